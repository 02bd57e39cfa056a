# SPDX-License-Identifier: Apache-2.0
"""Decode as three Triton kernels: a schedule, attention in even shares of all tiles, and a merge of divided rows.

The tiles of all rows are laid end to end, and each program takes the same number of tiles, whatever the rows' lengths
are. If a single program has a whole row, it writes the row's result. Otherwise the programs' parts are merged
(flash-decoding). The schedule depends only on the lengths, so the layers of a step share it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import tuning
from pallas_kernels.schedule import Work
from pallas_kernels.triton.attention import LOWEST, Operands, Static, attend, converts_fp8, first_slot, prepare, store

_COMPARED = 8192  # rows times programs, compared at once by a program of `share_tiles`


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
    """Attends as `xla.decode_attention`. `interpret` runs the kernels' Python on any platform."""
    rows, heads, width = q.shape
    in_words = scales is not None and values is None and width % 64 == 0 and q.dtype.itemsize == 2
    in_words = in_words and (jnp.issubdtype(pool.dtype, jnp.integer) or converts_fp8())
    tiles = tuning.triton_decode(width, q.dtype.itemsize, pool.dtype.itemsize, in_words)
    tiles = tiles if values is None else tuning.TRITON_LATENTS
    static, operands = prepare(
        q,
        pool,
        layer,
        tables,
        tiles,
        1,
        scale=scale,
        window=window,
        sink_tokens=sink_tokens,
        soft_cap=soft_cap,
        sinks=sinks,
        scales=scales,
        values=values,
        interpret=interpret,
        in_words=in_words,
    )
    groups = heads // static.group
    tiles_per_part = None
    programs = max(tuning.resident_programs(tiles) // groups, 1)
    if fixed_split:
        tiles_per_part = -(-tuning.FIXED_SPLIT // tiles.slots)
        reach = static.reach
        max_slots = tables.shape[1] * pool.shape[4] if reach is None else reach + tiles.slots
        programs = rows * -(-max_slots // (tiles_per_part * tiles.slots))
    shares = share_tiles(lengths, tiles.slots, programs, static.reach, tiles_per_part, interpret)

    def results(count, dtype):
        shape = count, heads, values or width
        return [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:2], jnp.float32)]

    out, lse, *parts = pl.pallas_call(
        functools.partial(_kernel, static=static),
        out_shape=[*results(rows, q.dtype), *results(rows + programs, jnp.float32)],
        grid=(programs, groups),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="decode_attention",
    )(*shares, lengths, *(x for x in operands if x is not None))
    out, lse = _merge(shares, None if sinks is None else operands.sinks, parts, out, lse, interpret)
    return (out, lse) if return_lse else out


def _kernel(order_ref, ends_ref, first_ref, tiles_per_program_ref, lengths_ref, *refs, static: Static):
    """Attention of a program's share of all tiles, row by row."""
    operands = Operands(*refs[:-4])
    (out_ref, lse_ref, parts_ref, parts_lse_ref) = refs[-4:]
    program = pl.program_id(0)
    head = pl.program_id(1)
    tiles_per_program = tiles_per_program_ref[0]
    begin = program * tiles_per_program
    limit = jnp.minimum(begin + tiles_per_program, ends_ref[lengths_ref.shape[0]])

    def attend_row(state):
        entry, tile = state
        row = order_ref[entry]
        start = ends_ref[entry]
        end = ends_ref[entry + 1]
        length = lengths_ref[row]
        stop = jnp.minimum(end, limit)
        slot = first_slot(length - 1, static.reach, static.tile) + (tile - start) * static.tile
        last = jnp.minimum(slot + (stop - tile) * static.tile, length)
        piece = Work(row, row, jnp.ones((), jnp.int32), length - 1, slot, last)
        packed, out, lse = attend(operands, piece, head, static)
        has_whole_row = (start >= begin) & (end <= limit)
        store(out_ref, lse_ref, row + packed.query, packed, out, lse, has_whole_row)
        # The next program and the next row each add 1, so no two parts have the same index.
        store(parts_ref, parts_lse_ref, program + entry + packed.query, packed, out, lse, ~has_whole_row)
        return entry + 1, stop

    lax.while_loop(lambda state: state[1] < limit, attend_row, (first_ref[program], begin))


class Shares(NamedTuple):
    """The tiles of all rows, laid end to end and divided among programs.

    Attributes:
      order: i32[R or more]; the rows, with rows without tiles last.
      ends: i32[R or more]; entry e of `order` has the tiles ends[e] to ends[e + 1] - 1.
      first: i32[programs or more]; the entry with each program's first tile.
      tiles_per_program: i32[1]; the number of tiles per program.
    """

    order: jax.Array
    ends: jax.Array
    first: jax.Array
    tiles_per_program: jax.Array


def share_tiles(
    lengths: jax.Array, tile: int, programs: int, window: int | None, part: int | None, interpret: bool
) -> Shares:
    """Divides the tiles of rows among programs, as evenly as whole tiles allow.

    Args:
      lengths: i32[R].
      tile: the number of slots in a tile.
      programs: the number of programs.
      window: only the last `window` slots of a row count. None means all slots.
      part: the number of tiles per program, all of the same row, so a row's cuts do not depend on the other rows. None
        divides all tiles evenly.
      interpret: as in `decode_attention`.
    """
    rows = lengths.shape[0]
    lanes = pl.next_power_of_2(rows)
    block = max(min(_COMPARED // lanes, pl.next_power_of_2(programs)), 1)

    def kernel(lengths_ref, order_ref, ends_ref, first_ref, tiles_per_program_ref):
        lane = jnp.arange(lanes, dtype=jnp.int32)
        length = plt.load(lengths_ref.at[lane], mask=lane < rows, other=0)
        slots = length - first_slot(length - 1, window, tile)
        tiles = lax.div(jnp.maximum(slots, 0) + (tile - 1), np.int32(tile))
        tiles_per_program = lax.div(jnp.sum(tiles, dtype=jnp.int32) + (programs - 1), np.int32(programs))
        if part is not None:
            tiles_per_program = np.int32(part)
            tiles = lax.div(tiles + (part - 1), np.int32(part)) * part
        has_tiles = tiles > 0
        ones = has_tiles.astype(jnp.int32)
        before = lax.cumsum(ones) - ones
        entry = jnp.where(has_tiles, before, jnp.sum(ones, dtype=jnp.int32) + lane - before)
        ends = jnp.where(has_tiles, lax.cumsum(tiles), jnp.sum(tiles, dtype=jnp.int32))

        @pl.when(pl.program_id(0) == 0)
        def _():
            plt.store(order_ref.at[entry], lane)
            plt.store(ends_ref.at[entry + 1], ends)
            ends_ref[0] = np.int32(0)
            tiles_per_program_ref[0] = tiles_per_program

        program = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        passed = (ends[None, :] <= (program * tiles_per_program)[:, None]) & has_tiles[None, :]
        plt.store(first_ref.at[program], jnp.sum(passed.astype(jnp.int32), axis=1, dtype=jnp.int32))

    blocks = -(-programs // block)
    sizes = lanes, lanes + 1, blocks * block, 1
    return Shares(
        *pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes],
            grid=(blocks,),
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="share_tiles",
        )(lengths)
    )


def _merge(shares: Shares, sinks, parts, out, lse, interpret: bool):
    """The results [R, Q, D] and f32[R, Q] of all rows. Merges divided rows from their parts, and fills in empty rows.

    Args:
      shares: the rows' shares.
      sinks: f32[Q], the only terms in an empty row's denominator, or None. The first part of other rows has them.
      parts: f32[R + programs, Q, D] and their log-sum-exp. Program p's part of entry e has index p + e.
      out: [R, Q, D]; the results of the undivided rows, updated in place.
      lse: f32[R, Q]; their log-sum-exp, updated in place.
      interpret: as in `decode_attention`.
    """
    rows, heads, width = out.shape
    padded = pl.next_power_of_2(width)

    def kernel(order_ref, ends_ref, tiles_per_program_ref, *refs):
        sinks_ref = refs[0]
        (parts_ref, parts_lse_ref, _, _, out_ref, lse_ref) = refs[-6:]
        entry = pl.program_id(0)
        head = pl.program_id(1)
        tiles_per_program = jnp.maximum(tiles_per_program_ref[0], 1)
        row = order_ref[entry]
        start = ends_ref[entry]
        end = ends_ref[entry + 1]
        first = lax.div(start, tiles_per_program)
        last = lax.div(jnp.maximum(end - 1, start), tiles_per_program)
        is_empty = end == start
        is_cut = last > first
        column = jnp.arange(padded, dtype=jnp.int32)
        inside = column < width

        def step(part, carry):
            highest, total, mixed = carry
            score = parts_lse_ref[part, head]
            new_highest = jnp.maximum(highest, score)
            shrink = jnp.exp(highest - new_highest)
            weight = jnp.exp(score - new_highest)
            part_mixed = plt.load(parts_ref.at[part, head, column], mask=inside, other=0.0)
            return new_highest, total * shrink + weight, mixed * shrink + weight * part_mixed

        highest = LOWEST
        total = np.float32(0)
        if sinks is not None:
            highest = jnp.where(is_empty, sinks_ref[head], highest)
            total = jnp.where(is_empty, 1.0, total)
        carry = highest, total, jnp.zeros((padded,), jnp.float32)
        highest, total, mixed = lax.fori_loop(first + entry, jnp.where(is_cut, last + 1, first) + entry, step, carry)
        divisor = jnp.where(total > 0, total, 1.0)
        mixed = mixed / divisor
        lse = jnp.where(total > 0, highest + jnp.log(divisor), -jnp.inf)
        plt.store(out_ref.at[row, head, column], mixed.astype(out_ref.dtype), mask=inside & (is_cut | is_empty))
        plt.store(lse_ref.at[row, head], lse, mask=is_cut | is_empty)

    inputs = [shares.order, shares.ends, shares.tiles_per_program, *([] if sinks is None else [sinks]), *parts]
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)],
        grid=(rows, heads),
        input_output_aliases={len(inputs) + i: i for i in range(2)},
        compiler_params=plt.CompilerParams(num_warps=max(padded // 512, 1), num_stages=1),
        interpret=interpret,
        name="merge_attention",
    )(*inputs, out, lse)
