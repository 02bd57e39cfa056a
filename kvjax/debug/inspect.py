# SPDX-License-Identifier: Apache-2.0
"""A cache inspected on the host: the condition of every block, and the number of its written slots."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from kvjax._summary import Condition, conditions, slots_reached
from kvjax.state import NO_BLOCK, CacheState


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
    ids = np.arange(blocks.refcount.shape[0], dtype=np.int32)
    table = own.table
    is_block = (table >= 0) & (table < len(ids))
    start = np.arange(table.shape[1]) * size
    reach = functools.partial(slots_reached, table, num_ids=len(ids), size=size)
    on_device = np.asarray(own.on_device(ids))
    written = np.maximum(reach(seqs.committed), blocks.fill)
    counted = is_block & on_device[np.where(is_block, table, 0)]
    return Inspection(
        condition=conditions(own),
        moving=np.asarray(own.moving(ids)),
        refcount=blocks.refcount,
        written=written,
        reserved=np.maximum(reach(seqs.length), written),
        fill=blocks.fill,
        tokens=tree.blocks.tokens[_group0_blocks(own, tree, is_block)],
        parent=blocks.parent,
        generation=blocks.generation,
        table=table,
        length=seqs.length,
        committed=seqs.committed,
        held=np.sum(np.where(counted, np.clip(seqs.committed[:, None] - start, 0, size), 0), axis=1),
        swapped=np.asarray(seqs.swapped_out),
    )


def _group0_blocks(group: Any, tree: Any, is_block: np.ndarray) -> np.ndarray:
    """i32[B]; the first group's block for each of a group's: `group0_block`, or that in the same column of a row."""
    found = np.asarray(group.group0_blocks(np.arange(len(group.blocks.fill), dtype=np.int32)))
    found = np.where(group.blocks.fill > 0, found, 0)
    found[group.table[is_block]] = tree.table[is_block]
    return np.clip(found, 0, len(tree.blocks.fill) - 1)
