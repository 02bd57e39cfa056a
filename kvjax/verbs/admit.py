# SPDX-License-Identifier: Apache-2.0
"""`admit` gives a row a prompt and what is cached of it; `lookup` only looks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax._arrays import Pytree, compact, count, fence, pick, put
from kvjax._checks import each_row, integers, on_state, static_int
from kvjax.blocks import windows
from kvjax.blocks.deal import take_over_tiers
from kvjax.blocks.holders import hold, hold_source, let_go_of_sources
from kvjax.blocks.match import longest_match
from kvjax.blocks.rows import Prompt, fit, read_row, write_prompt, write_row
from kvjax.blocks.take import available, take
from kvjax.blocks.tiers import next_move, priorities
from kvjax.events.records import EventKind, Events, Status, record
from kvjax.events.transfer import moves
from kvjax.policies.retention import UNSTATED, Retention, apply_retention, by_place
from kvjax.spec import GroupSpec
from kvjax.state import COPYING, NO_BLOCK, CacheState, Group, Match
from kvjax.verbs._request import all_or_nothing, assemble, extra_like, first_failure, flatten_rows, known_tiers, prompt


@on_state
def admit(
    state: CacheState,
    seq: ArrayLike,
    tokens: ArrayLike,
    length: ArrayLike,
    *,
    namespace: ArrayLike = 0,
    extra_ids: ArrayLike | None = None,
    retention: Retention | None = None,
    now: ArrayLike = 0,
    room: int | None = None,
    tiers: tuple[str, ...] = ("device",),
) -> tuple[CacheState, Events]:
    """Gives a free row a prompt: finds its longest cached prefix, holds it, and reserves blocks for the rest.

    Whole blocks are shared; inside the next block reuse goes on token by token, by a copy. The last token is never
    taken from the cache: its logits are wanted. Nothing becomes findable before `commit`. Several sequences at once
    (a leading axis R) equal one after the other in row order, each all or nothing, but that what one row copies from
    stays held until the call ends: a later row that needs its space is NO_BLOCKS, and can be had by a call of its own.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; a free row.
      tokens: i32[T] or i32[R, T]; the prompt, padded with anything.
      length: i32[] or i32[R]; its tokens, 1..T.
      namespace: i32[] or i32[R]; see `Namespaces`.
      extra_ids: as tokens, where the spec asks for them.
      retention: what the row's blocks are worth, where the spec has it (with R rows its arrays have that axis too);
        found blocks that it speaks of get the new priority, which is an event if it differs.
      now: i32[] ms.
      room: static; reserve blocks for only this many tokens beyond the cached ones (chunked prefill), None for all.
      tiers: static; ("device", "host") between loops: then blocks on the host are found too and brought back, and
        blocks that have to leave the device are offloaded, as `events.transfer` says.

    Returns:
      The cache; and events, E = ceil(T / P) + 1 a row and group (more with retention or with both tiers): removed,
      updated, copied. `events.cached` tells the tokens found, from where the row's `committed` goes on. Status
      BAD_REQUEST, HELD (row in use), ROW_FULL or NO_BLOCKS.

    Source: vLLM's KVCacheManager (get_computed_blocks, allocate_slots); partial blocks as in TensorRT-LLM.
    """
    seq, tokens = integers("seq", seq), integers("tokens", tokens)
    extra_ids, now = extra_like(state.spec, extra_ids, tokens), integers("now", now, ())

    room, tiers = None if room is None else static_int("room", room, 1), known_tiers(tiers)

    def one(state, request):
        seq, tokens, extra_ids, length, namespace, retention = request
        ask = prompt(state.spec, tokens, length, namespace, extra_ids)
        state, events, sources = admit_row(state, seq, ask, retention, now, room, tiers)
        return state, (events, sources)

    rows = seq.shape if seq.ndim == 0 else integers("seq", seq, ("R",)).shape
    length, namespace = each_row("length", length, rows), each_row("namespace", namespace, rows)
    if retention is not None and not state.spec.retention:
        raise ValueError("retention: got one, wanted None (the spec was made with retention=False)")
    requests = (seq, integers("tokens", tokens, (*rows, "T")), extra_ids, length, namespace, retention)
    state, (events, sources) = lax.scan(one, state, requests) if rows else one(state, requests)
    held = zip(state.groups, jnp.atleast_2d(sources).T, strict=True)
    state = state.replace(groups=tuple(let_go_of_sources(group, ids) for group, ids in held))
    return state, flatten_rows(events) if rows else events


@on_state
def lookup(
    state: CacheState,
    tokens: ArrayLike,
    length: ArrayLike,
    *,
    namespace: ArrayLike = 0,
    extra_ids: ArrayLike | None = None,
    tiers: tuple[str, ...] = ("device", "host"),
) -> Match:
    """Tells what `admit` would reuse of a prompt, without changing anything; `vmap` it for many.

    Args:
      state: the cache.
      tokens: i32[T]; the prompt, padded with anything.
      length: i32[]; its tokens, 1..T; otherwise nothing matches.
      namespace: i32[].
      extra_ids: i32[T], where the spec asks for them.
      tiers: static; as in `admit`.

    Returns:
      A `Match`; `match.cached_tokens` is the sum over the tiers.
    """
    tokens = integers("tokens", tokens, ("T",))
    ask = prompt(state.spec, tokens, length, namespace, extra_like(state.spec, extra_ids, tokens))
    length = jnp.where(ask.valid, ask.length, 1)
    return longest_match(state, ask.tokens, ask.extra_ids, length, ask.namespace, known_tiers(tiers))


class Found(Pytree):
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

    They stay held (`hold_source`) until the caller lets go of them after the last row of the call. So no later
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
    row = read_row(state, seq)
    status = first_failure(
        (~row.exists | ~ask.valid, Status.BAD_REQUEST),
        (row.length > 0, Status.HELD),
        (whole + need > spec.max_blocks_per_seq, Status.ROW_FULL),
        ((need > least) | fixed, Status.NO_BLOCKS),
    )
    refcounts, missing = [group.blocks.refcount for group in state.groups], need - least
    decided = fence(refcounts, found, status, target, need, whole, shared, missing)
    refcounts, found, status, target, need, whole, shared, missing = decided
    need = jnp.where(status == Status.OK, need, 0)
    worth = priorities(state, now) if "host" in tiers else None
    groups, taken, sources = [], [], []
    for g, (group, each) in enumerate(zip(state.groups, found, strict=True)):
        group = group.replace(blocks=group.blocks.replace(refcount=refcounts[g]))
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
            new = take_over_tiers(
                group, policy, need, place.size, now, value=worth[g], least=spec.offload_min_priority, number=g,
                back=back,
            )  # fmt: skip
        group = hold(new.group, each.blocks, each.hits & good & ~new.ok, by=-1)
        group = let_go_of_sources(group, jnp.where(new.ok, NO_BLOCK, source)[None])
        sources.append(jnp.where(new.ok, source, NO_BLOCK))
        status = jnp.where(new.ok, status, Status.NO_BLOCKS)
        need = jnp.where(new.ok, need, 0)
        if g > 0:
            new = new.replace(removed=jnp.concatenate([forgotten, new.removed]))
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
            far, host, number = (copies & ~near)[None], group.host, next_move(group.host)
            moved.append(
                moves(far, group=g, block=ids[:1], number=number, source=source, target=group.pool_row(ids[:1]))
            )
            host = host.replace(
                arriving=put(host.arriving, ids[:1], number, far),
                moves=jnp.where(far[0], number, host.moves),
                stuck=put(host.stuck, found[g].blocks, True, hits[g] & far[0]),
            )
            group = group.replace(host=host)
        table = jnp.where(
            hits[g], found[g].blocks, jnp.where((after >= 0) & (after < need), pick(ids, after), NO_BLOCK)
        )
        if g == 0:
            group = write_prompt(group, ids[:1], copies[None], ask, whole)
        groups[g], tables = group, [*tables, table]
    stated, updated = None, [new.updated for new in taken]
    if spec.retention:
        stated = by_place(retention, ask.length, size, spec.max_blocks_per_seq + 1)
        new = ok & (after >= 0) & (after < need)
        groups[0], changed = _retain(groups[0], tables[0], stated, hits[0] & ok, new)
        updated.append(changed)
    before, state = state, state.replace(groups=tuple(groups))
    state = write_row(state, seq, ok, tables, target, cached, ask.namespace, stated)
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
    blocks, stated = group.blocks, fit(stated, table.shape[0], UNSTATED)
    assert blocks.retention is not None
    again = hit & (stated[:, 0] >= 0)
    before = pick(blocks.retention, table)[:, 0]
    retention, before = fence(blocks.retention, before)
    blocks = apply_retention(blocks.replace(retention=retention), table, stated, again | fresh)
    changed = again & (before != stated[:, 0])
    updated = record(
        EventKind.UPDATED, changed, block=table, generation=pick(blocks.generation, table), priority=stated[:, 0]
    )
    return group.replace(blocks=blocks), updated
