# SPDX-License-Identifier: Apache-2.0
"""Sampling inside the caller's program: arrays in, arrays out, as a training step wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import Pytree, pick, runs
from kvjax._compile import own_transfers
from kvjax.cache import Cache
from kvjax.checks import check_alive, each_row, integers, static_int
from kvjax.events.log import EventLog, Log, init_log
from kvjax.events.records import Status
from kvjax.model import Model, check_model, check_placement
from kvjax.serving.capacity import admission_events, worst_step
from kvjax.serving.constraints import initial_state
from kvjax.serving.decode import LogitsFn, note
from kvjax.serving.options import Scheduler
from kvjax.serving.preempt import retire
from kvjax.serving.requests import Finish, Serving, init_serving
from kvjax.serving.sampling import Sampling, check_logprobs, output_seeds
from kvjax.serving.serve import serve
from kvjax.serving.submit import cancel, submit
from kvjax.spec import CacheSpec
from pallas_kernels.loops import while_loop


class Rollout(Pytree):
    """G completions of each of B prompts, of up to T tokens.

    Attributes:
      tokens: i32[B, G, T]; the stop token included, 0 beyond the end.
      logprobs: f32[B, G, T]; of the tokens, 0 beyond the end.
      mask: bool[B, G, T]; whether there is a token.
      lengths: i32[B, G]; tokens.
      finish: i32[B, G]; why each ended, a `kvjax.serving.Finish`. CANCELLED: it got no row, or the log was full.
      cached: i32[B, G]; prompt tokens that were found in the cache.
      preemptions: i32[B, G]; how often each had to give its row up and wait again.
      rows: i32[B, G]; with `hold` the row that still has each completion, but for its last token; else -1.
    """

    tokens: jax.Array
    logprobs: jax.Array
    mask: jax.Array
    lengths: jax.Array
    finish: jax.Array
    cached: jax.Array
    preemptions: jax.Array
    rows: jax.Array


@own_transfers()
def rollout(
    model: Model,
    cache: Cache,
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
    hold: bool = False,
    continues: ArrayLike | None = None,
    logprobs: Literal["sampling", "raw"] = "sampling",
    logits_fn: LogitsFn | None = None,
    logits_state: Any = None,
    scheduler: Scheduler | None = None,
    log: Log = None,
    now: Any = 0,
) -> tuple[Rollout, Cache, Log]:
    """Samples completions of prompts inside a program: pure, for `jit`, `vmap` and `shard_map`.

    A prompt is computed once for its samples, and what the cache has of it not at all. Rows that others have are left
    alone. New weights need a namespace of their own (`Namespaces`), or K/V of the old ones are found; its number is an
    array, so that they compile nothing.

    Args:
      model: see `step`.
      cache: on the device alone; donate it.
      prompts: i32[B, P]; padded with valid ids.
      lengths: i32[B]; tokens of each prompt, at the front of its row. None: `mask` says which they are.
      max_new_tokens: T, static.
      samples: G, static; completions of each prompt.
      mask: bool[B, P]; the tokens of each prompt, which stand together: at the end of a row that is padded on the left.
      sampling: leaves [] or [B]; None: temperature 1.
      seed: i32[], u32[] or a jax key, which gives each completion a random stream of its own; see `generate`.
      seeds: u32[B, G]; the streams themselves, as in `kvjax.serving.Request`.
      stop_tokens: i32[K]; end a completion.
      namespace: i32[] or i32[B].
      hold: static; whether completions hold their rows, so that nothing evicts them before the next turn. All B * G
        need a row then.
      continues: i32[...]; rows that an earlier rollout holds, -1 for none. They are released first: a prompt that
        begins with the text of one, such as that with a tool's answer behind it, finds all of it.
      logprobs: static; "sampling": of the distribution that a token was drawn from, after temperature, top-k, top-p
        and min-p, 0 where the choice is greedy. "raw": of the logits as they came.
      logits_fn: (logits f32[S, V], last tokens i32[S], positions i32[S]) -> logits, such as of `constrain`. Called once
        for each token, with the token before it. Pass a pytree of arrays, as a constraint is, to your program as an
        argument: a closed-over one is a constant of it.
      logits_state: a tree of arrays [B, ...], such as the state of a grammar. Each completion begins with its
        prompt's, and `logits_fn` gets those of the rows [S, ...] as a fourth argument and returns (logits, new ones).
        None: for all prompts the `initial_state` of `logits_fn`, if it has one.
      scheduler: static; None: `Scheduler()`. With its option `canonical` a completion is the same bits whatever the
        cache has and whoever runs beside it.
      log: of `rollout_log`, takes the events; if it has no space for the next step's, the rollout ends. None: nobody
        wants them.
      now: i32[] ms.

    Returns:
      The completions; the cache, with everything released and cached; and the log. A prompt that cannot be served
      ends with a `finish` that says why.

    Raises:
      ValueError: while tracing, naming the argument.

    Source: TensorRT-LLM's and vLLM's parallel sampling, which share a prompt's blocks among its samples.
    """
    prompts, start, lengths = checked_prompts(model, cache, prompts, lengths, mask)
    number, width = prompts.shape
    groups, most = static_int("samples", samples, 1), static_int("max_new_tokens", max_new_tokens, 1)
    scheduler, spec = Scheduler() if scheduler is None else scheduler, cache.state.spec
    if not isinstance(scheduler, Scheduler):
        raise ValueError(f"scheduler: got {scheduler!r:.80}, wanted a kvjax.serving.Scheduler or None")
    check_logprobs(logprobs)
    if logits_state is None:
        logits_state = jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *np.shape(x))), initial_state(logits_fn))
    _check(spec, scheduler, (number, groups), hold, logits_state)
    if continues is not None:
        cache, events = cache.release(jnp.reshape(integers("continues", continues), -1), now=now)
        log = note(log, events)
    lengths = jnp.where(lengths <= width, lengths, 0)  # more tokens than there are: refused, as none are
    outputs = number * groups

    def each(values: Any) -> Any:
        return jax.tree.map(lambda x: jnp.repeat(x, groups, axis=0), values)

    entry, leader = np.arange(outputs, dtype=np.int32), _leaders(cache, number, groups)
    stop = integers("stop_tokens", stop_tokens if np.size(stop_tokens) else np.zeros(0, np.int32), ("K",))
    sampling = (Sampling(temperature=1.0) if sampling is None else sampling).each_row(number)
    slots = {"num_stop_tokens": max(stop.shape[0], 1), "logprobs": logprobs, "logits_state": each(logits_state)}
    serving = init_serving(cache, [width + most] * outputs, min_p=sampling.min_p is not None, **slots)
    requests = serving.requests.replace(onboard=jnp.zeros_like(serving.requests.onboard))
    serving = serving.replace(requests=requests, held=jnp.full((outputs,), -1, jnp.int32) if hold else None)
    serving, status, _, generations = submit(
        serving, _flat(prompts, each(start), each(lengths), groups), each(lengths), jnp.full((outputs,), most),
        scheduler=scheduler, slots=entry, namespace=each(each_row("namespace", namespace, (number,))),
        seed=_seeds(seed, seeds, number, groups), sampling=each(sampling), stop_tokens=stop,
        sample_of=jnp.where(leader < entry, leader, -1), logits_state=each(logits_state),
    )  # fmt: skip
    serving, log = _run(model, serving, log, scheduler, logits_fn, generations, integers("now", now, ()))
    found = _completions(serving, status, each(lengths), most)
    return jax.tree.map(lambda x: x.reshape(number, groups, *x.shape[1:]), found), serving.cache, log


def _leaders(cache: Cache, number: int, groups: int) -> jax.Array:
    """i32[B * G]; for each completion the first one that it runs together with.

    That is the first of its prompt. Where others have rows, a prompt has several such groups, one after the other.
    """
    free = jnp.maximum(jnp.sum(cache.state.seqs.length == 0, dtype=jnp.int32), 1)
    behind = jnp.tile(np.arange(groups, dtype=np.int32) % free, number)
    return jnp.arange(number * groups, dtype=jnp.int32) - behind


def _run(
    model: Model,
    serving: Serving,
    log: Log,
    scheduler: Scheduler,
    logits_fn: LogitsFn | None,
    generations: jax.Array,
    now: jax.Array,
) -> tuple[Serving, Log]:
    """Steps until all requests are over; where no row is free or the log is full, what is left is cancelled."""

    def turn(carry):
        serving, log, _ = carry
        steps = serving.steps
        serving, log = serve(model, serving, log, scheduler=scheduler, steps=1 << 30, logits_fn=logits_fn, now=now)
        # A loop also ends where blocks were refused though counted; the next one preempts.
        return serving, log, serving.busy & ((serving.steps > steps) | (serving.refused == 1))

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
    """A log that holds the events of a rollout in ordinary use: those of all blocks, each stored and removed twice.

    Args:
      spec: of the cache.
      prompts: (B, P).
      max_new_tokens: T.
      samples: G.
      scheduler: the rollout's.
    """
    scheduler, (number, width) = Scheduler() if scheduler is None else scheduler, prompts
    blocks = number * samples * (-(-(width + max_new_tokens) // spec.block_size) + 1)
    spare = worst_step(spec, scheduler) + admission_events(spec, min(width + max_new_tokens, spec.max_length))
    capacity = 4 * blocks * len(spec.groups) + spare
    return init_log(capacity, spec.block_size, spec.extra_ids, spec.has_recurrent)


def _check(spec: CacheSpec, scheduler: Scheduler, outputs: tuple[int, int], hold: bool, logits_state: Any) -> None:
    """Refuses options that do not fit the cache, or that are not those of `outputs`, (B, G)."""
    number, groups = outputs
    scheduler.check(spec)
    if scheduler.preempt == "swap":
        raise ValueError("scheduler: got preempt='swap', wanted 'recompute' (a program moves nothing)")
    if groups * (number if hold else 1) > spec.max_seqs:
        of = f" of each of {number} prompts with hold=True" if hold else ""
        raise ValueError(f"samples: got {groups}{of}, wanted at most the {spec.max_seqs} rows of the cache")
    for path, leaf in jax.tree_util.tree_leaves_with_path(logits_state):
        if jnp.shape(leaf)[:1] != (number,):
            name = f"logits_state{jax.tree_util.keystr(path)}"
            raise ValueError(f"{name}: got shape {list(jnp.shape(leaf))}, wanted [{number}, ...]")


def checked_prompts(
    model: Model, cache: Any, prompts: Any, lengths: Any, mask: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prompts i32[B, P], the start of each in its row i32[B], and its number of tokens i32[B].

    Raises:
      ValueError: naming the argument; also for a model that does not fit, a cache with a host tier, or a donated one.
    """
    check_model(model)
    check_placement(model, cache)
    if not isinstance(cache, Cache):
        raise ValueError(f"cache: got a {type(cache).__name__}, wanted a kvjax.Cache (a program moves nothing)")
    check_alive(cache)
    prompts = integers("prompts", prompts, ("B", "P"))
    number, width = prompts.shape
    if (lengths is None) == (mask is None):
        raise ValueError(f"lengths: got {'none' if lengths is None else 'both it and mask'}, wanted it or mask")
    if mask is None:
        return prompts, jnp.zeros((number,), jnp.int32), integers("lengths", lengths, (number,))
    mask = jnp.asarray(mask)
    if mask.shape != (number, width) or mask.dtype != jnp.bool_:
        raise ValueError(f"mask: got {mask.dtype}{list(mask.shape)}, wanted bool[{number}, {width}]")
    return prompts, jnp.argmax(mask, axis=1).astype(jnp.int32), jnp.sum(mask, axis=1, dtype=jnp.int32)


def _flat(prompts: jax.Array, start: jax.Array, lengths: jax.Array, groups: int) -> jax.Array:
    """i32[B * G * P]; the prompt of each completion, one after the other."""
    number, width = prompts.shape
    lengths = jnp.maximum(lengths, 0)
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    index = jnp.arange(number * groups * width, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    offset = index - pick(ends - lengths, owner)
    return pick(prompts.reshape(-1), owner // groups * width + pick(start, owner) + offset)


def _seeds(seed: Any, seeds: Any, number: int, groups: int) -> jax.Array:
    """u32[B * G]; the random stream of each completion."""
    if seeds is None:
        return output_seeds(seed, number * groups)
    seeds = jnp.asarray(seeds)
    if seeds.shape != (number, groups) or not jnp.issubdtype(seeds.dtype, jnp.integer):
        raise ValueError(f"seeds: got {seeds.dtype}{list(seeds.shape)}, wanted u32[{number}, {groups}]")
    return seeds.reshape(-1).astype(jnp.uint32)


def _completions(serving: Serving, status: jax.Array, lengths: jax.Array, most: int) -> Rollout:
    """The completions of the requests, in the slots of their entries; [B * G, ...]."""
    requests = serving.requests
    served = status == Status.OK
    count = jnp.where(served, requests.num_tokens - lengths, 0)
    mask = jnp.arange(most, dtype=jnp.int32)[None] < count[:, None]
    at = runs(requests.start + lengths, most)
    finish = jnp.where(served, requests.finish, int(Finish.CANCELLED))
    for refusal in (Status.BAD_REQUEST, Status.ROW_FULL, Status.NO_BLOCKS):
        finish = jnp.where(status == refusal, int(Finish[refusal.name]), finish)
    return Rollout(
        tokens=jnp.where(mask, pick(requests.text, at), 0),
        logprobs=jnp.where(mask, pick(requests.logprobs, at), 0.0),
        mask=mask, lengths=count, finish=finish, cached=jnp.where(served, requests.cached, 0),
        preemptions=jnp.where(served, requests.preemptions, 0),
        rows=jnp.full_like(status, -1) if serving.held is None else serving.held,
    )  # fmt: skip
