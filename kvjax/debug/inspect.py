# SPDX-License-Identifier: Apache-2.0
"""Inspects a cache on the host: the condition of every block, and the number of its written slots."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from kvjax.state import NO_BLOCK, CacheState


class Condition(enum.IntEnum):
    """The condition of a block. UNUSED blocks lie beyond the capacity of the state.

    The last four are the conditions of blocks on the host. Swapped-out rows and pins hold ON_HOST_ACTIVE blocks. An
    ON_HOST_BACKUP has a copy of a block on the device.
    """

    UNUSED = 0
    EMPTY = 1
    CACHED = 2
    ACTIVE = 3
    ON_HOST_EMPTY = 4
    ON_HOST_CACHED = 5
    ON_HOST_ACTIVE = 6
    ON_HOST_BACKUP = 7


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A group of a state, as numpy arrays. Accepts any contents, even of a broken state."""

    condition: np.ndarray  # i32[B]; a `Condition` for each block
    moving: np.ndarray  # bool[B]; blocks whose K/V are on their way to the tier in `condition`
    refcount: np.ndarray  # i32[B]
    written: np.ndarray  # i32[B]; slots from the block's start with written, readable K/V
    reserved: np.ndarray  # i32[B]; slots from the block's start that are written or reserved by a row
    fill: np.ndarray  # i32[B]; tokens of a findable block
    tokens: np.ndarray  # i32[B, P]; in a window group the tokens of the first group's blocks with the same prefix
    parent: np.ndarray  # i32[B, 2]
    generation: np.ndarray  # i32[B]
    table: np.ndarray  # i32[S, M]
    length: np.ndarray  # i32[S]
    committed: np.ndarray  # i32[S]
    held: np.ndarray  # i32[S]; written tokens of each row in its blocks on the device; fewer with a window
    swapped: np.ndarray  # bool[S]; swapped-out rows
    holes: np.ndarray  # bool[S, M]; table entries that their rows no longer read

    @property
    def used(self) -> np.ndarray:
        """bool[B]; blocks that are active or cached, on either tier."""
        idle = (Condition.UNUSED, Condition.EMPTY, Condition.ON_HOST_EMPTY, Condition.ON_HOST_BACKUP)
        return ~np.isin(self.condition, idle) | self.moving

    @property
    def in_use(self) -> np.ndarray:
        """bool[S]; rows with a sequence, or with blocks."""
        return (self.length != 0) | (self.table != NO_BLOCK).any(axis=1)


def inspect_group(state: CacheState, group: int = 0) -> Inspection:
    """Inspects a group of a state on the host."""
    inspected, tree, seqs = jax.device_get((state.groups[group], state.groups[0], state.seqs))
    blocks = inspected.blocks
    size = state.spec.block_size
    if blocks.refcount.ndim != 1:
        raise ValueError(f"state: got arrays with batch axes {blocks.refcount.shape[:-1]}, wanted those of one cache")
    ids = np.arange(len(blocks.refcount), dtype=np.int32)
    table = inspected.table
    is_block = (table >= 0) & (table < len(ids))
    on_device = np.asarray(inspected.on_device(ids))

    def inside(num_tokens: np.ndarray) -> np.ndarray:
        """i32[S, M]; slots of each table entry within the first num_tokens i32[S] tokens of its row."""
        return np.clip(num_tokens[:, None] - np.arange(table.shape[1]) * size, 0, size)

    def reach(num_tokens: np.ndarray) -> np.ndarray:
        """i32[B]; slots from each block's start within the first num_tokens i32[S] tokens of any row."""
        slots = np.zeros(len(ids), np.int32)
        np.maximum.at(slots, table[is_block], inside(num_tokens)[is_block])
        return slots

    condition = np.where(blocks.fill > 0, Condition.CACHED, Condition.EMPTY)
    condition = np.where(blocks.refcount > 0, Condition.ACTIVE, condition)
    unused = (condition == Condition.EMPTY) & (ids >= inspected.num_blocks) & (ids < len(inspected.empty)) & on_device
    condition = np.where(on_device, condition, condition + (Condition.ON_HOST_EMPTY - Condition.EMPTY))
    if inspected.backup is not None:
        condition = np.where((inspected.backup >= 0) & (blocks.fill == 0), Condition.ON_HOST_BACKUP, condition)
    written = np.maximum(reach(seqs.committed), blocks.fill)
    holes = np.zeros(table.shape, np.bool_) if group or seqs.holes is None else seqs.holes
    counted = is_block & ~holes & on_device[np.where(is_block, table, 0)]
    return Inspection(
        condition=np.where(unused, Condition.UNUSED, condition),
        moving=np.asarray(inspected.moving(ids)),
        fill=blocks.fill,
        refcount=blocks.refcount,
        written=written,
        reserved=np.maximum(reach(seqs.length), written),
        tokens=tree.blocks.tokens[_group0_blocks(inspected, tree, is_block)],
        parent=blocks.parent,
        generation=blocks.generation,
        table=table,
        length=seqs.length,
        committed=seqs.committed,
        held=np.sum(np.where(counted, inside(seqs.committed), 0), axis=1),
        swapped=np.asarray(seqs.swapped_out),
        holes=holes,
    )


def _group0_blocks(group: Any, tree: Any, is_block: np.ndarray) -> np.ndarray:
    """Blocks i32[B] of the first group for each block of a group.

    It is the block in `group0_block`, or the block in the same column of a row.
    """
    group0_blocks = np.asarray(group.group0_blocks(np.arange(len(group.blocks.fill), dtype=np.int32)))
    group0_blocks = np.where(group.blocks.fill > 0, group0_blocks, 0)
    group0_blocks[group.table[is_block]] = tree.table[is_block]
    return np.clip(group0_blocks, 0, len(tree.blocks.fill) - 1)
