# SPDX-License-Identifier: Apache-2.0
"""Mirrors the cache behind a publisher of vLLM's events, kvjax's or any engine's, on a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from kvjax.interop._wires import zmq
from kvjax.interop.hashing import salt_text
from kvjax.interop.readers.follower import Follower
from kvjax.interop.readers.vllm import Found, Key, Prefix
from kvjax.interop.sockets import Curve, attach_socket, open_socket, receive

_QUEUED = 100_000  # messages that wait for the thread
_AT_ONCE = 256  # messages that it takes before others may look
_POLL = 50  # milliseconds


class Subscriber:
    """Mirrors one publisher: the cached blocks and their media, found by tokens.

    It requests what it missed where the publisher answers. Messages that are truncated, too large, foreign or of
    another kind are refused and counted, and leave the mirror as it is.
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
        """Begins to listen.

        Args:
          endpoint: where it publishes.
          replay_endpoint: where it answers; None: messages that are missed stay missing.
          bind: whether to bind the endpoint, for publishers that connect.
          topic: messages of other topics are not taken.
          salts: "digest" or "plain", as the publisher has it; other engines publish plain ones.
          key: the publisher's secret.
          replay_timeout: seconds within which something of a replay has to come; then it goes on without, and
            requests it again after as long.
          max_message: the most bytes of a frame.
          max_blocks: the most blocks that are mirrored.
          curve: keys, with the server's.

        Raises:
          ValueError: naming the argument.
          OSError: if the endpoint cannot be bound.
        """
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
          The tokens of the longest prefix of whole blocks that are cached somewhere, and how many of these each medium
          has: {"GPU": 32, "CPU": 16}. Groups of full attention alone are searched: a block that has left a window is
          not missed.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
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
                received = self._receive(self._socket, 3, self._follower.receive)
                if self._dealer is not None:
                    replayed = self._receive(self._dealer, 4, self._follower.receive_replay)
                    self._request(replayed > 0)
                    received += replayed
                if received:
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

    @staticmethod
    def _receive(socket: Any, max_frames: int, take: Callable[[list[bytes]], None]) -> int:
        """Takes the messages that are there, and counts them."""
        for number in range(_AT_ONCE):
            frames = receive(socket, max_frames)
            if frames is None:
                return number
            take(frames)
        return _AT_ONCE
