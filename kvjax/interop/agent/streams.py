# SPDX-License-Identifier: Apache-2.0
"""The state that was sent to each subscriber, and the streams of what follows."""

from __future__ import annotations

import collections
import enum
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from kvjax.interop.agent.updates import Update
from kvjax.interop.index import NodeMap


class End(enum.Enum):
    """Why a stream ends."""

    GONE = "the subscriber has gone"
    LATE = "the subscriber reads too slowly: subscribe again"
    CLOSED = "the agent is closed"


class Stream:
    """The messages that wait for a subscriber. One thread puts them, the subscriber's own takes them.

    Attributes:
      groups: whose updates it gets.
      cancel: ends it without a word.
      ended: why it ended, or None.
      since: when it ended.
    """

    def __init__(self, groups: tuple[int, ...], max_behind: int, cancel: Callable[[], object]):
        self.groups, self.cancel, self._most = groups, cancel, max_behind
        self.ended: End | None = None
        self.since = 0.0
        self._queue: collections.deque[bytes] = collections.deque()
        self._wake = threading.Condition()

    def put(self, message: bytes) -> None:
        """Sends a message, or ends the stream if too many wait."""
        with self._wake:
            if self.ended is None and len(self._queue) < self._most:
                self._queue.append(message)
                self._wake.notify_all()
                return
        self.end(End.LATE)

    def end(self, why: End) -> None:
        """Ends it, if it has not ended. What waits is sent in a stream that is closed, and in no other."""
        with self._wake:
            if self.ended is None:
                self.ended, self.since = why, time.monotonic()
                if why is not End.CLOSED:
                    self._queue.clear()
                self._wake.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self.ended)
                if not self._queue:
                    return
                message = self._queue.popleft()
            yield message


class Broadcaster:
    """The index that each subscriber has once it has read its stream. Its owner locks it.

    Attributes:
      nodes: that index.
      streams: of those who subscribe.
      updates: how many there were.
    """

    def __init__(self, nodes: NodeMap):
        self.nodes, self.streams, self.updates = nodes, set[Stream](), 0

    def send(self, updates: Iterable[Update]) -> None:
        """Sends each update to the streams of its group."""
        for update in updates:
            self.updates += 1
            listening = [stream for stream in self.streams if update.group in stream.groups]
            message = update.message() if listening else b""
            for stream in listening:
                stream.put(message)
