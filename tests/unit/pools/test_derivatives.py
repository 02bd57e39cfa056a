# SPDX-License-Identifier: Apache-2.0
"""Derivatives of write, attend and apply against those of dense attention, under jax's transformations."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh

import kvjax
from kvjax.gpu import lowering_for
from kvjax.pools.attention import attend
from kvjax.pools.device import apply, init_pools, write
from kvjax.pools.views import mixed, ragged, view
from tests.mesh import AUTO, EXPLICIT, mesh_of
from tests.poison import poisoned
from tests.unit.pools.hand_made import COMMITTED, SPEC, TABLE, copied, hand_made_state, no_events

KV_HEADS, GROUP, WIDTH = SPEC.groups[0].pools[0].kv_heads, 2, 16
FORMS = {  # the view, and its number of tokens of each row
    "decode": (lambda state: view(state, [1, 0, 0, 1], 1), [1, 0, 0, 1]),
    "padded": (lambda state: view(state, [2, 0, 0, 4], 4), [2, 0, 0, 4]),
    "ragged": (lambda state: ragged(state, [2, 0, 0, 4], 8), [2, 0, 0, 4]),
    "mixed": (lambda state: mixed(state, [True, False, False, False], [3, -1], [4, 1], 6), [1, 0, 0, 4]),
}
OPTIONS = {"plain": {}, "all": {"window": 5, "soft_cap": 1.5, "scale": 0.4, "sinks": True}}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs():
    """K/V of the committed tokens and of up to four more in each row, their queries, and sinks."""
    kv = [normal(i, 2, 4, count, KV_HEADS, WIDTH) for i, count in enumerate((max(COMMITTED), 4))]
    heads = KV_HEADS * GROUP
    return {"past": kv[0], "new": kv[1], "q": normal(2, 4, 4, heads, WIDTH), "sinks": normal(3, heads)}


@functools.cache
def views(form):
    """The view of the committed tokens, and that of the tokens after them."""
    with jax.ensure_compile_time_eval():
        make = jax.jit(lambda past, now: (view(past, COMMITTED, max(COMMITTED)), FORMS[form][0](now)))
        return make(hand_made_state([0] * 4), hand_made_state())


def tokens_of(now):
    """The tokens of a view: their (line, position) in it, and their (row, number) among the new ones."""
    slots, found = np.asarray(now.slots[0]), []
    for line, position in np.argwhere(slots < SPEC.groups[0].num_blocks * 4):
        block, offset = divmod(int(slots[line, position]), 4)
        row, column = np.argwhere(np.asarray(TABLE) == block)[0]
        found.append((line, position, row, column * 4 + offset - COMMITTED[row]))
    line, position, row, number = np.asarray(found).T
    return (line, position), (row, number)


def paged(x, form, options, layer=2, index=None, pools=None, **more):
    """The attention of a view's tokens, and its log-sum-exp, in the order of rows."""
    past, now = views(form)
    at, of = tokens_of(now)
    zeros = lambda x: jnp.zeros((*now.positions.shape, *x.shape[2:]))  # noqa: E731
    scatter = functools.partial(jax.tree.map, lambda x: zeros(x).at[at].set(x[of]))
    pools = poisoned(init_pools(SPEC)) if pools is None else pools
    pools = write(pools, layer, *x["past"], past, index=index, **more)
    pools = write(pools, layer, *map(scatter, x["new"]), now, index=index, **more)
    options = options | {"sinks": x["sinks"]} if options.get("sinks") else options
    result = attend(scatter(x["q"]), pools, layer, now, index=index, return_lse=True, **options, **more)
    order = np.lexsort(of[::-1])
    return [x[at][order] for x in result]


def dense(x, form, options):
    """The same as `paged`, without a cache."""
    out = []
    for row, count in enumerate(FORMS[form][1]):
        if not count:
            continue
        kv = jnp.concatenate([x["past"][:, row, : COMMITTED[row]], x["new"][:, row, :count]], axis=1)
        keys, values = jnp.repeat(kv, GROUP, axis=2)
        score = jnp.einsum("cqd,tqd->qct", x["q"][row, :count], keys) * options.get("scale", WIDTH**-0.5)
        if cap := options.get("soft_cap"):
            score = cap * jnp.tanh(score / cap)
        distance = COMMITTED[row] + np.arange(count)[:, None] - np.arange(kv.shape[1])[None]
        score = jnp.where((distance >= 0) & (distance < options.get("window", 99)), score, -jnp.inf)
        if options.get("sinks"):
            score = jnp.concatenate([score, jnp.broadcast_to(x["sinks"][:, None, None], (*score.shape[:2], 1))], axis=2)
        weight = jax.nn.softmax(score, axis=-1)[:, :, : kv.shape[1]]
        out.append((jnp.einsum("qct,tqd->cqd", weight, values), jax.nn.logsumexp(score, axis=-1).T))
    return [jnp.concatenate(parts) for parts in zip(*out, strict=True)]


def loss(function, x, *args, **options):
    """A loss for many directions at once, with another factor for each element of the result."""
    return sum(jnp.sum(jnp.sin(y) * normal(5, *y.shape)) for y in function(x, *args, **options))


def close(got, wanted, atol=1e-5):
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("decode", "plain"),
        pytest.param("padded", "plain", marks=pytest.mark.long),
        *[pytest.param(form, "all", marks=pytest.mark.long) for form in ("decode", "padded", "ragged", "mixed")],
    ],
)
def test_gradients_are_those_of_dense_attention(form, name):
    """The gradients go through two writes into pools of NaN, to q, old and new K/V, and sinks; and forwards, too."""
    x, options = inputs(), OPTIONS[name]
    wanted = jax.jit(jax.grad(lambda x: loss(dense, x, form, options)))(x)
    of_pages = functools.partial(loss, paged, form=form, options=options)
    close(jax.jit(jax.grad(of_pages))(x), wanted)
    direction = jax.tree.map(jnp.cos, x)
    _, tangent = jax.jit(lambda x: jax.jvp(of_pages, (x,), (direction,)))(x)
    close(tangent, sum(jnp.vdot(*pair) for pair in zip(*map(jax.tree.leaves, (wanted, direction)), strict=True)), 1e-4)


def layers(x, kind):
    """Two layers, whose second has the first's result as queries, one after the other or scanned."""
    now = views("padded")[1].replace(spec=x["pools"].spec)  # which may have only the first of the pools

    def layer(carry, index):
        q, pools = carry
        k, v = x["new"] * (1 + 0.1 * index.astype(jnp.float32))
        pools = write(pools, 0, k, v, now, index=index)
        return (q + attend(q, pools, 0, now, index=index), pools), None

    carry = x["q"], x["pools"]
    step = jax.checkpoint(layer) if kind == "checkpoint" else layer
    if kind == "unrolled":
        for index in range(2):
            carry, _ = step(carry, jnp.int32(index))
    else:
        carry, _ = lax.scan(step, carry, jnp.arange(2, dtype=jnp.int32))
    return [carry[0]]


def layers_inputs():
    x = inputs()
    pools = jax.tree.map(lambda pool: normal(7, *pool.shape), init_pools(SPEC))
    return {"q": x["q"], "new": x["new"], "pools": pools}


@functools.cache
def layers_gradients():
    return jax.jit(jax.grad(lambda x: loss(layers, x, "unrolled")))(layers_inputs())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["scan", "checkpoint"])
def test_layers_may_be_scanned_and_checkpointed(kind):
    """The gradients include those of the pools before them."""
    close(jax.jit(jax.grad(lambda x: loss(layers, x, kind)))(layers_inputs()), layers_gradients())


@pytest.mark.long
def test_gradients_without_jit():
    close(jax.grad(lambda x: loss(layers, x, "unrolled"))(layers_inputs()), layers_gradients())


@pytest.mark.long
def test_gradients_of_several_caches_at_once():
    x = layers_inputs()
    several = jax.tree.map(lambda x: jnp.stack([x, -x]), x)
    got = jax.jit(jax.vmap(jax.grad(lambda x: loss(layers, x, "unrolled"))))(several)
    close(jax.tree.map(lambda x: x[0], got), layers_gradients())


@pytest.mark.long
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_gradients_with_heads_on_two_devices(kind):
    with mesh_of(1, 2, kind) as mesh:
        spec = dataclasses.replace(SPEC, groups=(dataclasses.replace(SPEC.groups[0], pools=SPEC.groups[0].pools[:1]),))
        x, pools = layers_inputs(), init_pools(spec, mesh=mesh, heads="heads")
        x["pools"] = pools.replace(arrays=jax.device_put(((x["pools"].arrays[0][0],),), pools.arrays[0][0].sharding))
        got = jax.jit(jax.grad(lambda x: loss(layers, x, "unrolled")))(x)
    wanted = layers_gradients()
    close((got["q"], got["new"]), (wanted["q"], wanted["new"]))
    close(got["pools"].arrays[0][0], wanted["pools"].arrays[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_gradients_with_blocks_on_two_devices(kind):
    with mesh_of(1, 2, kind, ("heads", "context")) as mesh:
        spec = dataclasses.replace(SPEC, groups=(dataclasses.replace(SPEC.groups[0], pools=SPEC.groups[0].pools[:1]),))
        x, pools = layers_inputs(), init_pools(spec, mesh=mesh, heads="heads", context="context")
        context, (array,) = pools.context(0), pools.arrays[0]
        size = array.shape[4]
        parts = dataclasses.replace(context, size=size // 2).ordered(x["pools"].arrays[0][0])  # as the devices have it
        x["pools"] = pools.replace(arrays=((jax.device_put(parts, array.sharding),),))
        got = jax.jit(jax.grad(lambda x: loss(layers, x, "unrolled")))(x)
        of_pool = context.ordered(np.asarray(got["pools"].arrays[0][0]))
    wanted = layers_gradients()
    close((got["q"], got["new"]), (wanted["q"], wanted["new"]))
    close(of_pool, wanted["pools"].arrays[0][0])


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

    close(jax.jit(jax.grad(lambda x: loss(looped, x)))(x), jax.grad(lambda x: loss(plain, x))(x))


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
def test_rounding_has_no_derivative(dtype):
    """The derivative of quantised K/V is refused; q has one over the cached K/V."""
    x, now = inputs(), views("padded")[1].replace(spec=None)  # it is of a cache of float32
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(2, 16)], num_blocks=12, max_seqs=4, max_length=20, block_size=4, dtype=dtype
    )

    def total(q, kv):
        pools = write(init_pools(spec), 0, *kv, now)
        return jnp.sum(attend(q, pools, 0, now)[3])

    with pytest.raises(NotImplementedError, match=f"append_kv: got a derivative of rounding to {dtype}, wanted"):
        jax.jit(jax.grad(total, argnums=1))(x["q"], x["new"])
    got = jax.jit(jax.grad(lambda q: total(q, lax.stop_gradient(x["new"] * q[0, 0, 0, 0]))))(x["q"])
    assert np.all(np.isfinite(got)) and np.any(got[3] != 0) and not np.any(got[:3])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("implementation", ["triton", None])
def test_on_a_gpu_xla_computes_the_derivative_and_a_named_kernel_the_result(implementation):
    chip = AbstractDevice(device_kind="NVIDIA A100", num_cores=108, platform="gpu")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs())
    gradient = jax.value_and_grad(functools.partial(loss, paged, options={}, implementation=implementation))
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
        jax.jit(jax.grad(functools.partial(loss, paged, form="decode", options={}, implementation="triton")))(inputs())


@pytest.mark.long
def test_a_gradient_takes_no_copy_of_the_pool_per_layer():
    """Temporaries are two or three arrays of the pool's size, for any number of layers."""
    sizes = {"num_blocks": 256, "max_seqs": 1, "max_length": 32, "block_size": 16, "dtype": "float32"}
    cache = kvjax.Cache.create(kvjax.make_spec([kvjax.LayerSpec(1, 64)] * 6, **sizes))
    now, q, ((pool,),) = cache.view(4), jnp.zeros((1, 4, 2, 64)), cache.pools.arrays

    def total(q, pools, now):
        for layer in range(6):
            pools = write(pools, layer, q[:, :, :1], q[:, :, 1:], now)
            q = q + attend(q, pools, layer, now)
        return jnp.sum(q)

    memory = jax.jit(jax.grad(total)).lower(q, cache.pools, now).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3.5 * pool.nbytes
