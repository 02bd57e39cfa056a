# SPDX-License-Identifier: Apache-2.0
"""Taking blocks: empty ones first, then victims of the policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, either, fence, pick, put
from kvjax.blocks.publish import leave_index
from kvjax.blocks.transfers import take_over_tiers
from kvjax.blocks.victims import Taken, claim, unclaim
from kvjax.events.records import no_records
from kvjax.events.transfer import no_moves
from kvjax.policies.retention import advance_time
from kvjax.state import NO_BLOCK, EvictionPolicy, Group


def take(
    group: Group,
    number: int,
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
    """Takes `need` i32[] blocks for one holder each, all or none: empty ones, then victims of the policy.

    With `priorities` i32[B] (`tiers.priorities`), between loops, victims are offloaded to the host, or removed if their
    priority is below `min_priority`; `onboarded` i32[size], different findable blocks on the host, packed, come back
    from it (`transfers.py`). Without, the host is never touched, and a device block with descendants on the host is not
    evicted. `extra` i32[] more blocks are emptied. With `stays`, static, all that go to the host stay there.
    `size`, static, is the most blocks that need, onboarded and extra may be together. The group is unchanged unless all
    of `need` can be taken.
    """
    if priorities is not None:
        onboarded = jnp.full((size,), NO_BLOCK, jnp.int32) if onboarded is None else onboarded
        return take_over_tiers(
            group, number, policy, need, size, now, priorities, min_priority, onboarded, extra, stays
        )
    index = np.arange(size, dtype=np.int32)
    from_stack = jnp.minimum(need, group.num_empty)
    wanted = jnp.where(need <= group.available, need - from_stack, 0)
    before = group.blocks

    def eligible(ids: jax.Array) -> jax.Array:
        return group.evictable(ids) & (pick(before.refcount, ids) == 0) & (pick(before.fill, ids) > 0)

    victims, pstate = policy.chosen(group.policy, before, eligible, wanted, now, size)
    claimed = (index < wanted) & eligible(victims)
    (refcount, fill), victims, claimed = fence((before.refcount, before.fill), victims, claimed)
    blocks, claimed = claim(before.replace(refcount=refcount, fill=fill), victims, claimed)
    ok = (need <= group.available) & (count(claimed) == wanted)
    blocks = unclaim(blocks, victims, claimed & ~ok)
    from_stack, wanted = jnp.where(ok, from_stack, 0), jnp.where(ok, wanted, 0)
    is_empty, is_victim = from_stack > index, wanted > index
    group, removed = leave_index(group.replace(blocks=blocks), number, victims, is_victim, counted=False)
    stacked = pick(group.empty, group.num_empty - 1 - index)
    empty, stacked = fence(group.empty, stacked)
    ids = jnp.where(is_empty, stacked, pick(victims, index - from_stack))
    blocks = group.blocks.replace(refcount=put(group.blocks.refcount, ids, 1, is_empty))
    group = group.replace(
        blocks=advance_time(blocks, now, ok & (need > 0)),
        empty=empty,
        num_empty=group.num_empty - from_stack,
        num_cached=group.num_cached - wanted,
        policy=either(ok, pstate, group.policy),
    )
    ids = jnp.where(index < from_stack + wanted, ids, NO_BLOCK)
    return Taken(group, ids, ok, removed, updated=no_records(), orders=no_moves())
