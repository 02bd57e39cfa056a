# SPDX-License-Identifier: Apache-2.0
"""Listeners of a cache's events: several together, and those that send from a thread of their own.

    caller    publish: events are copied to the host, folded into the index, and what they change is queued
    thread    encodes and sends what is queued, and something else when idle

When the queue is full, a snapshot of the index takes the place of all that is in it, and of what follows until the
thread comes to it. Everything in the queue is a copy: the thread never reads the index.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from kvjax.events.host_events import HostEvents, host_events, listened
from kvjax.events.index import Change, NodeMap, share
from kvjax.events.listeners import Listeners
from kvjax.interop.encoder import EventEncoder
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

log = logging.getLogger("kvjax.interop")


def combine_listeners(spec: CacheSpec, *listeners: Callable[[Any], object]) -> Listeners:
    """One listener for several: events are copied to the host, read, and folded into an index once for all of them.

    One that raises costs the others nothing, see `kvjax.events.Listeners`.

    Args:
      spec: of the cache.
      listeners: methods of what `kvjax.interop` has, such as `Log.write` and `Publisher.publish`: they get
        `HostEvents`. Those that have equal indices by now share one, with its hashes if their `key` and names agree.

    Returns:
      The listener; in a loop of your own its `catch_up(state)` brings back those that have failed.

    Example:
      >>> from kvjax.events import NodeMap
      >>> from kvjax.interop import together
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> nodes, stored = NodeMap(spec), []
      >>> listener = together(spec, nodes.fold, lambda events: stored.append(len(events.text)))
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> listener(events)
      >>> stored, len(nodes.index)
      ([2], 2)
    """
    return _Together(spec, listeners)


class _Together(Listeners):
    """The listener of `combine_listeners`."""

    def __init__(self, spec: CacheSpec, listeners: Sequence[Callable[[Any], object]]):
        super().__init__(*listeners)
        self._spec = spec
        owners = [getattr(listener, "__self__", None) for listener in listeners]
        maps = [owner if isinstance(owner, NodeMap) else getattr(owner, "nodes", None) for owner in owners]
        self._maps = [one if isinstance(one, NodeMap) else None for one in maps]
        share([one for one in self._maps if one is not None])

    def _read(self, events: Any, *, is_shared: bool) -> HostEvents:
        return dataclasses.replace(listened(events, self._spec), is_shared=is_shared)

    def _fall_behind(self, number: int) -> None:
        if (nodes := self._maps[number]) is not None:
            nodes.part()


class PublisherThread[E: EventEncoder](abc.ABC):
    """The side of a wire that takes a cache's events. A subclass makes what it needs to send, then starts `_thread`."""

    _name = "publisher"  # as errors and the thread call it

    def __init__(self, encoder: E, *, queue_bytes: int, heartbeat: float | None):
        for name, value in (("heartbeat", heartbeat), ("queue_bytes", queue_bytes)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value!r}, wanted more than 0")
        self._encoder, self._heartbeat, self._queue_bytes = encoder, heartbeat, queue_bytes
        self._queue: collections.deque[list[Change] | NodeMap] = collections.deque([encoder.nodes.copy()])
        self._queued, self._closing, self._busy = 0, False, True
        self._error: Exception | None = None
        self._callers, self._wake = threading.Lock(), threading.Condition()  # taken in this order
        self._counts = {"overflows": 0, "ignored": 0}
        self._thread = threading.Thread(target=self._run, name=f"kvjax-{self._name}", daemon=True)

    nodes = property(lambda self: self._encoder.nodes)  # what is cached by the events so far

    def publish(self, events: Any) -> None:
        """Publishes events; their arrays may be donated afterwards.

        Events that cannot have happened never reach the caller: readers get an empty index, the log of
        `kvjax.interop` has it once, and what follows is ignored until `attach`, or until events that begin with groups
        that are cleared: a run's `kvjax.events.Listeners` send such a snapshot. Without it `close` raises the error.

        Args:
          events: `Events`, an `EventLog` or decoded events (`progress.events`); each once, in their order.
        """
        read = host_events(events, self._encoder.nodes.spec)
        if not len(read.records):
            return
        with self._callers:
            self._refuse_closed()
            if self._error is not None and not read.begins_anew:
                self._counts["ignored"] += 1
                return
            try:
                changes = self._encoder.follow(read)
            except Exception as error:
                return self._fail(error)
            if read.begins_anew:  # readers may have anything
                self._begin_anew()
            else:
                self._push(changes)

    @property
    def is_behind(self) -> bool:
        """Whether events are ignored, after some that cannot have happened."""
        return self._error is not None

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty, was restored, or goes on after events that were impossible.

        What is queued is dropped, as it is part of the state; readers get the whole of it.
        """
        with self._callers:
            self._refuse_closed()
            self._encoder.attach(state)
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Queues the whole index, whatever was wrong before."""
        with self._wake:
            self._error = None
            self._replace(self._encoder.nodes.copy())

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until what was published is sent, at most `timeout` seconds; whether it is."""
        with self._wake:
            return self._wake.wait_for(lambda: not (self._queue or self._busy), timeout)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the changes that wait for the thread."""
        return self._queued

    @property
    def counts(self) -> dict[str, int]:
        """Overflows of the queue, calls ignored after an error, and blocks left out."""
        return {**self._counts, **self._encoder.left_out}

    def close(self, timeout: float = 5.0) -> None:
        """Sends what is queued, for at most `timeout` seconds, and ends.

        Raises:
          ValueError: what was wrong with events that cannot have happened, if `attach` has not mended it.
          TimeoutError: if not all could be sent.
        """
        deadline = time.monotonic() + timeout
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)
        with self._wake:
            left = len(self._queue)
            self._queue.clear()
        self._thread.join()  # of what it sends at present
        self._end(max(0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        if left:
            raise TimeoutError(f"close: got {timeout} s, wanted more: {left} batches were not sent")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self.close()
        except (ValueError, TimeoutError):
            if kind is None:
                raise
            log.exception("the %s ended with an error", self._name)

    def _refuse_closed(self) -> None:
        if self._closing:
            raise ValueError(f"publish: got events after `close`, wanted an open {self._name}")

    def _push(self, changes: list[Change]) -> None:
        """Queues changes; or, if they do not fit, a snapshot in place of all that is queued."""
        size = sum(change.nbytes for change in changes)
        with self._wake:
            if self._error is not None:
                self._counts["ignored"] += 1
            elif self._queued + size <= self._queue_bytes:
                self._queue.append(changes)
                self._queued += size
                self._wake.notify_all()
            else:
                self._counts["overflows"] += 1
                nodes = self._queue.popleft() if self._queue else None
                if isinstance(nodes, NodeMap):  # to bring it up to date costs less than another copy
                    for change in itertools.chain(*self._queue, changes):  # pyright: ignore[reportArgumentType]
                        nodes.write(change)
                self._replace(nodes if isinstance(nodes, NodeMap) else self._encoder.nodes.copy())

    def _replace(self, nodes: NodeMap) -> None:
        """Queues a snapshot in place of all that is queued."""
        with self._wake:
            self._queue.clear()
            self._queue.append(nodes)
            self._queued = 0
            self._wake.notify_all()

    def _fail(self, error: Exception) -> None:
        """Ends publishing, for events that cannot have happened or an `extra_name` that raises."""
        log.error("events cannot be published any more, until `attach` or a snapshot: %s", error)
        with self._wake:
            self._error = error
            self._replace(NodeMap(self._encoder.nodes.spec))

    # The thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._queue or self._closing, self._patience())
                if self._closing and not self._queue:
                    return
                self._busy = bool(self._queue)
                some = self._queue.popleft() if self._queue else None
                if not isinstance(some, NodeMap | None):
                    self._queued -= sum(change.nbytes for change in some)
            try:
                if some is None:
                    self._idle()
                elif isinstance(some, NodeMap):
                    self._resync(some)
                else:
                    self._send(some)
            except Exception as error:
                if some is None or (isinstance(some, NodeMap) and not len(some)):
                    raise
                self._fail(error)

    def _patience(self) -> float | None:
        """Seconds without events after which the thread is idle."""
        return self._heartbeat

    # What each wire does, on the thread.

    @abc.abstractmethod
    def _send(self, changes: list[Change]) -> None:
        """Sends changes."""

    @abc.abstractmethod
    def _resync(self, nodes: NodeMap) -> None:
        """Sends readers an index, which takes the place of what they have."""

    @abc.abstractmethod
    def _idle(self) -> None:
        """Shows readers that it is there."""

    @abc.abstractmethod
    def _end(self, seconds: float) -> None:
        """Lets readers get what was sent, for at most some seconds, and ends."""
