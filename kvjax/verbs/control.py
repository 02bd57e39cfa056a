# SPDX-License-Identifier: Apache-2.0
"""Verbs for explicit control: protect blocks from eviction, evict chosen blocks, and empty the cache."""

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
from kvjax.verbs._request import assemble, checked_group, first_failure, replace_group
from kvjax.verbs.init import init_group


@on_state
def pin(state: CacheState, blocks: ArrayLike, *, group: int = 0) -> tuple[CacheState, Events]:
    """Adds a holder to blocks, which keeps them cached until `unpin`, whatever the rows do. Save the list for `unpin`.

    Args:
      state: the cache.
      blocks: i32[K]; different findable blocks, such as the filled blocks of a row. NO_BLOCK is padding. The prefix of
        each block must be pinned already, or be in the list. Costs a pass over all blocks.
      group: static; the index of their group. In a window group, only the blocks of the same prefixes in the first
        group must be pinned.

    Returns:
      The cache, and no events. Status BAD_REQUEST if a block is unknown, named twice or not findable (a row is still
      filling it), or if its prefix would not be pinned.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, _ = kvjax.pin(state, [0, 1])  # its two full blocks
      >>> state, _ = kvjax.release(state, 0)
      >>> state.groups[0].blocks.refcount[:3].tolist()
      [1, 1, 0]

    Source: TensorRT-LLM's pinBlocks, for blocks stored for reuse.
    """
    chosen_group = checked_group(state, group)
    ids = integers("blocks", blocks, ("K",))
    metadata = chosen_group.blocks
    named = ids != NO_BLOCK
    refcount = pick(metadata.refcount, ids)
    findable = (ids >= 0) & (ids < metadata.refcount.shape[0]) & (pick(metadata.fill, ids) > 0)
    ok = ~jnp.any(named & (~findable | repeated(ids)))
    pins = [_pins(member) for member in state.groups]
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
    """Takes back the holder added by `pin`. Blocks without another holder become cached, children first.

    Args:
      state: the cache.
      blocks: i32[K]; blocks given to `pin`. NO_BLOCK is padding.
      now: i32[]; the time in ms.
      group: static; see `pin`.

    Returns:
      The cache, and no events. Status BAD_REQUEST if a block is not pinned, is named twice, or is the prefix or
      first-group block of another pinned block.

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
    chosen_group = checked_group(state, group)
    ids = integers("blocks", blocks, ("K",))
    now = integers("now", now, ())
    named = ids != NO_BLOCK
    pins = [_pins(member) for member in state.groups]
    pinned = (ids >= 0) & (ids < pins[group].shape[0]) & (pick(pins[group], ids) > 0)
    ok = ~jnp.any(named & (~pinned | repeated(ids)))
    pins[group] = add(pins[group], ids, -1, named & ok)
    ok = ok & _prefixes_are_pinned(state, pins)
    # As with a row's blocks, the last is released first. Children come before parents, whatever the order of the list.
    metadata = chosen_group.blocks
    order = children_first(metadata, ids[::-1], (named & ok & (pick(metadata.fill, ids) > 0))[::-1])
    policy = windows.policy_of(state, group)
    chosen_group = give_back(chosen_group, policy, order, ok & (order != NO_BLOCK), now)
    state = replace_group(state, group, chosen_group)
    return state, assemble(state, first_failure((~ok, Status.BAD_REQUEST)))


def _pins(group: Group) -> jax.Array:
    """i32[B]; the number of holders of each block, not counting rows."""
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
    """Empties the given cached blocks and all their findable descendants, all or nothing.

    The window groups' blocks of the same prefixes are emptied too. `evict` skips blocks outside the index. It costs
    a pass over all blocks.

    Args:
      state: the cache.
      blocks: i32[K]; blocks of the first group. NO_BLOCK is padding.
      max_removed: static; the largest number of blocks to remove. None means N + H.

    Returns:
      The cache, and events with E = max_removed records a group: removed, children first. Status HELD if a block is
      held or on the move. Status BAD_REQUEST for an unknown block, or if more than `max_removed` would leave:
      `events.shortfall` is the number beyond it.

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
    group = state.groups[0]
    ids = integers("blocks", blocks, ("K",))
    metadata = group.blocks
    num_ids = group.blocks.refcount.shape[0]
    max_removed = num_ids if max_removed is None else min(static_int32("max_removed", max_removed, 1), num_ids)
    named = ids != NO_BLOCK
    unknown = jnp.any(named & ((ids < 0) | (ids >= num_ids)))
    doomed = is_among(num_ids, ids, named & ~unknown) & (metadata.fill > 0)
    doomed = descendants(metadata, doomed)
    total = count(doomed)
    over = jnp.maximum(total - max_removed, 0)
    held = jnp.any(doomed & (metadata.refcount > 0)) | jnp.any(named & (pick(metadata.refcount, ids) > 0))
    held = held | jnp.any(doomed & group.moving(group.ids))
    status = first_failure((unknown | (over > 0), Status.BAD_REQUEST), (held, Status.HELD))
    state, removed = leave_index_with(state, doomed, max_removed, status == Status.OK)
    return state, assemble(state, status, removed=removed, shortfall=over)


def leave_index_with(
    state: CacheState, doomed: jax.Array, max_removed: int, ok: jax.Array
) -> tuple[CacheState, list[Records]]:
    """Takes the first group's blocks doomed bool[B], at most `max_removed`, out of the index where ok bool[].

    Blocks without holders become empty. No doomed block is on the move, and all their findable descendants are doomed
    too. Also returns records, removed.
    """
    group = state.groups[0]
    order = children_first(group.blocks, group.ids, doomed)[:max_removed]
    group, removed = remove(group, 0, state.policy, order, pick(doomed, order) & ok)
    return forget_all(replace_group(state, 0, find_unevictable(group)), 0, removed)


@on_state
def forget_namespaces(
    state: CacheState, keep: ArrayLike, *, max_removed: int | None = None
) -> tuple[CacheState, Events]:
    """Empties the cached blocks of all namespaces except `keep`, for example after a model's weights have changed.

    A block that a row or a pin holds stays findable in its namespace, so running rows are not disturbed. Call
    `forget_namespaces` again when they are released. The window groups' blocks of the same prefixes are emptied too.
    The call costs a pass over all blocks for each level of the tree.

    Args:
      state: the cache.
      keep: i32[K]; numbers of the namespaces to keep. A number may occur several times.
      max_removed: static; the largest number of blocks to remove. None means N + H.

    Returns:
      The cache, and events with E = max_removed records a group: removed, children first. Status HELD if a block is on
      the move. Status BAD_REQUEST if more than `max_removed` would leave: `events.shortfall` is the number beyond it.

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
    group = state.groups[0]
    keep = integers("keep", keep, ("K",))
    metadata = group.blocks
    num_ids = group.blocks.refcount.shape[0]
    max_removed = num_ids if max_removed is None else min(static_int32("max_removed", max_removed, 1), num_ids)
    parent = metadata.parent[:, 0]
    namespace = metadata.parent[:, 1]
    is_current = jnp.any(namespace[:, None] == keep[None], axis=1)
    forgotten = descendants(metadata, (metadata.fill > 0) & (parent < 0) & ~is_current)
    moving = jnp.any(forgotten & (group.moving(group.ids) | (metadata.refcount >= COPYING)))
    doomed = forgotten & (metadata.refcount == 0)
    over = jnp.maximum(count(doomed) - max_removed, 0)
    status = first_failure((over > 0, Status.BAD_REQUEST), (moving, Status.HELD))
    state, removed = leave_index_with(state, doomed, max_removed, status == Status.OK)
    return state, assemble(state, status, removed=removed, shortfall=over)


@on_state
def reset(state: CacheState) -> tuple[CacheState, Events]:
    """Empties the whole cache. It is refused while a row or a pin holds a block.

    Reset the cache when a model gets new weights, because prompts would otherwise reuse K/V of the old weights.
    Alternatively, give each version of the weights its own namespace. The policy forgets all blocks and keeps the rest
    of its state, such as learned weights.

    Args:
      state: the cache.

    Returns:
      The cache, and events with E = 1 record a group: cleared. Status HELD if a block is held or on the move.

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
        jnp.array([jnp.any(group.moving(group.ids)) | jnp.any(group.blocks.refcount > 0) for group in state.groups])
    )
    cleared = [record(EventKind.CLEARED, jnp.atleast_1d(~held), group=index) for index in range(len(state.groups))]
    state = either(held, state, emptied(state))
    return state, assemble(state, first_failure((held, Status.HELD)), cleared=cleared)


def emptied(state: CacheState) -> CacheState:
    """Empties all blocks, even held blocks, for a cache whose bytes are lost. Rows stay as they are."""
    groups = []
    for group_index, group in enumerate(state.groups):
        policy = windows.policy_of(state, group_index)
        empty = init_group(state.spec, group_index, policy, group.num_blocks)
        old = group.blocks
        blocks = empty.blocks.replace(generation=old.generation, clock=old.clock, time=old.time)
        empty = empty.replace(blocks=blocks, policy=policy.forgot(group.policy, old, group.ids))
        groups.append(keep_host_policy(empty, group, policy))
    return state.replace(groups=tuple(groups))
