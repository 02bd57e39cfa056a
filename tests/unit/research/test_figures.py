# SPDX-License-Identifier: Apache-2.0
"""Figures of a trace, and requests that overlap, against plain Python and the conversation trace."""

import collections
import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from kvjax.research import (
    draw_trace,
    hits_by_age,
    hits_by_depth,
    lru_curve,
    make_trace,
    overlapping,
    reuse_distances,
    reuse_times,
    summary,
    unbounded,
)
from kvjax.research.simulators.hits import RULES
from tests.unit.research.cases import cut, forests, whole


def unbounded_in_python(trace, rule):
    """Hits of each request in a cache that never evicts."""
    cached, found = set(), []
    for number in range(len(trace)):
        prompt, full = trace.blocks(number).tolist(), int(trace.full[number])
        most = len(prompt) if rule == "papers" else len(prompt) - 1
        hits = 0
        while hits < min(most, full if rule == "full" else most) and prompt[hits] in cached:
            hits += 1
        found.append(hits)
        cached |= set(prompt[:full] if rule == "full" else prompt)
    return found


def held_in_python(trace, overlap):
    """The number of blocks held after each step: distinct ones of prompts, and those of answers."""
    running, found = set(), []
    for request, admit in zip(overlap.request.tolist(), overlap.admit.tolist(), strict=True):
        (running.add if admit else running.remove)(request)
        answers = sum(
            -(-int(trace.input_length[one] + trace.output_length[one]) // trace.block_size) - int(trace.lengths[one])
            for one in running
        )
        found.append(len({name for one in running for name in trace.blocks(one).tolist()}) + answers)
    return found


@hypothesis.given(trace=forests(), rule=st.sampled_from(sorted(RULES)))
def test_an_unbounded_cache_hits_what_plain_python_finds(trace, rule):
    assert unbounded(trace, rule).blocks.tolist() == [unbounded_in_python(trace, rule)]
    assert unbounded(trace, rule).refused.tolist() == [0]


@hypothesis.given(trace=forests(), speed=st.sampled_from([(200.0, 3.0), (1e6, 0.0), (400.0, 10.0)]))
def test_what_is_held_is_what_plain_python_finds(trace, speed):
    overlap = overlapping(trace, *speed)
    assert overlap.held.tolist() == held_in_python(trace, overlap)
    assert overlap.held[-1] == overlap.running[-1] == 0 and overlap.max_held == max(overlap.held)
    begins = overlap.request[overlap.admit]
    np.testing.assert_array_equal(begins, np.arange(len(trace)))  # in order of arrival
    takes = trace.input_length / speed[0] * 1000 + trace.output_length * speed[1]
    ends = overlap.request[~overlap.admit]
    np.testing.assert_allclose(overlap.time[~overlap.admit], (trace.time + takes)[ends])
    assert (np.diff(overlap.time) >= 0).all()


def test_steps_by_hand():
    """A release comes before an admit of the same time. 12 and 4 tokens are 3 blocks and 1, an answer's 4 are 1."""
    trace = make_trace([0, 0, 20], [12, 4, 12], [4, 0, 0], [[1, 2, 3], [1], [1, 2, 4]], 4)
    overlap = overlapping(trace, tokens_per_s=1000, ms_a_token=2)
    assert overlap.request.tolist() == [0, 1, 1, 0, 2, 2]
    assert overlap.admit.tolist() == [True, True, False, False, True, False]
    assert overlap.time.tolist() == [0, 0, 4, 20, 20, 32]
    assert overlap.blocks.tolist() == [4, 1, 3]
    assert overlap.held.tolist() == [4, 4, 4, 0, 3, 0] and overlap.running.tolist() == [1, 2, 1, 0, 1, 0]


@pytest.mark.parametrize(("speed", "name"), [((0, 50), "tokens_per_s"), ((1, -1), "ms_a_token")])
def test_a_speed_that_is_none_is_refused(speed, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        overlapping(cut(5), *speed)
    with pytest.raises(ValueError, match=f"{name}: got"):
        summary(cut(5), overlap=speed)


def test_times_of_reuse_by_hand():
    trace = make_trace([0, 5, 7], [8, 4, 8], [0, 0, 0], [[1, 2], [1], [1, 2]], 4)
    assert sorted(reuse_times(trace).tolist()) == [2, 5, 7]


def test_a_summary_by_hand():
    trace = make_trace(
        [0, 4000, 6000], [8, 4, 7], [3, 0, 1], [[1, 2], [1], [1, 2]], 4, kind=["a", "b", "a"], session=[5, 6, 5],
        notes=["by hand"],
    )  # fmt: skip
    found = summary(trace, "papers", (1000, 10))
    assert dataclasses.asdict(found) == {
        "rule": "papers", "requests": 3, "references": 5, "ids": 2, "block_size": 4, "span_ms": 6000, "step_ms": 3000,
        "blocks_median": 2, "blocks_most": 2, "input_tokens": 19, "output_tokens": 4, "partial": 1, "sessions": 2,
        "kinds": {"a": 2, "b": 1}, "rate": 3 / 5, "token_rate": 11 / 19, "mean_rate": 2 / 3, "used_once": 0,
        "reuse_ms": (3000, 4000, 5000), "answers_rate": 0, "next_turns": 0, "overlap": (1000, 10),
        "held": 3, "running": 1, "notes": ("by hand",),
    }  # fmt: skip
    text = str(found)
    for part in (
        "3 in 6.0 s; times are 3,000 ms apart in the median",
        "5 references to 2 ids of 4 tokens", "0.6000 by blocks, 0.5789 by tokens",
        "papers: every block may hit", "requests follow one another", "answers are not stored",
        "at 1,000 prompt tokens/s and 10 ms a token of an answer, up to 1 run at once and hold 3 blocks",
        "refused      a request longer", "a 2, b 1", "sessions     2", "by hand",
        "next use is 4.0 s later",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("rule", ["full", "kvjax", "papers"])
def test_next_turns_would_find_answers_that_are_stored(rule):
    """Blocks have 4 tokens. The first request fills four, some with its answer, and its prompt fills two."""
    first, turn, shorter, shared = [1, 2, 3], [1, 2, 4, 5, 6], [1, 2, 7, 8], [1, 9, 10, 11, 12]
    prompts = [first, turn, shorter, [*first, 13, 14], shared]
    trace = make_trace(range(5), [10, 18, 16, 20, 20], [7, 0, 0, 0, 0], prompts, 4)
    found = summary(trace, rule)
    assert found.next_turns == 1 and found.answers_rate == 2 / len(trace.ids)
    assert "add some 0.0909 to the hits, if 1 prompts are the next turns" in str(found)


@pytest.mark.slow
def test_answers_would_add_little_to_the_conversation_trace():
    assert round(summary(whole(), "papers").answers_rate, 3) == 0.009


def test_a_summary_leaves_out_what_the_trace_does_not_have():
    text = str(summary(make_trace([0.5], [3], [0], [[1]], 4)))
    assert "sessions" not in text and "classes" not in text and "next use" not in text
    with pytest.raises(ValueError, match="got no requests"):
        summary(cut(3)[:0])
    with pytest.raises(ValueError, match="rule: got 'b'"):
        summary(cut(3), "b")


def test_the_cut_and_a_random_trace_equal_plain_python():
    for trace in (cut(400), draw_trace(1, 200)):
        for rule in RULES:
            assert unbounded(trace, rule).blocks.tolist() == [unbounded_in_python(trace, rule)]
        overlap = overlapping(trace)
        assert overlap.held.tolist() == held_in_python(trace, overlap)


def test_the_conversation_trace():
    found = summary(whole(), "papers")
    assert [round(rate, 4) for rate in (found.rate, found.token_rate, found.mean_rate)] == [0.3664, 0.3736, 0.3843]
    assert found.held == 2903 and found.running == 105 and round(found.step_ms, -2) == 3000
    speed = "at 10,000 prompt tokens/s and 50 ms a token of an answer"
    assert f"{speed}, up to 105 run at once and hold 2,903 blocks" in str(found)


def test_hits_are_counted_by_depth_and_by_age():
    trace = cut(300)
    hits, edges = lru_curve(trace, [300, 1000], "papers"), [0, 1, 3000, 60_000, 120_000]
    found, requested = hits_by_depth(hits)
    of_age, requested_of_age = hits_by_age(hits, edges)
    for size in range(2):
        depths, ages, last = collections.Counter(), collections.Counter(), {}
        wanted = collections.Counter(), collections.Counter()
        for request, time in enumerate(trace.time.tolist()):
            for depth, block in enumerate(trace.blocks(request).tolist()):
                hit = depth < hits.blocks[size, request]
                age = [each for each in edges if block in last and each <= time - last[block]][-1:]
                for counts, counted in ((wanted, True), ((depths, ages), hit)):
                    counts[0][depth] += counted
                    counts[1][edges.index(age[0]) if age else None] += counted
                last[block] = time
        assert dict(enumerate(found[size])) == {n: depths[n] for n in range(found.shape[1])}
        assert dict(enumerate(requested)) == wanted[0]
        assert of_age[size].tolist() == [ages[n] for n in range(4)] and sum(of_age[size]) > 0
        assert requested_of_age.tolist() == [wanted[1][n] for n in range(4)]
    assert found.sum(axis=1).tolist() == hits.blocks.sum(axis=1).tolist()
    with pytest.raises(ValueError, match=r"edges: got .*, wanted at least two times in ascending order"):
        hits_by_age(hits, [3, 3])


@pytest.mark.parametrize("rule", ["full", "kvjax", "papers"])
def test_a_block_comes_again_at_the_size_that_its_reuse_distance_tells(rule):
    trace = cut(300)
    sizes = np.array([250, 400, 700, 1500, 4000])
    needed = reuse_distances(trace, rule)
    assert [np.sum(needed <= size) for size in sizes] == lru_curve(trace, sizes, rule).blocks.sum(axis=1).tolist()
