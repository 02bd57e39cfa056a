# SPDX-License-Identifier: Apache-2.0
"""Reads TensorRT-LLM's event JSON from any engine: decodes lines, with limits on everything, and mirrors the cache.

Events are independent, so an event that cannot be applied does not affect others.

Source: TensorRT-LLM's `_utils.py`, `KVCacheEventSerializer`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import starmap
from typing import Annotated, Any, NamedTuple

from kvjax.interop._wires import msgspec
from kvjax.interop.readers.tree import Hash, Node, Root, paths

Struct = msgspec.Struct
Meta = msgspec.Meta
field = msgspec.field
# Limits, in characters, tokens and groups.
_LONGEST_LINE = 64 << 20
_LONGEST_TEXT = 4096
_MAX_BLOCK = 1 << 16
_MAX_GROUPS = 1 << 10
_BLOCK_BYTES = 300  # approximate size of a mirrored block without tokens and names
_TOKEN_BYTES = 120  # approximate size of a mirrored token

_Number = Annotated[int, Meta(ge=0)]
_Text = Annotated[str, Meta(max_length=_LONGEST_TEXT)]
_Hash = int | _Text  # 64 bits, or the hexadecimal digits of newer hashes


class Diff(Struct, frozen=True):
    """A number that changed."""

    new: _Number = field(name="new_value")
    old: _Number = field(name="old_value")


class Created(Struct, frozen=True, tag="created"):
    """The beginning of a group without blocks, with its number of blocks on each level."""

    num_blocks: tuple[_Number, ...] = field(name="num_blocks_per_cache_level")


class Tokens(tuple[tuple[int, int], ...]):
    """(token id, extra id) of each token of a block."""


class Block(Struct, frozen=True):
    """A cached block. If it has no tokens, an earlier event has stored it."""

    block_hash: _Hash
    tokens: Tokens
    level: _Number = field(name="cache_level")
    priority: _Number


class Stored(Struct, frozen=True, tag="stored"):
    """Newly cached blocks of a chain. `parent` is the hash of the prefix before them, None at a root."""

    parent: _Hash | None = field(name="parent_hash")
    blocks: tuple[Block, ...]
    salt: _Text | None = field(name="cache_salt", default=None)
    lora: _Text | None = field(name="lora_name", default=None)


class Removed(Struct, frozen=True, tag="removed"):
    """Blocks no longer cached."""

    block_hashes: tuple[_Hash, ...]


class Updated(Struct, frozen=True, tag="updated"):
    """A new level or priority of a block."""

    block_hash: _Hash
    level: Diff | None = field(name="cache_level", default=None)
    priority: Diff | None = None


class Event(Struct, frozen=True):
    """A line. Without a `group`, the window alone identifies a group."""

    event_id: _Number
    data: Created | Stored | Removed | Updated
    window: Annotated[int, Meta(ge=-1)] = field(name="window_size")  # -1: recurrent states
    group: Annotated[int, Meta(ge=0, lt=_MAX_GROUPS)] | None = field(name="layer_group_id", default=None)
    rank: _Number | None = field(name="attention_dp_rank", default=None)


class _Numbered(Struct):
    """The id and the rank of an unreadable event."""

    event_id: _Number
    rank: _Number | None = field(name="attention_dp_rank", default=None)


class _Token(Struct, gc=False):
    token_id: _Number
    token_extra_id: _Number = 0


_UniqueTokens = Annotated[list[_Token], Meta(max_length=_MAX_BLOCK)]


def _tokens(kind: type, value: Any) -> Tokens:
    """Decodes `Tokens`, as a hook."""
    try:
        return Tokens((token.token_id, token.token_extra_id) for token in msgspec.convert(value, _UniqueTokens))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error  # msgspec adds the path of the tokens


_DECODERS: dict[type, Any] = {kind: msgspec.json.Decoder(kind, dec_hook=_tokens).decode for kind in (Event, _Numbered)}


def parse(lines: str | bytes | Iterable[str | bytes | dict[str, Any]]) -> list[Event]:
    """Reads events.

    Args:
      lines: a text of lines, such as a file's contents, or an iterable of lines or dicts.

    Raises:
      ValueError: for a line without an event, with its number and the path of the field.

    Example:
      >>> from kvjax.interop.trtllm import parse
      >>> line = '{"event_id": 0, "data": {"type": "removed", "block_hashes": [17, 18]}, "window_size": 32}'
      >>> (event,) = parse(line)
      >>> event.event_id, event.data
      (0, Removed(block_hashes=(17, 18)))
    """
    if isinstance(lines, str | bytes):
        lines = [line for line in lines.splitlines() if line.strip()]
    events = []
    for line_number, line in enumerate(lines, 1):
        try:
            events.append(_parse_line(line))
        except ValueError as error:
            raise ValueError(f"lines: got no event in line {line_number}: {error}") from error
    return events


def _parse_line(line: str | bytes | dict[str, Any]) -> Event:
    """The event of a line. A line without an event is a ValueError."""
    event = _read(line, Event)
    match event.data:
        case Stored(parent, blocks):
            _check_hashes("parent_hash", [] if parent is None else [parent])
            hashes = [block.block_hash for block in blocks]
            _check_hashes("block_hash", hashes)
            if len(set(hashes)) < len(hashes):
                raise ValueError("block_hash: got the same hash twice, wanted each once")
        case Removed(hashes):
            _check_hashes("block_hashes", hashes)
        case Updated(block_hash):
            _check_hashes("block_hash", [block_hash])
    return event


def _read[T](line: str | bytes | dict[str, Any], kind: type[T]) -> T:
    """A line as an Event, or only its id and rank."""
    try:
        if not isinstance(line, str | bytes):
            return msgspec.convert(line, kind, dec_hook=_tokens)
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"got {len(line)} characters, wanted at most {_LONGEST_LINE}")
        return _DECODERS[kind](line)
    except RecursionError as error:
        raise ValueError("got too deeply nested lists, wanted an event") from error


def _check_hashes(name: str, hashes: Iterable[Hash]) -> None:
    """Checks the range of hashes, which their type does not: integers have 64 bits."""
    for block_hash in hashes:
        if isinstance(block_hash, int) and not -(1 << 63) <= block_hash < 1 << 64:
            raise ValueError(f"{name}: got {block_hash!r:.80}, wanted an int of 64 bits or a short text")


class Prefix(NamedTuple):
    """A cached prefix, with group, adapter and salt as on the line, or None."""

    window: int
    group: int | None
    lora: str | None
    salt: str | None
    tokens: tuple[tuple[int, int], ...]  # (token id, extra id) of all tokens, or of the tokens after `after`
    after: Hash | None = None  # the hash of the prefix before, if no line has stored it


def _bytes_of(block_hash: Hash, node: Node) -> int:
    """The approximate memory of a mirrored block."""
    names = (block_hash, node.lora, node.salt)
    return _BLOCK_BYTES + _TOKEN_BYTES * len(node.tokens) + sum(map(sys.getsizeof, names))


class Mirror:
    """The cached blocks after the lines so far.

    Args:
      max_blocks: the maximum number of blocks.
      rank: the rank to follow in a stream with several ranks; None means all.
      max_bytes: the approximate maximum memory of the blocks.

    Attributes:
      last: the event_id of the last event followed.
      counts: `events` (followed), `refused` (lines without an event), `skipped` (unreadable events, and events beyond a
        limit), `unknown` (blocks without tokens or with a new level, but never stored), `gaps`, `duplicates`, and
        `others` (events of other ranks).
      num_bytes: the approximate memory of the blocks.

    Example:
      >>> from kvjax.interop.trtllm import Mirror, Writer
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> mirror = Mirror()
      >>> mirror.follow(Writer(spec).lines(events))
      >>> [len(prefix.tokens) for prefix in mirror.index], mirror.complete  # tokens of each cached prefix
      ([4, 8], True)
    """

    def __init__(self, max_blocks: int = 1 << 22, rank: int | None = None, max_bytes: int = 1 << 30):
        self.max_blocks = max_blocks
        self.rank = rank
        self.max_bytes = max_bytes
        self.last: int | None = None
        self.counts = dict.fromkeys(("events", "refused", "skipped", "unknown", "gaps", "duplicates", "others"), 0)
        self.num_bytes = 0
        self._groups: dict[tuple[int, int | None], dict[Hash, Node]] = {}
        self._complete = set[tuple[int, int | None]]()  # groups without a missing event since they were created

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    @property
    def complete(self) -> bool:
        """Whether each group has been followed since it was created, and no event was missing or skipped."""
        return bool(self._groups) and self._complete == self._groups.keys()

    def follow(self, lines: Iterable[str | bytes | dict[str, Any]]) -> None:
        """Follows lines or dicts. Skips an unreadable event, and refuses a line without an event."""
        for line in lines:
            try:
                self.apply(_parse_line(line))
            except ValueError:
                self._skip_line(line)

    def apply(self, event: Event) -> None:
        """Follows an event. Skips an event with too many blocks or groups."""
        if not self._is_next(event.event_id, event.rank):
            return
        key = event.window, event.group
        data = event.data
        if key not in self._groups and len(self._groups) >= _MAX_GROUPS:
            self._skip()
            return
        nodes = self._groups.setdefault(key, {})
        if isinstance(data, Stored) and not self._store(nodes, data):
            self._skip()
            return
        self.counts["events"] += 1
        if isinstance(data, Created):
            self._forget(nodes, list(nodes))
            self._complete.add(key)
        elif isinstance(data, Removed):
            self._forget(nodes, data.block_hashes)
        elif isinstance(data, Updated):
            self._update(nodes, data)

    def _is_next(self, event_id: int, rank: int | None) -> bool:
        """Whether to follow an event, by its id and rank. Counts the gap before it."""
        if self.rank is not None and rank != self.rank:
            self.counts["others"] += 1
            return False
        if event_id == self.last:
            self.counts["duplicates"] += 1
            return False
        if self.last is not None and event_id < self.last:  # a new process
            self._groups.clear()
            self._complete.clear()
            self.num_bytes = 0
        elif event_id != (0 if self.last is None else self.last + 1):
            self.counts["gaps"] += 1
            self._complete.clear()
        self.last = event_id
        return True

    def _skip(self) -> None:
        self.counts["skipped"] += 1
        self._complete.clear()

    def _skip_line(self, line: str | bytes | dict[str, Any]) -> None:
        """Skips the event of an unreadable line, or refuses the line."""
        try:
            event = _read(line, _Numbered)
        except ValueError:
            self.counts["refused"] += 1
            self._complete.clear()
            return
        if self.rank is not None and event.rank != self.rank:
            self.counts["others"] += 1
            return
        if event.event_id == (0 if self.last is None else self.last + 1):
            self.last = event.event_id  # any other id is trusted only in a readable event
        self._skip()

    def _store(self, nodes: dict[Hash, Node], event: Stored) -> bool:
        """Adds blocks to a group, or updates blocks without tokens. Returns False if the blocks exceed a limit."""
        parent = Root(event.lora, event.salt) if event.parent is None else event.parent
        placed: dict[Hash, Node] = {}
        for block in event.blocks:
            if block.tokens:
                where = (block.level, block.priority)
                placed[block.block_hash] = Node(parent, block.tokens, (), event.lora, event.salt, where)
            parent = block.block_hash
        old = [(block_hash, nodes[block_hash]) for block_hash in placed if block_hash in nodes]
        num_bytes = self.num_bytes + sum(starmap(_bytes_of, placed.items())) - sum(starmap(_bytes_of, old))
        if len(self) + len(placed) - len(old) > self.max_blocks or num_bytes > self.max_bytes:
            return False
        nodes.update(placed)
        self.num_bytes = num_bytes
        for block in event.blocks:
            node = nodes.get(block.block_hash)
            if node is None:
                self.counts["unknown"] += 1
            else:
                node.where = (block.level, block.priority)
        return True

    def _update(self, nodes: dict[Hash, Node], event: Updated) -> None:
        node = nodes.get(event.block_hash)
        if node is None:
            self.counts["unknown"] += 1
            return
        pairs = zip(node.where, (event.level, event.priority), strict=True)
        node.where = tuple(old if diff is None else diff.new for old, diff in pairs)

    def _forget(self, nodes: dict[Hash, Node], hashes: Iterable[Hash]) -> None:
        """Removes the blocks, except unknown blocks."""
        for block_hash in hashes:
            node = nodes.pop(block_hash, None)
            self.num_bytes -= 0 if node is None else _bytes_of(block_hash, node)

    @property
    def index(self) -> dict[Prefix, tuple[int, int]]:
        """{prefix: (level, priority)} of every cached block, for inspection and tests."""
        index = {}
        for key, path, after in paths(self._groups):
            tokens = tuple(token for node in path for token in node.tokens)
            index[Prefix(*key, path[-1].lora, path[-1].salt, tokens, after)] = path[-1].where
        return index
