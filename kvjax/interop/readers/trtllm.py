# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's event JSON, of any engine: lines, decoded with limits on everything, and a mirror of the cache.

Source: TensorRT-LLM's `_utils.py`, `KVCacheEventSerializer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from kvjax.interop._wires import msgspec
from kvjax.interop.readers.tree import Hash, Node, Root, paths

Struct, Meta, field = msgspec.Struct, msgspec.Meta, msgspec.field
_LONGEST_LINE, _LONGEST_TEXT = 64 << 20, 4096  # characters
_BLOCK, _GROUPS = 1 << 16, 1 << 10  # the most tokens of a block, and the most groups

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
    """A block that is cached."""

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


class _Token(Struct, gc=False):
    token_id: _Number
    token_extra_id: _Number = 0


_UniqueTokens = Annotated[list[_Token], Meta(min_length=1, max_length=_BLOCK)]


def _tokens(kind: type, value: Any) -> Tokens:
    """The hook that decodes `Tokens`."""
    try:
        return Tokens((token.token_id, token.token_extra_id) for token in msgspec.convert(value, _UniqueTokens))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error  # msgspec adds the path of the tokens


_decode = msgspec.json.Decoder(Event, dec_hook=_tokens).decode


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
    if isinstance(line, str | bytes):
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"got {len(line)} characters, wanted at most {_LONGEST_LINE}")
        event = _decode(line)
    else:
        event = msgspec.convert(line, Event, dec_hook=_tokens)
    match event.data:
        case Stored(parent, blocks):
            _check_hashes("parent_hash", [] if parent is None else [parent])
            _check_hashes("block_hash", [block.block_hash for block in blocks])
        case Removed(hashes):
            _check_hashes("block_hashes", hashes)
        case Updated(block_hash):
            _check_hashes("block_hash", [block_hash])
    return event


def _check_hashes(name: str, hashes: Iterable[Hash]) -> None:
    """Checks what their type does not say: integers have 64 bits, and each is there once."""
    seen = set()
    for one in hashes:
        if isinstance(one, int) and not -(1 << 63) <= one < 1 << 64:
            raise ValueError(f"{name}: got {one!r:.80}, wanted an int of 64 bits or a short text")
        if one in seen:
            raise ValueError(f"{name}: got {one!r:.80} twice, wanted each once")
        seen.add(one)


class Prefix(NamedTuple):
    """A cached prefix; group, adapter and salt as on the line, None where it has none."""

    window: int
    group: int | None
    lora: str | None
    salt: str | None
    tokens: tuple[tuple[int, int], ...]  # (token id, extra id) of all, or of those behind `after`
    after: Hash | None = None  # the hash of the prefix before, where no line has stored it


class Mirror:
    """The cached blocks by the lines so far.

    Args:
      max_blocks: the most blocks that it takes.
      rank: the one to follow where a stream has events of several; None: all.

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

    def __init__(self, max_blocks: int = 1 << 22, rank: int | None = None):
        self.max_blocks, self.rank = max_blocks, rank
        self.last: int | None = None  # event_id of the last event that counts
        # Lines that are refused, duplicates, and events of other ranks change nothing.
        self.counts = dict.fromkeys(("events", "refused", "gaps", "duplicates", "others"), 0)
        self._groups: dict[tuple[int, int | None], dict[Hash, Node]] = {}
        self._complete = set[tuple[int, int | None]]()  # groups of which no event is missing since they were created

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    @property
    def complete(self) -> bool:
        """Whether each group has been followed from its beginning (created), with no event missing since."""
        return bool(self._groups) and self._complete == self._groups.keys()

    def follow(self, lines: Iterable[str | bytes | dict[str, Any]]) -> None:
        """Follows lines or dicts; what is refused is counted and changes nothing."""
        for line in lines:
            try:
                self.apply(_parse_line(line))
            except ValueError:
                self.counts["refused"] += 1
                self._complete.clear()

    def apply(self, event: Event) -> None:
        """Follows an event; a ValueError for one too many blocks or groups leaves the mirror as it was."""
        if self.rank is not None and event.rank != self.rank:
            self.counts["others"] += 1
            return
        if event.number == self.last:
            self.counts["duplicates"] += 1
            return
        num_blocks = len(self) + (len(event.data.blocks) if isinstance(event.data, Stored) else 0)
        if num_blocks > self.max_blocks or len(self._groups) > _GROUPS:
            raise ValueError(f"lines: got {num_blocks} blocks, wanted at most {self.max_blocks}")
        self.counts["events"] += 1
        if self.last is not None and event.number < self.last:  # of another process
            self._groups.clear()
            self._complete.clear()
        elif event.number != (0 if self.last is None else self.last + 1):
            self.counts["gaps"] += 1
            self._complete.clear()
        self.last = event.number
        key = event.window, event.group
        nodes = self._groups.setdefault(key, {})
        match event.data:
            case Created():
                nodes.clear()
                self._complete.add(key)
            case Stored(parent, blocks, salt, lora):
                parent = Root(lora, salt) if parent is None else parent
                for block in blocks:
                    where = block.level, block.priority
                    nodes[block.block_hash] = Node(parent, block.tokens, (), lora, salt, where)
                    parent = block.block_hash
            case Removed(hashes):
                for block_hash in hashes:
                    nodes.pop(block_hash, None)
            case Updated(block_hash, level, priority) if block_hash in nodes:
                node = nodes[block_hash]
                pairs = zip(node.where, (level, priority), strict=True)
                node.where = tuple(was if diff is None else diff.new for was, diff in pairs)

    @property
    def index(self) -> dict[Prefix, tuple[int, int]]:
        """{prefix: (level, priority)} of everything that is cached; for looking at and for tests."""
        found = {}
        for key, path, after in paths(self._groups):
            tokens = tuple(token for node in path for token in node.tokens)
            found[Prefix(*key, path[-1].lora, path[-1].salt, tokens, after)] = path[-1].where
        return found
