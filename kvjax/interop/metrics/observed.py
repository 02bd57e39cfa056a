# SPDX-License-Identifier: Apache-2.0
"""Sums over the events of a cache: totals, bytes that moved, hits by tier, lifetimes."""

from __future__ import annotations

import jax
import numpy as np

from kvjax.events.log import EventLog
from kvjax.events.records import EventKind, Events
from kvjax.events.totals import Totals
from kvjax.events.transfer import Transfer
from kvjax.interop.events import arrays, listened
from kvjax.spec import CacheSpec

BOUNDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)  # seconds
TIERS = ("device", "host")  # by level


class Lifetimes:
    """The times for which the blocks of a group were findable.

    Attributes:
      counts: i64[14]; how many lasted up to each of `BOUNDS`, but longer than up to the one before; then the others.
      seconds: in all.
    """

    def __init__(self, num_ids: int):
        self.counts, self.seconds = np.zeros(len(BOUNDS) + 1, np.int64), 0.0
        self._since = np.full(num_ids, np.nan)

    def begin(self, blocks: np.ndarray, now: float) -> None:
        """Blocks are stored."""
        self._since[blocks] = now

    def end(self, blocks: np.ndarray, now: float) -> None:
        """Blocks are removed; those whose beginning nobody saw do not count."""
        lasted = now - self._since[blocks]
        lasted = lasted[~np.isnan(lasted)]
        self.counts += np.bincount(np.searchsorted(BOUNDS, lasted), minlength=len(self.counts))
        self.seconds += float(lasted.sum())
        self._since[blocks] = np.nan


class Observed:
    """Adds up events on the host.

    It needs no events from before, and none that are impossible trouble it: it counts what it has seen.

    Attributes:
      totals: as `Totals`.
      hits: tokens that admissions found, by tier.
      moved: bytes of ordered moves to each tier, by group.
      lifetimes: by group.
    """

    def __init__(self, spec: CacheSpec):
        self.spec, self.totals = spec, Totals()
        self.hits = dict.fromkeys(TIERS, 0)
        self.moved = {(number, tier): 0 for number in range(len(spec.groups)) for tier in TIERS}
        self.lifetimes = [Lifetimes(group.num_ids) for group in spec.groups]
        self._block_bytes = [sum(p.block_bytes(spec.block_size) for p in group.pools) for group in spec.groups]
        # Of the first group that has K/V: all that an admission finds, or what a window still sees of it.
        self._first = int(spec.bare)
        self._fill = np.full(spec.groups[self._first].num_ids, spec.block_size)
        self._level = np.zeros(spec.groups[self._first].num_ids, np.int64)

    def set_levels(self, levels: np.ndarray) -> None:
        """Sets the levels i64[B] of the first group with K/V, of a cache whose events were not all observed."""
        self._level[:] = levels

    def add(self, events: Events | EventLog, now: float) -> None:
        """Adds events, at a time in seconds.

        Raises:
          ValueError: for anything else, and for blocks of another size.
        """
        read = listened(events, self.spec)
        events = arrays(read)
        if isinstance(events, Events):  # nothing is computed on a device
            events = events.replace(transfer=jax.device_get(events.moves))
        self.totals = self.totals.add(events)
        back = 0
        for _, records, _ in read.steps:
            self._live(records, now)
            back += self._follow_levels(records)
        found = int(np.asarray(events.cached).sum())
        if isinstance(events, Events):
            self._move(events.moves)
        else:
            back = 0  # a jitted loop finds nothing on the host
        self.hits["host"] += min(back, found)
        self.hits["device"] += max(found - back, 0)

    def _live(self, records: np.ndarray, now: float) -> None:
        """Follows records i32[n, 9] of one kind: which blocks begin to be findable, and which end."""
        for number, lives in enumerate(self.lifetimes):
            found = self._of_group(records, number)
            for kind in found[:1, 0].tolist():
                if kind == EventKind.CLEARED:
                    lives.end(np.arange(self.spec.groups[number].num_ids), now)
                elif kind == EventKind.REMOVED:
                    lives.end(found[:, 2], now)
                elif kind == EventKind.STORED:
                    lives.begin(found[:, 2], now)

    def _follow_levels(self, records: np.ndarray) -> int:
        """Follows records of one kind: on which level blocks are. The tokens in those that left the host."""
        found = self._of_group(records, self._first)
        blocks, back = found[:, 2], 0
        if np.any(found[:, 0] == EventKind.UPDATED):
            came = np.unique(blocks[(found[:, 7] == 0) & (self._level[blocks] == 1)])
            back = int(self._fill[came].sum())
            self._level[blocks] = found[:, 7]
        if np.any(found[:, 0] == EventKind.STORED):
            self._level[blocks], self._fill[blocks] = found[:, 7], found[:, 6]
        return back

    def _of_group(self, records: np.ndarray, number: int) -> np.ndarray:
        """A group's records, of blocks that it has."""
        block = records[:, 2]
        return records[(records[:, 1] == number) & (block >= 0) & (block < self.spec.groups[number].num_ids)]

    def _move(self, transfer: Transfer) -> None:
        """Counts moves: between tiers the greater pool row is on the host."""
        is_move = transfer.block >= 0
        for number, size in enumerate(self._block_bytes):
            of = is_move & (transfer.group == number)
            for tier, towards in (
                ("host", transfer.target > transfer.source),
                ("device", transfer.target < transfer.source),
            ):
                self.moved[number, tier] += size * int(np.sum(of & towards))
