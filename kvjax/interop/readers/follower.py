# SPDX-License-Identifier: Apache-2.0
"""Follows a publisher's messages, without sockets and clocks: gaps, duplicates, restarts, replays.

A message that does not follow the last one is trusted only if the publisher's replay has it: a higher number may be
another publisher's, a lower one a duplicate or a new process that counts from 0. Without a replay the reader goes on,
and reports that something is missing (`complete`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvjax.interop.readers.vllm import Batch, Cleared, Mirror, decode
from kvjax.interop.sockets import END

_FIRST = 0  # the first message's number, of engines that count from there
_WAITING_BYTES = 64 << 20  # the most that waits for the end of a replay; what is dropped beyond is requested later
_OVERHEAD = 512  # bytes of a batch that waits, beside its payload, about


class _Message(NamedTuple):
    """A message: its number, its batch, and the bytes of its payload."""

    number: int
    batch: Batch
    size: int

    @property
    def clears(self) -> bool:
        return any(isinstance(event, Cleared) for event in self.batch.events)


class Follower:
    """The state of a subscription.

    Attributes:
      mirror: the cache, by the messages so far.
      last: number of the last message that counts, None before the first.
      complete: whether nothing is missing, by all messages so far.
      replay_from: number of the first message of the replay that was requested, None while none is under way.
      num_requests: how many replays were requested.
      counts: how often each thing happened.
    """

    def __init__(self, replays: bool, max_blocks: int):
        """Begins with nothing; `replays`: whether the publisher answers requests for messages that were missed."""
        self._replays, self._max_blocks = replays, max_blocks
        self.mirror, self.last, self.complete = Mirror(max_blocks), None, False
        self.replay_from: int | None = None
        self.num_requests = 0
        self.counts: dict[str, int] = dict.fromkeys(
            ("messages", "refused", "gaps", "duplicates", "restarts", "replays", "replays_failed"), 0
        )
        self._waiting: list[_Message] = []  # for the end of a replay
        self._waiting_bytes = 0
        self._num_unproven = 0  # the first of `_waiting`, which were there when the replay was requested
        self._low: int | None = None  # number of a message below the last one, which the next one may follow
        if replays:
            self.request_replay(0)

    def receive(self, frames: Sequence[bytes]) -> None:
        """Takes a published message: topic, number, payload."""
        try:
            message = _read(frames[1:]) if len(frames) == 3 else _read([])
        except ValueError:
            self.counts["refused"] += 1
            return
        self.counts["messages"] += 1
        if self.replay_from is None:
            self._follow(message)
        elif self._waiting_bytes + _OVERHEAD + message.size <= _WAITING_BYTES:
            self._wait(message)

    def _wait(self, message: _Message) -> None:
        self._waiting.append(message)
        self._waiting_bytes += _OVERHEAD + message.size

    def _follow(self, message: _Message) -> None:
        if self.last is not None and message.number == self.last + 1:
            self._apply(message)
        elif message.number == self.last:
            self.counts["duplicates"] += 1
        elif self._replays:
            ahead = self.last is not None and message.number > self.last
            self.counts["gaps" if ahead else "duplicates"] += self.last is not None
            self._wait(message)
            self.request_replay(self.last + 1 if ahead and self.last is not None else 0)
        else:
            self._guess(message)

    def _guess(self, message: _Message) -> None:
        """Takes a message that does not follow the last one, where no replay is to be had."""
        number = message.number
        if self.last is not None and number > self.last:
            self.counts["gaps"] += 1
            self.complete = False
        elif self.last is not None:
            restarted = number == _FIRST or number - 1 == self._low or message.clears
            self._low = number
            if not restarted:
                self.counts["duplicates"] += 1
                return
            self.counts["restarts"] += 1
            self.mirror, self.complete = Mirror(self._max_blocks), False
        self.complete |= number == _FIRST
        self._apply(message)

    def _apply(self, message: _Message) -> None:
        try:
            self.mirror.apply(message.batch)
        except ValueError:
            self.counts["refused"] += 1
            self.complete = False
            return
        self.last, self._low = message.number, None
        self.complete |= message.clears

    # Replays.

    def request_replay(self, start: int) -> None:
        """Begins a replay from a message on; the owner of the sockets sends the request."""
        self.replay_from, self._num_unproven = start, len(self._waiting)
        self.num_requests += 1
        self._new: Mirror | None = None  # of a replay that begins anew
        self._replayed: int | None = None
        self._sound = True

    def receive_replay(self, frames: Sequence[bytes]) -> None:
        """Takes an answer: empty, perhaps a topic, number, payload."""
        if self.replay_from is None:
            return
        if len(frames) in (3, 4) and frames[-2] == END and not frames[-1]:
            self._end_replay()
            return
        try:
            self._replay(_read(frames[-2:]) if len(frames) in (3, 4) else _read([]))
        except ValueError:
            self.counts["refused"] += 1
            self._sound = False

    def _replay(self, message: _Message) -> None:
        """Takes a replayed message, into a mirror of its own if the replay begins anew."""
        number = message.number
        if self._replayed is not None:
            self._sound &= number == self._replayed + 1
        elif self.replay_from == 0 or message.clears:
            self._new = Mirror(self._max_blocks)
            self._sound &= number == _FIRST or message.clears
        else:
            self._sound &= self.complete and number == self.replay_from
        mirror = self.mirror if self._new is None else self._new
        mirror.apply(message.batch)
        self._replayed = number
        if self._new is None:
            self.last = number

    def _end_replay(self) -> None:
        """Takes the replay for the truth; it proves which of the messages that wait are the publisher's."""
        self.counts["replays"] += 1
        if self._new is not None and self._replayed is not None:
            self.counts["restarts"] += self.last is not None and self._replayed < self.last
            self.mirror, self.last = self._new, self._replayed
        self.complete = self._sound and (self.complete or self._new is not None or self.last is None)
        num_unproven = self._num_unproven
        for at, message in enumerate(self._stop_waiting()):
            if self.replay_from is not None:
                self._wait(message)
            elif self.last is not None and message.number <= self.last:
                continue
            elif at < num_unproven and (self.last is None or message.number > self.last + 1):
                self.counts["refused"] += 1  # the replay of its publisher would have had it
            else:
                self._follow(message)

    def fail_replay(self) -> None:
        """Goes on without the replay, which did not come in time."""
        self.counts["replays_failed"] += 1
        self.complete = False
        for message in self._stop_waiting():
            follows = self.last is not None and message.number == self.last + 1
            (self._apply if follows else self._guess)(message)
            self.complete = False

    def _stop_waiting(self) -> list[_Message]:
        """The messages that have waited; no replay is under way any more."""
        waiting = self._waiting
        self._waiting, self._waiting_bytes, self._num_unproven, self.replay_from = [], 0, 0, None
        return waiting


def _read(frames: Sequence[bytes]) -> _Message:
    """The message of the last two frames."""
    if len(frames) != 2 or len(frames[0]) != 8:
        raise ValueError("message: got other frames, wanted a number of 8 bytes and a payload")
    return _Message(int.from_bytes(frames[0], "big"), decode(frames[1]), len(frames[1]))
