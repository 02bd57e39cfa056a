# SPDX-License-Identifier: Apache-2.0
"""An encoder: from changes of the index to the messages of a wire."""

from __future__ import annotations

import abc
import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.events import columns as col
from kvjax.events.index import Change, NodeMap, Space, parents_first
from kvjax.events.records import EventKind
from kvjax.interop.hashing import Hashing
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

SALTS = ("digest", "plain", "omit")
# What no wire of whole blocks publishes.
WHOLE = {col.PARTIAL: "", col.UNKNOWN: "unknown_namespace", col.COLLISION: "collision"}


def omitted_salts(salts: str) -> dict[int, str]:
    """The flag and reason that an encoder with this `salts` leaves out; checks it."""
    if salts not in SALTS:
        raise ValueError(f"salts: got {salts!r}, wanted {' or '.join(map(repr, SALTS))}")
    return {col.SALT: "salt_omitted"} if salts == "omit" else {}


class EventEncoder[W](abc.ABC):
    """Encodes a cache's events as messages `W` of a wire, which says how blocks are removed and stored.

    A change of level is a removal from the old level and a store on the new one, unless the wire has an event for it
    (`_updated`). `unpublished` has the flags of blocks that are left out, and reasons, "" for what is not counted.
    """

    def __init__(self, spec: CacheSpec, hashing: Hashing, groups: Iterable[int], unpublished: Mapping[int, str]):
        self.nodes = NodeMap(spec, hashing)  # what is cached by the events so far
        self.hashing, self.groups = hashing, frozenset(groups)  # numbers of those that the wire carries
        # The number of whole blocks that were not published, by reason, each with those below it.
        self.left_out: collections.Counter[str] = collections.Counter()
        self._unpublished, self._mask = unpublished, sum(unpublished)

    def follow(self, events: Any) -> list[Change]:
        """Folds events into the index; what they change, for `messages`."""
        changes = self.nodes.fold(events)
        for change in changes:
            if change.kind == EventKind.STORED:
                self._count(change.group, change.rows)
        return changes

    def attach(self, state: CacheState) -> Any:
        """Begins anew with a cache."""
        self.nodes.attach(state)
        for number, group in enumerate(self.nodes.groups):
            self._count(number, group.table[group.live])

    def messages(self, changes: Sequence[Change]) -> list[W]:
        """Encodes changes; reads nothing but them."""
        found: list[W] = []
        for kind, some in itertools.groupby(changes, lambda change: change.kind):
            run = list(some)
            published = [self._published(change) for change in run if change.group in self.groups]
            if kind == EventKind.UPDATED:
                found += self._updated(published)
                continue
            for change in published:
                found += self._encoded(change) if len(change.rows) else []
            if kind == EventKind.CLEARED and self.groups.isdisjoint(run[-1].others):
                found += self._cleared()
        return found

    def _encoded(self, change: Change) -> list[W]:
        if change.kind == EventKind.STORED:
            return self._stored(change.group, change.rows, change.spaces)
        return self._removed(change.group, change.rows)

    def _published(self, change: Change) -> Change:
        """A change without the blocks that are left out."""
        of = change.rows[:, col.FLAGS] & self._mask == 0
        if of.all():
            return change
        before = None if change.before is None else change.before[of]
        return change._replace(blocks=change.blocks[of], rows=change.rows[of], before=before)

    def _count(self, number: int, rows: np.ndarray) -> None:
        """Counts what is left out by its first reason."""
        if number in self.groups:
            flags = rows[:, col.FLAGS] & self._mask
            for flag in flags[flags > 0].tolist():
                self.left_out.update(filter(None, [self._unpublished[flag & -flag]]))

    def _updated(self, changes: Iterable[Change]) -> list[W]:
        """Encodes a run of updates: all removals, children first, then all stores, parents first."""
        removed, stored = [], []
        for change in changes:
            assert change.before is not None
            moved = np.flatnonzero(change.rows[:, col.LEVEL] != change.before[:, 0])
            moved = moved[parents_first(change.rows[moved])]
            left, rows = change.before[moved, 0], change.rows[moved]
            for level in (0, 1):
                gone = rows[left == level][::-1].copy()
                gone[:, col.LEVEL] = level
                removed += self._removed(change.group, gone) if len(gone) else []
            stored += self._stored(change.group, rows, change.spaces) if len(rows) else []
        return removed + stored

    @abc.abstractmethod
    def _removed(self, number: int, rows: np.ndarray) -> list[W]:
        """Encodes the removal of a group's blocks from the levels that their rows have; at least one."""

    @abc.abstractmethod
    def _stored(self, number: int, rows: np.ndarray, spaces: Mapping[int, Space]) -> list[W]:
        """Encodes the storing of a group's blocks, parents before children; at least one. All have a space."""

    def _cleared(self) -> list[W]:
        """Encodes that nothing is left in any group."""
        return []
