# SPDX-License-Identifier: Apache-2.0
"""Movement of blocks on TPUs, in plain XLA, such that pools stay in place.

A TPU stores the last two axes of an array in tiles, (8, 128) of float32. A reshape across tiles rewrites all of the
array, even in a program that touches a few rows. So these functions keep the axes of a pool:

    pool.reshape(N + 1, -1)          a copy of the pool     pool[row]                          a copy of a block
    pool[block, layer, :, :, slot]   turns the pool         pool[block, layer, kv, head, slot] writes rows of D

A pool of heads narrower than 128 is an exception. XLA stores it block-minor, so each block is spread over all of it,
and turns it in programs that read or write K/V.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import xla
from pallas_kernels.quantise import quantise

__all__ = ["append_kv", "copy_blocks", "gather_blocks", "rope_append", "scatter_blocks"]


def append_kv(pool, layer, k, v, slots, scales=None):
    """Equals `xla.append_kv`. Writes a row of D at a time."""
    scratch = pool.shape[0] - 1
    parts, heads, size = pool.shape[2:5]
    block = slots // size
    # As in `xla.append_kv`, every dropped token has a distinct index.
    block = jnp.where(block < scratch, block, scratch + 1 + jnp.arange(block.size, dtype=jnp.int32))
    part = jnp.arange(parts, dtype=jnp.int32)[None, :, None]
    head = jnp.arange(heads, dtype=jnp.int32)[None, None]
    index = block[:, None, None], layer, part, head, (slots % size)[:, None, None]
    kv = jnp.stack([k] if v is None else [k, v], axis=1)

    def put(array, new):
        return array.at[index].set(new, mode="drop", wrap_negative_indices=False, unique_indices=True)

    if scales is None:
        return put(pool, kv.astype(pool.dtype))
    rounded, scale = quantise(kv, pool.dtype)
    return put(pool, rounded), put(scales, scale[..., 0])


rope_append = functools.partial(xla.rope_append, append=append_kv)


def _axes_kept(pool: jax.Array) -> jax.Array:
    return pool


copy_blocks = functools.partial(xla.copy_blocks, as_rows=_axes_kept)
scatter_blocks = functools.partial(xla.scatter_blocks, as_rows=_axes_kept)


def gather_blocks(pool: jax.Array, blocks: jax.Array) -> jax.Array:
    """Equals `xla.gather_blocks`."""
    return pool.at[blocks].get(mode="promise_in_bounds", wrap_negative_indices=False)
