# SPDX-License-Identifier: Apache-2.0
"""Mirrors the cache behind a publisher of vLLM's events, kvjax's or any engine's, on a thread of its own.

A message that does not follow the last one is trusted only if the publisher's replay has it: a higher number may be
another publisher's, a lower one a duplicate or a new process that counts from 0. A message that is refused counts as
missed. Without a replay the reader goes on, and reports that something is missing (`complete`). The `Follower` decides
all this without sockets and clocks.
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
_OVERHEAD = 512  # bytes of a message that waits, beside its frames, about
_QUEUED = 100_000  # messages that wait for the thread
_AT_ONCE = 256  # messages that it takes before others may look
_POLL = 50  # milliseconds
_MISSED = 3  # heartbeats, after which a publisher is silent


class Subscriber:
    """Mirrors one publisher: the cached blocks and their media, found by tokens.

    It requests what it missed where the publisher answers. Messages that are truncated, too large, foreign or of
    another kind are refused and counted, and leave the mirror as it is. A message is not refused for an event that
    cannot be placed: that event is skipped and counted. An endpoint that cannot be bound is an OSError.

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
      max_bytes: the most memory that they may take, about.
      curve: keys, with the server's.
      heartbeat: seconds between two of the publisher's heartbeats, empty batches while nothing happens. None: as they
        come; a publisher that has sent none, such as an engine of vLLM, is never silent.
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
        max_bytes: int = 1 << 30,
        curve: Curve | None = None,
        heartbeat: float | None = None,
    ):
        if heartbeat is not None and not heartbeat > 0:
            raise ValueError(f"heartbeat: got {heartbeat!r}, wanted more than 0")
        if salts not in ("digest", "plain"):
            raise ValueError(f"salts: got {salts!r}, wanted 'digest' or 'plain'")
        salt_text("", salts, key)  # refuses what is no key
        self._salts, self._key, self._curve, self._max_message = salts, key, curve, max_message
        self._replay_endpoint, self._timeout = replay_endpoint or "", replay_timeout
        self._follower = Follower(replay_endpoint is not None, max_blocks, max_bytes)
        self._num_sent, self._deadline, self._failed = 0, 0.0, False  # requests, and until when the last one counts
        self._heartbeat, self._received_at, self._was_silent = heartbeat, time.monotonic(), False
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
        """Whether nothing is missing, by all messages so far.

        The cache is mirrored from its beginning on, without a gap, and no message was refused and no event skipped. A
        replay or AllBlocksCleared makes up for what was missing. Blocks that `counts` has as unknown change nothing:
        no message says what they hold. The mirror of a publisher that is silent is not complete.
        """
        with self._changed:
            return self._follower.complete and not self.is_silent

    @property
    def age(self) -> float:
        """Seconds since something came from the publisher; until then, since the subscription."""
        return time.monotonic() - self._received_at

    @property
    def is_silent(self) -> bool:
        """Whether the publisher has missed three heartbeats: it is gone, hangs, or cannot be reached."""
        heartbeat = self._heartbeat or self._follower.heartbeat
        return heartbeat is not None and self.age > _MISSED * heartbeat + 2 * _POLL / 1000

    @property
    def last(self) -> int | None:
        """Number of the last message that counts."""
        with self._changed:
            return self._follower.last

    @property
    def counts(self) -> dict[str, int]:
        """Counts of messages, of events and of blocks.

        Messages are `messages`, `refused`, `gaps`, `duplicates`, `restarts`, `replays` and `replays_failed`, those that
        did not come. Events that could not be placed are `skipped`. Blocks are `unknown` that events without tokens,
        such as those of vLLM's offloading connector, have named and no event with tokens.
        """
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
                    self._received_at = time.monotonic()
                if is_changed or self.is_silent != self._was_silent:
                    self._was_silent = self.is_silent
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
    """A message: its number, its batch, and whether that clears the cache."""

    number: int
    batch: Batch
    clears: bool


class Follower:
    """The state of a subscription by the messages so far; `replays`: whether the publisher answers requests."""

    def __init__(self, replays: bool, max_blocks: int, max_bytes: int = 1 << 30):
        self._replays, self._limits = replays, (max_blocks, max_bytes)
        self.last: int | None = None  # number of the last message that counts
        self.replay_from: int | None = None  # number of the first message of the replay that is under way
        self.num_requests = 0  # of replays
        self.heartbeat: float | None = None  # seconds from a message to the empty batch after it, as both say
        self._time: float | None = None  # of the last message
        counted = "messages", "refused", "gaps", "duplicates", "restarts", "replays", "replays_failed"
        self.counts: dict[str, int] = dict.fromkeys((*counted, "skipped", "unknown"), 0)
        self.mirror = self._empty_mirror()
        self._is_whole = False  # no message is missing
        self._waiting: list[Sequence[bytes]] = []  # frames, for the end of a replay: batches would take more memory
        self._waiting_bytes = 0
        self._num_unproven = 0  # the first of `_waiting`, which were there when the replay was requested
        self._low: int | None = None  # number of a message below the last one, which the next one may follow
        if replays:
            self.request_replay(0)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing: no message, and no event that the mirror has skipped."""
        return self._is_whole and self.replay_from is None and self.mirror.complete

    def receive(self, frames: Sequence[bytes]) -> None:
        """Takes a published message: topic, number, payload."""
        if self.replay_from is not None:
            self._wait(frames)
            return
        message = self._read(frames)
        if message is None:
            self._miss()
        else:
            self._follow(message, frames)

    def _read(self, frames: Sequence[bytes]) -> _Message | None:
        """The message of frames; None for one that is refused."""
        try:
            message = _message(frames, (3,))
        except ValueError:
            self.counts["refused"] += 1
            return None
        self.counts["messages"] += 1
        batch, before = message.batch, self._time
        self._time = batch.time
        if not batch.events and before is not None and batch.time > before:
            self.heartbeat = batch.time - before
        return message

    def _miss(self) -> None:
        """A message was refused: it may have been the next one."""
        if self._replays:
            self.request_replay(0 if self.last is None else self.last + 1)
        else:
            self._is_whole = False

    def _wait(self, frames: Sequence[bytes]) -> None:
        """Keeps a message for the end of the replay, if there is room."""
        num_bytes = _OVERHEAD + sum(map(len, frames))
        if self._waiting_bytes + num_bytes <= _WAITING_BYTES:
            self._waiting.append(frames)
            self._waiting_bytes += num_bytes

    def _follow(self, message: _Message, frames: Sequence[bytes]) -> None:
        if self.last is not None and message.number == self.last + 1:
            self._apply(message)
        elif message.number == self.last:
            self.counts["duplicates"] += 1
        elif self._replays:
            ahead = self.last is not None and message.number > self.last
            self.counts["gaps" if ahead else "duplicates"] += self.last is not None
            self._wait(frames)
            self.request_replay(self.last + 1 if ahead and self.last is not None else 0)
        else:
            self._guess(message)

    def _guess(self, message: _Message) -> None:
        """Takes a message that does not follow the last one, where no replay is to be had."""
        number = message.number
        if self.last is not None and number > self.last:
            self.counts["gaps"] += 1
            self._is_whole = False
        elif self.last is not None:
            restarted = number == _FIRST or number - 1 == self._low or message.clears
            self._low = number
            if not restarted:
                self.counts["duplicates"] += 1
                return
            self.counts["restarts"] += 1
            self.mirror, self._is_whole = self._empty_mirror(), False
        self._is_whole |= number == _FIRST
        self._apply(message)

    def _apply(self, message: _Message) -> None:
        self.mirror.apply(message.batch)
        self.last, self._low = message.number, None
        self._is_whole |= message.clears

    def _empty_mirror(self) -> Mirror:
        mirror = Mirror(*self._limits)
        mirror.counts = self.counts  # which has those of all its mirrors together
        return mirror

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
            self._replay(_message(frames, (3, 4)))
        except ValueError:
            self.counts["refused"] += 1
            self._sound = False

    def _replay(self, message: _Message) -> None:
        """Takes a replayed message, into a mirror of its own if the replay begins anew."""
        number = message.number
        if self._replayed is not None:
            self._sound &= number == self._replayed + 1
        elif self.replay_from == 0 or message.clears:
            self._new = self._empty_mirror()
            self._sound &= number == _FIRST or message.clears
        else:
            self._sound &= self._is_whole and number == self.replay_from
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
        self._is_whole = self._sound and (self._is_whole or self._new is not None or self.last is None)
        num_unproven = self._num_unproven
        for at, frames in enumerate(self._stop_waiting()):
            if self.replay_from is not None:
                self._wait(frames)
                continue
            message = self._read(frames)
            if message is None:
                self._miss()
            elif self.last is not None and message.number <= self.last:
                continue
            elif at < num_unproven and (self.last is None or message.number > self.last + 1):
                self.counts["refused"] += 1  # the replay of its publisher would have had it
            else:
                self._follow(message, frames)

    def fail_replay(self) -> None:
        """Goes on without the replay, which did not come in time."""
        self.counts["replays_failed"] += 1
        for message in map(self._read, self._stop_waiting()):
            if message is not None:
                follows = self.last is not None and message.number == self.last + 1
                (self._apply if follows else self._guess)(message)
        self._is_whole = False

    def _stop_waiting(self) -> list[Sequence[bytes]]:
        """The messages that have waited; no replay is under way any more."""
        waiting = self._waiting
        self._waiting, self._waiting_bytes, self._num_unproven, self.replay_from = [], 0, 0, None
        return waiting


def _message(frames: Sequence[bytes], lengths: Sequence[int]) -> _Message:
    """The message of the last two frames, of as many as one of `lengths`."""
    if len(frames) not in lengths or len(frames[-2]) != 8:
        raise ValueError("message: got other frames, wanted a number of 8 bytes and a payload")
    batch = decode(frames[-1])
    clears = any(isinstance(event, Cleared) for event in batch.events)
    return _Message(int.from_bytes(frames[-2], "big"), batch, clears)
