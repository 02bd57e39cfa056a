# SPDX-License-Identifier: Apache-2.0
"""One run: its requests fill a driver, which is turned until nothing is left."""

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
from kvjax.spec import CacheSpec

# Batches that need no more have arrays of these sizes, so that they share the programs of the first one.
MIN_SLOTS, MIN_TOKENS, MIN_COLUMNS, MIN_STOP_TOKENS = 32, 4096, 128, 4
MOST_SPARE = 2**18  # tokens: each has a few numbers of 4 bytes


def bucket(size: int, smallest: int) -> int:
    """`size` rounded up to `smallest` times a power of two, so that few shapes are compiled."""
    return smallest << max(-(-size // smallest) - 1, 0).bit_length()


class Batch[C: AnyCache]:
    """One run, from its requests to their outputs, turn by turn.

    Attributes:
      outputs: of all requests, a sample after the other.
      new: {output number: its tokens of the last turn}.
      closing: decoded events of `close`.
      driver: has the requests.
    """

    @own_transfers()
    def __init__(self, model: Model, cache: C, requests: Sequence[Request], options: RunOptions, steps: int):
        """Checks the arguments, before anything is donated; `steps` are those of options that say none."""
        check_run(model, cache, options)
        self._spec = spec = cache.state.spec
        requests = checked_requests(requests, options, spec)
        self._steps = options.steps or steps
        scheduler = dataclasses.replace(options.scheduler, k=min(options.scheduler.most_steps(spec), self._steps))
        limits = Limits.of(model, cache.cache, scheduler, options.top_logprobs)
        if any(request.prompt_logprobs_from is not None for request in requests):
            check_all_logits(model, cache.cache)
        self.outputs, self._jobs = list[Output](), list[Job]()
        for request in requests:
            self._add(request, limits)
        own_rows = np.asarray(cache.state.seqs.length) == 0  # bool[S]; others have the rows that are in use
        if self._jobs and not own_rows.any():
            raise ValueError("cache: got one without a free row")
        self.new: dict[int, list[int]] = {}
        self.closing: list[dict[str, Any]] = []
        without_one = [request for request in requests if request.logits_state is None]
        state = options.state_of((without_one or requests)[0]) if requests else None
        self.driver: Driver[C] = Driver(model, cache, options, scheduler, self._slots(state), own_rows)
        self.state, self._is_submitted = self.driver.state, False

    def _add(self, request: Request, limits: Limits) -> None:
        """Adds the outputs of a request; those of a prompt that cannot be computed at all end here."""
        number = len(self.outputs)
        jobs = limits.jobs(request, itertools.count(number), seed=number)
        self.outputs += [job.output for job in jobs]
        refusal = limits.refusal(request.prompt)
        if refusal is None:
            self._jobs += jobs
        for job in jobs:
            job.output.finish = refusal

    def _slots(self, logits_state: Any) -> Slots:
        """A slot for each output, in arrays of few sizes: most batches find the programs of the first one."""
        jobs, spec, size = self._jobs, self._spec, self._spec.block_size
        requests = [job.request for job in jobs]
        max_tokens = [job.max_tokens for job in jobs]
        number = bucket(max(len(jobs), 1), MIN_SLOTS)
        longest_answer = max((job.left for job in jobs), default=1)
        ranges = [request.num_ranges for request in requests if request.num_ranges is not None]
        samples = any(not request.is_greedy for request in requests)
        return Slots(
            [*max_tokens, *[0] * (number - len(jobs))],
            steps=self._steps,
            num_columns=min(self._steps, bucket(longest_answer, MIN_COLUMNS)),
            entries=number,
            entry_tokens=bucket(sum(len(job.tokens) for job in jobs), MIN_TOKENS),
            num_stop_tokens=bucket(max((len(request.stop_tokens) for request in requests), default=0), MIN_STOP_TOKENS),
            width=min(bucket(max(max(max_tokens, default=1) - 1, 1024), size), spec.max_length),
            num_ranges=bucket(max(ranges), 1) if ranges else None,
            logits_state=jax.tree.map(np.asarray, logits_state),
            # On a CPU the program that samples is as fast for greedy rows, and no other one is compiled.
            greedy=not samples and jax.default_backend() != "cpu",
            capacity=bucket(
                max(sum(max_tokens) + size * len(jobs), min(spec.max_seqs * (spec.max_length + size), MOST_SPARE)), size
            ),
        )

    @own_transfers()
    def turn(self) -> bool:
        """Enters the loop of the scheduler once, and reads what it did; returns whether there is more to do."""
        try:
            return self._turn()
        except BaseException:
            self.driver.drop_reads()
            raise

    def _turn(self) -> bool:
        driver, state = self.driver, self.state
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
            raise RuntimeError(f"rows {rows.tolist()} are in use, and no request has them")
        return bool(driver.active)

    def _score(self) -> None:
        """Scores all prompts for which that is wanted; keeps the jobs that go on."""
        for job in self._jobs:
            if job.leader is job and job.request.prompt_logprobs_from is not None:
                samples = [one for one in self._jobs if one.leader is job]
                while self.driver.score(samples, can_wait=False) is Step.MORE:
                    self.state.publish()
        self._jobs = [job for job in self._jobs if not job.is_done]

    @own_transfers()
    def close(self) -> None:
        """Releases the rows of a stream that is read no further, unless the caller has gone on with its cache."""
        state = self.state
        self.driver.drop_reads()
        if state.alive:
            state.events = self.closing
            with state.ctrl_c, jax.ensure_compile_time_eval():  # garbage collection may call this during a trace
                state.release_rows()
                state.publish()
                state.catch_up(is_last=True)


def checked_requests(requests: Any, options: RunOptions, spec: CacheSpec) -> list[Request]:
    """The requests as a list; a ValueError for anything else, and for a request that the run does not know."""
    wanted = "wanted kvjax.serving.Request objects; generate takes prompts"
    listed = list(requests) if isinstance(requests, Sequence) else [requests]
    for number, request in enumerate(listed):
        if not isinstance(request, Request):
            raise ValueError(f"requests: got a {type(request).__name__} as number {number}, {wanted}")
        with errors_of(number):
            options.check_request(request, spec)
            state = options.state_of(request)
            check_state(state, options.state_of(listed[0]), "arrays like those of the first prompt")
            check_request(options.logits_fn, request, state)
    return listed
