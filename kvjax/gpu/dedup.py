# SPDX-License-Identifier: Apache-2.0
"""`blocks/dedup.py` in a kernel: finds newly filled blocks that equal others. Each row has filled a single block."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import mix
from kvjax.blocks import index
from kvjax.blocks.keys import LANES, block_words, content_words, token_words
from kvjax.gpu.lanes import count, exchange, lanes_of, numbered, peers
from kvjax.gpu.memory import TEXT, Memory
from kvjax.state import NO_BLOCK, Text

Key = tuple[jax.Array, jax.Array]  # u32[lanes] each


class Filled(NamedTuple):
    """The blocks of a pass, a lane each. Other lanes have the values of row 0, like the padding of plain jax."""

    inside: jax.Array  # bool; whether the lane belongs to the pass
    row: jax.Array  # i32; the block's row, always valid
    column: jax.Array  # i32; the block's column in the row's table
    block: jax.Array  # i32; the block's id
    before: jax.Array  # i32; the block before it, or NO_BLOCK
    namespace: jax.Array  # i32; the row's namespace
    where: jax.Array  # bool; whether the block was filled, and can become findable

    @classmethod
    def of(cls, memory: Memory, done: jax.Array, num_filled: jax.Array, batch: int, size: np.int32) -> Filled:
        """The next `batch` of the `num_filled` i32[] blocks in the queue, after `done` blocks."""
        lane = numbered(lanes_of(batch))
        (rows, columns) = memory.shape("table")
        inside = lane < batch
        queued = inside & (done + lane < num_filled)
        queued_row = memory.pick("queue", done + lane, queued)
        row = jnp.clip(memory.pick("rows", queued_row), 0, rows - 1)
        column = lax.div(memory.pick("start", queued_row), size)
        block = memory.pick("table", (row, jnp.minimum(column, columns - 1)))
        before = memory.pick("table", (row, jnp.minimum(column, columns) - 1), column > 0)
        before = jnp.where(column > 0, before, NO_BLOCK)
        findable = (before < 0) | (memory.pick("fill", before, before >= 0) > 0)
        return cls(inside, row, column, block, before, memory.pick("namespace", row), queued & findable)

    def link(self, memory: Memory) -> jax.Array:
        """The generation of the block before, or the row's namespace. With `before` it is the block's parent."""
        return jnp.where(self.before >= 0, memory.pick("generation", self.before, self.before >= 0), self.namespace)


class Dedup(NamedTuple):
    """The outcome for each block, as in `blocks/dedup.Dedup`."""

    target: jax.Array
    publish: jax.Array
    merge: jax.Array
    first: jax.Array
    key: Key


def resolve(memory: Memory, filled: Filled, size: np.int32) -> Dedup:
    """Decides as `dedup.resolve` to publish each block, or to merge it with an equal block, cached or just filled."""
    block = filled.block
    before = filled.before
    namespace = filled.namespace
    where = filled.where
    key = key_of(memory, filled, size)
    cached_block = _find(memory, key, where)
    digest = (mix(key[0] ^ mix(key[1])) >> np.uint32(1)).astype(jnp.int32)
    lane = numbered(block.shape[0])
    earliest = jnp.where(where, peers(memory, digest, where, "first").first, lane)
    key_parts = [_signed(part) for part in key]
    link = filled.link(memory)
    duplicate, *duplicate_values = exchange(memory, earliest, block, *key_parts, before, namespace)

    # So far equal keys counted as equal contents. Now compare the contents.
    is_cached = where & (cached_block >= 0)
    matches_cached = is_cached & (memory.pick("fill", cached_block, is_cached) == size)
    for i, parent_part in enumerate((before, link)):
        matches_cached &= memory.pick("parent", (cached_block, i), is_cached) == parent_part
    matches_duplicate = where & ~is_cached
    for value, duplicate_value in zip((*key_parts, before, namespace), duplicate_values, strict=True):
        matches_duplicate &= value == duplicate_value
    target = jnp.where(is_cached, cached_block, duplicate)
    broken = where & ~(
        (matches_cached | matches_duplicate)
        & _same_text(memory, block, target, matches_cached | matches_duplicate, size)
    )
    (duplicate_broken,) = exchange(memory, earliest, broken.astype(jnp.int32))
    is_valid = where & ~broken & (duplicate_broken == 0)  # a block that depends on a broken block is broken
    first = earliest == lane
    return Dedup(target, is_valid & ~is_cached & first, is_valid & (target != block), first, key)


def key_of(memory: Memory, filled: Filled, size: np.int32) -> Key:
    """The key of each filled block (`keys.prefix_keys`)."""
    block = filled.block[:, None]
    where = filled.where[:, None]
    width = min(memory.tile(block.shape[0]), lanes_of(int(size)))
    memory.settle(*TEXT)

    def step(i: jax.Array, content: Key) -> Key:
        position = (i * width + numbered(width))[None]
        is_token = where & (position < size)
        words = token_words(text_at(memory, block, position, is_token))
        parts = [content_words(words, position.astype(jnp.uint32), lane) for lane in LANES]
        mixed = [_signed(jnp.where(is_token, part, np.uint32(0))) for part in parts]
        total = [jnp.sum(part, axis=1, dtype=jnp.int32) for part in mixed]
        return content[0] + _unsigned(total[0]), content[1] + _unsigned(total[1])

    zeros = jnp.zeros(block.shape[:1], jnp.uint32)
    contents = lax.fori_loop(np.int32(0), np.int32(-(-int(size) // width)), step, (zeros, zeros))
    has_before = filled.where & (filled.before >= 0)
    position_words = block_words(filled.column, jnp.full_like(filled.column, size))
    keys = []
    for key_index, (content, lane) in enumerate(zip(contents, LANES, strict=True)):
        root = mix(filled.namespace.astype(jnp.uint32) + lane)
        start = jnp.where(has_before, memory.pick("key", (filled.before, key_index), has_before), root)
        keys.append(start + mix(content ^ mix(position_words + lane)))
    return keys[0], keys[1]


def _find(memory: Memory, key: Key, where: jax.Array) -> jax.Array:
    """`index.find`, where bool[lanes]. NO_BLOCK for other lanes."""

    def differs(node: jax.Array) -> jax.Array:
        inside = node >= 0
        first, second = (memory.pick("key", (node, i), inside) for i in (0, 1))
        return inside & ((first != key[0]) | (second != key[1]))

    def follow(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        node, is_different = carry
        node = jnp.where(is_different, memory.pick("next", node, is_different), node)
        return node, differs(node)

    node = jnp.where(where, memory.pick("next", key_bucket(memory, key), where), NO_BLOCK)
    return lax.while_loop(lambda carry: count(carry[1]) > 0, follow, (node, differs(node)))[0]


def key_bucket(memory: Memory, key: Key) -> jax.Array:
    """`index.key_bucket`."""
    handles, buckets = table_sizes(memory)
    return handles + _signed(index.mix(key[0] ^ index.mix(key[1])) & np.uint32(buckets - 1))


def table_sizes(memory: Memory) -> tuple[int, int]:
    """The number of handles in both tables, and of buckets in each table."""
    (handles,) = memory.shape("prev")
    return handles, (memory.shape("next")[0] - handles) // 2


def _same_text(memory: Memory, block: jax.Array, other_block: jax.Array, where: jax.Array, size: np.int32) -> jax.Array:
    """bool[lanes]; whether two blocks have equal text, where bool[lanes]."""
    block = block[:, None]
    other_block = other_block[:, None]
    where = where[:, None]
    width = min(memory.tile(block.shape[0]), lanes_of(int(size)))

    def step(i: jax.Array, different: jax.Array) -> jax.Array:
        position = (i * width + numbered(width))[None]
        is_token = where & (position < size)
        same = text_at(memory, block, position, is_token).equals(text_at(memory, other_block, position, is_token))
        return different + jnp.sum((~same).astype(jnp.int32), axis=1, dtype=jnp.int32)

    start = jnp.zeros(block.shape[:1], jnp.int32)
    return lax.fori_loop(np.int32(0), np.int32(-(-int(size) // width)), step, start) == 0


def text_at(memory: Memory, block: jax.Array, position: jax.Array | int, where: jax.Array) -> Text:
    """The text of blocks i32[...] at positions i32[...], where bool[...]."""
    parts = {name: memory.pick(name, (block, position), where) for name in TEXT if name in memory}
    return Text(**{"extra_ids": None, **parts})


def _signed(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _unsigned(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)
