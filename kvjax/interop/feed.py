# SPDX-License-Identifier: Apache-2.0
"""Follows a cache's events on a thread of its own, which passes on what they tell.

    caller    publish: events are copied to the host and queued
    feeder    a batch at a time: node map, names, and what the wire does with them; something else when idle

What does not fit the queue is not dropped: the caller folds the queue and its own events into the node map, without
hashing and encoding, and the feeder tells the whole map anew. It holds the map for one batch at a time.
"""

from __future__ import annotations

import abc
import collections
import logging
import threading
import time
from types import TracebackType
from typing import Any, Self

from kvjax.interop.batch import Batch
from kvjax.interop.nodes import NodeMap
from kvjax.interop.teller import Teller
from kvjax.state import CacheState

log = logging.getLogger("kvjax.interop")


class Feed[T: Teller, W](abc.ABC):
    """The side of a wire that takes a cache's events; `W` is what the wire sends for a batch.

    Its owner makes what it needs to send, then calls `_start`.
    """

    _name = "feed"  # as errors and the thread call it

    def __init__(self, encoder: T, *, queue_bytes: int, heartbeat: float | None):
        """Begins with an empty cache; `encoder` tells its events."""
        for name, value in (("heartbeat", heartbeat), ("queue_bytes", queue_bytes)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value!r}, wanted more than 0")
        self._encoder, self._heartbeat, self._queue_bytes = encoder, heartbeat, queue_bytes
        self._queue: collections.deque[Batch] = collections.deque()
        self._queued, self._resync, self._closing, self._busy = 0, True, False, True
        self._error: Exception | None = None
        self._map_lock, self._wake = threading.Lock(), threading.Condition()  # taken in this order
        self._counts = {"overflows": 0, "ignored": 0}
        self._thread = threading.Thread(target=self._run, name=f"kvjax-{self._name}", daemon=True)

    def _start(self) -> None:
        self._thread.start()

    def publish(self, events: Any) -> None:
        """Publishes events; their arrays may be donated afterwards.

        Events that cannot have happened never reach the caller: readers are told that nothing is cached, the log of
        `kvjax.interop` has it once, what follows is ignored until `attach`, and `close` raises the error.

        Args:
          events: `Events`, an `EventLog` or decoded events (`progress.events`); each once, in their order.

        Raises:
          ValueError: for anything else, or once it is closed.
        """
        batch = self._encoder.read(events)
        if not len(batch):
            return
        with self._wake:
            self._refuse_closed()
            if self._error is not None:
                self._counts["ignored"] += 1
                return
            fits = self._queued + batch.nbytes <= self._queue_bytes
            if fits:
                self._push(batch)
        if not fits:
            self._overflow(batch)

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty, was restored, or goes on after events that were impossible.

        What is queued is dropped, as it is part of the state; readers are told the whole of it.

        Args:
          state: the cache; events published later are those after it.

        Raises:
          ValueError: if it is of another spec, or once it is closed.
        """
        with self._map_lock, self._wake:
            self._refuse_closed()
            self._encoder.attach(state)
            self._queue.clear()
            self._queued, self._resync, self._error = 0, True, None
            self._wake.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until what was published is sent, at most `timeout` seconds; whether it is."""
        with self._wake:
            return self._wake.wait_for(lambda: not (self._queue or self._resync or self._busy), timeout)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the events that wait for the thread."""
        return self._queued

    @property
    def counts(self) -> dict[str, int]:
        """Overflows of the queue, calls ignored after an error, and blocks left out."""
        return {**self._counts, **self._encoder.naming.left_out}

    def close(self, timeout: float = 5.0) -> None:
        """Sends what is queued, and ends.

        Args:
          timeout: the most seconds to wait for it.

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
            left = len(self._queue) + self._resync
            self._queue.clear()
            self._resync = False
        self._thread.join()  # of its present batch
        self._end(max(0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        if left:
            raise TimeoutError(f"close: got {timeout} s, wanted more: {left} batches were not sent")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            self.close()
        except (ValueError, TimeoutError):
            if kind is None:
                raise
            log.exception("the %s ended with an error", self._name)

    def _refuse_closed(self) -> None:
        if self._closing:
            raise ValueError(f"publish: got events after `close`, wanted an open {self._name}")

    def _push(self, batch: Batch) -> None:
        self._queue.append(batch)
        self._queued += batch.nbytes
        self._wake.notify_all()

    def _overflow(self, batch: Batch) -> None:
        """Folds what is queued, and a batch that does not fit, into the node map."""
        with self._map_lock, self._wake:
            self._refuse_closed()
            if self._queued + batch.nbytes <= self._queue_bytes:  # by now
                return self._push(batch)
            self._counts["overflows"] += 1
            batches = [*self._queue, batch]
            self._queue.clear()
            self._queued, self._resync = 0, True
            try:
                for one in batches:
                    for step in one.steps:
                        self._encoder.nodes.follow(step)
            except Exception as error:
                self._fail(error)
            self._wake.notify_all()

    # The thread.

    def _run(self) -> None:
        while self._wait():
            with self._map_lock:
                with self._wake:
                    resync, self._resync = self._resync, False
                    batch = self._queue.popleft() if self._queue and not resync else None
                    self._queued -= 0 if batch is None else batch.nbytes
                nodes = self._encoder.nodes.copy() if resync else None
                told = None if batch is None else self._follow(batch)
            if nodes is not None:
                self._tell_anew(nodes)
            elif told is not None:
                self._send(told)
            elif batch is None:
                self._idle()

    def _wait(self) -> bool:
        """Waits for something to do, or until the thread is idle; False when all is done."""
        with self._wake:
            self._busy = False
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._queue or self._resync or self._closing, self._patience())
            self._busy = bool(self._queue or self._resync)
            return self._busy or not self._closing

    def _follow(self, batch: Batch) -> W | None:
        """The messages of a batch; locks the map."""
        try:
            return self._take(batch)
        except Exception as error:
            with self._wake:
                self._fail(error)
            return None

    def _tell_anew(self, nodes: NodeMap) -> None:
        """Tells the index of a copy of the map, which may go on meanwhile and then learns the names."""
        try:
            self._send_index(nodes)
        except Exception as error:
            with self._map_lock, self._wake:
                return self._fail(error)
        with self._map_lock:
            self._encoder.nodes.adopt(nodes)

    def _fail(self, error: Exception) -> None:
        """Forgets everything, for events that cannot have happened or an `extra_name` that raises."""
        log.error("events cannot be published any more, until `attach`: %s", error)
        self._error, self._resync, self._queued = error, True, 0
        self._queue.clear()
        self._encoder.nodes = NodeMap(self._encoder.nodes.spec)

    def _patience(self) -> float | None:
        """Seconds without events after which the thread is idle."""
        return self._heartbeat

    # What each wire does.

    @abc.abstractmethod
    def _take(self, batch: Batch) -> W | None:
        """Follows a batch, while it holds the map; what to send when it does not, or None."""

    @abc.abstractmethod
    def _send(self, told: W) -> None:
        """Sends what a batch told."""

    @abc.abstractmethod
    def _send_index(self, nodes: NodeMap) -> None:
        """Tells readers to forget what they know, and a copy of the map, which it names."""

    @abc.abstractmethod
    def _idle(self) -> None:
        """Shows readers that it is there."""

    @abc.abstractmethod
    def _end(self, seconds: float) -> None:
        """Lets readers get what was sent, for at most some seconds, and ends."""
