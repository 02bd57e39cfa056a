# SPDX-License-Identifier: Apache-2.0
"""The third part of a step: waiting requests get rows, one after the other, while counting says that they fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, compact, count, fence, once, pick, put
from kvjax.blocks.rows import Prompt, fit
from kvjax.cache import Cache
from kvjax.events.log import EventLog
from kvjax.policies.retention import Retention, is_retention
from kvjax.pools.device import apply
from kvjax.serving.capacity import admission_events, for_samples, most_blocks, reserved
from kvjax.serving.loops import note
from kvjax.serving.requests import Finish, Requests, Serving, Stage
from kvjax.serving.scheduler import Scheduler, first, places, running
from kvjax.state import NO_BLOCK, Match
from kvjax.verbs._request import TIERS, checked_prompt, checked_text
from kvjax.verbs.admit import admit_row, find, let_go


class Admitted(Pytree):
    """The requests admitted in a step, in order, all i32[S], -1 for none.

    Attributes:
      slots: the requests.
      rows: the rows that they got.
      cached: tokens that were found in the cache.
    """

    slots: jax.Array
    rows: jax.Array
    cached: jax.Array


class _Search(Pytree):
    """The state of the loop over candidates.

    Attributes:
      goes_on: bool[]; whether there is a next candidate.
      skipped: bool[W]; those that cannot be admitted in this step.
      number: i32[]; how many these are.
      admitted: so far.
    """

    goes_on: jax.Array
    skipped: jax.Array
    number: jax.Array
    admitted: Admitted


def admit(
    serving: Serving, log: EventLog, scheduler: Scheduler, tried: jax.Array, log_room: int, now: jax.Array
) -> tuple[Serving, EventLog, Admitted]:
    """Admits waiting requests in their order; one that cannot be admitted is passed over, at most `patience` times.

    Where no row runs and nobody can be admitted, the first one is over: no block will ever become free for it.

    Args:
      serving: the requests, behind `grow`.
      log: takes the events.
      scheduler: static.
      tried: bool[]; whether to try at all: somebody waits, and there is a row to have.
      log_room: static; events that have to fit into the log afterwards.
      now: i32[] ms.
    """
    log_room += admission_events(serving.cache.state.spec, serving.width)

    def attempt(carry: tuple[Serving, EventLog, _Search]) -> tuple[Serving, EventLog, _Search]:
        serving, log, search = carry
        slot = _next(serving, scheduler, search.skipped)
        serving, log, row, done, cached = _admit(serving, log, scheduler, slot, now)
        skipped = search.skipped | (~done & (np.arange(search.skipped.shape[0], dtype=np.int32) == slot))
        number = search.number + (~done).astype(jnp.int32)
        late = jnp.any(skipped & (serving.requests.passed >= scheduler.patience))
        at = count(search.admitted.slots >= 0)[None]
        values = Admitted(slot[None], row[None], cached[None])
        admitted = put(search.admitted, at, values, done[None])
        over = late | (number >= scheduler.max_skips) | (serving.onboard_slot >= 0) | (log.room < log_room)
        goes_on = ~over & jnp.any(serving.free) & jnp.any(_waits(serving.requests) & ~skipped)
        return serving, log, _Search(goes_on, skipped, number, admitted)

    none = jnp.full(serving.row.shape, -1, jnp.int32)
    skipped = jnp.zeros(serving.requests.stage.shape, jnp.bool_)
    search = _Search(tried & (log.room >= log_room), skipped, jnp.int32(0), Admitted(none, none, none))
    serving, log, search = lax.while_loop(lambda carry: carry[2].goes_on, attempt, (serving, log, search))
    full = (log.room < log_room) | (serving.onboard_slot >= 0)
    serving = serving.replace(dirty=serving.dirty & (~tried | full))
    return once(tried & ~full, lambda serving: _give_up(serving, scheduler), serving), log, search.admitted


def _waits(requests: Requests) -> jax.Array:
    """bool[W]; requests that wait for a row of their own."""
    return (requests.stage == Stage.WAITING) & (requests.parent < 0)


def _next(serving: Serving, scheduler: Scheduler, skipped: jax.Array) -> jax.Array:
    """i32[]; the first request in order that waits and was not skipped, bool[W]; -1 if none."""
    requests = serving.requests
    key = scheduler.order(requests, serving.cache.state)
    return first(places(requests, scheduler, key), _waits(requests) & ~skipped)


def _give_up(serving: Serving, scheduler: Scheduler) -> Serving:
    """Ends the first waiting request where no row has one."""
    requests = serving.requests
    slot = _next(serving, scheduler, jnp.zeros(requests.stage.shape, jnp.bool_))
    where = (slot >= 0) & ~jnp.any(serving.row >= 0)
    requests = requests.at(
        slot[None], where[None], stage=int(Stage.DONE), finish=int(Finish.NO_BLOCKS), ended=serving.steps
    ).without_parent(slot, where)
    return serving.replace(requests=requests, dirty=serving.dirty | where)


def _admit(
    serving: Serving, log: EventLog, scheduler: Scheduler, slot: jax.Array, now: jax.Array
) -> tuple[Serving, EventLog, jax.Array, jax.Array, jax.Array]:
    """Admits request slot i32[] if it can be; also returns its row, whether it was, and the tokens found for it."""
    tokens = serving.requests.tokens(slot[None], jnp.zeros((1,), jnp.int32), serving.width)[0]
    state, requests = serving.cache.state, serving.requests
    known, namespace = pick(requests.known, slot), pick(requests.namespace, slot)
    ask = checked_prompt(checked_text(state.spec, tokens, None), known, namespace, state.spec.block_size)
    match = find(state, ask, TIERS[0])
    serving, good = _can_be_admitted(serving, scheduler, slot, tokens, ask, match)
    row = jnp.argmax(serving.free).astype(jnp.int32)
    room = scheduler.chunk if len(serving.cache.state.groups) > 1 else None

    def try_it(carry):
        serving, log, _, _ = carry
        stated = _retention(serving.requests, slot)
        state, events, sources = admit_row(serving.cache.state, row, ask, match, stated, now, room, TIERS[0])
        cache = Cache(let_go(state, sources), apply(serving.cache.pools, events))
        serving = enter(serving.replace(cache=cache), slot, row, events.cached[0], events.ok)
        requests, done = fence(serving.requests, events.ok)  # as in a mixed step: nobody reads the text any more
        return serving.replace(requests=requests), note(log, events), done, events.cached[0]

    serving, log, done, cached = once(good, try_it, (serving, log, jnp.bool_(False), jnp.int32(0)))
    return serving, log, row, done, cached


def _can_be_admitted(
    serving: Serving, scheduler: Scheduler, slot: jax.Array, tokens: jax.Array, ask: Prompt, match: Match
) -> tuple[Serving, jax.Array]:
    """bool[]; whether request slot i32[], with this match, may have a row; noted if it needs the host for that."""
    requests, state = serving.requests, serving.cache.state
    samples = (requests.parent == slot) & (requests.stage == Stage.WAITING)
    fits, evicts = _fits(serving, scheduler, slot, match, samples)
    good = fits & (count(serving.free) > count(samples))
    good = good & ~_waits_for_prefix(serving, scheduler, slot, tokens, match)
    if state.spec.has_host:
        there = find(state, ask, TIERS[1]).host_tokens
        enough = there >= scheduler.min_onboard * state.spec.block_size
        brings = good & (enough | evicts) & pick(requests.onboard, slot)
        serving, good = serving.replace(onboard_slot=jnp.where(brings, slot, serving.onboard_slot)), good & ~brings
    return serving, good


def enter(serving: Serving, slot: jax.Array, row: jax.Array, cached: jax.Array, done: jax.Array) -> Serving:
    """Notes that request slot i32[] has got row i32[], where done bool[], with so many tokens cached i32[]."""
    requests = serving.requests
    samples = (requests.parent == slot) & (requests.stage == Stage.WAITING) & done
    first_time = done & (pick(requests.preemptions, slot) == 0)
    requests = requests.at(slot[None], done[None], stage=int(Stage.RUNNING))
    requests = requests.at(slot[None], first_time[None], cached=cached, admitted=serving.steps)
    earlier = (requests.stage == Stage.WAITING) & (requests.arrival < pick(requests.arrival, slot))
    requests = requests.replace(passed=requests.passed + (done & earlier).astype(jnp.int32))
    serving = serving.replace(
        requests=requests,
        row=put(serving.row, row[None], slot, done[None]),
        leads=put(serving.leads, row[None], jnp.any(samples), done[None]),
    )
    return _hold_rows(serving, samples)


def has_row(serving: Serving, placed: jax.Array, cached: jax.Array, done: jax.Array) -> Serving:
    """After an admission between loops: a request runs, or is admitted without its blocks on the host the next time.

    Args:
      serving: the requests; the cache has admitted one of them.
      placed: i32[2]; its slot, and the row that it was to get.
      cached: i32[]; tokens that were found.
      done: bool[]; whether it has the row.
    """
    slot, row = placed[0], placed[1]
    requests = serving.requests.at(slot[None], ~done[None], onboard=False)
    serving = serving.replace(requests=requests, onboard_slot=jnp.int32(-1), dirty=jnp.bool_(True))
    return enter(serving, slot, row, cached, done)


def _hold_rows(serving: Serving, samples: jax.Array) -> Serving:
    """Gives free rows to requests, where bool[W]: samples that wait there until their parent's prompt is computed."""
    numbers = np.arange(samples.shape[0], dtype=np.int32)
    slots, _ = compact(jnp.where(samples, numbers, -1))
    rows = np.arange(serving.row.shape[0], dtype=np.int32)
    free, _ = compact(jnp.where(serving.free, rows, -1))
    slots, requests = fit(slots, rows.shape[0], NO_BLOCK), serving.requests
    requests = requests.replace(
        stage=jnp.where(samples, int(Stage.RUNNING), requests.stage),
        admitted=jnp.where(samples & (requests.admitted < 0), serving.steps, requests.admitted),
    )
    return serving.replace(requests=requests, row=put(serving.row, free, slots, (slots >= 0) & (free >= 0)))


def _retention(requests: Requests, slot: jax.Array) -> Retention | None:
    """The retention of request slot i32[]; blocks with generated tokens are no prompt's, if it comes back."""
    prompt = pick(requests.prompt, slot)

    def stated(one: Retention) -> Retention:
        ranges = jnp.asarray(one.ranges).at[:, 1].min(prompt)
        generated = jnp.stack([prompt, jnp.int32(np.iinfo(np.int32).max), one.decode[0], one.decode[1]])
        return Retention(jnp.concatenate([ranges, generated[None]]), one.decode)

    return jax.tree.map(stated, pick(requests.retention, slot), is_leaf=is_retention)


def _fits(
    serving: Serving, scheduler: Scheduler, slot: jax.Array, match: Match, samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """bool[]; whether there are blocks for a request and its samples bool[W], as `scheduler.reserve` wants it.

    And bool[], whether cached blocks may have to be evicted for it: inside a loop they do not go to the host.
    """
    state, requests = serving.cache.state, serving.requests
    spec, size = state.spec, state.spec.block_size
    known, goal, prompt = (pick(x, slot) for x in (requests.known, requests.goal, requests.prompt))
    cached, positions = match.cached_tokens, np.arange(match.blocks.shape[0], dtype=np.int32)
    length = known if len(state.groups) == 1 else jnp.minimum(known, cached + scheduler.chunk)
    new, most = -(-length // size) - match.num_blocks, most_blocks(spec, scheduler, goal)
    more = for_samples(spec, scheduler, requests.goal, prompt, samples)
    counted = reserved(serving, scheduler)
    good, evicts = jnp.bool_(True), jnp.bool_(False)
    for number, (group, group_spec) in enumerate(zip(state.groups, spec.groups, strict=True)):
        ids = group.in_this_group(match.blocks)
        found = (ids >= 0) & group_spec.keeps(positions, cached, size)
        held = found & (pick(group.blocks.refcount, ids) > 0)
        if scheduler.reserve == "known":
            spare = jnp.where(jnp.any(running(serving)), scheduler.watermark, 0)
            need, limit = new + count(found & ~held), group.available - spare
        else:
            shared = 0 if group_spec.window else count(held)
            need, limit = most[number] - shared + counted[number].need, counted[number].limit
        need = need + more[number]
        good, evicts = good & (need <= limit), evicts | (need - count(found & ~held) > limit - group.num_cached)
    return good, evicts


def _waits_for_prefix(
    serving: Serving, scheduler: Scheduler, slot: jax.Array, tokens: jax.Array, match: Match
) -> jax.Array:
    """bool[]; whether a row is about to compute the next whole block of a request's prefix.

    Keys decide who might be: two words of each row. Then the tokens of one of them are compared.
    """
    if not scheduler.wait_for_prefix:
        return jnp.bool_(False)
    requests, seqs, size = serving.requests, serving.cache.state.seqs, serving.cache.state.spec.block_size
    place, others = match.num_blocks, serving.row
    end = (place + 1) * size
    usable = (end <= pick(requests.known, slot) - 1) & (end <= pick(requests.prompt, slot))

    def key(slots: jax.Array) -> jax.Array:
        return pick(requests.keys, pick(requests.start, slots) // size + place)

    alike = running(serving) & (others != slot) & (pick(requests.prompt, others) >= end) & (seqs.committed < end)
    alike = alike & jnp.all(key(others) == key(slot)[None], axis=-1)
    other = pick(others, jnp.argmax(alike))
    theirs = requests.tokens(other[None], jnp.zeros((1,), jnp.int32), serving.width)[0]
    same = jnp.all((tokens == theirs) | (np.arange(serving.width, dtype=np.int32) >= end))
    same = same & (pick(requests.namespace, other) == pick(requests.namespace, slot))
    return usable & jnp.any(alike) & same
