# SPDX-License-Identifier: Apache-2.0
"""The functions that jax differentiates in place of any implementation: plain XLA, without loops.

jax cannot differentiate a Pallas kernel that writes in place, and cannot reverse a loop whose trip count is data.
Shapes use the legend of `pallas_kernels.xla`. Attention takes time and memory for all slots of the block tables, and a
derivative with respect to a pool is an array of the pool's size.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import xla
from pallas_kernels.by_token import blocks_by_head, head_shape, is_by_token, slot_axis
from pallas_kernels.xla import gather_blocks
from pallas_kernels.xla_attention import seen_slots

__all__ = [
    "append_kv",
    "copy_blocks",
    "decode_attention",
    "gather_blocks",
    "prefill_attention",
    "rope_append",
    "scatter_blocks",
]


def append_kv(pool, layer, k, v, slots, scales=None):
    """Equals `xla.append_kv`. Raises NotImplementedError for a quantised pool."""
    _check_rounding("append_kv", pool, "the K/V")
    return xla.append_kv(pool, layer, k, v, slots, scales)


def rope_append(q, k, v, cos, sin, pool, layer, slots, scales=None):
    """Equals `xla.rope_append`. Raises NotImplementedError for a quantised pool."""
    _check_rounding("rope_append", pool, "q and the K/V")
    return xla.rope_append(q, k, v, cos, sin, pool, layer, slots, scales)


def _check_rounding(name: str, pool, new: str) -> None:
    if pool.dtype.itemsize == 1:
        raise NotImplementedError(
            f"{name}: got a derivative of rounding to {pool.dtype}, wanted jax.lax.stop_gradient of {new}, or a "
            "pool that is not quantised"
        )


def copy_blocks(pool, sources, targets, count, tokens=None, by_token=False):
    """Copies as `xla.copy_blocks`, but in any order: no target is a source, and no two targets are equal."""
    blocks = pool.at[sources].get(mode="clip", wrap_negative_indices=False)
    if tokens is not None:
        slot = lax.broadcasted_iota(jnp.int32, blocks.shape, slot_axis(by_token))
        is_old = slot >= tokens.reshape(-1, *[1] * (pool.ndim - 1))
        blocks = jnp.where(is_old, pool.at[targets].get(mode="clip", wrap_negative_indices=False), blocks)
    return scatter_blocks(pool, blocks, targets, count)


def scatter_blocks(pool, staged, blocks, count):
    """Equals `xla.scatter_blocks`."""
    index = jnp.arange(blocks.size, dtype=jnp.int32)
    # As in `xla.append_kv`, every dropped block has a distinct index.
    row = jnp.where(index < count, blocks, pool.shape[0] + index)
    return pool.at[row].set(staged, mode="drop", wrap_negative_indices=False, unique_indices=True)


def _attend(
    q,
    pool,
    layer,
    tables,
    first,
    count,
    *,
    scale,
    window,
    sink_tokens,
    soft_cap,
    sinks,
    scales,
    values,
    stride=1,
    offset=0,
):
    """Attends as `xla_attention._attend`, with all slots of a table at once: [W, K, C, G, S] scores."""
    num_tiles, chunk, _, width = q.shape
    parts, kv_heads, size = head_shape(pool.shape, width)[2:5]
    position, length = seen_slots(first, count, chunk, window, stride, offset)
    slot = jnp.arange(tables.shape[1] * size, dtype=jnp.int32)[None]
    is_seen = (slot[None] <= position[:, :, None]) & (slot < length[:, None])[:, None]
    if window is not None:
        is_seen &= (slot[None] > position[:, :, None] - window) | (slot[None] < sink_tokens)
    is_read = jnp.any(is_seen, axis=1)[None, :, None, :, None]

    def fetch(array, width):  # 0 * NaN is NaN, so slots that no query sees are 0
        array = array.at[tables, layer].get(mode="promise_in_bounds", wrap_negative_indices=False)
        if is_by_token(pool):
            array = blocks_by_head(array, width)
        array = jnp.moveaxis(array.reshape(*array.shape[:5], width), (2, 3), (0, 2)).astype(jnp.float32)
        return jnp.where(is_read, array.reshape(parts, num_tiles, kv_heads, -1, width), 0.0)

    kv = fetch(pool, width) if scales is None else fetch(pool, width) * fetch(scales, 1)
    keys, v = kv if values is None else (kv[0], kv[0, ..., :values])
    queries = (q.astype(jnp.float32) * np.float32(scale)).reshape(num_tiles, chunk, kv_heads, -1, width)
    score = jnp.einsum("wckgd,wksd->wkcgs", queries, keys, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        score = np.float32(soft_cap) * jnp.tanh(score / np.float32(soft_cap))
    score = jnp.where(is_seen[:, None, :, None], score, -jnp.inf)
    highest = jnp.max(score, axis=-1, initial=-1e30)  # finite: score - highest is never inf - inf
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, 1, -1)
        highest = jnp.maximum(highest, sinks)
    highest = lax.stop_gradient(highest)  # it cancels out
    weight = jnp.exp(score - highest[..., None])
    denominator = jnp.sum(weight, axis=-1) + (0.0 if sinks is None else jnp.exp(sinks - highest))
    out = jnp.einsum("wkcgs,wksd->wckgd", weight, v, preferred_element_type=jnp.float32)
    divisor = jnp.where(denominator > 0, denominator, 1.0)
    out = out / divisor.swapaxes(1, 2)[..., None]
    lse = jnp.where(denominator > 0, highest + jnp.log(divisor), -jnp.inf)
    is_query = (jnp.arange(chunk, dtype=jnp.int32)[None] < count[:, None])[..., None, None]
    out = jnp.where(is_query, out.reshape(*q.shape[:-1], -1).astype(q.dtype), jnp.zeros((), q.dtype))
    return out, lse.swapaxes(1, 2).reshape(q.shape[:-1])


decode_attention = functools.partial(xla.decode_attention, attend=_attend)
prefill_attention = functools.partial(xla.prefill_attention, attend=_attend)
