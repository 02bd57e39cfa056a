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
from kvjax.group import available, give_back, hold, take
from kvjax.match import Match, beside, longest_match
from kvjax.place import on_device, row_of
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
    """

    blocks: jax.Array
    hits: jax.Array
    far: jax.Array
    source: jax.Array
    idle: jax.Array
    free: jax.Array


def admit_row(
    state: CacheState,
    seq: jax.Array,
    ask: Prompt,
    retention: Retention | None,
    now: jax.Array,
    room: int | None,
    tiers: tuple[str, ...],
    sources: jax.Array,
) -> tuple[CacheState, Events, jax.Array]:
    """Admits one row; `sources` i32[R, G] are what earlier rows of the call copy from, in pool rows.

    Also returns its own, i32[1, G].
    """
    spec, size = state.spec, state.spec.block_size
    match = longest_match(state, ask.tokens, ask.extra_ids, ask.length, ask.namespace, tiers)
    whole, place = match.num_blocks, np.arange(match.blocks.shape[0])
    found = [_find(group, of, match, size) for group, of in zip(state.groups, spec.groups, strict=True)]

    def plan(shared: jax.Array) -> tuple[jax.Array, jax.Array]:
        cached = whole * size + shared
        target = ask.length if room is None else jnp.minimum(ask.length, cached + room)
        return target, -(-target // size) - whole

    # The source of a copy is evicted last: only if its space is needed, and then only whole blocks are reused.
    spared = [plan(match.shared)[1] + each.idle.astype(jnp.int32) <= each.free for each in found]
    shared = jnp.where(_all(spared), match.shared, 0)
    target, need = plan(shared)
    least = functools.reduce(jnp.minimum, [each.free for each in found])
    row = _row.read(state, seq)
    status = first_failure(
        (~row.exists | ~ask.valid, Status.BAD_REQUEST),
        (row.length > 0, Status.HELD),
        (whole + need > spec.max_blocks_per_seq, Status.ROW_FULL),
        (need > least, Status.NO_BLOCKS),
    )
    refcounts = [group.blocks.refcount for group in state.groups]
    refcounts, found, status, need, shared = fence(refcounts, found, status, need, shared)
    need = jnp.where(status == Status.OK, need, 0)
    worth = tiers_.worth(state, now) if "host" in tiers else None
    groups, taken = [], []
    for g, (group, each) in enumerate(zip(state.groups, found, strict=True)):
        group = dataclasses.replace(group, blocks=dataclasses.replace(group.blocks, refcount=refcounts[g]))
        if g > 0:  # what the first group has lost is not findable in the others either
            group, forgotten = windows.forget(group, g, taken[0].removed)
        good, policy = status == Status.OK, windows.policy_of(g, state.policy)
        group = hold(group, each.blocks, each.hits & good)
        source = jnp.where(shared > 0, each.source, NO_BLOCK)
        if worth is None or group.host is None:
            new = take(group, policy, need, place.size, now, source, g)
        else:
            back = compact(jnp.where(each.far & good, each.blocks, NO_BLOCK))[0]
            new = tiers_.take(
                group, policy, need, place.size, now, value=worth[g], least=spec.offload_min_priority, spare=source,
                number=g, back=back,
            )  # fmt: skip
        group = hold(new.group, each.blocks, each.hits & good & ~new.ok, by=-1)
        status = jnp.where(new.ok, status, Status.NO_BLOCKS)
        need = jnp.where(new.ok, need, 0)
        if g > 0:
            new = dataclasses.replace(new, removed=jnp.concatenate([forgotten, new.removed]))
        groups, taken = [*groups, group], [*taken, new]
    ok = status == Status.OK
    hits, fresh = [each.hits & ok for each in found], [new.ids for new in taken]
    source = [jnp.where(shared > 0, each.source, NO_BLOCK) for each in found]

    # The copy goes into a row that nobody of this call copies from; without such a row there is no copy.
    rows = [row_of(group, ids) for group, ids in zip(groups, fresh, strict=True)]
    safe = [
        (i >= 0) & ~jnp.any(r[:, None] == sources[None, :, g], axis=1)
        for g, (i, r) in enumerate(zip(fresh, rows, strict=True))
    ]
    copies = ok & (source[0] >= 0) & _all([jnp.any(s) for s in safe])
    cached = jnp.where(ok, whole * size + jnp.where(copies, shared, 0), 0)
    copied, moved, tables, after = [], [new.moves for new in taken], [], place - whole
    from_rows = [row_of(group, s) for group, s in zip(state.groups, source, strict=True)]
    for g, (group, ids) in enumerate(zip(groups, fresh, strict=True)):
        chosen = jnp.argmax(safe[g])
        ids = ids.at[chosen].set(ids[0]).at[0].set(ids[chosen])
        near = copies & on_device(state.groups[g], source[g])
        copied.append(
            record(EventKind.COPIED, near[None], group=g, block=row_of(group, ids[:1]), source=from_rows[g],
                   num_tokens=shared)
        )  # fmt: skip
        if worth is not None and group.host is not None:
            far, host, number = (copies & ~near)[None], group.host, tiers_.next_move(group.host)
            moved.append(
                moves(far, group=g, block=ids[:1], number=number, source=from_rows[g], target=row_of(group, ids[:1]))
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
        else:  # the copied tokens may move a window on
            passed = hits[g] & ~spec.groups[g].keeps(place, cached, size)
            group = give_back(group, windows.POLICY, table, passed & ok, now)
            table = jnp.where(passed, NO_BLOCK, table)
        groups[g], tables = group, [*tables, table]
    stated, updated = None, [new.updated for new in taken]
    if spec.retention:
        stated = by_place(retention, ask.length, size, spec.max_blocks_per_seq)
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
        shortfall=jnp.where(status == Status.NO_BLOCKS, jnp.maximum(plan(shared)[1] - least, 1), 0),
        moves=moved,
    )
    return state, events, jnp.stack([jnp.where(copies, r, NO_BLOCK) for r in from_rows])[None]


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


def _find(group: Group, spec: GroupSpec, match: Match, size: int) -> Found:
    blocks, place = beside(group, match.blocks), np.arange(match.blocks.shape[0])
    hits = (blocks >= 0) & spec.keeps(place, match.num_blocks * size, size)
    here, source = on_device(group, blocks), beside(group, match.source)
    unheld = hits & here & (pick(group.blocks.refcount, blocks) == 0)
    idle = (source >= 0) & on_device(group, source) & (pick(group.blocks.refcount, source) == 0)
    free = available(group) - count(unheld) - count(hits & ~here)
    return Found(blocks, hits, hits & ~here, source, idle, free)


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
