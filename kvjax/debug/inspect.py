# SPDX-License-Identifier: Apache-2.0
"""A cache inspected on the host: the condition of every block, and the number of its written slots."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from kvjax.state import NO_BLOCK, CacheState


class Condition(enum.IntEnum):
    """The condition of a block. UNUSED blocks lie beyond the capacity that the state was made with.

    The last three are the same on the host; swapped-out rows and pins hold ON_HOST_ACTIVE blocks.
    """

    UNUSED = 0
    EMPTY = 1
    CACHED = 2
    ACTIVE = 3
    ON_HOST_EMPTY = 4
    ON_HOST_CACHED = 5
    ON_HOST_ACTIVE = 6


@dataclasses.dataclass(frozen=True)
class Inspection:
    """One group of a state, as numpy arrays; tolerates any contents, broken ones too."""

    condition: np.ndarray  # i32[B]; a `Condition` for each block
    moving: np.ndarray  # bool[B]; blocks whose K/V are on their way to the tier that `condition` says
    refcount: np.ndarray  # i32[B]
    written: np.ndarray  # i32[B]; slots from the block's start whose K/V are written and can still be read
    reserved: np.ndarray  # i32[B]; slots from the block's start that rows have reserved or that are written
    fill: np.ndarray  # i32[B]; tokens of a findable block
    tokens: np.ndarray  # i32[B, P]; in a window group those of the first group's blocks with the same prefix
    parent: np.ndarray  # i32[B, 2]
    generation: np.ndarray  # i32[B]
    table: np.ndarray  # i32[S, M]
    length: np.ndarray  # i32[S]
    committed: np.ndarray  # i32[S]
    held: np.ndarray  # i32[S]; written tokens of each row that are in its blocks on the device; fewer with a window
    swapped: np.ndarray  # bool[S]; rows that are swapped out

    @property
    def used(self) -> np.ndarray:
        """bool[B]; blocks that are active or cached, on either tier."""
        idle = (Condition.UNUSED, Condition.EMPTY, Condition.ON_HOST_EMPTY)
        return ~np.isin(self.condition, idle) | self.moving

    @property
    def in_use(self) -> np.ndarray:
        """bool[S]; rows that hold a sequence, or blocks."""
        return (self.length != 0) | (self.table != NO_BLOCK).any(axis=1)


def inspect_group(state: CacheState, group: int = 0) -> Inspection:
    """Inspects one group of a state on the host."""
    own, tree, seqs = jax.device_get((state.groups[group], state.groups[0], state.seqs))
    blocks, size = own.blocks, state.spec.block_size
    if blocks.refcount.ndim != 1:
        raise ValueError(f"state: got arrays with batch axes {blocks.refcount.shape[:-1]}, wanted one cache of them")
    ids, table = np.arange(len(blocks.refcount), dtype=np.int32), own.table
    is_block = (table >= 0) & (table < len(ids))
    on_device = np.asarray(own.on_device(ids))

    def inside(num_tokens: np.ndarray) -> np.ndarray:
        """i32[S, M]; slots of each table entry that the first num_tokens i32[S] tokens of its row reach."""
        return np.clip(num_tokens[:, None] - np.arange(table.shape[1]) * size, 0, size)

    def reach(num_tokens: np.ndarray) -> np.ndarray:
        """i32[B]; slots from each block's start that they reach in any row."""
        slots = np.zeros(len(ids), np.int32)
        np.maximum.at(slots, table[is_block], inside(num_tokens)[is_block])
        return slots

    condition = np.where(blocks.fill > 0, Condition.CACHED, Condition.EMPTY)
    condition = np.where(blocks.refcount > 0, Condition.ACTIVE, condition)
    unused = (condition == Condition.EMPTY) & (ids >= own.num_blocks) & (ids < len(own.empty)) & on_device
    condition = np.where(on_device, condition, condition + (Condition.ON_HOST_EMPTY - Condition.EMPTY))
    written = np.maximum(reach(seqs.committed), blocks.fill)
    counted = is_block & on_device[np.where(is_block, table, 0)]
    return Inspection(
        condition=np.where(unused, Condition.UNUSED, condition),
        moving=np.asarray(own.moving(ids)),
        fill=blocks.fill,
        refcount=blocks.refcount,
        written=written,
        reserved=np.maximum(reach(seqs.length), written),
        tokens=tree.blocks.tokens[_group0_blocks(own, tree, is_block)],
        parent=blocks.parent,
        generation=blocks.generation,
        table=table,
        length=seqs.length,
        committed=seqs.committed,
        held=np.sum(np.where(counted, inside(seqs.committed), 0), axis=1),
        swapped=np.asarray(seqs.swapped_out),
    )


def _group0_blocks(group: Any, tree: Any, is_block: np.ndarray) -> np.ndarray:
    """i32[B]; the first group's block for each of a group's: `group0_block`, or that in the same column of a row."""
    found = np.asarray(group.group0_blocks(np.arange(len(group.blocks.fill), dtype=np.int32)))
    found = np.where(group.blocks.fill > 0, found, 0)
    found[group.table[is_block]] = tree.table[is_block]
    return np.clip(found, 0, len(tree.blocks.fill) - 1)
