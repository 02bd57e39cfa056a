# SPDX-License-Identifier: Apache-2.0
"""A trace through the verbs has the hits of plain Python, request by request."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.policies import cost_aware, fifo, lfu, lru
from kvjax.research import in_blocks, make_trace, overlapping, replay
from kvjax.research.simulators.replay import _serve, request_arrays
from tests.oracle import research_policies as oracle
from tests.unit.research import cases
from tests.unit.research.policies import (
    BLOCK,
    LENGTHS,
    LONGEST,
    MOST,
    POLICIES,
    assert_same,
    forests,
    lines_of_size,
    lru_hits,
    marked,
    small_trace,
)


@pytest.mark.long
@pytest.mark.parametrize("name", marked())
@given(st.data())
def test_requests_of_a_forest_find_what_they_find_in_plain_python(name, data):
    """A cache of the longest request's size serves it. One of a block less refuses it, and evicts nothing for it."""
    trace, rule = data.draw(forests()), data.draw(st.sampled_from(["full", "kvjax"]))
    sizes = [LONGEST - 1, LONGEST, data.draw(st.integers(1, MOST)), MOST]
    policy, score = POLICIES[name]
    hits = assert_same(replay, trace, policy, score, sizes, rule)
    assert hits.refused[:2].tolist() == [LENGTHS.count(LONGEST), 0]
    if name == "lru":
        np.testing.assert_array_equal(hits.blocks, [lru_hits(trace, size, rule) for size in sizes])


@pytest.mark.slow
@pytest.mark.parametrize("name", marked())
def test_requests_of_a_production_trace_find_what_they_find_in_plain_python(name):
    trace = cases.cut(500)
    policy, score = POLICIES[name]
    score = oracle.cost_aware(5 * BLOCK / trace.block_size) if name == "cost_aware" else score
    sizes = [100, 600, 1500, 3000]
    for rule in ("full", "kvjax"):
        hits = assert_same(replay, trace, policy, score, sizes, rule)
        assert hits.rate[-1] > hits.rate[0] > 0 and hits.refused[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_all_requests_of_a_production_trace_find_what_they_find_in_plain_python(name):
    trace = cases.whole()
    policy, score = (cost_aware(), oracle.cost_aware(48)) if name == "cost_aware" else POLICIES[name]
    sizes = [247, 1000, 3000, 5859, 10_000]
    for rule, rate in ("full", 0.2149), ("kvjax", 0.2113):
        hits = assert_same(replay, trace, policy, score, sizes, rule)
        if name == "lru":
            assert round(hits.rate[-1], 4) == rate
    if name == "lru":
        sizes = (np.arange(1, 21) * 1500).tolist()
        found = replay(trace, policy, sizes).blocks
        np.testing.assert_array_equal(found, [lru_hits(trace, size, "full") for size in sizes])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["full", "kvjax"])
def test_requests_that_overlap_find_what_they_find_in_plain_python(rule):
    """The smallest cache refuses many. Those that it serves hold blocks that no other request gets."""
    trace, speed, sizes = cases.cut(300), (10_000, 50), [300, 600, 1000, 3000]
    hits, overlap = replay(trace, lru(), sizes, rule=rule, overlap=speed), overlapping(trace, *speed)
    wanted, refused = zip(
        *(oracle.overlapped_hits(trace, overlap, size, rule, oracle.lru) for size in sizes), strict=True
    )
    np.testing.assert_array_equal(hits.blocks, wanted)
    assert hits.refused.tolist() == list(refused) and refused[0] > refused[-1] == 0


@pytest.mark.slow
def test_a_request_that_gets_no_blocks_for_its_answer_holds_none():
    """The first request needs four blocks of three, and the third one finds the second one's."""
    trace = make_trace(
        [0, 1, 2000], [2 * BLOCK, 2 * BLOCK, 3 * BLOCK], [2 * BLOCK, 0, 0], [[0, 1], [2, 3], [2, 3, 4]], BLOCK
    )
    hits = replay(trace, lru(), [3], overlap=(10, 1))
    assert hits.blocks.tolist() == [[0, 0, 2]] and hits.refused.tolist() == [1]


@pytest.mark.slow
def test_the_conversation_trace_hits_less_where_requests_overlap():
    hits = replay(cases.whole(), lru(), [3000, 5859], rule="kvjax", overlap=(10_000, 50))
    assert hits.rate.round(4).tolist() == [0.0618, 0.1304] and hits.refused.tolist() == [0, 0]


@pytest.mark.slow
def test_a_block_filled_in_part_is_held_and_not_cached():
    """There are two blocks. By rule "kvjax" the second prompt's block stays, and the third's evicts the first's."""
    prompts, tokens = [[0], [1], [2], [0, 3]], [BLOCK, BLOCK - 1, BLOCK, 2 * BLOCK]
    trace = make_trace(range(4), tokens, [0] * 4, prompts, BLOCK)
    assert replay(trace, lru(), [2]).blocks.tolist() == [[0, 0, 0, 1]]
    assert replay(trace, lru(), [2], rule="kvjax").blocks.tolist() == [[0, 0, 0, 0]]


def stored_at(blocks):
    return blocks.stored - blocks.clock


OLDEST_FIRST, NEWEST_FIRST, MIXED = [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0], [0] * 6


@pytest.mark.slow
def test_weights_of_a_score_differ_from_cache_to_cache():
    policy = kvjax.by_score(lambda blocks, weight: weight * stored_at(blocks), init=lambda num_ids: jnp.int32(0))
    hits = replay(small_trace(), policy, [3, 3], policy_state=jnp.array([1, -1], jnp.int32))
    assert hits.blocks.tolist() == [OLDEST_FIRST, NEWEST_FIRST]
    with pytest.raises(ValueError, match="policy_state: got"):
        replay(small_trace(), policy, [3, 3], policy_state=jnp.zeros((2,), jnp.float32))


@pytest.mark.slow
def test_a_policy_gets_the_ms_since_the_first_request():
    """The times may wrap: 2^31 ms later they are negative, and the newest blocks leave first."""
    trace = dataclasses.replace(small_trace(), time=np.full(6, 7e11))
    late = dataclasses.replace(trace, time=trace.time + np.repeat([0, 2**31], [4, 2]))
    policy = kvjax.by_score(lambda blocks, now: jnp.where(now < 0, -1, 1) * stored_at(blocks), timed=True)
    assert replay(trace, policy, [3]).blocks.tolist() == [OLDEST_FIRST]
    assert replay(late, policy, [3]).blocks.tolist() == [MIXED]


@pytest.mark.slow
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


def compiled(policy, most):
    """The program of a replay in four caches of up to `most` blocks."""
    trace, sizes = small_trace(), np.array([1, 2, 3, most], np.int32)
    spec = kvjax.make_spec(num_blocks=most, max_seqs=1, max_length=2, block_size=1, partial_reuse=False)
    ids, requests = np.concatenate([trace.ids, np.zeros(2, np.int32)]), request_arrays(trace, "full")
    return _serve.lower(spec, policy, 0, sizes, None, requests, None, ids).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [lru(), lfu()], ids=str)
def test_no_request_selects_or_copies_all_blocks(policy):
    assert lines_of_size(compiled(policy, 4099), 4099) == []


@pytest.mark.slow
def test_a_score_selects_over_all_blocks_and_is_found():
    assert lines_of_size(compiled(fifo(), 4099), 4099)
