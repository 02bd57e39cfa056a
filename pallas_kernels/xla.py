# SPDX-License-Identifier: Apache-2.0
"""Paged attention and block movement in plain XLA: the oracle of every other implementation, and its fallback.

A pool is `[N + 1, L, 2, K, P, D]`: N blocks and one scratch block that padding may write and nobody reads; L
layers; K and V; K kv heads; P slots to a block; head width D. Slot s is position s % P of block s // P. Block
tables hold pool rows, all of them in 0..N: what a table holds beyond a row's length is never read. Further: R rows
of the block tables, M blocks to a row, T tokens in a call, Q query heads.

A pool of latents is `[N + 1, L, 1, 1, P, D]`: V is the first `values` columns of K, which all query heads share.

A quantised pool is of int8 or float8_e4m3fn and has `scales` f32[N + 1, L, 2, K, P] beside it, one per token, head
and K or V: the K/V are pool * scale. The functions that move blocks of a pool move those of scales too.

Slots that hold no token of the row that reads them may hold anything, NaN included, and so may their scales; it never
reaches a result.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
    """Writes new K/V into their slots, in place where the pool is donated.

    Args:
      pool: [N + 1, L, 2, K, P, D].
      layer: i32[].
      k: [T, K, D].
      v: [T, K, D]; None for a pool of latents.
      slots: i32[T]; distinct, but for those of the scratch block: what goes there is dropped.
      scales: f32[N + 1, L, 2, K, P] of a quantised pool, in place where donated.

    Returns:
      The pool with the tokens' K/V in the pool's dtype; with `scales` quantised, and the scales with theirs.
    """
    scratch = pool.shape[0] - 1
    size = pool.shape[4]
    block = slots // size
    # Every dropped token gets an index of its own beyond the pool, so that XLA may take all indices as distinct.
    block = jnp.where(block < scratch, block, scratch + 1 + jnp.arange(block.size, dtype=jnp.int32))
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
):
    """Rotates Q and K by their tokens' positions, and writes K and V into their slots as `append_kv`.

    Args:
      q: [..., Q, D] of T tokens on any axes; the pairs of dimensions are (i, i + D / 2).
      k: [..., K, D].
      v: [..., K, D]; not rotated.
      cos: f32[..., 1, D / 2]; of each pair's angle.
      sin: likewise.
      pool: [N + 1, L, 2, K, P, D].
      layer: i32[].
      slots: i32[T]; as of `append_kv`.
      scales: f32[N + 1, L, 2, K, P] of a quantised pool, in place where donated.

    Returns:
      q rotated, also where K/V are dropped; the pool; and with `scales` the scales. Rotated vectors are rounded to the
      dtype that they came in.
    """
    # Rotated on the axes that they come with: on others XLA fuses the norms before it otherwise, with other bits.
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (rotate(k, (cos, sin)), v))
    written = append_kv(pool, layer, k, v, slots, scales)
    return rotate(q, (cos, sin)), *((written,) if scales is None else written)


def copy_blocks(
    pool: jax.Array, sources: jax.Array, targets: jax.Array, count: jax.Array, tokens: jax.Array | None = None
) -> jax.Array:
    """Copies blocks inside a pool, in order, in place where the pool is donated. Costs `count` copies.

    Args:
      pool: [N + 1, L, 2, K, P, D], or scales [N + 1, L, 2, K, P].
      sources: i32[E]; pool rows.
      targets: i32[E]; pool rows.
      count: i32[]; how many leading entries to execute.
      tokens: i32[E]; how many leading slots of each block to copy. None: whole blocks.
    """

    def copy(i, rows):
        block = lax.dynamic_index_in_dim(rows, sources[i], allow_negative_indices=False)
        if tokens is not None:
            slot = jnp.arange(block.size, dtype=jnp.int32) // math.prod(pool.shape[5:]) % pool.shape[4]
            old = lax.dynamic_index_in_dim(rows, targets[i], allow_negative_indices=False)
            block = jnp.where(slot.reshape(block.shape) < tokens[i], block, old)
        return lax.dynamic_update_index_in_dim(rows, block, targets[i], 0, allow_negative_indices=False)

    return lax.fori_loop(0, count, copy, _as_rows(pool)).reshape(pool.shape)


def _as_rows(pool: jax.Array) -> jax.Array:
    """A pool in the shape in which XLA copies its blocks best on CPU.

    A block as one row takes a third of the time of one of six axes. But where an axis is 1 XLA does not see that the
    pool as rows is the pool, and copies all of it.
    """
    return pool.reshape(pool.shape[0], -1) if min(pool.shape[1:]) > 1 else pool


def gather_blocks(pool: jax.Array, blocks: jax.Array) -> jax.Array:
    """Blocks of a pool, one after the other.

    Args:
      pool: [N + 1, L, 2, K, P, D], or scales [N + 1, L, 2, K, P].
      blocks: i32[B]; pool rows, padding is the scratch row.

    Returns:
      [B, L, 2, K, P, D], or [B, L, 2, K, P].
    """
    _, *shape, size, width = pool.shape
    tiles = int(np.prod(shape))
    row = blocks[:, None] * tiles + jnp.arange(tiles, dtype=jnp.int32)[None]
    # A row is a tile, not a block: XLA's CPU copy of longer rows is slow.
    matrix = pool.reshape(-1, size * width)
    return matrix.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False).reshape(-1, *shape, size, width)


def scatter_blocks(pool: jax.Array, staged: jax.Array, blocks: jax.Array, count: jax.Array) -> jax.Array:
    """Puts blocks back into a pool, in place where the pool is donated. Costs `count` blocks.

    Args:
      pool: [N + 1, L, 2, K, P, D], or scales [N + 1, L, 2, K, P].
      staged: [B, L, 2, K, P, D], or [B, L, 2, K, P].
      blocks: i32[B]; pool rows.
      count: i32[]; how many leading entries to put back.
    """
    staged = staged.reshape(-1, *_as_rows(pool).shape[1:])

    def put(i, rows):
        block = lax.dynamic_index_in_dim(staged, i, allow_negative_indices=False)
        return lax.dynamic_update_index_in_dim(rows, block, blocks[i], 0, allow_negative_indices=False)

    return lax.fori_loop(0, count, put, _as_rows(pool)).reshape(pool.shape)
