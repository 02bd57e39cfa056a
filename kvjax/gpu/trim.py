# SPDX-License-Identifier: Apache-2.0
"""`verbs/trim` as a kernel."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import lax

from kvjax.gpu.lanes import count, lanes_of, numbered, rank
from kvjax.gpu.memory import Memory, arrays_of, run, with_arrays
from kvjax.state import NO_BLOCK, CacheState


@functools.partial(jax.jit, static_argnames="interpret")
def trim_rows(state: CacheState, length: jax.Array, interpret: bool = False) -> CacheState:
    """Equals `verbs/trim.cut` exactly, for a state that `choice.serves`. Rows lose a block at most."""
    rows = state.spec.max_seqs
    done = run(
        functools.partial(_trim, lanes=lanes_of(rows), rows=rows, size=np.int32(state.spec.block_size)),
        "trim_rows",
        lanes=lanes_of(rows),
        reads={"wanted": length},
        changes=arrays_of(state, ("length", "table", "refcount", "empty", "num_empty")),
        makes={},
        interpret=interpret,
    )
    return with_arrays(state, done)


def _trim(memory: Memory, *, lanes: int, rows: int, size: np.int32) -> None:
    """The kernel: a lane for each row."""
    row = numbered(lanes)
    is_row = row < rows
    wanted_length = memory.pick("wanted", row, is_row)
    length = memory.pick("length", row, is_row)
    column = lax.div(wanted_length + (size - 1), size)  # of the first unused block
    beyond = column * size < length
    block = memory.pick("table", (row, column), beyond)
    height = memory.number("num_empty")
    memory.put("length", row, wanted_length, is_row)
    memory.put("table", (row, column), NO_BLOCK, beyond)
    memory.put("refcount", block, 0, beyond)
    memory.put("empty", height + rank(beyond), block, beyond)
    memory.set_number("num_empty", height + count(beyond))
