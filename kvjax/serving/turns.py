# SPDX-License-Identifier: Apache-2.0
"""The programs of a driver: requests come and go by one call; a loop reports in arrays of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, pick, runs
from kvjax._compile import OutermostJit
from kvjax.events.log import Log, init_log
from kvjax.model import Model
from kvjax.policies.retention import Retention
from kvjax.serving.decode import LogitsFn, chosen_bits
from kvjax.serving.options import Scheduler
from kvjax.serving.request import Request
from kvjax.serving.requests import Output, Requests, Serving, Stage
from kvjax.serving.sampling import Sampling
from kvjax.serving.serve import serve, serve_step
from kvjax.serving.submit import cancel, drain, submit


@dataclasses.dataclass(eq=False)
class Job:
    """A sample of a request in a driver, with its output so far."""

    number: int  # of the sample; no other one of the driver has it
    request: Request
    output: Output
    max_tokens: int  # the tokens, with the prompt's, at which it ends: no more than fit into the cache
    seed: int  # of its random stream
    leader: Any = None  # the first sample of the request, which may be this one
    namespace: int = 0  # of the request, or the one that was lent for its salt
    slot: int = -1  # of the scheduler; -1 before it has one
    generation: int = -1  # of the slot
    since: int = 0  # the number of the first loop that has it
    stage: int = Stage.WAITING  # as the last loop has left it
    fits: bool = True  # whether its prompt fits, alone in the cache
    found_tokens: int | None = None  # of its prompt, in the cache when that was scored; None: it was not

    @property
    def tokens(self) -> np.ndarray:
        """i32[n]; the prompt."""
        return self.request.prompt

    @property
    def is_cut(self) -> bool:
        """Whether it ends before it has as many tokens as were wanted, since no more fit."""
        return self.max_tokens < len(self.tokens) + self.request.max_new_tokens

    @property
    def next_score(self) -> int:
        """The position of the next prompt token to score; the prompt's end where none is wanted."""
        first = self.request.prompt_logprobs_from
        return len(self.tokens) if first is None else first + len(self.output.prompt_logprobs)

    @property
    def num_unscored(self) -> int:
        """The number of prompt tokens that are still to be scored."""
        return len(self.tokens) - self.next_score

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


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """The shapes of a driver's programs."""

    max_tokens: Sequence[int]  # the tokens that each slot has space for
    steps: int  # the most steps of a loop
    num_columns: int  # N, the most tokens of a request in a loop
    entries: int  # R, requests of one call
    entry_tokens: int  # T, tokens of their prompts together
    num_stop_tokens: int  # for this, and for all that follow, see `init_serving`
    width: int
    num_ranges: int | None = None
    greedy: bool = False
    min_p: bool = False
    capacity: int | None = None
    logits_state: Any = None  # of a request that brings none, without the axis W
    has_log: bool = True  # whether loops note their events

    def arguments(self, jobs: Sequence[Job], rows: int) -> dict[str, Any]:
        """The arguments of `submit` by their names: numpy arrays [R, ...], with empty prompts after the last request.

        Samples of a prompt run at the same time, at most `rows` together.
        """
        number, requests = self.entries, [job.request for job in jobs]

        def column(values: Sequence[int], empty: int = 0, dtype: Any = np.int32) -> np.ndarray:
            """An array [R] of a value for each request."""
            return np.array([*values, *[empty] * (number - len(values))], dtype)

        tokens = np.zeros((self.entry_tokens,), np.int32)
        prompts = np.concatenate([tokens[:0], *(job.tokens for job in jobs)])
        tokens[: len(prompts)] = prompts
        no_stop_token = np.full((self.num_stop_tokens,), -1, np.int32)
        no_retention = None if self.num_ranges is None else Retention.of(max_ranges=self.num_ranges)
        return {
            "tokens": tokens,
            "lengths": column([len(job.tokens) for job in jobs]),
            "max_new_tokens": column([job.max_tokens - len(job.tokens) for job in jobs]),
            "slots": column([job.slot for job in jobs], -1),
            "priority": column([request.priority for request in requests]),
            "namespace": column([job.namespace for job in jobs]),
            "seed": column([job.seed for job in jobs], dtype=np.uint32),
            "sampling": None if self.greedy else self._samplings(requests),
            "stop_tokens": stacked([request.stop_tokens for request in requests], no_stop_token, number),
            "retention": stacked([request.retention for request in requests], no_retention, number),
            "sample_of": column(_first_samples(jobs, rows), -1),
            "logits_state": stacked([request.logits_state for request in requests], self.logits_state, number),
        }

    def _samplings(self, requests: Sequence[Request]) -> Sampling:
        """The samplings of requests, with leaves [R]."""
        if not self.min_p:
            return stacked([request.sampling for request in requests], Sampling(), self.entries)
        default = Sampling(min_p=0.0)
        samplings = [default if request.sampling is None else request.sampling.with_min_p() for request in requests]
        return stacked(samplings, default, self.entries)

    def ends(self, cancelled: Sequence[Job]) -> np.ndarray:
        """i32[R, 2]; slots and generations of requests to cancel, -1 after the last one."""
        ends = np.full((self.entries, 2), -1, np.int32)
        for entry, job in enumerate(cancelled):
            ends[entry] = job.slot, job.generation
        return ends


def stacked(values: Sequence[Any], default: Any, number: int) -> Any:
    """Trees of so many requests as one tree of numpy arrays [number, ...]; the default for None and after the last.

    A leaf may be the beginning of one like the default's, which then follows it.
    """
    leaves, tree = jax.tree.flatten(default)
    arrays = [np.tile(leaf, (number, *[1] * np.ndim(leaf))) for leaf in leaves]
    for entry, value in enumerate(values):
        if value is not None:
            for array, leaf in zip(arrays, jax.tree.leaves(value), strict=True):
                array[(entry, *map(slice, np.shape(leaf)))] = leaf
    return jax.tree.unflatten(tree, arrays)


def _first_samples(jobs: Sequence[Job], rows: int) -> list[int]:
    """For each request the entry of an earlier sample of its prompt that it runs together with; -1 if none."""
    found, members = [], dict[int, list[int]]()
    for entry, job in enumerate(jobs):
        earlier = members.setdefault(job.leader.number, [])
        together = len(earlier) % rows  # samples that are more than the rows are several fork groups
        found.append(earlier[-together] if together else -1)
        earlier.append(entry)
    return found


def _apply(
    serving: Serving, arguments: dict[str, Any], ends: jax.Array, scheduler: Scheduler
) -> tuple[Serving, jax.Array]:
    """Cancels and submits; also returns the status i32[R] of each submitted entry."""
    serving, _ = cancel(serving, ends[:, 0], ends[:, 1])
    serving, status, _, _ = submit(serving, scheduler=scheduler, **arguments)
    return serving, status


_OF_REQUESTS = "stage", "finish", "generation", "cached", "preemptions", "num_tokens"


class Turn(Pytree):
    """The result of a turn, in three arrays of its own: the next turn may take the requests before these are read."""

    numbers: jax.Array  # i32[3 + S]; steps of the model; `onboard_slot`, `refused` and `row` of `Serving`
    requests: jax.Array  # i32[7, W]; `_OF_REQUESTS`; and the tokens of each before the turn
    tokens: jax.Array  # i32[2 + 2 T, W, N]; new ones, as in `Chosen`

    @classmethod
    def of(cls, serving: Serving, steps: jax.Array, before: jax.Array, width: int) -> Turn:
        """The turn that has led here from so many steps i32[] and from requests with `before` i32[W] tokens."""
        requests: Requests = serving.requests
        at = runs(requests.start + before, width)
        tokens = chosen_bits(*pick((requests.text, requests.logprobs, requests.top), at))
        numbers = jnp.stack([serving.steps - steps, serving.onboard_slot, serving.refused])
        of_requests = jnp.stack([*(getattr(requests, name) for name in _OF_REQUESTS), before])
        return cls(jnp.concatenate([numbers, serving.row]), of_requests, tokens)

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
    static_argnames=("scheduler", "num_columns", "log_size", "loop", "fixed_steps"),
    donate_argnames="serving",
)
