# SPDX-License-Identifier: Apache-2.0
"""The kernel between a layer's products and its attention: rotates Q and K, and writes K and V into a pool."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.by_token import check_by_head
from pallas_kernels.quantise import round_by, scale_for
from pallas_kernels.rotary import rotate_halves
from pallas_kernels.triton.attention import check_reach, converts_fp8

_PAIRS = 1024  # the limit in a program, so the float32 halves stay in registers


class _Static(NamedTuple):
    """The static parameters of the kernel."""

    shape: tuple[int, ...]  # the pool's, [N + 1, L, 2, K, P, D]
    heads: int  # Q
    rows: int  # the number of heads in a program
    columns: int  # the width of a half, padded to a power of two

    @property
    def q_tiles(self) -> int:
        """The number of programs for Q of a token."""
        return pl.cdiv(self.heads, self.rows)

    @property
    def kv_tiles(self) -> int:
        """The number of programs for K of a token, and for V."""
        return pl.cdiv(self.shape[3], self.rows)


def rope_append(q, k, v, cos, sin, pool, layer, slots, scales=None, *, interpret=False):
    """Rotates and writes as `xla.rope_append`: a program takes some heads of a token, of Q, K or V.

    Q, K and V are concatenated. If they are products with the same x, XLA makes them a single product without a copy.
    """
    if not q.dtype == k.dtype == v.dtype or q.dtype.itemsize > 4:
        got = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise NotImplementedError(f"triton: got q, k and v of {got}, wanted one dtype of at most 32 bits")
    check_append(pool)
    tokens = slots.size
    (heads, width) = q.shape[-2:]
    columns = pl.next_power_of_2(width // 2)
    rows = min(pl.next_power_of_2(k.shape[-2]), max(_PAIRS // columns, 1))
    static = _Static(pool.shape, heads, rows, columns)
    # Uses rows of all heads, because XLA recognises slices of the same product only without a reshape in between.
    x = jnp.concatenate([x.reshape(tokens, -1) for x in (q, k, v)], axis=1).reshape(tokens, -1, width)
    cos, sin = (x.reshape(tokens, width // 2) for x in (cos, sin))
    arrays = [pool.reshape(-1, width), *([] if scales is None else [scales.reshape(-1)])]
    num_warps = min(max(rows * columns * q.dtype.itemsize // (32 * 16), 1), 4)  # 16 bytes of a half per thread
    new_q, new_pool, *new_scales = pl.pallas_call(
        functools.partial(_kernel, static=static),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, heads, width), q.dtype),
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays),
        ],
        grid=(tokens, static.q_tiles + 2 * static.kv_tiles),
        input_output_aliases={5 + i: 1 + i for i in range(len(arrays))},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="rope_append",
    )(jnp.full((1,), layer, jnp.int32), x, cos, sin, slots, *arrays)
    return new_q.reshape(q.shape), new_pool.reshape(pool.shape), *(x.reshape(pool.shape[:5]) for x in new_scales)


def _kernel(
    layer_ref,  # i32[1]
    x_ref,  # [T, Q + K + K, D]
    cos_ref,
    sin_ref,  # f32[T, D / 2]
    slots_ref,  # i32[T]
    *refs,  # inputs aliased with the results; q [T, Q, D]; [(N + 1) L 2 K P, D]; scales f32[(N + 1) L 2 K P] if any
    static: _Static,
):
    q_ref, pool_ref, *scales_refs = refs[len(refs) // 2 :]
    shape, heads, rows, columns = static
    kv_heads = shape[3]
    half = shape[5] // 2
    scratch_slot = (shape[0] - 1) * shape[4]
    token = pl.program_id(0)
    tile = pl.program_id(1)
    slot = slots_ref[token]
    is_q = tile < static.q_tiles
    kv_tile = jnp.maximum(tile - static.q_tiles, 0)
    kv_part = kv_tile // static.kv_tiles  # K or V; 0 for Q
    head = jnp.where(is_q, tile, kv_tile % static.kv_tiles) * rows + jnp.arange(rows, dtype=jnp.int32)[:, None]
    column = jnp.arange(columns, dtype=jnp.int32)
    present = head < jnp.where(is_q, np.int32(heads), np.int32(kv_heads))
    inside = jnp.broadcast_to(present, (rows, columns)) & jnp.broadcast_to(column[None] < half, (rows, columns))

    def load(column):
        x_head = head + jnp.where(is_q, np.int32(0), heads + kv_part * kv_heads)
        return plt.load(x_ref.at[token, x_head, column[None]], mask=inside, other=0.0).astype(jnp.float32)

    def angle(ref):
        return plt.load(ref.at[token, column], mask=column < half, other=0.0)[None]

    halves = load(column), load(column + half)
    rotated = rotate_halves(*halves, angle(cos_ref), angle(sin_ref))
    # K is rounded to its dtype in memory before it is quantised.
    new = [jnp.where(kv_part == 1, *pair).astype(q_ref.dtype) for pair in zip(halves, rotated, strict=True)]
    row = slot_row(shape, slot, layer_ref[0], kv_part, head)
    written = jnp.logical_not(is_q) & (slot < scratch_slot)
    if scales_refs:
        new_kv, scale = _quantise(new, pool_ref.dtype)
        plt.store(scales_refs[0].at[row], scale, mask=present & written)
    else:
        new_kv = [x.astype(pool_ref.dtype) for x in new]
    for columns_of_half, q_half, kv_half in zip((column[None], column[None] + half), new, new_kv, strict=True):
        plt.store(q_ref.at[token, head, columns_of_half], q_half, mask=inside & is_q)
        plt.store(pool_ref.at[row, columns_of_half], kv_half, mask=inside & written)


def _quantise(halves, dtype):
    """Both halves of vectors with a byte per element, and the vectors' factors f32[..., 1], as in `quantise`."""
    halves = [x.astype(jnp.float32) for x in halves]
    scale = scale_for(jnp.maximum(*(jnp.max(jnp.abs(x), axis=-1, keepdims=True) for x in halves)), dtype)
    return [round_by(x, scale, dtype) for x in halves], scale


def slot_row(shape, slot, layer, kv_part, head):
    """The row of a slot's K (`kv_part` 0) or V (1) in a pool [N + 1, L, 2, K, P, D] seen as [(N + 1) L 2 K P, D]."""
    _, layers, parts, kv_heads, size, _ = shape
    return (((slot // size * layers + layer) * parts + kv_part) * kv_heads + head) * size + slot % size


def check_append(pool):
    """Raises NotImplementedError for a pool without a kernel to write into it."""
    check_by_head("triton", pool)
    check_reach(pool)
    if pool.dtype == jnp.float8_e4m3fn and not converts_fp8():
        raise NotImplementedError("triton: nothing converts to float8_e4m3fn on a GPU before sm_89")
