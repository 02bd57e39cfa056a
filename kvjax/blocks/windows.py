# SPDX-License-Identifier: Apache-2.0
"""Window groups: blocks of layers with a sliding attention window, or of recurrent layers.

The first group holds all blocks of every sequence. It compares contents, links prefixes and finds them on behalf of all
groups. A window group has its own blocks for the positions that its layers can still see. Each is linked to the block
of the first group with the same prefix, its `group0_block`:

    first group   table 2 0 3 7    root <- 2 <- 0 <- 3       7 being filled
    window group  table - - 5 1    group0_block of 5: 3            1 being filled

A window block is found through its `group0_block` and leaves the index with it, so hits are exact in every group.
Victims are chosen only by age: the front of a sequence leaves before its end, since no window block depends on another.

A recurrent layer counts as a window of 2: the next token needs the block of the previous token, which holds a snapshot,
the state after that token. A snapshot with a single child, which a row has gone past, leaves before snapshots with no
child or with several. The ends of conversations and the shared prefixes of prompts stay longest.

Source: variable sliding windows as in TensorRT-LLM, joint hits as in vLLM's hybrid cache coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax._arrays import add, count, fence, last_of_each, pick, put, rank, runs
from kvjax.blocks.backups import backs_up
from kvjax.blocks.dedup import Dedup, Filled
from kvjax.blocks.holders import give_back_shared, hold, merge
from kvjax.blocks.tiers import take_over, touch_host
from kvjax.events.records import EventKind, Records, record
from kvjax.policies.classes import by_class
from kvjax.policies.ring import lru
from kvjax.spec import GroupSpec
from kvjax.state import NO_BLOCK, Blocks, CacheState, EvictionPolicy, Group


def _is_wanted(blocks: Blocks, ids: jax.Array) -> jax.Array:
    assert blocks.passed is not None
    return jnp.where(pick(blocks.passed, ids), 0, 1)


WINDOWS = lru()
SNAPSHOTS = by_class(_is_wanted, classes=2, name="snapshots")


def policy_of(state: CacheState, group_index: int) -> EvictionPolicy:
    """Returns the policy of a group: the cache's for the first group, else `own_policy`."""
    return state.policy if group_index == 0 else own_policy(state.groups[group_index].blocks)


def own_policy(blocks: Blocks) -> EvictionPolicy:
    """Returns the policy of a window group: by age, except that snapshots passed by a row leave first."""
    return WINDOWS if blocks.passed is None else SNAPSHOTS


def link_blocks(
    group: Group,
    group_index: int,
    tree: Blocks,
    ids: jax.Array,
    target: jax.Array,
    where: jax.Array,
    fill: jax.Array | int,
) -> tuple[Group, Records]:
    """Makes blocks ids i32[K] findable, where bool[K], by linking them to blocks target i32[K] of the first group.

    All are different. Blocks `ids` are not findable yet, and hold `fill` tokens. Targets are findable and have no block
    in this group. `tree` has the blocks of the first group. Also returns K records, stored.
    """
    group0_block, window_block = _group0_and_window_blocks(group)
    blocks = group.blocks
    generation = add(blocks.generation, ids, 1, where)
    parent = pick(tree.parent, target)
    stored = record(
        EventKind.STORED,
        where,
        group=group_index,
        block=ids,
        generation=pick(generation, ids),
        source=parent[:, 0],
        source_generation=parent[:, 1],
        num_tokens=fill,
    )
    passed = None if blocks.passed is None else put(blocks.passed, ids, False, where)
    if backs_up(group):  # which breaks ties between backups
        time = put(blocks.stored, ids, blocks.clock + rank(where), where)
        blocks = blocks.replace(stored=time, clock=blocks.clock + count(where))
    group = group.replace(
        blocks=blocks.replace(
            generation=generation,
            fill=put(blocks.fill, ids, fill, where),
            hits=put(blocks.hits, ids, 0, where),
            passed=passed,
        ),
        group0_block=put(group0_block, ids, target, where),
        window_block=put(window_block, target, ids, where),
    )
    return group, stored


def set_group0_blocks(group: Group, ids: jax.Array, target: jax.Array) -> Group:
    """Sets the `group0_block` of blocks ids i32[K], NO_BLOCK for none, to target i32[K]; they are not findable."""
    group0_block, window_block = fence(*_group0_and_window_blocks(group))  # `clear_window_blocks` has read the former
    return group.replace(group0_block=put(group0_block, ids, target, ids >= 0), window_block=window_block)


def follow(
    group: Group, group_index: int, tree: Blocks, dedup: Dedup, filled: Filled, now: jax.Array
) -> tuple[Group, Records, Records]:
    """Publishes or merges a window group's blocks in the filled columns [K], according to `dedup` [K].

    `dedup` is the outcome for the first group, whose blocks are `tree`. Also returns K records, stored, and records,
    updated.
    """
    where = (filled.row, filled.column)
    ids = pick(group.table, where)
    accepted = (dedup.publish | dedup.merge) & group.arrived(ids)
    missing = accepted & dedup.first & (group.in_this_group(dedup.target) < 0)
    group, ids, missing, accepted = fence(group, ids, missing, accepted)
    group, stored = link_blocks(group, group_index, tree, ids, dedup.target, missing, tree.tokens.shape[1])
    duplicate = group.in_this_group(dedup.target)
    swap = accepted & (duplicate >= 0) & (duplicate != ids)
    group, duplicate, swap = fence(group, duplicate, swap)
    policy = own_policy(group.blocks)
    group, updated = take_over(group, group_index, policy, ids, duplicate, swap & dedup.first)
    group = merge(group, policy, ids, duplicate, swap, dedup.first, now)
    table = put(group.table, where, duplicate, swap)
    return group.replace(table=table), stored, updated


def clear_window_blocks(group: Group, ids: jax.Array, where: jax.Array) -> Group:
    """Clears `window_block` of the first group's blocks with the prefixes of blocks ids i32[K], where bool[K]."""
    group0_block, window_block = _group0_and_window_blocks(group)
    return group.replace(window_block=put(window_block, pick(group0_block, ids), NO_BLOCK, where))


def _group0_and_window_blocks(group: Group) -> tuple[jax.Array, jax.Array]:
    """Returns `group0_block` of a window group and its inverse, `window_block`."""
    assert group.group0_block is not None and group.window_block is not None
    return group.group0_block, group.window_block


def slide(
    group: Group,
    spec: GroupSpec,
    rows: jax.Array,
    start: jax.Array,
    end: jax.Array,
    max_tokens: int,
    block_size: int,
    now,
) -> Group:
    """Releases blocks of different rows i32[R] that leave the window when written tokens grow from start to end i32[R].

    A row can have grown by at most `max_tokens`, static.
    """
    columns = runs(spec.first_column(start, block_size), -(-max_tokens // block_size))
    where = (jnp.broadcast_to(rows[:, None], columns.shape), columns)
    ids = pick(group.table, where)
    leave = (ids >= 0) & ~spec.keeps(columns, end[:, None], block_size)
    table, ids, leave = fence(group.table, ids, leave)
    group = group.replace(table=put(table, where, NO_BLOCK, leave))
    ids = ids.reshape(-1)
    leave = leave.reshape(-1)
    return give_back_shared(group, own_policy(group.blocks), ids, 1, leave, now)


def mark_passed(group: Group, tree: Group, dedup: Dedup, now: jax.Array) -> Group:
    """Marks the snapshots passed by rows, among newly filled blocks and their parents.

    A snapshot with a first child is marked, so it leaves early. A second child, which means that prompts part there,
    removes the mark. `tree` is the first group, and `dedup` [K] its outcome for the filled blocks.
    """
    if group.blocks.passed is None:
        return group
    ids = jnp.concatenate([dedup.target, dedup.parent[:, 0]])
    return mark(group, tree, ids, jnp.concatenate([dedup.publish | dedup.merge, dedup.publish]), now)


def mark(group: Group, tree: Group, ids: jax.Array, where: jax.Array, now: jax.Array) -> Group:
    """Applies `mark_passed` to blocks ids i32[K] of the first group, where bool[K]. A block may occur several times."""
    passed = group.blocks.passed
    if passed is None:
        return group
    window_ids = group.in_this_group(ids)
    is_passed = tree.num_children(ids) == 1
    ids = window_ids
    where = where & (ids >= 0) & (pick(passed, ids) != is_passed)
    holders = pick(group.blocks.refcount, ids)
    group, ids, is_passed, where, holders = fence(group, ids, is_passed, where, holders)
    refcount, changed = last_of_each(group.blocks.refcount, ids, where)
    refcount = put(refcount, ids, holders, changed)
    passed = put(group.blocks.passed, ids, is_passed, changed)
    group = group.replace(blocks=group.blocks.replace(refcount=refcount, passed=passed))
    idle = changed & (holders == 0)
    on_device = group.on_device(ids)
    group = touch_host(group, SNAPSHOTS, ids, idle & ~on_device, now)
    ids = jnp.where(idle & on_device, ids, NO_BLOCK)
    return group.replace(policy=SNAPSHOTS.touched(group.policy, group.blocks, ids, now))


def regain(
    groups: Sequence[Group], tables: Sequence[jax.Array], lacking: Sequence[jax.Array], ok: jax.Array
) -> tuple[jax.Array, list[Group], list[jax.Array]]:
    """Holds again the blocks that a row's windows lack, where ok bool[], if all of them are on the device, or none.

    `tables` i32[M] are the row's tables in all groups. `lacking` bool[M], for each window group, has the columns to
    fill. Returns whether it was done, the window groups, and the tables of all groups.
    """
    group_blocks = [
        jnp.where(columns, group.in_this_group(tables[0]), NO_BLOCK)
        for group, columns in zip(groups, lacking, strict=True)
    ]
    for group, columns, blocks in zip(groups, lacking, group_blocks, strict=True):
        ok = ok & ~jnp.any(columns & ~group.reachable(blocks, ("device",)))
    held = [hold(group, blocks, ok & (blocks >= 0)) for group, blocks in zip(groups, group_blocks, strict=True)]
    filled = [jnp.where(ok & (table < 0), ids, table) for table, ids in zip(tables[1:], group_blocks, strict=True)]
    return ok, held, [tables[0], *filled]
