# SPDX-License-Identifier: Apache-2.0
"""The node map: what is cached where, by the events alone, in arrays indexed by (group, block)."""

from __future__ import annotations

import copy
import itertools
from typing import Any, NoReturn

import numpy as np

from kvjax.events.records import EventKind
from kvjax.interop import columns as col
from kvjax.interop.batch import Step, read
from kvjax.interop.table import Gone, Nodes, empty_table, names_of, parents_among, tables_of
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

_NEW = "wanted one that is new"
_LACKS = "wanted one that the map has: begin with `attach(state)`, and leave no events out"


class NodeMap:
    """An index of the cached blocks, by the events alone; memory is O(blocks).

    After a ValueError for events that cannot have happened its contents are undefined, until `attach`.

    Attributes:
      spec: of the cache.
      groups: the nodes of each group.
    """

    def __init__(self, spec: CacheSpec):
        """Begins with an empty cache.

        Args:
          spec: of the cache.
        """
        self.spec = spec
        self.groups = [Nodes(empty_table(spec, group.num_ids), {}) for group in spec.groups]

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(group.table[:, col.FILL])) for group in self.groups)

    def copy(self) -> NodeMap:
        """A map that no longer changes with this one."""
        other = copy.copy(self)
        other.groups = copy.deepcopy(self.groups)
        return other

    def fold(self, events: Any) -> None:
        """Follows events: `Events`, an `EventLog`, or decoded ones.

        Raises:
          ValueError: if they cannot have come from a cache with these contents.
        """
        for step in read(events, self.spec).steps:
            self.follow(step)

    def follow(self, step: Step) -> None:
        """Follows a step of a batch."""
        if step.kind == EventKind.UPDATED:
            self.update(step.records)
        elif step.kind == EventKind.CLEARED:
            self.clear(step.records)
        else:
            self.remove(step.records)
            self.store(step.stored, step.text)

    def store(self, records: np.ndarray, text: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Follows stored records i32[n, 9] with their text; (group, blocks) of what is new, with status col.DUE."""
        size, found = self.spec.block_size, []
        for number, of in self._by_group(records):
            table, mine = self.groups[number].table, records[of]
            blocks = self._blocks(number, mine, "stored")
            fill, level = mine[:, 6], mine[:, 7]
            _refuse(mine, table[blocks, col.FILL] > 0, _NEW)
            wrong = (fill < 1) | (fill > size) | (level < 0) | (level > 1)
            _refuse(mine, wrong, f"wanted 1 to {size} tokens at level 0 or 1")
            namespace, depth = self._prefixes(number, mine, blocks)
            table[blocks, : col.NAMESPACE] = mine[:, 3:]
            table[blocks, col.NAMESPACE], table[blocks, col.DEPTH], table[blocks, col.STATUS] = (
                namespace,
                depth,
                col.DUE,
            )
            table[blocks, col.TEXT :] = text[of]
            found.append((number, blocks))
        return found

    def remove(self, records: np.ndarray) -> list[Gone]:
        """Follows removed records i32[n, 9]; what was known outside."""
        gone = []
        for number, of in self._by_group(records):
            blocks = self._blocks(number, records[of], "removed")
            self._refuse_unknown(number, records[of], blocks)
            gone.append(self.groups[number].forget(number, blocks))
        return gone

    def update(self, records: np.ndarray) -> dict[tuple[int, int], int]:
        """Follows updated records; {(group, block): level before} of those known outside that have another one now."""
        before = self.restate(records)
        return {
            (number, block): level
            for (number, block), (level, _) in before.items()
            if self.groups[number].table[block, col.LEVEL] != level
        }

    def restate(self, records: np.ndarray) -> dict[tuple[int, int], tuple[int, int]]:
        """Follows updated records; {(group, block): (level, priority) before} of those known outside that have others.

        A node may be updated several times, to and fro.
        """
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for number, of in self._by_group(records):
            mine, table = records[of], self.groups[number].table
            blocks = self._blocks(number, mine, "updated", repeats=True)
            self._refuse_unknown(number, mine, blocks)
            _refuse(mine, (mine[:, 7] < 0) | (mine[:, 7] > 1), "wanted level 0 or 1")
            stated = [col.LEVEL, col.PRIORITY]
            before = dict(zip(blocks.tolist(), map(tuple, table[blocks][:, stated].tolist()), strict=True))
            for block, level, priority in mine[:, [2, 7, 8]].tolist():  # the last one counts
                table[block, col.LEVEL], table[block, col.PRIORITY] = level, priority
            for block, (level, priority) in before.items():
                row = table[block]
                if row[col.STATUS] == col.SENT and (row[col.LEVEL] != level or row[col.PRIORITY] != priority):
                    found[number, block] = level, priority
        return found

    def clear(self, records: np.ndarray) -> list[Gone]:
        """Follows cleared records; what was known outside, children first."""
        return [
            self.groups[number].forget(number, self.groups[number].live[::-1])
            for number, _ in self._by_group(records)
        ]  # fmt: skip

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty, was restored, or goes on without its events having been followed.

        Raises:
          ValueError: if the cache is of another spec.
        """
        for nodes, table in zip(self.groups, tables_of(state, self.spec), strict=True):
            nodes.table[...] = table
            nodes.names.clear()

    def adopt(self, other: NodeMap) -> None:
        """Takes over the names that an earlier copy of this map has learnt, of the nodes that are still there."""
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            same = (mine.table[:, col.FILL] > 0) & (mine.table[:, col.STATUS] == col.DUE)
            same &= np.all(mine.table[:, : col.FILL + 1] == theirs.table[:, : col.FILL + 1], axis=1)
            mine.table[same, col.STATUS : col.SIZE] = theirs.table[same, col.STATUS : col.SIZE]
            sent = np.flatnonzero((mine.table[:, col.FILL] > 0) & (mine.table[:, col.STATUS] == col.SENT))
            names = names_of(mine.table[sent, col.DIGEST : col.DIGEST + 2])
            mine.names = dict(zip(names.tolist(), sent.tolist(), strict=True))

    @property
    def index(self) -> dict[tuple[int, int, tuple], tuple[int, int]]:
        """{(group, namespace, token path): (level, stated priority)}, as `events.index_of` has it; for tests."""
        return {
            (number, int(row[col.NAMESPACE]), self.path(number, int(block))): (
                int(row[col.LEVEL]),
                int(row[col.PRIORITY]),
            )
            for number, group in enumerate(self.groups)
            for block in group.live
            for row in (group.table[block],)
        }

    def path(self, number: int, block: int) -> tuple:
        """All tokens of the prefix that ends in a block, with their extra ids where the spec has them."""
        row, size = self.groups[number].table[block], self.spec.block_size
        parts, seen = [], set[int]()
        while True:
            text = row[col.TEXT :].reshape(-1, size)[:, : row[col.FILL]].tolist()
            parts.append(text[0] if len(text) == 1 else zip(*text, strict=True))
            parent = int(row[col.PARENT])
            if parent < 0 or parent in seen:  # events that cannot have happened may go in a circle
                return tuple(itertools.chain.from_iterable(reversed(parts)))
            seen.add(parent)
            row = self.groups[0].table[parent]

    def _by_group(self, records: np.ndarray) -> list[tuple[int, Any]]:
        """(group, index into the records) for each group that has any, the first group first."""
        numbers = records[:, 1]
        if not len(numbers):
            return []
        least, most = int(numbers.min()), int(numbers.max())
        if least < 0 or most >= len(self.groups):
            raise ValueError(f"events: got group {most}, wanted 0 to {len(self.groups) - 1}")
        if least == most:
            return [(least, slice(None))]
        return [(number, np.flatnonzero(numbers == number)) for number in np.unique(numbers).tolist()]

    def _blocks(self, number: int, records: np.ndarray, kind: str, repeats: bool = False) -> np.ndarray:
        """The blocks i32[n] of one group's records, which must be in range, and none of them twice."""
        blocks = records[:, 2]
        num_ids = self.spec.groups[number].num_ids
        if blocks.min() < 0 or blocks.max() >= num_ids:
            _refuse(records, (blocks < 0) | (blocks >= num_ids), f"wanted block 0 to {num_ids - 1}")
        if not repeats and len(set(blocks.tolist())) < len(blocks):
            raise ValueError(f"events: got {kind} of one node twice in group {number}, wanted it once")
        return blocks

    def _refuse_unknown(self, number: int, records: np.ndarray, blocks: np.ndarray) -> None:
        table = self.groups[number].table
        _refuse(records, (table[blocks, col.FILL] == 0) | (table[blocks, col.GENERATION] != records[:, 3]), _LACKS)

    def _prefixes(self, number: int, records: np.ndarray, blocks: np.ndarray) -> tuple[Any, Any]:
        """The namespaces and depths of stored records, some of which may be the parents of others after them."""
        first, source, generation = self.groups[0].table, records[:, 4], records[:, 5]
        known = (source >= 0) & (source < len(first))
        parents = np.where(known, source, 0)
        known &= (first[parents, col.FILL] > 0) & (first[parents, col.GENERATION] == generation)
        namespace = np.where(source < 0, generation, first[parents, col.NAMESPACE])
        depth = np.where(source < 0, 0, first[parents, col.DEPTH] + 1)
        late = np.flatnonzero((source >= 0) & ~known)
        if not len(late):
            return namespace, depth
        where = parents_among(number, blocks)
        namespaces, depths, of = namespace.tolist(), depth.tolist(), records[:, 3].tolist()
        for at, parent, wanted in zip(late.tolist(), source[late].tolist(), generation[late].tolist(), strict=True):
            before = where.get(parent, at)
            if before >= at or of[before] != wanted:
                _impossible("stored under node", 0, parent, wanted, _LACKS)
            namespaces[at], depths[at] = namespaces[before], depths[before] + 1
        return namespaces, depths


def _refuse(records: np.ndarray, wrong: np.ndarray, wanted: str) -> None:
    """Refuses the first record that is wrong."""
    if wrong.any():
        kind, number, block, generation = records[np.argmax(wrong), :4].tolist()
        _impossible(f"{EventKind(kind).name.lower()} of node", number, block, generation, wanted)


def _impossible(what: str, number: int, block: int, generation: int, wanted: str) -> NoReturn:
    raise ValueError(f"events: got {what} {(number, block, generation)}, {wanted}")
