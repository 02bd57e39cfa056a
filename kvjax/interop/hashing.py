# SPDX-License-Identifier: Apache-2.0
"""Hashes of cached prefixes that are the same in every process, from events.

`blocks/hashes.py` says what they are made of. A reader of events keeps those of what is cached, as `fold` its mirror:

    hashes = hashing.block_hashes(kvjax.events.snapshot(state), names=names)
    events, hashes = hashing.with_hashes(kvjax.to_list(events), hashes, names=names)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvjax.blocks.hashes import (
    HASH_BYTES,
    block_hash,
    chain_hash,
    checked_loras,
    encoded,
    hasher,
    namespace_root,
    root_hash,
)
from kvjax.blocks.keys import Namespaces
from kvjax.events.mirror import Node, decoded, node_of, parent_of
from kvjax.interop import columns as col

__all__ = ["Hashing", "block_hash", "block_hashes", "root_hash", "salt_hash", "with_hashes"]

_WORD = 4  # bytes of a word of a row
_LACKS = "wanted one that `hashes` has: the hashes after all events before these"
_NONE = bytes(HASH_BYTES)


def first_64_bits(block_hash: bytes) -> int:
    """The first 8 bytes of a hash, big-endian, for wires of 64 bits; 1 for 0, which some readers take for no parent."""
    return int.from_bytes(block_hash[:8], "big") or 1


def salt_hash(salt: str, *, key: bytes = b"") -> str:
    """A hash of a salt's UTF-8: 32 hexadecimal digits. Without a `key` a short salt can be guessed from it.

    Args:
      salt: the tenant's, as in `Namespaces`.
      key: as for `root_hash`.

    Example:
      >>> from kvjax.interop.hashing import salt_hash
      >>> salt_hash("tenant a")
      '3a779d9a0f9d58a66187a31f5f83e267'
      >>> salt_hash("tenant a", key=b"secret") == salt_hash("tenant a")
      False
    """
    return hasher(b"kvjax-salt", key, encoded("salt", salt)).hexdigest()


def salt_text(salt: str | None, salts: str, key: bytes) -> str | None:
    """A salt as it is published."""
    return salt if salt is None or salts == "plain" else salt_hash(salt, key=key)


def block_hashes(
    events: Iterable[dict[str, Any]], hashes: Mapping[Node, bytes] | None = None, **options: Any
) -> dict[Node, bytes]:
    """{(group, block, generation): hash of the whole prefix} of all that is cached after events, by `with_hashes`.

    Example:
      >>> from kvjax.interop.hashing import block_hash, block_hashes, root_hash
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> hashes = block_hashes(kvjax.to_list(events))
      >>> sorted(hashes)  # (group, block, generation)
      [(0, 0, 1), (0, 1, 1)]
      >>> hashes[0, 0, 1] == block_hash(root_hash(), [0, 1, 2, 3])
      True
    """
    return with_hashes(events, hashes, **options)[1]


def with_hashes(
    events: Iterable[dict[str, Any]],
    hashes: Mapping[Node, bytes] | None = None,
    *,
    names: Namespaces | None = None,
    loras: Mapping[int, str] | None = None,
    model: str | None = None,
    key: bytes = b"",
) -> tuple[list[dict[str, Any]], dict[Node, bytes]]:
    """Adds hashes to decoded events, and keeps the hashes of what is cached.

    Args:
      events: from `to_list`, in their order, or from `snapshot`, for a reader who begins late.
      hashes: those before these events; None: of an empty cache. They are left as they are.
      names: the `Namespaces` of the cache, for salts and LoRAs; None: all prompts had namespace 0.
      loras: adapter number to name, for each adapter in use. Two adapters need two names: their K/V differ.
      model: as for `root_hash`.
      key: as for `root_hash`.

    Returns:
      The events: stored, updated and removed ones have "block_hash" too, stored ones "parent_hash", which at a root is
      that of the empty prefix; and the hashes after the events, as from `block_hashes`.

    Example:
      >>> from kvjax.interop.hashing import with_hashes
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> (first, second), hashes = with_hashes(kvjax.to_list(events), model="llama")
      >>> second["parent_hash"] == first["block_hash"], len(hashes)
      (True, 2)
    """
    adapters = checked_loras("loras", loras)
    names = Namespaces() if names is None else names
    after, found = dict(hashes or {}), []
    for event in decoded(events):
        if event["kind"] == "cleared":
            after = {node: one for node, one in after.items() if node[0] != event["group"]}
        if event["kind"] in ("stored", "updated", "removed"):
            node = node_of(event, after, _LACKS)
            if event["kind"] == "stored":
                parent = parent_of(event, after, _LACKS)
                if parent is None:
                    parent = namespace_root(event["namespace"], names, adapters, model, key)
                after[node] = block_hash(parent, event["tokens"], event.get("extra_ids"), key=key)
                event = {**event, "parent_hash": parent}
            event = {**event, "block_hash": after[node]}
            if event["kind"] == "removed":
                del after[node]
        found.append(event)
    return found, after


class Space(NamedTuple):
    """A namespace: the hash of its empty prefix, the flags of its blocks, its salt and its adapter."""

    root: bytes
    flags: int
    salt: str | None = None
    lora_id: int | None = None
    lora: str | None = None


class Hashing:
    """Hashes the rows of an index's table. Two with equal arguments are equal: one pass serves both.

    Args:
      names: the `Namespaces` of the cache; None: all prompts have namespace 0. Blocks of others are not published.
      lora_names: adapter number to name; an adapter without one is called by its number.
      model: part of all hashes, as for `root_hash`.
      key: a secret of at most 64 bytes, the same on all replicas, without which hashes can neither be made nor probed.
    """

    def __init__(self, names: Namespaces | None, lora_names: Mapping[int, str] | None, model: str | None, key: bytes):
        self._names = Namespaces() if names is None else names
        self._loras = checked_loras("lora_names", lora_names)
        self._model, self._key, self._hasher = model, key, hasher(b"kvjax-block", key)
        self._equal = names and id(names), tuple(sorted(self._loras.items())), model, key
        root_hash(model)  # refuses what is no text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashing) and self._equal == other._equal

    def space(self, namespace: int) -> Space:
        """A namespace; one that was not given out yet has the flag UNKNOWN."""
        if namespace not in self._names:
            return Space(_NONE, col.UNKNOWN)
        salt, number = self._names.describe(namespace)
        name = None if number is None else self._loras.get(number, str(number))
        root = root_hash(self._model, salt, name, key=self._key)
        flags = col.SALT * (salt is not None) | col.LORA * (name is not None)
        return Space(root, flags, salt, number, name)

    def hash(self, rows: np.ndarray, among: list[int], size: int, hashes: set[int], spaces: dict[int, Space]) -> None:
        """Writes the flags and hashes of rows that are stored, and adds these to the group's.

        Args:
          rows: i32[n, W]; with flags and hash of the prefix before where that is not among them.
          among: index of the parent among the rows, before its children; or -1.
          size: P.
          hashes: of the group's blocks.
          spaces: by namespace; those of the rows' namespaces are added.
        """
        flags, digests, above, start = self._flags(rows, size, spaces), [], [], 0
        data, width = np.ascontiguousarray(rows[:, col.ABOVE :]).tobytes(), _WORD * (rows.shape[1] - col.ABOVE)
        for at, (parent, fill) in enumerate(zip(among, rows[:, col.FILL].tolist(), strict=True)):
            before = data[start : start + HASH_BYTES] if parent < 0 else digests[parent]
            flags[at] |= flags[parent] if parent >= 0 else 0
            if flags[at] & col.UNKNOWN:
                digests.append(_NONE)
            else:
                content = data[start + HASH_BYTES : start + width]
                digests.append(chain_hash(self._hasher, before, content if fill == size else _cut(content, fill, size)))
            above.append(before)
            start += width
        rows[:, col.HASH : col.ABOVE] = np.frombuffer(b"".join(digests), np.int32).reshape(-1, 4)
        rows[:, col.ABOVE : col.SIZE] = np.frombuffer(b"".join(above), np.int32).reshape(-1, 4)
        rows[:, col.FLAGS] = flags
        self._find_collisions(rows, among, hashes)

    def _find_collisions(self, rows: np.ndarray, among: list[int], hashes: set[int]) -> None:
        """Flags rows whose 64 bits another block has, and those below them; the first of such blocks keeps them."""
        firsts, flags = col.hashes_of(rows).tolist(), rows[:, col.FLAGS]
        new = set(firsts)
        if len(new) < len(firsts) or not hashes.isdisjoint(new) or np.any(flags & (col.UNKNOWN | col.COLLISION)):
            for at, (first, parent) in enumerate(zip(firsts, among, strict=True)):
                flags[at] |= flags[parent] & col.COLLISION if parent >= 0 else 0
                if not flags[at] & (col.UNKNOWN | col.COLLISION):
                    flags[at] |= col.COLLISION * (first in hashes)
                    hashes.add(first)
        else:
            hashes |= new

    def forget(self, rows: np.ndarray, hashes: set[int]) -> None:
        """Takes the hashes of rows that are removed from the group's."""
        own = rows[:, col.FLAGS] & (col.UNKNOWN | col.COLLISION) == 0
        hashes.difference_update(col.hashes_of(rows[own]).tolist())

    def _flags(self, rows: np.ndarray, size: int, spaces: dict[int, Space]) -> list[int]:
        """The flags of rows, but for what they have of parents among them; writes the hashes of empty prefixes."""
        flags, roots = rows[:, col.FLAGS].copy(), np.flatnonzero(rows[:, col.PARENT] < 0)
        for namespace in set(rows[roots, col.NAMESPACE].tolist()):
            of = roots[rows[roots, col.NAMESPACE] == namespace]
            if (space := spaces.get(namespace) or self.space(namespace)).flags != col.UNKNOWN:
                spaces[namespace] = space
            rows[of, col.ABOVE : col.SIZE], flags[of] = np.frombuffer(space.root, np.int32), space.flags
        flags |= np.where(rows[:, col.TEXT + size :].any(axis=1), col.EXTRA, 0)
        flags |= np.where(rows[:, col.FILL] < size, col.PARTIAL, 0)
        return flags.tolist()


def _cut(content: bytes, fill: int, size: int) -> bytes:
    """The content of a whole block as that of one with only some tokens."""
    starts = range(_WORD, len(content), _WORD * size)
    return fill.to_bytes(_WORD, "little") + b"".join(content[start : start + _WORD * fill] for start in starts)
