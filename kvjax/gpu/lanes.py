# SPDX-License-Identifier: Apache-2.0
"""Counts, ranks and finds lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.gpu.memory import Memory


def lanes_of(size: int) -> int:
    """The number of lanes for `size` entries: a power of two."""
    return 1 << max(size - 1, 0).bit_length()


def numbered(lanes: int) -> jax.Array:
    """The index i32[lanes] of each lane."""
    return jnp.arange(lanes, dtype=jnp.int32)


def count(where: jax.Array) -> jax.Array:
    """The number i32[] of lanes where the condition holds."""
    return jnp.sum(where.astype(jnp.int32), dtype=jnp.int32)


def rank(where: jax.Array) -> jax.Array:
    """The number i32[lanes] of lanes before each lane where the condition holds."""
    ones = where.astype(jnp.int32)
    return lax.cumsum(ones) - ones


class Peers(NamedTuple):
    """The lanes with the same value, as each lane sees them, all i32[lanes]. Unused fields are None."""

    first: Any = None  # the first peer, perhaps the lane itself
    before: Any = None  # the last peer before the lane, or -1
    after: Any = None  # the first peer after the lane, or the number of lanes
    size: Any = None  # the number of peers

    @property
    def last(self) -> jax.Array:
        """bool[lanes]; whether no peer comes after the lane."""
        return self.after == self.after.shape[0]


def peers(memory: Memory, value: jax.Array, where: jax.Array, *fields: str) -> Peers:
    """Finds the peers of each lane by its value i32[lanes], at least 0, among the lanes where bool[lanes].

    Each lane compares its value with the values of a row of lanes at a time, so the result does not depend on timing.
    The result of a lane outside of `where` is undefined. `fields` are names of fields of `Peers`, and `memory` has an
    array `peers` of the lanes' size.
    """
    lanes = value.shape[0]
    lane = numbered(lanes)
    width = min(memory.tile(lanes), lanes)
    memory.put("peers", lane, jnp.where(where, value, -1))
    memory.settle("peers")
    end = jnp.max(jnp.where(where, lane + 1, 0))

    def compare(i: jax.Array, partial: dict[str, jax.Array]) -> dict[str, jax.Array]:
        peer_lane = (i * width + numbered(width))[None]
        this_lane = lane[:, None]
        equal = value[:, None] == memory.pick("peers", peer_lane)

        def smallest(where: jax.Array, name: str) -> jax.Array:
            return jnp.minimum(partial[name], jnp.min(jnp.where(where, peer_lane, lanes), axis=1))

        def largest(where: jax.Array, name: str) -> jax.Array:
            return jnp.maximum(partial[name], jnp.max(jnp.where(where, peer_lane, -1), axis=1))

        updates = {
            "first": lambda: smallest(equal, "first"),
            "before": lambda: largest(equal & (peer_lane < this_lane), "before"),
            "after": lambda: smallest(equal & (peer_lane > this_lane), "after"),
            "size": lambda: partial["size"] + jnp.sum(equal.astype(jnp.int32), axis=1, dtype=jnp.int32),
        }
        return {name: updates[name]() for name in fields}

    initial = {"first": lanes, "before": -1, "after": lanes, "size": 0}
    start = {name: jnp.full((lanes,), initial[name], jnp.int32) for name in fields}
    return Peers(**lax.fori_loop(np.int32(0), (end + width - 1) // width, compare, start))


def add(memory: Memory, names: tuple[str, ...], index: jax.Array, by: int, where: jax.Array) -> None:
    """Adds `by` at `index` i32[lanes], where bool[lanes], in the named arrays. Lanes may share an index."""

    def change() -> None:
        same_index = peers(memory, index, where, "after", "size")
        last = where & same_index.last
        for name in names:
            memory.put(name, index, memory.pick(name, index, last) + by * same_index.size, last)

    memory.when(count(where) > 0, change)


def copy_rows(
    memory: Memory, names: Sequence[tuple[str, str]], source: jax.Array, target: jax.Array, where: jax.Array
) -> None:
    """Copies rows source i32[lanes] of arrays to rows target i32[lanes] of others, where bool[lanes], of equal width.

    `names` are pairs of arrays. No row is both a source and a target.
    """
    columns = memory.shape(names[0][0])[1]
    width = min(memory.tile(source.shape[0]), lanes_of(columns))
    source = source[:, None]
    target = target[:, None]
    where = where[:, None]

    def copy(start: jax.Array) -> jax.Array:
        column = start + numbered(width)[None]
        inside = where & (column < columns)
        for name, values in [(new, memory.pick(old, (source, column), inside)) for old, new in names]:
            memory.put(name, (target, column), values, inside)
        return start + width

    memory.loop(lambda start: start < columns, copy, jnp.int32(0))


def exchange(memory: Memory, index: jax.Array, *values: jax.Array) -> list[jax.Array]:
    """values[index] of each array of values i32[lanes]. index i32[lanes] names lanes."""
    lane = numbered(index.shape[0])
    for i, value in enumerate(values):
        memory.put(f"lane{i}", lane, value)
    return [memory.pick(f"lane{i}", index) for i in range(len(values))]
