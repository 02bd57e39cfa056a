# SPDX-License-Identifier: Apache-2.0
"""Paged attention for Hopper, as a Mosaic GPU kernel. Shapes use the legend of `pallas_kernels.xla` and of `schedule`.

Mosaic cannot index freely, so XLA gathers for it: before the kernel, it gathers the queries of each piece of work into
a matrix, and after the kernel, the result of each token. If K/V were cut into parts, a second kernel merges them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.by_token import check_by_head
from pallas_kernels.mosaic_append import append_kv, rope_append
from pallas_kernels.mosaic_attention import ROWS, attend
from pallas_kernels.mosaic_merge import merge
from pallas_kernels.mosaic_move import copy_blocks, gather_blocks, scatter_blocks
from pallas_kernels.schedule import query_tiles, split_lengths

__all__ = [
    "append_kv",
    "copy_blocks",
    "decode_attention",
    "gather_blocks",
    "prefill_attention",
    "rope_append",
    "scatter_blocks",
]


def decode_attention(
    q,
    pool,
    layer,
    tables,
    lengths,
    *,
    scale,
    window=None,
    sink_tokens=0,
    soft_cap=None,
    sinks=None,
    scales=None,
    values=None,
    return_lse=False,
    fixed_split=False,
    interpret=False,
):
    """Attends as `xla.decode_attention`. With `interpret` Pallas's GPU simulator runs it, on any platform."""
    rows, heads, width = q.shape
    kv_heads = pool.shape[3]
    group = heads // kv_heads
    _refuse(q, pool, scale, scales, values, group, interpret)
    if fixed_split:
        raise NotImplementedError("mosaic: no fixed split, since the parts of all rows are merged by one sum")
    tiles = tuning.mosaic_decode(width)
    work, starts = split_lengths(
        lengths, tiles.slots, tuning.decode_programs() // kv_heads, None if sink_tokens else window
    )
    parts = work.row.shape[0]
    out, lse = attend(
        _packed(q.reshape(rows, kv_heads, group, width)[work.row], 8),
        pool,
        layer,
        tables,
        work,
        tiles,
        group,
        q.dtype if parts == rows else jnp.float32,
        scale=scale,
        window=window,
        sink_tokens=sink_tokens,
        soft_cap=soft_cap,
        sinks=sinks,
        scales=scales,
        interpret=interpret,
    )
    if parts > rows:
        out, lse = merge(out, lse, starts, group, q.dtype, interpret=interpret)
    else:
        out, lse = (x[:, :, :group].reshape(parts, heads, *x.shape[3:]) for x in (out, lse))
    return (out, lse) if return_lse else out


def prefill_attention(
    q,
    pool,
    layer,
    tables,
    lengths,
    starts,
    counts,
    *,
    max_count,
    scale,
    window=None,
    sink_tokens=0,
    soft_cap=None,
    sinks=None,
    scales=None,
    values=None,
    return_lse=False,
    stride=1,
    offset=0,
    interpret=False,
):
    """Attends as `xla.prefill_attention`. With `interpret` Pallas's GPU simulator runs it, on any platform."""
    if stride > 1:
        raise NotImplementedError(f"mosaic: got a stride of {stride}, wanted 1; xla has others")
    if scales is not None:
        raise NotImplementedError("mosaic: no prefill over K/V with a byte per element")
    tokens, heads, width = q.shape
    kv_heads, size = pool.shape[3:5]
    group = heads // kv_heads
    _refuse(q, pool, scale, scales, values, group, interpret)
    tiles = tuning.mosaic_prefill(width, size)
    rows = tiles.workers * ROWS
    queries = rows // group
    # A row's last queries see the most slots. Pieces run from the back, so the longest pieces start first.
    work = jax.tree.map(jnp.flip, query_tiles(tokens, lengths, starts, counts, max_count, queries))
    token = work.token[:, None] + jnp.arange(queries, dtype=jnp.int32)[None]  # [W, queries]
    pieces = q.at[token].get(mode="clip", wrap_negative_indices=False)
    pieces = (
        pieces.reshape(*token.shape, kv_heads, group, width)
        .swapaxes(1, 2)
        .reshape(-1, kv_heads, queries * group, width)
    )
    results = attend(
        _packed(pieces, rows),
        pool,
        layer,
        tables,
        work,
        tiles,
        group,
        q.dtype,
        scale=scale,
        window=window,
        sink_tokens=sink_tokens,
        soft_cap=soft_cap,
        sinks=sinks,
        interpret=interpret,
    )
    # The inverse gather: every token is a query of at most a single piece.
    is_query = jnp.arange(queries, dtype=jnp.int32)[None] < work.count[:, None]
    index = jnp.arange(token.size, dtype=jnp.int32)
    source = jnp.full((tokens,), token.size, jnp.int32)
    source = source.at[jnp.where(is_query, token, tokens).reshape(-1)].set(
        index, mode="drop", wrap_negative_indices=False
    )

    def to_tokens(x):  # [W, K, X, ...] to [T, Q, ...]
        x = x[:, :, : queries * group].reshape(-1, kv_heads, queries, group, *x.shape[3:]).swapaxes(1, 2)
        x = x.reshape(token.size, heads, *x.shape[4:])
        return x.at[source].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    out, lse = map(to_tokens, results)
    return (out, lse) if return_lse else out


def _refuse(q, pool, scale, scales, values, group, interpret) -> None:
    """Raises NotImplementedError for calls that the kernel does not support."""
    check_by_head("mosaic", pool)
    size, width = pool.shape[4:]
    if not interpret and tuning.chip() != "hopper":
        raise NotImplementedError(f"mosaic: made for Hopper GPUs, not for {tuning.chip() or 'this device'}")
    if q.dtype not in (jnp.bfloat16, jnp.float16) or (scales is None and q.dtype != pool.dtype):
        raise NotImplementedError(f"mosaic: q in {q.dtype} over {pool.dtype}; both must be bfloat16 or float16")
    if values is not None:
        raise NotImplementedError("mosaic: no latents")
    if scales is not None and width % 64:
        raise NotImplementedError(f"mosaic: heads of a byte per element are {width} wide; wanted a multiple of 64")
    if width % 16 or width > 256:
        raise NotImplementedError(f"mosaic: heads are {width} wide; wanted a multiple of 16 up to 256")
    if size not in (8, 16, 32, 64, 128):
        raise NotImplementedError(f"mosaic: blocks of {size}; wanted 8, 16, 32, 64 or 128")
    if scale <= 0:
        raise NotImplementedError(f"mosaic: scale {scale}; wanted a positive number")
    if group > ROWS:
        raise NotImplementedError(f"mosaic: {group} query heads share a kv head; wanted {ROWS} at most")


def _packed(x: jax.Array, multiple: int) -> jax.Array:
    """Pads rows [W, K, G, D] to a multiple."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % multiple), (0, 0)))
