# SPDX-License-Identifier: Apache-2.0
"""The third part of a step: waiting requests get rows in turn, as long as the counted blocks suffice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import FEW, Pytree, compact, count, fence, once, pick, put
from kvjax.blocks import windows
from kvjax.blocks.backups import would_lose
from kvjax.blocks.rows import fit, most_columns
from kvjax.cache import Cache
from kvjax.events.log import Log, num_free
from kvjax.policies.retention import Retention, is_retention
from kvjax.pools.device import apply
from kvjax.serving.capacity import admission_events, max_blocks, reserved, sample_blocks
from kvjax.serving.decode import append_events
from kvjax.serving.options import Scheduler, first, sort_keys
from kvjax.serving.program_tier import find_on_both, moved
from kvjax.serving.requests import Finish, Serving, Stage
from kvjax.state import NO_BLOCK, Match
from kvjax.verbs._request import TIERS, checked_prompt, checked_text
from kvjax.verbs.admit import admit_row, find, release_sources
from pallas_kernels.loops import while_loop


class Admitted(Pytree):
    """The requests admitted in a step, in order, all i32[S], padded with -1."""

    slots: jax.Array
    rows: jax.Array
    cached: jax.Array  # number of tokens found in the cache


def admit(
    serving: Serving, log: Log, scheduler: Scheduler, tried: jax.Array, log_room: int, now: jax.Array
) -> tuple[Serving, Log, Admitted]:
    """Admits waiting requests in order, if `tried` bool[], and leaves room for `log_room` events in the log."""
    log_room += admission_events(serving.cache.state.spec, serving.width)

    def attempt(carry):
        serving, log, _, skipped, num_skipped, admitted = carry
        slot = _next(serving, scheduler, skipped)
        serving, log, row, is_admitted, cached = _admit_one(serving, log, scheduler, slot, now)
        skipped = skipped | (~is_admitted & (np.arange(skipped.shape[0], dtype=np.int32) == slot))
        num_skipped = num_skipped + (~is_admitted).astype(jnp.int32)
        any_late = jnp.any(skipped & (serving.requests.passed >= scheduler.max_deferrals))
        admitted = put(admitted, count(admitted.slots >= 0), Admitted(slot, row, cached), is_admitted)
        is_over = any_late | (num_skipped >= scheduler.max_skips) | (serving.onboard_slot >= 0)
        is_over = is_over | (num_free(log) < log_room)
        goes_on = ~is_over & jnp.any(serving.free) & jnp.any(serving.requests.waiting & ~skipped)
        return serving, log, goes_on, skipped, num_skipped, admitted

    no_slots = jnp.full(serving.row.shape, -1, jnp.int32)
    skipped = jnp.zeros(serving.requests.stage.shape, jnp.bool_)
    can_start = tried & (num_free(log) >= log_room)
    start = serving, log, can_start, skipped, jnp.int32(0), Admitted(no_slots, no_slots, no_slots)
    serving, log, *_, admitted = while_loop(lambda carry: carry[2], attempt, start)
    must_return = (num_free(log) < log_room) | (serving.onboard_slot >= 0)
    serving = serving.replace(dirty=serving.dirty & (~tried | must_return))
    return once(tried & ~must_return, lambda serving: _give_up(serving, scheduler), serving), log, admitted


def _next(serving: Serving, scheduler: Scheduler, skipped: jax.Array) -> jax.Array:
    """i32[]; the first waiting request in order outside bool[W] `skipped`, or -1."""
    return first(sort_keys(serving, scheduler), serving.requests.waiting & ~skipped)


def _give_up(serving: Serving, scheduler: Scheduler) -> Serving:
    """Ends the first waiting request if no request has a row, because then no more blocks will become free."""
    requests = serving.requests
    slot = _next(serving, scheduler, jnp.zeros(requests.stage.shape, jnp.bool_))
    where = (slot >= 0) & ~jnp.any(serving.row >= 0)
    requests = requests.at(
        slot, where, stage=int(Stage.DONE), finish=int(Finish.NO_BLOCKS), ended=serving.steps
    ).without_parent(slot, where)
    return serving.replace(requests=requests, dirty=serving.dirty | where)


def _admit_one(
    serving: Serving, log: Log, scheduler: Scheduler, slot: jax.Array, now: jax.Array
) -> tuple[Serving, Log, jax.Array, jax.Array, jax.Array]:
    """Admits request slot i32[] if it fits. Also returns its row, whether it was admitted, and its cached tokens."""
    tokens = serving.requests.tokens(slot[None], jnp.zeros((1,), jnp.int32), serving.width)[0]
    state = serving.cache.state
    request = serving.requests[slot]
    spec = state.spec
    text = checked_text(state.spec, tokens, None)
    text = checked_prompt(text, request.num_tokens, request.namespace, spec.block_size)
    in_program = serving.host_pools is not None
    if in_program:
        match = find_on_both(state, text, scheduler)
    else:
        match = find(state, text, TIERS[0], scheduler.alignment_tokens)
    samples = serving.requests.samples_of(slot)
    fits, evicts = _fits(serving, scheduler, slot, match, samples)
    can_admit = fits & (count(serving.free) > count(samples))
    can_admit = can_admit & ~_waits_for_prefix(serving, scheduler, slot, tokens, match)
    if spec.has_host and not in_program:  # inside a loop, evicted blocks go there only if they have copies
        match_on_both = find(state, text, TIERS[1], scheduler.alignment_tokens)
        is_worth_it = match_on_both.host_tokens >= scheduler.min_onboard * spec.block_size
        if spec.backups:
            loses = _loses(serving, scheduler, slot, match, now) if scheduler.stop_before_loss else jnp.bool_(False)
        else:
            loses = evicts
        onboards = can_admit & (is_worth_it | loses) & request.onboard
        serving = serving.replace(onboard_slot=jnp.where(onboards, slot, serving.onboard_slot))
        can_admit = can_admit & ~onboards
    row = jnp.argmax(serving.free).astype(jnp.int32)
    reserve_tokens = scheduler.chunk if len(state.groups) > 1 else None
    width = spec.max_seqs * most_columns(scheduler.max_steps(spec), spec.block_size)  # the same length as in `grow`
    width = width if width <= FEW else 0

    def try_it(carry):
        serving, log, _, _ = carry
        state = serving.cache.state
        retention = _retention(serving, slot)
        state, events, sources = admit_row(
            state, row, text, match, retention, now, reserve_tokens, TIERS[0], width, in_program
        )
        serving = moved(serving, events) if in_program else serving
        cache = Cache(release_sources(state, sources), apply(serving.cache.pools, events))
        serving = enter(serving.replace(cache=cache), slot, row, events.cached[0], events.ok)
        # Fenced as in a mixed step, because nothing reads the text any more.
        requests, is_admitted = fence(serving.requests, events.ok)
        return serving.replace(requests=requests), append_events(log, events), is_admitted, events.cached[0]

    start = serving, log, jnp.bool_(False), jnp.int32(0)
    serving, log, is_admitted, cached = once(can_admit, try_it, start)
    return serving, log, row, is_admitted, cached


def _fits(
    serving: Serving, scheduler: Scheduler, slot: jax.Array, match: Match, samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Whether a request and its samples bool[W] fit, and whether cached blocks may leave for them, both bool[]."""
    state = serving.cache.state
    request = serving.requests[slot]
    spec = state.spec
    block_size = state.spec.block_size
    num_tokens = request.num_tokens
    max_tokens = request.max_tokens
    prompt = request.prompt
    cached = match.cached_tokens
    columns = np.arange(match.blocks.shape[0], dtype=np.int32)
    length = num_tokens if len(state.groups) == 1 else jnp.minimum(num_tokens, cached + scheduler.chunk)
    num_new = -(-length // block_size) - match.num_blocks
    request_blocks = max_blocks(spec, scheduler, max_tokens)
    sample_needs = sample_blocks(spec, scheduler, serving.requests.max_tokens, prompt, samples)
    reservations = reserved(serving, scheduler)
    fits = jnp.bool_(True)
    evicts = jnp.bool_(False)
    for group_index, (group, group_spec) in enumerate(zip(state.groups, spec.groups, strict=True)):
        ids = group.in_this_group(match.blocks)
        is_cached = (ids >= 0) & group_spec.keeps(columns, cached, block_size)
        is_held = is_cached & (pick(group.blocks.refcount, ids) > 0)
        if scheduler.reserve == "num_tokens":
            num_spare = jnp.where(jnp.any(serving.running), scheduler.watermark, 0)
            num_needed = num_new + count(is_cached & ~is_held)
            limit = group.available - num_spare
        else:
            num_shared = 0 if group_spec.window else count(is_held)
            num_needed, limit = reservations[group_index]
            num_needed = request_blocks[group_index] - num_shared + num_needed
        num_needed = num_needed + sample_needs[group_index]
        fits = fits & (num_needed <= limit)
        evicts = evicts | (num_needed - count(is_cached & ~is_held) > limit - group.num_cached)
    return fits, evicts


def _loses(serving: Serving, scheduler: Scheduler, slot: jax.Array, match: Match, now: jax.Array) -> jax.Array:
    """bool[]; whether the admission of a request would evict blocks that have no copy on the host."""
    state = serving.cache.state
    num_tokens = serving.requests[slot].num_tokens
    if len(state.groups) > 1:  # it takes the blocks of its first chunk
        num_tokens = jnp.minimum(num_tokens, match.cached_tokens + scheduler.chunk)
    num_new = -(-num_tokens // state.spec.block_size) - match.num_blocks
    loses = jnp.bool_(False)
    for group_index, group in enumerate(state.groups):
        found = group.in_this_group(match.blocks)
        policy = windows.policy_of(state, group_index)
        loses = loses | would_lose(group, policy, num_new, match.blocks.shape[0], now, spared=found)
    return loses


def _waits_for_prefix(
    serving: Serving, scheduler: Scheduler, slot: jax.Array, tokens: jax.Array, match: Match
) -> jax.Array:
    """bool[]; whether a running row is about to compute the next part of the prefix that the request could reuse."""
    if not scheduler.wait_for_prefix:
        return jnp.bool_(False)
    requests = serving.requests
    seqs = serving.cache.state.seqs
    block_size = serving.cache.state.spec.block_size
    num_columns = (scheduler.alignment_tokens or block_size) // block_size
    request = requests[slot]
    row_requests = serving.by_row
    column = match.num_blocks + num_columns - 1  # its last block
    end = (column + 1) * block_size
    is_usable = (end <= request.num_tokens - 1) & (end <= request.prompt)

    def key(start: jax.Array) -> jax.Array:
        return pick(requests.keys, start // block_size + column)

    # Keys, two words for each row, select candidates. Then the tokens of a single candidate are compared with the
    # prompt.
    is_alike = serving.running & (serving.row != slot) & (row_requests.prompt >= end) & (seqs.committed < end)
    is_alike = is_alike & jnp.all(key(row_requests.start) == key(request.start)[None], axis=-1)
    other_slot = pick(serving.row, jnp.argmax(is_alike))
    other_tokens = requests.tokens(other_slot[None], jnp.zeros((1,), jnp.int32), serving.width)[0]
    is_same = jnp.all((tokens == other_tokens) | (np.arange(serving.width, dtype=np.int32) >= end))
    is_same = is_same & (requests[other_slot].namespace == request.namespace)
    return is_usable & jnp.any(is_alike) & is_same


def _retention(serving: Serving, slot: jax.Array) -> Retention | None:
    """The retention of request slot i32[]. If it was preempted, its generated tokens do not count as its prompt."""
    request = serving.requests[slot]
    prompt = request.prompt

    def with_generated(retention: Retention) -> Retention:
        ranges = jnp.asarray(retention.ranges).at[:, 1].min(prompt)
        generated = jnp.stack([prompt, jnp.int32(np.iinfo(np.int32).max), retention.decode[0], retention.decode[1]])
        return Retention(jnp.concatenate([ranges, generated[None]]), retention.decode)

    return jax.tree.map(with_generated, request.retention, is_leaf=is_retention)


def enter(serving: Serving, slot: jax.Array, row: jax.Array, cached: jax.Array, done: jax.Array) -> Serving:
    """Records the admission of request slot i32[] to row i32[] with `cached` i32[] tokens, if `done` bool[]."""
    requests = serving.requests
    samples = requests.samples_of(slot) & done
    first_time = done & (requests[slot].preemptions == 0)
    requests = requests.at(slot, done, stage=int(Stage.RUNNING))
    requests = requests.at(slot, first_time, cached=cached, admitted=serving.steps)
    is_earlier = (requests.stage == Stage.WAITING) & (requests.arrival < requests[slot].arrival)
    requests = requests.replace(passed=requests.passed + (done & is_earlier).astype(jnp.int32))
    slots = put(serving.row, row, slot, done)
    leads = put(serving.leads, row, jnp.any(samples), done)
    serving = serving.replace(requests=requests, row=slots, leads=leads)
    # Its samples get other free rows, where they wait until its prompt is computed.
    slots, _ = compact(jnp.where(samples, np.arange(samples.shape[0], dtype=np.int32), -1))
    rows = np.arange(serving.row.shape[0], dtype=np.int32)
    free, _ = compact(jnp.where(serving.free, rows, -1))
    slots = fit(slots, rows.shape[0], NO_BLOCK)
    requests = requests.replace(
        stage=jnp.where(samples, int(Stage.RUNNING), requests.stage),
        admitted=jnp.where(samples & (requests.admitted < 0), serving.steps, requests.admitted),
    )
    return serving.replace(requests=requests, row=put(serving.row, free, slots, (slots >= 0) & (free >= 0)))


def has_row(serving: Serving, placed: jax.Array, cached: jax.Array, done: jax.Array) -> Serving:
    """Records an admission between loops: placed i32[2] has the slot and the row, `cached` i32[] the tokens found."""
    slot = placed[0]
    row = placed[1]
    requests = serving.requests.at(slot, ~done, onboard=False)  # the next attempt ignores its blocks on the host
    serving = serving.replace(requests=requests, onboard_slot=jnp.int32(-1), dirty=jnp.bool_(True))
    return enter(serving, slot, row, cached, done)
