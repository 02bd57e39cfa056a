# SPDX-License-Identifier: Apache-2.0
"""Kernels that move K/V against XLA's implementations, bit for bit, in interpret mode; and the choice among them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import mosaic, triton, triton_rope, xla
from pallas_kernels.quantise import largest, quantise
from pallas_kernels.schedule import query_tiles, split_lengths
from pallas_kernels.triton_attention import by_bits
from tests.kernels import on_gpu


def pool_of(dtype="float32", blocks=8, heads=3, size=4, width=20, seed=0, parts=2):
    """A pool of odd sizes; its scratch row is NaN."""
    pool = np.random.default_rng(seed).standard_normal((blocks + 1, 2, parts, heads, size, width))
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


def quantised(dtype, **shape):
    """A pool of all bit patterns, and its scales, NaN in the scratch row."""
    scales = pool_of(**shape)[..., 0]
    return jnp.asarray(np.random.default_rng(2).integers(0, 256, pool_of(**shape).shape), jnp.uint8).view(dtype), scales


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("heads", "width", "source"),
    [
        (3, 20, "float32"),
        pytest.param(2, 16, "bfloat16", marks=pytest.mark.long),
        pytest.param(1, 80, "float16", marks=pytest.mark.long),
    ],
)
def test_quantised_append(dtype, heads, width, source):
    pool, scales = quantised(dtype, heads=heads, width=width)
    k, v = kv = jnp.asarray(np.random.default_rng(1).standard_normal((2, 6, heads, width)), source)
    slots = np.array([0, 33, 17, 31, 9, 34], np.int32)  # two of them in scratch
    args = pool, jnp.int32(1), k, v, jnp.asarray(slots), scales
    wanted = jax.jit(xla.append_kv)(*args)
    got = jax.jit(functools.partial(triton.append_kv, interpret=True))(*args)
    real, index = slots < 32, (slots[slots < 32] // 4, 1, slice(None), slice(None), slots[slots < 32] % 4)
    for new, of_xla, old, values in zip(got, wanted, (pool, scales), quantise(kv, dtype), strict=True):
        np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (new, of_xla)))
        expected = np.array(old)
        expected[index] = np.asarray(values).reshape(2, 6, *expected[index].shape[2:]).swapaxes(0, 1)[real]
        np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (new, expected)))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_latents_are_appended_and_moved_alike(dtype):
    shape = {"heads": 1, "width": 24, "parts": 1}
    pool, scales = quantised("int8", **shape) if dtype == "int8" else (pool_of(dtype, **shape), None)
    latents, slots = jnp.asarray(pool_of(seed=1, **shape)[:6, 0, 0, :, 0]), jnp.array([0, 33, 17, 31, 9, 34], jnp.int32)
    rows, tokens = (jnp.array(x, jnp.int32) for x in ([[1, 2, 8], [4, 5, 8]], [3, 4, 2]))

    def changed(module, **options):
        run = {name: functools.partial(getattr(module, name), **options) for name in xla.__all__}
        arrays = run["append_kv"](pool, jnp.int32(1), latents, None, slots, scales)
        arrays = [arrays] if scales is None else list(arrays)
        arrays = [run["copy_blocks"](array, *rows, jnp.int32(2), tokens) for array in arrays]
        staged = [run["gather_blocks"](array, rows[0]) for array in arrays]
        return [run["scatter_blocks"](*pair, rows[1] - 4, jnp.int32(2)) for pair in zip(arrays, staged, strict=True)]

    for got, wanted in zip(changed(triton, interpret=True), jax.jit(lambda: changed(xla))(), strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, wanted)))


def test_mosaic_leaves_latents_to_others():
    q, pool = jnp.zeros((2, 4, 64), jnp.bfloat16), pool_of("bfloat16", heads=1, size=16, width=64, parts=1)
    args, options = (jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32)), {"scale": 1.0, "interpret": True}
    with pytest.raises(NotImplementedError, match="mosaic: no latents"):
        mosaic.decode_attention(q, pool, 0, *args, values=48, **options)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_vectors_are_close_to_what_they_were(dtype):
    x = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32) * np.logspace(-30, 30, 500)[:, None]
    x = np.concatenate([x, [[0.0] * 64, [1e-44] * 64, [-3.0] * 64]]).astype(np.float32)
    values, scale = (np.asarray(y, np.float64) for y in jax.jit(quantise, static_argnums=1)(x, dtype))
    # Half a step of 127, or of the last of three bits.
    step = scale if dtype == "int8" else np.maximum(np.abs(x) / 8, scale * 2.0**-9)
    assert np.all(np.abs(values * scale - x) <= np.maximum(0.5001 * step, 1e-40))
    assert np.all(np.max(np.abs(values[:500]), axis=1) == largest(dtype)) and np.all(values[502] == -largest(dtype))
    assert np.all(scale[500:502] == 1) and np.all(values[500:502] == 0)


def test_bits_of_float8_become_float16():
    x = jnp.arange(256, dtype=jnp.uint8).view(jnp.float8_e4m3fn)
    finite = np.isfinite(np.asarray(x, np.float32))
    np.testing.assert_array_equal(*(np.asarray(y, np.float32)[finite] for y in (by_bits(x), x)))


# 20 numbers to a row are less than a chunk, 200 heads of 20 more than one.
@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.long), 200])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("what", ["pool", "scales"])
def test_moving_blocks(heads, count, what):
    pool, count = pool_of(heads=heads), jnp.int32(count)
    pool = pool if what == "pool" else pool[..., 0]
    sources, targets = jnp.array([1, 2, 3, 8], jnp.int32), jnp.array([4, 5, 6, 8], jnp.int32)
    moved = triton.copy_blocks(pool, sources, targets, count, interpret=True)
    np.testing.assert_array_equal(moved, xla.copy_blocks(pool, sources, targets, count))
    staged = xla.gather_blocks(pool, sources)
    np.testing.assert_array_equal(triton.gather_blocks(pool, sources, interpret=True), staged)
    back = triton.scatter_blocks(pool, -staged, targets, count, interpret=True)
    np.testing.assert_array_equal(back, xla.scatter_blocks(pool, -staged, targets, count))


@pytest.mark.parametrize(("dtype", "heads"), [("float32", 1), ("int8", 3), ("bfloat16", 200)])
def test_copying_the_first_tokens_of_blocks(dtype, heads):
    pool = pool_of(heads=heads) if dtype != "int8" else quantised(dtype, heads=heads)[0]
    pool = pool.astype(dtype)
    sources, targets = jnp.array([1, 2, 3, 0, 8], jnp.int32), jnp.array([4, 5, 6, 7, 8], jnp.int32)
    tokens = jnp.array([3, 0, 4, 1, 2], jnp.int32)
    wanted = np.array(pool)
    for source, target, number in zip(sources[:3], targets[:3], tokens[:3], strict=True):
        wanted[target, ..., :number, :] = wanted[source, ..., :number, :]
    for implementation in (xla.copy_blocks, functools.partial(triton.copy_blocks, interpret=True)):
        moved = jax.jit(implementation)(pool, sources, targets, jnp.int32(3), tokens)
        np.testing.assert_array_equal(np.asarray(moved, np.float32), wanted.astype(np.float32))


def test_a_pool_beyond_the_reach_of_offsets_is_refused():
    pool = jax.ShapeDtypeStruct((2**14, 4, 2, 8, 16, 128), jnp.float8_e4m3fn)
    q, table, rows = (
        jax.ShapeDtypeStruct((2, 8, 128), jnp.bfloat16),
        jnp.zeros((2, 4), jnp.int32),
        jnp.ones(2, jnp.int32),
    )
    with pytest.raises(NotImplementedError, match="32-bit offsets"):
        jax.eval_shape(lambda q, pool: triton.decode_attention(q, pool, 0, table, rows, scale=1.0), q, pool)
    with pytest.raises(NotImplementedError, match="32-bit offsets"):
        jax.eval_shape(lambda pool: triton.copy_blocks(pool, rows, rows, 1), pool)
    with pytest.raises(NotImplementedError, match="32-bit offsets"):
        jax.eval_shape(lambda q, pool: triton.append_kv(pool, 0, q, q, rows), q, pool)


@pytest.mark.parametrize(("width", "dtype"), [(1040, "bfloat16"), (528, "float32")])
def test_heads_too_wide_for_shared_memory_are_refused(width, dtype):
    q, pool = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, 8, width), (4, 1, 2, 8, 16, width)))
    table, rows = jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32)
    with pytest.raises(NotImplementedError, match=f"heads are {width} wide"):
        jax.eval_shape(lambda q, pool: triton.decode_attention(q, pool, 0, table, rows, scale=1.0), q, pool)


def test_a_gpu_without_float8_appends_none(monkeypatch):
    monkeypatch.setattr(triton_rope, "converts_fp8", lambda: False)
    pool, scales = quantised("float8_e4m3fn")
    k = jnp.zeros((1, *pool.shape[3:4], pool.shape[5]))
    with pytest.raises(NotImplementedError, match="sm_89"):
        triton.append_kv(pool, 0, k, k, jnp.zeros(1, jnp.int32), scales)
    with pytest.raises(NotImplementedError, match="sm_89"):
        triton.rope_append(k, k, k, *[k[:, 0, :10]] * 2, pool, 0, jnp.zeros(1, jnp.int32), scales)


def test_without_a_gpu_xla_serves_and_a_named_kernel_refuses():
    pool, blocks = pool_of(), jnp.array([3, 1], jnp.int32)
    run = functools.partial(pallas_kernels.call, "gather_blocks")
    np.testing.assert_array_equal(jax.jit(run)(pool, blocks), xla.gather_blocks(pool, blocks))
    with pytest.raises(NotImplementedError):
        jax.jit(functools.partial(run, implementation="triton"))(pool, blocks)


SOME_ROWS = jnp.array([1, 2, 8], jnp.int32), jnp.array([4, 5, -1], jnp.int32), jnp.int32(2)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize(
    ("name", "arrays", "others"),
    [
        ("append_kv", [(4, 3, 20), (4, 3, 20)], [jnp.array([0, 33, 17, 34], jnp.int32)]),
        ("copy_blocks", [], SOME_ROWS),
        ("copy_blocks", [], [*SOME_ROWS, jnp.array([3, 0, 2], jnp.int32)]),
        ("gather_blocks", [], SOME_ROWS[:1]),
        ("scatter_blocks", [(3, 2, 2, 3, 4, 20)], SOME_ROWS[1:]),
    ],
)
def test_a_move_is_its_own_derivative(name, arrays, others, implementation):
    """The forward pass is the move itself, the backward pass its transpose. Other rows than the list's take no part."""
    numbers = np.random.default_rng(2).standard_normal
    points, directions = ([pool_of(seed=i).at[-1].set(0), *(jnp.float32(numbers(x)) for x in arrays)] for i in (0, 1))
    interpret = {"interpret": True} if implementation == "triton" else {}

    def move(pool, *arrays):
        args = (pool, 1, *arrays) if name == "append_kv" else (pool, *arrays)
        return pallas_kernels.call(name, *args, *others, implementation=implementation, **interpret)

    moved, tangent = jax.jit(lambda *x: jax.jvp(move, x[: len(points)], x[len(points) :]))(*points, *directions)
    np.testing.assert_array_equal(moved, move(*points))
    np.testing.assert_array_equal(tangent, move(*directions))
    factors = jnp.float32(numbers(moved.shape))
    gradients = jax.jit(jax.grad(lambda *x: jnp.vdot(move(*x), factors), tuple(range(len(points)))))(*points)
    along = sum(jnp.vdot(*pair) for pair in zip(gradients, directions, strict=True))
    np.testing.assert_allclose(along, jnp.vdot(tangent, factors), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("target", [1, 12, 500])
def test_parts_cover_each_row_once(target, window):
    lengths = np.array([0, 1, 64, 65, 1000, 17, 300], np.int32)
    work, starts = jax.tree.map(np.asarray, split_lengths(jnp.asarray(lengths), 16, target, window))
    assert len(work.row) <= target + len(lengths)
    _check_parts(lengths, work, starts, window)


def _check_parts(lengths, work, starts, window):
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


@pytest.mark.parametrize(
    "shape",
    [(4, 2, 3, 2, 8), (1, 2, 2, 2, 8), (2, 2, 1, 2, 8), (2, 2, 2, 1, 8), (2, 2, 2, 2, 1), (4, 1, 1, 2, 8)],
    ids=str,
)
def test_moving_blocks_copies_no_pool(shape):
    """Layers, parts, heads, positions and width. Where one of them was 1, XLA's CPU backend has copied whole pools."""
    pool = jnp.zeros((20_001, *shape), jnp.float32)
    ids = jnp.arange(8, dtype=jnp.int32)
    for move, args in ((xla.copy_blocks, (ids, ids + 8, jnp.int32(8))), (xla.scatter_blocks, (pool[:8], ids, 8))):
        memory = jax.jit(move, donate_argnums=0).lower(pool, *args).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool.nbytes
        assert memory.temp_size_in_bytes < 0.05 * pool.nbytes, move.__name__


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "who"), on_gpu.CHECKS)
def test_each_kernel_is_right_on_this_machine(function, who):
    try:
        on_gpu.check(function, who)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
