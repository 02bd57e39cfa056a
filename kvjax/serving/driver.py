# SPDX-License-Identifier: Apache-2.0
"""The one host loop of serving: requests go in, the scheduler's loop runs, and the host reads what it did.

    submit    requests and cancels go in by one call; each request gets a slot
    dispatch  blocks are emptied if a host tier can take them; the loop starts, and the call returns at once
    read      the tokens of the oldest loop that is not read yet, requests that are over, and moves between the tiers

`run_batch` and `stream` fill a driver and turn it until nothing is left. An `Engine` has one in its thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import unreadable
from kvjax._compile import OutermostJit
from kvjax.cache import AnyCache, Cache
from kvjax.checks import check_alive, check_on_host
from kvjax.events.log import EventLog
from kvjax.events.records import Status
from kvjax.model import Model, check_model, check_placement, forward
from kvjax.pools import mixed
from kvjax.serving.capacity import admission_events, most_blocks, worst_step
from kvjax.serving.decode import check_cache
from kvjax.serving.host_tier import HostTier
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.request import INSIDE, Request, RunOptions
from kvjax.serving.requests import Finish, Output, Stage, init_serving
from kvjax.serving.stored import StoredPrefixes
from kvjax.serving.turns import Job, Slots, Turn, TurnResult, apply, entries_of, logits_states, turn
from kvjax.spec import CacheSpec
from kvjax.state import CacheState


def _mixed_logits(model: Model, cache: Cache, scheduler: Scheduler) -> jax.Array:
    """The logits f32[S, V] of a mixed step, with its shapes: `serve` finds the model traced."""
    spec, size = cache.state.spec, scheduler.chunk_tokens(cache.state.spec)
    none = jnp.full((scheduler.most_chunks(spec),), -1, jnp.int32)
    view = mixed(cache.state, jnp.zeros((spec.max_seqs,), jnp.bool_), none, jnp.zeros_like(none), size)
    tokens, last = jnp.zeros((1, spec.max_seqs + size), jnp.int32), jnp.zeros((spec.max_seqs,), jnp.int32)
    return forward(model, tokens, cache.pools, view, last)[0]


_mixed_logits = OutermostJit(_mixed_logits, static_argnames="scheduler")


def check_run(model: Any, cache: Any, options: RunOptions) -> None:
    """Raises a ValueError unless this is host code with a whole cache, and a model and options that fit it."""
    check_model(model)
    check_cache(cache)
    check_placement(model, cache)
    check_on_host("generation", (model, cache.state, cache.pools), INSIDE)
    check_alive(cache)
    options.check(cache.state.spec)
    if options.store is not None and (why := unreadable(cache)):
        raise ValueError(f"cache: got one that is {why}, wanted one of this process with store=")


class Limits(NamedTuple):
    """The prompts that a model and a cache take.

    Attributes:
      spec: of the cache.
      vocabulary: the number of the model's logits.
      most_tokens: the most tokens of a request whose K/V fit, alone in the cache.
    """

    spec: CacheSpec
    vocabulary: int
    most_tokens: int

    @classmethod
    def of(cls, model: Model, cache: Cache, scheduler: Scheduler, top_logprobs: int) -> Limits:
        """The limits; a ValueError if the model has fewer logits than `top_logprobs` are to be noted."""
        vocabulary = _mixed_logits.eval_shape(model, cache, scheduler=scheduler).shape[-1]
        if top_logprobs > vocabulary:
            raise ValueError(f"top_logprobs: got {top_logprobs}, wanted at most the vocabulary, {vocabulary}")
        return cls(cache.state.spec, vocabulary, _most_tokens(cache.state, scheduler))

    def jobs(self, request: Request, number: int, seed: int, make: Callable[..., Job] = Job) -> list[Job]:
        """The samples of a request, the first of which has this number, and this seed if none was given."""
        jobs = list[Job]()
        max_tokens = self._max_tokens(len(request.prompt), request.max_new_tokens)
        for sample, stream in enumerate(request.streams(default=seed)):
            output = Output(len(request.prompt))
            job = make(number + sample, request, output, max_tokens, stream, namespace=request.namespace)
            job.leader = jobs[0] if jobs else job
            jobs.append(job)
        return jobs

    def refusal(self, prompt: np.ndarray) -> str | None:
        """Why a prompt can never run: "bad_request" or "row_full"; None if it can."""
        if not prompt.size or prompt.min() < 0 or prompt.max() >= self.vocabulary:
            return "bad_request"
        return "row_full" if prompt.size > self.spec.max_length else None

    def _max_tokens(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """The tokens at which a request ends, at the latest: beyond what fits it would only wait."""
        return max(min(prompt_tokens + max_new_tokens, self.most_tokens + 1), prompt_tokens + 1)


def _most_tokens(state: CacheState, scheduler: Scheduler) -> int:
    """The most tokens of a request whose K/V fit, alone in the cache."""
    spec = state.spec
    most = spec.max_length
    max_tokens: Any = np.int32(spec.max_length + 1)  # of the host, so that nothing is compiled
    for group, blocks in zip(state.groups, most_blocks(spec, scheduler, max_tokens), strict=True):
        num_blocks = int(group.num_blocks)
        if blocks > num_blocks:
            most = min(most, num_blocks * spec.block_size)
    return most


class StepOutput(NamedTuple):
    """The result of a loop, on the host.

    Attributes:
      steps: of the model.
      dispatched_at: when the loop started, of `time.monotonic`.
      new: {number of a request: its new tokens}.
      ended: requests that are over since.
    """

    steps: int
    dispatched_at: float
    new: dict[int, list[int]]
    ended: list[Job]


class Driver[C: AnyCache]:
    """Requests that run over a cache, from `submit` to their outputs.

    Attributes:
      state: the cache, the requests on the device, and events that nobody has got yet.
      active: the requests that the scheduler has, by their slots, until these are empty again.
      host_tier: moves blocks between the tiers.
      stored: reads of prefixes from a store, and writes to it; None without a store.
    """

    def __init__(
        self, model: Model, cache: C, options: RunOptions, scheduler: Scheduler, slots: Slots, own_rows: np.ndarray
    ):
        """Makes empty slots; `cache` is donated to the first loop. `own_rows` bool[S] are those that requests get."""
        self._model, self._options, self._scheduler = model, options, scheduler
        self._slots, self._own_rows = slots, own_rows
        self.spec = cache.state.spec
        self.state: GenerationState[C] = GenerationState(
            _empty_serving(cache.cache, options, slots), cache.host, own_rows, options
        )  # fmt: skip
        self.host_tier = HostTier(self.state, scheduler, slots.steps)
        self.stored = options.store and StoredPrefixes(options.store, self.state, scheduler)
        self.active: dict[int, Job] = {}
        self._free = deque(range(len(slots.max_tokens)))
        self._generations = [0] * len(slots.max_tokens)
        # Loops that are not read yet: their numbers, the times at which they started, and their results.
        self._turns: deque[tuple[int, float, EventLog | None, Turn]] = deque()
        self._statuses: deque[tuple[int, Sequence[Job], jax.Array]] = deque()  # of calls that are not read yet
        self._turn_number = 0
        worst = worst_step(self.spec, scheduler) + admission_events(self.spec, self.state.serving.width)
        listens = options.log_events or options.listener is not None or self.stored is not None
        self._log_size = 3 * worst + slots.steps * self.spec.max_seqs * len(self.spec.groups) // 2 if listens else 0

    @property
    def num_free_slots(self) -> int:
        """The number of slots without a request."""
        return len(self._free)

    @property
    def in_flight(self) -> int:
        """The number of loops that are not read yet."""
        return len(self._turns)

    def wait(self) -> None:
        """Waits until all loops that have started are over."""
        if self._turns:
            jax.block_until_ready(self._turns[-1][-1].numbers)

    def submit(self, jobs: Sequence[Job], cancelled: Sequence[Job] = ()) -> None:
        """Gives requests to the scheduler, and takes others from it, by one call."""
        for job in jobs:
            job.slot = self._free.popleft()
            job.generation = self._generations[job.slot]
            job.since = self._turn_number
            self.active[job.slot] = job
        entries = entries_of(jobs, cancelled, self._slots, int(self._own_rows.sum()))
        self.state.serving, statuses = apply(self.state.serving, entries, scheduler=self._scheduler)
        if jobs:
            self._statuses.append((self._turn_number, jobs, statuses))

    def adopt(self, wait_for: int = 0) -> None:
        """Adopts prefixes that have come from the store; for `wait_for` prompts it waits, until their deadline."""
        if self.stored:
            running = [job for job in self.active.values() if job.stage == Stage.RUNNING]
            blocks_ahead = sum(-(-job.left // self.spec.block_size) + 1 for job in running)
            self.stored.adopt(self.host_tier.call, blocks_ahead, wait_for)

    def dispatch(self, steps: int) -> None:
        """Starts a loop of at most so many steps of the model."""
        self.host_tier.empty_blocks()
        state, options = self.state, self._options
        state.serving, log, result = turn(
            self._model, state.serving, scheduler=self._scheduler, steps=np.int32(steps),
            num_columns=self._slots.num_columns, log_size=self._log_size, loop=options.loop,
            logits_fn=options.logits_fn, fixed_steps=options.fixed_steps, now=state.now(),
        )  # fmt: skip
        if log is not None:
            state.unpublished.append(log)
        self._turns.append((self._turn_number, time.monotonic(), log, result))
        self._turn_number += 1

    def read_statuses(self) -> list[Job]:
        """Reads whether requests were accepted; ends those that were refused, and returns them."""
        refused = []
        while self._statuses and self._statuses[0][0] <= self._turn_number - self.in_flight:
            _, jobs, statuses = self._statuses.popleft()
            for job, status in zip(jobs, np.asarray(statuses).tolist(), strict=False):  # then entries of nobody
                if status != Status.OK:
                    job.end(Status(status).name.lower())
                    self._release(job, job.generation)
                    refused.append(job)
        return refused

    def read(self) -> StepOutput:
        """Reads the oldest loop: new tokens, requests that are over, slots that are empty; makes the moves it asks for.

        The events of the loop are then the first of `state.unpublished`.
        """
        number, dispatched_at, log, turn_arrays = self._turns[0]
        result = turn_arrays.read()
        ended = self.read_statuses()
        self._turns.popleft()
        new, admitted, rows = dict[int, list[int]](), dict[int, tuple[int, Output]](), set(result.row.tolist())
        for slot, job in list(self.active.items()):
            if number < job.since:
                continue
            if not job.is_done:
                if tokens := self._update(job, result):
                    new[job.number] = tokens
                if job.is_done:
                    ended.append(job)
                if job.stage != Stage.WAITING:
                    admitted[job.number] = job.leader.number, job.output
            if result.stage[slot] in (Stage.DONE, Stage.CANCELLED) and slot not in rows:
                self._release(job, result.generation[slot] + 1)
        if self.stored and log is not None:
            self.stored.after_loop(log, admitted)
        self._move(result)
        return StepOutput(result.steps, dispatched_at, new, ended)

    def _update(self, job: Job, result: TurnResult) -> list[int]:
        """Adds a loop's tokens to a request's output; returns them."""
        slot, stage = job.slot, job.stage
        job.stage = result.stage[slot]
        new, finish = result.num_tokens[slot] - result.before[slot], Finish(result.finish[slot])
        reason = None if finish == Finish.NONE else finish.name.lower()
        if finish == Finish.LENGTH and job.is_cut and result.num_tokens[slot] >= job.max_tokens:
            reason = "row_full" if result.num_tokens[slot] > self.spec.max_length else "no_blocks"
        tokens = result.tokens[slot, :new].tolist()
        logprobs = result.logprobs[slot, :new].tolist()
        top = [] if result.top is None else [column[slot, :new].tolist() for column in result.top]

        def change(output: Output) -> None:
            output.add(tokens, logprobs, *top)
            output.cached_tokens, output.preemptions = result.cached[slot], result.preemptions[slot]
            output.finish = reason

        if tokens or reason is not None or job.stage != stage:
            job.change(change)
        return tokens

    def _release(self, job: Job, generation: int) -> None:
        """Takes the slot of a request that is over, as the loop's `drain` has; its next request has this generation."""
        del self.active[job.slot]
        self._free.append(job.slot)
        self._generations[job.slot] = generation

    def _move(self, result: TurnResult) -> None:
        """Moves blocks between the tiers for which the loop has stopped."""
        tier = self.host_tier
        if not tier.groups:
            return
        if result.refused == 1:
            tier.empty_refused()
        if result.onboard_slot >= 0:
            requests = jax.device_get(self.state.serving.requests)
            tier.onboard(requests, result.onboard_slot, int(np.argmax(self._own_rows & (result.row < 0))))
        while tier.swap():
            pass

    def compile(self) -> None:
        """Compiles all programs, while no request is there; changes nothing."""
        for steps in (1, self._slots.steps):  # jax compiles anew for what a program has returned
            self.host_tier.compile()
            if self.stored:
                self.stored.compile(self.host_tier.call)
            self.submit([])
            self.dispatch(steps)
        while self.in_flight:
            self.read()


def _empty_serving(cache: Cache, options: RunOptions, slots: Slots) -> Any:
    """The slots, over the cache on the device."""
    return init_serving(
        cache, slots.max_tokens, capacity=slots.capacity,
        width=slots.width, num_stop_tokens=slots.num_stop_tokens, num_ranges=slots.num_ranges, greedy=slots.greedy,
        top_logprobs=options.top_logprobs, logprobs=options.logprobs,
        logits_state=jax.device_put(logits_states([], slots.logits_state, len(slots.max_tokens))),
    )  # fmt: skip
