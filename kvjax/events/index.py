# SPDX-License-Identifier: Apache-2.0
"""The index of what is cached, by the events alone: one fold for all wires, in arrays by (group, block).

    events ── fold ──> changes: rows of the table that were stored, removed or updated
                          │
                          └── an encoder per wire (`interop/encoder.py`) ──> bytes

A block has at most one findable node at a time, so a row of words for each block is enough:

    generation, parent (block, generation), fill, level, priority      as in the record that stored the node
    namespace, depth                                                    of the whole prefix
    flags, hash                                                         by a `RowHashing`, if the map has one
    hash of the prefix before, size, tokens, extra ids                  the content that the hash is of

Records are copied by one assignment, and a block's content is put together once for its hash and for all wires.
"""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvjax.events import columns as col
from kvjax.events.host_events import HostEvents, host_events, parts_of
from kvjax.events.mirror import snapshot_log
from kvjax.events.records import EventKind
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

_FEW_SPACES = 64
_LACKS = "wanted one that the map has: begin with `attach(state)`, and leave no events out"


class Space(NamedTuple):
    """A namespace: the hash of its empty prefix, the flags of its blocks, its salt and its adapter."""

    root: bytes
    flags: int
    salt: str | None = None
    lora_id: int | None = None
    lora: str | None = None


class RowHashing(Protocol):
    """A way to hash the rows of the table, such as `kvjax.interop.hashing.Hashing`."""

    def hash(self, rows: np.ndarray, among: list[int], size: int, hashes: set[int], spaces: dict[int, Space]) -> None:
        """Writes the flags and hashes of rows that are stored, and adds these to the group's."""

    def forget(self, rows: np.ndarray, hashes: set[int]) -> None:
        """Takes the hashes of rows that are removed from the group's."""


class Change(NamedTuple):
    """Blocks of one group that events stored, removed or updated, with their rows of the table."""

    kind: EventKind  # STORED, UPDATED, REMOVED, or CLEARED: the group was emptied
    group: int
    blocks: np.ndarray  # i[n]
    rows: np.ndarray  # i32[n, W]; stored, updated: as they are now; removed, cleared: as they were
    before: np.ndarray | None = None  # updated: i32[n, 2], level and priority before
    others: frozenset[int] = frozenset()  # cleared: the groups that still have blocks
    spaces: Mapping[int, Space] = {}  # stored, updated: by namespace, those of the rows that are hashed, and others

    @property
    def nbytes(self) -> int:
        """The number of bytes it holds."""
        return self.rows.nbytes + self.blocks.nbytes


class Nodes:
    """The findable blocks of one group: a table i32[B, W], and the 64-bit hashes of those that have one."""

    def __init__(self, table: np.ndarray, hashes: set[int]):
        self.table, self.hashes = table, hashes

    @property
    def live(self) -> np.ndarray:
        """The blocks that have nodes, parents before children."""
        blocks = np.flatnonzero(self.table[:, col.FILL])
        return blocks[np.argsort(self.table[blocks, col.DEPTH], kind="stable")]


class _Contents:
    """The tables of a map, with what hashes their rows. Maps may share one, and count its versions."""

    def __init__(self, spec: CacheSpec, hashing: RowHashing | None):
        width = col.TEXT + spec.block_size * len(parts_of(spec))
        self.groups = [Nodes(np.zeros((group.num_ids, width), np.int32), set()) for group in spec.groups]
        self.hashing, self.is_shared, self.version = hashing, False, 0
        # By namespace, those of blocks that are here, and of some that were. Whoever copies a row has this dict too, so
        # that `Namespaces` may forget a pair as soon as the cache has none of its blocks: a new dict takes its place.
        self.spaces: dict[int, Space] = {}
        self._most_spaces = _FEW_SPACES

    def drop_spaces(self) -> None:
        """Drops the spaces without blocks, once they may be more than half of all."""
        if len(self.spaces) > self._most_spaces:
            tables = [group.table for group in self.groups]
            live = {n for table in tables for n in np.unique(table[table[:, col.FILL] > 0, col.NAMESPACE]).tolist()}
            self.spaces = {namespace: space for namespace, space in self.spaces.items() if namespace in live}
            self._most_spaces = 2 * len(self.spaces) + _FEW_SPACES

    def copy(self) -> _Contents:
        """Contents that no longer change with these, and are not shared."""
        other = copy.copy(self)
        other.groups = [Nodes(group.table.copy(), set(group.hashes)) for group in self.groups]
        other.spaces = dict(self.spaces)
        other.is_shared, other.version = False, 0
        return other


class NodeMap:
    """An index of the cached blocks, by the events alone; memory is O(blocks).

    After a ValueError for events that cannot have happened its contents are undefined, until `attach` or events that
    begin with groups that are cleared, such as a snapshot of `kvjax.events.Listeners`.

    Args:
      spec: of the cache, which is empty; see `attach` for others.
      hashing: hashes blocks as they are stored; None: the map has no hashes.

    Example:
      >>> from kvjax.events import NodeMap
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> nodes = NodeMap(spec)
      >>> changes = nodes.fold(events)
      >>> nodes.path(0, 1), nodes.index == kvjax.events.index_of(state)  # the prefix that ends in block 1 of group 0
      ((0, 1, 2, 3, 4, 5, 6, 7), True)
    """

    def __init__(self, spec: CacheSpec, hashing: RowHashing | None = None):
        self.spec, self.hashing = spec, hashing
        self._contents, self._version = _Contents(spec, hashing), 0

    @property
    def groups(self) -> list[Nodes]:
        """The nodes of each group."""
        return self._contents.groups

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(group.table[:, col.FILL])) for group in self.groups)

    def copy(self) -> NodeMap:
        """A map that no longer changes with this one."""
        other = copy.copy(self)
        other._contents, other._version = self._contents.copy(), 0
        return other

    def part(self) -> None:
        """Shares its contents with no other map any more: some events will not come to both."""
        if self._contents.is_shared:
            self._contents, self._version = self._contents.copy(), 0

    def fold(self, events: Any) -> list[Change]:
        """Follows events, which must be possible: `Events`, an `EventLog`, or decoded ones; what they changed."""
        contents, events = self._contents, host_events(events, self.spec)
        if not len(events.records):  # which not all who share ask for
            return []
        if not contents.is_shared:
            return self._fold(events)
        version, changes = events.once(contents, self._fold_shared) if events.is_shared else (contents.version, [])
        if version != self._version:
            raise ValueError("events: got some after others that were left out, wanted `attach(state)` first")
        self._version += 1
        if not events.is_shared:  # others may not get these
            self._contents, self._version = contents.copy(), 0
            changes = self._fold(events)
        return changes

    def _fold_shared(self, events: HostEvents) -> tuple[int, list[Change]]:
        """Folds for all who share the contents: the version before, and the changes."""
        self._contents.version += 1
        return self._contents.version - 1, self._fold(events)

    def _fold(self, events: HostEvents) -> list[Change]:
        """Follows the runs of records of one kind, each group by group, the first one first."""
        found = []
        for kind, records, text in events.steps:
            for number, of in self._by_group(records[:, 1]):
                if kind == EventKind.STORED:
                    found.append(self._store(number, records[of], text[of]))
                elif kind == EventKind.REMOVED:
                    found.append(self._forget(EventKind.REMOVED, number, self._blocks(number, records[of])))
                elif kind == EventKind.UPDATED:
                    found.append(self._update(number, records[of]))
                else:
                    found.append(self._clear(number))
        return found

    def _store(self, number: int, records: np.ndarray, text: np.ndarray) -> Change:
        group, size, blocks = self.groups[number], self.spec.block_size, self._blocks(number, records)
        fill, level = records[:, 6], records[:, 7]
        wrong = (fill < 1) | (fill > size) | (level < 0) | (level > 1)
        _refuse(records, wrong, f"wanted 1 to {size} tokens at level 0 or 1")
        rows = np.zeros((len(blocks), group.table.shape[1]), np.int32)
        rows[:, : col.NAMESPACE], rows[:, col.SIZE], rows[:, col.TEXT :] = records[:, 3:], size, text
        parents = self._link(number, blocks, rows)
        if self._contents.hashing is not None:
            self._contents.hashing.hash(rows, parents, size, group.hashes, self._contents.spaces)
        group.table[blocks] = rows
        change = Change(EventKind.STORED, number, blocks, rows, spaces=self._contents.spaces)
        self._contents.drop_spaces()
        return change

    def _clear(self, number: int) -> Change:
        change = self._forget(EventKind.CLEARED, number, self.groups[number].live[::-1])  # children first
        self.groups[number].hashes.clear()  # of blocks too that came with events which were impossible
        others = (number for number, group in enumerate(self.groups) if group.table[:, col.FILL].any())
        return change._replace(others=frozenset(others))

    def _forget(self, kind: EventKind, number: int, blocks: np.ndarray) -> Change:
        group = self.groups[number]
        rows = group.table[blocks]
        group.table[blocks, col.FILL] = 0
        if self._contents.hashing is not None:
            self._contents.hashing.forget(rows, group.hashes)
        return Change(kind, number, blocks, rows)

    def _update(self, number: int, records: np.ndarray) -> Change:
        """A node may be updated several times, to and fro: the last one counts."""
        table, blocks = self.groups[number].table, self._blocks(number, records)
        stated = slice(col.LEVEL, col.NAMESPACE)  # level and priority
        _refuse(records, (records[:, 7] < 0) | (records[:, 7] > 1), "wanted level 0 or 1")
        distinct = np.array(list(dict.fromkeys(blocks.tolist())), np.int64)
        before = table[distinct, stated]
        table[blocks, stated] = records[:, 7:]
        rows = table[distinct]
        differ = np.any(rows[:, stated] != before, axis=1)
        return Change(
            EventKind.UPDATED, number, distinct[differ], rows[differ], before[differ], spaces=self._contents.spaces
        )

    def write(self, change: Change) -> None:
        """Applies a change of the map that this one is a copy of; a copy that does so folds no events."""
        table = self.groups[change.group].table
        if change.kind in (EventKind.REMOVED, EventKind.CLEARED):
            table[change.blocks, col.FILL] = 0
        else:
            table[change.blocks] = change.rows
            for namespace in set(change.rows[:, col.NAMESPACE].tolist()):
                if (space := change.spaces.get(namespace)) is not None:
                    self._contents.spaces[namespace] = space
            self._contents.drop_spaces()

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty, was restored, or goes on without its events."""
        events = snapshot_log(state)
        if state.spec != self.spec:
            raise ValueError(f"state: got a cache of {state.spec}, wanted one of {self.spec}")
        self._contents, self._version = _Contents(self.spec, self.hashing), 0
        self._fold(host_events(events, self.spec))

    def snapshot(self) -> list[Change]:
        """The changes that store all that is cached, in each group parents first and prefixes in one piece."""
        found = []
        for number, group in enumerate(self.groups):
            live = group.live
            blocks = live[parents_first(group.table[live])]
            spaces = self._contents.spaces
            found.append(Change(EventKind.STORED, number, blocks, group.table[blocks], spaces=spaces))
        return found

    @property
    def index(self) -> dict[tuple[int, int, tuple], tuple[int, int]]:
        """{(group, namespace, token path): (level, stated priority)}, as `events.index_of` has it; for tests."""
        found = {}
        for number, group in enumerate(self.groups):
            for block in group.live.tolist():
                namespace, level, priority = group.table[block, [col.NAMESPACE, col.LEVEL, col.PRIORITY]].tolist()
                found[number, namespace, self.path(number, block)] = level, priority
        return found

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

    def _by_group(self, numbers: np.ndarray) -> list[tuple[int, Any]]:
        """(group, index of its records) for each group that has any, by the numbers of all records' groups."""
        least, most = int(numbers.min()), int(numbers.max())
        if least < 0 or most >= len(self.groups):
            raise ValueError(f"events: got group {most}, wanted 0 to {len(self.groups) - 1}")
        if least == most:
            return [(least, slice(None))]
        return [(number, np.flatnonzero(numbers == number)) for number in np.unique(numbers).tolist()]

    def _blocks(self, number: int, records: np.ndarray) -> np.ndarray:
        """The blocks i32[n] of one group's records of one kind: new ones if stored, else those of nodes that exist."""
        table, kind, blocks = self.groups[number].table, EventKind(records[0, 0]), records[:, 2]
        _refuse(records, (blocks < 0) | (blocks >= len(table)), f"wanted block 0 to {len(table) - 1}")
        if kind != EventKind.UPDATED and len(set(blocks.tolist())) < len(blocks):
            raise ValueError(f"events: got {kind.name.lower()} of one node twice in group {number}, wanted it once")
        live = table[blocks, col.FILL] > 0
        if kind == EventKind.STORED:
            _refuse(records, live, "wanted one that is new")
        else:
            _refuse(records, ~live | (table[blocks, col.GENERATION] != records[:, 3]), _LACKS)
        return blocks

    def _link(self, number: int, blocks: np.ndarray, rows: np.ndarray) -> list[int]:
        """Writes what rows have of their parents: namespace, depth, flags and hash of the prefix before.

        The first group links prefixes for all groups. Rows may be parents of others after them.

        Returns:
          For each row the index of its parent's among them, whose flags and hash it does not have yet; or -1.
        """
        first, parent, generation = self.groups[0].table, rows[:, col.PARENT], rows[:, col.PARENT_GENERATION]
        has_parent = (parent >= 0) & (parent < len(first))
        above = first[np.where(has_parent, parent, 0)]
        has_parent &= (above[:, col.FILL] > 0) & (above[:, col.GENERATION] == generation)
        rows[:, col.NAMESPACE] = np.where(parent < 0, generation, above[:, col.NAMESPACE])
        rows[:, col.DEPTH] = np.where(parent < 0, 0, above[:, col.DEPTH] + 1)
        rows[:, col.FLAGS] = np.where(has_parent, above[:, col.FLAGS], 0)
        rows[:, col.ABOVE : col.SIZE] = above[:, col.HASH : col.ABOVE]
        among = [-1] * len(rows)
        late = np.flatnonzero((parent >= 0) & ~has_parent).tolist()
        if not late:
            return among
        is_first = self.groups[number].table is first
        where = dict(zip(blocks.tolist(), range(len(blocks)), strict=True)) if is_first else {}
        columns = (parent, generation, rows[:, col.GENERATION], rows[:, col.NAMESPACE], rows[:, col.DEPTH])
        parents, wanted, generations, namespaces, depths = (column.tolist() for column in columns)
        for at in late:
            before = where.get(parents[at], at)
            if before >= at or generations[before] != wanted[at]:
                raise ValueError(f"events: got stored under node {(0, parents[at], wanted[at])}, {_LACKS}")
            among[at], namespaces[at], depths[at] = before, namespaces[before], depths[before] + 1
        rows[:, col.NAMESPACE], rows[:, col.DEPTH] = namespaces, depths
        return among


def share(maps: Iterable[NodeMap]) -> None:
    """Lets maps of equal contents share them, until one gets events of its own or is attached: see `together`."""
    distinct_maps: list[NodeMap] = []
    for one in sorted(maps, key=lambda one: one.hashing is None):
        other = next((other for other in distinct_maps if _is_shareable(one, other)), None)
        if other is None:
            distinct_maps.append(one)
        else:
            other._contents.is_shared = True
            one._contents, one._version = other._contents, other._version


def _is_shareable(one: NodeMap, other: NodeMap) -> bool:
    """Whether a map may use another's contents; one that hashes nothing takes any hashes."""
    hashing = other._contents.hashing
    if one.spec != other.spec or one.hashing not in (None, hashing) or other._version != other._contents.version:
        return False
    width = slice(None) if one.hashing is not None else slice(0, col.FLAGS)
    pairs = zip(one.groups, other.groups, strict=True)
    return all(np.array_equal(a.table[:, width], b.table[:, width]) for a, b in pairs)


def parents_first(rows: np.ndarray) -> np.ndarray:
    """The order of rows of a group in which parents come before their children, and chains stay together."""
    hashes, parents = col.hashes_of(rows).tolist(), col.hashes_of(rows, col.ABOVE).tolist()
    own, children, roots = set(hashes), collections.defaultdict(list), []
    for at in np.argsort(rows[:, col.DEPTH], kind="stable").tolist():
        has_parent = rows[at, col.DEPTH] and parents[at] in own
        (children[parents[at]] if has_parent else roots).append(at)
    order, waiting = [], roots[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(hashes[order[-1]], [])[::-1]
    return np.array(order, np.int64)


def _refuse(records: np.ndarray, wrong: np.ndarray, wanted: str) -> None:
    """Refuses the first record that is wrong."""
    if wrong.any():
        kind, *node = records[np.argmax(wrong), :4].tolist()
        raise ValueError(f"events: got {EventKind(kind).name.lower()} of node {tuple(node)}, {wanted}")
