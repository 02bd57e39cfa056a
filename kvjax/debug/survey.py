# SPDX-License-Identifier: Apache-2.0
"""Reading a cache on the host: the condition of every block, and how far it is written."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from kvjax.state import CacheState


class Condition(enum.IntEnum):
    """What a block is at the moment. UNUSED blocks lie beyond the capacity that the state was made with.

    The last three are the same on the host: ON_HOST_ACTIVE are the blocks of rows that rest, and pinned ones.
    """

    UNUSED = 0
    EMPTY = 1
    CACHED = 2
    ACTIVE = 3
    ON_HOST_EMPTY = 4
    ON_HOST_CACHED = 5
    ON_HOST_ACTIVE = 6


@dataclasses.dataclass(frozen=True)
class Survey:
    """One group of a state, as numpy arrays; tolerates any contents, broken ones too.

    Attributes:
      condition: i32[B]; a `Condition` for each block.
      moving: bool[B]; blocks whose K/V are on their way to where `condition` says they are.
      refcount: i32[B].
      written: i32[B]; slots from the block's start whose K/V are written and can still be read.
      reserved: i32[B]; slots from the block's start that rows have room for or that are written.
      fill: i32[B]; tokens of a findable block.
      tokens: i32[B, P]; in a window group those of the blocks of the first group beside them.
      parent: i32[B, 2].
      generation: i32[B].
      table: i32[S, M].
      length, committed: i32[S].
      held: i32[S]; written tokens of each row that are in its blocks on the device; with a window these are fewer.
      swapped: bool[S]; rows that rest.
    """

    condition: np.ndarray
    moving: np.ndarray
    refcount: np.ndarray
    written: np.ndarray
    reserved: np.ndarray
    fill: np.ndarray
    tokens: np.ndarray
    parent: np.ndarray
    generation: np.ndarray
    table: np.ndarray
    length: np.ndarray
    committed: np.ndarray
    held: np.ndarray
    swapped: np.ndarray


_TO_HOST = Condition.ON_HOST_EMPTY - Condition.EMPTY


def survey(state: CacheState, group: int = 0) -> Survey:
    """Reads one group of a state on the host."""
    view, tree, seqs = jax.device_get((state.groups[group], state.groups[0], state.seqs))
    blocks, size = view.blocks, state.spec.block_size
    if blocks.refcount.ndim != 1:
        raise ValueError(f"state: got arrays with batch axes {blocks.refcount.shape[:-1]}, wanted one cache of them")
    ids = np.arange(blocks.refcount.shape[0], dtype=np.int32)
    known = (view.table >= 0) & (view.table < len(ids))
    entries = view.table[known]
    start = np.arange(view.table.shape[1]) * size

    def inside(tokens: np.ndarray) -> np.ndarray:
        """How many of the rows' first `tokens` tokens are at each place of their tables."""
        return np.clip(tokens[:, None] - start, 0, size)

    def reach(tokens: np.ndarray) -> np.ndarray:
        """How far into each block the rows' first `tokens` tokens come."""
        far = np.zeros(len(ids), np.int32)
        np.maximum.at(far, entries, inside(tokens)[known])
        return far

    here = np.asarray(view.on_device(ids))
    condition = np.where(
        blocks.refcount > 0, Condition.ACTIVE, np.where(blocks.fill > 0, Condition.CACHED, Condition.EMPTY)
    )
    unused = (condition == Condition.EMPTY) & (ids >= view.num_blocks) & (ids < len(view.empty)) & here
    condition = np.where(unused, Condition.UNUSED, np.where(here, condition, condition + _TO_HOST))
    written = np.maximum(reach(seqs.committed), blocks.fill)
    on_device = known & here[np.where(known, view.table, 0)]
    return Survey(
        condition=condition,
        moving=np.asarray(view.moving(ids)),
        refcount=blocks.refcount,
        written=written,
        reserved=np.maximum(reach(seqs.length), written),
        fill=blocks.fill,
        tokens=tree.blocks.tokens[_beside(view, tree, known)],
        parent=blocks.parent,
        generation=blocks.generation,
        table=view.table,
        length=seqs.length,
        committed=seqs.committed,
        held=np.sum(np.where(on_device, inside(seqs.committed), 0), axis=1),
        swapped=np.asarray(seqs.rests),
    )


def _beside(view: Any, tree: Any, known: np.ndarray) -> np.ndarray:
    """i32[B]; the first group's blocks beside a window group's: their anchors, or what the rows have in their place."""
    beside = np.asarray(view.anchors(np.arange(len(view.blocks.fill), dtype=np.int32)))
    beside = np.where(view.blocks.fill > 0, beside, 0)
    beside[view.table[known]] = tree.table[known]
    return np.clip(beside, 0, len(tree.blocks.fill) - 1)
