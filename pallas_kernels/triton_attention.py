# SPDX-License-Identifier: Apache-2.0
"""Paged attention as Triton kernels; shapes use the legend of `pallas_kernels.xla` and of `schedule`.

One kernel serves decode and prefill: a program takes one piece of work and one kv head. The G = Q / K query heads
that share the head are packed into the rows of one matrix product, query after query; K and V are read slot by slot
through the block table, a tile of slots at a time, with a running softmax in base 2. Only tiles at an edge (the
causal one, the window's, the end of the row) pay for masks; what a mask hides is never loaded.

A latent is loaded once, for K and for V: its columns are cut into powers of two, those of V first. All query heads
share it, and a program takes as many of them as its registers allow.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import tuning
from pallas_kernels.quantise import largest
from pallas_kernels.schedule import Work, fixed_parts, query_tiles, split_lengths
from pallas_kernels.triton_merge import merge
from pallas_kernels.tuning import Programs

_LOWEST = np.float32(-1e30)  # finite, so that score - maximum is never inf - inf
_LOG2E = np.float32(math.log2(math.e))
_LN2 = np.float32(math.log(2))
_WIDEST = 2048  # bytes of the widest head, padded to a power of two, whose tiles fit in shared memory


class _Columns(NamedTuple):
    """Columns `begin` to `end` - 1 of K, padded to a power of two."""

    begin: int
    end: int
    padded: int

    @property
    def is_padded(self) -> bool:
        return self.padded > self.end - self.begin

    @property
    def numbers(self) -> jax.Array:
        """i32[padded]."""
        return jnp.arange(self.begin, self.begin + self.padded, dtype=jnp.int32)


def _cut(width: int, values: int | None) -> tuple[_Columns, ...]:
    """The columns of K together, those of a latent in pieces: V's first, of at least the 16 that a product takes."""
    if values is None:
        return (_Columns(0, width, pl.next_power_of_2(width)),)
    pieces, begin = [], 0
    for end in (values, width):
        while begin < end:
            size = max(1 << ((end - begin).bit_length() - 1), 16)
            pieces.append(_Columns(begin, min(begin + size, end), size))
            begin = pieces[-1].end
    return tuple(pieces)


class _Static(NamedTuple):
    """The static parameters of a kernel."""

    shape: tuple[int, ...]  # of the pool, [N + 1, L, 2, K, P, D]
    columns: tuple[_Columns, ...]  # of K
    values: int | None  # columns of V in a latent
    group: int  # G, or of a latent's query heads as many as a program takes
    queries: int  # of a piece of work, at most
    tile: int  # slots
    by_part: bool  # whether results are indexed by piece, not by token
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    has_scales: bool
    interpret: bool

    @property
    def of_values(self) -> tuple[_Columns, ...]:
        """The columns of V."""
        return tuple(piece for piece in self.columns if self.values is None or piece.begin < self.values)


class _Rows(NamedTuple):
    """The X rows of a program's products: row i is query i // G in head i % G of the group."""

    query: jax.Array  # i32[X]
    head: jax.Array  # i32[X]; of q's Q
    live: jax.Array  # bool[X]; whether there is such a query
    columns: list[jax.Array]  # i32[padded] each; those of `_Static.columns`
    inside: list[jax.Array]  # bool[X, padded] each; live, and a column of K


def decode_attention(
    q, pool, layer, tables, lengths, *, scale, window=None, soft_cap=None, sinks=None, scales=None, values=None,
    return_lse=False, fixed_split=False, interpret=False,
):  # fmt: skip
    """As `xla.decode_attention`; `interpret` runs the kernel's Python on any platform."""
    rows, heads, width = q.shape
    tiles = tuning.triton_decode(width, q.dtype.itemsize, pool.dtype.itemsize)
    tiles = tiles if values is None else tuning.TRITON_LATENTS
    programs = heads // _group(heads, pool, tiles, values)
    if fixed_split:
        most = tables.shape[1] * pool.shape[4]
        work, starts = fixed_parts(lengths, tiles.slots, tuning.FIXED_SPLIT, most, window)
    else:
        work, starts = split_lengths(lengths, tiles.slots, tuning.decode_programs() // programs, window)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "values": values, "interpret": interpret}
    parts = work.row.shape[0]
    dtype = q.dtype if parts == rows else jnp.float32
    out, lse = _attend(q, pool, layer, tables, work, 1, parts, dtype, tiles, None, sinks, scales, **options)
    if parts > rows:
        out, lse = merge(out, lse, starts, q.dtype, interpret)
    return (out, lse) if return_lse else out


def prefill_attention(
    q, pool, layer, tables, lengths, starts, counts, *, max_count, scale, window=None, soft_cap=None, sinks=None,
    scales=None, values=None, return_lse=False, stride=1, offset=0, interpret=False,
):  # fmt: skip
    """As `xla.prefill_attention`; `interpret` runs the kernel's Python on any platform."""
    if stride > 1:
        raise NotImplementedError(f"triton: got a stride of {stride}, wanted 1; xla has others")
    tokens, heads, width = q.shape
    tiles = tuning.triton_prefill(width, q.dtype.itemsize, pool.dtype.itemsize)
    tiles = tiles if values is None else tuning.TRITON_LATENTS
    queries = min(max(tiles.rows * pool.shape[3] // heads, 1), max_count)
    work = query_tiles(tokens, lengths, starts, counts, max_count, queries)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "values": values, "interpret": interpret}
    # The results of padding, which no program writes.
    blank = jnp.zeros((tokens, heads, values or width), q.dtype), jnp.zeros((tokens, heads), jnp.float32)
    out, lse = _attend(q, pool, layer, tables, work, queries, tokens, q.dtype, tiles, blank, sinks, scales, **options)
    return (out, lse) if return_lse else out


def _attend(
    q, pool, layer, tables, work: Work, queries: int, num_results: int, dtype, tiles: Programs, blank, sinks, scales,
    *, scale, window, soft_cap, values, interpret,
):  # fmt: skip
    """Attention of every piece of work, up to `queries` of each: results [num_results, Q, D or values], and their lse.

    With `blank` a result has the index of its query in q, and `blank` holds the results of padding. Without, a piece
    has one query, whose result has the index of the piece in the list.
    """
    _, heads, width = q.shape
    check_reach(pool)
    columns, group = _cut(width, values), _group(heads, pool, tiles, values)
    widest = _WIDEST // q.dtype.itemsize if values is None else tuning.WIDEST_LATENT.get(q.dtype.itemsize, 0)
    if sum(piece.padded for piece in columns) > widest:
        raise NotImplementedError(f"triton: heads are {width} wide; wanted {widest} at most")
    static = _Static(
        pool.shape, columns, values, group, queries, tiles.slots, blank is None, scale, window, soft_cap,
        sinks is not None, scales is not None, interpret,
    )  # fmt: skip
    sinks = jnp.zeros((heads,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    operands = [*work, jnp.full((1,), layer, jnp.int32), q, pool.reshape(-1, width), tables, sinks]
    operands += [] if scales is None else [scales.reshape(-1)]
    aliases = {len(operands) + i: i for i in range(2)} if blank else {}
    return pl.pallas_call(
        functools.partial(_kernel, static=static),
        out_shape=(
            jax.ShapeDtypeStruct((num_results, heads, values or width), dtype),
            jax.ShapeDtypeStruct((num_results, heads), jnp.float32),
        ),
        grid=(work.row.shape[0], heads // group),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=2),
        interpret=interpret,
        name="prefill_attention" if blank else "decode_attention",
    )(*operands, *(blank or ()))


def _group(heads: int, pool, tiles: Programs, values: int | None) -> int:
    """The query heads of a program: all that share a kv head; of those that share a latent equal parts."""
    if values is None:
        return heads // pool.shape[3]
    return max(group for group in range(1, tiles.rows + 1) if heads % group == 0)


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
    static: _Static,
):  # fmt: skip
    scales_ref, (out_ref, lse_ref) = refs[0] if static.has_scales else None, refs[-2:]
    _, _, _, kv_heads, size, _ = static.shape
    item, head = pl.program_id(0), pl.program_id(1)
    row, count, first, end = row_ref[item], count_ref[item], position_ref[item], end_ref[item]
    begin = begin_ref[item]
    if static.window is not None:
        begin = jnp.maximum(begin, _first_slot(first, static))
    rows = _pack(head, count, static)
    query, heads = (token_ref[item] + rows.query)[:, None], rows.head[:, None]
    q = [
        plt.load(q_ref.at[query, heads, column[None, :]], mask=inside, other=0.0)
        for column, inside in zip(rows.columns, rows.inside, strict=True)
    ]
    position = first + rows.query
    product = functools.partial(plt.dot, precision=_precision(q_ref.dtype, static.interpret))
    # A weight times V's scale can underflow float16; times `unit`, which `_write` divides by, it is as large as the
    # weight times V.
    unit = np.float32(2.0 ** math.ceil(math.log2(largest(kv_ref.dtype))) if static.has_scales else 1)

    def step(number, carry, masked):
        highest, total, mixed = carry
        slot = begin + number * static.tile + jnp.arange(static.tile, dtype=jnp.int32)
        inside, at = _find(tables_ref, layer_ref, row, head, slot, first, end, static)
        masks = [
            inside[:, None] & (column < piece.end)[None, :] if masked or piece.is_padded else None
            for column, piece in zip(rows.columns, static.columns, strict=True)
        ]
        loaded = inside if masked else None
        fetch = functools.partial(_fetch, kv_ref, scales_ref, rows.columns, masks, loaded, q_ref.dtype)
        k, k_scale = fetch(at)
        products = [product(*pair, trans_b=True) for pair in zip(q, k, strict=True)]
        score = _score(functools.reduce(operator.add, products), k_scale, static)
        if masked:
            score = _mask(score, slot, inside, position, static.window)
        new = jnp.maximum(highest, jnp.max(score, axis=1))
        shrink, weight = jnp.exp2(highest - new), jnp.exp2(score - new[:, None])
        v, v_scale = fetch(at + kv_heads * size) if static.values is None else (k, k_scale)
        scaled = (weight * (v_scale * unit)).astype(q_ref.dtype)
        updates = [product(scaled, part) for part in v[: len(mixed)]]
        total = total * shrink + jnp.sum(weight, axis=1)
        return new, total, [old * shrink[:, None] + update for old, update in zip(mixed, updates, strict=True)]

    carry = _begin(sinks_ref, begin_ref, item, first, rows, static)
    carry = _over_tiles(step, carry, first, begin, end, static)
    _write(out_ref, lse_ref, token_ref, item, rows, carry, unit, static)


def _pack(head, count, static: _Static) -> _Rows:
    """The rows of the products of a kv head and `count` queries."""
    packed = jnp.arange(max(pl.next_power_of_2(static.queries * static.group), 16), dtype=jnp.int32)
    query, heads = packed // static.group, head * static.group + packed % static.group
    live, columns = query < count, [piece.numbers for piece in static.columns]
    inside = [
        live[:, None] & (column < piece.end)[None, :] if piece.is_padded
        else jnp.broadcast_to(live[:, None], (packed.size, piece.padded))
        for column, piece in zip(columns, static.columns, strict=True)
    ]  # fmt: skip
    return _Rows(query, heads, live, columns, inside)


def _precision(dtype, interpret: bool):
    """Products of float32 are as exact as float32, by three products of tf32, which only GPUs have."""
    exact = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return exact if dtype == jnp.float32 else None


def _begin(sinks_ref, begin_ref, item, first, rows: _Rows, static: _Static):
    """The running softmax before any score: highest f32[X], total f32[X], mixed f32[X, padded] by pieces."""
    shape = rows.query.shape
    highest, total = jnp.full(shape, _LOWEST), jnp.zeros(shape, jnp.float32)
    if static.has_sinks:  # one more score, whose value is zero; in the part that begins the row's K/V
        sink = plt.load(sinks_ref.at[rows.head], mask=rows.live, other=0.0) * _LOG2E
        is_first = begin_ref[item] <= _first_slot(first, static)
        highest, total = jnp.where(is_first, sink, highest), jnp.where(is_first, 1.0, total)
    return highest, total, [jnp.zeros((*shape, piece.padded), jnp.float32) for piece in static.of_values]


def _over_tiles(step, carry, first, begin, end, static: _Static):
    """Calls step(number, carry, masked) for every tile from `begin` to `end`; masks are for tiles at an edge."""
    last = lax.div(jnp.maximum(end - begin, 0) + (static.tile - 1), np.int32(static.tile))
    whole = 0
    if static.window is None:  # tiles that every query sees whole
        whole = jnp.clip((jnp.minimum(first + 1, end) - begin) // static.tile, 0, last)
        carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
    return lax.fori_loop(whole, last, functools.partial(step, masked=True), carry)


def _find(tables_ref, layer_ref, row, head, slot, first, end, static: _Static):
    """The slots of a tile i32[tile] that the piece may see, bool[tile], and the rows of kv_ref with their K."""
    _, layers, parts, kv_heads, size, _ = static.shape
    head = head if static.values is None else 0
    inside = slot < end
    if static.window is not None:
        inside = inside & (slot > first - static.window)
    block = plt.load(tables_ref.at[row, slot // size], mask=inside, other=0)
    return inside, (((block * layers + layer_ref[0]) * parts) * kv_heads + head) * size + slot % size


def _score(product, k_scale, static: _Static):
    """Scores f32[X, tile] in base 2, from the products of q and K."""
    score = product * (k_scale * np.float32(static.scale))
    if static.soft_cap is not None:
        score = np.float32(static.soft_cap) * jnp.tanh(score / np.float32(static.soft_cap))
    return score * _LOG2E


def _mask(score, slot, inside, position, window: int | None):
    """Scores f32[X, tile] with -inf for the slots that a row, by its position, does not see."""
    seen = (slot[None, :] <= position[:, None]) & inside[None, :]
    if window is not None:
        seen = seen & (slot[None, :] > position[:, None] - window)
    return jnp.where(seen, score, -jnp.inf)


def _write(out_ref, lse_ref, token_ref, item, rows: _Rows, carry, unit, static: _Static) -> None:
    """Writes the results of the live rows, and their log-sum-exp, from the running softmax."""
    highest, total, mixed = carry
    divisor = jnp.where(total > 0, total * unit, 1.0)[:, None]
    out = [part / divisor for part in mixed]
    result = (item if static.by_part else token_ref[item]) + rows.query
    for part, column, inside in zip(out, rows.columns, rows.inside, strict=False):
        index = result[:, None], rows.head[:, None], column[None, :]
        plt.store(out_ref.at[index], part.astype(out_ref.dtype), mask=inside)
    lse = jnp.where(total > 0, (highest + jnp.log2(jnp.where(total > 0, total, 1.0))) * _LN2, -jnp.inf)
    plt.store(lse_ref.at[result, rows.head], lse, mask=rows.live)


def _fetch(kv_ref, scales_ref, columns, masks, inside, dtype, at):
    """Columns of K or V at rows `at` of kv_ref, and their scales f32[1, tile] or 1; a mask of None loads all."""
    zero = 0 if jnp.issubdtype(kv_ref.dtype, jnp.integer) else 0.0
    kv = []
    for column, mask in zip(columns, masks, strict=True):
        part = plt.load(kv_ref.at[at[:, None], column[None, :]], mask=mask, other=None if mask is None else zero)
        kv.append((_by_bits(part) if part.dtype == jnp.float8_e4m3fn and not converts_fp8() else part).astype(dtype))
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
    """float8_e4m3fn as float16, exact but for NaN: the bits shifted left are 2**-8 times the number."""
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16) << 7  # bits 14 and 15 are both the sign
    return lax.bitcast_convert_type(bits & np.int16(~0x4000), jnp.float16) * np.float16(256)


def _first_slot(first, static: _Static):
    """The first slot that the piece's first query sees, rounded down to a tile."""
    if static.window is None:
        return 0
    return jnp.maximum(first - (static.window - 1), 0) // static.tile * static.tile
