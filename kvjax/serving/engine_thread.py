# SPDX-License-Identifier: Apache-2.0
"""The thread of an engine: it has the cache, and runs turn after turn while there is something to do.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._compile import OutermostJit, own_transfers
from kvjax.blocks.keys import Namespaces
from kvjax.cache import Cache
from kvjax.events.listeners import Listeners
from kvjax.events.log import EventLog
from kvjax.events.records import Status
from kvjax.model import Model
from kvjax.pools.host import init_host_pools
from kvjax.serving.capacity import admission_events, worst_step
from kvjax.serving.handle import EngineError, Handle
from kvjax.serving.inputs import RunOptions
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.requests import Finish, Output, Stage, init_serving
from kvjax.serving.runner import HostTier
from kvjax.serving.stored import StoredPrefixes
from kvjax.serving.turns import Done, Entries, Turn, apply, for_each, turn
from kvjax.state import NO_BLOCK, CacheState
from kvjax.tiered import joined
from kvjax.verbs.control import reset

ENTRIES, MANY = 16, 32  # requests of one call; the most steps of a turn
PACE = 0.02  # seconds of a turn while somebody waits for tokens
_FEW_SALTS = 64
_RETRY = 0.1  # seconds between two looks at listeners that have failed, if there is nothing to do
_NAP = 0.001  # seconds between two looks at a store's reads, if there is nothing else to do

_copy = OutermostJit(lambda state: jax.tree.map(jnp.copy, state))
_reset = OutermostJit(reset)


@dataclasses.dataclass(eq=False)
class Request:
    """A request on the host: an entry for `submit`, and where it is.

    Attributes:
      leader: the first sample of its prompt.
      max_tokens: at which it ends; `unlimited` if the cache were larger.
      deadline: when it is cancelled, of `time.monotonic`.
      slot, generation: that it has; -1: none yet.
      since: the number of the first turn that has it.
    """

    number: int
    handle: Handle
    tokens: np.ndarray
    max_tokens: int
    unlimited: int
    options: dict[str, Any]
    deadline: float
    leader: Any = None
    slot: int = -1
    generation: int = -1
    since: int = 0
    is_cancelled: bool = False

    @property
    def left(self) -> int:
        """The most tokens that are still to be generated."""
        return self.max_tokens - len(self.tokens) - len(self.handle.output.tokens)


class Inbox:
    """The tasks of other threads for the engine's.

    Attributes:
      wake: guards all of it, and is notified when something comes, or when nothing is to be done any more.
      queue: requests that wait.
      cancels: requests to be ended.
      copies: where copies of the state are wanted: an event, and a list to append it to.
      lent: the numbers that `names` has lent for salts, by these.
      is_closing: whether the engine is to end.
      is_idle: whether nothing is to be done.
    """

    def __init__(self, names: Namespaces | None = None) -> None:
        self.wake, self.is_closing, self.is_idle = threading.Condition(), False, True
        self._names, self.lent = names, dict[str, int]()
        self.queue, self.cancels = deque[Request](), deque[Request]()
        self.copies = deque[tuple[threading.Event, list[CacheState]]]()

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
    """The thread that has the cache.

    Attributes:
      active: the requests that the scheduler has, by their slots, until these are empty again.
      reading: requests whose prefixes are being read from the store, or for which there is no slot.
      last: the cache, once the thread has ended.
    """

    def __init__(
        self, model: Model, cache: Any, options: RunOptions, inbox: Inbox, max_requests: int, num_stop_tokens: int,
        logits_state: Any,
    ):  # fmt: skip
        """Compiles everything; `cache`, committed to its devices, is donated. The thread is still to be started."""
        super().__init__(name="kvjax-engine", daemon=True)
        self.spec, self._model, self._options, self._inbox = cache.state.spec, model, options, inbox
        self._slots, self._stop_tokens, self.last = max_requests, num_stop_tokens, None
        self._most_lent = _FEW_SALTS  # salts at which those are looked for that nothing has
        self._logits_state = logits_state
        self._scheduler = options.scheduler
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), cache)
        self._empty = jax.device_get(_reset(cache.state)[0])
        self._begin(cache)

    @property
    def listener_counts(self) -> dict[str, int]:
        """As of `Listeners`; zeros without a listener."""
        return (self._options.listeners or Listeners()).counts

    def _begin(self, cache: Any) -> None:
        """Begins with a cache and no requests; compiles what is not compiled yet."""
        serving = init_serving(
            cache.cache, [self.spec.max_length + 1] * self._slots, width=self.spec.max_length,
            num_stop_tokens=self._stop_tokens, top_logprobs=self._options.top_logprobs,
            logits_state=jax.device_put(for_each(self._logits_state, self._slots)),
        )  # fmt: skip
        rows = np.ones((self.spec.max_seqs,), np.bool_)
        self._state: GenerationState[Any] = GenerationState(serving, cache.host, rows, self._options)
        self._tier = HostTier(self._state, self._scheduler, MANY)
        self._stored = self._options.store and StoredPrefixes(self._options.store, self._state, self._scheduler)
        self._ahead = 0 if cache.host or self._stored else 1  # turns that are under way while an earlier one is read
        self._free, self._generations = deque(range(self._slots)), [0] * self._slots
        self.active: dict[int, Request] = {}
        self.reading = list[Request]()
        # Those that are not read yet, with their numbers and the times at which they were dispatched.
        self._turns: deque[tuple[int, float, EventLog | None, Turn]] = deque()
        self._statuses: deque[tuple[int, list[Request], jax.Array]] = deque()  # likewise
        self._turn_number, self._read_at, self._step_seconds = 0, 0.0, PACE
        worst = worst_step(self.spec, self._scheduler) + admission_events(self.spec, serving.width)
        listens = self._options.listener is not None or self._stored
        self._log_size = 3 * worst + MANY * self.spec.max_seqs * len(self.spec.groups) // 2 if listens else 0
        self._entry_tokens = min(ENTRIES, self.spec.max_seqs) * self.spec.max_length
        for steps in (1, MANY):  # jax compiles anew for what a program has returned
            self._tier.compile()
            if self._stored:
                self._stored.compile(self._tier.call)
            self._apply([], [])
            self._dispatch(steps)
        while self._turns:
            self._read(*self._turns.popleft())
        jax.block_until_ready(_copy(self._state.cache.state))

    def run(self) -> None:
        """Runs until the engine is closed."""
        inbox = self._inbox
        try:
            while not inbox.is_closing:
                with inbox.wake:
                    inbox.is_idle = not (inbox.queue or inbox.cancels or self.reading or self.active or self._turns)
                    if inbox.is_idle:
                        inbox.wake.notify_all()  # whoever drains
                        inbox.wake.wait_for(inbox.has_task, _RETRY if self._state.is_behind else None)
                try:
                    self._step()
                except Exception as error:
                    self._recover(error)
        finally:
            self._end()

    @own_transfers()
    def _step(self) -> None:
        """One turn: what has come goes in, the loop runs, and an earlier turn is read."""
        while self._inbox.copies:
            event, copies = self._inbox.copies.popleft()
            try:
                copies.append(_copy(self._state.cache.state))
            finally:
                event.set()
        if self._turns and len(self._running) < self.spec.max_seqs:  # who comes while it runs is to be in the next one
            jax.block_until_ready(self._turns[-1][-1].numbers)
        cancelled = self._take_cancels()
        chosen = self._choose()
        if chosen or cancelled:
            self._apply(chosen, cancelled)
            self.reading = self.reading[len(chosen) :]  # not before: after an error the others are chosen again
        if self.active:
            self._tier.empty_blocks()
            self._dispatch(self._choose_steps())
        elif self.reading and not self._turns:
            time.sleep(_NAP)
        while len(self._turns) > (self._ahead if self.active and not self._state.is_due else 0):
            self._read(*self._turns.popleft())
        if not self._turns:
            self._state.catch_up()
        if self._stored:
            waiting = [request for request in self.reading if not request.handle.done]
            self._stored.forget_others({request.leader.number for request in [*waiting, *self.active.values()]})
        if len(self._inbox.lent) > self._most_lent:
            self._give_back_salts()

    def _give_back_salts(self) -> None:
        """Gives back the salts that no block and no request has; at most half of those that are lent later."""
        cached = _cached_namespaces(self._state.cache.state)
        with self._inbox.wake:
            requests = [*self._inbox.queue, *self.reading, *self.active.values()]
            self._inbox.give_back(cached | {request.options["namespace"] for request in requests})
            self._most_lent = 2 * len(self._inbox.lent) + _FEW_SALTS

    @property
    def _running(self) -> list[Handle]:
        return [request.handle for request in self.active.values() if not request.handle.done]

    def _choose_steps(self) -> int:
        """Steps of the next turn: more than one if all rows run, since who comes now would wait anyway."""
        running = self._running
        if len(running) < self.spec.max_seqs:
            return 1
        if not any(handle.listens for handle in running):
            return MANY
        return int(min(max(PACE / self._step_seconds, 1), MANY))

    def _take_cancels(self) -> list[Request]:
        """Requests to cancel that the scheduler has, at most so many as one call takes; others end at once."""
        now, found = time.monotonic(), list[Request]()
        late = [one for one in [*self.active.values(), *self._inbox.queue, *self.reading] if one.deadline < now]
        while (self._inbox.cancels or late) and len(found) < ENTRIES:
            request = late.pop() if late else self._inbox.cancels.popleft()
            if request.is_cancelled or request.handle.done:
                continue
            request.is_cancelled = True
            if request.slot >= 0:
                found.append(request)
            else:
                request.handle.end("cancelled")
        return found

    def _choose(self) -> list[Request]:
        """The requests to submit: those that came first, as there are slots, once their prefixes have been read."""
        while self._inbox.queue and len(self.reading) < len(self._free):
            self.reading.append(self._inbox.queue.popleft())
        self.reading = [request for request in self.reading if not request.handle.done]
        if self._stored:
            self._read_prefixes(self._stored)
        chosen, num_tokens = list[Request](), 0
        for leader, members in itertools.groupby(self.reading, key=lambda request: request.leader):
            group = list(members)
            num_tokens += sum(len(request.tokens) for request in group)
            is_full = len(chosen) + len(group) > min(ENTRIES, len(self._free)) or num_tokens > self._entry_tokens
            if is_full or (self._stored and not self._stored.has_read(leader.number)):
                break
            chosen += group
        return chosen

    def _read_prefixes(self, stored: StoredPrefixes) -> None:
        """Begins to read for prompts that are new, and adopts what has come."""
        waiting = {one.leader.number: (one.tokens, one.options["namespace"]) for one in self.reading}
        if new := {number: prompt for number, prompt in waiting.items() if number not in stored.prefixes}:
            stored.begin(new)
        size = self.spec.block_size
        stored.adopt(self._tier.call, sum(-(-one.left // size) + 1 for one in self.active.values()))

    def _apply(self, chosen: list[Request], cancelled: list[Request]) -> None:
        """Submits and cancels requests by one call."""
        entries = Entries.none(ENTRIES, self._entry_tokens, self._stop_tokens, self._logits_state)
        start, at = 0, {}
        for n, request in enumerate(chosen):
            request.slot = self._free.popleft()
            request.generation, request.since = self._generations[request.slot], self._turn_number
            self.active[request.slot] = request
            # The first one that is left of a prompt's samples: the leader may have been cancelled.
            entries.sample_of[n] = at.get(request.leader.number, -1)
            at.setdefault(request.leader.number, n)
            end, options = start + len(request.tokens), request.options
            entries.tokens[start:end], start = request.tokens, end
            entries.lengths[n], entries.slots[n] = len(request.tokens), request.slot
            entries.max_new_tokens[n] = request.max_tokens - len(request.tokens)
            entries.stop_tokens[n, : len(options["stop"])] = options["stop"]
            for name in ("priority", "namespace", "seed"):
                getattr(entries, name)[n] = options[name]
            of_request = options["sampling"], options["logits_state"]
            leaves = map(jax.tree.leaves, ((entries.sampling, entries.logits_state), of_request))
            for leaf, value in zip(*leaves, strict=True):
                leaf[n] = value
        for n, request in enumerate(cancelled):
            entries.cancelled[n] = request.slot, request.generation
        self._state.serving, status = apply(self._state.serving, entries, scheduler=self._scheduler)
        if chosen:
            self._statuses.append((self._turn_number, chosen, status))

    def _dispatch(self, steps: int) -> None:
        """Starts a turn."""
        options = self._options
        self._state.serving, log, done = turn(
            self._model, self._state.serving, scheduler=self._scheduler, steps=np.int32(steps),
            most_steps=MANY, log_size=self._log_size, logits_fn=options.logits_fn,
            fixed_steps=options.fixed_steps, now=self._state.now(),
        )  # fmt: skip
        self._turns.append((self._turn_number, time.monotonic(), log, done))
        self._turn_number += 1

    def _read(self, number: int, dispatched_at: float, log: EventLog | None, done: Turn) -> None:
        """Reads what a turn did: new tokens, requests that are over, and slots that are empty again."""
        result = done.read()
        began_at, self._read_at = max(dispatched_at, self._read_at), time.monotonic()
        # A mean in which turns of few steps, that are slower for each, count for less.
        new = self._read_at - began_at - result.steps * self._step_seconds
        self._step_seconds += new / (result.steps + 8) if result.steps else 0.0
        while self._statuses and self._statuses[0][0] <= number:
            _, requests, statuses = self._statuses.popleft()
            for request, status in zip(requests, np.asarray(statuses).tolist(), strict=False):
                if status != Status.OK:
                    request.handle.end(Status(status).name.lower())
                    self._release(request, request.generation)
        admitted, rows = {}, set(result.row.tolist())
        for slot, request in list(self.active.items()):
            if number < request.since:
                continue
            if not request.handle.done:
                self._update(request, result)
                if result.stage[slot] != Stage.WAITING:
                    admitted[request.number] = request.leader.number, request.handle.output
            if result.stage[slot] in (Stage.DONE, Stage.CANCELLED) and slot not in rows:
                self._release(request, result.generation[slot] + 1)
        if self._stored and log is not None:
            self._stored.after_loop(log, admitted)
        if log is not None:
            self._state.publish(log)
        if self._tier.groups:
            self._move(result)

    def _release(self, request: Request, generation: int) -> None:
        """Takes the slot of a request that is over, as the turn's `drain` has; its next request has this generation."""
        del self.active[request.slot]
        self._free.append(request.slot)
        self._generations[request.slot] = generation

    def _update(self, request: Request, result: Done) -> None:
        """Adds a turn's tokens to a request's output."""
        slot, handle = request.slot, request.handle
        before, after = result.before[slot], result.num_tokens[slot]
        finish, stage = Finish(result.finish[slot]), result.stage[slot]
        if stage in (Stage.RUNNING, Stage.DONE) and handle.times.admitted is None:
            handle.times.admitted = time.monotonic()
        if after == before and finish == Finish.NONE:
            return

        def change(output: Output) -> None:
            new = slice(0, after - before)
            output.tokens += result.tokens[slot, new].tolist()
            output.logprobs += result.logprobs[slot, new].tolist()
            if result.top is not None:
                likeliest, logprobs = (column[slot, new].tolist() for column in result.top)
                output.top_logprobs += [dict(zip(*one, strict=True)) for one in zip(likeliest, logprobs, strict=True)]
            output.cached_tokens, output.preemptions = result.cached[slot], result.preemptions[slot]
            if finish != Finish.NONE:
                is_cut = finish == Finish.LENGTH and after < request.unlimited
                full = "row_full" if after > self.spec.max_length else "no_blocks"
                output.finish = full if is_cut else finish.name.lower()

        handle.update(change, ended=finish != Finish.NONE)

    def _move(self, result: Done) -> None:
        """Moves blocks between the tiers for which the loop has stopped."""
        tier, requests = self._tier, self._state.serving.requests
        if result.refused == 1:
            tier.empty_refused()
        if result.onboard_slot >= 0:
            tier.onboard(jax.device_get(requests), result.onboard_slot, int(np.argmax(result.row < 0)))
        while tier.swap():
            pass

    @own_transfers()
    def _recover(self, error: Exception) -> None:
        """Ends the requests that the scheduler has, and goes on with an empty cache."""
        failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        for request in self.active.values():
            request.handle.end(None, failure)
        waiting = self.reading
        if self._stored:
            self._stored.drop()
        del self._state, self._tier, self._stored, self._turns, self._statuses  # the memory of the old cache
        self._begin(self._empty_cache())
        self.reading = waiting
        _, events = _reset(self._state.cache.state)
        self._state.publish(events)

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
        failure = EngineError("the engine was closed")
        with self._inbox.wake:
            self._inbox.is_closing = self._inbox.is_idle = True
            self._inbox.wake.notify_all()
        for request in [*self.active.values(), *self.reading, *self._inbox.queue]:
            request.handle.end(None, failure)
        for event, _ in self._inbox.copies:
            event.set()
        state, stored = vars(self).get("_state"), vars(self).get("_stored")  # not set if a new start has failed
        if stored:
            stored.drop()
        if state and state.alive:
            state.unpublished += [log for _, _, log, _ in vars(self).get("_turns", ()) if log is not None]
            state.release_rows()
            self.last = state.result
            state.publish()
            state.catch_up(is_last=True)


def _cached_namespaces(state: CacheState) -> set[int]:
    """The namespaces of rows in use, and of all blocks with contents: each has a root, whose link has the number."""
    namespace, length = jax.device_get((state.seqs.namespace, state.seqs.length))
    found = set(namespace[length > 0].tolist())
    for group in state.groups:
        parent, fill = jax.device_get((group.blocks.parent, group.blocks.fill))
        found.update(parent[(fill > 0) & (parent[:, 0] == NO_BLOCK), 1].tolist())
    return found
