# SPDX-License-Identifier: Apache-2.0
"""Takes blocks: empty blocks first, then victims of the policy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, either, fence, once, pick, put, skip_unless
from kvjax.blocks.backups import backs_up, has_backup, leave_by_backup
from kvjax.blocks.publish import leave_index
from kvjax.blocks.transfers import take_over_tiers
from kvjax.blocks.victims import Taken, claim, unclaim
from kvjax.events.records import Records, no_records
from kvjax.events.transfer import no_moves
from kvjax.policies.retention import advance_time
from kvjax.state import NO_BLOCK, EvictionPolicy, Group


def take(
    group: Group,
    group_index: int,
    policy: EvictionPolicy,
    need: jax.Array,
    size: int,
    now: jax.Array,
    *,
    priorities: jax.Array | None = None,
    min_priority: int = 0,
    onboarded: jax.Array | None = None,
    extra: jax.Array | int = 0,
    stays: bool = False,
) -> Taken:
    """Takes `need` i32[] blocks, all or none, and gives each a holder: empty blocks first, then victims of the policy.

    Pass `priorities` i32[B] (`tiers.priorities`) between loops. Victims are then offloaded to the host, or removed if
    their priority is below `min_priority`, and the blocks `onboarded` i32[size] come back (`transfers.py`): they are
    different, findable, on the host, and packed to the front. `extra` i32[] more blocks are emptied. With `stays`,
    static, none of the offloaded blocks may become a victim of the host.

    Without priorities, no device block with descendants on the host is evicted, unless all of the blocks between them
    have backups. A victim with a backup stays on the host, and the others are removed.

    `size`, static, is the largest sum of need, onboarded and extra. The group is unchanged unless all of `need` can be
    taken.
    """
    if priorities is not None:
        onboarded = jnp.full((size,), NO_BLOCK, jnp.int32) if onboarded is None else onboarded
        return take_over_tiers(
            group, group_index, policy, need, size, now, priorities, min_priority, onboarded, extra, stays
        )
    index = np.arange(size, dtype=np.int32)
    num_from_stack = jnp.minimum(need, group.num_empty)
    fits = need <= group.available
    num_victims = jnp.where(fits, need - num_from_stack, 0)
    no_victims = np.full((size,), NO_BLOCK, np.int32)
    untaken: Any = (group, no_victims, np.bool_(True), no_records(size), no_records(size * backs_up(group)))
    group, taken_ids, has_victims, removed, updated = skip_unless(
        lambda: num_victims > 0,
        lambda carry: _evict(carry[0], group_index, policy, num_victims, size, now),
        untaken,
    )
    ok = fits & has_victims
    num_from_stack = jnp.where(ok, num_from_stack, 0)
    is_empty = num_from_stack > index
    from_stack_ids = pick(group.empty, group.num_empty - 1 - index)
    empty, from_stack_ids = fence(group.empty, from_stack_ids)
    ids = jnp.where(is_empty, from_stack_ids, pick(taken_ids, index - num_from_stack))
    num_taken = jnp.where(ok, need, 0)
    lacks_holder = num_taken > index if backs_up(group) else is_empty
    blocks = group.blocks.replace(refcount=put(group.blocks.refcount, ids, 1, lacks_holder))
    group = group.replace(
        blocks=advance_time(blocks, now, ok & (need > 0)),
        empty=empty,
        num_empty=group.num_empty - num_from_stack,
    )
    ids = jnp.where(index < num_taken, ids, NO_BLOCK)
    return Taken(group, ids, ok, removed, updated, orders=no_moves())


def _evict(
    group: Group, group_index: int, policy: EvictionPolicy, wanted: jax.Array, size: int, now: jax.Array
) -> tuple[Group, jax.Array, jax.Array, Records, Records]:
    """Takes `wanted` i32[] victims of the policy out of the index, or out of the device, all or none.

    Returns the group, the taken blocks i32[size], bool[], whether all were taken, and records, removed and updated. The
    taken blocks have a holder, unless the group has backups.
    """
    index = np.arange(size, dtype=np.int32)
    before = group.blocks

    def eligible(ids: jax.Array) -> jax.Array:
        return group.evictable(ids) & (pick(before.refcount, ids) == 0) & (pick(before.fill, ids) > 0)

    victims, pstate = policy.chosen(group.policy, before, eligible, wanted, now, size)
    claimed = (index < wanted) & eligible(victims)
    (refcount, fill), victims, claimed = fence((before.refcount, before.fill), victims, claimed)
    blocks, claimed = claim(before.replace(refcount=refcount, fill=fill), victims, claimed)
    ok = count(claimed) == wanted
    blocks = unclaim(blocks, victims, claimed & ~ok)
    num_victims = jnp.where(ok, wanted, 0)
    is_victim = num_victims > index
    group = group.replace(blocks=blocks)
    backed = is_victim & has_backup(group, victims) if backs_up(group) else None
    is_removed = is_victim if backed is None else is_victim & ~backed
    group, removed = leave_index(group, group_index, victims, is_removed, counted=False, backed=False)
    group = group.replace(num_cached=group.num_cached - num_victims, policy=either(ok, pstate, group.policy))
    if backed is None:
        return group, victims, ok, removed, no_records()

    def leave(carry: tuple[Group, jax.Array, Records]) -> tuple[Group, jax.Array, Records]:
        group, ids, _ = carry
        gone = jnp.where(backed, ids, NO_BLOCK)
        group, taken_ids, updated = leave_by_backup(group, group_index, ids, backed)
        return group.replace(policy=policy.forgot(group.policy, group.blocks, gone)), taken_ids, updated

    nothing: Any = jnp.asarray(no_records(size).records)
    group, taken_ids, updated = once(jnp.any(backed), leave, (group, victims, Records(nothing)))
    return group, taken_ids, ok, removed, updated
