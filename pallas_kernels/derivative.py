# SPDX-License-Identifier: Apache-2.0
"""What jax differentiates in place of any implementation: the same functions in plain XLA, without loops.

jax cannot differentiate a Pallas kernel that writes in place, nor reverse a loop whose trip count is data. Shapes use
the legend of `pallas_kernels.xla`. A derivative with respect to a pool is an array of the pool's size.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels import xla
from pallas_kernels.xla import gather_blocks

__all__ = ["append_kv", "copy_blocks", "decode_attention", "gather_blocks", "prefill_attention", "scatter_blocks"]

decode_attention = functools.partial(xla.decode_attention, in_one_tile=True)
prefill_attention = functools.partial(xla.prefill_attention, in_one_tile=True)


def append_kv(pool, layer, k, v, slots, scales=None):
    """As `xla.append_kv`; NotImplementedError for a pool of bytes."""
    if pool.dtype.itemsize == 1:
        raise NotImplementedError(
            f"append_kv: got a derivative of rounding to {pool.dtype}, wanted jax.lax.stop_gradient of the K/V, or a "
            "pool that is not quantised"
        )
    return xla.append_kv(pool, layer, k, v, slots, scales)


def copy_blocks(pool, sources, targets, count, tokens=None):
    """As `xla.copy_blocks`, but in any order: no target is a source, and no two targets are the same."""
    blocks = pool.at[sources].get(mode="clip", wrap_negative_indices=False)
    if tokens is not None:
        kept = lax.broadcasted_iota(jnp.int32, blocks.shape, 4) >= tokens.reshape(-1, *[1] * (pool.ndim - 1))
        blocks = jnp.where(kept, pool.at[targets].get(mode="clip", wrap_negative_indices=False), blocks)
    return scatter_blocks(pool, blocks, targets, count)


def scatter_blocks(pool, staged, blocks, count):
    """As `xla.scatter_blocks`."""
    number = jnp.arange(blocks.size, dtype=jnp.int32)
    # As in `xla.append_kv` every dropped block has an index of its own.
    row = jnp.where(number < count, blocks, pool.shape[0] + number)
    return pool.at[row].set(staged, mode="drop", wrap_negative_indices=False, unique_indices=True)
