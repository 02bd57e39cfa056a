# SPDX-License-Identifier: Apache-2.0
"""Taking blocks: empty ones first, then victims of the policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, count, fence, pick, put
from kvjax.blocks import index
from kvjax.blocks.victims import claim, unclaim
from kvjax.events.records import EventKind, record
from kvjax.policies.retention import tell_time
from kvjax.state import NO_BLOCK, EvictionPolicy, Group


def available(group: Group) -> jax.Array:
    """i32[]; blocks that can be had: empty ones and cached ones."""
    return group.num_empty + group.num_cached


class Taken(Pytree):
    """What `take` did.

    Attributes:
      group: the group after it.
      ids: i32[.]; the blocks, NO_BLOCK beyond those asked for.
      ok: bool[]; whether they were had; if not, nothing has changed.
      removed: records i32[., 9] of blocks that are findable no longer.
      updated: records i32[., 9] of those that changed tier.
      moves: i32[., 5]; the moves for that, as in `Transfer`.
    """

    group: Group
    ids: jax.Array
    ok: jax.Array
    removed: jax.Array
    updated: jax.Array
    moves: jax.Array


def take(
    group: Group,
    policy: EvictionPolicy,
    need: jax.Array,
    size: int,
    now: jax.Array,
    number: int = 0,
) -> Taken:
    """Takes `need` blocks for one holder each: empty ones, then victims of the policy.

    Args:
      group: the group; untouched unless all of `need` can be had.
      policy: chooses the victims.
      need: i32[], at most `size`.
      size: the most that can be asked for.
      now: i32[] ms.
      number: the group's number.

    Never touches the host. A device block with descendants on the host is not evicted.
    """
    slot = np.arange(size, dtype=np.int32)
    from_stack = jnp.minimum(need, group.num_empty)
    wanted = jnp.where(need <= available(group), need - from_stack, 0)
    before = group.blocks

    def eligible(ids: jax.Array) -> jax.Array:
        here = group.arrived(ids) & group.on_device(ids)
        if group.host is not None:
            here = here & ~pick(group.host.stuck, ids)
        return here & (pick(before.refcount, ids) == 0) & (pick(before.fill, ids) > 0)

    victims, pstate = policy.chosen(group.policy, before, eligible, wanted, now, size)
    claimed, generation = (slot < wanted) & eligible(victims), pick(before.generation, victims)
    (refcount, fill, count_), victims, claimed, generation = fence(
        (before.refcount, before.fill, before.generation), victims, claimed, generation
    )
    blocks = before.replace(refcount=refcount, fill=fill, generation=count_)
    blocks, claimed = claim(blocks, victims, claimed)
    ok = (need <= available(group)) & (count(claimed) == wanted)
    blocks = unclaim(blocks, victims, claimed & ~ok)
    evicted = claimed & ok
    removed = record(EventKind.REMOVED, evicted, group=number, block=victims, generation=generation)
    fill = put(blocks.fill, victims, 0, evicted)
    links, shadow = group.links, group.shadow
    if group.anchor is None or shadow is None:
        links = index.remove(links, fill, victims, evicted)
    else:
        shadow = put(shadow, pick(group.anchor, victims), NO_BLOCK, evicted)
    stacked = pick(group.empty, group.num_empty - 1 - slot)
    empty, stacked = fence(group.empty, stacked)
    from_empty = ok & (slot < from_stack)
    ids = jnp.where(from_empty, stacked, pick(victims, slot - from_stack))
    blocks = blocks.replace(fill=fill, refcount=put(blocks.refcount, ids, 1, from_empty))
    blocks = tell_time(blocks, now, ok & (need > 0))
    group = group.replace(
        blocks=blocks,
        links=links,
        shadow=shadow,
        empty=empty,
        num_empty=group.num_empty - jnp.where(ok, from_stack, 0),
        num_cached=group.num_cached - jnp.where(ok, wanted, 0),
        policy=jax.tree.map(lambda new, old: old if new is old else jnp.where(ok, new, old), pstate, group.policy),
    )
    return Taken(
        group, jnp.where(ok & (slot < need), ids, NO_BLOCK), ok, removed,
        updated=jnp.zeros((0, 9), jnp.int32), moves=jnp.zeros((0, 5), jnp.int32),
    )  # fmt: skip
