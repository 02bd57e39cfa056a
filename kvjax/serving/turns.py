# SPDX-License-Identifier: Apache-2.0
"""The programs of a driver: requests come and go by one call; a loop reports in arrays of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, pick, runs
from kvjax._compile import OutermostJit
from kvjax.events.log import Log, init_log
from kvjax.model import Model
from kvjax.policies.retention import UNSTATED, Retention
from kvjax.serving.decode import LogitsFn
from kvjax.serving.options import Scheduler
from kvjax.serving.request import Request
from kvjax.serving.requests import Output, Requests, Serving, Stage
from kvjax.serving.sampling import Sampling
from kvjax.serving.serve import serve, serve_step
from kvjax.serving.submit import cancel, drain, submit


@dataclasses.dataclass(eq=False)
class Job:
    """A sample of a request in a driver: what is wanted, and where it is.

    Attributes:
      number: of the sample; no other one of the driver has it.
      request: the request.
      output: so far.
      max_tokens: the tokens, with the prompt's, at which it ends: no more than fit into the cache.
      seed: of its random stream.
      leader: the first sample of the request, which may be this one.
      namespace: of the request, or the one that was lent for its salt.
      slot, generation: of the scheduler's; -1 before it has them.
      since: the number of the first loop that has it.
      stage: as the last loop has left it.
    """

    number: int
    request: Request
    output: Output
    max_tokens: int
    seed: int
    leader: Any = None
    namespace: int = 0
    slot: int = -1
    generation: int = -1
    since: int = 0
    stage: int = Stage.WAITING

    @property
    def tokens(self) -> np.ndarray:
        """i32[n]; the prompt."""
        return self.request.prompt

    @property
    def is_cut(self) -> bool:
        """Whether it ends before it has as many tokens as were wanted, since no more fit."""
        return self.max_tokens < len(self.tokens) + self.request.max_new_tokens

    @property
    def left(self) -> int:
        """The most tokens that are still to be generated."""
        return self.max_tokens - len(self.tokens) - len(self.output.tokens)

    @property
    def is_done(self) -> bool:
        """Whether it is over."""
        return self.output.finish is not None

    def change(self, change: Callable[[Output], Any]) -> None:
        """Changes the output."""
        change(self.output)

    def end(self, finish: str) -> None:
        """Ends it."""
        self.change(lambda output: setattr(output, "finish", finish))


@dataclasses.dataclass(frozen=True)
class Slots:
    """The shapes of a driver's programs.

    Attributes:
      max_tokens: the tokens that each slot has space for.
      steps: the most steps of a loop.
      num_columns: N, the most tokens of a request in a loop.
      entries: R, requests of one call.
      entry_tokens: T, tokens of their prompts together.
      num_stop_tokens: K.
      num_ranges: of each request's retention; None: no request has one.
      greedy: whether no request samples.
      width, capacity: as of `init_serving`.
      logits_state: what `logits_fn` keeps of a request that brings none; None: nothing.
      has_log: whether loops note their events.
    """

    max_tokens: Sequence[int]
    steps: int
    num_columns: int
    entries: int
    entry_tokens: int
    num_stop_tokens: int
    width: int
    num_ranges: int | None = None
    greedy: bool = False
    capacity: int | None = None
    logits_state: Any = None
    has_log: bool = True


class Entries(Pytree):
    """Requests to submit, R of them, and others to cancel; numpy arrays.

    Attributes:
      requests: arguments of `submit` by their names, arrays [R, ...]; with prompts of no tokens behind the last one.
      cancelled: i32[R, 2]; slots and generations; -1: none.
    """

    requests: dict[str, Any]
    cancelled: Any


def entries_of(jobs: Sequence[Job], cancelled: Sequence[Job], slots: Slots, rows: int) -> Entries:
    """Arrays of a driver's shapes; samples of a prompt run at the same time, at most `rows` together."""

    def column(values: Sequence[Any], empty: Any = 0, dtype: Any = np.int32) -> np.ndarray:
        """An array [R] of a value for each request, padded."""
        array = np.full((slots.entries,), empty, dtype)
        array[: len(values)] = values
        return array

    tokens = np.zeros((slots.entry_tokens,), np.int32)
    prompts = np.concatenate([job.tokens for job in jobs]) if jobs else np.zeros((0,), np.int32)
    tokens[: len(prompts)] = prompts
    stop = np.full((slots.entries, slots.num_stop_tokens), -1, np.int32)
    ends = np.full((slots.entries, 2), -1, np.int32)
    for entry, job in enumerate(jobs):
        stop[entry, : len(job.request.stop_tokens)] = job.request.stop_tokens
    for entry, job in enumerate(cancelled):
        ends[entry] = job.slot, job.generation
    requests = {
        "tokens": tokens,
        "lengths": column([len(job.tokens) for job in jobs]),
        "max_new_tokens": column([job.max_tokens - len(job.tokens) for job in jobs]),
        "slots": column([job.slot for job in jobs], -1),
        "priority": column([job.request.priority for job in jobs]),
        "namespace": column([job.namespace for job in jobs]),
        "seed": column([job.seed for job in jobs], dtype=np.uint32),
        "sampling": None if slots.greedy else _samplings(jobs, column),
        "stop_tokens": stop,
        "retention": None if slots.num_ranges is None else _retentions(jobs, slots.entries, slots.num_ranges),
        "sample_of": column(_first_samples(jobs, rows), -1),
        "logits_state": logits_states([job.request.logits_state for job in jobs], slots.logits_state, slots.entries),
    }
    return Entries(requests, ends)


def _samplings(jobs: Sequence[Job], column: Callable[..., np.ndarray]) -> Sampling:
    """The sampling of each request, as arrays that `column` pads."""
    arrays = {}
    for field in dataclasses.fields(Sampling):
        default = getattr(Sampling(), field.name)
        values = [getattr(job.request.sampling or Sampling(), field.name) for job in jobs]
        arrays[field.name] = column(values, default, default.dtype)
    return Sampling(**arrays)


def _first_samples(jobs: Sequence[Job], rows: int) -> list[int]:
    """For each request the entry of an earlier sample of its prompt that it runs together with; -1 if none."""
    found, members = [], dict[int, list[int]]()
    for entry, job in enumerate(jobs):
        earlier = members.setdefault(job.leader.number, [])
        together = len(earlier) % rows  # samples that are more than the rows are several fork groups
        found.append(earlier[-together] if together else -1)
        earlier.append(entry)
    return found


def _retentions(jobs: Sequence[Job], number: int, num_ranges: int) -> Retention:
    """The retention of each of so many requests, with empty ranges behind its own."""
    default = Retention.of()
    ranges = np.tile(np.array([0, 0, UNSTATED, UNSTATED], np.int32), (number, num_ranges, 1))
    decode = np.tile(np.asarray(default.decode, np.int32), (number, 1))
    for entry, job in enumerate(jobs):
        retention = job.request.retention or default
        ranges[entry, : len(retention.ranges)] = retention.ranges
        decode[entry] = retention.decode
    return Retention(ranges, decode)


def logits_states(states: Sequence[Any], default: Any, number: int) -> Any:
    """The states of so many requests as one tree of numpy arrays, with the default behind the last one."""
    arrays = jax.tree.map(lambda leaf: np.tile(leaf, (number, *[1] * np.ndim(leaf))), default)
    for entry, state in enumerate(states):
        state = default if state is None else state
        for array, leaf in zip(jax.tree.leaves(arrays), jax.tree.leaves(state), strict=True):
            array[entry] = leaf
    return arrays


def _apply(serving: Serving, entries: Entries, scheduler: Scheduler) -> tuple[Serving, jax.Array]:
    """Cancels and submits; also returns the status i32[R] of each submitted entry."""
    serving, _ = cancel(serving, entries.cancelled[:, 0], entries.cancelled[:, 1])
    serving, status, _, _ = submit(serving, scheduler=scheduler, **entries.requests)
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

    def read(self) -> TurnResult:
        """The same on the host."""
        numbers, requests, columns = jax.device_get((self.numbers, self.requests, self.tokens))
        half = (len(columns) - 2) // 2
        likeliest, logprobs = np.moveaxis(columns[2 : 2 + half], 0, -1), np.moveaxis(columns[2 + half :], 0, -1)
        top = (likeliest, np.ascontiguousarray(logprobs).view(np.float32)) if half else None
        steps, onboard_slot, refused = numbers[:3].tolist()
        return TurnResult(
            steps, onboard_slot, refused, row=numbers[3:], tokens=columns[0], logprobs=columns[1].view(np.float32),
            top=top, **dict(zip((*_OF_REQUESTS, "before"), requests.tolist(), strict=True)),
        )  # fmt: skip


class TurnResult(NamedTuple):
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
    num_columns: int,
    log_size: int,
    loop: bool = True,
    logits_fn: LogitsFn | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Serving, Log, Turn]:
    """Runs the loop for i32[] `steps`, or a step of the scheduler; empties the slots of requests that are over.

    Those that have a row then keep it, and their slots, until the next turn.
    """
    spec = serving.cache.state.spec
    log = init_log(log_size, spec.block_size, spec.extra_ids, spec.has_recurrent) if log_size else None
    before = serving.steps, serving.requests.num_tokens
    options: dict[str, Any] = {"scheduler": scheduler, "logits_fn": logits_fn, "fixed_steps": fixed_steps, "now": now}
    if loop:
        serving, log = serve(model, serving, log, steps=steps, **options)
    else:
        serving, log, _ = serve_step(model, serving, log, **options)
    return drain(serving), log, Turn.of(serving, *before, num_columns)


apply = OutermostJit(_apply, static_argnames="scheduler", donate_argnums=0)
turn = OutermostJit(
    _turn,
    static_argnames=("scheduler", "num_columns", "log_size", "loop", "logits_fn", "fixed_steps"),
    donate_argnames="serving",
)
