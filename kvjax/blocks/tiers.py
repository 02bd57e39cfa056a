# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a group are: on the device, on the host, or on their way between the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax._arrays import add, count, fence, pick, put, rank
from kvjax.events.records import EventKind, Records, no_records, record
from kvjax.events.transfer import Transfer, moves
from kvjax.policies.retention import priority_at
from kvjax.state import NO_BLOCK, CacheState, EvictionPolicy, Group, Host


def led_to(group: Group, marked: jax.Array, near: jax.Array) -> jax.Array:
    """bool[B]; marked bool[B] and all blocks that they follow within their tier; `near` bool[B] are on the device."""
    blocks = group.blocks
    parent = blocks.parent[:, 0]
    follows = (blocks.fill > 0) & (parent >= 0) & (near == pick(near, parent))

    def up(marked: jax.Array) -> jax.Array:
        return put(marked, parent, True, marked & follows, unique=False)

    return jax.lax.while_loop(lambda m: jnp.any(up(m) & ~m), up, marked)


def find_stuck(group: Group) -> Group:
    """The group with `Host.stuck` up to date; a pass over all blocks for each level of the longest chain."""

    def find(host: Host) -> Host:
        near = host.pool_row < group.empty.shape[0]
        return host.replace(stuck=led_to(group, (host.arriving != 0) | (near & (host.below > 0)), near))

    return with_host(group, find)


def _stick(host: Host, parent: jax.Array, ids: jax.Array, where: jax.Array) -> jax.Array:
    """bool[B]; `Host.stuck` with device blocks ids i32[K], where bool[K], and all that they follow marked too.

    Costs a step for each ancestor that is not marked yet.
    """

    def step(carry):
        stuck, ids, where = carry
        stuck, above = put(stuck, ids, True, where, unique=False), pick(parent, ids)
        return stuck, above, where & (above >= 0) & ~pick(stuck, above)

    return jax.lax.while_loop(lambda carry: jnp.any(carry[2]), step, (host.stuck, ids, where))[0]


def take_over(
    group: Group, number: int, policy: EvictionPolicy, own: jax.Array, target: jax.Array, where: jax.Array
) -> tuple[Group, Records]:
    """Blocks target i32[K] on the host, where bool[K], take the device rows of equal blocks own i32[K], all different.

    Before `merge`: what has just been computed is there already, and need not come from the host. Children that stay
    on the host keep the block, and all that it follows, from being evicted inside a loop.

    Returns:
      The group and K records, updated; none without a host tier.
    """
    blocks, host = group.blocks, group.host
    if host is None:
        return group, no_records()
    where = where & ~group.on_device(target)
    near, far, parent = pick(host.pool_row, own), pick(host.pool_row, target), pick(blocks.parent, target)[:, 0]
    idle = where & (pick(blocks.refcount, target) == 0)
    updated = record(
        EventKind.UPDATED, where, group=number, block=target, generation=pick(blocks.generation, target),
        priority=blocks.stated_priority(target),
    )  # fmt: skip
    (pool_row, arriving), near, far, idle, updated = fence((host.pool_row, host.arriving), near, far, idle, updated)
    up = where & (parent >= 0)
    host = host.replace(
        pool_row=put(put(pool_row, own, far, where), target, near, where),
        arriving=put(arriving, target, 0, where),
        below=add(host.below, parent, -1, up, unique=False),
        policy=policy.forgot(host.policy, jnp.where(where, target, NO_BLOCK)),
    )
    host = host.replace(stuck=_stick(host, blocks.parent[:, 0], target, where & (pick(host.below, target) > 0)))
    blocks = blocks.replace(children=add(blocks.children, parent, 1, up, unique=False))
    return group.replace(blocks=blocks, host=host, num_cached=group.num_cached + count(idle)), updated


def keep_host_policy(fresh: Group, group: Group, policy: EvictionPolicy) -> Group:
    """The fresh group with what the group's policy knows on the host, but for what it forgets of the blocks."""
    return with_host(fresh, lambda host: host.replace(policy=policy.forgot(host_of(group).policy, group.ids)))


def touch_host(group: Group, policy: EvictionPolicy, ids: jax.Array, where: jax.Array, now: jax.Array) -> Group:
    """Tells the host's policy that blocks ids i32[K] on the host, where bool[K], have lost their last holder."""
    ids = jnp.where(where, ids, NO_BLOCK)
    return with_host(group, lambda host: host.replace(policy=policy.touched(host.policy, group.blocks, ids, now)))


def push_empty(group: Group, policy: EvictionPolicy, ids: jax.Array, where: jax.Array) -> Group:
    """Puts blocks ids i32[K] without holders and contents, where bool[K], on the stack of their tier."""
    here = group.on_device(ids)
    away, here = where & ~here, where & here

    def push(host: Host) -> Host:
        (stack, pstate), block, gone, leaves = fence((host.empty, host.policy), ids, away, where)
        return host.replace(
            empty=put(stack, host.num_empty + rank(gone), block, gone),
            num_empty=host.num_empty + count(gone),
            arriving=put(host.arriving, block, 0, leaves),  # what still arrives there is nobody's
            stuck=put(host.stuck, block, False, leaves),
            policy=policy.forgot(pstate, jnp.where(gone, block, NO_BLOCK)),
        )

    group = with_host(group, push)
    return group.replace(
        empty=put(group.empty, group.num_empty + rank(here), ids, here), num_empty=group.num_empty + count(here)
    )


def priorities(state: CacheState, now: jax.Array, tiers: tuple[str, ...] = ("device", "host")) -> list[Any]:
    """For each group i32[B], what its blocks are worth at `now`; in a window group, as much as their anchors.

    None where blocks stay on their tier: the group has but one, or `tiers` says so.
    """
    if "host" not in tiers:
        return [None] * len(state.groups)
    blocks, ids = state.groups[0].blocks, state.groups[0].ids
    known = priority_at(blocks, now) if state.spec.retention else blocks.stated_priority(ids)
    return [pick(known, group.anchors(group.ids)) if group.tiered else None for group in state.groups]


def with_host(group: Group, change: Callable[[Host], Host]) -> Group:
    """The group with its host tier changed, if it has one."""
    return group if group.host is None else group.replace(host=change(group.host))


def host_of(group: Group) -> Host:
    """The host tier of a group that has one."""
    assert group.host is not None
    return group.host


def order_copy(
    group: Group, number: int, source: jax.Array, block: jax.Array, where: jax.Array, prefix: jax.Array
) -> tuple[Group, Transfer]:
    """Orders a copy from source i32[] on the host to block i32[1], where bool[], as a move of that block.

    No loop may evict the prefix i32[.] of a block that is on the move.
    """
    host = host_of(group)
    move = next_move(host)
    ordered = moves(
        where[None], group=number, block=block, number=move, source=group.pool_row(source),
        target=group.pool_row(block),
    )  # fmt: skip
    host = host.replace(
        arriving=put(host.arriving, block, move, where[None]),
        moves=jnp.where(where, move, host.moves),
        stuck=put(host.stuck, prefix, True, (prefix >= 0) & where),
    )
    return group.replace(host=host), ordered


def next_move(host: Host) -> jax.Array:
    """i32[]; the number of the next move: 0, which means none, is left out when they wrap."""
    return jnp.where(host.moves == -1, 1, host.moves + 1)


def count_children(group: Group, parent: jax.Array, by: int, where: jax.Array, on_device: jax.Array) -> Group:
    """Adds `by` to the children counted at each parent i32[K], where bool[K], on the tier where the child is."""
    blocks, where = group.blocks, where & (parent >= 0)
    blocks = blocks.replace(children=add(blocks.children, parent, by, where & on_device, unique=False))

    def below(host: Host) -> Host:
        return host.replace(below=add(host.below, parent, by, where & ~on_device, unique=False))

    return with_host(group.replace(blocks=blocks), below)
