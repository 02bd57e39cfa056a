# SPDX-License-Identifier: Apache-2.0
"""Transfers move the blocks of a group from tier to tier.

A moving block keeps its id: tables, links and indexes stay the same, and only its pool row changes. A call sorts blocks
into parts, by the tiers where they begin and end:

                  device             host                nowhere
    offloaded     3, 4  ---------->  3, 4                          findable on the host from then on
    evicted       5, 6  ------------------------------>  5, 6      6 would go to the host, but is its victim at once
    dropped                          7, 8  ----------->  7, 8      7 is a descendant of 5, 8 a victim for lack of space
    onboarded     9     <----------  9

Blocks with backups leave the device first, without a move (`backups.py`). In their places are then their backups, free
blocks that leave no contents. Onboarded blocks keep their host rows as backups, as long as there are others.

All pool rows are assigned together: device rows to onboarded blocks, host rows to offloaded blocks, and the remaining
rows to the empty blocks. So an evicted block may become an empty block of the host if a transfer needs its
device row.

Nothing here runs inside a jitted loop, so passes over all blocks are allowed. Loops use `take` of `take.py`.

Source: TensorRT-LLM's offloading and onboarding, which swap the memory slots of two block objects.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, add, compact, count, either, is_among, pick, put, rank
from kvjax.blocks.backups import (
    backs_up,
    drop_backups,
    has_backup,
    keep_rows,
    leave_by_backup,
    make_room,
    settle,
    with_backups,
)
from kvjax.blocks.publish import children_first, descendants, leave_index
from kvjax.blocks.tiers import find_unevictable, host_of, next_move, updates, with_ancestors
from kvjax.blocks.victims import Taken, claim
from kvjax.events.records import joined
from kvjax.events.transfer import orders
from kvjax.policies.retention import advance_time
from kvjax.state import NO_BLOCK, EvictionPolicy, Group, Host


class Outgoing(Pytree, static=("held", "stays")):
    """Device blocks leaving their pool rows, all [A]."""

    ids: jax.Array  # i32; children before parents, and no longer counted in the parents' `children`
    where: jax.Array  # bool; the entries that count
    to_host: jax.Array  # bool; whether the block goes to the host or is evicted
    by_backup: jax.Array | None = None  # i32; blocks that have left by their backups, at the places of these in `ids`
    held: bool = False  # static; whether rows hold the blocks and keep them (a swap)
    stays: bool = False  # static; whether all blocks that go to the host stay there, so its victims are others


class Transfers(Pytree):
    """The parts of a call; see the drawing at the top."""

    offloaded: jax.Array  # bool[A]; whether a block of `Outgoing.ids` ends on the host
    # i32[2A]; host blocks that leave the index: descendants of evicted blocks, then the host's victims
    dropped: jax.Array
    removed: jax.Array  # i32[3A]; evicted and dropped blocks, children before parents, then NO_BLOCK
    onboarded: jax.Array  # i32[C]
    host_tier: Host  # after the choice of its victims, before any block has moved
    ok: jax.Array  # bool[]; whether the transfers can be done


class Rows(Pytree):
    """The pool row of each block after a call."""

    pool_row: jax.Array  # i32[B]; see `Host`
    free: jax.Array  # i32[.]; blocks without holders and contents, packed: first those with pool rows on the device
    num_on_device: jax.Array  # i32[]; free blocks with pool rows on the device
    num_free: jax.Array  # i32[]; free blocks
    num_popped: jax.Array  # i32[]; free blocks that were on the host's stack
    came_back: jax.Array | None = (
        None  # i32[.]; the onboarded block that had the row of each free block. None without backups
    )


def take_over_tiers(
    group: Group,
    group_index: int,
    policy: EvictionPolicy,
    need: jax.Array,
    size: int,
    now: jax.Array,
    priorities: jax.Array,
    min_priority: int,
    onboarded: jax.Array,
    extra: jax.Array | int,
    stays: bool,
) -> Taken:
    """Takes `need` blocks for a holder each and brings blocks back, offloading the policy's victims; see `take`."""
    host = host_of(group)
    before = group.blocks
    device_rows = group.empty.shape[0]
    total = need + count(onboarded >= 0) + extra
    popped = jnp.minimum(need + count(onboarded >= 0), group.num_empty)
    num_victims = jnp.where(total <= group.available, total - popped, 0)

    moving = with_ancestors(group, host.pending_transfer != 0, host.pool_row < device_rows)

    def eligible(ids: jax.Array) -> jax.Array:
        settled = (ids >= 0) & (pick(host.pool_row, ids) < device_rows) & ~pick(moving, ids)
        return settled & (pick(before.refcount, ids) == 0) & (pick(before.fill, ids) > 0)

    ids, pstate = policy.chosen(group.policy, before, eligible, num_victims, now, size)
    where = (jnp.arange(size, dtype=jnp.int32) < num_victims) & eligible(ids)
    blocks, claimed = claim(before, ids, where)
    fits = (total <= group.available) & (count(claimed) == num_victims)
    outgoing = Outgoing(ids, claimed, claimed & (pick(priorities, ids) >= min_priority), stays=stays)
    group_after_claim = group.replace(blocks=blocks, policy=pstate)
    taken = transfer(
        group_after_claim, group_index, policy, outgoing, now, onboarded=onboarded, need=need, popped=popped
    )
    ok = fits & taken.ok
    group = either(ok, taken.group, group)
    ids = jnp.where(ok, taken.ids, NO_BLOCK)[:size]
    removed, updated = (records.only(ok) for records in (taken.removed, taken.updated))
    return Taken(group, ids, ok, removed, updated, taken.orders.only(ok))


def transfer(
    group: Group,
    group_index: int,
    policy: EvictionPolicy,
    outgoing: Outgoing,
    now: jax.Array,
    *,
    onboarded: jax.Array | None = None,
    need: jax.Array | None = None,
    popped: jax.Array | None = None,
) -> Taken:
    """Moves `outgoing` blocks off the device, brings `onboarded` i32[C] back, and takes `need` i32[] empty blocks.

    The outgoing blocks are claimed. The call may also use `popped` i32[] empty blocks. The taken
    blocks are valid only if `ok`; the lists of records have room for every possible change.
    """
    onboarded = jnp.full((1,), NO_BLOCK, jnp.int32) if onboarded is None else onboarded
    need, popped = (jnp.int32(0) if blocks is None else blocks for blocks in (need, popped))
    if backs_up(group):
        moves_any = jnp.any(outgoing.where) | jnp.any(onboarded >= 0)
        group = settle(group, policy, now, moves_any)
        group, outgoing = leave_without_moves(group, group_index, policy, outgoing)
        num_lacking = count(outgoing.where & outgoing.to_host) - host_of(group).num_empty - count(onboarded >= 0)
        group = make_room(group, num_lacking, outgoing.ids.shape[0])
    transfers = plan_transfers(group, policy, outgoing, onboarded, now)
    rows = assign_rows(group, outgoing, transfers, popped)
    taken = apply_transfers(group, group_index, policy, outgoing, transfers, rows, need, popped, now)
    if outgoing.by_backup is None:
        return taken
    gone = outgoing.by_backup
    stays = ~pick(is_among(group.ids.size, transfers.removed, transfers.removed >= 0), gone)
    return taken.replace(
        updated=joined(updates(group.blocks, group_index, gone, (gone >= 0) & stays, 1), taken.updated)
    )


def leave_without_moves(
    group: Group, group_index: int, policy: EvictionPolicy, outgoing: Outgoing
) -> tuple[Group, Outgoing]:
    """Lets the outgoing blocks with backups go to the host. In their places are then their backups, free blocks."""
    backed = outgoing.where & has_backup(group, outgoing.ids)
    gone = jnp.where(backed, outgoing.ids, NO_BLOCK)
    group = drop_backups(group, outgoing.ids, outgoing.where & ~backed)  # the copies that have not arrived
    group, ids, _ = leave_by_backup(group, group_index, outgoing.ids, backed, holders=int(outgoing.held), mark=NO_BLOCK)
    group = group.replace(policy=policy.forgot(group.policy, group.blocks, gone))
    return group, outgoing.replace(ids=ids, to_host=outgoing.to_host & ~backed, by_backup=gone)


def plan_transfers(
    group: Group, policy: EvictionPolicy, outgoing: Outgoing, onboarded: jax.Array, now: jax.Array
) -> Transfers:
    """Decides which outgoing blocks end on the host, and which blocks of the host leave the index to make room."""
    blocks = group.blocks
    host = host_of(group)
    ids = outgoing.ids
    num_ids = blocks.fill.shape[0]
    size = ids.shape[0]
    to_host = outgoing.where & outgoing.to_host
    parent = pick(blocks.parent, ids)[:, 0]
    has_parent = (pick(blocks.fill, ids) > 0) & (parent >= 0)
    host = host.replace(num_host_children=add(host.num_host_children, parent, 1, to_host & has_parent, unique=False))

    # All descendants of an evicted block leave with it. They are on the host, since leaves leave the device first.
    evicted = outgoing.where & ~outgoing.to_host
    if outgoing.by_backup is not None:
        evicted = evicted & (outgoing.by_backup < 0)
    doomed = descendants(
        blocks, is_among(num_ids, ids, evicted), jnp.any(evicted & (pick(host.num_host_children, ids) > 0))
    )
    is_outgoing = is_among(num_ids, ids, outgoing.where)
    ok = ~jnp.any(doomed & ~is_outgoing & ((blocks.refcount > 0) | (host.pending_transfer != 0)))
    pulled_down = jnp.nonzero(doomed & ~is_outgoing, size=size, fill_value=NO_BLOCK)[0].astype(jnp.int32)
    ok = ok & (count(doomed & ~is_outgoing) <= size)

    # The host's victims are chosen as if all blocks had arrived. An arriving block may be a victim, unless it must
    # stay.
    offloaded = to_host & ~pick(doomed, ids)
    capacity = host.num_empty + count(pulled_down >= 0) + count(onboarded >= 0)
    overflow = jnp.maximum(count(offloaded) - capacity, 0)
    victims, host = choose_host_victims(group, host, policy, outgoing, offloaded, doomed, onboarded, overflow, now)
    ok = ok & (count(victims >= 0) == overflow)
    offloaded = offloaded & ~pick(is_among(num_ids, victims, victims >= 0), ids)
    dropped = jnp.concatenate([pulled_down, jnp.where(pick(is_outgoing, victims), NO_BLOCK, victims)])

    is_evicted = outgoing.where & ~offloaded
    if outgoing.by_backup is not None:
        is_evicted = is_evicted & (outgoing.by_backup < 0)
    removed = jnp.concatenate([jnp.where(is_evicted, ids, NO_BLOCK), dropped])
    removed = children_first(blocks, removed, removed >= 0)
    return Transfers(offloaded, dropped, removed, onboarded, host, ok)


def choose_host_victims(
    group: Group,
    host: Host,
    policy: EvictionPolicy,
    outgoing: Outgoing,
    offloaded: jax.Array,
    doomed: jax.Array,
    onboarded: jax.Array,
    overflow: jax.Array,
    now: jax.Array,
) -> tuple[jax.Array, Host]:
    """Chooses the host's victims i32[A], at most `overflow`. Also returns the host without them."""
    blocks = group.blocks
    size = outgoing.ids.shape[0]
    num_ids = group.blocks.fill.shape[0]
    incoming = is_among(num_ids, outgoing.ids, offloaded & (not outgoing.held))
    exempt = is_among(num_ids, onboarded, onboarded >= 0) | doomed
    exempt = exempt | incoming if outgoing.stays else exempt
    refcount = put(blocks.refcount, outgoing.ids, 0, offloaded & (not outgoing.held))
    # The policy counts only a block's children on the host.
    seen = blocks.replace(refcount=refcount, children=host.num_host_children)
    moving = with_ancestors(group, host.pending_transfer != 0, (host.pool_row < group.empty.shape[0]) & ~incoming)
    arrivals = jnp.where(offloaded & (not outgoing.held), outgoing.ids, NO_BLOCK)
    if outgoing.by_backup is not None:
        gone = outgoing.by_backup
        arrivals = arrivals if outgoing.held else jnp.where(gone >= 0, gone, arrivals)  # in the order of eviction
        exempt = exempt | is_among(num_ids, gone, gone >= 0) if outgoing.stays else exempt
    pstate = policy.touched(host.policy, seen, arrivals, now)

    def eligible(ids: jax.Array) -> jax.Array:
        on_host = (ids >= 0) & ((pick(host.pool_row, ids) >= group.empty.shape[0]) | pick(incoming, ids))
        on_host = on_host & ~pick(moving, ids) & ~pick(exempt, ids)
        return on_host & (pick(refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)

    ids, pstate = policy.chosen(pstate, seen, eligible, overflow, now, size)
    seen, claimed = claim(seen, ids, (jnp.arange(size, dtype=jnp.int32) < overflow) & eligible(ids))
    return jnp.where(claimed, ids, NO_BLOCK), host.replace(num_host_children=seen.children, policy=pstate)


def assign_rows(group: Group, outgoing: Outgoing, transfers: Transfers, popped: jax.Array) -> Rows:
    """Assigns the pool rows of all blocks that leave a tier, and of `popped` i32[] empty device blocks.

    Device rows go to onboarded blocks, then to free blocks. Host rows go to offloaded blocks, then to free blocks.
    """
    host = transfers.host_tier
    onboarded = transfers.onboarded
    offloaded = transfers.offloaded
    dropped = transfers.dropped
    pool_row = host.pool_row
    size = max(outgoing.ids.shape[0], onboarded.shape[0])
    num_onboarded = count(onboarded >= 0)
    num_offloaded = count(offloaded)
    index = jnp.arange(size, dtype=jnp.int32)
    num_dropped = count(dropped >= 0)
    num_popped = jnp.maximum(num_offloaded - num_onboarded - num_dropped, 0)
    if backs_up(group):  # rows of onboarded blocks are the last to be used
        num_popped = jnp.clip(num_offloaded - num_dropped, 0, host.num_empty)
    from_stack = jnp.where(index < popped, pick(group.empty, group.num_empty - 1 - index), NO_BLOCK)
    from_host = jnp.where(index < num_popped, pick(host.empty, host.num_empty - 1 - index), NO_BLOCK)
    left_device = jnp.where(outgoing.where, outgoing.ids, NO_BLOCK)
    device_rows = pick(pool_row, compact(from_stack, left_device)[0])
    leaves_host = compact(onboarded, dropped, from_host)[0]
    if backs_up(group):  # followers first, and before them what is not findable
        order = jnp.argsort(
            jnp.where(pick(group.blocks.fill, onboarded) > 0, -pick(group.blocks.depth, onboarded), -(2**30))
        )
        leaves_host = compact(dropped, from_host, pick(onboarded, order))[0]
    host_rows = pick(pool_row, leaves_host)
    free, num_free = compact(from_stack, jnp.where(offloaded, NO_BLOCK, left_device), dropped, from_host)
    index = jnp.arange(free.shape[0], dtype=jnp.int32)
    num_on_device = popped + count(outgoing.where) - num_onboarded
    host_index = num_offloaded + index - num_on_device
    rows = jnp.where(index < num_on_device, pick(device_rows, num_onboarded + index), pick(host_rows, host_index))
    pool_row = put(pool_row, free, rows, index < num_free)
    pool_row = put(pool_row, outgoing.ids, pick(host_rows, rank(offloaded)), offloaded)
    pool_row = put(pool_row, onboarded, pick(device_rows, rank(onboarded >= 0)), onboarded >= 0)
    came_back = None
    if backs_up(group):
        kept = (index >= num_on_device) & (index < num_free) & (host_index >= num_dropped + num_popped)
        came_back = jnp.where(kept, pick(leaves_host, host_index), NO_BLOCK)
    return Rows(pool_row, free, num_on_device, num_free, num_popped, came_back)


def apply_transfers(
    group: Group,
    group_index: int,
    policy: EvictionPolicy,
    outgoing: Outgoing,
    transfers: Transfers,
    rows: Rows,
    need: jax.Array,
    popped: jax.Array,
    now: jax.Array,
) -> Taken:
    """Moves the blocks to their rows, orders the moves of their bytes and takes `need` free blocks; see `transfer`."""
    blocks = group.blocks
    host = transfers.host_tier
    onboarded = transfers.onboarded
    offloaded = transfers.offloaded
    free = rows.free
    index = jnp.arange(rows.free.shape[0], dtype=jnp.int32)
    moved = jnp.concatenate([jnp.where(offloaded, outgoing.ids, NO_BLOCK), onboarded])
    level = (jnp.arange(moved.shape[0], dtype=jnp.int32) < offloaded.shape[0]).astype(jnp.int32)
    updated = updates(blocks, group_index, moved, (moved >= 0) & (pick(blocks.fill, moved) > 0), level)
    ordered = orders(
        moved >= 0,
        group=group_index,
        block=moved,
        move_id=next_move(host),
        source=pick(host.pool_row, moved),
        target=pick(rows.pool_row, moved),
    )

    removed = transfers.removed
    parent = pick(blocks.parent, onboarded)[:, 0]
    idle = (onboarded >= 0) & (pick(blocks.refcount, onboarded) == 0)
    has_parent = (onboarded >= 0) & (pick(blocks.fill, onboarded) > 0) & (parent >= 0)
    refcount = put(blocks.refcount, removed, 0, removed >= 0)
    refcount = put(refcount, outgoing.ids, 1 if outgoing.held else 0, offloaded)
    blocks = blocks.replace(
        refcount=put(refcount, free, 1, index < need),
        children=put(add(blocks.children, parent, 1, has_parent, unique=False), removed, 0, removed >= 0),
    )
    blocks = advance_time(blocks, now, (need > 0) | jnp.any(moved >= 0))
    on_stack = (index >= need) & (index < rows.num_on_device)
    on_host = (index >= rows.num_on_device) & (index < rows.num_free)
    if rows.came_back is not None:
        host, backup = with_backups(keep_rows(group.replace(host=host), rows.came_back, free))
        on_host = on_host & (pick(backup, free) < 0)
    pstate = policy.forgot(group.policy, blocks, jnp.where(outgoing.where, outgoing.ids, NO_BLOCK))
    host_children = add(host.num_host_children, parent, -1, has_parent, unique=False)
    host = host.replace(
        pool_row=rows.pool_row,
        num_host_children=put(host_children, removed, 0, removed >= 0),
        pending_transfer=put(host.pending_transfer, moved, next_move(host), moved >= 0),
        num_moves=jnp.where(jnp.any(moved >= 0), next_move(host), host.num_moves),
        empty=put(host.empty, host.num_empty - rows.num_popped + rank(on_host), free, on_host),
        num_empty=host.num_empty - rows.num_popped + count(on_host),
        policy=policy.forgot(host.policy, blocks, jnp.concatenate([onboarded, removed])),
    )
    group = group.replace(
        blocks=blocks,
        host=host,
        empty=put(group.empty, group.num_empty - popped + rank(on_stack), free, on_stack),
        num_empty=group.num_empty - popped + count(on_stack),
        num_cached=group.num_cached - (0 if outgoing.held else count(outgoing.where)) + count(idle),
    )
    group, left_index = leave_index(group, group_index, removed, removed >= 0, counted=False)
    pstate = policy.touched(pstate, group.blocks, jnp.where(idle, onboarded, NO_BLOCK), now)
    group = find_unevictable(group.replace(policy=pstate))
    ids = jnp.where(index < need, free, NO_BLOCK)
    return Taken(group, ids, transfers.ok, left_index, updated, ordered)
