# SPDX-License-Identifier: Apache-2.0
"""The prefix index and the child index: two chained hash tables whose nodes are the blocks themselves.

The prefix index finds the block of a key. The child index finds the children of a parent with a given first token,
for reuse inside a block. Both use the same pair of link arrays (`state.Links`), so a batch of insertions or removals is
a single pass over both. Chains never lose an entry, however full the tables are. To remove n blocks that are neighbours
in a chain takes O(log n) steps, without a loop over single blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from kvjax._arrays import PAIRS, count, fence, leading, loop, mix, pick, put, some
from kvjax.blocks.keys import token_words
from kvjax.state import NO_BLOCK, Blocks, Links, Text
from pallas_kernels.loops import while_loop


def init_links(num_ids: int) -> Links:
    """Makes empty tables for B = num_ids block ids, each with the next power of two of buckets."""
    buckets = 1 << max(num_ids - 1, 1).bit_length()
    return Links(
        next=jnp.full((2 * num_ids + 2 * buckets,), -1, jnp.int32), prev=jnp.full((2 * num_ids,), -1, jnp.int32)
    )


def find(blocks: Blocks, links: Links, keys: jax.Array) -> jax.Array:
    """i32[K]; the findable block of each key u32[K, 2], unique by construction, or NO_BLOCK."""

    def differs(node):
        return (node >= 0) & some(pick(blocks.key, node) != keys)

    node = pick(links.next, key_bucket(links, keys))
    node, _ = while_loop(
        lambda carry: jnp.any(carry[1]),
        lambda carry: (n := jnp.where(carry[1], pick(links.next, carry[0]), carry[0]), differs(n)),
        (node, differs(node)),
    )
    return node


def longest_child(
    blocks: Blocks,
    links: Links,
    parent: jax.Array,
    text: Text,
    limit: jax.Array,
    usable: Callable[[jax.Array], jax.Array] = lambda block: block >= 0,
) -> tuple[jax.Array, jax.Array]:
    """Finds the child of `parent` i32[2] that shares the longest prefix with text i32[P].

    Only the first `limit` i32[] tokens count, and only findable children for which `usable(block)` holds. A parent is
    (block, generation), or (NO_BLOCK, namespace). Returns the child, NO_BLOCK if none shares a token, and the number of
    shared tokens.
    """
    num_ids, size = blocks.tokens.shape
    first = pick(links.next, child_bucket(links, parent, pick(text, 0)))

    def step(carry):
        node, best, shared = carry
        block = node - num_ids
        same = pick(blocks.text, block).equals(text)
        same = same & (np.arange(size, dtype=np.int32) < jnp.minimum(pick(blocks.fill, block), limit))
        is_child = jnp.all(pick(blocks.parent, block) == parent) & usable(block)
        length = jnp.where(is_child, leading(same), 0)
        better = length > shared
        return pick(links.next, node), jnp.where(better, block, best), jnp.where(better, length, shared)

    start = (jnp.where(limit > 0, first, -1), jnp.int32(NO_BLOCK), jnp.int32(0))
    _, best, shared = while_loop(lambda carry: (carry[0] >= 0) & (carry[2] < limit), step, start)
    return best, shared


def insert(links: Links, blocks: Blocks, ids: jax.Array, where: jax.Array) -> Links:
    """Links the blocks ids i32[K] (where bool[K]) into both tables, by their key, parent and first token."""
    num_ids = blocks.refcount.shape[0]
    ids = ids[::-1]
    where = where[::-1]  # so `longest_child` meets the newest of equally good blocks first
    first = pick(blocks.text, (ids, 0))
    buckets = [key_bucket(links, pick(blocks.key, ids)), child_bucket(links, pick(blocks.parent, ids), first)]
    nowhere = np.iinfo(np.int32).max
    bucket = jnp.where(jnp.concatenate([where, where]), jnp.concatenate(buckets), nowhere)
    node = jnp.concatenate([ids, ids + num_ids])
    # Entries of one bucket become a run in front of the bucket's old chain.
    if bucket.size <= PAIRS and pallas_kernels.lowers_for("cuda"):
        live = bucket != nowhere
        has_before, node_before, has_after, node_after = _neighbours(bucket, node)
    else:
        bucket, node = lax.sort((bucket, node), num_keys=1)
        live = bucket != nowhere
        joined = bucket[1:] == bucket[:-1]
        has_before, node_before = jnp.pad(joined, (1, 0)), jnp.roll(node, 1)
        has_after, node_after = jnp.pad(joined, (0, 1)), jnp.roll(node, -1)
    old = pick(links.next, bucket)
    links, old = fence(links, old)
    after = jnp.where(has_after, node_after, old)
    before = jnp.where(has_before, node_before, bucket)
    following = put(
        links.next,
        jnp.concatenate([node, bucket]),
        jnp.concatenate([after, node]),
        jnp.concatenate([live, live & ~has_before]),
    )
    preceding = put(links.prev, node, before, live)
    preceding = put(preceding, old, node, live & ~has_after & (old >= 0))
    return Links(next=following, prev=preceding)


def _neighbours(bucket: jax.Array, node: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Finds the entries before and after each of node i32[K] in bucket i32[K], by comparing each with each.

    Returns bool[K] and the node before i32[K], and bool[K] and the node after i32[K].
    """
    entry = jnp.arange(bucket.size, dtype=jnp.int32)
    same = bucket[:, None] == bucket[None]
    nearest_before = jnp.max(jnp.where(same & (entry[None] < entry[:, None]), entry[None], -1), axis=1)
    nearest_after = jnp.min(jnp.where(same & (entry[None] > entry[:, None]), entry[None], bucket.size), axis=1)
    return (
        nearest_before >= 0,
        pick(node, nearest_before),
        nearest_after < bucket.size,
        pick(node, nearest_after),
    )


def remove(links: Links, fill: jax.Array, ids: jax.Array, where: jax.Array) -> Links:
    """Unlinks the blocks ids i32[K] (where bool[K]) from both tables. Only these blocks have `fill` 0 already."""
    num_ids = fill.shape[0]
    node = jnp.concatenate([ids, ids + num_ids])
    where = jnp.concatenate([where, where])

    def leaves(x):
        return where & (x >= 0) & (x < 2 * num_ids) & (pick(fill, x % num_ids) == 0)

    def skip(carry):
        # Pointer doubling over neighbours that leave together: each block takes over its neighbour's target.
        following, preceding, _ = carry
        after = pick(following, node)
        before = pick(preceding, node)
        after = jnp.where(leaves(after), pick(following, after), after)
        before = jnp.where(leaves(before), pick(preceding, before), before)
        (following, preceding), after, before = fence((following, preceding), after, before)
        following = put(following, node, after, where)
        preceding = put(preceding, node, before, where)
        return following, preceding, jnp.any(leaves(after) | leaves(before))

    start = jnp.any(leaves(pick(links.next, node)) | leaves(pick(links.prev, node)))
    following, preceding, _ = loop(lambda carry: carry[2], skip, (links.next, links.prev, start))
    after = pick(following, node)
    before = pick(preceding, node)
    (following, preceding), after, before = fence((following, preceding), after, before)
    # All members of a run have the same two neighbours, and write the same values.
    return Links(
        next=put(following, before, after, where, unique=False),
        prev=put(preceding, after, before, where & (after >= 0), unique=False),
    )


def findable(blocks: Blocks) -> jax.Array:
    """i32[]; the number of findable blocks. It is a pass over all blocks, for tests and displays."""
    return count(blocks.fill > 0)


def key_bucket(links: Links, keys: jax.Array) -> jax.Array:
    """i32[...]; the index in `links.next` where the chain of each key u32[..., 2] begins."""
    num_handles, buckets = _sizes(links)
    return num_handles + (mix(keys[..., 0] ^ mix(keys[..., 1])) & np.uint32(buckets - 1)).astype(jnp.int32)


def child_bucket(links: Links, parent: jax.Array, first: Text) -> jax.Array:
    """i32[...]; the start of the chain of children of parent i32[..., 2] whose first token is `first` i32[...]."""
    num_handles, buckets = _sizes(links)
    words = parent.astype(jnp.uint32)
    mixed = mix(mix(words[..., 0] * np.uint32(0x9E3779B1) + words[..., 1]) + token_words(first))
    return num_handles + buckets + (mixed & np.uint32(buckets - 1)).astype(jnp.int32)


def _sizes(links: Links) -> tuple[int, int]:
    num_handles = links.prev.shape[0]
    return num_handles, (links.next.shape[0] - num_handles) // 2
