# SPDX-License-Identifier: Apache-2.0
"""The programs of a driver: a call that submits and cancels requests, and a loop with its results in new arrays."""

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
from kvjax.serving.speculation import Drafter
from kvjax.serving.submit import cancel, drain, submit


@dataclasses.dataclass(eq=False)
class Job:
    """A sample of a request in a driver, with its output so far."""

    number: int  # unique in the driver
    request: Request
    output: Output
    max_tokens: int  # tokens at which it ends, prompt included: at most as many as fit into the cache
    seed: int  # selects its random stream
    leader: Any = None  # first sample of the request, possibly this one
    namespace: int = 0  # namespace of the request, or the number lent for its salt
    slot: int = -1  # slot in the scheduler; -1 before it has a slot
    generation: int = -1  # generation of the slot
    first_loop: int = 0  # number of the first loop that has it
    stage: int = Stage.WAITING  # after the last loop
    fits: bool = True  # whether its prompt fits if it is alone in the cache
    found_tokens: int | None = None  # cached prompt tokens when the prompt was scored; None without a score
    num_kept: int = 0  # generated tokens that it keeps if a canonical scheduler computes it again
    kept_state: Any = None  # state of `logits_fn` after these tokens
    last_state: Any = None  # state of `logits_fn` after all its tokens, when the requests were last parked

    @property
    def tokens(self) -> np.ndarray:
        """i32[n]; the prompt."""
        return self.request.prompt

    @property
    def is_cut(self) -> bool:
        """Whether it ends before `max_new_tokens`, because no more tokens fit."""
        return self.max_tokens < len(self.tokens) + self.request.max_new_tokens

    @property
    def next_score(self) -> int:
        """The position of the next prompt token to score, or the prompt's end if no tokens are to be scored."""
        first = self.request.prompt_logprobs_from
        return len(self.tokens) if first is None else first + len(self.output.prompt_logprobs)

    @property
    def num_unscored(self) -> int:
        """The number of prompt tokens not scored yet."""
        return len(self.tokens) - self.next_score

    @property
    def remaining(self) -> int:
        """The maximum number of tokens still to generate."""
        return self.max_tokens - len(self.tokens) - len(self.output.tokens)

    @property
    def is_done(self) -> bool:
        """Whether the request is over."""
        return self.output.finish is not None

    def change(self, change: Callable[[Output], Any]) -> None:
        """Changes the output with a function."""
        change(self.output)

    def end(self, finish: str, reason: str | None = None) -> None:
        """Ends it with this `finish` and reason."""

        def change(output: Output) -> None:
            output.reason = reason
            output.finish = finish

        self.change(change)


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """The shapes of a driver's programs."""

    max_tokens: Sequence[int]  # maximum tokens of each slot
    steps: int  # maximum steps of a loop
    num_columns: int  # N, maximum tokens of a request in a loop
    entries: int  # R, maximum requests of a call
    entry_tokens: int  # T, maximum total of their prompt tokens
    num_stop_tokens: int  # see `init_serving`, as for the attributes below
    width: int
    num_ranges: int | None = None
    greedy: bool = False
    min_p: bool = False
    capacity: int | None = None
    logits_state: Any = None  # default of a request, without the axis W
    has_log: bool = True  # whether loops record their events

    def arguments(self, jobs: Sequence[Job], rows: int) -> dict[str, Any]:
        """The arguments of `submit` by name: numpy arrays [R, ...], padded with empty prompts.

        Samples of a prompt run at the same time, at most `rows` together.
        """
        num_entries = self.entries
        requests = [job.request for job in jobs]

        def column(values: Sequence[int], empty: int = 0, dtype: Any = np.int32) -> np.ndarray:
            """An array [R] with a value for each request, padded with `empty`."""
            return np.array([*values, *[empty] * (num_entries - len(values))], dtype)

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
            "stop_tokens": stacked([request.stop_tokens for request in requests], no_stop_token, num_entries),
            "retention": stacked([request.retention for request in requests], no_retention, num_entries),
            "sample_of": column(_first_samples(jobs, rows), -1),
            "logits_state": stacked([request.logits_state for request in requests], self.logits_state, num_entries),
        }

    def first_state(self, request: Request) -> Any:
        """The state of `logits_fn` with which a request begins."""
        return jax.tree.map(lambda x: x[0], stacked([request.logits_state], self.logits_state, 1))

    def _samplings(self, requests: Sequence[Request]) -> Sampling:
        """Stacks the samplings of requests into leaves [R]."""
        if not self.min_p:
            return stacked([request.sampling for request in requests], Sampling(), self.entries)
        default = Sampling(min_p=0.0)
        samplings = [default if request.sampling is None else request.sampling.with_min_p() for request in requests]
        return stacked(samplings, default, self.entries)

    def ends(self, cancelled: Sequence[Job]) -> np.ndarray:
        """Slots and generations i32[R, 2] of requests to cancel, padded with -1."""
        ends = np.full((self.entries, 2), -1, np.int32)
        for entry, job in enumerate(cancelled):
            ends[entry] = job.slot, job.generation
        return ends


def stacked(values: Sequence[Any], default: Any, num_entries: int) -> Any:
    """Stacks trees into a tree of numpy arrays [num_entries, ...]; the default replaces None and pads.

    A leaf may be shorter than the default's leaf, which then supplies the rest.
    """
    leaves, tree = jax.tree.flatten(default)
    arrays = [np.tile(leaf, (num_entries, *[1] * np.ndim(leaf))) for leaf in leaves]
    for entry, value in enumerate(values):
        if value is not None:
            for array, leaf in zip(arrays, jax.tree.leaves(value), strict=True):
                array[(entry, *map(slice, np.shape(leaf)))] = leaf
    return jax.tree.unflatten(tree, arrays)


def _first_samples(jobs: Sequence[Job], rows: int) -> list[int]:
    """The entry of an earlier sample of the same prompt, running together with each request, or -1."""
    leaders = []
    members = dict[int, list[int]]()
    for entry, job in enumerate(jobs):
        entries = members.setdefault(job.leader.number, [])
        position = len(entries) % rows  # more samples than rows make several fork groups
        leaders.append(entries[-position] if position else -1)
        entries.append(entry)
    return leaders


def _apply(
    serving: Serving, arguments: dict[str, Any], ends: jax.Array, scheduler: Scheduler
) -> tuple[Serving, jax.Array]:
    """Cancels and submits requests. Also returns the status i32[R] of each submitted entry."""
    serving, _ = cancel(serving, ends[:, 0], ends[:, 1])
    serving, status, _, _ = submit(serving, scheduler=scheduler, **arguments)
    return serving, status


_SCALARS = "steps", "onboard_slot", "refused"
_DRAFT_FIELDS = "drafted", "accepted"
_REQUEST_FIELDS = "stage", "finish", "generation", "cached", "preemptions", "num_tokens"


class TurnArrays(Pytree):
    """The result of a turn, in separate arrays, because the next turn may donate the requests before the host reads it.

    Each array costs a transfer to the host, so there are only three.
    """

    scalars_and_rows: jax.Array  # i32[3 + S]; `_SCALARS`, then the slot of each row's request
    # i32[7, W], or i32[9, W] with a drafter; `_REQUEST_FIELDS`, the number of tokens before the turn, `_DRAFT_FIELDS`
    requests: jax.Array
    tokens: jax.Array  # i32[2 + 2 T, W, N]; new tokens, laid out like `SampledTokens`

    @classmethod
    def of(cls, serving: Serving, first_step: jax.Array, num_tokens_before: jax.Array, width: int) -> TurnArrays:
        """The result of a turn from i32[] `first_step` on, with i32[W] `num_tokens_before` tokens."""
        requests: Requests = serving.requests
        new = runs(requests.start + num_tokens_before, width)
        tokens = chosen_bits(*pick((requests.text, requests.logprobs, requests.top), new))
        scalars = jnp.stack([serving.steps - first_step, serving.onboard_slot, serving.refused])
        columns = [*(getattr(requests, name) for name in _REQUEST_FIELDS), num_tokens_before]
        if requests.draft_stats is not None:
            columns += [getattr(requests.draft_stats, name) for name in _DRAFT_FIELDS]
        fields = jnp.stack(columns)
        return cls(jnp.concatenate([scalars, serving.row]), fields, tokens)

    def read(self) -> TurnResult:
        """Reads the arrays on the host."""
        scalars_and_rows, requests, columns = jax.device_get((self.scalars_and_rows, self.requests, self.tokens))
        scalars, rows = np.split(scalars_and_rows, [len(_SCALARS)])
        tokens, logprobs = columns[:2]
        top_tokens, top_logprobs = np.split(columns[2:], 2)
        top = None
        if len(top_tokens):
            top_logprobs = np.ascontiguousarray(np.moveaxis(top_logprobs, 0, -1)).view(np.float32)
            top = np.moveaxis(top_tokens, 0, -1), top_logprobs
        names = *_REQUEST_FIELDS, "num_tokens_before", *_DRAFT_FIELDS
        return TurnResult(
            **dict(zip(_SCALARS, scalars.tolist(), strict=True)),
            **dict(zip(names, requests.tolist(), strict=False)),
            row=rows,
            tokens=tokens,
            logprobs=logprobs.view(np.float32),
            top=top,
        )


class TurnResult(NamedTuple):
    """The result of a turn, on the host."""

    steps: int
    onboard_slot: int
    refused: int
    row: np.ndarray  # i32[S]
    stage: list[int]  # W entries, as in the lists below
    finish: list[int]
    generation: list[int]
    cached: list[int]
    preemptions: list[int]
    num_tokens: list[int]
    num_tokens_before: list[int]
    tokens: np.ndarray  # i32[W, N]
    logprobs: np.ndarray  # f32[W, N]
    top: tuple[np.ndarray, np.ndarray] | None  # i32[W, N, T] and f32[W, N, T]
    drafted: list[int] | None = None  # None without a drafter
    accepted: list[int] | None = None


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
    drafter: Drafter | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Serving, Log, TurnArrays]:
    """Runs the loop for i32[] `steps`, or a step of the scheduler. Then empties the slots of finished requests.

    A request still in a row keeps the row and the slot until the next turn.
    """
    spec = serving.cache.state.spec
    log = init_log(log_size, spec.block_size, spec.extra_ids, spec.has_recurrent) if log_size else None
    first_step = serving.steps
    num_tokens_before = serving.requests.num_tokens
    options: dict[str, Any] = {
        "scheduler": scheduler,
        "logits_fn": logits_fn,
        "drafter": drafter,
        "fixed_steps": fixed_steps,
        "now": now,
    }
    if loop:
        serving, log = serve(model, serving, log, steps=steps, **options)
    else:
        serving, log, _ = serve_step(model, serving, log, **options)
    return drain(serving), log, TurnArrays.of(serving, first_step, num_tokens_before, num_columns)


apply = OutermostJit(_apply, static_argnames="scheduler", donate_argnums=0)
turn = OutermostJit(
    _turn,
    static_argnames=("scheduler", "num_columns", "log_size", "loop", "fixed_steps"),
    donate_argnames="serving",
)
