# SPDX-License-Identifier: Apache-2.0
"""The programs of an engine: requests come and go in one call; a turn of the loop reports in arrays of its own."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, pick, runs
from kvjax._compile import OutermostJit
from kvjax.events.log import Log, init_log
from kvjax.model import Model
from kvjax.serving.decode import LogitsFn
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Requests, Serving
from kvjax.serving.sampling import Sampling
from kvjax.serving.serve import serve
from kvjax.serving.submit import cancel, drain, submit


class Entries(Pytree):
    """Requests to submit, R of them, and others to cancel; numpy arrays of always the same shapes.

    Attributes:
      tokens: i32[T]; prompts, one after the other.
      lengths: i32[R]; 0: no request.
      max_new_tokens, slots, priority, namespace, sample_of: i32[R]; as of `submit`.
      seed: u32[R].
      sampling: of each, [R].
      stop_tokens: i32[R, K].
      cancelled: i32[R, 2]; slots and generations; -1: none.
      logits_state: a tree of arrays [R, ...]; or None.
    """

    tokens: Any
    lengths: Any
    max_new_tokens: Any
    slots: Any
    priority: Any
    namespace: Any
    sample_of: Any
    seed: Any
    sampling: Sampling
    stop_tokens: Any
    cancelled: Any
    logits_state: Any

    @classmethod
    def none(cls, entries: int, tokens: int, stop_tokens: int, logits_state: Any = None) -> Entries:
        """No requests: arrays to be written; `logits_state` is that of one request."""

        def full(value: int = 0, *shape: int) -> np.ndarray:
            return np.full((entries, *shape), value, np.int32)

        sampling, logits_state = for_each((Sampling(), logits_state), entries)
        return cls(
            np.zeros((tokens,), np.int32), full(), full(), full(-1), full(), full(), full(-1),
            np.zeros((entries,), np.uint32), sampling, full(-1, stop_tokens), full(-1, 2), logits_state,
        )  # fmt: skip


def for_each(tree: Any, number: int) -> Any:
    """The arrays of a tree, one for each of so many entries, to be written."""
    return jax.tree.map(lambda leaf: np.tile(leaf, (number, *[1] * np.ndim(leaf))), tree)


def _apply(serving: Serving, entries: Entries, scheduler: Scheduler) -> tuple[Serving, jax.Array]:
    """Cancels and submits; also returns the status i32[R] of each submitted entry."""
    serving, _ = cancel(serving, entries.cancelled[:, 0], entries.cancelled[:, 1])
    serving, status, _, _ = submit(
        serving, entries.tokens, entries.lengths, entries.max_new_tokens, scheduler=scheduler, slots=entries.slots,
        priority=entries.priority, namespace=entries.namespace, seed=entries.seed, sampling=entries.sampling,
        stop_tokens=entries.stop_tokens, sample_of=entries.sample_of, logits_state=entries.logits_state,
    )  # fmt: skip
    return serving, status


_OF_REQUESTS = "stage", "finish", "generation", "cached", "preemptions", "num_tokens"


class Turn(Pytree):
    """The result of a turn, in three arrays of its own: the next turn may take the requests before these are read.

    Attributes:
      numbers: i32[3 + S]; steps of the model; `onboard_slot`, `refused` and `row` of `Serving`.
      requests: i32[7, W]; `_OF_REQUESTS`; and the tokens of each before the turn.
      tokens: i32[2 + 2 T, W, N]; new ones, bits of their log-probabilities; the same of the T likeliest.
    """

    numbers: jax.Array
    requests: jax.Array
    tokens: jax.Array

    @classmethod
    def of(cls, serving: Serving, steps: jax.Array, before: jax.Array, width: int) -> Turn:
        """The turn that has led here from so many steps i32[] and from requests with `before` i32[W] tokens."""
        requests: Requests = serving.requests
        at, bits = (
            runs(requests.start + before, width),
            functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32),
        )
        columns = [pick(requests.text, at), bits(pick(requests.logprobs, at))]
        if requests.top is not None:
            tokens, logprobs = pick(requests.top, at)
            columns += [*jnp.moveaxis(tokens, -1, 0), *jnp.moveaxis(bits(logprobs), -1, 0)]
        numbers = jnp.stack([serving.steps - steps, serving.onboard_slot, serving.refused])
        of_requests = jnp.stack([*(getattr(requests, name) for name in _OF_REQUESTS), before])
        return cls(jnp.concatenate([numbers, serving.row]), of_requests, jnp.stack(columns))

    def read(self) -> Done:
        """The same on the host."""
        numbers, requests, columns = jax.device_get((self.numbers, self.requests, self.tokens))
        half = (len(columns) - 2) // 2
        likeliest, logprobs = np.moveaxis(columns[2 : 2 + half], 0, -1), np.moveaxis(columns[2 + half :], 0, -1)
        top = (likeliest, np.ascontiguousarray(logprobs).view(np.float32)) if half else None
        steps, onboard_slot, refused = numbers[:3].tolist()
        return Done(
            steps, onboard_slot, refused, row=numbers[3:], tokens=columns[0], logprobs=columns[1].view(np.float32),
            top=top, **dict(zip((*_OF_REQUESTS, "before"), requests.tolist(), strict=True)),
        )  # fmt: skip


class Done(NamedTuple):
    """The result of a turn, on the host."""

    steps: int
    onboard_slot: int
    refused: int
    row: np.ndarray  # i32[S]
    stage: list[int]  # of W, as those below
    finish: list[int]
    generation: list[int]
    cached: list[int]
    preemptions: list[int]
    num_tokens: list[int]
    before: list[int]
    tokens: np.ndarray  # i32[W, N]
    logprobs: np.ndarray  # f32[W, N]
    top: tuple[np.ndarray, np.ndarray] | None  # i32[W, N, T] and f32[W, N, T]


def _turn(
    model: Model,
    serving: Serving,
    *,
    scheduler: Scheduler,
    steps: Any,
    most_steps: int,
    log_size: int,
    logits_fn: LogitsFn | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Serving, Log, Turn]:
    """Runs the loop for i32[] `steps`, says what it did, and empties the slots of requests that are over.

    Those that have a row then keep it, and their slots, until the next turn.
    """
    spec = serving.cache.state.spec
    log = init_log(log_size, spec.block_size, spec.extra_ids, spec.has_recurrent) if log_size else None
    before = serving.steps, serving.requests.num_tokens
    serving, log = serve(
        model, serving, log, scheduler=scheduler, steps=steps, logits_fn=logits_fn, fixed_steps=fixed_steps, now=now
    )
    return drain(serving), log, Turn.of(serving, *before, most_steps)


apply = OutermostJit(_apply, static_argnames="scheduler", donate_argnums=0)
turn = OutermostJit(
    _turn,
    static_argnames=("scheduler", "most_steps", "log_size", "logits_fn", "fixed_steps"),
    donate_argnames="serving",
)
