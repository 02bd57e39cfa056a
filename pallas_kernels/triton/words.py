# SPDX-License-Identifier: Apache-2.0
"""Reads K/V with a byte per element in words of four bytes. Reading single bytes would take longer than the memory.

Byte j of a word holds column 4 c + j of a head. Attention makes a separate product for each j, with the same columns of
q. float16 holds every int8 and every float8_e4m3fn exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

WORD = 4  # bytes


def as_words(pool: jax.Array) -> jax.Array:
    """A pool [..., D] of bytes as i32[-1, D / 4], without a copy."""
    return lax.bitcast_convert_type(pool.reshape(-1, pool.shape[-1] // WORD, WORD), jnp.int32)


def unpack(words: jax.Array, dtype, interpret: bool) -> list[jax.Array]:
    """Four float16 arrays of the words' shape: bytes 0 to 3 of each word, as numbers of the pool's dtype."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    if interpret:
        parts = [((words << (24 - 8 * byte)) >> 24).astype(jnp.int8) for byte in range(WORD)]
        return [(x if integer else lax.bitcast_convert_type(x, dtype)).astype(jnp.float16) for x in parts]
    return [_convert(words, _INT8 if integer else _FP8, byte) for byte in range(WORD)]


# PTX that makes two float16, $0, from byte {0} of two words, $1 and $2. {1} is {0} + 4. prmt gathers the two bytes.
# With its sign flipped, an int8 b is b + 128, which as the last bits of the float16 1024 makes 1152 + b. lop3's table
# 0x6a is (x & y) ^ z.
_INT8 = """{{ .reg .b32 offset; mov.b32 offset, 0x64806480; prmt.b32 $0, $1, $2, 0x0{1}0{0};
lop3.b32 $0, $0, 0x00ff00ff, offset, 0x6a; sub.f16x2 $0, $0, offset; }}"""
_FP8 = """{{ .reg .b32 pair; .reg .b16 low, high; prmt.b32 pair, $1, $2, 0x00{1}{0}; mov.b32 {{low, high}}, pair;
cvt.rn.f16x2.e4m3x2 $0, low; }}"""


def _convert(words: jax.Array, ptx: str, byte: int) -> jax.Array:
    result = jax.ShapeDtypeStruct(words.shape, jnp.float16)
    (converted,) = plt.elementwise_inline_asm(
        ptx.format(byte, WORD + byte), args=[words], constraints="=r,r,r", pack=2, result_shape_dtypes=[result]
    )
    return converted


def power_below(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest power of two up to x, f32[X] of at least 0, and its inverse, for x of a size that has both."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7F800000)
    bits = jnp.clip(bits, np.int32(1 << 23), np.int32(253 << 23))
    inverse = np.int32(254 << 23) - bits
    return lax.bitcast_convert_type(bits, jnp.float32), lax.bitcast_convert_type(inverse, jnp.float32)
