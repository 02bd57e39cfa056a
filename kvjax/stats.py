# SPDX-License-Identifier: Apache-2.0
"""Counting a cache on the host: the condition of every block, and what that adds up to."""

from __future__ import annotations

import dataclasses
import enum

import jax
import numpy as np

from kvjax.events import EventKind, EventLog, Events
from kvjax.state import CacheState


class Condition(enum.IntEnum):
    """What a block is at the moment. UNUSED blocks lie beyond the capacity that the state was made with."""

    UNUSED = 0
    EMPTY = 1
    CACHED = 2
    ACTIVE = 3


@dataclasses.dataclass(frozen=True)
class Survey:
    """One group of a state, as numpy arrays; tolerates any contents, broken ones too.

    Attributes:
      condition: i32[B]; a `Condition` for each block.
      refcount: i32[B].
      written: i32[B]; slots from the block's start whose K/V are written and can still be read.
      reserved: i32[B]; slots from the block's start that rows have room for or that are written.
      fill: i32[B]; tokens of a findable block.
      tokens: i32[B, P].
      parent: i32[B, 2].
      generation: i32[B].
      table: i32[S, M].
      length, committed: i32[S].
    """

    condition: np.ndarray
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


def survey(state: CacheState, group: int = 0) -> Survey:
    """Reads one group of a state on the host."""
    view, seqs = jax.device_get((state.groups[group], state.seqs))
    blocks, size = view.blocks, state.spec.block_size
    if blocks.refcount.ndim != 1:
        raise ValueError(f"state: got arrays with batch axes {blocks.refcount.shape[:-1]}, wanted one cache of them")
    ids = np.arange(blocks.refcount.shape[0])
    known = (view.table >= 0) & (view.table < len(ids))
    start = np.arange(view.table.shape[1]) * size

    def reach(tokens: np.ndarray) -> np.ndarray:
        """How far into each block the rows' first `tokens` tokens come."""
        far = np.zeros(len(ids), np.int32)
        np.maximum.at(far, view.table[known], np.clip(tokens[:, None] - start, 0, size)[known])
        return far

    condition = np.where(
        blocks.refcount > 0, Condition.ACTIVE, np.where(blocks.fill > 0, Condition.CACHED, Condition.EMPTY)
    )
    condition = np.where((condition == Condition.EMPTY) & (ids >= view.num_blocks), Condition.UNUSED, condition)
    written = np.maximum(reach(seqs.committed), blocks.fill)
    return Survey(
        condition=condition,
        refcount=blocks.refcount,
        written=written,
        reserved=np.maximum(reach(seqs.length), written),
        fill=blocks.fill,
        tokens=blocks.tokens,
        parent=blocks.parent,
        generation=blocks.generation,
        table=view.table,
        length=seqs.length,
        committed=seqs.committed,
    )


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a state adds up to. `print` it for one line. Slots are token positions, `block_size` to a block.

    Attributes:
      block_size: P.
      num_blocks: blocks in use: active + cached + empty.
      active_blocks: blocks that rows or pins hold.
      cached_blocks: blocks that nobody holds whose contents can be reused.
      empty_blocks: blocks without contents. Room for new tokens is cached + empty.
      num_rows: S.
      active_rows: rows that hold a sequence.
      row_tokens: sum of the rows' written tokens; a shared token counts once for each row.
      written_slots: slots of active blocks whose K/V are written; a shared slot counts once.
      reserved_slots: slots of active blocks that some row has room for and that are not yet written.
      cached_slots: slots of cached blocks that hold contents.
    """

    block_size: int
    num_blocks: int
    active_blocks: int
    cached_blocks: int
    empty_blocks: int
    num_rows: int
    active_rows: int
    row_tokens: int
    written_slots: int
    reserved_slots: int
    cached_slots: int

    @property
    def total_slots(self) -> int:
        """Slots of all blocks in use."""
        return self.num_blocks * self.block_size

    @property
    def filled_slots(self) -> int:
        """Slots that hold K/V which somebody reads or may reuse."""
        return self.written_slots + self.cached_slots

    @property
    def active_share(self) -> float:
        """Share of the blocks that cannot be had at present: 1.0 means that nothing more can be admitted."""
        return self.active_blocks / self.num_blocks

    @property
    def filled_share(self) -> float:
        """Share of all slots that hold K/V which somebody reads or may reuse."""
        return self.filled_slots / self.total_slots

    @property
    def unused_share(self) -> float:
        """Share of the active blocks' slots that hold nothing: allocated but not (or not yet) written."""
        allocated = self.active_blocks * self.block_size
        return 1 - self.written_slots / allocated if allocated else 0.0

    @property
    def sharing(self) -> float:
        """How many rows read the average written slot: 1.0 means that nothing is shared."""
        return self.row_tokens / self.written_slots if self.written_slots else 1.0

    def __str__(self) -> str:
        """One line of counts."""
        return (
            f"{self.num_blocks:,} blocks: {self.active_blocks:,} active, {self.cached_blocks:,} cached, "
            f"{self.empty_blocks:,} empty; {self.filled_slots:,} of {self.total_slots:,} slots filled; "
            f"{self.active_rows:,} of {self.num_rows:,} rows in use"
        )


def stats(state: CacheState, group: int = 0) -> Stats:
    """Counts one group of a state on the host.

    Args:
      state: the cache; not traced.
      group: which attention window.

    Returns:
      Counts of blocks, slots and rows as they stand. What happened so far (tokens queried and reused, copies,
      evictions) is in the events, not in the state.
    """
    return tally(state, survey(state, group))


def tally(state: CacheState, seen: Survey) -> Stats:
    """Adds up a survey of `state`."""
    active, cached = seen.condition == Condition.ACTIVE, seen.condition == Condition.CACHED
    return Stats(
        block_size=state.spec.block_size,
        num_blocks=int(np.sum(seen.condition != Condition.UNUSED)),
        active_blocks=int(np.sum(active)),
        cached_blocks=int(np.sum(cached)),
        empty_blocks=int(np.sum(seen.condition == Condition.EMPTY)),
        num_rows=state.spec.max_seqs,
        active_rows=int(np.sum(seen.length > 0)),
        row_tokens=int(np.sum(seen.committed)),
        written_slots=int(np.sum(seen.written[active])),
        reserved_slots=int(np.sum((seen.reserved - seen.written)[active])),
        cached_slots=int(np.sum(seen.fill[cached])),
    )


@dataclasses.dataclass(frozen=True)
class Totals:
    """What happened so far, added up on the host from the events of each transition.

    Attributes:
      queried_tokens: prompt tokens that were looked up.
      reused_tokens: those of them that were found, and so need no computing.
      stored_blocks: blocks that became findable.
      removed_blocks: blocks that stopped being findable, by eviction or because a row was cut inside them.
      copied_blocks: blocks copied, for partial reuse or before a write into a shared block.
      refused: rows whose request was not done.
    """

    queried_tokens: int = 0
    reused_tokens: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    copied_blocks: int = 0
    refused: int = 0

    @property
    def reused_share(self) -> float:
        """Share of the queried tokens that were found."""
        return self.reused_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def add(self, events: Events | EventLog) -> Totals:
        """These totals and `events`, which may have leading axes (of a scan, of a vmap)."""
        events = jax.device_get(events)
        kinds = events.records[..., 0]
        rows = {} if isinstance(events, EventLog) else {
            "queried_tokens": np.sum(events.queried), "reused_tokens": np.sum(events.cached),
            "refused": np.sum(events.status != 0),
        }  # fmt: skip
        new = {
            "stored_blocks": np.sum(kinds == EventKind.STORED),
            "removed_blocks": np.sum(kinds == EventKind.REMOVED),
            "copied_blocks": np.sum(kinds == EventKind.COPIED),
        } | rows
        return dataclasses.replace(self, **{name: getattr(self, name) + int(n) for name, n in new.items()})
