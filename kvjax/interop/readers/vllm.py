# SPDX-License-Identifier: Apache-2.0
"""Reads vLLM's wire from any engine: decodes payloads of every form, with limits, and mirrors the cache.

Events are independent, so an event that cannot be applied does not affect others.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Annotated, Any, NamedTuple

from kvjax.interop._wires import msgspec
from kvjax.interop.readers.tree import Hash, Node, Root, paths

Key = str | int | float | bytes | tuple  # an extra key; (name, offset) for an image
MEDIA = ("GPU", "CPU")  # by level
SALT_PREFIX = "dynamo-cache-salt:"  # marks the salt in `extra_keys`, whose keys have no names
_TOKEN_BYTES = 8
_LONGEST = 4096  # characters of a name, bytes of a hash, keys of a block
_MAX_GROUPS = 1 << 10
_MAX_BLOCK = 1 << 16  # tokens
_MAX_EVENTS = 1 << 20  # of a payload
_MAX_MEDIA = 32
_BLOCK_BYTES = 360  # approximate size of a mirrored block without its tokens, names and keys
_FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})  # vLLM's words


class Stored(NamedTuple):
    """Newly cached blocks of a chain.

    `tokens` is empty unless the event has the tokens of every block. vLLM's offloading connector sends events
    without tokens, and groups of Mamba layers send events with fewer hashes than blocks of tokens.
    """

    hashes: Sequence[Hash]
    parent: Hash | None  # the prefix before them, None at a root
    tokens: bytes  # i64[n * size], or empty
    size: int  # tokens of a block
    lora: str | None
    salt: str | None  # an event without a salt has its parent's
    keys: Sequence[tuple[Key, ...]]  # the extra keys of each block; empty if no block has any
    medium: str
    group: int
    kind: str | None  # of the group: "full_attention", "sliding_window", ..., None if the event has none
    window: int | None


class Removed(NamedTuple):
    """Blocks that are no longer cached on a medium."""

    hashes: Sequence[Hash]
    medium: str
    group: int


class Cleared(NamedTuple):
    """All groups are empty now."""


class Skipped(NamedTuple):
    """An unreadable event, of an unknown kind or with a field that vLLM does not have."""

    reason: str


Event = Stored | Removed | Cleared | Skipped


class Batch(NamedTuple):
    """The contents of a payload: seconds since 1970, events in their order, data-parallel rank."""

    time: float
    events: list[Event]
    rank: int | None


_Name = Annotated[str, msgspec.Meta(max_length=_LONGEST)]
_Hash = Annotated[bytes, msgspec.Meta(max_length=_LONGEST)] | int
_Keys = Annotated[list[Any], msgspec.Meta(max_length=_LONGEST)]  # either text or bytes, checked by `_keys`
_Number = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_GROUPS)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_BLOCK)]
_Token = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token]
    block_size: _Size
    lora_id: int | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: list[_Keys | None] | None = None
    group_idx: _Number | None = None
    kv_cache_spec_kind: _Name | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: _Name | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: _Name | None = None
    group_idx: _Number | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False): ...


class _StoredArray(_Stored, tag="BlockStored", array_like=True): ...


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True): ...


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True): ...


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MAX_EVENTS)]
    data_parallel_rank: int | None = None


class _BatchMap(_Batch, array_like=False): ...  # some versions of vLLM send the batch as a map too


_decode_array = msgspec.msgpack.Decoder(_Batch).decode
_decode_map = msgspec.msgpack.Decoder(_BatchMap).decode
_decode_array_event = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_decode_map_event = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode


def decode(payload: bytes) -> Batch:
    """Reads a payload of any form, with hashes that are ints or bytes.

    An unreadable event becomes a `Skipped` with the reason, and does not affect others.

    Raises:
      ValueError: for a payload without a batch of events.

    Example:
      >>> import msgspec
      >>> from kvjax.interop.vllm import decode
      >>> payload = msgspec.msgpack.encode([0.0, [["AllBlocksCleared"], ["BlockMoved"]], 0])
      >>> decode(payload)
      Batch(time=0.0, events=[Cleared(), Skipped(reason="Invalid value 'BlockMoved' - at `$[0]`")], rank=0)
    """
    try:
        batch = (_decode_map if _is_map(payload) else _decode_array)(payload)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"payload: got {payload[:40]!r}, wanted a KVEventBatch: {error}") from error
    events: list[Event] = []
    skipped: dict[str, Skipped] = {}  # shares equal objects, so a payload full of them takes no memory
    for event in batch.events:
        try:
            events.append(_checked((_decode_map_event if _is_map(event) else _decode_array_event)(event)))
        except (ValueError, RecursionError) as error:
            reason = str(error)
            events.append(skipped.setdefault(reason, Skipped(reason)))
    return Batch(batch.ts, events, batch.data_parallel_rank)


def _is_map(message: bytes | msgspec.Raw) -> bool:
    """Whether msgpack begins with a map, by its first byte."""
    first = memoryview(message)[:1]
    return len(first) == 1 and (first[0] >> 4 == 0x8 or first[0] in (0xDE, 0xDF))


def _checked(event: Any) -> Stored | Removed | Cleared:
    """The public form of an event, after the checks that its types cannot express."""
    if isinstance(event, _Cleared):
        return Cleared()
    hashes = event.block_hashes
    group = event.group_idx or 0
    medium = event.medium or MEDIA[0]
    if isinstance(event, _Removed):
        return Removed(hashes, medium, group)
    if len(hashes) > 1 and len(set(hashes)) < len(hashes):
        raise ValueError("block_hashes: got the same hash twice, wanted each once")
    size = event.block_size
    lora = event.lora_name
    salt = event.cache_salt
    parent = event.parent_block_hash
    tokens = _tokens(event.token_ids, len(hashes), size)
    keys = []
    if lora is None and event.lora_id is not None:
        lora = str(event.lora_id)
    if tokens and event.extra_keys is not None:
        if len(event.extra_keys) != len(hashes):
            raise ValueError(f"extra_keys: got lists for {len(event.extra_keys)} blocks, wanted {len(hashes)}")
        keys, salt_key = _keys(event.extra_keys, lora, parent is None)
        salt = salt_key if salt is None else salt
    kind = event.kv_cache_spec_kind
    window = event.kv_cache_spec_sliding_window
    return Stored(hashes, parent, tokens, size, lora, salt, keys, medium, group, kind, window)


def _tokens(token_ids: list[int], num_hashes: int, size: int) -> bytes:
    """The tokens of blocks, or nothing if an event has no tokens, or has skipped some unknown blocks."""
    num_blocks, beyond = divmod(len(token_ids), size) if size else (0, len(token_ids))
    if beyond or (token_ids and num_blocks < num_hashes):
        raise ValueError(f"token_ids: got {len(token_ids)}, wanted {size} for each of {num_hashes} blocks")
    return array.array("q", token_ids).tobytes() if num_blocks == num_hashes else b""


def _keys(extra_keys: Sequence[Any], lora: str | None, at_root: bool) -> tuple[list[tuple[Key, ...]], str | None]:
    """The extra keys of each block without the adapter's name, and the salt.

    vLLM's keys have no names. A text in the first block, other than the adapter's name, is taken for the salt. If this
    guess is wrong, fewer prompts find the block, but prompts of another salt never do.
    """
    block_keys = []
    salt = None
    for block_index, unchecked_keys in enumerate(extra_keys):
        keys: list[Key] = []
        for key in unchecked_keys or ():
            key = tuple(key) if isinstance(key, list) else key
            parts = key if isinstance(key, tuple) else (key,)
            if len(parts) > 8 or not all(map(_is_plain, parts)):
                raise ValueError(f"extra_keys: got {key!r:.80}, wanted a key of vLLM's")
            is_first_text = at_root and block_index == 0 and key != lora
            if isinstance(key, str) and (key.startswith(SALT_PREFIX) or is_first_text):
                salt = key.removeprefix(SALT_PREFIX)
            elif key != lora:
                keys.append(key)
        block_keys.append(tuple(keys))
    return (block_keys if any(block_keys) else []), salt


def _is_plain(part: Any) -> bool:
    return len(part) <= _LONGEST if isinstance(part, str | bytes) else isinstance(part, int | float)


class Prefix(NamedTuple):
    """A cached prefix, with adapter and salt as on the wire."""

    group: int
    lora: str | None
    salt: str | None
    tokens: tuple[int, ...]  # all tokens, or the tokens after `after`
    extra: tuple[tuple[int, Any], ...] = ()  # (position, name) of a key with an offset, else (block position, key)
    after: Hash | None = None  # the hash of the prefix before, if no event has stored it


class PrefixMatch(NamedTuple):
    """The cached prefix of a prompt: tokens in whole blocks, and the number of these tokens in each medium."""

    tokens: int
    media: dict[str, int]


class _Group:
    """The blocks of a group by hash, and the hashes by content, for lookups of tokens."""

    def __init__(self, size: int, kind: str | None):
        self.size = size
        self.kind = kind
        self.nodes: dict[Hash, Node] = {}
        self.hashes: dict[tuple[Any, ...], Hash] = {}


def _bytes_of(block_hash: Hash, node: Node) -> int:
    """The approximate memory of a mirrored block."""
    num_bytes = _BLOCK_BYTES + len(node.tokens)
    num_bytes += sys.getsizeof(block_hash) + sys.getsizeof(node.lora) + sys.getsizeof(node.salt)
    for key in node.keys:
        parts = (key, *key) if isinstance(key, tuple) else (key,)
        num_bytes += sum(map(sys.getsizeof, parts))
    return num_bytes


class Mirror:
    """The cached blocks after the events so far.

    Events are independent. A stored event without tokens adds its medium to known blocks, and `unknown` counts the
    other blocks. An event is skipped, and counted in `skipped`, if it is unreadable, has blocks of another size, or
    exceeds a limit.

    Args:
      max_blocks: the maximum number of blocks.
      max_bytes: the approximate maximum memory of the blocks.

    Attributes:
      counts: `skipped`, the number of skipped events, and `unknown`, the number of blocks known only from events
        without tokens.
      complete: whether no event was skipped since the beginning, or since the last clear. Unknown blocks do not matter,
        because no message has their contents.
      num_bytes: the approximate memory of the blocks.

    Example:
      >>> from kvjax.interop.vllm import Encoder, Mirror, decode
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> mirror = Mirror()
      >>> for payload in Encoder(spec).encode(events):
      ...     mirror.apply(decode(payload))
      >>> mirror.lookup(range(10), salt=None, lora=None, extra_keys=())
      PrefixMatch(tokens=8, media={'GPU': 8})
    """

    def __init__(self, max_blocks: int = 1 << 22, max_bytes: int = 1 << 30):
        self.max_blocks = max_blocks
        self.max_bytes = max_bytes
        self.counts = {"skipped": 0, "unknown": 0}
        self.complete = True
        self.num_bytes = 0
        self._groups: dict[int, _Group] = {}
        self._media: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(len(group.nodes) for group in self._groups.values())

    def apply(self, batch: Batch) -> None:
        """Applies a batch of events to the mirror."""
        for event in batch.events:
            if isinstance(event, Cleared):
                self._groups.clear()
                self.num_bytes = 0
                self.complete = True
            elif isinstance(event, Removed):
                self._remove(event)
            elif isinstance(event, Skipped) or not (self._store if event.tokens else self._add_medium)(event):
                self.counts["skipped"] += 1
                self.complete = False

    def _store(self, event: Stored) -> bool:
        """Adds the blocks of an event. Returns False if they do not fit the group or the limits."""
        group = self._groups.get(event.group)
        if group is None or not group.nodes:
            group = _Group(event.size, event.kind)
        too_many_media = event.medium not in self._media and len(self._media) == _MAX_MEDIA
        if too_many_media or event.size != group.size:
            return False
        blocks, new = self._blocks_of(event, group.nodes)
        num_bytes = sum(starmap(_bytes_of, new))
        if len(self) + len(new) > self.max_blocks or self.num_bytes + num_bytes > self.max_bytes:
            return False
        for block_hash, node in new:
            if block_hash in group.nodes:
                self._forget(group, block_hash)
            group.nodes[block_hash] = node
        self.num_bytes += num_bytes
        bit = self._media.setdefault(event.medium, 1 << len(self._media))
        for block_hash, node, content in blocks:
            node.where |= bit
            group.hashes[content] = block_hash
        self._groups[event.group] = group
        return True

    def _blocks_of(self, event: Stored, nodes: dict[Hash, Node]) -> tuple[list[Any], list[tuple[Hash, Node]]]:
        """(hash, node, content) of an event's blocks, and the blocks new to the group or with new contents.

        A block on the GPU keeps its contents, because the contents sent by vLLM's offloading connector lack salts and
        extra keys.
        """
        on_gpu = 0 if event.medium == MEDIA[0] else self._media.get(MEDIA[0], 0)
        width = _TOKEN_BYTES * event.size
        parent = Root(event.lora, event.salt) if event.parent is None else event.parent
        blocks = []
        new = []
        for index, block_hash in enumerate(event.hashes):
            tokens = event.tokens[index * width : (index + 1) * width]
            content = (parent, tokens, event.keys[index] if event.keys else ())
            node = nodes.get(block_hash)
            if node is not None and node.where & on_gpu:
                content = (node.parent, node.tokens, node.keys)
            elif node is None or (node.parent, node.tokens, node.keys) != content:
                node = Node(*content, event.lora, event.salt, 0)
                new.append((block_hash, node))
            blocks.append((block_hash, node, content))
            parent = block_hash
        return blocks, new

    def _add_medium(self, event: Stored) -> bool:
        """Adds the medium of an event without tokens to known blocks. Returns False if there are too many media."""
        nodes = self._groups[event.group].nodes if event.group in self._groups else {}
        mirrored = [nodes[block_hash] for block_hash in event.hashes if block_hash in nodes]
        if mirrored and event.medium not in self._media and len(self._media) == _MAX_MEDIA:
            return False
        self.counts["unknown"] += len(event.hashes) - len(mirrored)
        for node in mirrored:
            node.where |= self._media.setdefault(event.medium, 1 << len(self._media))
        return True

    def _remove(self, event: Removed) -> None:
        group = self._groups.get(event.group)
        bit = self._media.get(event.medium, 0)
        if group is None:
            return
        for block_hash in event.hashes:
            node = group.nodes.get(block_hash)
            if node is not None:
                node.where &= ~bit
                if not node.where:
                    self._forget(group, block_hash)

    def _forget(self, group: _Group, block_hash: Hash) -> None:
        """Removes a block, if it is known."""
        node = group.nodes.pop(block_hash, None)
        if node is None:
            return
        self.num_bytes -= _bytes_of(block_hash, node)
        content = (node.parent, node.tokens, node.keys)
        if group.hashes.get(content) == block_hash:
            del group.hashes[content]

    def lookup(
        self, tokens: Iterable[int], salt: str | None, lora: str | None, extra_keys: Sequence[Sequence[Key]] | None
    ) -> PrefixMatch:
        """The longest cached prefix of a prompt, in whole blocks of the groups of full attention."""
        text = array.array("q", tokens).tobytes()
        keys = [
            tuple(tuple(key) if isinstance(key, list) else key for key in block_keys or ())
            for block_keys in extra_keys or ()
        ]
        groups = [group for group in self._groups.values() if group.kind in _FULL_ATTENTION]
        matches = (self._match(group, text, Root(lora, salt), keys) for group in groups)
        return min(matches, key=lambda match: match.tokens, default=PrefixMatch(0, {}))

    def _match(self, group: _Group, text: bytes, root: Root, keys: Sequence[tuple[Key, ...]]) -> PrefixMatch:
        width = _TOKEN_BYTES * group.size
        total = 0
        parent: Hash | Root | None = root
        media = dict.fromkeys(self._media, 0)
        for index, start in enumerate(range(0, len(text) - width + 1, width)):
            block_keys = keys[index] if index < len(keys) else ()
            parent = group.hashes.get((parent, text[start : start + width], block_keys))
            if parent is None:
                break
            total += group.size
            for medium, bit in self._media.items():
                media[medium] += group.size if group.nodes[parent].where & bit else 0
        return PrefixMatch(total, {medium: count for medium, count in media.items() if count})

    @property
    def index(self) -> dict[Prefix, tuple[str, ...]]:
        """{prefix: media} of every cached block. It contains whole paths, so use it only for tests and small caches."""
        index = {}
        nodes = {group_index: group.nodes for group_index, group in self._groups.items()}
        for group_index, path, after in paths(nodes):
            root = path[0].parent
            tokens = array.array("q")
            extra = []
            for node in path:
                for key in node.keys:
                    named = isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], int)
                    extra.append((len(tokens) + (key[1] if named else 0), key[0] if named else key))
                tokens.frombytes(node.tokens)
            salt = root.salt if isinstance(root, Root) else None
            prefix = Prefix(group_index, path[-1].lora, salt, tuple(tokens), tuple(extra), after)
            index[prefix] = tuple(name for name, bit in self._media.items() if path[-1].where & bit)
        return index
