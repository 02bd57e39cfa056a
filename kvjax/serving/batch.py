# SPDX-License-Identifier: Apache-2.0
"""A run of requests: they fill a driver, which takes turns until no request is left."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax._compile import own_transfers
from kvjax.cache import AnyCache
from kvjax.model import Model
from kvjax.serving.constraints import check_request
from kvjax.serving.driver import Driver, Limits, check_run
from kvjax.serving.prompt_scores import Step, check_all_logits
from kvjax.serving.request import Request, RunOptions, check_state, errors_of
from kvjax.serving.requests import Output
from kvjax.serving.turns import Job, Slots
from kvjax.serving.weights import check_weights, known
from kvjax.spec import CacheSpec

# Minimum sizes of arrays, so small batches share the programs of the first batch.
MIN_SLOTS = 32
MIN_TOKENS = 4096
MIN_COLUMNS = 128
MIN_STOP_TOKENS = 4
MAX_SPARE = 2**18  # tokens, each with a few numbers of 4 bytes


def bucket(size: int, smallest: int) -> int:
    """Rounds `size` up to `smallest` times a power of two, so few shapes are compiled."""
    return smallest << max(-(-size // smallest) - 1, 0).bit_length()


class Batch[C: AnyCache]:
    """A run, from its requests to their outputs, turn by turn.

    Attributes:
      outputs: outputs of all requests, with the samples of a request next to each other.
      new: tokens of the last turn, by output number.
      closing: decoded events of `close`.
      driver: the driver of the requests.
    """

    @own_transfers()
    def __init__(self, model: Model, cache: C, requests: Sequence[Request], options: RunOptions, steps: int):
        """Checks the arguments before anything is donated. `steps` is the default of `options.steps`."""
        check_run(model, cache, options)
        self._spec = spec = cache.state.spec
        requests = checked_requests(requests, options, spec)
        self._steps = options.steps or steps
        scheduler = dataclasses.replace(options.scheduler, k=min(options.scheduler.max_steps(spec), self._steps))
        limits = Limits.of(model, cache.cache, scheduler, options.top_logprobs)
        if any(request.prompt_logprobs_from is not None for request in requests):
            check_all_logits(model, cache.cache)
        self.outputs = list[Output]()
        self._jobs = list[Job]()
        for request in requests:
            self._add(request, limits)
        if options.reuse != "any":
            check_weights(model, known(cache.state), {job.namespace for job in self._jobs})
        own_rows = np.asarray(cache.state.seqs.length) == 0  # bool[S]; rows in use belong to other code
        if self._jobs and not own_rows.any():
            raise ValueError("cache: got no free row, wanted at least 1")
        self.new: dict[int, list[int]] = {}
        self.closing: list[dict[str, Any]] = []
        stateless_requests = [request for request in requests if request.logits_state is None]
        state = options.state_of((stateless_requests or requests)[0]) if requests else None
        self.driver: Driver[C] = Driver(model, cache, options, scheduler, self._slots(state), own_rows)
        self.state = self.driver.state
        self._is_submitted = False

    def _add(self, request: Request, limits: Limits) -> None:
        """Adds the outputs of a request. If its prompt can never be computed, they end here."""
        first_number = len(self.outputs)
        jobs = limits.jobs(request, itertools.count(first_number), seed=first_number)
        self.outputs += [job.output for job in jobs]
        refusal = limits.refusal(request.prompt)
        if refusal is None:
            self._jobs += jobs
        for job in jobs:
            job.output.finish = refusal

    def _slots(self, logits_state: Any) -> Slots:
        """Makes a slot for each output. Arrays have few sizes, so most batches share programs with the first batch."""
        jobs = self._jobs
        spec = self._spec
        block_size = self._spec.block_size
        requests = [job.request for job in jobs]
        max_tokens = [job.max_tokens for job in jobs]
        num_slots = bucket(max(len(jobs), 1), MIN_SLOTS)
        longest_answer = max((job.remaining for job in jobs), default=1)
        ranges = [request.num_ranges for request in requests if request.num_ranges is not None]
        samples = any(not request.is_greedy for request in requests)
        needed = sum(max_tokens) + block_size * len(jobs)
        full_rows = spec.max_seqs * (spec.max_length + block_size)
        return Slots(
            [*max_tokens, *[0] * (num_slots - len(jobs))],
            steps=self._steps,
            num_columns=min(self._steps, bucket(longest_answer, MIN_COLUMNS)),
            entries=num_slots,
            entry_tokens=bucket(sum(len(job.tokens) for job in jobs), MIN_TOKENS),
            num_stop_tokens=bucket(max((len(request.stop_tokens) for request in requests), default=0), MIN_STOP_TOKENS),
            width=min(bucket(max(max(max_tokens, default=1) - 1, 1024), block_size), spec.max_length),
            num_ranges=bucket(max(ranges), 1) if ranges else None,
            logits_state=jax.tree.map(np.asarray, logits_state),
            # On a CPU the program that samples is as fast for greedy rows, so only this program is compiled.
            greedy=not samples and jax.default_backend() != "cpu",
            min_p=any(request.has_min_p for request in requests),
            capacity=bucket(max(needed, min(full_rows, MAX_SPARE)), block_size),
        )

    @own_transfers()
    def turn(self) -> bool:
        """Runs the scheduler's loop, and reads its result. Returns whether there is more to do."""
        try:
            return self._turn()
        except BaseException:
            self.driver.drop_reads()
            raise

    def _turn(self) -> bool:
        driver = self.driver
        state = self.state
        self.new = {}
        if not self._jobs:
            return False
        state.catch_up()
        if self._is_submitted:
            driver.adopt([])
        else:
            self._score()
            if not self._jobs:
                return False
            driver.submit(self._jobs)
            self._is_submitted = True
            driver.read_statuses()
            waiting = [job for job in self._jobs if not job.is_done]
            driver.adopt(sorted(waiting, key=lambda job: -job.request.priority), wait_for=driver.num_rows)
        driver.dispatch(self._steps)
        state.publish(keep=driver.in_flight)  # the events of earlier turns, while the device works
        self.new = driver.read().new
        if not driver.active and (rows := state.rows_in_use()).size:
            raise RuntimeError(f"rows {rows.tolist()} are in use without a request")
        return bool(driver.active)

    def _score(self) -> None:
        """Scores the prompts whose log-probabilities are requested, and keeps the jobs that continue."""
        for job in self._jobs:
            if job.leader is job and job.request.prompt_logprobs_from is not None:
                samples = [sample for sample in self._jobs if sample.leader is job]
                while self.driver.score(samples, can_wait=False) is Step.MORE:
                    self.state.publish()
        self._jobs = [job for job in self._jobs if not job.is_done]

    @own_transfers()
    def close(self) -> None:
        """Releases the rows of an abandoned stream, unless the caller has gone on with its cache."""
        state = self.state
        self.driver.drop_reads()
        if state.alive:
            state.events = self.closing
            with state.ctrl_c, jax.ensure_compile_time_eval():  # garbage collection may call this during a trace
                state.release_rows()
                state.publish()
                state.catch_up(is_last=True)


def checked_requests(requests: Any, options: RunOptions, spec: CacheSpec) -> list[Request]:
    """The requests as a list. Raises a ValueError for other values and for requests unknown to the run."""
    wanted = "wanted kvjax.serving.Request objects; generate takes prompts"
    listed = list(requests) if isinstance(requests, Sequence) else [requests]
    for index, request in enumerate(listed):
        if not isinstance(request, Request):
            raise ValueError(f"requests: got a {type(request).__name__} as number {index}, {wanted}")
        with errors_of(index):
            options.check_request(request, spec)
            state = options.state_of(request)
            check_state(state, options.state_of(listed[0]), "arrays like those of the first prompt")
            check_request(options.logits_fn, request, state)
    return listed
