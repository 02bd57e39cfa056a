# SPDX-License-Identifier: Apache-2.0
"""Pools on several devices, which divide the heads, and blocks by token. `test_attention.py` compares their steps."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
import pallas_kernels
from kvjax import LayerSpec
from kvjax.processes import agreed_time, failed_anywhere
from tests.mesh import AUTO, EXPLICIT, collectives, mesh_of
from tests.unit.pools.hand_made import copied, no_events

AXES = {"heads": "heads", "context": "context"}
OPTIONS = {"num_blocks": 8, "max_seqs": 2, "max_length": 32, "block_size": 8, "dtype": "float32"}
meshes = functools.partial(mesh_of, names=("heads", "context"))


def spec_of(layers=None, **options):
    return kvjax.make_spec(layers or [LayerSpec(4, 16)] * 2, **OPTIONS | options)


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(rows=2, length=6):
    """Queries [R, C, Q, D], K/V [2, R, C, K, D] and sinks."""
    return numbers(1, rows, length, 8, 16), numbers(2, 2, rows, length, 4, 16), numbers(3, 8)


def write_attend(pools, state, q, kv, sinks):
    """One write and one attention, for any number of heads."""
    view = kvjax.view(state, 6)
    pools = kvjax.write(pools, 0, *kv, view)
    return pools, kvjax.attend(q, pools, 0, view, sinks=sinks)


def admitted(**placement):
    cache = kvjax.Cache.create(spec_of(), **placement)
    return cache.admit(np.arange(2), np.arange(12, dtype=np.int32).reshape(2, 6), np.array([6, 3]))[0]


@pytest.mark.parametrize(
    "axes", [pytest.param({"heads": "heads"}, marks=pytest.mark.long), pytest.param(AXES, marks=pytest.mark.slow)]
)
def test_a_step_that_its_caller_maps_over_the_heads_is_mapped_once(axes):
    with meshes(2, 2) as mesh:
        cache = admitted(mesh=mesh, **axes)
        args = cache.pools, cache.state, *inputs()
        _, wanted = jax.jit(write_attend)(*args)
        of_pools, of_heads = P(None, None, None, "heads"), P(None, None, "heads")
        mapped = jax.shard_map(
            write_attend, mesh=mesh, in_specs=(of_pools, P(), of_heads, of_pools, P("heads")),
            out_specs=(of_pools, of_heads), axis_names={"heads"}, check_vma=False,
        )  # fmt: skip
        _, seen = jax.jit(mapped)(*args)
    np.testing.assert_allclose(seen, wanted, atol=2e-6)


@pytest.mark.slow
def test_replicas_mapped_over_another_axis():
    """Two caches are stacked along the data axis, one for each replica. The map over heads nests in the caller's."""
    q, kv, sinks = numbers(1, 2, 2, 6, 8, 16), numbers(2, 2, 2, 2, 6, 4, 16), numbers(3, 8)
    tokens, counts = np.arange(24, dtype=np.int32).reshape(2, 2, 6), np.array([[6, 3], [2, 6]], np.int32)

    def one(cache, tokens, count, q, kv):
        cache, _ = cache.admit(jnp.arange(2), tokens, count)
        pools, y = write_attend(cache.pools, cache.state, q, kv, jnp.asarray(sinks))
        return cache.replace(pools=pools), y

    wanted = [jax.jit(one)(kvjax.Cache.create(spec_of()), *(x[i] for x in (tokens, counts, q, kv))) for i in range(2)]
    with mesh_of(2, 2) as mesh:
        cache = kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads")

        def stacked(x):
            return jax.device_put(np.stack([np.asarray(x)] * 2), NamedSharding(mesh, P("data", *x.sharding.spec)))

        def replica(*args):
            return jax.tree.map(lambda x: x[None], one(*jax.tree.map(lambda x: x[0], args)))

        mapped = jax.shard_map(
            replica, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
        )
        together, out = jax.jit(mapped)(jax.tree.map(stacked, cache), tokens, counts, q, kv)
    for i, (alone, y) in enumerate(wanted):
        np.testing.assert_allclose(np.asarray(out[i]), y, atol=2e-6)
        own = jax.tree.map(lambda x, i=i: np.asarray(x[i]), together.state)
        chex.assert_trees_all_equal(own, jax.tree.map(np.asarray, alone.state))


@pytest.mark.slow
def test_queries_that_both_axes_divide_are_gathered_over_one():
    with meshes(2, 2) as mesh:
        cache = admitted(mesh=mesh, **AXES)
        q, *rest = inputs()
        step = jax.jit(write_attend)
        _, wanted = step(cache.pools, cache.state, q, *rest)
        divided = jax.device_put(q, NamedSharding(mesh, P(None, None, ("heads", "context"))))
        compiled = step.lower(cache.pools, cache.state, divided, *rest).compile()
        _, seen = compiled(cache.pools, cache.state, divided, *rest)
        assert collectives(compiled) == {"all-reduce": 2, "all-gather": 1}
    np.testing.assert_allclose(seen, wanted, atol=2e-6)


def test_blocks_leave_and_come_with_their_tokens_in_order():
    """From one device to a mesh and back, as stores do; a group with windows has whole blocks."""
    spec = spec_of([LayerSpec(2, 16), LayerSpec(2, 16, window=6)], dtype="int8")
    filled = jax.tree.map(lambda x: (10 * numbers(x.ndim, *x.shape)).astype(x.dtype), kvjax.init_pools(spec))
    rows, counts = [np.array([5, 0, 2, 8], np.int32)] * 2, [np.int32(3)] * 2
    staged = jax.jit(kvjax.stores.gather)(filled, rows)
    with meshes(2, 2) as mesh:
        pools = kvjax.init_pools(spec, mesh=mesh, **AXES)
        assert pools.context(0) and pools.context(1) is None
        parts = [{leaf.addressable_shards[0].data.shape[4] for leaf in arrays} for arrays in pools.arrays]
        assert parts == [{4}, {8}]
        pools = jax.jit(kvjax.stores.scatter, donate_argnums=0)(pools, staged, rows, counts)
        for number in range(2):
            for got, want in zip(leaves_of(pools, number), leaves_of(filled, number), strict=True):
                np.testing.assert_array_equal(got[[5, 0, 2]], want[[5, 0, 2]])
        again = jax.jit(kvjax.stores.gather)(pools, rows)
        copies = jax.jit(kvjax.apply)(pools, no_events(copied([2], [4])))
        for got in leaves_of(copies, 0):
            np.testing.assert_array_equal(got[4], got[2])
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(staged), strict=True):
        np.testing.assert_array_equal(np.asarray(got)[:3], np.asarray(want)[:3])


def leaves_of(pools, number):
    """The arrays and scales of a group, with the tokens of each block in order."""
    context = pools.context(number)
    leaves = map(np.asarray, jax.tree.leaves((pools.arrays[number], pools.scales[number])))
    return [leaf if context is None else context.ordered(leaf) for leaf in leaves]


@pytest.mark.parametrize("axes", [{"heads": "heads"}, AXES])
def test_a_plan_counts_what_one_device_has(axes):
    shape = {"max_seqs": 2, "max_length": 64, "budget_bytes": 400_000, "block_size": 8, "dtype": "int8"}
    layers = [LayerSpec(4, 16), LayerSpec(4, 16, window=9), LayerSpec.latent(16, 8)]
    with meshes(2, 4) as mesh:
        planned = kvjax.plan(layers, mesh=mesh.abstract_mesh if len(axes) == 1 else mesh, **axes, **shape)
        cache = kvjax.Cache.create(planned.spec, mesh=mesh, **axes)
        own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
        assert own == planned.ledger.used_bytes <= 400_000
        alone = kvjax.plan([LayerSpec(2, 16), LayerSpec(2, 16, window=9), layers[2]], **shape)
        if axes is AXES:
            assert planned.spec.groups[0].num_blocks > 2 * alone.spec.groups[0].num_blocks
        else:
            assert planned.ledger == alone.ledger
            sizes = [[group.num_blocks for group in each.spec.groups] for each in (planned, alone)]
            assert sizes[0] == sizes[1]
        with pytest.raises(
            ValueError, match=r"^heads: got axis 'heads' of 2 devices, wanted one that divides the 3 kv"
        ):
            kvjax.plan([LayerSpec(3, 16)], mesh=mesh, **axes, **shape)


def prefill(pool, q):
    """Attention of a chunk by a kernel that needs all tokens of a block."""
    row, length = np.zeros(1, np.int32), np.full(1, 6, np.int32)
    return pallas_kernels.call(
        "prefill_attention", q, pool, 0, np.zeros((1, 4), np.int32), length, row, length, max_count=6, scale=1.0,
        stride=4, offset=1, implementation="triton", interpret=True,
    )  # fmt: skip


def test_what_cannot_be_divided_is_refused():
    one_of_axes = r"wanted one of the mesh's axes \('heads', 'context'\)"
    with meshes(2, 4) as mesh:
        for options, message in (
            ({"mesh": mesh}, f"heads: got None, {one_of_axes}"),
            ({"mesh": mesh, "heads": "model"}, f"heads: got 'model', {one_of_axes}"),
            ({"heads": "heads"}, "mesh: got None, wanted a jax.sharding.Mesh"),
            ({"mesh": mesh.abstract_mesh, "heads": "heads"}, "mesh: got AbstractMesh.*which has devices"),
            ({"mesh": mesh, **AXES, "context": "rows"}, r"context: got 'rows', wanted one of the mesh's axes \('con"),
            ({"mesh": mesh, **AXES, "context": "heads"}, r"context: got 'heads', wanted one of the mesh's axes \('c"),
            ({"mesh": mesh, "context": "context"}, "heads: got None, wanted one of the mesh's axes"),
            ({"context": "context"}, "mesh: got None, wanted a jax.sharding.Mesh"),
        ):
            for function in kvjax.init_pools, kvjax.Cache.create:
                with pytest.raises(ValueError, match=f"^{message}"):
                    function(spec_of(), **options)
        for spec, message in (
            (
                spec_of([LayerSpec(4, 16), LayerSpec(5, 16)]),
                r"heads: got axis 'heads' of 2 .* 5 kv heads of layers \[1\]",
            ),
            (spec_of(block_size=6), "context: got axis 'context' of 4 devices, wanted one that divides blocks of 6"),
        ):
            with pytest.raises(ValueError, match=f"^{message}"):
                kvjax.init_pools(spec, mesh=mesh, **AXES)
        cache, (q, kv, _) = kvjax.Cache.create(spec_of(), mesh=mesh, **AXES), inputs()
        view = cache.view(6)
        latents = kvjax.init_pools(spec_of([LayerSpec.latent(16, 16)]), mesh=mesh, heads="heads")
        with pytest.raises(ValueError, match=r"^q: got 3 heads, wanted a number of them that the 2 devices of"):
            jax.eval_shape(functools.partial(kvjax.attend, layer=0, view=view.replace(spec=None)), q[:, :, :3], latents)
        mapped = jax.shard_map(
            lambda pools, view, k, v: kvjax.write(pools, 0, k, v, view), mesh=mesh, in_specs=P(), out_specs=P(),
            axis_names={"context"}, check_vma=False,
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"^context: got a step whose caller has mapped axis 'context' of the mes"):
            jax.jit(mapped).trace(cache.pools, view, *kv)
        with pytest.raises(NotImplementedError, match="triton: got a stride of 4, wanted 1"):
            jax.eval_shape(prefill, cache.pools.arrays[0][0], q[0])
        divided = kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads")
    other = jax.make_mesh((4,), ("model",), axis_types=(AUTO,), devices=jax.devices()[:4])
    with (
        jax.set_mesh(other),
        pytest.raises(ValueError, match=r"^mesh: got axes \('model',\) in context, wanted 'heads'"),
    ):
        jax.eval_shape(kvjax.apply, divided.pools, no_events(copied([2], [4])))
    message = "^mesh: got .* in context, wanted an axis 'context' of 4 devices, which divides the pools"
    with meshes(2, 2) as other, jax.set_mesh(other), pytest.raises(ValueError, match=message):
        jax.eval_shape(kvjax.write, cache.pools, 0, *kv, view)


def test_explicit_axes_need_their_mesh_in_context_and_pools_in_place():
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(EXPLICIT,), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"^mesh: got Explicit axes and no mesh in context, wanted `with jax.set_mesh"):
        kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads")
    with jax.set_mesh(mesh):
        cache = kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads")
        gathered = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), cache.pools)
        wanted = r"^pools: got arrays divided as P\(None, None, .*, wanted P\(None, None, "
        with pytest.raises(ValueError, match=wanted):
            jax.jit(kvjax.apply).trace(gathered, no_events(copied([2], [4])))


def test_in_one_process_everybody_agrees():
    with mesh_of(2, 4) as mesh:
        state = kvjax.Cache.create(spec_of(), mesh=mesh, heads="heads").state
    assert agreed_time(state, -7) == -7
    assert not failed_anywhere(state, False) and failed_anywhere(state, True)
