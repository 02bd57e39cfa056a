# SPDX-License-Identifier: Apache-2.0
"""Listeners get a cache's events, and cannot harm the cache, its requests or each other.

events    are for each listener; one that raises is behind, and gets no more of them
snapshot  of the cache's state is for a listener that is behind; it stands for all that the listener has missed
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from kvjax.events.mirror import snapshot_log
from kvjax.events.records import COLUMNS, EventKind
from kvjax.state import CacheState

log = logging.getLogger("kvjax")
Listener = Callable[[Any], object]
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 30.0  # seconds until a listener that has failed is tried again


@dataclasses.dataclass(eq=False)
class _Standing:
    """The failures of a listener, in all runs that it listens to."""

    failures: int = 0
    missed: int = 0
    snapshots: int = 0
    is_behind: bool = False
    wait: float = _FIRST_WAIT  # seconds, doubled by each failure that follows another one
    retry_at: float = 0.0

    def fail(self) -> None:
        """Notes that the listener has not got what it was called with."""
        self.failures += 1
        self.retry_at = time.monotonic() + self.wait
        self.wait = min(2 * self.wait, _LONGEST_WAIT)
        self.is_behind = True

    @property
    def is_due(self) -> bool:
        """Whether the listener is behind, and is to be tried again by now."""
        return self.is_behind and time.monotonic() >= self.retry_at


# By the identity of a function, or of an object and the name of its method. An entry goes with the function or object.
_standings: dict[tuple[Hashable, ...], _Standing] = {}


def _standing_of(listener: Callable[..., object], leading: tuple[Hashable, ...]) -> _Standing:
    """The standing of a listener; a new one each time for a function that takes no weak references, as of a list."""
    owner = getattr(listener, "__self__", listener)
    key = id(owner), getattr(listener, "__name__", ""), *leading
    if key not in _standings:
        try:
            weakref.finalize(owner, _standings.pop, key, None).atexit = False
        except TypeError:
            return _Standing()
        _standings[key] = _Standing()
    return _standings[key]


class Listeners:
    """Calls listeners with a cache's events. One that raises costs nobody anything but its own events.

    A failure is logged by `kvjax`. A listener that has failed is behind, and gets no more events. It is tried again
    after a while with a snapshot: an `EventLog` of groups that are created and cleared, and of all that is cached, by
    which `fold` has the cache's index whatever it had before. `generate`, `stream`, `run_batch`, `Engine` and
    `Replicas` call each listener by this class. An exception that is no `Exception`, such as KeyboardInterrupt, is
    raised when all listeners have got the events.

    Args:
      listeners: functions of `Events`, an `EventLog` or other events. An object whose `is_behind` is true after a call
        of its method wants a snapshot too.
      leading: arguments before the events, such as the number of one of the caches that call one listener.

    Example:
      >>> from kvjax.events import Listeners, to_list
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> found, away = [], [True]
      >>> def listener(events):
      ...     if away:
      ...         raise OSError("away")
      ...     found.extend(to_list(events))
      >>> listeners = Listeners(listener)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> listeners(events)
      >>> away.clear()
      >>> listeners.catch_up(state)
      >>> [event["kind"] for event in found], listeners.counts
      (['created', 'cleared', 'stored', 'stored'], {'failures': 1, 'missed': 0, 'snapshots': 1})
    """

    def __init__(self, *listeners: Callable[..., object], leading: tuple[Hashable, ...] = ()):
        self._listeners = [(listener, _standing_of(listener, leading)) for listener in listeners]
        self._leading = leading

    @classmethod
    def of(cls, listener: Listener) -> Listeners:
        """These listeners, or those that consist of one function."""
        return listener if isinstance(listener, Listeners) else cls(listener)

    def __call__(self, events: Any) -> None:
        """Calls each listener with the events of the next transition, or of several together."""
        if not hasattr(events, "records"):
            raise ValueError(f"events: got {type(events).__name__}, wanted Events or an EventLog")
        read, interrupts = functools.cache(functools.partial(self._read, events, is_shared=True)), []
        for number, (_, standing) in enumerate(self._listeners):
            if standing.is_behind and not _begins_anew(events):
                standing.missed += 1
            else:
                interrupts += self._call(number, read)
        if interrupts:
            raise interrupts[0]

    @property
    def is_behind(self) -> bool:
        """Whether a listener is behind."""
        return any(standing.is_behind for _, standing in self._listeners)

    @property
    def is_due(self) -> bool:
        """Whether a listener is behind, and is to be tried again by now."""
        return any(standing.is_due for _, standing in self._listeners)

    @property
    def counts(self) -> dict[str, int]:
        """Failures of the listeners, calls that they have missed, and snapshots that they have taken."""
        names = "failures", "missed", "snapshots"
        return {name: sum(getattr(standing, name) for _, standing in self._listeners) for name in names}

    def lose(self) -> None:
        """Notes that events did not come to these listeners: they are behind, and due."""
        for _, standing in self._listeners:
            standing.is_behind, standing.retry_at = True, 0.0

    def catch_up(self, state: CacheState, *, due_only: bool = False) -> None:
        """Gives listeners that are behind a snapshot.

        Args:
          state: after all events so far.
          due_only: whether to leave alone those that are not due.
        """
        behind = [
            number
            for number, (_, standing) in enumerate(self._listeners)
            if (standing.is_due if due_only else standing.is_behind)
        ]
        if not behind:
            return
        read, interrupts = functools.partial(self._read, snapshot_log(state), is_shared=False), []
        for number in behind:
            interrupts += self._call(number, read)
        if interrupts:
            raise interrupts[0]

    def _call(self, number: int, read: Callable[[], Any]) -> list[BaseException]:
        """Calls a listener with the events that `read` returns; returns the interrupt that it raises, if any."""
        listener, standing = self._listeners[number]
        owner, was_behind, interrupts = getattr(listener, "__self__", listener), standing.is_behind, []
        try:
            listener(*self._leading, read())
        except BaseException as error:
            standing.fail()
            log.error(
                "listener %r failed, and gets a snapshot of the cache when it works again: %s: %s",
                listener,
                type(error).__name__,
                error,
                exc_info=not was_behind,
            )
            interrupts += [] if isinstance(error, Exception) else [error]
        else:
            if getattr(owner, "is_behind", False):
                standing.fail()
            elif was_behind:
                standing.is_behind, standing.wait = False, _FIRST_WAIT
                standing.snapshots += 1
                log.info("listener %r works again: a snapshot stands for what it has missed", listener)
        if standing.is_behind:
            self._fall_behind(number)
        return interrupts

    def _read(self, events: Any, *, is_shared: bool) -> Any:
        """The events as listeners get them, which may be several at a time."""
        return events

    def _fall_behind(self, number: int) -> None:
        """A listener has failed."""


def _begins_anew(events: Any) -> bool:
    """Whether events say the whole of a cache, by themselves: they are a snapshot, or those of `reset`."""
    records = np.asarray(jax.device_get(events.records)).reshape(-1, len(COLUMNS))
    return records[:1, 0].tolist() in ([EventKind.CREATED], [EventKind.CLEARED])
