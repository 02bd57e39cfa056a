# SPDX-License-Identifier: Apache-2.0
"""Generation as a user calls it: `generate`, `stream` and `run_batch`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax._compile import own_transfers
from kvjax.cache import AnyCache
from kvjax.checks import check_alive, check_functions
from kvjax.model import Model
from kvjax.policies.retention import Retention
from kvjax.serving.batch import Batch
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.request import Request, RunOptions, make_requests
from kvjax.serving.requests import Output
from kvjax.serving.sampling import Sampling, output_seeds
from kvjax.state import CacheState


@dataclasses.dataclass(frozen=True)
class Progress[C: AnyCache]:
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


def generate[C: AnyCache](
    model: Model,
    cache: C,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 32,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    seed: int | jax.Array | None = None,
    stop_tokens: Sequence[int] = (),
    namespace: int | Sequence[int] = 0,
    retention: Retention | Sequence[Retention | None] | None = None,
    prompt_logprobs_from: int | Sequence[int | None] | None = None,
    chunk: int = 128,
    k: int | None = None,
    canonical: bool = False,
    **options: Any,
) -> tuple[list[Output], C, list[dict[str, Any]]]:
    """Generates for all prompts, as many at a time as there are rows and blocks.

    It is the short form of `run_batch`, for prompts of which the same is wanted. A prompt waits for a row and for the
    blocks of all that it can become; then nothing interrupts it. As soon as a row ends, the next prompt takes it.
    Prompts that share a prefix compute it once, also if they come together. A prompt that wants more than the whole
    cache holds ends with the tokens that fit, and finish "no_blocks".

    The first call with a model and with new shapes compiles, which takes some 20 to 30 s on two CPU cores: more prompts
    or longer ones compile at each doubling. What takes over two seconds to compile is said in the log `kvjax`
    (`logging`, as information), and `enable_compilation_cache` keeps it for other processes.

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
      sampling: for all prompts, or one for each; None: greedy.
      seed: an int or a jax key, from which each output gets a random stream. 3, `jax.random.key(3)` and
        `jax.random.PRNGKey(3)` give the same ones. None: the same ones at every call.
      stop_tokens: end a row when chosen.
      namespace: of all prompts, or one for each; see `kvjax.serving.Request`.
      retention: of each prompt's blocks, or one for all prompts; see `kvjax.serving.Request`.
      prompt_logprobs_from: of all prompts, or one for each; see `kvjax.serving.Request`.
      chunk: prompt tokens, of one row or of several, that a model call computes beside a token of each decoding row.
      k: the most steps for which the loop keeps the cache's books at once, 1 to P; P if None. What is chosen does not
        depend on it.
      canonical: whether the log-probabilities of a prompt's tokens, and so the tokens, are the same bits whatever the
        cache has and whoever runs beside it; see `Scheduler`. Reuse ends at multiples of `chunk` then.
      **options: attributes of `RunOptions` but for the scheduler, such as `listener` and `steps`.

    Returns:
      list of `Output`, one per prompt; the cache, with everything released and cached; and the decoded events.

    Raises:
      ValueError: before anything is donated: if the cache has pools for no layer or was donated before, the model is
        not as `step` wants it, an option is out of range or not given for each prompt, `names` did not give out a
        namespace, or the spec has no retention.
      GenerationInterrupted: from an error or Ctrl-C, with the cache to go on with. Ctrl-C waits until a jitted loop
        is done; a second one does not, and may cost the cache.
    """
    requests = make_requests(
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=stop_tokens,
        retention=retention,
        namespace=namespace,
        prompt_logprobs_from=prompt_logprobs_from,
    )
    if seed is not None:
        requests = _with_seeds(requests, seed)
    scheduler = Scheduler(chunk=chunk, k=k, canonical=canonical)
    return _run(Batch(model, cache, requests, RunOptions(scheduler=scheduler, **options), steps=32))


@own_transfers()
def _with_seeds(requests: list[Request], seed: Any) -> list[Request]:
    """The requests, each with a random stream by its number."""
    seeds = jax.device_get(output_seeds(seed, len(requests))).tolist()
    return [dataclasses.replace(request, seed=own) for request, own in zip(requests, seeds, strict=True)]


def run_batch[C: AnyCache](
    model: Model,
    cache: C,
    requests: Sequence[Request],
    options: RunOptions | None = None,
    *,
    progress: Callable[[list[Output]], None] | None = None,
) -> tuple[list[Output], C, list[dict[str, Any]]]:
    """Serves all requests by continuous batching, in one program that admits, computes and evicts by itself.

    Rows and prefixes are shared as in `generate`. The program returns to the host when all is done, after so many steps
    as the options say, when its log of events is nearly full, and where blocks are to be brought back from the host
    tier.

    Args:
      model: see `generate`.
      cache: is donated: go on with the returned one; see `generate`.
      requests: each a `kvjax.serving.Request`.
      options: None: `RunOptions()`, whose scheduler preempts nobody.
      progress: called with the outputs so far after each return.

    Returns:
      list of `Output`, one per request, or its samples one after the other; the cache, with everything released and
      cached; and the decoded events.

    Raises:
      ValueError: before anything is donated, as `generate` does, and for options of the scheduler that do not fit.
      GenerationInterrupted: from an error or Ctrl-C, with the cache to go on with.
    """
    check_functions(progress=progress)
    return _run(Batch(model, cache, requests, RunOptions() if options is None else options, steps=1024), progress)


def _run[C: AnyCache](
    batch: Batch[C], progress: Callable[[list[Output]], None] | None = None
) -> tuple[list[Output], C, list[dict[str, Any]]]:
    state = batch.state
    more = True
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


def stream[C: AnyCache](
    model: Model, cache: C, requests: Sequence[Request], options: RunOptions | None = None
) -> Generator[Progress[C], None, None]:
    """Serves all requests as `run_batch` does, handing out what is new after at most `options.steps` steps.

    The steps decide how many tokens come at a time. Fewer come sooner, and cost a return to the host each.

    The cache is donated: use `progress.cache` from then on. A stream that is closed early, as by `break`, releases its
    rows, and `progress.cache` is the cache after that, unless a caller who went on with it has donated it. The listener
    has got the events of a loop when its `Progress` comes, and gets those of these releases. Errors and Ctrl-C are as
    in `generate`; while a `Progress` is read, Ctrl-C is the caller's. The arguments are those of `run_batch`.

    Yields:
      A `Progress`; the last one has every output finished and every row released.
    """
    return _progress(Batch(model, cache, requests, RunOptions() if options is None else options, steps=8))


def _progress[C: AnyCache](batch: Batch[C]) -> Generator[Progress[C], None, None]:
    state = batch.state
    more = True
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
