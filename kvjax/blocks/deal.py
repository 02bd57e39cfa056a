# SPDX-License-Identifier: Apache-2.0
"""Blocks change tier: the part of the verbs that a cache with a host tier adds, for one group.

A block keeps its number wherever it is, so that no table, link or index changes when it moves; what changes is its
pool row. Device rows that become free and host rows that become free are dealt out anew in one go:

    before   block 3 at row 0, cached        block 9 at row 6 (host), wanted again        block 8 empty, row 7 (host)
    after    block 3 at row 6 or 7 (host)    block 9 at row 0                             block 8 empty, the other row

Here nothing happens inside a jitted loop, so that passes over all blocks are allowed; `take` of `take.py` is what
loops use.

Source: TensorRT-LLM's offloading and onboarding, which swap the memory slots of two block objects.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, add, compact, count, either, pick, put, rank
from kvjax.blocks.publish import children_first, descendants, leave_index
from kvjax.blocks.tiers import find_stuck, host_of, led_to, next_move
from kvjax.blocks.victims import Taken, claim
from kvjax.events.records import EventKind, Records, joined, record
from kvjax.events.transfer import moves
from kvjax.policies.retention import tell_time
from kvjax.state import NO_BLOCK, Blocks, EvictionPolicy, Group, Host


class Leaving(Pytree, static=("held",)):
    """Device blocks that leave their rows, all [A].

    Attributes:
      ids: i32; in order, children before parents, off their parents' count of children already.
      where: bool; which entries count.
      stay: bool; goes to the host; the others are removed.
      held: static; whether rows hold them and keep them (a swap), or nobody does.
    """

    ids: jax.Array
    where: jax.Array
    stay: jax.Array
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
    rows = group.empty.shape[0]
    total = need + count(back >= 0) + extra
    popped = jnp.minimum(need + count(back >= 0), group.num_empty)
    wanted = jnp.where(total <= group.available, total - popped, 0)

    moving = led_to(group, host.arriving != 0, host.pool_row < rows)

    def eligible(ids: jax.Array) -> jax.Array:
        here = (ids >= 0) & (pick(host.pool_row, ids) < rows) & ~pick(moving, ids)
        return here & (pick(before.refcount, ids) == 0) & (pick(before.fill, ids) > 0)

    ids, pstate = policy.chosen(group.policy, before, eligible, wanted, now, size)
    where = (jnp.arange(size, dtype=jnp.int32) < wanted) & eligible(ids)
    blocks, claimed = claim(before, ids, where)
    fits = (total <= group.available) & (count(claimed) == wanted)
    out = Leaving(ids, claimed, claimed & (pick(priorities, ids) >= min_priority))
    moved = deal(group.replace(blocks=blocks, policy=pstate), policy, out, back, need, popped, now,
                 number)  # fmt: skip
    ok = fits & moved.ok
    return Taken(
        group=either(ok, moved.group, group),
        ids=jnp.where(ok, moved.ids, NO_BLOCK)[:size],
        ok=ok,
        removed=moved.removed.only(ok),
        updated=moved.updated.only(ok),
        moves=moved.moves.only(ok),
    )


def deal(
    group: Group,
    policy: EvictionPolicy,
    out: Leaving,
    back: jax.Array,
    need: jax.Array,
    popped: jax.Array,
    now: jax.Array,
    number: int,
) -> Taken:
    """Deals out the rows of blocks that leave the device, that come back and that were empty; see `take`.

    Where the host has too little room its own victims are removed first; they may be among those that just come.

    Args:
      group: the group after `claim` of what leaves.
      policy: chooses who leaves the host.
      out: what leaves the device.
      back: i32[C]; what comes to the device.
      need: i32[]; blocks for new holders.
      popped: i32[]; empty device blocks to use.
      now: i32[] ms.
      number: the group's number.

    Returns:
      What was taken, of which nothing counts unless `ok`; removed and updated with rows for all that can happen.
    """
    blocks, host = group.blocks, host_of(group)
    lasting, followers, losers, host, ok = _who_goes(group, host, policy, out, back, now)
    passing = out.where & out.stay & ~lasting
    removed = jnp.concatenate([jnp.where(out.where & ~lasting, out.ids, NO_BLOCK), followers, losers])
    removed = children_first(blocks, removed, removed >= 0)
    dealt = _deal_rows(group, host, out, lasting, jnp.concatenate([followers, losers]), back, popped)
    free, place = dealt.free, jnp.arange(dealt.free.shape[0], dtype=jnp.int32)
    moved = jnp.concatenate([jnp.where(lasting, out.ids, NO_BLOCK), back])
    to_host = (jnp.arange(moved.shape[0], dtype=jnp.int32) < lasting.shape[0]).astype(jnp.int32)
    updated = _updated(blocks, number, moved, (moved >= 0) & (pick(blocks.fill, moved) > 0), to_host)
    passed = _updated(blocks, number, out.ids, passing, 1)
    ordered = moves(
        moved >= 0, group=number, block=moved, number=next_move(host), source=pick(host.pool_row, moved),
        target=pick(dealt.pool_row, moved),
    )  # fmt: skip

    above, idle = pick(blocks.parent, back)[:, 0], (back >= 0) & (pick(blocks.refcount, back) == 0)
    under = (back >= 0) & (pick(blocks.fill, back) > 0) & (above >= 0)
    refcount = put(blocks.refcount, removed, 0, removed >= 0)
    refcount = put(refcount, out.ids, 1 if out.held else 0, lasting)
    blocks = blocks.replace(
        refcount=put(refcount, free, 1, place < need),
        children=put(add(blocks.children, above, 1, under, unique=False), removed, 0, removed >= 0),
    )
    blocks = tell_time(blocks, now, (need > 0) | jnp.any(moved >= 0))
    on_stack = (place >= need) & (place < dealt.near)
    on_host = (place >= dealt.near) & (place < dealt.count)
    pstate = policy.forgot(group.policy, jnp.where(out.where, out.ids, NO_BLOCK))
    far_pstate = policy.forgot(host.policy, jnp.concatenate([back, removed]))
    host = host.replace(
        pool_row=dealt.pool_row,
        below=put(add(host.below, above, -1, under, unique=False), removed, 0, removed >= 0),
        arriving=put(host.arriving, moved, next_move(host), moved >= 0),
        moves=jnp.where(jnp.any(moved >= 0), next_move(host), host.moves),
        empty=put(host.empty, host.num_empty - dealt.taken + rank(on_host), free, on_host),
        num_empty=host.num_empty - dealt.taken + count(on_host),
        policy=far_pstate,
    )
    group = group.replace(
        blocks=blocks,
        host=host,
        empty=put(group.empty, group.num_empty - popped + rank(on_stack), free, on_stack),
        num_empty=group.num_empty - popped + count(on_stack),
        num_cached=group.num_cached - (0 if out.held else count(out.where)) + count(idle),
    )
    group, gone = leave_index(group, number, removed, removed >= 0, counted=False)
    pstate = policy.touched(pstate, group.blocks, jnp.where(idle, back, NO_BLOCK), now)
    group = find_stuck(group.replace(policy=pstate))
    ids = jnp.where(place < need, free, NO_BLOCK)
    return Taken(group, ids, ok, joined(passed, gone), updated, ordered)


def _updated(blocks: Blocks, number: int, ids: jax.Array, where: jax.Array, level: jax.Array | int) -> Records:
    """Records of blocks ids i32[K] of group `number` that come to a level, where bool[K]."""
    return record(
        EventKind.UPDATED, where, group=number, block=ids, generation=pick(blocks.generation, ids),
        priority=blocks.stated_priority(ids), level=level,
    )  # fmt: skip


def _who_goes(
    group: Group, host: Host, policy: EvictionPolicy, out: Leaving, back: jax.Array, now: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Host, jax.Array]:
    """Decides what of the leaving blocks comes to last on the host, and what else is removed.

    Returns:
      bool[A], which of out.ids are on the host in the end; i32[A] older blocks that go since what they follow goes;
      i32[A] older ones that go for want of room; the host, with `below` as it will be but for `back`; and bool[],
      whether it can be done.
    """
    blocks, size, num_ids = group.blocks, out.ids.shape[0], group.blocks.fill.shape[0]
    goes, parent = out.where & out.stay, pick(blocks.parent, out.ids)[:, 0]
    stored = (pick(blocks.fill, out.ids) > 0) & (parent >= 0)
    host = host.replace(below=add(host.below, parent, 1, goes & stored, unique=False))

    # Whatever follows a removed block goes with it, and is on the host, for the device loses leaves.
    removed = out.where & ~out.stay
    doomed = descendants(blocks, _mark(num_ids, out.ids, removed), jnp.any(removed & (pick(host.below, out.ids) > 0)))
    mine = _mark(num_ids, out.ids, out.where)
    ok = ~jnp.any(doomed & ~mine & ((blocks.refcount > 0) | (host.arriving != 0)))
    followers = _where(doomed & ~mine, size)
    ok = ok & (count(doomed & ~mine) <= size)

    # The host's own victims, chosen as if everything had come already.
    lasting = goes & ~pick(doomed, out.ids)
    room = host.num_empty + count(followers >= 0) + count(back >= 0)
    overflow = jnp.maximum(count(lasting) - room, 0)
    losers, host = _host_victims(group, host, policy, out, lasting, doomed, back, overflow, now)
    ok = ok & (count(losers >= 0) == overflow)
    lasting = lasting & ~pick(_mark(num_ids, losers, losers >= 0), out.ids)
    return lasting, followers, jnp.where(pick(mine, losers), NO_BLOCK, losers), host, ok


class Dealt(Pytree):
    """Who has which row now.

    Attributes:
      pool_row: i32[B]; as in `Host`.
      free: i32[.]; blocks that are nobody's, packed: first those with rows on the device.
      near: i32[]; how many these are.
      count: i32[]; how many blocks are free.
      taken: i32[]; how many of them were on the host's stack.
    """

    pool_row: jax.Array
    free: jax.Array
    near: jax.Array
    count: jax.Array
    taken: jax.Array


def _deal_rows(
    group: Group, host: Host, out: Leaving, lasting: jax.Array, old: jax.Array, back: jax.Array, popped: jax.Array
) -> Dealt:
    """Deals out the rows that are free when blocks have left, come back, and been removed (`old` i32[.], on the host).

    Rows on the device go to `back`, then to free blocks; rows on the host to what lasts there, then to free blocks.
    """
    pool_row, size, came, stay = host.pool_row, max(out.ids.shape[0], back.shape[0]), count(back >= 0), count(lasting)
    place = jnp.arange(size, dtype=jnp.int32)
    taken = jnp.maximum(stay - came - count(old >= 0), 0)
    from_stack = jnp.where(place < popped, pick(group.empty, group.num_empty - 1 - place), NO_BLOCK)
    from_host = jnp.where(place < taken, pick(host.empty, host.num_empty - 1 - place), NO_BLOCK)
    leaves = jnp.where(out.where, out.ids, NO_BLOCK)
    device_rows = pick(pool_row, compact(from_stack, leaves)[0])
    host_rows = pick(pool_row, compact(back, old, from_host)[0])
    free, total = compact(from_stack, jnp.where(lasting, NO_BLOCK, leaves), old, from_host)
    place = jnp.arange(free.shape[0], dtype=jnp.int32)
    near = popped + count(out.where) - came
    rows = jnp.where(place < near, pick(device_rows, came + place), pick(host_rows, stay + place - near))
    pool_row = put(pool_row, free, rows, place < total)
    pool_row = put(pool_row, out.ids, pick(host_rows, rank(lasting)), lasting)
    pool_row = put(pool_row, back, pick(device_rows, rank(back >= 0)), back >= 0)
    return Dealt(pool_row, free, near, total, taken)


def _host_victims(
    group: Group,
    host: Host,
    policy: EvictionPolicy,
    out: Leaving,
    lasting: jax.Array,
    doomed: jax.Array,
    back: jax.Array,
    overflow: jax.Array,
    now: jax.Array,
) -> tuple[jax.Array, Host]:
    """Who is removed from the host, i32[A], `overflow` of them if there are so many; and the host after it."""
    blocks, size, num_ids = group.blocks, out.ids.shape[0], group.blocks.fill.shape[0]
    coming = _mark(num_ids, out.ids, lasting & (not out.held))
    staying = _mark(num_ids, back, back >= 0) | doomed
    refcount = put(blocks.refcount, out.ids, 0, lasting & (not out.held))
    # As the policy is to see them: with the host's children, those of a block on the host.
    seen = blocks.replace(refcount=refcount, children=host.below)
    moving = led_to(group, host.arriving != 0, (host.pool_row < group.empty.shape[0]) & ~coming)
    pstate = policy.touched(host.policy, seen, jnp.where(lasting & (not out.held), out.ids, NO_BLOCK), now)

    def eligible(ids: jax.Array) -> jax.Array:
        there = (ids >= 0) & ((pick(host.pool_row, ids) >= group.empty.shape[0]) | pick(coming, ids))
        there = there & ~pick(moving, ids) & ~pick(staying, ids)
        return there & (pick(refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)

    ids, pstate = policy.chosen(pstate, seen, eligible, overflow, now, size)
    seen, claimed = claim(seen, ids, (jnp.arange(size, dtype=jnp.int32) < overflow) & eligible(ids))
    return jnp.where(claimed, ids, NO_BLOCK), host.replace(below=seen.children, policy=pstate)


def _mark(size: int, ids: jax.Array, where: jax.Array) -> jax.Array:
    """bool[size]; which are among ids i32[K], where bool[K]."""
    return put(jnp.zeros((size,), jnp.bool_), ids, True, where, unique=False)


def _where(marked: jax.Array, size: int) -> jax.Array:
    """i32[size]; the marked blocks, NO_BLOCK after them; what does not fit is left out."""
    return jnp.nonzero(marked, size=size, fill_value=NO_BLOCK)[0].astype(jnp.int32)
