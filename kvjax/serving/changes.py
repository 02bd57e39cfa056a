# SPDX-License-Identifier: Apache-2.0
"""Changes of a running engine, which its thread makes between two turns: it sleeps, wakes, and gets new weights.

sleep     parks the requests and frees the pools; with `keep="host"` cached blocks go to the host tier first
wake      makes the pools again; the requests go on
update    lets the requests in flight finish, computes their K/V anew, or lets them continue over old K/V

Each version of the weights has namespaces of its own, so nothing finds K/V of another version. A change that fails
leaves the engine with its weights and its requests.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any, Literal

import jax
import numpy as np

from kvjax._compile import OutermostJit
from kvjax.cache import Cache
from kvjax.serving.park import (
    Parked,
    back_to,
    disown,
    leave_device,
    park,
    preempt,
    renumber,
    unpark,
    withdraw,
    without_pools,
)
from kvjax.serving.weights import Weights
from kvjax.verbs.control import forget_namespaces

InFlight = Literal["finish", "recompute", "continue"]

_park = OutermostJit(park, static_argnames="scheduler")
_preempt = OutermostJit(preempt)
_disown = OutermostJit(disown)
_back_to = OutermostJit(lambda serving, kept, logits_state: (back_to(serving, kept, logits_state), None))
_renumber = OutermostJit(lambda serving, namespace: (renumber(serving, namespace), None))
_withdraw = OutermostJit(withdraw)
_leave_device = OutermostJit(leave_device)
_forget = OutermostJit(forget_namespaces)


@dataclasses.dataclass(eq=False)
class Change:
    """A change that a caller waits for."""

    kind: Literal["sleep", "wake", "update"]
    keep: Literal["none", "host"] = "none"
    model: Any = None
    in_flight: InFlight = "recompute"
    weights: str | int = ""
    forget: bool = True
    has_begun: bool = False  # whether an update that lets requests finish has taken the others back
    done: Future[int] = dataclasses.field(default_factory=Future)  # its result is the version


class Changes:
    """The changes of an engine's thread."""

    def __init__(self, thread: Any):
        self._thread = thread
        self._named = dict[str, Weights]()  # the weights of all updates, by name
        self._prepared = set[Any]()  # the changes whose programs are compiled

    def prepare(self, change: Change) -> None:
        """Compiles the programs of a change on its caller's thread, by empty requests, while the engine goes on."""
        thread = self._thread
        kind = change.kind, change.keep, change.in_flight
        driver = vars(thread).get("driver")  # not set while it recovers
        if change.kind == "wake" or kind in self._prepared or driver is None:
            return
        shapes = without_pools(driver.state.serving)

        def placed(value: Any, like: jax.Array) -> jax.Array:
            return jax.device_put(np.asarray(value, like.dtype), like.sharding)

        serving = jax.tree.map(lambda x: placed(np.zeros(x.shape), x), shapes)
        state = jax.tree.map(placed, thread.empty_state, shapes.cache.state)  # zeros are no valid index
        row = placed(np.full(shapes.row.shape, -1), shapes.row)
        serving = serving.replace(cache=Cache(state, shapes.cache.pools), row=row)
        requests = serving.requests
        kept = np.zeros(requests.stage.shape, np.int32), jax.tree.map(np.array, requests.logits_state)
        rows = np.zeros(serving.row.shape, np.bool_)
        now = np.int32(0)
        if change.kind == "sleep" and change.keep == "none":
            options = {"kept": kept[0], "logits_state": kept[1]} if thread.scheduler.canonical else {}
            _park(serving, scheduler=thread.scheduler, now=now, **options)
        elif change.kind == "sleep":
            _preempt(serving, rows, now)
            _leave_device(serving.cache.state)
        else:
            _withdraw(serving, kept[0] > 0)
            _renumber(serving, kept[0])
            _preempt(serving, rows, now)
            if change.in_flight == "continue":
                _disown(serving)
            _forget(serving.cache.state, np.full((1,), -1, np.int32))
        if thread.scheduler.canonical:
            _back_to(serving, *kept)
        self._prepared.add(kind)

    def make(self) -> None:
        """Makes the pending changes in order, up to one that waits for requests to finish."""
        pending = self._thread.inbox.changes
        while pending:
            change = pending[0]
            try:
                is_made = getattr(self, f"_{change.kind}")(change)
            except Exception as error:
                pending.popleft()
                change.done.set_exception(error)
                if not self._thread.driver.state.alive:
                    raise
                continue
            if not is_made:
                return
            pending.popleft()
            change.done.set_result(self._thread.version)

    @property
    def drains(self) -> bool:
        """Whether an update waits for requests to finish, so no other request may start."""
        pending = self._thread.inbox.changes
        return bool(pending) and pending[0].has_begun

    def fail(self, error: Exception) -> None:
        """Ends all pending changes with an error."""
        pending = self._thread.inbox.changes
        while pending:
            pending.popleft().done.set_exception(error)

    def _sleep(self, change: Change) -> bool:
        thread = self._thread
        driver = thread.driver
        if thread.is_asleep:
            return True
        thread.read_all()
        serving = driver.state.serving
        kept = self._kept(serving) if thread.scheduler.canonical else None
        pools = driver.state.cache.pools
        if change.keep == "none":
            options = {} if kept is None else {"kept": kept[0], "logits_state": kept[1]}
            now = driver.state.now()
            parked, events = _park(without_pools(serving), scheduler=thread.scheduler, now=now, **options)
            if not bool(events.ok):
                raise RuntimeError("a pin holds blocks of the cache, so its pools cannot be freed")
            driver.state.serving = parked.serving
            driver.settle()
            driver.state.publish(events)
        else:
            self._park_on_host(kept)
        for array in jax.tree.leaves(pools):
            array.delete()
        thread.is_asleep = True
        return True

    def _park_on_host(self, kept: Any) -> None:
        """Preempts all rows, and moves the cached blocks to the host tier, as far as it has space."""
        driver = self._thread.driver
        state = driver.state
        rows = np.ones((driver.spec.max_seqs,), np.bool_)
        state.publish(driver.change(_preempt, rows, state.now()))
        if kept is not None:
            driver.change(_back_to, *kept)
        driver.settle()
        if any(np.any(np.asarray(group.blocks.refcount)) for group in state.cache.state.groups):
            raise RuntimeError("a pin holds blocks of the cache, so its pools cannot be freed")
        driver.host_tier.make_empty(max(group.num_blocks for group in driver.spec.groups))
        metadata, events = _leave_device(state.cache.state)
        bare = without_pools(state.serving)
        state.serving = bare.replace(cache=Cache(metadata, bare.cache.pools))
        state.publish(events)

    def _wake(self, change: Change) -> bool:
        del change
        thread = self._thread
        if thread.is_asleep:
            state = thread.driver.state
            state.serving = unpark(Parked(state.serving), thread.empty_pools())
            thread.is_asleep = False
            thread.end_cancelled()
        return True

    def _update(self, change: Change) -> bool:
        thread = self._thread
        driver = thread.driver
        begun = [job for job in driver.active.values() if job.output.tokens and not job.is_done]
        if not change.has_begun:
            if change.in_flight == "finish" and thread.is_asleep and begun:
                raise RuntimeError(f"{len(begun)} requests in flight cannot finish while the engine sleeps")
            self._check_name(change.weights, change.model)
            thread.read_all()
            self._take_back()
            change.has_begun = change.in_flight == "finish"
        if change.has_begun and (driver.in_flight or any(not job.is_done for job in driver.active.values())):
            return False
        state = driver.state
        if not thread.is_asleep:
            rows = np.ones((driver.spec.max_seqs,), np.bool_)
            if change.in_flight == "continue":  # a row without a whole block would publish its first block
                seqs = state.cache.state.seqs  # rows of samples that wait for their prompt have no length
                rows = (np.asarray(seqs.committed) < driver.spec.block_size) & (np.asarray(seqs.length) > 0)
            state.publish(driver.change(_preempt, rows, state.now()))
            if change.in_flight == "continue":
                state.publish(driver.change(_disown))
                self._mark()
        driver.settle()
        self._take_back()
        self._keep_tokens()
        namespace = np.array(jax.device_get(state.serving.requests.namespace))
        for slot, job in driver.active.items():
            if not job.is_done:
                namespace[slot] = thread.space_of(job, change.weights)
        if change.forget:
            metadata, events = _forget(state.cache.state, np.full((1,), -1, np.int32))
            state.serving = state.serving.replace(cache=Cache(metadata, state.cache.pools))
            state.publish(events)
        driver.change(_renumber, namespace)
        thread.replace_model(change.model, change.weights)
        self._named[str(change.weights)] = Weights(change.model)
        return True

    def _take_back(self) -> None:
        """Takes back the waiting requests without a token. They begin anew under the next weights."""
        driver = self._thread.driver
        where = np.zeros(driver.state.serving.requests.stage.shape, np.bool_)
        for slot, job in driver.active.items():
            where[slot] = not job.output.tokens
        self._thread.take_back(driver.change(_withdraw, where))

    def _check_name(self, weights: str | int, model: Any) -> None:
        """Raises a ValueError if other arrays had this name before."""
        named = self._named.get(str(weights))
        if named is not None and not named.are_of(model) and self._thread.options.reuse != "any":
            raise ValueError(f"weights: got the name {weights!r} of other arrays, wanted another name, or None")

    def _mark(self) -> None:
        """Marks the outputs of rows that go on over K/V of older weights."""
        driver = self._thread.driver
        for slot in np.asarray(driver.state.serving.row).tolist():
            if slot >= 0 and not driver.active[slot].is_done:
                driver.active[slot].output.mixed = True

    def _keep_tokens(self) -> None:
        """Keeps the tokens that requests have so far, although other weights chose them, with a canonical scheduler."""
        if not self._thread.scheduler.canonical:
            return
        driver = self._thread.driver
        self._note_states(driver.state.serving)
        for job in driver.active.values():
            job.num_kept = len(job.output.tokens)
            job.kept_state = job.last_state
        driver.change(_back_to, *self._kept(driver.state.serving))

    def _note_states(self, serving: Any) -> Any:
        """Notes the state of `logits_fn` of each request with all its tokens. Returns the requests on the host."""
        requests = jax.device_get(serving.requests)
        for slot, job in self._thread.driver.active.items():
            if requests.num_tokens[slot] == len(job.tokens) + len(job.output.tokens):
                job.last_state = jax.tree.map(lambda array, slot=slot: array[slot], requests.logits_state)
        return requests

    def _kept(self, serving: Any) -> tuple[np.ndarray, Any]:
        """The number of tokens i32[W] that each request keeps, and the states of `logits_fn` after them."""
        thread = self._thread
        requests = self._note_states(serving)
        num_tokens = np.array(requests.prompt)
        states = jax.tree.map(np.array, requests.logits_state)
        for slot, job in thread.driver.active.items():
            if job.output.mixed:  # its K/V cannot be made again
                job.num_kept = len(job.output.tokens)
                job.kept_state = job.last_state
            num_tokens[slot] += job.num_kept
            first = thread.slots.first_state(job.request)
            state = job.kept_state if job.num_kept else first
            for array, value in zip(jax.tree.leaves(states), jax.tree.leaves(state), strict=True):
                array[slot] = value
        return num_tokens, states
