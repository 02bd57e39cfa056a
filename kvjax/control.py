# SPDX-License-Identifier: Apache-2.0
"""Explicit control: holding blocks against eviction, evicting by name, and starting afresh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax._arrays import add, count, pick, put, rank, repeated
from kvjax._request import assemble, first_failure, integers, static_int
from kvjax.events import EventKind, Events, Status, record
from kvjax.group import give_back, init_group
from kvjax.state import NO_BLOCK, Blocks, CacheState, Group
from kvjax.store import withdraw


def pin(state: CacheState, blocks: Any) -> tuple[CacheState, Events]:
    """Adds a holder to blocks, so that they stay whatever the rows do; the caller keeps the list for `unpin`.

    Args:
      state: the cache.
      blocks: i32[K]; different findable blocks, such as the filled ones of a row; NO_BLOCK is padding. The prefix of
        each must be pinned too, or among them. Costs a pass over all blocks.

    Returns:
      The cache; and no events. Status BAD_REQUEST if a block is unknown, not findable (what a row is still filling has
      nothing to keep yet) or named twice, or if its prefix would not be pinned.

    Source: TensorRT-LLM's pinBlocks, for blocks that were stored for reuse.
    """
    (group,), ids = state.groups, integers("blocks", blocks, ("K",))
    known = group.blocks
    named = ids != NO_BLOCK
    refcount = pick(known.refcount, ids)
    there = (ids >= 0) & (ids < known.refcount.shape[0]) & (pick(known.fill, ids) > 0)
    ok = ~jnp.any(named & (~there | repeated(ids)))
    ok = ok & _prefixes_are_pinned(known, add(_pins(group), ids, 1, named & ok))
    named = named & ok
    group = dataclasses.replace(
        group,
        blocks=dataclasses.replace(known, refcount=add(known.refcount, ids, 1, named)),
        num_cached=group.num_cached - count(named & (refcount == 0)),
    )
    state = dataclasses.replace(state, groups=(group,))
    return state, assemble(state.spec, first_failure((~ok, Status.BAD_REQUEST)))


def unpin(state: CacheState, blocks: Any, *, now: Any = 0) -> tuple[CacheState, Events]:
    """Takes back what `pin` gave the same blocks; those without holders become cached.

    Args:
      state: the cache.
      blocks: i32[K]; as given to `pin`.
      now: i32[] ms.

    Returns:
      The cache; and no events. Status BAD_REQUEST if one of them is not pinned or is named twice, or is the prefix of a
      block that stays pinned.
    """
    (group,), ids, now = state.groups, integers("blocks", blocks, ("K",)), integers("now", now, ())
    named = ids != NO_BLOCK
    pins = _pins(group)
    there = (ids >= 0) & (ids < pins.shape[0]) & (pick(pins, ids) > 0)
    ok = ~jnp.any(named & (~there | repeated(ids)))
    ok = ok & _prefixes_are_pinned(group.blocks, add(pins, ids, -1, named & ok))
    group = give_back(group, state.policy, ids[::-1], (named & ok)[::-1], now)
    state = dataclasses.replace(state, groups=(group,))
    return state, assemble(state.spec, first_failure((~ok, Status.BAD_REQUEST)))


def _pins(group: Group) -> jax.Array:
    """i32[B]; holders of each block that are not rows."""
    table = group.table.reshape(-1)
    return add(group.blocks.refcount, table, -1, table >= 0, unique=False)


def _prefixes_are_pinned(blocks: Blocks, pins: jax.Array) -> jax.Array:
    """bool[]; whether with these pins i32[B] no block is pinned without its parent.

    Eviction relies on it: rows hold whole prefixes too, so whoever lets go, a held block's parent is held. Then
    parents are released after their children, and the oldest cached block is a leaf.
    """
    parent = blocks.parent[:, 0]
    return ~jnp.any((pins > 0) & (parent >= 0) & (pick(pins, parent) <= 0))


def evict(state: CacheState, blocks: Any, *, max_removed: int | None = None) -> tuple[CacheState, Events]:
    """Empties cached blocks by name, and with them every findable block that follows them; all or nothing.

    Costs a pass over all blocks. Blocks that are not findable are passed over.

    Args:
      state: the cache.
      blocks: i32[K]; NO_BLOCK is padding.
      max_removed: static; the most blocks that may leave, None for N + H.

    Returns:
      The cache; and events, E = max_removed: removed, children first. Status HELD if one of them is held,
      BAD_REQUEST for an unknown block or if more than `max_removed` would leave (`events.shortfall` says how many).
    """
    (group,), ids = state.groups, integers("blocks", blocks, ("K",))
    known, num_ids = group.blocks, group.blocks.refcount.shape[0]
    most = num_ids if max_removed is None else min(static_int("max_removed", max_removed, 1), num_ids)
    named = ids != NO_BLOCK
    unknown = jnp.any(named & ((ids < 0) | (ids >= num_ids)))
    chosen = put(jnp.zeros((num_ids,), jnp.bool_), ids, True, named & ~unknown, unique=False) & (known.fill > 0)
    parent = known.parent[:, 0]

    def following(marked: jax.Array) -> jax.Array:
        return (known.fill > 0) & (parent >= 0) & pick(marked, parent)

    chosen = lax.while_loop(
        lambda marked: jnp.any(following(marked) & ~marked), lambda marked: marked | following(marked), chosen
    )
    total = count(chosen)
    over = jnp.maximum(total - most, 0)
    held = jnp.any(chosen & (known.refcount > 0)) | jnp.any(named & (pick(known.refcount, ids) > 0))
    status = first_failure((unknown | (over > 0), Status.BAD_REQUEST), (held, Status.HELD))
    # Children were stored after their parents, so the youngest go first.
    age = jnp.where(chosen, known.clock - known.stored, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(age)[:most].astype(jnp.int32)
    leaves = pick(chosen, order) & (status == Status.OK)
    group, removed = withdraw(group, order, leaves)
    group = dataclasses.replace(
        group,
        empty=put(group.empty, group.num_empty + rank(leaves), order, leaves),
        num_empty=group.num_empty + count(leaves),
        num_cached=group.num_cached - count(leaves),
    )
    state = dataclasses.replace(state, groups=(group,))
    return state, assemble(state.spec, status, removed=removed, shortfall=over)


def reset(state: CacheState) -> tuple[CacheState, Events]:
    """Forgets everything that is cached. Refused while a row or a pin holds anything.

    Args:
      state: the cache.

    Returns:
      The cache; and events, E = 1: cleared. Status HELD.

    Source: vLLM's reset_prefix_cache.
    """
    (group,), spec = state.groups, state.spec
    held = group.num_blocks > group.num_empty + group.num_cached
    fresh = init_group(spec, spec.groups[0], state.policy, group.num_blocks)
    kept = dataclasses.replace(fresh.blocks, generation=group.blocks.generation, clock=group.blocks.clock)
    fresh = dataclasses.replace(fresh, blocks=kept)
    group = jax.tree.map(lambda new, old: jnp.where(held, old, new), fresh, group)
    state = dataclasses.replace(state, groups=(group,))
    status = first_failure((held, Status.HELD))
    return state, assemble(spec, status, other=record(EventKind.CLEARED, jnp.atleast_1d(~held)))
