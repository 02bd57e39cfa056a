# SPDX-License-Identifier: Apache-2.0
"""The thread of an engine: it has the cache, and runs turn after turn while there is something to do.

score     the next part of the first prompt whose log-probabilities are wanted; without a row or blocks for it nothing
          is chosen, so that requests that run leave some
choose    of what has come, requests whose prefixes have been read go in by one call, and cancels with them
dispatch  the loop of the scheduler runs: few steps while somebody waits for tokens, else many
read      what a turn did is read when the next one is under way, unless a host tier or a store has to come between
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._compile import OutermostJit, own_transfers
from kvjax.blocks.keys import Namespaces
from kvjax.cache import Cache
from kvjax.model import Model
from kvjax.pools.host import init_host_pools
from kvjax.serving.constraints import as_tree
from kvjax.serving.driver import Driver, StepOutput
from kvjax.serving.handle import EngineError, Handle
from kvjax.serving.prompt_scores import Step, check_all_logits
from kvjax.serving.request import RunOptions
from kvjax.serving.requests import Output, Stage
from kvjax.serving.turns import Job, Slots
from kvjax.state import NO_BLOCK, CacheState
from kvjax.tiered import joined
from kvjax.verbs.control import emptied, reset

ENTRIES, MANY = 16, 32  # requests of one call; the most steps of a turn
PACE = 0.02  # seconds of a turn while somebody waits for tokens
_FEW_SALTS = 64
_RETRY = 0.1  # seconds between two looks at listeners that have failed, if there is nothing to do
_NAP = 0.001  # seconds between two looks at a store's reads, if there is nothing else to do

_copy = OutermostJit(lambda state: jax.tree.map(jnp.copy, state))
_emptied, _reset = OutermostJit(emptied), OutermostJit(reset)


@dataclasses.dataclass(eq=False, kw_only=True)
class EngineJob(Job):
    """A job whose output somebody reads through a handle."""

    deadline: float  # when it is cancelled, of `time.monotonic`
    cancel: dataclasses.InitVar[Callable[[Handle], None]]
    is_cancelled: bool = False  # whether it has been

    def __post_init__(self, cancel: Callable[[Handle], None]):
        self.handle = Handle(self.output, cancel)
        self.handle.job = self

    @property
    def is_done(self) -> bool:
        """Whether it is over."""
        return self.handle.done

    def change(self, change: Callable[[Output], Any]) -> None:
        """Changes the output, and wakes whoever waits for it."""
        times = self.handle.times
        if times.admitted is None and self.stage in (Stage.RUNNING, Stage.DONE):
            times.admitted = time.monotonic()
        self.handle.update(change)


class Inbox:
    """The tasks of other threads for the engine's."""

    def __init__(self, names: Namespaces | None = None) -> None:
        # Guards all of it, and is notified when something comes, or when nothing is to be done any more.
        self.wake = threading.Condition()
        self.queue = deque[EngineJob]()  # requests that wait
        self.cancels = deque[EngineJob]()  # requests to be ended
        self.copies = deque[Future[CacheState]]()  # copies of the state that somebody waits for
        self._names = names
        self.lent = dict[str, int]()  # the numbers that `names` has lent for salts, by these
        self.is_closing = False  # whether the engine is to end
        self.is_idle = True  # whether nothing is to be done

    def has_task(self) -> bool:
        """Whether there is something to do for an engine that is idle."""
        return bool(self.queue or self.cancels or self.copies or self.is_closing)

    def lend(self, salt: str) -> int:
        """The number of a salt whose request comes next; for who has `wake`."""
        assert self._names is not None
        if salt not in self.lent:
            self.lent[salt] = self._names.lend(salt)
        return self.lent[salt]

    def give_back(self, used: set[int]) -> None:
        """Gives back all numbers but those that are used; for who has `wake`."""
        assert self._names is not None
        for salt in [salt for salt, number in self.lent.items() if number not in used]:
            self._names.give_back(self.lent.pop(salt))


class EngineThread(threading.Thread):
    """The thread that has the cache."""

    def __init__(self, model: Model, cache: Any, options: RunOptions, inbox: Inbox, slots: Slots):
        """Compiles everything; `cache`, committed to its devices, is donated. The thread is still to be started."""
        super().__init__(name="kvjax-engine", daemon=True)
        self.spec, self._model, self._options = cache.state.spec, model, options
        self._inbox, self._slots = inbox, slots
        self.logits_fn = as_tree(options.logits_fn)  # the latest
        self.last = None  # the cache, once the thread has ended
        # Requests whose prefixes are being read from the store, or for which there is no slot.
        self.reading = list[EngineJob]()
        self.scoring = list[list[EngineJob]]()  # the samples of each request whose prompt is still to be scored
        self._scored_now = list[EngineJob]()  # those of them that a call is for, which fail with it
        self._gives_all_logits = False  # whether the model is known to
        self._most_lent = _FEW_SALTS  # salts at which those are looked for that nothing has
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), cache)
        self._empty = jax.device_get(_emptied(cache.state))
        self._begin(cache)

    def check_scores(self) -> None:
        """Raises a ValueError for a model that cannot give the logits of a whole prompt."""
        if not self._gives_all_logits:
            check_all_logits(self._model, self._shapes.cache)
            self._gives_all_logits = True

    def _begin(self, cache: Any) -> None:
        """Begins with a cache and no requests; compiles what is not compiled yet."""
        self.driver: Driver[Any] = Driver(
            self._model, cache, self._options, self._options.scheduler, self._slots,
            np.ones((self.spec.max_seqs,), np.bool_),
        )  # fmt: skip
        with self._inbox.wake:
            self.driver.logits_fn = self.driver.placed(self.logits_fn)
        # Loops that are under way while an earlier one is read.
        self._ahead = 0 if cache.host or self.driver.stored else 1
        self.active: dict[int, Any] = self.driver.active  # the requests that the scheduler has, by their slots
        self._read_at, self._step_seconds = 0.0, PACE
        self.driver.compile()
        jax.block_until_ready(_copy(self.driver.state.cache.state))

    def run(self) -> None:
        """Runs until the engine is closed."""
        inbox = self._inbox
        try:
            while not inbox.is_closing:
                with inbox.wake:
                    has_jobs = self.reading or self.scoring or self.active or self.driver.in_flight
                    inbox.is_idle = not (inbox.queue or inbox.cancels or has_jobs)
                    if inbox.is_idle:
                        inbox.wake.notify_all()  # whoever drains
                        inbox.wake.wait_for(inbox.has_task, _RETRY if self.driver.state.is_behind else None)
                try:
                    self._step()
                except Exception as error:
                    self._recover(error)
        finally:
            self._end()

    def replace_logits_fn(self, logits_fn: Any) -> None:
        """Takes another `logits_fn` of the same shapes, from the next loop on; for any thread."""
        with self._inbox.wake:
            self.logits_fn = logits_fn
            if driver := vars(self).get("driver"):  # not set while it recovers
                driver.logits_fn = driver.placed(logits_fn)

    @own_transfers()
    def _step(self) -> None:
        """One turn: what has come goes in, the loop runs, and an earlier turn is read."""
        driver = self.driver
        while self._inbox.copies:
            copy = self._inbox.copies.popleft()
            try:
                copy.set_result(_copy(driver.state.cache.state))
            finally:
                copy.cancel()  # unless it has its result
        if len(self._running) < self.spec.max_seqs:  # who comes while a loop runs is to be in the next one
            driver.wait()
        cancelled = self._take_cancels()
        chosen = [] if self._score() else self._choose()
        if chosen or cancelled:
            driver.submit(chosen, cancelled)
            self.reading = self.reading[len(chosen) :]  # not before: after an error the others are chosen again
        if driver.active:
            driver.dispatch(self._choose_steps())
        elif self.reading and not driver.in_flight:
            time.sleep(_NAP)
        while driver.in_flight > (self._ahead if driver.active and not driver.state.is_due else 0):
            self._note_pace(driver.read())
            driver.state.publish(keep=driver.in_flight)
        if not driver.in_flight:
            driver.state.catch_up()
        if driver.stored:
            waiting = [job for job in self.reading if not job.is_done]
            driver.stored.forget_others({job.leader.number for job in [*waiting, *driver.active.values()]})
        if len(self._inbox.lent) > self._most_lent:
            self._give_back_salts()

    def _give_back_salts(self) -> None:
        """Gives back the salts that no block and no request has; at most half of those that are lent later."""
        cached = _cached_namespaces(self.driver.state.cache.state)
        with self._inbox.wake:
            jobs = [*self._inbox.queue, *self.waiting, *self.active.values()]
            self._inbox.give_back(cached | {job.namespace for job in jobs})
            self._most_lent = 2 * len(self._inbox.lent) + _FEW_SALTS

    @property
    def waiting(self) -> list[EngineJob]:
        """Requests that have left the queue, and that the scheduler does not have yet."""
        return [*itertools.chain(*self.scoring), *self.reading]

    @property
    def _running(self) -> list[EngineJob]:
        return [job for job in list(self.active.values()) if not job.is_done]

    def _choose_steps(self) -> int:
        """Steps of the next turn: more than one if all rows run, since who comes now would wait anyway."""
        running = self._running
        if len(running) < self.spec.max_seqs:
            return 1
        if not any(job.handle.listens for job in running):
            return self._slots.steps
        return int(min(max(PACE / self._step_seconds, 1), self._slots.steps))

    def _note_pace(self, output: StepOutput) -> None:
        """Notes how long a step takes: a mean in which turns of few steps, that are slower for each, count for less."""
        began_at, self._read_at = max(output.dispatched_at, self._read_at), time.monotonic()
        new = self._read_at - began_at - output.steps * self._step_seconds
        self._step_seconds += new / (output.steps + 8) if output.steps else 0.0

    def _take_cancels(self) -> list[EngineJob]:
        """Requests to cancel that the scheduler has, at most so many as one call takes; others end at once."""
        now, found = time.monotonic(), list[EngineJob]()
        jobs = [*self.active.values(), *self._inbox.queue, *self.waiting]
        late = [job for job in jobs if job.deadline < now]
        while (self._inbox.cancels or late) and len(found) < ENTRIES:
            job = late.pop() if late else self._inbox.cancels.popleft()
            if job.is_cancelled or job.is_done:
                continue
            job.is_cancelled = True
            if job.slot >= 0:
                found.append(job)
            else:
                job.end("cancelled")
        return found

    def _score(self) -> bool:
        """Scores a part of the first prompt that is to be scored; returns whether it waits for a row or blocks."""
        while self.scoring:
            jobs = [job for job in self.scoring[0] if not job.is_done]
            if jobs:
                break
            self.scoring = self.scoring[1:]
        else:
            return False
        self._scored_now = jobs
        step = self.driver.score(jobs, can_wait=bool(self.active))
        self._scored_now = []
        if step is Step.DONE:
            self.scoring = self.scoring[1:]
            self.reading += [job for job in jobs if not job.is_done]
        return step is Step.NO_BLOCKS and not jobs[0].is_done

    def _choose(self) -> list[EngineJob]:
        """The requests to submit: those that came first, as there are slots, once their prefixes have been read."""
        num_free, queue = self.driver.num_free_slots, self._inbox.queue
        while queue and len(self.waiting) < num_free:
            job = queue.popleft()
            if job.request.prompt_logprobs_from is None:
                self.reading.append(job)
            else:
                others = [queue.popleft() for _ in range(1, job.request.samples)]
                self.scoring = [*self.scoring, [job, *others]]
        self.reading = [job for job in self.reading if not job.is_done]
        stored = self.driver.stored
        self.driver.adopt(self.reading)
        chosen, num_tokens = list[EngineJob](), 0
        for leader, members in itertools.groupby(self.reading, key=lambda job: job.leader):
            group = list(members)
            num_tokens += sum(len(job.tokens) for job in group)
            is_full = len(chosen) + len(group) > min(ENTRIES, num_free) or num_tokens > self._slots.entry_tokens
            if is_full or (stored and not stored.has_read(leader.number)):
                break
            chosen += group
        return chosen

    @own_transfers()
    def _recover(self, error: Exception) -> None:
        """Ends the requests that the scheduler has, and goes on with an empty cache."""
        failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._fail([*self.active.values(), *self._scored_now], failure)
        self.driver.drop_reads()
        del self.driver  # the memory of the old cache
        self._begin(self._empty_cache())
        state = self.driver.state
        _, events = _reset(state.cache.state)
        state.publish(events)

    def _empty_cache(self) -> Any:
        """A cache like the first one, without contents."""
        shapes: Any = self._shapes
        state = jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), self._empty, shapes.state)
        pools = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes.pools)
        pools, host = init_host_pools(pools) if shapes.host else (pools, None)
        return joined(Cache(state, pools), host)

    @own_transfers()
    def _end(self) -> None:
        """Ends all requests, and leaves the cache with its rows released."""
        with self._inbox.wake:
            self._inbox.is_closing = self._inbox.is_idle = True
            self._inbox.wake.notify_all()
        driver = vars(self).get("driver")  # not set if a new start has failed
        self._fail([*self.active.values(), *self.waiting, *self._inbox.queue], EngineError("the engine was closed"))
        for copy in self._inbox.copies:
            copy.cancel()
        if driver:
            driver.drop_reads()
        if driver and driver.state.alive:
            driver.state.release_rows()
            self.last = driver.state.result
            driver.state.publish()
            driver.state.catch_up(is_last=True)

    def _fail(self, jobs: Iterable[Any], error: EngineError) -> None:
        for job in jobs:
            job.handle.end(None, error)


def _cached_namespaces(state: CacheState) -> set[int]:
    """The namespaces of rows in use, and of all blocks with contents: each has a root, whose link has the number."""
    namespace, length = jax.device_get((state.seqs.namespace, state.seqs.length))
    found = set(namespace[length > 0].tolist())
    for group in state.groups:
        parent, fill = jax.device_get((group.blocks.parent, group.blocks.fill))
        found.update(parent[(fill > 0) & (parent[:, 0] == NO_BLOCK), 1].tolist())
    return found
