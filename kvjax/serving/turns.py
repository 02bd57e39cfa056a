# SPDX-License-Identifier: Apache-2.0
"""The programs of an engine: requests come and go in one call; a turn of the loop reports in arrays of its own."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kvjax._arrays import Pytree, pick, runs
from kvjax._compile import OutermostJit
from kvjax.events.log import Log
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


class Turn(Pytree):
    """The results of a turn, in arrays of their own: the next turn may take the requests before these are read.

    Attributes:
      stage, finish, generation, cached, preemptions: i32[W]; of the requests.
      before, num_tokens: i32[W]; tokens of each before and after it.
      tokens: i32[W, N]; the new ones.
      logprobs: f32[W, N].
      top: i32[W, N, T] and f32[W, N, T], or None.
      row: i32[S]; the slot of each row's request.
      onboard_slot, refused: i32[]; of `Serving`.
    """

    stage: jax.Array
    finish: jax.Array
    generation: jax.Array
    cached: jax.Array
    preemptions: jax.Array
    before: jax.Array
    num_tokens: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    top: tuple[jax.Array, jax.Array] | None
    row: jax.Array
    onboard_slot: jax.Array
    refused: jax.Array

    @classmethod
    def of(cls, serving: Serving, before: jax.Array, width: int) -> Turn:
        """The turn that has led here from requests with `before` i32[W] tokens."""
        requests: Requests = serving.requests
        at = runs(requests.start + before, width)
        names = "stage", "finish", "generation", "cached", "preemptions", "num_tokens"
        return cls(
            before=before, tokens=pick(requests.text, at), logprobs=pick(requests.logprobs, at),
            top=None if requests.top is None else pick(requests.top, at), row=serving.row,
            onboard_slot=serving.onboard_slot, refused=serving.refused,
            **{name: getattr(requests, name) for name in names},
        )  # fmt: skip


def _turn(
    model: Model,
    serving: Serving,
    log: Log,
    *,
    scheduler: Scheduler,
    steps: Any,
    most_steps: int,
    logits_fn: LogitsFn | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Serving, Log, Turn]:
    """Empties the slots of requests that are over, runs the loop for about i32[] `steps`, and says what it did."""
    serving = drain(serving)
    before = serving.requests.num_tokens
    serving, log = serve(
        model, serving, log, scheduler=scheduler, steps=steps, logits_fn=logits_fn, fixed_steps=fixed_steps, now=now
    )
    return serving, log, Turn.of(serving, before, most_steps + scheduler.most_steps(serving.cache.state.spec))


apply = OutermostJit(_apply, static_argnames="scheduler", donate_argnums=0)
turn = OutermostJit(
    _turn, static_argnames=("scheduler", "most_steps", "logits_fn", "fixed_steps"), donate_argnames=("serving", "log")
)
