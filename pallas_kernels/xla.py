# SPDX-License-Identifier: Apache-2.0
"""Paged attention and block movement in plain XLA: the test oracle of all other implementations, and their fallback.

A pool is `[N + 1, L, 2, K, P, D]`: N blocks and a scratch block, L layers, K and V, K kv heads, P slots per block, and
head width D. Padding may write to the scratch block, and nothing reads it. Slot s is position s % P of block s // P.
Block tables hold pool rows, all in 0..N. Entries beyond a row's length are never read. Other letters: R rows of the
block tables, M blocks per row, T tokens in a call, Q query heads.

A pool of latents is `[N + 1, L, 1, 1, P, D]`: V is the first `values` columns of K, which all query heads share.

A pool by token is `[N + 1, L, P, R, W]` (`pallas_kernels.by_token`). It is never quantised.

A quantised pool is int8 or float8_e4m3fn, together with `scales` f32[N + 1, L, 2, K, P], a scale per token, head and K
or V: the K/V are pool * scale. The functions that move blocks of a pool also move blocks of scales.

Slots without a token of the row that reads them may hold anything, including NaN, and so may their scales. Their
contents never reach a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.by_token import is_by_token, slot_axis, to_tokens
from pallas_kernels.quantise import quantise
from pallas_kernels.rotary import rotate
from pallas_kernels.xla_attention import decode_attention, prefill_attention

__all__ = [
    "append_kv",
    "copy_blocks",
    "decode_attention",
    "gather_blocks",
    "prefill_attention",
    "rope_append",
    "scatter_blocks",
]


def append_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array | None,
    slots: jax.Array,
    scales: jax.Array | None = None,
):
    """Writes new K/V into their slots, in place if the pool is donated.

    Args:
      pool: [N + 1, L, 2, K, P, D].
      layer: i32[].
      k: [T, K, D].
      v: [T, K, D]; None for a pool of latents.
      slots: i32[T]; distinct, except for slots of the scratch block, whose tokens are dropped.
      scales: f32[N + 1, L, 2, K, P] of a quantised pool, in place if donated.

    Returns:
      The pool with the tokens' K/V in the pool's dtype. With `scales` they are quantised, and the scales are returned
      too.
    """
    scratch = pool.shape[0] - 1
    size = pool.shape[slot_axis(is_by_token(pool))]
    block = slots // size
    # Every dropped token gets a different index beyond the pool, so XLA may assume distinct indices.
    block = jnp.where(block < scratch, block, scratch + 1 + jnp.arange(block.size, dtype=jnp.int32))
    if is_by_token(pool):
        assert v is not None  # latents have no layout by token
        target = pool.at[block, layer, slots % size]
        rows = to_tokens(k, v, pool).astype(pool.dtype)
        return target.set(rows, mode="drop", wrap_negative_indices=False, unique_indices=True)
    kv = jnp.stack([k] if v is None else [k, v], axis=1)

    def put(array, new):
        target = array.at[block, layer, :, :, slots % size]
        return target.set(new, mode="drop", wrap_negative_indices=False, unique_indices=True)

    if scales is None:
        return put(pool, kv.astype(pool.dtype))
    rounded, scale = quantise(kv, pool.dtype)
    return put(pool, rounded), put(scales, scale[..., 0])


def rope_append(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    slots: jax.Array,
    scales: jax.Array | None = None,
    append: Callable[..., Any] | None = None,
):
    """Rotates Q and K by their tokens' positions, and writes K and V into their slots as `append_kv`.

    Args:
      q: [..., Q, D] of T tokens on any axes. The pairs of dimensions are (i, i + D / 2).
      k: [..., K, D].
      v: [..., K, D]; not rotated.
      cos: f32[..., 1, D / 2]; the cosine of each pair's angle.
      sin: f32[..., 1, D / 2]; the sine of each pair's angle.
      pool: [N + 1, L, 2, K, P, D].
      layer: i32[].
      slots: i32[T]; see `append_kv`.
      scales: f32[N + 1, L, 2, K, P] of a quantised pool, in place if donated.
      append: a function to write K and V. Defaults to `append_kv`.

    Returns:
      The rotated q, also for dropped tokens, the pool, and with `scales` the scales. Rotated vectors are rounded to
      their dtype.
    """
    # Rotates before the reshape. With other axes XLA would fuse the preceding norms differently, and the bits would
    # differ.
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (rotate(k, (cos, sin)), v))
    written = (append or append_kv)(pool, layer, k, v, slots, scales)
    return rotate(q, (cos, sin)), *((written,) if scales is None else written)


def copy_blocks(
    pool: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    count: jax.Array,
    tokens: jax.Array | None = None,
    by_token: bool = False,
    as_rows: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Copies blocks inside a pool, in order, in place if the pool is donated. Costs `count` copies.

    Args:
      pool: [N + 1, L, 2, K, P, D], or scales [N + 1, L, 2, K, P].
      sources: i32[E]; pool rows.
      targets: i32[E]; pool rows.
      count: i32[]; the number of leading entries to copy.
      tokens: i32[E]; the number of leading slots of each block to copy. None means whole blocks.
      by_token: whether the pool is by token, for `tokens`. Its shape does not tell, because scales have five axes too.
      as_rows: a function that gives the pool the shape in which its blocks are copied. Defaults to a CPU's best shape.
    """
    as_rows = as_rows or _as_rows
    axis = slot_axis(by_token)

    def copy(i, rows):
        block = lax.dynamic_index_in_dim(rows, sources[i], allow_negative_indices=False)
        if tokens is not None:
            slot = jnp.arange(block.size, dtype=jnp.int32) // math.prod(pool.shape[axis + 1 :]) % pool.shape[axis]
            old = lax.dynamic_index_in_dim(rows, targets[i], allow_negative_indices=False)
            block = jnp.where(slot.reshape(block.shape) < tokens[i], block, old)
        return lax.dynamic_update_index_in_dim(rows, block, targets[i], 0, allow_negative_indices=False)

    return lax.fori_loop(0, count, copy, as_rows(pool)).reshape(pool.shape)


def _as_rows(pool: jax.Array) -> jax.Array:
    """Reshapes a pool so XLA copies its blocks fastest on a CPU.

    Copying a block as a row takes a third of the time of a block with six axes. But if an axis is 1, XLA does not
    recognise the reshaped pool as the same array, and copies all of it.
    """
    return pool.reshape(pool.shape[0], -1) if min(pool.shape[1:]) > 1 else pool


def gather_blocks(pool: jax.Array, blocks: jax.Array) -> jax.Array:
    """Blocks of a pool, stacked.

    Args:
      pool: [N + 1, L, 2, K, P, D], or scales [N + 1, L, 2, K, P].
      blocks: i32[B]; pool rows. The scratch row is padding.

    Returns:
      [B, L, 2, K, P, D], or [B, L, 2, K, P].
    """
    _, *shape, size, width = pool.shape
    tiles = int(np.prod(shape))
    row = blocks[:, None] * tiles + jnp.arange(tiles, dtype=jnp.int32)[None]
    # A row is a tile, not a block, because XLA's CPU backend copies longer rows slowly.
    matrix = pool.reshape(-1, size * width)
    return matrix.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False).reshape(-1, *shape, size, width)


def scatter_blocks(
    pool: jax.Array,
    staged: jax.Array,
    blocks: jax.Array,
    count: jax.Array,
    as_rows: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Writes stacked blocks into a pool, in place if the pool is donated. Costs `count` blocks.

    Args:
      pool: [N + 1, L, 2, K, P, D], or scales [N + 1, L, 2, K, P].
      staged: [B, L, 2, K, P, D], or [B, L, 2, K, P].
      blocks: i32[B]; pool rows.
      count: i32[]; the number of leading entries to write.
      as_rows: as in `copy_blocks`.
    """
    as_rows = as_rows or _as_rows
    staged = staged.reshape(-1, *as_rows(pool).shape[1:])

    def put(i, rows):
        block = lax.dynamic_index_in_dim(staged, i, allow_negative_indices=False)
        return lax.dynamic_update_index_in_dim(rows, block, blocks[i], 0, allow_negative_indices=False)

    return lax.fori_loop(0, count, put, as_rows(pool)).reshape(pool.shape)
