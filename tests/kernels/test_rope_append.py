# SPDX-License-Identifier: Apache-2.0
"""The kernel that rotates Q and K and writes K and V, against its twin in XLA, bit for bit, in interpret mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import triton, xla
from tests.kernels.attention import how

BLOCKS, SIZE, LAYER = 6, 4, 1
SLOTS = np.array([3, 24, 17, 22, 8, 27, 0], np.int32)  # two of them in scratch, which is block 6
NUMBERS = {"float32": 2047, "float16": 1023, "bfloat16": 127}


def arguments(dtype="float32", heads=6, kv_heads=3, width=20, stored=None, seed=0):
    """Q, K, V, angles, a pool that is NaN (-128 of int8) and scales likewise; and where they are.

    float32 holds the products exactly, so that a compiler of a CPU changes nothing if it fuses them with the sums.
    """
    rng = np.random.default_rng(seed)

    def numbers(most, *shape):
        return rng.integers(-most, most + 1, shape) / (most + 1)

    most, tokens = NUMBERS[dtype], SLOTS.size
    q, k, v = (jnp.asarray(2 * numbers(most, tokens, n, width), dtype) for n in (heads, kv_heads, kv_heads))
    cos, sin = (jnp.asarray(numbers(4095, tokens, 1, width // 2), jnp.float32) for _ in range(2))
    shape = BLOCKS + 1, LAYER + 1, 2, kv_heads, SIZE, width
    pool = jnp.full(shape, -128 if stored == "int8" else np.nan, stored or dtype)
    scales = (jnp.full(shape[:5], np.nan, jnp.float32),) if stored else ()
    return q, k, v, cos, sin, pool, jnp.int32(LAYER), jnp.asarray(SLOTS), *scales


def kernel(*args):
    return pallas_kernels.call("rope_append", *args, **how("triton"))


def bits(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


def check_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(bits(one), bits(other))


MORE = pytest.mark.long


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "width", "stored"),
    [
        ("float32", 6, 3, 20, None),
        ("bfloat16", 4, 1, 80, "int8"),
        ("bfloat16", 16, 8, 512, None),  # a program has some of the kv heads
        pytest.param("float32", 2, 2, 16, "float8_e4m3fn", marks=MORE),
        pytest.param("float16", 8, 1, 32, None, marks=MORE),
        pytest.param("bfloat16", 3, 3, 64, "float8_e4m3fn", marks=MORE),
        pytest.param("bfloat16", 64, 8, 64, None, marks=MORE),
        pytest.param("float16", 8, 8, 128, "int8", marks=MORE),
        pytest.param("float32", 32, 8, 128, None, marks=MORE),
        pytest.param("bfloat16", 9, 3, 256, "int8", marks=MORE),
        pytest.param("float32", 5, 5, 512, "int8", marks=MORE),
        pytest.param("bfloat16", 1, 1, 2, None, marks=MORE),
    ],
)
def test_it_is_rotation_and_append_in_every_bit(dtype, heads, kv_heads, width, stored):
    args = arguments(dtype, heads, kv_heads, width, stored)
    got, wanted = jax.jit(kernel)(*args), jax.jit(xla.rope_append)(*args)
    check_same(got, wanted)
    rotated, pool, *_ = got
    assert np.all(np.isfinite(np.asarray(rotated, np.float32)))
    written, real = np.zeros(pool.shape, bool), SLOTS[SLOTS < BLOCKS * SIZE]
    written[real // SIZE, LAYER, :, :, real % SIZE] = True
    np.testing.assert_array_equal(bits(pool) != bits(args[5]), written)
    if dtype == "float32" and stored is None:
        k, v, cos, sin = (np.asarray(x, np.float64) for x in args[1:5])
        turn = (cos + 1j * sin) * (k[..., : width // 2] + 1j * k[..., width // 2 :])
        new = np.asarray(pool)[SLOTS[0] // SIZE, LAYER, :, :, SLOTS[0] % SIZE]
        np.testing.assert_allclose(new, [np.concatenate([turn.real, turn.imag], -1)[0], v[0]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stored", [None, pytest.param("int8", marks=pytest.mark.long)])
def test_several_caches_at_once(stored):
    batch = jax.tree.map(lambda *x: jnp.stack(x), *(arguments(stored=stored, seed=seed) for seed in (0, 1)))
    check_same(jax.jit(jax.vmap(kernel))(*batch), jax.jit(jax.vmap(xla.rope_append))(*batch))


@pytest.mark.long
@pytest.mark.parametrize("stored", [None, "int8"])
def test_64_bit_types_change_nothing(stored):
    args = arguments("bfloat16", stored=stored)
    wanted = jax.jit(xla.rope_append)(*args)
    with jax.enable_x64(True):
        check_same(jax.jit(kernel)(*args), wanted)
        check_same(jax.jit(xla.rope_append)(*args), wanted)


def test_tokens_on_several_axes_are_the_same_tokens():
    args = arguments()
    parted = [x.reshape(7, 1, *x.shape[1:]) for x in args[:5]]
    for function in (kernel, xla.rope_append):
        flat, (q, pool) = (jax.jit(function)(*first, *args[5:]) for first in (args[:5], parted))
        check_same((q.reshape(flat[0].shape), pool), flat)


def test_what_the_kernel_cannot_serve_is_refused():
    q, k, v, *rest = arguments()
    with pytest.raises(NotImplementedError, match="got q, k and v of float32, float32 and bfloat16, wanted one dtype"):
        triton.rope_append(q, k, v.astype(jnp.bfloat16), *rest, interpret=True)
