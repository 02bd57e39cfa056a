# SPDX-License-Identifier: Apache-2.0
"""What the verbs are made of: taking, holding and giving back the blocks of one group.

Each function decides first and then writes with masked scatters, in an order that lets XLA update in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import index
from kvjax._arrays import add, count, fence, pick, put, rank
from kvjax.events import EventKind, record
from kvjax.policies import COPYING, EvictionPolicy
from kvjax.retention import later, tell_time, time_at
from kvjax.spec import CacheSpec, GroupSpec
from kvjax.state import NO_BLOCK, Blocks, Group, Host, pytree


def init_group(
    spec: CacheSpec, number: int, policy: EvictionPolicy, num_blocks: jax.Array, policy_state: Any = None
) -> Group:
    """Group `number`, its first `num_blocks` i32[] device blocks empty and the others out of use; see `cache.init`."""
    group, windowed = spec.groups[number], number > 0
    num_ids, size = group.num_ids, 0 if windowed else spec.block_size

    def zeros(*shape: int, dtype=jnp.int32) -> jax.Array:
        return jnp.zeros((num_ids, *shape), dtype)

    blocks = Blocks(
        refcount=zeros(), tokens=zeros(size), extra_ids=zeros(size) if spec.extra_ids else None, fill=zeros(),
        key=zeros(2, dtype=jnp.uint32), generation=zeros(), parent=jnp.full((num_ids, 2), NO_BLOCK, jnp.int32),
        children=zeros(), depth=zeros(), hits=zeros(), stored=zeros(), released=zeros(), clock=jnp.int32(0),
        retention=zeros(2) if spec.retention and not windowed else None,
        expiry=zeros(2) if spec.retention and not windowed else None,
        time=jnp.zeros((2,), jnp.int32) if spec.retention and not windowed else None,
    )  # fmt: skip
    return Group(
        blocks=blocks,
        links=index.init_links(1 if windowed else num_ids),
        empty=num_blocks - 1 - jnp.arange(group.num_blocks, dtype=jnp.int32),
        num_empty=jnp.array(num_blocks),
        num_cached=jnp.int32(0),
        num_blocks=jnp.array(num_blocks),
        table=jnp.full((spec.max_seqs, spec.max_blocks_per_seq), NO_BLOCK, jnp.int32),
        policy=_init_policy(policy, num_ids, policy_state),
        anchor=jnp.full((num_ids,), NO_BLOCK, jnp.int32) if windowed else None,
        shadow=jnp.full((spec.groups[0].num_ids,), NO_BLOCK, jnp.int32) if windowed else None,
        host=_init_host(group, policy, policy_state) if group.num_host_blocks else None,
    )


def _init_policy(policy: EvictionPolicy, num_ids: int, given: Any) -> Any:
    """The policy's own state: a copy of the given one, since no two fields of a cache may share an array."""
    if given is None:
        return policy.init(num_ids)

    given = jax.tree.map(jnp.array, given)
    got, wanted = (
        jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
        for tree in (given, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, policy.init(num_ids))))
    )
    if jax.tree.structure(got) != jax.tree.structure(wanted) or jax.tree.leaves(got) != jax.tree.leaves(wanted):
        raise ValueError(f"policy_state: got {got}, wanted {wanted}, as the policy's init makes it")
    return given


def _init_host(group: GroupSpec, policy: EvictionPolicy, policy_state: Any) -> Host:
    ids = jnp.arange(group.num_ids, dtype=jnp.int32)
    return Host(
        slot=ids,
        below=jnp.zeros_like(ids),
        arriving=jnp.zeros_like(ids),
        moves=jnp.int32(0),
        stuck=jnp.zeros(ids.shape, jnp.bool_),
        empty=ids[::-1][: group.num_host_blocks],
        num_empty=jnp.int32(group.num_host_blocks),
        policy=_init_policy(policy, group.num_ids, policy_state),
    )


def available(group: Group) -> jax.Array:
    """i32[]; blocks that can be had: empty ones and cached ones."""
    return group.num_empty + group.num_cached


def hold_source(group: Group, source: jax.Array) -> Group:
    """Holds the block source i32[], or NO_BLOCK, which a transition copies from, until `let_go_of_sources`.

    This is neither a hit nor, at the end, a release: the block keeps its place in the order of eviction.
    """
    source = source[None]
    where = source >= 0
    idle = count(where & (pick(group.blocks.refcount, source) == 0) & group.on_device(source))
    refcount, idle = fence(group.blocks.refcount, idle)
    blocks = dataclasses.replace(group.blocks, refcount=add(refcount, source, COPYING, where))
    return dataclasses.replace(group, blocks=blocks, num_cached=group.num_cached - idle)


def let_go_of_sources(group: Group, sources: jax.Array) -> Group:
    """Undoes `hold_source` for sources i32[K]; a block may be there several times, NO_BLOCK is padding."""
    where = sources >= 0
    refcount = add(group.blocks.refcount, sources, -COPYING, where, unique=False)
    first = jnp.argmax(sources[:, None] == sources[None], axis=1) == np.arange(sources.shape[0])
    idle = count(where & first & (pick(refcount, sources) == 0) & group.on_device(sources))
    refcount, idle = fence(refcount, idle)
    blocks = dataclasses.replace(group.blocks, refcount=refcount)
    return dataclasses.replace(group, blocks=blocks, num_cached=group.num_cached + idle)


def hold(group: Group, ids: jax.Array, where: jax.Array, *, by: int = 1) -> Group:
    """Adds a holder to each of the findable blocks ids i32[K], all different, where bool[K]; counts as a hit.

    With by=-1 it undoes just that.
    """
    idle = 0 if by > 0 else 1
    changed = count(where & (pick(group.blocks.refcount, ids) == idle) & group.on_device(ids))
    refcount, changed = fence(group.blocks.refcount, changed)
    blocks = dataclasses.replace(
        group.blocks, refcount=add(refcount, ids, by, where), hits=add(group.blocks.hits, ids, by, where)
    )
    return dataclasses.replace(group, blocks=blocks, num_cached=group.num_cached - by * changed)


@pytree()
class Taken:
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
    blocks = dataclasses.replace(before, refcount=refcount, fill=fill, generation=count_)
    blocks, claimed = claim(blocks, victims, claimed)
    ok = (need <= available(group)) & (count(claimed) == wanted)
    blocks = _unclaim(blocks, victims, claimed & ~ok)
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
    blocks = dataclasses.replace(blocks, fill=fill, refcount=put(blocks.refcount, ids, 1, from_empty))
    blocks = tell_time(blocks, now, ok & (need > 0))
    group = dataclasses.replace(
        group,
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


def claim(blocks: Blocks, ids: jax.Array, where: jax.Array) -> tuple[Blocks, jax.Array]:
    """Gives each victim a holder and takes it off its parent's children.

    Whatever a policy names, what is claimed are different blocks, each behind all its findable children.
    """
    mark = -1 - np.arange(ids.shape[0], dtype=np.int32)  # for a moment the refcount tells the place in `ids`
    refcount = put(blocks.refcount, ids, mark, where, unique=False)
    named = where & (pick(refcount, ids) == mark)
    parent = pick(blocks.parent, ids)[:, 0]
    above = jnp.where(parent >= 0, pick(refcount, parent), 0)
    in_order = named & ((above >= 0) | (above < mark))
    children = add(blocks.children, parent, -1, in_order & (parent >= 0), unique=False)

    def reject(carry):
        children, claimed = carry
        bad = claimed & (pick(children, ids) != 0)
        return add(children, parent, 1, bad & (parent >= 0), unique=False), claimed & ~bad

    children, claimed = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1] & (pick(carry[0], ids) != 0)), reject, (children, in_order)
    )
    refcount = put(refcount, ids, claimed.astype(jnp.int32), named)
    return dataclasses.replace(blocks, refcount=refcount, children=children), claimed


def _unclaim(blocks: Blocks, ids: jax.Array, where: jax.Array) -> Blocks:
    parent = pick(blocks.parent, ids)[:, 0]
    return dataclasses.replace(
        blocks,
        refcount=add(blocks.refcount, ids, -1, where),
        children=add(blocks.children, parent, 1, where & (parent >= 0), unique=False),
    )


def give_back_shared(
    group: Group, policy: EvictionPolicy, ids: jax.Array, less: jax.Array | int, where: jax.Array, now: jax.Array
) -> Group:
    """Takes `less` i32[K] holders from each of ids i32[K], where bool[K]; an id may be there several times."""
    refcount = add(group.blocks.refcount, ids, -less, where, unique=False)
    # Of a block's places here one lets go of its last holder: which one, its refcount tells for a moment.
    free = where & (pick(refcount, ids) == 0)
    mark = -1 - np.arange(ids.shape[0], dtype=np.int32)
    refcount, free = fence(refcount, free)
    refcount = put(refcount, ids, mark, free, unique=False)
    last = free & (pick(refcount, ids) == mark)
    refcount, last = fence(refcount, last)
    blocks = dataclasses.replace(group.blocks, refcount=put(refcount, ids, 1, last))
    return give_back(dataclasses.replace(group, blocks=blocks), policy, ids, last, now)


def give_back(group: Group, policy: EvictionPolicy, ids: jax.Array, where: jax.Array, now: jax.Array) -> Group:
    """Takes a holder from each of ids i32[K], all different, where bool[K]; the first to leave stands in front.

    A block without holders stays cached if it is findable and becomes empty if not.
    """
    blocks, host = group.blocks, group.host
    freed = where & (pick(blocks.refcount, ids) == 1)
    cached = freed & (pick(blocks.fill, ids) > 0)
    here = group.on_device(ids)
    refcount, freed, cached, here = fence(blocks.refcount, freed, cached, here)
    emptied = freed & ~cached
    blocks = dataclasses.replace(blocks, refcount=add(refcount, ids, -1, where))
    blocks = stamp_release(blocks, ids, cached, now)
    if host is not None:
        away = jnp.where(cached & ~here, ids, NO_BLOCK)
        host = dataclasses.replace(host, policy=policy.touched(host.policy, blocks, away, now))
        cached = cached & here
    group = push_empty(dataclasses.replace(group, blocks=blocks, host=host), policy, ids, emptied)
    return dataclasses.replace(
        group,
        num_cached=group.num_cached + count(cached),
        policy=policy.touched(group.policy, blocks, jnp.where(cached, ids, NO_BLOCK), now),
    )


def push_empty(group: Group, policy: EvictionPolicy, ids: jax.Array, where: jax.Array) -> Group:
    """Puts blocks ids i32[K] without holders and contents, where bool[K], on the stack of their tier."""
    host = group.host
    if host is not None:
        here = group.on_device(ids)
        away, here = where & ~here, where & here
        (stack, pstate), ids, away, where, here = fence((host.empty, host.policy), ids, away, where, here)
        host = dataclasses.replace(
            host,
            empty=put(stack, host.num_empty + rank(away), ids, away),
            num_empty=host.num_empty + count(away),
            arriving=put(host.arriving, ids, 0, where),  # what still arrives there is nobody's
            stuck=put(host.stuck, ids, False, where),
            policy=policy.forgot(pstate, jnp.where(away, ids, NO_BLOCK)),
        )
        where = here
    return dataclasses.replace(
        group,
        empty=put(group.empty, group.num_empty + rank(where), ids, where),
        num_empty=group.num_empty + count(where),
        host=host,
    )


def merge(
    group: Group,
    policy: EvictionPolicy,
    own: jax.Array,
    target: jax.Array,
    where: jax.Array,
    first: jax.Array,
    now: jax.Array,
) -> Group:
    """Moves holders from blocks own i32[K] to equal ones, target i32[K], where bool[K]; own ones become empty.

    Of entries that share a target `first` bool[K] holds for one.
    """
    blocks = group.blocks
    unheld = count(where & first & (pick(blocks.refcount, target) == 0) & group.on_device(target))
    refcount, unheld = fence(blocks.refcount, unheld)
    blocks = dataclasses.replace(
        blocks,
        refcount=add(refcount, target, 1, where, unique=False),
        hits=add(blocks.hits, target, 1, where, unique=False),
    )
    group = dataclasses.replace(group, blocks=blocks, num_cached=group.num_cached - unheld)
    return give_back(group, policy, own, where, now)


def stamp_release(blocks: Blocks, ids: jax.Array, where: jax.Array, now: jax.Array) -> Blocks:
    """Notes when blocks ids i32[K], all different, lost their last holder, where bool[K]."""
    blocks = dataclasses.replace(
        blocks,
        released=put(blocks.released, ids, blocks.clock + rank(where), where),
        clock=blocks.clock + count(where),
    )
    if blocks.retention is None or blocks.expiry is None:
        return blocks
    expiry = later(time_at(blocks, now), pick(blocks.retention, ids)[:, 1])
    blocks = dataclasses.replace(blocks, expiry=put(blocks.expiry, ids, expiry, where))
    return tell_time(blocks, now, jnp.any(where))
