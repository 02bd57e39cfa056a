# SPDX-License-Identifier: Apache-2.0
"""Counting a cache on the host: what its blocks and its events add up to."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvjax._summary import Condition, block_counts, count_lines
from kvjax.checks import on_state
from kvjax.debug.inspect import Inspection, inspect_group
from kvjax.state import CacheState


@dataclasses.dataclass(frozen=True)
class Stats:
    """Totals of a state. `print` it for one line. Slots are token positions, `block_size` to a block.

    Attributes:
      block_size: P.
      num_blocks: blocks in use on the device: active + cached + empty; 0 if it was out of range (see `init`).
      active_blocks: blocks that rows or pins hold.
      cached_blocks: blocks without holders whose contents can be reused.
      empty_blocks: blocks without contents. New tokens can take cached and empty blocks.
      num_rows: S.
      active_rows: rows that hold a sequence.
      row_tokens: written tokens in the rows' blocks on the device; a shared token counts once for each row. With a
        window a row has only blocks that its next token sees.
      written_slots: slots of active blocks whose K/V are written; a shared slot counts once.
      reserved_slots: slots of active blocks that some row has reserved and that are not yet written.
      cached_slots: slots of cached blocks that hold contents.
      host_blocks: H: active + cached + empty; the slots above are those of the device alone.
      host_active_blocks: blocks on the host that swapped-out rows or pins hold.
      host_cached_blocks: blocks on the host whose contents can be reused.
      host_empty_blocks: blocks on the host without contents.
      in_transit_blocks: blocks on the move, counted on the tier that they move to.
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
    host_blocks: int = 0
    host_active_blocks: int = 0
    host_cached_blocks: int = 0
    host_empty_blocks: int = 0
    in_transit_blocks: int = 0

    @property
    def total_slots(self) -> int:
        """Slots of all blocks in use."""
        return self.num_blocks * self.block_size

    @property
    def filled_slots(self) -> int:
        """Slots that hold K/V in use or for reuse."""
        return self.written_slots + self.cached_slots

    @property
    def active_share(self) -> float:
        """Share of the blocks that are active: 1.0 means that nothing more can be admitted."""
        return self.active_blocks / self.num_blocks if self.num_blocks else 1.0

    @property
    def filled_share(self) -> float:
        """Share of all slots that hold K/V in use or for reuse."""
        return self.filled_slots / self.total_slots if self.total_slots else 0.0

    @property
    def unused_share(self) -> float:
        """Share of the active blocks' slots that hold nothing: allocated but not (or not yet) written."""
        allocated = self.active_blocks * self.block_size
        return 1 - self.written_slots / allocated if allocated else 0.0

    @property
    def sharing(self) -> float:
        """Rows that read the average written slot: 1.0 means that nothing is shared."""
        return self.row_tokens / self.written_slots if self.written_slots else 1.0

    @property
    def lines(self) -> list[str]:
        """Counts in words, of the device and of the host if there is one."""
        return count_lines(self)

    def __str__(self) -> str:
        """One line of counts."""
        return "; ".join(self.lines)


@on_state
def stats(state: CacheState, group: int = 0) -> Stats:
    """Counts one group of a state on the host.

    Args:
      state: the cache; not traced.
      group: number of the group.

    Returns:
      Counts of blocks, slots and rows as they stand. What happened so far (tokens queried and reused, copies,
      evictions) is in the events, not in the state.
    """
    return tally(state, inspect_group(state, group))


def tally(state: CacheState, seen: Inspection) -> Stats:
    """Counts of an inspected group of `state`."""
    active, cached = seen.condition == Condition.ACTIVE, seen.condition == Condition.CACHED
    return Stats(
        block_size=state.spec.block_size,
        num_rows=state.spec.max_seqs,
        active_rows=int(np.sum(seen.length > 0)),
        row_tokens=int(np.sum(seen.held)),
        written_slots=int(np.sum(seen.written[active])),
        reserved_slots=int(np.sum((seen.reserved - seen.written)[active])),
        cached_slots=int(np.sum(seen.fill[cached])),
        in_transit_blocks=int(np.sum(seen.moving)),
        **block_counts(seen.condition),
    )
