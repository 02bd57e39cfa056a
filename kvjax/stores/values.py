# SPDX-License-Identifier: Apache-2.0
"""The format of a stored block: a value, with a name, for the block's K/V in each group.

    name    <layout>-<group>-<bytes>/<hash>      16 hexadecimal digits, two numbers, 32 hexadecimal digits
    value   magic, version, group; hashes of the layout, of the parent and of the block
            number of tokens; tokens; extra ids; zeros up to the size of a whole block's
            the words of each array of the block, in the order of `leaves_of`; zeros after the last token
            crc32 of all this, u32                                                           all little-endian

The name contains everything on which the bytes depend. <layout> covers the version of this format, the dtype of the K/V
and the rest of `layout_of`. <hash> covers the model and the version of its weights, the salt, the name of the LoRA and
all tokens (`blocks/hashes.py`). A hash is not trusted: a value is valid only if all fields before its words are as
expected.

`DiskStore` writes each value separately. `save` writes them in a single file: all values of a group have the same size.
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
    """A block of a prefix, identified by its contents.

    Attributes:
      parent: the hash of the prefix before the block.
      hash: the hash of the prefix including the block.
      text: the block's tokens, then its extra ids if the spec has them; i32, little-endian.
    """

    parent: bytes
    hash: bytes
    text: bytes


class Values:
    """The names and values of the blocks of a layout.

    Attributes:
      sizes: the size in bytes of a value of each group.
    """

    def __init__(self, spec: CacheSpec, key: bytes = b""):
        """`key` is a secret. Without it the names cannot be computed."""
        layout = json.dumps([VERSION, layout_of(spec)], sort_keys=True).encode()
        self.spec = spec
        self.layout = hashlib.blake2b(layout, digest_size=8, person=b"kvjax-layout").digest()
        self._hasher = hasher(b"kvjax-block", key)
        self._words_per_token = 1 + spec.extra_ids
        self._leaves = [leaves_of(spec, group_index) for group_index in range(len(spec.groups))]
        start = len(self._head(Block(bytes(16), bytes(16), b""), 0))
        self.sizes = [start + sum(leaf.num_bytes for leaf in leaves) + _CRC for leaves in self._leaves]
        self._folders = [f"{self.layout.hex()}-{group_index}-{size}" for group_index, size in enumerate(self.sizes)]

    def has_bytes(self, group_index: int) -> bool:
        """Whether the blocks of a group have any K/V."""
        return bool(self._leaves[group_index])

    def name(self, block: Block, group_index: int) -> str:
        """The name of a block's value of a group."""
        return f"{self._folders[group_index]}/{block.hash.hex()}"

    def block(self, parent: bytes, text: bytes) -> Block:
        """Makes the block with this text, whose parent has the hash `parent`."""
        return Block(parent, chain_hash(self._hasher, parent, self._counted(text)), text)

    def blocks(self, root: bytes, prompt: Text) -> list[Block]:
        """The whole blocks of a prompt i32[n]. `root` is the hash of its empty prefix."""
        block_size = self.spec.block_size
        parts = prompt.parts().values()
        num_blocks = len(prompt.tokens) // block_size
        words = np.stack(
            [np.asarray(part[: num_blocks * block_size], "<i4").reshape(num_blocks, block_size) for part in parts],
            axis=1,
        )
        blocks: list[Block] = []
        for text in words:
            blocks.append(self.block(blocks[-1].hash if blocks else root, text.tobytes()))
        return blocks

    def starts(self, exists: np.ndarray) -> np.ndarray:
        """The positions i64[G, n] of the values of blocks bool[G, n] in a file with the values group by group."""
        sizes = np.array(
            [[size * self.has_bytes(group_index)] for group_index, size in enumerate(self.sizes)], np.int64
        )
        return np.cumsum(exists * sizes).reshape(exists.shape) - exists * sizes

    def encode(self, block: Block, group_index: int, arrays: Sequence[np.ndarray]) -> list[Any]:
        """The value of a block with these arrays of a group, as parts to be concatenated."""
        num_tokens = self._num_tokens(block.text)
        words = (leaf.words(array, num_tokens) for leaf, array in zip(self._leaves[group_index], arrays, strict=True))
        parts = [self._head(block, group_index), *words]
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        return [*parts, struct.pack("<I", crc)]

    def decode(self, block: Block, group_index: int, value: bytes) -> list[np.ndarray] | None:
        """The words of each array of a block, or None if the value is not of this block or is broken."""
        head = self._head(block, group_index)
        if len(value) != self.sizes[group_index] or not value.startswith(head):
            return None
        view = memoryview(value)
        if zlib.crc32(view[:-_CRC]) != struct.unpack("<I", view[-_CRC:])[0]:
            return None
        return list(self._words(value, len(head), group_index))

    def _words(self, value: bytes, start: int, group_index: int) -> Iterator[np.ndarray]:
        for leaf in self._leaves[group_index]:
            count = leaf.num_bytes // leaf.word.itemsize
            yield np.frombuffer(value, leaf.word, count, start).reshape(leaf.shape)
            start += leaf.num_bytes

    def _head(self, block: Block, group_index: int) -> bytes:
        fields = _MAGIC, struct.pack("<II", VERSION, group_index), self.layout, block.parent, block.hash
        text_size = _WORD * (1 + self.spec.block_size * self._words_per_token)
        return b"".join(fields) + self._counted(block.text).ljust(text_size, b"\0")

    def _counted(self, text: bytes) -> bytes:
        """A text with its number of tokens in front."""
        return struct.pack("<I", self._num_tokens(text)) + text

    def _num_tokens(self, text: bytes) -> int:
        return len(text) // (_WORD * self._words_per_token)


def size_of(name: str) -> int | None:
    """The size in bytes of the value with this name, or None if the name is not a value's."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None
