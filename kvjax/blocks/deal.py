# SPDX-License-Identifier: Apache-2.0
"""Blocks change tier: what a host tier adds to the verbs, for one group.

A block keeps its number when it moves, so that no table, link or index changes: only its pool row does. The pool
rows that become free, on the device and on the host, are dealt out in one go:

    before   block 3 in row 0, cached        block 9 in row 6 (host), wanted again        block 8 empty, row 7 (host)
    after    block 3 in row 6 or 7 (host)    block 9 in row 0                             block 8 empty, the other row

This code never runs inside a jitted loop, so that passes over all blocks are allowed; loops use `take` of `take.py`.

Source: TensorRT-LLM's offloading and onboarding, which swap the memory slots of two block objects.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, add, compact, count, either, pick, put, rank
from kvjax.blocks.publish import children_first, descendants, leave_index
from kvjax.blocks.tiers import find_unevictable, host_of, next_move, with_ancestors
from kvjax.blocks.victims import Taken, claim
from kvjax.events.records import EventKind, Records, joined, record
from kvjax.events.transfer import orders
from kvjax.policies.retention import tell_time
from kvjax.state import NO_BLOCK, Blocks, EvictionPolicy, Group, Host


class Leaving(Pytree, static=("held",)):
    """Device blocks that leave their pool rows, all [A].

    Attributes:
      ids: i32; children before parents, subtracted from the parents' `children` already.
      where: bool; which entries count.
      to_host: bool; goes to the host; the others are removed.
      held: static; whether rows hold the blocks and keep them (a swap), or nobody does.
    """

    ids: jax.Array
    where: jax.Array
    to_host: jax.Array
    held: bool = False


def take_over_tiers(
    group: Group,
    number: int,
    policy: EvictionPolicy,
    need: jax.Array,
    size: int,
    now: jax.Array,
    priorities: jax.Array,
    min_priority: int,
    back: jax.Array,
    extra: jax.Array | int,
) -> Taken:
    """Takes `need` blocks for one holder each and brings blocks back, offloading what has to leave; see `take`."""
    host, before = host_of(group), group.blocks
    device_rows = group.empty.shape[0]
    total = need + count(back >= 0) + extra
    popped = jnp.minimum(need + count(back >= 0), group.num_empty)
    wanted = jnp.where(total <= group.available, total - popped, 0)

    moving = with_ancestors(group, host.pending_transfer != 0, host.pool_row < device_rows)

    def eligible(ids: jax.Array) -> jax.Array:
        settled = (ids >= 0) & (pick(host.pool_row, ids) < device_rows) & ~pick(moving, ids)
        return settled & (pick(before.refcount, ids) == 0) & (pick(before.fill, ids) > 0)

    ids, pstate = policy.chosen(group.policy, before, eligible, wanted, now, size)
    where = (jnp.arange(size, dtype=jnp.int32) < wanted) & eligible(ids)
    blocks, claimed = claim(before, ids, where)
    fits = (total <= group.available) & (count(claimed) == wanted)
    leaving = Leaving(ids, claimed, claimed & (pick(priorities, ids) >= min_priority))
    taken = deal(group.replace(blocks=blocks, policy=pstate), policy, leaving, back, need, popped, now,
                 number)  # fmt: skip
    ok = fits & taken.ok
    return Taken(
        group=either(ok, taken.group, group),
        ids=jnp.where(ok, taken.ids, NO_BLOCK)[:size],
        ok=ok,
        removed=taken.removed.only(ok),
        updated=taken.updated.only(ok),
        moves=taken.moves.only(ok),
    )


def deal(
    group: Group,
    policy: EvictionPolicy,
    leaving: Leaving,
    back: jax.Array,
    need: jax.Array,
    popped: jax.Array,
    now: jax.Array,
    number: int,
) -> Taken:
    """Deals out the pool rows of blocks that leave the device, that come back and that were empty; see `take`.

    Where the host has too little room it removes victims of its own, which may be among the blocks that just came.

    Args:
      group: the group after `claim` of the leaving blocks.
      policy: chooses the host's victims.
      leaving: blocks that leave the device.
      back: i32[C]; blocks that come to the device.
      need: i32[]; blocks for new holders.
      popped: i32[]; empty device blocks to use.
      now: i32[] ms.
      number: the group's number.

    Returns:
      What was taken, valid only if `ok`. Removed and updated have records for all that can happen.
    """
    blocks, host = group.blocks, host_of(group)
    lasting, orphans, victims, host, ok = _divide(group, host, policy, leaving, back, now)
    passing = leaving.where & leaving.to_host & ~lasting
    removed = jnp.concatenate([jnp.where(leaving.where & ~lasting, leaving.ids, NO_BLOCK), orphans, victims])
    removed = children_first(blocks, removed, removed >= 0)
    dealt = _deal_rows(group, host, leaving, lasting, jnp.concatenate([orphans, victims]), back, popped)
    free, index = dealt.free, jnp.arange(dealt.free.shape[0], dtype=jnp.int32)
    moved = jnp.concatenate([jnp.where(lasting, leaving.ids, NO_BLOCK), back])
    to_host = (jnp.arange(moved.shape[0], dtype=jnp.int32) < lasting.shape[0]).astype(jnp.int32)
    updated = _updated(blocks, number, moved, (moved >= 0) & (pick(blocks.fill, moved) > 0), to_host)
    passed = _updated(blocks, number, leaving.ids, passing, 1)
    ordered = orders(
        moved >= 0, group=number, block=moved, number=next_move(host), source=pick(host.pool_row, moved),
        target=pick(dealt.pool_row, moved),
    )  # fmt: skip

    parent, idle = pick(blocks.parent, back)[:, 0], (back >= 0) & (pick(blocks.refcount, back) == 0)
    has_parent = (back >= 0) & (pick(blocks.fill, back) > 0) & (parent >= 0)
    refcount = put(blocks.refcount, removed, 0, removed >= 0)
    refcount = put(refcount, leaving.ids, 1 if leaving.held else 0, lasting)
    blocks = blocks.replace(
        refcount=put(refcount, free, 1, index < need),
        children=put(add(blocks.children, parent, 1, has_parent, unique=False), removed, 0, removed >= 0),
    )
    blocks = tell_time(blocks, now, (need > 0) | jnp.any(moved >= 0))
    on_stack = (index >= need) & (index < dealt.num_on_device)
    on_host = (index >= dealt.num_on_device) & (index < dealt.num_free)
    pstate = policy.forgot(group.policy, jnp.where(leaving.where, leaving.ids, NO_BLOCK))
    host_children = add(host.num_host_children, parent, -1, has_parent, unique=False)
    host = host.replace(
        pool_row=dealt.pool_row,
        num_host_children=put(host_children, removed, 0, removed >= 0),
        pending_transfer=put(host.pending_transfer, moved, next_move(host), moved >= 0),
        num_moves=jnp.where(jnp.any(moved >= 0), next_move(host), host.num_moves),
        empty=put(host.empty, host.num_empty - dealt.num_popped + rank(on_host), free, on_host),
        num_empty=host.num_empty - dealt.num_popped + count(on_host),
        policy=policy.forgot(host.policy, jnp.concatenate([back, removed])),
    )
    group = group.replace(
        blocks=blocks,
        host=host,
        empty=put(group.empty, group.num_empty - popped + rank(on_stack), free, on_stack),
        num_empty=group.num_empty - popped + count(on_stack),
        num_cached=group.num_cached - (0 if leaving.held else count(leaving.where)) + count(idle),
    )
    group, gone = leave_index(group, number, removed, removed >= 0, counted=False)
    pstate = policy.touched(pstate, group.blocks, jnp.where(idle, back, NO_BLOCK), now)
    group = find_unevictable(group.replace(policy=pstate))
    ids = jnp.where(index < need, free, NO_BLOCK)
    return Taken(group, ids, ok, joined(passed, gone), updated, ordered)


def _updated(blocks: Blocks, number: int, ids: jax.Array, where: jax.Array, level: jax.Array | int) -> Records:
    """Records of blocks ids i32[K] of group `number` that come to a level (0 device, 1 host), where bool[K]."""
    return record(
        EventKind.UPDATED, where, group=number, block=ids, generation=pick(blocks.generation, ids),
        priority=blocks.stated_priority(ids), level=level,
    )  # fmt: skip


def _divide(
    group: Group, host: Host, policy: EvictionPolicy, leaving: Leaving, back: jax.Array, now: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Host, jax.Array]:
    """Decides which of the leaving blocks end on the host, and which blocks of the host are removed.

    Returns:
      bool[A], which of leaving.ids end on the host; i32[A], orphans: host blocks that go because an ancestor is
      removed; i32[A], host blocks that go for lack of room; the host, with `below` as it will be before `back` comes;
      and bool[], whether it can be done.
    """
    blocks, size, num_ids = group.blocks, leaving.ids.shape[0], group.blocks.fill.shape[0]
    offloaded, parent = leaving.where & leaving.to_host, pick(blocks.parent, leaving.ids)[:, 0]
    stored = (pick(blocks.fill, leaving.ids) > 0) & (parent >= 0)
    host = host.replace(num_host_children=add(host.num_host_children, parent, 1, offloaded & stored, unique=False))

    # All descendants of a removed block go with it. They are on the host, since the device loses leaves first.
    removed = leaving.where & ~leaving.to_host
    doomed = descendants(
        blocks, _mark(num_ids, leaving.ids, removed), jnp.any(removed & (pick(host.num_host_children, leaving.ids) > 0))
    )
    is_leaving = _mark(num_ids, leaving.ids, leaving.where)
    ok = ~jnp.any(doomed & ~is_leaving & ((blocks.refcount > 0) | (host.pending_transfer != 0)))
    orphans = _packed(doomed & ~is_leaving, size)
    ok = ok & (count(doomed & ~is_leaving) <= size)

    # The host's victims are chosen as if all leaving blocks had arrived.
    lasting = offloaded & ~pick(doomed, leaving.ids)
    room = host.num_empty + count(orphans >= 0) + count(back >= 0)
    overflow = jnp.maximum(count(lasting) - room, 0)
    victims, host = _host_victims(group, host, policy, leaving, lasting, doomed, back, overflow, now)
    ok = ok & (count(victims >= 0) == overflow)
    lasting = lasting & ~pick(_mark(num_ids, victims, victims >= 0), leaving.ids)
    return lasting, orphans, jnp.where(pick(is_leaving, victims), NO_BLOCK, victims), host, ok


class Dealt(Pytree):
    """The pool row of each block.

    Attributes:
      pool_row: i32[B]; as in `Host`.
      free: i32[.]; blocks without holders and contents, packed: first those with pool rows on the device.
      num_on_device: i32[]; how many free blocks have pool rows on the device.
      num_free: i32[]; how many blocks are free.
      num_popped: i32[]; how many free blocks were on the host's stack.
    """

    pool_row: jax.Array
    free: jax.Array
    num_on_device: jax.Array
    num_free: jax.Array
    num_popped: jax.Array


def _deal_rows(
    group: Group, host: Host, leaving: Leaving, lasting: jax.Array, gone: jax.Array, back: jax.Array, popped: jax.Array
) -> Dealt:
    """Deals out the pool rows of blocks that left, came back or were removed from the host (`gone` i32[.]).

    Rows on the device go to `back`, then to free blocks; rows on the host to `lasting` blocks, then to free blocks.
    """
    pool_row, size = host.pool_row, max(leaving.ids.shape[0], back.shape[0])
    num_back, num_lasting = count(back >= 0), count(lasting)
    index = jnp.arange(size, dtype=jnp.int32)
    num_popped = jnp.maximum(num_lasting - num_back - count(gone >= 0), 0)
    from_stack = jnp.where(index < popped, pick(group.empty, group.num_empty - 1 - index), NO_BLOCK)
    from_host = jnp.where(index < num_popped, pick(host.empty, host.num_empty - 1 - index), NO_BLOCK)
    leaving_ids = jnp.where(leaving.where, leaving.ids, NO_BLOCK)
    device_rows = pick(pool_row, compact(from_stack, leaving_ids)[0])
    host_rows = pick(pool_row, compact(back, gone, from_host)[0])
    free, num_free = compact(from_stack, jnp.where(lasting, NO_BLOCK, leaving_ids), gone, from_host)
    index = jnp.arange(free.shape[0], dtype=jnp.int32)
    num_on_device = popped + count(leaving.where) - num_back
    rows = jnp.where(
        index < num_on_device, pick(device_rows, num_back + index), pick(host_rows, num_lasting + index - num_on_device)
    )
    pool_row = put(pool_row, free, rows, index < num_free)
    pool_row = put(pool_row, leaving.ids, pick(host_rows, rank(lasting)), lasting)
    pool_row = put(pool_row, back, pick(device_rows, rank(back >= 0)), back >= 0)
    return Dealt(pool_row, free, num_on_device, num_free, num_popped)


def _host_victims(
    group: Group,
    host: Host,
    policy: EvictionPolicy,
    leaving: Leaving,
    lasting: jax.Array,
    doomed: jax.Array,
    back: jax.Array,
    overflow: jax.Array,
    now: jax.Array,
) -> tuple[jax.Array, Host]:
    """The host's victims i32[A], `overflow` of them if there are so many; and the host without them."""
    blocks, size, num_ids = group.blocks, leaving.ids.shape[0], group.blocks.fill.shape[0]
    coming = _mark(num_ids, leaving.ids, lasting & (not leaving.held))
    exempt = _mark(num_ids, back, back >= 0) | doomed
    refcount = put(blocks.refcount, leaving.ids, 0, lasting & (not leaving.held))
    # The policy sees a block's children on the host as its only children.
    seen = blocks.replace(refcount=refcount, children=host.num_host_children)
    moving = with_ancestors(group, host.pending_transfer != 0, (host.pool_row < group.empty.shape[0]) & ~coming)
    pstate = policy.touched(host.policy, seen, jnp.where(lasting & (not leaving.held), leaving.ids, NO_BLOCK), now)

    def eligible(ids: jax.Array) -> jax.Array:
        on_host = (ids >= 0) & ((pick(host.pool_row, ids) >= group.empty.shape[0]) | pick(coming, ids))
        on_host = on_host & ~pick(moving, ids) & ~pick(exempt, ids)
        return on_host & (pick(refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)

    ids, pstate = policy.chosen(pstate, seen, eligible, overflow, now, size)
    seen, claimed = claim(seen, ids, (jnp.arange(size, dtype=jnp.int32) < overflow) & eligible(ids))
    return jnp.where(claimed, ids, NO_BLOCK), host.replace(num_host_children=seen.children, policy=pstate)


def _mark(size: int, ids: jax.Array, where: jax.Array) -> jax.Array:
    """bool[size]; which numbers are among ids i32[K], where bool[K]."""
    return put(jnp.zeros((size,), jnp.bool_), ids, True, where, unique=False)


def _packed(marked: jax.Array, size: int) -> jax.Array:
    """i32[size]; the first `size` marked blocks, NO_BLOCK after them."""
    return jnp.nonzero(marked, size=size, fill_value=NO_BLOCK)[0].astype(jnp.int32)
