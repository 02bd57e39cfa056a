# SPDX-License-Identifier: Apache-2.0
"""Mirrors the cache of any engine that publishes vLLM's events, on a separate thread.

A message that does not follow the last message is trusted only if the publisher's replay contains it. A higher number
may come from another publisher, and a lower number may be a duplicate or come from a new process. A refused message
counts as missed. If no replay comes, the reader continues, and `complete` is False. `Follower` makes these decisions,
without sockets and clocks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

from kvjax.interop._wires import zmq
from kvjax.interop.hashing import salt_text
from kvjax.interop.readers.vllm import Batch, Cleared, Key, Mirror, Prefix, PrefixMatch, decode
from kvjax.interop.sockets import END, Curve, attach_socket, open_socket, receive

_FIRST = 0  # the number of the first message in most engines
_WAITING_BYTES = 64 << 20  # limit on messages that wait for the end of a replay; dropped messages are requested later
_OVERHEAD = 512  # approximate bytes of a waiting message without its frames
_MAX_QUEUED = 100_000  # messages that wait for the thread
_MAX_BURST = 256  # messages received before the state is shown
_POLL = 50  # milliseconds
_MISSED = 3  # heartbeats until a publisher counts as silent


class Subscriber:
    """Mirrors the cached blocks of a publisher, with their media, so you can look up tokens.

    It requests missed messages if the publisher answers requests. Messages that are truncated, too large or foreign are
    refused and counted, and leave the mirror unchanged. An event that cannot be applied is skipped and counted, but its
    message is not refused.

    Args:
      endpoint: the publisher's endpoint.
      replay_endpoint: the publisher's endpoint for replays; None disables requests for missed messages.
      bind: whether to bind the endpoint, for publishers that connect.
      topic: receives only messages of this topic.
      salts: "digest" or "plain", as configured in the publisher; other engines publish plain salts.
      key: the publisher's secret.
      replay_timeout: seconds to wait for a part of a replay. Afterwards the subscriber continues without the replay,
        and requests it again after the same time.
      max_message: the maximum bytes of a frame.
      max_blocks: the maximum number of mirrored blocks.
      max_bytes: the approximate maximum memory of the mirrored blocks.
      curve: keys, with the server's public key.
      heartbeat: seconds between the publisher's heartbeats, which are empty batches while nothing happens. None
        measures the interval. A publisher that never sends heartbeats, such as a vLLM engine, then never counts as
        silent.

    Raises:
      OSError: for an endpoint that cannot be bound.
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
        salt_text("", salts, key)  # refuses an invalid key
        self._salts = salts
        self._key = key
        self._curve = curve
        self._max_message = max_message
        self._replay_endpoint = replay_endpoint or ""
        self._timeout = replay_timeout
        self._follower = Follower(replay_endpoint is not None, max_blocks, max_bytes)

        self._num_sent = 0  # requests
        self._deadline = 0.0  # of the last request
        self._failed = False

        self._heartbeat = heartbeat
        self._received_at = time.monotonic()
        self._was_silent = False

        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._dealer: Any = None
        try:
            self._socket = open_socket(self._context, zmq.SUB, curve, max_message, _MAX_QUEUED)
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
        """Whether the mirror is complete, according to all messages so far.

        The cache has been mirrored from its beginning without a gap, and no message was refused and no event skipped. A
        replay or AllBlocksCleared makes up for missing messages. Blocks counted as `unknown` do not matter, because no
        message has their contents. The mirror of a silent publisher is never complete.
        """
        with self._changed:
            return self._follower.complete and not self.is_silent

    @property
    def age(self) -> float:
        """Seconds since the publisher's last message, or else since the subscription."""
        return time.monotonic() - self._received_at

    @property
    def is_silent(self) -> bool:
        """Whether the publisher has missed three heartbeats: it has ended, hangs, or is unreachable."""
        heartbeat = self._heartbeat or self._follower.heartbeat
        return heartbeat is not None and self.age > _MISSED * heartbeat + 2 * _POLL / 1000

    @property
    def last(self) -> int | None:
        """The number of the last message followed."""
        with self._changed:
            return self._follower.last

    @property
    def counts(self) -> dict[str, int]:
        """Counts of messages, of events and of blocks.

        Messages are `messages`, `refused`, `gaps`, `duplicates`, `restarts`, `replays` and `replays_failed` (which
        never came). Events that could not be applied are `skipped`. Blocks are `unknown` if only events without
        tokens have named them, such as the events of vLLM's offloading connector.
        """
        with self._changed:
            return dict(self._follower.counts)

    @property
    def index(self) -> dict[Prefix, tuple[str, ...]]:
        """{prefix: media} of every cached block. It contains whole paths, so use it only for tests and small caches."""
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
    ) -> PrefixMatch:
        """The cached prefix of a prompt.

        Args:
          tokens: the prompt's tokens.
          salt: the tenant's salt.
          lora: the adapter's name.
          extra_keys: the publisher's keys for each block, such as [name, offset].

        Returns:
          The number of tokens in the longest prefix of cached whole blocks, and how many of these each medium has:
          {"GPU": 32, "CPU": 16}. Only groups of full attention are searched.
        """
        with self._changed:
            return self._follower.mirror.lookup(tokens, salt_text(salt, self._salts, self._key), lora, extra_keys)

    def wait(self, condition: Callable[[Subscriber], bool], timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds for a condition on this subscriber. Returns whether it holds."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), timeout)

    def close(self) -> None:
        """Ends the subscription. The mirror stays readable."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_dealer(self) -> None:
        """Opens a socket for requests. After a failed replay, a new socket never receives the late replay."""
        if self._dealer is not None:
            self._dealer.close(linger=0)
        self._dealer = open_socket(self._context, zmq.DEALER, self._curve, self._max_message, _MAX_QUEUED)
        attach_socket(self._dealer, "replay_endpoint", self._replay_endpoint, bind=False)

    def _run(self) -> None:
        while not self._stop.is_set():
            zmq.select([socket for socket in (self._socket, self._dealer) if socket], [], [], _POLL / 1000)
            with self._changed:
                is_changed = is_replayed = False
                for frames in receive(self._socket, _MAX_BURST):
                    self._follower.receive(frames)
                    is_changed = True
                if self._dealer is not None:
                    for frames in receive(self._dealer, _MAX_BURST):
                        self._follower.receive_replay(frames)
                        is_changed = is_replayed = True
                    self._request(is_replayed)
                if is_changed:
                    self._received_at = time.monotonic()
                if is_changed or self.is_silent != self._was_silent:
                    self._was_silent = self.is_silent
                    self._changed.notify_all()

    def _request(self, replayed: bool) -> None:
        """Sends the request of a replay, and gives up a replay that has been silent for too long."""
        follower = self._follower
        now = time.monotonic()
        if replayed:
            self._deadline = now + self._timeout
        late = now > self._deadline
        if follower.replay_from is not None and follower.num_requests == self._num_sent and late:
            follower.fail_replay()
            self._open_dealer()
            self._deadline = now + self._timeout
            self._failed = True
        elif follower.replay_from is None and self._failed and late:
            follower.request_replay(0)
        if follower.replay_from is not None and follower.num_requests != self._num_sent:
            self._num_sent = follower.num_requests
            self._deadline = now + self._timeout
            self._failed = False
            with contextlib.suppress(zmq.Again):  # without a peer the replay will not come
                self._dealer.send_multipart([b"", follower.replay_from.to_bytes(8, "big")], zmq.NOBLOCK)


class _Message(NamedTuple):
    """A message: its number, its batch, and whether the batch clears the cache."""

    sequence: int
    batch: Batch
    clears: bool


class Follower:
    """The state of a subscription after the messages so far. `replays` tells whether the publisher answers requests."""

    def __init__(self, replays: bool, max_blocks: int, max_bytes: int = 1 << 30):
        self._replays = replays
        self._limits = (max_blocks, max_bytes)
        self.last: int | None = None  # number of the last followed message
        self.replay_from: int | None = None  # number of the first message of the replay in progress
        self.num_requests = 0  # of replays
        self.heartbeat: float | None = None  # seconds from a message to the empty batch after it, by their clocks
        self._time: float | None = None  # of the last message
        counted = ("messages", "refused", "gaps", "duplicates", "restarts", "replays", "replays_failed")
        self.counts: dict[str, int] = dict.fromkeys((*counted, "skipped", "unknown"), 0)
        self.mirror = self._empty_mirror()
        self._is_whole = False  # no message is missing
        self._waiting: list[Sequence[bytes]] = []  # frames, for the end of a replay: batches would take more memory
        self._waiting_bytes = 0
        self._num_unproven = 0  # messages of `_waiting` that came before the replay was requested
        self._low: int | None = None  # number of a message below the last, which the next message may follow
        if replays:
            self.request_replay(0)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing: no message, and no event skipped by the mirror."""
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
        """The message of frames; None if it is refused."""
        try:
            message = _message(frames, (3,))
        except ValueError:
            self.counts["refused"] += 1
            return None
        self.counts["messages"] += 1
        batch = message.batch
        before = self._time
        self._time = batch.time
        if not batch.events and before is not None and batch.time > before:
            self.heartbeat = batch.time - before
        return message

    def _miss(self) -> None:
        """Reacts to a refused message, which may have been the next message."""
        if self._replays:
            self.request_replay(0 if self.last is None else self.last + 1)
        else:
            self._is_whole = False

    def _wait(self, frames: Sequence[bytes]) -> None:
        """Keeps a message for the end of the replay, within the limit of memory."""
        num_bytes = _OVERHEAD + sum(map(len, frames))
        if self._waiting_bytes + num_bytes <= _WAITING_BYTES:
            self._waiting.append(frames)
            self._waiting_bytes += num_bytes

    def _follow(self, message: _Message, frames: Sequence[bytes]) -> None:
        if self.last is not None and message.sequence == self.last + 1:
            self._apply(message)
        elif message.sequence == self.last:
            self.counts["duplicates"] += 1
        elif self._replays:
            ahead = self.last is not None and message.sequence > self.last
            self.counts["gaps" if ahead else "duplicates"] += self.last is not None
            self._wait(frames)
            self.request_replay(self.last + 1 if ahead and self.last is not None else 0)
        else:
            self._guess(message)

    def _guess(self, message: _Message) -> None:
        """Takes a message that does not follow the last message, if there is no replay."""
        sequence = message.sequence
        if self.last is not None and sequence > self.last:
            self.counts["gaps"] += 1
            self._is_whole = False
        elif self.last is not None:
            restarted = sequence == _FIRST or sequence - 1 == self._low or message.clears
            self._low = sequence
            if not restarted:
                self.counts["duplicates"] += 1
                return
            self.counts["restarts"] += 1
            self.mirror = self._empty_mirror()
            self._is_whole = False
        self._is_whole |= sequence == _FIRST
        self._apply(message)

    def _apply(self, message: _Message) -> None:
        self.mirror.apply(message.batch)
        self.last = message.sequence
        self._low = None
        self._is_whole |= message.clears

    def _empty_mirror(self) -> Mirror:
        mirror = Mirror(*self._limits)
        mirror.counts = self.counts  # a sum over all mirrors
        return mirror

    # Replays.

    def request_replay(self, start: int) -> None:
        """Begins a replay from a message on. The owner of the sockets sends the request."""
        self.replay_from = start
        self._num_unproven = len(self._waiting)
        self.num_requests += 1
        self._new: Mirror | None = None  # of a replay from the beginning
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
        """Applies a replayed message, to a new mirror if the replay starts from the beginning."""
        sequence = message.sequence
        if self._replayed is not None:
            self._sound &= sequence == self._replayed + 1
        elif self.replay_from == 0 or message.clears:
            self._new = self._empty_mirror()
            self._sound &= sequence == _FIRST or message.clears
        else:
            self._sound &= self._is_whole and sequence == self.replay_from
        mirror = self.mirror if self._new is None else self._new
        mirror.apply(message.batch)
        self._replayed = sequence
        if self._new is None:
            self.last = sequence

    def _end_replay(self) -> None:
        """Accepts the replay, which shows whether waiting messages come from the same publisher."""
        self.counts["replays"] += 1
        if self._new is not None and self._replayed is not None:
            self.counts["restarts"] += self.last is not None and self._replayed < self.last
            self.mirror = self._new
            self.last = self._replayed
        self._is_whole = self._sound and (self._is_whole or self._new is not None or self.last is None)
        num_unproven = self._num_unproven
        for index, frames in enumerate(self._stop_waiting()):
            if self.replay_from is not None:
                self._wait(frames)
                continue
            message = self._read(frames)
            if message is None:
                self._miss()
            elif self.last is not None and message.sequence <= self.last:
                continue
            elif index < num_unproven and (self.last is None or message.sequence > self.last + 1):
                self.counts["refused"] += 1  # its publisher's replay would have contained it
            else:
                self._follow(message, frames)

    def fail_replay(self) -> None:
        """Continues without the replay, which did not come in time."""
        self.counts["replays_failed"] += 1
        for message in map(self._read, self._stop_waiting()):
            if message is not None:
                follows = self.last is not None and message.sequence == self.last + 1
                (self._apply if follows else self._guess)(message)
        self._is_whole = False

    def _stop_waiting(self) -> list[Sequence[bytes]]:
        """Ends the replay. Returns the messages that have waited."""
        waiting = self._waiting
        self._waiting = []
        self._waiting_bytes = 0
        self._num_unproven = 0
        self.replay_from = None
        return waiting


def _message(frames: Sequence[bytes], lengths: Sequence[int]) -> _Message:
    """The message of the last two frames. `lengths` are the valid numbers of frames."""
    if len(frames) not in lengths or len(frames[-2]) != 8:
        raise ValueError("message: got other frames, wanted a number of 8 bytes and a payload")
    batch = decode(frames[-1])
    clears = any(isinstance(event, Cleared) for event in batch.events)
    return _Message(int.from_bytes(frames[-2], "big"), batch, clears)
