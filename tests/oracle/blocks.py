# SPDX-License-Identifier: Apache-2.0
"""The parts of the cache in plain Python (`cache.py`): blocks, rows, events."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

NO_BLOCK = -1
Path = tuple[tuple[int, int], ...]
Node = tuple[int, Path]


class Status(enum.IntEnum):
    """The reasons to refuse a row, with the library's numbers."""

    OK = 0
    NO_BLOCKS = 1
    ROW_FULL = 2
    BAD_REQUEST = 3
    HELD = 4


class Event(NamedTuple):
    """An event of a block: `kind` is stored, removed, updated, copied or cleared.

    `path` ends with the block's last token, or for a copied block with the last token copied.
    """

    kind: str
    namespace: int = 0
    path: Path = ()
    group: int = 0


class Result(NamedTuple):
    """The report of a verb: a status for each row, events, tokens looked up and found per row, blocks missing, moves.

    A move is (group, block, number). `complete` ends it.
    """

    status: list[Status]
    events: Sequence[Event] = ()
    queried: Sequence[int] = ()
    cached: Sequence[int] = ()
    shortfall: int = 0
    moves: Sequence[tuple[int, int, int]] = ()

    @property
    def ok(self) -> bool:
        """Whether every row succeeded."""
        return all(status == Status.OK for status in self.status)


class Adopted(NamedTuple):
    """A prefix whose blocks are reserved: its nodes, the blocks found, and each group's reserved block of a column."""

    nodes: Sequence[Node] = ()
    held: Sequence[int] = ()
    reserved: Sequence[dict[int, int]] = ()
    hits: Sequence[int] = ()


class Priority(NamedTuple):
    """The priority of a block, by default 35, and its time to live in ms after a release, None for ever."""

    priority: int = 35
    ttl: int | None = None


DEFAULT = Priority()


class Retention(NamedTuple):
    """The requested priorities: (start, end or None, priority) of ranges of a prompt, and that of generated blocks."""

    ranges: Sequence[tuple[int, int | None, Priority]] = ()
    generated: Priority = DEFAULT


RETENTION = Retention()


@dataclasses.dataclass
class Block:
    """A block. `node` is its entry in the index, or None."""

    refcount: int = 0
    copies: int = 0  # of these holders, copies of the present call
    node: Node | None = None
    parent: int | None = None  # the first group's block of the node before, None where a prompt begins
    children: int = 0  # findable blocks of the first group that follow this one
    hits: int = 0  # how often the contents were reused since they were stored
    stored: int = 0  # clock when the contents entered the index
    released: int = 0  # clock when the last holder let go
    freed: int = 0  # ms of that
    requested_priority: Priority = DEFAULT
    expiry: int | None = None  # ms when its time to live is over, if it has one and nobody holds it
    host: bool = False  # its tier, if it is not empty
    move: int = 0  # number of the move that brings it to its tier, until that is complete
    unevictable: bool = False  # on the device, when blocks last moved, with a descendant on the host or moving
    queued: int = 0  # turn when it began to wait for its eviction in its tier
    backed: bool = False  # on the device, with a copy on the host
    copying: int = 0  # number of the move that makes this copy, until that is complete
    left: bool = False  # it left the device by its copy in a loop, and its wait on the host has not begun
    passed: bool = False  # of a recurrent group: a row has gone past it, and no prompts part there


@dataclasses.dataclass
class Row:
    """A sequence: `length` tokens reserved, of which `tokens` are written, and a table per group. Gaps are NO_BLOCK.

    Nothing reads the columns `holes` of the first table. A hole keeps its block as long as others read it. A row with
    holes or with `approximate` K/V is private: it publishes nothing.
    """

    namespace: int = 0
    length: int = 0
    tokens: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    tables: list[list[int]] = dataclasses.field(default_factory=lambda: [[]])
    prompt: int = 0  # tokens of the prompt
    retention: Retention = RETENTION
    swapped: bool = False
    holes: frozenset[int] = frozenset()
    approximate: bool = False

    @property
    def is_private(self) -> bool:
        return bool(self.holes) or self.approximate

    def copy(self) -> Row:
        """An equal row with its own lists."""
        return dataclasses.replace(self, tokens=list(self.tokens), tables=[list(table) for table in self.tables])

    def requested_priority(self, first: int) -> Priority | None:
        """The requested priority of the block from token `first` on, or None."""
        if first >= self.prompt:
            return self.retention.generated
        for start, end, priority in self.retention.ranges:
            if start <= first and (end is None or first < end):
                return priority
        return None


@dataclasses.dataclass
class Group:
    """The blocks of an attention window (None: full attention). `index` has the block of each node.

    A `recurrent` group has a window of 2: the next token of a sequence needs the block of the token before.
    At most `num_blocks` blocks are on the device and `num_host_blocks` on the host. Each block has its tier.
    """

    number: int
    num_blocks: int
    num_host_blocks: int
    blocks: list[Block]
    window: int | None = None
    sink_tokens: int = 0
    recurrent: bool = False
    backups: bool = False
    index: dict[Node, int] = dataclasses.field(default_factory=dict)

    @property
    def num_device_ids(self) -> int:
        """The largest number of blocks that the device can have."""
        return len(self.blocks) - self.num_host_blocks

    @property
    def num_host_empty(self) -> int:
        """The number of blocks on the host which neither have contents nor are a copy."""
        used = sum(block.backed or (block.host and bool(block.node or block.refcount)) for block in self.blocks)
        return self.num_host_blocks - used

    def has_backup(self, block: int) -> bool:
        """Whether a block on the device has a copy on the host which has arrived."""
        return self.blocks[block].backed and not self.blocks[block].copying

    def counts(self) -> dict[str, int]:
        """The numbers of empty, cached and active blocks on the device."""
        device = [block for block in self.blocks if not block.host]
        idle = [block for block in device if not block.refcount]
        active, cached = len(device) - len(idle), sum(block.node is not None for block in idle)
        return {"empty": self.num_blocks - active - cached, "cached": cached, "active": active}

    def sees(self, column: int, written: int, size: int) -> bool:
        """Whether the next token after `written` tokens sees any part of a sequence's block at `column`."""
        return (
            self.window is None or column * size < self.sink_tokens or (column + 1) * size > written - self.window + 1
        )


def snapshots(block: Block) -> tuple[bool, int]:
    """The score of recurrent groups: first the blocks which a row has passed, by age in each class."""
    return not block.passed, block.queued


def lru(block: Block) -> int:
    """The default score: blocks leave a tier in the order of their release or of their arrival in it."""
    return block.queued
