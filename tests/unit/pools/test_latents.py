# SPDX-License-Identifier: Apache-2.0
"""Latents through the front door: one array a token, whose first columns are V, and all query heads read it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax import LayerSpec
from kvjax.pools.attention import attend
from kvjax.pools.device import Pools, apply, init_pools, write
from kvjax.pools.views import mixed, ragged, view
from tests.kernels.attention import oracle
from tests.mesh import AUTO, EXPLICIT, collectives, mesh_of
from tests.poison import poisoned
from tests.unit.pools.hand_made import COMMITTED, TABLE, copied, hand_made_state, no_events

WIDTH, VALUES, HEADS = 24, 16, 4
LAYERS = [LayerSpec.latent(WIDTH, VALUES), LayerSpec(2, 16), LayerSpec.latent(WIDTH, VALUES)]
SIZES = {"num_blocks": 12, "max_seqs": 4, "max_length": 20, "block_size": 4}
FORMS = {
    "decode": lambda state: view(state, [1, 0, 0, 1], 1),
    "padded": lambda state: view(state, [2, 0, 0, 4], 4),
    "ragged": lambda state: ragged(state, [2, 0, 0, 4], 8),
    "mixed": lambda state: mixed(state, [True, False, False, False], [3, -1], [4, 1], 6),
}


def spec_of(layers=LAYERS, dtype="float32", **sizes):
    return kvjax.make_spec(layers, dtype=dtype, **SIZES | sizes)


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@functools.cache
def views(form):
    """The views of the committed tokens, and of those after them; made for a cache of other layers."""
    with jax.ensure_compile_time_eval():
        states = hand_made_state([0] * 4), hand_made_state()
        return [now.replace(spec=None) for now in (view(states[0], COMMITTED, max(COMMITTED)), FORMS[form](states[1]))]


def tokens_of(now):
    """The indices of a view's tokens, and the (row, position) of each."""
    slots = np.asarray(now.slots[0])
    index = np.nonzero(slots < 12 * 4)
    row = [int(np.argwhere(np.asarray(TABLE) == slot // 4)[0, 0]) for slot in slots[index]]
    return index, (np.asarray(row), np.asarray(now.positions)[index])


def paged(text, q, form, layer, pools, **options):
    """The attention of a view's tokens in order, after both views' latents [4, 20, D] were written; and the pools."""
    for now in views(form):
        at, of = tokens_of(now)
        new = jnp.full((*now.positions.shape, 1, WIDTH), jnp.nan).at[at].set(text[of][:, None])
        pools = write(pools, layer, new, None, now)
    queries = jnp.zeros((*now.positions.shape, HEADS, WIDTH)).at[at].set(q[of])
    return attend(queries, pools, layer, now, **options)[at], pools


def dense(text, q, form, **options):
    """The same by the oracle."""
    row, position = tokens_of(views(form)[1])[1]
    return np.concatenate([
        oracle(q[r, p][None], text[r, : p + 1, None], text[r, : p + 1, None, :VALUES], p, **options)[0]
        for r, p in zip(row, position, strict=True)
    ])  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "layer", "dtype"),
    [
        ("decode", 2, "float32"), ("mixed", 0, "float32"),
        pytest.param("padded", 0, "int8", marks=pytest.mark.long),
        pytest.param("ragged", 2, "bfloat16", marks=pytest.mark.long),
        pytest.param("mixed", 2, "int8", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_attend_sees_the_latents_that_were_written_and_nothing_else(form, layer, dtype):
    """From NaN pools, through two views; and the K/V beside them stay as they are."""
    text, q = numbers(0, 4, 20, WIDTH), numbers(1, 4, 20, HEADS, WIDTH)
    pools = poisoned(init_pools(spec_of(dtype=dtype)))
    assert [array.shape[1:] for array in pools.arrays[0]] == [(2, 1, 1, 4, WIDTH), (1, 2, 2, 4, 16)]
    options = {"scale": 0.3, "window": 7}
    got, after = jax.jit(functools.partial(paged, form=form, layer=layer, **options))(text, q, pools=pools)
    atol = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.05}[dtype]
    np.testing.assert_allclose(got, dense(text, q, form, **options), atol=atol)
    chex.assert_trees_all_equal(after.arrays[0][1], pools.arrays[0][1])


def test_latents_take_half_the_bytes_of_keys_that_are_values_too():
    latents, kv = (spec_of([layer] * 3).groups[0] for layer in (LAYERS[0], LayerSpec(1, WIDTH)))
    assert 2 * latents.block_bytes(4) == kv.block_bytes(4)
    assert sum(x.nbytes for x in init_pools(spec_of(LAYERS[:1], "int8")).arrays[0]) == 13 * 4 * WIDTH


@pytest.mark.long
@pytest.mark.parametrize("form", ["decode", "mixed"])
def test_gradients_are_those_of_dense_attention(form):
    """With respect to the latents, through K and V at once, and to q."""
    text, q, pools = numbers(0, 4, 20, WIDTH), numbers(1, 4, 20, HEADS, WIDTH), poisoned(init_pools(spec_of()))
    row, position = tokens_of(views(form)[1])[1]
    factors = numbers(2, row.size, HEADS, VALUES)

    def plain(text, q):
        score = jnp.einsum("nhd,ntd->nht", q[row, position], text[row]) * WIDTH**-0.5
        score = jnp.where(np.arange(20)[None, None] <= position[:, None, None], score, -jnp.inf)
        return jnp.vdot(jnp.einsum("nht,ntd->nhd", jax.nn.softmax(score), text[row, :, :VALUES]), factors)

    wanted = jax.grad(plain, (0, 1))(text, q)
    got = jax.jit(jax.grad(lambda *x: jnp.vdot(paged(*x, form, 0, pools)[0], factors), (0, 1)))(text, q)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_copies_take_latents_and_their_scales_along():
    pools = jax.tree.map(lambda x: numbers(x.ndim, *x.shape).astype(x.dtype), init_pools(spec_of(dtype="int8")))
    after = jax.jit(apply)(pools, no_events(copied([3, 11], [5, 0])))
    for got, before in zip(jax.tree.leaves(after), jax.tree.leaves(pools), strict=True):
        np.testing.assert_array_equal(got, before.at[jnp.array([5, 0])].set(before[jnp.array([3, 11])]))


def test_blocks_of_latents_move_to_the_host_and_back():
    tiered = kvjax.tiers.TieredCache.create(spec_of(dtype="int8", num_host_blocks=2))
    pools = jax.tree.map(lambda x: numbers(x.ndim, *x.shape).astype(x.dtype), tiered.pools)
    before = jax.tree.map(np.asarray, pools)
    pools, host = kvjax.tiers.move(pools, tiered.host, kvjax.tiers.Transfer(np.array([[0, 3, 1, 3, 13]], np.int32)))
    pools, _ = kvjax.tiers.move(pools, host, kvjax.tiers.Transfer(np.array([[0, 3, 2, 13, 7]], np.int32)))
    for got, wanted in zip(jax.tree.leaves(pools), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got[7], wanted[3])


def test_write_and_attend_refuse():
    recurrent = LayerSpec.recurrent({"state": (2, 3)})
    pools, (now, _) = init_pools(spec_of([*LAYERS, recurrent], partial_reuse=False)), views("decode")
    latent, kv = jnp.zeros((4, 10, 1, WIDTH)), jnp.zeros((4, 10, 2, 16))
    now = now.replace(tables=now.tables * 2, slots=now.slots * 2)
    for call, message in [
        (
            lambda: write(pools, 0, latent, latent, now),
            r"v: got shape \(4, 10, 1, 24\), wanted None: layer 0 has laten",
        ),
        (lambda: write(pools, 1, kv, None, now), r"v: got None, wanted \(4, 10, 2, 16\) for this view and layer 1"),
        (
            lambda: write(pools, 0, latent[..., :16], None, now),
            r"k: got shape \(4, 10, 1, 16\), wanted \(4, 10, 1, 24\)",
        ),
        (lambda: write(pools, 0, kv, None, now), r"k: got shape \(4, 10, 2, 16\), wanted \(4, 10, 1, 24\)"),
        (
            lambda: write(pools, 3, latent, None, now),
            "layer: got 3, which is recurrent, wanted one with K/V or latents",
        ),
        (lambda: attend(latent, pools, 3, now), "layer: got 3, which is recurrent"),
        (lambda: attend(kv, pools, 0, now), r"q: got shape \(4, 10, 2, 16\), wanted \[4, 10, a multiple of 1, 24\]"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def test_steps_update_latents_in_place():
    """In a loop over layers: temporaries under 5 % of the pool, which is the donated one."""
    layers = 4
    spec = spec_of([LayerSpec.latent(64, 48)] * layers, num_blocks=8191, max_seqs=16, max_length=8192, block_size=16)
    pools, state = jax.eval_shape(lambda: init_pools(spec)), jax.eval_shape(lambda: kvjax.init(spec))

    def step(pools, q, state, records):
        pools, now = apply(pools, no_events(records)), view(state, 1)

        def through_layer(carry, layer):
            pools, q = carry
            pools = write(pools, layer, q[:, :, :1], None, now)
            return (pools, q.at[..., :48].add(attend(q, pools, layer, now))), None

        return lax.scan(through_layer, (pools, q), jnp.arange(layers, dtype=jnp.int32))[0]

    args = jax.ShapeDtypeStruct((16, 1, 8, 64), jnp.float32), state, jax.ShapeDtypeStruct((256, 9), jnp.int32)
    memory = jax.jit(step, donate_argnums=0).lower(pools, *args).compile().memory_analysis()
    pool_bytes = pools.arrays[0][0].size * 4
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes


def write_attend_copy(pools, state, q, latents, kv, sinks):
    now, out = view(state, 6), []
    for layer, new in enumerate((latents, kv, latents)):
        pools = write(pools, layer, new, None if layer != 1 else new, now)
        out.append(attend(q[..., : new.shape[-1]], pools, layer, now, sinks=sinks, window=4))
    return apply(pools, no_events(copied([2], [4]))), out


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float32", AUTO), pytest.param("int8", EXPLICIT, marks=pytest.mark.long)],
)
def test_each_device_has_all_latents_and_its_query_heads(dtype, kind):
    """Beside K/V whose heads are divided; no collective, and what comes of it is what one device computes."""
    args = numbers(1, 4, 6, HEADS, WIDTH), numbers(2, 4, 6, 1, WIDTH), numbers(3, 4, 6, 2, 16), numbers(4, HEADS)
    alone = kvjax.Cache.create(spec_of(dtype=dtype))
    alone = alone.replace(state=admitted(alone.state))
    pools, wanted = jax.jit(write_attend_copy)(alone.pools, alone.state, *args)
    with mesh_of(1, 2, kind) as mesh:
        cache = kvjax.Cache.create(spec_of(dtype=dtype), mesh=mesh, heads="heads")
        cache = cache.replace(state=admitted(cache.state))
        program = jax.jit(write_attend_copy, donate_argnums=0).lower(cache.pools, cache.state, *args).compile()
        assert not collectives(program)
        got, seen = program(cache.pools, cache.state, *args)
        latents, kv = ({shard.data.shape[3] for shard in array.addressable_shards} for array in got.arrays[0])
        assert latents == {1} and kv == {1} and got.arrays[0][1].shape[3] == 2
        queries = functools.partial(attend, pools=got, layer=0, view=view(cache.state, 6))
        with pytest.raises(
            ValueError, match=r"^q: got 3 heads, wanted a number of them that the 2 devices of mesh axis"
        ):
            jax.eval_shape(queries, args[0][:, :, :3])
    for leaf, like in zip(jax.tree.leaves(got), jax.tree.leaves(pools), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(like))
    chex.assert_trees_all_close(jax.tree.map(np.asarray, seen), jax.tree.map(np.asarray, wanted), atol=2e-6)


def admitted(state):
    """Rows 0 and 3 with 6 tokens to compute."""
    (group,) = state.groups
    seqs = state.seqs.replace(length=jnp.array([6, 0, 0, 6]), committed=jnp.zeros(4, jnp.int32))
    table = jnp.asarray(TABLE, jnp.int32)
    return state.replace(groups=(group.replace(table=table),), seqs=seqs)


def test_a_pool_of_latents_alone_takes_a_traced_layer():
    pools = init_pools(spec_of([LAYERS[0]] * 2))
    assert isinstance(pools, Pools)
    now, latent = views("decode")[0], numbers(0, 4, 10, 1, WIDTH)
    traced = jax.jit(lambda pools, layer: write(pools, layer, latent, None, now))(pools, 1)
    chex.assert_trees_all_equal(traced, jax.jit(write, static_argnums=1)(pools, 1, latent, None, now))
