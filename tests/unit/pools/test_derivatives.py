# SPDX-License-Identifier: Apache-2.0
"""Derivatives of write, attend and apply against those of dense attention, under jax's transformations."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh

import kvjax
from kvjax.pools import apply, attend, init_pools, rope_write, write
from pallas_kernels import lowering_for
from tests.poison import poisoned
from tests.unit.pools.hand_made import (
    SIZES,
    SPEC,
    copied,
    in_order,
    inputs,
    no_events,
    normal,
    on_lines,
    paged,
    views,
)


def loss(results):
    """A loss for many directions at once, with another factor for each element of the results."""
    return sum(jnp.sum(jnp.sin(y) * normal(5, *y.shape)) for y in results)


def loss_of_step(x, form, **options):
    """A loss of a step of one layer, from pools of NaN."""
    return loss(in_order(paged(on_lines(x, form, 0.0), poisoned(init_pools(SPEC)), form, **options)[1], form))


def close(got, wanted, atol=1e-5):
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=atol)


def layers(x, kind):
    """Two layers, whose second has the first's result as queries, one after the other or scanned."""
    now = views("padded")[1]

    def layer(carry, index):
        q, pools = carry
        k, v = x["new"] * (1 + 0.1 * index.astype(jnp.float32))
        pools = write(pools, 0, k, v, now, index=index)
        return (q + attend(q, pools, 0, now, index=index), pools), None

    carry = x["q"], x["pools"]
    step = jax.checkpoint(layer) if kind == "checkpoint" else layer
    if kind in ("unrolled", "without jit"):
        for index in range(2):
            carry, _ = step(carry, jnp.int32(index))
    else:
        carry, _ = lax.scan(step, carry, jnp.arange(2, dtype=jnp.int32))
    return [carry[0]]


def layers_inputs():
    x = inputs("kv")
    pools = jax.tree.map(lambda pool: normal(7, *pool.shape), init_pools(SPEC))
    return {"q": x["q"], "new": x["new"], "pools": pools}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scan", "checkpoint", "without jit"])
def test_layers_may_be_scanned_and_checkpointed(kind):
    """The gradients include those of the pools before them."""
    got, wanted = (jax.grad(lambda x, kind=kind: loss(layers(x, kind))) for kind in (kind, "unrolled"))
    close((got if kind == "without jit" else jax.jit(got))(layers_inputs()), jax.jit(wanted)(layers_inputs()))


@pytest.mark.slow
def test_gradients_through_a_decode_loop():
    """A prompt, a fork, and a scan whose steps extend, the first by a copy on write, then write, attend and commit."""
    sizes = {"num_blocks": 12, "max_seqs": 2, "max_length": 12, "block_size": 4, "dtype": "float32"}
    spec = kvjax.make_spec([kvjax.LayerSpec(1, 16)], **sizes)
    x = {"prompt": normal(9, 2, 2, 1, 16), "steps": normal(10, 5, 3, 2, 1, 1, 16)}  # K/V of 2 tokens; q, K/V of 5 steps

    def step(cache, qkv):
        q, k, v = qkv
        cache, _ = cache.extend(np.ones(2, bool))
        now = cache.view(1)
        pools = write(cache.pools, 0, k, v, now)
        tokens = now.positions + np.array([[100], [200]], np.int32)  # of equal rows one would get the other's blocks
        cache, _ = cache.replace(pools=pools).commit(tokens, now.num_tokens)
        return cache, attend(q, pools, 0, now)

    def looped(x):
        cache, _ = kvjax.Cache.create(spec).admit(0, np.arange(2, dtype=np.int32), 2)
        k, v = jnp.stack([x["prompt"], x["prompt"]], axis=1)
        now = cache.view(np.array([2, 0], np.int32), 2)
        cache = cache.replace(pools=write(poisoned(cache.pools), 0, k, v, now))
        cache, _ = cache.commit(np.tile(np.arange(2, dtype=np.int32), (2, 1)), now.num_tokens)
        cache, _ = cache.fork(0, 1)
        _, out = lax.scan(step, cache, x["steps"])
        return [out[:, :, 0, 0]]

    def plain(x):
        kv = [jnp.broadcast_to(x["prompt"][:, :, None, 0], (2, 2, 2, 16)), x["steps"][:, 1:, :, 0, 0].swapaxes(0, 1)]
        keys, values = jnp.concatenate(kv, axis=1)  # [T, R, D]
        score = jnp.einsum("crd,trd->crt", x["steps"][:, 0, :, 0, 0], keys) / 4
        seen = np.arange(7)[None] <= 2 + np.arange(5)[:, None]
        return [jnp.einsum("crt,trd->crd", jax.nn.softmax(jnp.where(seen[:, None], score, -jnp.inf)), values)]

    close(jax.jit(jax.grad(lambda x: loss(looped(x))))(x), jax.grad(lambda x: loss(plain(x)))(x))


def test_a_gradient_follows_the_copies():
    """A copied block has the gradients of both copies, an overwritten one has none."""
    pools, events = layers_inputs()["pools"], no_events(copied([3, 3, 11], [5, 0, 2]))
    factors = jax.tree.map(lambda x: normal(8, *x.shape), pools.arrays)

    def total(pools):
        after = apply(pools, events)
        return sum(jnp.vdot(*pair) for pair in zip(*map(jax.tree.leaves, (after.arrays, factors)), strict=True))

    for got, factor in zip(jax.jit(jax.grad(total))(pools).arrays[0], factors[0], strict=True):
        wanted = np.array(factor)
        wanted[3] += wanted[5] + wanted[0]
        wanted[11] += wanted[2]
        wanted[[5, 0, 2]] = 0
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["kv", "rope"])
def test_rounding_has_no_derivative(dtype, kind):
    """The derivative of quantised K/V is refused; q has one over the cached K/V."""
    x, now = inputs(kind), views("padded")[1]
    spec = kvjax.make_spec([kvjax.LayerSpec(2, 16)], **SIZES | {"dtype": dtype})

    def total(q, kv):
        pools = init_pools(spec)
        if kind == "rope":
            q, pools = rope_write(pools, 0, q, *kv, tuple(lax.stop_gradient(x["angles"])), now)
        else:
            pools = write(pools, 0, *kv, now)
        return jnp.sum(attend(q, pools, 0, now)[3])

    name = {"kv": "append_kv", "rope": "rope_append"}[kind]
    with pytest.raises(NotImplementedError, match=f"{name}: got a derivative of rounding to {dtype}, wanted"):
        jax.jit(jax.grad(total, argnums=1))(x["q"], x["new"])
    if kind == "kv":
        got = jax.jit(jax.grad(lambda q: total(q, lax.stop_gradient(x["new"] * q[0, 0, 0, 0]))))(x["q"])
        assert np.all(np.isfinite(got)) and np.any(got[3] != 0) and not np.any(got[:3])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("implementation", ["triton", None])
def test_on_a_gpu_xla_computes_the_derivative_and_a_named_kernel_the_result(implementation):
    chip = AbstractDevice(device_kind="NVIDIA A100", num_cores=108, platform="gpu")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs("kv"))
    gradient = jax.value_and_grad(functools.partial(loss_of_step, implementation=implementation))
    for form, kernel in (("decode", "decode_attention"), ("padded", "prefill_attention")):
        views(form)  # made here, not on the abstract GPU
        mesh = AbstractMesh((1,), ("x",), abstract_device=chip)
        with lowering_for("cuda"), jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(functools.partial(gradient, form=form)).trace(shapes)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        calls = [text.count(f'name = "{name}"') for name in ("append_kv", kernel)]
        assert calls == ([2, 1] if implementation else [0, 0])
        assert "stablehlo.scatter" in text and "stablehlo.while" not in text


def test_a_named_kernel_that_cannot_serve_does_not_fall_back():
    with pytest.raises(NotImplementedError):
        jax.jit(jax.grad(functools.partial(loss_of_step, form="decode", implementation="triton")))(inputs("kv"))
