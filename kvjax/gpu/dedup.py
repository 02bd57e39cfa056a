# SPDX-License-Identifier: Apache-2.0
"""`blocks/dedup.py` in a kernel: which of the blocks that have just been filled equal others. Each row filled one."""

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
    """Blocks that a pass looks at, a lane each; other lanes say of row 0 what plain jax says of its padding."""

    inside: jax.Array  # bool; the lane belongs to the pass
    row: jax.Array  # i32; the block's row, one that exists
    column: jax.Array  # i32; its column there
    own: jax.Array  # i32; the block
    before: jax.Array  # i32; the block before it, or NO_BLOCK
    namespace: jax.Array  # i32; of the row
    where: jax.Array  # bool; the block was filled, and can become findable

    @classmethod
    def of(cls, memory: Memory, done: jax.Array, number: jax.Array, batch: int, size: np.int32) -> Filled:
        """The next `batch` of the `number` i32[] blocks in the queue, of which so many are done."""
        lane = numbered(lanes_of(batch))
        (rows, columns) = memory.shape("table")
        inside = lane < batch
        queued = inside & (done + lane < number)
        entry = memory.pick("queue", done + lane, queued)
        row = jnp.clip(memory.pick("rows", entry), 0, rows - 1)
        column = lax.div(memory.pick("start", entry), size)
        own = memory.pick("table", (row, jnp.minimum(column, columns - 1)))
        before = memory.pick("table", (row, jnp.minimum(column, columns) - 1), column > 0)
        before = jnp.where(column > 0, before, NO_BLOCK)
        findable = (before < 0) | (memory.pick("fill", before, before >= 0) > 0)
        return cls(inside, row, column, own, before, memory.pick("namespace", row), queued & findable)

    def link(self, memory: Memory) -> jax.Array:
        """The generation of the block before, or the row's namespace: with `before` the parent of the block."""
        return jnp.where(self.before >= 0, memory.pick("generation", self.before, self.before >= 0), self.namespace)


class Dedup(NamedTuple):
    """The outcome for them, as `blocks/dedup.Dedup`."""

    target: jax.Array
    publish: jax.Array
    merge: jax.Array
    first: jax.Array
    key: Key


def resolve(memory: Memory, filled: Filled, size: np.int32) -> Dedup:
    """`dedup.resolve`: to publish each block, or to merge it with an equal one, cached or filled just now."""
    own = filled.own
    before = filled.before
    namespace = filled.namespace
    where = filled.where
    key = key_of(memory, filled, size)
    found = _find(memory, key, where)
    digest = (mix(key[0] ^ mix(key[1])) >> np.uint32(1)).astype(jnp.int32)
    lane = numbered(own.shape[0])
    earliest = jnp.where(where, peers(memory, digest, where, "first").first, lane)
    equal = [_signed(part) for part in key]
    link = filled.link(memory)
    duplicate, *others = exchange(memory, earliest, own, *equal, before, namespace)

    # So far equal keys counted as equal contents; now compare.
    is_cached = where & (found >= 0)
    as_found = is_cached & (memory.pick("fill", found, is_cached) == size)
    for number, its in enumerate((before, link)):
        as_found &= memory.pick("parent", (found, number), is_cached) == its
    as_duplicate = where & ~is_cached
    for value, its in zip((*equal, before, namespace), others, strict=True):
        as_duplicate &= value == its
    other = jnp.where(is_cached, found, duplicate)
    broken = where & ~((as_found | as_duplicate) & _same_text(memory, own, other, as_found | as_duplicate, size))
    (of_duplicate,) = exchange(memory, earliest, broken.astype(jnp.int32))
    good = where & ~broken & (of_duplicate == 0)  # a block that depends on a broken one is broken
    first = earliest == lane
    return Dedup(other, good & ~is_cached & first, good & (other != own), first, key)


def key_of(memory: Memory, filled: Filled, size: np.int32) -> Key:
    """The key of each block, where it was filled (`keys.prefix_keys`)."""
    own = filled.own[:, None]
    where = filled.where[:, None]
    width = min(memory.tile(own.shape[0]), lanes_of(int(size)))
    memory.settle(*TEXT)

    def step(i: jax.Array, content: Key) -> Key:
        position = (i * width + numbered(width))[None]
        counts = where & (position < size)
        words = token_words(text_at(memory, own, position, counts))
        parts = [content_words(words, position.astype(jnp.uint32), lane) for lane in LANES]
        mixed = [_signed(jnp.where(counts, part, np.uint32(0))) for part in parts]
        total = [jnp.sum(part, axis=1, dtype=jnp.int32) for part in mixed]
        return content[0] + _unsigned(total[0]), content[1] + _unsigned(total[1])

    none = jnp.zeros(own.shape[:1], jnp.uint32)
    contents = lax.fori_loop(np.int32(0), np.int32(-(-int(size) // width)), step, (none, none))
    has_before = filled.where & (filled.before >= 0)
    position_words = block_words(filled.column, jnp.full_like(filled.column, size))
    keys = []
    for number, (content, lane) in enumerate(zip(contents, LANES, strict=True)):
        root = mix(filled.namespace.astype(jnp.uint32) + lane)
        start = jnp.where(has_before, memory.pick("key", (filled.before, number), has_before), root)
        keys.append(start + mix(content ^ mix(position_words + lane)))
    return keys[0], keys[1]


def _find(memory: Memory, key: Key, where: jax.Array) -> jax.Array:
    """`index.find`, where bool[lanes]; else NO_BLOCK."""

    def differs(node: jax.Array) -> jax.Array:
        inside = node >= 0
        first, second = (memory.pick("key", (node, number), inside) for number in (0, 1))
        return inside & ((first != key[0]) | (second != key[1]))

    def follow(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        node, wrong = carry
        node = jnp.where(wrong, memory.pick("next", node, wrong), node)
        return node, differs(node)

    node = jnp.where(where, memory.pick("next", key_bucket(memory, key), where), NO_BLOCK)
    return lax.while_loop(lambda carry: count(carry[1]) > 0, follow, (node, differs(node)))[0]


def key_bucket(memory: Memory, key: Key) -> jax.Array:
    """`index.key_bucket`."""
    handles, buckets = table_sizes(memory)
    return handles + _signed(index.mix(key[0] ^ index.mix(key[1])) & np.uint32(buckets - 1))


def table_sizes(memory: Memory) -> tuple[int, int]:
    """Handles of both tables together, and buckets of each."""
    (handles,) = memory.shape("prev")
    return handles, (memory.shape("next")[0] - handles) // 2


def _same_text(memory: Memory, one: jax.Array, other: jax.Array, where: jax.Array, size: np.int32) -> jax.Array:
    """bool[lanes]; whether two blocks have equal text, where bool[lanes]."""
    one = one[:, None]
    other = other[:, None]
    where = where[:, None]
    width = min(memory.tile(one.shape[0]), lanes_of(int(size)))

    def step(i: jax.Array, different: jax.Array) -> jax.Array:
        position = (i * width + numbered(width))[None]
        counts = where & (position < size)
        same = text_at(memory, one, position, counts).equals(text_at(memory, other, position, counts))
        return different + jnp.sum((~same).astype(jnp.int32), axis=1, dtype=jnp.int32)

    start = jnp.zeros(one.shape[:1], jnp.int32)
    return lax.fori_loop(np.int32(0), np.int32(-(-int(size) // width)), step, start) == 0


def text_at(memory: Memory, block: jax.Array, position: jax.Array | int, where: jax.Array) -> Text:
    """The text of blocks i32[...] at positions i32[...], where bool[...]."""
    parts = {name: memory.pick(name, (block, position), where) for name in TEXT if name in memory}
    return Text(**{"extra_ids": None, **parts})


def _signed(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _unsigned(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)
