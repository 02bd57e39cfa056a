# SPDX-License-Identifier: Apache-2.0
"""Making blocks findable and taking that back: the half of the verbs that changes the index."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import index
from kvjax._arrays import add, count, fence, pick, put, rank, runs
from kvjax._row import Row
from kvjax.events import COLUMNS, DEFAULT_PRIORITY, EventKind, record
from kvjax.group import give_back
from kvjax.keys import prefix_keys, root_key
from kvjax.match import Resolution, link, resolve
from kvjax.policies import EvictionPolicy
from kvjax.state import NO_BLOCK, CacheState, Group

_BATCH = 32  # rows: about what 256 rows fill in a step with blocks of 16, measured against 16, 64 and 256


def publish(
    group: Group, ids: jax.Array, where: jax.Array, key: jax.Array, parent: jax.Array, fill: jax.Array | int
) -> tuple[Group, jax.Array]:
    """Makes blocks findable by what `blocks.tokens` says they hold; a parent may be among them.

    Args:
      group: the group.
      ids: i32[K]; all different, none findable.
      where: bool[K]; those to publish.
      key: u32[K, 2]; not the key of any findable block.
      parent: i32[K, 2]; (block, namespace): the second counts where the block is NO_BLOCK.
      fill: i32[] or i32[K]; tokens that each holds.

    Returns:
      The group and records i32[K, 9], stored.
    """
    blocks = group.blocks
    generation = add(blocks.generation, ids, 1, where)
    above = jnp.where(parent[:, 0] >= 0, pick(generation, parent[:, 0]), parent[:, 1])
    parent = jnp.stack([parent[:, 0], above], axis=-1)
    blocks = dataclasses.replace(
        blocks,
        generation=generation,
        fill=put(blocks.fill, ids, fill, where),
        key=put(blocks.key, ids, key, where),
        parent=put(blocks.parent, ids, parent, where),
        children=add(blocks.children, parent[:, 0], 1, where & (parent[:, 0] >= 0), unique=False),
        hits=put(blocks.hits, ids, 0, where),
        stored=put(blocks.stored, ids, blocks.clock + rank(where), where),
        clock=blocks.clock + count(where),
    )
    stored = record(
        EventKind.STORED, where, block=ids, generation=pick(generation, ids), source=parent[:, 0],
        source_generation=parent[:, 1], num_tokens=fill,
        priority=DEFAULT_PRIORITY if blocks.retention is None else pick(blocks.retention, ids)[:, 0],
    )  # fmt: skip
    return dataclasses.replace(group, blocks=blocks, links=index.insert(group.links, blocks, ids, where)), stored


def withdraw(group: Group, ids: jax.Array, where: jax.Array) -> tuple[Group, jax.Array]:
    """Makes findable blocks ids i32[K] without findable children outside the set unfindable; records, removed."""
    blocks = group.blocks
    parent, generation = pick(blocks.parent, ids)[:, 0], pick(blocks.generation, ids)
    blocks = dataclasses.replace(
        blocks,
        fill=put(blocks.fill, ids, 0, where),
        children=add(blocks.children, parent, -1, where & (parent >= 0), unique=False),
    )
    removed = record(EventKind.REMOVED, where, block=ids, generation=generation)
    return dataclasses.replace(group, blocks=blocks, links=index.remove(group.links, blocks.fill, ids, where)), removed


def publish_filled(
    group: Group, state: CacheState, rows: jax.Array, first: jax.Array, end: jax.Array, most: int, now: jax.Array
) -> tuple[Group, jax.Array]:
    """Publishes the blocks that rows have just filled, or merges them with equal ones.

    Goes through the rows that filled any in small batches, so that a step pays for those and not for all rows.

    Args:
      group: the group, `blocks.tokens` up to date.
      state: the rows' namespaces, and the policy.
      rows: i32[R]; all different.
      first: i32[R]; table index of the first block that a row filled.
      end: i32[R]; that of the first block it did not.
      most: static; the most blocks that a row can have filled.
      now: i32[] ms.

    Returns:
      The group and records i32[R * most, 9], stored.
    """
    total = rows.shape[0]
    batch = min(_BATCH, total)
    fills = end > first
    order = put(jnp.zeros((total + batch,), jnp.int32), rank(fills), jnp.arange(total, dtype=jnp.int32), fills)
    records = jnp.zeros((total + batch, most, len(COLUMNS)), jnp.int32)

    def step(carry):
        done, group, records = carry
        picked = lax.dynamic_slice(order, (done,), (batch,))
        live = done + np.arange(batch, dtype=np.int32) < count(fills)
        row, start = pick(rows, picked), pick(first, picked)
        place = runs(start, most)
        filled = live[:, None] & (place < pick(end, picked)[:, None])
        blocks, news = fence(group.blocks, resolve(group, state.seqs, row, start, filled))
        group = dataclasses.replace(group, blocks=blocks)
        group, stored = publish(group, news.own, news.publish, news.key, news.parent, group.blocks.tokens.shape[1])
        group = merge(group, state.policy, news, now)
        where = (jnp.broadcast_to(row[:, None], place.shape), place)
        swap = news.merge.reshape(place.shape)
        table = put(group.table, where, news.target.reshape(place.shape), swap)
        group = dataclasses.replace(group, table=table)
        records = lax.dynamic_update_slice(records, stored.reshape(batch, most, -1), (done, 0, 0))
        return done + batch, group, records

    _, group, records = lax.while_loop(lambda carry: carry[0] < count(fills), step, (jnp.int32(0), group, records))
    return group, records[:total].reshape(total * most, -1)


def merge(group: Group, policy: EvictionPolicy, news: Resolution, now: jax.Array) -> Group:
    """Lets rows hold `news.target` in place of their own blocks, where news.merge; these become empty."""
    blocks = group.blocks
    unheld = count(news.merge & news.first & (pick(blocks.refcount, news.target) == 0))
    refcount, unheld = fence(blocks.refcount, unheld)
    blocks = dataclasses.replace(
        blocks,
        refcount=add(refcount, news.target, 1, news.merge, unique=False),
        hits=add(blocks.hits, news.target, 1, news.merge, unique=False),
    )
    group = dataclasses.replace(group, blocks=blocks, num_cached=group.num_cached - unheld)
    return give_back(group, policy, news.own, news.merge, now)


def store_tail(group: Group, row: Row, where: jax.Array) -> tuple[Group, jax.Array]:
    """Publishes a row's partly written last block, where bool[], as far as it is written.

    Not if others hold it (their release decides), if it is findable anyway, or if a findable block covers it.

    Returns:
      The group and records i32[1, 9], stored.
    """
    blocks, size = group.blocks, group.blocks.tokens.shape[1]
    whole, fill = row.committed // size, row.committed % size
    tail = pick(row.table, whole)
    before = jnp.where(whole > 0, pick(row.table, whole - 1), NO_BLOCK)
    tokens = pick(blocks.tokens, tail)
    extra = None if blocks.extra_ids is None else pick(blocks.extra_ids, tail)
    parent = link(blocks, before, row.namespace)
    start = jnp.where(before >= 0, pick(blocks.key, before), root_key(row.namespace))
    key = prefix_keys(start, tokens[None], None if extra is None else extra[None], fill, whole[None])
    intact = (before < 0) | (pick(blocks.fill, before) > 0)
    mine = (pick(blocks.refcount, tail) == 1) & (pick(blocks.fill, tail) == 0)
    _, covered = index.longest_child(blocks, group.links, parent, tokens, extra, fill)
    collides = index.find(blocks, group.links, key)[0] >= 0
    good = where & (fill > 0) & intact & mine & (covered < fill) & ~collides
    return publish(group, tail[None], good[None], key, jnp.stack([before, row.namespace])[None], fill)
