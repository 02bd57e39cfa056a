# SPDX-License-Identifier: Apache-2.0
"""Holes: columns in the middle of rows, whose blocks `thin` has let go of.

Two rows share a prompt of three blocks, and row 0 has let go of columns 1 and 3:

    row 0   table 2 4 5 - 7   holes - x - x -   its views read 2 5 7
    row 1   table 2 4 5 6     holes - - - -     its views read 2 4 5 6

K/V computed after a hole are not the K/V of the row's prefix. So a row with a hole publishes nothing, and no other
request can find its K/V. A row of a sparse cache, whose views may read a part of its blocks, publishes nothing either
after a commit without `exact=True`.

Block 4 stays in row 0's table while row 1 reads it: every holder of a findable block holds the whole prefix, and
eviction relies on it. When only holes have a block, the next call of `thin` frees it. If rows still hold findable
blocks after the freed block, these leave the index then, for the same reason.

The functions return their arguments unchanged if the spec has neither. Programs without them stay the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import add, pick, put
from kvjax.blocks.dedup import Filled
from kvjax.blocks.holders import give_back_shared
from kvjax.blocks.publish import descendants
from kvjax.blocks.rows import Chunk
from kvjax.state import NO_BLOCK, CacheState, EvictionPolicy, Group, Sequences


def without_private(seqs: Sequences, filled: Filled) -> Filled:
    """Leaves out the filled blocks of rows with holes or approximate K/V: they are neither published nor merged."""
    where = filled.where
    if seqs.holes is not None:
        where = where & ~jnp.any(pick(seqs.holes, filled.row), axis=-1)
    if seqs.approximate is not None:
        where = where & ~pick(seqs.approximate, filled.row)
    return filled._replace(where=where)


def unless_private(row: Sequences, where: jax.Array) -> jax.Array:
    """bool[]; where bool[], unless the row publishes nothing."""
    where = where if row.holes is None else where & ~jnp.any(row.holes)
    return where if row.approximate is None else where & ~row.approximate


def with_approximate(seqs: Sequences, chunk: Chunk) -> Sequences:
    """Marks the rows of written tokens whose K/V may be approximate. They publish nothing any more."""
    if seqs.approximate is None:
        return seqs
    is_new = chunk.done & (chunk.end > chunk.start)
    is_new = is_new if chunk.exact is None else is_new & ~chunk.exact
    return seqs.replace(approximate=put(seqs.approximate, chunk.rows, True, is_new))


def unless_inside(row: Sequences, length: jax.Array, block_size: int, where: jax.Array) -> jax.Array:
    """bool[]; where bool[], unless a cut to `length` tokens would end inside a hole. Nothing can be written there."""
    if row.holes is None:
        return where
    return where & ~((length % block_size > 0) & pick(row.holes, length // block_size))


def cut_off(row: Sequences, num_columns: jax.Array) -> Sequences:
    """Forgets the holes from column `num_columns` i32[] on."""
    if row.holes is None:
        return row
    column = np.arange(row.holes.shape[0], dtype=np.int32)
    return row.replace(holes=row.holes & (column < num_columns))


def unread(group: Group, holes: jax.Array) -> jax.Array:
    """bool[B]; blocks of the first group whose only holders are holes bool[S, M]. Blocks on the move wait."""
    table = group.table.reshape(-1)
    num_holes = add(jnp.zeros_like(group.blocks.refcount), table, 1, holes.reshape(-1) & (table >= 0), unique=False)
    return (num_holes > 0) & (num_holes == group.blocks.refcount) & group.arrived(group.ids)


def stranded(state: CacheState, freed: jax.Array) -> jax.Array:
    """bool[B]; blocks of the first group that leave the index when nobody holds the blocks freed bool[B] any more.

    They are the held blocks after the freed blocks, by the holders in any group, and all their descendants.
    """
    group, *window_groups = state.groups
    blocks = group.blocks
    is_held = (blocks.refcount > 0) & ~freed
    for window_group in window_groups:
        ids = window_group.in_this_group(group.ids)
        is_held = is_held | ((ids >= 0) & (pick(window_group.blocks.refcount, ids) > 0))
    below = descendants(blocks, freed & (blocks.fill > 0))
    return descendants(blocks, below & is_held)


def free(group: Group, policy: EvictionPolicy, holes: jax.Array, freed: jax.Array, now: Any) -> Group:
    """Takes the blocks freed bool[B] from all holes bool[S, M]. Findable blocks stay cached, others become empty."""
    leaves = holes & (group.table >= 0) & pick(freed, group.table)
    ids = group.table.T[::-1].reshape(-1)  # tails before heads: the order in which blocks are freed
    where = leaves.T[::-1].reshape(-1)
    group = group.replace(table=jnp.where(leaves, NO_BLOCK, group.table))
    return give_back_shared(group, policy, ids, 1, where, now)
