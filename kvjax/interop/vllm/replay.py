# SPDX-License-Identifier: Apache-2.0
"""Answers readers who missed messages, on a thread of its own.

    request     empty, u64be number of the first message that is wanted
    answer      empty, topic, u64be number, payload: one for each message; vLLM 0.11's form has no topic
    end         the same with number -1 and no payload

A plain ROUTER drops answers in silence where a peer reads slowly. So the socket says where it would block
(ROUTER_MANDATORY), and that peer's answers wait; others go on.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvjax.interop._wires import zmq
from kvjax.interop.sockets import END, receive
from kvjax.interop.vllm.history import History

IN_FLIGHT, WAITING, WAITING_OF_PEER, INTERVAL = 4, 64, 8, 1.0
REQUEST_BYTES = 64  # the most of a request's frame
_AT_ONCE = 64  # messages to a peer before others have their turn
_BLOCKED, _IDLE = 5, 100  # milliseconds until it looks again
Snapshot = Callable[[Any], list[bytes]]


@dataclasses.dataclass
class _Answer:
    """A replay in flight: the frames that are still to be sent, the next one taken out, and until when it may rest."""

    peer: bytes
    frames: Iterator[list[bytes]]
    waiting: list[bytes] | None
    deadline: float


class Replayer:
    """Answers requests for missed messages.

    At most `IN_FLIGHT` replays run at a time, and one a second for a peer. A request that comes too early or is one too
    many waits its turn; beyond a bounded queue it gets the end alone.

    Attributes:
      counts: replays ended, replays given up, requests that got the end alone, and what was no request.
    """

    def __init__(self, socket: Any, history: History, snapshot: Snapshot, topic: bytes, form: str, timeout: float):
        """Takes a ROUTER that is bound.

        Args:
          socket: the ROUTER.
          history: what to answer from.
          snapshot: makes the payloads of a `NodeMap`.
          topic: as it was published.
          form: "" or "0.11".
          timeout: seconds after which a peer that does not read is given up.
        """
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket, self._history, self._snapshot, self._timeout = socket, history, snapshot, timeout
        self._topic = [] if form == "0.11" else [topic]
        self._active: list[_Answer] = []
        self._waiting: collections.deque[tuple[bytes, int]] = collections.deque()
        self._ends: collections.deque[tuple[bytes, float]] = collections.deque(maxlen=WAITING)
        self._last: dict[bytes, float] = {}
        self.counts = {"replays": 0, "replays_given_up": 0, "replays_refused": 0, "requests_refused": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvjax-replay", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the socket."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        busy = 0
        while not self._stop.is_set():
            blocked = self._active or self._ends or self._waiting
            soon = 0 if busy else _BLOCKED if blocked else _IDLE  # POLLOUT would be true for any one peer
            if self._socket.poll(soon, zmq.POLLIN):
                for frames in iter(lambda: receive(self._socket, 3), None):
                    self._take(frames)
            now = time.monotonic()
            self._start(now)
            busy = sum(self._go_on(answer, now) for answer in self._active)  # each has its turn
            self._active = [answer for answer in self._active if answer.waiting is not None]
            for _ in range(len(self._ends)):
                peer, deadline = self._ends.popleft()
                if self._send(self._frames(peer, END, b"")) is False and now < deadline:
                    self._ends.append((peer, deadline))
        self._socket.close(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        """Takes a request."""
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self.counts["requests_refused"] += 1
            return
        peer, start = frames[0], int.from_bytes(frames[2], "big")
        of_peer = sum(other == peer for other, _ in self._waiting)
        if len(self._waiting) >= WAITING or of_peer >= WAITING_OF_PEER:
            self.counts["replays_refused"] += 1
            self._ends.append((peer, time.monotonic() + self._timeout))
        else:
            self._waiting.append((peer, start))

    def _start(self, now: float) -> None:
        """Starts the replays whose turn it is."""
        self._last = {peer: then for peer, then in self._last.items() if now - then < INTERVAL}
        for _ in range(len(self._waiting)):
            peer, start = self._waiting.popleft()
            if len(self._active) >= IN_FLIGHT or peer in self._last:
                self._waiting.append((peer, start))
                continue
            self._last[peer] = now
            frames = self._answer(peer, start)
            self._active.append(_Answer(peer, frames, next(frames), now + self._timeout))

    def _answer(self, peer: bytes, start: int) -> Iterator[list[bytes]]:
        """The frames of all answers to a request."""
        nodes, oldest, messages = self._history.since(start)
        if nodes is not None:
            payloads = self._snapshot(nodes)
            first = oldest - len(payloads)
            messages = [(max(first + at, 0), payload) for at, payload in enumerate(payloads)] + messages
        for number, payload in messages:
            yield self._frames(peer, number.to_bytes(8, "big"), payload)
        yield self._frames(peer, END, b"")

    def _frames(self, peer: bytes, number: bytes, payload: bytes) -> list[bytes]:
        return [peer, b"", *self._topic, number, payload]

    def _go_on(self, answer: _Answer, now: float) -> bool:
        """Sends some of a replay; whether there is more to send at once."""
        for _ in range(_AT_ONCE):
            if answer.waiting is None:
                return False
            sent = self._send(answer.waiting)
            if sent is False and now < answer.deadline:
                return False
            if not sent:
                self.counts["replays_given_up"] += 1
                answer.waiting = None
                return False
            answer.deadline = now + self._timeout
            answer.waiting = next(answer.frames, None)
            self.counts["replays"] += answer.waiting is None
        return True

    def _send(self, frames: list[bytes]) -> bool | None:
        """Sends a message; False if its peer does not read, None if it is gone."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            return None
        return True
