# SPDX-License-Identifier: Apache-2.0
"""A trace through the verbs finds, request by request, what plain Python finds."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.policies import cost_aware, fifo, lfu, lru
from kvjax.research import in_blocks, make_trace, replay
from kvjax.research.replays import _serve, asks_of
from tests.oracle import research
from tests.oracle import research_policies as oracle
from tests.unit.research import cases

BLOCK = 4
LENGTHS = [1] * 8 + [2] * 8 + [3] * 6 + [5] * 6 + [7] * 4 + [9] * 4 + [10] * 4
LONGEST, MOST = 10, 48


def often(blocks):
    """Many ties, which go by block number."""
    return blocks.hits - blocks.depth


# Each policy, what plain Python says of it, and whether every test run has the time to compile it.
POLICIES = {
    "lru": (lru(), oracle.lru),
    "lfu": (lfu(), oracle.lfu),
    "fifo": (fifo(), oracle.fifo),
    "cost_aware": (cost_aware(balance=5 * BLOCK), oracle.cost_aware(5)),
    "in one line": (kvjax.by_score(often), lambda cache: cache.hits - cache.depth),
}
SOME = [pytest.param(name, marks=() if name == "lru" else pytest.mark.long) for name in POLICIES]


@st.composite
def forests(draw):
    """A trace of as many requests and blocks as any other, so that all are one program.

    A prompt begins as an earlier one does, with some of its blocks or all of them, and goes on with new ones; its last
    block is often filled in part.
    """
    prompts, tokens, ids = [], [], iter(range(sum(LENGTHS)))
    for length in draw(st.permutations(LENGTHS)):
        earlier = draw(st.sampled_from([[], *prompts]))
        shared = earlier[: draw(st.integers(0, length))]
        prompts.append([*shared, *(next(ids) for _ in range(length - len(shared)))])
        tokens.append(length * BLOCK - draw(st.sampled_from([0, 0, 1, BLOCK - 1])))
    return make_trace(range(len(prompts)), tokens, [0] * len(prompts), prompts, BLOCK)


def lru_hits(trace, size, rule):
    return research.lru(cases.prompts_of(trace), trace.full.tolist(), size, rule)


def assert_same(trace, policy, score, sizes, rule):
    """Every request finds the same in caches of all sizes."""
    hits = replay(trace, policy, sizes, rule=rule)
    assert hits.sizes.tolist() == sizes and hits.rule == rule and hits.blocks.dtype == np.int32
    wanted = [oracle.score_hits(trace, size, rule, score) for size in sizes]
    np.testing.assert_array_equal(hits.blocks, wanted)
    return hits


@pytest.mark.parametrize("name", SOME)
@given(st.data())
def test_requests_of_a_forest_find_what_they_find_in_plain_python(name, data):
    """A cache as long as the longest request serves it; one below refuses it, and forgets nothing for it."""
    trace, rule = data.draw(forests()), data.draw(st.sampled_from(["full", "kvjax"]))
    sizes = [LONGEST - 1, LONGEST, data.draw(st.integers(1, MOST)), MOST]
    policy, score = POLICIES[name]
    hits = assert_same(trace, policy, score, sizes, rule)
    assert hits.refused[:2].tolist() == [LENGTHS.count(LONGEST), 0]
    if name == "lru":
        np.testing.assert_array_equal(hits.blocks, [lru_hits(trace, size, rule) for size in sizes])


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
def test_requests_of_a_production_trace_find_what_they_find_in_plain_python(name):
    trace = cases.cut(500)
    policy, score = POLICIES[name]
    score = oracle.cost_aware(5 * BLOCK / trace.block_size) if name == "cost_aware" else score
    sizes = [100, 600, 1500, 3000]
    for rule in ("full", "kvjax"):
        hits = assert_same(trace, policy, score, sizes, rule)
        assert hits.rate[-1] > hits.rate[0] > 0 and hits.refused[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_all_requests_of_a_production_trace_find_what_they_find_in_plain_python(name):
    trace = cases.whole()
    policy, score = (cost_aware(), oracle.cost_aware(48)) if name == "cost_aware" else POLICIES[name]
    sizes = [247, 1000, 3000, 5859, 10_000]
    for rule, rate in ("full", 0.2149), ("kvjax", 0.2113):
        hits = assert_same(trace, policy, score, sizes, rule)
        if name == "lru":
            assert round(hits.rate[-1], 4) == rate
    if name == "lru":
        sizes = (np.arange(1, 21) * 1500).tolist()
        found = replay(trace, policy, sizes).blocks
        np.testing.assert_array_equal(found, [lru_hits(trace, size, "full") for size in sizes])


def small_trace():
    """Four prompts of one block; then the first and the last of them again, each with another block behind it."""
    prompts = [[0], [1], [2], [3], [0, 4], [3, 5]]
    return make_trace(range(6), [BLOCK * len(prompt) for prompt in prompts], [0] * 6, prompts, BLOCK)


@pytest.mark.long
def test_a_block_filled_in_part_is_held_and_not_cached():
    """Two blocks of room. By rule "kvjax" the second prompt's block stays, and the third one's evicts the first's."""
    prompts, tokens = [[0], [1], [2], [0, 3]], [BLOCK, BLOCK - 1, BLOCK, 2 * BLOCK]
    trace = make_trace(range(4), tokens, [0] * 4, prompts, BLOCK)
    assert replay(trace, lru(), [2]).blocks.tolist() == [[0, 0, 0, 1]]
    assert replay(trace, lru(), [2], rule="kvjax").blocks.tolist() == [[0, 0, 0, 0]]


def stored_at(blocks):
    return blocks.stored - blocks.clock


OLDEST_FIRST, NEWEST_FIRST, MIXED = [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0], [0] * 6


@pytest.mark.long
def test_weights_of_a_score_differ_from_cache_to_cache():
    policy = kvjax.by_score(lambda blocks, weight: weight * stored_at(blocks), init=lambda num_ids: jnp.int32(0))
    hits = replay(small_trace(), policy, [3, 3], policy_state=jnp.array([1, -1], jnp.int32))
    assert hits.blocks.tolist() == [OLDEST_FIRST, NEWEST_FIRST]
    with pytest.raises(ValueError, match="policy_state: got"):
        replay(small_trace(), policy, [3, 3], policy_state=jnp.zeros((2,), jnp.float32))


@pytest.mark.long
def test_a_policy_is_told_the_ms_since_the_first_request():
    """They may wrap: 2^31 ms later they are negative, and the newest leave first."""
    trace = dataclasses.replace(small_trace(), time=np.full(6, 7e11))
    late = dataclasses.replace(trace, time=trace.time + np.repeat([0, 2**31], [4, 2]))
    policy = kvjax.by_score(lambda blocks, now: jnp.where(now < 0, -1, 1) * stored_at(blocks), timed=True)
    assert replay(trace, policy, [3]).blocks.tolist() == [OLDEST_FIRST]
    assert replay(late, policy, [3]).blocks.tolist() == [MIXED]


@pytest.mark.long
def test_a_trace_without_requests_has_no_hits():
    hits = replay(small_trace()[:0], lru(), [3, 4])
    assert hits.blocks.shape == (2, 0) and hits.rate.tolist() == [0, 0]


def test_the_balance_of_cost_aware_is_counted_in_blocks():
    assert in_blocks(cost_aware(), 512) == cost_aware(48.0)
    for policy in (lru(), lfu(), kvjax.by_score(functools.partial(lambda blocks, balance: blocks.hits, balance=1))):
        assert in_blocks(policy, 512) == policy


def test_what_cannot_be_replayed_is_refused():
    trace = small_trace()
    with pytest.raises(ValueError, match='rule: got "papers", wanted "kvjax" or "full"'):
        replay(trace, lru(), [3], rule="papers")
    with pytest.raises(ValueError, match="rule: got 'vllm', wanted one of"):
        replay(trace, lru(), [3], rule="vllm")
    for sizes in ([], [3, 0], [[3]], [2.5]):
        with pytest.raises(ValueError, match=r"sizes: got .*, wanted at least one number of blocks, each at least 1"):
            replay(trace, lru(), sizes)
    with pytest.raises(ValueError, match="got the function lru"):
        replay(trace, lru, [3])


def lines_of_size(policy, most):
    """The lines of a replay's loop, compiled for four caches of up to `most` blocks, that select or copy all."""
    trace, sizes = small_trace(), np.array([1, 2, 3, most], np.int32)
    spec = kvjax.make_spec(num_blocks=most, max_seqs=1, max_length=2, block_size=1, partial_reuse=False)
    ids = np.concatenate([trace.ids, np.zeros(2, np.int32)])
    text = _serve.lower(spec, policy, sizes, None, asks_of(trace, "full"), ids).compile().as_text()
    return re.findall(rf"^ *(?:ROOT )?%?\S+ = \(?\w+\[[\d,]*\b{most}\b[\d,]*\]\S* (?:copy|select)\(.*$", text, re.M)


@pytest.mark.long
def test_no_request_selects_or_copies_all_blocks():
    assert [line for line in lines_of_size(lru(), 4099) if "/while/" in line] == []


@pytest.mark.long
def test_a_score_selects_over_all_blocks_and_is_found():
    assert [line for line in lines_of_size(fifo(), 4099) if "/while/" in line]
