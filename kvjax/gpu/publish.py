# SPDX-License-Identifier: Apache-2.0
"""`blocks/publish.publish` and `holders.merge` in a kernel: filled blocks become findable, or are merged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.blocks import index
from kvjax.blocks.keys import token_words
from kvjax.gpu.dedup import Dedup, Filled, key_bucket, table_sizes, text_at
from kvjax.gpu.lanes import add, count, exchange, peers, rank
from kvjax.gpu.memory import Memory


def publish(memory: Memory, filled: Filled, dedup: Dedup, size: np.int32) -> None:
    """Makes blocks findable, as decided by `dedup`."""
    block = filled.block
    before = filled.before
    where = dedup.publish
    memory.put("generation", block, memory.pick("generation", block, where) + 1, where)
    values = {"fill": size, "depth": filled.column, "hits": 0}
    for name, value in values.items():
        memory.put(name, block, value, where)
    clock = memory.number("clock")
    memory.put("stored", block, clock + rank(where), where)
    memory.set_number("clock", clock + count(where))
    pairs = {"key": dedup.key, "parent": (before, filled.link(memory))}
    for name, pair in pairs.items():
        for i, value in enumerate(pair):
            memory.put(name, (block, i), value, where)
    add(memory, ("children",), before, 1, where & (before >= 0))
    _insert(memory, block, key_bucket(memory, dedup.key), 0, where)
    _insert(memory, block, _child_bucket(memory, filled, where), memory.shape("fill")[0], where)


def _insert(memory: Memory, ids: jax.Array, bucket: jax.Array, offset: int, where: jax.Array) -> None:
    """`index.insert` for either table. Its handles are block ids plus `offset`.

    The blocks of a bucket become a run in front of its old chain, the last block first.
    """
    neighbours = peers(memory, bucket, where, "before", "after")
    lanes = ids.shape[0]
    node = ids + offset
    (following,) = exchange(memory, jnp.maximum(neighbours.before, 0), node)
    (preceding,) = exchange(memory, jnp.minimum(neighbours.after, lanes - 1), node)
    is_end = where & (neighbours.before < 0)
    is_begin = where & neighbours.last
    old_head = memory.pick("next", bucket, is_end)
    memory.put("next", node, jnp.where(is_end, old_head, following), where)
    memory.put("next", bucket, node, is_begin)
    memory.put("prev", node, jnp.where(is_begin, bucket, preceding), where)
    memory.put("prev", old_head, node, is_end & (old_head >= 0))


def _child_bucket(memory: Memory, filled: Filled, where: jax.Array) -> jax.Array:
    """`index.child_bucket`."""
    handles, buckets = table_sizes(memory)
    parent = [word.astype(jnp.uint32) for word in (filled.before, filled.link(memory))]
    first = token_words(text_at(memory, filled.block, 0, where))
    mixed = index.mix(index.mix(parent[0] * np.uint32(0x9E3779B1) + parent[1]) + first)
    return handles + buckets + (mixed & np.uint32(buckets - 1)).astype(jnp.int32)


def merge(memory: Memory, filled: Filled, dedup: Dedup) -> None:
    """Moves rows from newly filled blocks to equal blocks. The filled blocks have no other holder, and become empty."""
    block = filled.block
    target = dedup.target
    where = dedup.merge
    unheld = count(where & dedup.first & (memory.pick("refcount", target, where) == 0))
    memory.set_number("num_cached", memory.number("num_cached") - unheld)
    add(memory, ("refcount", "hits"), target, 1, where)
    memory.put("refcount", block, 0, where)
    num_empty = memory.number("num_empty")
    memory.put("empty", num_empty + rank(where), block, where)
    memory.set_number("num_empty", num_empty + count(where))
    memory.put("table", (filled.row, filled.column), target, where)
