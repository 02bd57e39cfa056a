# SPDX-License-Identifier: Apache-2.0
"""The third part of a step: waiting requests get rows, one after the other, while counting says that they fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import FEW, Pytree, compact, count, fence, once, pick, put
from kvjax.blocks.rows import fit, most_columns
from kvjax.cache import Cache
from kvjax.events.log import Log, num_free
from kvjax.policies.retention import Retention, is_retention
from kvjax.pools.device import apply
from kvjax.serving.capacity import admission_events, max_blocks, reserved, sample_blocks
from kvjax.serving.decode import append_events
from kvjax.serving.options import Scheduler, first, sort_keys
from kvjax.serving.requests import Finish, Serving, Stage
from kvjax.state import NO_BLOCK, Match
from kvjax.verbs._request import TIERS, checked_prompt, checked_text
from kvjax.verbs.admit import admit_row, find, release_sources
from pallas_kernels.loops import while_loop


class Admitted(Pytree):
    """The requests admitted in a step, in order; all i32[S], -1 for none."""

    slots: jax.Array
    rows: jax.Array
    cached: jax.Array  # tokens that were found in the cache


def admit(
    serving: Serving, log: Log, scheduler: Scheduler, tried: jax.Array, log_room: int, now: jax.Array
) -> tuple[Serving, Log, Admitted]:
    """Admits waiting requests in their order, if tried bool[], while `log_room` events would fit into the log after."""
    log_room += admission_events(serving.cache.state.spec, serving.width)

    def attempt(carry):
        serving, log, _, skipped, num_skipped, admitted = carry
        slot = _next(serving, scheduler, skipped)
        serving, log, row, done, cached = _admit_one(serving, log, scheduler, slot, now)
        skipped = skipped | (~done & (np.arange(skipped.shape[0], dtype=np.int32) == slot))
        num_skipped = num_skipped + (~done).astype(jnp.int32)
        late = jnp.any(skipped & (serving.requests.passed >= scheduler.max_deferrals))
        admitted = put(admitted, count(admitted.slots >= 0), Admitted(slot, row, cached), done)
        over = late | (num_skipped >= scheduler.max_skips) | (serving.onboard_slot >= 0) | (num_free(log) < log_room)
        goes_on = ~over & jnp.any(serving.free) & jnp.any(serving.requests.waiting & ~skipped)
        return serving, log, goes_on, skipped, num_skipped, admitted

    none = jnp.full(serving.row.shape, -1, jnp.int32)
    skipped = jnp.zeros(serving.requests.stage.shape, jnp.bool_)
    start = serving, log, tried & (num_free(log) >= log_room), skipped, jnp.int32(0), Admitted(none, none, none)
    serving, log, *_, admitted = while_loop(lambda carry: carry[2], attempt, start)
    full = (num_free(log) < log_room) | (serving.onboard_slot >= 0)
    serving = serving.replace(dirty=serving.dirty & (~tried | full))
    return once(tried & ~full, lambda serving: _give_up(serving, scheduler), serving), log, admitted


def _next(serving: Serving, scheduler: Scheduler, skipped: jax.Array) -> jax.Array:
    """i32[]; the first request in order that waits and was not skipped, bool[W]; -1 if none."""
    return first(sort_keys(serving, scheduler), serving.requests.waiting & ~skipped)


def _give_up(serving: Serving, scheduler: Scheduler) -> Serving:
    """Ends the first waiting request where no row has one: no block will ever become free for it."""
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
    """Admits request slot i32[] if it can be; also returns its row, whether it was, and the tokens found for it."""
    tokens = serving.requests.tokens(slot[None], jnp.zeros((1,), jnp.int32), serving.width)[0]
    state = serving.cache.state
    request = serving.requests[slot]
    spec = state.spec
    text = checked_text(state.spec, tokens, None)
    text = checked_prompt(text, request.num_tokens, request.namespace, spec.block_size)
    match = find(state, text, TIERS[0], scheduler.alignment_tokens)
    samples = serving.requests.samples_of(slot)
    fits, evicts = _fits(serving, scheduler, slot, match, samples)
    good = fits & (count(serving.free) > count(samples))
    good = good & ~_waits_for_prefix(serving, scheduler, slot, tokens, match)
    if spec.has_host:  # inside a loop, what is evicted does not go there
        both = find(state, text, TIERS[1], scheduler.alignment_tokens)
        enough = both.host_tokens >= scheduler.min_onboard * spec.block_size
        brings = good & (enough | evicts) & request.onboard
        serving = serving.replace(onboard_slot=jnp.where(brings, slot, serving.onboard_slot))
        good = good & ~brings
    row = jnp.argmax(serving.free).astype(jnp.int32)
    reserve_tokens = scheduler.chunk if len(state.groups) > 1 else None
    width = spec.max_seqs * most_columns(scheduler.max_steps(spec), spec.block_size)  # the length of that of `grow`
    width = width if width <= FEW else 0

    def try_it(carry):
        serving, log, _, _ = carry
        state = serving.cache.state
        retention = _retention(serving, slot)
        state, events, sources = admit_row(state, row, text, match, retention, now, reserve_tokens, TIERS[0], width)
        cache = Cache(release_sources(state, sources), apply(serving.cache.pools, events))
        serving = enter(serving.replace(cache=cache), slot, row, events.cached[0], events.ok)
        requests, done = fence(serving.requests, events.ok)  # as in a mixed step: nobody reads the text any more
        return serving.replace(requests=requests), append_events(log, events), done, events.cached[0]

    serving, log, done, cached = once(good, try_it, (serving, log, jnp.bool_(False), jnp.int32(0)))
    return serving, log, row, done, cached


def _fits(
    serving: Serving, scheduler: Scheduler, slot: jax.Array, match: Match, samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """bool[] each; whether a request and its samples bool[W] fit, and whether cached blocks may leave for them."""
    state = serving.cache.state
    request = serving.requests[slot]
    spec = state.spec
    size = state.spec.block_size
    num_tokens = request.num_tokens
    max_tokens = request.max_tokens
    prompt = request.prompt
    cached = match.cached_tokens
    columns = np.arange(match.blocks.shape[0], dtype=np.int32)
    length = num_tokens if len(state.groups) == 1 else jnp.minimum(num_tokens, cached + scheduler.chunk)
    new = -(-length // size) - match.num_blocks
    most = max_blocks(spec, scheduler, max_tokens)
    more = sample_blocks(spec, scheduler, serving.requests.max_tokens, prompt, samples)
    counted = reserved(serving, scheduler)
    good = jnp.bool_(True)
    evicts = jnp.bool_(False)
    for number, (group, group_spec) in enumerate(zip(state.groups, spec.groups, strict=True)):
        ids = group.in_this_group(match.blocks)
        found = (ids >= 0) & group_spec.keeps(columns, cached, size)
        held = found & (pick(group.blocks.refcount, ids) > 0)
        if scheduler.reserve == "num_tokens":
            spare = jnp.where(jnp.any(serving.running), scheduler.watermark, 0)
            need = new + count(found & ~held)
            limit = group.available - spare
        else:
            shared = 0 if group_spec.window else count(held)
            need, limit = counted[number]
            need = most[number] - shared + need
        need = need + more[number]
        good = good & (need <= limit)
        evicts = evicts | (need - count(found & ~held) > limit - group.num_cached)
    return good, evicts


def _waits_for_prefix(
    serving: Serving, scheduler: Scheduler, slot: jax.Array, tokens: jax.Array, match: Match
) -> jax.Array:
    """bool[]; whether a row is about to compute the next part of a request's prefix that can be reused."""
    if not scheduler.wait_for_prefix:
        return jnp.bool_(False)
    requests = serving.requests
    seqs = serving.cache.state.seqs
    size = serving.cache.state.spec.block_size
    part = (scheduler.alignment_tokens or size) // size
    request = requests[slot]
    others = serving.by_row
    column = match.num_blocks + part - 1  # its last block
    end = (column + 1) * size
    usable = (end <= request.num_tokens - 1) & (end <= request.prompt)

    def key(start: jax.Array) -> jax.Array:
        return pick(requests.keys, start // size + column)

    # Keys decide who might be: two words of each row. Then the tokens of one of them are compared.
    alike = serving.running & (serving.row != slot) & (others.prompt >= end) & (seqs.committed < end)
    alike = alike & jnp.all(key(others.start) == key(request.start)[None], axis=-1)
    other = pick(serving.row, jnp.argmax(alike))
    theirs = requests.tokens(other[None], jnp.zeros((1,), jnp.int32), serving.width)[0]
    same = jnp.all((tokens == theirs) | (np.arange(serving.width, dtype=np.int32) >= end))
    same = same & (requests[other].namespace == request.namespace)
    return usable & jnp.any(alike) & same


def _retention(serving: Serving, slot: jax.Array) -> Retention | None:
    """The retention of request slot i32[]; if it comes back, blocks with generated tokens are not the prompt's."""
    request = serving.requests[slot]
    prompt = request.prompt

    def stated(one: Retention) -> Retention:
        ranges = jnp.asarray(one.ranges).at[:, 1].min(prompt)
        generated = jnp.stack([prompt, jnp.int32(np.iinfo(np.int32).max), one.decode[0], one.decode[1]])
        return Retention(jnp.concatenate([ranges, generated[None]]), one.decode)

    return jax.tree.map(stated, request.retention, is_leaf=is_retention)


def enter(serving: Serving, slot: jax.Array, row: jax.Array, cached: jax.Array, done: jax.Array) -> Serving:
    """Notes that request slot i32[] has got row i32[], where done bool[], with so many tokens cached i32[]."""
    requests = serving.requests
    samples = requests.samples_of(slot) & done
    first_time = done & (requests[slot].preemptions == 0)
    requests = requests.at(slot, done, stage=int(Stage.RUNNING))
    requests = requests.at(slot, first_time, cached=cached, admitted=serving.steps)
    earlier = (requests.stage == Stage.WAITING) & (requests.arrival < requests[slot].arrival)
    requests = requests.replace(passed=requests.passed + (done & earlier).astype(jnp.int32))
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
    """Notes an admission between loops, of a slot to a row, placed i32[2], with so many tokens cached i32[]."""
    slot = placed[0]
    row = placed[1]
    requests = serving.requests.at(slot, ~done, onboard=False)  # next time without its blocks on the host
    serving = serving.replace(requests=requests, onboard_slot=jnp.int32(-1), dirty=jnp.bool_(True))
    return enter(serving, slot, row, cached, done)
