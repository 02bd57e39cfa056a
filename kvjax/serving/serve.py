# SPDX-License-Identifier: Apache-2.0
"""A step of the scheduler, and a loop of them as one program.

    retire    requests that are over leave their rows; others are preempted if the next tokens do not fit
    grow      rows that decode get blocks for their next tokens
    admit     waiting requests get free rows
    compute   either a mixed step, one token of every decode row and chunks of prompts as one flat batch; or a block of
              up to k decode steps
    choose    rows whose tokens are all computed choose the next one; some requests are over then

A part that is not needed is a loop that does not turn. A branch would copy the pools.
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
from kvjax.serving.capacity import admission_events, worst_step
from kvjax.serving.decode import Chooser, Chosen, LogitsFn, Written, compute, grow, note, rows_of
from kvjax.serving.options import Scheduler
from kvjax.serving.preempt import Retired, retire, swaps
from kvjax.serving.prefill import Chunks, commit_step, fork_samples, mixed_step
from kvjax.serving.requests import Finish, Requests, Serving, Stage
from pallas_kernels.loops import while_loop


class Served(Pytree):
    """The result of a step of the scheduler."""

    retired: Retired
    admitted: Admitted
    n: jax.Array  # i32[]; decode steps for which there were blocks; 0 if they were refused
    mixed: jax.Array  # bool[]; whether it was a mixed step
    chunks: Chunks
    chosen: Chosen  # k columns


def serve_step(
    model: Model,
    serving: Serving,
    log: Log,
    *,
    scheduler: Scheduler,
    steps: int | jax.Array | None = None,
    logits_fn: LogitsFn | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Serving, Log, Served]:
    """One step of the scheduler; jit it, and donate `serving` and `log`.

    Args:
      model: see `kvjax.step`.
      serving: the requests and their cache.
      log: takes the events; it has room for `worst_step` of them. None: nobody wants them.
      scheduler: static.
      steps: i32[]; the most decode steps; None: those of a block.
      logits_fn: see `RunOptions`.
      fixed_steps: static; see `RunOptions`.
      now: i32[] ms.
    """
    spec, now = serving.cache.state.spec, integers("now", now, ())
    k, log_room = scheduler.most_steps(spec), worst_step(spec, scheduler)
    serving, log, retired = retire(serving, log, scheduler, now)
    tried = _tries(serving, scheduler, retired)
    single = _has_chunks(serving, scheduler) | tried
    most = k if steps is None else steps
    serving, extended, n, new = grow(serving, scheduler, k, most, single, num_free(log) - log_room, now)
    log = once(single, lambda log: note(log, extended), log)  # else there are no events between these and the commit's
    serving, log, admitted = admit(serving, log, scheduler, tried, log_room, now)

    seqs, mixed = serving.cache.state.seqs, _has_chunks(serving, scheduler)
    decode = serving.decoding & (seqs.length > seqs.committed)
    # Whether rows that decode are computed together with the chunks; else behind them, by the program of a block.
    joint, with_chunks = (jnp.bool_(False), jnp.zeros_like(decode)) if scheduler.canonical else (mixed, decode)
    serving, log, chunks, chosen = mixed_step(
        model, serving, log, scheduler, mixed, with_chunks, k, logits_fn=logits_fn, now=now
    )
    after_chunks = jnp.where(joint, 0, jnp.maximum(n, 1))
    new = jnp.where(decode, jnp.maximum(new, 1), 0)  # a row that was just admitted has a slot for one token
    requests, rows = fence(serving.requests, rows_of(serving, decode))  # it has read the text that is written below
    serving, cache = serving.replace(requests=requests), serving.cache

    def block(carry: tuple[Pools, Written]) -> tuple[Pools, Written]:
        at, choose = cache.replace(pools=carry[0]), Chooser.of(serving, logits_fn)
        pools, _, written = compute(
            model, at, rows, new, after_chunks, choose, k, fixed_steps, fixed_split=scheduler.canonical
        )
        return pools, written

    start = cache.pools, Written(jnp.zeros_like(new), Chosen.none(new.shape[0], k, requests.num_top), rows.state)
    pools, written = once(jnp.any(decode & ~joint), block, start) if fixed_steps else block(start)
    serving = serving.with_logits_state(written.state)
    wrote = jnp.where(joint, decode.astype(jnp.int32), written.count)
    chosen = Chosen(jnp.where(~decode[:, None] if scheduler.canonical else mixed, chosen.bits, written.chosen.bits))
    state, committed = commit_step(cache.state, chunks, scheduler, wrote, written.text(rows.token), now)
    cache = Cache(state, pools)
    if k > 1:
        cache, _ = cache.trim(decode, max_tokens=k)
    serving = serving.replace(cache=cache, dirty=serving.dirty | mixed)
    if scheduler.coalesce > 1:
        chunks_deferred = jnp.where(mixed | ~jnp.any(serving.prefilling), 0, serving.chunks_deferred + 1)
        serving = serving.replace(chunks_deferred=chunks_deferred)
    serving = record(serving, chosen, jnp.where(mixed, 1, jnp.max(wrote)))
    extended = extended.replace(records=jnp.where(single, int(EventKind.NONE), extended.records))
    return serving, note(log, extended, committed), Served(retired, admitted, n, mixed, chunks, chosen)


def _tries(serving: Serving, scheduler: Scheduler, retired: Retired) -> jax.Array:
    """bool[]; whether to look for requests to admit: some wait, and there may be a row and blocks."""
    waits = jnp.any(serving.requests.waiting)
    tries = serving.dirty & waits & jnp.any(serving.free) & (retired.preempted[0] < 0)
    tries = tries & ~jnp.any((serving.row >= 0) & serving.cache.state.seqs.swapped_out)
    return tries & ~jnp.any(serving.row >= 0) if scheduler.reserve == "batch" else tries


def _has_chunks(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """bool[]; whether a mixed step comes next: enough rows prefill, or waited long enough, or nobody decodes."""
    rows = serving.prefilling
    if scheduler.coalesce == 1:
        return jnp.any(rows)
    enough = (count(rows) >= scheduler.coalesce) | (serving.chunks_deferred >= scheduler.coalesce)
    return jnp.any(rows) & (enough | ~jnp.any(serving.decoding))


def record(serving: Serving, chosen: Chosen, steps: jax.Array) -> Serving:
    """Adds the choices of so many steps i32[] to the requests' tokens; those that ended so are done."""
    requests, request, row, tokens = serving.requests, serving.by_row, serving.row, chosen.tokens
    real = tokens >= 0
    new = jnp.sum(real, axis=1, dtype=jnp.int32)
    any_chosen, num_tokens = new > 0, request.num_tokens + new
    at = runs(request.start + request.num_tokens, tokens.shape[1])
    final = pick(tokens, (np.arange(new.size, dtype=np.int32), jnp.maximum(new - 1, 0)))
    stopped = any_chosen & jnp.any(final[:, None] == request.stop, axis=1)
    over = stopped | (any_chosen & (num_tokens >= request.max_tokens))
    begins = any_chosen & (request.num_tokens == request.prompt)
    requests = requests.replace(
        text=put(requests.text, at, tokens, real), logprobs=put(requests.logprobs, at, chosen.logprobs, real)
    )
    if requests.top is not None:
        requests = requests.replace(top=put(requests.top, at, chosen.top, real))
    serving = serving.replace(requests=requests.at(row, any_chosen, num_tokens=num_tokens))

    def mark(serving: Serving) -> Serving:
        """Notes which rows have their first token, forks samples off them, and notes which are over."""
        serving = fork_samples(serving, begins)
        requests = serving.requests.at(row, begins, first_token=serving.steps + 1)  # one is chosen in each step
        requests = requests.at(
            row, over, stage=int(Stage.DONE), ended=serving.steps + new,
            finish=jnp.where(stopped, int(Finish.STOP), int(Finish.LENGTH)),
        )  # fmt: skip
        return serving.replace(requests=requests, dirty=serving.dirty | jnp.any(begins))

    serving = once(jnp.any(begins | over), mark, serving)
    return serving.replace(steps=serving.steps + steps)


def serve(
    model: Model,
    serving: Serving,
    log: Log,
    *,
    scheduler: Scheduler,
    steps: int | jax.Array,
    logits_fn: LogitsFn | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Serving, Log]:
    """Steps until all requests are over, the model has run so often, or the log may not hold another step's events.

    With a host tier also until a request could have blocks that are on the host (`serving.onboard_slot` names it),
    until a row is to be swapped out or in (`preempt.swaps`), or until blocks are refused though counted
    (`serving.refused` is 1): a loop does not evict those with children on the host. Empty some (`watermark`) and set it
    to 0, or the next step preempts.

    `steps` are the most of the model, and `now` is the same for all of them. Without a log no loop ends for it. The
    other arguments are those of `serve_step`.
    """
    spec, end = serving.cache.state.spec, serving.steps + steps
    worst, one_admission = worst_step(spec, scheduler), admission_events(spec, serving.width)

    def going(serving: Serving, log: Log) -> jax.Array:
        more = serving.busy & (serving.onboard_slot < 0) & ~swaps(serving, scheduler).any
        return more & (serving.steps < end) & (num_free(log) >= worst + one_admission)

    def step(carry):
        _, serving, log = carry
        serving, log, _ = serve_step(
            model, serving, log, scheduler=scheduler, steps=end - serving.steps, logits_fn=logits_fn,
            fixed_steps=fixed_steps, now=now,
        )  # fmt: skip
        return going(serving, log) & (serving.refused != 1), serving, log

    _, serving, log = while_loop(lambda carry: carry[0], step, (going(serving, log), serving, log))
    return serving, log


@jax.tree_util.Partial
def _no_model(tokens: jax.Array, pools: Pools, view: View, /, *, last: jax.Array | None) -> tuple[jax.Array, Pools]:
    """Chooses token 0 and writes nothing."""
    del view
    last = tokens if last is None else last
    return jnp.zeros((*last.shape, 1), jnp.float32), pools


def what_if(serving: Serving, *, scheduler: Scheduler, steps: int, now: int = 0) -> Requests:
    """The requests as they would be after some steps, if nobody submitted or cancelled anything; jit it.

    When each is admitted, with how many cached tokens, and when it ends are as they will be, but for what depends on
    the tokens that a model chooses: stop tokens, and generated text that is found in the cache. Here it chooses 0.
    Blocks on the host are not found. Costs the bookkeeping of the steps, and no bytes.

    Args:
      serving: the requests and their cache; a batch that is only considered can be submitted to it first.
      scheduler: static; perhaps another than the one that runs.
      steps: static; of the model.
      now: i32[] ms.
    """
    spec, state = serving.cache.state.spec, serving.cache.state
    groups = tuple(dataclasses.replace(group, pools=()) for group in spec.groups)
    pools = Pools(tuple(() for _ in groups), dataclasses.replace(spec, groups=groups))
    # No blocks come from the host or go there, and a model of one token has no others that are likely.
    scheduler, top = dataclasses.replace(scheduler, preempt="recompute"), serving.requests.top
    requests = serving.requests.replace(onboard=jnp.zeros_like(serving.requests.onboard), top=None)
    serving = serving.replace(cache=Cache(state, pools), requests=requests, onboard_slot=jnp.int32(-1))
    end = serving.steps + steps

    def run(serving: Serving) -> Serving:
        return serve(_no_model, serving, None, scheduler=scheduler, steps=end - serving.steps, now=now)[0]

    serving = while_loop(lambda serving: serving.busy & (serving.steps < end), run, serving)
    return serving.requests.replace(top=top)
