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

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import compact, count, either, pick, put, repeated
from kvjax._checks import integers, on_state, static_int
from kvjax.blocks import windows
from kvjax.blocks.deal import Leaving, deal
from kvjax.blocks.holders import give_back
from kvjax.blocks.publish import children_first, forget_all
from kvjax.blocks.rows import Row, read_row
from kvjax.blocks.take import take
from kvjax.blocks.tiers import priorities, with_ancestors
from kvjax.blocks.victims import Taken, claim
from kvjax.events.records import Events, Records, Status
from kvjax.state import NO_BLOCK, CacheState, Group
from kvjax.verbs._request import assemble, chosen, first_failure, replace_group


@on_state
def offload(state: CacheState, blocks: ArrayLike, *, now: ArrayLike = 0, group: int = 0) -> tuple[CacheState, Events]:
    """Moves cached blocks to the host, whatever their priority; all or nothing.

    Args:
      state: the cache.
      blocks: i32[K]; different cached blocks on the device; NO_BLOCK is padding. Their children on the device must
        be among them.
      now: i32[] ms.
      group: static; number of their group.

    Returns:
      The cache; and events, E = 5 K: removed (from a full host), updated; with `transfer`. Status HELD if a block is
      held or on the move, NO_BLOCKS if the host has too little room, else BAD_REQUEST.
    """
    chosen_group, ids, now = _tiered_group(state, group), integers("blocks", blocks, ("K",)), integers("now", now, ())
    known, named = chosen_group.blocks, ids != NO_BLOCK
    on_device = (ids >= 0) & (ids < known.fill.shape[0]) & (pick(known.fill, ids) > 0) & chosen_group.on_device(ids)
    bad = jnp.any(named & (~on_device | repeated(ids)))
    held = jnp.any(named & on_device & ((pick(known.refcount, ids) > 0) | chosen_group.moving(ids)))
    good = ~bad & ~held
    ids = children_first(known, ids, named & on_device)
    out, claimed = claim(known, ids, good & (ids >= 0))
    all_claimed = good & (count(claimed) == count(named))
    leaving = Leaving(ids, claimed, claimed)
    new = _deal(state, chosen_group.replace(blocks=out), leaving, now, group)
    status = first_failure((held, Status.HELD), (~all_claimed, Status.BAD_REQUEST), (~new.ok, Status.NO_BLOCKS))
    return _finish(state, group, new, status)


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
    known, named, num_ids = chosen_group.blocks, ids != NO_BLOCK, chosen_group.blocks.fill.shape[0]
    on_host = (ids >= 0) & (ids < num_ids) & (pick(known.fill, ids) > 0) & ~chosen_group.on_device(ids)
    parent = pick(known.parent, ids)[:, 0]
    coming = put(jnp.zeros((num_ids,), jnp.bool_), ids, True, named & on_host, unique=False)
    has_parent = (parent < 0) | (chosen_group.on_device(parent) & chosen_group.arrived(parent)) | pick(coming, parent)
    bad = jnp.any(named & (~on_host | repeated(ids) | ~has_parent))
    held = jnp.any(named & on_host & ((pick(known.refcount, ids) > 0) | chosen_group.moving(ids)))
    status = first_failure((held, Status.HELD), (bad, Status.BAD_REQUEST))
    # Their ancestors on the device must not leave it for them. These are released after them, the nearest first, since
    # no block may have waited longer for its eviction than its children: see `control._prefixes_are_pinned`.
    good = named & on_host & (status == Status.OK)
    parents = put(jnp.zeros_like(coming), parent, True, good & (parent >= 0) & ~pick(coming, parent), unique=False)
    keep = with_ancestors(chosen_group, parents, chosen_group.on_device(chosen_group.ids))
    blocks = known.replace(refcount=known.refcount + keep.astype(jnp.int32))
    idle = count(keep & (known.refcount == 0))
    kept = chosen_group.replace(blocks=blocks, num_cached=chosen_group.num_cached - idle)
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    back = jnp.where(index < count(good), children_first(known, ids, good), NO_BLOCK)
    new = _take(state, group, kept, ids.shape[0], now, back=back)
    waited = known.released - known.clock  # of equally deep ones the first that was released stays the first
    order = jnp.lexsort((waited, -jnp.where(keep, known.depth, -1))).astype(jnp.int32)
    policy = windows.policy_of(group, state.policy)
    new = new.replace(group=give_back(new.group, policy, order, pick(keep, order), now))
    return _finish(state, group, new, jnp.where((status == Status.OK) & ~new.ok, jnp.int32(Status.NO_BLOCKS), status))


@on_state
def watermark(
    state: CacheState, empty: ArrayLike, *, most: int, now: ArrayLike = 0, group: int = 0
) -> tuple[CacheState, Events]:
    """Empties device blocks ahead of time, so that a loop that takes `empty` blocks evicts nothing.

    The policy's victims go to the host, or are removed if their priority is too low. If fewer are cached than wanted,
    all of them go.

    Args:
      state: the cache.
      empty: i32[]; number of empty blocks wanted; a loop of n steps takes at most S * ceil(n / P) + S.
      most: static; the most blocks that may leave.
      now: i32[] ms.
      group: static; number of the group.

    Returns:
      The cache; and events, E = 5 * most: removed, updated; with `transfer`. Status NO_BLOCKS if the host has too
      little room.
    """
    chosen_group, empty, now = _tiered_group(state, group), integers("empty", empty, ()), integers("now", now, ())
    most = static_int("most", most, 1)
    extra = jnp.minimum(jnp.clip(empty - chosen_group.num_empty, 0, most), chosen_group.num_cached)
    new = _take(state, group, chosen_group, most, now, extra=extra)
    return _finish(state, group, new, first_failure((~new.ok, Status.NO_BLOCKS)))


@on_state
def swap_out(state: CacheState, seq: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Moves the blocks that only this row holds to the host, to make room, until `swap_in`.

    Blocks that others hold stay on the device, and so do those with children that stay. A swapped-out row can only be
    released or swapped in.

    Args:
      state: the cache.
      seq: i32[]; a row in use.
      now: i32[] ms.

    Returns:
      The cache; and events, E = 5 M a group: removed (from a full host), updated; with `transfer`. Status BAD_REQUEST,
      HELD (blocks of the row are still on the move) or NO_BLOCKS if the host has too little room.

    Source: vLLM's swap_out of a preempted sequence group.
    """
    seq, now = integers("seq", seq, ()), integers("now", now, ())
    row = read_row(state, seq)
    bad, moving = ~row.exists | (row.length == 0) | row.swapped_out, _moving(state, row)

    def leave(after: CacheState, number: int) -> Taken:
        group, ids = after.groups[number], row.tables[number][::-1]
        private = ~bad & ~moving & (ids >= 0) & (pick(group.blocks.refcount, ids) == 1)
        findable = pick(group.blocks.fill, ids) > 0
        blocks, claimed = claim(group.blocks, ids, private & findable)
        leaves = claimed | (private & ~findable)
        blocks = blocks.replace(refcount=put(blocks.refcount, ids, 1, private))  # also of blocks that stay
        group = group.replace(blocks=blocks)
        return _deal(after, group, Leaving(ids, leaves, leaves, held=True), now, number)

    return _swap(state, seq, leave, True, (bad, Status.BAD_REQUEST), (moving, Status.HELD))


@on_state
def swap_in(state: CacheState, seq: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Brings all blocks of a swapped-out row back to the device; all or nothing.

    Args:
      state: the cache.
      seq: i32[]; a row that `swap_out` has swapped out.
      now: i32[] ms.

    Returns:
      The cache; and events, E = 5 M a group: removed, updated (also of blocks that leave the device for it); with
      `transfer`. Status BAD_REQUEST, HELD (blocks of the row are still on the move) or NO_BLOCKS.

    Source: vLLM's swap_in.
    """
    seq, now = integers("seq", seq, ()), integers("now", now, ())
    row = read_row(state, seq)
    bad, moving = ~row.exists | ~row.swapped_out, _moving(state, row)

    def come(after: CacheState, number: int) -> Taken:
        group, table = after.groups[number], row.tables[number]
        on_host = ~bad & ~moving & (table >= 0) & ~group.on_device(table)
        back, _ = compact(jnp.where(on_host, table, NO_BLOCK))
        return _take(after, number, group, table.shape[0], now, back=back)

    return _swap(state, seq, come, False, (bad, Status.BAD_REQUEST), (moving, Status.HELD))


def _tiered_group(state: CacheState, number: int) -> Any:
    """The group, which must have a host tier."""
    group = chosen(state, number)
    if not group.tiered:
        raise ValueError(f"group: got {number}, which has no host tier (num_host_blocks)")
    return group


def _moving(state: CacheState, row: Row) -> jax.Array:
    """bool[]; whether a block of the row is on the move."""
    pairs = zip(state.groups, row.tables, strict=True)
    moving = [jnp.any(group.moving(table)) for group, table in pairs]
    return functools.reduce(jnp.logical_or, moving, jnp.bool_(False))


def _take(state: CacheState, number: int, group: Group, size: int, now: jax.Array, **blocks: jax.Array) -> Taken:
    """`take` for no new holders, with the state's policy."""
    return take(
        group, number, windows.policy_of(number, state.policy), jnp.int32(0), size, now,
        priorities=priorities(state, now)[number], min_priority=state.spec.offload_min_priority, **blocks,
    )  # fmt: skip


def _deal(state: CacheState, group: Group, leaving: Leaving, now: jax.Array, number: int) -> Taken:
    nothing = jnp.full((1,), NO_BLOCK, jnp.int32)
    policy = windows.policy_of(number, state.policy)
    return deal(group, policy, leaving, nothing, jnp.int32(0), jnp.int32(0), now, number)


def _finish(state: CacheState, number: int, new: Taken, status: jax.Array) -> tuple[CacheState, Events]:
    """The state after a change of one group, where status i32[] is OK, else the state before; and the events."""
    after, report = _put(state, number, new)
    return _report(state, after, [report], status)


def _put(state: CacheState, number: int, new: Taken) -> tuple[CacheState, tuple[list[Records], Taken]]:
    """The state after a change of one group; and its report: the records, removed, of all groups, and the change."""
    state, removed = forget_all(replace_group(state, number, new.group), number, new.removed)
    return state, (removed, new)


def _report(
    before: CacheState, after: CacheState, reports: list[tuple[list[Records], Taken]], status: jax.Array
) -> tuple[CacheState, Events]:
    """One of the two states, by status i32[]; and the events."""
    ok = status == Status.OK
    state = either(ok, after, before)
    return state, assemble(
        state,
        status,
        removed=[removed.only(ok) for gone, _ in reports for removed in gone],
        updated=[new.updated.only(ok) for _, new in reports],
        moves=[new.moves.only(ok) for _, new in reports],
    )


def _swap(
    state: CacheState, seq: jax.Array, do: Callable[[CacheState, int], Taken], out: bool, *causes: Any
) -> tuple[CacheState, Events]:
    """The state after `do` in every group with a host tier, the row marked as swapped out or not; all or nothing."""
    if not state.spec.has_host:
        raise ValueError("state: got a cache without a host tier, wanted num_host_blocks above 0")
    after, reports = state, []
    for number in state.spec.host_groups:
        after, report = _put(after, number, do(after, number))
        reports.append(report)
    room = functools.reduce(jnp.logical_and, [new.ok for _, new in reports])
    swapped = put(after.seqs.swapped_out, seq[None], out, jnp.ones((1,), jnp.bool_))
    after = after.replace(seqs=after.seqs.replace(swapped=swapped))
    return _report(state, after, reports, first_failure(*causes, (~room, Status.NO_BLOCKS)))
