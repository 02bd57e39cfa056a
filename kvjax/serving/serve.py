# SPDX-License-Identifier: Apache-2.0
"""A step of the scheduler, and a loop of such steps as a single program.

    retire    finished requests leave their rows; others are preempted if the next tokens do not fit
    grow      decoding rows get blocks for their next tokens
    admit     waiting requests get free rows
    compute   a mixed step: a token of every decoding row and chunks of prompts, as one flat batch; or a block of up to
              k decode steps
    choose    rows whose tokens are all computed choose the next token, which may end their requests

If a part has nothing to do, it is skipped by a loop with zero iterations, because `lax.cond` would copy the pools.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, count, fence, once, pick, put, runs
from kvjax.cache import Cache
from kvjax.checks import integers
from kvjax.events.log import Log, num_free
from kvjax.events.records import EventKind
from kvjax.model import Model
from kvjax.pools.device import Pools
from kvjax.pools.views import View
from kvjax.serving.admit import Admitted, admit
from kvjax.serving.capacity import admission_events, worst_step, would_lose
from kvjax.serving.decode import (
    DecodeBlock,
    LogitsFn,
    SampledTokens,
    Sampler,
    append_events,
    compute,
    grow,
    rows_of,
)
from kvjax.serving.options import Scheduler
from kvjax.serving.park import without_pools
from kvjax.serving.preempt import Retired, retire, swaps
from kvjax.serving.prefill import Chunks, commit_step, fork_samples, mixed_step
from kvjax.serving.program_tier import back_up, backup_events
from kvjax.serving.requests import Finish, Requests, Serving, Stage
from kvjax.serving.speculation import Drafter, decode_block
from pallas_kernels.loops import while_loop


class Served(Pytree):
    """The result of a step of the scheduler."""

    retired: Retired
    admitted: Admitted
    n: jax.Array  # i32[]; decode steps that got blocks; 0 if blocks were refused
    mixed: jax.Array  # bool[]; whether it was a mixed step
    chunks: Chunks
    chosen: SampledTokens  # k columns


def serve_step(
    model: Model,
    serving: Serving,
    log: Log,
    *,
    scheduler: Scheduler,
    steps: int | jax.Array | None = None,
    logits_fn: LogitsFn | None = None,
    drafter: Drafter | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Serving, Log, Served]:
    """Runs a step of the scheduler. Jit it, and donate `serving` and `log`.

    Args:
      model: see `kvjax.step`.
      serving: the requests and their cache.
      log: a log for the events, with room for `worst_step` of them. None disables events.
      scheduler: static.
      steps: i32[]; maximum decode steps. None means the steps of a block.
      logits_fn: see `RunOptions`.
      drafter: see `RunOptions`; the requests then have `draft_stats`.
      fixed_steps: static; see `RunOptions`.
      now: i32[] ms.
    """
    spec = serving.cache.state.spec
    now = integers("now", now, ())
    k = scheduler.max_steps(spec)
    log_room = worst_step(spec, scheduler)
    if serving.host_pools is not None:
        serving, log = back_up(serving, log, scheduler, now)
    serving, log, retired = retire(serving, log, scheduler, now)
    tried = _tries(serving, scheduler, retired)
    single = _has_chunks(serving, scheduler) | tried
    max_steps = k if steps is None else steps
    serving, extended, n, new = grow(serving, scheduler, k, max_steps, single, num_free(log) - log_room, now)
    # In a block of steps, the events of the commit follow directly.
    log = once(single, lambda log: append_events(log, extended), log)
    serving, log, admitted = admit(serving, log, scheduler, tried, log_room, now)

    seqs = serving.cache.state.seqs
    mixed = _has_chunks(serving, scheduler)
    decode = serving.decoding & (seqs.length > seqs.committed)
    if scheduler.canonical:  # decoding rows are computed after the chunks, by the program of a block
        decodes_in_mixed = jnp.bool_(False)
        mixed_decode = jnp.zeros_like(decode)
    else:  # a mixed step also computes the decoding rows
        decodes_in_mixed = mixed
        mixed_decode = decode
    serving, log, chunks, chosen = mixed_step(
        model, serving, log, scheduler, mixed, mixed_decode, k, logits_fn=logits_fn, now=now
    )
    block_steps = jnp.where(decodes_in_mixed, 0, jnp.maximum(n, 1))
    new = jnp.where(decode, jnp.maximum(new, 1), 0)  # a row that was just admitted has a slot for one token
    # The fence keeps the reads of the text before the writes below.
    requests, rows = fence(serving.requests, rows_of(serving, decode))
    cache = serving.cache
    serving = serving.replace(requests=requests)

    def block(carry: tuple[Pools, DecodeBlock]) -> tuple[Pools, DecodeBlock]:
        current = cache.replace(pools=carry[0])
        choose = Sampler.of(serving, logits_fn)
        pools, _, written = compute(
            model, current, rows, new, block_steps, choose, k, fixed_steps, fixed_split=scheduler.canonical
        )
        return pools, written

    nothing = DecodeBlock(jnp.zeros_like(new), SampledTokens.none(new.shape[0], k, requests.num_top), rows.state)
    start = cache.pools, nothing
    if drafter is not None:
        options: dict[str, Any] = {"fixed_steps": fixed_steps, "canonical": scheduler.canonical}
        pools, written, serving = decode_block(
            model, serving, rows, new, block_steps, k, drafter=drafter, logits_fn=logits_fn, **options
        )
    elif fixed_steps:
        pools, written = once(jnp.any(decode & ~decodes_in_mixed), block, start)
    else:
        pools, written = block(start)
    serving = serving.with_logits_state(written.state)
    num_written = jnp.where(decodes_in_mixed, decode.astype(jnp.int32), written.count)
    is_from_mixed = ~decode[:, None] if scheduler.canonical else mixed
    chosen = SampledTokens(jnp.where(is_from_mixed, chosen.bits, written.chosen.bits))
    state, committed = commit_step(cache.state, chunks, scheduler, num_written, written.text(rows.token), now)
    cache = Cache(state, pools)
    if k > 1:
        cache, _ = cache.trim(decode, max_tokens=k)
    serving = serving.replace(cache=cache, dirty=serving.dirty | mixed)
    if scheduler.coalesce > 1:
        chunks_deferred = jnp.where(mixed | ~jnp.any(serving.prefilling), 0, serving.chunks_deferred + 1)
        serving = serving.replace(chunks_deferred=chunks_deferred)
    serving = record(serving, chosen, jnp.where(mixed, 1, jnp.max(num_written)))
    extended = extended.replace(records=jnp.where(single, int(EventKind.NONE), extended.records))
    return serving, append_events(log, extended, committed), Served(retired, admitted, n, mixed, chunks, chosen)


def _tries(serving: Serving, scheduler: Scheduler, retired: Retired) -> jax.Array:
    """bool[]; whether to look for requests to admit, because a request waits and there may be a row and blocks."""
    waits = jnp.any(serving.requests.waiting)
    tries = serving.dirty & waits & jnp.any(serving.free) & (retired.preempted[0] < 0)
    tries = tries & ~jnp.any((serving.row >= 0) & serving.cache.state.seqs.swapped_out)
    return tries & ~jnp.any(serving.row >= 0) if scheduler.reserve == "batch" else tries


def _has_chunks(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """bool[]; whether the next step is mixed: enough rows prefill, chunks waited long enough, or no row decodes."""
    rows = serving.prefilling
    if scheduler.coalesce == 1:
        return jnp.any(rows)
    is_due = (count(rows) >= scheduler.coalesce) | (serving.chunks_deferred >= scheduler.coalesce)
    return jnp.any(rows) & (is_due | ~jnp.any(serving.decoding))


def record(serving: Serving, chosen: SampledTokens, steps: jax.Array) -> Serving:
    """Adds the tokens chosen in i32[] `steps` to the requests, and ends complete requests."""
    requests = serving.requests
    request = serving.by_row
    row = serving.row
    tokens = chosen.tokens
    is_token = tokens >= 0
    num_new = jnp.sum(is_token, axis=1, dtype=jnp.int32)
    any_chosen = num_new > 0
    num_tokens = request.num_tokens + num_new
    positions = runs(request.start + request.num_tokens, tokens.shape[1])
    final = pick(tokens, (np.arange(num_new.size, dtype=np.int32), jnp.maximum(num_new - 1, 0)))
    stopped = any_chosen & jnp.any(final[:, None] == request.stop, axis=1)
    is_over = stopped | (any_chosen & (num_tokens >= request.max_tokens))
    begins = any_chosen & (request.num_tokens == request.prompt)
    requests = requests.replace(
        text=put(requests.text, positions, tokens, is_token),
        logprobs=put(requests.logprobs, positions, chosen.logprobs, is_token),
    )
    if requests.top is not None:
        requests = requests.replace(top=put(requests.top, positions, chosen.top, is_token))
    serving = serving.replace(requests=requests.at(row, any_chosen, num_tokens=num_tokens))

    def mark(serving: Serving) -> Serving:
        """Marks rows with their first token, forks samples off them, and ends requests."""
        serving = fork_samples(serving, begins)
        # A row that begins chooses a single token in its step.
        requests = serving.requests.at(row, begins, first_token=serving.steps + 1)
        requests = requests.at(
            row,
            is_over,
            stage=int(Stage.DONE),
            ended=serving.steps + num_new,
            finish=jnp.where(stopped, int(Finish.STOP), int(Finish.LENGTH)),
        )
        return serving.replace(requests=requests, dirty=serving.dirty | jnp.any(begins))

    serving = once(jnp.any(begins | is_over), mark, serving)
    return serving.replace(steps=serving.steps + steps)


def serve(
    model: Model,
    serving: Serving,
    log: Log,
    *,
    scheduler: Scheduler,
    steps: int | jax.Array,
    logits_fn: LogitsFn | None = None,
    drafter: Drafter | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Serving, Log]:
    """Steps until all requests are over, the model has run `steps` times, or the log may be too small for another step.

    With `serving.host_pools` the program moves blocks between the tiers itself: each step copies the next victims to
    the host, and admissions bring blocks back. Otherwise, with a host tier the loop also ends in four
    cases. `serving.onboard_slot` names a request for blocks on the host. `preempt.swaps` finds a row to swap out or in.
    The next step may evict blocks without copies on the host, and the scheduler has `stop_before_loss`: call `backup`.
    Or `serving.refused` is 1: blocks were refused in spite of the count, because a loop does not evict blocks with
    children on the host. Then call `backup`, or empty some blocks (`watermark`), and set it to 0. Otherwise the next
    step preempts.

    `now` is the same for all steps. If the log is None, it never ends the loop. The other arguments are as in
    `serve_step`.
    """
    spec = serving.cache.state.spec
    end = serving.steps + steps
    step_events = worst_step(spec, scheduler)
    events_of_admission = admission_events(spec, serving.width)
    if serving.host_pools is not None:
        events_of_admission += backup_events(spec, scheduler, serving.width)

    def goes_on(serving: Serving, log: Log) -> jax.Array:
        can_run = serving.busy & (serving.onboard_slot < 0) & ~swaps(serving, scheduler).any
        return can_run & (serving.steps < end) & (num_free(log) >= step_events + events_of_admission)

    def step(carry):
        _, serving, log = carry
        serving, log, _ = serve_step(
            model,
            serving,
            log,
            scheduler=scheduler,
            steps=end - serving.steps,
            logits_fn=logits_fn,
            drafter=drafter,
            fixed_steps=fixed_steps,
            now=now,
        )
        has_more = goes_on(serving, log) & (serving.refused != 1)
        if scheduler.stop_before_loss:
            has_more = has_more & ~would_lose(serving, scheduler, integers("now", now, ()))
        return has_more, serving, log

    _, serving, log = while_loop(lambda carry: carry[0], step, (goes_on(serving, log), serving, log))
    return serving, log


@jax.tree_util.Partial
def _no_model(tokens: jax.Array, pools: Pools, view: View, /, *, last: jax.Array | None) -> tuple[jax.Array, Pools]:
    """Chooses token 0 and writes nothing."""
    del view
    last = tokens if last is None else last
    return jnp.zeros((*last.shape, 1), jnp.float32), pools


def what_if(serving: Serving, *, scheduler: Scheduler, steps: int, now: int = 0) -> Requests:
    """Predicts the requests after some steps, if nothing is submitted or cancelled meanwhile. Jit it.

    The prediction is exact, except where it depends on tokens chosen by the model: stop tokens, and generated text
    found in the cache. Here the model always chooses token 0. Blocks on the host are not found. A prediction costs only
    the bookkeeping of the steps, and touches no K/V.

    Args:
      serving: the requests and their cache. Submit a batch to it first to see how the batch would run.
      scheduler: static; may differ from the running scheduler.
      steps: static; number of steps of the model.
      now: i32[] ms.
    """
    # No blocks move between the tiers, and a model with a single token has no alternatives to record.
    scheduler = dataclasses.replace(scheduler, preempt="recompute")
    top = serving.requests.top
    requests = serving.requests.replace(onboard=jnp.zeros_like(serving.requests.onboard), top=None)
    serving = without_pools(serving).replace(requests=requests, onboard_slot=jnp.int32(-1), host_pools=None)
    end = serving.steps + steps

    def run(serving: Serving) -> Serving:
        return serve(_no_model, serving, None, scheduler=scheduler, steps=end - serving.steps, now=now)[0]

    serving = while_loop(lambda serving: serving.busy & (serving.steps < end), run, serving)
    return serving.requests.replace(top=top)
