# SPDX-License-Identifier: Apache-2.0
"""Makes blocks findable, and takes them out of the index."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import add, count, count_on, fence, loop, pick, put, rank
from kvjax.blocks import index, tiers, windows
from kvjax.blocks.backups import drop_backups
from kvjax.events.records import EventKind, Records, record
from kvjax.state import Blocks, CacheState, EvictionPolicy, Group


def publish(
    group: Group,
    ids: jax.Array,
    where: jax.Array,
    key: jax.Array,
    parent: jax.Array,
    depth: jax.Array,
    fill: jax.Array | int,
) -> tuple[Group, Records]:
    """Makes blocks ids i32[K] findable, where bool[K], by their `blocks.text`. All are different, none is findable yet.

    No findable block may have any of their keys u32[K, 2]. A parent i32[K, 2] is (block, namespace), and the namespace
    matters only if the block is NO_BLOCK. Parents may be among `ids`. `depth` i32[K] blocks come before each block,
    which holds `fill` tokens, i32[] or i32[K]. Also returns K records, stored.
    """
    blocks = group.blocks
    generation = add(blocks.generation, ids, 1, where)
    above = jnp.where(parent[:, 0] >= 0, pick(generation, parent[:, 0]), parent[:, 1])
    parent = jnp.stack([parent[:, 0], above], axis=-1)
    blocks = blocks.replace(
        generation=generation,
        fill=put(blocks.fill, ids, fill, where),
        key=put(blocks.key, ids, key, where),
        parent=put(blocks.parent, ids, parent, where),
        depth=put(blocks.depth, ids, depth, where),
        children=add(blocks.children, parent[:, 0], 1, where & (parent[:, 0] >= 0), unique=False),
        hits=put(blocks.hits, ids, 0, where),
        stored=put(blocks.stored, ids, blocks.clock + rank(where), where),
        clock=count_on(blocks.clock, where),
    )
    stored = record(
        EventKind.STORED,
        where,
        block=ids,
        generation=pick(generation, ids),
        source=parent[:, 0],
        source_generation=parent[:, 1],
        num_tokens=fill,
        priority=blocks.requested_priority(ids),
    )
    return group.replace(blocks=blocks, links=index.insert(group.links, blocks, ids, where)), stored


def leave_index(
    group: Group, group_index: int, ids: jax.Array, where: jax.Array, *, counted: bool = True, backed: bool = True
) -> tuple[Group, Records]:
    """Takes findable blocks ids i32[K], all different, where bool[K], out of the index of group `group_index`.

    If a block has findable children, all of them must leave too. `counted` is False after `claim`, which has already
    subtracted these blocks from their parents' `children`. `backed` is False if none of the blocks has a backup. Also
    returns K records, removed.
    """
    blocks = group.blocks
    on_device = group.on_device(ids)
    generations, generation = fence(blocks.generation, pick(blocks.generation, ids))
    removed = record(EventKind.REMOVED, where, group=group_index, block=ids, generation=generation)
    group = group.replace(blocks=blocks.replace(fill=put(blocks.fill, ids, 0, where), generation=generations))
    group = drop_backups(group, ids, where) if backed else group
    if group_index > 0:
        return windows.clear_window_blocks(group, ids, where), removed
    if counted:
        group = tiers.count_children(group, pick(blocks.parent, ids)[:, 0], -1, where, on_device)
    return group.replace(links=index.remove(group.links, group.blocks.fill, ids, where)), removed


def remove(
    group: Group, group_index: int, policy: EvictionPolicy, ids: jax.Array, where: jax.Array
) -> tuple[Group, Records]:
    """Takes blocks out of the index, as `leave_index` does, and empties blocks without holders."""
    idle = where & (pick(group.blocks.refcount, ids) == 0)
    on_device = group.on_device(ids)
    group, idle, on_device = fence(group, idle, on_device)
    group, removed = leave_index(group, group_index, ids, where)
    group = group.replace(num_cached=group.num_cached - count(idle & on_device))
    return tiers.push_empty(group, policy, ids, idle), removed


def forget(group: Group, group_index: int, removed: Records) -> tuple[Group, Records]:
    """Removes a window group's blocks whose `group0_block` is in `removed`. Also returns as many records, removed."""
    ids = group.in_this_group(removed.block)
    policy = windows.own_policy(group.blocks)
    return remove(group, group_index, policy, ids, (removed.kind == EventKind.REMOVED) & (ids >= 0))


def forget_all(state: CacheState, group_index: int, removed: Records) -> tuple[CacheState, list[Records]]:
    """Removes the window groups' blocks of the prefixes `removed` from group `group_index`, if it is the first group.

    Also returns records, removed, of the window groups and then of this group.
    """
    if group_index > 0:
        return state, [removed]
    groups = [state.groups[0]]
    records = [removed]
    for window_index, group in enumerate(state.window_groups, 1):
        group, left_index = forget(group, window_index, removed)
        groups.append(group)
        records.insert(0, left_index)
    return state.replace(groups=tuple(groups)), records


def descendants(blocks: Blocks, marked: jax.Array, when: jax.Array | bool = True) -> jax.Array:
    """bool[B]; marked bool[B] and, if `when`, all their findable descendants; a pass over all blocks for each level."""
    parent = blocks.parent[:, 0]

    def children(marked: jax.Array) -> jax.Array:
        return when & (blocks.fill > 0) & (parent >= 0) & pick(marked, parent)

    return loop(lambda marked: jnp.any(children(marked) & ~marked), lambda marked: marked | children(marked), marked)


def children_first(blocks: Blocks, ids: jax.Array, where: jax.Array) -> jax.Array:
    """i32[K]; the findable blocks ids i32[K], where bool[K], with children before their parents; then the other ids."""
    return pick(ids, jnp.argsort(-jnp.where(where, pick(blocks.depth, ids), -1)))
