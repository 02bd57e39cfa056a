# SPDX-License-Identifier: Apache-2.0
"""Pools: what is refused, which kernel serves, the layer that is meant, and copies."""

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

import kvjax
import pallas_kernels
from kvjax import LayerSpec, make_spec
from kvjax.model import forward
from kvjax.pools import rope_write
from kvjax.pools.attention import attend
from kvjax.pools.device import Pools, apply, init_pools, write
from kvjax.pools.views import mixed, view
from models import verify
from tests.drive import DATA
from tests.unit.pools.hand_made import SIZES, SPEC, copied, hand_made_state, no_events, normal


def filled_pools(spec=SPEC):
    return jax.tree.map(lambda x: normal(x.ndim, *x.shape).astype(x.dtype), init_pools(spec))


def test_new_pools_can_be_donated():
    pools = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(init_pools(SPEC))
    assert isinstance(pools, Pools)
    assert [[x.shape for x in group] for group in pools.arrays] == [[(13, 2, 2, 2, 4, 16), (13, 1, 2, 1, 4, 32)]]


def test_latents_take_half_the_bytes_of_keys_that_are_values_too():
    latents, kv = (make_spec([layer] * 3, **SIZES) for layer in (LayerSpec.latent(24, 16), LayerSpec(1, 24)))
    assert 2 * latents.groups[0].block_bytes(4) == kv.groups[0].block_bytes(4)
    assert 2 * sum(x.nbytes for x in jax.tree.leaves(init_pools(latents))) == sum(
        x.nbytes for x in jax.tree.leaves(init_pools(kv))
    )


@pytest.mark.slow
def test_numpys_arrays_outside_of_a_program():
    state, _ = kvjax.admit(kvjax.init(SPEC), 0, np.arange(3), 3)
    now = view(state, 1)
    arrays = [np.random.default_rng(seed).normal(size=(4, 1, heads, 16)) for seed, heads in enumerate((4, 2, 2))]

    def used(q, k, v, sinks):
        return attend(q, write(init_pools(SPEC), 0, k, v, now), 0, now, sinks=sinks)

    sinks = np.arange(4.0)
    of_jax = [jnp.asarray(x) for x in (*arrays, sinks)]
    np.testing.assert_array_equal(used(*arrays, sinks), used(*of_jax))
    np.testing.assert_array_equal(used(*(x.tolist() for x in arrays), sinks.tolist()), used(*of_jax))


@pytest.mark.slow
def test_over_quantised_pools_verify_reports_the_error_of_the_logits(capsys):
    assert verify.main(["--kv-dtype", "int8", str(DATA / "goldens" / "llama")]) == 0
    out = capsys.readouterr().out
    assert "not judged: largest logit error" in out and "e-01" in out


# Refusals.

KINDS = [LayerSpec(2, 16), LayerSpec(1, 32), LayerSpec.latent(24, 16), LayerSpec.recurrent({"state": (2, 3)})]
Q, K, LATENT = jnp.zeros((4, 1, 4, 16)), jnp.zeros((4, 1, 2, 16)), jnp.zeros((4, 1, 1, 24))
ANGLES = (jnp.zeros((4, 1, 1, 8)),) * 2


@functools.cache
def made():
    """Pools of all kinds of layers, and the view of a token of each row."""
    now = view(hand_made_state(), 1)
    now = now.replace(spec=None, tables=now.tables * 2, slots=now.slots * 2)
    return init_pools(make_spec(KINDS, **SIZES, partial_reuse=False)), now


def wrote(layer=0, k=K, v=K, **options):
    pools, now = made()
    return write(pools, layer, k, v, now, **options)


def attended(q=Q, layer=0, **options):
    pools, now = made()
    return attend(q, pools, layer, now, **options)


def rotated(q=Q, k=K, v=K, angles=ANGLES, layer=0, now=None, **options):
    pools, own = made()
    return rope_write(pools, layer, q, k, v, angles, own if now is None else now, **options)


REFUSED = [
    (lambda: wrote(k=K[:3]), "k: got shape (3, 1, 2, 16), wanted (4, 1, 2, 16)"),
    (lambda: wrote(1), "k: got shape (4, 1, 2, 16), wanted (4, 1, 1, 32)"),
    (lambda: wrote(4), "layer: got 4"),
    *((lambda dtype=dtype: wrote(k=K.astype(dtype)), "k: got") for dtype in ("int32", "int8", "bool", "complex64")),
    *((lambda dtype=dtype: wrote(v=K.astype(dtype)), "v: got") for dtype in ("int32", "int8", "bool", "complex64")),
    (lambda: wrote(implementation="cuda"), "implementation: got 'cuda'"),
    (lambda: wrote(v=None), "v: got None, wanted (4, 1, 2, 16) for this view and layer 0"),
    (lambda: wrote(2, LATENT, LATENT), "v: got shape (4, 1, 1, 24), wanted None: layer 2 has laten"),
    (lambda: wrote(2, LATENT[..., :16], None), "k: got shape (4, 1, 1, 16), wanted (4, 1, 1, 24)"),
    (lambda: wrote(2, K, None), "k: got shape (4, 1, 2, 16), wanted (4, 1, 1, 24)"),
    (lambda: wrote(3, LATENT, None), "layer: got 3, which is recurrent, wanted one with K/V or latents"),
    (lambda: attended(Q[:, :, :3]), "q: got shape (4, 1, 3, 16), wanted [4, 1, a multiple of 2, 16]"),
    (lambda: attended(Q[0]), "q: got shape"),
    (lambda: attended(Q.astype(jnp.int32)), "q: got int32"),
    (lambda: attended(K, 2), "q: got shape (4, 1, 2, 16), wanted [4, 1, a multiple of 1, 24]"),
    (lambda: attended(LATENT, 3), "layer: got 3, which is recurrent"),
    (lambda: attended(window=0), "window: got 0"),
    (lambda: attended(soft_cap=0.0), "soft_cap: got 0.0"),
    (lambda: attended(sinks=np.zeros(4, int)), "sinks: got int32, wanted a floating"),
    (lambda: attended(sinks=jnp.zeros(3)), "sinks: got shape (3,), wanted (4,)"),
    (lambda: attended(implementation="cuda"), "implementation: got 'cuda'"),
    (lambda: rotated(Q[:, :, :3]), "q: got shape (4, 1, 3, 16), wanted [4, 1, a multiple of 2, 16]"),
    (lambda: rotated(Q[..., :8]), "q: got shape (4, 1, 4, 8), wanted [4, 1, a multiple of 2, 16]"),
    (lambda: rotated(k=K[:, :, :1]), "k: got shape (4, 1, 1, 16), wanted (4, 1, 2, 16)"),
    (lambda: rotated(v=None), "v: got None, wanted (4, 1, 2, 16) for this view and layer 0"),
    (
        lambda: rotated(angles=(ANGLES[0], ANGLES[1][..., :4])),
        "angles: got float32[4, 1, 1, 8], float32[4, 1, 1, 4], wanted cosine and sine float32[4, 1, 1, 8], at most",
    ),
    (
        lambda: rotated(angles=tuple(x.astype(jnp.bfloat16) for x in ANGLES)),
        "angles: got bfloat16[4, 1, 1, 8], bfloat16[4, 1, 1, 8], wanted",
    ),
    (lambda: rotated(now=3), "view: got a int, wanted a View"),
    (lambda: rotated(layer=2), "layer: got 2, which has latents, wanted one with K/V"),
    (lambda: rotated(layer=3), "layer: got 3, which is recurrent, wanted one with K/V"),
    (lambda: jax.jit(lambda layer: rotated(layer=layer))(0), "layer: got a traced value with "),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_arguments_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
def test_an_implementation_that_the_platform_lacks_is_refused_in_a_sentence(implementation):
    if pallas_kernels.lowers_for("cuda"):
        pytest.skip("this process has the platform")
    for where in (lambda call: call(), jax.eval_shape):
        with pytest.raises(NotImplementedError, match=f"^implementation: '{implementation}' runs on cuda alone, which"):
            where(lambda: attended(implementation=implementation))
    with pytest.raises(NotImplementedError):
        jax.jit(lambda: rotated(implementation=implementation))()


def test_a_cache_or_a_state_is_no_pools_and_no_view():
    state, pools = hand_made_state(), init_pools(SPEC)
    now, cache = view(state, 1), kvjax.Cache(state, pools)
    for call in (lambda pools, now: write(pools, 0, K, K, now), lambda pools, now: attend(K, pools, 0, now)):
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


# Which kernel serves, and which layer is meant.


def line(decodes=4):
    """A mixed view of four rows that decode, with room for four tokens of chunks."""
    now = mixed(hand_made_state(), np.ones(4, bool), np.array([-1]), np.array([0]), 4)
    return now.replace(decodes=decodes)


def test_each_part_of_a_mixed_view_has_the_kernel_that_suits_it(monkeypatch):
    called, call = [], pallas_kernels.call

    def record(name, q, *args, **options):
        called.append((name, len(q)))
        return call(name, q, *args, **options)

    monkeypatch.setattr(pallas_kernels, "call", record)
    for now in (line(4), line(0)):
        jax.eval_shape(functools.partial(attend, layer=0, view=now), jnp.zeros((1, 8, 4, 16)), init_pools(SPEC))
    assert called == [("decode_attention", 4), ("prefill_attention", 4), ("prefill_attention", 8)]


def test_a_model_gives_logits_of_as_many_positions_as_are_requested():
    shapes = {"line": (7, 32), "rows": (1, 32), "all": (1, 8, 32)}

    def compute(what, last):
        def model(tokens, pools, view, *, last):
            return jnp.zeros(shapes[what]), pools

        return forward(model, np.zeros((1, 8), np.int32), init_pools(SPEC), line(), last)[0].shape

    last = np.zeros(7, np.int32)
    assert compute("line", last) == (7, 32) and compute("all", None) == (1, 8, 32)
    for what, got in (("rows", r"\[1, 32\]"), ("all", r"\[1, 8, 32\]")):
        wanted = rf"^model: got logits float32{got} for last=i32\[7\], wanted .*f32\[7, V\]"
        with pytest.raises(ValueError, match=wanted):
            compute(what, last)


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


def test_an_index_out_of_range_is_clamped():
    """Both `write` and `attend` clamp it."""
    pools, now = filled_pools(), made()[1]

    def used(index):
        after = write(pools, 0, K, K, now, index=index)
        return after, attend(Q + 1, after, 0, now, index=index)

    run = jax.jit(used)
    results = {index: run(jnp.int32(index)) for index in (0, 1, 2, 2**31 - 1, -1, -(2**31))}
    for index, result in results.items():
        chex.assert_trees_all_equal(result, results[int(index > 0)])
        assert int(pools.at(0, index)[2]) == int(index > 0)
    assert not np.array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("layers", [(0, 1, 2), (4, 1)])
def test_a_traced_layer_has_its_own_index_in_the_only_pool(layers):
    """A number that the pool lacks is clamped to its last layer."""
    pool = kvjax.spec.PoolSpec(layers, 2, 16, "float32")
    pools = init_pools(dataclasses.replace(SPEC, groups=(dataclasses.replace(SPEC.groups[0], pools=(pool,)),)))
    index = jax.jit(lambda layer: pools.at(layer)[2])
    assert [int(index(layer)) for layer in layers] == [*range(len(layers))]
    assert [int(index(layer)) for layer in (max(layers) + 1, 2**31 - 1)] == [len(layers) - 1] * 2


# Copies.


@pytest.mark.parametrize("layer", [LayerSpec(2, 16), LayerSpec.latent(24, 16)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_apply_copies_whole_blocks_and_their_scales(layer, dtype):
    pools = filled_pools(make_spec([layer, LayerSpec(1, 32)], **SIZES | {"dtype": dtype}))
    before = [np.asarray(x) for x in jax.tree.leaves(pools)]
    after = jax.jit(apply, donate_argnums=0)(pools, no_events(copied([3, 3, 11], [5, 0, 2])))
    for got, want in zip(jax.tree.leaves(after), before, strict=True):
        want = want.copy()
        want[[5, 0, 2]] = want[[3, 3, 11]]
        np.testing.assert_array_equal(got, want)


def test_apply_heeds_the_group():
    pools = filled_pools()
    chex.assert_trees_all_equal(apply(pools, no_events(copied([3], [5], group=1))), pools)


def test_padding_costs_apply_nothing():
    """A copy of 32 KB takes microseconds. 256 of padding, if executed, would take tens of milliseconds."""
    pools = init_pools(make_spec([LayerSpec(4, 64)] * 4, num_blocks=1023, max_seqs=16, max_length=64, dtype="float32"))
    run = jax.jit(apply, donate_argnums=0)
    least = math.inf
    for _ in range(20):
        events = no_events(jnp.zeros((256, 9), jnp.int32))
        start = time.perf_counter()
        pools = jax.block_until_ready(run(pools, events))
        least = min(least, time.perf_counter() - start)
    assert least < 2e-3
