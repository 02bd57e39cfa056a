# SPDX-License-Identifier: Apache-2.0
"""The state that was sent to each subscriber, and the streams of what follows."""

from __future__ import annotations

import collections
import enum
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from kvjax.interop.agent.updates import Entry, Update, message_of, updates_of


class End(enum.Enum):
    """Why a stream ends."""

    GONE = "the subscriber has gone"
    LATE = "the subscriber reads too slowly: subscribe again"
    CLOSED = "the agent is closed"


class Stream:
    """The messages that wait for a subscriber. One thread puts them, the subscriber's own takes them.

    Attributes:
      groups: of which it is told.
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


class Board:
    """The state that each subscriber has once it has read its stream. Its owner locks it.

    Attributes:
      told: for each group {name: entry}.
      streams: of those who subscribe.
      updates: how many there were.
    """

    def __init__(self, groups: Iterable[int]):
        self.told: dict[int, dict[int, Entry]] = {number: {} for number in sorted(groups)}
        self.streams: set[Stream] = set()
        self.updates = 0

    def put(self, updates: Iterable[Update]) -> None:
        """Tells of what changes."""
        for update in updates:
            told = self.told[update.group]
            if update.added:
                told.update(update.blocks)
            else:
                for name in update.blocks:
                    del told[name]
            self.updates += 1
            listening = [stream for stream in self.streams if update.group in stream.groups]
            message = message_of(update) if listening else b""
            for stream in listening:
                stream.put(message)

    def put_index(self, updates: Iterable[Update]) -> None:
        """Tells of what differs from an index, which is given as updates that add all of it."""
        index: dict[int, dict[int, Entry]] = {number: {} for number in self.told}
        for update in updates:
            index[update.group].update(update.blocks)
        for number, told in list(self.told.items()):
            now = index[number]
            gone = {name: e for name, e in told.items() if name not in now or now[name].level != e.level}
            new = {name: e for name, e in now.items() if name not in told or name in gone}
            self.put(updates_of(number, by_depth(gone, reverse=True), added=False))
            self.put(updates_of(number, by_depth(new)))


def snapshot(told: dict[int, dict[int, Entry]]) -> Iterator[bytes]:
    """The messages that tell somebody new."""
    for number, blocks in told.items():
        for update in updates_of(number, by_depth(blocks)):
            yield message_of(update, in_snapshot=True)


def by_depth(blocks: dict[int, Entry], reverse: bool = False) -> dict[int, Entry]:
    """The same blocks by depth."""
    return dict(sorted(blocks.items(), key=lambda item: item[1].depth, reverse=reverse))
