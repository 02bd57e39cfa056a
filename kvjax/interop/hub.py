# SPDX-License-Identifier: Apache-2.0
"""Combined listeners of a cache's events, and listeners with a sender thread.

    caller    publish: copies events to the host, folds them into the index, and queues the changes
    thread    encodes and sends queued changes, and a heartbeat when idle

When the queue is full, a snapshot of the index replaces its contents. Further changes update the snapshot until the
thread sends it. Everything in the queue is a copy, so the thread never reads the index.
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
    """Combines listeners, so events are copied to the host, decoded and folded into an index only once for all.

    A listener that raises does not disturb the others, see `kvjax.events.Listeners`.

    Args:
      spec: the spec of the cache.
      listeners: methods of `kvjax.interop`'s objects, such as `Log.write` and `Publisher.publish`, or other functions
        of `HostEvents`. Listeners with equal indices share them, including the hashes if their keys and names agree.

    Returns:
      The combined listener. In your own loop, call its `catch_up(state)` to bring back failed listeners.

    Example:
      >>> from kvjax.events import NodeMap
      >>> from kvjax.interop import combine_listeners
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> nodes, stored = NodeMap(spec), []
      >>> listener = combine_listeners(spec, nodes.fold, lambda events: stored.append(len(events.text)))
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> listener(events)
      >>> stored, len(nodes.index)
      ([2], 2)
    """
    return _CombinedListeners(spec, listeners)


class _CombinedListeners(Listeners):
    """The listener of `combine_listeners`."""

    def __init__(self, spec: CacheSpec, listeners: Sequence[Callable[[Any], object]]):
        super().__init__(*listeners)
        self._spec = spec
        owners = [getattr(listener, "__self__", None) for listener in listeners]
        maps = [owner if isinstance(owner, NodeMap) else getattr(owner, "nodes", None) for owner in owners]
        self._maps = [candidate if isinstance(candidate, NodeMap) else None for candidate in maps]
        share([nodes for nodes in self._maps if nodes is not None])

    def _read(self, events: Any, *, is_shared: bool) -> HostEvents:
        return dataclasses.replace(listened(events, self._spec), is_shared=is_shared)

    def _fall_behind(self, index: int) -> None:
        if (nodes := self._maps[index]) is not None:
            nodes.part()


class PublisherThread[E: EventEncoder](abc.ABC):
    """The sending part of a wire. A subclass opens its sockets, then starts `_thread`."""

    _name = "publisher"  # in errors, and of the thread

    def __init__(self, encoder: E, *, queue_bytes: int, heartbeat: float | None):
        for name, value in (("heartbeat", heartbeat), ("queue_bytes", queue_bytes)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value!r}, wanted more than 0")
        self._encoder = encoder
        self._heartbeat = heartbeat
        self._queue_bytes = queue_bytes
        self._queue: collections.deque[list[Change] | NodeMap] = collections.deque([encoder.nodes.copy()])
        self._queued = 0
        self._closing = False
        self._busy = True
        self._error: Exception | None = None
        self._callers = threading.Lock()
        self._wake = threading.Condition()  # taken after `_callers`
        self._counts = {"overflows": 0, "ignored": 0}
        self._thread = threading.Thread(target=self._run, name=f"kvjax-{self._name}", daemon=True)

    nodes = property(lambda self: self._encoder.nodes)  # the blocks cached after the events so far

    def publish(self, events: Any) -> None:
        """Publishes events. You may donate their arrays afterwards.

        Impossible events do not raise an error here. Readers get an empty index, the logger `kvjax.interop` records the
        error once, and further events are ignored. To continue, call `attach`, or pass events that begin with cleared
        groups, such as the snapshots of a run's `kvjax.events.Listeners`. Otherwise `close` raises the error.

        Args:
          events: `Events`, an `EventLog` or decoded events (`progress.events`), each once, in their order.
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
            if read.begins_anew:  # readers may have any contents
                self._begin_anew()
            else:
                self._push(changes)

    @property
    def is_behind(self) -> bool:
        """Whether events are being ignored because of impossible events."""
        return self._error is not None

    def attach(self, state: CacheState) -> None:
        """Takes over the index of a cache that is not empty or was restored, or after impossible events.

        Queued changes are dropped, because the state includes them. Readers get the whole state.
        """
        with self._callers:
            self._refuse_closed()
            self._encoder.attach(state)
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Queues the whole index, and forgets any error."""
        with self._wake:
            self._error = None
            self._replace(self._encoder.nodes.copy())

    def flush(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds for all published events to be sent. Returns whether they were."""
        with self._wake:
            return self._wake.wait_for(lambda: not (self._queue or self._busy), timeout)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the changes in the queue."""
        return self._queued

    @property
    def counts(self) -> dict[str, int]:
        """Overflows of the queue, calls ignored after an error, and unpublished blocks."""
        return {**self._counts, **self._encoder.unpublished_counts}

    def close(self, timeout: float = 5.0) -> None:
        """Sends queued events, for at most `timeout` seconds, and stops the thread.

        Raises:
          ValueError: the error of impossible events, unless `attach` has followed.
          TimeoutError: if events were left unsent.
        """
        deadline = time.monotonic() + timeout
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)
        with self._wake:
            num_unsent = len(self._queue)
            self._queue.clear()
        self._thread.join()  # waits for the batch in progress
        self._end(max(0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        if num_unsent:
            raise TimeoutError(f"close: timed out after {timeout} s with {num_unsent} batches unsent")

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
        """Queues changes. If they do not fit, queues a snapshot in place of everything."""
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
                if isinstance(nodes, NodeMap):  # updating this snapshot costs less than another copy
                    for change in itertools.chain(*self._queue, changes):  # pyright: ignore[reportArgumentType]
                        nodes.write(change)
                self._replace(nodes if isinstance(nodes, NodeMap) else self._encoder.nodes.copy())

    def _replace(self, nodes: NodeMap) -> None:
        """Queues a snapshot in place of everything queued."""
        with self._wake:
            self._queue.clear()
            self._queue.append(nodes)
            self._queued = 0
            self._wake.notify_all()

    def _fail(self, error: Exception) -> None:
        """Stops publishing, after impossible events or an error in `extra_name`."""
        log.error("events can no longer be published, until `attach` or a snapshot: %s", error)
        with self._wake:
            self._error = error
            self._replace(NodeMap(self._encoder.nodes.spec))

    # Methods that run on the thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._queue or self._closing, self._idle_seconds())
                if self._closing and not self._queue:
                    return
                self._busy = bool(self._queue)
                entry = self._queue.popleft() if self._queue else None
                if not isinstance(entry, NodeMap | None):
                    self._queued -= sum(change.nbytes for change in entry)
            try:
                if entry is None:
                    self._idle()
                elif isinstance(entry, NodeMap):
                    self._resync(entry)
                else:
                    self._send(entry)
            except Exception as error:
                if entry is None or (isinstance(entry, NodeMap) and not len(entry)):
                    raise
                self._fail(error)

    def _idle_seconds(self) -> float | None:
        """Seconds without events until the thread is idle."""
        return self._heartbeat

    # The part of each wire, on the thread.

    @abc.abstractmethod
    def _send(self, changes: list[Change]) -> None:
        """Sends changes."""

    @abc.abstractmethod
    def _resync(self, nodes: NodeMap) -> None:
        """Sends an index, which replaces the readers' contents."""

    @abc.abstractmethod
    def _idle(self) -> None:
        """Sends a sign of life to readers."""

    @abc.abstractmethod
    def _end(self, seconds: float) -> None:
        """Waits at most some seconds for readers to get the sent messages, and closes the wire."""
