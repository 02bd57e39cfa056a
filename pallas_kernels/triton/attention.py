# SPDX-License-Identifier: Apache-2.0
"""Paged attention as Triton kernels: the attention of a piece of work, and prefill, which consists of such pieces.

A program takes a kv head. The G = Q / K query heads that share it are packed into the rows of a matrix product, query
after query. K and V are read slot by slot through the block table, a tile of slots at a time, with a running softmax in
base 2. Only tiles at an edge (the causal edge, the edge of the window, the end of the row) need masks. Masked slots are
never loaded. Shapes use the legend of `pallas_kernels.xla` and of `schedule`.

The columns of a head may be cut into parts, with separate products. A latent is loaded once, as both K and V. The
widths of its parts are powers of two, with V's parts first. All query heads share it, and a program takes as many of
them as its registers allow. A quantised pool is read in words of four bytes, and part j has the columns j, j + 4, ...
(`triton.words`).
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import tuning
from pallas_kernels.by_token import check_by_head
from pallas_kernels.schedule import Work, query_tiles
from pallas_kernels.triton.words import WORD, as_words, power_below, unpack
from pallas_kernels.tuning import Programs

LOWEST = np.float32(-1e30)  # finite: score - maximum is never inf - inf
_LOG2E = np.float32(math.log2(math.e))
_LN2 = np.float32(math.log(2))
_WIDEST = 2048  # bytes of the widest head, padded to a power of two, whose tiles fit in shared memory


class Columns(NamedTuple):
    """Columns of a head, `begin`, `begin + step` and so on below `end`, padded to a power of two."""

    begin: int
    end: int
    padded: int
    step: int = 1

    @property
    def is_padded(self) -> bool:
        """Whether the last column is beyond `end`."""
        return self.begin + self.step * (self.padded - 1) >= self.end

    @property
    def numbers(self) -> jax.Array:
        """The columns i32[padded]."""
        return self.begin + self.step * jnp.arange(self.padded, dtype=jnp.int32)


def _cut(width: int, values: int | None) -> tuple[Columns, ...]:
    """All columns of K, or the parts of a latent: V's parts first, each at least 16 wide, as a product requires."""
    if values is None:
        return (Columns(0, width, pl.next_power_of_2(width)),)
    parts = []
    begin = 0
    for end in (values, width):
        while begin < end:
            size = max(1 << ((end - begin).bit_length() - 1), 16)
            parts.append(Columns(begin, min(begin + size, end), size))
            begin = parts[-1].end
    return tuple(parts)


class Static(NamedTuple):
    """The static parameters of a kernel."""

    shape: tuple[int, ...]  # the pool's, [N + 1, L, 2, K, P, D]
    kv_dtype: Any  # the pool's
    loads: tuple[Columns, ...]  # columns of the array with K and V
    columns: tuple[Columns, ...]  # K's columns
    dtype: Any  # the products'
    values: int | None  # the number of V's columns in a latent
    group: int  # G; for latents the number of query heads in a program
    queries: int  # the largest number of queries in a piece of work
    tile: int  # the number of slots
    scale: float
    window: int | None
    sink_tokens: int  # seen whatever the window
    soft_cap: float | None
    has_sinks: bool
    has_scales: bool
    in_words: bool  # whether K and V are read in words of four bytes, part j of the columns in the bytes j
    interpret: bool

    @property
    def reach(self) -> int | None:
        """The number of last slots to go through. None means all slots."""
        return None if self.sink_tokens else self.window

    @property
    def of_values(self) -> tuple[Columns, ...]:
        """The columns of V."""
        return tuple(part for part in self.columns if self.values is None or part.begin < self.values)


class Operands(NamedTuple):
    """The arrays read by every kernel, or references to them."""

    layer: Any  # i32[1]
    q: Any  # [T, Q, D]
    kv: Any  # [(N + 1) L 2 K P, D], or in words i32[(N + 1) L 2 K P, D / 4]
    tables: Any  # i32[R, M]
    sinks: Any  # f32[Q]
    scales: Any = None  # f32[(N + 1) L 2 K P]


class Rows(NamedTuple):
    """The X rows of a program's products. Row i is query i // G in head i % G of the group."""

    query: jax.Array  # i32[X]
    head: jax.Array  # i32[X]; the query head, of Q
    live: jax.Array  # bool[X]; whether there is such a query
    columns: list[jax.Array]  # i32[padded] each; the columns of `Static.columns`
    inside: list[jax.Array]  # bool[X, padded] each; whether the row is live and the column is K's


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
    """Attends as `xla.prefill_attention`. `interpret` runs the kernel's Python on any platform."""
    if stride > 1:
        raise NotImplementedError(f"triton: got a stride of {stride}, wanted 1; xla has others")
    tokens, heads, width = q.shape
    tiles = tuning.triton_prefill(width, q.dtype.itemsize, pool.dtype.itemsize)
    tiles = tiles if values is None else tuning.TRITON_LATENTS
    queries = min(max(tiles.rows * pool.shape[3] // heads, 1), max_count)
    work = query_tiles(tokens, lengths, starts, counts, max_count, queries)
    static, operands = prepare(
        q,
        pool,
        layer,
        tables,
        tiles,
        queries,
        scale=scale,
        window=window,
        sink_tokens=sink_tokens,
        soft_cap=soft_cap,
        sinks=sinks,
        scales=scales,
        values=values,
        interpret=interpret,
    )
    # No program writes the results of padding.
    blank = jnp.zeros((tokens, heads, values or width), q.dtype), jnp.zeros((tokens, heads), jnp.float32)

    def kernel(*refs):
        work_refs = refs[:6]
        operand_refs = refs[6:-4]
        (out_ref, lse_ref) = refs[-2:]
        item = pl.program_id(0)
        head = pl.program_id(1)
        piece = Work(*(ref[item] for ref in work_refs))
        rows, out, lse = attend(Operands(*operand_refs), piece, head, static)
        store(out_ref, lse_ref, piece.token + rows.query, rows, out, lse)

    inputs = *work, *(x for x in operands if x is not None)
    out, lse = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in blank],
        grid=(work.row.shape[0], heads // static.group),
        input_output_aliases={len(inputs) + i: i for i in range(2)},
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="prefill_attention",
    )(*inputs, *blank)
    return (out, lse) if return_lse else out


def prepare(
    q,
    pool,
    layer,
    tables,
    tiles: Programs,
    queries: int,
    *,
    scale,
    window,
    sink_tokens,
    soft_cap,
    sinks,
    scales,
    values,
    interpret,
    in_words=False,
) -> tuple[Static, Operands]:
    """The parameters and the operands of a kernel. Raises NotImplementedError if no kernel can serve."""
    check_by_head("triton", pool)
    _, heads, width = q.shape
    kv = as_words(pool) if in_words else pool.reshape(-1, width)
    check_reach(kv)
    columns = loads = _cut(width, values)
    if in_words:
        padded = columns[0].padded // WORD
        loads = (Columns(0, width // WORD, padded),)
        columns = tuple(Columns(byte, width, padded, WORD) for byte in range(WORD))
    widest = _WIDEST // q.dtype.itemsize if values is None else tuning.WIDEST_LATENT.get(q.dtype.itemsize, 0)
    if sum(part.padded for part in columns) > widest:
        raise NotImplementedError(f"triton: heads are {width} wide; wanted {widest} at most")
    group = heads // pool.shape[3]
    if values is not None:  # equal parts of the heads that share a latent
        group = max(size for size in range(1, tiles.rows + 1) if heads % size == 0)
    static = Static(
        shape=pool.shape,
        kv_dtype=pool.dtype,
        loads=loads,
        columns=columns,
        values=values,
        group=group,
        dtype=jnp.float16 if in_words else q.dtype,
        queries=queries,
        tile=tiles.slots,
        scale=scale,
        window=window,
        sink_tokens=sink_tokens,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        has_scales=scales is not None,
        in_words=in_words,
        interpret=interpret,
    )
    sinks = jnp.zeros((heads,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    scales = None if scales is None else scales.reshape(-1)
    return static, Operands(jnp.full((1,), layer, jnp.int32), q, kv, tables, sinks, scales)


def check_reach(pool):
    """Raises NotImplementedError for a pool with offsets that Pallas would compute wrongly."""
    if pool.dtype.itemsize == 1 and 2**31 <= pool.size <= 2**32:
        raise NotImplementedError("triton: Pallas's 32-bit offsets do not reach all of a pool of 2 to 4 GiB of bytes")


def attend(refs: Operands, piece: Work, head, static: Static) -> tuple[Rows, list[jax.Array], jax.Array]:
    """Attention of a piece of work, with fields i32[], and a group of query heads.

    Returns:
      The rows of the products, their results f32[X, padded] by parts of V, and their log-sum-exp f32[X].
    """
    _, _, _, kv_heads, size, _ = static.shape
    rows = _pack(head, piece.count, static)
    q, factor = _queries(refs.q, piece.token, rows, static)
    position = piece.position + rows.query
    begin = piece.begin
    end = piece.end
    if static.reach is not None:
        begin = jnp.maximum(begin, first_slot(piece.position, static.reach, static.tile))
    product = functools.partial(plt.dot, precision=_precision(static.dtype, static.interpret))

    def step(tile_index, carry, masked):
        highest, total, mixed, *largest = carry
        slot = begin + tile_index * static.tile + jnp.arange(static.tile, dtype=jnp.int32)
        inside = _inside(slot, piece.position, end, static) if masked else None
        kv_row = _find(refs, piece.row, head, slot, inside, static)
        k, k_scale = _fetch(refs, kv_row, inside, static)
        products = [product(*pair, trans_b=True) for pair in zip(q, k, strict=True)]
        score = _score(functools.reduce(operator.add, products), k_scale, factor, static)
        if masked:
            score = _mask(score, slot, inside, position, static)
        new_highest = jnp.maximum(highest, jnp.max(score, axis=1))
        shrink = jnp.exp2(highest - new_highest)
        weight = jnp.exp2(score - new_highest[:, None])
        total = total * shrink + jnp.sum(weight, axis=1)
        v, v_scale = (
            (k, k_scale) if static.values is not None else _fetch(refs, kv_row + kv_heads * size, inside, static)
        )
        if (
            v_scale is not None
        ):  # relative to the largest scale so far, so that float16 holds the products of scales and weights
            (before,) = largest
            largest = [jnp.maximum(before, jnp.max(v_scale))]
            shrink = shrink * (before / largest[0])
            weight = weight * (v_scale * (1 / largest[0]))[None, :]
        updates = [product(weight.astype(static.dtype), part) for part in v[: len(mixed)]]
        mixed = [mixed_part * shrink[:, None] + update for mixed_part, update in zip(mixed, updates, strict=True)]
        return new_highest, total, mixed, *largest

    carry = _begin(refs.sinks, piece, rows, static)
    highest, total, mixed, *largest = _over_tiles(step, carry, piece.position, begin, end, static)
    divisor = jnp.where(total > 0, total, 1.0)
    out = [part * (largest[0] / divisor)[:, None] if largest else part / divisor[:, None] for part in mixed]
    return rows, out, jnp.where(total > 0, (highest + jnp.log2(divisor)) * _LN2, -jnp.inf)


def store(out_ref, lse_ref, index, rows: Rows, out, lse, where=True) -> None:
    """Writes the results of the live rows, and their log-sum-exp, at index i32[X]."""
    for part, column, inside in zip(out, rows.columns, rows.inside, strict=False):
        position = index[:, None], rows.head[:, None], column[None, :]
        plt.store(out_ref.at[position], part.astype(out_ref.dtype), mask=inside & where)
    plt.store(lse_ref.at[index, rows.head], lse, mask=rows.live & where)


def _pack(head, count, static: Static) -> Rows:
    """The rows of the products for a kv head and `count` queries."""
    packed = jnp.arange(max(pl.next_power_of_2(static.queries * static.group), 16), dtype=jnp.int32)
    query = packed // static.group
    heads = head * static.group + packed % static.group
    live = query < count
    columns = [part.numbers for part in static.columns]
    inside = [
        live[:, None] & (column < part.end)[None, :]
        if part.is_padded
        else jnp.broadcast_to(live[:, None], (packed.size, part.padded))
        for column, part in zip(columns, static.columns, strict=True)
    ]
    return Rows(query, heads, live, columns, inside)


def _queries(q_ref, token, rows: Rows, static: Static) -> tuple[list[jax.Array], Any]:
    """The parts of q [X, padded], and a factor for their scores, f32[X] or 1.

    A bfloat16 may be too large for float16. So in float16, a row of q is divided by the power of two below its largest
    element.
    """
    query = (token + rows.query)[:, None]
    heads = rows.head[:, None]
    q = [
        plt.load(q_ref.at[query, heads, column[None, :]], mask=inside, other=0.0)
        for column, inside in zip(rows.columns, rows.inside, strict=True)
    ]
    if not static.in_words:
        return q, np.float32(1)
    q = [part.astype(jnp.float32) for part in q]
    factor, inverse = power_below(functools.reduce(jnp.maximum, (jnp.max(jnp.abs(part), axis=1) for part in q)))
    return [(part * inverse[:, None]).astype(static.dtype) for part in q], factor


def _precision(dtype, interpret: bool):
    """The precision that makes products as exact as float32, by three products of tf32. Only GPUs have it."""
    exact = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return exact if dtype == jnp.float32 else None


def _begin(sinks_ref, piece: Work, rows: Rows, static: Static):
    """The initial state of the running softmax: highest f32[X], total f32[X], mixed f32[X, padded] by parts.

    With scales also the largest scale of V so far, f32[].
    """
    shape = rows.query.shape
    highest = jnp.full(shape, LOWEST)
    total = jnp.zeros(shape, jnp.float32)
    if static.has_sinks:  # an additional score with a value of zero, in the first part of the row's K/V
        sink = plt.load(sinks_ref.at[rows.head], mask=rows.live, other=0.0) * _LOG2E
        is_first = piece.begin <= first_slot(piece.position, static.reach, static.tile)
        highest = jnp.where(is_first, sink, highest)
        total = jnp.where(is_first, 1.0, total)
    mixed = [jnp.zeros((*shape, part.padded), jnp.float32) for part in static.of_values]
    return highest, total, mixed, *([np.finfo(np.float32).tiny] if static.has_scales else [])


def _over_tiles(step, carry, first, begin, end, static: Static):
    """Calls step(tile index, carry, masked) for every tile from `begin` to `end`. Only tiles at an edge are masked."""
    num_tiles = lax.div(jnp.maximum(end - begin, 0) + (static.tile - 1), np.int32(static.tile))
    num_unmasked = 0
    if static.window is None:  # every query sees all of these tiles
        num_seen = jnp.maximum(jnp.minimum(first + 1, end) - begin, 0)
        num_unmasked = jnp.minimum(lax.div(num_seen, np.int32(static.tile)), num_tiles)
        carry = lax.fori_loop(0, num_unmasked, functools.partial(step, masked=False), carry)
    return lax.fori_loop(num_unmasked, num_tiles, functools.partial(step, masked=True), carry)


def _inside(slot, first, end, static: Static):
    """bool[tile], whether some query of the piece may see the slots i32[tile]."""
    inside = slot < end
    return inside if static.window is None else inside & _in_window(slot, first, static)


def _in_window(slot, position, static: Static):
    """Whether the window's limit lets queries at these positions see the slots."""
    in_window = slot > position - static.window
    return in_window | (slot < static.sink_tokens) if static.sink_tokens else in_window


def _find(refs: Operands, row, head, slot, inside, static: Static):
    """The rows i32[tile] of K at slots i32[tile] of a row. If `inside` is None, all slots are live."""
    _, layers, parts, kv_heads, size, _ = static.shape
    head = head if static.values is None else 0
    # Shifts make shorter loops, but need more registers: tiles of many queries would spill.
    divide = _shifted if static.queries == 1 and size & (size - 1) == 0 else _divided
    column, offset = divide(slot, size)
    block = plt.load(refs.tables.at[row, column], mask=inside, other=None if inside is None else 0)
    return (((block * layers + refs.layer[0]) * parts) * kv_heads + head) * size + offset


def _divided(slot, size: int):
    """Quotient and remainder of slots, which are never negative, without the handling of signs."""
    return lax.div(slot, np.int32(size)), lax.rem(slot, np.int32(size))


def _shifted(slot, size: int):
    """Quotient and remainder by a power of two."""
    return slot >> (size.bit_length() - 1), slot & (size - 1)


def _fetch(refs: Operands, kv_row, inside, static: Static):
    """K or V [tile, padded] in parts at these rows, and scales f32[tile] or None. Loads all if `inside` is None."""
    zero = 0 if jnp.issubdtype(refs.kv.dtype, jnp.integer) else 0.0
    kv = []
    for part in static.loads:
        column = part.numbers
        mask = None
        if part.is_padded or inside is not None:
            live = jnp.ones(kv_row.shape, jnp.bool_) if inside is None else inside
            mask = live[:, None] & (column < part.end)[None, :]
        kv.append(
            plt.load(refs.kv.at[kv_row[:, None], column[None, :]], mask=mask, other=None if mask is None else zero)
        )
    if static.in_words:
        kv = unpack(kv[0], static.kv_dtype, static.interpret)
    else:
        kv = [_converted(part, static.dtype) for part in kv]
    if refs.scales is None:
        return kv, None
    return kv, plt.load(refs.scales.at[kv_row], mask=inside, other=None if inside is None else 0.0)


def _score(product, k_scale, factor, static: Static):
    """Scores f32[X, tile] in base 2, from the products of q and K."""
    if k_scale is not None:
        product = product * k_scale[None, :]
    factor = factor[:, None] if static.in_words else factor
    if static.soft_cap is None:
        return product * (factor * np.float32(static.scale * _LOG2E))
    cap = np.float32(static.soft_cap)
    return cap * _LOG2E * jnp.tanh(product * (factor * np.float32(static.scale / static.soft_cap)))


def _mask(score, slot, inside, position, static: Static):
    """Scores f32[X, tile] with -inf for the slots that a row, by its position, does not see."""
    is_seen = (slot[None, :] <= position[:, None]) & inside[None, :]
    if static.window is not None:
        is_seen = is_seen & _in_window(slot[None, :], position[:, None], static)
    return jnp.where(is_seen, score, -jnp.inf)


def first_slot(position, window: int | None, tile: int):
    """The first slot that a query sees, rounded down to a tile."""
    if window is None:
        return 0
    return jnp.maximum(position - (window - 1), 0) // tile * tile


def converts_fp8() -> bool:
    """Whether the GPU has instructions to convert float8_e4m3fn, which need sm_89."""
    try:
        return plt.get_gpu_info().compute_capability >= 89
    except ValueError:  # no GPU at all
        return True


def _converted(x, dtype):
    """K or V in the products' dtype."""
    return (by_bits(x) if x.dtype == jnp.float8_e4m3fn and not converts_fp8() else x).astype(dtype)


def by_bits(x):
    """Converts float8_e4m3fn to float16, exactly except for NaN: the bits shifted left are 2**-8 times the number."""
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16) << 7  # bits 14 and 15 are both the sign
    return lax.bitcast_convert_type(bits & np.int16(~0x4000), jnp.float16) * np.float16(256)
