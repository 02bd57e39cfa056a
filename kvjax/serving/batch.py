# SPDX-License-Identifier: Apache-2.0
"""One generation: its prompts fill a driver, which is turned until nothing is left."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from kvjax._compile import own_transfers
from kvjax.cache import Cache
from kvjax.policies.retention import Retention
from kvjax.serving.driver import Driver, Limits
from kvjax.serving.inputs import MIN_TOKENS, Inputs, bucket
from kvjax.serving.requests import Output
from kvjax.serving.sampling import Sampling
from kvjax.serving.turns import Job, Slots
from kvjax.tiered import TieredCache

MIN_SLOTS = 32
MIN_COLUMNS = 128  # tokens of a request in a loop, if its steps are as many: fewer compile no other program
MOST_SPARE = 2**18  # tokens: each has a few numbers of 4 bytes


class Batch[C: (Cache, TieredCache)]:
    """One generation, from its prompts to their outputs, turn by turn.

    Attributes:
      outputs: of all prompts.
      new: {output number: its tokens of the last turn}.
      closing: decoded events of `close`.
      driver: has the requests.
    """

    @own_transfers()
    def __init__(self, inputs: Inputs[C]):
        options, self._inputs = inputs.options, inputs
        k = min(options.scheduler.most_steps(inputs.spec), options.steps)
        options.scheduler = dataclasses.replace(options.scheduler, k=k)
        self.outputs = [Output(len(prompt)) for prompt in inputs.prompts]
        self.new: dict[int, list[int]] = {}
        self.closing: list[dict[str, Any]] = []
        self._jobs = self._admissible(Limits.of(inputs.model, inputs.cache.cache, options))
        self.driver: Driver[C] = Driver(inputs.model, inputs.cache, options, self._slots(), inputs.own_rows)
        self.state, self._is_submitted = self.driver.state, False

    def _admissible(self, limits: Limits) -> list[Job]:
        """The outputs of prompts that can be computed at all; the others end here."""
        inputs, jobs = self._inputs, dict[int, Job]()
        for number, prompt in enumerate(inputs.prompts):
            self.outputs[number].finish = limits.refusal(prompt)
            if self.outputs[number].finish is None:
                new, first = int(inputs.max_new_tokens[number]), int(inputs.first_sample[number])
                sampling, retention = inputs.sampling, inputs.retention
                jobs[number] = Job(
                    number, prompt.astype(np.int32), self.outputs[number], unlimited=len(prompt) + new,
                    max_tokens=limits.max_tokens(len(prompt), new), seed=inputs.seeds[number],
                    sampling=Sampling() if sampling is None else jax.tree.map(lambda x, n=number: x[n], sampling),
                    stop_tokens=inputs.stop_tokens, priority=inputs.priorities[number],
                    namespace=int(inputs.namespaces[number]),
                    retention=retention and Retention(retention.ranges[number], retention.decode[number]),
                )  # fmt: skip
                jobs[number].leader = jobs[first]
        if jobs and not inputs.own_rows.any():
            raise ValueError("cache: got one without a free row")
        return list(jobs.values())

    def _slots(self) -> Slots:
        """A slot for each prompt, in arrays of few sizes: most batches find the programs of the first one."""
        inputs, spec = self._inputs, self._inputs.spec
        max_tokens = [job.max_tokens for job in self._jobs]
        number = bucket(max(len(max_tokens), 1), MIN_SLOTS)
        size, longest = spec.block_size, max(max_tokens, default=1) - 1
        least = min(spec.max_seqs * (spec.max_length + size), MOST_SPARE)
        longest_answer = max((job.max_tokens - len(job.tokens) for job in self._jobs), default=1)
        return Slots(
            [*max_tokens, *[0] * (number - len(max_tokens))],
            steps=inputs.options.steps,
            num_columns=min(inputs.options.steps, bucket(longest_answer, MIN_COLUMNS)),
            entries=number,
            entry_tokens=bucket(sum(len(job.tokens) for job in self._jobs), MIN_TOKENS),
            num_stop_tokens=len(inputs.stop_tokens),
            width=min(bucket(max(longest, 1024), size), spec.max_length),
            num_ranges=None if inputs.retention is None else inputs.retention.ranges.shape[1],
            greedy=inputs.sampling is None,
            capacity=bucket(max(sum(max_tokens) + size * len(max_tokens), least), size),
        )

    @own_transfers()
    def turn(self) -> bool:
        """Enters the loop of the scheduler once, and reads what it did; returns whether there is more to do."""
        try:
            return self._turn()
        except BaseException:
            if self.driver.stored:
                self.driver.stored.drop()
            raise

    def _turn(self) -> bool:
        driver, state = self.driver, self.state
        self.new = {}
        if not self._jobs:
            return False
        state.catch_up()
        first_rows = 0 if self._is_submitted else int(self._inputs.own_rows.sum())
        if not self._is_submitted:
            self._submit()
        driver.adopt(wait_for=first_rows)
        driver.dispatch(self._inputs.options.steps)
        state.publish(keep=driver.in_flight)  # the events of earlier turns, while the device works
        self.new = driver.read().new
        if not driver.active and (rows := state.rows_in_use()).size:
            raise RuntimeError(f"rows {rows.tolist()} are in use, and no request has them")
        return bool(driver.active)

    def _submit(self) -> None:
        """Submits all requests; begins to read what the store has of their prompts."""
        driver, inputs = self.driver, self._inputs
        driver.submit(self._jobs)
        self._is_submitted = True
        driver.read_statuses()
        if driver.stored:
            leaders = {job.leader.number: job.leader for job in self._jobs if not job.is_done}
            by_priority = sorted(leaders, key=lambda number: -inputs.priorities[number])
            driver.stored.begin({n: (leaders[n].tokens, leaders[n].namespace) for n in by_priority})

    @own_transfers()
    def close(self) -> None:
        """Releases the rows of a stream that is read no further, unless the caller has gone on with its cache."""
        state = self.state
        if self.driver.stored:
            self.driver.stored.drop()
        if state.alive:
            state.events = self.closing
            with state.ctrl_c, jax.ensure_compile_time_eval():  # garbage collection may call this during a trace
                state.release_rows()
                state.publish()
                state.catch_up(is_last=True)
