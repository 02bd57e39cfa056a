# SPDX-License-Identifier: Apache-2.0
"""Finds cached blocks that equal newly filled blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from kvjax._arrays import PAIRS, Pytree, every, mix, pick, put
from kvjax.blocks import index
from kvjax.blocks.keys import prefix_keys, root_key
from kvjax.state import NO_BLOCK, Blocks, Group, Sequences, Text
from pallas_kernels.loops import while_loop


def link(blocks: Blocks, block: jax.Array, namespace: jax.Array) -> jax.Array:
    """i32[..., 2]; the node of each block i32[...], or the root of `namespace` for NO_BLOCK."""
    return jnp.stack([block, jnp.where(block >= 0, pick(blocks.generation, block), namespace)], axis=-1)


def same_content(blocks: Blocks, ids: jax.Array, text: Text, fill: jax.Array | None = None) -> jax.Array:
    """bool[...]; whether ids are findable blocks of this text i32[..., P], or of its first fill i32[...] tokens."""
    block_size = text.tokens.shape[-1]
    same = pick(blocks.text, ids).equals(text)
    if fill is not None:
        column = np.arange(block_size, dtype=np.int32).reshape((1,) * fill.ndim + (block_size,))
        same = same | (column >= fill[..., None])
    return (ids >= 0) & (pick(blocks.fill, ids) == (block_size if fill is None else fill)) & every(same)


class Filled(NamedTuple):
    """Blocks that rows may just have filled, all [K]. The blocks of a row follow one another."""

    row: jax.Array  # i32; the row of the table
    column: jax.Array  # i32; the column of the block in this row
    first: jax.Array  # i32; the first such column of the row
    where: jax.Array  # bool; whether the block was filled

    @classmethod
    def of(cls, rows: jax.Array, first: jax.Array, end: jax.Array, max_blocks: int) -> Filled:
        """Lists columns first to end - 1 i32[R] of rows i32[R], at most `max_blocks` of each: K = R * max_blocks."""
        row, first, end = (jnp.repeat(x, max_blocks) for x in (rows, first, end))
        column = first + np.arange(row.shape[0], dtype=np.int32) % max_blocks
        return cls(row, column, first, column < end)


class Dedup(Pytree):
    """The outcome for newly filled blocks, all [K]."""

    block: jax.Array  # i32; the block that was filled
    target: jax.Array  # i32; the block that the row holds from now on: the same or an equal block
    publish: jax.Array  # bool; the block becomes findable
    merge: jax.Array  # bool; the block is given back in exchange for the target
    first: jax.Array  # bool; no earlier entry has the same key, so these entries count each block once
    key: jax.Array  # u32[K, 2]
    parent: jax.Array  # i32[K, 2]; (block, namespace) for `publish`


def resolve(group: Group, seqs: Sequences, filled: Filled, *, several: bool) -> Dedup:
    """Decides for each filled block whether to publish it, or to merge it with an equal block, cached or just filled.

    Among equal blocks filled in a call, the first block is published. A key that already belongs to other contents is a
    collision: then none of the row's blocks is published. This can cost a hit later, but never gives a wrong hit.
    `blocks.text` must be up to date. `several`, static, tells whether a row can have filled several blocks.
    """
    blocks = group.blocks
    (row, column, first, where) = filled
    entry = np.arange(row.shape[0], dtype=np.int32)
    head = jnp.maximum(entry - (column - first), 0) if several else entry  # the entry of the row's first block here
    begin = pick(column, head) if several else column
    block = pick(group.table, (row, column))
    text = pick(blocks.text, block)
    before = pick(group.table, (row, begin - 1))
    before = jnp.where(begin > 0, before, NO_BLOCK)

    def so_far(x: jax.Array) -> jax.Array:
        """[K, ...]; the running sum of x [K, ...] over the entries of each row."""
        if not several:
            return x
        running = jnp.cumsum(x, axis=0, dtype=x.dtype)
        return running - pick(running - x, head)

    def in_row(x: jax.Array) -> jax.Array:
        """bool[K]; whether bool[K] holds for any entry of the row."""
        return pick(put(jnp.zeros_like(x), head, True, x, unique=False), head) if several else x

    where = where & ((before < 0) | (pick(blocks.fill, before) > 0))  # no children of unpublished blocks
    if group.tiered:  # no block without its K/V (a failed move may lose them), and no descendants of it
        where = where & (so_far((where & ~group.arrived(block)).astype(jnp.int32)) == 0)
    namespace = pick(seqs.namespace, row)
    start = jnp.where((before >= 0)[:, None], pick(blocks.key, before), root_key(namespace))
    key = prefix_keys(start, text, blocks.tokens.shape[1], column, so_far)

    cached = index.find(blocks, group.links, key)
    earliest = earliest_with_key(key, where)
    is_first = earliest == entry
    target = jnp.where(cached >= 0, cached, pick(block, earliest))
    parent = jnp.where(head == entry, before, jnp.roll(target, 1)) if several else before

    # So far equal keys counted as equal contents. Now compare the contents.
    findable_parent = (parent < 0) | (pick(blocks.fill, parent) > 0)
    same_parent = every(pick(blocks.parent, cached) == link(blocks, parent, namespace))
    matches_cached = same_content(blocks, cached, text) & findable_parent & same_parent
    duplicate = every(key == pick(key, earliest)) & every(text.equals(pick(text, earliest)))
    duplicate = duplicate & (parent == pick(parent, earliest)) & (namespace == pick(namespace, earliest))
    broken = in_row(where & ~jnp.where(cached >= 0, matches_cached, duplicate))

    def depends(broken: jax.Array) -> jax.Array:
        """bool[K]; whether a block equals a block of bool[K], or follows such a block in its row."""
        return in_row(where & pick(broken, earliest))

    with jax.named_scope("seldom"):
        broken = while_loop(lambda b: jnp.any(~b & depends(b)), lambda b: b | depends(b), broken)
    ok = where & ~broken
    publish = ok & (cached < 0) & is_first
    merge = ok & (target != block)
    return Dedup(block, target, publish, merge, is_first, key, jnp.stack([parent, namespace], axis=-1))


def earliest_with_key(key: jax.Array, where: jax.Array) -> jax.Array:
    """i32[K]; for each entry where bool[K], the first with the same digest of its key u32[K, 2]; for others, itself."""
    entry = jnp.arange(where.size, dtype=jnp.int32)
    if where.size <= PAIRS and pallas_kernels.lowers_for("cuda"):
        words = mix(key[:, 0] ^ mix(key[:, 1])) >> np.uint32(1)
        same = (words[:, None] == words[None]) & where[None]
        first = jnp.min(jnp.where(same, entry[None], where.size), axis=1)
        return jnp.where(where, first, entry)
    digest = jnp.where(
        where, mix(key[:, 0] ^ mix(key[:, 1])) >> np.uint32(1), entry.astype(jnp.uint32) | np.uint32(1 << 31)
    )
    digest, order = lax.sort((digest, entry), num_keys=1)
    starts = jnp.pad(digest[1:] != digest[:-1], (1, 0), constant_values=True)
    return put(entry, order, pick(order, lax.cummax(jnp.where(starts, entry, 0))), where=jnp.ones_like(where))
