# SPDX-License-Identifier: Apache-2.0
"""The cache in plain Python: one full-attention group on the device, written to be read and to be right.

Dicts and lists instead of arrays, one block at a time instead of masks: what the library computes, said the slow way.

A token is a pair (token id, extra id). A *path* is the tuple of all tokens from the start of a prompt to the end of
a block; a *node* is (namespace, path). The index maps each node to the one block that holds its last tokens, so two
prompts share a block exactly when everything up to its end is equal, and no hash is needed. Every block is
*active* (somebody holds it), *cached* (nobody does, but it is in the index) or *empty*. Only a block of
`block_size` tokens has children; a shorter one is the tail of a released sequence.

Every verb first decides and then acts: a status other than OK leaves everything as it was.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

NO_BLOCK = -1
Path = tuple[tuple[int, int], ...]
Node = tuple[int, Path]


class Status(enum.IntEnum):
    """Why a row was refused; the numbers are the library's."""

    OK = 0
    NO_BLOCKS = 1
    ROW_FULL = 2
    BAD_REQUEST = 3
    HELD = 4


class Event(NamedTuple):
    """What happened to one block: `kind` is stored, removed, updated, copied or cleared.

    `path` ends with the block's last token; of a copied block, with the last token copied.
    """

    kind: str
    namespace: int = 0
    path: Path = ()


class Result(NamedTuple):
    """What a verb reports: one status per row, events, tokens asked for and found per row, blocks missing."""

    status: list[Status]
    events: Sequence[Event] = ()
    queried: Sequence[int] = ()
    cached: Sequence[int] = ()
    shortfall: int = 0

    @property
    def ok(self) -> bool:
        """Whether every row succeeded."""
        return all(status == Status.OK for status in self.status)


class Worth(NamedTuple):
    """Priority, and ms to live after a release (None: for ever); what blocks are worth of which nobody says more."""

    priority: int = 35
    ttl: int | None = None


WORTH = Worth()


class Retention(NamedTuple):
    """What a request says of its blocks: (start, end or None, worth) of ranges of its prompt; generated ones."""

    ranges: Sequence[tuple[int, int | None, Worth]] = ()
    generated: Worth = WORTH


RETENTION = Retention()


@dataclasses.dataclass
class Block:
    """One block; `node` is its place in the index, None where it has none."""

    refcount: int = 0
    node: Node | None = None
    hits: int = 0  # how often the contents were reused since they were stored
    stored: int = 0  # clock when the contents entered the index
    released: int = 0  # clock when the last holder let go
    worth: Worth = WORTH
    expiry: int | None = None  # ms when its time to live is over, if it has one and nobody holds it


@dataclasses.dataclass
class Row:
    """One sequence: `length` tokens of room, of which `tokens` are written."""

    namespace: int = 0
    length: int = 0
    tokens: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    table: list[int] = dataclasses.field(default_factory=list)
    prompt: int = 0  # tokens of the prompt
    retention: Retention = RETENTION

    def copy(self) -> Row:
        """An equal row that shares nothing with this one."""
        return dataclasses.replace(self, tokens=list(self.tokens), table=list(self.table))

    def stated(self, first: int) -> Worth | None:
        """What the block that begins with token `first` is to be worth; None: nothing is said of it."""
        if first >= self.prompt:
            return self.retention.generated
        for start, end, worth in self.retention.ranges:
            if start <= first and (end is None or first < end):
                return worth
        return None


def lru(block: Block) -> int:
    """The default score: blocks leave in the order of their last release."""
    return block.released


class Oracle:
    """The cache.

    Attributes:
      blocks: what is known of each block.
      rows: the sequences; a free one has length 0.
      index: the block of each node.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        partial_reuse: bool = True,
        score: Callable[[Block], Any] = lru,
    ):
        """An empty cache; among leaves the block of the lowest `score` is evicted first, then the older one."""
        self.block_size = block_size
        self.max_blocks_per_seq = max_blocks_per_seq
        self.partial_reuse = partial_reuse
        self.score = score
        self.blocks = [Block() for _ in range(num_blocks)]
        self.rows = [Row() for _ in range(max_seqs)]
        self.index: dict[Node, int] = {}
        self.clock = 0
        self.now = 0  # ms; set by the caller

    # What a test compares.

    def snapshot(self) -> Any:
        """Everything there is to know, as a value."""
        blocks = [dataclasses.replace(block) for block in self.blocks]
        return blocks, [row.copy() for row in self.rows], dict(self.index), self.clock

    def counts(self) -> dict[str, int]:
        """How many blocks are empty, cached and active."""
        kinds = collections.Counter(
            "active" if block.refcount else "cached" if block.node else "empty" for block in self.blocks
        )
        return {kind: kinds[kind] for kind in ("empty", "cached", "active")}

    def tables(self) -> list[list[int]]:
        """The block table of each row."""
        return [list(row.table) for row in self.rows]

    def priority(self, block: Block) -> int:
        """What a block that nobody holds is worth now."""
        over = block.expiry is not None and self.now >= block.expiry
        return WORTH.priority if over else block.worth.priority

    # The verbs.

    def admit(self, seq, tokens, *, namespace=0, extra_ids=None, room=None, retention=RETENTION) -> Result:
        """Starts free row `seq` with what is cached of a prompt and blocks for the rest, or for `room` tokens of it."""
        if not 0 <= seq < len(self.rows) or not tokens or min(tokens) < 0 or namespace < 0 or (room or 1) < 1:
            return Result([Status.BAD_REQUEST])
        if self.rows[seq].length:
            return Result([Status.HELD])
        prompt = self._pair(tokens, extra_ids)
        whole, source, cached = self._match(namespace, prompt)
        for copied in (True, False) if source is not None else (False,):
            if not copied:
                source, cached = None, len(whole) * self.block_size
            length = len(prompt) if room is None else min(len(prompt), cached + room)
            if self._blocks_for(length) > self.max_blocks_per_seq:
                return Result([Status.ROW_FULL])
            needed = self._blocks_for(length) - len(whole)
            # The source of the copy is needed until the copy is made: give it up only if there is no other way.
            victims, missing = self._choose(needed, kept={*whole, source})
            if not missing:
                break
        else:
            return Result([Status.NO_BLOCKS], shortfall=missing)
        fresh, events = self._take(needed, victims)
        row = self.rows[seq] = Row(namespace, length, prompt[:cached], whole + fresh, len(prompt), retention)
        for i, block in enumerate(whole):
            self.blocks[block].refcount += 1
            self.blocks[block].hits += 1
            stated, node = row.stated(i * self.block_size), self.blocks[block].node
            if stated and stated.priority != self.blocks[block].worth.priority and node:
                events.append(Event("updated", *node))
            self.blocks[block].worth = stated or self.blocks[block].worth
        self._state_worth(row, len(whole))
        if source is not None:
            events.append(Event("copied", namespace, tuple(prompt[:cached])))
        return Result([Status.OK], events, [len(prompt)], [cached])

    def extend(self, active, num_tokens=1) -> Result:
        """Room for `num_tokens` (an int, or one per row) more tokens in every active row, or in none.

        A row whose last block is held by others too, or findable, copies it before it writes there; of several rows
        that share a block, the last one in row order need not copy once the others have.
        """
        counts = [num_tokens] * len(self.rows) if isinstance(num_tokens, int) else list(num_tokens)
        status = [Status.OK] * len(self.rows)
        holders = [block.refcount for block in self.blocks]
        needed, copies = 0, []
        wanted = [seq for seq, on in enumerate(active) if on]
        for seq in wanted:
            row, count = self.rows[seq], counts[seq]
            if not row.length or count < 0:
                status[seq] = Status.BAD_REQUEST
            elif self._blocks_for(row.length + count) > self.max_blocks_per_seq:
                status[seq] = Status.ROW_FULL
            elif count:
                needed += self._blocks_for(row.length + count) - len(row.table)
                last = row.table[-1]
                if row.length % self.block_size and (holders[last] > 1 or self.blocks[last].node):
                    holders[last] -= 1
                    copies.append(seq)
        if any(status):
            return Result(status)
        victims, missing = self._choose(needed + len(copies))
        if missing:
            return Result([Status.NO_BLOCKS if on else Status.OK for on in active], shortfall=missing)
        fresh, events = self._take(needed + len(copies), victims)
        for seq in wanted:
            row, first = self.rows[seq], len(self.rows[seq].table) - (seq in copies)
            if seq in copies:
                source, row.table[-1] = row.table[-1], fresh.pop()
                self._drop(source)
                if len(row.tokens) > row.length // self.block_size * self.block_size:
                    events.append(Event("copied", row.namespace, tuple(row.tokens)))
            row.length += counts[seq]
            while len(row.table) < self._blocks_for(row.length):
                row.table.append(fresh.pop())
            self._state_worth(row, first)
        return Result(status, events)

    def commit(self, tokens, num_tokens, *, extra_ids=None) -> Result:
        """The K/V of each row's next `num_tokens[seq]` tokens are written: blocks that fill become findable.

        A block whose content is already cached is swapped for the cached one.
        """
        status, events = [], []
        for seq, (row, count) in enumerate(zip(self.rows, num_tokens, strict=True)):
            new = list(tokens[seq][: max(count, 0)])
            most = min(row.length - len(row.tokens), len(tokens[seq]))
            if not 0 <= count <= most or min(new, default=0) < 0:
                status.append(Status.BAD_REQUEST)
                continue
            status.append(Status.OK)
            full = len(row.tokens) // self.block_size
            row.tokens += self._pair(new, None if extra_ids is None else extra_ids[seq][:count])
            for i in range(full, len(row.tokens) // self.block_size):
                node = (row.namespace, tuple(row.tokens[: (i + 1) * self.block_size]))
                twin = self.index.get(node)
                if twin is None:
                    events.append(self._publish(row.table[i], node))
                else:
                    self.blocks[twin].refcount += 1
                    self.blocks[twin].hits += 1
                    self._drop(row.table[i])
                    row.table[i] = twin
        return Result(status, events)

    def fork(self, src, dst) -> Result:
        """Free row `dst` shares all blocks of row `src`, whose tokens must all be written."""
        row = self._row(src)
        if row is None or row.length != len(row.tokens) or src == dst or not 0 <= dst < len(self.rows):
            return Result([Status.BAD_REQUEST])
        if self.rows[dst].length:
            return Result([Status.HELD])
        for block in row.table:
            self.blocks[block].refcount += 1
        self.rows[dst] = row.copy()
        return Result([Status.OK])

    def truncate(self, seq, length) -> Result:
        """Keeps the first `length` tokens of a row.

        A cut inside a findable block that nobody else holds and that has no findable children takes it out of the
        index, so that it can be written in place; any other findable block is copied by the next write.
        """
        row = self._row(seq)
        if row is None or not 1 <= length <= row.length:
            return Result([Status.BAD_REQUEST])
        while len(row.table) > self._blocks_for(length):
            self._drop(row.table.pop())
        row.length = length
        del row.tokens[length:]
        events, last = [], self.blocks[row.table[-1]]
        if length % self.block_size and last.node and last.refcount == 1 and not self._children(last.node):
            events.append(self._remove(row.table[-1]))
        return Result([Status.OK], events)

    def release(self, seqs) -> Result:
        """Ends rows (an int or several), one after the other; blocks in the index stay cached, tails age first.

        The last holder of a block that is not full makes it findable, unless a cached sibling already holds its tokens.
        """
        status, events = [], []
        for seq in [seqs] if isinstance(seqs, int) else seqs:
            row = self._row(seq)
            status.append(Status.BAD_REQUEST if row is None else Status.OK)
            if row is None:
                continue
            written, path = len(row.tokens), tuple(row.tokens)
            for i in reversed(range(len(row.table))):
                block = self.blocks[row.table[i]]
                is_tail = i * self.block_size < written < (i + 1) * self.block_size
                if self.partial_reuse and is_tail and block.refcount == 1 and block.node is None:
                    siblings = self._children((row.namespace, path[: i * self.block_size]))
                    if not any(sibling[:written] == path for sibling in siblings):
                        events.append(self._publish(row.table[i], (row.namespace, path)))
                self._drop(row.table[i])
            self.rows[seq] = Row()
        return Result(status, events)

    def beam_step(self, seqs, parents) -> Result:
        """Row seqs[i] becomes what row seqs[parents[i]] was; rows that nobody goes on from are dropped."""
        rows = [self._row(seq) for seq in seqs]
        sound = all(row is not None and row.length == len(row.tokens) for row in rows)
        if not sound or len(set(seqs)) < len(seqs) or not all(0 <= parent < len(seqs) for parent in parents):
            return Result([Status.BAD_REQUEST] * len(seqs))
        for parent in parents:
            for block in rows[parent].table:
                self.blocks[block].refcount += 1
        for place in reversed(range(self.max_blocks_per_seq)):
            for row in rows:
                if place < len(row.table):
                    self._drop(row.table[place])
        for seq, row in zip(seqs, [rows[parent].copy() for parent in parents], strict=True):
            self.rows[seq] = row
        return Result([Status.OK] * len(seqs))

    def lookup(self, tokens, *, namespace=0, extra_ids=None) -> int:
        """How many tokens of a prompt `admit` would find; changes nothing."""
        return self._match(namespace, self._pair(tokens, extra_ids))[2]

    def pin(self, blocks) -> Result:
        """Holds blocks that are in the index; NO_BLOCK entries are skipped."""
        wanted = [block for block in blocks if block != NO_BLOCK]
        if len(set(wanted)) < len(wanted):
            return Result([Status.BAD_REQUEST])
        if not all(0 <= b < len(self.blocks) and self.blocks[b].node for b in wanted):
            return Result([Status.BAD_REQUEST])
        if not self._prefixes_pinned(collections.Counter(wanted)):
            return Result([Status.BAD_REQUEST])
        for block in wanted:
            self.blocks[block].refcount += 1
        return Result([Status.OK])

    def unpin(self, blocks) -> Result:
        """Drops one hold on each block, the last of the list first, like the tail of a row."""
        wanted = [block for block in blocks if block != NO_BLOCK]
        if len(set(wanted)) < len(wanted) or not all(0 <= b < len(self.blocks) for b in wanted):
            return Result([Status.BAD_REQUEST])
        pins = self._pins()
        if not all(pins[b] for b in wanted):
            return Result([Status.BAD_REQUEST])
        if not self._prefixes_pinned(collections.Counter(dict.fromkeys(wanted, -1))):
            return Result([Status.BAD_REQUEST])
        for block in reversed(wanted):
            self._drop(block)
        return Result([Status.OK])

    def _pins(self) -> collections.Counter[int]:
        """Holders of each block that are not rows."""
        held = collections.Counter({b: block.refcount for b, block in enumerate(self.blocks)})
        return held - collections.Counter(block for row in self.rows for block in row.table)

    def _prefixes_pinned(self, change: collections.Counter[int]) -> bool:
        """Whether after this change of pins every pinned block has a pinned parent."""
        pins = self._pins()
        pinned = {b for b in range(len(self.blocks)) if pins[b] + change[b] > 0}
        nodes = [self._parent(node) for node, block in self.index.items() if block in pinned]
        return all(self.index.get(node, None) in pinned for node in nodes if node[1])

    def evict(self, blocks) -> Result:
        """Empties cached blocks and all their findable descendants, children first; none if any of them is held."""
        wanted = {block for block in blocks if block != NO_BLOCK}
        if not all(0 <= block < len(self.blocks) for block in wanted):
            return Result([Status.BAD_REQUEST])
        doomed: dict[Node, int] = {}
        for node, block in self.index.items():  # parents stand before their children
            if block in wanted or self._parent(node) in doomed:
                doomed[node] = block
        if any(self.blocks[block].refcount for block in wanted | set(doomed.values())):
            return Result([Status.HELD])
        return Result([Status.OK], [self._remove(block) for block in reversed(doomed.values())])

    def reset(self) -> Result:
        """Forgets everything cached, once nothing is held."""
        if any(block.refcount for block in self.blocks):
            return Result([Status.HELD])
        self.index.clear()
        for block in self.blocks:
            block.node = None
        return Result([Status.OK], [Event("cleared")])

    # The index.

    def _match(self, namespace: int, prompt: list) -> tuple[list[int], int | None, int]:
        """Cached blocks of a prompt, a block to copy the next tokens from, and how many tokens that makes in all."""
        findable, whole = tuple(prompt[:-1]), []  # the last token must be computed for its logits
        end = self.block_size
        while end <= len(findable) and (namespace, findable[:end]) in self.index:
            whole.append(self.index[namespace, findable[:end]])
            end += self.block_size
        source, cached = None, len(whole) * self.block_size
        if self.partial_reuse:
            shared = cached
            for child in self._children((namespace, findable[:cached])):
                pairs = zip(findable, child, strict=False)
                common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                if common > shared or common == shared > cached:  # of several equally good the one stored last
                    source, shared = self.index[namespace, child], common
            cached = shared
        return whole, source, cached

    def _children(self, node: Node) -> list[Path]:
        """Paths of the findable blocks that follow a node."""
        return [path for (space, path) in self.index if self._parent((space, path)) == node]

    def _parent(self, node: Node) -> Node:
        """The prefix before a node's own block: all whole blocks before its last token."""
        namespace, path = node
        return namespace, path[: (len(path) - 1) // self.block_size * self.block_size]

    def _publish(self, block: int, node: Node) -> Event:
        self.index[node] = block
        self.blocks[block] = dataclasses.replace(self.blocks[block], node=node, hits=0, stored=self.clock)
        self.clock += 1
        return Event("stored", *node)

    def _remove(self, block: int) -> Event:
        node = self.blocks[block].node
        assert node is not None and not self._children(node), f"block {block} is not a leaf of the index"
        self.blocks[block].node = None
        del self.index[node]
        return Event("removed", *node)

    # Blocks.

    def _choose(self, count: int, kept: Sequence[int] | set = ()) -> tuple[list[int], int]:
        """Victims, in order, that make `count` blocks free, and how many blocks are still missing without them."""
        missing = max(0, count - self.counts()["empty"])
        victims: list[int] = []
        candidates = {b for b in self.index.values() if not self.blocks[b].refcount and b not in kept}
        parents = collections.Counter(self._parent(node) for node in self.index)
        while len(victims) < missing:
            leaves = [b for b in candidates if not parents[self.blocks[b].node]]
            if not leaves:
                break
            victim = min(leaves, key=lambda b: (self.score(self.blocks[b]), self.blocks[b].released))
            victims.append(victim)
            candidates.remove(victim)
            parents[self._parent(self.blocks[victim].node)] -= 1
        return victims, missing - len(victims)

    def _take(self, count: int, victims: list[int]) -> tuple[list[int], list[Event]]:
        """Evicts the victims and takes `count` blocks, empty ones first; their refcount becomes 1."""
        events = [self._remove(block) for block in victims]
        empty = [b for b, block in enumerate(self.blocks) if not block.refcount and not block.node and b not in victims]
        fresh = (empty + victims)[:count]
        for block in fresh:
            self.blocks[block].refcount = 1
        return fresh, events

    def _drop(self, block: int) -> None:
        """One holder lets go."""
        self.blocks[block].refcount -= 1
        if not self.blocks[block].refcount and self.blocks[block].node:
            self.blocks[block].released = self.clock
            self.clock += 1
            ttl = self.blocks[block].worth.ttl
            self.blocks[block].expiry = None if ttl is None else self.now + ttl

    def _state_worth(self, row: Row, first: int) -> None:
        """Gives a row's new blocks, from the first-th on, what it says of them."""
        for i in range(first, len(row.table)):
            self.blocks[row.table[i]].worth = row.stated(i * self.block_size) or WORTH

    # Small things.

    def _row(self, seq: int) -> Row | None:
        """A row in use, or None."""
        return self.rows[seq] if 0 <= seq < len(self.rows) and self.rows[seq].length else None

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _pair(self, tokens: Sequence[int], extra_ids: Sequence[int] | None) -> list[tuple[int, int]]:
        return list(zip(tokens, [0] * len(tokens) if extra_ids is None else extra_ids, strict=True))
