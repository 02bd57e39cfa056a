# SPDX-License-Identifier: Apache-2.0
"""The interruption of a generation: Ctrl-C, put off until it does no harm, and the error with the cache."""

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
from kvjax.tiered import joined
from kvjax.verbs.release import release

_release = OutermostJit(release)


class GenerationInterrupted(RuntimeError):
    """A generation that ended by an error or Ctrl-C, which is this error's `__cause__`.

    Attributes:
      cache: the cache to go on with, of the kind that was given: the generation's own rows are released, and all that
        was committed is cached. None if a call to which the cache had been donated died on the device.
      outputs: one `Output` per prompt, so far; `finish` is None for unfinished ones.
      events: decoded, those of the releases included: since the last `Progress` of `stream`, or all of `generate`.
    """

    def __init__(self, message: str, cache: Any, outputs: list[Output], events: list[dict[str, Any]]):
        super().__init__(message)
        self.cache = cache
        self.outputs = outputs
        self.events = events


class CtrlC:
    """Ctrl-C inside `with`: noted, and acted on by `act` and where the `with` ends; a second one acts at once."""

    def __init__(self) -> None:
        self._handler: Callable[..., Any] | None = None  # the caller's, while ours is installed
        self._pending: Callable[[], Any] | None = None
        self._noted = False

    def __enter__(self) -> CtrlC:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):  # no other thread gets signals
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        handler = self._handler
        self._handler = None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if kind is None:  # an error ends the generation already
            self.act()

    def act(self) -> None:
        """Calls the caller's handler for a Ctrl-C that was noted and not yet acted on."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending()

    def _note(self, number: int, frame: Any) -> None:
        handler = self._handler
        assert handler is not None
        if self._noted:
            handler(number, frame)
        else:
            self._noted = True
            self._pending = functools.partial(handler, number, frame)


class GenerationState[C: AnyCache]:
    """All that an interruption has to save: the cache, which jitted calls take by donation, and the events.

    Between two jitted calls `serving` and `host` are what the last one returned. A Ctrl-C at any other time waits
    (`ctrl_c`), so that none comes between a call that takes the cache and the assignment of the cache it returns.
    """

    def __init__(self, serving: Serving, host: HostPools | None, own_rows: np.ndarray, options: RunOptions):
        self.serving = serving
        self.host = host
        self._own_rows = own_rows
        self._options = options
        self._time = np.int32(0)
        self.events: list[dict[str, Any]] = []  # decoded
        # Those that neither `events` nor the listener has got yet; none is lost with the call that made them.
        self.unpublished: list[Events | EventLog] = []
        self.ctrl_c = CtrlC()

    @property
    def cache(self) -> Cache:
        """The cache on the device."""
        return self.serving.cache

    @property
    def result(self) -> C:
        """The cache as it is now, of the kind that was given."""
        return cast(C, joined(self.cache, self.host))

    def replace(self, cache: Any) -> None:
        """Goes on with another cache, of the kind that was given."""
        self.serving = self.serving.replace(cache=cache.cache)
        self.host = cache.host

    @property
    def alive(self) -> bool:
        """Whether the cache is here: no call to which it was donated died."""
        return alive((self.cache, self.host))

    def now(self) -> np.int32:
        """The time for the next jitted call; acts on Ctrl-C before."""
        self.ctrl_c.act()
        if (clock := self._options.clock) is not None:
            self._time = np.int32(agreed_time(self.cache.state, read_clock(clock)))
        return self._time

    def publish(self, *events: Events | EventLog, keep: int = 0) -> None:
        """Passes events on in their order, but for the last `keep`; if a listener interrupts, later ones stay too."""
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
        """Passes all events on, if listeners that have failed are due, and gives these a snapshot of the cache.

        Args:
          is_last: whether the run ends here, so that all that are behind get one.
        """
        if self.alive and (self.is_behind if is_last else self.is_due):
            self.publish()
            self._options.listeners.catch_up(self.cache.state, due_only=not is_last)

    def rows_in_use(self) -> np.ndarray:
        """Rows of this generation that have tokens, i32[K]."""
        return np.flatnonzero(self._own_rows & (np.asarray(self.cache.state.seqs.length) > 0))

    def release_rows(self) -> None:
        """Releases all rows of this generation, at any point of it; the events are still to be published."""
        rows = self.rows_in_use()
        if rows.size:
            seqs = np.full(self._own_rows.shape, -1, np.int32)
            seqs[rows] = rows
            # Nothing is donated, so that nothing can be lost. The clock may have failed: this is its last reading.
            state, events = _release(self.cache.state, seqs, now=self._time)
            self.serving = self.serving.replace(cache=Cache(state, self.cache.pools))
            self.unpublished.append(events)

    @own_transfers()
    def interrupted(self, cause: BaseException, outputs: list[Output]) -> GenerationInterrupted:
        """The error that has the cache as `cause` leaves it."""
        cache = None
        how = "the call that it had been donated to did not return: there is no cache"
        if self.alive:
            try:
                jax.block_until_ready((self.cache, self.host))  # shows a call that died on the device
                cache = self.result
                self.release_rows()
                cache = self.result
                how = "go on with this error's `cache`"
            except Exception as error:
                how = f"{'there is no cache' if cache is None else 'its rows are not released'}: {error}"
            for act in [*[self.publish] * len(self.unpublished), functools.partial(self.catch_up, is_last=True)]:
                try:
                    act()
                except BaseException as error:  # the generation ends already, by `cause`
                    how += f"; at its last events the listener raised {_describe(error)}"
        return GenerationInterrupted(f"interrupted by {_describe(cause)}; {how}", cache, outputs, self.events)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
