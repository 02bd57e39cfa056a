# SPDX-License-Identifier: Apache-2.0
"""Samples inside the caller's program, such as a training step, from arrays to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import Pytree, pick, put, runs
from kvjax._compile import own_transfers
from kvjax.cache import AnyCache, Cache
from kvjax.checks import check_alive, each_row, integers, static_int
from kvjax.events.log import EventLog, Log, init_log
from kvjax.events.records import Status
from kvjax.model import Model, check_model, check_placement
from kvjax.serving.capacity import admission_events, worst_step
from kvjax.serving.constraints import initial_state
from kvjax.serving.decode import LogitsFn, append_events
from kvjax.serving.options import Scheduler
from kvjax.serving.preempt import retire
from kvjax.serving.program_tier import backup_events
from kvjax.serving.requests import Finish, Serving, Stage, init_serving
from kvjax.serving.sampling import Sampling, check_logprobs, output_seeds
from kvjax.serving.serve import serve
from kvjax.serving.speculation import Drafter
from kvjax.serving.submit import cancel, submit
from kvjax.spec import CacheSpec
from kvjax.tiered import joined
from pallas_kernels.loops import while_loop


class Rollout(Pytree):
    """G completions of each of B prompts, of up to T tokens.

    Attributes:
      tokens: i32[B, G, T]; includes the stop token, and is 0 beyond the end.
      logprobs: f32[B, G, T]; log-probabilities of the tokens, 0 beyond the end.
      mask: bool[B, G, T]; whether there is a token.
      lengths: i32[B, G]; number of tokens.
      finish: i32[B, G]; reason for the end, a `kvjax.serving.Finish`. CANCELLED means no row was free, or the log was
        full. NONE means the completion goes on after `max_steps`.
      cached: i32[B, G]; number of prompt tokens found in the cache.
      preemptions: i32[B, G]; number of times the completion gave its row up and waited again.
      rows: i32[B, G]; with `keep_rows` the row with the completion, without its last token, or -1.
      versions: i32[B, G, T]; number of the weights that chose each token, 0 beyond the end. None without a `version`.
      logits_state: a tree of arrays [B, G, ...]; state of `logits_fn` after each completion. None without `max_steps`
        or without a state.
    """

    tokens: jax.Array
    logprobs: jax.Array
    mask: jax.Array
    lengths: jax.Array
    finish: jax.Array
    cached: jax.Array
    preemptions: jax.Array
    rows: jax.Array
    versions: jax.Array | None = None
    logits_state: Any = None


@own_transfers()
def rollout[C: AnyCache](
    model: Model,
    cache: C,
    prompts: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    max_new_tokens: int,
    samples: int = 1,
    mask: ArrayLike | None = None,
    sampling: Sampling | None = None,
    seed: ArrayLike = 0,
    seeds: ArrayLike | None = None,
    stop_tokens: Sequence[int] | jax.Array = (),
    namespace: ArrayLike = 0,
    keep_rows: bool = False,
    resume_rows: ArrayLike | None = None,
    resume: Rollout | None = None,
    max_steps: ArrayLike | None = None,
    version: ArrayLike | None = None,
    logprobs: Literal["sampling", "raw"] = "sampling",
    logits_fn: LogitsFn | None = None,
    logits_state: Any = None,
    drafter: Drafter | None = None,
    scheduler: Scheduler | None = None,
    log: Log = None,
    now: Any = 0,
) -> tuple[Rollout, C, Log]:
    """Samples completions of prompts inside a program. It is pure, so it runs under `jit`, `vmap` and `shard_map`.

    A prompt is computed once for its samples, without its cached part. Rows in use are left alone. Give new weights a
    new namespace (`Namespaces`). Otherwise, K/V of the old weights are reused. The namespace's number is an array, so a
    new namespace compiles nothing.

    Args:
      model: see `step`.
      cache: the cache. Donate it. With a `TieredCache` with backups (`make_spec`) the program itself moves blocks
        between the tiers. With a `Cache` it moves nothing.
      prompts: i32[B, P]; padded with valid ids.
      lengths: i32[B]; number of tokens of each prompt, at the front of its row. With None, `mask` marks the tokens.
      max_new_tokens: T, static.
      samples: G, static; completions of each prompt.
      mask: bool[B, P]; marks the tokens of each prompt, which are contiguous, such as the end of a row padded on the
        left.
      sampling: leaves [] or [B]. None means temperature 1.
      seed: i32[], u32[] or a jax key, which gives each completion a separate random stream; see `generate`.
      seeds: u32[B, G]; the streams themselves, as in `kvjax.serving.Request`.
      stop_tokens: i32[K]; tokens ending a completion.
      namespace: i32[] or i32[B].
      keep_rows: static; whether completions keep their rows, so nothing evicts them before your next call. All B * G
        completions need a row then.
      resume_rows: i32[...]; rows kept by an earlier rollout, padded with -1. They are released first, so a prompt
        that begins with the text of such a row, for example followed by a tool's answer, finds the whole text cached.
      resume: the completions so far, of a rollout of the same prompts and streams that ended after `max_steps`. Its
        tokens stay, whatever weights chose them, and unfinished completions go on. Their K/V are found in the cache, or
        computed with these weights. None begins with the prompts.
      max_steps: i32[]; steps of the model after which the rollout ends. Unfinished completions are released and cached:
        `resume` them. None means no limit.
      version: i32[]; number of the weights, for `versions` of the new tokens. None notes no versions.
      logprobs: static; "sampling" for the distribution that a token was drawn from, after temperature, top-k, top-p and
        min-p, with 0 for greedy choices; "raw" for the logits as the model returned them.
      logits_fn: (logits f32[S, V], last tokens i32[S], positions i32[S]) -> logits, such as `constrain` makes. It is
        called once for each token, with the token before it. Pass a pytree of arrays, such as a constraint, to your
        program as an argument: if you close over it, it becomes a constant of the program.
      logits_state: a tree of arrays [B, ...], such as the state of a grammar. Each completion begins with its prompt's
        state. `logits_fn` gets the states of the rows [S, ...] as a fourth argument and returns (logits, new states).
        None means the `initial_state` of `logits_fn`, if it has one.
      drafter: guesses the next tokens; see `RunOptions`. None disables it.
      scheduler: static. None means `Scheduler()`. With its option `canonical`, the bits of a completion depend neither
        on the cache nor on other requests.
      log: a `rollout_log` for the events. The rollout ends if the log may be too small for the next step. None disables
        events.
      now: i32[] ms.

    Returns:
      The completions, the cache with everything released and cached, and the log. A prompt that cannot be served ends
      with a `finish` that gives the reason.

    Raises:
      ValueError: while tracing, naming the argument.

    Source: TensorRT-LLM's and vLLM's parallel sampling, which share a prompt's blocks among its samples.
    """
    prompts, start, lengths = checked_prompts(model, cache, prompts, lengths, mask, AnyCache)
    num_prompts, width = prompts.shape
    num_samples = static_int("samples", samples, 1)
    max_new = static_int("max_new_tokens", max_new_tokens, 1)
    scheduler = Scheduler() if scheduler is None else scheduler
    check_logprobs(logprobs)
    logits_state = _first_states(logits_fn, num_prompts) if logits_state is None else logits_state
    _check(cache.state.spec, scheduler, (num_prompts, num_samples), keep_rows, logits_state)
    if resume_rows is not None:
        cache, log = _without_rows(cache, integers("resume_rows", resume_rows), log, now)
    lengths = jnp.where(lengths <= width, lengths, 0)  # too many tokens are refused, like none
    num_outputs = num_prompts * num_samples

    def each(values: Any) -> Any:
        """Repeats values of the prompts for each of their samples."""
        return jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0), values)

    entry = np.arange(num_outputs, dtype=np.int32)
    stop_ids = integers("stop_tokens", stop_tokens if np.size(stop_tokens) else np.zeros(0, np.int32), ("K",))
    sampling = (Sampling(temperature=1.0) if sampling is None else sampling).each_row(num_prompts)

    serving = init_serving(
        cache,
        [width + max_new] * num_outputs,
        num_stop_tokens=max(stop_ids.shape[0], 1),
        logprobs=logprobs,
        logits_state=each(logits_state),
        min_p=sampling.min_p is not None,
        speculates=drafter is not None,
    )
    requests = serving.requests.replace(onboard=jnp.zeros_like(serving.requests.onboard))
    serving = serving.replace(requests=requests, kept_rows=jnp.full_like(entry, -1) if keep_rows else None)

    serving, status, _, generations = submit(
        serving,
        _flat(prompts, each(start), each(lengths), num_samples),
        each(lengths),
        jnp.full((num_outputs,), max_new),
        scheduler=scheduler,
        slots=entry,
        namespace=each(each_row("namespace", namespace, (num_prompts,))),
        seed=_seeds(seed, seeds, num_prompts, num_samples),
        sampling=each(sampling),
        stop_tokens=stop_ids,
        sample_of=_leaders(cache, num_prompts, num_samples),
        logits_state=each(logits_state),
    )

    if resume is not None:
        resume = _flat_completions(resume, (num_prompts, num_samples), max_new)
        serving = _resumed(serving, status == Status.OK, each(lengths), resume)
    end = None if max_steps is None else integers("max_steps", max_steps, ())
    serving, log = _run(model, serving, log, scheduler, logits_fn, drafter, generations, integers("now", now, ()), end)
    flat = _completions(serving, status, each(lengths), max_new)
    flat = _with_versions(flat, resume, None if version is None else integers("version", version, ()))
    if end is not None:
        flat = _resumable(flat, serving, (status == Status.OK) & (serving.steps >= end))
    completions = jax.tree.map(lambda x: x.reshape(num_prompts, num_samples, *x.shape[1:]), flat)
    return completions, cast(C, joined(serving.cache, serving.host_pools)), log


def _resumable(flat: Rollout, serving: Serving, has_ended: jax.Array) -> Rollout:
    """Leaves completions that the last step cut off, where bool[B * G], without a `finish` and with their states."""
    is_cut_off = (flat.finish == Finish.CANCELLED) & has_ended
    finish = jnp.where(is_cut_off, int(Finish.NONE), flat.finish)
    return flat.replace(finish=finish, logits_state=serving.requests.logits_state)


def _with_versions(flat: Rollout, resume: Rollout | None, version: jax.Array | None) -> Rollout:
    """Adds the version i32[] of the new tokens, and what the completions so far already had."""
    versions = None if version is None else jnp.where(flat.mask, version, 0)
    if resume is None:
        return flat.replace(versions=versions)
    if versions is not None:
        earlier = jnp.zeros_like(versions) if resume.versions is None else resume.versions
        versions = jnp.where(resume.mask, earlier, versions)
    cached = jnp.where(resume.lengths > 0, resume.cached, flat.cached)
    return flat.replace(versions=versions, cached=cached, preemptions=flat.preemptions + resume.preemptions)


def _flat_completions(resume: Rollout, outputs: tuple[int, int], max_new: int) -> Rollout:
    """The completions so far with axes [B * G, ...], for up to `max_new` tokens."""
    if not isinstance(resume, Rollout) or resume.tokens.ndim != 3 or resume.tokens.shape[:2] != outputs:
        got = f"shape {list(resume.tokens.shape)}" if isinstance(resume, Rollout) else f"{resume!r:.80}"
        raise ValueError(f"resume: got {got}, wanted a kvjax.serving.Rollout of {list(outputs)} completions")
    num_more = max_new - resume.tokens.shape[2]
    if num_more < 0:
        raise ValueError(f"max_new_tokens: got {max_new}, wanted at least those of resume, {resume.tokens.shape[2]}")

    def widened(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.pad(x, ((0, 0), (0, 0), (0, num_more)))

    columns = {name: widened(getattr(resume, name)) for name in ("tokens", "logprobs", "mask", "versions")}
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), resume.replace(**columns))


def _resumed(serving: Serving, served: jax.Array, lengths: jax.Array, resume: Rollout) -> Serving:
    """Gives the requests of the entries where bool[B * G] their tokens so far. Each computes its text on its own."""
    requests = serving.requests
    entry = jnp.arange(requests.size, dtype=jnp.int32)
    positions = runs(requests.start + lengths, resume.tokens.shape[1])
    where = resume.mask & served[:, None]
    text = put(requests.text, positions, resume.tokens, where)
    requests = requests.replace(text=text, logprobs=put(requests.logprobs, positions, resume.logprobs, where))
    requests = requests.at(entry, served, num_tokens=lengths + resume.lengths, parent=-1)
    if resume.logits_state is not None:
        requests = requests.at(entry, served, logits_state=resume.logits_state)
    is_over = served & (resume.finish != Finish.NONE) & (resume.finish != Finish.CANCELLED)
    requests = requests.at(entry, is_over, stage=int(Stage.DONE), finish=resume.finish)
    return serving.replace(requests=requests)


def _without_rows[C: AnyCache](cache: C, rows: jax.Array, log: Log, now: Any) -> tuple[C, Log]:
    """Releases rows i32[...], padded with -1."""
    released, events = cache.cache.release(jnp.reshape(rows, -1), now=now)
    return cast(C, joined(released, cache.host)), append_events(log, events)


def _first_states(logits_fn: LogitsFn | None, num_prompts: int) -> Any:
    """Repeats the `initial_state` of `logits_fn` for each prompt."""
    default = initial_state(logits_fn)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_prompts, *np.shape(x))), default)


def _leaders(cache: AnyCache, num_prompts: int, num_samples: int) -> jax.Array:
    """i32[B * G]; for each completion, the first completion running together with it, or -1 if it is the first itself.

    The first is the first sample of its prompt. If a prompt has more samples than there are free rows, they form
    several groups, which run in turn.
    """
    num_free = jnp.maximum(jnp.sum(cache.state.seqs.length == 0, dtype=jnp.int32), 1)
    distance = jnp.tile(np.arange(num_samples, dtype=np.int32) % num_free, num_prompts)
    leader = jnp.arange(num_prompts * num_samples, dtype=jnp.int32) - distance
    return jnp.where(distance > 0, leader, -1)


def _run(
    model: Model,
    serving: Serving,
    log: Log,
    scheduler: Scheduler,
    logits_fn: LogitsFn | None,
    drafter: Drafter | None,
    generations: jax.Array,
    now: jax.Array,
    max_steps: jax.Array | None,
) -> tuple[Serving, Log]:
    """Steps until all requests are over, and cancels the rest after `max_steps`, or if no row or log space is free."""

    def turn(carry):
        serving, log, _ = carry
        steps = serving.steps
        options: dict[str, Any] = {"scheduler": scheduler, "logits_fn": logits_fn, "drafter": drafter, "now": now}
        max_more = 1 << 30 if max_steps is None else max_steps - steps
        serving, log = serve(model, serving, log, steps=max_more, **options)
        # A loop also ends if blocks were refused in spite of the count. The next loop preempts.
        goes_on = serving.busy & ((serving.steps > steps) | (serving.refused == 1))
        return serving, log, goes_on if max_steps is None else goes_on & (serving.steps < max_steps)

    serving, log, _ = while_loop(lambda carry: carry[2], turn, (serving, log, jnp.bool_(True)))
    serving, _ = cancel(serving, np.arange(serving.requests.size, dtype=np.int32), generations)
    serving, log, _ = retire(serving, log, scheduler, now)
    return serving, log


def rollout_log(
    spec: CacheSpec,
    prompts: tuple[int, int],
    max_new_tokens: int,
    samples: int = 1,
    scheduler: Scheduler | None = None,
) -> EventLog:
    """Makes a log for the events of a rollout in ordinary use, where each block is stored and removed at most twice.

    Args:
      spec: spec of the cache.
      prompts: (B, P), the shape of the prompts.
      max_new_tokens: T.
      samples: G.
      scheduler: scheduler of the rollout.
    """
    scheduler = Scheduler() if scheduler is None else scheduler
    num_prompts, width = prompts
    num_blocks = num_prompts * samples * (-(-(width + max_new_tokens) // spec.block_size) + 1)
    longest = min(width + max_new_tokens, spec.max_length)
    spare = worst_step(spec, scheduler) + admission_events(spec, longest)
    spare += backup_events(spec, scheduler, longest) if spec.backups else 0
    capacity = 4 * num_blocks * len(spec.groups) + spare
    return init_log(capacity, spec.block_size, spec.extra_ids, spec.has_recurrent)


def _check(spec: CacheSpec, scheduler: Scheduler, outputs: tuple[int, int], keep_rows: bool, logits_state: Any) -> None:
    """Raises a ValueError for options that do not fit the cache, or the shape (B, G) of `outputs`."""
    num_prompts, num_samples = outputs
    if not isinstance(scheduler, Scheduler):
        raise ValueError(f"scheduler: got {scheduler!r:.80}, wanted a kvjax.serving.Scheduler or None")
    scheduler.check(spec)
    if scheduler.preempt == "swap":
        raise ValueError("scheduler: got preempt='swap', wanted 'recompute' (a program moves nothing)")
    if num_samples * (num_prompts if keep_rows else 1) > spec.max_seqs:
        prompts = f" of each of {num_prompts} prompts with keep_rows=True" if keep_rows else ""
        raise ValueError(f"samples: got {num_samples}{prompts}, wanted at most the {spec.max_seqs} rows of the cache")
    for path, leaf in jax.tree_util.tree_leaves_with_path(logits_state):
        if jnp.shape(leaf)[:1] != (num_prompts,):
            name = f"logits_state{jax.tree_util.keystr(path)}"
            raise ValueError(f"{name}: got shape {list(jnp.shape(leaf))}, wanted [{num_prompts}, ...]")


def checked_prompts(
    model: Model, cache: Any, prompts: Any, lengths: Any, mask: Any, kind: type[AnyCache] = Cache
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checks prompts. Returns them i32[B, P], with the start i32[B] and the number of tokens i32[B] of each in its row.

    Raises:
      ValueError: naming the argument; also if the model does not fit, or the cache has a host tier or was donated.
    """
    check_model(model)
    check_placement(model, cache)
    if not isinstance(cache, kind):
        raise ValueError(f"cache: got a {type(cache).__name__}, wanted a kvjax.Cache (a program moves nothing)")
    check_alive(cache)
    prompts = integers("prompts", prompts, ("B", "P"))
    num_prompts, width = prompts.shape
    if (lengths is None) == (mask is None):
        if lengths is None:
            raise ValueError("lengths: got None without a mask, wanted lengths or a mask")
        raise ValueError("lengths: got lengths together with a mask, wanted None")
    if mask is None:
        return prompts, jnp.zeros((num_prompts,), jnp.int32), integers("lengths", lengths, (num_prompts,))
    mask = jnp.asarray(mask)
    if mask.shape != (num_prompts, width) or mask.dtype != jnp.bool_:
        raise ValueError(f"mask: got {mask.dtype}{list(mask.shape)}, wanted bool[{num_prompts}, {width}]")
    return prompts, jnp.argmax(mask, axis=1).astype(jnp.int32), jnp.sum(mask, axis=1, dtype=jnp.int32)


def _flat(prompts: jax.Array, start: jax.Array, lengths: jax.Array, num_samples: int) -> jax.Array:
    """i32[B * G * P]; the prompts of the completions, concatenated."""
    num_prompts, width = prompts.shape
    lengths = jnp.maximum(lengths, 0)
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    index = jnp.arange(num_prompts * num_samples * width, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    offset = index - pick(ends - lengths, owner)
    return pick(prompts.reshape(-1), owner // num_samples * width + pick(start, owner) + offset)


def _seeds(seed: Any, seeds: Any, num_prompts: int, num_samples: int) -> jax.Array:
    """u32[B * G]; a random stream for each completion."""
    if seeds is None:
        return output_seeds(seed, num_prompts * num_samples)
    seeds = jnp.asarray(seeds)
    if seeds.shape != (num_prompts, num_samples) or not jnp.issubdtype(seeds.dtype, jnp.integer):
        raise ValueError(f"seeds: got {seeds.dtype}{list(seeds.shape)}, wanted u32[{num_prompts}, {num_samples}]")
    return seeds.reshape(-1).astype(jnp.uint32)


def _completions(serving: Serving, status: jax.Array, lengths: jax.Array, max_new: int) -> Rollout:
    """Reads the completions [B * G, ...] from the requests, which are in the slots of their entries."""
    requests = serving.requests
    served = status == Status.OK
    count = jnp.where(served, requests.num_tokens - lengths, 0)
    mask = jnp.arange(max_new, dtype=jnp.int32)[None] < count[:, None]
    positions = runs(requests.start + lengths, max_new)
    finish = jnp.where(served, requests.finish, int(Finish.CANCELLED))
    for refusal in (Status.BAD_REQUEST, Status.ROW_FULL, Status.NO_BLOCKS):
        finish = jnp.where(status == refusal, int(Finish[refusal.name]), finish)
    return Rollout(
        tokens=jnp.where(mask, pick(requests.text, positions), 0),
        logprobs=jnp.where(mask, pick(requests.logprobs, positions), 0.0),
        mask=mask,
        lengths=count,
        finish=finish,
        cached=jnp.where(served, requests.cached, 0),
        preemptions=jnp.where(served, requests.preemptions, 0),
        rows=jnp.full_like(status, -1) if serving.kept_rows is None else serving.kept_rows,
    )
