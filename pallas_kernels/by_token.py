# SPDX-License-Identifier: Apache-2.0
"""Pools by token, the layout of TPUs: `[N + 1, L, P, R, W]`, R rows of width W for each token.

The rows of a token have its K and V, head by head. Narrow heads share a row, because a TPU stores rows in multiples of
128 elements:

    width 128, 2 kv heads    [ k0 ] [ v0 ] [ k1 ] [ v1 ]     R = 4, W = 128
    width 64,  2 kv heads    [ k0 v0 ] [ k1 v1 ]             R = 2, W = 128
    width 32,  2 kv heads    [ k0 v0 k1 v1 ]                 R = 1, W = 128

All other pools are by head, `[N + 1, L, 2, K, P, D]`. Blocks outside of pools are always by head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LANES = 128  # elements side by side in a TPU's memory


def token_rows(kv_heads: int, width: int) -> tuple[int, int]:
    """R and W of a pool by token. A row has a single K or V, or K and V of the fewest heads that fill it."""
    if width >= LANES:
        return 2 * kv_heads, width
    sharing = [heads for heads in range(1, kv_heads + 1) if kv_heads % heads == 0 and 2 * heads * width >= LANES]
    heads = min(sharing, default=kv_heads)
    return kv_heads // heads, 2 * heads * width


def is_by_token(pool: jax.Array) -> bool:
    """Whether a pool is by token. Arrays of scales have the same number of axes, and never are."""
    return pool.ndim == 5


def slot_axis(by_token: bool) -> int:
    """The axis of a block's slots in a pool. The elements of a slot follow it."""
    return 2 if by_token else 4


def check_by_head(implementation: str, pool: jax.Array) -> None:
    """Raises NotImplementedError for a pool by token."""
    if is_by_token(pool):
        raise NotImplementedError(f"{implementation}: got a pool with layout='tokens', wanted layout='heads'")


def head_shape(shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The shape [N + 1, L, 2, K, P, D] of the same blocks by head, where heads have this width."""
    if len(shape) != 5:
        return shape
    num_rows, num_layers, size, rows, row_width = shape
    return num_rows, num_layers, 2, rows * row_width // (2 * width), size, width


def to_tokens(k: jax.Array, v: jax.Array, pool: jax.Array) -> jax.Array:
    """The rows [T, R, W] of new tokens, from K and V [T, K, D]."""
    return jnp.stack([k, v], axis=2).reshape(-1, *pool.shape[3:])


def blocks_by_token(blocks: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    """Blocks [B, L, P, R, W] from blocks by head [B, L, 2, K, P, D]; `rows` are R and W."""
    size = blocks.shape[4]
    return blocks.transpose(0, 1, 4, 3, 2, 5).reshape(*blocks.shape[:2], size, *rows)


def blocks_by_head(blocks: jax.Array, width: int) -> jax.Array:
    """Blocks [B, L, 2, K, P, D] from blocks by token [B, L, P, R, W]."""
    return blocks.reshape(*blocks.shape[:3], -1, 2, width).transpose(0, 1, 4, 3, 2, 5)
