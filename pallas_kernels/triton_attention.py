# SPDX-License-Identifier: Apache-2.0
"""Paged attention as Triton kernels; shapes use the legend of `pallas_kernels.xla` and of `schedule`.

One kernel serves decode and prefill: a program takes one piece of work and one kv head. The G = Q / K query heads
that share the head are packed into the rows of one matrix product, query after query; K and V come slot by slot
through the block table, a tile of slots at a time, with a running softmax in base 2. Only tiles at an edge (the
causal one, the window's, the end of the row) pay for masks; what a mask hides is never loaded.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.schedule import Work, query_tiles, split_lengths

_LOWEST = np.float32(-1e30)  # finite, so that score - maximum is never inf - inf
_LOG2E = np.float32(math.log2(math.e))
_LN2 = np.float32(math.log(2))

# Not measured on a GPU yet; chosen so that no target spills a register.
_DECODE_TILE, _PREFILL_TILE = 64, 64  # slots
_QUERY_ROWS = 64  # rows of prefill's products: queries x G
_DECODE_PROGRAMS = 4 * 132  # four to a multiprocessor of an H200


def decode_attention(
    q, pool, layer, tables, lengths, *, scale, window=None, soft_cap=None, sinks=None, return_lse=False, interpret=False
):
    """As `xla.decode_attention`; `interpret` runs the kernel's Python on any platform."""
    rows, kv_heads = q.shape[0], pool.shape[3]
    work, starts = split_lengths(lengths, _DECODE_TILE, _DECODE_PROGRAMS // kv_heads, window)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "interpret": interpret}
    parts = work.row.shape[0]
    dtype = q.dtype if parts == rows else jnp.float32
    out, lse = _attend(q, pool, layer, tables, work, 1, parts, dtype, _DECODE_TILE, None, **options)
    if parts > rows:
        out, lse = _merge(out, lse, starts, q.dtype, interpret)
    return (out, lse) if return_lse else out


def prefill_attention(
    q, pool, layer, tables, lengths, starts, counts, *, max_count, scale, window=None, soft_cap=None, sinks=None,
    return_lse=False, interpret=False,
):  # fmt: skip
    """As `xla.prefill_attention`; `interpret` runs the kernel's Python on any platform."""
    tokens, heads, _ = q.shape
    width = min(max(_QUERY_ROWS * pool.shape[3] // heads, 1), max_count)
    work = query_tiles(tokens, lengths, starts, counts, max_count, width)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "interpret": interpret}
    # No program writes padding's results.
    blank = jnp.zeros_like(q), jnp.zeros((tokens, heads), jnp.float32)
    out, lse = _attend(q, pool, layer, tables, work, width, tokens, q.dtype, _PREFILL_TILE, blank, **options)
    return (out, lse) if return_lse else out


def _attend(
    q, pool, layer, tables, work: Work, queries: int, places: int, dtype, tile: int, blank,
    *, scale, window, soft_cap, sinks, interpret,
):  # fmt: skip
    """Attention of every piece of work, up to `queries` of each; results [places, Q, D] and their lse f32[places, Q].

    `blank` is what the results are where no piece of work writes them; None if every place is written.
    """
    _, heads, width = q.shape
    kv_heads = pool.shape[3]
    if pool.dtype.itemsize == 1 and 2**31 <= pool.size <= 2**32:
        raise NotImplementedError("triton: Pallas's 32-bit offsets do not reach all of a pool of 2 to 4 GiB of bytes")
    padded = pl.next_power_of_2(width)
    kernel = functools.partial(
        _kernel, shape=pool.shape, width=width, padded=padded, group=heads // kv_heads, queries=queries, tile=tile,
        scale=scale, window=window, soft_cap=soft_cap, has_sinks=sinks is not None,
    )  # fmt: skip
    sinks = jnp.zeros((heads,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    operands = [
        *work, jnp.full((1,), layer, jnp.int32), q, pool.reshape(-1, width), tables, sinks, *(blank or ()),
    ]  # fmt: skip
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((places, heads, width), dtype),
            jax.ShapeDtypeStruct((places, heads), jnp.float32),
        ),
        grid=(work.row.shape[0], kv_heads),
        input_output_aliases={12: 0, 13: 1} if blank else {},
        compiler_params=plt.CompilerParams(num_warps=4 if padded <= 128 else 8, num_stages=2),
        interpret=interpret,
        name="decode_attention" if queries == 1 else "prefill_attention",
    )(*operands)


def _kernel(
    row_ref, token_ref, count_ref, position_ref, begin_ref, end_ref, place_ref,  # i32[W]
    layer_ref,  # i32[1]
    q_ref,  # [T, Q, D]
    kv_ref,  # [(N + 1) L 2 K P, D]
    tables_ref,  # i32[R, M]
    sinks_ref,  # f32[Q]
    *refs,  # what the results are aliased with, if anything; out [X, Q, D]; lse f32[X, Q]
    shape, width, padded, group, queries, tile, scale, window, soft_cap, has_sinks,
):  # fmt: skip
    out_ref, lse_ref = refs[-2:]
    _, layers, _, kv_heads, size, _ = shape
    item, head = pl.program_id(0), pl.program_id(1)
    row, count, first, end = row_ref[item], count_ref[item], position_ref[item], end_ref[item]
    begin = begin_ref[item]
    if window is not None:
        begin = jnp.maximum(begin, jnp.maximum(first - (window - 1), 0) // tile * tile)

    # Row i of the products is query i // G in head i % G of the group.
    packed = jnp.arange(max(pl.next_power_of_2(queries * group), 16), dtype=jnp.int32)
    query, heads = packed // group, head * group + packed % group
    live, column = query < count, jnp.arange(padded, dtype=jnp.int32)
    here = (live[:, None] & (column < width)[None, :]) if padded > width else jnp.broadcast_to(
        live[:, None], (packed.size, padded)
    )  # fmt: skip
    q = plt.load(q_ref.at[(token_ref[item] + query)[:, None], heads[:, None], column[None, :]], mask=here, other=0.0)
    dtype = jnp.float32 if q.dtype == jnp.float32 else q.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    position = first + query

    def step(number, carry, masked):
        highest, total, mixed = carry
        slot = begin + number * tile + jnp.arange(tile, dtype=jnp.int32)
        inside = slot < end
        block = plt.load(tables_ref.at[row, slot // size], mask=inside, other=0)
        at = (((block * layers + layer_ref[0]) * 2) * kv_heads + head) * size + slot % size
        mask = None
        if masked or padded > width:
            mask = inside[:, None] & (column < width)[None, :]
        other = None if mask is None else 0.0
        k = plt.load(kv_ref.at[at[:, None], column[None, :]], mask=mask, other=other).astype(dtype)
        score = plt.dot(q, k, trans_b=True, precision=precision) * np.float32(scale)
        if soft_cap is not None:
            score = np.float32(soft_cap) * jnp.tanh(score / np.float32(soft_cap))
        score = score * _LOG2E
        if masked:
            seen = (slot[None, :] <= position[:, None]) & inside[None, :]
            if window is not None:
                seen = seen & (slot[None, :] > position[:, None] - window)
            score = jnp.where(seen, score, -jnp.inf)
        new = jnp.maximum(highest, jnp.max(score, axis=1))
        shrink, weight = jnp.exp2(highest - new), jnp.exp2(score - new[:, None])
        v = plt.load(kv_ref.at[(at + kv_heads * size)[:, None], column[None, :]], mask=mask, other=other).astype(dtype)
        update = plt.dot(weight.astype(dtype), v, precision=precision)
        return new, total * shrink + jnp.sum(weight, axis=1), mixed * shrink[:, None] + update

    highest, total = jnp.full(packed.shape, _LOWEST), jnp.zeros(packed.shape, jnp.float32)
    if has_sinks:  # in the part that begins the row's K/V: one more score, whose value is zero
        sink = plt.load(sinks_ref.at[heads], mask=live, other=0.0) * _LOG2E
        is_first = begin_ref[item] <= _first_slot(first, window, tile)
        highest, total = jnp.where(is_first, sink, highest), jnp.where(is_first, 1.0, total)
    carry = highest, total, jnp.zeros((packed.size, padded), jnp.float32)
    last = pl.cdiv(jnp.maximum(end - begin, 0), tile)
    if window is None:  # tiles that every query sees whole
        whole = jnp.clip((jnp.minimum(first + 1, end) - begin) // tile, 0, last)
        carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
    else:
        whole = 0
    highest, total, mixed = lax.fori_loop(whole, last, functools.partial(step, masked=True), carry)

    out = mixed / jnp.where(total > 0, total, 1.0)[:, None]
    place = place_ref[item] + query
    plt.store(out_ref.at[place[:, None], heads[:, None], column[None, :]], out.astype(out_ref.dtype), mask=here)
    lse = jnp.where(total > 0, (highest + jnp.log2(jnp.where(total > 0, total, 1.0))) * _LN2, -jnp.inf)
    plt.store(lse_ref.at[place, heads], lse, mask=live)


def _first_slot(first, window, tile):
    return 0 if window is None else jnp.maximum(first - (window - 1), 0) // tile * tile


def _merge(parts: jax.Array, lse: jax.Array, starts: jax.Array, dtype, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Puts rows together from parts f32[W, Q, D] and their lse f32[W, Q]; row r's are starts[r] to starts[r + 1]."""
    _, heads, width = parts.shape
    rows, padded = starts.shape[0] - 1, pl.next_power_of_2(width)

    def kernel(parts_ref, lse_ref, starts_ref, out_ref, total_ref):
        row, head = pl.program_id(0), pl.program_id(1)
        column = jnp.arange(padded, dtype=jnp.int32)
        there = column < width

        def step(part, carry):
            highest, total, mixed = carry
            score = lse_ref[part, head]
            new = jnp.maximum(highest, score)
            shrink, weight = jnp.exp(highest - new), jnp.exp(score - new)
            more = plt.load(parts_ref.at[part, head, column], mask=there, other=0.0)
            return new, total * shrink + weight, mixed * shrink + weight * more

        start = _LOWEST, np.float32(0.0), jnp.zeros((padded,), jnp.float32)
        highest, total, mixed = lax.fori_loop(starts_ref[row], starts_ref[row + 1], step, start)
        some = total > 0
        plt.store(out_ref.at[row, head, column], (mixed / jnp.where(some, total, 1.0)).astype(dtype), mask=there)
        total_ref[row, head] = jnp.where(some, highest + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)

    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((rows, heads, width), dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ),
        grid=(rows, heads),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="merge_attention",
    )(parts, lse, starts)
