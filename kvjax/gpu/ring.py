# SPDX-License-Identifier: Apache-2.0
"""`policies/ring.py` in a kernel: the order in which cached blocks leave."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.gpu.lanes import count, numbered, rank
from kvjax.gpu.memory import Memory


def _read(memory: Memory, position: jax.Array, tail: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks at these positions, and whether their entries are live, outside of a copy."""
    ids = memory.pick("order", position & (memory.shape("order")[0] - 1))
    live = (memory.pick("stamp", ids) == position) & (position - tail < 0)
    return ids, live & (memory.pick("refcount", ids) == 0) & (memory.pick("fill", ids) > 0)


def pop(memory: Memory, wanted: jax.Array, lanes: int) -> jax.Array:
    """Writes the next `wanted` i32[] victims to `victims`, or as many as there are. Returns the new head.

    Reads `lanes` entries at a time. Every live entry may leave, so the head passes all entries read.
    """
    head = memory.number("head")
    tail = memory.number("tail")
    lane = numbered(lanes)

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        read, num_found = carry
        ids, live = _read(memory, read + lane, tail)
        index = num_found + rank(live)
        is_taken = live & (index < wanted)
        memory.put("victims", index, ids, is_taken)
        num_found = num_found + count(is_taken)
        end = jnp.max(jnp.where(is_taken, lane, -1)) + 1
        return read + jnp.where(num_found < wanted, lanes, end), num_found

    read, _ = memory.loop(lambda carry: (carry[1] < wanted) & (carry[0] - tail < 0), step, (head, jnp.int32(0)))
    return jnp.where(read - tail > 0, tail, read)


def push(memory: Memory, ids: jax.Array, is_new: jax.Array) -> None:
    """Adds blocks ids i32[lanes], where bool[lanes], which have just lost their last holder."""
    capacity = memory.shape("order")[0]
    num_new = count(is_new)
    head = memory.number("head")
    tail = memory.number("tail")
    full = tail - head + num_new > capacity
    tail = memory.when(full, lambda: _squeeze(memory, head, tail), tail)
    position = tail + rank(is_new)
    memory.put("order", position & (capacity - 1), ids, is_new)
    memory.put("stamp", ids, position, is_new)
    memory.set_number("tail", tail + num_new)


def _squeeze(memory: Memory, head: jax.Array, tail: jax.Array) -> jax.Array:
    """Moves live entries forward over dead entries. Writes never overtake reads. Returns the new tail."""
    capacity = memory.shape("order")[0]
    lane = numbered(min(1024, capacity))

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        read, write = carry
        ids, live = _read(memory, read + lane, tail)
        position = write + rank(live)
        memory.put("order", position & (capacity - 1), ids, live)
        memory.put("stamp", ids, position, live)
        return read + lane.shape[0], write + count(live)

    return memory.loop(lambda carry: carry[0] - tail < 0, step, (head, head))[1]
