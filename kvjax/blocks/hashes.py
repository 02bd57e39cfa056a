# SPDX-License-Identifier: Apache-2.0
"""Hashes of prefixes, equal in every process: 128 bits, computed on the host.

Block ids and namespace numbers mean nothing in another process. A block's hash stands for the whole prefix that ends in
it: model, salt, LoRA and all tokens so far. Equal prefixes have equal hashes in all caches with the same block size,
and different prefixes have different hashes, unless somebody breaks BLAKE2b. With a secret `key`, nobody else can
compute them.

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
_WORD = 4  # the bytes of a word in a row
_NONE = bytes(HASH_BYTES)


def root_hash(model: str | None = None, salt: str | None = None, lora: str | None = None, *, key: bytes = b"") -> bytes:
    """Computes the hash of the empty prefix: 16 bytes.

    Args:
      model: a text that distinguishes models with different K/V, such as a checkpoint's name and the dtype of its K/V.
      salt: the tenant's salt; see `Namespaces`.
      lora: the adapter's name. Its number may belong to another adapter in another process.
      key: a secret of at most 64 bytes, the same for all processes comparing hashes.

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
    """Computes the hash of the prefix up to a block: 16 bytes.

    Args:
      parent: 16 bytes; the hash of the prefix before the block.
      tokens: i32[n]; the tokens of the block, fewer than P in the last block of a prefix.
      extra_ids: i32[n]; their extra ids, including zeros, if the spec has extra ids. None otherwise.
      key: a secret; see `root_hash`.

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
    num_tokens = words[0].size
    if words[-1].size != num_tokens:
        raise ValueError(f"extra_ids: got {words[1].size}, wanted an id for each of {num_tokens} tokens")
    content = struct.pack("<I", num_tokens) + b"".join(ids.tobytes() for ids in words)
    return chain_hash(hasher(b"kvjax-block", key), parent, content)


def first_64_bits(block_hash: bytes) -> int:
    """The first 8 bytes of a hash, big-endian, for wires with 64 bits. 0 becomes 1, since 0 may mean no parent."""
    return int.from_bytes(block_hash[:8], "big") or 1


def chain_hash(keyed: hashlib.blake2b, parent: bytes, content: bytes) -> bytes:
    """Computes the hash of a block from its parent's; `keyed` has read the key."""
    result = keyed.copy()
    result.update(parent)
    result.update(content)
    return result.digest()


def namespace_root(namespace: int, names: Namespaces, loras: Mapping[int, str], model: str | None, key: bytes) -> bytes:
    """Computes the root hash of a namespace."""
    if namespace not in names:
        raise ValueError(f"names: got no entry for namespace {namespace}, wanted the Namespaces that issued it")
    salt, lora = names.describe(namespace)
    name = None if lora is None else loras.get(lora)
    if name is None and lora is not None:  # None stands for the model without an adapter
        raise ValueError(f"loras: got no name for adapter {lora}, wanted a name for each adapter in use")
    return root_hash(model, salt, name, key=key)


def checked_loras(argument: str, loras: Mapping[int, str] | None) -> dict[int, str]:
    """Returns {adapter number: name}; all names must differ."""
    names = dict(loras or {})
    if len(set(names.values())) < len(names):
        raise ValueError(f"{argument}: got {names}, wanted a different name for each adapter")
    return names


def encoded(name: str, value: str, wanted: str = "text") -> bytes:
    """Encodes a text as UTF-8, or raises a ValueError with the argument's name."""
    try:
        return value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise ValueError(f"{name}: got {value!r}, wanted {wanted}") from error


def hasher(person: bytes, key: bytes = b"", content: bytes = b"") -> hashlib.blake2b:
    """Makes a BLAKE2b hasher with a personalisation string, which has read a key and some content."""
    if not isinstance(key, bytes) or len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        got = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"  # never shows a secret
        raise ValueError(f"key: got {got}, wanted at most {hashlib.blake2b.MAX_KEY_SIZE} bytes")
    return hashlib.blake2b(content, digest_size=HASH_BYTES, key=key, person=person)


class Hashing:
    """Hashes the rows of an index's table. Objects with equal arguments are equal, so they can share a pass.

    Args:
      names: the `Namespaces` of the cache. Blocks of other namespaces are not published. None means that all prompts
        have namespace 0.
      lora_names: adapter number to name. The name of an adapter without an entry is its number.
      model: a text, part of all hashes; see `root_hash`.
      key: a secret of at most 64 bytes, the same on all replicas. Without it nobody can make or probe hashes.
    """

    def __init__(self, names: Namespaces | None, lora_names: Mapping[int, str] | None, model: str | None, key: bytes):
        self._names = Namespaces() if names is None else names
        self._loras = checked_loras("lora_names", lora_names)
        self._model = model
        self._key = key
        self._hasher = hasher(b"kvjax-block", key)
        self._equal = names and id(names), tuple(sorted(self._loras.items())), model, key
        root_hash(model)  # raises an error unless it is a text

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._equal == other._equal

    def space(self, namespace: int) -> Space:
        """Describes a namespace, with the flag UNKNOWN if it was not issued yet."""
        if namespace not in self._names:
            return Space(_NONE, col.UNKNOWN)
        salt, lora = self._names.describe(namespace)
        name = None if lora is None else self._loras.get(lora, str(lora))
        root = root_hash(self._model, salt, name, key=self._key)
        flags = col.SALT * (salt is not None) | col.LORA * (name is not None)
        return Space(root, flags, salt, lora, name)

    def hash(self, rows: np.ndarray, among: list[int], size: int, hashes: set[int], spaces: dict[int, Space]) -> None:
        """Writes the flags and hashes of stored rows, and adds the hashes to the group's hashes.

        Args:
          rows: i32[n, W]; the rows, with the parent's flags and hash where the parent is not in `rows`.
          among: the index of each row's parent in `rows`, which comes before its children, or -1.
          size: P.
          hashes: the hashes of the group's blocks.
          spaces: a `Space` for each namespace. Namespaces of the rows are added.
        """
        flags = self._flags(rows, size, spaces)
        digests = []
        parents = []
        start = 0
        data = np.ascontiguousarray(rows[:, col.ABOVE :]).tobytes()
        width = _WORD * (rows.shape[1] - col.ABOVE)
        for index, (parent, fill) in enumerate(zip(among, rows[:, col.FILL].tolist(), strict=True)):
            parent_hash = data[start : start + HASH_BYTES] if parent < 0 else digests[parent]
            flags[index] |= flags[parent] if parent >= 0 else 0
            if flags[index] & col.UNKNOWN:
                digests.append(_NONE)
            else:
                content = data[start + HASH_BYTES : start + width]
                content = content if fill == size else _cut(content, fill, size)
                digests.append(chain_hash(self._hasher, parent_hash, content))
            parents.append(parent_hash)
            start += width
        rows[:, col.HASH : col.ABOVE] = np.frombuffer(b"".join(digests), np.int32).reshape(-1, 4)
        rows[:, col.ABOVE : col.SIZE] = np.frombuffer(b"".join(parents), np.int32).reshape(-1, 4)
        rows[:, col.FLAGS] = flags
        self._find_collisions(rows, among, hashes)

    def _find_collisions(self, rows: np.ndarray, among: list[int], hashes: set[int]) -> None:
        """Flags rows whose 64 bits belong to another block, and their descendants. The first block keeps its hash."""
        firsts = col.hashes_of(rows).tolist()
        flags = rows[:, col.FLAGS]
        new = set(firsts)
        if len(new) < len(firsts) or not hashes.isdisjoint(new) or np.any(flags & (col.UNKNOWN | col.COLLISION)):
            for index, (first, parent) in enumerate(zip(firsts, among, strict=True)):
                flags[index] |= flags[parent] & col.COLLISION if parent >= 0 else 0
                if not flags[index] & (col.UNKNOWN | col.COLLISION):
                    flags[index] |= col.COLLISION * (first in hashes)
                    hashes.add(first)
        else:
            hashes |= new

    def forget(self, rows: np.ndarray, hashes: set[int]) -> None:
        """Removes the hashes of removed rows from the group's hashes."""
        is_published = rows[:, col.FLAGS] & (col.UNKNOWN | col.COLLISION) == 0
        hashes.difference_update(col.hashes_of(rows[is_published]).tolist())

    def _flags(self, rows: np.ndarray, size: int, spaces: dict[int, Space]) -> list[int]:
        """Returns the flags of rows without their parents' flags, and writes the hashes of empty prefixes."""
        flags = rows[:, col.FLAGS].copy()
        roots = np.flatnonzero(rows[:, col.PARENT] < 0)
        for namespace in set(rows[roots, col.NAMESPACE].tolist()):
            in_namespace = roots[rows[roots, col.NAMESPACE] == namespace]
            if (space := spaces.get(namespace) or self.space(namespace)).flags != col.UNKNOWN:
                spaces[namespace] = space
            rows[in_namespace, col.ABOVE : col.SIZE] = np.frombuffer(space.root, np.int32)
            flags[in_namespace] = space.flags
        flags |= np.where(rows[:, col.TEXT + size :].any(axis=1), col.EXTRA, 0)
        flags |= np.where(rows[:, col.FILL] < size, col.PARTIAL, 0)
        return flags.tolist()


def _cut(content: bytes, fill: int, size: int) -> bytes:
    """Cuts the content of a whole block to its first `fill` tokens."""
    starts = range(_WORD, len(content), _WORD * size)
    return fill.to_bytes(_WORD, "little") + b"".join(content[start : start + _WORD * fill] for start in starts)
