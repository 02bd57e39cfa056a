# SPDX-License-Identifier: Apache-2.0
"""Rotation and write in one call: the same bytes as one after the other, for any view and on meshes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax import LayerSpec
from kvjax.pools import attend, init_pools, mixed, ragged, rope_write, view, write
from pallas_kernels.rotary import rotate
from tests.mesh import AUTO, EXPLICIT, mesh_of
from tests.poison import poisoned
from tests.unit.pools.hand_made import SPEC, hand_made_state

FORMS = {
    "decode": lambda state: view(state, [1, 0, 0, 1], 1),
    "padded": lambda state: view(state, [2, 0, 0, 4], 4),
    "ragged": lambda state: ragged(state, [2, 0, 0, 4], 8),
    "mixed": lambda state: mixed(state, [True, False, False, False], [3, -1], [4, 1], 6),
}


def spec_of(layers, dtype="float32", **options):
    sizes = {"num_blocks": 12, "max_seqs": 4, "max_length": 20, "block_size": 4}
    return kvjax.make_spec(layers, dtype=dtype, **sizes | options)


def inputs(now, kv_heads=2, width=16, dtype="float32"):
    """Q, K and V of a view's tokens, and their angles. float32 holds the products exactly, fused with sums or not."""
    rng, batch = np.random.default_rng(0), now.positions.shape

    def numbers(most, *shape):
        return rng.integers(-most, most + 1, (*batch, *shape)) / (most + 1)

    new = [jnp.asarray(numbers(127, heads, width), dtype) for heads in (2 * kv_heads, kv_heads, kv_heads)]
    return (*new, tuple(jnp.asarray(numbers(4095, 1, width // 2), jnp.float32) for _ in range(2)))


def one_by_one(pools, layer, q, k, v, angles, now, **options):
    return rotate(q, angles), write(pools, layer, rotate(k, angles), v, now, **options)


def check_same(got, wanted):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(*(np.asarray(x).astype(np.float32) for x in (one, other)))


@pytest.mark.parametrize("form", ["ragged", *(pytest.param(x, marks=pytest.mark.long) for x in FORMS if x != "ragged")])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_it_rotates_and_writes(form, dtype):
    spec = spec_of([LayerSpec(2, 16)] * 3, dtype)
    now = FORMS[form](hand_made_state()).replace(spec=None)
    args = poisoned(init_pools(spec)), 1, *inputs(now), now
    check_same(*(jax.jit(function, static_argnums=1)(*args) for function in (rope_write, one_by_one)))


@pytest.mark.parametrize("which", ["layer", "index"])
def test_a_layer_may_be_traced(which):
    spec = spec_of([LayerSpec(2, 16)] * 3)
    now = view(hand_made_state(), 1).replace(spec=None)
    pools, new = poisoned(init_pools(spec)), inputs(now)
    called = (lambda i: rope_write(pools, i, *new, now)) if which == "layer" else (
        lambda i: rope_write(pools, 0, *new, now, index=i)
    )  # fmt: skip
    check_same(jax.jit(called)(jnp.int32(2)), one_by_one(pools, 2, *new, now))


def test_vmap_and_64_bit_types():
    now = view(hand_made_state(), 1)
    pools, new = poisoned(init_pools(SPEC)), inputs(now)
    wanted = one_by_one(pools, 2, *new, now)
    several = jax.tree.map(lambda x: jnp.stack([x, x]), (pools, *new))
    got = jax.jit(jax.vmap(lambda pools, *new: rope_write(pools, 2, *new, now)))(*several)
    check_same(jax.tree.map(lambda x: x[1], got), wanted)
    with jax.enable_x64(True):
        check_same(jax.jit(lambda: rope_write(pools, 2, *new, now))(), wanted)


def test_the_derivative_is_that_of_rotation_and_write():
    now = FORMS["padded"](hand_made_state())
    pools, (*new, angles) = jax.tree.map(jnp.zeros_like, init_pools(SPEC)), inputs(now)
    factors = jnp.asarray(np.random.default_rng(1).standard_normal(new[0].shape), jnp.float32)

    def total(function, *new):
        q, after = function(pools, 2, *new, now)
        return jnp.vdot(attend(q, after, 2, now), factors)

    got, wanted = (
        jax.jit(jax.grad(functools.partial(total, function), (0, 1, 2, 3)))(*new, angles)
        for function in (rope_write, one_by_one)
    )
    for one, other in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert np.any(one != 0)


def test_rounding_has_no_derivative():
    now, pools = view(hand_made_state(), 1).replace(spec=None), init_pools(spec_of([LayerSpec(2, 16)], "int8"))
    *new, angles = inputs(now)

    def total(x, held=lambda x: x):
        q, after = rope_write(pools, 0, *(held(x * one) for one in new), angles, now)
        return x * jnp.sum(attend(q, after, 0, now))

    with pytest.raises(NotImplementedError, match="rope_append: got a derivative of rounding to int8, wanted"):
        jax.grad(total)(jnp.float32(1))
    assert np.isfinite(jax.grad(functools.partial(total, held=lax.stop_gradient))(jnp.float32(1)))


MESHES = [(2, 2, AUTO), *(pytest.param(*axes, EXPLICIT, marks=pytest.mark.long) for axes in ((1, 2), (2, 1), (2, 2)))]


@pytest.mark.parametrize(("heads", "context", "kind"), MESHES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.long)])
def test_devices_that_divide_heads_and_blocks(heads, context, kind, dtype):
    spec = spec_of([LayerSpec(2, 16)] * 2, dtype)
    now = FORMS["mixed"](hand_made_state()).replace(spec=None)
    new = inputs(now)
    wanted, alone = jax.jit(one_by_one, static_argnums=1)(poisoned(init_pools(spec)), 1, *new, now)
    with mesh_of(heads, context, kind, ("heads", "context")) as mesh:
        pools = poisoned(init_pools(spec, mesh=mesh, heads="heads", context="context"))
        got, pools = jax.jit(rope_write, static_argnums=1)(pools, 1, *new, now)
        check_same(got, wanted)
        divided = [pools.context(0).ordered(np.asarray(x)) for x in jax.tree.leaves(pools)]
    check_same([x[:-1] for x in divided], [np.asarray(x)[:-1] for x in jax.tree.leaves(alone)])


def test_what_does_not_fit_is_refused():
    now = view(hand_made_state(), 1)
    pools, (q, k, v, angles) = init_pools(SPEC), inputs(now)
    half = tuple(x[..., :4] for x in angles)
    for message, args in {
        "q: got shape (4, 1, 3, 16), wanted [4, 1, a multiple of 2, 16]": (2, q[:, :, :3], k, v, angles, now),
        "q: got shape (4, 1, 4, 8), wanted [4, 1, a multiple of 2, 16]": (2, q[..., :8], k, v, angles, now),
        "k: got shape (4, 1, 1, 16), wanted (4, 1, 2, 16)": (2, q, k[:, :, :1], v, angles, now),
        "v: got None, wanted (4, 1, 2, 16) for this view and layer 2": (2, q, k, None, angles, now),
        "angles: got float32[4, 1, 1, 4], float32[4, 1, 1, 4], wanted cosine and sine float32[4, 1, 1, 8]": (
            2, q, k, v, half, now
        ),
        "angles: got bfloat16[4, 1, 1, 8], bfloat16[4, 1, 1, 8], wanted": (
            2, q, k, v, tuple(x.astype(jnp.bfloat16) for x in angles), now
        ),
        "view: got a int, wanted a View": (2, q, k, v, angles, 3),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            rope_write(pools, *args)
    with pytest.raises(ValueError, match=r"^layer: got a traced value with 2 pools"):
        jax.jit(lambda layer: rope_write(pools, layer, q, k, v, angles, now))(0)
    with pytest.raises(NotImplementedError):
        jax.jit(lambda: rope_write(pools, 2, q, k, v, angles, now, implementation="triton"))()


def test_layers_without_k_and_v_are_refused():
    now = view(hand_made_state(), 1).replace(spec=None)
    layers = [LayerSpec.latent(24, 16), LayerSpec.recurrent({"state": (2, 4)}, axes={"state": 0})]
    for layer, kind in ((0, "which has latents"), (1, "which is recurrent")):
        with pytest.raises(ValueError, match=f"^layer: got {layer}, {kind}, wanted one with K/V"):
            rope_write(init_pools(spec_of(layers)), layer, *inputs(now, 1, 24), now)
