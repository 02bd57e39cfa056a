# SPDX-License-Identifier: Apache-2.0
"""The thread of an engine: it owns the cache, and runs turn after turn while there is something to do.

score     computes the next part of the first prompt whose log-probabilities are wanted; if it lacks a row or blocks, no
          new request is chosen, so running requests leave some
choose    submits requests whose prefixes have been read, together with cancels, by a single call
dispatch  runs the loop of the scheduler: few steps while a client waits for tokens, many otherwise
read      reads a turn while the next one runs, unless a host tier or a store has to act between them

Before all this it makes the pending changes (`changes.py`). While the engine sleeps, it does nothing else.
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
from kvjax.blocks.keys import MAX_NUMBER, Namespaces
from kvjax.cache import Cache
from kvjax.model import Model
from kvjax.pools.device import Pools
from kvjax.pools.host import init_host_pools
from kvjax.serving.changes import Change, Changes
from kvjax.serving.constraints import as_tree
from kvjax.serving.driver import Driver, StepOutput
from kvjax.serving.handle import EngineError, Handle
from kvjax.serving.park import Parked, unpark
from kvjax.serving.prompt_scores import Step, check_all_logits
from kvjax.serving.request import RunOptions
from kvjax.serving.requests import Output, Stage
from kvjax.serving.turns import Job, Slots
from kvjax.state import NO_BLOCK, CacheState
from kvjax.tiered import joined
from kvjax.verbs.control import emptied, reset

ENTRIES = 16  # maximum requests of a call
MANY = 32  # maximum steps of a turn
PACE = 0.02  # seconds of a turn while a client waits for tokens
_FEW_SALTS = 64
_RETRY = 0.1  # seconds between two attempts to reach a failed listener, while there is nothing to do
_NAP = 0.001  # seconds between two checks of a store's reads, while there is nothing else to do

_copy = OutermostJit(lambda state: jax.tree.map(jnp.copy, state))
_emptied = OutermostJit(emptied)
_reset = OutermostJit(reset)


@dataclasses.dataclass(eq=False, kw_only=True)
class EngineJob(Job):
    """A job whose output is read through a handle."""

    deadline: float  # time of `time.monotonic` after which it is cancelled
    cancel: dataclasses.InitVar[Callable[[Handle], None]]
    is_cancelled: bool = False
    salt: str | None = None  # in place of a namespace

    def __post_init__(self, cancel: Callable[[Handle], None]):
        self.handle = Handle(self.output, cancel)
        self.handle.job = self

    @property
    def is_done(self) -> bool:
        """Whether the request is over."""
        return self.handle.done

    def change(self, change: Callable[[Output], Any]) -> None:
        """Changes the output, and wakes every thread that waits for it."""
        times = self.handle.times
        if times.admitted is None and self.stage in (Stage.RUNNING, Stage.DONE):
            times.admitted = time.monotonic()
        self.handle.update(change)


class Inbox:
    """Tasks that other threads give to the engine's thread."""

    def __init__(self, names: Namespaces | None = None) -> None:
        # Guards all attributes. It is notified when a task arrives, and when the engine becomes idle.
        self.wake = threading.Condition()
        self.queue = deque[EngineJob]()  # waiting requests
        self.cancels = deque[EngineJob]()  # requests to end
        self.copies = deque[Future[CacheState]]()  # requested copies of the state
        self.changes = deque[Change]()  # changes to make, in order
        self.names = names
        self.weights: str | int | None = None  # name of the present weights; None before the first update
        self.lent = dict[tuple[str, str | int | None], int]()  # numbers that `names` has lent, by salt and weights
        self.numbers = dict[tuple[int, str | int], int]()  # without `names`, numbers of namespaces under new weights
        self.is_closing = False
        self.is_idle = True

    def has_task(self) -> bool:
        """Whether an idle engine has something to do."""
        return bool(self.queue) or self.has_order()

    def has_order(self) -> bool:
        """Whether a sleeping engine has something to do."""
        return bool(self.cancels or self.copies or self.changes or self.is_closing)

    def number(self, namespace: int, salt: str | None, weights: str | int | None) -> int:
        """The number of a namespace or a salt under weights of this name, for a request. The caller holds `wake`."""
        if salt is not None:
            return self._lend(salt, weights)
        if weights is None:
            return namespace
        if self.names is not None:
            return self.names.with_weights(namespace, weights)
        return self.numbers.setdefault((namespace, weights), MAX_NUMBER - len(self.numbers))

    def _lend(self, salt: str, weights: str | int | None) -> int:
        assert self.names is not None
        if (salt, weights) not in self.lent:
            self.lent[salt, weights] = self.names.lend(salt, weights=weights)
        return self.lent[salt, weights]

    def give_back(self, used: set[int]) -> None:
        """Gives back all numbers except the used ones. The caller holds `wake`."""
        assert self.names is not None
        unused = [salt for salt, namespace in self.lent.items() if namespace not in used]
        for salt in unused:
            self.names.give_back(self.lent.pop(salt))


class EngineThread(threading.Thread):
    """The thread that owns the cache."""

    def __init__(self, model: Model, cache: Any, options: RunOptions, inbox: Inbox, slots: Slots):
        """Compiles all programs, without starting the thread. The cache, committed to its devices, is donated."""
        super().__init__(name="kvjax-engine", daemon=True)
        self.spec = cache.state.spec
        self.model = model
        self.options = options
        self.scheduler = options.scheduler
        self.inbox = inbox
        self.slots = slots
        self.changes = Changes(self)
        self.version = 0  # number of updates of the weights
        self._ended_asleep = list[EngineJob]()  # requests in slots that ended while the engine slept
        self.logits_fn = as_tree(options.logits_fn)  # the latest
        self.last = None  # the cache, after the thread has ended

        # Requests whose prefixes are being read from the store, or that have no slot yet.
        self.reading = list[EngineJob]()
        self.scoring = list[list[EngineJob]]()  # for each request whose prompt is not scored yet, its samples
        self._scored_now = list[EngineJob]()  # samples whose prompt is being scored, which fail if the call fails
        self._gives_all_logits = False  # whether the model is known to give them
        self._max_lent = _FEW_SALTS  # with more salts, unused numbers are given back
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), cache)
        self.empty_state = jax.device_get(_emptied(cache.state))
        self._begin(cache)

    def check_scores(self) -> None:
        """Raises a ValueError if a model cannot give the logits of a whole prompt."""
        if not self._gives_all_logits:
            check_all_logits(self.model, self._shapes.cache)
            self._gives_all_logits = True

    def _begin(self, cache: Any) -> None:
        """Begins with a cache and no requests, and compiles the missing programs."""
        self.driver: Driver[Any] = Driver(
            self.model,
            cache,
            self.options,
            self.options.scheduler,
            self.slots,
            np.ones((self.spec.max_seqs,), np.bool_),
        )
        self.driver.version = self.version
        self.is_asleep = False
        with self.inbox.wake:
            self.driver.logits_fn = self.driver.placed(self.logits_fn)
        # The number of loops that run while an earlier loop is read.
        self._num_ahead = 0 if cache.host or self.driver.stored else 1
        self.active: dict[int, Any] = self.driver.active  # requests of the scheduler, by slot
        self._read_at = 0.0
        self._step_seconds = PACE
        self.driver.compile()
        jax.block_until_ready(_copy(self.driver.state.cache.state))

    def run(self) -> None:
        """Runs until the engine is closed."""
        inbox = self.inbox
        try:
            while not inbox.is_closing:
                with inbox.wake:
                    has_jobs = self.reading or self.scoring or self.active or self.driver.in_flight
                    inbox.is_idle = not (inbox.queue or inbox.cancels or inbox.changes or has_jobs)
                    if inbox.is_idle:
                        inbox.wake.notify_all()  # `drain` waits for this
                        inbox.wake.wait_for(inbox.has_task, _RETRY if self.driver.state.is_behind else None)
                    elif self.is_asleep:
                        inbox.wake.wait_for(inbox.has_order, _RETRY)  # requests may be late
                try:
                    self._step()
                except Exception as error:
                    self._recover(error)
        finally:
            self._end()

    def replace_logits_fn(self, logits_fn: Any) -> None:
        """Replaces `logits_fn` by another of the same shapes, from the next loop on. Any thread may call this."""
        with self.inbox.wake:
            self.logits_fn = logits_fn
            if driver := vars(self).get("driver"):  # not set while it recovers
                driver.logits_fn = driver.placed(logits_fn)

    @own_transfers()
    def _step(self) -> None:
        """Runs a turn: submits requests, starts the loop, and reads an earlier turn."""
        driver = self.driver
        self._copy_states()
        self.changes.make()
        if self.is_asleep:
            self._end_while_asleep()
            driver.state.catch_up()
            return
        if len(self._running) < self.spec.max_seqs:  # a request that arrives during a loop joins the next loop
            driver.wait()
        cancelled = self._take_cancels()
        chosen = [] if self.changes.drains or self._score() else self._choose()
        if chosen or cancelled:
            driver.submit(chosen, cancelled)
            self.reading = self.reading[len(chosen) :]  # only now: after an error they are chosen again
        if driver.active:
            driver.dispatch(self._choose_steps())
        elif self.reading and not driver.in_flight:
            time.sleep(_NAP)
        while driver.in_flight > (self._num_ahead if driver.active and not driver.state.is_due else 0):
            self._update_pace(driver.read())
            driver.state.publish(keep=driver.in_flight)
        if not driver.in_flight:
            driver.state.catch_up()
        if driver.stored:
            waiting = [job for job in self.reading if not job.is_done]
            driver.stored.keep_only({job.leader.number for job in [*waiting, *driver.active.values()]})
        if len(self.inbox.lent) > self._max_lent:
            self._give_back_salts()

    def read_all(self) -> None:
        """Reads all started loops."""
        while self.driver.in_flight:
            self._update_pace(self.driver.read())
        self.driver.read_statuses()
        self.driver.state.publish()

    def _end_while_asleep(self) -> None:
        """Ends late and cancelled requests. Their slots become free when the engine wakes."""
        while cancelled := self._take_cancels():
            self._ended_asleep += cancelled
            for job in cancelled:
                job.end("cancelled")

    def end_cancelled(self) -> None:
        """Frees the slots of requests that ended while the engine slept."""
        ended = [job for job in self._ended_asleep if job.slot >= 0]
        self._ended_asleep = []
        for first in range(0, len(ended), ENTRIES):
            self.driver.submit([], ended[first : first + ENTRIES])

    def all_jobs(self) -> list[EngineJob]:
        """All requests that are not over."""
        jobs = [*self.active.values(), *self.waiting, *self.inbox.queue]
        return [job for job in jobs if not job.is_done]

    def space_of(self, job: EngineJob, weights: str | int | None) -> int:
        """The number of a request's namespace under weights of this name."""
        with self.inbox.wake:
            return self.inbox.number(job.request.namespace, job.salt, weights)

    def take_back(self, slots: np.ndarray) -> None:
        """Takes requests back whose slots, where bool[W], a change has emptied. Their prompts are scored again."""
        jobs = [*self.driver.withdraw(slots), *itertools.chain(*self.scoring), *self.reading]
        jobs = sorted((job for job in jobs if not job.is_done), key=lambda job: job.number)
        self.reading = [job for job in jobs if job.request.prompt_logprobs_from is None]
        scored = [job for job in jobs if job.request.prompt_logprobs_from is not None]
        for job in scored:
            job.found_tokens = None
            job.change(Output.forget_scores)
        self.scoring = [list(samples) for _, samples in itertools.groupby(scored, key=lambda job: job.leader)]

    def replace_model(self, model: Model, weights: str | int) -> None:
        """Replaces the weights. All requests that are not in a row get their namespaces under the new weights."""
        self.model = model
        self.driver.replace_model(model)
        self.version = self.driver.version
        with self.inbox.wake:
            self.inbox.weights = weights
            for job in self.all_jobs():
                job.namespace = self.inbox.number(job.request.namespace, job.salt, weights)
        if self.driver.stored:
            self.driver.stored.keep_only(set())
            self.driver.stored.begin([job for job in self.active.values() if job.stage == Stage.WAITING])

    def _copy_states(self) -> None:
        """Makes the copies of the state for other threads."""
        while self.inbox.copies:
            copy = self.inbox.copies.popleft()
            try:
                copy.set_result(_copy(self.driver.state.cache.state))
            finally:
                copy.cancel()  # unless it has its result

    def _give_back_salts(self) -> None:
        """Gives back salts without a block or a request. The next check comes when twice as many are lent."""
        cached = _cached_namespaces(self.driver.state.cache.state)
        with self.inbox.wake:
            jobs = [*self.inbox.queue, *self.waiting, *self.active.values()]
            self.inbox.give_back(cached | {job.namespace for job in jobs})
            self._max_lent = 2 * len(self.inbox.lent) + _FEW_SALTS

    @property
    def waiting(self) -> list[EngineJob]:
        """Requests between the queue and the scheduler."""
        return [*itertools.chain(*self.scoring), *self.reading]

    @property
    def _running(self) -> list[EngineJob]:
        return [job for job in list(self.active.values()) if not job.is_done]

    def _choose_steps(self) -> int:
        """Chooses the steps of the next turn. While a row is free it is a single step, so a new request starts soon."""
        running = self._running
        drafter = self.options.drafter
        fewest = min(1 if drafter is None else 1 + drafter.num_tokens, self.slots.steps)  # a pass has space for drafts
        if len(running) < self.spec.max_seqs:
            return fewest
        if not any(job.handle.is_streaming for job in running):
            return self.slots.steps
        return int(min(max(PACE / self._step_seconds, fewest), self.slots.steps))

    def _update_pace(self, output: StepOutput) -> None:
        """Updates the mean time of a step. Short turns, whose steps take longer, have less weight."""
        began_at = max(output.dispatched_at, self._read_at)
        self._read_at = time.monotonic()
        excess_seconds = self._read_at - began_at - output.steps * self._step_seconds
        self._step_seconds += excess_seconds / (output.steps + 8) if output.steps else 0.0

    def _take_cancels(self) -> list[EngineJob]:
        """Ends late and cancelled requests. Returns the requests in the scheduler, at most as many as a call takes."""
        now = time.monotonic()
        jobs = [*self.active.values(), *self.inbox.queue, *self.waiting]
        late = [job for job in jobs if job.deadline < now]
        to_cancel = list[EngineJob]()
        while (self.inbox.cancels or late) and len(to_cancel) < ENTRIES:
            job = late.pop() if late else self.inbox.cancels.popleft()
            if job.is_cancelled or job.is_done:
                continue
            job.is_cancelled = True
            if job.slot >= 0:
                to_cancel.append(job)
            else:
                job.end("cancelled")
        return to_cancel

    def _score(self) -> bool:
        """Scores a part of the first unscored prompt. Returns whether it waits for a row or blocks."""
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
        """Chooses requests to submit: the earliest whose prefixes have been read, as long as slots are free."""
        num_free = self.driver.num_free_slots
        self._take_queue(num_free)
        self.reading = [job for job in self.reading if not job.is_done]
        stored = self.driver.stored
        self.driver.adopt(self.reading)
        chosen = list[EngineJob]()
        num_tokens = 0
        for leader, members in itertools.groupby(self.reading, key=lambda job: job.leader):
            samples = list(members)
            num_tokens += sum(len(job.tokens) for job in samples)
            is_full = len(chosen) + len(samples) > min(ENTRIES, num_free) or num_tokens > self.slots.entry_tokens
            if is_full or (stored and not stored.has_read(leader.number)):
                break
            chosen += samples
        return chosen

    def _take_queue(self, num_free: int) -> None:
        """Takes requests from the queue, for as many slots as are free."""
        queue = self.inbox.queue
        while queue and len(self.waiting) < num_free:
            job = queue.popleft()
            if job.request.prompt_logprobs_from is None:
                self.reading.append(job)
            else:
                other_samples = [queue.popleft() for _ in range(1, job.request.samples)]
                self.scoring = [*self.scoring, [job, *other_samples]]

    @own_transfers()
    def _recover(self, error: Exception) -> None:
        """Ends the scheduler's requests, and continues with an empty cache."""
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
        """Makes an empty cache with the shapes of the first cache."""
        shapes: Any = self._shapes
        state = jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), self.empty_state, shapes.state)
        pools = self.empty_pools()
        pools, host = init_host_pools(pools) if shapes.host else (pools, None)
        return joined(Cache(state, pools), host)

    def empty_pools(self) -> Pools:
        """Makes pools of zeros with the shapes of the first cache."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._shapes.pools)

    @own_transfers()
    def _end(self) -> None:
        """Ends all requests, and releases the rows of the cache."""
        with self.inbox.wake:
            self.inbox.is_closing = self.inbox.is_idle = True
            self.inbox.wake.notify_all()
        driver = vars(self).get("driver")  # not set if a new start has failed
        closed = EngineError("the engine was closed")
        self._fail([*self.active.values(), *self.waiting, *self.inbox.queue], closed)
        self.changes.fail(closed)
        for copy in self.inbox.copies:
            copy.cancel()
        if driver:
            driver.drop_reads()
        if driver and driver.state.alive:
            if self.is_asleep:  # the cache of `close` has pools
                driver.state.serving = unpark(Parked(driver.state.serving), self.empty_pools())
            driver.state.release_rows()
            self.last = driver.state.result
            driver.state.publish()
            driver.state.catch_up(is_last=True)

    def _fail(self, jobs: Iterable[Any], error: EngineError) -> None:
        for job in jobs:
            job.handle.end(None, error)


def _cached_namespaces(state: CacheState) -> set[int]:
    """The namespaces of rows in use and of all blocks with contents. Links to a root contain the namespace's number."""
    namespace, length = jax.device_get((state.seqs.namespace, state.seqs.length))
    namespaces = set(namespace[length > 0].tolist())
    for group in state.groups:
        parent, fill = jax.device_get((group.blocks.parent, group.blocks.fill))
        namespaces.update(parent[(fill > 0) & (parent[:, 0] == NO_BLOCK), 1].tolist())
    return namespaces
