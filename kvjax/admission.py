# SPDX-License-Identifier: Apache-2.0
"""Admitting one row: the decisions behind `cache.admit`, in order."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _row
from kvjax._arrays import count, fence, pick
from kvjax._request import Prompt, assemble, first_failure
from kvjax.events import EventKind, Events, Status, record
from kvjax.group import available, hold, take
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
    """Admits one row; `sources` i32[R] are what earlier rows of the call copy from. Also returns its own, i32[1]."""
    (group,), spec, size = state.groups, state.spec, state.spec.block_size
    match = longest_match(group, ask.tokens, ask.extra_ids, ask.length, ask.namespace, spec.partial_reuse)
    whole, hit = match.num_blocks, match.blocks >= 0
    free = available(group) - count(hit & (pick(group.blocks.refcount, match.blocks) == 0))

    def plan(shared: jax.Array) -> tuple[jax.Array, jax.Array]:
        cached = whole * size + shared
        target = ask.length if room is None else jnp.minimum(ask.length, cached + room)
        return target, -(-target // size) - whole

    # The source of a copy is evicted last: only if its space is needed, and then only whole blocks are reused.
    spare = ((match.source >= 0) & (pick(group.blocks.refcount, match.source) == 0)).astype(jnp.int32)
    shared = jnp.where(plan(match.shared)[1] + spare <= free, match.shared, 0)
    target, need = plan(shared)
    row = _row.read(state, seq)
    status = first_failure(
        (~row.exists | ~ask.valid, Status.BAD_REQUEST),
        (row.length > 0, Status.HELD),
        (whole + need > spec.max_blocks_per_seq, Status.ROW_FULL),
        (need > free, Status.NO_BLOCKS),
    )
    refcount, match, status, need, shared = fence(group.blocks.refcount, match, status, need, shared)
    group = dataclasses.replace(group, blocks=dataclasses.replace(group.blocks, refcount=refcount))
    hit = hit & (status == Status.OK)
    source = jnp.where(shared > 0, match.source, NO_BLOCK)
    group = hold(group, match.blocks, hit)
    need = jnp.where(status == Status.OK, need, 0)
    group, ids, had, removed = take(group, state.policy, need, hit.size, now, source)
    group = hold(group, match.blocks, hit & ~had, by=-1)
    status = jnp.where(had, status, Status.NO_BLOCKS)
    ok = status == Status.OK

    # The copy goes into a block that nobody of this call copies from; without such a block there is no copy.
    safe = (ids >= 0) & ~jnp.any(ids[:, None] == sources[None], axis=1)
    chosen = jnp.argmax(safe)
    ids = ids.at[chosen].set(ids[0]).at[0].set(ids[chosen])
    copies = (ok & (source >= 0) & safe[chosen])[None]
    copied = record(EventKind.COPIED, copies, block=ids[:1], source=source, num_tokens=shared)
    group = _row.write_prompt(group, ids[:1], copies, ask, whole)
    place = np.arange(hit.size) - whole
    table = jnp.where(place < 0, match.blocks, jnp.where(place < need, pick(ids, place), NO_BLOCK))
    cached = jnp.where(ok, whole * size + jnp.where(copies[0], shared, 0), 0)
    stated, updated = None, None
    if spec.retention:
        stated = by_place(retention, ask.length, size, spec.max_blocks_per_seq)
        group, updated = _retain(group, table, stated, hit & ok, ok & (place >= 0) & (place < need))
    state = _row.write(state, group, seq, ok, table, target, cached, ask.namespace, stated)
    events = assemble(
        spec,
        status,
        removed=removed,
        updated=updated,
        copied=copied,
        queried=jnp.where(ok, ask.length, 0),
        cached=cached,
        shortfall=jnp.where(status == Status.NO_BLOCKS, plan(shared)[1] - free, 0),
    )
    return state, events, jnp.where(copies, source, NO_BLOCK)


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
