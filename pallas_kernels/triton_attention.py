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

from pallas_kernels import tuning
from pallas_kernels.quantise import largest
from pallas_kernels.schedule import Work, query_tiles, split_lengths
from pallas_kernels.tuning import Programs

_LOWEST = np.float32(-1e30)  # finite, so that score - maximum is never inf - inf
_LOG2E = np.float32(math.log2(math.e))
_LN2 = np.float32(math.log(2))
_WIDEST = 2048  # bytes of a head, filled up to a power of two, whose tiles find room in shared memory


def decode_attention(
    q, pool, layer, tables, lengths, *, scale, window=None, soft_cap=None, sinks=None, scales=None, return_lse=False,
    interpret=False,
):  # fmt: skip
    """As `xla.decode_attention`; `interpret` runs the kernel's Python on any platform."""
    rows, kv_heads = q.shape[0], pool.shape[3]
    tiles = tuning.triton_decode(q.shape[2], q.dtype.itemsize, pool.dtype.itemsize)
    work, starts = split_lengths(lengths, tiles.slots, tuning.decode_programs() // kv_heads, window)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "interpret": interpret}
    parts = work.row.shape[0]
    dtype = q.dtype if parts == rows else jnp.float32
    out, lse = _attend(q, pool, layer, tables, work, 1, parts, dtype, tiles, None, sinks, scales, **options)
    if parts > rows:
        out, lse = _merge(out, lse, starts, q.dtype, interpret)
    return (out, lse) if return_lse else out


def prefill_attention(
    q, pool, layer, tables, lengths, starts, counts, *, max_count, scale, window=None, soft_cap=None, sinks=None,
    scales=None, return_lse=False, interpret=False,
):  # fmt: skip
    """As `xla.prefill_attention`; `interpret` runs the kernel's Python on any platform."""
    tokens, heads, _ = q.shape
    tiles = tuning.triton_prefill(q.shape[2], q.dtype.itemsize, pool.dtype.itemsize)
    queries = min(max(tiles.rows * pool.shape[3] // heads, 1), max_count)
    work = query_tiles(tokens, lengths, starts, counts, max_count, queries)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "interpret": interpret}
    # No program writes padding's results.
    blank = jnp.zeros_like(q), jnp.zeros((tokens, heads), jnp.float32)
    out, lse = _attend(q, pool, layer, tables, work, queries, tokens, q.dtype, tiles, blank, sinks, scales, **options)
    return (out, lse) if return_lse else out


def _attend(
    q, pool, layer, tables, work: Work, queries: int, places: int, dtype, tiles: Programs, blank, sinks, scales,
    *, scale, window, soft_cap, interpret,
):  # fmt: skip
    """Attention of every piece of work, up to `queries` of each; results [places, Q, D] and their lse f32[places, Q].

    With `blank` the queries' places in q are their results' too, and blank is what stands at the places of padding;
    without, one query's result is at the place of its piece in the list.
    """
    _, heads, width = q.shape
    kv_heads = pool.shape[3]
    check_reach(pool)
    padded = pl.next_power_of_2(width)
    if padded * q.dtype.itemsize > _WIDEST:
        raise NotImplementedError(f"triton: heads are {width} wide; wanted {_WIDEST // q.dtype.itemsize} at most")
    kernel = functools.partial(
        _kernel, shape=pool.shape, width=width, padded=padded, group=heads // kv_heads, queries=queries,
        tile=tiles.slots, by_part=blank is None, scale=scale, window=window, soft_cap=soft_cap,
        has_sinks=sinks is not None, has_scales=scales is not None, interpret=interpret,
    )  # fmt: skip
    sinks = jnp.zeros((heads,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    operands = [*work, jnp.full((1,), layer, jnp.int32), q, pool.reshape(-1, width), tables, sinks]
    operands += [] if scales is None else [scales.reshape(-1)]
    aliases = {len(operands) + i: i for i in range(2)} if blank else {}
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((places, heads, width), dtype),
            jax.ShapeDtypeStruct((places, heads), jnp.float32),
        ),
        grid=(work.row.shape[0], kv_heads),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=2),
        interpret=interpret,
        name="prefill_attention" if blank else "decode_attention",
    )(*operands, *(blank or ()))


def check_reach(pool):
    """Raises NotImplementedError on a pool that Pallas would address wrongly."""
    if pool.dtype.itemsize == 1 and 2**31 <= pool.size <= 2**32:
        raise NotImplementedError("triton: Pallas's 32-bit offsets do not reach all of a pool of 2 to 4 GiB of bytes")


def _kernel(
    row_ref, token_ref, count_ref, position_ref, begin_ref, end_ref,  # i32[W]
    layer_ref,  # i32[1]
    q_ref,  # [T, Q, D]
    kv_ref,  # [(N + 1) L 2 K P, D]
    tables_ref,  # i32[R, M]
    sinks_ref,  # f32[Q]
    *refs,  # scales f32[(N + 1) L 2 K P], if any; what the results are aliased with; out [X, Q, D]; lse f32[X, Q]
    shape, width, padded, group, queries, tile, by_part, scale, window, soft_cap, has_sinks, has_scales, interpret,
):  # fmt: skip
    scales_ref, (out_ref, lse_ref) = refs[0] if has_scales else None, refs[-2:]
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
    # As exact as float32 by three products of tf32, which only GPUs have.
    exact = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    precision = exact if dtype == jnp.float32 else None
    position = first + query
    # A weight times V's scale can be too small for float16; times this it is as large as the weight times V.
    unit = np.float32(2.0 ** math.ceil(math.log2(largest(kv_ref.dtype))) if has_scales else 1)

    def step(number, carry, masked):
        highest, total, mixed = carry
        slot = begin + number * tile + jnp.arange(tile, dtype=jnp.int32)
        inside = slot < end
        if window is not None:
            inside = inside & (slot > first - window)
        block = plt.load(tables_ref.at[row, slot // size], mask=inside, other=0)
        at = (((block * layers + layer_ref[0]) * 2) * kv_heads + head) * size + slot % size
        mask = inside[:, None] & (column < width)[None, :] if masked or padded > width else None
        fetch = functools.partial(_fetch, kv_ref, scales_ref, column, mask, inside if masked else None, dtype)
        k, k_scale = fetch(at)
        score = plt.dot(q, k, trans_b=True, precision=precision) * (k_scale * np.float32(scale))
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
        v, v_scale = fetch(at + kv_heads * size)
        update = plt.dot((weight * (v_scale * unit)).astype(dtype), v, precision=precision)
        return new, total * shrink + jnp.sum(weight, axis=1), mixed * shrink[:, None] + update

    highest, total = jnp.full(packed.shape, _LOWEST), jnp.zeros(packed.shape, jnp.float32)
    if has_sinks:  # in the part that begins the row's K/V: one more score, whose value is zero
        sink = plt.load(sinks_ref.at[heads], mask=live, other=0.0) * _LOG2E
        is_first = begin_ref[item] <= _first_slot(first, window, tile)
        highest, total = jnp.where(is_first, sink, highest), jnp.where(is_first, 1.0, total)
    carry = highest, total, jnp.zeros((packed.size, padded), jnp.float32)
    last = lax.div(jnp.maximum(end - begin, 0) + (tile - 1), np.int32(tile))
    if window is None:  # tiles that every query sees whole
        whole = jnp.clip((jnp.minimum(first + 1, end) - begin) // tile, 0, last)
        carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
    else:
        whole = 0
    highest, total, mixed = lax.fori_loop(whole, last, functools.partial(step, masked=True), carry)

    out = mixed / jnp.where(total > 0, total * unit, 1.0)[:, None]
    place = (item if by_part else token_ref[item]) + query
    plt.store(out_ref.at[place[:, None], heads[:, None], column[None, :]], out.astype(out_ref.dtype), mask=here)
    lse = jnp.where(total > 0, (highest + jnp.log2(jnp.where(total > 0, total, 1.0))) * _LN2, -jnp.inf)
    plt.store(lse_ref.at[place, heads], lse, mask=live)


def _fetch(kv_ref, scales_ref, column, mask, inside, dtype, at):
    """K or V of a tile's slots at rows `at` of kv_ref, and their scales f32[1, tile] or 1; masks are None for all."""
    zero = 0 if jnp.issubdtype(kv_ref.dtype, jnp.integer) else 0.0
    kv = plt.load(kv_ref.at[at[:, None], column[None, :]], mask=mask, other=None if mask is None else zero)
    kv = (_by_bits(kv) if kv.dtype == jnp.float8_e4m3fn and not converts_fp8() else kv).astype(dtype)
    if scales_ref is None:
        return kv, np.float32(1)
    return kv, plt.load(scales_ref.at[at], mask=inside, other=None if inside is None else 0.0)[None, :]


def converts_fp8() -> bool:
    """Whether the GPU has instructions that convert float8_e4m3fn; they came with sm_89."""
    try:
        return plt.get_gpu_info().compute_capability >= 89
    except ValueError:  # no GPU at all
        return True


def _by_bits(x):
    """float8_e4m3fn as float16, exactly, but for NaN: the same bits further left have an exponent less by 8."""
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16) << 7  # with the sign twice
    return lax.bitcast_convert_type(bits & np.int16(~0x4000), jnp.float16) * np.float16(256)


def _first_slot(first, window, tile):
    return 0 if window is None else jnp.maximum(first - (window - 1), 0) // tile * tile


def _merge(parts: jax.Array, lse: jax.Array, starts: jax.Array, dtype, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Puts rows together from parts f32[W, Q, D] and their lse f32[W, Q]; row r's are starts[r] to starts[r + 1]."""
    _, heads, width = parts.shape
    rows, padded = starts.shape[0] - 1, pl.next_power_of_2(width)

    def kernel(
        parts_ref,  # f32[W, Q, D]
        lse_ref,  # f32[W, Q]
        starts_ref,  # i32[R + 1]
        out_ref,  # [R, Q, D]
        total_ref,  # f32[R, Q]
    ):
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
