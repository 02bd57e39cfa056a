# SPDX-License-Identifier: Apache-2.0
"""The functions that users call to generate: `generate`, `stream` and `run_batch`."""

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
      outputs: outputs so far, in the order of the prompts; the same objects every time.
      new: tokens since the last `Progress`, by prompt number.
      events: decoded events since the last `Progress`.
      closing: decoded events of the releases when the stream is closed early; the same list every time.
    """

    outputs: list[Output]
    new: dict[int, list[int]]
    events: list[dict[str, Any]]
    closing: list[dict[str, Any]]
    _state: GenerationState[C] = dataclasses.field(repr=False, compare=False)

    @property
    def cache(self) -> C:
        """The latest cache, also after the stream was closed. Earlier caches have been donated."""
        return self._state.result

    @property
    @own_transfers()
    def state(self) -> CacheState:
        """A copy of the latest cache's metadata. No later loop donates it, so any thread may read it.

        Ask for it in the stream's thread, before the next `Progress`.
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
    """Generates for all prompts, as many at a time as rows and blocks allow.

    This is the short form of `run_batch`, for prompts with the same options. A prompt waits for a row and for all
    blocks that it may need, and then nothing interrupts it. When a row ends, the next prompt takes it. Prompts with a
    common prefix compute it once, even if they arrive together. If a prompt asks for more tokens than the whole cache
    holds, it ends with the tokens that fit, and finish "no_blocks".

    The first call with a model and with new shapes compiles, which takes some 20 to 30 s on two CPU cores. More or
    longer prompts compile again at each doubling. The logger `kvjax` reports compilations of more than two seconds at
    level INFO, and `enable_compilation_cache` keeps compiled programs for other processes.

    If the weights change, `reset` the cache, or give each version of the weights a namespace (`Namespaces`). Other
    weights over the same namespace are refused, unless the cache has been changed elsewhere; see `RunOptions.reuse`.

    Args:
      model: see `step`. It also gets views in mixed form, on one flat batch; see `Model`.
      cache: donated, so continue with the returned cache. Rows in use are left alone. With a host tier, prompts also
        find blocks on the host, and blocks go to the host to make space: before each loop for the growth of rows, and
        between loops for the admission of a prompt. Blocks that a long prompt pushes out of a window group are lost. If
        a move between the tiers fails, a RuntimeWarning reports it, and the lost K/V are computed again.
      prompts: token ids.
      max_new_tokens: maximum new tokens of each prompt.
      sampling: options for all prompts, or a list with an entry for each. None means greedy.
      seed: an int or a jax key, which gives each output a random stream. 3, `jax.random.key(3)` and
        `jax.random.PRNGKey(3)` give the same streams. None gives the same streams at every call.
      stop_tokens: tokens ending a row.
      namespace: a namespace for all prompts, or a list; see `kvjax.serving.Request`.
      retention: retention of each prompt's blocks, or a list; see `kvjax.serving.Request`.
      prompt_logprobs_from: a position for all prompts, or a list; see `kvjax.serving.Request`.
      chunk: maximum prompt tokens, of any number of rows, that a model call computes together with a token of each
        decoding row.
      k: maximum number of decode steps between two rounds of bookkeeping, 1 to P. None means P. The chosen tokens do
        not depend on it.
      canonical: whether the bits of log-probabilities, and so the tokens, depend neither on the cache nor on other
        prompts; see `Scheduler`. Reuse then ends at multiples of `chunk`.
      **options: attributes of `RunOptions` other than the scheduler, such as `listener` and `steps`.

    Returns:
      A list with an `Output` for each prompt, the cache with everything released and cached, and the decoded events.

    Raises:
      ValueError: before anything is donated: if the cache has no pools for a layer or was donated before, `step` would
        refuse the model, an option is out of range or has no value for a prompt, `names` did not issue a namespace, or
        a retention is given and the spec has none.
      GenerationInterrupted: after an error or Ctrl-C, with the cache to go on with. The first Ctrl-C waits for the end
        of a jitted loop. A second Ctrl-C does not wait, and may cost the cache.
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
    """Gives each request a random stream by its position."""
    seeds = jax.device_get(output_seeds(seed, len(requests))).tolist()
    return [dataclasses.replace(request, seed=stream) for request, stream in zip(requests, seeds, strict=True)]


def run_batch[C: AnyCache](
    model: Model,
    cache: C,
    requests: Sequence[Request],
    options: RunOptions | None = None,
    *,
    progress: Callable[[list[Output]], None] | None = None,
) -> tuple[list[Output], C, list[dict[str, Any]]]:
    """Serves all requests by continuous batching, in a single program for admission, computation and eviction.

    Rows and prefixes are shared as in `generate`. The program returns to the host if all requests are over, after
    `options.steps` steps, if its log of events is nearly full, or if blocks on the host tier are needed.

    Args:
      model: see `generate`.
      cache: donated, so continue with the returned cache; see `generate`.
      requests: `kvjax.serving.Request` objects.
      options: None means `RunOptions()`, whose scheduler preempts no request.
      progress: called with the outputs so far after each return. None disables it.

    Returns:
      A list with an `Output` for each request, or for each of its samples in order; the cache, with everything released
      and cached; and the decoded events.

    Raises:
      ValueError: before anything is donated, as in `generate`, and if the scheduler's options do not fit.
      GenerationInterrupted: after an error or Ctrl-C, with the cache to go on with.
    """
    check_functions(progress=progress)
    return _run(Batch(model, cache, requests, RunOptions() if options is None else options, steps=1024), progress)


def _run[C: AnyCache](
    batch: Batch[C], progress: Callable[[list[Output]], None] | None = None
) -> tuple[list[Output], C, list[dict[str, Any]]]:
    state = batch.state
    has_more = True
    try:
        with state.ctrl_c:
            while has_more:
                has_more = batch.turn()
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
    """Serves all requests like `run_batch`, and yields the progress after at most `options.steps` steps.

    With fewer steps tokens come sooner, but each return to the host costs time.

    The cache is donated: use `progress.cache` from then on. If you close a stream early, for example by `break`, it
    releases its rows. `progress.cache` is then the cache after the release, unless you have already donated it to
    another call. When a `Progress` comes, the listener has the events of its loop. It also gets the events of the
    release. Errors and Ctrl-C act as in `generate`. While you read a `Progress`, Ctrl-C interrupts your own code. The
    arguments are as in `run_batch`.

    Yields:
      A `Progress`. In the last, every output is finished and every row released.
    """
    return _progress(Batch(model, cache, requests, RunOptions() if options is None else options, steps=8))


def _progress[C: AnyCache](batch: Batch[C]) -> Generator[Progress[C], None, None]:
    state = batch.state
    has_more = True
    try:
        while has_more:
            state.events = []
            with state.ctrl_c:
                has_more = batch.turn()
                state.publish()
                state.catch_up(is_last=not has_more)
            yield Progress(batch.outputs, batch.new, state.events, batch.closing, state)
    except GeneratorExit:
        batch.close()
        raise
    except BaseException as cause:
        with state.ctrl_c:
            raise state.interrupted(cause, batch.outputs) from cause
