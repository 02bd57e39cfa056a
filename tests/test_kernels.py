# SPDX-License-Identifier: Apache-2.0
"""Kernels that move K/V against their XLA twins, bit for bit, in interpret mode; and which of them is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import triton, xla
from pallas_kernels.schedule import query_tiles, split_lengths


def pool_of(dtype="float32", blocks=8, heads=3, size=4, width=20, seed=0):
    """A pool of odd sizes; its scratch row is NaN."""
    pool = np.random.default_rng(seed).standard_normal((blocks + 1, 2, 2, heads, size, width))
    pool[-1] = np.nan
    return jnp.asarray(pool, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "width"), [(3, 20), (2, 16), (1, 80)])
def test_append_kv(dtype, heads, width):
    pool = pool_of(dtype, heads=heads, width=width)
    kv = np.random.default_rng(1).standard_normal((2, 6, heads, width))
    k, v = jnp.asarray(kv, jnp.float32)
    slots = jnp.array([0, 33, 17, 31, 9, 34], jnp.int32)  # two of them in scratch
    wanted = xla.append_kv(pool, 1, k, v, slots)
    got = jax.jit(functools.partial(triton.append_kv, interpret=True))(pool, jnp.int32(1), k, v, slots)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, wanted)))


# 20 numbers to a row are less than a chunk, 200 heads of 20 more than one.
@pytest.mark.parametrize("heads", [1, 200])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_moving_blocks(heads, count):
    pool, count = pool_of(heads=heads), jnp.int32(count)
    sources, targets = jnp.array([1, 2, 3, 8], jnp.int32), jnp.array([4, 5, 6, 8], jnp.int32)
    moved = triton.copy_blocks(pool, sources, targets, count, interpret=True)
    np.testing.assert_array_equal(moved, xla.copy_blocks(pool, sources, targets, count))
    staged = xla.gather_blocks(pool, sources)
    np.testing.assert_array_equal(triton.gather_blocks(pool, sources, interpret=True), staged)
    back = triton.scatter_blocks(pool, -staged, targets, count, interpret=True)
    np.testing.assert_array_equal(back, xla.scatter_blocks(pool, -staged, targets, count))


def test_a_pool_beyond_the_reach_of_offsets_is_refused():
    pool = jax.ShapeDtypeStruct((2**14, 4, 2, 8, 16, 128), jnp.float8_e4m3fn)
    q, table, rows = (
        jax.ShapeDtypeStruct((2, 8, 128), jnp.bfloat16),
        jnp.zeros((2, 4), jnp.int32),
        jnp.ones(2, jnp.int32),
    )
    with pytest.raises(NotImplementedError, match="32-bit offsets"):
        jax.eval_shape(lambda q, pool: triton.decode_attention(q, pool, 0, table, rows, scale=1.0), q, pool)


def test_where_there_is_no_gpu_the_twin_serves_and_a_named_kernel_refuses():
    pool, blocks = pool_of(), jnp.array([3, 1], jnp.int32)
    run = functools.partial(pallas_kernels.call, "gather_blocks")
    np.testing.assert_array_equal(jax.jit(run)(pool, blocks), xla.gather_blocks(pool, blocks))
    with pytest.raises(NotImplementedError):
        jax.jit(functools.partial(run, implementation="triton"))(pool, blocks)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("target", [1, 12, 500])
def test_parts_cover_each_row_once(target, window):
    lengths = np.array([0, 1, 64, 65, 1000, 17, 300], np.int32)
    work, starts = jax.tree.map(np.asarray, split_lengths(jnp.asarray(lengths), 16, target, window))
    assert len(work.row) <= target + len(lengths)
    for row, length in enumerate(lengths):
        parts = np.arange(starts[row], starts[row + 1])
        assert np.all(work.row[parts] == row) and np.all(work.count[parts] == 1)
        first = 0 if window is None else max(length - window, 0) // 16 * 16
        edges = [first, *work.end[parts].tolist()]
        assert edges[:-1] == work.begin[parts].tolist() and edges[-1] == max(length, first)
    assert np.all(work.count[starts[-1] :] == 0)


def test_tiles_cover_each_query_once():
    lengths, counts = np.array([9, 0, 70, 5, 33], np.int32), np.array([9, 0, 40, 1, 17], np.int32)
    starts = np.cumsum(counts + 2) - counts - 2
    work = jax.tree.map(np.asarray, query_tiles(90, *map(jnp.asarray, (lengths, starts, counts)), 64, 16))
    seen = [
        (row, token + i, position + i)
        for row, token, count, position in zip(work.row, work.token, work.count, work.position, strict=True)
        for i in range(count)
    ]
    wanted = [
        (row, starts[row] + i, lengths[row] - counts[row] + i) for row in range(len(counts)) for i in range(counts[row])
    ]
    assert sorted(seen) == wanted
    assert np.all(work.end[work.count > 0] == (work.position + work.count)[work.count > 0])
