# SPDX-License-Identifier: Apache-2.0
"""Lanes that count, rank and find one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.gpu.memory import Memory


def lanes_of(size: int) -> int:
    """The lanes that hold `size` entries: a power of two."""
    return 1 << max(size - 1, 0).bit_length()


def numbered(lanes: int) -> jax.Array:
    """i32[lanes]; the number of each lane."""
    return jnp.arange(lanes, dtype=jnp.int32)


def count(where: jax.Array) -> jax.Array:
    """i32[]; how many lanes hold."""
    return jnp.sum(where.astype(jnp.int32), dtype=jnp.int32)


def rank(where: jax.Array) -> jax.Array:
    """i32[lanes]; how many lanes before each hold."""
    one = where.astype(jnp.int32)
    return lax.cumsum(one) - one


class Peers(NamedTuple):
    """The lanes with the same value, as each lane sees them, all i32[lanes]; None for unused fields."""

    first: Any = None  # the first of them, perhaps the lane itself
    before: Any = None  # the last one before the lane, or -1
    after: Any = None  # the first one after the lane, or the number of lanes
    number: Any = None  # how many there are

    @property
    def last(self) -> jax.Array:
        """bool[lanes]; no peer comes after the lane."""
        return self.after == self.after.shape[0]


def peers(memory: Memory, value: jax.Array, where: jax.Array, *fields: str) -> Peers:
    """Finds the peers of each lane by its value i32[lanes], at least 0, among the lanes where bool[lanes].

    Each lane compares its value with a row of others at a time, so that nothing depends on who comes first. A lane
    that does not hold finds anything. `fields` are names of those of `Peers`; `memory` has an array `peers` of the
    lanes' size.
    """
    lanes = value.shape[0]
    lane = numbered(lanes)
    width = min(memory.tile(lanes), lanes)
    memory.put("peers", lane, jnp.where(where, value, -1))
    memory.settle("peers")
    end = jnp.max(jnp.where(where, lane + 1, 0))

    def compare(i: jax.Array, found: dict[str, jax.Array]) -> dict[str, jax.Array]:
        other = (i * width + numbered(width))[None]
        this = lane[:, None]
        equal = value[:, None] == memory.pick("peers", other)

        def least(where: jax.Array, name: str) -> jax.Array:
            return jnp.minimum(found[name], jnp.min(jnp.where(where, other, lanes), axis=1))

        finds = {
            "first": lambda: least(equal, "first"),
            "before": lambda: jnp.maximum(
                found["before"], jnp.max(jnp.where(equal & (other < this), other, -1), axis=1)
            ),
            "after": lambda: least(equal & (other > this), "after"),
            "number": lambda: found["number"] + jnp.sum(equal.astype(jnp.int32), axis=1, dtype=jnp.int32),
        }
        return {name: finds[name]() for name in fields}

    none = {"first": lanes, "before": -1, "after": lanes, "number": 0}
    start = {name: jnp.full((lanes,), none[name], jnp.int32) for name in fields}
    return Peers(**lax.fori_loop(np.int32(0), (end + width - 1) // width, compare, start))


def add(memory: Memory, names: tuple[str, ...], index: jax.Array, by: int, where: jax.Array) -> None:
    """Adds `by` at `index` i32[lanes], where bool[lanes], in arrays of these names; lanes may share an index."""

    def change() -> None:
        found = peers(memory, index, where, "after", "number")
        last = where & found.last
        for name in names:
            memory.put(name, index, memory.pick(name, index, last) + by * found.number, last)

    memory.when(count(where) > 0, change)


def copy_rows(
    memory: Memory, names: Sequence[tuple[str, str]], source: jax.Array, target: jax.Array, where: jax.Array
) -> None:
    """Copies rows source i32[lanes] of arrays to rows target i32[lanes] of others, where bool[lanes], of equal width.

    `names` are pairs of arrays; no row is a source and a target.
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
    """values[index] of each of the values i32[lanes]; index i32[lanes] names lanes."""
    lane = numbered(index.shape[0])
    for number, value in enumerate(values):
        memory.put(f"lane{number}", lane, value)
    return [memory.pick(f"lane{number}", index) for number in range(len(values))]
