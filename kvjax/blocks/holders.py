# SPDX-License-Identifier: Apache-2.0
"""Holding blocks and releasing them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import add, count, fence, last_of_each, pick, put, rank
from kvjax.blocks.tiers import push_empty, touch_host
from kvjax.policies.retention import set_expiry
from kvjax.state import COPYING, NO_BLOCK, Blocks, EvictionPolicy, Group


def hold_source(group: Group, source: jax.Array) -> Group:
    """Holds block source i32[] (or NO_BLOCK), the source of a copy, until `unhold_sources`.

    This counts as neither a hit nor a release, so the block keeps its place in the order of eviction.
    """
    source = source[None]
    where = source >= 0
    idle = count(where & (pick(group.blocks.refcount, source) == 0) & group.on_device(source))
    refcount, idle = fence(group.blocks.refcount, idle)
    blocks = group.blocks.replace(refcount=add(refcount, source, COPYING, where))
    return group.replace(blocks=blocks, num_cached=group.num_cached - idle)


def unhold_sources(group: Group, sources: jax.Array) -> Group:
    """Undoes `hold_source` for sources i32[K], where a block may occur several times and NO_BLOCK is padding."""
    where = sources >= 0
    refcount = add(group.blocks.refcount, sources, -COPYING, where, unique=False)
    first = jnp.argmax(sources[:, None] == sources[None], axis=1) == np.arange(sources.shape[0])
    idle = count(where & first & (pick(refcount, sources) == 0) & group.on_device(sources))
    refcount, idle = fence(refcount, idle)
    blocks = group.blocks.replace(refcount=refcount)
    return group.replace(blocks=blocks, num_cached=group.num_cached + idle)


def hold(group: Group, ids: jax.Array, where: jax.Array, *, by: int = 1, hit: bool = True) -> Group:
    """Adds a holder to each of the findable blocks ids i32[K], all different, where bool[K]; by=-1 undoes it.

    `hit`, static, says whether this counts as a hit.
    """
    idle = 0 if by > 0 else 1
    changed = count(where & (pick(group.blocks.refcount, ids) == idle) & group.on_device(ids))
    refcount, changed = fence(group.blocks.refcount, changed)
    hits = add(group.blocks.hits, ids, by, where) if hit else group.blocks.hits
    blocks = group.blocks.replace(refcount=add(refcount, ids, by, where), hits=hits)
    return group.replace(blocks=blocks, num_cached=group.num_cached - by * changed)


def give_back_shared(
    group: Group, policy: EvictionPolicy, ids: jax.Array, less: jax.Array | int, where: jax.Array, now: jax.Array
) -> Group:
    """Takes `less` i32[K] holders from each of ids i32[K], where bool[K]. An id may occur several times."""
    refcount = add(group.blocks.refcount, ids, -less, where, unique=False)
    refcount, freed = fence(refcount, where & (pick(refcount, ids) == 0))
    refcount, last = last_of_each(refcount, ids, freed)
    blocks = group.blocks.replace(refcount=put(refcount, ids, 1, last))
    return give_back(group.replace(blocks=blocks), policy, ids, last, now)


def give_back(group: Group, policy: EvictionPolicy, ids: jax.Array, where: jax.Array, now: jax.Array) -> Group:
    """Takes a holder from each of ids i32[K], all different, where bool[K]. The first id will be evicted first.

    A block without holders stays cached if it is findable, else it becomes empty.
    """
    blocks = group.blocks
    freed = where & (pick(blocks.refcount, ids) == 1)
    cached = freed & (pick(blocks.fill, ids) > 0)
    on_device = group.on_device(ids)
    refcount, freed, cached, on_device = fence(blocks.refcount, freed, cached, on_device)
    blocks = blocks.replace(refcount=add(refcount, ids, -1, where))
    blocks = stamp_release(blocks, ids, cached, now)
    group = touch_host(group.replace(blocks=blocks), policy, ids, cached & ~on_device, now)
    group = push_empty(group, policy, ids, freed & ~cached)
    cached = cached & on_device
    return group.replace(
        num_cached=group.num_cached + count(cached),
        policy=policy.touched(group.policy, group.blocks, jnp.where(cached, ids, NO_BLOCK), now),
    )


def merge(
    group: Group,
    policy: EvictionPolicy,
    ids: jax.Array,
    target: jax.Array,
    where: jax.Array,
    first: jax.Array,
    now: jax.Array,
) -> Group:
    """Moves holders from blocks ids i32[K] to equal blocks target i32[K], where bool[K]; ids become empty.

    `first` bool[K] is true for exactly one of the entries with the same target.
    """
    blocks = group.blocks
    unheld = count(where & first & (pick(blocks.refcount, target) == 0) & group.on_device(target))
    refcount, unheld = fence(blocks.refcount, unheld)
    blocks = blocks.replace(
        refcount=add(refcount, target, 1, where, unique=False),
        hits=add(blocks.hits, target, 1, where, unique=False),
    )
    group = group.replace(blocks=blocks, num_cached=group.num_cached - unheld)
    return give_back(group, policy, ids, where, now)


def stamp_release(blocks: Blocks, ids: jax.Array, where: jax.Array, now: jax.Array) -> Blocks:
    """Records when blocks ids i32[K], all different, lost their last holder, where bool[K]."""
    blocks = blocks.replace(
        released=put(blocks.released, ids, blocks.clock + rank(where), where),
        clock=blocks.clock + count(where),
    )
    return set_expiry(blocks, ids, where, now)
