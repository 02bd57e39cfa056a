# SPDX-License-Identifier: Apache-2.0
"""Pools and views: bytes go to the slots that the state gives, nothing else changes, and nothing copies a pool."""

import dataclasses
import functools
import math
import re
import sys
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
import pallas_kernels
from kvjax import LayerSpec, make_spec
from kvjax.pools.attention import attend
from kvjax.pools.device import Pools, apply, init_pools, write
from kvjax.pools.views import View, ragged, view
from tests.kernels.attention import how, oracle
from tests.poison import poisoned
from tests.unit.pools.hand_made import COMMITTED, SPEC, TABLE, copied, hand_made_state, no_events


def filled_pools(seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), init_pools(SPEC))


# views


def test_padded_view():
    got = jax.jit(functools.partial(view, max_tokens=3))(hand_made_state(), jnp.asarray([2, 1, 1, 3], jnp.int32))
    np.testing.assert_array_equal(got.num_tokens, [2, 0, 0, 3])  # rows 1 and 2 have nothing reserved
    np.testing.assert_array_equal(got.lengths, [5, 0, 0, 13])
    np.testing.assert_array_equal(np.where(np.asarray(TABLE) < 0, 12, TABLE), got.tables[0])
    np.testing.assert_array_equal(got.positions[0, :2], [3, 4])
    np.testing.assert_array_equal(got.positions[3], [10, 11, 12])
    np.testing.assert_array_equal(got.slots[0][0, :2], [2 * 4 + 3, 0 * 4 + 0])
    np.testing.assert_array_equal(got.slots[0][3], [6 * 4 + 2, 6 * 4 + 3, 8 * 4 + 0])
    padding = np.asarray([[0, 0, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    np.testing.assert_array_equal(np.asarray(got.slots[0]) >= 12 * 4, padding)


def test_view_of_some_rows_and_of_padding_rows():
    got = view(hand_made_state(), jnp.asarray([1, 1, 1], jnp.int32), 1, seqs=jnp.asarray([3, -1, 4], jnp.int32))
    np.testing.assert_array_equal(got.num_tokens, [1, 0, 0])
    np.testing.assert_array_equal(got.lengths, [11, 0, 0])
    np.testing.assert_array_equal(got.tables[0], [TABLE[3], [12] * 5, [12] * 5])


def test_an_int_of_tokens_stands_for_all_rows():
    got, wanted = view(hand_made_state(), 2), view(hand_made_state(), jnp.full(4, 2, jnp.int32), 2)
    chex.assert_trees_all_equal(got, wanted)


def test_host_blocks_become_scratch():
    state = hand_made_state(table=[*TABLE[:3], [12 + 3, *TABLE[3][1:]]])
    np.testing.assert_array_equal(view(state, 1).tables[0][3], [12, 4, 6, 8, 9])


def test_ragged_view():
    got = jax.jit(functools.partial(ragged, size=8))(hand_made_state(), jnp.asarray([2, 1, 1, 9], jnp.int32))
    np.testing.assert_array_equal(got.starts, [0, 2, 2, 2])
    np.testing.assert_array_equal(got.num_tokens, [2, 0, 0, 6])  # 6 of 9, because no more fit on the line
    np.testing.assert_array_equal(got.lengths, [5, 0, 0, 16])
    np.testing.assert_array_equal(got.positions, [[3, 4, 10, 11, 12, 13, 14, 15]])
    np.testing.assert_array_equal(got.slots[0], [[11, 0, 26, 27, 32, 33, 34, 35]])
    short = ragged(hand_made_state(), jnp.asarray([2, 1, 1, 3], jnp.int32), 8)
    assert np.all(np.asarray(short.slots[0])[0, 5:] >= 12 * 4)


# Rows 0 and 3 have 3 and 10 more tokens reserved. Written tokens that are not committed use them up.
WRITTEN = jnp.asarray([1, 0, 0, 4], jnp.int32)


def test_a_view_goes_on_after_what_is_written():
    got = jax.jit(functools.partial(view, max_tokens=3))(hand_made_state(), jnp.full(4, 3, jnp.int32), written=WRITTEN)
    np.testing.assert_array_equal(got.num_tokens, [2, 0, 0, 3])
    np.testing.assert_array_equal(got.lengths, [6, 0, 0, 17])
    np.testing.assert_array_equal(got.positions[0, :2], [4, 5])
    np.testing.assert_array_equal(got.positions[3], [14, 15, 16])
    np.testing.assert_array_equal(got.slots[0][0], [0 * 4 + 0, 0 * 4 + 1, 12 * 4 + 0])
    np.testing.assert_array_equal(got.slots[0][3], [8 * 4 + 2, 8 * 4 + 3, 9 * 4 + 0])
    plain = view(hand_made_state(committed=[4, 0, 9, 14]), 3)  # as if it were committed
    chex.assert_trees_all_equal(got, plain)


def test_a_ragged_view_goes_on_after_what_is_written():
    state, counts = hand_made_state(), jnp.asarray([9, 1, 1, 4], jnp.int32)
    got = jax.jit(functools.partial(ragged, size=8))(state, counts, written=WRITTEN)
    np.testing.assert_array_equal(got.num_tokens, [2, 0, 0, 4])
    np.testing.assert_array_equal(got.starts, [0, 2, 2, 2])
    np.testing.assert_array_equal(got.lengths, [6, 0, 0, 18])
    np.testing.assert_array_equal(got.positions[0, :6], [4, 5, 14, 15, 16, 17])
    np.testing.assert_array_equal(got.slots[0][0], [0, 1, 34, 35, 36, 37, 48, 48])
    chex.assert_trees_all_equal(got, ragged(hand_made_state(committed=[4, 0, 9, 14]), counts, 8))


@pytest.mark.parametrize("form", [functools.partial(view, max_tokens=2), functools.partial(ragged, size=6)])
def test_no_slots_are_beyond_what_is_written_and_nothing_is_written_twice(form):
    state, two = hand_made_state(), jnp.full(4, 2, jnp.int32)
    for written in (3, 4, 2**20):
        got = form(state, two, written=jnp.asarray([written, 0, 0, 0], jnp.int32))
        assert int(got.num_tokens[0]) == int(got.lengths[0]) == 0
        slots = np.asarray(got.slots[0]).reshape(-1)
        assert set(slots[slots < 12 * 4]) == {26, 27}  # those of row 3
    chex.assert_trees_all_equal(form(state, two, written=-WRITTEN), form(state, two))  # committed K/V stay
    some, one = jnp.asarray([3, -1], jnp.int32), jnp.ones(2, jnp.int32)
    got = form(state, one, seqs=some, written=jnp.asarray([9, 9], jnp.int32))  # like num_tokens, a number per row named
    np.testing.assert_array_equal(got.lengths, [20, 0])
    chex.assert_trees_all_equal(got, form(state, one, seqs=some, written=9))  # an int stands for all of them


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: view(s, 1, written=jnp.ones(3, jnp.int32)), r"written: got shape \[3\], wanted \[4\]"),
        (lambda s: ragged(s, jnp.ones(4, jnp.int32), 4, written=jnp.ones(4)), "written: got dtype float32"),
        (lambda s: view(s, jnp.ones(4, jnp.int32)), "max_tokens: got None"),
        (lambda s: view(s, 0), "num_tokens: got 0"),
        (lambda s: view(s, jnp.ones(3, jnp.int32), 1), r"num_tokens: got shape \[3\], wanted \[4\]"),
        (lambda s: view(s, jnp.ones(4), 1), "num_tokens: got dtype float32, wanted integers"),
        (lambda s: view(s, 1, seqs=jnp.zeros((2, 2), jnp.int32)), r"seqs: got shape \[2, 2\], wanted \[R\]"),
        (lambda s: ragged(s, jnp.ones(4, jnp.int32), 0), "size: got 0"),
    ],
)
def test_view_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call(hand_made_state())


# pools


def test_new_pools_can_be_donated():
    pools = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(init_pools(SPEC))
    assert [[x.shape for x in group] for group in pools.arrays] == [[(13, 2, 2, 2, 4, 16), (13, 1, 2, 1, 4, 32)]]


@pytest.mark.parametrize("form", ["padded", "ragged"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write(form, layer, dtype):
    pools = jax.tree.map(lambda x: x.astype(dtype), filled_pools())
    before = [np.asarray(x, np.float32) for x in pools.arrays[0]]
    counts = jnp.asarray([2, 0, 0, 3], jnp.int32)
    now = view(hand_made_state(), counts, 3) if form == "padded" else ragged(hand_made_state(), counts, 7)
    _, pool, index = SPEC.locate(layer)
    heads, width = before[pool].shape[3::2]
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((*now.positions.shape, heads, width)), jnp.float32) for _ in "kv")
    wanted = [x.copy() for x in before]
    for token in np.argwhere(np.asarray(now.slots[0]) < 12 * 4):
        block, offset = divmod(int(now.slots[0][tuple(token)]), 4)
        kv = np.stack([k[tuple(token)], v[tuple(token)]])
        wanted[pool][block, index, :, :, offset] = np.asarray(jnp.asarray(kv, dtype), np.float32)
    after = jax.jit(write, static_argnums=1, donate_argnums=0)(pools, layer, k, v, now)
    for got, want in zip(after.arrays[0], wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), want)


def of_wrong_dtypes(x):
    return [x.astype(dtype) for dtype in ("int32", "int8", "bool", "complex64")]


@pytest.mark.parametrize("tokens", [1, 3])
def test_numpys_arrays_outside_of_a_program(tokens):
    state, _ = kvjax.admit(kvjax.init(SPEC), 0, np.arange(3), 3)
    now = view(state, tokens)
    arrays = [np.random.default_rng(seed).normal(size=(4, tokens, heads, 16)) for seed, heads in enumerate((4, 2, 2))]

    def used(q, k, v, sinks):
        return attend(q, write(init_pools(SPEC), 0, k, v, now), 0, now, sinks=sinks)

    sinks = np.arange(4.0)
    of_jax = [jnp.asarray(x) for x in (*arrays, sinks)]
    np.testing.assert_array_equal(used(*arrays, sinks), used(*of_jax))
    np.testing.assert_array_equal(used(*(x.tolist() for x in arrays), sinks.tolist()), used(*of_jax))


@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
def test_an_implementation_that_the_platform_lacks_is_refused_in_a_sentence(implementation):
    if pallas_kernels.lowers_for("cuda"):
        pytest.skip("this process has the platform")
    state, _ = kvjax.admit(kvjax.init(SPEC), 0, np.arange(3), 3)
    now, q = view(state, 3), jnp.zeros((4, 3, 4, 16))
    for where in (lambda call: call(), jax.eval_shape):
        with pytest.raises(NotImplementedError, match=f"^implementation: '{implementation}' runs on cuda alone, which"):
            where(lambda: attend(q, init_pools(SPEC), 0, now, implementation=implementation))


def test_write_and_attend_refuse():
    now = view(hand_made_state(), 1)
    pools, q = init_pools(SPEC), jnp.zeros((4, 1, 4, 16))
    k = jnp.zeros((4, 1, 2, 16))
    for call, message in [
        (lambda: write(pools, 0, k[:3], k, now), r"k: got shape \(3, 1, 2, 16\), wanted \(4, 1, 2, 16\)"),
        (lambda: write(pools, 1, k, k, now), r"k: got shape \(4, 1, 2, 16\), wanted \(4, 1, 1, 32\)"),
        (lambda: write(pools, 3, k, k, now), "layer: got 3"),
        *((lambda one=one: write(pools, 0, one, k, now), "k: got") for one in of_wrong_dtypes(k)),
        *((lambda one=one: write(pools, 0, k, one, now), "v: got") for one in of_wrong_dtypes(k)),
        (lambda: attend(q, pools, 0, now, sinks=np.zeros(4, int)), "sinks: got int32, wanted a floating"),
        (lambda: write(pools, 0, k, k, now, implementation="cuda"), "implementation: got 'cuda'"),
        (lambda: attend(q[:, :, :3], pools, 0, now), r"q: got shape \(4, 1, 3, 16\), wanted \[4, 1, a multiple of 2"),
        (lambda: attend(q[0], pools, 0, now), "q: got shape"),
        (lambda: attend(q.astype(jnp.int32), pools, 0, now), "q: got int32"),
        (lambda: attend(q, pools, 0, now, window=0), "window: got 0"),
        (lambda: attend(q, pools, 0, now, soft_cap=0.0), r"soft_cap: got 0\.0"),
        (lambda: attend(q, pools, 0, now, sinks=jnp.zeros(3)), r"sinks: got shape \(3,\), wanted \(4,\)"),
        (lambda: attend(q, pools, 0, now, implementation="cuda"), "implementation: got 'cuda'"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_cache_or_a_state_is_no_pools_and_no_view():
    state, pools, k = hand_made_state(), init_pools(SPEC), jnp.zeros((4, 1, 2, 16))
    now, cache = view(state, 1), kvjax.Cache(state, pools)
    for call in (lambda pools, now: write(pools, 0, k, k, now), lambda pools, now: attend(k, pools, 0, now)):
        for wrong, message in (
            (cache, r"Cache, wanted its pools: cache\.pools"),
            (state, "CacheState, wanted Pools, su"),
        ):
            with pytest.raises(ValueError, match=f"^pools: got a {message}"):
                call(wrong, now)
        for wrong in (state, cache):
            with pytest.raises(ValueError, match=rf"^view: got a {type(wrong).__name__}, wanted a View, such as kvjax"):
                call(pools, wrong)
    with pytest.raises(ValueError, match=r"^pools: got a Cache, wanted its pools: cache\.pools"):
        apply(cache, no_events(copied([3], [5])))


THREE = LayerSpec(2, 16), LayerSpec(1, 32), LayerSpec(2, 16)
SIZES = {"num_blocks": 12, "max_seqs": 4, "max_length": 20, "block_size": 4, "dtype": "float32"}
VIEWS = {
    "view": ((4, 1), (1,)),
    "ragged": ((1, 4), (np.ones(4, np.int32), 4)),
    "mixed": ((1, 8), (np.ones(4, bool), [0], [1], 4)),
}


@pytest.mark.parametrize(("what", "make"), [*(("write", make) for make in VIEWS), ("attend", "mixed")])
def test_a_view_of_another_cache_is_refused(what, make):
    """It is refused while tracing, also under `vmap`. A view of an equal spec, or of none (by hand), is accepted."""
    shape, args = VIEWS[make]

    def use(state, pools, **spec):
        now, x = getattr(kvjax.pools, make)(state, *args).replace(**spec), jnp.zeros((*shape, 2, 16))
        return write(pools, 0, x, x, now) if what == "write" else attend(x, pools, 0, now)

    def traced(use, layers=THREE, **changed):
        pools = jax.eval_shape(lambda: init_pools(make_spec(layers, **(SIZES | changed))))
        return jax.eval_shape(use, jax.eval_shape(hand_made_state), pools)

    batched = jax.vmap(use, in_axes=(None, None), axis_size=2)
    traced(batched)
    traced(functools.partial(use, spec=None), max_seqs=5)
    for calls, changed, message in (
        ((use, batched), {"max_seqs": 5}, r"max_seqs=4, wanted 5"),
        ((use,), {"num_blocks": 13}, r"groups\[0\].num_blocks=12, wanted 13"),
        ((use,), {"layers": (LayerSpec(2, 8), *THREE[1:])}, r"2 in groups\[0\].pools, wanted 3"),
        ((use,), {"layers": (*THREE, LayerSpec(2, 8, window=8))}, r"1 in groups, wanted 2"),
        ((use,), {"layers": (*THREE, THREE[0])}, r"2 in groups\[0\].pools\[0\].layers, wanted 3"),
    ):
        for call in calls:
            with pytest.raises(ValueError, match=rf"^view: got one of a cache with {message}, as the pools have(\n|$)"):
                traced(call, **changed)


@pytest.mark.parametrize("form", ["padded", "ragged", "decode"])
def test_attend_sees_what_was_written_and_nothing_else(form):
    """The pools begin as NaN. Two chunks are written by verbs, and attention is compared with the oracle."""
    pools = poisoned(init_pools(SPEC))
    rng = np.random.default_rng(2)
    kv = {row: rng.standard_normal((20, 2, 1, 32)).astype(np.float32) for row in range(4)}
    chunks = [(jnp.asarray(COMMITTED, jnp.int32), 10, np.zeros(4, np.int32))]
    after = {"padded": [2, 0, 0, 4], "ragged": [2, 0, 0, 4], "decode": [1, 0, 0, 1]}[form]
    chunks.append((jnp.asarray(after, jnp.int32), max(after), np.asarray(COMMITTED)))
    for counts, size, done in chunks:
        state = hand_made_state(committed=done)
        now = ragged(state, counts, 8) if form == "ragged" and size < 10 else view(state, counts, size)
        k, v = np.zeros((2, *now.positions.shape, 1, 32), np.float32)
        for row, count in enumerate(counts):
            start = int(now.starts[row]) if now.starts is not None else 0
            line = row if now.starts is None else 0
            tokens = kv[row][done[row] : done[row] + count]
            k[line, start : start + count], v[line, start : start + count] = tokens[:, 0], tokens[:, 1]
        pools = write(pools, 1, jnp.asarray(k), jnp.asarray(v), now)
    q = jnp.asarray(rng.standard_normal((*now.positions.shape, 3, 32)), jnp.float32)
    out, lse = jax.jit(functools.partial(attend, layer=1, return_lse=True))(q, pools=pools, view=now)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    for row, count in enumerate(after):
        if count:
            start, line = (0, row) if now.starts is None else (int(now.starts[row]), 0)
            span, length = slice(start, start + count), COMMITTED[row] + count
            wanted, wanted_lse = oracle(
                q[line, span], kv[row][:length, 0], kv[row][:length, 1], COMMITTED[row], scale=32**-0.5
            )
            np.testing.assert_allclose(out[line, span], wanted, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(lse[line, span], wanted_lse, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(np.asarray(out)[np.asarray(now.slots[0]) >= 12 * 4], 0)


# traced layers


def through(pools, layer, seed, index=None):
    """The pools and the attention after writes of a layer's K/V of a chunk and of the token after it."""
    rng, out = np.random.default_rng(seed), []
    heads, width = pools.at(layer)[3].shape[3::2]
    for count, committed in ((2, COMMITTED), (1, [5, 0, 9, 12])):
        now = view(hand_made_state(committed), jnp.asarray([count, 0, 0, count], jnp.int32), count)
        k, v, q = (
            jnp.asarray(rng.standard_normal((*now.positions.shape, n * heads, width)), jnp.float32) for n in (1, 1, 3)
        )
        pools = write(pools, layer, k, v, now, index=index)
        out.append(attend(q, pools, layer, now, index=index))
    return pools, out


@pytest.mark.parametrize(
    ("implementation", "layer", "named"),  # Mosaic's simulator has traced layers in test_mosaic.py
    [
        ("xla", 0, 2),
        *[pytest.param(*at, marks=pytest.mark.long) for at in (("xla", 2, 0), ("triton", 2, 0), ("triton", 0, 2))],
    ],
)
def test_an_index_stands_for_the_layer(implementation, layer, named, monkeypatch):
    """It may be traced; `layer` is then any of the pool's. Results equal those of the layer itself in every bit."""
    call = functools.partial(pallas_kernels.call, **how(implementation))
    monkeypatch.setattr(pallas_kernels, "call", lambda *args, implementation, **options: call(*args, **options))
    wanted = jax.jit(functools.partial(through, layer=layer, seed=layer))(filled_pools())
    traced = jax.jit(lambda pools, index: through(pools, named, layer, index))
    chex.assert_trees_all_equal(traced(filled_pools(), SPEC.locate(layer)[2]), wanted)


def test_an_index_out_of_range_is_clamped():
    """Both `write` and `attend` clamp it."""
    pools, run = filled_pools(), jax.jit(lambda pools, index: through(pools, 0, 5, index))
    results = {index: run(pools, jnp.int32(index)) for index in (0, 1, 2, 2**31 - 1, -1, -(2**31))}
    for index, result in results.items():
        chex.assert_trees_all_equal(result, results[int(index > 0)])
        assert int(pools.at(0, index)[2]) == int(index > 0)
    assert not np.array_equal(results[0][1][0], results[1][1][0])


@pytest.mark.parametrize("layers", [(0, 1, 2), (4, 1)])
def test_a_traced_layer_has_its_own_index_in_the_only_pool(layers):
    """A number that the pool lacks is clamped to its last layer."""
    pool = kvjax.spec.PoolSpec(layers, 2, 16, "float32")
    pools = init_pools(dataclasses.replace(SPEC, groups=(dataclasses.replace(SPEC.groups[0], pools=(pool,)),)))
    index = jax.jit(lambda layer: pools.at(layer)[2])
    assert [int(index(layer)) for layer in layers] == [*range(len(layers))]
    assert [int(index(layer)) for layer in (max(layers) + 1, 2**31 - 1)] == [len(layers) - 1] * 2


def test_apply_copies_whole_blocks():
    pools = filled_pools()
    before = [np.asarray(x) for x in pools.arrays[0]]
    events = no_events(copied([3, 3, 11], [5, 0, 2]))
    after = jax.jit(apply, donate_argnums=0)(pools, events)
    for got, want in zip(after.arrays[0], before, strict=True):
        want = want.copy()
        want[[5, 0, 2]] = want[[3, 3, 11]]
        np.testing.assert_array_equal(got, want)


def test_apply_heeds_the_group():
    pools = filled_pools()
    after = apply(pools, no_events(copied([3], [5], group=1)))
    chex.assert_trees_all_equal(after, pools)


def test_blocks_out_and_back():
    pool = filled_pools().arrays[0][0]
    blocks = jnp.asarray([7, 0, 12, 3], jnp.int32)
    staged = pallas_kernels.call("gather_blocks", pool, blocks)
    np.testing.assert_array_equal(staged, np.asarray(pool)[np.asarray(blocks)])
    targets = jnp.asarray([1, 2, 4, 5], jnp.int32)
    put = jax.jit(functools.partial(pallas_kernels.call, "scatter_blocks"), donate_argnums=0)
    want = np.asarray(pool).copy()
    want[[1, 2]] = want[[7, 0]]
    np.testing.assert_array_equal(put(pool + 0, staged, targets, jnp.int32(2)), want)


# cost

LAYERS = [LayerSpec(4, 64)] * 4
BIG = make_spec(LAYERS, num_blocks=1023, max_seqs=16, max_length=1024, dtype="float32")
HUGE = make_spec(LAYERS, num_blocks=8191, max_seqs=16, max_length=8192, dtype="float32")  # compiled for, never made


def test_padding_costs_apply_nothing():
    """A copy of 32 KB takes microseconds. 256 of padding, if executed, would take tens of milliseconds."""
    pools = init_pools(BIG)
    run = jax.jit(apply, donate_argnums=0)
    least = math.inf
    for _ in range(20):
        events = no_events(jnp.zeros((256, 9), jnp.int32))
        start = time.perf_counter()
        pools = jax.block_until_ready(run(pools, events))
        least = min(least, time.perf_counter() - start)
    assert least < 2e-3


def steps(pools, q, state, records, loop):
    """Three decode steps: copies, then write and attention in every layer. With "layers" the layers are a scan, too."""

    def one(carry):
        number, pools, q, seqs = carry
        pools, now = apply(pools, no_events(records)), view(state.replace(seqs=seqs), 1)

        def through_layer(carry, layer):
            pools, q = carry
            pools = write(pools, layer, q[:, :, :4], q[:, :, 4:], now)
            return (pools, q + attend(q, pools, layer, now).astype(q.dtype)), None

        if loop == "layers":
            (pools, q), _ = lax.scan(through_layer, (pools, q), jnp.arange(4, dtype=jnp.int32))
        else:
            for layer in range(4):
                (pools, q), _ = through_layer((pools, q), layer)
        return number + 1, pools, q, seqs.replace(committed=seqs.committed + 1)

    carry = (jnp.int32(0), pools, q, state.seqs)
    if loop != "while":
        return lax.scan(lambda c, _: (one(c), None), carry, None, length=3)[0]
    return lax.while_loop(lambda c: c[0] < 3, one, carry)


@pytest.mark.parametrize(
    ("loop", "dtype"),
    [
        ("layers", "float32"),
        pytest.param("while", "float32", marks=pytest.mark.long),
        pytest.param("scan", "bfloat16", marks=pytest.mark.long),
        pytest.param("scan", "float32", marks=pytest.mark.long),
        pytest.param("while", "bfloat16", marks=pytest.mark.long),
        pytest.param("layers", "bfloat16", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_steps_update_the_pools_in_place(loop, dtype):
    """In a compiled loop temporaries are under 5 % of the pool, and only updates make an array of its size."""
    pools = jax.eval_shape(lambda: jax.tree.map(lambda x: x.astype(dtype), init_pools(HUGE)))
    state = jax.eval_shape(lambda: kvjax.init(HUGE))
    q = jax.ShapeDtypeStruct((16, 1, 8, 64), dtype)
    records = jax.ShapeDtypeStruct((256, 9), jnp.int32)
    run = jax.jit(functools.partial(steps, loop=loop), donate_argnums=0)
    compiled = run.lower(pools, q, state, records).compile()
    array = pools.arrays[0][0]
    pool_bytes = array.size * array.dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes
    in_place = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "dynamic-update-slice", "scatter"}
    for name, sizes, kind in re.findall(r"%?([\w.-]+) = \w+\[([\d,]+)\]\S* ([\w-]+)\(", compiled.as_text()):
        if math.prod(map(int, sizes.split(","))) >= array.size // 2 and kind not in in_place:
            assert kind == "fusion" and ("scatter" in name or "dynamic-update-slice" in name), (name, sizes, kind)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["scan", "while", "layers"])
def test_steps_in_a_donated_loop_equal_steps_one_by_one(loop):
    """No read of a layer sees a later write, and no write is lost. Copies run between the steps."""
    layers, rng = 4, np.random.default_rng(4)
    spec = make_spec(
        [LayerSpec(4, 16)] * layers, num_blocks=16, max_seqs=2, max_length=20, block_size=4, dtype="float32"
    )
    state = kvjax.init(spec)
    group = state.groups[0].replace(table=jnp.asarray([[2, 0, 9, 4, 7], [5, 1, 8, 3, 6]], jnp.int32))
    seqs = kvjax.state.Sequences(*(jnp.asarray(x, jnp.int32) for x in ([20, 20], [6, 13], [0, 0])))
    state = state.replace(groups=(group,), seqs=seqs)
    pools = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), init_pools(spec))
    q = jnp.asarray(rng.standard_normal((2, 1, 8, 16)), jnp.float32)
    records = copied([11, 2], [12, 13])

    run = jax.jit(functools.partial(steps, loop=loop), donate_argnums=0)
    _, got, got_q, _ = run(jax.tree.map(jnp.copy, pools), q, state, records)
    for number in range(3):
        pools = apply(pools, no_events(records))
        now = view(state.replace(seqs=seqs.replace(committed=seqs.committed + number)), 1)
        for layer in range(layers):
            pools = write(pools, layer, q[:, :, :4], q[:, :, 4:], now)
            q = q + attend(q, pools, layer, now)
    np.testing.assert_allclose(got_q, q, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.arrays[0][0], pools.arrays[0][0], rtol=1e-5, atol=1e-5)


def test_decode_follows_the_longest_live_length_not_the_table():
    """The loop's trip count is data, so that nothing of the size of a whole table is computed."""
    tables, lengths = jnp.zeros((1, 4096), jnp.int32), jnp.asarray([3], jnp.int32)
    pool, q = jnp.zeros((2, 1, 2, 1, 16, 64)), jnp.zeros((1, 1, 64))
    compiled = (
        jax.jit(functools.partial(pallas_kernels.call, "decode_attention", scale=1.0))
        .lower(q, pool, 0, tables, lengths)
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 16 * 64


def test_call_reports_when_no_implementation_can_serve(monkeypatch):
    class Picky:
        @staticmethod
        def append_kv(*args):
            raise NotImplementedError("not here")

    monkeypatch.setattr(pallas_kernels, "IMPLEMENTATIONS", ("picky", "other"))
    for name in pallas_kernels.IMPLEMENTATIONS:
        monkeypatch.setitem(sys.modules, f"pallas_kernels.{name}", Picky)
    with pytest.raises(ExceptionGroup, match="append_kv: no implementation can serve"):
        pallas_kernels.call("append_kv", 1)
    with pytest.raises(NotImplementedError, match="not here"):
        pallas_kernels.call("append_kv", 1, implementation="other")


def test_view_and_pools_are_pytrees():
    now = view(hand_made_state(), 1)
    assert isinstance(jax.tree.map(lambda x: x, now), View)
    assert isinstance(jax.tree.map(lambda x: x, init_pools(SPEC)), Pools)
