# SPDX-License-Identifier: Apache-2.0
"""Events of a cache as updates of MAX's agent: hashes that are added to a tier, and hashes that leave it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvjax.interop import columns as col
from kvjax.interop.agent._wires import messages
from kvjax.interop.columns import hashes_of, parents_of
from kvjax.interop.encoder import EventEncoder
from kvjax.interop.events import pieces, runs
from kvjax.interop.index import NodeMap

MOST_HASHES = 20_000  # in an update: one and its parent's have at most 44 bytes, so that it stays below 1 MB
TIERS = (messages.MEMORY_TIER_GPU, messages.MEMORY_TIER_CPU)  # by level


class Update(NamedTuple):
    """Blocks of one group that are added to one level, or removed from it."""

    is_added: bool
    group: int
    level: int
    hashes: list[int]
    parents: list[int]  # of added ones, 0 at a root

    def message(self, in_snapshot: bool = False) -> bytes:
        """The update as a message, which has no number yet."""
        return messages.KVCacheStateUpdate(
            update_type=messages.UPDATE_TYPE_ADDED if self.is_added else messages.UPDATE_TYPE_REMOVED,
            memory_tier=TIERS[self.level],
            cache_ids=map(str, self.hashes),
            parent_ids=[str(parent or "") for parent in self.parents],
            in_snapshot=in_snapshot,
            group=self.group,
        ).SerializeToString()


def numbered(message: bytes, sequence: int) -> bytes:
    """A message with its number: messages that are joined are merged."""
    return message + messages.KVCacheStateUpdate(sequence=sequence).SerializeToString()


class UpdateEncoder(EventEncoder[Update]):
    """Makes updates of events."""

    def differences(self, old: NodeMap, new: NodeMap) -> list[Update]:
        """Updates from one index to another; group by group, what is gone before what is new."""
        found = []
        for number in sorted(self.groups):
            (old_rows, old_keys), (new_rows, new_keys) = (self._published(nodes, number) for nodes in (old, new))
            both = {*old_keys} & {*new_keys}
            gone, added = (np.array([key not in both for key in keys], bool) for keys in (old_keys, new_keys))
            found += self._removed(number, old_rows[gone][::-1]) + self._stored(number, new_rows[added])
        return found

    def _published(self, nodes: NodeMap, number: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Rows of a group's published blocks, parents first, and for each its hash and level."""
        group = nodes.groups[number]
        rows = group.table[group.live]
        rows = rows[self._is_published(rows)]
        return rows, list(zip(hashes_of(rows).tolist(), rows[:, col.LEVEL].tolist(), strict=True))

    def _removed(self, number: int, rows: np.ndarray) -> list[Update]:
        return _updates(False, number, rows, [])

    def _stored(self, number: int, rows: np.ndarray) -> list[Update]:
        return _updates(True, number, rows, np.where(rows[:, col.DEPTH] > 0, parents_of(rows), 0).tolist())


def _updates(is_added: bool, number: int, rows: np.ndarray, parents: list[int]) -> list[Update]:
    hashes, levels = hashes_of(rows).tolist(), rows[:, col.LEVEL]
    return [
        Update(is_added, number, int(levels[start]), hashes[start:stop], parents[start:stop])
        for start, stop in pieces(runs(levels), MOST_HASHES)
    ]
