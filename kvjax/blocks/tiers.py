# SPDX-License-Identifier: Apache-2.0
"""The tiers of a group's blocks: on the device, on the host, or moving between the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax._arrays import add, count, fence, loop, pick, put, rank
from kvjax.blocks.backups import backs_up, droppable, has_backup, is_backup
from kvjax.events.records import EventKind, Records, no_records, record
from kvjax.events.transfer import Transfer, orders
from kvjax.policies.retention import priority_at
from kvjax.state import NO_BLOCK, Blocks, CacheState, EvictionPolicy, Group, Host


def with_ancestors(group: Group, marked: jax.Array, on_device: jax.Array) -> jax.Array:
    """bool[B]; marked bool[B] and their ancestors on the same tier. `on_device` bool[B] has the tier of each block."""
    blocks = group.blocks
    parent = blocks.parent[:, 0]
    follows = (blocks.fill > 0) & (parent >= 0) & (on_device == pick(on_device, parent))

    def up(marked: jax.Array) -> jax.Array:
        return put(marked, parent, True, marked & follows, unique=False)

    return loop(lambda m: jnp.any(up(m) & ~m), up, marked)


def host_space(group: Group) -> jax.Array:
    """i32[]; blocks that the host has space for: empty blocks, backups to drop, and cached blocks that may leave it."""
    blocks = group.blocks
    host = host_of(group)
    on_device = group.on_device(group.ids)
    moving = with_ancestors(group, host.pending_transfer != 0, on_device)
    space = host.num_empty + count(~on_device & ~moving & (blocks.refcount == 0) & (blocks.fill > 0))
    return space + count(droppable(group)[0]) if backs_up(group) else space


def find_unevictable(group: Group) -> Group:
    """Updates `Host.unevictable` by a pass over all blocks for each level of the longest chain."""

    def find(host: Host) -> Host:
        on_device = host.pool_row < group.empty.shape[0]
        moving = host.pending_transfer != 0
        has_followers = on_device & (host.num_host_children > 0)
        if host.backup is not None:  # with a backup a block can follow its children, once the backup has arrived
            waits = (host.backup >= 0) & (group.blocks.fill > 0) & pick(moving, host.backup)
            moving = (moving & ~is_backup(group)) | waits
            has_followers = has_followers & ~has_backup(group, group.ids)
        marked = moving | has_followers
        return host.replace(unevictable=with_ancestors(group, marked, on_device))

    return with_host(group, find)


def mark_unevictable(host: Host, parent: jax.Array, ids: jax.Array, where: jax.Array) -> jax.Array:
    """bool[B]; `Host.unevictable` with device blocks ids i32[K], where bool[K], and all their ancestors marked too."""

    def step(carry):
        unevictable, ids, where = carry
        unevictable = put(unevictable, ids, True, where, unique=False)
        above = pick(parent, ids)
        return unevictable, above, where & (above >= 0) & ~pick(unevictable, above)

    return loop(lambda carry: jnp.any(carry[2]), step, (host.unevictable, ids, where))[0]


def take_over(
    group: Group, group_index: int, policy: EvictionPolicy, ids: jax.Array, target: jax.Array, where: jax.Array
) -> tuple[Group, Records]:
    """Gives host blocks target i32[K], where bool[K], the device rows of the equal blocks ids i32[K], all different.

    Call it before `merge`, so newly computed K/V need not come from the host. If the block has children that stay on
    the host and no backup, no loop can evict it or its ancestors. Also returns K records, updated, or no records
    without a host tier.
    """
    blocks = group.blocks
    host = group.host
    if host is None:
        return group, no_records()
    where = where & ~group.on_device(target)
    keeps = where & group.arrived(target) if host.backup is not None else where
    device_row = pick(host.pool_row, ids)
    host_row = pick(host.pool_row, target)
    parent = pick(blocks.parent, target)[:, 0]
    idle = where & (pick(blocks.refcount, target) == 0)
    updated = updates(blocks, group_index, target, where, 0)
    (pool_row, pending_transfer), device_row, host_row, idle, updated = fence(
        (host.pool_row, host.pending_transfer), device_row, host_row, idle, updated
    )
    has_parent = where & (parent >= 0)
    host = host.replace(
        pool_row=put(put(pool_row, ids, host_row, where), target, device_row, where),
        pending_transfer=put(pending_transfer, target, 0, where),
        num_host_children=add(host.num_host_children, parent, -1, has_parent, unique=False),
        policy=policy.forgot(host.policy, blocks, jnp.where(where, target, NO_BLOCK)),
    )
    above = blocks.parent[:, 0]
    stays = where & (pick(host.num_host_children, target) > 0)
    if host.backup is not None:  # the row on the host, which `ids` have now, is a backup if its K/V have arrived
        keeps = keeps & ((parent < 0) | has_backup(group, parent))
        pair = jnp.concatenate([target, ids])
        other = jnp.concatenate([jnp.where(keeps, ids, NO_BLOCK), jnp.where(keeps, target, NO_BLOCK)])
        host = host.replace(backup=put(host.backup, pair, other, jnp.concatenate([where, where])))
        stays = stays & ~keeps
    host = host.replace(unevictable=mark_unevictable(host, above, target, stays))
    blocks = blocks.replace(children=add(blocks.children, parent, 1, has_parent, unique=False))
    return group.replace(blocks=blocks, host=host, num_cached=group.num_cached + count(idle)), updated


def updates(blocks: Blocks, group_index: int, ids: jax.Array, where: jax.Array, level: jax.Array | int) -> Records:
    """Records that blocks ids i32[K], where bool[K], come to a level (0 device, 1 host)."""
    return record(
        EventKind.UPDATED,
        where,
        group=group_index,
        block=ids,
        generation=pick(blocks.generation, ids),
        priority=blocks.requested_priority(ids),
        level=level,
    )


def keep_host_policy(empty: Group, group: Group, policy: EvictionPolicy) -> Group:
    """Gives the empty group the host policy's state of `group`, after `forget` of all blocks."""

    def forget(host: Host) -> Host:
        return host.replace(policy=policy.forgot(host_of(group).policy, group.blocks, group.ids))

    return with_host(empty, forget)


def touch_host(group: Group, policy: EvictionPolicy, ids: jax.Array, where: jax.Array, now: jax.Array) -> Group:
    """Tells the host's policy that blocks ids i32[K] on the host, where bool[K], have lost their last holders."""
    ids = jnp.where(where, ids, NO_BLOCK)
    return with_host(group, lambda host: host.replace(policy=policy.touched(host.policy, group.blocks, ids, now)))


def push_empty(group: Group, policy: EvictionPolicy, ids: jax.Array, where: jax.Array) -> Group:
    """Puts blocks ids i32[K] without holders and contents, where bool[K], on the stack of their tier."""
    on_device = group.on_device(ids)
    on_host = where & ~on_device
    on_device = where & on_device

    def push(host: Host) -> Host:
        is_empty = on_host if host.backup is None else on_host & (pick(host.backup, ids) < 0)  # or it is a backup
        (empty, pstate), block, emptied, leaves = fence((host.empty, host.policy), ids, is_empty, where)
        return host.replace(
            empty=put(empty, host.num_empty + rank(emptied), block, emptied),
            num_empty=host.num_empty + count(emptied),
            pending_transfer=put(host.pending_transfer, block, 0, leaves),  # K/V still on the move belong to no block
            unevictable=put(host.unevictable, block, False, leaves),
            policy=policy.forgot(pstate, group.blocks, jnp.where(emptied, block, NO_BLOCK)),
        )

    group = with_host(group, push)
    return group.replace(
        empty=put(group.empty, group.num_empty + rank(on_device), ids, on_device),
        num_empty=group.num_empty + count(on_device),
    )


def priorities(state: CacheState, now: jax.Array, tiers: tuple[str, ...] = ("device", "host")) -> list[Any]:
    """i32[B] for each group; the priorities of its blocks at `now`, in a window group those of its `group0_blocks`.

    An entry is None if blocks stay on their tier: the group has a single tier, or `tiers` names a single tier.
    """
    if "host" not in tiers:
        return [None] * len(state.groups)
    blocks = state.groups[0].blocks
    ids = state.groups[0].ids
    of_group0 = priority_at(blocks, now) if state.spec.retention else blocks.requested_priority(ids)
    return [pick(of_group0, group.group0_blocks(group.ids)) if group.tiered else None for group in state.groups]


def with_host(group: Group, change: Callable[[Host], Host]) -> Group:
    """Changes the group's host tier, if there is any."""
    return group if group.host is None else group.replace(host=change(group.host))


def host_of(group: Group) -> Host:
    """Returns the host tier of a tiered group."""
    assert group.host is not None
    return group.host


def order_copy(
    group: Group, group_index: int, source: jax.Array, block: jax.Array, where: jax.Array, prefix: jax.Array
) -> tuple[Group, Transfer]:
    """Orders a copy from host block source i32[] to block i32[1], where bool[], in the form of a move.

    No loop may evict the prefix i32[.] of a moving block.
    """
    host = host_of(group)
    move = next_move(host)
    ordered = orders(
        where[None],
        group=group_index,
        block=block,
        move_id=move,
        source=group.pool_row(source),
        target=group.pool_row(block),
    )
    host = host.replace(
        pending_transfer=put(host.pending_transfer, block, move, where[None]),
        num_moves=jnp.where(where, move, host.num_moves),
        unevictable=put(host.unevictable, prefix, True, (prefix >= 0) & where),
    )
    return group.replace(host=host), ordered


def next_move(host: Host) -> jax.Array:
    """i32[]; the id of the next move. Ids wrap, and skip 0, which means no move."""
    return jnp.where(host.num_moves == -1, 1, host.num_moves + 1)


def count_children(group: Group, parent: jax.Array, by: int, where: jax.Array, on_device: jax.Array) -> Group:
    """Adds `by` to the number of children of each parent i32[K], where bool[K], on the tier of the child."""
    blocks = group.blocks
    where = where & (parent >= 0)
    blocks = blocks.replace(children=add(blocks.children, parent, by, where & on_device, unique=False))

    def on_host(host: Host) -> Host:
        return host.replace(num_host_children=add(host.num_host_children, parent, by, where & ~on_device, unique=False))

    return with_host(group.replace(blocks=blocks), on_host)
