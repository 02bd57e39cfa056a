# SPDX-License-Identifier: Apache-2.0
"""`verbs/commit` as a kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.blocks.rows import Chunk
from kvjax.events.records import COLUMNS, EventKind, Records
from kvjax.gpu.dedup import Dedup, Filled, resolve
from kvjax.gpu.lanes import count, lanes_of, numbered, rank
from kvjax.gpu.memory import TEXT, Memory, arrays_of, run, with_arrays
from kvjax.gpu.publish import merge, publish
from kvjax.state import DEFAULT_PRIORITY, CacheState

CHANGED = (
    *TEXT,
    "committed",
    "refcount",
    "fill",
    "key",
    "generation",
    "parent",
    "children",
    "depth",
    "hits",
    "stored",
    "clock",
    "next",
    "prev",
    "empty",
    "num_empty",
    "num_cached",
    "table",
)


@functools.partial(jax.jit, static_argnames=("batch", "spare", "interpret"))
def fill_rows(
    state: CacheState, chunk: Chunk, batch: int, spare: int = 0, interpret: bool = False
) -> tuple[CacheState, Records]:
    """Equals `verbs/commit.write` exactly, for a state that `choice.serves`. Also returns R stored records.

    A chunk has at most a block's tokens of each row. The kernel handles `batch` filled blocks in a pass, like plain
    jax, and returns `spare` additional records, of kind NONE.
    """
    rows, start, end, done, text = chunk
    num_rows = rows.shape[0]
    size = np.int32(state.spec.block_size)
    lanes = lanes_of(num_rows)
    per_block = (lanes_of(batch),)
    exchanged = {f"lane{i}": per_block for i in range(5)}  # `lanes.exchange` has five values at once
    reads = {"rows": rows, "start": start, "end": end, "done": done.astype(jnp.int32)}
    result = run(
        functools.partial(_fill, lanes=lanes, batch=batch, size=size),
        "commit_rows",
        lanes=lanes,
        reads=reads | arrays_of(state, ("namespace",)) | {f"new_{name}": part for name, part in text.parts().items()},
        changes=arrays_of(state, CHANGED),
        makes={"records": (num_rows + spare, len(COLUMNS)), "queue": (num_rows,), "peers": per_block, **exchanged},
        interpret=interpret,
    )
    return with_arrays(state, result), Records(result["records"])


def _fill(memory: Memory, *, lanes: int, batch: int, size: np.int32) -> None:
    """The kernel. It has a lane for each row during the writes, then a lane for each filled block of a pass."""
    num_filled = _write(memory, lanes, size)

    def step(done: jax.Array) -> jax.Array:
        filled = Filled.of(memory, done, num_filled, batch, size)
        dedup = resolve(memory, filled, size)
        memory.when(count(dedup.publish) > 0, lambda: publish(memory, filled, dedup, size))
        memory.when(count(dedup.merge) > 0, lambda: merge(memory, filled, dedup))
        _record(memory, done, filled, dedup, size)
        return done + batch

    memory.loop(lambda done: done < num_filled, step, jnp.int32(0))


def _write(memory: Memory, lanes: int, size: np.int32) -> jax.Array:
    """Writes the rows' tokens, and queues the rows that filled a block. Returns the number of queued rows."""
    lane = numbered(lanes)
    (rows, columns) = memory.shape("table")
    is_row = lane < memory.shape("rows")[0]
    start = memory.pick("start", lane, is_row)
    end = memory.pick("end", lane, is_row)
    row = jnp.clip(memory.pick("rows", lane, is_row), 0, rows - 1)
    memory.put("committed", row, end, is_row & (memory.pick("done", lane, is_row) > 0))

    first = lax.div(start, size)
    second_start = (first + 1) * size  # where a row's second block begins
    blocks = [
        memory.pick("table", (row, jnp.minimum(first + i, columns - 1)), is_row & (end > second_start + (i - 1) * size))
        for i in (0, 1)
    ]
    steps = memory.shape("new_tokens")[1]
    width = min(memory.tile(lanes), lanes_of(steps))

    def write(done: jax.Array) -> jax.Array:
        step = (done + numbered(width))[None]
        position = start[:, None] + step
        is_token = position < end[:, None]
        in_second = position >= second_start[:, None]
        block = jnp.where(in_second, blocks[1][:, None], blocks[0][:, None])
        slot = position - second_start[:, None] + jnp.where(in_second, 0, size)
        for name in TEXT:
            if name in memory:
                memory.put(name, (block, slot), memory.pick(f"new_{name}", (lane[:, None], step), is_token), is_token)
        return done + width

    memory.loop(lambda done: done < steps, write, jnp.int32(0))
    fills = is_row & (end >= second_start)
    memory.put("queue", rank(fills), lane, fills)
    column = numbered(16)[None]
    records = memory.shape("records")[0]

    def clear(done: jax.Array) -> jax.Array:
        index = (done + lane)[:, None]
        memory.put("records", (index, column), 0, (index < records) & (column < len(COLUMNS)))
        return done + lanes

    memory.loop(lambda done: done < records, clear, jnp.int32(0))
    return count(fills)


def _record(memory: Memory, done: jax.Array, filled: Filled, dedup: Dedup, size: np.int32) -> None:
    """Writes a pass's stored records. Records of kind NONE are the same as in plain jax."""
    lane = numbered(filled.block.shape[0])
    column = numbered(16)[None]
    values = {
        "kind": jnp.where(dedup.publish, int(EventKind.STORED), 0),
        "block": filled.block,
        "generation": memory.pick("generation", jnp.maximum(filled.block, 0)),
        "source": filled.before,
        "source_generation": filled.link(memory),
        "num_tokens": jnp.full_like(lane, size),
        "priority": jnp.full_like(lane, DEFAULT_PRIORITY),
    }
    records = jnp.zeros((lane.shape[0], column.shape[1]), jnp.int32)
    for name, value in values.items():
        records = jnp.where(column == COLUMNS.index(name), value[:, None], records)
    index = (done + lane)[:, None]
    inside = filled.inside[:, None] & (index < memory.shape("records")[0]) & (column < len(COLUMNS))
    memory.put("records", (index, column), records, inside)
