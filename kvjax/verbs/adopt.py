# SPDX-License-Identifier: Apache-2.0
"""`adopt` and `land`: K/V from outside enter the cache, without a row.

    state, events = adopt(state, tokens, length, have)      # blocks are reserved; events.adopted says where
    write the bytes at hand into events.adopted.pool_rows
    state, events = land(state, events.adopted, arrived)    # those that came become findable

A reserved block has a holder and is not findable, so that nobody finds, evicts or writes it. Other verbs may come
between the two: what others publish or remove meanwhile is found by `land`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import Pytree, compact, count, fence, leading, pick, put
from kvjax.blocks import index, windows
from kvjax.blocks.dedup import earliest_with_key, link, same_content
from kvjax.blocks.holders import give_back, hold
from kvjax.blocks.keys import chain, prefix_keys, root_key
from kvjax.blocks.publish import forget, publish
from kvjax.blocks.rows import Prompt
from kvjax.blocks.take import take
from kvjax.blocks.tiers import priorities
from kvjax.blocks.victims import Taken
from kvjax.checks import each_row, flags, integers, on_state
from kvjax.events.records import Adopted, Events, Records, Status, joined
from kvjax.policies.retention import UNSTATED, apply_retention
from kvjax.state import LOST, NO_BLOCK, CacheState, Group
from kvjax.verbs._request import (
    all_or_nothing,
    assemble,
    check_retention,
    checked_prompt,
    checked_text,
    checked_tiers,
    first_failure,
    replace_group,
)


class _Plan(Pytree):
    """The decision on a prefix of F blocks."""

    fill: jax.Array  # i32[F]; tokens of each block, 0 beyond the prompt
    held: jax.Array  # i32[F]; blocks of the first group that are found, NO_BLOCK after them
    is_new: jax.Array  # bool[G, F]; the columns that each group reserves a block for
    free: jax.Array  # i32[G]; blocks of each group that can be taken for them


@on_state
def adopt(
    state: CacheState,
    tokens: ArrayLike,
    length: ArrayLike,
    have: ArrayLike,
    *,
    namespace: ArrayLike = 0,
    extra_ids: ArrayLike | None = None,
    stated: ArrayLike = UNSTATED,
    hits: ArrayLike = 0,
    now: ArrayLike = 0,
    tiers: tuple[str, ...] = ("device",),
) -> tuple[CacheState, Events]:
    """Reserves blocks for the part of a prefix whose K/V are at hand outside and that the cache lacks.

    What the first group has of the prefix is held, which counts as no hit. Blocks are reserved for the rest, up to the
    first one that is not in `have`; and in each window group for every column of that prefix in `have` that has none.
    The prefix also ends before a block on the move, one on a tier that is not in `tiers`, and a key that other contents
    have. All or nothing. `land` is to follow, whatever came.

    Args:
      state: the cache.
      tokens: i32[T]; a text, padded with anything.
      length: i32[]; its tokens, 1..T; the last block may be partly filled.
      have: bool[G, F], or bool[F] for all groups; whether the K/V of each block are at hand, F = ceil(T / P).
      namespace: i32[].
      extra_ids: i32[T], where the spec asks for them.
      stated: i32[F, 2]; the priority and time to live (ms, -1 for ever) of each block, where the spec has retention; a
        priority of -1 is the default. -1 for all: so.
      hits: i32[F], or i32[] for all; how often each block was reused, merges with equal ones included.
      now: i32[] ms.
      tiers: static; as in `admit`.

    Returns:
      The cache; and events, E = F a group (more with both tiers): removed, updated. `events.adopted` says which pool
      rows take the bytes. Status BAD_REQUEST or NO_BLOCKS.

    Example:
      >>> from kvjax.stores import adopt, land
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, events = adopt(kvjax.init(spec), np.arange(10), 10, [True, True, False])
      >>> events.adopted.pool_rows.tolist()  # for the bytes of two blocks; 8 is the scratch row
      [[0, 1, 8]]
      >>> state, _ = land(state, events.adopted, [True, True, False])
      >>> kvjax.lookup(state, np.arange(10), 10)
      Match(8 tokens cached, 0 of them on the host)

    Source: vLLM's KV connectors, which allocate slots for what a remote cache has before it arrives.
    """
    spec, tokens, now = state.spec, integers("tokens", tokens, ("T",)), integers("now", now, ())
    prompt = checked_prompt(checked_text(spec, tokens, extra_ids), length, namespace, spec.block_size)
    tiers, columns = checked_tiers(tiers), prompt.text.tokens.shape[0]
    have = flags("have", have, (len(state.groups), columns))
    check_retention(spec, stated=stated if np.ndim(stated) else None)
    hits, stated = each_row("hits", hits, (columns,)), each_row("stated", stated, (columns, 2))
    state, plan = _plan(state, prompt, have, tiers)
    need = jnp.sum(plan.is_new, axis=1, dtype=jnp.int32)
    missing = jnp.max(need - plan.free)
    status = first_failure((~prompt.valid, Status.BAD_REQUEST), (missing > 0, Status.NO_BLOCKS))
    held = jnp.where(jnp.any(need > 0), plan.held, NO_BLOCK)  # with nothing to land, nothing is held
    groups, taken, ok = _take(state, held, jnp.where(status == Status.OK, need, 0), status == Status.OK, now, tiers)
    status = jnp.where((status == Status.OK) & ~ok, jnp.int32(Status.NO_BLOCKS), status)
    rank_of_new = jnp.cumsum(plan.is_new, axis=1, dtype=jnp.int32) - plan.is_new.astype(jnp.int32)
    ids = [
        jnp.where(is_new & ok, pick(new.ids, at), NO_BLOCK)
        for is_new, at, new in zip(plan.is_new, rank_of_new, taken, strict=True)
    ]
    node = jnp.where(held >= 0, held, ids[0])
    stamps = [group.blocks.clock for group in groups]
    groups = [_reserve(group, own) for group, own in zip(groups, ids, strict=True)]
    groups[0] = _write(groups[0], ids[0], node, prompt, stated)
    groups[1:] = [windows.note(group, own, node) for group, own in zip(groups[1:], ids[1:], strict=True)]
    pool_rows = [
        jnp.where(own >= 0, group.pool_row(own), group_spec.num_blocks)
        for group, own, group_spec in zip(groups, ids, spec.groups, strict=True)
    ]
    reports = [[new.removed for new in reversed(taken)], [new.updated for new in taken], [new.orders for new in taken]]
    after, removed, updated, moves = all_or_nothing(state, state.replace(groups=tuple(groups)), ok, *reports)
    shortfall = jnp.where(status == Status.NO_BLOCKS, jnp.maximum(missing, 1), 0)
    events = assemble(after, status, removed=removed, updated=updated, moves=moves, shortfall=shortfall)
    adopted = Adopted(
        text=prompt.text, fill=plan.fill, namespace=prompt.namespace, pinned=jnp.where(ok, held, NO_BLOCK),
        blocks=jnp.stack(ids), pool_rows=jnp.stack(pool_rows), hits=hits, stamps=jnp.stack(stamps),
    )  # fmt: skip
    return after, events.replace(adopted=adopted)


def _plan(state: CacheState, prompt: Prompt, have: jax.Array, tiers: tuple[str, ...]) -> tuple[CacheState, _Plan]:
    """Decides by reading alone; returns the state behind a `fence`, so that later writes come after these reads."""
    group, size, columns = state.groups[0], state.spec.block_size, prompt.text.tokens.shape[0]
    column = jnp.arange(columns, dtype=jnp.int32)
    fill = jnp.clip(jnp.where(prompt.valid, prompt.length, 0) - column * size, 0, size)
    cached, matches = _cached(group, prompt.text, fill, prompt.namespace)
    num_found = leading(matches & group.reachable(cached, tiers))
    end = leading((column < num_found) | (have[0] & (cached < 0) & (fill > 0)))
    held = jnp.where(column < num_found, cached, NO_BLOCK)
    is_new = [(column >= num_found) & (column < end)]
    for other, at_hand in zip(state.window_groups, have[1:], strict=True):
        is_new.append((column < end) & at_hand & (other.in_this_group(held) < 0))
    on_host = (held >= 0) & ~group.on_device(held)
    idle = (held >= 0) & (on_host | (pick(group.blocks.refcount, held) == 0))
    free = [group.available - count(idle), *(other.available for other in state.window_groups)]
    refcount, plan = fence(group.blocks.refcount, _Plan(fill, held, jnp.stack(is_new), jnp.stack(free)))
    return replace_group(state, 0, group.replace(blocks=group.blocks.replace(refcount=refcount))), plan


def _cached(group: Group, text: Any, fill: jax.Array, namespace: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks i32[F] that have the keys of a text's blocks; and bool[F], which of them hold it.

    A block holds it only behind blocks that do.
    """
    blocks, column = group.blocks, jnp.arange(fill.shape[0], dtype=jnp.int32)
    cached = index.find(blocks, group.links, keys_of(text, fill, namespace))
    cached = jnp.where(fill > 0, cached, NO_BLOCK)
    parents = link(blocks, jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), cached[:-1]]), namespace)
    same = same_content(blocks, cached, text, fill) & jnp.all(pick(blocks.parent, cached) == parents, axis=-1)
    return cached, column < leading(same & (fill > 0))


def keys_of(text: Any, fill: jax.Array, namespace: jax.Array) -> jax.Array:
    """u32[F, 2]; the key of the prefix that ends in each block of a text i32[F, P], of which fill i32[F] count."""
    column = jnp.arange(fill.shape[0], dtype=jnp.int32)
    return prefix_keys(root_key(namespace)[None], text, fill, column, chain)


def _take(
    state: CacheState, held: jax.Array, need: jax.Array, ok: jax.Array, now: jax.Array, tiers: tuple[str, ...]
) -> tuple[list[Group], list[Taken], jax.Array]:
    """Holds what was found, and takes need i32[G] blocks; also returns what was taken of each group, and whether."""
    block_priorities, is_held, size = priorities(state, now, tiers), ok & (held >= 0), held.shape[0]
    onboarded, _ = compact(jnp.where(is_held & ~state.groups[0].on_device(held), held, NO_BLOCK))

    def of_group(number: int, group: Group, ok: jax.Array, **options: Any) -> Taken:
        return take(
            group, number, windows.policy_of(state, number), jnp.where(ok, need[number], 0), size, now,
            priorities=block_priorities[number], min_priority=state.spec.offload_min_priority, **options,
        )  # fmt: skip

    first = of_group(0, hold(state.groups[0], held, is_held, hit=False), ok, onboarded=onboarded)
    groups, taken, ok = [hold(first.group, held, is_held & ~first.ok, by=-1, hit=False)], [first], ok & first.ok
    for number, group in enumerate(state.window_groups, 1):
        group, gone = forget(group, number, first.removed)  # what left the first group's index leaves the others' too
        new = of_group(number, group, ok)
        groups, taken, ok = [*groups, new.group], [*taken, new.replace(removed=joined(gone, new.removed))], ok & new.ok
    return groups, taken, ok


def _reserve(group: Group, ids: jax.Array) -> Group:
    """Marks blocks ids i32[F], NO_BLOCK for none, as reserved: `land` knows them by the reading of the clock."""
    blocks, where = group.blocks, ids >= 0
    released, hits = put(blocks.released, ids, blocks.clock, where), put(blocks.hits, ids, LOST, where)
    clock = blocks.clock + jnp.any(where).astype(jnp.int32)
    return group.replace(blocks=blocks.replace(released=released, hits=hits, clock=clock))


def _write(group: Group, ids: jax.Array, node: jax.Array, prompt: Prompt, stated: jax.Array) -> Group:
    """Writes text, retention and parents of reserved blocks ids i32[F]; node i32[F] has the whole prefix."""
    blocks, where = group.blocks, ids >= 0
    before = jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), node[:-1]])
    parent = jnp.stack([before, jnp.broadcast_to(prompt.namespace, before.shape)], axis=-1)
    blocks = apply_retention(blocks, ids, jax.tree.map(lambda _: stated, blocks.retention), where)
    text, parent = put(blocks.text, ids, prompt.text, where), put(blocks.parent, ids, parent, where)
    return group.replace(blocks=blocks.replace(text=text, parent=parent))


@on_state
def land(state: CacheState, adopted: Adopted, arrived: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Makes the reserved blocks findable whose K/V have arrived, and releases all that `adopt` holds.

    A block behind one that is missing is dropped, and becomes empty. Where others have published the same meanwhile,
    theirs stays. Nothing becomes findable behind a block that has left the device or the index.

    Args:
      state: the cache.
      adopted: of the events of `adopt`; each can land once.
      arrived: bool[G, F], or bool[F]; whether the K/V of each reserved block are in its pool row.
      now: i32[] ms.

    Returns:
      The cache; and events, E = F a group: stored. Status BAD_REQUEST if these blocks are not reserved (any more).

    Example:
      >>> from kvjax.stores import adopt, land
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, events = adopt(kvjax.init(spec), np.arange(10), 10, [True, True, False])
      >>> state, events = land(state, events.adopted, [True, False, False])  # the second block did not arrive
      >>> [(event["kind"], event["tokens"]) for event in kvjax.to_list(events)], state.groups[0].num_empty.item()
      ([('stored', [0, 1, 2, 3])], 7)
    """
    if not isinstance(adopted, Adopted):
        raise ValueError(f"adopted: got a {type(adopted).__name__}, wanted the `adopted` of the events of adopt")
    arrived, now = flags("arrived", arrived, adopted.blocks.shape), integers("now", now, ())
    ok = functools.reduce(
        jnp.logical_and,
        [_are_reserved(*each) for each in zip(state.groups, adopted.blocks, adopted.stamps, strict=True)],
        jnp.all((adopted.pinned < 0) | (pick(state.groups[0].blocks.refcount, adopted.pinned) > 0)),
    )
    groups, ok = fence(state.groups, ok)
    state, status = state.replace(groups=groups), first_failure((~ok, Status.BAD_REQUEST))
    ok = ok & jnp.any(adopted.blocks >= 0)  # nothing is held for a prefix of which nothing was reserved
    group, fill, own = state.groups[0], adopted.fill, adopted.blocks[0]
    column = jnp.arange(fill.shape[0], dtype=jnp.int32)
    cached, matches = _cached(group, adopted.text, fill, adopted.namespace)
    num_cached = leading(matches & group.reachable(cached, ("device",)))
    keys = keys_of(adopted.text, fill, adopted.namespace)
    is_new = (own >= 0) & arrived[0] & (cached < 0)
    end = leading((column < num_cached) | (is_new & (earliest_with_key(keys, is_new) == column)))
    published, joins = ok & (column >= num_cached) & (column < end), ok & (column < num_cached)
    node = jnp.where(column < end, jnp.where(column < num_cached, cached, own), NO_BLOCK)
    refcount, node, published, joins = fence(group.blocks.refcount, node, published, joins & (node != adopted.pinned))
    group = group.replace(blocks=group.blocks.replace(refcount=refcount))
    before = jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), node[:-1]])
    parent = jnp.stack([before, jnp.broadcast_to(adopted.namespace, before.shape)], axis=-1)
    group, stored = publish(group, own, published, keys, parent, column, fill)
    group = hold(group, node, joins, hit=False)
    hits = put(group.blocks.hits, own, jnp.where(published, adopted.hits, 0), ok & (own >= 0))  # no longer LOST
    group = group.replace(blocks=group.blocks.replace(hits=hits))
    groups, records = [group], [stored]
    for number, other in enumerate(state.window_groups, 1):
        of_group = jnp.where(ok, adopted.blocks[number], NO_BLOCK)
        other, stored = _link(other, number, group, of_group, node, arrived[number], fill)
        changed = jnp.concatenate([published, published])
        other = windows.mark(other, group, jnp.concatenate([node, before]), changed, now)
        (other,) = fence(other)  # the policy has read the refcounts that are written below
        groups, records = [*groups, _release(state, other, number, of_group[::-1], ok, now)], [*records, stored]
    # Children before their parents; then what was reserved in vain, and what was lost meanwhile.
    rest = [jnp.where(ids == node, NO_BLOCK, ids) for ids in (own, adopted.pinned)]
    groups[0] = _release(state, group, 0, jnp.concatenate([part[::-1] for part in (node, *rest)]), ok, now)
    state = state.replace(groups=tuple(groups))
    return state, assemble(state, status, stored=records)


def _are_reserved(group: Group, ids: jax.Array, stamp: jax.Array) -> jax.Array:
    """bool[]; whether blocks ids i32[F], NO_BLOCK for none, are those that one call of `adopt` has reserved."""
    blocks = group.blocks
    reserved = (ids < blocks.fill.shape[0]) & (pick(blocks.refcount, ids) > 0) & (pick(blocks.fill, ids) == 0)
    reserved = reserved & (pick(blocks.hits, ids) == LOST) & (pick(blocks.released, ids) == stamp)
    return jnp.all((ids < 0) | reserved)


def _link(
    group: Group, number: int, tree: Group, own: jax.Array, node: jax.Array, arrived: jax.Array, fill: jax.Array
) -> tuple[Group, Records]:
    """Makes a window group's reserved blocks own i32[F] findable beside blocks node i32[F] that have none, if arrived.

    Also returns F records, stored.
    """
    where = (own >= 0) & arrived & (node >= 0) & (group.in_this_group(node) < 0)
    group, where = fence(group, where)
    group = group.replace(blocks=group.blocks.replace(hits=put(group.blocks.hits, own, 0, own >= 0)))  # not LOST
    return windows.link_blocks(group, number, tree.blocks, own, node, where, fill)


def _release(state: CacheState, group: Group, number: int, ids: jax.Array, ok: jax.Array, now: jax.Array) -> Group:
    """Takes a holder from each of blocks ids i32[.] of a group, NO_BLOCK for none, where ok bool[]."""
    return give_back(group, windows.policy_of(state, number), ids, ok & (ids >= 0), now)
