# SPDX-License-Identifier: Apache-2.0
"""`verbs/extend.grow` as a kernel."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.blocks.rows import most_columns
from kvjax.events.records import EventKind, Records, record
from kvjax.gpu import ring
from kvjax.gpu.lanes import copy_rows, count, lanes_of, numbered, peers, rank
from kvjax.gpu.memory import TEXT, Memory, arrays_of, run, with_arrays
from kvjax.gpu.take import take
from kvjax.state import CacheState

CHANGED = (
    "refcount",
    "fill",
    "children",
    "released",
    "clock",
    *TEXT,
    "next",
    "prev",
    "num_empty",
    "num_cached",
    "table",
    "order",
    "stamp",
    "head",
    "tail",
)
READ = ("parent", "generation", "empty", "length", "committed")


@functools.partial(jax.jit, static_argnames=("max_tokens", "interpret"))
def grow_rows(
    state: CacheState, grown: jax.Array, max_tokens: int, interpret: bool = False
) -> tuple[CacheState, jax.Array, Records, Records, jax.Array]:
    """Equals `verbs/extend.grow` exactly, for a state that `choice.serves`: all rows grow, or no row.

    Also returns whether all rows could grow bool[], the removed records, the copied records, and the missing blocks
    i32[].
    """
    spec = state.spec
    width = most_columns(max_tokens, spec.block_size)
    rows = spec.max_seqs
    max_blocks = min(spec.max_seqs * width, spec.groups[0].num_blocks)
    lanes = lanes_of(rows * width)
    done = run(
        functools.partial(_grow, size=np.int32(spec.block_size), width=np.int32(width), lanes=lanes),
        "extend_rows",
        lanes=lanes,
        reads=arrays_of(state, READ) | {"grown": grown},
        changes=arrays_of(state, CHANGED),
        makes={
            "ok": (1,),
            "shortfall": (1,),
            "victims": (max_blocks,),
            "removed": (max_blocks,),
            "generations": (max_blocks,),
            "copies": (rows,),
            "ids": (rows,),
            "source": (rows,),
            "written": (rows,),
            "holders": (rows,),
            "remaining": (rows,),
            "taken": (max_blocks,),
            "peers": (lanes,),
        },
        interpret=interpret,
    )
    removed = record(EventKind.REMOVED, done["removed"] > 0, block=done["victims"], generation=done["generations"])
    copied = record(
        EventKind.COPIED, done["copies"] > 0, block=done["ids"], source=done["source"], num_tokens=done["written"]
    )
    return with_arrays(state, done), done["ok"][0] > 0, removed, copied, done["shortfall"][0]


def _grow(memory: Memory, *, size: np.int32, width: np.int32, lanes: int) -> None:
    """The kernel: a lane for each of the `width` columns that a row may write, in the order of the rows."""
    span = _Span.of(memory, size, width, lanes)
    copies = _unshare(memory, span, span.begins & (span.grown > span.length) & (span.first * size < span.length))
    num_needed = count(span.beyond | copies)
    num_missing = num_needed - (memory.number("num_empty") + memory.number("num_cached"))
    ok = take(memory, jnp.where(num_missing <= 0, num_needed, 0), lanes) & (num_missing <= 0)
    span = _Span.of(memory, size, width, lanes)
    _settle(memory, span, ok)
    _hand_out(memory, span, ok, size)
    memory.set_number("ok", ok)
    memory.set_number("shortfall", jnp.where(ok, 0, jnp.maximum(num_missing, 1)))


class _Span(NamedTuple):
    """The growth of each row, with a lane for each column. It is computed twice, to save registers."""

    row: jax.Array  # i32
    begins: jax.Array  # bool; whether the lane is at a row's first column
    length: jax.Array  # i32; the row's reserved tokens
    grown: jax.Array  # i32; the reserved tokens that the row asks for
    first: jax.Array  # i32; the column that the row is in
    column: jax.Array  # i32
    beyond: jax.Array  # bool; whether the column needs a new block

    @classmethod
    def of(cls, memory: Memory, size: np.int32, width: np.int32, lanes: int) -> _Span:
        lane = numbered(lanes)
        row = lax.div(lane, width)
        is_row = row < memory.shape("table")[0]
        length = memory.pick("length", row, is_row)
        grown = memory.pick("grown", row, is_row)
        first = lax.div(length, size)
        column = first + lane - row * width
        beyond = is_row & (column * size < grown) & (column * size >= length)
        return cls(row, is_row & (lane == row * width), length, grown, first, column, beyond)

    def block(self, memory: Memory) -> jax.Array:
        """The block that each row is in, at its first lane."""
        columns = memory.shape("table")[1]
        return memory.pick("table", (self.row, jnp.minimum(self.first, columns - 1)), self.begins)


def _unshare(memory: Memory, span: _Span, writes: jax.Array) -> jax.Array:
    """`copy_on_write.unshare`: decides where bool[lanes] a row must copy the block that it is in before it writes.

    The last of the rows that share a block stores the block's `holders`, and the `remaining` holders if the others
    release it. Leaves the same marks as plain jax in the refcounts of blocks without any remaining holder.
    """
    block = span.block(memory)
    holders = memory.pick("refcount", block, writes)
    findable = memory.pick("fill", block, writes) > 0
    shared = writes & ((holders > 1) | findable)

    def mark() -> tuple[jax.Array, jax.Array]:
        sharers = peers(memory, block, shared, "after", "size")
        remaining = holders - sharers.size
        final = shared & sharers.last
        mark = -1 - memory.shape("refcount")[0] - span.row
        memory.put("refcount", block, jnp.where(remaining == 0, mark, remaining), final)
        return remaining, final

    remaining, final = memory.when(count(shared) > 0, mark, (holders, shared))
    keeps = final & (remaining == 0) & ~findable
    copies = shared & ~keeps
    notes = {"copies": copies, "holders": jnp.where(final, holders, 0), "remaining": jnp.where(keeps, 1, remaining)}
    for name, values in notes.items():
        memory.put(name, span.row, values, span.begins)
    return copies


def _settle(memory: Memory, span: _Span, ok: jax.Array) -> None:
    """`copy_on_write.settle`, with the values stored by `_unshare`."""
    holders = memory.pick("holders", span.row, span.begins)

    def release() -> None:
        block = span.block(memory)
        remaining = memory.pick("remaining", span.row, span.begins)
        memory.put("refcount", block, jnp.where(ok, remaining, holders), holders > 0)
        cached = ok & (holders > 0) & (remaining == 0)
        clock = memory.number("clock")
        memory.put("released", block, clock + rank(cached), cached)
        memory.set_number("clock", clock + count(cached))
        memory.set_number("num_cached", memory.number("num_cached") + count(cached))
        ring.push(memory, block, cached)

    memory.when(count(holders > 0) > 0, release)


def _hand_out(memory: Memory, span: _Span, ok: jax.Array, size: np.int32) -> None:
    """Gives the rows the blocks `taken` if ok bool[], with the text of blocks to copy, and makes the records."""
    block = span.block(memory)
    copies = memory.pick("copies", span.row, span.begins) > 0
    wanted = span.beyond | copies
    ids = memory.pick("taken", jnp.minimum(rank(wanted), memory.shape("taken")[0] - 1))
    memory.put("table", (span.row, span.column), ids, wanted & ok)
    written = jnp.maximum(memory.pick("committed", span.row, span.begins) - span.first * size, 0)
    copies = copies & ok & (written > 0)
    text = [(name, name) for name in TEXT if name in memory]
    memory.when(count(copies) > 0, lambda: copy_rows(memory, text, block, ids, copies))
    for name, values in {"copies": copies, "ids": ids, "source": block, "written": written}.items():
        memory.put(name, span.row, values, span.begins)
