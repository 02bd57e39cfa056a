# SPDX-License-Identifier: Apache-2.0
"""Counting a cache on the host: what its blocks and its events add up to."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax._arrays import unreadable
from kvjax._compile import own_transfers
from kvjax.checks import on_state
from kvjax.debug.inspect import Condition, Inspection, inspect_group
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

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> stats = kvjax.debug.stats(state)
      >>> print(stats)
      8 blocks: 3 active, 0 cached, 5 empty; 0 of 32 slots filled; 1 of 2 rows in use
      >>> stats.active_share, stats.reserved_slots  # nothing is written yet
      (0.375, 10)
    """
    return tally(state, inspect_group(state, group))


def tally(state: CacheState, seen: Inspection) -> Stats:
    """Counts of an inspected group of `state`."""
    active, cached = (seen.condition == kind for kind in (Condition.ACTIVE, Condition.CACHED))
    _, *device, host_empty, host_cached, host_active = np.bincount(seen.condition, minlength=len(Condition)).tolist()
    return Stats(
        block_size=state.spec.block_size,
        num_rows=state.spec.max_seqs,
        active_rows=int(np.sum(seen.length > 0)),
        num_blocks=sum(device),
        empty_blocks=device[0],
        cached_blocks=device[1],
        active_blocks=device[2],
        row_tokens=int(np.sum(seen.held)),
        written_slots=int(np.sum(seen.written[active])),
        reserved_slots=int(np.sum((seen.reserved - seen.written)[active])),
        cached_slots=int(np.sum(seen.fill[cached])),
        host_blocks=host_empty + host_cached + host_active,
        host_empty_blocks=host_empty,
        host_cached_blocks=host_cached,
        host_active_blocks=host_active,
        in_transit_blocks=int(np.sum(seen.moving)),
    )


def count_lines(stats: Stats, since: Stats | None = None) -> list[str]:
    """Counts in words, of the device and of the host if there is one; with `since`, earlier counts, their changes."""
    if since is None and not stats.num_blocks:
        return ["num_blocks out of range: no block is in use"]
    number = lambda name: change(getattr(since or stats, name), getattr(stats, name))  # noqa: E731
    blocks, on_host = (
        ", ".join(f"{number(f'{tier}{kind}_blocks')} {kind}" for kind in ("active", "cached", "empty"))
        for tier in ("", "host_")
    )
    slots = "" if since else f"; {stats.filled_slots:,} of {stats.total_slots:,} slots filled"
    rows = f"{number('active_rows')} of {stats.num_rows:,} rows in use"
    lines = [f"{number('num_blocks')} blocks: {blocks}{slots}; {rows}"]
    if stats.host_blocks:
        moving = number("in_transit_blocks")
        lines.append(f"on the host {stats.host_blocks:,} blocks: {on_host}; {moving} on the move")
    return lines


def change(old: int, new: int) -> str:
    """The new number, behind the old one if that differs."""
    return f"{new:,}" if old == new else f"{old:,} -> {new:,}"


@own_transfers()
def one_line(owner: Any, state: Any, *sizes: str) -> str:
    """One line for a state or for its owner, traced or donated too: shapes, sizes, and counts if it has any."""
    spec, why = state.spec, uncounted(owner, state)
    line = f"blocks of {spec.block_size:,} tokens, {spec.max_seqs:,} rows of up to {spec.max_blocks_per_seq:,} blocks"
    line = ", ".join([line, *sizes])
    for number, group in enumerate(spec.groups):
        host = f" and {group.num_host_blocks:,} on the host" if group.num_host_blocks else ""
        counts = f"{group.num_blocks:,} blocks{host}" if why else str(tally(state, inspect_group(state, number)))
        line += f"; {spec.group_name(number)}{counts}"
    return f"{type(owner).__name__}({line}{f'; {why}' if why else ''})"


def uncounted(owner: Any, state: Any) -> str:
    """Why the blocks of an owner's state cannot be counted; "" if they can."""
    if why := unreadable((state, getattr(owner, "pools", None), getattr(owner, "host", None))):
        return why
    shapes = [state.seqs.length.shape, *(group.blocks.refcount.shape for group in state.groups)]
    if shapes == [(state.spec.max_seqs,), *((group.num_ids,) for group in state.spec.groups)]:
        return ""
    return f"batched, {list(shapes[0][:-1])}" if shapes[0][:-1] else "of other shapes"
