# SPDX-License-Identifier: Apache-2.0
"""Window groups: blocks that layers with a sliding attention window share.

Every sequence is in the first group with all of its blocks: that one compares contents, links prefixes and finds
them, once for all groups. A window group has blocks of its own for what its layers can still see. Each is *anchored*
to the block of the first group with the same prefix:

    first group   table 2 0 3 7    root <- 2 <- 0 <- 3       7 being filled
    window group  table - - 5 1    anchor of 5: 3            1 being filled

It is found through its anchor and leaves the index with it, so what is found is exact here too. Otherwise blocks come
and go by age alone: the front of a sequence leaves before its end, since nothing hangs on it.

Source: variable sliding windows as in TensorRT-LLM, joint hits as in vLLM's hybrid cache coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax._arrays import add, fence, pick, put, runs
from kvjax.blocks.holders import give_back_shared, hold, merge
from kvjax.blocks.tiers import take_over
from kvjax.blocks.twins import Resolution
from kvjax.events.records import EventKind, Records, record
from kvjax.policies.ring import lru
from kvjax.spec import GroupSpec
from kvjax.state import NO_BLOCK, Blocks, EvictionPolicy, Group

POLICY = lru()  # of all window groups


def policy_of(number: int, policy: EvictionPolicy) -> EvictionPolicy:
    """Who chooses victims in a group: the cache's policy in the first, age alone in the others."""
    return policy if number == 0 else POLICY


def anchor_blocks(
    group: Group, number: int, tree: Blocks, own: jax.Array, target: jax.Array, where: jax.Array, fill: jax.Array | int
) -> tuple[Group, Records]:
    """Makes blocks own i32[K] findable beside the blocks target i32[K] of the first group, all different.

    Args:
      group: the window group.
      number: its number.
      tree: the blocks of the first group.
      own: not findable so far.
      target: findable, without a block in this group so far.
      where: bool[K]; those to anchor.
      fill: i32[] or i32[K]; tokens that each holds.

    Returns:
      The group and K records, stored.
    """
    (anchor, shadow), blocks = _ways(group), group.blocks
    generation, parent = add(blocks.generation, own, 1, where), pick(tree.parent, target)
    stored = record(
        EventKind.STORED, where, group=number, block=own, generation=pick(generation, own), source=parent[:, 0],
        source_generation=parent[:, 1], num_tokens=fill,
    )  # fmt: skip
    group = group.replace(
        blocks=blocks.replace(
            generation=generation, fill=put(blocks.fill, own, fill, where), hits=put(blocks.hits, own, 0, where)
        ),
        anchor=put(anchor, own, target, where),
        shadow=put(shadow, target, own, where),
    )
    return group, stored


def follow(
    group: Group, number: int, tree: Blocks, news: Resolution, rows: jax.Array, place: jax.Array, now: jax.Array
) -> tuple[Group, Records, Records]:
    """Does with rows' blocks at place i32[R, F] what the first group has just done with theirs, by news [R * F].

    Returns:
      The group; R * F records, stored; and records, updated.
    """
    where = (jnp.broadcast_to(rows[:, None], place.shape), place)
    own = group.table.at[where].get(mode="clip", wrap_negative_indices=False).reshape(-1)
    good = (news.publish | news.merge) & group.arrived(own)
    missing = good & news.first & (group.beside(news.target) < 0)
    group, own, missing, good = fence(group, own, missing, good)
    group, stored = anchor_blocks(group, number, tree, own, news.target, missing, tree.tokens.shape[1])
    there = group.beside(news.target)
    swap = good & (there >= 0) & (there != own)
    group, there, swap = fence(group, there, swap)
    group, updated = take_over(group, number, POLICY, own, there, swap & news.first)
    group = merge(group, POLICY, own, there, swap, news.first, now)
    table = put(group.table, where, there.reshape(place.shape), swap.reshape(place.shape))
    return group.replace(table=table), stored, updated


def let_go_of_anchors(group: Group, ids: jax.Array, where: jax.Array) -> Group:
    """The anchors of blocks ids i32[K], where bool[K], have no block in this group any more."""
    anchor, shadow = _ways(group)
    return group.replace(shadow=put(shadow, pick(anchor, ids), NO_BLOCK, where))


def _ways(group: Group) -> tuple[jax.Array, jax.Array]:
    """The anchors of a window group, and the way back."""
    assert group.anchor is not None and group.shadow is not None
    return group.anchor, group.shadow


def slide(
    group: Group, spec: GroupSpec, rows: jax.Array, start: jax.Array, end: jax.Array, most: int, size: int, now
) -> Group:
    """Lets rows i32[R] go of the blocks that leave the window as their written tokens grow from start to end i32[R].

    Args:
      group: the window group.
      spec: its window.
      rows: all different.
      start: i32[R].
      end: i32[R].
      most: static; the most tokens by which a row can have grown.
      size: P.
      now: i32[] ms.
    """
    place = runs(spec.first_place(start, size), -(-most // size))
    where = (jnp.broadcast_to(rows[:, None], place.shape), place)
    ids = group.table.at[where].get(mode="clip", wrap_negative_indices=False)
    leave = (ids >= 0) & ~spec.keeps(place, end[:, None], size)
    table, ids, leave = fence(group.table, ids, leave)
    group = group.replace(table=put(table, where, NO_BLOCK, leave))
    return give_back_shared(group, POLICY, ids.reshape(-1), 1, leave.reshape(-1), now)


def regain(
    groups: Sequence[Group], tables: Sequence[jax.Array], lacking: Sequence[jax.Array], ok: jax.Array
) -> tuple[jax.Array, list[Group], list[jax.Array]]:
    """Holds again what has left the windows of a row and is still on the device: all that is lacking, or nothing.

    Args:
      groups: the window groups.
      tables: i32[M]; the row's blocks in the first group, and then in each of these.
      lacking: bool[M]; for each of these groups the columns that the row lacks.
      ok: bool[]; whether to do it.

    Returns:
      Whether it was done; the window groups; and the tables of all groups.
    """
    own = [
        jnp.where(columns, group.beside(tables[0]), NO_BLOCK) for group, columns in zip(groups, lacking, strict=True)
    ]
    for group, columns, blocks in zip(groups, lacking, own, strict=True):
        ok = ok & ~jnp.any(columns & ~group.reachable(blocks, ("device",)))
    held = [hold(group, blocks, ok & (blocks >= 0)) for group, blocks in zip(groups, own, strict=True)]
    found = [jnp.where(ok & (table < 0), ids, table) for table, ids in zip(tables[1:], own, strict=True)]
    return ok, held, [tables[0], *found]
