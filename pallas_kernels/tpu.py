# SPDX-License-Identifier: Apache-2.0
"""Paged attention and movement of blocks on TPUs, such that pools stay in place.

A TPU stores the last two axes of an array in tiles, (8, 128) of float32. A reshape across tiles rewrites all of the
array, even in a program that touches a few rows. So these functions keep the axes of a pool:

    pool.reshape(N + 1, -1)          a copy of the pool     pool[row]                          a copy of a block
    pool[block, layer, :, :, slot]   turns the pool         pool[block, layer, kv, head, slot] writes rows of D

A pool by head whose heads are narrower than 128 is an exception. XLA stores it block-minor, so each block is spread
over all of it, and turns it in programs that read or write K/V. A pool by token has no narrow rows.

Attention over a pool by token is jax's own kernel, `jax.experimental.pallas.ops.tpu.ragged_paged_attention`. XLA serves
all other attention.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import xla
from pallas_kernels.by_token import LANES, is_by_token
from pallas_kernels.quantise import quantise

__all__ = [
    "append_kv",
    "copy_blocks",
    "decode_attention",
    "gather_blocks",
    "prefill_attention",
    "rope_append",
    "scatter_blocks",
]

_KERNEL = "jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel"
# K/V slots and queries of a step of the kernel. With a device to ask it would choose by the chip.
_KERNEL_SLOTS = 256
_KERNEL_QUERIES = 32


def append_kv(pool, layer, k, v, slots, scales=None):
    """Equals `xla.append_kv`. Writes a row of D at a time, or a token of a pool by token."""
    if is_by_token(pool):
        return xla.append_kv(pool, layer, k, v, slots)
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


def decode_attention(q, pool, layer, tables, lengths, *, fixed_split=False, **options):
    """Attends as `xla.decode_attention`. Each row is a query of the kernel, also a row of length 0."""
    del fixed_split  # the kernel computes a row by itself
    num_rows = q.shape[0]
    bounds = jnp.arange(num_rows + 1, dtype=jnp.int32)
    out = _attend(q, pool, layer, tables, lengths, bounds, jnp.full((1,), num_rows, jnp.int32), **options)
    return jnp.where(lengths[:, None, None] > 0, out, jnp.zeros((), q.dtype))


def prefill_attention(q, pool, layer, tables, lengths, starts, counts, *, max_count, stride=1, offset=0, **options):
    """Attends as `xla.prefill_attention`."""
    del max_count, offset
    if stride > 1:
        raise NotImplementedError(f"tpu: got a stride of {stride}, wanted 1; xla has others")
    num_tokens = q.shape[0]
    num_rows = tables.shape[0]
    # The kernel wants the queries of all rows side by side, and its last row to have queries. Without any query it
    # gets one of the first row, to wait for its first copy.
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    packed_starts = ends - counts
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(token[:, None] >= ends[None], axis=1, dtype=jnp.int32), num_rows - 1)
    packed = q.at[starts[owner] + token - packed_starts[owner]].get(mode="clip", wrap_negative_indices=False)
    num_live = jnp.max(jnp.where(counts > 0, jnp.arange(1, num_rows + 1, dtype=jnp.int32), 0))
    bounds = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.where(num_live > 0, ends, 1)])
    out = _attend(packed, pool, layer, tables, lengths, bounds, jnp.maximum(num_live, 1)[None], **options)
    # Back to the places of the tokens.
    owner = jnp.maximum(jnp.sum(token[:, None] >= starts[None], axis=1, dtype=jnp.int32) - 1, 0)
    token_offset = token - starts[owner]
    is_query = (token_offset >= 0) & (token_offset < counts[owner])
    out = out.at[packed_starts[owner] + token_offset].get(mode="clip", wrap_negative_indices=False)
    return jnp.where(is_query[:, None, None], out, jnp.zeros((), q.dtype))


def _attend(
    q,
    pool,
    layer,
    tables,
    lengths,
    bounds,
    num_rows,
    *,
    scale,
    window=None,
    soft_cap=None,
    sink_tokens=0,
    sinks=None,
    scales=None,
    values=None,
    return_lse=False,
):
    """Attention of packed queries [T, Q, D] by jax's kernel, in a pool seen as pages [(N + 1) * L, P, 2 * K, D].

    Row r has the queries from bounds[r] to bounds[r + 1], i32[R + 1]. The kernel reads the leading num_rows i32[1]
    rows. It does not wait for the page of a row of length 0, so such a row gets length 1 here.
    """
    refused = {"sinks": sinks, "scales": scales, "values": values}
    refused |= {"sink_tokens": sink_tokens or None, "return_lse": return_lse or None}
    for name, value in refused.items():
        if value is not None:
            raise NotImplementedError(f"tpu: got {name}, which jax's kernel for TPUs lacks; xla has it")
    if not is_by_token(pool):
        raise NotImplementedError("tpu: got a pool with layout='heads', wanted layout='tokens'")
    if q.shape[-1] != LANES:
        raise NotImplementedError(f"tpu: got heads of width {q.shape[-1]}, wanted {LANES}; xla has others")
    if q.dtype != pool.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"tpu: got q in {q.dtype} over {pool.dtype}, wanted both in bfloat16 or float32")
    kernel = _kernel()
    _, num_layers, size, rows, width = pool.shape
    num_pages = min(tables.shape[1], max(1, _KERNEL_SLOTS // size))
    try:
        kernel.get_min_heads_per_blk(q.shape[1], rows, q.dtype, pool.dtype)
    except ValueError as error:  # heads that do not fill the kernel's tiles
        raise NotImplementedError(f"tpu: {error}") from error
    return kernel.ragged_paged_attention(
        q,
        pool.reshape(-1, size, rows, width),
        jnp.maximum(lengths, 1),
        tables * num_layers + layer,
        bounds,
        num_rows,
        sm_scale=scale,
        sliding_window=window,
        soft_cap=soft_cap,
        num_kv_pages_per_block=num_pages,
        num_queries_per_block=min(_KERNEL_QUERIES, q.shape[0]),
    )


def _kernel() -> Any:
    try:
        return importlib.import_module(_KERNEL)
    except ImportError as error:
        raise NotImplementedError(f"tpu: this jax lacks {_KERNEL}: {error}") from error
