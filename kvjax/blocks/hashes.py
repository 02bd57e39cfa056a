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

HASH_BYTES = 16


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
