# SPDX-License-Identifier: Apache-2.0
"""Pools whose blocks are divided among devices by token: the same attention and metadata, and no program sends K/V."""

import functools

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
import pallas_kernels
from kvjax import LayerSpec
from kvjax.pools import host as host_pool
from kvjax.pools.host import arrays_of
from tests.mesh import AUTO, EXPLICIT, collectives, mesh_of, sent_shapes
from tests.poison import poisoned
from tests.unit.pools.hand_made import copied, no_events

PLAIN = LayerSpec(2, 16)
AXES = {"heads": "heads", "context": "context"}
OPTIONS = {"num_blocks": 8, "max_seqs": 3, "max_length": 32, "block_size": 8, "dtype": "float32"}
MESHES = [(1, 2, AUTO), (2, 2, EXPLICIT), (2, 4, AUTO), (1, 8, AUTO)]
meshes = functools.partial(mesh_of, names=("heads", "context"))


def spec_of(layer=PLAIN, **options):
    return kvjax.make_spec([layer] * 2, **OPTIONS | options)


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def by_token(pools):
    """The arrays of pools, numpy's, less the scratch row, with the tokens of each block in order."""
    found = []
    for number, (arrays, scales) in enumerate(zip(pools.arrays, pools.scales or pools.arrays, strict=True)):
        for leaf in jax.tree.leaves((arrays, scales if pools.scales else None)):
            context = pools.context(number)
            found.append(np.asarray(leaf) if context is None else context.ordered(np.asarray(leaf)))
    return [leaf[:-1].astype(np.float32) for leaf in found]


def compute(cache, tokens, count, q, kv, sinks, mixed=False):
    """Writes the K/V of the rows' next tokens in both layers, attends to all, and commits."""
    pools, out, rows = cache.pools, [], np.arange(tokens.shape[0], dtype=np.int32)
    if mixed:  # the first row decodes, the second has a chunk
        view = cache.mixed(rows == 0, np.array([1], np.int32), count[1:2], tokens.shape[1] - tokens.shape[0])
    else:
        view = cache.view(count, tokens.shape[1])
    for layer in range(2):
        pools = kvjax.write(pools, layer, kv[0], None if kv.shape[0] == 1 else kv[1], view)
        y, lse = kvjax.attend(q, pools, layer, view, sinks=sinks, return_lse=True, scale=0.3, soft_cap=8.0)
        out.append((y, lse))
        if kv.shape[3] > 1:  # as in a model the next layer's depend on this one's values
            kv = kv + 0.1 * y.reshape(*y.shape[:2], kv.shape[3], -1, 16)[None, :, :, :, 0]
    cache = cache.replace(pools=pools)
    if mixed:
        return cache, out, view
    cache, _ = cache.commit(tokens, count)
    return cache, out, view


def inputs(seed, rows, length, parts=2, kv_heads=2):
    return numbers(seed, rows, length, 8, 16), numbers(seed + 1, parts, rows, length, kv_heads, 16), numbers(0, 8)


def history(cache, kv_heads=2, parts=2):
    """Prompts of three lengths in chunks, a fork, copies on write.

    Returns the cache, each step's attention, and the metadata after each verb.
    """
    step, seen, states = jax.jit(compute, donate_argnums=0), [], []

    def done(cache, events=None):
        assert events is None or events.ok.all()
        kvjax.check(cache.state)
        states.append(jax.tree.map(np.array, cache.state))
        return cache

    cache = cache.replace(pools=poisoned(cache.pools))
    lengths = np.array([13, 9, 1], np.int32)
    tokens = np.arange(39, dtype=np.int32).reshape(3, 13)
    cache = done(*jax.jit(kvjax.Cache.admit, donate_argnums=0)(cache, np.arange(3), tokens, lengths))
    for start, length in ((0, 7), (7, 6), (13, 1), (14, 1)):
        if length == 1:
            cache = done(*jax.jit(kvjax.Cache.extend, donate_argnums=0)(cache, np.ones(3, bool)))
        count = np.clip(lengths - start, 0, length) if length > 1 else np.ones(3, np.int32)
        text = tokens[:, start : start + length] if length > 1 else tokens[:, start - 13 : start - 12] + 50
        cache, out, view = step(cache, text, count, *inputs(length + start, 3, length, parts, kv_heads))
        done(cache)
        real = np.arange(length)[None, :, None] < np.asarray(view.num_tokens)[:, None, None]
        seen += [(np.asarray(y), np.where(real, lse, 0)) for y, lse in out]
        if start == 7:
            cache = done(*jax.jit(kvjax.Cache.release, donate_argnums=0)(cache, 2))
            cache = done(*jax.jit(kvjax.Cache.fork, donate_argnums=0)(cache, 0, 2))
    return cache, seen, states


def view_of(state, start, count):
    """The view of `count` tokens of the first row, after `start` ones that are committed."""
    length, committed = np.array([start + count, 0], np.int32), np.array([start, 0], np.int32)
    table = state.groups[0].table.at[0, :2].set(np.array([5, 2]))
    state = state.replace(
        seqs=state.seqs.replace(length=length, committed=committed), groups=(state.groups[0].replace(table=table),)
    )
    return kvjax.view(state, np.array([count, 0], np.int32), count)


def test_a_chunk_is_that_on_one_device():
    """Seven tokens, then a chunk of six after them, with NaN in all that is not theirs."""
    args = inputs(3, 2, 7)[1], *inputs(1, 2, 6)

    def run(cache, prompt, q, kv, sinks):
        pools = kvjax.write(poisoned(cache.pools), 1, *prompt, view_of(cache.state, 0, 7))
        view = view_of(cache.state, 7, 6)
        pools = kvjax.write(pools, 1, *kv, view)
        return pools, kvjax.attend(q, pools, 1, view, sinks=sinks, return_lse=True)

    alone, wanted = jax.jit(run)(kvjax.Cache.create(spec_of(max_seqs=2)), *args)
    with meshes(2, 4) as mesh:
        pools, seen = jax.jit(run)(kvjax.Cache.create(spec_of(max_seqs=2), mesh=mesh, **AXES), *args)
        for got, want in zip(by_token(pools), by_token(alone), strict=True):
            np.testing.assert_array_equal(got, want)
    for got, want in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(got[0], want[0], atol=2e-6)
    assert not np.any(seen[0][1])  # padding


@pytest.mark.parametrize(
    ("shape", "dtype", "layer"),
    [
        pytest.param(MESHES[1], "float32", PLAIN, marks=pytest.mark.slow),
        pytest.param(MESHES[0], "float32", PLAIN, marks=pytest.mark.slow),
        pytest.param(MESHES[2], "int8", PLAIN, marks=pytest.mark.slow),
        pytest.param(MESHES[1], "float8_e4m3fn", PLAIN, marks=pytest.mark.slow),
        pytest.param(MESHES[3], "float32", LayerSpec(1, 16), marks=pytest.mark.slow),
        pytest.param(MESHES[2], "float32", LayerSpec.latent(16, 16), marks=pytest.mark.slow),
        pytest.param(MESHES[1], "int8", LayerSpec.latent(16, 16), marks=pytest.mark.slow),
    ],
)
def test_a_history_is_that_on_one_device(shape, dtype, layer):
    spec, parts = spec_of(layer, dtype=dtype), 1 if layer.values else 2
    alone, wanted, states = history(kvjax.Cache.create(spec), layer.kv_heads, parts)
    with meshes(*shape) as mesh:
        cache, seen, found = history(kvjax.Cache.create(spec, mesh=mesh, **AXES), layer.kv_heads, parts)
        for leaf in jax.tree.leaves(cache.pools):
            (own,) = {shard.data.shape for shard in leaf.addressable_shards}
            assert own[4] == 8 // shape[1] and own[3] == (1 if layer.values else layer.kv_heads // shape[0])
        chex.assert_trees_all_equal(found, states)
        # K/V that depend on attention differ in their last bits; one step of int8 is a whole one.
        for got, want in zip(by_token(cache.pools), by_token(alone.pools), strict=True):
            close = np.isclose(got, want, rtol=0.1, atol=1.01 if dtype == "int8" else 1e-5, equal_nan=True)
            assert close.all()
    chex.assert_trees_all_close(seen, wanted, atol=2e-2 if dtype != "float32" else 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MESHES[2], MESHES[1]])
def test_a_mixed_step_is_that_on_one_device(shape):
    """A row that decodes and another's chunk on one axis, with NaN in all that is not theirs."""

    def prepared(cache):
        cache = cache.replace(pools=poisoned(cache.pools))
        tokens, lengths = np.arange(26, dtype=np.int32).reshape(2, 13), np.array([11, 13], np.int32)
        cache, _ = jax.jit(kvjax.Cache.admit)(cache, np.arange(2), tokens, lengths)
        first = np.array([10, 4, 0], np.int32)
        return jax.jit(compute)(cache, np.tile(tokens[0], (3, 1)), first, *inputs(3, 3, 13))[0]

    def run(cache):
        step = jax.jit(functools.partial(compute, mixed=True))
        cache, out, view = step(prepared(cache), np.zeros((3, 13), np.int32), np.array([1, 9, 0]), *inputs(5, 1, 13))
        assert np.asarray(view.num_tokens).tolist() == [1, 0, 0, 9]
        real = np.array([0, *range(3, 12)])
        return cache, [(np.asarray(y)[0], np.asarray(lse)[0, real]) for y, lse in out]

    alone, wanted = run(kvjax.Cache.create(spec_of()))
    with meshes(*shape) as mesh:
        cache, seen = run(kvjax.Cache.create(spec_of(), mesh=mesh, **AXES))
        for got, want in zip(by_token(cache.pools), by_token(alone.pools), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)
    chex.assert_trees_all_close(seen, wanted, atol=2e-6)


@pytest.mark.parametrize(
    "shape", [pytest.param((1, 4), marks=pytest.mark.long), pytest.param((2, 2), marks=pytest.mark.slow)]
)
def test_a_layer_sends_its_attention_and_verbs_send_nothing(shape):
    """One maximum of f32[T, Q] and one sum of f32[T, Q, D + 1] a layer; no copy of a pool."""
    with meshes(*shape) as mesh:
        cache = kvjax.Cache.create(spec_of(num_blocks=256), mesh=mesh, **AXES)
        args = np.zeros((3, 1), np.int32), np.ones(3, np.int32), *inputs(0, 3, 1)
        chunk = np.zeros((3, 6), np.int32), np.full(3, 6, np.int32), *inputs(0, 3, 6)
        programs = {
            "step": jax.jit(compute, donate_argnums=0).lower(cache, *args),
            "chunk": jax.jit(compute, donate_argnums=0).lower(cache, *chunk),
            "extend": jax.jit(kvjax.Cache.extend, donate_argnums=0).lower(cache, np.ones(3, bool)),
            "admit": jax.jit(kvjax.Cache.admit, donate_argnums=0).lower(cache, 0, np.arange(6, dtype=np.int32), 6),
        }
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pools)) // (shape[0] * shape[1])
        for name, program in programs.items():
            compiled, heads = program.compile(), 8 // shape[0]
            tokens = {"step": 3, "chunk": 18}.get(name)
            sent = [f"f32[{tokens},{heads}]", f"f32[{tokens},{heads},17]"] * 2 if tokens else []
            assert sorted(sent_shapes(compiled)) == sorted(sent), name
            assert collectives(compiled) == ({"all-reduce": 4} if tokens else {}), name
            memory = compiled.memory_analysis()
            assert memory.alias_size_in_bytes > own and memory.temp_size_in_bytes < own / 2, (name, memory)


@pytest.mark.slow
def test_queries_that_both_axes_divide_are_gathered_over_one():
    with meshes(2, 2) as mesh:
        cache, _ = kvjax.Cache.create(spec_of(), mesh=mesh, **AXES).admit(0, np.arange(6, dtype=np.int32), 6)
        q, kv, sinks = inputs(1, 3, 6)
        step = jax.jit(compute)
        args = np.zeros((3, 6), np.int32), np.array([6, 0, 0], np.int32)
        _, wanted, _ = step(cache, *args, q, kv, sinks)
        divided = jax.device_put(q, NamedSharding(mesh, P(None, None, ("heads", "context"))))
        compiled = step.lower(cache, *args, divided, kv, sinks).compile()
        _, seen, _ = compiled(cache, *args, divided, kv, sinks)
        assert collectives(compiled) == {"all-reduce": 4, "all-gather": 1}
    chex.assert_trees_all_close([y[0] for y, _ in seen], [y[0] for y, _ in wanted], atol=2e-6)


def test_blocks_leave_and_come_with_their_tokens_in_order():
    """From one device to a mesh and back, as stores do; a group with windows has whole blocks."""
    layers = [LayerSpec(2, 16), LayerSpec(2, 16, window=6)]
    spec = kvjax.make_spec(layers, **OPTIONS | {"dtype": "int8"})
    alone = kvjax.init_pools(spec)
    filled = jax.tree.map(lambda x: (10 * numbers(x.ndim, *x.shape)).astype(x.dtype), alone)
    rows, counts = [np.array([5, 0, 2, 8], np.int32)] * 2, [np.int32(3)] * 2
    staged = jax.jit(kvjax.stores.gather)(filled, rows)
    with meshes(2, 2) as mesh:
        pools = kvjax.init_pools(spec, mesh=mesh, **AXES)
        assert pools.context(0) and pools.context(1) is None
        assert {leaf.addressable_shards[0].data.shape[4] for leaf in pools.arrays[0]} == {4}
        assert {leaf.addressable_shards[0].data.shape[4] for leaf in pools.arrays[1]} == {8}
        pools = jax.jit(kvjax.stores.scatter, donate_argnums=0)(pools, staged, rows, counts)
        for got, want in zip(by_token(pools), by_token(filled), strict=True):
            np.testing.assert_array_equal(got[[5, 0, 2]], want[[5, 0, 2]])
        again = jax.jit(kvjax.stores.gather)(pools, rows)
        copies = jax.jit(kvjax.apply)(pools, no_events(copied([2], [4])))
        for got in by_token(copies)[:2]:
            np.testing.assert_array_equal(got[4], got[2])
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(staged), strict=True):
        np.testing.assert_array_equal(np.asarray(got)[:3], np.asarray(want)[:3])


def test_blocks_move_to_the_host_and_back():
    with meshes(2, 4) as mesh:
        tiered = kvjax.tiers.TieredCache.create(spec_of(num_host_blocks=8, dtype="int8"), mesh=mesh, **AXES)
        before = jax.tree.map(lambda x: numbers(x.ndim, *x.shape).astype(x.dtype), tiered.pools)
        pools = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), before, tiered.pools)
        records = np.array([[0, b, 1, b, 8 + b] for b in range(5)], np.int32)
        pools, host = kvjax.tiers.move(pools, tiered.host, kvjax.tiers.Transfer(records))
        for leaf in jax.tree.leaves(host):
            assert leaf.sharding.memory_kind == "pinned_host" and leaf.addressable_shards[0].data.shape[4] == 2
        one, (of_device, of_host) = np.zeros((2, 1), np.int32), (arrays_of(tier, 0) for tier in (pools, host))
        for target, source in (of_host, of_device), (of_device, of_host):
            assert not collectives(host_pool._copy.lower(target, source, one).compile())
        back = records[:, [0, 1, 2, 4, 3]] + np.array([0, 0, 0, 0, 1], np.int32)
        pools, _ = kvjax.tiers.move(pools, host, kvjax.tiers.Transfer(back))
        for got, want in zip(jax.tree.leaves(pools), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(np.asarray(got)[1:6], np.asarray(want)[:5])


def test_a_plan_counts_what_one_device_has():
    shape = {"max_seqs": 2, "max_length": 64, "budget_bytes": 400_000, "block_size": 8, "dtype": "int8"}
    layers = [LayerSpec(4, 16), LayerSpec(4, 16, window=9), LayerSpec.latent(16, 8)]
    with meshes(2, 4) as mesh:
        planned = kvjax.plan(layers, mesh=mesh, **AXES, **shape)
        cache = kvjax.Cache.create(planned.spec, mesh=mesh, **AXES)
        own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
        assert own == planned.ledger.used_bytes <= 400_000
        heads = kvjax.plan(layers, mesh=mesh, heads="heads", **shape)
        assert planned.spec.groups[0].num_blocks > 2 * heads.spec.groups[0].num_blocks


def prefill(pool, q):
    """Attention of a chunk by a kernel that needs all tokens of a block."""
    row, length = np.zeros(1, np.int32), np.full(1, 6, np.int32)
    return pallas_kernels.call(
        "prefill_attention", q, pool, 0, np.zeros((1, 4), np.int32), length, row, length, max_count=6, scale=1.0,
        stride=4, offset=1, implementation="triton", interpret=True,
    )  # fmt: skip


def test_what_cannot_be_divided_is_refused():
    with meshes(2, 4) as mesh:
        for options, message in (
            ({"mesh": mesh, **AXES, "context": "rows"}, r"^context: got 'rows', wanted one of the mesh's axes \('con"),
            ({"mesh": mesh, **AXES, "context": "heads"}, r"^context: got 'heads', wanted one of the mesh's axes \('c"),
            ({"mesh": mesh, "context": "context"}, r"^heads: got None, wanted one of the mesh's axes"),
            ({"context": "context"}, r"^mesh: got None, wanted a jax.sharding.Mesh"),
        ):
            for function in kvjax.init_pools, kvjax.Cache.create:
                with pytest.raises(ValueError, match=message):
                    function(spec_of(), **options)
        message = r"^context: got axis 'context' of 4 devices, wanted one that divides blocks of 6 tokens"
        with pytest.raises(ValueError, match=message):
            kvjax.init_pools(spec_of(block_size=6), mesh=mesh, **AXES)
        cache = kvjax.Cache.create(spec_of(), mesh=mesh, **AXES)
        q, kv, _ = inputs(0, 3, 6)
        with pytest.raises(ValueError, match=r"^window: got 4 for layer 1, which has none in its spec, wanted a kvjax"):
            kvjax.attend(q, cache.pools, 1, cache.view(6), window=4)
        mapped = jax.shard_map(
            lambda pools, view, k, v: kvjax.write(pools, 0, k, v, view), mesh=mesh, in_specs=P(), out_specs=P(),
            axis_names={"context"}, check_vma=False,
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"^context: got a step whose caller has mapped axis 'context' of the mes"):
            jax.jit(mapped).trace(cache.pools, cache.view(6), *kv)
        with pytest.raises(NotImplementedError, match="triton: got a stride of 4, wanted 1"):
            jax.eval_shape(prefill, cache.pools.arrays[0][0], q[0])
        view = cache.view(6)
    message = r"^mesh: got .* in context, wanted an axis 'context' of 4 devices, which divides the pools"
    with meshes(2, 2) as other, jax.set_mesh(other), pytest.raises(ValueError, match=message):
        jax.eval_shape(kvjax.write, cache.pools, 0, *kv, view)


@pytest.mark.slow
def test_a_step_that_its_caller_maps_over_the_heads():
    q, kv, sinks = inputs(1, 3, 6)
    with meshes(2, 2) as mesh:
        cache, _ = kvjax.Cache.create(spec_of(), mesh=mesh, **AXES).admit(0, np.arange(6, dtype=np.int32), 6)

        def step(pools, state, q, kv, sinks):
            view = kvjax.view(state, 6)
            pools = kvjax.write(pools, 0, *kv, view)
            return pools, kvjax.attend(q, pools, 0, view, sinks=sinks)

        args = cache.pools, cache.state, q, kv, sinks
        _, wanted = jax.jit(step)(*args)
        of_heads = P(None, None, "heads")
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(P(*[None] * 3, "heads"), P(), of_heads, P(*[None] * 3, "heads"), P("heads")),
            out_specs=(P(*[None] * 3, "heads"), of_heads), axis_names={"heads"}, check_vma=False,
        )  # fmt: skip
        _, seen = jax.jit(mapped)(*args)
    np.testing.assert_allclose(seen[0], wanted[0], atol=2e-6)
