# SPDX-License-Identifier: Apache-2.0
"""Belady's bound equals a cache that evicts the farthest next use, and no cache finds more."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.research import belady, lru_curve, make_trace
from kvjax.research.simulators.belady import _serve
from kvjax.research.simulators.hits import RULES
from tests.oracle import research as oracle
from tests.unit.research.cases import cut, forests, prompts_of, whole

# The share of requested blocks found in the whole trace, by size, with bypass and without.
PUBLISHED = {
    False: {1000: 0.1792, 3000: 0.2916, 5859: 0.3516, 10_000: 0.3664, 30_000: 0.3664},
    True: {1000: 0.1907, 3000: 0.2945, 5859: 0.3532, 10_000: 0.3664},
}
BOTH = pytest.mark.parametrize("bypass", [False, True])


def assert_as_oracle(trace, sizes, bypass):
    prompts = prompts_of(trace)
    uses = oracle.next_uses(prompts)
    bound = belady(trace, sizes, bypass=bypass)
    assert bound.blocks.shape == (len(sizes), len(trace)) and bound.blocks.dtype == np.int32
    assert bound.rule == "papers" and bound.sizes.tolist() == list(sizes)
    for size, blocks in zip(sizes, bound.blocks, strict=True):
        assert blocks.tolist() == oracle.belady(prompts, uses, size, bypass), size
        fast = [] if bypass else oracle.belady_by_runs(trace.lengths.tolist(), oracle.next_runs(uses), size)
        assert bypass or blocks.tolist() == fast, size
    return bound


@BOTH
@settings(max_examples=100)
@given(trace=forests(most=30))
def test_every_size_finds_what_its_cache_finds(bypass, trace):
    # Equal numbers of sizes for each trace, since each number is a program of its own.
    sizes = np.linspace(int(trace.lengths.max()), trace.num_ids + 1, 16).astype(int).tolist()
    bound = assert_as_oracle(trace, sizes, bypass)
    for rule in RULES:
        assert np.all(np.cumsum(lru_curve(trace, bound.sizes, rule).blocks, axis=1) <= np.cumsum(bound.blocks, axis=1))


@BOTH
@settings(max_examples=100)
@given(trace=forests(most=6, longest=3))
def test_no_way_to_evict_finds_more(bypass, trace):
    prompts, longest = prompts_of(trace), int(trace.lengths.max())
    sizes = range(longest, longest + 4)
    most = [oracle.most_hits(prompts, size, bypass) for size in sizes]
    assert belady(trace, sizes, bypass=bypass).blocks.sum(axis=1).tolist() == most


@BOTH
def test_the_cut_of_the_trace(bypass):
    trace = cut()
    assert_as_oracle(trace, [int(trace.lengths.max()), 1000, 5859, trace.num_ids], bypass)


def test_only_a_pool_apart_can_refuse_blocks():
    """Three blocks are used once in a cache of three. The block that is used again need not leave for them."""
    trace = make_trace(range(3), [1, 3, 1], [0] * 3, [[0], [1, 2, 3], [0]], 1)
    assert [belady(trace, [3], bypass=bypass).blocks[0].tolist() for bypass in (False, True)] == [[0, 0, 0], [0, 0, 1]]


@BOTH
def test_64_bit_types_change_nothing(bypass):
    trace, sizes = cut(), [300, 1000]
    wanted = belady(trace, sizes, bypass=bypass).blocks
    with jax.enable_x64(True):
        blocks = belady(trace, np.asarray(sizes), bypass=bypass).blocks
    assert blocks.dtype == np.int32 and np.array_equal(blocks, wanted)


def test_traces_of_about_one_length_share_a_program():
    sizes, before = [300, 1000], _serve._cache_size()
    for number in (1990, 1995, 2000):
        belady(cut()[:number], sizes)
    assert _serve._cache_size() <= before + 1


def test_an_empty_trace_finds_nothing():
    assert belady(cut()[:0], [7]).blocks.shape == (1, 0)


def test_a_size_below_the_longest_request_is_refused():
    longest = int(cut().lengths.max())
    with pytest.raises(ValueError, match=f"sizes: got {longest - 1}, wanted at least {longest} blocks"):
        belady(cut(), [longest - 1])


@pytest.mark.long
@pytest.mark.parametrize("bypass", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_whole_trace_at_20_sizes(bypass):
    trace = whole()
    bound = assert_as_oracle(trace, np.geomspace(247, trace.num_ids, 20).astype(int).tolist(), bypass)
    assert np.all(lru_curve(trace, bound.sizes, "papers").rate <= bound.rate)
    published = PUBLISHED[bypass]
    rates = belady(trace, [*published], bypass=bypass).rate
    assert dict(zip(published, np.round(rates, 4).tolist(), strict=True)) == published
