# SPDX-License-Identifier: Apache-2.0
"""Finds cached blocks that equal those which have just been filled."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, mix, pick, put
from kvjax.blocks import index
from kvjax.blocks.keys import prefix_keys, root_key
from kvjax.state import NO_BLOCK, Blocks, Group, Sequences, Text
from pallas_kernels.loops import while_loop


def link(blocks: Blocks, block: jax.Array, namespace: jax.Array) -> jax.Array:
    """i32[..., 2]; the node of each block i32[...], or the root of `namespace` where it is NO_BLOCK."""
    return jnp.stack([block, jnp.where(block >= 0, pick(blocks.generation, block), namespace)], axis=-1)


def same_content(blocks: Blocks, ids: jax.Array, text: Text, fill: jax.Array | None = None) -> jax.Array:
    """bool[...]; whether ids are findable blocks of exactly this text i32[..., P], or of its first fill i32[...]."""
    size, same = text.tokens.shape[-1], pick(blocks.text, ids).equals(text)
    if fill is not None:
        column = np.arange(size, dtype=np.int32).reshape((1,) * fill.ndim + (size,))
        same = same | (column >= fill[..., None])
    return (ids >= 0) & (pick(blocks.fill, ids) == (size if fill is None else fill)) & jnp.all(same, axis=-1)


class Filled(NamedTuple):
    """Blocks that rows may just have filled, all [K]; those of a row follow one another."""

    row: jax.Array  # i32; the row of the table
    column: jax.Array  # i32; its column there
    first: jax.Array  # i32; the first such column of the row
    where: jax.Array  # bool; whether it was filled

    @classmethod
    def of(cls, rows: jax.Array, first: jax.Array, end: jax.Array, most: int) -> Filled:
        """Those from columns first to end - 1 i32[R] of each row i32[R], `most` at most: K = R * most."""
        row, first, end = (jnp.repeat(x, most) for x in (rows, first, end))
        column = first + np.arange(row.shape[0], dtype=np.int32) % most
        return cls(row, column, first, column < end)


class Dedup(Pytree):
    """The outcome for blocks that have just been filled, all [K]."""

    own: jax.Array  # i32; the block that was filled
    target: jax.Array  # i32; the block that the row holds from now on: its own, or an equal one
    publish: jax.Array  # bool; own becomes findable
    merge: jax.Array  # bool; own is given back for the target
    first: jax.Array  # bool; no earlier entry has the same key (so a count of these counts each block once)
    key: jax.Array  # u32[K, 2]
    parent: jax.Array  # i32[K, 2]; (block, namespace) as `publish` wants it


def resolve(group: Group, seqs: Sequences, filled: Filled, *, several: bool) -> Dedup:
    """Decides for each filled block whether to publish it or to merge it with an equal one, cached or filled just now.

    Among equal blocks filled in one call, the first one is published. A key that already belongs to other contents
    is a collision: of its row nothing here is published, which can cost a hit later and never gives a wrong one.
    `blocks.text` is up to date; `several`, static, tells whether a row can have filled more than one block.
    """
    blocks, (row, column, first, where) = group.blocks, filled
    number = np.arange(row.shape[0], dtype=np.int32)
    head = jnp.maximum(number - (column - first), 0) if several else number  # the entry of the row's first block here
    begin = pick(column, head) if several else column
    own = pick(group.table, (row, column))
    text = pick(blocks.text, own)
    before = pick(group.table, (row, begin - 1))
    before = jnp.where(begin > 0, before, NO_BLOCK)

    def so_far(x: jax.Array) -> jax.Array:
        """The sum of x [K, ...] over the row's entries up to each one."""
        if not several:
            return x
        total = jnp.cumsum(x, axis=0, dtype=x.dtype)
        return total - pick(total - x, head)

    def in_row(x: jax.Array) -> jax.Array:
        """bool[K]; whether bool[K] holds for any entry of the row."""
        return pick(put(jnp.zeros_like(x), head, True, x, unique=False), head) if several else x

    where = where & ((before < 0) | (pick(blocks.fill, before) > 0))  # no children of unpublished blocks
    if group.tiered:  # nor a block whose K/V have not arrived, which a failed move may lose, nor its descendants
        where = where & (so_far((where & ~group.arrived(own)).astype(jnp.int32)) == 0)
    namespace = pick(seqs.namespace, row)
    start = jnp.where((before >= 0)[:, None], pick(blocks.key, before), root_key(namespace))
    key = prefix_keys(start, text, blocks.tokens.shape[1], column, so_far)

    found = index.find(blocks, group.links, key)
    earliest = earliest_with_key(key, where)
    is_first = earliest == number
    target = jnp.where(found >= 0, found, pick(own, earliest))
    parent = jnp.where(head == number, before, jnp.roll(target, 1)) if several else before

    # So far equal keys counted as equal contents; now compare.
    findable_parent = (parent < 0) | (pick(blocks.fill, parent) > 0)
    same_parent = jnp.all(pick(blocks.parent, found) == link(blocks, parent, namespace), axis=-1)
    as_found = same_content(blocks, found, text) & findable_parent & same_parent
    duplicate = jnp.all(key == pick(key, earliest), axis=-1) & jnp.all(text.equals(pick(text, earliest)), axis=-1)
    duplicate = duplicate & (parent == pick(parent, earliest)) & (namespace == pick(namespace, earliest))
    broken = in_row(where & ~jnp.where(found >= 0, as_found, duplicate))

    def depends(broken: jax.Array) -> jax.Array:
        """bool[K]; whether a block equals one of bool[K], or follows such a block in its row."""
        return in_row(where & pick(broken, earliest))

    broken = while_loop(lambda b: jnp.any(~b & depends(b)), lambda b: b | depends(b), broken)
    good = where & ~broken
    publish, merge = good & (found < 0) & is_first, good & (target != own)
    return Dedup(own, target, publish, merge, is_first, key, jnp.stack([parent, namespace], axis=-1))


def earliest_with_key(key: jax.Array, where: jax.Array) -> jax.Array:
    """i32[K]; the first entry, where bool[K], with an equal digest of its key u32[K, 2]; each other entry itself."""
    at = jnp.arange(where.size, dtype=jnp.int32)
    digest = jnp.where(
        where, mix(key[:, 0] ^ mix(key[:, 1])) >> np.uint32(1), at.astype(jnp.uint32) | np.uint32(1 << 31)
    )
    digest, order = lax.sort((digest, at), num_keys=1)
    starts = jnp.pad(digest[1:] != digest[:-1], (1, 0), constant_values=True)
    return put(at, order, pick(order, lax.cummax(jnp.where(starts, at, 0))), where=jnp.ones_like(where))
