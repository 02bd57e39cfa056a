# SPDX-License-Identifier: Apache-2.0
"""`make_spec(layout=)`: the same K/V in another order, for TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import pallas_kernels
from kvjax.pools import block_mass, key_bounds
from kvjax.pools.placement import num_shards
from kvjax.stores import load, save
from tests.mesh import AUTO

LAYERS = [kvjax.LayerSpec(2, 16)] * 2
SIZES = {"num_blocks": 8, "max_seqs": 2, "max_length": 32, "block_size": 4, "dtype": "float32"}


def spec_of(layout, layers=LAYERS, **options):
    return kvjax.make_spec(layers, **{**SIZES, **options}, layout=layout)


def test_pools_have_the_shape_of_their_layout_and_as_many_bytes():
    arrays = [kvjax.init_pools(spec_of(layout)).arrays[0][0] for layout in ("heads", "tokens")]
    assert [array.shape for array in arrays] == [(9, 2, 2, 2, 4, 16), (9, 2, 4, 1, 64)]
    assert len({spec_of(layout).groups[0].block_bytes(4) for layout in ("heads", "tokens")}) == 1


def test_latents_and_states_have_a_single_layout():
    layers = [kvjax.LayerSpec(2, 16), kvjax.LayerSpec.latent(8, 4), kvjax.LayerSpec.recurrent({"state": (2, 3)})]
    pools = [pool for group in spec_of("tokens", layers).groups for pool in group.pools]
    assert [pool.layout for pool in pools] == ["tokens", "heads", "heads"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "rows"}, r"layout: got 'rows', wanted None or one of \('heads', 'tokens'\)"),
        ({"layout": "tokens", "dtype": "int8"}, "layout: got 'tokens' for K/V in int8, wanted 'heads'"),
    ],
)
def test_other_layouts_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        spec_of(**{"layout": "tokens", **options})


def test_a_process_for_tpus_has_pools_by_token_where_it_can():
    assert spec_of(None).groups[0].pools[0].layout == "heads"
    with pallas_kernels.lowering_for("tpu"):
        assert spec_of(None).groups[0].pools[0].layout == "tokens"
        wide, narrow = ([kvjax.LayerSpec(2, width)] for width in (128, 64))
        assert spec_of(None, wide, dtype="int8").groups[0].pools[0].layout == "heads"
        with pytest.raises(ValueError, match="got heads of 64 for K/V in int8, wanted a multiple of 128 on a TPU"):
            spec_of(None, narrow, dtype="int8")
        assert spec_of("heads", narrow, dtype="int8").groups[0].pools[0].layout == "heads"


def test_a_mesh_divides_rows_of_heads_and_no_blocks():
    mesh = jax.make_mesh((2, 2), ("x", "c"), axis_types=(AUTO, AUTO))
    with pytest.raises(ValueError, match="context: got a mesh axis for K/V with layout='tokens', wanted None"):
        num_shards(spec_of("tokens", [kvjax.LayerSpec(4, 128)]), mesh, "x", "c")
    with pytest.raises(ValueError, match="heads: got axis 'x' of 2 devices, wanted one that divides the 1 rows of kv"):
        num_shards(spec_of("tokens"), mesh, "x", None)
    assert num_shards(spec_of("tokens", [kvjax.LayerSpec(4, 64)]), mesh, "x", None) == (2, 1)


def run(cache, view, q, k, v):
    pools = kvjax.write(cache.pools, 1, k, v, view)
    return cache.replace(pools=pools), kvjax.attend(q, pools, 1, view)


def filled(layout, **options):
    """A cache with ten tokens of a row, and attention over them."""
    cache, _ = kvjax.Cache.create(spec_of(layout), **options).admit(0, np.arange(10), 10)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 10, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    cache, out = jax.jit(run)(cache, cache.view([10, 0], 10), q, k, v)
    cache, _ = cache.commit(np.tile(np.arange(10), (2, 1)), np.array([10, 0]))
    return cache, out


@pytest.mark.long
def test_a_save_is_read_into_either_layout(tmp_path):
    caches = {}
    for layout in ("heads", "tokens"):
        caches[layout], out = filled(layout)
        caches[layout, "out"] = out
        save(caches[layout], tmp_path / layout, model="m")
    np.testing.assert_array_equal(caches["heads", "out"], caches["tokens", "out"])
    by_head, by_token = (next((tmp_path / layout).glob("*.values")).read_bytes() for layout in ("heads", "tokens"))
    assert by_head == by_token
    for saved, layout in ("heads", "tokens"), ("tokens", "heads"):
        loaded, _ = load(kvjax.Cache.create(spec_of(layout)), tmp_path / saved, model="m")
        hit, _ = loaded.admit(0, np.arange(10), 10)
        assert hit.state.seqs.committed[0] >= 8
        blocks = []
        for cache in (caches[layout], hit):
            rows = np.asarray(cache.view(1).tables[0])[0, :2]
            blocks.append(np.asarray(cache.pools.arrays[0][0])[rows])
        np.testing.assert_array_equal(*blocks)


@pytest.mark.parametrize("source", ["heads", "tokens"])
def test_blocks_outside_of_pools_have_one_form(source):
    """Blocks of a cache of either layout enter caches of both, and no other block changes."""
    rows = [np.array([2, 0, 5], np.int32)]
    rng = np.random.default_rng(0)
    caches = {layout: kvjax.init_pools(spec_of(layout)) for layout in ("heads", "tokens")}
    blocks = jnp.asarray(rng.standard_normal((9, 2, 2, 2, 4, 16)), jnp.float32)
    full = kvjax.stores.Staged(((blocks,),), caches[source].spec)
    filled_pools = kvjax.stores.scatter(caches[source], full, [np.arange(9, dtype=np.int32)], [np.int32(9)])
    staged = kvjax.stores.gather(filled_pools, rows)
    np.testing.assert_array_equal(staged.arrays[0][0], blocks[rows[0]])
    for pools in caches.values():
        got = kvjax.stores.scatter(pools, staged, rows, [np.int32(2)])
        wanted = jnp.zeros_like(blocks).at[rows[0][:2]].set(blocks[rows[0][:2]])
        everything = kvjax.stores.gather(got, [np.arange(9, dtype=np.int32)])
        np.testing.assert_array_equal(everything.arrays[0][0], wanted)


@pytest.mark.long
def test_events_and_drawings_do_not_depend_on_the_layout():
    shown = []
    for layout in ("heads", "tokens"):
        cache, _ = filled(layout)
        cache, events = cache.release(0)
        kvjax.check(cache.state)
        shown.append((kvjax.to_list(events), kvjax.show(cache.state)))
    assert shown[0] == shown[1]


@pytest.mark.long
def test_heads_on_a_mesh_are_the_same_by_token():
    layers = [kvjax.LayerSpec(4, 64)]
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AUTO,))
    results = []
    for layout, where in ("tokens", {}), ("tokens", {"mesh": mesh, "heads": "heads"}), ("heads", {}):
        cache, _ = kvjax.Cache.create(spec_of(layout, layers), **where).admit(0, np.arange(10), 10)
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.standard_normal((2, 10, heads, 64)), jnp.float32) for heads in (8, 4, 4))
        view = cache.view([10, 0], 10)
        pools = kvjax.write(cache.pools, 0, k, v, view)
        results.append(jax.jit(kvjax.attend, static_argnums=2)(q, pools, 0, view))
    np.testing.assert_allclose(results[0], results[1], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.long
def test_pools_by_token_have_derivatives():
    grads = []
    for layout in ("heads", "tokens"):
        cache, _ = kvjax.Cache.create(spec_of(layout)).admit(0, np.arange(10), 10)
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.standard_normal((2, 10, heads, 16)), jnp.float32) for heads in (4, 2, 2))
        view = cache.view([10, 0], 10)
        loss = lambda q, k, v, cache=cache, view=view: jnp.sum(run(cache, view, q, k, v)[1] ** 2)  # noqa: E731
        grads.append(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))
    for by_head, by_token in zip(*grads, strict=True):
        np.testing.assert_allclose(by_head, by_token, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_scores_of_blocks_are_the_same_by_token():
    scores = []
    for layout in ("heads", "tokens"):
        cache, _ = filled(layout)
        cache, _ = cache.extend(np.array([True, False]))
        view = cache.view([1, 0], 1)
        q = jnp.asarray(np.random.default_rng(1).standard_normal((2, 1, 4, 16)), jnp.float32)
        scores.append([block_mass(q, cache.pools, 1, view)[0], *(x[0] for x in key_bounds(cache.pools, 1, view))])
    for by_head, by_token in zip(*scores, strict=True):
        np.testing.assert_array_equal(by_head, by_token)
