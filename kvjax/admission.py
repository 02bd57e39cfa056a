# SPDX-License-Identifier: Apache-2.0
"""Admitting one row: the decisions behind `cache.admit`, in order."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _row, windows
from kvjax._arrays import count, fence, pick
from kvjax._request import Prompt, assemble, first_failure
from kvjax.events import EventKind, Events, Status, record
from kvjax.group import available, give_back, hold, take
from kvjax.match import longest_match
from kvjax.retention import UNSTATED, Retention, apply_retention, by_place
from kvjax.state import NO_BLOCK, CacheState, Group


def admit_row(
    state: CacheState,
    seq: jax.Array,
    ask: Prompt,
    retention: Retention | None,
    now: jax.Array,
    room: int | None,
    sources: jax.Array,
) -> tuple[CacheState, Events, jax.Array]:
    """Admits one row; `sources` i32[R, G] are what earlier rows of the call copy from. Also returns its own, i32[1, G].
    """
    spec, size, everyone = state.spec, state.spec.block_size, range(len(state.groups))
    match = longest_match(state, ask.tokens, ask.extra_ids, ask.length, ask.namespace)
    whole, place = match.num_blocks, np.arange(match.blocks.shape[0])
    # Each group's blocks of the prefix that the next token sees, after so many whole blocks; and what to copy from.
    found = [windows.beside(group, match.blocks) for group in state.groups]
    hits = [(b >= 0) & of.keeps(place, whole * size, size) for b, of in zip(found, spec.groups, strict=True)]
    source = [windows.beside(group, match.source) for group in state.groups]
    idle = [pick(group.blocks.refcount, s) == 0 for group, s in zip(state.groups, source, strict=True)]
    free = [
        available(group) - count(hit & (pick(group.blocks.refcount, b) == 0))
        for group, hit, b in zip(state.groups, hits, found, strict=True)
    ]

    def plan(shared: jax.Array) -> tuple[jax.Array, jax.Array]:
        cached = whole * size + shared
        target = ask.length if room is None else jnp.minimum(ask.length, cached + room)
        return target, -(-target // size) - whole

    # The source of a copy is evicted last: only if its space is needed, and then only whole blocks are reused.
    spared = [
        plan(match.shared)[1] + (i & (s >= 0)).astype(jnp.int32) <= f
        for i, s, f in zip(idle, source, free, strict=True)
    ]
    shared = jnp.where(_all(spared), match.shared, 0)
    target, need = plan(shared)
    least = functools.reduce(jnp.minimum, free)
    row = _row.read(state, seq)
    status = first_failure(
        (~row.exists | ~ask.valid, Status.BAD_REQUEST),
        (row.length > 0, Status.HELD),
        (whole + need > spec.max_blocks_per_seq, Status.ROW_FULL),
        (need > least, Status.NO_BLOCKS),
    )
    refcounts = [group.blocks.refcount for group in state.groups]
    refcounts, found, hits, source, status, need, shared = fence(refcounts, found, hits, source, status, need, shared)
    source = [jnp.where(shared > 0, s, NO_BLOCK) for s in source]
    need = jnp.where(status == Status.OK, need, 0)
    groups, fresh, removed, gone = [], [], [], None
    for g, group in enumerate(state.groups):
        group = dataclasses.replace(group, blocks=dataclasses.replace(group.blocks, refcount=refcounts[g]))
        if gone is not None:  # what the first group has evicted is not findable in the others either
            group, forgotten = windows.forget(group, g, gone)
            removed.insert(0, forgotten)
        hits[g] = hits[g] & (status == Status.OK)
        group = hold(group, found[g], hits[g])
        policy = windows.policy_of(g, state.policy)
        group, ids, had, out = take(group, policy, need, place.size, now, source[g], g)
        group = hold(group, found[g], hits[g] & ~had, by=-1)
        gone = out if gone is None else gone
        status = jnp.where(had, status, Status.NO_BLOCKS)
        need = jnp.where(had, need, 0)
        groups, fresh, removed = [*groups, group], [*fresh, ids], [*removed, out]
    ok = status == Status.OK

    # The copy goes into a block that nobody of this call copies from; without such a block there is no copy.
    safe = [(ids >= 0) & ~jnp.any(ids[:, None] == sources[:, g][None], axis=1) for g, ids in enumerate(fresh)]
    copies = ok & (source[0] >= 0) & _all([jnp.any(s) for s in safe])
    cached = jnp.where(ok, whole * size + jnp.where(copies, shared, 0), 0)
    copied, tables = [], []
    after = place - whole
    for g, (group, ids) in enumerate(zip(groups, fresh, strict=True)):
        chosen = jnp.argmax(safe[g])
        ids = ids.at[chosen].set(ids[0]).at[0].set(ids[chosen])
        copied.append(
            record(
                EventKind.COPIED, copies[None], group=g, block=ids[:1], source=source[g], num_tokens=shared
            )
        )
        table = jnp.where(hits[g], found[g], jnp.where((after >= 0) & (after < need), pick(ids, after), NO_BLOCK))
        if g == 0:
            group = _row.write_prompt(group, ids[:1], copies[None], ask, whole)
        else:  # the copied tokens may move a window on
            passed = hits[g] & ~spec.groups[g].keeps(place, cached, size)
            group = give_back(group, windows.POLICY, table, passed & ok, now)
            table = jnp.where(passed, NO_BLOCK, table)
        groups[g], tables = group, [*tables, table]
    stated, updated = None, []
    if spec.retention:
        stated = by_place(retention, ask.length, size, spec.max_blocks_per_seq)
        new = ok & (after >= 0) & (after < need)
        groups[0], changed = _retain(groups[0], tables[0], stated, hits[0] & ok, new)
        updated = [changed]
    state = dataclasses.replace(state, groups=tuple(groups))
    state = _row.write(state, seq, ok, tables, target, cached, ask.namespace, stated)
    events = assemble(
        state,
        status,
        removed=removed,
        updated=updated,
        copied=copied,
        queried=jnp.where(ok, ask.length, 0),
        cached=cached,
        shortfall=jnp.where(status == Status.NO_BLOCKS, plan(shared)[1] - least, 0),
    )
    return state, events, jnp.stack([jnp.where(copies, source[g], NO_BLOCK) for g in everyone])[None]


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
