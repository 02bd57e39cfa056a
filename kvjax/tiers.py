# SPDX-License-Identifier: Apache-2.0
"""Blocks change tier: the part of the verbs that a cache with a host tier adds, for one group.

A block keeps its number wherever it is, so that no table, link or index changes when it moves; what changes is its
pool row. Device rows that become free and host rows that become free are dealt out anew in one go:

    before   block 3 at row 0, cached        block 9 at row 6 (host), wanted again        block 8 empty, row 7 (host)
    after    block 3 at row 6 or 7 (host)    block 9 at row 0                             block 8 empty, the other row

Here nothing happens inside a jitted loop, so that passes over all blocks are allowed; `take` of `group.py` is what
loops use.

Source: TensorRT-LLM's offloading and onboarding, which swap the memory slots of two block objects.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvjax import index
from kvjax._arrays import add, compact, count, pick, put, rank
from kvjax.events import DEFAULT_PRIORITY, EventKind, record
from kvjax.group import Taken, available, claim, find_stuck, led_to
from kvjax.policies import EvictionPolicy
from kvjax.retention import priority_at
from kvjax.state import NO_BLOCK, Blocks, CacheState, Group, Host, pytree
from kvjax.transfer import moves


def worth(state: CacheState, now: jax.Array) -> list[jax.Array]:
    """i32[B] for each group; what its blocks are worth at `now`; in a window group, as much as their anchors."""
    blocks = state.groups[0].blocks
    if blocks.retention is None:
        return [jnp.full_like(group.blocks.fill, DEFAULT_PRIORITY) for group in state.groups]
    values = priority_at(blocks, now)
    return [values if group.anchor is None else pick(values, group.anchor) for group in state.groups]


@pytree("held")
class Leaving:
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


def take(
    group: Group,
    policy: EvictionPolicy,
    need: jax.Array,
    size: int,
    now: jax.Array,
    *,
    value: jax.Array,
    least: int,
    spare: jax.Array | int = NO_BLOCK,
    number: int = 0,
    back: jax.Array | None = None,
    extra: jax.Array | int = 0,
) -> Taken:
    """Takes `need` blocks for one holder each and brings blocks back, offloading what has to leave for it.

    Args:
      group: the group; untouched unless all can be done.
      policy: chooses who leaves the device, and who the host.
      need: i32[].
      size: static; the most blocks that need, back and extra may be together.
      now: i32[] ms.
      value: i32[B]; from `worth`.
      least: blocks worth less are removed, not offloaded.
      spare: i32[]; a block that may not leave its row.
      number: the group's number.
      back: i32[size]; different findable blocks on the host that are to come to the device, packed; NO_BLOCK is
        padding.
      extra: i32[]; blocks that are to be emptied beyond that.
    """
    host, before = group.host, group.blocks
    assert host is not None
    back = jnp.full((size,), NO_BLOCK, jnp.int32) if back is None else back
    rows = group.empty.shape[0]
    total = need + count(back >= 0) + extra
    popped = jnp.minimum(need + count(back >= 0), group.num_empty)
    wanted = jnp.where(total <= available(group), total - popped, 0)

    moving = led_to(group, host.arriving != 0, host.slot < rows)

    def eligible(ids: jax.Array) -> jax.Array:
        here = (ids >= 0) & (pick(host.slot, ids) < rows) & ~pick(moving, ids) & (ids != spare)
        return here & (pick(before.refcount, ids) == 0) & (pick(before.fill, ids) > 0)

    ids, pstate = policy.victims(group.policy, before, eligible, wanted, now, size)
    where = (jnp.arange(size, dtype=jnp.int32) < wanted) & eligible(ids)
    blocks, claimed = claim(before, ids, where)
    fits = (total <= available(group)) & (count(claimed) == wanted)
    out = Leaving(ids, claimed, claimed & (pick(value, ids) >= least))
    moved = deal(dataclasses.replace(group, blocks=blocks, policy=pstate), policy, out, back, need, popped, now, spare,
                 number)  # fmt: skip
    ok = fits & moved.ok
    return Taken(
        group=jax.tree.map(lambda new, old: jnp.where(ok, new, old), moved.group, group),
        ids=jnp.where(ok, moved.ids, NO_BLOCK)[:size],
        ok=ok,
        removed=jnp.where(ok, moved.removed, 0),
        updated=jnp.where(ok, moved.updated, 0),
        moves=jnp.where(ok, moved.moves, NO_BLOCK),
    )


def deal(
    group: Group,
    policy: EvictionPolicy,
    out: Leaving,
    back: jax.Array,
    need: jax.Array,
    popped: jax.Array,
    now: jax.Array,
    spare: jax.Array | int,
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
      spare: i32[]; a block that may not leave the host.
      number: the group's number.

    Returns:
      What was taken, of which nothing counts unless `ok`; removed and updated with rows for all that can happen.
    """
    blocks, host = group.blocks, group.host
    assert host is not None
    size, slot, stored = out.ids.shape[0], host.slot, pick(blocks.fill, out.ids) > 0
    parent, goes, num_ids = pick(blocks.parent, out.ids)[:, 0], out.where & out.stay, blocks.fill.shape[0]
    came = count(back >= 0)
    below = add(host.below, parent, 1, goes & stored & (parent >= 0), unique=False)
    host = dataclasses.replace(host, below=below)

    # Whatever follows a removed block goes with it, and is on the host, for the device loses leaves.
    doomed = _followers(blocks, out.ids, out.where & ~out.stay, below)
    mine = _mark(num_ids, out.ids, out.where)
    ok = ~jnp.any(doomed & ~mine & ((blocks.refcount > 0) | (host.arriving != 0)))
    followers = _where(doomed & ~mine, size)
    ok = ok & (count(doomed & ~mine) <= size)

    # The host's own victims, chosen as if everything had come already.
    lasting = goes & ~pick(doomed, out.ids)
    room = host.num_empty + count(followers >= 0) + came
    overflow = jnp.maximum(count(lasting) - room, 0)
    losers, host = _host_victims(group, host, policy, out, lasting, doomed, back, overflow, now, spare)
    ok = ok & (count(losers >= 0) == overflow)
    lost = _mark(num_ids, losers, losers >= 0)
    passing = goes & (pick(doomed, out.ids) | pick(lost, out.ids))
    stays = goes & ~passing
    losers = jnp.where(pick(mine, losers), NO_BLOCK, losers)  # those that had been there before
    removed = jnp.concatenate([jnp.where(out.where & ~stays, out.ids, NO_BLOCK), followers, losers])
    removed = pick(removed, jnp.argsort(-jnp.where(removed >= 0, pick(blocks.depth, removed), -1)))  # children first

    # Rows and numbers that became free, and who gets them.
    from_stack = pick(group.empty, group.num_empty - 1 - jnp.arange(max(size, back.shape[0]), dtype=jnp.int32))
    from_stack = jnp.where(jnp.arange(from_stack.shape[0], dtype=jnp.int32) < popped, from_stack, NO_BLOCK)
    leaves, old = jnp.where(out.where, out.ids, NO_BLOCK), jnp.concatenate([followers, losers])
    taken = jnp.maximum(count(stays) - came - count(old >= 0), 0)
    from_host = pick(host.empty, host.num_empty - 1 - jnp.arange(size, dtype=jnp.int32))
    from_host = jnp.where(jnp.arange(size, dtype=jnp.int32) < taken, from_host, NO_BLOCK)
    here, _ = compact(from_stack, leaves)
    there, _ = compact(back, old, from_host)
    device_rows, host_rows = pick(slot, here), pick(slot, there)
    free, num_free = compact(from_stack, jnp.where(stays, NO_BLOCK, leaves), old, from_host)
    place = jnp.arange(free.shape[0], dtype=jnp.int32)
    spread = popped + count(out.where) - came  # device rows for free blocks: `need` of them and then the stack
    free_rows = jnp.where(
        place < spread, pick(device_rows, came + place), pick(host_rows, count(stays) + place - spread)
    )
    new_slot = put(slot, free, free_rows, place < num_free)
    new_slot = put(new_slot, out.ids, pick(host_rows, rank(stays)), stays)
    new_slot = put(new_slot, back, pick(device_rows, rank(back >= 0)), back >= 0)
    on_stack, on_host = (place >= need) & (place < spread), (place >= spread) & (place < num_free)

    moved = jnp.concatenate([jnp.where(stays, out.ids, NO_BLOCK), back])
    known = moved >= 0

    def tell(kind: EventKind, ids: jax.Array, where: jax.Array, level: jax.Array | int = 0) -> jax.Array:
        priority = DEFAULT_PRIORITY if blocks.retention is None else pick(blocks.retention, ids)[:, 0]
        generation = pick(blocks.generation, ids)
        return record(kind, where, group=number, block=ids, generation=generation, level=level, priority=priority)

    findable = known & (pick(blocks.fill, moved) > 0)
    updated = tell(
        EventKind.UPDATED, moved, findable, (jnp.arange(moved.shape[0], dtype=jnp.int32) < size).astype(jnp.int32)
    )
    records = [tell(EventKind.UPDATED, out.ids, passing, 1), tell(EventKind.REMOVED, removed, removed >= 0)]
    number_of_move = next_move(host)
    ordered = moves(
        known, group=number, block=moved, number=number_of_move, source=pick(slot, moved), target=pick(new_slot, moved)
    )

    up, idle = pick(blocks.parent, back)[:, 0], (back >= 0) & (pick(blocks.refcount, back) == 0)
    below_back = (back >= 0) & (pick(blocks.fill, back) > 0) & (up >= 0)
    refcount = put(blocks.refcount, removed, 0, removed >= 0)
    refcount = put(refcount, out.ids, 1 if out.held else 0, stays)
    refcount = put(refcount, free, 1, place < need)
    blocks = dataclasses.replace(
        blocks,
        refcount=refcount,
        fill=put(blocks.fill, removed, 0, removed >= 0),
        children=put(add(blocks.children, up, 1, below_back, unique=False), removed, 0, removed >= 0),
    )
    host = dataclasses.replace(
        host,
        slot=new_slot,
        below=put(add(host.below, up, -1, below_back, unique=False), removed, 0, removed >= 0),
        arriving=put(host.arriving, moved, number_of_move, known),
        moves=jnp.where(jnp.any(known), number_of_move, host.moves),
        empty=put(host.empty, host.num_empty - taken + rank(on_host), free, on_host),
        num_empty=host.num_empty - taken + count(on_host),
    )
    pstate = group.policy
    if policy.forget is not None:
        pstate = policy.forget(pstate, leaves)
        host = dataclasses.replace(host, policy=policy.forget(host.policy, jnp.concatenate([back, removed])))
    group = dataclasses.replace(
        group,
        blocks=blocks,
        host=host,
        links=group.links if group.anchor is not None else index.remove(
            group.links, blocks.fill, removed, removed >= 0
        ),
        shadow=None if group.shadow is None or group.anchor is None else put(
            group.shadow, pick(group.anchor, removed), NO_BLOCK, removed >= 0
        ),
        empty=put(group.empty, group.num_empty - popped + rank(on_stack), free, on_stack),
        num_empty=group.num_empty - popped + count(on_stack),
        num_cached=group.num_cached - (0 if out.held else count(out.where)) + count(idle),
        policy=policy.touch(pstate, blocks, jnp.where(idle, back, NO_BLOCK), now),
    )  # fmt: skip
    ids = jnp.where(place < need, free, NO_BLOCK)
    return Taken(find_stuck(group), ids, ok, jnp.concatenate(records), updated, ordered)


def next_move(host: Host) -> jax.Array:
    """i32[]; the number of the next move: 0, which means none, is left out when they wrap."""
    return jnp.where(host.moves == -1, 1, host.moves + 1)


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
    spare: jax.Array | int,
) -> tuple[jax.Array, Host]:
    """Who is removed from the host, i32[A], `overflow` of them if there are so many; and the host after it."""
    blocks, size, num_ids = group.blocks, out.ids.shape[0], group.blocks.fill.shape[0]
    coming = _mark(num_ids, out.ids, lasting & (not out.held))
    staying = _mark(num_ids, back, back >= 0) | doomed
    refcount = put(blocks.refcount, out.ids, 0, lasting & (not out.held))
    # As the policy is to see them: with the host's children, those of a block on the host.
    seen = dataclasses.replace(blocks, refcount=refcount, children=host.below)
    moving = led_to(group, host.arriving != 0, (host.slot < group.empty.shape[0]) & ~coming)
    pstate = policy.touch(host.policy, seen, jnp.where(lasting & (not out.held), out.ids, NO_BLOCK), now)

    def eligible(ids: jax.Array) -> jax.Array:
        there = (ids >= 0) & ((pick(host.slot, ids) >= group.empty.shape[0]) | pick(coming, ids)) & (ids != spare)
        there = there & ~pick(moving, ids) & ~pick(staying, ids)
        return there & (pick(refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)

    ids, pstate = policy.victims(pstate, seen, eligible, overflow, now, size)
    seen, claimed = claim(seen, ids, (jnp.arange(size, dtype=jnp.int32) < overflow) & eligible(ids))
    return jnp.where(claimed, ids, NO_BLOCK), dataclasses.replace(host, below=seen.children, policy=pstate)


def _followers(blocks: Blocks, ids: jax.Array, where: jax.Array, below: jax.Array) -> jax.Array:
    """bool[B]; blocks ids i32[K], where bool[K], and all findable blocks that follow those of them with any below."""
    parent = blocks.parent[:, 0]

    def following(marked: jax.Array) -> jax.Array:
        return (blocks.fill > 0) & (parent >= 0) & pick(marked, parent)

    some = jnp.any(where & (pick(below, ids) > 0))
    return lax.while_loop(
        lambda marked: some & jnp.any(following(marked) & ~marked),
        lambda marked: marked | following(marked),
        _mark(blocks.fill.shape[0], ids, where),
    )


def _mark(size: int, ids: jax.Array, where: jax.Array) -> jax.Array:
    """bool[size]; which are among ids i32[K], where bool[K]."""
    return put(jnp.zeros((size,), jnp.bool_), ids, True, where, unique=False)


def _where(marked: jax.Array, size: int) -> jax.Array:
    """i32[size]; the marked blocks, NO_BLOCK after them; what does not fit is left out."""
    return jnp.nonzero(marked, size=size, fill_value=NO_BLOCK)[0].astype(jnp.int32)
