# SPDX-License-Identifier: Apache-2.0
"""The values of a store: a whole block of one group each, under a name that is made of its contents.

    name    <layout>-<group>-<bytes>/<hash>      16 hexadecimal digits, two numbers, 32 hexadecimal digits
    value   magic, version, group; hashes of the layout, of the parent and of the block; tokens; extra ids
            the words of each array of the block, in the order of `leaves_of`
            crc32 of all this, u32                                                           all little-endian

A hash is not trusted: a value counts only if all that stands before its words is what it has to be.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.blocks.hashes import chain_hash, hasher
from kvjax.spec import CacheSpec
from kvjax.state import Text
from kvjax.stores.layout import layout_of, leaves_of

VERSION = 1
_MAGIC, _CRC = b"kvjaxblk", 4
_NAME = re.compile(r"[0-9a-f]{16}-[0-9]+-([0-9]{1,18})/[0-9a-f]{32}")


class Block(NamedTuple):
    """A whole block of a prefix, by its contents.

    Attributes:
      parent: the hash of the prefix before it.
      hash: the hash of the prefix that ends with it.
      text: its tokens, then its extra ids if the spec has them; i32, little-endian.
    """

    parent: bytes
    hash: bytes
    text: bytes


class Values:
    """The names and values of the blocks of one layout."""

    def __init__(self, spec: CacheSpec, key: bytes):
        layout = json.dumps(layout_of(spec), sort_keys=True).encode()
        self.spec, self.layout = spec, hashlib.blake2b(layout, digest_size=8, person=b"kvjax-layout").digest()
        self._hasher, self._tokens = hasher(b"kvjax-block", key), struct.pack("<I", spec.block_size)
        words = spec.block_size * (1 + spec.extra_ids)
        self._leaves = [leaves_of(spec, number) for number in range(len(spec.groups))]
        start = len(self._head(Block(bytes(16), bytes(16), bytes(4 * words)), 0))
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
        return Block(parent, chain_hash(self._hasher, parent, self._tokens + text), text)

    def blocks(self, root: bytes, prompt: Text) -> list[Block]:
        """The whole blocks of a prompt i32[n] whose empty prefix has the hash `root`."""
        size, parts = self.spec.block_size, prompt.parts().values()
        whole = len(prompt.tokens) // size
        words = np.stack([np.asarray(part[: whole * size], "<i4").reshape(whole, size) for part in parts], axis=1)
        found: list[Block] = []
        for text in words:
            found.append(self.block(found[-1].hash if found else root, text.tobytes()))
        return found

    def encode(self, block: Block, number: int, arrays: Sequence[np.ndarray]) -> bytes:
        """The value of a block with these arrays, of one group."""
        parts = [self._head(block, number), *(np.ascontiguousarray(array).view(np.uint8) for array in arrays)]
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        return b"".join([*parts, struct.pack("<I", crc)])

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
        described = _MAGIC, struct.pack("<II", VERSION, number), self.layout, block.parent, block.hash, block.text
        return b"".join(described)


def size_of(name: str) -> int | None:
    """The bytes of the value of this name; None if it is no value's."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None
