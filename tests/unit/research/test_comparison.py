# SPDX-License-Identifier: Apache-2.0
"""Sessions, halves of a trace, and the comparison of policies on them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.policies import lfu, lru
from kvjax.research import belady, compare, draw_trace, lru_curve, make_trace, sessions_of, simulate, split_sessions
from tests.unit.research import cases


def sessions_in_plain_python(prompts):
    """The first block of each prompt that no more than eight sessions share, numbered by first request."""
    followers = {}
    for prompt in prompts:
        for block, after in itertools.pairwise(prompt):
            followers.setdefault(block, set()).add(after)
    shared = {block for prompt in prompts for block in prompt if len(followers.get(block, ())) > 8}
    shared |= {before for prompt in prompts for n, before in enumerate(prompt) if shared & set(prompt[n:])}
    names = [next((block for block in prompt if block not in shared), prompt[-1]) for prompt in prompts]
    numbers = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


@given(cases.forests(max_requests=40, longest=3))
def test_sessions_are_those_of_plain_python(trace):
    assert sessions_of(trace).tolist() == sessions_in_plain_python(cases.prompts_of(trace))


def test_sessions_may_share_a_prompt():
    prompts = [[0, 1, 2 + n, 100 + n] for n in range(9)] + [[0, 1, 2, 100, 200], [0, 1], [300]]
    trace = make_trace(range(len(prompts)), [4 * len(p) for p in prompts], [0] * len(prompts), prompts, 4)
    assert sessions_of(trace).tolist() == sessions_in_plain_python(prompts) == [*range(9), 0, 9, 10]


def test_a_trace_may_know_its_sessions():
    trace = draw_trace(0, 200)
    assert sessions_of(trace).tolist() == trace.session.tolist()


@given(st.integers(2, 200))
def test_halves_share_no_session_and_keep_every_request(requests):
    trace = draw_trace(3, requests)
    if trace.session.max() == 0:
        with pytest.raises(ValueError, match="trace: got 1 session, wanted at least 2"):
            split_sessions(trace)
        return
    halves = split_sessions(trace)
    assert not set(halves[0].session) & set(halves[1].session) and min(map(len, halves)) > 0
    times = np.concatenate([half.time for half in halves])
    assert sorted(times.tolist()) == trace.time.tolist()
    assert halves[0].session.max() < halves[1].session.min()
    for half in halves:
        request = int(np.searchsorted(trace.time, half.time[-1]))
        assert half.lengths[-1] == trace.lengths[request] and half.input_length[-1] == trace.input_length[request]


@pytest.mark.long
def test_a_comparison_is_what_the_simulators_count():
    trace = split_sessions(cases.cut(300))[0]
    found = compare(trace, {"lfu": lfu(), "again": lru()}, shares=[0.01, 0.4], name="cut")
    sizes = [int(trace.lengths.max()), int(0.4 * trace.num_ids)]
    assert found.sizes.tolist() == sizes
    lru_hits, lfu_hits = lru_curve(trace, sizes), simulate(trace, lfu(), sizes)
    np.testing.assert_array_equal(found.rates["lru"], lru_hits.rate)
    np.testing.assert_array_equal(found.rates["lfu"], lfu_hits.rate)
    np.testing.assert_array_equal(found.rates["bound"], belady(trace, sizes).rate)
    np.testing.assert_array_equal(found.rates["again"], lru_hits.rate)
    assert not found.low["again"].any() and not found.high["again"].any() and not found.closed("again").any()
    gain = found.rates["lfu"] - found.rates["lru"]
    assert (found.low["lfu"] <= gain).all() and (gain <= found.high["lfu"]).all()
    np.testing.assert_allclose(found.closed("lfu"), gain / (found.rates["bound"] - found.rates["lru"]))
    tokens = [max(int(t) - 512 * int(n), 0) for t, n in zip(trace.input_length, lfu_hits.blocks[0], strict=True)]
    np.testing.assert_allclose(found.uncached["lfu"][0], np.quantile(tokens, (0.5, 0.95, 0.99)))
    assert "cut, rule" in str(found) and f"{found.rates['lfu'][1]:.2%}" in str(found)


def test_uncached_tokens_and_their_rate():
    trace = make_trace([0, 5, 9], [12, 8, 10], [0, 0, 0], [[1, 2, 3], [4, 5], [1, 2, 6]], block_size=4)
    hits = lru_curve(trace, [6])
    assert hits.uncached_tokens.tolist() == [[12, 8, 2]] and hits.token_rate.tolist() == [pytest.approx(8 / 30)]


def test_a_comparison_needs_sound_arguments():
    trace = draw_trace(0, 20)
    with pytest.raises(ValueError, match=r"shares: got \[\], wanted shares"):
        compare(trace, {}, shares=[])
    with pytest.raises(ValueError, match="policies: got the name 'lru'"):
        compare(trace, {"lru": lru()})
    with pytest.raises(ValueError, match="trace: got no requests"):
        compare(trace[:0], {})
