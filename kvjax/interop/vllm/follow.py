# SPDX-License-Identifier: Apache-2.0
"""Follows a publisher's messages, without sockets and clocks: gaps, duplicates, restarts, replays.

What does not follow the last message is trusted only if the publisher's replay has it: a number in the future may be
somebody else's, a lower one a duplicate or a new process that counts from 0. Without a replay the reader goes on, and
says that something is missing (`complete`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.interop.vllm.decode import Batch, Cleared, decode
from kvjax.interop.vllm.mirror import Mirror
from kvjax.interop.vllm.sockets import END

_FIRST = 0  # the first message's number, of engines that count from there
_HELD_BYTES = 64 << 20  # the most that is held while a replay comes; what is dropped beyond is asked for later
_OVERHEAD = 512  # bytes of a batch that is held, beside its payload, about


class Follower:
    """The state of a subscription.

    Attributes:
      mirror: what is cached, by the messages so far.
      last: number of the last message that counts, None before the first.
      complete: whether nothing is missing, as far as is known.
      asking: number of the first message that a replay was asked for, None while none is under way.
      asks: how many replays were asked for.
      counts: how often what happened.
    """

    def __init__(self, replays: bool, max_blocks: int):
        """Begins with nothing; `replays` says whether the publisher can be asked for what was missed."""
        self._replays, self._max_blocks = replays, max_blocks
        self.mirror, self.last, self.complete = Mirror(max_blocks), None, False
        self.asking: int | None = None
        self.asks = 0
        self.counts: dict[str, int] = dict.fromkeys(
            ("messages", "refused", "gaps", "duplicates", "restarts", "replays", "replays_failed"), 0
        )
        self._held: list[tuple[int, Batch, int]] = []
        self._held_bytes = 0
        self._suspects = 0  # how many of `_held` were there when the replay was asked for
        self._low: int | None = None
        if replays:
            self.ask(0)

    def live(self, frames: Sequence[bytes]) -> None:
        """Takes a published message: topic, number, payload."""
        try:
            number, batch = _read(frames[1:]) if len(frames) == 3 else _read([])
        except ValueError:
            self.counts["refused"] += 1
            return
        self.counts["messages"] += 1
        if self.asking is None:
            self._take(number, batch, len(frames[2]))
        elif self._held_bytes + _OVERHEAD + len(frames[2]) <= _HELD_BYTES:
            self._hold(number, batch, len(frames[2]))

    def _hold(self, number: int, batch: Batch, size: int) -> None:
        self._held.append((number, batch, size))
        self._held_bytes += _OVERHEAD + size

    def _take(self, number: int, batch: Batch, size: int) -> None:
        if self.last is not None and number == self.last + 1:
            self._apply(number, batch)
        elif number == self.last:
            self.counts["duplicates"] += 1
        elif self._replays:
            ahead = self.last is not None and number > self.last
            self.counts["gaps" if ahead else "duplicates"] += self.last is not None
            self._hold(number, batch, size)
            self.ask(self.last + 1 if ahead and self.last is not None else 0)
        else:
            self._guess(number, batch)

    def _guess(self, number: int, batch: Batch) -> None:
        """Takes a message that does not follow the last one, where nobody can be asked."""
        if self.last is not None and number > self.last:
            self.counts["gaps"] += 1
            self.complete = False
        elif self.last is not None:
            begins = number == _FIRST or number - 1 == self._low or _clears(batch)
            self._low = number
            if not begins:
                self.counts["duplicates"] += 1
                return
            self.counts["restarts"] += 1
            self.mirror, self.complete = Mirror(self._max_blocks), False
        self.complete |= number == _FIRST
        self._apply(number, batch)

    def _apply(self, number: int, batch: Batch) -> None:
        try:
            self.mirror.apply(batch)
        except ValueError:
            self.counts["refused"] += 1
            self.complete = False
            return
        self.last, self._low = number, None
        self.complete |= _clears(batch)

    # Replays.

    def ask(self, start: int) -> None:
        """Makes a replay from a message on be wanted."""
        self.asking, self._suspects = start, len(self._held)
        self.asks += 1
        self._new: Mirror | None = None  # of a replay that begins anew
        self._replayed: int | None = None
        self._sound = True

    def answer(self, frames: Sequence[bytes]) -> None:
        """Takes an answer: empty, perhaps a topic, number, payload."""
        if self.asking is None:
            return
        if len(frames) in (3, 4) and frames[-2] == END and not frames[-1]:
            self._end()
            return
        try:
            number, batch = _read(frames[-2:]) if len(frames) in (3, 4) else _read([])
            self._follow(number, batch)
        except ValueError:
            self.counts["refused"] += 1
            self._sound = False

    def _follow(self, number: int, batch: Batch) -> None:
        """Takes a replayed batch, into a mirror of its own if the replay begins anew."""
        if self._replayed is not None:
            self._sound &= number == self._replayed + 1
        elif self.asking == 0 or _clears(batch):
            self._new = Mirror(self._max_blocks)
            self._sound &= number == _FIRST or _clears(batch)
        else:
            self._sound &= self.complete and number == self.asking
        mirror = self.mirror if self._new is None else self._new
        mirror.apply(batch)
        self._replayed = number
        if self._new is None:
            self.last = number

    def _end(self) -> None:
        """The replay is over: it tells what is true, and which of the messages held are the publisher's."""
        self.counts["replays"] += 1
        if self._new is not None and self._replayed is not None:
            self.counts["restarts"] += self.last is not None and self._replayed < self.last
            self.mirror, self.last = self._new, self._replayed
        self.complete = self._sound and (self.complete or self._new is not None or self.last is None)
        self._release()

    def fail(self) -> None:
        """The replay did not come in time: goes on without."""
        self.counts["replays_failed"] += 1
        self.complete = False
        held, self._held, self._held_bytes, self.asking = self._held, [], 0, None
        for number, batch, _ in held:
            follows = self.last is not None and number == self.last + 1
            (self._apply if follows else self._guess)(number, batch)
            self.complete = False

    def _release(self) -> None:
        held, suspects = self._held, self._suspects
        self._held, self._held_bytes, self._suspects, self.asking = [], 0, 0, None
        for at, (number, batch, size) in enumerate(held):
            if self.asking is not None:
                self._hold(number, batch, size)
            elif self.last is not None and number <= self.last:
                continue
            elif at < suspects and (self.last is None or number > self.last + 1):
                self.counts["refused"] += 1  # its publisher does not know of it
            else:
                self._take(number, batch, size)


def _clears(batch: Batch) -> bool:
    return any(isinstance(event, Cleared) for event in batch.events)


def _read(frames: Sequence[bytes]) -> tuple[int, Batch]:
    """The number and the batch of the last two frames of a message."""
    if len(frames) != 2 or len(frames[0]) != 8:
        raise ValueError("message: got other frames, wanted a number of 8 bytes and a payload")
    return int.from_bytes(frames[0], "big"), decode(frames[1])
