# SPDX-License-Identifier: Apache-2.0
"""The host tier's verbs move blocks off the device and back. They order moves, which `pools/host.py` makes.

Between loops, call in this order:

    state, events = offload(state, ...)                         # or admit(..., tiers=("device", "host")), swap_in, ...
    pools, host = move(pools, host, events.transfer)            # starts the moves and returns
    pools = apply(pools, events)                                # copies, also of newly moved blocks
    state, _ = complete(state, events.transfer, True)           # or False, if a move has failed

Then run the model. A block on the move has left its old pool row and cannot be found until `complete`. Its bytes are
safe, since a later write to this pool row is issued later. Inside a jitted loop nothing moves, and evicted blocks are
lost unless they have copies on the host: call `backup` before the loop, or `watermark` to avoid evictions in it.

Source: TensorRT-LLM's secondary pool; vLLM's swapping of whole sequences.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import count, fence, is_among, pick, put, repeated
from kvjax.blocks import windows
from kvjax.blocks.backups import backs_up, drop_failed, is_backup
from kvjax.blocks.holders import give_back
from kvjax.blocks.publish import children_first, descendants, forget_all, remove
from kvjax.blocks.take import take
from kvjax.blocks.tiers import find_unevictable, host_of, host_space, next_move, priorities, with_ancestors
from kvjax.blocks.transfers import Outgoing, transfer
from kvjax.blocks.victims import Taken, claim
from kvjax.checks import integers, on_state, static_int32
from kvjax.events.records import Events, Status
from kvjax.events.transfer import Transfer
from kvjax.state import LOST, NO_BLOCK, CacheState, Group
from kvjax.verbs._request import assemble, checked_group, conclude, first_failure, put_taken, replace_group


@on_state
def offload(state: CacheState, blocks: ArrayLike, *, now: ArrayLike = 0, group: int = 0) -> tuple[CacheState, Events]:
    """Moves cached blocks to the host, even with a low priority: all of them, or none.

    If the host is full, its own policy chooses blocks to remove. It never removes the incoming blocks.

    Args:
      state: the cache.
      blocks: i32[K]; different cached blocks on the device. NO_BLOCK is padding. A block's children on the device must
        be in the list too.
      now: i32[]; the time in ms.
      group: static; the index of their group.

    Returns:
      The cache, and events with `transfer` and E = 4 K + 1 records: removed (from a full host), updated. Status HELD if
      a block is held or on the move, NO_BLOCKS if the host has too few blocks, else BAD_REQUEST.

    Example:
      >>> from kvjax import stores, tiers
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4, num_host_blocks=8)
      >>> state, events = stores.adopt(kvjax.init(spec), np.arange(10), 10, [True, True, False])
      >>> state, _ = stores.finish_adoption(state, events.adopted, [True, True, False])  # two cached blocks
      >>> state, events = tiers.offload(state, [0, 1])
      >>> [(event["kind"], event["block"], event["level"]) for event in kvjax.to_list(events)]  # the child first
      [('updated', 1, 1), ('updated', 0, 1)]
      >>> state, _ = tiers.complete(state, events.transfer, True)  # after `tiers.move`
      >>> kvjax.lookup(state, np.arange(10), 10)
      Match(8 tokens cached, 8 of them on the host)
    """
    chosen_group = tiered_group(state, group)
    ids = integers("blocks", blocks, ("K",))
    now = integers("now", now, ())
    before = chosen_group.blocks
    named = ids != NO_BLOCK
    on_device = (ids >= 0) & (ids < before.fill.shape[0]) & (pick(before.fill, ids) > 0) & chosen_group.on_device(ids)
    bad = jnp.any(named & (~on_device | repeated(ids)))
    held = jnp.any(named & on_device & ((pick(before.refcount, ids) > 0) | chosen_group.moving(ids)))
    movable = ~bad & ~held
    ids = children_first(before, ids, named & on_device)
    claimed_blocks, claimed = claim(before, ids, movable & (ids >= 0))
    all_claimed = movable & (count(claimed) == count(named))
    taken = transfer(
        chosen_group.replace(blocks=claimed_blocks),
        group,
        windows.policy_of(state, group),
        Outgoing(ids, claimed, claimed, stays=True),
        now,
    )
    status = first_failure((held, Status.HELD), (~all_claimed, Status.BAD_REQUEST), (~taken.ok, Status.NO_BLOCKS))
    after, removed = put_taken(state, group, taken)
    return conclude(state, after, status, [taken], removed)


@on_state
def onboard(state: CacheState, blocks: ArrayLike, *, now: ArrayLike = 0, group: int = 0) -> tuple[CacheState, Events]:
    """Brings cached blocks back to the device before they are used: all of them, or none.

    This counts as a use: the blocks become the most recently released blocks, followed by their cached ancestors.

    Args:
      state: the cache.
      blocks: i32[K]; different cached blocks on the host. NO_BLOCK is padding. Each block's parent must be on the
        device or in the list.
      now: i32[]; the time in ms.
      group: static; the index of their group.

    Returns:
      The cache, and events with `transfer` and E = 5 K records: removed, updated (also for blocks leaving the device
      to make room). Status HELD if a block is held or on the move, NO_BLOCKS, else BAD_REQUEST.
    """
    chosen_group = tiered_group(state, group)
    ids = integers("blocks", blocks, ("K",))
    now = integers("now", now, ())
    before = chosen_group.blocks
    named = ids != NO_BLOCK
    num_ids = before.fill.shape[0]
    on_host = (ids >= 0) & (ids < num_ids) & (pick(before.fill, ids) > 0) & ~chosen_group.on_device(ids)
    parent = pick(before.parent, ids)[:, 0]
    coming = is_among(num_ids, ids, named & on_host)
    has_parent = (parent < 0) | (chosen_group.on_device(parent) & chosen_group.arrived(parent)) | pick(coming, parent)
    bad = jnp.any(named & (~on_host | repeated(ids) | ~has_parent))
    held = jnp.any(named & on_host & ((pick(before.refcount, ids) > 0) | chosen_group.moving(ids)))
    status = first_failure((held, Status.HELD), (bad, Status.BAD_REQUEST))
    # Ancestors on the device must not leave it to make room. They are released after the blocks, the nearest first,
    # because no block may have waited longer for its eviction than its children (`control._prefixes_are_pinned`).
    ready = named & on_host & (status == Status.OK)
    parents = put(jnp.zeros_like(coming), parent, True, ready & (parent >= 0) & ~pick(coming, parent), unique=False)
    ancestors = with_ancestors(chosen_group, parents, chosen_group.on_device(chosen_group.ids))
    idle = count(ancestors & (before.refcount == 0))
    holding = chosen_group.replace(
        blocks=before.replace(refcount=before.refcount + ancestors.astype(jnp.int32)),
        num_cached=chosen_group.num_cached - idle,
    )
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    onboarded = jnp.where(index < count(ready), children_first(before, ids, ready), NO_BLOCK)
    taken = take_unheld(state, group, holding, ids.shape[0], now, onboarded=onboarded)
    waited = before.released - before.clock  # among equally deep blocks the first that was released stays the first
    order = jnp.lexsort((waited, -jnp.where(ancestors, before.depth, -1))).astype(jnp.int32)
    policy = windows.policy_of(state, group)
    taken = taken.replace(group=give_back(taken.group, policy, order, pick(ancestors, order), now))
    after, removed = put_taken(state, group, taken)
    status = jnp.where((status == Status.OK) & ~taken.ok, jnp.int32(Status.NO_BLOCKS), status)
    return conclude(state, after, status, [taken], removed)


@on_state
def watermark(
    state: CacheState, empty: ArrayLike, *, max_blocks: int, now: ArrayLike = 0, group: int = 0
) -> tuple[CacheState, Events]:
    """Empties device blocks ahead of time, so a loop that takes `empty` blocks evicts nothing.

    The policy's victims go to the host, or are removed if their priority is too low. If fewer blocks are cached than
    have to leave, all cached blocks leave. If the host cannot take all of them, even after it has evicted its own
    victims, the others stay findable on the device.

    Args:
      state: the cache.
      empty: i32[]; the number of empty blocks to provide. A loop of n steps takes at most S * ceil(n / P) + S.
      max_blocks: static; the largest number of blocks to empty.
      now: i32[]; the time in ms.
      group: static; the index of the group.

    Returns:
      The cache, and events with `transfer` and E = 5 * max_blocks records: removed, updated. Status NO_BLOCKS if the
      host has too few blocks.
    """
    chosen_group = tiered_group(state, group)
    empty = integers("empty", empty, ())
    now = integers("now", now, ())
    max_blocks = static_int32("max_blocks", max_blocks, 1)
    extra = jnp.minimum(jnp.clip(empty - chosen_group.num_empty, 0, max_blocks), chosen_group.num_cached)
    extra = jnp.minimum(extra, host_space(chosen_group))
    taken = take_unheld(state, group, chosen_group, max_blocks, now, extra=extra, stays=True)
    after, removed = put_taken(state, group, taken)
    return conclude(state, after, first_failure((~taken.ok, Status.NO_BLOCKS)), [taken], removed)


@on_state
def complete(
    state: CacheState, transfer: Transfer | None, ok: ArrayLike, *, max_removed: int | None = None
) -> tuple[CacheState, Events]:
    """Reports the moves as done, which makes their blocks findable on the new tier, or as failed.

    If moves failed, their blocks are removed with all descendants, on both tiers. Rows that hold a removed block have
    lost K/V and must be released; the lost contents are never stored. If the copies of a `backup` failed, they are
    dropped, and nothing else changes.

    To undo the transition instead, pass the state from before it with `ok` False, and continue with the returned state,
    in which all blocks and rows are where they were. Only blocks in pool rows that a failed move may have overwritten
    are lost. Undo a transition only before its copies are made and before anything else is written.

    Args:
      state: the cache.
      transfer: `events.transfer` of the transition with the moves. None means nothing to do.
      ok: bool[]; whether all moves have been made.
      max_removed: static; the largest number of blocks to remove from a group after a failure. None means N + H. Blocks
        beyond it stay in the index, so give a number only where `ok` is always True.

    Returns:
      The cache, and events with E = max_removed records a group: removed. Status i32[S] HELD for rows that must be
      released.
    """
    has_lost = jnp.zeros((state.spec.max_seqs,), jnp.bool_)
    if transfer is None:
        return state, assemble(state, has_lost.astype(jnp.int32))
    ok = jnp.asarray(ok, jnp.bool_)
    removed = []
    for group_index in state.spec.host_groups:
        group = state.groups[group_index]
        host = host_of(state.groups[group_index])
        ids = jnp.where(transfer.group == group_index, transfer.block, NO_BLOCK)
        current = (ids >= 0) & (transfer.move_id == pick(host.pending_transfer, ids))
        later = jnp.where(ids >= 0, transfer.move_id - host.num_moves, 0)  # above 0: the state is from before the moves
        undone = (later > 0) & ~ok
        overwritten = pick(is_among(group.ids.size, transfer.target, undone), host.pool_row)
        failed_copies = None
        if backs_up(group):
            failed_copies = is_backup(group) & (overwritten | is_among(group.ids.size, ids, current & ~ok))
        overwritten = overwritten & ((group.blocks.refcount > 0) | (group.blocks.fill > 0))
        pending_transfer, current, undone = fence(host.pending_transfer, current, undone)
        # A block whose move has failed stays on the move until it is empty, so commits of its row do not publish it.
        pending_transfer = put(pending_transfer, ids, 0, current & ok, unique=False)
        host = host.replace(
            pending_transfer=jnp.where(overwritten, next_move(host), pending_transfer),
            num_moves=host.num_moves + jnp.max(jnp.where(undone, later, 0), initial=0),
        )
        lost = is_among(group.ids.size, ids, current & ~ok) | overwritten
        group = group.replace(host=host)
        group = group if failed_copies is None else drop_failed(group, failed_copies)
        has_lost = has_lost | jnp.any((group.table >= 0) & pick(lost, group.table), axis=1)
        num_ids = lost.shape[0]
        limit = num_ids if max_removed is None else min(static_int32("max_removed", max_removed, 1), num_ids)
        policy = windows.policy_of(state, group_index)
        # The findable blocks among the lost ones leave the index with all their descendants.
        doomed = descendants(group.blocks, lost & (group.blocks.fill > 0))
        order = children_first(group.blocks, group.ids, doomed)[:limit]
        group, left_index = remove(group, group_index, policy, order, pick(doomed, order))
        after, records = forget_all(replace_group(state, group_index, find_unevictable(group)), group_index, left_index)
        state = _mark_lost(state, after)
        removed += records
    return state, assemble(state, jnp.where(has_lost, Status.HELD, Status.OK).astype(jnp.int32), removed=removed)


def tiered_group(state: CacheState, group_index: int) -> Group:
    """Returns the group with this index, which must have a host tier."""
    group = checked_group(state, group_index)
    if not group.tiered:
        raise ValueError(f"group: got {group_index}, which has no host tier (num_host_blocks)")
    return group


def take_unheld(state: CacheState, group_index: int, group: Group, size: int, now: jax.Array, **options: Any) -> Taken:
    """Calls `take` over both tiers without new holders, with the policy of group `group_index`."""
    return take(
        group,
        group_index,
        windows.policy_of(state, group_index),
        jnp.int32(0),
        size,
        now,
        priorities=priorities(state, now)[group_index],
        min_priority=state.spec.offload_min_priority,
        **options,
    )


def _mark_lost(before: CacheState, after: CacheState) -> CacheState:
    """Marks held blocks without an index entry as LOST, because their pins outlast the entry."""
    for group_index, (old, new) in enumerate(zip(before.groups, after.groups, strict=True)):
        lost = (old.blocks.fill > 0) & (new.blocks.fill == 0) & (new.blocks.refcount > 0)
        blocks = new.blocks.replace(hits=jnp.where(lost, LOST, new.blocks.hits))
        after = replace_group(after, group_index, new.replace(blocks=blocks))
    return after
