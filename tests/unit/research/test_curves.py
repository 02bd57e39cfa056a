# SPDX-License-Identifier: Apache-2.0
"""LRU at every size at once has the hits of caches of one size, request by request."""

import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.research import lru_curve, make_trace
from kvjax.research.simulators.hits import RULES
from tests.oracle import research as oracle
from tests.unit.research.cases import cut, forests, prompts_of, whole

# The share of requested blocks found in the whole trace, by size and rule.
PUBLISHED = {
    "kvjax": {5859: 0.1359, 10_000: 0.2113, 30_000: 0.3254},
    "papers": {
        1000: 0.0445, 5859: 0.1361, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637, 182_790: 0.3664,
    },
    "full": {5859: 0.1409, 10_000: 0.2149, 30_000: 0.3305},
}  # fmt: skip


def assert_as_oracle(trace, sizes, rule):
    prompts, full = prompts_of(trace), trace.full.tolist()
    curve = lru_curve(trace, sizes, rule)
    assert curve.blocks.shape == (len(sizes), len(trace)) and curve.blocks.dtype == np.int32
    for size, blocks in zip(sizes, curve.blocks, strict=True):
        wanted = oracle.lru(prompts, full, size, rule)
        assert blocks.tolist() == wanted, (rule, size)
    return curve


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=100)
@given(forests(most=30))
def test_every_size_finds_what_its_cache_finds(rule, trace):
    longest = int(trace.lengths.max())
    assert_as_oracle(trace, range(longest, trace.num_ids + 2), rule)


@pytest.mark.parametrize("rule", RULES)
def test_the_cut_of_the_trace(rule):
    trace = cut()
    assert_as_oracle(trace, [int(trace.lengths.max()), 1000, 5859, trace.num_ids], rule)


def test_sizes_come_in_any_order_and_more_than_once():
    trace = cut()
    sizes = [3000, 500, 3000, 700, 500]
    curve = lru_curve(trace, sizes)
    assert curve.sizes.tolist() == sizes and curve.rule == "full" and curve.trace is trace
    for size, blocks in zip(sizes, curve.blocks, strict=True):
        assert np.array_equal(blocks, lru_curve(trace, [size]).blocks[0])
    assert not np.array_equal(curve.blocks[0], curve.blocks[1])


def test_a_block_merged_with_its_copy_leaves_one_empty():
    """It shows in the next request: of five blocks four are cached, and the oldest one is not found."""
    prompts = [[0], [1, 2, 3, 4], [1, 2, 3, 4], [0, 5]]
    trace = make_trace(range(4), [1, 4, 4, 2], [0] * 4, prompts, 1)
    found = {rule: lru_curve(trace, [5, 6], rule).blocks[:, 3].tolist() for rule in RULES}
    assert found == {"papers": [1, 1], "kvjax": [0, 1], "full": [0, 1]}


def test_an_empty_trace_finds_nothing():
    trace = cut()[:0]
    assert lru_curve(trace, [7]).blocks.shape == (1, 0)


def test_a_size_below_the_longest_request_is_refused():
    longest = int(cut().lengths.max())
    with pytest.raises(ValueError, match=f"sizes: got {longest - 1}, wanted at least {longest} blocks"):
        lru_curve(cut(), [longest, longest - 1])
    with pytest.raises(ValueError, match="rule: got 'lru', wanted one of 'kvjax', 'papers', 'full'"):
        lru_curve(cut(), [longest], "lru")


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_the_whole_trace_at_20_sizes(rule):
    trace = whole()
    curve = assert_as_oracle(trace, np.geomspace(247, trace.num_ids, 20).astype(int).tolist(), rule)
    assert np.all(np.diff(curve.rate) >= 0)
    published = PUBLISHED[rule]
    rates = lru_curve(trace, [*published], rule).rate
    assert dict(zip(published, np.round(rates, 4).tolist(), strict=True)) == published
