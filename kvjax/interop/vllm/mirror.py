# SPDX-License-Identifier: Apache-2.0
"""The cache as a reader of vLLM's wire has it. Hashes are opaque: prefixes are found by their tokens."""

from __future__ import annotations

import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from kvjax.interop.vllm.decode import TOKEN_BYTES, Batch, Cleared, Hash, Key, Removed, Stored

_MOST_MEDIA = 32
_FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})  # vLLM's words


class Prefix(NamedTuple):
    """A cached prefix.

    Attributes:
      group: number of the group.
      lora, salt: as on the wire.
      tokens: all tokens, or those behind `after`.
      extra: (position, name) of the extra keys that have an offset, and (position of their block, key) of others.
      after: the name of the prefix before, where the wire has not told what it is; else None.
    """

    group: int
    lora: str | None
    salt: str | None
    tokens: tuple[int, ...]
    extra: tuple[tuple[int, Any], ...] = ()
    after: Hash | None = None


class Found(NamedTuple):
    """The cached prefix of a prompt: tokens in whole blocks, and how many of them each medium has."""

    tokens: int
    media: dict[str, int]


class _Node:
    """A cached block: what it follows (a name, or (lora, salt) at a root), contents, and the media as bits."""

    __slots__ = ("before", "keys", "lora", "media", "tokens")

    def __init__(self, before: Any, tokens: bytes, keys: tuple[Key, ...], lora: str | None):
        self.before, self.tokens, self.keys, self.lora, self.media = before, tokens, keys, lora, 0

    @property
    def content(self) -> tuple[Any, ...]:
        return self.before, self.tokens, self.keys


class _Group:
    """The cached blocks of a group: nodes by name, and names by content."""

    def __init__(self, size: int, kind: str | None, window: int | None):
        self.size, self.kind, self.window = size, kind, window
        self.nodes: dict[Hash, _Node] = {}
        self.names: dict[tuple[Any, ...], Hash] = {}


class Mirror:
    """The cached blocks by the events so far.

    Attributes:
      max_blocks: the most blocks that it takes.
    """

    def __init__(self, max_blocks: int = 1 << 22):
        self.max_blocks = max_blocks
        self._groups: dict[int, _Group] = {}
        self._media: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(len(group.nodes) for group in self._groups.values())

    def apply(self, batch: Batch) -> None:
        """Follows a batch.

        Raises:
          ValueError: if it cannot belong to what is mirrored; then nothing has changed.
        """
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
        media, more = set(self._media), len(self)
        for event in batch.events:
            if isinstance(event, Stored):
                if sizes.setdefault(event.group, event.size) != event.size:
                    raise ValueError(f"block_size: got {event.size}, wanted {sizes[event.group]}")
                media.add(event.medium)
                more += len(event.hashes)
            elif isinstance(event, Cleared):
                sizes, more = {}, 0
        if len(media) > _MOST_MEDIA or more > self.max_blocks:
            raise ValueError(f"events: got {more} blocks on {len(media)} media, wanted at most {self.max_blocks}")

    def _store(self, event: Stored) -> None:
        group = self._groups.get(event.group)
        if group is None:
            group = self._groups[event.group] = _Group(event.size, event.kind, event.window)
        nodes, names, width = group.nodes, group.names, TOKEN_BYTES * event.size
        bit = self._media.setdefault(event.medium, 1 << len(self._media))
        before: Hashable = (event.lora, event.salt) if event.parent is None else event.parent
        start = 0
        for at, name in enumerate(event.hashes):
            tokens, keys = event.tokens[start : start + width], event.keys[at] if event.keys else ()
            content = before, tokens, keys
            node = nodes.get(name)
            if node is None or node.content != content:
                if node is not None and names.get(node.content) == name:
                    del names[node.content]
                nodes[name] = node = _Node(*content, event.lora)
            node.media |= bit
            names[content] = name
            before, start = name, start + width

    def _remove(self, event: Removed) -> None:
        group, bit = self._groups.get(event.group), self._media.get(event.medium, 0)
        if group is None:
            return
        for name in event.hashes:
            node = group.nodes.get(name)
            if node is not None:
                node.media &= ~bit
                if not node.media:
                    del group.nodes[name]
                    if group.names.get(node.content) == name:
                        del group.names[node.content]

    def lookup(
        self, tokens: Iterable[int], salt: str | None, lora: str | None, extra_keys: Sequence[Sequence[Key]] | None
    ) -> Found:
        """The longest cached prefix of a prompt, in whole blocks of the groups of full attention."""
        text = array.array("q", tokens).tobytes()
        keys = [tuple(tuple(key) if isinstance(key, list) else key for key in of or ()) for of in extra_keys or ()]
        groups = [group for group in self._groups.values() if group.kind in _FULL_ATTENTION]
        found = (self._match(group, text, (lora, salt), keys) for group in groups)
        return min(found, key=lambda match: match.tokens, default=Found(0, {}))

    def _match(self, group: _Group, text: bytes, root: Hashable, keys: Sequence[tuple[Key, ...]]) -> Found:
        width, before, total = TOKEN_BYTES * group.size, root, 0
        media = dict.fromkeys(self._media, 0)
        for at, start in enumerate(range(0, len(text) - width + 1, width)):
            content = before, text[start : start + width], keys[at] if at < len(keys) else ()
            before = group.names.get(content)
            if before is None:
                break
            total += group.size
            for medium, bit in self._media.items():
                media[medium] += group.size if group.nodes[before].media & bit else 0
        return Found(total, {medium: count for medium, count in media.items() if count})

    @property
    def index(self) -> dict[Prefix, tuple[str, ...]]:
        """{prefix: media}; whole paths, so for tests and small caches."""
        found = {}
        for number, group in self._groups.items():
            for name, node in group.nodes.items():
                media = tuple(medium for medium, bit in self._media.items() if node.media & bit)
                found[self._prefix(number, name)] = media
        return found

    def _prefix(self, number: int, name: Hash) -> Prefix:
        others = [group for of, group in sorted(self._groups.items()) if of != number]
        lora, path, seen = self._groups[number].nodes[name].lora, [], set[Hash]()
        before: Any = name
        while not isinstance(before, tuple) and before not in seen:  # foreign events may go in a circle
            known = [group.nodes[before] for group in (self._groups[number], *others) if before in group.nodes]
            if not known:
                break
            seen.add(before)
            path.append(known[0])
            before = known[0].before
        salt, after = (before[1], None) if isinstance(before, tuple) else (None, before)
        tokens, extra = array.array("q"), []
        for node in reversed(path):
            for key in node.keys:
                named = isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], int)
                extra.append((len(tokens) + (key[1] if named else 0), key[0] if named else key))
            tokens.frombytes(node.tokens)
        return Prefix(number, lora, salt, tuple(tokens), tuple(extra), after)
