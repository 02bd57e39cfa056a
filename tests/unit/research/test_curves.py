# SPDX-License-Identifier: Apache-2.0
"""LRU and Belady's bound at every size at once have the hits of caches of one size, request by request.

No cache finds more than the bound.
"""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.research import belady, lru_curve, make_trace
from kvjax.research.simulators.belady import _serve
from kvjax.research.simulators.hits import RULES
from tests.oracle import research as oracle
from tests.unit.research.cases import cut, forests, prompts_of, whole

CURVES = {
    **{f"lru, {rule}": functools.partial(lru_curve, rule=rule) for rule in RULES},
    "bound": belady,
    "bound with bypass": functools.partial(belady, bypass=True),
}
# The share of requested blocks found in the whole trace, by size.
PUBLISHED = {
    "lru, kvjax": {5859: 0.1359, 10_000: 0.2113, 30_000: 0.3254},
    "lru, papers": {
        1000: 0.0445, 5859: 0.1361, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637, 182_790: 0.3664,
    },
    "lru, full": {5859: 0.1409, 10_000: 0.2149, 30_000: 0.3305},
    "bound": {1000: 0.1792, 3000: 0.2916, 5859: 0.3516, 10_000: 0.3664, 30_000: 0.3664},
    "bound with bypass": {1000: 0.1907, 3000: 0.2945, 5859: 0.3532, 10_000: 0.3664},
}  # fmt: skip
curves = pytest.mark.parametrize("name", CURVES)
bypasses = pytest.mark.parametrize("bypass", [False, True])


def hits_in_python(trace, size, name):
    """The hits of each request in a cache of one size; those of the bound counted in two ways."""
    prompts = prompts_of(trace)
    if name.startswith("lru"):
        return oracle.lru(prompts, trace.full.tolist(), size, name.removeprefix("lru, "))
    uses = oracle.next_uses(prompts)
    wanted = oracle.belady(prompts, uses, size, "bypass" in name)
    if "bypass" not in name:
        assert wanted == oracle.belady_by_runs(trace.lengths.tolist(), oracle.next_runs(uses), size)
    return wanted


def assert_as_oracle(trace, sizes, name):
    found = CURVES[name](trace, sizes)
    assert found.blocks.shape == (len(sizes), len(trace)) and found.blocks.dtype == np.int32
    assert found.sizes.tolist() == list(sizes) and found.trace is trace
    assert found.rule == (name.removeprefix("lru, ") if name.startswith("lru") else "papers")
    for size, blocks in zip(sizes, found.blocks, strict=True):
        assert blocks.tolist() == hits_in_python(trace, size, name), (name, size)
    return found


@pytest.mark.long
@curves
@settings(max_examples=100)
@given(trace=forests(max_requests=30))
def test_every_size_finds_what_its_cache_finds(name, trace):
    # Equal numbers of sizes for each trace, since each number is a program of its own.
    sizes = np.linspace(int(trace.lengths.max()), trace.num_ids + 1, 16).astype(int).tolist()
    found = assert_as_oracle(trace, sizes, name)
    for rule in RULES if name.startswith("bound") else ():
        assert np.all(np.cumsum(lru_curve(trace, sizes, rule).blocks, axis=1) <= np.cumsum(found.blocks, axis=1))


@pytest.mark.long
@bypasses
@settings(max_examples=100)
@given(trace=forests(max_requests=6, longest=3))
def test_no_way_to_evict_finds_more(bypass, trace):
    prompts, longest = prompts_of(trace), int(trace.lengths.max())
    sizes = range(longest, longest + 4)
    most = [oracle.most_hits(prompts, size, bypass) for size in sizes]
    assert belady(trace, sizes, bypass=bypass).blocks.sum(axis=1).tolist() == most


@pytest.mark.long
@curves
def test_the_cut_of_the_trace(name):
    trace = cut()
    assert_as_oracle(trace, [int(trace.lengths.max()), 1000, 5859, trace.num_ids], name)


def test_sizes_come_in_any_order_and_more_than_once():
    trace = cut()
    sizes = [3000, 500, 3000, 700, 500]
    curve = lru_curve(trace, sizes)
    assert curve.sizes.tolist() == sizes and curve.rule == "full"
    for size, blocks in zip(sizes, curve.blocks, strict=True):
        assert np.array_equal(blocks, lru_curve(trace, [size]).blocks[0])
    assert not np.array_equal(curve.blocks[0], curve.blocks[1])


def test_a_block_merged_with_its_copy_leaves_one_empty():
    """It shows in the next request: of five blocks four are cached, and the oldest one is not found."""
    prompts = [[0], [1, 2, 3, 4], [1, 2, 3, 4], [0, 5]]
    trace = make_trace(range(4), [1, 4, 4, 2], [0] * 4, prompts, 1)
    found = {rule: lru_curve(trace, [5, 6], rule).blocks[:, 3].tolist() for rule in RULES}
    assert found == {"papers": [1, 1], "kvjax": [0, 1], "full": [0, 1]}


def test_only_a_pool_apart_can_refuse_blocks():
    """Three blocks are used once in a cache of three. The block that is used again need not leave for them."""
    trace = make_trace(range(3), [1, 3, 1], [0] * 3, [[0], [1, 2, 3], [0]], 1)
    assert [belady(trace, [3], bypass=bypass).blocks[0].tolist() for bypass in (False, True)] == [[0, 0, 0], [0, 0, 1]]


@bypasses
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


@curves
def test_an_empty_trace_finds_nothing_and_a_size_below_the_longest_request_is_refused(name):
    assert CURVES[name](cut()[:0], [7]).blocks.shape == (1, 0)
    longest = int(cut().lengths.max())
    with pytest.raises(ValueError, match=f"sizes: got {longest - 1}, wanted at least {longest} blocks"):
        CURVES[name](cut(), [longest, longest - 1])


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule: got 'lru', wanted one of 'kvjax', 'papers', 'full'"):
        lru_curve(cut(), [7], "lru")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "bypass" in name else name for name in CURVES]
)
def test_the_whole_trace_at_20_sizes(name):
    trace = whole()
    found = assert_as_oracle(trace, np.geomspace(247, trace.num_ids, 20).astype(int).tolist(), name)
    if name.startswith("lru"):
        assert np.all(np.diff(found.rate) >= 0)
    else:
        assert np.all(lru_curve(trace, found.sizes, "papers").rate <= found.rate)
    rates = CURVES[name](trace, [*PUBLISHED[name]]).rate
    assert dict(zip(PUBLISHED[name], np.round(rates, 4).tolist(), strict=True)) == PUBLISHED[name]
