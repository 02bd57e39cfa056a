# SPDX-License-Identifier: Apache-2.0
"""Listeners get a cache's events. A listener that fails harms neither the cache, nor its requests, nor other listeners.

events    go to each listener. A listener falls behind when it raises, and gets no more events
snapshot  of the cache's state goes to a listener that is behind. It replaces all missed events
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
# Seconds until a failed listener is called again.
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 30.0


@dataclasses.dataclass(eq=False)
class _Standing:
    """The failures of a listener, across all its runs."""

    failures: int = 0
    missed: int = 0
    snapshots: int = 0
    is_behind: bool = False
    wait: float = _FIRST_WAIT  # seconds, doubled by each consecutive failure
    retry_at: float = 0.0

    def fail(self) -> None:
        """Records a failed call of the listener."""
        self.failures += 1
        self.retry_at = time.monotonic() + self.wait
        self.wait = min(2 * self.wait, _LONGEST_WAIT)
        self.is_behind = True

    @property
    def is_due(self) -> bool:
        """Whether the listener is behind and it is time to try it again."""
        return self.is_behind and time.monotonic() >= self.retry_at


# Keyed by the identity of a function, or of an object and the name of its method. An entry lives as long as its owner.
_standings: dict[tuple[Hashable, ...], _Standing] = {}


def _standing_of(listener: Callable[..., object], leading: tuple[Hashable, ...]) -> _Standing:
    """The standing of a listener. If the listener supports no weak references, it is new in each call."""
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
    """Calls listeners with a cache's events. If a listener raises, only its own events are lost.

    The logger `kvjax` records the failure. The listener is then behind, and gets no more events until it is called with
    a snapshot: an `EventLog` of created and cleared groups, and of all cached blocks. `fold` turns the snapshot into
    the cache's index, whatever the listener had before. `generate`, `stream`, `run_batch`, `Engine` and `Replicas` call
    each listener in this way. An interrupt, such as KeyboardInterrupt, is raised after all listeners have got the
    events.

    Args:
      listeners: functions of `Events`, an `EventLog` or other events. If the object of a method has a true `is_behind`
        after the call, it gets a snapshot too.
      leading: arguments before the events, such as the index of the cache if several caches call one listener.

    Example:
      >>> from kvjax.events import Listeners, to_list
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> received, away = [], [True]
      >>> def listener(events):
      ...     if away:
      ...         raise OSError("away")
      ...     received.extend(to_list(events))
      >>> listeners = Listeners(listener)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> listeners(events)
      >>> away.clear()
      >>> listeners.catch_up(state)
      >>> [event["kind"] for event in received], listeners.counts
      (['created', 'cleared', 'stored', 'stored'], {'failures': 1, 'missed': 0, 'snapshots': 1})
    """

    def __init__(self, *listeners: Callable[..., object], leading: tuple[Hashable, ...] = ()):
        self._listeners = [(listener, _standing_of(listener, leading)) for listener in listeners]
        self._leading = leading

    @classmethod
    def of(cls, listener: Listener) -> Listeners:
        """Returns the argument itself if it is a `Listeners`, and else `Listeners` of this function."""
        return listener if isinstance(listener, Listeners) else cls(listener)

    def __call__(self, events: Any) -> None:
        """Calls each listener with the events of a transition, or of several."""
        if not hasattr(events, "records"):
            raise ValueError(f"events: got {type(events).__name__}, wanted Events or an EventLog")
        read = functools.cache(functools.partial(self._read, events, is_shared=True))
        interrupts = []
        for index, (_, standing) in enumerate(self._listeners):
            if standing.is_behind and not _begins_anew(events):
                standing.missed += 1
            else:
                interrupts += self._call(index, read)
        if interrupts:
            raise interrupts[0]

    @property
    def is_behind(self) -> bool:
        """Whether any listener is behind."""
        return any(standing.is_behind for _, standing in self._listeners)

    @property
    def is_due(self) -> bool:
        """Whether any listener is behind and it is time to try it again."""
        return any(standing.is_due for _, standing in self._listeners)

    @property
    def counts(self) -> dict[str, int]:
        """Failures of the listeners, missed calls, and received snapshots."""
        names = ("failures", "missed", "snapshots")
        return {name: sum(getattr(standing, name) for _, standing in self._listeners) for name in names}

    def lose(self) -> None:
        """Marks all listeners as behind and due, after events were lost."""
        for _, standing in self._listeners:
            standing.is_behind = True
            standing.retry_at = 0.0

    def catch_up(self, state: CacheState, *, due_only: bool = False) -> None:
        """Gives a snapshot to listeners that are behind.

        Args:
          state: the state after all events so far.
          due_only: whether to skip listeners not yet due.
        """
        behind = [
            index
            for index, (_, standing) in enumerate(self._listeners)
            if (standing.is_due if due_only else standing.is_behind)
        ]
        if not behind:
            return
        read = functools.partial(self._read, snapshot_log(state), is_shared=False)
        interrupts = []
        for index in behind:
            interrupts += self._call(index, read)
        if interrupts:
            raise interrupts[0]

    def _call(self, index: int, read: Callable[[], Any]) -> list[BaseException]:
        """Calls a listener with the events of `read`. Returns the interrupt raised by the listener, if any."""
        listener, standing = self._listeners[index]
        owner = getattr(listener, "__self__", listener)
        was_behind = standing.is_behind
        interrupts = []
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
                standing.is_behind = False
                standing.wait = _FIRST_WAIT
                standing.snapshots += 1
                log.info("listener %r works again: a snapshot replaced the events that it missed", listener)
        if standing.is_behind:
            self._fall_behind(index)
        return interrupts

    def _read(self, events: Any, *, is_shared: bool) -> Any:
        """The events in the form that listeners get. The form may be shared."""
        return events

    def _fall_behind(self, index: int) -> None:
        """Does nothing. A subclass may react to a listener's failure here."""


def _begins_anew(events: Any) -> bool:
    """Whether events describe a whole cache, like a snapshot or the events of `reset`."""
    records = np.asarray(jax.device_get(events.records)).reshape(-1, len(COLUMNS))
    return records[:1, 0].tolist() in ([EventKind.CREATED], [EventKind.CLEARED])
