# SPDX-License-Identifier: Apache-2.0
"""Counts of a cache on the host: blocks, slots and rows."""

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
    """Totals of a state. `print` shows them in a line. Slots are token positions, `block_size` to a block.

    Attributes:
      block_size: tokens of a block, P.
      num_blocks: blocks in use on the device: active + cached + empty, or 0 after an invalid number (see `init`).
      active_blocks: blocks held by rows or pins.
      cached_blocks: blocks with reusable contents and without holders.
      empty_blocks: blocks without contents. New tokens can take cached and empty blocks.
      num_rows: rows of the cache, S.
      active_rows: rows with a sequence.
      row_tokens: written tokens in the rows' blocks on the device. A shared token counts once for each row. With a
        window a row has only the blocks that its next token sees.
      written_slots: written slots of active blocks. A shared slot counts once.
      reserved_slots: slots of active blocks reserved by a row and not yet written.
      cached_slots: slots of cached blocks with contents.
      host_blocks: blocks on the host: active + cached + backup + empty. The slots above are on the device.
      host_active_blocks: blocks on the host held by swapped-out rows or by pins.
      host_cached_blocks: blocks on the host with reusable contents.
      host_backup_blocks: blocks on the host with copies of blocks on the device.
      host_empty_blocks: blocks on the host without contents.
      in_transit_blocks: blocks on the move, counted on their new tier.
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
    host_backup_blocks: int = 0
    host_empty_blocks: int = 0
    in_transit_blocks: int = 0

    @property
    def total_slots(self) -> int:
        """Slots of all blocks in use."""
        return self.num_blocks * self.block_size

    @property
    def filled_slots(self) -> int:
        """Slots with K/V, of active and cached blocks."""
        return self.written_slots + self.cached_slots

    @property
    def active_share(self) -> float:
        """Share of the blocks that are active. At 1.0 nothing more can be admitted."""
        return self.active_blocks / self.num_blocks if self.num_blocks else 1.0

    @property
    def filled_share(self) -> float:
        """Share of all slots that hold K/V."""
        return self.filled_slots / self.total_slots if self.total_slots else 0.0

    @property
    def unused_share(self) -> float:
        """Share of the active blocks' slots without contents: allocated, but not (or not yet) written."""
        allocated = self.active_blocks * self.block_size
        return 1 - self.written_slots / allocated if allocated else 0.0

    @property
    def sharing(self) -> float:
        """Average number of rows that read a written slot. At 1.0 nothing is shared."""
        return self.row_tokens / self.written_slots if self.written_slots else 1.0

    @property
    def lines(self) -> list[str]:
        """Counts in words, of the device and of the host if there is a host tier."""
        return count_lines(self)

    def __str__(self) -> str:
        """Counts in a line."""
        return "; ".join(self.lines)


@on_state
def stats(state: CacheState, group: int = 0) -> Stats:
    """Counts a group of a state on the host.

    Args:
      state: the cache, not traced.
      group: index of the group.

    Returns:
      Counts of the present blocks, slots and rows. For the history (tokens queried and reused, copies, evictions) read
      the events, because a state does not have it.

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
    active = seen.condition == Condition.ACTIVE
    cached = seen.condition == Condition.CACHED
    num_by_condition = np.bincount(seen.condition, minlength=len(Condition)).tolist()
    _, *device, host_empty, host_cached, host_active, host_backup = num_by_condition
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
        host_blocks=host_empty + host_cached + host_active + host_backup,
        host_backup_blocks=host_backup,
        host_empty_blocks=host_empty,
        host_cached_blocks=host_cached,
        host_active_blocks=host_active,
        in_transit_blocks=int(np.sum(seen.moving)),
    )


def count_lines(stats: Stats, since: Stats | None = None) -> list[str]:
    """Counts in words, of the device and of the host if there is a host tier. Shows changes since earlier counts."""
    if since is None and not stats.num_blocks:
        return ["num_blocks out of range: no block is in use"]
    count = lambda name: change(getattr(since or stats, name), getattr(stats, name))  # noqa: E731
    kinds = "active", "cached", "empty"
    host_kinds = "active", "cached", "backup", "empty"
    if not stats.host_backup_blocks and not (since and since.host_backup_blocks):
        host_kinds = kinds
    blocks = ", ".join(f"{count(f'{kind}_blocks')} {kind}" for kind in kinds)
    on_host = ", ".join(f"{count(f'host_{kind}_blocks')} {kind}" for kind in host_kinds)
    slots = "" if since else f"; {stats.filled_slots:,} of {stats.total_slots:,} slots filled"
    rows = f"{count('active_rows')} of {stats.num_rows:,} rows in use"
    lines = [f"{count('num_blocks')} blocks: {blocks}{slots}; {rows}"]
    if stats.host_blocks:
        moving = count("in_transit_blocks")
        lines.append(f"on the host {stats.host_blocks:,} blocks: {on_host}; {moving} on the move")
    return lines


def change(old: int, new: int) -> str:
    """The new number, preceded by the old number if it differs."""
    return f"{new:,}" if old == new else f"{old:,} -> {new:,}"


@own_transfers()
def one_line(owner: Any, state: Any, *sizes: str) -> str:
    """A line for a state or its owner, even if traced or donated: shapes and sizes, and counts if they can be read."""
    spec = state.spec
    reason = uncounted(owner, state)
    line = f"blocks of {spec.block_size:,} tokens, {spec.max_seqs:,} rows of up to {spec.max_blocks_per_seq:,} blocks"
    line = ", ".join([line, *sizes])
    for group_index, group in enumerate(spec.groups):
        host = f" and {group.num_host_blocks:,} on the host" if group.num_host_blocks else ""
        counts = (
            f"{group.num_blocks:,} blocks{host}" if reason else str(tally(state, inspect_group(state, group_index)))
        )
        line += f"; {spec.group_name(group_index)}{counts}"
    return f"{type(owner).__name__}({line}{f'; {reason}' if reason else ''})"


def uncounted(owner: Any, state: Any) -> str:
    """The reason that the blocks of an owner's state cannot be counted, or ""."""
    if reason := unreadable((state, getattr(owner, "pools", None), getattr(owner, "host", None))):
        return reason
    shapes = [state.seqs.length.shape, *(group.blocks.refcount.shape for group in state.groups)]
    if shapes == [(state.spec.max_seqs,), *((group.num_ids,) for group in state.spec.groups)]:
        return ""
    return f"batched, {list(shapes[0][:-1])}" if shapes[0][:-1] else "of other shapes"
