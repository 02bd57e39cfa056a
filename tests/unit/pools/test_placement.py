# SPDX-License-Identifier: Apache-2.0
"""Pools on several devices: each has its own heads of every block, and no program sends a pool."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import LayerSpec
from kvjax.processes import agreed_time, failed_anywhere
from tests.mesh import AUTO, EXPLICIT, collectives, mesh_of
from tests.poison import poisoned
from tests.unit.pools.hand_made import copied, no_events

LAYERS = [LayerSpec(4, 16), LayerSpec(4, 16)]
WINDOWS = [LayerSpec(4, 16), LayerSpec(4, 16, window=6)]
OPTIONS = {"num_blocks": 8, "max_seqs": 2, "max_length": 24, "block_size": 4, "dtype": "float32"}


def spec_of(layers=LAYERS, **options):
    return kvjax.make_spec(layers, **OPTIONS | options)


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def following(kv, y):
    """The K/V of the next layer, which depend on this one's values as in a model."""
    return kv + 0.1 * y.reshape(*y.shape[:2], 4, 2, 16)[None, :, :, :, 0]


def compute(cache, tokens, count, q, kv, sinks):
    """Writes K/V [2, R, C, K, D] of the rows' next tokens in both layers, attends with q [R, C, Q, D], and commits."""
    view, pools, out = cache.view(count, tokens.shape[1]), cache.pools, []
    for layer, window in ((0, None), (1, 6)):
        pools = kvjax.write(pools, layer, kv[0], kv[1], view)
        out.append(kvjax.attend(q, pools, layer, view, window=window, sinks=sinks, return_lse=True))
        kv = following(kv, out[-1][0])
    cache, events = cache.replace(pools=pools).commit(tokens, count)
    return cache, out, events


def history(cache):
    """A prompt, a fork, and copies on write; returns every step's attention, and the cache after it."""
    step, seen = jax.jit(compute, donate_argnums=0), []
    cache = cache.replace(pools=poisoned(cache.pools))
    cache, _ = jax.jit(kvjax.Cache.admit, donate_argnums=0)(cache, 0, np.arange(6, dtype=np.int32), 6)
    for length, count in ((6, [6, 0]), (1, [1, 1]), (1, [1, 1])):
        if length == 1:
            cache, events = jax.jit(kvjax.Cache.extend, donate_argnums=0)(cache, np.array([True, True]))
            assert events.ok
        tokens = np.full((2, length), length, np.int32)
        q, kv = numbers(length, 2, length, 8, 16), numbers(length, 2, 2, length, 4, 16)
        cache, out, _ = step(cache, tokens, np.array(count, np.int32), q, kv, numbers(0, 8))
        seen.append([jnp.where(jnp.asarray(count)[:, None, None] > 0, lse, 0) for _, lse in out] + [y for y, _ in out])
        if length == 6:
            cache, _ = jax.jit(kvjax.Cache.fork, donate_argnums=0)(cache, 0, 1)
    return cache, seen


def rows_of_three_and_six(cache):
    """The cache with hand-made rows: 2 of 3 tokens and none of 6 committed."""
    (group,) = cache.state.groups
    table = group.table.at[:, :2].set(jnp.array([[5, -1], [2, 7]]))
    seqs = cache.state.seqs.replace(length=jnp.array([3, 6]), committed=jnp.array([2, 0]))
    return cache.replace(state=cache.state.replace(groups=(group.replace(table=table),), seqs=seqs))


def write_attend_copy(pools, state, q, kv, sinks):
    """The writes and attention of `compute`, and the copy of block 2 to 4, without a verb."""
    view, out = kvjax.view(state, 6), []
    for layer in range(2):
        pools = kvjax.write(pools, layer, kv[0], kv[1], view)
        y, lse = kvjax.attend(q, pools, layer, view, window=4, sinks=sinks, return_lse=True)
        kv = following(kv, y)
        out += [y, jnp.where(np.arange(6)[None, :, None] < view.num_tokens[:, None, None], lse, 0)]
    return kvjax.apply(pools, no_events(copied([2], [4]))), out


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "kind", "shape"),
    [
        ("float32", EXPLICIT, (2, 2)),
        pytest.param("int8", AUTO, (1, 4), marks=pytest.mark.long),
        pytest.param("float32", AUTO, (2, 4), marks=pytest.mark.long),
    ],
)
def test_heads_are_computed_apart(dtype, kind, shape):
    args = numbers(1, 2, 6, 8, 16), numbers(2, 2, 2, 6, 4, 16), numbers(3, 8)
    alone = rows_of_three_and_six(kvjax.Cache.create(spec_of(dtype=dtype)))
    pools, wanted = jax.jit(write_attend_copy)(alone.pools, alone.state, *args)
    with mesh_of(*shape, kind) as mesh:
        cache = rows_of_three_and_six(kvjax.Cache.create(spec_of(dtype=dtype), mesh=mesh, heads="heads"))
        if kind == EXPLICIT:  # rows that a model may have divided are gathered before the map
            q, kv, sinks = args
            args = jax.device_put(q, NamedSharding(mesh, P("data"))), kv, sinks
        got, seen = jax.jit(write_attend_copy, donate_argnums=0)(cache.pools, cache.state, *args)
    for leaf, like in zip(jax.tree.leaves(got), jax.tree.leaves(pools), strict=True):
        own = {shard.data.shape for shard in leaf.addressable_shards}
        assert own == {(*leaf.shape[:3], 4 // shape[1], *leaf.shape[4:])}
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(like))
    chex.assert_trees_all_close(jax.tree.map(np.asarray, seen), jax.tree.map(np.asarray, wanted), atol=2e-6)


def write_attend_line(pools, state, q, kv, sinks):
    """Row 0's next token and row 1's chunk on one line: the pools and, where the line has tokens, the attention."""
    view = kvjax.pools.mixed(state, np.array([True, False]), np.array([1, -1]), np.array([6, 1]), 7)
    pools = kvjax.write(pools, 0, kv[0], kv[1], view)
    seen = kvjax.attend(q, pools, 0, view, window=4, sinks=sinks, return_lse=True)
    return pools, [x[0, np.array([0, *range(2, 8)])] for x in seen]


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "kind", "shape"), [("float32", EXPLICIT, (2, 2)), ("int8", AUTO, (1, 4))])
def test_heads_of_a_mixed_line_are_computed_apart(dtype, kind, shape):
    args = numbers(1, 1, 9, 8, 16), numbers(2, 2, 1, 9, 4, 16), numbers(3, 8)
    alone = rows_of_three_and_six(kvjax.Cache.create(spec_of(dtype=dtype)))
    pools, wanted = jax.jit(write_attend_line)(alone.pools, alone.state, *args)
    with mesh_of(*shape, kind) as mesh:
        cache = rows_of_three_and_six(kvjax.Cache.create(spec_of(dtype=dtype), mesh=mesh, heads="heads"))
        program = jax.jit(write_attend_line, donate_argnums=0).lower(cache.pools, cache.state, *args).compile()
        assert not collectives(program)
        got, seen = program(cache.pools, cache.state, *args)
    for leaf, like in zip(jax.tree.leaves(got), jax.tree.leaves(pools), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(like))
    chex.assert_trees_all_close(jax.tree.map(np.asarray, seen), jax.tree.map(np.asarray, wanted), atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "kind", "shape"),
    [
        pytest.param("int8", EXPLICIT, (2, 2), marks=pytest.mark.slow),
        pytest.param("float32", AUTO, (1, 4), marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", AUTO, (2, 4), marks=pytest.mark.slow),
    ],
)
def test_a_history_on_a_mesh_is_that_on_one_device(dtype, kind, shape):
    spec = spec_of(dtype=dtype)
    alone, wanted = history(kvjax.Cache.create(spec))
    with mesh_of(*shape, kind) as mesh:
        cache = kvjax.Cache.create(spec, mesh=mesh, heads="heads")
        for leaf in jax.tree.leaves(cache.pools):
            (own,) = {shard.data.shape for shard in leaf.addressable_shards}
            assert own == (*leaf.shape[:3], leaf.shape[3] // shape[1], *leaf.shape[4:])
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(cache.state))
        cache, seen = history(cache)
        chex.assert_trees_all_equal(jax.tree.map(np.asarray, cache.state), jax.tree.map(np.asarray, alone.state))
        for got, want in zip(jax.tree.leaves(cache.pools), jax.tree.leaves(alone.pools), strict=True):
            same = np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32)
            np.testing.assert_array_equal(*same)  # the scratch row too, and NaN
        chex.assert_trees_all_close(jax.tree.map(np.asarray, seen), jax.tree.map(np.asarray, wanted), atol=2e-6)


@pytest.mark.long
def test_verbs_send_nothing_and_steps_copy_no_pool():
    with mesh_of(1, 4) as mesh:
        cache = kvjax.Cache.create(spec_of(num_blocks=256), mesh=mesh, heads="heads")
        rows, one = np.zeros(2, np.int32), np.ones(2, np.int32)
        args = rows[:, None], one, numbers(0, 2, 1, 8, 16), numbers(0, 2, 2, 1, 4, 16), numbers(0, 8)
        programs = {
            "step": jax.jit(compute, donate_argnums=0).lower(cache, *args),
            "extend": jax.jit(kvjax.Cache.extend, donate_argnums=0).lower(cache, np.ones(2, bool)),
            "admit": jax.jit(kvjax.Cache.admit, donate_argnums=0).lower(cache, 0, np.arange(6, dtype=np.int32), 6),
        }
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pools)) // 4
        for name, program in programs.items():
            compiled = program.compile()
            memory = compiled.memory_analysis()
            # The inputs of the kernels' maps come from the model, here whole from the host to each device.
            assert not collectives(compiled), (name, collectives(compiled))
            assert memory.alias_size_in_bytes > own and memory.temp_size_in_bytes < own / 2, (name, memory)


@pytest.mark.slow
def test_verbs_called_one_by_one_are_those_of_jit():
    with mesh_of(1, 4) as mesh:
        cache = kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads")
        cache, _ = cache.admit(0, np.arange(6, dtype=np.int32), 6)
        view = cache.view(6)
        q, kv = jnp.asarray(numbers(1, 2, 6, 8, 16)), jnp.asarray(numbers(0, 2, 2, 6, 4, 16))
        y = kvjax.attend(q, kvjax.write(cache.pools, 0, *kv, view), 0, view)
    alone, _ = kvjax.Cache.create(spec_of()).admit(0, np.arange(6, dtype=np.int32), 6)
    plain = kvjax.write(alone.pools, 0, *kv, alone.view(6))
    np.testing.assert_allclose(y, kvjax.attend(q, plain, 0, alone.view(6)), atol=2e-6)


@pytest.mark.slow
def test_replicas_mapped_over_another_axis():
    """Two caches are stacked along the data axis, one for each replica. The map over heads nests in the caller's."""
    spec = spec_of()
    q, kv, sinks = numbers(1, 2, 2, 6, 8, 16), numbers(2, 2, 2, 2, 6, 4, 16), numbers(3, 8)
    tokens, counts = np.arange(24, dtype=np.int32).reshape(2, 2, 6), np.array([[6, 3], [2, 6]], np.int32)

    def one(cache, tokens, count, q, kv):
        cache, _ = cache.admit(jnp.arange(2), tokens, count)
        cache, out, _ = compute(cache, tokens, count, q, kv, jnp.asarray(sinks))
        return cache, [y for y, _ in out]

    wanted = [jax.jit(one)(kvjax.Cache.create(spec), *(x[i] for x in (tokens, counts, q, kv))) for i in range(2)]
    with mesh_of(2, 2) as mesh:
        cache = kvjax.Cache.create(spec, mesh=mesh, heads="heads")

        def stacked(x):
            return jax.device_put(np.stack([np.asarray(x)] * 2), NamedSharding(mesh, P("data", *x.sharding.spec)))

        def replica(*args):
            result = one(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: x[None], result)

        mapped = jax.shard_map(
            replica, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
        )
        together, out = jax.jit(mapped)(jax.tree.map(stacked, cache), tokens, counts, q, kv)
    for i, (alone, y) in enumerate(wanted):
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, i=i: np.asarray(x[i]), out), jax.tree.map(np.asarray, y), atol=2e-6
        )
        own = jax.tree.map(lambda x, i=i: np.asarray(x[i]), together.state)
        chex.assert_trees_all_equal(own, jax.tree.map(np.asarray, alone.state))


@pytest.mark.long
def test_a_step_that_its_caller_maps_over_the_heads_is_mapped_once():
    q, kv, sinks = numbers(1, 2, 6, 8, 16), numbers(2, 2, 2, 6, 4, 16), numbers(3, 8)
    with mesh_of(1, 4) as mesh:
        cache = rows_of_three_and_six(kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads"))
        _, wanted = jax.jit(write_attend)(cache.pools, cache.state, q, kv, sinks)
        mapped = jax.shard_map(
            write_attend,
            mesh=mesh,
            in_specs=(P(None, None, None, "heads"), P(), P(None, None, "heads"), P(*[None] * 3, "heads"), P("heads")),
            out_specs=(P(None, None, None, "heads"), P(None, None, "heads")),
            check_vma=False,
        )
        _, seen = jax.jit(mapped)(cache.pools, cache.state, q, kv, sinks)
    chex.assert_trees_all_close(jax.tree.map(np.asarray, seen), jax.tree.map(np.asarray, wanted), atol=2e-6)


def write_attend(pools, state, q, kv, sinks):
    """One write and one attention, for any number of heads."""
    view = kvjax.view(state, 6)
    pools = kvjax.write(pools, 0, *kv, view)
    return pools, kvjax.attend(q, pools, 0, view, sinks=sinks)


def test_what_cannot_be_placed_is_refused():
    with mesh_of(2, 4) as mesh:
        for options, message in (
            ({"mesh": mesh}, r"^heads: got None, wanted one of the mesh's axes \('data', 'heads'\)"),
            ({"mesh": mesh, "heads": "model"}, r"^heads: got 'model', wanted one of the mesh's axes"),
            ({"heads": "heads"}, r"^mesh: got None, wanted a jax.sharding.Mesh"),
            ({"mesh": mesh.abstract_mesh, "heads": "heads"}, r"^mesh: got AbstractMesh.*which has devices"),
        ):
            with pytest.raises(ValueError, match=message):
                kvjax.Cache.create(spec_of(), **options)
        three = kvjax.make_spec([LayerSpec(4, 16), LayerSpec(6, 16)], **OPTIONS)
        message = r"^heads: got axis 'heads' of 4 devices, wanted one that divides the 6 kv heads of layers \[1\]"
        with pytest.raises(ValueError, match=message):
            kvjax.init_pools(three, mesh=mesh, heads="heads")
        cache = kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads")
    other = jax.make_mesh((4,), ("model",), axis_types=(AUTO,), devices=jax.devices()[:4])
    with (
        jax.set_mesh(other),
        pytest.raises(ValueError, match=r"^mesh: got axes \('model',\) in context, wanted 'heads'"),
    ):
        jax.eval_shape(kvjax.apply, cache.pools, no_events(copied([2], [4])))


def test_explicit_axes_need_their_mesh_in_context_and_pools_in_place():
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(EXPLICIT,), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"^mesh: got Explicit axes and no mesh in context, wanted `with jax.set_mesh"):
        kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads")
    with jax.set_mesh(mesh):
        cache = kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads")
        gathered = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), cache.pools)
        with pytest.raises(
            ValueError, match=r"^pools: got arrays divided as P\(None, None, .*, wanted P\(None, None, "
        ):
            jax.jit(kvjax.apply).trace(gathered, no_events(copied([2], [4])))


def test_blocks_move_to_the_host_and_back_shard_by_shard():
    with mesh_of(2, 4) as mesh:
        tiered = kvjax.tiers.TieredCache.create(
            spec_of(WINDOWS, num_host_blocks=8, dtype="int8"), mesh=mesh, heads="heads"
        )
        before = jax.tree.map(lambda x: numbers(x.ndim, *x.shape).astype(x.dtype), tiered.pools)
        pools = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), before, tiered.pools)
        records = np.array([[0, b, 1, b, 8 + b] for b in range(5)] + [[1, 2, 1, 2, 9]], np.int32)
        pools, host = kvjax.tiers.move(pools, tiered.host, kvjax.tiers.Transfer(records))
        for leaf in jax.tree.leaves(host):
            assert leaf.sharding.memory_kind == "pinned_host" and leaf.addressable_shards[0].data.shape[3] == 1
        back = records[:, [0, 1, 2, 4, 3]] + np.array([0, 0, 0, 0, 1], np.int32)  # each into the row after its own
        pools, _ = kvjax.tiers.move(pools, host, kvjax.tiers.Transfer(back))
        for group, rows in ((0, 5), (1, 1)):
            for got, want in zip(
                jax.tree.leaves(pools.arrays[group]), jax.tree.leaves(before.arrays[group]), strict=True
            ):
                first = records[records[:, 0] == group][0, 1]
                np.testing.assert_array_equal(got[first + 1 : first + 1 + rows], want[first : first + rows])
                np.testing.assert_array_equal(got[first + 1 + rows :], want[first + 1 + rows :])


def test_a_plan_counts_what_one_device_has():
    shape = {"max_seqs": 2, "max_length": 64, "budget_bytes": 400_000, "block_size": 4, "dtype": "int8"}
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "heads"))
    planned = kvjax.plan([LayerSpec(8, 16)] * 2, mesh=mesh, heads="heads", **shape)
    alone = kvjax.plan([LayerSpec(2, 16)] * 2, **shape)
    assert planned.ledger == alone.ledger
    assert planned.spec == kvjax.make_spec(
        [LayerSpec(8, 16)] * 2, num_blocks=alone.spec.groups[0].num_blocks, max_seqs=2, max_length=64, block_size=4,
        dtype="int8",
    )  # fmt: skip
    with mesh_of(2, 4) as real:
        cache = kvjax.Cache.create(planned.spec, mesh=real, heads="heads")
        own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
        assert own == planned.ledger.used_bytes
    with pytest.raises(
        ValueError, match=r"^heads: got axis 'heads' of 4 devices, wanted one that divides the 2 kv heads"
    ):
        kvjax.plan([LayerSpec(2, 16)], mesh=mesh, heads="heads", **shape)


def test_in_one_process_everybody_agrees():
    with mesh_of(2, 4) as mesh:
        state = kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads").state
    assert agreed_time(state, -7) == -7
    assert not failed_anywhere(state, False) and failed_anywhere(state, True)
