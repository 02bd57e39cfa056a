# SPDX-License-Identifier: Apache-2.0
"""The one format of a stored block: the K/V that a group has of it are a value, under a name.

    name    <layout>-<group>-<bytes>/<hash>      16 hexadecimal digits, two numbers, 32 hexadecimal digits
    value   magic, version, group; hashes of the layout, of the parent and of the block
            number of tokens; tokens; extra ids; zeros up to the size of a whole block's
            the words of each array of the block, in the order of `leaves_of`; zeros after the last token
            crc32 of all this, u32                                                           all little-endian

A name has all that the bytes depend on. In <layout> are the version of this format, the dtype of the K/V and the rest
of `layout_of`. In <hash> are the model and the version of its weights, the salt, the name of the LoRA and all tokens
(`blocks/hashes.py`). A hash is not trusted: a value counts only if all that stands before its words is as expected.

`DiskStore` writes values one by one. `save` writes them one after the other: all values of a group have one size.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.blocks.hashes import chain_hash, hasher
from kvjax.spec import CacheSpec
from kvjax.state import Text
from kvjax.stores.layout import layout_of, leaves_of

VERSION = 2
_MAGIC = b"kvjaxblk"
_CRC = 4
_WORD = 4
_NAME = re.compile(r"[0-9a-f]{16}-[0-9]+-([0-9]{1,18})/[0-9a-f]{32}")


class Block(NamedTuple):
    """A block of a prefix, by its contents.

    Attributes:
      parent: the hash of the prefix before it.
      hash: the hash of the prefix that ends with it.
      text: its tokens, then its extra ids if the spec has them; i32, little-endian.
    """

    parent: bytes
    hash: bytes
    text: bytes


class Values:
    """The names and values of the blocks of one layout.

    Attributes:
      sizes: the bytes of a value of each group.
    """

    def __init__(self, spec: CacheSpec, key: bytes = b""):
        """`key` is a secret, without which the names cannot be computed."""
        layout = json.dumps([VERSION, layout_of(spec)], sort_keys=True).encode()
        self.spec = spec
        self.layout = hashlib.blake2b(layout, digest_size=8, person=b"kvjax-layout").digest()
        self._hasher = hasher(b"kvjax-block", key)
        self._words_per_token = 1 + spec.extra_ids
        self._leaves = [leaves_of(spec, number) for number in range(len(spec.groups))]
        start = len(self._head(Block(bytes(16), bytes(16), b""), 0))
        self.sizes = [start + sum(leaf.num_bytes for leaf in leaves) + _CRC for leaves in self._leaves]
        self._folders = [f"{self.layout.hex()}-{number}-{size}" for number, size in enumerate(self.sizes)]

    def has_bytes(self, number: int) -> bool:
        """Whether the blocks of a group have any K/V."""
        return bool(self._leaves[number])

    def name(self, block: Block, number: int) -> str:
        """The name of a block's value of one group."""
        return f"{self._folders[number]}/{block.hash.hex()}"

    def block(self, parent: bytes, text: bytes) -> Block:
        """The block with this text after a prefix."""
        return Block(parent, chain_hash(self._hasher, parent, self._counted(text)), text)

    def blocks(self, root: bytes, prompt: Text) -> list[Block]:
        """The whole blocks of a prompt i32[n] whose empty prefix has the hash `root`."""
        size = self.spec.block_size
        parts = prompt.parts().values()
        whole = len(prompt.tokens) // size
        words = np.stack([np.asarray(part[: whole * size], "<i4").reshape(whole, size) for part in parts], axis=1)
        found: list[Block] = []
        for text in words:
            found.append(self.block(found[-1].hash if found else root, text.tobytes()))
        return found

    def starts(self, exists: np.ndarray) -> np.ndarray:
        """i64[G, n]; where the values of blocks bool[G, n] begin in a file that has them group by group."""
        sizes = np.array([[size * self.has_bytes(number)] for number, size in enumerate(self.sizes)], np.int64)
        return np.cumsum(exists * sizes).reshape(exists.shape) - exists * sizes

    def encode(self, block: Block, number: int, arrays: Sequence[np.ndarray]) -> list[Any]:
        """The value of a block with these arrays, of one group: parts, one after the other."""
        num_tokens = self._num_tokens(block.text)
        words = (leaf.words(array, num_tokens) for leaf, array in zip(self._leaves[number], arrays, strict=True))
        parts = [self._head(block, number), *words]
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        return [*parts, struct.pack("<I", crc)]

    def decode(self, block: Block, number: int, value: bytes) -> list[np.ndarray] | None:
        """The words of each array of a block, or None if the value is not of this block, or not whole."""
        head = self._head(block, number)
        if len(value) != self.sizes[number] or not value.startswith(head):
            return None
        whole = memoryview(value)
        if zlib.crc32(whole[:-_CRC]) != struct.unpack("<I", whole[-_CRC:])[0]:
            return None
        return list(self._words(value, len(head), number))

    def _words(self, value: bytes, start: int, number: int) -> Iterator[np.ndarray]:
        for leaf in self._leaves[number]:
            count = leaf.num_bytes // leaf.word.itemsize
            yield np.frombuffer(value, leaf.word, count, start).reshape(leaf.shape)
            start += leaf.num_bytes

    def _head(self, block: Block, number: int) -> bytes:
        described = _MAGIC, struct.pack("<II", VERSION, number), self.layout, block.parent, block.hash
        most = _WORD * (1 + self.spec.block_size * self._words_per_token)
        return b"".join(described) + self._counted(block.text).ljust(most, b"\0")

    def _counted(self, text: bytes) -> bytes:
        """A text after its number of tokens."""
        return struct.pack("<I", self._num_tokens(text)) + text

    def _num_tokens(self, text: bytes) -> int:
        return len(text) // (_WORD * self._words_per_token)


def size_of(name: str) -> int | None:
    """The bytes of the value of this name; None if it is no value's."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None
