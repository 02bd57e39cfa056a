# SPDX-License-Identifier: Apache-2.0
"""Checked lines of a log of events (`kvjax.interop.log`), and an index of the cached blocks that follows them.

A digest of the whole prefix identifies a block's content, so the memory for a block does not depend on the length of
its prefix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvjax.blocks.hashes import block_hash, root_hash
from kvjax.events.mirror import Node
from kvjax.events.records import EventKind
from kvjax.research.traces import records

_KINDS = frozenset(kind.name.lower() for kind in EventKind if kind)
_ABOUT_NODES = frozenset({"stored", "removed", "updated"})
_WORD = 1 << 31  # limit of tokens
_SECONDS = 1 << 53  # limit of times: float64 represents smaller integers exactly


class LogLine(NamedTuple):
    """A line of a log: decoded events, the prompt tokens looked up and found, and the time in seconds."""

    events: list[dict[str, Any]]
    queried: int
    cached: int
    ts: float


class LoggedBlock(NamedTuple):
    """A cached block as described by a log."""

    digest: bytes  # of the prefix that ends with the block
    parent: bytes | None  # digest of the block before; None at a root, and after a block that the log lacks
    level: int
    since: float  # time of storing


class LogFollower:
    """The index of a cache after the lines of its log, which may begin in the middle of a run.

    Attributes:
      blocks: {(group, block, generation): the cached block}.
      levels: number of blocks on the device, and on the host.
      unknown: number of events of blocks that the log had not stored before.
    """

    def __init__(self):
        self.blocks: dict[Node, LoggedBlock] = {}
        self.levels = [0, 0]
        self.unknown = 0

    def follow(self, event: dict[str, Any], now: float) -> list[tuple[str, LoggedBlock]]:
        """Follows an event. Returns (change, block) for blocks added to or taken from the index.

        "removed" and "cleared" end the life of a block. A "replaced" block lives on in another cache, so the log does
        not show when it ends.
        """
        kind = event["kind"]
        group = event["group"]
        if kind in ("created", "cleared"):
            nodes = [node for node in self.blocks if node[0] == group]
            return [("replaced" if kind == "created" else kind, self._pop(node)) for node in nodes]
        if kind == "copied":
            return []
        node = (group, event["block"], event["generation"])
        if kind == "stored":
            replaced = [("replaced", self._pop(node))] if node in self.blocks else []
            return [*replaced, (kind, self._put(node, self._stored(event, now)))]
        if node not in self.blocks:
            self.unknown += 1
            return []
        block = self._pop(node)
        if kind == "removed":
            return [(kind, block)]
        self._put(node, block._replace(level=event["level"]))
        return []

    def _stored(self, event: dict[str, Any], now: float) -> LoggedBlock:
        parent = event.get("parent")
        above = (
            None if parent is None else self.blocks.get((0, *parent))
        )  # the first group links prefixes for all groups
        if above is None:
            self.unknown += parent is not None
            prefix = root_hash(salt=str(event["namespace"] if parent is None else parent))
        else:
            prefix = above.digest
        digest = block_hash(prefix, event["tokens"], event.get("extra_ids"))
        return LoggedBlock(digest, above and above.digest, event["level"], now)

    def _put(self, node: Node, block: LoggedBlock) -> LoggedBlock:
        self.blocks[node] = block
        self.levels[block.level] += 1
        return block

    def _pop(self, node: Node) -> LoggedBlock:
        block = self.blocks.pop(node)
        self.levels[block.level] -= 1
        return block


def checked_line(where: str, value: Any) -> LogLine:
    """The line of a JSON value.

    Raises:
      ValueError: with the line and the field.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {value!r:.80}, wanted an object")
    queried, cached = (records.count(where, value, name) for name in ("queried", "cached"))
    ts = records.timestamp(where, value, "ts")
    events = records.field(where, value, "events")
    if abs(ts) >= _SECONDS:
        raise ValueError(f"{where}: ts: got {ts!r}, wanted a number of seconds below {_SECONDS}")
    if not isinstance(events, list):
        raise ValueError(f"{where}: events: got {events!r:.80}, wanted an array")
    for event in events:
        _check_event(where, event)
    return LogLine(events, queried, cached, ts)


def _check_event(where: str, event: Any) -> None:
    """Checks the fields of an event that are read later."""
    kind = event.get("kind") if isinstance(event, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{where}: events: got {event!r:.80}, wanted an event of to_list")
    for name in ("group", "block", "generation") if kind in _ABOUT_NODES else ("group",):
        records.integer(where, event, name)
    if kind in ("stored", "updated") and records.integer(where, event, "level") not in (0, 1):
        raise ValueError(f"{where}: level: got {event['level']}, wanted 0 or 1")
    if kind != "stored":
        return
    tokens = records.integers(where, event, "tokens")
    extra_ids = records.integers(where, event, "extra_ids") if "extra_ids" in event else tokens
    if not tokens or len(extra_ids) != len(tokens):
        wanted = "wanted at least one token, and an id for each"
        raise ValueError(f"{where}: tokens: got {len(tokens)} with {len(extra_ids)} extra ids, {wanted}")
    if not all(-_WORD <= word < _WORD for word in (*tokens, *extra_ids)):
        raise ValueError(f"{where}: tokens: got values beyond 32 bits, wanted i32")
    if event.get("parent") is None:
        records.integer(where, event, "namespace")
    elif len(parent := records.integers(where, event, "parent")) != 2:
        raise ValueError(f"{where}: parent: got {parent!r:.80}, wanted a block and its generation")
