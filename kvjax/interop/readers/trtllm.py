# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's event JSON, of any engine: lines, decoded with limits on everything, and a mirror of the cache.

Each event is judged by itself, so that an event which no mirror can place costs nothing but itself.

Source: TensorRT-LLM's `_utils.py`, `KVCacheEventSerializer`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import starmap
from typing import Annotated, Any, NamedTuple

from kvjax.interop._wires import msgspec
from kvjax.interop.readers.tree import Hash, Node, Root, paths

Struct, Meta, field = msgspec.Struct, msgspec.Meta, msgspec.field
_LONGEST_LINE, _LONGEST_TEXT = 64 << 20, 4096  # characters
_BLOCK, _GROUPS = 1 << 16, 1 << 10  # the most tokens of a block, and the most groups
_BLOCK_BYTES, _TOKEN_BYTES = 300, 120  # of a mirrored block without tokens and names, and of a token, about

_Number = Annotated[int, Meta(ge=0)]
_Text = Annotated[str, Meta(max_length=_LONGEST_TEXT)]
_Hash = int | _Text  # 64 bits, or the hexadecimal digits of newer hashes


class Diff(Struct, frozen=True):
    """A number that changed."""

    new: _Number = field(name="new_value")
    old: _Number = field(name="old_value")


class Created(Struct, frozen=True, tag="created"):
    """A group begins, empty: its blocks on each level."""

    num_blocks: tuple[_Number, ...] = field(name="num_blocks_per_cache_level")


class Tokens(tuple[tuple[int, int], ...]):
    """(token id, extra id) of each token of a block."""


class Block(Struct, frozen=True):
    """A block that is cached; without tokens, a block that an earlier event has stored."""

    block_hash: _Hash
    tokens: Tokens
    level: _Number = field(name="cache_level")
    priority: _Number


class Stored(Struct, frozen=True, tag="stored"):
    """Blocks that follow each other are cached; `parent` is the prefix before them, None at a root."""

    parent: _Hash | None = field(name="parent_hash")
    blocks: tuple[Block, ...]
    salt: _Text | None = field(name="cache_salt", default=None)
    lora: _Text | None = field(name="lora_name", default=None)


class Removed(Struct, frozen=True, tag="removed"):
    """Blocks are no longer cached."""

    block_hashes: tuple[_Hash, ...]


class Updated(Struct, frozen=True, tag="updated"):
    """A block has another level or priority."""

    block_hash: _Hash
    level: Diff | None = field(name="cache_level", default=None)
    priority: Diff | None = None


class Event(Struct, frozen=True):
    """A line; without a `group`, the window alone identifies a group."""

    number: _Number = field(name="event_id")
    data: Created | Stored | Removed | Updated
    window: Annotated[int, Meta(ge=-1)] = field(name="window_size")  # -1: recurrent states
    group: Annotated[int, Meta(ge=0, lt=_GROUPS)] | None = field(name="layer_group_id", default=None)
    rank: _Number | None = field(name="attention_dp_rank", default=None)


class _Numbered(Struct):
    """The number and the rank of an event that cannot be read."""

    number: _Number = field(name="event_id")
    rank: _Number | None = field(name="attention_dp_rank", default=None)


class _Token(Struct, gc=False):
    token_id: _Number
    token_extra_id: _Number = 0


_UniqueTokens = Annotated[list[_Token], Meta(max_length=_BLOCK)]


def _tokens(kind: type, value: Any) -> Tokens:
    """The hook that decodes `Tokens`."""
    try:
        return Tokens((token.token_id, token.token_extra_id) for token in msgspec.convert(value, _UniqueTokens))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error  # msgspec adds the path of the tokens


_DECODERS: dict[type, Any] = {kind: msgspec.json.Decoder(kind, dec_hook=_tokens).decode for kind in (Event, _Numbered)}


def parse(lines: str | bytes | Iterable[str | bytes | dict[str, Any]]) -> list[Event]:
    """Reads events; a ValueError for a line that is none has its number and the path of the field.

    Args:
      lines: a text of lines, such as a file's; or lines, or dicts.

    Example:
      >>> from kvjax.interop.trtllm import parse
      >>> line = '{"event_id": 0, "data": {"type": "removed", "block_hashes": [17, 18]}, "window_size": 32}'
      >>> (event,) = parse(line)
      >>> event.number, event.data
      (0, Removed(block_hashes=(17, 18)))
    """
    if isinstance(lines, str | bytes):
        lines = [line for line in lines.splitlines() if line.strip()]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_parse_line(line))
        except ValueError as error:
            raise ValueError(f"lines: got no event in line {number}: {error}") from error
    return found


def _parse_line(line: str | bytes | dict[str, Any]) -> Event:
    """The event of a line; a ValueError for a line that is none."""
    event = _read(line, Event)
    match event.data:
        case Stored(parent, blocks):
            _check_hashes("parent_hash", [] if parent is None else [parent])
            hashes = [block.block_hash for block in blocks]
            _check_hashes("block_hash", hashes)
            if len(set(hashes)) < len(hashes):
                raise ValueError("block_hash: got one twice, wanted each once")
        case Removed(hashes):
            _check_hashes("block_hashes", hashes)
        case Updated(block_hash):
            _check_hashes("block_hash", [block_hash])
    return event


def _read[T](line: str | bytes | dict[str, Any], kind: type[T]) -> T:
    """A line as an Event, or as the numbers of one."""
    try:
        if not isinstance(line, str | bytes):
            return msgspec.convert(line, kind, dec_hook=_tokens)
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"got {len(line)} characters, wanted at most {_LONGEST_LINE}")
        return _DECODERS[kind](line)
    except RecursionError as error:
        raise ValueError("got lists in each other, wanted an event") from error


def _check_hashes(name: str, hashes: Iterable[Hash]) -> None:
    """Checks what their type does not say: integers have 64 bits."""
    for block_hash in hashes:
        if isinstance(block_hash, int) and not -(1 << 63) <= block_hash < 1 << 64:
            raise ValueError(f"{name}: got {block_hash!r:.80}, wanted an int of 64 bits or a short text")


class Prefix(NamedTuple):
    """A cached prefix; group, adapter and salt as on the line, None where it has none."""

    window: int
    group: int | None
    lora: str | None
    salt: str | None
    tokens: tuple[tuple[int, int], ...]  # (token id, extra id) of all, or of those behind `after`
    after: Hash | None = None  # the hash of the prefix before, where no line has stored it


def _bytes_of(block_hash: Hash, node: Node) -> int:
    """The memory of a mirrored block, about."""
    names = block_hash, node.lora, node.salt
    return _BLOCK_BYTES + _TOKEN_BYTES * len(node.tokens) + sum(map(sys.getsizeof, names))


class Mirror:
    """The cached blocks by the lines so far.

    Args:
      max_blocks: the most blocks that it takes.
      rank: the one to follow where a stream has events of several; None: all.
      max_bytes: the most memory that the blocks may take, about.

    Attributes:
      last: the event_id of the last event that counts.
      counts: `events`, those that it followed; `refused`, lines that are no events; `skipped`, events that it could not
        read or that exceeded a limit; `unknown`, blocks without tokens, or with a new level, that no event has stored;
        `gaps`; `duplicates`; and `others`, events of other ranks.
      num_bytes: the memory of its blocks, about.

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
        self._complete = set[tuple[int, int | None]]()  # groups of which no event is missing since they were created

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    @property
    def complete(self) -> bool:
        """Whether each group has been followed from its beginning (created), with no event missing or skipped since."""
        return bool(self._groups) and self._complete == self._groups.keys()

    def follow(self, lines: Iterable[str | bytes | dict[str, Any]]) -> None:
        """Follows lines or dicts. An event that cannot be read is skipped, a line that is none is refused."""
        for line in lines:
            try:
                self.apply(_parse_line(line))
            except ValueError:
                self._skip_line(line)

    def apply(self, event: Event) -> None:
        """Follows an event, or skips it if it has too many blocks or groups."""
        if not self._is_next(event.number, event.rank):
            return
        key = event.window, event.group
        data = event.data
        if key not in self._groups and len(self._groups) >= _GROUPS:
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

    def _is_next(self, number: int, rank: int | None) -> bool:
        """Whether an event counts, by its number and rank; notes the gap before it."""
        if self.rank is not None and rank != self.rank:
            self.counts["others"] += 1
            return False
        if number == self.last:
            self.counts["duplicates"] += 1
            return False
        if self.last is not None and number < self.last:  # of another process
            self._groups.clear()
            self._complete.clear()
            self.num_bytes = 0
        elif number != (0 if self.last is None else self.last + 1):
            self.counts["gaps"] += 1
            self._complete.clear()
        self.last = number
        return True

    def _skip(self) -> None:
        self.counts["skipped"] += 1
        self._complete.clear()

    def _skip_line(self, line: str | bytes | dict[str, Any]) -> None:
        """Skips the event of a line that cannot be read, or refuses the line."""
        try:
            event = _read(line, _Numbered)
        except ValueError:
            self.counts["refused"] += 1
            self._complete.clear()
            return
        if self.rank is not None and event.rank != self.rank:
            self.counts["others"] += 1
            return
        if event.number == (0 if self.last is None else self.last + 1):
            self.last = event.number  # any other number is believed of events alone that can be read
        self._skip()

    def _store(self, nodes: dict[Hash, Node], event: Stored) -> bool:
        """Adds blocks to a group; False if they exceed a limit. Blocks without tokens get a new level and priority."""
        parent = Root(event.lora, event.salt) if event.parent is None else event.parent
        placed: dict[Hash, Node] = {}
        for block in event.blocks:
            if block.tokens:
                where = block.level, block.priority
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
                node.where = block.level, block.priority
        return True

    def _update(self, nodes: dict[Hash, Node], event: Updated) -> None:
        node = nodes.get(event.block_hash)
        if node is None:
            self.counts["unknown"] += 1
            return
        pairs = zip(node.where, (event.level, event.priority), strict=True)
        node.where = tuple(was if diff is None else diff.new for was, diff in pairs)

    def _forget(self, nodes: dict[Hash, Node], hashes: Iterable[Hash]) -> None:
        """Removes the blocks that are there."""
        for block_hash in hashes:
            node = nodes.pop(block_hash, None)
            self.num_bytes -= 0 if node is None else _bytes_of(block_hash, node)

    @property
    def index(self) -> dict[Prefix, tuple[int, int]]:
        """{prefix: (level, priority)} of everything that is cached; for looking at and for tests."""
        found = {}
        for key, path, after in paths(self._groups):
            tokens = tuple(token for node in path for token in node.tokens)
            found[Prefix(*key, path[-1].lora, path[-1].salt, tokens, after)] = path[-1].where
        return found
