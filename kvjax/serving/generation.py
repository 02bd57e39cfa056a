# SPDX-License-Identifier: Apache-2.0
"""Generation as a user calls it: `generate`, `stream` and `run_batch`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kvjax._compile import own_transfers
from kvjax.blocks.keys import Namespaces
from kvjax.cache import Cache
from kvjax.checks import check_alive, check_functions
from kvjax.model import Model
from kvjax.policies.retention import Retention
from kvjax.serving.batch import Batch
from kvjax.serving.decode import LogitsFn
from kvjax.serving.inputs import Inputs, Listener, RunOptions
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler, with_canonical
from kvjax.serving.requests import Output
from kvjax.serving.sampling import Sampling
from kvjax.state import CacheState
from kvjax.stores.disk import DiskStore
from kvjax.tiered import TieredCache


@dataclasses.dataclass(frozen=True)
class Progress[C: (Cache, TieredCache)]:
    """The state of a generation after a jitted loop.

    Attributes:
      outputs: one per prompt, so far; the same objects every time.
      new: {prompt number: tokens since the last Progress}.
      events: decoded, since the last Progress.
      closing: decoded events of the releases when the stream is closed early; the same list every time.
    """

    outputs: list[Output]
    new: dict[int, list[int]]
    events: list[dict[str, Any]]
    closing: list[dict[str, Any]]
    _state: GenerationState[C] = dataclasses.field(repr=False, compare=False)

    @property
    def cache(self) -> C:
        """The latest cache, also after the stream was closed; earlier ones have been donated."""
        return self._state.result

    @property
    @own_transfers()
    def state(self) -> CacheState:
        """A copy of the latest cache's metadata, which no later loop donates: any thread may read it.

        Ask for it in the thread that reads the stream, before the next `Progress`.
        """
        state = self.cache.state
        check_alive(state)
        return jax.tree.map(jnp.copy, state)


def generate[C: (Cache, TieredCache)](
    model: Model,
    cache: C,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 32,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    seed: int | jax.Array | None = None,
    seeds: Sequence[int] | None = None,
    stop_tokens: Sequence[int] = (),
    namespaces: Sequence[int] | None = None,
    names: Namespaces | None = None,
    retention: Retention | Sequence[Retention | None] | None = None,
    clock: Callable[[], int] | None = None,
    logprobs: Literal["raw", "sampling"] = "raw",
    logits_fn: LogitsFn | None = None,
    canonical: bool = False,
    chunk: int = 128,
    steps: int = 32,
    k: int | None = None,
    fixed_steps: bool = False,
    log_events: bool = True,
    listener: Listener | None = None,
    store: DiskStore | None = None,
) -> tuple[list[Output], C, list[dict[str, Any]]]:
    """Generates for all prompts, as many at a time as there are rows and blocks.

    A prompt waits for a row and for the blocks of all that it can become; then nothing interrupts it. As soon as a row
    ends, the next prompt takes it. Prompts that share a prefix compute it once, also if they come together. A prompt
    that wants more than the whole cache holds ends with the tokens that fit, and finish "no_blocks". The options are
    those of the default `Scheduler`; `run_batch` takes others.

    The first call with a model and with new shapes compiles, which takes some 20 to 30 s on two CPU cores: more prompts
    or longer ones compile at each doubling. What takes over two seconds to compile is said in the log `kvjax`
    (`logging`, as information), and `keep_programs` keeps it for other processes.

    With new weights `reset` the cache, or give each version of them a namespace of its own (`Namespaces`): otherwise
    K/V of the old ones are reused, and nothing says so.

    Args:
      model: see `step`. It also gets views in mixed form, on one flat batch; see `Model`.
      cache: is donated: go on with the returned one. Rows in use already are left alone. With a host tier, prompts
        find blocks there too, and blocks that have to leave the device go there: before each loop those that rows may
        need as they grow, and between loops those that a prompt needs to be admitted. Blocks that a prompt longer than
        a window's blocks pushes out of them are lost. If a move between the tiers fails, a RuntimeWarning says so, and
        the lost K/V are computed again.
      prompts: token ids.
      max_new_tokens: for each prompt.
      sampling: for all prompts, or one for each; None: greedy. What a prompt gets does not depend on the others.
      seed: an int or a jax key, from which each output gets a random stream. 3, `jax.random.key(3)` and
        `jax.random.PRNGKey(3)` give the same ones. None: the same ones at every call.
      seeds: of each prompt's random stream; its number if None.
      stop_tokens: end a row when chosen.
      namespaces: of each prompt, as `Namespaces` numbers them; 0 if None.
      names: the `Namespaces` that gave them out; numbers that it did not are refused. None: any number will do.
      retention: of each prompt's blocks, or one for all prompts, where the spec has it.
      clock: () -> ms since any origin, such as `lambda: time.monotonic_ns() // 1_000_000`, an int; read at the start
        and before each jitted loop. None: the time is always 0, and no time to live ends.
      logprobs: static; "raw": log-probabilities of the logits as they came. "sampling": of the distribution that a
        token was drawn from, after temperature, top-k and top-p; 0 where the choice is greedy.
      logits_fn: static; (logits f32[S, V], last tokens i32[S], positions i32[S]) -> logits.
      canonical: whether the log-probabilities of a prompt's tokens, and so the tokens, are the same bits whatever the
        cache has and whoever runs beside it; see `Scheduler`. Reuse ends at multiples of `chunk` then.
      chunk: prompt tokens, of one row or of several, that a model call computes beside a token of each decoding row.
      steps: the most steps of the model in one jitted loop; between loops the clock is read, and Ctrl-C acts.
      k: the most steps for which the loop keeps the cache's books at once, 1 to P; P if None. What is chosen does not
        depend on it.
      fixed_steps: whether every block runs k steps of the model, even if fewer are wanted: for a GPU without command
        buffers, see `compiler_options`.
      log_events: whether to decode the events.
      listener: called on this thread with every `Events` and `EventLog` of the run, each once and in their order,
        whatever log_events is; such as `Publisher.publish` of `kvjax.interop.vllm`. It gets the events of a loop while
        the next one runs. It copies what it keeps: all of it may be donated next. Ctrl-C waits for it. An `Exception`
        that it raises is logged, and costs nothing: later, and at the run's end, it gets a snapshot in place of all
        that it has missed, see `kvjax.events.Listeners`. By another exception the run ends as by Ctrl-C. It must not
        read the cache, which the running loop has: to see its metadata beside the events, take `progress.state` of a
        `stream`.
      store: a `kvjax.stores.DiskStore`, for whole blocks of prompts that the cache lacks: what comes in time is taken,
        the rest is computed. What is computed is written to it. Waits for it at most its `patience_ms`, once.

    Returns:
      list of `Output`, one per prompt; the cache, with everything released and cached; and the decoded events.

    Raises:
      ValueError: before anything is donated: if the cache has pools for no layer or was donated before, the model is
        not as `step` wants it, an option is out of range or not given for each prompt, `names` did not give out a
        namespace, or the spec has no retention.
      GenerationInterrupted: from an error or Ctrl-C, with the cache to go on with. Ctrl-C waits until a jitted loop
        is done; a second one does not, and may cost the cache.
    """
    return run_batch(
        model, cache, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, seeds=seeds,
        stop_tokens=stop_tokens, namespaces=namespaces, names=names, retention=retention, logprobs=logprobs,
        scheduler=Scheduler(chunk=chunk, k=k, canonical=canonical), clock=clock, logits_fn=logits_fn, steps=steps,
        fixed_steps=fixed_steps, log_events=log_events, listener=listener, store=store,
    )  # fmt: skip


def stream[C: (Cache, TieredCache)](
    model: Model,
    cache: C,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 32,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    seed: int | jax.Array | None = None,
    seeds: Sequence[int] | None = None,
    stop_tokens: Sequence[int] = (),
    namespaces: Sequence[int] | None = None,
    names: Namespaces | None = None,
    retention: Retention | Sequence[Retention | None] | None = None,
    clock: Callable[[], int] | None = None,
    logprobs: Literal["raw", "sampling"] = "raw",
    logits_fn: LogitsFn | None = None,
    canonical: bool = False,
    chunk: int = 128,
    steps: int = 8,
    k: int | None = None,
    fixed_steps: bool = False,
    log_events: bool = True,
    listener: Listener | None = None,
    store: DiskStore | None = None,
) -> Generator[Progress[C], None, None]:
    """Generates for all prompts, handing out what is new after at most `steps` steps; the arguments are `generate`'s.

    `steps` decides how many tokens come at a time. Fewer come sooner, and cost a return to the host each.

    The cache is donated: use `progress.cache` from then on. A stream that is closed early, as by `break`, releases its
    rows, and `progress.cache` is the cache after that, unless a caller who went on with it has donated it. The listener
    has got the events of a loop when its `Progress` comes, and gets those of these releases. Errors and Ctrl-C are as
    in `generate`; while a `Progress` is read, Ctrl-C is the caller's.

    Yields:
      A `Progress`; the last one has every output finished and every row released.
    """
    options = RunOptions(
        Scheduler(chunk=chunk, k=k, canonical=canonical), steps=steps, fixed_steps=fixed_steps, clock=clock,
        logits_fn=logits_fn, log_events=log_events, listener=listener, logprobs=logprobs, store=store,
    )  # fmt: skip
    inputs = Inputs(
        model, cache, options, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, seeds=seeds,
        stop_tokens=stop_tokens, namespaces=namespaces, names=names, retention=retention,
    )  # fmt: skip
    return _progress(Batch(inputs))


def _progress[C: (Cache, TieredCache)](batch: Batch[C]) -> Generator[Progress[C], None, None]:
    state, more = batch.state, True
    try:
        while more:
            state.events = []
            with state.ctrl_c:
                more = batch.turn()
                state.publish()
                state.catch_up(is_last=not more)
            yield Progress(batch.outputs, batch.new, state.events, batch.closing, state)
    except GeneratorExit:
        batch.close()
        raise
    except BaseException as cause:
        with state.ctrl_c:
            raise state.interrupted(cause, batch.outputs) from cause


def run_batch[C: (Cache, TieredCache)](
    model: Model,
    cache: C,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 32,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    seed: int | jax.Array | None = None,
    seeds: Sequence[int] | None = None,
    stop_tokens: Sequence[int] = (),
    namespaces: Sequence[int] | None = None,
    names: Namespaces | None = None,
    retention: Retention | Sequence[Retention | None] | None = None,
    priorities: Sequence[int] | None = None,
    samples: int | Sequence[int] = 1,
    logprobs: Literal["raw", "sampling"] = "raw",
    top_logprobs: int = 0,
    canonical: bool = False,
    scheduler: Scheduler | None = None,
    clock: Callable[[], int] | None = None,
    logits_fn: LogitsFn | None = None,
    steps: int = 1024,
    fixed_steps: bool = False,
    loop: bool = True,
    progress: Callable[[list[Output]], None] | None = None,
    log_events: bool = True,
    listener: Listener | None = None,
    store: DiskStore | None = None,
) -> tuple[list[Output], C, list[dict[str, Any]]]:
    """Generates for all prompts by continuous batching, in one program that admits, computes and evicts by itself.

    Rows and prefixes are shared as in `generate`. The program returns to the host when all is done, after `steps`
    steps, when its log of events is nearly full, and where blocks are to be brought back from the host tier.

    Args:
      model: see `generate`.
      cache: is donated: go on with the returned one; see `generate`.
      prompts: token ids.
      max_new_tokens: for all prompts, or for each.
      sampling: how tokens are chosen, for all prompts or one for each; None: greedy.
      seed: an int or a jax key, from which each output gets a random stream. 3, `jax.random.key(3)` and
        `jax.random.PRNGKey(3)` give the same ones. None: the same ones at every call.
      seeds: of each output's random stream; its number if None.
      stop_tokens: end a row when chosen.
      namespaces: of each prompt, as `Namespaces` numbers them; 0 if None.
      names: the `Namespaces` that gave them out; None: any number will do.
      retention: of each prompt's blocks, or one for all prompts, where the spec has it.
      priorities: of each prompt, higher first; None: they come in their order.
      samples: outputs of each prompt, or one number for all. They run at the same time, and share what is computed of
        the prompt. One without blocks for all of them ends with "no_blocks".
      logprobs: static; what log-probabilities are of; see `generate`.
      top_logprobs: static; of how many of the likeliest tokens to note the log-probabilities, at each step.
      canonical: see `generate`; sets the scheduler's option.
      scheduler: the options; None: `Scheduler()`, which preempts nobody.
      clock: () -> ms; see `generate`.
      logits_fn: static; (logits f32[S, V], last tokens i32[S], positions i32[S]) -> logits.
      steps: the most steps of the model between two returns to the host.
      fixed_steps: see `generate`.
      loop: False: Python calls each step of the scheduler and reads what it did, for a GPU that does not run the loop;
        see `compiler_options`.
      progress: called with the outputs so far after each return.
      log_events: whether to decode the events.
      listener: called with every `Events` and `EventLog`; see `generate`.
      store: prefixes from a disk; see `generate`.

    Returns:
      list of `Output`, one per prompt, or its samples one after the other; the cache, with everything released and
      cached; and the decoded events.

    Raises:
      ValueError: before anything is donated, as `generate` does, and for options of the scheduler that do not fit.
      GenerationInterrupted: from an error or Ctrl-C, with the cache to go on with.
    """
    check_functions(progress=progress)
    options = RunOptions(
        with_canonical(scheduler, canonical), steps=steps, fixed_steps=fixed_steps, clock=clock, logits_fn=logits_fn,
        log_events=log_events, listener=listener, top_logprobs=top_logprobs, logprobs=logprobs, loop=loop, store=store,
    )  # fmt: skip
    inputs = Inputs(
        model, cache, options, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, seeds=seeds,
        stop_tokens=stop_tokens, namespaces=namespaces, names=names, retention=retention, priorities=priorities,
        samples=samples,
    )  # fmt: skip
    batch = Batch(inputs)
    state, more = batch.state, True
    try:
        with state.ctrl_c:
            while more:
                more = batch.turn()
                if progress is not None:
                    state.publish()
                    progress(batch.outputs)
            state.publish()
            state.catch_up(is_last=True)
    except BaseException as cause:
        with state.ctrl_c:
            raise state.interrupted(cause, batch.outputs) from cause
    return batch.outputs, state.result, state.events
