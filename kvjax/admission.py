# SPDX-License-Identifier: Apache-2.0
"""Admitting one row: the decisions behind `cache.admit`, in order."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _row, windows
from kvjax import tiers as tiers_
from kvjax._arrays import compact, count, fence, pick, put
from kvjax._request import Prompt, assemble, first_failure
from kvjax.events import EventKind, Events, Status, record
from kvjax.group import available, hold, hold_source, let_go_of_sources, take
from kvjax.match import longest_match
from kvjax.policies import COPYING
from kvjax.retention import UNSTATED, Retention, apply_retention, by_place
from kvjax.spec import GroupSpec
from kvjax.state import NO_BLOCK, CacheState, Group, pytree
from kvjax.transfer import moves


@pytree()
class Found:
    """What one group has of a prompt.

    Attributes:
      blocks: i32[F]; its blocks of the cached prefix.
      hits: bool[F]; which of them the next token sees.
      far: bool[F]; which of these are on the host.
      source: i32[]; the block to copy further tokens from, or NO_BLOCK.
      idle: bool[]; whether that is on the device and nobody holds it.
      free: i32[]; blocks that can be had, beside the hits, less those that come from the host.
      fixed: bool[]; whether a hit would have to come from the host while an earlier row of the call copies from it.
    """

    blocks: jax.Array
    hits: jax.Array
    far: jax.Array
    source: jax.Array
    idle: jax.Array
    free: jax.Array
    fixed: jax.Array


def admit_row(
    state: CacheState,
    seq: jax.Array,
    ask: Prompt,
    retention: Retention | None,
    now: jax.Array,
    room: int | None,
    tiers: tuple[str, ...],
) -> tuple[CacheState, Events, jax.Array]:
    """Admits one row; also returns the blocks that it copies from, i32[G], NO_BLOCK if none.

    They stay held (`group.hold_source`) until the caller lets go of them after the last row of the call. So no later
    row evicts, moves, empties or overwrites them, and the bytes are still there when the copies are made.
    """
    spec, size = state.spec, state.spec.block_size
    match = longest_match(state, ask.tokens, ask.extra_ids, ask.length, ask.namespace, tiers)
    place = np.arange(match.blocks.shape[0], dtype=np.int32)

    def plan(whole: jax.Array, shared: jax.Array) -> tuple[jax.Array, jax.Array, list[Found]]:
        cached, blocks = whole * size + shared, jnp.where(place < whole, match.blocks, NO_BLOCK)
        target = ask.length if room is None else jnp.minimum(ask.length, cached + room)
        source = jnp.where(shared > 0, match.source, NO_BLOCK)
        pairs = zip(state.groups, spec.groups, strict=True)
        found = [_find(group, of, blocks, source, cached, size) for group, of in pairs]
        return target, -(-target // size) - whole, found

    # The source of a copy is evicted last: only if its space is needed, and then only whole blocks are reused.
    _, need, found = plan(match.num_blocks, match.shared)
    spared = _all([need + each.idle.astype(jnp.int32) <= each.free for each in found])
    whole, shared = jnp.where(spared, match.num_blocks, match.num_uncopied), jnp.where(spared, match.shared, 0)
    target, need, found = plan(whole, shared)
    least = functools.reduce(jnp.minimum, [each.free for each in found])
    fixed = functools.reduce(jnp.logical_or, [each.fixed for each in found])
    row = _row.read(state, seq)
    status = first_failure(
        (~row.exists | ~ask.valid, Status.BAD_REQUEST),
        (row.length > 0, Status.HELD),
        (whole + need > spec.max_blocks_per_seq, Status.ROW_FULL),
        ((need > least) | fixed, Status.NO_BLOCKS),
    )
    refcounts, missing = [group.blocks.refcount for group in state.groups], need - least
    refcounts, found, status, need, shared, missing = fence(refcounts, found, status, need, shared, missing)
    need = jnp.where(status == Status.OK, need, 0)
    worth = tiers_.worth(state, now) if "host" in tiers else None
    groups, taken, sources = [], [], []
    for g, (group, each) in enumerate(zip(state.groups, found, strict=True)):
        group = dataclasses.replace(group, blocks=dataclasses.replace(group.blocks, refcount=refcounts[g]))
        if g > 0:  # what the first group has lost is not findable in the others either
            group, forgotten = windows.forget(group, g, taken[0].removed)
        good, policy = status == Status.OK, windows.policy_of(g, state.policy)
        group = hold(group, each.blocks, each.hits & good)
        source = jnp.where(good, each.source, NO_BLOCK)
        group = hold_source(group, source)
        if worth is None or group.host is None:
            new = take(group, policy, need, place.size, now, g)
        else:
            back = compact(jnp.where(each.far & good, each.blocks, NO_BLOCK))[0]
            new = tiers_.take(
                group, policy, need, place.size, now, value=worth[g], least=spec.offload_min_priority, number=g,
                back=back,
            )  # fmt: skip
        group = hold(new.group, each.blocks, each.hits & good & ~new.ok, by=-1)
        group = let_go_of_sources(group, jnp.where(new.ok, NO_BLOCK, source)[None])
        sources.append(jnp.where(new.ok, source, NO_BLOCK))
        status = jnp.where(new.ok, status, Status.NO_BLOCKS)
        need = jnp.where(new.ok, need, 0)
        if g > 0:
            new = dataclasses.replace(new, removed=jnp.concatenate([forgotten, new.removed]))
        groups, taken = [*groups, group], [*taken, new]
    ok = status == Status.OK
    sources = jnp.where(ok, jnp.stack(sources), NO_BLOCK)
    copies, hits, fresh = ok & (shared > 0), [each.hits & ok for each in found], [new.ids for new in taken]
    cached = jnp.where(ok, whole * size + shared, 0)
    copied, moved, tables, after = [], [new.moves for new in taken], [], place - whole
    for g, (group, ids) in enumerate(zip(groups, fresh, strict=True)):
        near, source = copies & group.on_device(sources[g]), group.pool_row(sources[g])
        copied.append(
            record(EventKind.COPIED, near[None], group=g, block=group.pool_row(ids[:1]), source=source,
                   num_tokens=shared)
        )  # fmt: skip
        if worth is not None and group.host is not None:
            far, host, number = (copies & ~near)[None], group.host, tiers_.next_move(group.host)
            moved.append(
                moves(far, group=g, block=ids[:1], number=number, source=source, target=group.pool_row(ids[:1]))
            )
            host = dataclasses.replace(
                host,
                arriving=put(host.arriving, ids[:1], number, far),
                moves=jnp.where(far[0], number, host.moves),
                stuck=put(host.stuck, found[g].blocks, True, hits[g] & far[0]),
            )
            group = dataclasses.replace(group, host=host)
        table = jnp.where(
            hits[g], found[g].blocks, jnp.where((after >= 0) & (after < need), pick(ids, after), NO_BLOCK)
        )
        if g == 0:
            group = _row.write_prompt(group, ids[:1], copies[None], ask, whole)
        groups[g], tables = group, [*tables, table]
    stated, updated = None, [new.updated for new in taken]
    if spec.retention:
        stated = by_place(retention, ask.length, size, spec.max_blocks_per_seq + 1)
        new = ok & (after >= 0) & (after < need)
        groups[0], changed = _retain(groups[0], tables[0], stated, hits[0] & ok, new)
        updated.append(changed)
    before, state = state, dataclasses.replace(state, groups=tuple(groups))
    state = _row.write(state, seq, ok, tables, target, cached, ask.namespace, stated)
    state, removed, updated, moved = all_or_nothing(
        before, state, ok, [new.removed for new in reversed(taken)], updated, moved
    )
    events = assemble(
        state,
        status,
        removed=removed,
        updated=updated,
        copied=copied,
        queried=jnp.where(ok, ask.length, 0),
        cached=cached,
        shortfall=jnp.where(status == Status.NO_BLOCKS, jnp.maximum(missing, 1), 0),
        moves=moved,
    )
    return state, events, sources


def all_or_nothing(
    before: CacheState, after: CacheState, ok: jax.Array, *records: list[jax.Array]
) -> tuple[CacheState, *tuple[list[jax.Array], ...]]:
    """One of two states, by ok bool[], and the records where it holds.

    A group that fails has changed nothing. That others have, before it, takes several groups and a host tier, where the
    number of cached blocks does not tell how many of them can leave; only then does this cost a pass over the state.
    """
    if not before.spec.has_host or len(before.groups) == 1:
        return after, *records
    state = jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, before)
    return state, *([jnp.where(ok, r, NO_BLOCK if r.shape[-1] == 5 else 0) for r in rows] for rows in records)


def _find(group: Group, spec: GroupSpec, ids: jax.Array, source: jax.Array, cached: jax.Array, size: int) -> Found:
    """What the group has beside blocks ids i32[F] and source i32[] of the first group, for `cached` i32[] tokens."""
    blocks, source = group.beside(ids), group.beside(source)
    hits = (blocks >= 0) & spec.keeps(np.arange(ids.shape[0], dtype=np.int32), cached, size)
    refcount, far = pick(group.blocks.refcount, blocks), hits & ~group.on_device(blocks)
    idle = (source >= 0) & group.on_device(source) & (pick(group.blocks.refcount, source) == 0)
    free = available(group) - count(hits & (far | (refcount == 0)))
    return Found(blocks, hits, far, source, idle, free, jnp.any(far & (refcount >= COPYING)))


def _all(conditions: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, conditions)


def _retain(
    group: Group, table: jax.Array, stated: jax.Array, hit: jax.Array, fresh: jax.Array
) -> tuple[Group, jax.Array]:
    """Gives a new row's blocks table i32[F] what is stated i32[M, 2] of them; found ones keep what is not stated.

    Returns:
      The group and records i32[F, 9], updated.
    """
    blocks, stated = group.blocks, _row.fit(stated, table.shape[0], UNSTATED)
    assert blocks.retention is not None
    again = hit & (stated[:, 0] >= 0)
    before = pick(blocks.retention, table)[:, 0]
    retention, before = fence(blocks.retention, before)
    blocks = apply_retention(dataclasses.replace(blocks, retention=retention), table, stated, again | fresh)
    changed = again & (before != stated[:, 0])
    updated = record(
        EventKind.UPDATED, changed, block=table, generation=pick(blocks.generation, table), priority=stated[:, 0]
    )
    return dataclasses.replace(group, blocks=blocks), updated
