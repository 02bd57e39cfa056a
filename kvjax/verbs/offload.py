# SPDX-License-Identifier: Apache-2.0
"""The host tier's verbs: blocks leave the device and come back. They order moves; `pools/host.py` makes them.

Between loops, in this order:

    state, events = offload(state, ...)                         # or admit(..., tiers=("device", "host")), swap_in, ...
    pools, host = move(pools, host, events.transfer)            # starts the moves and returns
    pools = apply(pools, events)                                # copies, also of blocks that have just moved
    state, _ = complete(state, events.transfer, True)           # or False, if a move has failed

and then the model. A block on the move has left its old pool row already and cannot be found until `complete`. Its
bytes are safe, since a later write to that pool row is issued later. Inside a jitted loop nothing moves, and evicted
blocks are lost: avoid evictions there with `watermark`.

Source: TensorRT-LLM's secondary pool; vLLM's swapping of whole sequences.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import count, fence, is_among, pick, put, repeated
from kvjax.blocks import windows
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
from kvjax.verbs._request import assemble, chosen, conclude, first_failure, put_taken, replace_group


@on_state
def offload(state: CacheState, blocks: ArrayLike, *, now: ArrayLike = 0, group: int = 0) -> tuple[CacheState, Events]:
    """Moves cached blocks to the host, whatever their priority; all or nothing.

    A full host removes blocks of its own for them, by its policy, and none of those that come.

    Args:
      state: the cache.
      blocks: i32[K]; different cached blocks on the device; NO_BLOCK is padding. Their children on the device must
        be among them.
      now: i32[] ms.
      group: static; number of their group.

    Returns:
      The cache; and events, E = 4 K + 1: removed (from a full host), updated; with `transfer`. Status HELD if a block
      is held or on the move, NO_BLOCKS if the host has too few blocks, else BAD_REQUEST.

    Example:
      >>> from kvjax import stores, tiers
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4, num_host_blocks=8)
      >>> state, events = stores.adopt(kvjax.init(spec), np.arange(10), 10, [True, True, False])
      >>> state, _ = stores.land(state, events.adopted, [True, True, False])  # two cached blocks
      >>> state, events = tiers.offload(state, [0, 1])
      >>> [(event["kind"], event["block"], event["level"]) for event in kvjax.to_list(events)]  # the child first
      [('updated', 1, 1), ('updated', 0, 1)]
      >>> state, _ = tiers.complete(state, events.transfer, True)  # after `tiers.move`
      >>> kvjax.lookup(state, np.arange(10), 10)
      Match(8 tokens cached, 8 of them on the host)
    """
    chosen_group, ids, now = _tiered_group(state, group), integers("blocks", blocks, ("K",)), integers("now", now, ())
    before, named = chosen_group.blocks, ids != NO_BLOCK
    on_device = (ids >= 0) & (ids < before.fill.shape[0]) & (pick(before.fill, ids) > 0) & chosen_group.on_device(ids)
    bad = jnp.any(named & (~on_device | repeated(ids)))
    held = jnp.any(named & on_device & ((pick(before.refcount, ids) > 0) | chosen_group.moving(ids)))
    good = ~bad & ~held
    ids = children_first(before, ids, named & on_device)
    claimed_blocks, claimed = claim(before, ids, good & (ids >= 0))
    all_claimed = good & (count(claimed) == count(named))
    taken = transfer(
        chosen_group.replace(blocks=claimed_blocks), group, windows.policy_of(state, group),
        Outgoing(ids, claimed, claimed, stays=True), now,
    )  # fmt: skip
    status = first_failure((held, Status.HELD), (~all_claimed, Status.BAD_REQUEST), (~taken.ok, Status.NO_BLOCKS))
    after, removed = put_taken(state, group, taken)
    return conclude(state, after, status, [taken], removed)


@on_state
def onboard(state: CacheState, blocks: ArrayLike, *, now: ArrayLike = 0, group: int = 0) -> tuple[CacheState, Events]:
    """Brings cached blocks back to the device ahead of their use; all or nothing.

    Counts as a use: the blocks, and then their cached ancestors, are the last ones released.

    Args:
      state: the cache.
      blocks: i32[K]; different cached blocks on the host; NO_BLOCK is padding. Their parents must be on the device or
        among them.
      now: i32[] ms.
      group: static; number of their group.

    Returns:
      The cache; and events, E = 5 K: removed, updated (also of blocks that leave the device for it); with `transfer`.
      Status HELD if a block is held or on the move, NO_BLOCKS, else BAD_REQUEST.
    """
    chosen_group, ids, now = _tiered_group(state, group), integers("blocks", blocks, ("K",)), integers("now", now, ())
    before, named, num_ids = chosen_group.blocks, ids != NO_BLOCK, chosen_group.blocks.fill.shape[0]
    on_host = (ids >= 0) & (ids < num_ids) & (pick(before.fill, ids) > 0) & ~chosen_group.on_device(ids)
    parent = pick(before.parent, ids)[:, 0]
    coming = is_among(num_ids, ids, named & on_host)
    has_parent = (parent < 0) | (chosen_group.on_device(parent) & chosen_group.arrived(parent)) | pick(coming, parent)
    bad = jnp.any(named & (~on_host | repeated(ids) | ~has_parent))
    held = jnp.any(named & on_host & ((pick(before.refcount, ids) > 0) | chosen_group.moving(ids)))
    status = first_failure((held, Status.HELD), (bad, Status.BAD_REQUEST))
    # Their ancestors on the device must not leave it for them. These are released after them, the nearest first, since
    # no block may have waited longer for its eviction than its children: see `control._prefixes_are_pinned`.
    good = named & on_host & (status == Status.OK)
    parents = put(jnp.zeros_like(coming), parent, True, good & (parent >= 0) & ~pick(coming, parent), unique=False)
    ancestors = with_ancestors(chosen_group, parents, chosen_group.on_device(chosen_group.ids))
    idle = count(ancestors & (before.refcount == 0))
    holding = chosen_group.replace(
        blocks=before.replace(refcount=before.refcount + ancestors.astype(jnp.int32)),
        num_cached=chosen_group.num_cached - idle,
    )
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    onboarded = jnp.where(index < count(good), children_first(before, ids, good), NO_BLOCK)
    taken = take_unheld(state, group, holding, ids.shape[0], now, onboarded=onboarded)
    waited = before.released - before.clock  # of equally deep ones the first that was released stays the first
    order = jnp.lexsort((waited, -jnp.where(ancestors, before.depth, -1))).astype(jnp.int32)
    policy = windows.policy_of(state, group)
    taken = taken.replace(group=give_back(taken.group, policy, order, pick(ancestors, order), now))
    after, removed = put_taken(state, group, taken)
    status = jnp.where((status == Status.OK) & ~taken.ok, jnp.int32(Status.NO_BLOCKS), status)
    return conclude(state, after, status, [taken], removed)


@on_state
def watermark(
    state: CacheState, empty: ArrayLike, *, most: int, now: ArrayLike = 0, group: int = 0
) -> tuple[CacheState, Events]:
    """Empties device blocks ahead of time, so that a loop that takes `empty` blocks evicts nothing.

    The policy's victims go to the host, or are removed if their priority is too low. If fewer are cached than wanted,
    all of them go. No more leave than the host has space for, with its own victims: the others stay on the device,
    where they are found.

    Args:
      state: the cache.
      empty: i32[]; number of empty blocks wanted; a loop of n steps takes at most S * ceil(n / P) + S.
      most: static; the most blocks that may leave.
      now: i32[] ms.
      group: static; number of the group.

    Returns:
      The cache; and events, E = 5 * most: removed, updated; with `transfer`. Status NO_BLOCKS if the host has too
      few blocks.
    """
    chosen_group, empty, now = _tiered_group(state, group), integers("empty", empty, ()), integers("now", now, ())
    most = static_int32("most", most, 1)
    extra = jnp.minimum(jnp.clip(empty - chosen_group.num_empty, 0, most), chosen_group.num_cached)
    extra = jnp.minimum(extra, host_space(chosen_group))
    taken = take_unheld(state, group, chosen_group, most, now, extra=extra, stays=True)
    after, removed = put_taken(state, group, taken)
    return conclude(state, after, first_failure((~taken.ok, Status.NO_BLOCKS)), [taken], removed)


@on_state
def complete(
    state: CacheState, transfer: Transfer | None, ok: ArrayLike, *, max_removed: int | None = None
) -> tuple[CacheState, Events]:
    """Reports that moves have been made, so that their blocks are findable on the new tier; or that they have failed.

    Blocks whose move has failed are removed with all their descendants, on both tiers; rows that hold one of them have
    lost K/V and must be released. Lost contents are never stored.

    To undo the transition instead, give the state from before it, with `ok` False, and go on with what comes back: all
    blocks and rows are where they were. Only blocks in pool rows that a failed move may have overwritten are lost. No
    copy of the transition may have been made, and nothing may have been written since.

    Args:
      state: the cache.
      transfer: of the events that ordered the moves; None: there is nothing to do.
      ok: bool[]; whether all have been made.
      max_removed: static; the most blocks that a failure may remove in a group, None for N + H. Blocks beyond it
        stay in the index, so give a number only where `ok` is always True.

    Returns:
      The cache; and events, E = max_removed a group: removed. Status i32[S] HELD for the rows that must be released.
    """
    hurt = jnp.zeros((state.spec.max_seqs,), jnp.bool_)
    if transfer is None:
        return state, assemble(state, hurt.astype(jnp.int32))
    ok, removed = jnp.asarray(ok, jnp.bool_), []
    for number in state.spec.host_groups:
        group, host = state.groups[number], host_of(state.groups[number])
        ids = jnp.where(transfer.group == number, transfer.block, NO_BLOCK)
        current = (ids >= 0) & (transfer.move_id == pick(host.pending_transfer, ids))
        later = jnp.where(ids >= 0, transfer.move_id - host.num_moves, 0)  # above 0: the state is from before the moves
        undone = (later > 0) & ~ok
        overwritten = pick(is_among(group.ids.size, transfer.target, undone), host.pool_row)
        overwritten = overwritten & ((group.blocks.refcount > 0) | (group.blocks.fill > 0))
        pending_transfer, current, undone = fence(host.pending_transfer, current, undone)
        # A block whose move has failed stays on the move until it is empty, so that its row's writes are not stored.
        pending_transfer = put(pending_transfer, ids, 0, current & ok, unique=False)
        host = host.replace(
            pending_transfer=jnp.where(overwritten, next_move(host), pending_transfer),
            num_moves=host.num_moves + jnp.max(jnp.where(undone, later, 0), initial=0),
        )
        lost = is_among(group.ids.size, ids, current & ~ok) | overwritten
        hurt = hurt | jnp.any((group.table >= 0) & pick(lost, group.table), axis=1)
        most = lost.shape[0] if max_removed is None else min(static_int32("max_removed", max_removed, 1), lost.shape[0])
        policy = windows.policy_of(state, number)
        # The findable ones of the lost blocks leave the index with all their descendants.
        doomed = descendants(group.blocks, lost & (group.blocks.fill > 0))
        order = children_first(group.blocks, group.ids, doomed)[:most]
        group, gone = remove(group.replace(host=host), number, policy, order, pick(doomed, order))
        after, records = forget_all(replace_group(state, number, find_unevictable(group)), number, gone)
        state = _mark_lost(state, after)
        removed += records
    return state, assemble(state, jnp.where(hurt, Status.HELD, Status.OK).astype(jnp.int32), removed=removed)


def _tiered_group(state: CacheState, number: int) -> Group:
    """The group, which must have a host tier."""
    group = chosen(state, number)
    if not group.tiered:
        raise ValueError(f"group: got {number}, which has no host tier (num_host_blocks)")
    return group


def take_unheld(state: CacheState, number: int, group: Group, size: int, now: jax.Array, **options: Any) -> Taken:
    """`take` over both tiers for no new holders, with the policy of group `number`."""
    return take(
        group, number, windows.policy_of(state, number), jnp.int32(0), size, now,
        priorities=priorities(state, now)[number], min_priority=state.spec.offload_min_priority, **options,
    )  # fmt: skip


def _mark_lost(before: CacheState, after: CacheState) -> CacheState:
    """Marks held blocks that have left the index as LOST: their pins outlast their index entry."""
    for number, (old, new) in enumerate(zip(before.groups, after.groups, strict=True)):
        lost = (old.blocks.fill > 0) & (new.blocks.fill == 0) & (new.blocks.refcount > 0)
        blocks = new.blocks.replace(hits=jnp.where(lost, LOST, new.blocks.hits))
        after = replace_group(after, number, new.replace(blocks=blocks))
    return after
