# SPDX-License-Identifier: Apache-2.0
"""Events of a cache as updates of MAX's agent: names that are added to a tier, and names that leave it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvjax.interop import columns as col
from kvjax.interop.agent._wires import messages
from kvjax.interop.batch import pieces, runs
from kvjax.interop.nodes import NodeMap
from kvjax.interop.table import Gone, names_of
from kvjax.interop.teller import Teller

MOST_NAMES = 20_000  # in an update: a name and its parent's have at most 44 bytes, so that it stays below 1 MB
TIERS = (messages.MEMORY_TIER_GPU, messages.MEMORY_TIER_CPU)  # by level


class Entry(NamedTuple):
    """The fields of a block that are sent beside its name.

    Attributes:
      level: where it is.
      parent: the name of the prefix before, 0 at a root.
      depth: blocks before it.
    """

    level: int
    parent: int
    depth: int


class Update(NamedTuple):
    """Blocks of one group that are added to one level, or removed from it: {name: entry}."""

    added: bool
    group: int
    level: int
    blocks: dict[int, Entry]


class Updates(Teller[Update]):
    """Makes updates of events."""

    def _removed(self, gone: Iterable[Gone]) -> list[Update]:
        return [
            Update(False, number, level, dict.fromkeys(names[start:stop].tolist(), Entry(level, 0, 0)))
            for number, names, levels in gone
            if number in self.groups
            for start, stop in pieces(runs(levels), MOST_NAMES)
            for level in (int(levels[start]),)
        ]

    def _stored(self, nodes: NodeMap, number: int, blocks: np.ndarray) -> list[Update]:
        if number not in self.groups:
            return []
        rows = nodes.groups[number].table[blocks]
        names, parents = names_of(rows[:, col.DIGEST : col.DIGEST + 2]), names_of(rows[:, col.ABOVE : col.ABOVE + 2])
        parents[rows[:, col.DEPTH] == 0] = 0
        known = zip(rows[:, col.LEVEL].tolist(), parents.tolist(), rows[:, col.DEPTH].tolist(), strict=True)
        return updates_of(number, dict(zip(names.tolist(), map(Entry._make, known), strict=True)))


def updates_of(number: int, blocks: dict[int, Entry], added: bool = True) -> list[Update]:
    """Updates that add a group's blocks, or remove them, in their order."""
    names, levels = list(blocks), np.array([entry.level for entry in blocks.values()], np.int64)
    return [
        Update(added, number, int(levels[start]), {name: blocks[name] for name in names[start:stop]})
        for start, stop in pieces(runs(levels), MOST_NAMES)
    ]


def message_of(update: Update, in_snapshot: bool = False) -> bytes:
    """An update as a message, which has no number yet."""
    return messages.KVCacheStateUpdate(
        update_type=messages.UPDATE_TYPE_ADDED if update.added else messages.UPDATE_TYPE_REMOVED,
        memory_tier=TIERS[update.level],
        cache_ids=map(str, update.blocks),
        parent_ids=[str(entry.parent or "") for entry in update.blocks.values()] if update.added else (),
        in_snapshot=in_snapshot,
        group=update.group,
    ).SerializeToString()


def numbered(message: bytes, sequence: int) -> bytes:
    """A message with its number: messages that are joined are merged."""
    return message + messages.KVCacheStateUpdate(sequence=sequence).SerializeToString()
