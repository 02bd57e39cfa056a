# SPDX-License-Identifier: Apache-2.0
"""Mirrors the cache behind a publisher of vLLM's events, kvjax's or any engine's, on a thread of its own.

A message that does not follow the last one is trusted only if the publisher's replay has it: a higher number may be
another publisher's, a lower one a duplicate or a new process that counts from 0. Without a replay the reader goes on,
and reports that something is missing (`complete`). The `Follower` decides all this without sockets and clocks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

from kvjax.interop._wires import zmq
from kvjax.interop.hashing import salt_text
from kvjax.interop.readers.vllm import Batch, Cleared, Found, Key, Mirror, Prefix, decode
from kvjax.interop.sockets import END, Curve, attach_socket, open_socket, receive

_FIRST = 0  # the first message's number, of engines that count from there
_WAITING_BYTES = 64 << 20  # the most that waits for the end of a replay; what is dropped beyond is requested later
_OVERHEAD = 512  # bytes of a batch that waits, beside its payload, about
_QUEUED = 100_000  # messages that wait for the thread
_AT_ONCE = 256  # messages that it takes before others may look
_POLL = 50  # milliseconds


class Subscriber:
    """Mirrors one publisher: the cached blocks and their media, found by tokens.

    It requests what it missed where the publisher answers. Messages that are truncated, too large, foreign or of
    another kind are refused and counted, and leave the mirror as it is. An endpoint that cannot be bound is an OSError.

    Args:
      endpoint: where it publishes.
      replay_endpoint: where it answers; None: messages that are missed stay missing.
      bind: whether to bind the endpoint, for publishers that connect.
      topic: messages of other topics are not taken.
      salts: "digest" or "plain", as the publisher has it; other engines publish plain ones.
      key: the publisher's secret.
      replay_timeout: seconds within which something of a replay has to come; then it goes on without, and requests it
        again after as long.
      max_message: the most bytes of a frame.
      max_blocks: the most blocks that are mirrored.
      curve: keys, with the server's.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        bind: bool = False,
        topic: str = "",
        salts: str = "digest",
        key: bytes = b"",
        replay_timeout: float = 5.0,
        max_message: int = 16 << 20,
        max_blocks: int = 1 << 22,
        curve: Curve | None = None,
    ):
        if salts not in ("digest", "plain"):
            raise ValueError(f"salts: got {salts!r}, wanted 'digest' or 'plain'")
        salt_text("", salts, key)  # refuses what is no key
        self._salts, self._key, self._curve, self._max_message = salts, key, curve, max_message
        self._replay_endpoint, self._timeout = replay_endpoint or "", replay_timeout
        self._follower = Follower(replay_endpoint is not None, max_blocks)
        self._num_sent, self._deadline, self._failed = 0, 0.0, False  # requests, and until when the last one counts
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._context = zmq.Context()
        self._dealer: Any = None
        try:
            self._socket = open_socket(self._context, zmq.SUB, curve, max_message, _QUEUED)
            self._socket.subscribe(topic.encode())
            self.endpoint = attach_socket(self._socket, "endpoint", endpoint, bind=bind)
            if replay_endpoint is not None:
                self._open_dealer()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvjax-subscriber", daemon=True)
        self._thread.start()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing, by all messages so far: no gap, and mirrored from its beginning on."""
        with self._changed:
            return self._follower.complete and self._follower.replay_from is None

    @property
    def last(self) -> int | None:
        """Number of the last message that counts."""
        with self._changed:
            return self._follower.last

    @property
    def counts(self) -> dict[str, int]:
        """Messages, and those refused; gaps, duplicates, restarts; replays, and those that did not come."""
        with self._changed:
            return dict(self._follower.counts)

    @property
    def index(self) -> dict[Prefix, tuple[str, ...]]:
        """{prefix: media} of everything that is cached; whole paths, so for tests and small caches."""
        with self._changed:
            return self._follower.mirror.index

    def __len__(self) -> int:
        with self._changed:
            return len(self._follower.mirror)

    def lookup(
        self,
        tokens: Iterable[int],
        salt: str | None = None,
        lora: str | None = None,
        *,
        extra_keys: Sequence[Sequence[Key]] | None = None,
    ) -> Found:
        """The cached prefix of a prompt.

        Args:
          tokens: of the prompt.
          salt: the tenant's.
          lora: the adapter's name.
          extra_keys: for each block the keys that the publisher has for it, such as [name, offset].

        Returns:
          The tokens of the longest prefix of whole blocks that are cached, and how many of these each medium has:
          {"GPU": 32, "CPU": 16}. Groups of full attention alone are searched.
        """
        with self._changed:
            return self._follower.mirror.lookup(tokens, salt_text(salt, self._salts, self._key), lora, extra_keys)

    def wait(self, condition: Callable[[Subscriber], bool], timeout: float | None = None) -> bool:
        """Waits until something holds of this subscriber, at most `timeout` seconds; whether it does."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), timeout)

    def close(self) -> None:
        """Ends; the mirror stays."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_dealer(self) -> None:
        """A socket for requests; a new one after a replay that did not come, so that it does not come later."""
        if self._dealer is not None:
            self._dealer.close(linger=0)
        self._dealer = open_socket(self._context, zmq.DEALER, self._curve, self._max_message, _QUEUED)
        attach_socket(self._dealer, "replay_endpoint", self._replay_endpoint, bind=False)

    def _run(self) -> None:
        while not self._stop.is_set():
            zmq.select([socket for socket in (self._socket, self._dealer) if socket], [], [], _POLL / 1000)
            with self._changed:
                is_changed = is_replayed = False
                for frames in receive(self._socket, _AT_ONCE):
                    self._follower.receive(frames)
                    is_changed = True
                if self._dealer is not None:
                    for frames in receive(self._dealer, _AT_ONCE):
                        self._follower.receive_replay(frames)
                        is_changed = is_replayed = True
                    self._request(is_replayed)
                if is_changed:
                    self._changed.notify_all()

    def _request(self, replayed: bool) -> None:
        """Sends the request of a replay, and gives up one that nothing has come of for too long."""
        follower, now = self._follower, time.monotonic()
        if replayed:
            self._deadline = now + self._timeout
        late = now > self._deadline
        if follower.replay_from is not None and follower.num_requests == self._num_sent and late:
            follower.fail_replay()
            self._open_dealer()
            self._deadline, self._failed = now + self._timeout, True
        elif follower.replay_from is None and self._failed and late:
            follower.request_replay(0)
        if follower.replay_from is not None and follower.num_requests != self._num_sent:
            self._num_sent, self._deadline, self._failed = follower.num_requests, now + self._timeout, False
            with contextlib.suppress(zmq.Again):  # nobody is there: the replay will not come
                self._dealer.send_multipart([b"", follower.replay_from.to_bytes(8, "big")], zmq.NOBLOCK)


class _Message(NamedTuple):
    """A message: its number, its batch, whether that clears the cache, and the bytes of its payload."""

    number: int
    batch: Batch
    clears: bool
    size: int


class Follower:
    """The state of a subscription by the messages so far; `replays`: whether the publisher answers requests."""

    def __init__(self, replays: bool, max_blocks: int):
        self._replays, self._max_blocks = replays, max_blocks
        self.mirror, self.complete = Mirror(max_blocks), False  # complete: nothing is missing
        self.last: int | None = None  # number of the last message that counts
        self.replay_from: int | None = None  # number of the first message of the replay that is under way
        self.num_requests = 0  # of replays
        counted = "messages", "refused", "gaps", "duplicates", "restarts", "replays", "replays_failed"
        self.counts: dict[str, int] = dict.fromkeys(counted, 0)
        self._waiting: list[_Message] = []  # for the end of a replay
        self._waiting_bytes = 0
        self._num_unproven = 0  # the first of `_waiting`, which were there when the replay was requested
        self._low: int | None = None  # number of a message below the last one, which the next one may follow
        if replays:
            self.request_replay(0)

    def receive(self, frames: Sequence[bytes]) -> None:
        """Takes a published message: topic, number, payload."""
        try:
            message = _read(frames, (3,))
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
            self._replay(_read(frames, (3, 4)))
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


def _read(frames: Sequence[bytes], lengths: Sequence[int]) -> _Message:
    """The message of the last two frames, of as many as one of `lengths`."""
    if len(frames) not in lengths or len(frames[-2]) != 8:
        raise ValueError("message: got other frames, wanted a number of 8 bytes and a payload")
    batch = decode(frames[-1])
    clears = any(isinstance(event, Cleared) for event in batch.events)
    return _Message(int.from_bytes(frames[-2], "big"), batch, clears, len(frames[-1]))
