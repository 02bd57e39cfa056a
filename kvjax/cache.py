# SPDX-License-Identifier: Apache-2.0
"""The verbs: pure transitions `(state, request) -> (state, events)`.

A sequence's life: `admit` finds what is cached of its prompt and reserves blocks for the rest; the model computes;
`commit` says what was written, and only then blocks become findable; `extend` makes room for the next tokens;
`release` lets go, and what was findable stays cached. A verb that cannot be done returns the state as it was and
says why in `events.status`. The K/V bytes follow by `kvjax.apply(pools, events)`; `Cache` does both at once. The
caller owns `jit` and donation: jit a verb together with the copies and the model step.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from kvjax import _row, windows
from kvjax._arrays import add, pick, put, repeated
from kvjax._request import (
    assemble,
    each_row,
    extra_like,
    first_failure,
    flatten_rows,
    integers,
    known_policy,
    known_tiers,
    on_state,
    one_after_the_other,
    one_or_more,
    prompt,
    row_mask,
    static_int,
)
from kvjax.admission import admit_row
from kvjax.events import Events, Status
from kvjax.group import give_back, init_group, let_go_of_sources
from kvjax.growth import grow
from kvjax.match import Match, longest_match
from kvjax.policies import EvictionPolicy
from kvjax.retention import Retention
from kvjax.rewind import rewind
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState, Sequences
from kvjax.store import publish_filled, store_tail


def init(
    spec: CacheSpec,
    policy: EvictionPolicy | None = None,
    num_blocks: ArrayLike | None = None,
    *,
    policy_state: Any = None,
) -> CacheState:
    """An empty cache.

    Args:
      spec: its shapes.
      policy: who is evicted, `lru()` if None; static, so pass the same object again to reuse compiled programs.
      num_blocks: i32[]; device blocks in use of every group but a bare first one, at most the spec's N (None: all).
        May be traced, so that caches of many sizes fit in one `vmap`: then a number outside 1..N counts as 0 blocks,
        so that every `admit` is NO_BLOCKS; `check` and `stats` say "num_blocks out of range".
      policy_state: the policy's own state to begin with, on both tiers (a learned score's weights); copied; None: what
        the policy's `init` makes.

    Raises:
      ValueError: if `num_blocks` is a number outside 1..N, `policy` is none, or `policy_state` does not have the
        structure, shapes and dtypes of what the policy's `init` makes.
    """
    policy = known_policy(policy)
    groups = []
    for number, group in enumerate(spec.groups):
        given = group.num_blocks if num_blocks is None or (spec.bare and number == 0) else num_blocks
        wanted = None if number else policy_state
        groups.append(
            init_group(spec, number, windows.policy_of(number, policy), _in_range(given, group.num_blocks), wanted)
        )
    seqs = Sequences(*(jnp.zeros((spec.max_seqs,), jnp.int32) for _ in range(3)))
    if spec.retention:
        seqs = dataclasses.replace(
            seqs, retention=jnp.zeros((spec.max_seqs, spec.max_blocks_per_seq + 1, 2), jnp.int32)
        )
    if spec.has_host:
        seqs = dataclasses.replace(seqs, swapped=jnp.zeros((spec.max_seqs,), jnp.bool_))
    return CacheState(tuple(groups), seqs, spec, policy)


def _in_range(num_blocks: Any, most: int) -> jax.Array:
    """i32[]; num_blocks, or 0 for a traced number outside 1..most."""
    given = integers("num_blocks", num_blocks, ())
    if isinstance(num_blocks, Tracer):
        return jnp.where((given >= 1) & (given <= most), given, 0)
    if not 1 <= int(num_blocks) <= most:
        raise ValueError(f"num_blocks: got {num_blocks}, wanted 1..{most}")
    return given


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
    state = dataclasses.replace(state, groups=tuple(let_go_of_sources(group, ids) for group, ids in held))
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


@on_state
def extend(
    state: CacheState,
    active: ArrayLike,
    num_tokens: ArrayLike = 1,
    *,
    max_tokens: int | None = None,
    now: ArrayLike = 0,
    tiers: tuple[str, ...] = ("device",),
) -> tuple[CacheState, Events]:
    """Gives every active row room for its next tokens; all rows or none.

    A last block that others hold too, or that is findable, is replaced by a private copy before it is written; of
    several holders that are active together the last one keeps it.

    Args:
      state: the cache.
      active: bool[S]; rows to grow.
      num_tokens: a static number for all rows, or i32[S].
      max_tokens: static; the most that a row asks for, needed where `num_tokens` is an array.
      now: i32[] ms.
      tiers: static; as in `admit`.

    Returns:
      The cache, unchanged unless `events.ok`; and events, E = 2 S F a group for rows that touch up to F blocks (more
      with both tiers): removed, updated, copied. Status ROW_FULL, BAD_REQUEST (a free row) or HELD (one swapped out) at
      the rows to blame, NO_BLOCKS at all active rows, with the blocks missing in `events.shortfall`: those of the
      group that misses most.

    Source: vLLM's append_slots with copy-on-write, for a whole batch in one pass.
    """
    spec, seqs, size = state.spec, state.seqs, state.spec.block_size
    active, now = row_mask("active", active, spec.max_seqs), integers("now", now, ())
    if max_tokens is None:
        max_tokens = static_int("num_tokens", num_tokens, 1)
    asked = each_row("num_tokens", num_tokens, active.shape)
    max_tokens = static_int("max_tokens", max_tokens, 1)
    bad = active & ((seqs.length == 0) | (asked < 0) | (asked > max_tokens))
    grown = seqs.length + jnp.where(active & ~bad, asked, 0)
    full = active & (-(-grown // size) > spec.max_blocks_per_seq)
    away = active & (False if seqs.swapped is None else seqs.swapped)
    fine = ~jnp.any(bad | away | full)
    state, grew = grow(state, jnp.where(fine, grown, seqs.length), max_tokens, now, known_tiers(tiers))
    status = first_failure(
        (bad, Status.BAD_REQUEST), (away, Status.HELD), (full, Status.ROW_FULL), (active & ~grew.ok, Status.NO_BLOCKS)
    )
    seqs = dataclasses.replace(seqs, length=jnp.where(fine & grew.ok, grown, seqs.length))
    state = dataclasses.replace(state, seqs=seqs)
    return state, assemble(
        state, status, removed=grew.removed, updated=grew.updated, copied=grew.copied, shortfall=grew.shortfall,
        moves=grew.moves,
    )  # fmt: skip


@on_state
def commit(
    state: CacheState,
    tokens: ArrayLike,
    num_tokens: ArrayLike,
    *,
    extra_ids: ArrayLike | None = None,
    seqs: ArrayLike | None = None,
    now: ArrayLike = 0,
) -> tuple[CacheState, Events]:
    """Records that the K/V of these tokens are now written, and publishes the blocks that they fill.

    A filled block whose contents are cached already is swapped for the cached one and emptied; of equal blocks that
    fill in one call the first row's stays. Blocks that the next token cannot see through a window are let go of.

    Args:
      state: the cache.
      tokens: i32[R, T]; each row's next tokens, from its committed length on, padded with anything.
      num_tokens: i32[R]; how many of them, at most what the row has room for; 0 leaves a row alone.
      extra_ids: i32[R, T], where the spec asks for them.
      seqs: i32[R]; the rows, all different; None for all S.
      now: i32[] ms.

    Returns:
      The cache; and events, E = R F a group for rows that fill up to F blocks: stored; and as many updated where there
      is a host tier, whose blocks give way to equal ones on the device. Status BAD_REQUEST for a row without so much
      room or swapped out, a negative token, or a row that is named twice; the other rows are done.

    Source: vLLM's mark_blocks_as_computed and MAX's commit, which swap equal blocks likewise.
    """
    spec, size = state.spec, state.spec.block_size
    rows = integers("seqs", np.arange(spec.max_seqs) if seqs is None else seqs, ("R",))
    tokens = integers("tokens", tokens, (rows.shape[0], "T"))
    asked, now = integers("num_tokens", num_tokens, rows.shape), integers("now", now, ())
    extra_ids = extra_like(spec, extra_ids, tokens)
    exists = (rows >= 0) & (rows < spec.max_seqs) & ~(repeated(rows) & (asked != 0))
    length, start = pick(state.seqs.length, rows), pick(state.seqs.committed, rows)
    most = tokens.shape[1]
    steps = np.arange(most, dtype=np.int32)[None]
    bad = (~exists & (asked > 0)) | (asked < 0) | (asked > jnp.minimum(length - start, most))
    bad = bad | jnp.any((steps < asked[:, None]) & (tokens < 0), axis=1)
    if state.seqs.swapped is not None:
        bad = bad | ((asked > 0) & pick(state.seqs.swapped, rows))
    end = start + jnp.where(bad, 0, asked)
    group = _row.note_tokens(state.groups[0], rows, start, end, tokens, extra_ids)
    state = dataclasses.replace(state, groups=(group, *state.groups[1:]))
    state, stored, updated = publish_filled(state, rows, start // size, end // size, (most + size - 2) // size + 1, now)
    groups = [
        group if group.anchor is None else windows.slide(group, of, rows, start, end, most, size, now)
        for group, of in zip(state.groups, spec.groups, strict=True)
    ]
    committed = put(state.seqs.committed, rows, end, exists & ~bad)
    seqs_ = dataclasses.replace(state.seqs, committed=committed)
    state = dataclasses.replace(state, groups=tuple(groups), seqs=seqs_)
    return state, assemble(state, first_failure((bad, Status.BAD_REQUEST)), updated=updated, stored=stored)


@on_state
def fork(state: CacheState, src: ArrayLike, dst: ArrayLike) -> tuple[CacheState, Events]:
    """Makes the free row `dst` share all blocks of row `src`; whoever writes first into the shared end copies it.

    Several rows at once equal one after the other, each all or nothing: a row forked before can be forked again.

    Args:
      state: the cache.
      src: i32[] or i32[R]; a row in use whose tokens are all committed; one number stands for all rows.
      dst: i32[] or i32[R]; a free row.

    Returns:
      The cache; and no events. Status BAD_REQUEST or HELD (`dst` in use).

    Source: vLLM's BlockSpaceManager.fork.
    """
    dst = one_or_more("dst", dst)
    src = each_row("src", src, dst.shape)
    if dst.ndim > 0:
        return one_after_the_other(fork, state, src, dst)
    old, new = _row.read(state, src), _row.read(state, dst)
    bad = ~old.exists | ~new.exists | (old.length == 0) | (old.length != old.committed) | (src == dst) | old.swapped
    status = first_failure((bad, Status.BAD_REQUEST), (new.length > 0, Status.HELD))
    ok = status == Status.OK
    groups = []
    for group, table in zip(state.groups, old.tables, strict=True):
        refcount = add(group.blocks.refcount, table, 1, ok & (table >= 0))
        groups.append(dataclasses.replace(group, blocks=dataclasses.replace(group.blocks, refcount=refcount)))
    state = dataclasses.replace(state, groups=tuple(groups))
    state = _row.write(state, dst, ok, old.tables, old.length, old.committed, old.namespace, old.retention)
    return state, assemble(state, status)


@on_state
def truncate(state: CacheState, seq: ArrayLike, length: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Cuts a row back to its first `length` tokens (rejected draft tokens, an edited prompt).

    A cut inside a findable block that only this row holds and nothing cached follows withdraws the block from reuse;
    otherwise the block stays findable and the row's next write copies it. Several rows at once equal one after the
    other, each all or nothing.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; a row in use.
      length: i32[] or i32[R]; 1 up to the row's length.
      now: i32[] ms.

    Returns:
      The cache; and events, E = 1 a row and group: removed. Status BAD_REQUEST, also where a window goes back over
      blocks that are no longer there.

    Source: TensorRT-LLM's rewindKVCache.
    """
    seq, now = one_or_more("seq", seq), integers("now", now, ())
    length = each_row("length", length, seq.shape)
    if seq.ndim > 0:
        return one_after_the_other(functools.partial(truncate, now=now), state, seq, length)
    row = _row.read(state, seq)
    bad = ~row.exists | (length < 1) | (length > row.length) | row.swapped
    state, removed, ok = rewind(state, row, seq, length, ~bad, now)
    return state, assemble(state, first_failure((~ok, Status.BAD_REQUEST)), removed=removed)


@on_state
def release(state: CacheState, seq: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Frees a row: what is findable stays cached, tails to be evicted before heads; the rest becomes empty.

    A partly filled last block becomes findable too, with all its written tokens, when its last holder lets go,
    unless a cached block covers it. Several rows at once equal one after the other.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; rows in use.
      now: i32[] ms.

    Returns:
      The cache; and events, E = 1 a row and group: stored. Status BAD_REQUEST for a row that is free or unknown.

    Source: TensorRT-LLM's removeSequence, which stores partial blocks; vLLM's free, in reverse order.
    """
    seq, now = one_or_more("seq", seq), integers("now", now, ())
    if seq.ndim > 0:
        return one_after_the_other(functools.partial(release, now=now), state, seq)
    row, stored = _row.read(state, seq), []
    ok = row.exists & (row.length > 0)
    if state.spec.partial_reuse:
        state, stored = store_tail(state, row, ok)
    groups = [
        give_back(group, windows.policy_of(g, state.policy), table[::-1], (ok & (table >= 0))[::-1], now)
        for g, (group, table) in enumerate(zip(state.groups, row.tables, strict=True))
    ]
    state = dataclasses.replace(state, groups=tuple(groups))
    state = _row.write(state, seq, ok, [jnp.full_like(table, NO_BLOCK) for table in row.tables], 0, 0, 0)
    return state, assemble(state, first_failure((~ok, Status.BAD_REQUEST)), stored=stored)
