# SPDX-License-Identifier: Apache-2.0
"""The index of cached blocks, built only from the events. All wires share this fold, in arrays by (group, block).

    events ── fold ──> changes: stored, removed or updated rows of the table
                          │
                          └── an encoder per wire (`interop/encoder.py`) ──> bytes

A block has at most a single findable node at a time, so each block needs only a row of words:

    generation, parent (block, generation), fill, level, priority      as in the record that stored the node
    namespace, depth                                                    of the whole prefix
    flags, hash                                                         by a `RowHashing`, if the map has one
    hash of the prefix before, size, tokens, extra ids                  the hashed content

A single assignment copies many records. A block's content is assembled once, for its hash and for all wires.
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
_LACKS = "wanted a node of the map: begin with `attach(state)`, and leave no events out"


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
        """Writes the flags and hashes of stored rows, and adds the hashes to the group's hashes."""

    def forget(self, rows: np.ndarray, hashes: set[int]) -> None:
        """Removes the hashes of removed rows from the group's hashes."""


class Change(NamedTuple):
    """Blocks of a group, stored, removed or updated by events, with their rows of the table."""

    kind: EventKind  # STORED, UPDATED, REMOVED, or CLEARED: the group was emptied
    group: int
    blocks: np.ndarray  # i[n]
    rows: np.ndarray  # i32[n, W]; stored, updated: the present rows; removed, cleared: the former rows
    before: np.ndarray | None = None  # updated: i32[n, 2], level and priority before
    others: frozenset[int] = frozenset()  # cleared: the groups that still have blocks
    spaces: Mapping[int, Space] = {}  # stored, updated: by namespace; includes the spaces of all hashed rows

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.rows.nbytes + self.blocks.nbytes


class Nodes:
    """The findable blocks of a group: a table i32[B, W], and the 64-bit hashes of the hashed blocks."""

    def __init__(self, table: np.ndarray, hashes: set[int]):
        self.table = table
        self.hashes = hashes

    @property
    def live(self) -> np.ndarray:
        """The blocks with nodes, parents before children."""
        blocks = np.flatnonzero(self.table[:, col.FILL])
        return blocks[np.argsort(self.table[blocks, col.DEPTH], kind="stable")]


class _Contents:
    """The tables of a map, and the hashing of their rows. Maps may share contents, which have a version number."""

    def __init__(self, spec: CacheSpec, hashing: RowHashing | None):
        width = col.TEXT + spec.block_size * len(parts_of(spec))
        self.groups = [Nodes(np.zeros((group.num_ids, width), np.int32), set()) for group in spec.groups]
        self.hashing = hashing
        self.is_shared = False
        self.version = 0
        # The spaces of present blocks and of some former blocks. `Namespaces` may forget a pair as soon as the cache
        # has none of its blocks. Then a new dict replaces this dict, to which copied rows keep a reference.
        self.spaces: dict[int, Space] = {}
        self._max_spaces = _FEW_SPACES

    def drop_spaces(self) -> None:
        """Drops the spaces without blocks, if they may be more than half of all spaces."""
        if len(self.spaces) > self._max_spaces:
            tables = [group.table for group in self.groups]
            live = {n for table in tables for n in np.unique(table[table[:, col.FILL] > 0, col.NAMESPACE]).tolist()}
            self.spaces = {namespace: space for namespace, space in self.spaces.items() if namespace in live}
            self._max_spaces = 2 * len(self.spaces) + _FEW_SPACES

    def copy(self) -> _Contents:
        """An unshared copy of these contents."""
        duplicate = copy.copy(self)
        duplicate.groups = [Nodes(group.table.copy(), set(group.hashes)) for group in self.groups]
        duplicate.spaces = dict(self.spaces)
        duplicate.is_shared = False
        duplicate.version = 0
        return duplicate


class NodeMap:
    """An index of the cached blocks, built only from events. Its memory is O(blocks).

    After a ValueError for impossible events the contents are undefined. `attach` restores them, and so do events that
    begin with cleared groups, such as a snapshot of `kvjax.events.Listeners`.

    Args:
      spec: the spec of the cache, which must be empty; otherwise call `attach`.
      hashing: hashes blocks when they are stored; None disables hashes.

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
        self.spec = spec
        self.hashing = hashing
        self._replace(_Contents(spec, hashing))

    def _replace(self, contents: _Contents) -> None:
        """Replaces the contents by unshared contents."""
        self._contents = contents
        self._version = 0

    @property
    def groups(self) -> list[Nodes]:
        """The nodes of each group."""
        return self._contents.groups

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(group.table[:, col.FILL])) for group in self.groups)

    def copy(self) -> NodeMap:
        """An independent copy of this map."""
        duplicate = copy.copy(self)
        duplicate._replace(self._contents.copy())
        return duplicate

    def part(self) -> None:
        """Stops sharing contents with other maps, because some events will not come to all of them."""
        if self._contents.is_shared:
            self._replace(self._contents.copy())

    def fold(self, events: Any) -> list[Change]:
        """Applies events and returns the changes.

        Args:
          events: `Events`, an `EventLog` or decoded events, which must be possible after all events so far.
        """
        contents = self._contents
        events = host_events(events, self.spec)
        if not len(events.records):  # maps that share contents may skip such events
            return []
        if not contents.is_shared:
            return self._fold(events)
        version, changes = events.once(contents, self._fold_shared) if events.is_shared else (contents.version, [])
        if version != self._version:
            raise ValueError("events: got events after others that were left out, wanted `attach(state)` first")
        self._version += 1
        if not events.is_shared:  # the other maps may not get these
            self._replace(contents.copy())
            changes = self._fold(events)
        return changes

    def _fold_shared(self, events: HostEvents) -> tuple[int, list[Change]]:
        """Applies events for all sharing maps. Returns the version before, and the changes."""
        self._contents.version += 1
        return self._contents.version - 1, self._fold(events)

    def _fold(self, events: HostEvents) -> list[Change]:
        """Applies runs of records of the same kind. Each run goes group by group, the first group first."""
        changes = []
        for kind, records, text in events.steps:
            for group_index, where in self._by_group(records[:, 1]):
                if kind == EventKind.STORED:
                    changes.append(self._store(group_index, records[where], text[where]))
                elif kind == EventKind.REMOVED:
                    blocks = self._blocks(group_index, records[where])
                    changes.append(self._forget(EventKind.REMOVED, group_index, blocks))
                elif kind == EventKind.UPDATED:
                    changes.append(self._update(group_index, records[where]))
                else:
                    changes.append(self._clear(group_index))
        return changes

    def _store(self, group_index: int, records: np.ndarray, text: np.ndarray) -> Change:
        group = self.groups[group_index]
        size = self.spec.block_size
        blocks = self._blocks(group_index, records)
        fill = records[:, 6]
        level = records[:, 7]
        wrong = (fill < 1) | (fill > size) | (level < 0) | (level > 1)
        _refuse(records, wrong, f"wanted 1 to {size} tokens at level 0 or 1")
        rows = np.zeros((len(blocks), group.table.shape[1]), np.int32)
        rows[:, : col.NAMESPACE] = records[:, 3:]
        rows[:, col.SIZE] = size
        rows[:, col.TEXT :] = text
        parents = self._link(group_index, blocks, rows)
        if self._contents.hashing is not None:
            self._contents.hashing.hash(rows, parents, size, group.hashes, self._contents.spaces)
        group.table[blocks] = rows
        change = Change(EventKind.STORED, group_index, blocks, rows, spaces=self._contents.spaces)
        self._contents.drop_spaces()
        return change

    def _clear(self, group_index: int) -> Change:
        change = self._forget(EventKind.CLEARED, group_index, self.groups[group_index].live[::-1])  # children first
        self.groups[group_index].hashes.clear()  # impossible events may have left hashes without blocks
        others = (index for index, group in enumerate(self.groups) if group.table[:, col.FILL].any())
        return change._replace(others=frozenset(others))

    def _forget(self, kind: EventKind, group_index: int, blocks: np.ndarray) -> Change:
        group = self.groups[group_index]
        rows = group.table[blocks]
        group.table[blocks, col.FILL] = 0
        if self._contents.hashing is not None:
            self._contents.hashing.forget(rows, group.hashes)
        return Change(kind, group_index, blocks, rows)

    def _update(self, group_index: int, records: np.ndarray) -> Change:
        """Updates nodes. If a node is updated several times, the last update counts."""
        table = self.groups[group_index].table
        blocks = self._blocks(group_index, records)
        level_and_priority = slice(col.LEVEL, col.NAMESPACE)
        _refuse(records, (records[:, 7] < 0) | (records[:, 7] > 1), "wanted level 0 or 1")
        distinct = np.array(list(dict.fromkeys(blocks.tolist())), np.int64)
        before = table[distinct, level_and_priority]
        table[blocks, level_and_priority] = records[:, 7:]
        rows = table[distinct]
        differ = np.any(rows[:, level_and_priority] != before, axis=1)
        return Change(
            EventKind.UPDATED,
            group_index,
            distinct[differ],
            rows[differ],
            before[differ],
            spaces=self._contents.spaces,
        )

    def write(self, change: Change) -> None:
        """Applies a change of another map. This map must be a copy of it, and must not fold events itself."""
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
        """Takes over the index of a cache that is not empty, was restored, or whose events were missed."""
        events = snapshot_log(state)
        if state.spec != self.spec:
            raise ValueError(f"state: got a cache of {state.spec}, wanted one of {self.spec}")
        self._replace(_Contents(self.spec, self.hashing))
        self._fold(host_events(events, self.spec))

    def snapshot(self) -> list[Change]:
        """The changes that store all cached blocks: in each group parents first, with unbroken prefixes."""
        spaces = self._contents.spaces
        changes = []
        for group_index, group in enumerate(self.groups):
            live = group.live
            blocks = live[parents_first(group.table[live])]
            changes.append(Change(EventKind.STORED, group_index, blocks, group.table[blocks], spaces=spaces))
        return changes

    @property
    def index(self) -> dict[tuple[int, int, tuple], tuple[int, int]]:
        """{(group, namespace, token path): (level, priority)}, equal to `events.index_of`, for tests."""
        index = {}
        for group_index, group in enumerate(self.groups):
            for block in group.live.tolist():
                namespace, level, priority = group.table[block, [col.NAMESPACE, col.LEVEL, col.PRIORITY]].tolist()
                index[group_index, namespace, self.path(group_index, block)] = level, priority
        return index

    def path(self, group_index: int, block: int) -> tuple:
        """All tokens of the prefix up to a block, with their extra ids if the spec has them."""
        row = self.groups[group_index].table[block]
        size = self.spec.block_size
        parts = []
        seen = set[int]()
        while True:
            text = row[col.TEXT :].reshape(-1, size)[:, : row[col.FILL]].tolist()
            parts.append(text[0] if len(text) == 1 else zip(*text, strict=True))
            parent = int(row[col.PARENT])
            if parent < 0 or parent in seen:  # impossible events may create a cycle
                return tuple(itertools.chain.from_iterable(reversed(parts)))
            seen.add(parent)
            row = self.groups[0].table[parent]

    def _by_group(self, group_indices: np.ndarray) -> list[tuple[int, Any]]:
        """(group, index of its records) for each group of the records."""
        first = int(group_indices.min())
        last = int(group_indices.max())
        if first < 0 or last >= len(self.groups):
            raise ValueError(f"events: got group {last}, wanted 0 to {len(self.groups) - 1}")
        if first == last:
            return [(first, slice(None))]
        return [(index, np.flatnonzero(group_indices == index)) for index in np.unique(group_indices).tolist()]

    def _blocks(self, group_index: int, records: np.ndarray) -> np.ndarray:
        """The blocks i32[n] of a group's records of the same kind: new blocks if stored, else blocks with nodes."""
        table = self.groups[group_index].table
        kind = EventKind(records[0, 0])
        blocks = records[:, 2]
        _refuse(records, (blocks < 0) | (blocks >= len(table)), f"wanted block 0 to {len(table) - 1}")
        if kind != EventKind.UPDATED and len(set(blocks.tolist())) < len(blocks):
            name = kind.name.lower()
            raise ValueError(f"events: got {name} of one node twice in group {group_index}, wanted it once")
        live = table[blocks, col.FILL] > 0
        if kind == EventKind.STORED:
            _refuse(records, live, "wanted a new node")
        else:
            _refuse(records, ~live | (table[blocks, col.GENERATION] != records[:, 3]), _LACKS)
        return blocks

    def _link(self, group_index: int, blocks: np.ndarray, rows: np.ndarray) -> list[int]:
        """Writes the parents' part of rows: namespace, depth, flags and hash of the prefix before.

        The first group links prefixes for all groups. Rows may be parents of later rows.

        Returns:
          For each row the index of its parent among the rows, whose flags and hash are not known yet, or -1.
        """
        first_table = self.groups[0].table
        parent = rows[:, col.PARENT]
        generation = rows[:, col.PARENT_GENERATION]
        has_parent = (parent >= 0) & (parent < len(first_table))
        above = first_table[np.where(has_parent, parent, 0)]
        has_parent &= (above[:, col.FILL] > 0) & (above[:, col.GENERATION] == generation)
        rows[:, col.NAMESPACE] = np.where(parent < 0, generation, above[:, col.NAMESPACE])
        rows[:, col.DEPTH] = np.where(parent < 0, 0, above[:, col.DEPTH] + 1)
        rows[:, col.FLAGS] = np.where(has_parent, above[:, col.FLAGS], 0)
        rows[:, col.ABOVE : col.SIZE] = above[:, col.HASH : col.ABOVE]
        among = [-1] * len(rows)
        late = np.flatnonzero((parent >= 0) & ~has_parent).tolist()
        if not late:
            return among
        is_first = self.groups[group_index].table is first_table
        where = dict(zip(blocks.tolist(), range(len(blocks)), strict=True)) if is_first else {}
        columns = (parent, generation, rows[:, col.GENERATION], rows[:, col.NAMESPACE], rows[:, col.DEPTH])
        parents, wanted, generations, namespaces, depths = (column.tolist() for column in columns)
        for index in late:
            before = where.get(parents[index], index)
            if before >= index or generations[before] != wanted[index]:
                raise ValueError(f"events: got stored under node {(0, parents[index], wanted[index])}, {_LACKS}")
            among[index] = before
            namespaces[index] = namespaces[before]
            depths[index] = depths[before] + 1
        rows[:, col.NAMESPACE] = namespaces
        rows[:, col.DEPTH] = depths
        return among


def share(maps: Iterable[NodeMap]) -> None:
    """Lets maps of equal contents share them, until a map gets its own events: see `combine_listeners`."""
    distinct_maps: list[NodeMap] = []
    for node_map in sorted(maps, key=lambda candidate: candidate.hashing is None):
        owner = next((candidate for candidate in distinct_maps if _is_shareable(node_map, candidate)), None)
        if owner is None:
            distinct_maps.append(node_map)
        else:
            owner._contents.is_shared = True
            node_map._contents = owner._contents
            node_map._version = owner._version


def _is_shareable(user: NodeMap, owner: NodeMap) -> bool:
    """Whether a map may use another's contents. A map without hashing takes any hashes."""
    hashing = owner._contents.hashing
    if user.spec != owner.spec or user.hashing not in (None, hashing) or owner._version != owner._contents.version:
        return False
        return False
    width = slice(None) if user.hashing is not None else slice(0, col.FLAGS)
    pairs = zip(user.groups, owner.groups, strict=True)
    return all(np.array_equal(a.table[:, width], b.table[:, width]) for a, b in pairs)


def parents_first(rows: np.ndarray) -> np.ndarray:
    """The order of a group's rows with parents before their children, and unbroken chains."""
    hashes = col.hashes_of(rows).tolist()
    parents = col.hashes_of(rows, col.ABOVE).tolist()
    present = set(hashes)
    children = collections.defaultdict(list)
    roots = []
    for index in np.argsort(rows[:, col.DEPTH], kind="stable").tolist():
        has_parent = rows[index, col.DEPTH] and parents[index] in present
        (children[parents[index]] if has_parent else roots).append(index)
    order = []
    waiting = roots[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(hashes[order[-1]], [])[::-1]
    return np.array(order, np.int64)


def _refuse(records: np.ndarray, wrong: np.ndarray, wanted: str) -> None:
    """Refuses the first wrong record."""
    if wrong.any():
        kind, *node = records[np.argmax(wrong), :4].tolist()
        raise ValueError(f"events: got {EventKind(kind).name.lower()} of node {tuple(node)}, {wanted}")
