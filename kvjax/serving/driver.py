# SPDX-License-Identifier: Apache-2.0
"""The host loop of serving: requests go in, the scheduler's loop runs, and the host reads its results.

    score     computes log-probabilities of a prompt, if a request wants them, before the request is submitted
    submit    submits and cancels requests in a single call, and gives each request a slot
    dispatch  empties blocks if a host tier can take them, and starts the loop without waiting for it
    read      reads the oldest unread loop: its tokens, finished requests, and moves between the tiers

`run_batch` and `stream` fill a driver, and run these steps until no request is left. An `Engine` has a driver in its
thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from kvjax.serving.capacity import admission_events, max_blocks, worst_step
from kvjax.serving.constraints import as_tree
from kvjax.serving.decode import check_cache
from kvjax.serving.host_tier import HostTier
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.park import with_pools, without_pools
from kvjax.serving.prompt_scores import PromptScores, Step
from kvjax.serving.request import INSIDE, Request, RunOptions
from kvjax.serving.requests import Output, Serving, Stage, finish_of, init_serving
from kvjax.serving.shortages import ShortageLog, explain
from kvjax.serving.stored import StoredPrefixes
from kvjax.serving.turns import Job, Slots, TurnArrays, TurnResult, apply, stacked, turn
from kvjax.serving.weights import Weights, known
from kvjax.spec import CacheSpec
from kvjax.state import CacheState


def _mixed_logits(model: Model, cache: Cache, scheduler: Scheduler) -> jax.Array:
    """The logits f32[S, V] of a mixed step, traced with its shapes, so `serve` need not trace the model again."""
    spec = cache.state.spec
    chunk_tokens = scheduler.chunk_tokens(cache.state.spec)
    no_rows = jnp.full((scheduler.max_chunks(spec),), -1, jnp.int32)
    view = mixed(cache.state, jnp.zeros((spec.max_seqs,), jnp.bool_), no_rows, jnp.zeros_like(no_rows), chunk_tokens)
    tokens = jnp.zeros((1, spec.max_seqs + chunk_tokens), jnp.int32)
    last = jnp.zeros((spec.max_seqs,), jnp.int32)
    return forward(model, tokens, cache.pools, view, last)[0]


_mixed_logits = OutermostJit(_mixed_logits, static_argnames="scheduler")


def check_run(model: Any, cache: Any, options: RunOptions) -> None:
    """Raises a ValueError unless this is host code, the cache is whole, and the model and options fit the cache."""
    check_model(model)
    check_cache(cache)
    check_placement(model, cache)
    check_on_host("generation", (model, cache.state, cache.pools), INSIDE)
    check_alive(cache)
    options.check(cache.state.spec)
    if options.store is not None and (why := unreadable(cache)):
        raise ValueError(f"cache: got a cache that is {why}, wanted a cache of this process with store=")


class Limits(NamedTuple):
    """The limits of prompts for a model and a cache."""

    spec: CacheSpec
    vocabulary: int  # number of the model's logits
    max_tokens: int  # maximum tokens of a request whose K/V fit if it is alone in the cache

    @classmethod
    def of(cls, model: Model, cache: Cache, scheduler: Scheduler, top_logprobs: int) -> Limits:
        """The limits. Raises a ValueError if the model has fewer than `top_logprobs` logits."""
        vocabulary = _mixed_logits.eval_shape(model, cache, scheduler=scheduler).shape[-1]
        if top_logprobs > vocabulary:
            raise ValueError(f"top_logprobs: got {top_logprobs}, wanted at most the vocabulary, {vocabulary}")
        return cls(cache.state.spec, vocabulary, _max_tokens(cache.state, scheduler))

    def jobs[J: Job](
        self, request: Request, numbers: Iterator[int], seed: int, make: Callable[..., J] = Job
    ) -> list[J]:
        """Makes a job for each sample of a request, with the next numbers.

        `seed` is the seed of the first sample if the request has none.
        """
        jobs = list[J]()
        prompt_tokens = len(request.prompt)
        # A request must not grow beyond the cache, because it would wait forever.
        max_tokens = max(min(prompt_tokens + request.max_new_tokens, self.max_tokens + 1), prompt_tokens + 1)
        for stream in request.streams(default=seed):
            output = Output(prompt_tokens)
            job = make(next(numbers), request, output, max_tokens, stream, namespace=request.namespace)
            job.leader = jobs[0] if jobs else job
            job.fits = prompt_tokens <= self.max_tokens
            jobs.append(job)
        return jobs

    def refusal(self, prompt: np.ndarray) -> str | None:
        """The reason why a prompt can never run, "bad_request" or "row_full", or None if it can run."""
        if not prompt.size or prompt.min() < 0 or prompt.max() >= self.vocabulary:
            return "bad_request"
        return "row_full" if prompt.size > self.spec.max_length else None


def _max_tokens(state: CacheState, scheduler: Scheduler) -> int:
    """The maximum tokens of a request whose K/V fit if it is alone in the cache."""
    spec = state.spec
    max_fitting = spec.max_length
    max_tokens: Any = np.int32(spec.max_length + 1)  # on the host, so nothing is compiled
    for group, blocks in zip(state.groups, max_blocks(spec, scheduler, max_tokens), strict=True):
        num_blocks = int(group.num_blocks)
        if blocks > num_blocks:
            max_fitting = min(max_fitting, num_blocks * spec.block_size)
    return max_fitting


class StepOutput(NamedTuple):
    """The result of a loop, on the host."""

    steps: int  # steps of the model
    dispatched_at: float  # time of `time.monotonic` when the loop started
    new: dict[int, list[int]]  # new tokens, by the number of the job


class _StartedLoop(NamedTuple):
    """A started loop, before the host reads it."""

    number: int
    dispatched_at: float  # time of `time.monotonic`
    log: EventLog | None
    arrays: TurnArrays


class _Submission(NamedTuple):
    """A call of `submit` whose statuses the host has not read yet."""

    first_loop: int  # number of the first loop after the call
    jobs: Sequence[Job]
    statuses: jax.Array  # i32[R]


class Driver[C: AnyCache]:
    """Requests running over a cache, from `submit` to their outputs.

    Attributes:
      state: the cache, the requests on the device, and unpublished events.
      num_rows: number of rows for requests.
      active: requests of the scheduler by slot, until the slot is empty again.
      host_tier: moves blocks between the tiers.
      logits_fn: a pytree on the devices of the cache. None leaves logits as they are.
      stored: reads of prefixes from a store, and writes to it. None without a store.
      version: number of updates of the weights so far.
    """

    def __init__(
        self, model: Model, cache: C, options: RunOptions, scheduler: Scheduler, slots: Slots, own_rows: np.ndarray
    ):
        """Makes empty slots. `cache` is donated to the first loop, and requests get rows where bool[S] `own_rows`."""
        self._model = model
        self._weights = Weights(model)
        self.version = 0
        self._options = options
        self._scheduler = scheduler
        self._slots = slots
        self._own_rows = own_rows
        self.num_rows = int(own_rows.sum())
        self.spec = cache.state.spec
        length = cache.state.seqs.length
        self._sharding = length.sharding if length.committed else None
        self.logits_fn = self.placed(options.logits_fn)
        logits_state = jax.device_put(stacked([], slots.logits_state, len(slots.max_tokens)))
        serving: Serving = init_serving(
            cache.cache,
            slots.max_tokens,
            capacity=slots.capacity,
            width=slots.width,
            logits_state=logits_state,
            num_stop_tokens=slots.num_stop_tokens,
            num_ranges=slots.num_ranges,
            greedy=slots.greedy,
            min_p=slots.min_p,
            top_logprobs=options.top_logprobs,
            logprobs=options.logprobs,
            speculates=options.drafter is not None,
        )
        weights = known(cache.state)
        self.state: GenerationState[C] = GenerationState(serving, cache.host, own_rows, options)
        self.state.weights = weights
        self.host_tier = HostTier(self.state, scheduler, slots.steps)
        self.stored = options.store and StoredPrefixes(options.store, self.state, scheduler)
        self._scores = PromptScores(
            self.state, self.host_tier, self.stored, scheduler, num_top=options.top_logprobs, has_log=slots.has_log
        )
        self.active: dict[int, Job] = {}
        self._free = deque(range(len(slots.max_tokens)))
        self._generations = [0] * len(slots.max_tokens)
        self._started: deque[_StartedLoop] = deque()
        self._submissions: deque[_Submission] = deque()
        self._shortages = ShortageLog()
        self._loop_number = 0
        step_events = worst_step(self.spec, scheduler) + admission_events(self.spec, self.state.serving.width)
        usual_events = slots.steps * self.spec.max_seqs * len(self.spec.groups) // 2
        self._log_size = 3 * step_events + usual_events if slots.has_log else 0

    def placed(self, logits_fn: Any) -> Any:
        """Converts a `logits_fn` to a pytree with its arrays on the cache's devices."""
        return jax.device_put(as_tree(logits_fn), self._sharding)

    @property
    def num_free_slots(self) -> int:
        """The number of slots without a request."""
        return len(self._free)

    @property
    def in_flight(self) -> int:
        """The number of loops still unread by the host."""
        return len(self._started)

    def wait(self) -> None:
        """Waits until all started loops have ended."""
        if self._started:
            jax.block_until_ready(self._started[-1].arrays.scalars_and_rows)

    def score(self, jobs: Sequence[Job], *, can_wait: bool) -> Step:
        """Scores the next prompt tokens of samples of a request, and ends samples without an answer.

        Without blocks the samples end as well, unless they can wait for blocks of other requests.
        """
        step = self._scores.step(self._model, jobs) if jobs[0].fits else Step.NO_BLOCKS
        is_refused = step is Step.NO_BLOCKS and not (can_wait and jobs[0].fits)
        for job in jobs:
            if is_refused or (step is Step.DONE and not job.request.max_new_tokens):
                job.stage = Stage.DONE
                job.end("no_blocks" if is_refused else "length", self._reason(job) if is_refused else None)
        return step

    def submit(self, jobs: Sequence[Job], cancelled: Sequence[Job] = ()) -> None:
        """Submits requests to the scheduler, and cancels others, in a single call."""
        for job in jobs:
            job.slot = self._free.popleft()
            job.generation = self._generations[job.slot]
            job.first_loop = self._loop_number
            self.state.weights[job.namespace] = self._weights
            self.active[job.slot] = job
        arguments = self._slots.arguments(jobs, self.num_rows)
        ends = self._slots.ends(cancelled)
        self.state.serving, statuses = apply(self.state.serving, arguments, ends, scheduler=self._scheduler)
        if jobs:
            self._submissions.append(_Submission(self._loop_number, jobs, statuses))

    def adopt(self, jobs: Sequence[Job], wait_for: int = 0) -> None:
        """Starts to read prefixes of new prompts from the store, in this order, and adopts the prefixes already read.

        For the first `wait_for` prompts it waits, until their deadline.
        """
        if self.stored:
            self.stored.begin(jobs)
            running = [job for job in self.active.values() if job.stage == Stage.RUNNING]
            blocks_ahead = sum(-(-job.remaining // self.spec.block_size) + 1 for job in running)
            self.stored.adopt(self.host_tier.call, blocks_ahead, wait_for)

    def drop_reads(self) -> None:
        """Drops all reads from the store, at the end of a run."""
        if self.stored:
            self.stored.drop()

    def dispatch(self, steps: int) -> None:
        """Starts a loop of at most this many steps of the model."""
        self.host_tier.empty_blocks()
        state = self.state
        options = self._options
        state.serving, log, result = turn(
            self._model,
            state.serving,
            scheduler=self._scheduler,
            steps=np.int32(steps),
            num_columns=self._slots.num_columns,
            log_size=self._log_size,
            loop=options.loop,
            logits_fn=self.logits_fn,
            drafter=options.drafter,
            fixed_steps=options.fixed_steps,
            now=state.now(),
        )
        if log is not None:
            state.unpublished.append(log)
        self._started.append(_StartedLoop(self._loop_number, time.monotonic(), log, result))
        self._loop_number += 1

    def read_statuses(self) -> None:
        """Reads whether submitted requests were accepted, and ends refused requests."""
        while self._submissions and self._submissions[0].first_loop <= self._loop_number - self.in_flight:
            _, jobs, statuses = self._submissions.popleft()
            for job, status in zip(jobs, np.asarray(statuses).tolist(), strict=False):  # then come empty entries
                if status != Status.OK:
                    is_refused = status == Status.NO_BLOCKS
                    job.end(Status(status).name.lower(), self._reason(job) if is_refused else None)
                    self._release(job, job.generation)

    def read(self) -> StepOutput:
        """Reads the oldest loop: new tokens, finished requests and empty slots. Then makes the requested moves.

        The events of the loop are then the first of `state.unpublished`.
        """
        loop = self._started[0]
        result = loop.arrays.read()
        self.read_statuses()
        self._started.popleft()
        new_tokens = dict[int, list[int]]()
        admitted = list[Job]()
        slots_with_rows = set(result.row.tolist())
        for slot, job in list(self.active.items()):
            if loop.number < job.first_loop:
                continue
            if not job.is_done:
                if tokens := self._update(job, result):
                    new_tokens[job.number] = tokens
                if job.stage != Stage.WAITING:
                    admitted.append(job)
            if result.stage[slot] in (Stage.DONE, Stage.CANCELLED) and slot not in slots_with_rows:
                self._release(job, result.generation[slot] + 1)
        if self.stored and loop.log is not None:
            self.stored.after_loop(loop.log, admitted)
        self._move(result)
        return StepOutput(result.steps, loop.dispatched_at, new_tokens)

    def _update(self, job: Job, result: TurnResult) -> list[int]:
        """Adds a loop's tokens to a request's output. Returns them."""
        slot = job.slot
        stage = job.stage
        job.stage = result.stage[slot]
        num_tokens = result.num_tokens[slot]
        finish = finish_of(result.finish[slot])
        if finish == "length" and job.is_cut and num_tokens >= job.max_tokens:
            finish = "row_full" if num_tokens > self.spec.max_length else "no_blocks"
        num_new = num_tokens - result.num_tokens_before[slot]
        # A canonical request makes its last tokens again after its K/V were lost.
        num_known = len(job.tokens) + len(job.output.tokens) - result.num_tokens_before[slot]
        made_again = result.tokens[slot, : min(num_new, num_known)].tolist()
        known = job.output.tokens[len(job.output.tokens) - num_known :][: len(made_again)]
        if made_again != known:
            raise RuntimeError(f"request {job.number} made tokens {made_again} again, wanted {known}")
        new = slice(num_known, num_new)
        tokens = result.tokens[slot, new].tolist()
        logprobs = result.logprobs[slot, new].tolist()
        top = [] if result.top is None else [column[slot, new].tolist() for column in result.top]

        if result.preemptions[slot] > job.output.preemptions and not self._shortages.has("was preempted"):
            shortage = explain(self.state.cache.state, self._scheduler, num_tokens)
            self._shortages.write("was preempted", job.number, shortage.reason)
        reason = self._reason(job) if finish == "no_blocks" else None

        def change(output: Output) -> None:
            output.add(tokens, logprobs, *top)
            output.versions += [self.version] * len(tokens)
            output.reason = reason
            output.cached_tokens = result.cached[slot] if job.found_tokens is None else job.found_tokens
            output.preemptions = result.preemptions[slot]
            if result.drafted is not None and result.accepted is not None:
                output.drafted_tokens = result.drafted[slot]
                output.accepted_tokens = result.accepted[slot]
            output.finish = finish

        if tokens or finish is not None or job.stage != stage:
            job.change(change)
        return tokens

    def _reason(self, job: Job) -> str:
        """Why a request ends for lack of blocks, for its output. The first of a run is also in the log."""
        shortage = explain(self.state.cache.state, self._scheduler, len(job.tokens) + job.request.max_new_tokens)
        waits = "would wait for ever for other code, and " if shortage.is_held else ""
        self._shortages.write(f"{waits}ended with no_blocks", job.number, shortage.reason)
        return shortage.reason

    def _release(self, job: Job, generation: int) -> None:
        """Frees the slot of a request that the loop has drained. The slot's next request gets this generation."""
        del self.active[job.slot]
        self._free.append(job.slot)
        self._generations[job.slot] = generation

    def _move(self, result: TurnResult) -> None:
        """Makes the moves between the tiers for which the loop has stopped."""
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

    def change(self, program: Callable[..., Any], *args: Any) -> Any:
        """Runs a program over the requests and the metadata, between loops. Returns its second result."""
        state = self.state
        serving, result = program(without_pools(state.serving), *args)
        state.serving = with_pools(serving, state.cache.pools)
        return result

    def settle(self) -> None:
        """Notes which requests wait again after a change."""
        requests = self.state.serving.requests
        stages, preemptions = jax.device_get((requests.stage, requests.preemptions))
        for slot, job in self.active.items():
            if not job.is_done:
                job.stage = int(stages[slot])
                job.output.preemptions = int(preemptions[slot])

    def withdraw(self, slots: np.ndarray) -> list[Job]:
        """Takes requests back whose slots, where bool[W], a change has emptied."""
        jobs = [self.active[slot] for slot in np.flatnonzero(slots).tolist()]
        for job in jobs:
            self._release(job, job.generation + 1)
            job.slot = -1
            job.stage = Stage.WAITING
        return sorted(jobs, key=lambda job: job.number)

    def replace_model(self, model: Model) -> None:
        """Computes with a model of the same shapes from the next loop on."""
        self._model = model
        self._weights = Weights(model)
        self.version += 1

    def compile(self) -> None:
        """Compiles all programs before the first request. Changes nothing."""
        for steps in (1, self._slots.steps):  # jax compiles again for arrays returned by a program
            self.host_tier.compile()
            if self.stored:
                self.stored.compile(self.host_tier.call)
            self.submit([])
            self.dispatch(steps)
        while self.in_flight:
            self.read()
