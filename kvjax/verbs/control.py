# SPDX-License-Identifier: Apache-2.0
"""Explicit control: holding blocks against eviction, evicting by name, and starting afresh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import add, count, either, is_among, pick, repeated
from kvjax.blocks import windows
from kvjax.blocks.holders import give_back
from kvjax.blocks.publish import children_first, descendants, forget_all, remove
from kvjax.blocks.tiers import find_unevictable, keep_host_policy
from kvjax.checks import integers, on_state, static_int32
from kvjax.events.records import EventKind, Events, Records, Status, record
from kvjax.state import COPYING, NO_BLOCK, CacheState, Group
from kvjax.verbs._request import assemble, chosen, first_failure, replace_group
from kvjax.verbs.init import init_group


@on_state
def pin(state: CacheState, blocks: ArrayLike, *, group: int = 0) -> tuple[CacheState, Events]:
    """Adds a holder to blocks, so that they stay whatever the rows do; the caller keeps the list for `unpin`.

    Args:
      state: the cache.
      blocks: i32[K]; different findable blocks, such as the filled ones of a row; NO_BLOCK is padding. The prefix of
        each must be pinned too, or among them. Costs a pass over all blocks.
      group: static; number of their group. In a window group only their blocks in the first group must be pinned.

    Returns:
      The cache; and no events. Status BAD_REQUEST if a block is unknown, not findable (a block that a row is still
      filling has nothing to keep) or named twice, or if its prefix would not be pinned.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, _ = kvjax.pin(state, [0, 1])  # its two full blocks
      >>> state, _ = kvjax.release(state, 0)
      >>> state.groups[0].blocks.refcount[:3].tolist()
      [1, 1, 0]

    Source: TensorRT-LLM's pinBlocks, for blocks that were stored for reuse.
    """
    chosen_group, ids = chosen(state, group), integers("blocks", blocks, ("K",))
    metadata = chosen_group.blocks
    named = ids != NO_BLOCK
    refcount = pick(metadata.refcount, ids)
    findable = (ids >= 0) & (ids < metadata.refcount.shape[0]) & (pick(metadata.fill, ids) > 0)
    ok = ~jnp.any(named & (~findable | repeated(ids)))
    pins = [_pins(each) for each in state.groups]
    pins[group] = add(pins[group], ids, 1, named & ok)
    ok = ok & _prefixes_are_pinned(state, pins)
    named = named & ok
    chosen_group = chosen_group.replace(
        blocks=metadata.replace(refcount=add(metadata.refcount, ids, 1, named)),
        num_cached=chosen_group.num_cached - count(named & (refcount == 0) & chosen_group.on_device(ids)),
    )
    state = replace_group(state, group, chosen_group)
    return state, assemble(state, first_failure((~ok, Status.BAD_REQUEST)))


@on_state
def unpin(state: CacheState, blocks: ArrayLike, *, now: ArrayLike = 0, group: int = 0) -> tuple[CacheState, Events]:
    """Takes the holder that `pin` added from the same blocks; those without holders become cached, children first.

    Args:
      state: the cache.
      blocks: i32[K]; as given to `pin`.
      now: i32[] ms.
      group: static; likewise.

    Returns:
      The cache; and no events. Status BAD_REQUEST if one of them is not pinned or is named twice, or is the prefix or
      first-group block of a block that stays pinned.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, _ = kvjax.pin(state, [0, 1])
      >>> state, _ = kvjax.release(state, 0)
      >>> after, _ = kvjax.unpin(state, [0, 1])
      >>> [s.groups[0].num_cached.item() for s in (state, after)]  # cached: the tail alone, then all three
      [1, 3]
    """
    chosen_group, ids, now = chosen(state, group), integers("blocks", blocks, ("K",)), integers("now", now, ())
    named = ids != NO_BLOCK
    pins = [_pins(each) for each in state.groups]
    pinned = (ids >= 0) & (ids < pins[group].shape[0]) & (pick(pins[group], ids) > 0)
    ok = ~jnp.any(named & (~pinned | repeated(ids)))
    pins[group] = add(pins[group], ids, -1, named & ok)
    ok = ok & _prefixes_are_pinned(state, pins)
    # As a row's blocks: the last one first, but whatever the order of the list, children before their parents.
    metadata = chosen_group.blocks
    order = children_first(metadata, ids[::-1], (named & ok & (pick(metadata.fill, ids) > 0))[::-1])
    policy = windows.policy_of(state, group)
    chosen_group = give_back(chosen_group, policy, order, ok & (order != NO_BLOCK), now)
    state = replace_group(state, group, chosen_group)
    return state, assemble(state, first_failure((~ok, Status.BAD_REQUEST)))


def _pins(group: Group) -> jax.Array:
    """i32[B]; holders of each block that are not rows."""
    table = group.table.reshape(-1)
    return add(group.blocks.refcount, table, -1, table >= 0, unique=False)


def _prefixes_are_pinned(state: CacheState, pins: list[jax.Array]) -> jax.Array:
    """bool[]; whether, with these pins i32[B] of each group, each pinned block's parent, or `group0_block`, is pinned.

    Eviction relies on it. Rows hold whole prefixes too, so a held block always has a held parent: parents are released
    after their children, and the oldest cached block is a leaf.
    """
    parent = state.groups[0].blocks.parent[:, 0]
    alone = jnp.any((pins[0] > 0) & (parent >= 0) & (pick(pins[0], parent) <= 0))
    for group, group_pins in zip(state.window_groups, pins[1:], strict=True):
        alone = alone | jnp.any((group_pins > 0) & (pick(pins[0], group.group0_blocks(group.ids)) <= 0))
    return ~alone


@on_state
def evict(state: CacheState, blocks: ArrayLike, *, max_removed: int | None = None) -> tuple[CacheState, Events]:
    """Empties cached blocks by name, with all their findable descendants; all or nothing.

    The window groups' blocks of the same prefixes are emptied too. Costs a pass over all blocks. Skips blocks
    that are not findable.

    Args:
      state: the cache.
      blocks: i32[K]; of the first group; NO_BLOCK is padding.
      max_removed: static; the most blocks that may leave, None for N + H.

    Returns:
      The cache; and events, E = max_removed a group: removed, children first. Status HELD if one of them is held or on
      the move, BAD_REQUEST for an unknown block or if more than `max_removed` would leave (`events.shortfall` says how
      many more).

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, _ = kvjax.release(state, 0)
      >>> state, events = kvjax.evict(state, [1])  # and block 2, its child
      >>> [(event["kind"], event["block"]) for event in kvjax.to_list(events)]
      [('removed', 2), ('removed', 1)]
    """
    group, ids = state.groups[0], integers("blocks", blocks, ("K",))
    metadata, num_ids = group.blocks, group.blocks.refcount.shape[0]
    most = num_ids if max_removed is None else min(static_int32("max_removed", max_removed, 1), num_ids)
    named = ids != NO_BLOCK
    unknown = jnp.any(named & ((ids < 0) | (ids >= num_ids)))
    doomed = is_among(num_ids, ids, named & ~unknown) & (metadata.fill > 0)
    doomed = descendants(metadata, doomed)
    total = count(doomed)
    over = jnp.maximum(total - most, 0)
    held = jnp.any(doomed & (metadata.refcount > 0)) | jnp.any(named & (pick(metadata.refcount, ids) > 0))
    held = held | jnp.any(doomed & group.moving(group.ids))
    status = first_failure((unknown | (over > 0), Status.BAD_REQUEST), (held, Status.HELD))
    state, removed = _empty(state, doomed, most, status == Status.OK)
    return state, assemble(state, status, removed=removed, shortfall=over)


def _empty(state: CacheState, doomed: jax.Array, most: int, ok: jax.Array) -> tuple[CacheState, list[Records]]:
    """Empties the first group's blocks doomed bool[B], at most `most`, where ok bool[]; also returns records, removed.

    Nothing holds or moves them, and all their findable descendants are among them.
    """
    group = state.groups[0]
    order = children_first(group.blocks, group.ids, doomed)[:most]
    group, removed = remove(group, 0, state.policy, order, pick(doomed, order) & ok)
    return forget_all(replace_group(state, 0, find_unevictable(group)), 0, removed)


@on_state
def forget_namespaces(
    state: CacheState, keep: ArrayLike, *, max_removed: int | None = None
) -> tuple[CacheState, Events]:
    """Empties the cached blocks of all namespaces but these, such as those of a model's old weights.

    Blocks that a row or a pin holds stay, findable in their namespace, so that rows in flight end as they began: call
    again once they are released. The window groups' blocks of the same prefixes are emptied too. Costs a pass over all
    blocks for each level of the tree.

    Args:
      state: the cache.
      keep: i32[K]; numbers of namespaces, as `admit` takes them; one may occur several times.
      max_removed: static; the most blocks that may leave, None for N + H.

    Returns:
      The cache; and events, E = max_removed a group: removed, children first. Status HELD if one of them is on the
      move, BAD_REQUEST if more than `max_removed` would leave (`events.shortfall` says how many more).

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> for seq, namespace in [(0, 7), (1, 8)]:  # the same prompt under the weights of two training steps
      ...     state, _ = kvjax.admit(state, seq, prompt, 10, namespace=namespace)
      ...     state, _ = kvjax.commit(state, prompt[None], [10], seqs=[seq])
      ...     state, _ = kvjax.release(state, seq)
      >>> state, events = kvjax.forget_namespaces(state, [8])
      >>> [kvjax.lookup(state, prompt, 10, namespace=namespace).cached_tokens.item() for namespace in (7, 8)]
      [0, 9]
    """
    group, keep = state.groups[0], integers("keep", keep, ("K",))
    metadata, num_ids = group.blocks, group.blocks.refcount.shape[0]
    most = num_ids if max_removed is None else min(static_int32("max_removed", max_removed, 1), num_ids)
    above, namespace = metadata.parent[:, 0], metadata.parent[:, 1]
    is_current = jnp.any(namespace[:, None] == keep[None], axis=1)
    forgotten = descendants(metadata, (metadata.fill > 0) & (above < 0) & ~is_current)
    moving = jnp.any(forgotten & (group.moving(group.ids) | (metadata.refcount >= COPYING)))
    doomed = forgotten & (metadata.refcount == 0)
    over = jnp.maximum(count(doomed) - most, 0)
    status = first_failure((over > 0, Status.BAD_REQUEST), (moving, Status.HELD))
    state, removed = _empty(state, doomed, most, status == Status.OK)
    return state, assemble(state, status, removed=removed, shortfall=over)


@on_state
def reset(state: CacheState) -> tuple[CacheState, Events]:
    """Forgets everything that is cached. Refused while a row or a pin holds anything.

    For new weights of a model: the K/V of the old ones would be reused. Or give each version a namespace of its own.

    The policy forgets all blocks; it keeps the rest of its own state, such as learned weights.

    Args:
      state: the cache.

    Returns:
      The cache; and events, E = 1 a group: cleared. Status HELD.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> _, events = kvjax.reset(state)
      >>> kvjax.Status(int(events.status[0]))  # row 0 is in use
      Status.HELD
      >>> state, _ = kvjax.release(state, 0)
      >>> state, events = kvjax.reset(state)
      >>> kvjax.to_list(events)
      [{'kind': 'cleared', 'group': 0}]

    Source: vLLM's reset_prefix_cache.
    """
    held = jnp.any(
        jnp.array([jnp.any(each.moving(each.ids)) | jnp.any(each.blocks.refcount > 0) for each in state.groups])
    )
    cleared = [record(EventKind.CLEARED, jnp.atleast_1d(~held), group=number) for number in range(len(state.groups))]
    state = either(held, state, emptied(state))
    return state, assemble(state, first_failure((held, Status.HELD)), other=cleared)


def emptied(state: CacheState) -> CacheState:
    """The cache without blocks, whoever holds them: of use where their bytes are lost. Rows are left as they are."""
    groups = []
    for number, group in enumerate(state.groups):
        policy = windows.policy_of(state, number)
        empty, old = init_group(state.spec, number, policy, group.num_blocks), group.blocks
        blocks = empty.blocks.replace(generation=old.generation, clock=old.clock, time=old.time)
        empty = empty.replace(blocks=blocks, policy=policy.forgot(group.policy, group.ids))
        groups.append(keep_host_policy(empty, group, policy))
    return state.replace(groups=tuple(groups))
