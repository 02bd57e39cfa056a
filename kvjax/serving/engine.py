# SPDX-License-Identifier: Apache-2.0
"""`Engine`: threads and asyncio submit requests while it runs, and a separate thread owns the cache.

    with kvjax.serving.Engine(model, cache) as engine:
        handle = engine.submit(Request(prompt, max_new_tokens=64))
        for token in handle: ...                             # or: async for token in handle
        output = handle.result()

Source: vLLM's AsyncLLM and its engine core, which run apart from the submitting code.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import reprlib
import time
import uuid
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, cast

import jax
import numpy as np

from kvjax._arrays import described
from kvjax._compile import own_transfers
from kvjax.blocks.keys import MAX_NUMBER, Namespaces
from kvjax.cache import AnyCache
from kvjax.checks import check_alive, check_bool, static_int
from kvjax.model import Model, check_placement
from kvjax.serving.changes import Change, InFlight
from kvjax.serving.constraints import as_tree, check_request, initial_state
from kvjax.serving.driver import Limits, check_run
from kvjax.serving.engine_thread import ENTRIES, MANY, EngineJob, EngineThread, Inbox
from kvjax.serving.handle import EngineError, Handle
from kvjax.serving.request import Request, RunOptions, check_state
from kvjax.serving.turns import Slots
from kvjax.serving.weights import check_weights, known, remember
from kvjax.state import CacheState
from kvjax.verbs._request import check_retention


class QueueFull(RuntimeError):
    """A request was refused because too many requests wait.

    Attributes:
      waiting: number of waiting requests.
    """

    def __init__(self, waiting: int):
        super().__init__(f"{waiting:,} requests wait already")
        self.waiting = waiting


class Engine[C: AnyCache]:
    """Serves requests with a model and a cache. Nothing else may use the cache.

    Its programs are compiled when it starts, except programs that move blocks to a host tier or from a store: these are
    compiled when they are first used.

    If a step fails, the cache is lost. The requests in the scheduler end with an `EngineError`, the listener gets the
    event of a reset, and the engine continues with an empty cache without pins. If a listener raises, no request and no
    cache is lost: see `kvjax.events.Listeners`.

    Attributes:
      spec: spec of the cache.
    """

    @own_transfers()
    def __init__(
        self,
        model: Model,
        cache: C,
        options: RunOptions | None = None,
        *,
        max_requests: int | None = None,
        max_waiting: int = 1024,
        num_stop_tokens: int = 4,
        num_ranges: int | None = None,
        min_p: bool = False,
        logits_state: Any = None,
    ):
        """Starts an engine.

        Args:
          model: see `generate`.
          cache: donated; no row of it may be in use. `close` returns the last cache.
          options: None means `RunOptions()`. The listener is called on the engine's thread. A store is not closed.
            `steps` are at most 32.
          max_requests: W, maximum requests that the scheduler knows at a time. None means four for each row.
          max_waiting: maximum requests that wait for the scheduler; `QueueFull` refuses more.
          num_stop_tokens: K, maximum stop tokens of a request.
          num_ranges: maximum number of ranges in a request's retention. None means no request has a retention.
          min_p: whether a request may have a `Sampling.min_p`; otherwise programs contain nothing for it.
          logits_state: a tree of numpy arrays, the state of `logits_fn` for a request that is submitted without one.
            None means the `initial_state` of `logits_fn`, if it has one.

        Raises:
          ValueError: naming the argument, before anything is donated.
        """
        self._options = options = dataclasses.replace(RunOptions() if options is None else options, log_events=False)
        check_run(model, cache, options)
        self._weights = known(cache.state)
        # Committed to its devices like all later caches. Otherwise jax would compile again for them.
        cache = jax.tree.map(lambda x: jax.device_put(x, x.sharding), cache)
        remember(cache.state, self._weights)
        check_placement(model, cache)
        self.spec = spec = cache.state.spec
        if np.any(np.asarray(cache.state.seqs.length)):
            raise ValueError("cache: got rows in use, wanted none")
        if logits_state is not None and options.logits_fn is None:
            raise ValueError("logits_state: got one, wanted None without a logits_fn")
        check_bool("min_p", min_p)
        check_retention(spec, num_ranges=num_ranges)
        self._max_waiting = static_int("max_waiting", max_waiting, 1)
        num_requests = static_int("max_requests", 4 * spec.max_seqs if max_requests is None else max_requests, 1)
        steps = min(options.steps or MANY, MANY)
        self._logits_fn = as_tree(options.logits_fn)
        if logits_state is None:
            logits_state = initial_state(options.logits_fn)
        self._slots = Slots(
            [spec.max_length + 1] * num_requests,
            steps=steps,
            num_columns=steps,
            entries=ENTRIES,
            entry_tokens=min(ENTRIES, spec.max_seqs) * spec.max_length,
            width=spec.max_length,
            num_stop_tokens=static_int("num_stop_tokens", num_stop_tokens, 1),
            num_ranges=None if num_ranges is None else static_int("num_ranges", num_ranges, 0),
            min_p=min_p,
            logits_state=jax.tree.map(np.asarray, logits_state),
            has_log=options.listener is not None or options.store is not None,
        )
        self._limits = Limits.of(model, cache.cache, options.scheduler, options.top_logprobs)
        self._max_samples = min(ENTRIES, spec.max_seqs, num_requests)
        self._numbers = itertools.count()
        self._inbox = Inbox(options.names)
        self._thread = EngineThread(model, cache, options, self._inbox, self._slots)
        self._thread.start()

    @own_transfers()
    def submit(self, request: Request, *, salt: str | None = None, timeout: float | None = None) -> Handle:
        """Submits a request, from any thread.

        Args:
          request: a `Request`.
          salt: salt of a tenant, in place of a namespace. `names` lends a number for it as long as a block or a request
            uses it, so you can use any number of salts. A refused request gets no number. None means the request's
            namespace.
          timeout: seconds after which the request is cancelled. None means no limit.

        Returns:
          The handle of the first sample, which knows the handles of all samples.

        Raises:
          ValueError: naming the argument.
          QueueFull: if too many requests wait.
          EngineError: if the engine is closed.
        """
        self._check(request, salt)
        deadline = np.inf if timeout is None else time.monotonic() + timeout
        make = functools.partial(EngineJob, deadline=deadline, cancel=self._cancel)
        jobs = self._limits.jobs(request, self._numbers, 0, make)
        handles = [job.handle for job in jobs]
        for handle in handles:
            handle.samples = handles
        inbox = self._inbox
        with inbox.wake:
            self._check_open()
            if len(inbox.queue) + len(jobs) > self._max_waiting:
                raise QueueFull(len(inbox.queue))
            namespace = inbox.number(request.namespace, salt, inbox.weights)
            if salt is None and self._options.reuse != "any":
                check_weights(self._thread.model, self._weights, [namespace])
            for job in jobs:
                job.namespace = namespace
                job.salt = salt
            inbox.queue.extend(jobs)
            inbox.is_idle = False
            inbox.wake.notify_all()
        return handles[0]

    def _check(self, request: Request, salt: str | None) -> None:
        """Raises a ValueError for a request that the engine cannot serve."""
        if not isinstance(request, Request):
            raise ValueError(f"request: got {reprlib.repr(request)}, wanted a kvjax.serving.Request")
        self._options.check_request(request, self.spec)
        if salt is not None and (self.names is None or request.namespace):
            reason = "without names" if self.names is None else f"together with namespace {request.namespace}"
            raise ValueError(f"salt: got a salt {reason}, wanted None")
        Namespaces.salted(salt)
        if salt is None and self.names is None and request.namespace > MAX_NUMBER - len(self._inbox.numbers):
            raise ValueError(f"namespace: got {request.namespace}, wanted a number that no new weights have")
        if request.prompt_logprobs_from is not None:
            self._thread.check_scores()
        slots = self._slots
        prompt = request.prompt
        refusal = self._limits.refusal(prompt)
        if refusal == "bad_request":
            wanted = f"wanted tokens of 0..{self.vocabulary - 1}, at least one"
            raise ValueError(f"prompt: got {reprlib.repr(prompt.tolist())}, {wanted}")
        if refusal == "row_full":
            raise ValueError(f"prompt: got {len(prompt)} tokens, wanted at most {self.spec.max_length}")
        if len(request.stop_tokens) > slots.num_stop_tokens:
            got = len(request.stop_tokens)
            raise ValueError(f"stop_tokens: got {got}, wanted at most num_stop_tokens, {slots.num_stop_tokens}")
        if request.samples > (max_samples := min(self._max_samples, self._max_waiting)):
            raise ValueError(f"samples: got {request.samples}, wanted at most {max_samples}")
        max_ranges = -1 if slots.num_ranges is None else slots.num_ranges
        if request.num_ranges is not None and request.num_ranges > max_ranges:
            got = request.num_ranges
            raise ValueError(f"retention: got {got} ranges, wanted at most num_ranges, {slots.num_ranges}")
        if request.has_min_p and not slots.min_p:
            raise ValueError("sampling.min_p: got one, wanted None (the engine was made without min_p=True)")
        if request.logits_state is not None:
            check_state(request.logits_state, slots.logits_state, "arrays like the engine's")
        state = slots.logits_state if request.logits_state is None else request.logits_state
        check_request(self._logits_fn, request, state)

    @own_transfers()
    def replace_logits_fn(self, logits_fn: Any) -> None:
        """Replaces `logits_fn` from the next loop on, for example by constraints with a new grammar.

        Requests keep their `logits_state`. You may call it from any thread, before you submit a request that needs the
        new function. Nothing is compiled.

        Raises:
          ValueError: unless its arrays are like the engine's.
        """
        new, old = (jax.tree.flatten(fn) for fn in (as_tree(logits_fn), self._logits_fn))
        if new[1] != old[1] or described(new[0]) != described(old[0]):
            got = described(as_tree(logits_fn))
            wanted = described(self._logits_fn)
            raise ValueError(f"logits_fn: got {got}, wanted arrays like the engine's, {wanted}")
        self._logits_fn = jax.tree.unflatten(*reversed(new))
        self._thread.replace_logits_fn(self._logits_fn)

    @own_transfers()
    def sleep(self, *, keep: Literal["none", "host"] = "none") -> None:
        """Frees the memory of the pools until `wake`, for example for a training step. Any thread may call it.

        Requests wait: they keep their tokens, and compute their K/V again afterwards. Their tokens stay the same, with
        a canonical scheduler bit for bit. New requests wait in the queue, and `QueueFull` refuses more than it takes.

        Args:
          keep: "host" moves cached blocks to the host tier first, as far as it has space. "none" empties the cache.

        Raises:
          ValueError: if `keep` is "host" and the cache has no host tier.
          RuntimeError: if a pin holds blocks. The engine goes on then.
          EngineError: if the engine is closed.
        """
        if keep not in ("none", "host"):
            raise ValueError(f"keep: got {keep!r}, wanted 'none' or 'host'")
        if keep == "host" and not self.spec.host_groups:
            raise ValueError("keep: got 'host', wanted 'none' (the cache has no host tier)")
        self._make(Change("sleep", keep=keep))

    @own_transfers()
    def wake(self) -> None:
        """Makes the pools again. The requests go on. Nothing changes if the engine does not sleep.

        Raises:
          EngineError: if the engine is closed.
        """
        self._make(Change("wake"))

    @own_transfers()
    def update(
        self,
        model: Model,
        *,
        in_flight: InFlight = "recompute",
        weights: str | int | None = None,
        forget: bool = True,
    ) -> int:
        """Replaces the weights, and returns when they are in use. Nothing is compiled. Any thread may call it.

        No request finds K/V of other weights, except what a request in flight "continues" over. `Output.versions` says
        by which weights each token was chosen. A request without a token begins anew under the new weights.

        Args:
          model: a model with arrays of the same shapes, dtypes and devices. The engine does not copy them.
          in_flight: what happens to requests that have tokens. "finish": they end with the old weights, while others
            wait. "recompute": they keep their tokens, and the new weights compute the K/V anew. "continue": they go on
            over K/V of the old weights and write K/V of the new weights after it. Such an output is `mixed`, and
            nothing else finds its blocks. A row without a whole block is computed anew.
          weights: name of the weights in the salts of namespaces, and so in stores and in published events. Give equal
            names only to equal weights. None means a new random name.
          forget: whether cached blocks of other weights become empty at once. Otherwise they leave when other blocks
            need their space.

        Returns:
          The number of updates so far, as in `Output.versions`.

        Raises:
          ValueError: naming the argument, also if other arrays had this name before.
          RuntimeError: if the engine sleeps, and requests in flight cannot "finish".
          EngineError: if the engine is closed.
        """
        got, wanted = (jax.tree.flatten(tree) for tree in (model, self._thread.model))
        if got[1] != wanted[1] or described(got[0]) != described(wanted[0]):
            raise ValueError("model: got other arrays than the engine's, wanted the same tree, shapes and dtypes")
        check_alive(model, name="model")
        places = [[getattr(leaf, "sharding", None) for leaf in leaves] for leaves, _ in (got, wanted)]
        if places[0] != places[1]:
            raise ValueError("model: got arrays on other devices than the engine's, wanted the same shardings")
        if in_flight not in (modes := ("finish", "recompute", "continue")):
            raise ValueError(f"in_flight: got {in_flight!r}, wanted one of {modes}")
        Namespaces.salted(None, weights)
        name = uuid.uuid4().hex if weights is None else weights
        return self._make(Change("update", model=model, in_flight=in_flight, weights=name, forget=forget))

    def _make(self, change: Change) -> int:
        """Gives the engine's thread a change, and waits until it is made. Returns the version of the weights."""
        self._thread.changes.prepare(change)
        with self._inbox.wake:
            self._check_open()
            self._inbox.changes.append(change)
            self._inbox.is_idle = False
            self._inbox.wake.notify_all()
        return change.done.result()

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self._thread.is_asleep

    @property
    def version(self) -> int:
        """The number of updates of the weights so far."""
        return self._thread.version

    @property
    def vocabulary(self) -> int:
        """The number of the model's tokens."""
        return self._limits.vocabulary

    @property
    def names(self) -> Namespaces | None:
        """The `Namespaces` of the requests, or None."""
        return self._options.names

    def _cancel(self, handle: Handle) -> None:
        with self._inbox.wake:
            self._inbox.cancels.append(handle.job)
            self._inbox.wake.notify_all()

    def _check_open(self) -> None:
        if self._inbox.is_closing:
            raise EngineError("the engine is closed")

    @property
    def waiting(self) -> int:
        """The number of requests that are not in the scheduler yet."""
        return len(self._inbox.queue) + len(self._thread.waiting)

    @property
    def listener_counts(self) -> dict[str, int]:
        """Counts of the listener: failures, missed calls, and snapshots taken since."""
        return self._options.listeners.counts

    @property
    def running(self) -> int:
        """The number of requests in the scheduler that are not over."""
        return sum(not job.is_done for job in list(self._thread.active.values()))

    @property
    def state(self) -> CacheState:
        """A copy of the cache's metadata, which any thread may read."""
        copy = Future[CacheState]()
        with self._inbox.wake:
            self._check_open()
            self._inbox.copies.append(copy)
            self._inbox.wake.notify_all()
        try:
            return copy.result()
        except CancelledError:
            raise EngineError("the engine was closed, or has failed") from None

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until all submitted requests are over, at most `timeout` seconds. Returns whether they are."""
        with self._inbox.wake:
            return self._inbox.wake.wait_for(lambda: self._inbox.is_idle, timeout)

    def close(self) -> C:
        """Ends all requests and the engine. Returns its cache."""
        with self._inbox.wake:
            self._inbox.is_closing = True
            self._inbox.wake.notify_all()
        self._thread.join()
        return cast(C, self._thread.last)

    def __enter__(self) -> Engine[C]:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
