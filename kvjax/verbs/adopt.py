# SPDX-License-Identifier: Apache-2.0
"""`adopt` and `finish_adoption` bring K/V from outside into the cache, without a row.

    state, events = adopt(state, tokens, length, have)                 # reserves blocks
    ...                                                                # write bytes into events.adopted.pool_rows
    state, events = finish_adoption(state, events.adopted, arrived)    # arrived blocks become findable

A reserved block has a holder and is not findable, so nothing finds, evicts or writes it. You may call other verbs
between the two: `finish_adoption` allows for blocks that they publish or remove. `pin` and `unpin` take the holder for
a pin. So pin a block's prefix yourself, and unpin the prefix last: nobody else holds it after `finish_adoption`.
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


class _Decision(Pytree):
    """The decision on a prefix of F blocks, before anything is taken."""

    status: jax.Array  # i32[]
    fill: jax.Array  # i32[F]; tokens of each block, 0 beyond the prompt
    pinned: jax.Array  # i32[F]; blocks of the first group that are cached, NO_BLOCK after them
    is_new: jax.Array  # bool[G, F]; the columns that each group reserves a block for
    need: jax.Array  # i32[G]; blocks to reserve in each group
    missing: jax.Array  # i32[]; blocks missing in the group with the largest shortage


@on_state
def adopt(
    state: CacheState,
    tokens: ArrayLike,
    length: ArrayLike,
    have: ArrayLike,
    *,
    namespace: ArrayLike = 0,
    extra_ids: ArrayLike | None = None,
    requested_priority: ArrayLike = UNSTATED,
    hits: ArrayLike = 0,
    now: ArrayLike = 0,
    tiers: tuple[str, ...] = ("device",),
) -> tuple[CacheState, Events]:
    """Reserves blocks for the uncached part of a prefix whose K/V you have outside of the cache.

    Cached blocks of the prefix are pinned. This does not count as a hit. The first group reserves
    blocks for the rest, up to the first block missing in `have`. Each window group reserves a block for every
    column of this prefix in `have` where it has none. The prefix also ends before a block on the move, a block on a
    tier missing in `tiers`, and a key that belongs to other contents.

    The call reserves all blocks or none. Always call `finish_adoption` afterwards, even if no data arrived.

    Args:
      state: the cache.
      tokens: i32[T]; a text, with any padding.
      length: i32[]; the number of its tokens, 1..T. The last block may be partly filled.
      have: bool[G, F], or bool[F] for all groups; whether you have the K/V of each block, F = ceil(T / P).
      namespace: i32[]; see `Namespaces`.
      extra_ids: i32[T]; extra ids of the tokens, if the spec has them.
      requested_priority: i32[F, 2]; the priority and time to live (ms, -1 for ever) of each block, if the spec has
        retention. A priority of -1 means the default, and a single -1 means the default for all blocks.
      hits: i32[F], or i32[] for all blocks; earlier uses of each block, including merges with equal blocks.
      now: i32[]; the time in ms.
      tiers: static; see `admit`.

    Returns:
      The cache, and events with E = F records a group (more with both tiers): removed, updated. `events.adopted` has
      the pool rows to write the bytes into. Status BAD_REQUEST or NO_BLOCKS.

    Example:
      >>> from kvjax.stores import adopt, finish_adoption
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, events = adopt(kvjax.init(spec), np.arange(10), 10, [True, True, False])
      >>> events.adopted.pool_rows.tolist()  # for the bytes of two blocks; 8 is the scratch row
      [[0, 1, 8]]
      >>> state, _ = finish_adoption(state, events.adopted, [True, True, False])
      >>> kvjax.lookup(state, np.arange(10), 10)
      Match(8 tokens cached, 0 of them on the host)

    Source: vLLM's KV connectors, which allocate slots for the blocks of a remote cache before they arrive.
    """
    spec = state.spec
    tokens = integers("tokens", tokens, ("T",))
    now = integers("now", now, ())
    prompt = checked_prompt(checked_text(spec, tokens, extra_ids), length, namespace, spec.block_size)
    tiers = checked_tiers(tiers)
    num_columns = prompt.text.tokens.shape[0]
    have = flags("have", have, (len(state.groups), num_columns))
    check_retention(spec, requested_priority=requested_priority if np.ndim(requested_priority) else None)
    hits = each_row("hits", hits, (num_columns,))
    requested_priority = each_row("requested_priority", requested_priority, (num_columns, 2))

    state, plan = _decide(state, prompt, have, tiers)
    groups, taken, ok = _take(state, plan, now, tiers)
    status = jnp.where((plan.status == Status.OK) & ~ok, jnp.int32(Status.NO_BLOCKS), plan.status)
    stamps = [group.blocks.clock for group in groups]
    groups, new_blocks = _assign(groups, plan, taken, ok, prompt, requested_priority)
    pool_rows = [
        jnp.where(ids >= 0, group.pool_row(ids), group_spec.num_blocks)
        for group, ids, group_spec in zip(groups, new_blocks, spec.groups, strict=True)
    ]

    removed = [new.removed for new in reversed(taken)]
    updated = [new.updated for new in taken]
    moves = [new.orders for new in taken]
    after, removed, updated, moves = all_or_nothing(
        state, state.replace(groups=tuple(groups)), ok, removed, updated, moves
    )
    shortfall = jnp.where(status == Status.NO_BLOCKS, jnp.maximum(plan.missing, 1), 0)
    events = assemble(after, status, removed=removed, updated=updated, moves=moves, shortfall=shortfall)
    adopted = Adopted(
        text=prompt.text,
        fill=plan.fill,
        namespace=prompt.namespace,
        pinned=jnp.where(ok, plan.pinned, NO_BLOCK),
        blocks=jnp.stack(new_blocks),
        pool_rows=jnp.stack(pool_rows),
        hits=hits,
        stamps=jnp.stack(stamps),
    )
    return after, events.replace(adopted=adopted)


def _decide(state: CacheState, prompt: Prompt, have: jax.Array, tiers: tuple[str, ...]) -> tuple[CacheState, _Decision]:
    """Decides without writing. A `fence` around the returned state keeps later writes after these reads."""
    group = state.groups[0]
    block_size = state.spec.block_size
    column = jnp.arange(prompt.text.tokens.shape[0], dtype=jnp.int32)
    fill = jnp.clip(jnp.where(prompt.valid, prompt.length, 0) - column * block_size, 0, block_size)
    cached, matches = _cached(group, prompt.text, fill, prompt.namespace)
    num_cached = leading(matches & group.reachable(cached, tiers))
    end = leading((column < num_cached) | (have[0] & (cached < 0) & (fill > 0)))
    pinned = jnp.where(column < num_cached, cached, NO_BLOCK)
    is_new = [(column >= num_cached) & (column < end)]
    for window_group, group_have in zip(state.window_groups, have[1:], strict=True):
        is_new.append((column < end) & group_have & (window_group.in_this_group(pinned) < 0))
    on_host = (pinned >= 0) & ~group.on_device(pinned)
    idle = (pinned >= 0) & (on_host | (pick(group.blocks.refcount, pinned) == 0))
    free = [group.available - count(idle), *(window_group.available for window_group in state.window_groups)]
    refcount, fill, pinned, is_new, free = fence(
        group.blocks.refcount, fill, pinned, jnp.stack(is_new), jnp.stack(free)
    )
    state = replace_group(state, 0, group.replace(blocks=group.blocks.replace(refcount=refcount)))

    need = jnp.sum(is_new, axis=1, dtype=jnp.int32)
    missing = jnp.max(need - free)
    status = first_failure((~prompt.valid, Status.BAD_REQUEST), (missing > 0, Status.NO_BLOCKS))
    pinned = jnp.where(jnp.any(need > 0), pinned, NO_BLOCK)  # if nothing is reserved, nothing is pinned
    return state, _Decision(status, fill, pinned, is_new, need, missing)


def _cached(group: Group, text: Any, fill: jax.Array, namespace: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the blocks i32[F] with the keys of a text's blocks. Also returns bool[F], whether each of them matches.

    A block matches if it and all blocks before it hold the text.
    """
    blocks = group.blocks
    column = jnp.arange(fill.shape[0], dtype=jnp.int32)
    cached = index.find(blocks, group.links, keys_of(text, fill, namespace))
    cached = jnp.where(fill > 0, cached, NO_BLOCK)
    parents = link(blocks, jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), cached[:-1]]), namespace)
    same = same_content(blocks, cached, text, fill) & jnp.all(pick(blocks.parent, cached) == parents, axis=-1)
    return cached, column < leading(same & (fill > 0))


def keys_of(text: Any, fill: jax.Array, namespace: jax.Array) -> jax.Array:
    """u32[F, 2]; the prefix key of each block of a text i32[F, P] with fill i32[F] tokens."""
    column = jnp.arange(fill.shape[0], dtype=jnp.int32)
    return prefix_keys(root_key(namespace)[None], text, fill, column, chain)


def _take(
    state: CacheState, plan: _Decision, now: jax.Array, tiers: tuple[str, ...]
) -> tuple[list[Group], list[Taken], jax.Array]:
    """Pins the cached blocks and takes new blocks. Returns the groups, a `Taken` of each, and whether it was done."""
    need = jnp.where(plan.status == Status.OK, plan.need, 0)
    ok = plan.status == Status.OK
    pinned = plan.pinned
    block_priorities = priorities(state, now, tiers)
    is_pinned = ok & (pinned >= 0)
    onboarded, _ = compact(jnp.where(is_pinned & ~state.groups[0].on_device(pinned), pinned, NO_BLOCK))

    def take_in(group_index: int, group: Group, ok: jax.Array, **options: Any) -> Taken:
        return take(
            group,
            group_index,
            windows.policy_of(state, group_index),
            jnp.where(ok, need[group_index], 0),
            pinned.shape[0],
            now,
            priorities=block_priorities[group_index],
            min_priority=state.spec.offload_min_priority,
            **options,
        )

    first = take_in(0, hold(state.groups[0], pinned, is_pinned, hit=False), ok, onboarded=onboarded)
    groups = [hold(first.group, pinned, is_pinned & ~first.ok, by=-1, hit=False)]
    taken = [first]
    ok = ok & first.ok
    for group_index, group in enumerate(state.window_groups, 1):
        # Blocks that left the first group's index leave the index of the other groups too.
        group, left_index = forget(group, group_index, first.removed)
        new = take_in(group_index, group, ok)
        groups.append(new.group)
        taken.append(new.replace(removed=joined(left_index, new.removed)))
        ok = ok & new.ok
    return groups, taken, ok


def _assign(
    groups: list[Group],
    plan: _Decision,
    taken: list[Taken],
    ok: jax.Array,
    prompt: Prompt,
    requested_priority: jax.Array,
) -> tuple[list[Group], list[jax.Array]]:
    """Assigns the taken blocks to columns and marks them as reserved. Also returns the blocks i32[F] of each group."""
    new_rank = jnp.cumsum(plan.is_new, axis=1, dtype=jnp.int32) - plan.is_new.astype(jnp.int32)
    new_blocks = [
        jnp.where(is_new & ok, pick(new.ids, rank), NO_BLOCK)
        for is_new, rank, new in zip(plan.is_new, new_rank, taken, strict=True)
    ]
    node = jnp.where(plan.pinned >= 0, plan.pinned, new_blocks[0])
    groups = [_reserve(group, ids) for group, ids in zip(groups, new_blocks, strict=True)]
    groups[0] = _write(groups[0], new_blocks[0], node, prompt, requested_priority)
    groups[1:] = [
        windows.set_group0_blocks(group, ids, node) for group, ids in zip(groups[1:], new_blocks[1:], strict=True)
    ]
    return groups, new_blocks


def _reserve(group: Group, ids: jax.Array) -> Group:
    """Marks blocks ids i32[F], NO_BLOCK for none, as reserved. `finish_adoption` recognises them by the clock."""
    blocks = group.blocks
    where = ids >= 0
    released = put(blocks.released, ids, blocks.clock, where)
    hits = put(blocks.hits, ids, LOST, where)
    clock = blocks.clock + jnp.any(where).astype(jnp.int32)
    return group.replace(blocks=blocks.replace(released=released, hits=hits, clock=clock))


def _write(group: Group, ids: jax.Array, node: jax.Array, prompt: Prompt, requested_priority: jax.Array) -> Group:
    """Writes text, retention and parents of reserved blocks ids i32[F]; node i32[F] are the blocks of the prefix."""
    blocks = group.blocks
    where = ids >= 0
    before = jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), node[:-1]])
    parent = jnp.stack([before, jnp.broadcast_to(prompt.namespace, before.shape)], axis=-1)
    blocks = apply_retention(blocks, ids, jax.tree.map(lambda _: requested_priority, blocks.retention), where)
    text = put(blocks.text, ids, prompt.text, where)
    parent = put(blocks.parent, ids, parent, where)
    return group.replace(blocks=blocks.replace(text=text, parent=parent))


@on_state
def finish_adoption(
    state: CacheState, adopted: Adopted, arrived: ArrayLike, *, now: ArrayLike = 0
) -> tuple[CacheState, Events]:
    """Makes reserved blocks findable if their K/V have arrived, and releases all blocks held by `adopt`.

    A block after a missing block is dropped and becomes empty. If another verb has published the same contents since
    `adopt`, the published block stays and the reserved block is dropped. Nothing becomes findable after a block that
    has left the device or the index.

    Args:
      state: the cache.
      adopted: `events.adopted` of a call of `adopt`; use it once.
      arrived: bool[G, F] or bool[F]; whether the K/V of each reserved block are in its pool row.
      now: i32[]; the time in ms.

    Returns:
      The cache, and events with E = F records a group: stored. Status BAD_REQUEST if the blocks are not reserved, or no
      longer.

    Example:
      >>> from kvjax.stores import adopt, finish_adoption
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, events = adopt(kvjax.init(spec), np.arange(10), 10, [True, True, False])
      >>> state, events = finish_adoption(state, events.adopted, [True, False, False])  # the second block is missing
      >>> [(event["kind"], event["tokens"]) for event in kvjax.to_list(events)], state.groups[0].num_empty.item()
      ([('stored', [0, 1, 2, 3])], 7)
    """
    if not isinstance(adopted, Adopted):
        raise ValueError(f"adopted: got a {type(adopted).__name__}, wanted `events.adopted` of a call of adopt")
    arrived = flags("arrived", arrived, adopted.blocks.shape)
    now = integers("now", now, ())
    ok = functools.reduce(
        jnp.logical_and,
        [_are_reserved(*group) for group in zip(state.groups, adopted.blocks, adopted.stamps, strict=True)],
        jnp.all((adopted.pinned < 0) | (pick(state.groups[0].blocks.refcount, adopted.pinned) > 0)),
    )
    groups, ok = fence(state.groups, ok)
    state = state.replace(groups=groups)
    status = first_failure((~ok, Status.BAD_REQUEST))
    ok = ok & jnp.any(adopted.blocks >= 0)  # if nothing was reserved, nothing was pinned

    reserved = adopted.blocks[0]
    group, stored, node, before, published = _publish_arrived(state.groups[0], adopted, reserved, arrived, ok)
    groups = [group]
    records = [stored]
    for group_index, window_group in enumerate(state.window_groups, 1):
        window_reserved = jnp.where(ok, adopted.blocks[group_index], NO_BLOCK)
        window_group, stored = _link(
            window_group, group_index, group, window_reserved, node, arrived[group_index], adopted.fill
        )
        changed = jnp.concatenate([published, published])
        window_group = windows.mark(window_group, group, jnp.concatenate([node, before]), changed, now)
        (window_group,) = fence(window_group)  # the policy has read the refcounts that are written below
        groups.append(_release(state, window_group, group_index, window_reserved[::-1], ok, now))
        records.append(stored)
    # Releases children before their parents, then reserved blocks without data and pinned blocks that were lost.
    rest = [jnp.where(ids == node, NO_BLOCK, ids) for ids in (reserved, adopted.pinned)]
    groups[0] = _release(state, group, 0, jnp.concatenate([part[::-1] for part in (node, *rest)]), ok, now)
    state = state.replace(groups=tuple(groups))
    return state, assemble(state, status, stored=records)


def _publish_arrived(
    group: Group, adopted: Adopted, reserved: jax.Array, arrived: jax.Array, ok: jax.Array
) -> tuple[Group, Records, jax.Array, jax.Array, jax.Array]:
    """Publishes the first group's reserved blocks i32[F], up to the first missing block, where ok bool[].

    Returns the group, F records (stored), the blocks of the findable prefix i32[F] with a holder each, their parents
    i32[F], and whether each was published, bool[F].
    """
    fill = adopted.fill
    column = jnp.arange(fill.shape[0], dtype=jnp.int32)
    cached, matches = _cached(group, adopted.text, fill, adopted.namespace)
    num_cached = leading(matches & group.reachable(cached, ("device",)))
    keys = keys_of(adopted.text, fill, adopted.namespace)
    is_new = (reserved >= 0) & arrived[0] & (cached < 0)
    end = leading((column < num_cached) | (is_new & (earliest_with_key(keys, is_new) == column)))
    published = ok & (column >= num_cached) & (column < end)
    joins = ok & (column < num_cached)
    node = jnp.where(column < end, jnp.where(column < num_cached, cached, reserved), NO_BLOCK)
    refcount, node, published, joins = fence(group.blocks.refcount, node, published, joins & (node != adopted.pinned))
    group = group.replace(blocks=group.blocks.replace(refcount=refcount))
    before = jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), node[:-1]])
    parent = jnp.stack([before, jnp.broadcast_to(adopted.namespace, before.shape)], axis=-1)
    group, stored = publish(group, reserved, published, keys, parent, column, fill)
    group = hold(group, node, joins, hit=False)
    # The mark LOST ends here.
    hits = put(group.blocks.hits, reserved, jnp.where(published, adopted.hits, 0), ok & (reserved >= 0))
    return group.replace(blocks=group.blocks.replace(hits=hits)), stored, node, before, published


def _are_reserved(group: Group, ids: jax.Array, stamp: jax.Array) -> jax.Array:
    """bool[]; whether a single call of `adopt` has reserved blocks ids i32[F], NO_BLOCK for none."""
    blocks = group.blocks
    reserved = (ids < blocks.fill.shape[0]) & (pick(blocks.refcount, ids) > 0) & (pick(blocks.fill, ids) == 0)
    reserved = reserved & (pick(blocks.hits, ids) == LOST) & (pick(blocks.released, ids) == stamp)
    return jnp.all((ids < 0) | reserved)


def _link(
    group: Group,
    group_index: int,
    tree: Group,
    reserved: jax.Array,
    node: jax.Array,
    arrived: jax.Array,
    fill: jax.Array,
) -> tuple[Group, Records]:
    """Makes a window group's reserved blocks i32[F] findable, where arrived bool[F] and its prefix has no block yet.

    node i32[F] are the blocks of the prefix in the first group, `tree`. Also returns F records, stored.
    """
    where = (reserved >= 0) & arrived & (node >= 0) & (group.in_this_group(node) < 0)
    group, where = fence(group, where)
    hits = put(group.blocks.hits, reserved, 0, reserved >= 0)  # no longer LOST
    group = group.replace(blocks=group.blocks.replace(hits=hits))
    return windows.link_blocks(group, group_index, tree.blocks, reserved, node, where, fill)


def _release(state: CacheState, group: Group, group_index: int, ids: jax.Array, ok: jax.Array, now: jax.Array) -> Group:
    """Takes a holder from each of blocks ids i32[.] of a group, NO_BLOCK for none, where ok bool[]."""
    return give_back(group, windows.policy_of(state, group_index), ids, ok & (ids >= 0), now)
