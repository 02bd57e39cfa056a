# SPDX-License-Identifier: Apache-2.0
"""Encodes changes of the index as the messages of a wire."""

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
# Flags of blocks that wires of whole blocks never publish.
WHOLE = {col.PARTIAL: "", col.UNKNOWN: "unknown_namespace", col.COLLISION: "collision"}


def omitted_salts(salts: str) -> dict[int, str]:
    """The flag and the reason of the blocks left out by an encoder with this `salts`. Refuses unknown values."""
    if salts not in SALTS:
        raise ValueError(f"salts: got {salts!r}, wanted {' or '.join(map(repr, SALTS))}")
    return {col.SALT: "salt_omitted"} if salts == "omit" else {}


class EventEncoder[W](abc.ABC):
    """Encodes a cache's events as messages `W` of a wire. Each wire defines how blocks are removed and stored.

    A change of level is a removal from the old level and a store on the new level, unless the wire has an event for it
    (`_updated`). `unpublished` maps the flags of blocks to leave out to reasons, or to "" to count no reason.
    """

    def __init__(self, spec: CacheSpec, hashing: Hashing, groups: Iterable[int], unpublished: Mapping[int, str]):
        self.nodes = NodeMap(spec, hashing)  # the blocks cached after the events so far
        self.hashing = hashing
        self.groups = frozenset(groups)  # indices of the groups that the wire carries
        # The number of whole unpublished blocks, by reason. A block below an unpublished block counts too.
        self.unpublished_counts: collections.Counter[str] = collections.Counter()
        self._unpublished = unpublished
        self._mask = sum(unpublished)

    def follow(self, events: Any) -> list[Change]:
        """Applies events to the index. Returns the changes, for `messages`."""
        changes = self.nodes.fold(events)
        for change in changes:
            if change.kind == EventKind.STORED:
                self._count(change.group, change.rows)
        return changes

    def attach(self, state: CacheState) -> Any:
        """Takes over the index of a cache."""
        self.nodes.attach(state)
        for group_index, group in enumerate(self.nodes.groups):
            self._count(group_index, group.table[group.live])

    def messages(self, changes: Sequence[Change]) -> list[W]:
        """Encodes changes, without reading anything else."""
        encoded: list[W] = []
        for kind, changes_of_kind in itertools.groupby(changes, lambda change: change.kind):
            run = list(changes_of_kind)
            published = [self._published(change) for change in run if change.group in self.groups]
            if kind == EventKind.UPDATED:
                encoded += self._updated(published)
                continue
            for change in published:
                encoded += self._encoded(change) if len(change.rows) else []
            if kind == EventKind.CLEARED and self.groups.isdisjoint(run[-1].others):
                encoded += self._cleared()
        return encoded

    def _encoded(self, change: Change) -> list[W]:
        if change.kind == EventKind.STORED:
            return self._stored(change.group, change.rows, change.spaces)
        return self._removed(change.group, change.rows)

    def _published(self, change: Change) -> Change:
        """A change without its unpublished blocks."""
        is_published = change.rows[:, col.FLAGS] & self._mask == 0
        if is_published.all():
            return change
        before = None if change.before is None else change.before[is_published]
        return change._replace(blocks=change.blocks[is_published], rows=change.rows[is_published], before=before)

    def _count(self, group_index: int, rows: np.ndarray) -> None:
        """Counts unpublished blocks by their first reason."""
        if group_index in self.groups:
            flags = rows[:, col.FLAGS] & self._mask
            for flag in flags[flags > 0].tolist():
                self.unpublished_counts.update(filter(None, [self._unpublished[flag & -flag]]))

    def _updated(self, changes: Iterable[Change]) -> list[W]:
        """Encodes a run of updates: all removals, children first, then all stores, parents first."""
        removed = []
        stored = []
        for change in changes:
            assert change.before is not None
            moved = np.flatnonzero(change.rows[:, col.LEVEL] != change.before[:, 0])
            moved = moved[parents_first(change.rows[moved])]
            old_levels = change.before[moved, 0]
            rows = change.rows[moved]
            for level in (0, 1):
                gone = rows[old_levels == level][::-1].copy()
                gone[:, col.LEVEL] = level
                removed += self._removed(change.group, gone) if len(gone) else []
            stored += self._stored(change.group, rows, change.spaces) if len(rows) else []
        return removed + stored

    @abc.abstractmethod
    def _removed(self, group_index: int, rows: np.ndarray) -> list[W]:
        """Encodes the removal of one or more blocks of a group from their rows' levels."""

    @abc.abstractmethod
    def _stored(self, group_index: int, rows: np.ndarray, spaces: Mapping[int, Space]) -> list[W]:
        """Encodes the storing of one or more blocks of a group, parents before children. All have a space."""

    def _cleared(self) -> list[W]:
        """Encodes the clearing of all groups."""
        return []
