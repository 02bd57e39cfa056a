# SPDX-License-Identifier: Apache-2.0
"""Kernels that move K/V against XLA's implementations, bit for bit, in interpret mode; and the choice among them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import mosaic, tpu, triton, xla
from pallas_kernels.quantise import largest, quantise
from pallas_kernels.schedule import query_tiles, split_lengths
from pallas_kernels.triton import rope as triton_rope
from pallas_kernels.triton.attention import by_bits
from tests.kernels import on_gpu


def pool_of(dtype="float32", blocks=8, heads=3, size=4, width=20, seed=0, parts=2):
    """A pool of odd sizes, whose scratch row is NaN; of a quantised dtype it has all bit patterns."""
    shape = blocks + 1, 2, parts, heads, size, width
    if dtype in QUANTISED:
        return jnp.asarray(np.random.default_rng(2).integers(0, 256, shape), jnp.uint8).view(dtype)
    pool = np.random.default_rng(seed).standard_normal(shape)
    pool[-1] = np.nan
    return jnp.asarray(pool, dtype)


def bits(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


def check_equal(got, *others):
    for other in others:
        for one, another in zip(got, other, strict=True):
            np.testing.assert_array_equal(bits(one), bits(another))


QUANTISED = ("int8", "float8_e4m3fn")
SLOTS = np.array([0, 33, 17, 31, 9, 34], np.int32)  # two of them in scratch
REAL = SLOTS < 32


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "source", "heads", "width", "parts"),
    [
        *((dtype, "float32", *shape, 2) for dtype in ("float32", "bfloat16") for shape in ((3, 20), (2, 16), (1, 80))),
        *((dtype, "float32", 3, 20, 2) for dtype in QUANTISED),
        *(pytest.param(dtype, "bfloat16", 2, 16, 2, marks=pytest.mark.long) for dtype in QUANTISED),
        *(pytest.param(dtype, "float16", 1, 80, 2, marks=pytest.mark.long) for dtype in QUANTISED),
        ("bfloat16", "float32", 1, 24, 1), ("int8", "float32", 1, 24, 1),
    ],
)  # fmt: skip
def test_append_kv(dtype, source, heads, width, parts):
    """Of one part, which is latents, too."""
    shape = {"heads": heads, "width": width, "parts": parts}
    pool, kv = pool_of(dtype, **shape), np.random.default_rng(1).standard_normal((parts, 6, heads, width))
    kv = jnp.asarray(kv, source)
    arrays, new = [pool], [kv.astype(dtype)]
    if dtype in QUANTISED:
        arrays, new = [pool, pool_of(**shape)[..., 0]], quantise(kv, dtype)
    args = pool, jnp.int32(1), kv[0], kv[1] if parts > 1 else None, jnp.asarray(SLOTS), *arrays[1:]
    wanted, index = (
        [np.array(array) for array in arrays],
        (SLOTS[REAL] // 4, 1, slice(None), slice(None), SLOTS[REAL] % 4),
    )
    for array, values in zip(wanted, new, strict=True):
        array[index] = np.asarray(values).reshape(parts, 6, *array[index].shape[2:]).swapaxes(0, 1)[REAL]
    found = [
        jax.jit(function)(*args)
        for function in (functools.partial(triton.append_kv, interpret=True), tpu.append_kv, xla.append_kv)
    ]
    check_equal(wanted, *([one] if len(arrays) == 1 else one for one in found))


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
@pytest.mark.parametrize(
    ("dtype", "heads", "parts"),
    [
        ("float32", 200, 2), ("int8", 3, 2), ("bfloat16", 1, 1),
        pytest.param("float32", 1, 2, marks=pytest.mark.long), pytest.param("bfloat16", 200, 2, marks=pytest.mark.long),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("what", ["pool", "scales"])
def test_moving_blocks(dtype, heads, parts, count, what):
    """Whole blocks, the first tokens of blocks, and out and back through a staging array."""
    pool = pool_of(dtype, heads=heads, parts=parts)
    pool = pool if what == "pool" else pool[..., 0]
    sources, targets = jnp.array([1, 2, 3, 8], jnp.int32), jnp.array([4, 5, 6, 8], jnp.int32)
    tokens, old = jnp.array([3, 0, 4, 2], jnp.int32), np.asarray(pool)
    whole, first, back = (np.array(pool) for _ in range(3))
    for source, target, number in zip(sources[:count], targets[:count], tokens[:count], strict=True):
        whole[target], back[target] = old[source], old[source][..., ::-1]
        first[target, ..., :number, :] = old[source, ..., :number, :]
    for module, options in ((triton, {"interpret": True}), (tpu, {}), (xla, {})):
        run = {name: functools.partial(getattr(module, name), **options) for name in xla.__all__ if "blocks" in name}
        staged = run["gather_blocks"](pool, sources)
        found = [
            run["copy_blocks"](pool, sources, targets, jnp.int32(count)), staged,
            run["scatter_blocks"](pool, staged[..., ::-1], targets, jnp.int32(count)),
        ]  # fmt: skip
        wanted = [whole, old[np.asarray(sources)], back]
        if what == "pool":
            found.append(run["copy_blocks"](pool, sources, targets, jnp.int32(count), tokens))
            wanted.append(first)
        check_equal(found, wanted)


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
    pool, scales = pool_of("float8_e4m3fn"), pool_of()[..., 0]
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


@pytest.mark.long
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


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "who"), on_gpu.CHECKS)
def test_each_kernel_is_right_on_this_machine(function, who):
    try:
        on_gpu.check(function, who)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
