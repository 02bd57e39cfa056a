# SPDX-License-Identifier: Apache-2.0
"""vLLM's wire, as any engine publishes it: payloads in every form, decoded with limits, and a mirror of the cache."""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

from kvjax.interop._wires import msgspec
from kvjax.interop.readers.tree import Hash, Node, Root, paths

Key = str | int | float | bytes | tuple  # an extra key; (name, offset) of an image
MEDIA = ("GPU", "CPU")  # by level
SALT_PREFIX = "dynamo-cache-salt:"  # of the salt among the keys of `extra_keys`, which have no names
_TOKEN_BYTES = 8
_LONGEST = 4096  # characters of a name, bytes of a hash, keys of a block
_GROUPS, _BLOCK = 1 << 10, 1 << 16  # the most groups, and the most tokens of a block
_MOST_MEDIA = 32
_FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})  # vLLM's words


class Stored(NamedTuple):
    """Blocks that follow each other are cached."""

    hashes: Sequence[Hash]
    parent: Hash | None  # the prefix before them, None at a root
    tokens: bytes  # i64[n * size]
    size: int  # tokens of a block
    lora: str | None
    salt: str | None  # an event without a salt has that of its parent
    keys: Sequence[tuple[Key, ...]]  # for each block its extra keys; empty if no block has any
    medium: str
    group: int
    kind: str | None  # of the group: "full_attention", "sliding_window", ..., None if the event has none
    window: int | None


class Removed(NamedTuple):
    """Blocks are no longer cached there."""

    hashes: Sequence[Hash]
    medium: str
    group: int


class Cleared(NamedTuple):
    """Nothing is cached any more, in any group."""


class Batch(NamedTuple):
    """The contents of a payload: seconds since 1970, events in their order, data-parallel rank."""

    time: float
    events: list[Stored | Removed | Cleared]
    rank: int | None


_Name = Annotated[str, msgspec.Meta(max_length=_LONGEST)]
_Hash = Annotated[bytes, msgspec.Meta(max_length=_LONGEST)] | int
_Keys = Annotated[list[Any], msgspec.Meta(max_length=_LONGEST)]  # text or bytes, so that `_keys` checks them
_Number = Annotated[int, msgspec.Meta(ge=0, lt=_GROUPS)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=_BLOCK)]
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


class _Batch[E](msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[E]
    data_parallel_rank: int | None = None


class _BatchMap[E](_Batch[E], array_like=False): ...  # some versions of vLLM have the batch as a map too


_Maps, _Arrays = _Stored | _Removed | _Cleared, _StoredArray | _RemovedArray | _ClearedArray
_DECODERS = [msgspec.msgpack.Decoder(form).decode for form in (_Batch[_Maps], _Batch[_Arrays], _BatchMap[_Maps])]


def decode(payload: bytes) -> Batch:
    """Reads a payload of any of the forms, with hashes that are ints or bytes; a ValueError for anything else.

    Example:
      >>> import msgspec
      >>> from kvjax.interop.vllm import decode
      >>> payload = msgspec.msgpack.encode([0.0, [["AllBlocksCleared"]], 0])
      >>> decode(payload)
      Batch(time=0.0, events=[Cleared()], rank=0)
    """
    errors = []
    for decoder in _DECODERS:
        try:
            batch = decoder(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            errors.append(str(error))
            continue
        return Batch(batch.ts, [_checked(event) for event in batch.events], batch.data_parallel_rank)
    raise ValueError(f"payload: got {payload[:40]!r}, wanted a KVEventBatch: {errors[0]}; {errors[1]}")


def _checked(event: Any) -> Stored | Removed | Cleared:
    """The public form of an event, once what its types do not say is checked."""
    if isinstance(event, _Cleared):
        return Cleared()
    hashes = event.block_hashes
    if len(hashes) > 1 and len(set(hashes)) < len(hashes):
        raise ValueError("block_hashes: got one twice, wanted each once")
    group, medium = event.group_idx or 0, event.medium or MEDIA[0]
    if isinstance(event, _Removed):
        return Removed(hashes, medium, group)
    size, lora, salt, parent = event.block_size, event.lora_name, event.cache_salt, event.parent_block_hash
    if len(event.token_ids) != len(hashes) * size:
        raise ValueError(f"token_ids: got {len(event.token_ids)}, wanted {size} for each of {len(hashes)} blocks")
    if lora is None and event.lora_id is not None:
        lora = str(event.lora_id)
    tokens, keys = array.array("q", event.token_ids).tobytes(), []
    if event.extra_keys is not None:
        if len(event.extra_keys) != len(hashes):
            raise ValueError(f"extra_keys: got those of {len(event.extra_keys)} blocks, wanted {len(hashes)}")
        keys, salt_key = _keys(event.extra_keys, lora, parent is None)
        salt = salt_key if salt is None else salt
    kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
    return Stored(hashes, parent, tokens, size, lora, salt, keys, medium, group, kind, window)


def _keys(extra_keys: Sequence[Any], lora: str | None, at_root: bool) -> tuple[list[tuple[Key, ...]], str | None]:
    """The extra keys of each block without the adapter's name, and the salt.

    vLLM's keys have no names. A text in the first block that is not the adapter's is taken for the salt: then a block
    may be found by fewer prompts than have it, and never by others.
    """
    found, salt = [], None
    for at, of_block in enumerate(extra_keys):
        keys: list[Key] = []
        for key in of_block or ():
            key = tuple(key) if isinstance(key, list) else key
            parts = key if isinstance(key, tuple) else (key,)
            if len(parts) > 8 or not all(map(_is_plain, parts)):
                raise ValueError("extra_keys: got what is no key")
            if isinstance(key, str) and (key.startswith(SALT_PREFIX) or (at_root and at == 0 and key != lora)):
                salt = key.removeprefix(SALT_PREFIX)
            elif key != lora:
                keys.append(key)
        found.append(tuple(keys))
    return (found if any(found) else []), salt


def _is_plain(part: Any) -> bool:
    return len(part) <= _LONGEST if isinstance(part, str | bytes) else isinstance(part, int | float)


class Prefix(NamedTuple):
    """A cached prefix; adapter and salt as on the wire."""

    group: int
    lora: str | None
    salt: str | None
    tokens: tuple[int, ...]  # all, or those behind `after`
    extra: tuple[tuple[int, Any], ...] = ()  # (position, name) of a key with an offset, else (block position, key)
    after: Hash | None = None  # the hash of the prefix before, where no event has stored it


class Found(NamedTuple):
    """The cached prefix of a prompt: tokens in whole blocks, and how many of them each medium has."""

    tokens: int
    media: dict[str, int]


class _Group:
    """The blocks of a group by their hashes, and the hashes by content: prefixes are found by their tokens."""

    def __init__(self, size: int, kind: str | None):
        self.size, self.kind = size, kind
        self.nodes: dict[Hash, Node] = {}
        self.hashes: dict[tuple[Any, ...], Hash] = {}

    def remove(self, block_hash: Hash) -> None:
        """Removes a block that is there."""
        node = self.nodes.pop(block_hash)
        content = node.parent, node.tokens, node.keys
        if self.hashes.get(content) == block_hash:
            del self.hashes[content]


class Mirror:
    """The cached blocks by the events so far, at most `max_blocks`.

    Example:
      >>> from kvjax.interop.vllm import Encoder, Mirror, decode
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> mirror = Mirror()
      >>> for payload in Encoder(spec).encode(events):
      ...     mirror.apply(decode(payload))
      >>> mirror.lookup(range(10), salt=None, lora=None, extra_keys=())
      Found(tokens=8, media={'GPU': 8})
    """

    def __init__(self, max_blocks: int = 1 << 22):
        self.max_blocks = max_blocks
        self._groups: dict[int, _Group] = {}
        self._media: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(len(group.nodes) for group in self._groups.values())

    def apply(self, batch: Batch) -> None:
        """Follows a batch; a ValueError for one that cannot belong to the cache leaves the mirror as it was."""
        self._check(batch)
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                self._groups.clear()

    def _check(self, batch: Batch) -> None:
        sizes = {number: group.size for number, group in self._groups.items()}
        media, num_blocks = set(self._media), len(self)
        for event in batch.events:
            if isinstance(event, Stored):
                if sizes.setdefault(event.group, event.size) != event.size:
                    raise ValueError(f"block_size: got {event.size}, wanted {sizes[event.group]}")
                media.add(event.medium)
                num_blocks += len(event.hashes)
            elif isinstance(event, Cleared):
                sizes, num_blocks = {}, 0
        if len(media) > _MOST_MEDIA or num_blocks > self.max_blocks:
            raise ValueError(f"events: got {num_blocks} blocks on {len(media)} media, wanted at most {self.max_blocks}")

    def _store(self, event: Stored) -> None:
        group = self._groups.setdefault(event.group, _Group(event.size, event.kind))
        nodes, hashes, width = group.nodes, group.hashes, _TOKEN_BYTES * event.size
        bit = self._media.setdefault(event.medium, 1 << len(self._media))
        parent = Root(event.lora, event.salt) if event.parent is None else event.parent
        start = 0
        for at, block_hash in enumerate(event.hashes):
            content = parent, event.tokens[start : start + width], event.keys[at] if event.keys else ()
            node = nodes.get(block_hash)
            if node is not None and (node.parent, node.tokens, node.keys) != content:
                group.remove(block_hash)
                node = None
            if node is None:
                nodes[block_hash] = node = Node(*content, event.lora, event.salt, 0)
            node.where |= bit
            hashes[content] = block_hash
            parent, start = block_hash, start + width

    def _remove(self, event: Removed) -> None:
        group, bit = self._groups.get(event.group), self._media.get(event.medium, 0)
        if group is None:
            return
        for block_hash in event.hashes:
            node = group.nodes.get(block_hash)
            if node is not None:
                node.where &= ~bit
                if not node.where:
                    group.remove(block_hash)

    def lookup(
        self, tokens: Iterable[int], salt: str | None, lora: str | None, extra_keys: Sequence[Sequence[Key]] | None
    ) -> Found:
        """The longest cached prefix of a prompt, in whole blocks of the groups of full attention."""
        text = array.array("q", tokens).tobytes()
        keys = [tuple(tuple(key) if isinstance(key, list) else key for key in of or ()) for of in extra_keys or ()]
        groups = [group for group in self._groups.values() if group.kind in _FULL_ATTENTION]
        found = (self._match(group, text, Root(lora, salt), keys) for group in groups)
        return min(found, key=lambda match: match.tokens, default=Found(0, {}))

    def _match(self, group: _Group, text: bytes, root: Root, keys: Sequence[tuple[Key, ...]]) -> Found:
        width, total = _TOKEN_BYTES * group.size, 0
        parent: Hash | Root | None = root
        media = dict.fromkeys(self._media, 0)
        for at, start in enumerate(range(0, len(text) - width + 1, width)):
            parent = group.hashes.get((parent, text[start : start + width], keys[at] if at < len(keys) else ()))
            if parent is None:
                break
            total += group.size
            for medium, bit in self._media.items():
                media[medium] += group.size if group.nodes[parent].where & bit else 0
        return Found(total, {medium: count for medium, count in media.items() if count})

    @property
    def index(self) -> dict[Prefix, tuple[str, ...]]:
        """{prefix: media}; whole paths, so for tests and small caches."""
        found = {}
        for number, path, after in paths({number: group.nodes for number, group in self._groups.items()}):
            root, tokens, extra = path[0].parent, array.array("q"), []
            for node in path:
                for key in node.keys:
                    named = isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], int)
                    extra.append((len(tokens) + (key[1] if named else 0), key[0] if named else key))
                tokens.frombytes(node.tokens)
            salt = root.salt if isinstance(root, Root) else None
            prefix = Prefix(number, path[-1].lora, salt, tuple(tokens), tuple(extra), after)
            found[prefix] = tuple(name for name, bit in self._media.items() if path[-1].where & bit)
        return found
