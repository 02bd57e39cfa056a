# SPDX-License-Identifier: Apache-2.0
"""Hashes of prefixes that are the same in every process: 128 bits, made on the host.

A block's number and a namespace's number mean something in one process only. A block's hash stands for the whole prefix
that ends in it: model, salt, LoRA and all tokens so far. So equal prefixes have equal hashes in all caches of one block
size, and others never do, by the strength of BLAKE2b. Who does not know the secret `key` cannot compute them.

    root    person kvjax-root   text(model) + text(salt) + text(LoRA name)
    block   person kvjax-block  the parent's 16 bytes, u32 number of tokens, tokens i32; with extra ids, these too, i32
    text    00 for None; else 01, u32 length, UTF-8                                          all little-endian
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from kvjax.blocks.keys import Namespaces
from kvjax.checks import host_integers
from kvjax.events import columns as col
from kvjax.events.index import Space

HASH_BYTES = 16
_WORD = 4  # bytes of a word of a row
_NONE = bytes(HASH_BYTES)


def root_hash(model: str | None = None, salt: str | None = None, lora: str | None = None, *, key: bytes = b"") -> bytes:
    """The hash of the empty prefix: 16 bytes.

    Args:
      model: whatever tells apart models whose K/V differ, such as a checkpoint's name and the dtype of its K/V.
      salt: the tenant's, as in `Namespaces`.
      lora: the adapter's name; its number may be another one's in another process.
      key: a secret of at most 64 bytes, the same for all that compare hashes.

    Example:
      >>> from kvjax.interop.hashing import root_hash
      >>> root_hash(model="llama").hex()
      'b1935fbc9f2ae9c17b24ac30bbf39592'
      >>> root_hash(model="llama", salt="tenant a") == root_hash(model="llama")
      False
    """
    content = b""
    for name, value in {"model": model, "salt": salt, "lora": lora}.items():
        text = b"" if value is None else encoded(name, value, "text or None")
        content += b"\x00" if value is None else b"\x01" + struct.pack("<I", len(text)) + text
    return hasher(b"kvjax-root", key, content).digest()


def block_hash(parent: bytes, tokens: ArrayLike, extra_ids: ArrayLike | None = None, *, key: bytes = b"") -> bytes:
    """The hash of the prefix that ends with a block: 16 bytes.

    Args:
      parent: 16 bytes; the hash of the prefix before the block.
      tokens: i32[n]; the tokens of the block, fewer than P in the last one of a prefix.
      extra_ids: i32[n]; where the spec has them, zeros too; else None.
      key: as for `root_hash`.

    Example:
      >>> from kvjax.interop.hashing import block_hash, root_hash
      >>> first = block_hash(root_hash(), [0, 1, 2, 3])
      >>> block_hash(first, [4, 5, 6, 7]).hex()
      '8b7fb69ca9b7b05165eddd19cb57a27d'
      >>> block_hash(root_hash(), [4, 5, 6, 7]) == block_hash(first, [4, 5, 6, 7])  # the whole prefix counts
      False
    """
    if not isinstance(parent, bytes) or len(parent) != HASH_BYTES:
        raise ValueError(f"parent: got {parent!r:.80}, wanted a hash of {HASH_BYTES} bytes")
    parts = [("tokens", tokens), *(("extra_ids", ids) for ids in [extra_ids] if ids is not None)]
    words = [host_integers(name, part, np.int32, "a list of integers").astype("<i4") for name, part in parts]
    size = words[0].size
    if words[-1].size != size:
        raise ValueError(f"extra_ids: got {words[1].size}, wanted one for each of {size} tokens")
    content = struct.pack("<I", size) + b"".join(ids.tobytes() for ids in words)
    return chain_hash(hasher(b"kvjax-block", key), parent, content)


def first_64_bits(block_hash: bytes) -> int:
    """The first 8 bytes of a hash, big-endian, for wires of 64 bits; 1 for 0, which some readers take for no parent."""
    return int.from_bytes(block_hash[:8], "big") or 1


def chain_hash(keyed: hashlib.blake2b, parent: bytes, content: bytes) -> bytes:
    """The hash of a block by that of its parent; `keyed` is a hasher that has read the key."""
    one = keyed.copy()
    one.update(parent)
    one.update(content)
    return one.digest()


def namespace_root(namespace: int, names: Namespaces, loras: Mapping[int, str], model: str | None, key: bytes) -> bytes:
    """The root of a namespace."""
    if namespace not in names:
        raise ValueError(f"names: got none of namespace {namespace}, wanted the Namespaces that gave it out")
    salt, lora = names.describe(namespace)
    name = None if lora is None else loras.get(lora)
    if name is None and lora is not None:  # as None it would be the name of the model without an adapter
        raise ValueError(f"loras: got no name of adapter {lora}, wanted one for each adapter in use")
    return root_hash(model, salt, name, key=key)


def checked_loras(argument: str, loras: Mapping[int, str] | None) -> dict[int, str]:
    """{adapter number: name}, which must all differ."""
    names = dict(loras or {})
    if len(set(names.values())) < len(names):
        raise ValueError(f"{argument}: got {names}, wanted another name for each adapter")
    return names


def encoded(name: str, value: str, wanted: str = "text") -> bytes:
    """The UTF-8 of a text; a ValueError that names it for what is none."""
    try:
        return value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise ValueError(f"{name}: got {value!r}, wanted {wanted}") from error


def hasher(person: bytes, key: bytes = b"", content: bytes = b"") -> hashlib.blake2b:
    """BLAKE2b with a person, after a key and some content."""
    if not isinstance(key, bytes) or len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        got = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"  # a secret is not shown
        raise ValueError(f"key: got {got}, wanted at most {hashlib.blake2b.MAX_KEY_SIZE} bytes")
    return hashlib.blake2b(content, digest_size=HASH_BYTES, key=key, person=person)


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
        return type(other) is type(self) and self._equal == other._equal

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
