# SPDX-License-Identifier: Apache-2.0
"""The turns of engines and batches against the scheduler in plain Python: each loop leaves both in the same state.

The oracle gets everything which an engine or a batch gives to its driver: requests and cancels, then loops of steps.
After each loop `Both.agree` compares all of the state, and every byte. When requests are over, it compares outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import kvjax
from kvjax.serving import Engine, Request, RunOptions
from kvjax.serving.batch import Batch
from kvjax.serving.capacity import admission_events, worst_step
from kvjax.serving.driver import Driver
from kvjax.serving.engine_thread import EngineThread
from kvjax.serving.options import Scheduler as Options
from kvjax.serving.turns import Job
from tests.oracle import requests, serving
from tests.oracle.blocks import Status
from tests.oracle.bytes_machine import SIZE, VOCAB
from tests.oracle.cache import Oracle
from tests.oracle.events import named, without_copied_paths
from tests.oracle.requests import Ask, Finish
from tests.oracle.scheduler import Scheduler
from tests.oracle.serving import COLUMNS, MODEL, ROWS, SLOTS, TENANTS, Both, oracle_options

STEPS = 4  # of a batch's loop


class Driven(Both):
    """A driver and the oracle's scheduler.

    Attributes:
      accepted: the oracle's request of each accepted job, and its status for a refused job.
      number: number of the last submitted job.
    """

    def __init__(self, options: Options, num_blocks: int, seed: int, drafter: Any = None):
        super().__init__(options, "full", num_blocks, seed)
        self.num_blocks = num_blocks
        self.accepted: dict[Job, requests.Request | Status] = {}
        listener = {"log_events": False, "listener": lambda events: None}
        self.options_of_run = RunOptions(scheduler=options, drafter=drafter, **listener)

    def attach(self, driver: Driver) -> None:
        """Lets the oracle follow a driver, which has no requests so far."""
        options, self.number, self.driver = oracle_options(driver._scheduler), -1, driver
        self.oracle = Scheduler(self.oracle.cache, options, serving.choose, list(driver._slots.max_tokens))
        submit, dispatch = driver.submit, driver.dispatch

        def submitted(jobs: Sequence[Job], cancelled: Sequence[Job] = ()) -> None:
            submit(jobs, cancelled)
            self.put(jobs, cancelled)

        def dispatched(steps: int) -> None:
            dispatch(steps)
            self.loop(steps)

        driver.submit, driver.dispatch = submitted, dispatched  # type: ignore[method-assign]

    def put(self, jobs: Sequence[Job], cancelled: Sequence[Job]) -> None:
        """Gives the oracle the requests and cancels of a call."""
        for job in cancelled:
            self.tally[f"cancel {self.oracle.cancel(job.slot, job.generation).name}"] += 1
        asks: list[Ask] = []
        leaders: list[Any] = [job.leader for job in jobs]
        for at, job in enumerate(jobs):
            assert job.number > self.number, "an earlier request comes later"
            self.number, first, request = job.number, leaders.index(job.leader), job.request
            assert job.max_tokens == self.limit(job)[0]
            options = {"namespace": job.namespace, "stop": request.stop_tokens.tolist()}
            sample_of = first if first < at else -1
            asks.append(Ask(job.tokens.tolist(), job.max_tokens, request.priority, **options, sample_of=sample_of))
        for job, (status, slot, generation) in zip(jobs, self.oracle.submit(asks, [j.slot for j in jobs]), strict=True):
            self.tally[f"submit {status.name}"] += 1
            self.accepted[job] = self.oracle.requests[slot] if status == Status.OK else status
            assert status != Status.OK or (slot, generation) == (job.slot, job.generation)

    def limit(self, job: Job) -> tuple[int, str]:
        """The tokens at which a request ends at the latest, by the oracle alone, and the reason."""
        alone = Scheduler(Oracle(self.num_blocks, SIZE, ROWS, COLUMNS), self.oracle.options, serving.choose)
        prompt, most = len(job.tokens), len(job.tokens) + job.request.max_new_tokens
        alone.max_tokens = [most] * len(alone.requests)
        for max_tokens in range(prompt + 1, most + 1):
            status = alone._check(Ask([0] * prompt, max_tokens), [], alone.requests[0])
            if status != Status.OK:
                return max(max_tokens - 1, prompt + 1), status.name.lower()
        return most, "length"

    def loop(self, steps: int) -> None:
        """Lets the oracle run a loop, and compares everything."""
        oracle, driver, scheduler = self.oracle, self.driver, self.driver._scheduler
        end, free, events = oracle.steps + steps, driver._log_size, list[Any]()
        worst, admission = worst_step(self.spec, scheduler), admission_events(self.spec, driver.state.serving.width)
        more = True
        while more and oracle.busy and oracle.steps < end and free >= worst + admission:
            report = oracle.step(free - worst, end - oracle.steps)
            free, events = free - len(oracle.events), events + oracle.events
            more = oracle.refused != 1
            self.tally.update(admitted=len(report.admitted), preempted=len(report.preempted), mixed=report.mixed)
        self.tally["full log"] += free < worst + admission
        self.tally["many steps"] += steps > 1
        oracle.drain()
        decoded = kvjax.to_list(driver.state.unpublished[-1])
        assert named(decoded, self.life.mirror) == without_copied_paths(events, SIZE)
        self.life.follow(decoded)
        self.tally.update(event["kind"] for event in decoded)
        self.serving = driver.state.serving
        self.agree()
        driver.state.serving = self.serving

    def verify_output(self, job: Job) -> None:
        """Compares an output with the oracle's."""
        request, output = self.accepted.get(job), job.output
        self.tally[f"finish {output.finish}"] += 1
        if request is None:  # it never came so far
            assert output.finish == "cancelled" and not output.tokens
        elif isinstance(request, Status):
            assert (output.finish, output.tokens) == (request.name.lower(), [])
        else:
            most, reason = self.limit(job)
            is_cut = request.finish == Finish.LENGTH and request.num_tokens == most
            finish = reason if is_cut else request.finish.name.lower()
            found = output.tokens, output.finish, output.cached_tokens, output.preemptions
            assert found == (request.tokens[request.prompt :], finish, request.cached, request.preemptions)
            assert len(output.logprobs) == len(output.tokens)

    def requests_of(self, number: int) -> list[Request]:
        """Random requests. The oracle knows some of them as impossible."""
        found = []
        for _ in range(number):
            prompt, kind = self.prompt(), self.rng.random()
            if kind < 0.05:
                prompt = [[], [VOCAB], [0] * (COLUMNS * SIZE + 1)][self.rng.integers(3)]
            namespace = int(TENANTS[prompt[0]]) if prompt and prompt[0] < VOCAB else 0
            found.append(
                Request(
                    prompt, max_new_tokens=int(self.rng.integers(1, 30 if self.rng.random() < 0.1 else 9)),
                    priority=int(self.rng.integers(3)), stop_tokens=[1] if self.rng.random() < 0.3 else [],
                    namespace=namespace, samples=int(self.rng.integers(1, 4)) if self.rng.random() < 0.3 else 1,
                )
            )  # fmt: skip
        return found

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be computed at all."""
        prompt = request.prompt.tolist()
        if not prompt or max(prompt) >= VOCAB:
            return "bad_request"
        return "row_full" if len(prompt) > COLUMNS * SIZE else None

    # Runs.

    def batch(self) -> None:
        """A batch over the cache as the run before has left it."""
        asks = self.requests_of(int(self.rng.integers(1, 8)))
        batch = Batch(MODEL, self.life.cache, asks, self.options_of_run, steps=STEPS)
        self.attach(batch.driver)
        while batch.turn():
            pass
        at = {job.number: job for job in batch._jobs}
        each = [ask for ask in asks for _ in range(ask.samples)]
        for number, (one, output) in enumerate(zip(each, batch.outputs, strict=True)):
            if (refusal := self.refusal(one)) is None:
                assert at[number].output is output
                self.verify_output(at[number])
            else:
                self.tally[f"refused {refusal}"] += 1
                assert (output.finish, output.tokens, number in at) == (refusal, [], False)
        self.life.cache = batch.state.result

    def engine(self, turns: int) -> None:
        """Turns an engine by hand, while requests come and go at random."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineThread, "start", lambda thread: None)
            engine = Engine(MODEL, self.life.cache, self.options_of_run, max_requests=SLOTS)
        thread, handles = engine._thread, list[Any]()
        self.attach(thread.driver)
        for turn in range(turns + 300):
            if turn < turns:
                handles += self.come_and_go(engine, handles)
            thread._step()
            if turn >= turns and not (thread.active or thread.reading or engine._inbox.queue):
                break
        assert all(handle.done for handle in handles), "requests do not end"
        for handle in handles:
            assert handle.error is None
            self.verify_output(handle.job)
        thread._end()
        self.life.cache = thread.last

    def come_and_go(self, engine: Engine, handles: Sequence[Any]) -> list[Any]:
        """Submits requests, cancels them, or does neither. Returns new handles."""
        chance = self.rng.random()
        if chance < 0.15 and handles:
            handle = handles[-int(self.rng.integers(1, min(len(handles), 8) + 1))]
            if chance < 0.05:
                handle.job.deadline = 0.0
            else:
                handle.cancel()
        new = list[Any]()
        for request in self.requests_of(int(self.rng.integers(1, 4)) if chance > 0.7 else 0):
            if (refusal := self.refusal(request)) is None:
                new += engine.submit(request).samples
            else:
                self.tally[f"refused {refusal}"] += 1
                with pytest.raises(ValueError, match=r"^prompt: got"):
                    engine.submit(request)
        return new
