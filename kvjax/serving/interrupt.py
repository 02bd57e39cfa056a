# SPDX-License-Identifier: Apache-2.0
"""Interrupts a generation: defers Ctrl-C until it does no harm, and raises an error with the cache."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from kvjax._arrays import alive
from kvjax._compile import OutermostJit, own_transfers
from kvjax.cache import AnyCache, Cache
from kvjax.events.log import EventLog
from kvjax.events.mirror import to_list
from kvjax.events.records import Events
from kvjax.pools.host import HostPools
from kvjax.processes import agreed_time
from kvjax.serving.request import RunOptions, read_clock
from kvjax.serving.requests import Output, Serving
from kvjax.serving.weights import Weights, remember
from kvjax.tiered import joined
from kvjax.verbs.release import release

_release = OutermostJit(release)


class GenerationInterrupted(RuntimeError):
    """A generation ended by an error or Ctrl-C, which is this error's `__cause__`.

    Attributes:
      cache: the cache to continue with, of the same kind as the cache you passed. The generation's rows are released,
        and everything committed is cached. None if the cache was lost in a failed call.
      outputs: outputs so far, in the order of the prompts; `finish` is None for unfinished outputs.
      events: decoded events, including the releases: since the last `Progress` of `stream`, or all events of
        `generate`.
    """

    def __init__(self, message: str, cache: Any, outputs: list[Output], events: list[dict[str, Any]]):
        super().__init__(message)
        self.cache = cache
        self.outputs = outputs
        self.events = events


class CtrlC:
    """Defers Ctrl-C inside `with` until `act` is called or the block ends. A second Ctrl-C acts at once."""

    def __init__(self) -> None:
        self._handler: Callable[..., Any] | None = None  # the caller's handler, while ours is installed
        self._pending: Callable[[], Any] | None = None
        self._is_deferred = False

    def __enter__(self) -> CtrlC:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):  # no other thread gets signals
            self._handler = handler
            signal.signal(signal.SIGINT, self._defer)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        handler = self._handler
        self._handler = None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if kind is None:  # an error ends the generation already
            self.act()

    def act(self) -> None:
        """Calls the caller's handler if a Ctrl-C was deferred."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending()

    def _defer(self, signal_number: int, frame: Any) -> None:
        handler = self._handler
        assert handler is not None
        if self._is_deferred:
            handler(signal_number, frame)
        else:
            self._is_deferred = True
            self._pending = functools.partial(handler, signal_number, frame)


class GenerationState[C: AnyCache]:
    """The data that an interruption must save: the cache, which jitted calls take by donation, and the events.

    Between two jitted calls `serving` and `host` are the results of the last call. At any other time Ctrl-C waits
    (`ctrl_c`), so it never comes between a call taking the cache and the assignment of the returned cache.
    """

    def __init__(self, serving: Serving, host: HostPools | None, own_rows: np.ndarray, options: RunOptions):
        self.serving = serving
        self.host = host
        self._own_rows = own_rows
        self._options = options
        self._time = np.int32(0)
        self.events: list[dict[str, Any]] = []  # decoded
        # Events that neither `events` nor the listener has yet. They survive a failure of the call that made them.
        self.unpublished: list[Events | EventLog] = []
        self.ctrl_c = CtrlC()
        self.weights: dict[int, Weights] = {}  # of each namespace

    @property
    def cache(self) -> Cache:
        """The cache on the device."""
        return self.serving.cache

    @property
    def result(self) -> C:
        """The present cache, of the same kind as the passed cache."""
        remember(self.cache.state, self.weights)
        return cast(C, joined(self.cache, self.host))

    def replace(self, cache: Any) -> None:
        """Continues with another cache of the same kind."""
        self.serving = self.serving.replace(cache=cache.cache)
        self.host = cache.host

    @property
    def alive(self) -> bool:
        """Whether the cache still exists, because no failed call has lost it."""
        return alive((self.cache, self.host))

    def now(self) -> np.int32:
        """The time for the next jitted call. Acts on a deferred Ctrl-C first."""
        self.ctrl_c.act()
        if (clock := self._options.clock) is not None:
            self._time = np.int32(agreed_time(self.cache.state, read_clock(clock)))
        return self._time

    def publish(self, *events: Events | EventLog, keep: int = 0) -> None:
        """Publishes events in order, except the last `keep`. If a listener interrupts, later events stay too."""
        self.unpublished += events
        while len(self.unpublished) > keep:
            if self._options.log_events:
                self.events += to_list(self.unpublished[0])
            self._options.listeners(self.unpublished.pop(0))

    @property
    def is_behind(self) -> bool:
        """Whether a listener has failed, and has had no snapshot since."""
        return self._options.listeners.is_behind

    @property
    def is_due(self) -> bool:
        """Whether `catch_up` has something to do."""
        return self._options.listeners.is_due

    def catch_up(self, *, is_last: bool = False) -> None:
        """If failed listeners are due, publishes all events and gives them a snapshot of the cache.

        Args:
          is_last: whether the run ends here, so every failed listener gets a snapshot.
        """
        if self.alive and (self.is_behind if is_last else self.is_due):
            self.publish()
            self._options.listeners.catch_up(self.cache.state, due_only=not is_last)

    def rows_in_use(self) -> np.ndarray:
        """Rows of this generation with tokens, i32[K]."""
        return np.flatnonzero(self._own_rows & (np.asarray(self.cache.state.seqs.length) > 0))

    def release_rows(self) -> None:
        """Releases all rows of this generation, at any point of it. The caller publishes the events."""
        rows = self.rows_in_use()
        if rows.size:
            seqs = np.full(self._own_rows.shape, -1, np.int32)
            seqs[rows] = rows
            # Nothing is donated, so nothing can be lost. The clock may have failed, so this uses its last reading.
            state, events = _release(self.cache.state, seqs, now=self._time)
            self.serving = self.serving.replace(cache=Cache(state, self.cache.pools))
            self.unpublished.append(events)

    @own_transfers()
    def interrupted(self, cause: BaseException, outputs: list[Output]) -> GenerationInterrupted:
        """Makes the error, with the cache in the state that `cause` has left."""
        cache = None
        outcome = "the call that had taken the cache did not return: there is no cache"
        if self.alive:
            try:
                jax.block_until_ready((self.cache, self.host))  # shows a call that died on the device
                cache = self.result
                self.release_rows()
                cache = self.result
                outcome = "go on with this error's `cache`"
            except Exception as error:
                outcome = f"{'there is no cache' if cache is None else 'its rows are not released'}: {error}"
            for act in [*[self.publish] * len(self.unpublished), functools.partial(self.catch_up, is_last=True)]:
                try:
                    act()
                except BaseException as error:  # the generation ends already, by `cause`
                    outcome += f"; at its last events the listener raised {_describe(error)}"
        return GenerationInterrupted(f"interrupted by {_describe(cause)}; {outcome}", cache, outputs, self.events)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
