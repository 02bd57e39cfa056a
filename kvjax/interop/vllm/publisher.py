# SPDX-License-Identifier: Apache-2.0
"""Publishes a cache's events over ZMQ as vLLM does, and answers readers who missed messages.

    publisher   payloads of what `publish` queues (`interop/hub.py`), history, PUB; an empty batch when idle
    replayer    ROUTER: what was missed, by the history

The history has the last messages and the index before them, so that a replay has no holes:

    base        the index before the oldest batch that is kept
    batches     (number of the first message, payloads, the changes that they encode)

The changes of a batch that drops out are written into the base. A replay that is too old begins with this base, not
with the present index: readers such as vLLM's example end a replay at the message before the first that they have, and
go on with that one, which must not be in the index already.

    request     empty, u64be number of the first message that is wanted
    answer      empty, topic, u64be number, payload: one for each message; vLLM 0.11's form has no topic
    end         the same with number -1 and no payload
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvjax.checks import static_int
from kvjax.events.index import Change, NodeMap
from kvjax.interop._wires import zmq
from kvjax.interop.hub import PublisherThread
from kvjax.interop.sockets import END, LOOPBACK, Curve, attach_socket, default_topic, open_socket, receive
from kvjax.interop.vllm.encode import Encoder
from kvjax.spec import CacheSpec

IN_FLIGHT, WAITING, WAITING_OF_PEER, INTERVAL = 4, 64, 8, 1.0
_QUEUED = 1000  # messages queued for a subscriber that reads slowly; it asks for what is dropped beyond
_SUBSCRIPTION_BYTES, _REQUEST_BYTES = 1024, 64  # the most of a subscription's and of a request's frame
_OVERHEAD = 512  # bytes of a batch beside its payloads and arrays, about
_AT_ONCE = 64  # messages to a peer, and requests, before others have their turn
_BLOCKED, _IDLE = 5, 100  # milliseconds until the replayer looks again


class Publisher(PublisherThread[Encoder]):
    """Publishes the events of a cache; readers are vLLM's, NVIDIA Dynamo, llm-d, AIBrix and `Subscriber`.

    The first message is a resync: AllBlocksCleared and the index, if any, so that what readers know of a process that
    died goes. The stream holds prompts in clear. `close`, or the end of a `with`, sends what is queued. An
    endpoint that cannot be bound is an OSError.

    Args:
      spec: of the cache, which is empty; see `attach` for others.
      bind: where readers connect to; None: tcp://127.0.0.1:5557. Other machines see `tcp://*:5557`.
      connect: where a reader binds (llm-d's central mode), in place of `bind`.
      replay: where to answer readers who missed messages; None: nowhere.
      topic: of the messages; None: `kv@<host>:<port>@<model>`.
      model: as for `Encoder`.
      replay_form: "0.11" leaves the topic out of answers, as vLLM 0.11 does.
      first_seq: number of the first message; None: the clock in microseconds, so that a process that takes the place of
        another begins with a higher one. A resync needs some numbers below.
      queue_bytes: the most events that wait for the publisher's thread.
      buffer_batches, buffer_bytes: the most batches, and bytes, that are buffered for replays.
      heartbeat: after so many idle seconds an empty batch is sent, since a lost last message shows no gap; None: never.
      replay_timeout: seconds after which a peer that does not read its replay is given up.
      curve: keys; None: in clear.
      options: as for `Encoder`: names, lora_names, key, salts, extra_name, form, rank, max_message.

    Attributes:
      endpoint: where it publishes, with the port that was chosen.
      replay_endpoint: where it answers, or None.
      topic: of its messages.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        bind: str | None = None,
        connect: str | None = None,
        replay: str | None = None,
        topic: str | None = None,
        model: str | None = None,
        replay_form: str = "",
        first_seq: int | None = None,
        queue_bytes: int = 64 << 20,
        buffer_batches: int = 10_000,
        buffer_bytes: int = 64 << 20,
        heartbeat: float | None = 1.0,
        replay_timeout: float = 5.0,
        curve: Curve | None = None,
        **options: Any,
    ):
        if not replay_timeout > 0:
            raise ValueError(f"replay_timeout: got {replay_timeout!r}, wanted more than 0")
        if bind is not None and connect is not None:
            raise ValueError(f"connect: got {connect!r} beside bind={bind!r}, wanted one of them")
        if replay_form not in ("", "0.11"):
            raise ValueError(f"replay_form: got {replay_form!r}, wanted '' or '0.11'")
        first = time.time_ns() // 1000 if first_seq is None else static_int("first_seq", first_seq, 0)
        static_int("buffer_batches", buffer_batches, 0)
        static_int("buffer_bytes", buffer_bytes, 0)
        super().__init__(Encoder(spec, model=model, **options), queue_bytes=queue_bytes, heartbeat=heartbeat)
        self._counts |= {"messages": 0, "resyncs": 0}
        self._history, self._next = History(spec, self._encoder.snapshot_of, buffer_batches, buffer_bytes), first
        self._context, self._replayer, self.replay_endpoint = zmq.Context(), None, None
        try:
            self._socket = open_socket(self._context, zmq.PUB, curve, _SUBSCRIPTION_BYTES, _QUEUED)
            name, given = ("bind", bind or LOOPBACK) if connect is None else ("connect", connect)
            self.endpoint = attach_socket(self._socket, name, given, bind=connect is None)
            default = default_topic(self.endpoint, model, bound=connect is None)
            self.topic = default if topic is None else topic.encode()
            if replay is not None:
                router = open_socket(self._context, zmq.ROUTER, curve, _REQUEST_BYTES, 64)
                self.replay_endpoint = attach_socket(router, "replay", replay, bind=True)
                topics = [] if replay_form == "0.11" else [self.topic]
                self._replayer = Replayer(router, self._history, topics, replay_timeout)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread.start()

    @property
    def last(self) -> int | None:
        """Number of the last message; a `Subscriber` whose `last` is as high has followed."""
        return self._next - 1 if self._counts["messages"] else None

    @property
    def counts(self) -> dict[str, int]:
        """Messages, resyncs, overflows of the queue, calls ignored after an error, replays, and blocks left out."""
        return super().counts | ({} if self._replayer is None else self._replayer.counts)

    # The publisher's thread.

    def _send(self, changes: list[Change]) -> None:
        payloads = self._encoder.payloads(self._encoder.messages(changes))
        if payloads:
            self._history.append(self._next, payloads, changes)  # a reader who has seen a message can ask for it
            self._put(payloads)

    def _resync(self, nodes: NodeMap) -> None:
        payloads = self._encoder.snapshot_of(nodes)
        self._history.restart(nodes, self._next + len(payloads))
        self._put(payloads)
        self._counts["resyncs"] += 1

    def _idle(self) -> None:
        payloads = [self._encoder.idle()]
        self._history.append(self._next, payloads, [])
        self._put(payloads)

    def _end(self, seconds: float) -> None:
        if self._replayer is not None:
            self._replayer.stop()
        self._socket.close(linger=int(1000 * seconds))
        self._context.term()

    def _put(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            self._socket.send_multipart((self.topic, self._next.to_bytes(8, "big"), payload))
            self._next += 1
        self._counts["messages"] += len(payloads)


class _Sent(NamedTuple):
    """A batch that was sent: the number of its first message, what it changed, and the bytes that it holds."""

    first: int
    payloads: Sequence[bytes]
    changes: Sequence[Change]
    nbytes: int


class History:
    """The last messages, and the index before them. One thread appends; any may ask."""

    def __init__(self, spec: CacheSpec, snapshot: Callable[[NodeMap], list[bytes]], most_batches: int, most_bytes: int):
        self._lock, self._snapshot = threading.Lock(), snapshot
        self._most_batches, self._most_bytes = most_batches, most_bytes
        self.restart(NodeMap(spec), 0)

    def restart(self, nodes: NodeMap, following: int) -> None:
        """Begins with an index, which becomes the history's own, after which the message `following` comes."""
        with self._lock:
            self._base = nodes
            self._batches: collections.deque[_Sent] = collections.deque()
            self._bytes, self._next = 0, following

    def append(self, first: int, payloads: Sequence[bytes], changes: Sequence[Change]) -> None:
        """Adds a batch, before it is sent: what a reader has seen can be asked for."""
        num_bytes = _OVERHEAD + sum(map(len, payloads)) + sum(change.nbytes for change in changes)
        with self._lock:
            self._batches.append(_Sent(first, payloads, changes, num_bytes))
            self._bytes += num_bytes
            self._next = first + len(payloads)
            while self._batches and (len(self._batches) > self._most_batches or self._bytes > self._most_bytes):
                oldest = self._batches.popleft()
                self._bytes -= oldest.nbytes
                for change in oldest.changes:
                    self._base.write(change)

    def since(self, start: int) -> list[tuple[int, bytes]]:
        """The messages from `start` on with their numbers, and the base before them if some are no longer kept."""
        with self._lock:
            oldest = self._batches[0].first if self._batches else self._next
            base = self._base.copy() if start < oldest else None
            found = [
                (number, payload)
                for sent in self._batches
                for number, payload in enumerate(sent.payloads, sent.first)
                if number >= start
            ]
        payloads = [] if base is None else self._snapshot(base)
        first = oldest - len(payloads)
        return [(max(first + at, 0), payload) for at, payload in enumerate(payloads)] + found


@dataclasses.dataclass
class _Answer:
    """A replay in flight: the messages that are still to be sent, and until when the next one may wait for its peer."""

    messages: collections.deque[list[bytes]]
    deadline: float


class Replayer:
    """Answers requests for missed messages, which come to a bound ROUTER, on a thread of its own.

    At most `IN_FLIGHT` replays run at a time, and one a second for a peer. A request that comes too early or is one too
    many waits its turn; beyond a bounded queue it gets the end alone. A plain ROUTER drops answers in silence where a
    peer reads slowly. So the socket says where it would block (ROUTER_MANDATORY), and that peer's answers wait; others
    go on. A peer that does not read for `timeout` seconds is given up. `topic` is the frame with the topic, if any.
    """

    def __init__(self, socket: Any, history: History, topic: list[bytes], timeout: float):
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket, self._history, self._topic, self._timeout = socket, history, topic, timeout
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
            self._socket.poll(soon, zmq.POLLIN)
            for frames in receive(self._socket, _AT_ONCE):
                self._take(frames)
            now = time.monotonic()
            self._start(now)
            busy = sum(self._go_on(answer, now) for answer in self._active)  # each has its turn
            self._active = [answer for answer in self._active if answer.messages]
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
            messages = [(number.to_bytes(8, "big"), payload) for number, payload in self._history.since(start)]
            frames = collections.deque(self._frames(peer, *message) for message in [*messages, (END, b"")])
            self._active.append(_Answer(frames, now + self._timeout))

    def _frames(self, peer: bytes, number: bytes, payload: bytes) -> list[bytes]:
        return [peer, b"", *self._topic, number, payload]

    def _go_on(self, answer: _Answer, now: float) -> bool:
        """Sends some of a replay; whether there is more to send at once."""
        for _ in range(min(_AT_ONCE, len(answer.messages))):
            sent = self._send(answer.messages[0])
            if sent is False and now < answer.deadline:
                return False
            if not sent:
                self.counts["replays_given_up"] += 1
                answer.messages.clear()
                return False
            answer.deadline = now + self._timeout
            answer.messages.popleft()
        self.counts["replays"] += not answer.messages
        return bool(answer.messages)

    def _send(self, frames: list[bytes]) -> bool | None:
        """Sends a message; False if its peer does not read, None if it is gone."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            return None
        return True
