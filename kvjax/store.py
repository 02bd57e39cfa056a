# SPDX-License-Identifier: Apache-2.0
"""Making blocks findable and taking that back: the half of the verbs that changes the index."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import index, windows
from kvjax._arrays import add, count, fence, pick, put, rank, runs
from kvjax._row import Row
from kvjax.events import COLUMNS, DEFAULT_PRIORITY, EventKind, record
from kvjax.group import merge
from kvjax.keys import prefix_keys, root_key
from kvjax.match import link, resolve, same_content
from kvjax.place import take_over
from kvjax.state import NO_BLOCK, CacheState, Group

_BATCH = 32  # rows: about what 256 rows fill in a step with blocks of 16, measured against 16, 64 and 256


def publish(
    group: Group,
    ids: jax.Array,
    where: jax.Array,
    key: jax.Array,
    parent: jax.Array,
    depth: jax.Array,
    fill: jax.Array | int,
) -> tuple[Group, jax.Array]:
    """Makes blocks findable by what `blocks.tokens` says they hold; a parent may be among them.

    Args:
      group: the group.
      ids: i32[K]; all different, none findable.
      where: bool[K]; those to publish.
      key: u32[K, 2]; not the key of any findable block.
      parent: i32[K, 2]; (block, namespace): the second counts where the block is NO_BLOCK.
      depth: i32[K]; blocks before each.
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
        depth=put(blocks.depth, ids, depth, where),
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
    here, host = group.on_device(ids), group.host
    blocks = dataclasses.replace(
        blocks,
        fill=put(blocks.fill, ids, 0, where),
        children=add(blocks.children, parent, -1, where & here & (parent >= 0), unique=False),
    )
    if host is not None:
        below = add(host.below, parent, -1, where & ~here & (parent >= 0), unique=False)
        host = dataclasses.replace(host, below=below)
    removed = record(EventKind.REMOVED, where, block=ids, generation=generation)
    links = index.remove(group.links, blocks.fill, ids, where)
    return dataclasses.replace(group, blocks=blocks, host=host, links=links), removed


def publish_filled(
    state: CacheState, rows: jax.Array, first: jax.Array, end: jax.Array, most: int, now: jax.Array
) -> tuple[CacheState, list[jax.Array], list[jax.Array]]:
    """Publishes the blocks that rows have just filled, or merges them with equal ones, in every group.

    Goes through the rows that filled any in small batches, so that a step pays for those and not for all rows.

    Args:
      state: the cache, the first group's `blocks.tokens` up to date.
      rows: i32[R]; all different.
      first: i32[R]; table index of the first block that a row filled.
      end: i32[R]; that of the first block it did not.
      most: static; the most blocks that a row can have filled.
      now: i32[] ms.

    Returns:
      The cache; for each group records i32[R * most, 9], stored, and for each with a host tier as many, updated.
    """
    total = rows.shape[0]
    batch = min(_BATCH, total)
    fills = end > first
    order = put(jnp.zeros((total + batch,), jnp.int32), rank(fills), jnp.arange(total, dtype=jnp.int32), fills)
    rows_of = [*state.groups, *(group for group in state.groups if group.host is not None)]
    records = [jnp.zeros((total + batch, most, len(COLUMNS)), jnp.int32) for _ in rows_of]

    def step(carry):
        done, (group, *others), records = carry
        picked = lax.dynamic_slice(order, (done,), (batch,))
        live = done + np.arange(batch, dtype=np.int32) < count(fills)
        row, start = pick(rows, picked), pick(first, picked)
        place = runs(start, most)
        filled = live[:, None] & (place < pick(end, picked)[:, None])
        blocks, news = fence(group.blocks, resolve(group, state.seqs, row, start, filled))
        group = dataclasses.replace(group, blocks=blocks)
        group, stored = publish(
            group, news.own, news.publish, news.key, news.parent, place.reshape(-1), group.blocks.tokens.shape[1]
        )
        group, updated = take_over(group, 0, state.policy, news.own, news.target, news.merge & news.first)
        group = merge(group, state.policy, news.own, news.target, news.merge, news.first, now)
        where = (jnp.broadcast_to(row[:, None], place.shape), place)
        swap = news.merge.reshape(place.shape)
        table = put(group.table, where, news.target.reshape(place.shape), swap)
        groups, new, moved = [dataclasses.replace(group, table=table)], [stored], [updated]
        for number, other in enumerate(others, 1):
            other, stored, updated = windows.follow(other, number, group.blocks, news, row, place, now)
            groups, new, moved = [*groups, other], [*new, stored], [*moved, updated]
        records = [
            lax.dynamic_update_slice(r, n.reshape(batch, most, -1), (done, np.int32(0), np.int32(0)))
            for r, n in zip(records, [*new, *(m for m in moved if m.size)], strict=True)
        ]
        return done + batch, tuple(groups), records

    _, groups, records = lax.while_loop(
        lambda carry: carry[0] < count(fills), step, (jnp.int32(0), state.groups, records)
    )
    records = [r[:total].reshape(total * most, -1) for r in records]
    state, num = dataclasses.replace(state, groups=groups), len(state.groups)
    return state, records[:num], records[num:]


def store_tail(state: CacheState, row: Row, where: jax.Array) -> tuple[CacheState, list[jax.Array]]:
    """Publishes a row's partly written last block, where bool[], as far as it is written, in every group.

    Not if others hold it (their release decides), if it is findable anyway, if its K/V have not arrived, if the row
    rests on the host, or if a findable block covers it that every group has. Where the first group has an equal block,
    the groups that lack it get theirs.

    Returns:
      The cache and for each group records i32[1, 9], stored.
    """
    group = state.groups[0]
    blocks, size = group.blocks, group.blocks.tokens.shape[1]
    whole, fill = row.committed // size, row.committed % size
    tail = pick(row.tables[0], whole)
    before = jnp.where(whole > 0, pick(row.tables[0], whole - 1), NO_BLOCK)
    tokens = pick(blocks.tokens, tail)
    extra = None if blocks.extra_ids is None else pick(blocks.extra_ids, tail)
    parent = link(blocks, before, row.namespace)
    start = jnp.where(before >= 0, pick(blocks.key, before), root_key(row.namespace))
    key = prefix_keys(start, tokens[None], None if extra is None else extra[None], fill, whole[None])
    intact = (before < 0) | (pick(blocks.fill, before) > 0)
    mine = (pick(blocks.refcount, tail) == 1) & (pick(blocks.fill, tail) == 0) & group.arrived(tail) & ~row.swapped
    others = state.groups[1:]

    def everywhere(block: jax.Array) -> jax.Array:
        return functools.reduce(jnp.logical_and, [other.beside(block) >= 0 for other in others], block >= 0)

    _, covered = index.longest_child(blocks, group.links, parent, tokens, extra, fill, everywhere)
    twin = index.find(blocks, group.links, key)[0]
    good = where & (fill > 0) & intact & mine & (covered < fill)
    above = jnp.stack([before, row.namespace])[None]
    group, stored = publish(group, tail[None], (good & (twin < 0))[None], key, above, whole[None], fill)
    groups, records = [group], [stored]
    if others:
        same = same_content(blocks, twin, tokens, extra, fill) & jnp.all(pick(blocks.parent, twin) == parent)
        target, good = jnp.where(same, twin, tail), good & (same | (twin < 0))
    for number, other in enumerate(others, 1):
        last = pick(row.tables[number], whole)
        where = good & other.arrived(last) & (other.beside(target) < 0)
        other, follows = windows.anchor_blocks(other, number, group.blocks, last[None], target[None], where[None], fill)
        groups, records = [*groups, other], [*records, follows]
    return dataclasses.replace(state, groups=tuple(groups)), records
