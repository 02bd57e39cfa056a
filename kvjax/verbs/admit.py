# SPDX-License-Identifier: Apache-2.0
"""`admit` gives a row a prompt and its cached prefix; `lookup` only finds the prefix.

`admit_row` works in four steps: it decides without writing, takes the blocks, places the copy, and fills the tables.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import Pytree, compact, count, fence, is_among, pick
from kvjax.blocks import windows
from kvjax.blocks.backups import backs_up
from kvjax.blocks.bring_back import bring_back
from kvjax.blocks.holders import hold, hold_source, unhold_sources
from kvjax.blocks.match import longest_match
from kvjax.blocks.publish import forget
from kvjax.blocks.rows import Prompt, fit, read_row, write_prompt, write_row
from kvjax.blocks.take import take
from kvjax.blocks.tiers import order_copy, priorities
from kvjax.blocks.victims import Taken
from kvjax.checks import each_row, integers, on_state, static_int32
from kvjax.events.records import COLUMNS, EventKind, Events, Records, Status, joined, record
from kvjax.events.transfer import Transfer, no_moves
from kvjax.policies.retention import UNSTATED, Retention, apply_retention, by_column
from kvjax.spec import GroupSpec
from kvjax.state import COPYING, NO_BLOCK, CacheState, EvictionPolicy, Group, Match
from kvjax.verbs._request import (
    all_or_nothing,
    assemble,
    check_retention,
    checked_alignment,
    checked_prompt,
    checked_text,
    checked_tiers,
    first_failure,
    flatten_rows,
)
from pallas_kernels.loops import scan


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
    reserve_tokens: int | None = None,
    alignment_tokens: int | None = None,
    tiers: tuple[str, ...] = ("device",),
) -> tuple[CacheState, Events]:
    """Gives a free row a prompt: finds its longest cached prefix, holds it, and reserves blocks for the rest.

    The row shares whole blocks of the prefix. If the next block matches in part, its matching tokens are copied. The
    last token is always computed, because you need its logits. Nothing becomes findable before `commit`.

    With a leading axis R, `admit` admits R sequences in row order, each all or nothing. The result equals R calls in
    this order, with one difference: the source of a copy stays held until the call ends. A later row that would have to
    evict this block gets NO_BLOCKS. Admit this row in another call.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; a free row.
      tokens: i32[T] or i32[R, T]; the prompt, with any padding.
      length: i32[] or i32[R]; the number of its tokens, 1..T.
      namespace: i32[] or i32[R]; see `Namespaces`.
      extra_ids: i32[T] or i32[R, T]; extra ids of the tokens, if the spec has them.
      retention: priorities and times to live of the row's blocks, if the spec has retention. With R rows its arrays
        have this axis too. Cached blocks in its ranges get the new priority, with an updated event if it differs.
      now: i32[]; the time in ms.
      reserve_tokens: static; reserve blocks for at most this many tokens after the cached prefix (chunked prefill).
        None reserves blocks for the whole prompt.
      alignment_tokens: static; a multiple of P. The reused prefix ends at a multiple of it, without a copy, so
        chunks of this size begin at the same positions as without the cache. None lets it end anywhere.
      tiers: static; pass ("device", "host") between loops to find blocks on the host too. They are brought back, and
        victims on the device are offloaded: see `events.transfer`.

    Returns:
      The cache, and events with E = ceil(T / P) + 1 records a row and group (more with retention or with both tiers):
      removed, updated, copied. `events.cached` is the number of cached tokens, where the row's `committed` starts.
      Status BAD_REQUEST, HELD (row in use), ROW_FULL or NO_BLOCKS.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, events = kvjax.admit(state, 1, np.append(prompt[:8], [70, 71]), 10)  # shares two whole blocks
      >>> bool(events.ok), events.cached.tolist(), state.groups[0].table[:, :3].tolist()
      (True, [8], [[0, 1, 2], [0, 1, 3]])

    Source: vLLM's KVCacheManager (get_computed_blocks, allocate_slots); partial blocks as in TensorRT-LLM.
    """
    seq = integers("seq", seq)
    tokens = integers("tokens", tokens)
    text = checked_text(state.spec, tokens, extra_ids)
    now = integers("now", now, ())
    tiers = checked_tiers(tiers)
    if reserve_tokens is not None:
        reserve_tokens = static_int32("reserve_tokens", reserve_tokens, 1)
    alignment_tokens = checked_alignment(alignment_tokens, state.spec.block_size)

    def admit_one(state, request):
        seq, text, length, namespace, retention = request
        prompt = checked_prompt(text, length, namespace, state.spec.block_size)
        match = find(state, prompt, tiers, alignment_tokens)
        state, events, sources = admit_row(state, seq, prompt, match, retention, now, reserve_tokens, tiers)
        return state, (events, sources)

    rows = seq.shape if seq.ndim == 0 else integers("seq", seq, ("R",)).shape
    length = each_row("length", length, rows)
    namespace = each_row("namespace", namespace, rows)
    check_retention(state.spec, retention=retention)
    retention = jax.tree.map(functools.partial(integers, "retention"), retention)
    integers("tokens", tokens, (*rows, "T"))
    requests = (seq, text, length, namespace, retention)
    state, (events, sources) = scan(admit_one, state, requests) if rows else admit_one(state, requests)
    return release_sources(state, sources), flatten_rows(events) if rows else events


@on_state
def lookup(
    state: CacheState,
    tokens: ArrayLike,
    length: ArrayLike,
    *,
    namespace: ArrayLike = 0,
    extra_ids: ArrayLike | None = None,
    alignment_tokens: int | None = None,
    tiers: tuple[str, ...] = ("device", "host"),
) -> Match:
    """Finds the prefix of a prompt for `admit` to reuse, without changing anything; `vmap` it for many prompts.

    Args:
      state: the cache.
      tokens: i32[T]; the prompt, with any padding.
      length: i32[]; the number of its tokens, 1..T. With any other length nothing matches.
      namespace: i32[]; see `Namespaces`.
      extra_ids: i32[T]; extra ids of the tokens, if the spec has them.
      alignment_tokens: static; see `admit`.
      tiers: static; see `admit`.

    Returns:
      A `Match`; `match.cached_tokens` is the sum over the tiers.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> kvjax.lookup(state, prompt, 10)  # the two filled blocks
      Match(8 tokens cached, 0 of them on the host)
      >>> kvjax.lookup(state, prompt, 10, namespace=1)  # another tenant finds nothing
      Match(0 tokens cached, 0 of them on the host)
    """
    tokens = integers("tokens", tokens, ("T",))
    prompt = checked_prompt(checked_text(state.spec, tokens, extra_ids), length, namespace, state.spec.block_size)
    return find(state, prompt, checked_tiers(tiers), checked_alignment(alignment_tokens, state.spec.block_size))


class GroupHits(Pytree):
    """The cached blocks of a prompt in a group."""

    blocks: jax.Array  # i32[F]; the group's blocks of the cached prefix
    hits: jax.Array  # bool[F]; whether the next token sees each block
    on_host: jax.Array  # bool[F]; hits that are on the host
    source: jax.Array  # i32[]; the block to copy further tokens from, or NO_BLOCK
    idle: jax.Array  # bool[]; whether the source is on the device without a holder
    free: jax.Array  # i32[]; available blocks less the cached hits and the hits that have to come from the host
    fixed: jax.Array  # bool[]; whether a hit on the host must stay, since an earlier row of the call copies from it


class Decision(Pytree):
    """The decision on a request, before anything is taken."""

    status: jax.Array  # i32[]
    num_whole: jax.Array  # i32[]; whole blocks of the prompt that are cached
    num_copied: jax.Array  # i32[]; tokens after them that are copied
    target: jax.Array  # i32[]; tokens that the row will have reserved
    need: jax.Array  # i32[]; new blocks in each group, 0 unless the status is OK
    missing: jax.Array  # i32[]; blocks missing in the group with the largest shortage
    group_hits: list[GroupHits]  # cached blocks of the prompt in each group
    unusable: jax.Array | None  # i32[]; see `Match`


def find(state: CacheState, prompt: Prompt, tiers: tuple[str, ...], alignment_tokens: int | None = None) -> Match:
    """Finds the longest cached prefix of a prompt; an invalid prompt has none."""
    length = jnp.where(prompt.valid, prompt.length, 1)
    return longest_match(state, prompt.text, length, prompt.namespace, tiers, alignment_tokens)


def admit_row(
    state: CacheState,
    seq: jax.Array,
    prompt: Prompt,
    match: Match,
    retention: Retention | None,
    now: jax.Array,
    reserve_tokens: int | None,
    tiers: tuple[str, ...],
    width: int = 0,
    in_program: bool = False,
) -> tuple[CacheState, Events, jax.Array]:
    """Admits a row. `match` is the result of `find` in this state, on these tiers.

    With `in_program`, static, the match has blocks of both tiers, and its source is on the device. Blocks on the host
    come back (`bring_back`), and `tiers` is the device alone, so no block leaves the device by a move.

    `width`, static, is the minimum length of the list of blocks to take. If all such lists of a program have equal
    lengths, XLA compiles their code once. Also returns the sources of the copies, i32[G], NO_BLOCK for none. They stay
    held (`hold_source`) until the caller releases them (`release_sources`) after the last row of the call: no later row
    evicts, moves, empties or overwrites them before the copies are made.
    """
    spec = state.spec
    block_size = state.spec.block_size
    state, plan = _decide(state, seq, prompt, match, reserve_tokens)
    block_priorities = priorities(state, now, tiers)
    groups, taken, sources, status, need = _take(state, plan, block_priorities, now, width, in_program)
    ok = status == Status.OK
    copies = ok & (plan.num_copied > 0)
    cached = jnp.where(ok, plan.num_whole * block_size + plan.num_copied, 0)
    sources = jnp.where(ok, jnp.stack(sources), NO_BLOCK)
    new_index = jnp.arange(prompt.text.tokens.shape[0], dtype=jnp.int32) - plan.num_whole  # into `Taken.ids`
    is_new = (new_index >= 0) & (new_index < need)

    copied = []
    moved = [new.orders for new in taken]
    tables = []
    for group_index, (hits, new) in enumerate(zip(plan.group_hits, taken, strict=True)):
        groups[group_index], by_copy, by_move = _place_copy(
            groups[group_index],
            group_index,
            hits,
            new.ids[:1],
            sources[group_index],
            copies,
            plan.num_copied,
            block_priorities[group_index],
        )
        copied.append(by_copy)
        moved.append(by_move)
        is_hit = hits.hits & ok
        new_blocks = jnp.where(is_new, pick(new.ids, new_index), NO_BLOCK)
        tables.append(jnp.where(is_hit, hits.blocks, new_blocks))
    groups[0] = write_prompt(groups[0], taken[0].ids[:1], copies[None], prompt, plan.num_whole)

    row = read_row(state, seq).metadata
    updated = [new.updated for new in taken]
    if spec.retention:
        requested_priority = by_column(retention, prompt.length, block_size, spec.max_blocks_per_seq + 1)
        is_hit = plan.group_hits[0].hits & ok
        groups[0], changed, updated[0] = _retain(
            groups[0], tables[0], requested_priority, is_hit, is_new & ok, updated[0]
        )
        row = row.replace(retention=requested_priority)
        updated.append(changed)
    row = row.replace(length=plan.target, committed=cached, namespace=prompt.namespace)
    after = write_row(state.replace(groups=tuple(groups)), seq, ok, row, tables)

    removed = [new.removed for new in reversed(taken)]
    after, removed, updated, moved = all_or_nothing(state, after, ok, removed, updated, moved)
    missing = jnp.where(status == Status.NO_BLOCKS, jnp.maximum(plan.missing, 1), 0)
    unusable = 0 if plan.unusable is None else jnp.where(ok, plan.unusable, 0)
    events = assemble(
        after,
        status,
        removed=removed,
        updated=updated,
        copied=copied,
        queried=jnp.where(ok, prompt.length, 0),
        cached=cached,
        unusable=unusable,
        shortfall=missing,
        moves=moved,
    )
    return after, events, sources


def release_sources(state: CacheState, sources: jax.Array) -> CacheState:
    """Releases the sources of copies, i32[G] or i32[R, G]."""
    held = zip(state.groups, jnp.atleast_2d(sources).T, strict=True)
    return state.replace(groups=tuple(unhold_sources(group, ids) for group, ids in held))


def _decide(
    state: CacheState, seq: jax.Array, prompt: Prompt, match: Match, reserve_tokens: int | None
) -> tuple[CacheState, Decision]:
    """Decides without writing. A `fence` around the returned state keeps later writes after these reads."""
    spec = state.spec
    block_size = state.spec.block_size
    column = np.arange(match.blocks.shape[0], dtype=np.int32)

    def plan(num_whole: jax.Array, num_copied: jax.Array) -> tuple[jax.Array, jax.Array, list[GroupHits]]:
        cached = num_whole * block_size + num_copied
        blocks = jnp.where(column < num_whole, match.blocks, NO_BLOCK)
        target = prompt.length if reserve_tokens is None else jnp.minimum(prompt.length, cached + reserve_tokens)
        source = jnp.where(num_copied > 0, match.source, NO_BLOCK)
        pairs = zip(state.groups, spec.groups, strict=True)
        group_hits = [_find(group, group_spec, blocks, source, cached, block_size) for group, group_spec in pairs]
        return target, -(-target // block_size) - num_whole, group_hits

    # The source of a copy is evicted last, only if its space is needed. The row then reuses only whole blocks.
    _, need, group_hits = plan(match.num_blocks, match.shared)
    fits = [need + hits.idle.astype(jnp.int32) <= hits.free for hits in group_hits]
    spared = functools.reduce(jnp.logical_and, fits)
    num_whole = jnp.where(spared, match.num_blocks, match.num_uncopied)
    num_copied = jnp.where(spared, match.shared, 0)
    target, need, group_hits = plan(num_whole, num_copied)
    min_free = functools.reduce(jnp.minimum, [hits.free for hits in group_hits])
    fixed = functools.reduce(jnp.logical_or, [hits.fixed for hits in group_hits])
    row = read_row(state, seq)
    status = first_failure(
        (~row.exists | ~prompt.valid, Status.BAD_REQUEST),
        (row.length > 0, Status.HELD),
        (num_whole + need > spec.max_blocks_per_seq, Status.ROW_FULL),
        ((need > min_free) | fixed, Status.NO_BLOCKS),
    )
    refcounts = [group.blocks.refcount for group in state.groups]
    decision = Decision(status, num_whole, num_copied, target, need, need - min_free, group_hits, match.unusable_tokens)
    refcounts, decision = fence(refcounts, decision)
    groups = [
        group.replace(blocks=group.blocks.replace(refcount=refcount))
        for group, refcount in zip(state.groups, refcounts, strict=True)
    ]
    need = jnp.where(decision.status == Status.OK, decision.need, 0)
    return state.replace(groups=tuple(groups)), decision.replace(need=need)


def _take(
    state: CacheState, plan: Decision, block_priorities: list[Any], now: jax.Array, width: int, in_program: bool
) -> tuple[list[Group], list[Taken], list[jax.Array], jax.Array, jax.Array]:
    """Holds the hits and takes new blocks, group by group.

    Returns the groups, a `Taken` of each group, the held source i32[] of each group, the status, which may be
    NO_BLOCKS now, and i32[], the number of blocks taken in each group.
    """
    status = plan.status
    need = plan.need
    groups = []
    taken = []
    sources = []
    for group_index, (group, hits) in enumerate(zip(state.groups, plan.group_hits, strict=True)):
        forgotten = []
        if group_index > 0:  # blocks that left the first group's index leave the index of the other groups too
            group, left_index = forget(group, group_index, taken[0].removed)
            forgotten.append(left_index)
        ok = status == Status.OK
        group = hold(group, hits.blocks, hits.hits & ok)
        source = jnp.where(ok, hits.source, NO_BLOCK)
        group = hold_source(group, source)
        onboarded, _ = compact(jnp.where(hits.on_host & ok, hits.blocks, NO_BLOCK))
        policy = windows.policy_of(state, group_index)
        comes_back = in_program and backs_up(group)
        new = take(
            group,
            group_index,
            policy,
            need + count(onboarded >= 0) if comes_back else need,
            max(hits.blocks.shape[0], width),
            now,
            priorities=block_priorities[group_index],
            min_priority=state.spec.offload_min_priority,
            onboarded=onboarded,
        )
        if comes_back:
            new = _bring_back(new, group_index, policy, onboarded, need)
        group = hold(new.group, hits.blocks, hits.hits & ok & ~new.ok, by=-1)
        groups.append(unhold_sources(group, jnp.where(new.ok, NO_BLOCK, source)[None]))
        sources.append(jnp.where(new.ok, source, NO_BLOCK))
        taken.append(new.replace(removed=joined(*forgotten, new.removed)))
        status = jnp.where(new.ok, status, Status.NO_BLOCKS)
        need = jnp.where(new.ok, need, 0)
    return groups, taken, sources, status, need


def _bring_back(taken: Taken, group_index: int, policy: EvictionPolicy, onboarded: jax.Array, need: jax.Array) -> Taken:
    """Trades the pool rows of the taken blocks after the first `need` i32[] for those of onboarded i32[F]."""
    index = jnp.arange(onboarded.shape[0], dtype=jnp.int32)
    ids = jnp.where(taken.ok, onboarded, NO_BLOCK)
    free = jnp.where(ids >= 0, pick(taken.ids, need + index), NO_BLOCK)
    group, updated, moves = bring_back(taken.group, group_index, policy, ids, free)
    return taken.replace(group=group, updated=joined(taken.updated, updated), orders=moves)


def _place_copy(
    group: Group,
    group_index: int,
    hits: GroupHits,
    block: jax.Array,
    source: jax.Array,
    copies: jax.Array,
    num_tokens: jax.Array,
    priorities: jax.Array | None,
) -> tuple[Group, Records, Transfer]:
    """Orders the copy of `num_tokens` i32[] tokens from source i32[] to block i32[1], where copies bool[].

    Also returns a record, copied, and the moves instead of the copy if the source is on the host.
    """
    on_device = copies & group.on_device(source)
    copied = record(
        EventKind.COPIED,
        on_device[None],
        group=group_index,
        block=group.pool_row(block),
        source=group.pool_row(source),
        num_tokens=num_tokens,
    )
    if priorities is None:
        return group, copied, no_moves()
    prefix = jnp.where(hits.hits, hits.blocks, NO_BLOCK)
    group, moved = order_copy(group, group_index, source, block, copies & ~on_device, prefix)
    return group, copied, moved


def _find(
    group: Group, spec: GroupSpec, ids: jax.Array, source: jax.Array, cached: jax.Array, block_size: int
) -> GroupHits:
    """Finds a group's blocks for ids i32[F] and source i32[] of the first group, and a row of `cached` i32[] tokens."""
    blocks = group.in_this_group(ids)
    source = group.in_this_group(source)
    hits = (blocks >= 0) & spec.keeps(np.arange(ids.shape[0], dtype=np.int32), cached, block_size)
    refcount = pick(group.blocks.refcount, blocks)
    on_host = hits & ~group.on_device(blocks)
    idle = (source >= 0) & group.on_device(source) & (pick(group.blocks.refcount, source) == 0)
    free = group.available - count(hits & (on_host | (refcount == 0)))
    return GroupHits(blocks, hits, on_host, source, idle, free, jnp.any(on_host & (refcount >= COPYING)))


def _retain(
    group: Group, table: jax.Array, requested_priority: jax.Array, hit: jax.Array, is_new: jax.Array, moved: Records
) -> tuple[Group, Records, Records]:
    """Gives a new row's blocks table i32[F] the requested retention i32[M, 2]. Hits without a new priority keep theirs.

    Also returns F records, updated, and the records `moved` with the new priorities.
    """
    blocks = group.blocks
    requested_priority = fit(requested_priority, table.shape[0], UNSTATED)
    has_new_priority = hit & (requested_priority[:, 0] >= 0)
    before = blocks.requested_priority(table)
    retention, before = fence(blocks.retention, before)
    blocks = apply_retention(blocks.replace(retention=retention), table, requested_priority, has_new_priority | is_new)
    changed = has_new_priority & (before != requested_priority[:, 0])
    if moved.block.size:
        has_moved = moved.kind == EventKind.UPDATED
        changed = changed & ~pick(is_among(blocks.fill.shape[0], moved.block, has_moved), table)
        priority = jnp.where(has_moved, blocks.requested_priority(moved.block), moved.priority)
        moved = moved.replace(records=moved.records.at[:, COLUMNS.index("priority")].set(priority))
    updated = record(
        EventKind.UPDATED,
        changed,
        block=table,
        generation=pick(blocks.generation, table),
        priority=requested_priority[:, 0],
    )
    return group.replace(blocks=blocks), updated, moved
