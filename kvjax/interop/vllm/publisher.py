# SPDX-License-Identifier: Apache-2.0
"""Publishes a cache's events over ZMQ as vLLM does, and answers readers who missed messages.

    publisher   sends payloads of queued changes (`interop/hub.py`) over PUB, keeps a history, sends empty batches when
                idle
    replayer    answers requests for missed messages over ROUTER, from the history

The history has the last messages and the index before them, so a replay has no holes:

    base        the index before the oldest batch
    batches     (number of the first message, payloads, the encoded changes)

When a batch drops out, its changes are written into the base. If the requested message is gone, the replay begins with
the base, not with the present index. Readers such as vLLM's example end a replay at the message before the first
message they received, and continue with that message. So the replayed index must not include it yet.

    request     empty, u64be number of the first wanted message
    answer      empty, topic, u64be number, payload: one for each message; vLLM 0.11's form has no topic
    end         like an answer, with number -1 and no payload
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

IN_FLIGHT = 4
WAITING = 64
WAITING_OF_PEER = 8
INTERVAL = 1.0
_MAX_QUEUED = 1000  # messages queued for a slow subscriber, which requests the dropped messages later
_SUBSCRIPTION_BYTES = 1024  # the maximum of a subscription's frame
_REQUEST_BYTES = 64  # the maximum of a request's frame
_OVERHEAD = 512  # bytes of a batch without its payloads and arrays, about
_MAX_BURST = 64  # messages to a peer, and requests, before the others' turn
# Milliseconds until the replayer looks again.
_BLOCKED = 5
_IDLE = 100


class Publisher(PublisherThread[Encoder]):
    """Publishes the events of a cache. Readers are vLLM's, NVIDIA Dynamo, llm-d, AIBrix and `Subscriber`.

    The first message is a resync: AllBlocksCleared and the index, if any. Readers then forget the blocks of an earlier
    process. The stream holds prompts as plain text. `close`, or the end of a `with`, sends all queued events.

    Args:
      spec: the spec of the cache, which must be empty; otherwise call `attach`.
      bind: the endpoint for readers to connect to; defaults to tcp://127.0.0.1:5557. Other machines can reach
        `tcp://*:5557`.
      connect: the endpoint of a reader that binds (llm-d's central mode), in place of `bind`.
      replay: the endpoint for readers who missed messages; None disables replays.
      topic: the topic of the messages; defaults to `kv@<host>:<port>@<model>`.
      model: the model's name, as for `Encoder`.
      replay_form: "0.11" leaves the topic out of answers, as vLLM 0.11 does.
      first_seq: the first message's number, larger than the number of messages of a resync. It defaults to the clock in
        microseconds, so a process that replaces another begins with a higher number.
      queue_bytes: the maximum bytes of events queued for the publisher's thread.
      buffer_batches, buffer_bytes: the maximum number of batches, and of their bytes, buffered for replays.
      heartbeat: sends an empty batch after this many idle seconds, because the loss of the last message would otherwise
        go unnoticed; None disables it.
      replay_timeout: seconds until a replay is dropped because its peer does not read.
      curve: keys; None disables encryption.
      options: for `Encoder`: names, lora_names, key, salts, extra_name, form, rank, max_message.

    Attributes:
      endpoint: the endpoint to connect to, with the chosen port.
      replay_endpoint: the endpoint for replays, or None.
      topic: the topic of the messages.

    Raises:
      OSError: for an endpoint that cannot be bound.
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
            raise ValueError(f"connect: got {connect!r} and bind={bind!r}, wanted only one of them")
        if replay_form not in ("", "0.11"):
            raise ValueError(f"replay_form: got {replay_form!r}, wanted '' or '0.11'")
        first = time.time_ns() // 1000 if first_seq is None else static_int("first_seq", first_seq, 0)
        static_int("buffer_batches", buffer_batches, 0)
        static_int("buffer_bytes", buffer_bytes, 0)
        super().__init__(Encoder(spec, model=model, **options), queue_bytes=queue_bytes, heartbeat=heartbeat)
        self._counts |= {"messages": 0, "resyncs": 0}
        self._history = History(spec, self._encoder.snapshot_of, buffer_batches, buffer_bytes)
        self._next = first
        self._context = zmq.Context()
        self._replayer = None
        self.replay_endpoint = None
        try:
            self._socket = open_socket(self._context, zmq.PUB, curve, _SUBSCRIPTION_BYTES, _MAX_QUEUED)
            name = "bind" if connect is None else "connect"
            requested = (bind or LOOPBACK) if connect is None else connect
            self.endpoint = attach_socket(self._socket, name, requested, bind=connect is None)
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
        """The number of the last message. A `Subscriber` has caught up when its `last` is as high."""
        return self._next - 1 if self._counts["messages"] else None

    @property
    def counts(self) -> dict[str, int]:
        """Messages, resyncs, overflows of the queue, calls ignored after an error, replays, and unpublished blocks."""
        return super().counts | ({} if self._replayer is None else self._replayer.counts)

    # Methods of the publisher's thread.

    def _send(self, changes: list[Change]) -> None:
        payloads = self._encoder.payloads(self._encoder.messages(changes))
        if payloads:
            self._history.append(self._next, payloads, changes)  # before a reader can request it
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
    """A sent batch: the number of its first message, its payloads, its changes, and its memory."""

    first: int
    payloads: Sequence[bytes]
    changes: Sequence[Change]
    nbytes: int


class History:
    """The last messages, and the index before them. A single thread appends, and any thread may read."""

    def __init__(self, spec: CacheSpec, snapshot: Callable[[NodeMap], list[bytes]], max_batches: int, max_bytes: int):
        self._lock = threading.Lock()
        self._snapshot = snapshot
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self.restart(NodeMap(spec), 0)

    def restart(self, nodes: NodeMap, following: int) -> None:
        """Begins with an index, which the history takes over. The next message has the number `following`."""
        with self._lock:
            self._base = nodes
            self._batches: collections.deque[_Sent] = collections.deque()
            self._bytes = 0
            self._next = following

    def append(self, first: int, payloads: Sequence[bytes], changes: Sequence[Change]) -> None:
        """Adds a batch. Call it before sending the batch, as readers may request any message that they have seen."""
        num_bytes = _OVERHEAD + sum(map(len, payloads)) + sum(change.nbytes for change in changes)
        with self._lock:
            self._batches.append(_Sent(first, payloads, changes, num_bytes))
            self._bytes += num_bytes
            self._next = first + len(payloads)
            while self._batches and (len(self._batches) > self._max_batches or self._bytes > self._max_bytes):
                oldest = self._batches.popleft()
                self._bytes -= oldest.nbytes
                for change in oldest.changes:
                    self._base.write(change)

    def since(self, start: int) -> list[tuple[int, bytes]]:
        """The messages from `start` on with their numbers, and the base before them if `start` is too old."""
        with self._lock:
            oldest = self._batches[0].first if self._batches else self._next
            base = self._base.copy() if start < oldest else None
            recent = [
                (sequence, payload)
                for sent in self._batches
                for sequence, payload in enumerate(sent.payloads, sent.first)
                if sequence >= start
            ]
        payloads = [] if base is None else self._snapshot(base)
        first = oldest - len(payloads)
        return [(max(sequence, 0), payload) for sequence, payload in enumerate(payloads, first)] + recent


@dataclasses.dataclass
class _Answer:
    """A replay in flight: the unsent messages, and a deadline for the peer to take the next message."""

    messages: collections.deque[list[bytes]]
    deadline: float


class Replayer:
    """Answers requests for missed messages at a bound ROUTER, on a separate thread.

    At most `IN_FLIGHT` replays run at a time, and each peer gets a replay a second. Further requests wait. If too many
    wait, a request gets only the end. A plain ROUTER silently drops answers to a slow peer. With ROUTER_MANDATORY the
    socket reports that it would block, so answers to this peer wait while others continue. A peer that does not read
    for `timeout` seconds is dropped. `topic` is the frame with the topic, if any.
    """

    def __init__(self, socket: Any, history: History, topic: list[bytes], timeout: float):
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket = socket
        self._history = history
        self._topic = topic
        self._timeout = timeout
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
            soon = (
                0 if busy else _BLOCKED if blocked else _IDLE
            )  # POLLOUT would be true if any peer could be written to
            self._socket.poll(soon, zmq.POLLIN)
            for frames in receive(self._socket, _MAX_BURST):
                self._take(frames)
            now = time.monotonic()
            self._start(now)
            busy = sum(self._go_on(answer, now) for answer in self._active)  # every replay has its turn
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
        peer = frames[0]
        start = int.from_bytes(frames[2], "big")
        num_of_peer = sum(waiting_peer == peer for waiting_peer, _ in self._waiting)
        if len(self._waiting) >= WAITING or num_of_peer >= WAITING_OF_PEER:
            self.counts["replays_refused"] += 1
            self._ends.append((peer, time.monotonic() + self._timeout))
        else:
            self._waiting.append((peer, start))

    def _start(self, now: float) -> None:
        """Starts the next replays."""
        self._last = {peer: started for peer, started in self._last.items() if now - started < INTERVAL}
        for _ in range(len(self._waiting)):
            peer, start = self._waiting.popleft()
            if len(self._active) >= IN_FLIGHT or peer in self._last:
                self._waiting.append((peer, start))
                continue
            self._last[peer] = now
            messages = [(sequence.to_bytes(8, "big"), payload) for sequence, payload in self._history.since(start)]
            frames = collections.deque(self._frames(peer, *message) for message in [*messages, (END, b"")])
            self._active.append(_Answer(frames, now + self._timeout))

    def _frames(self, peer: bytes, sequence: bytes, payload: bytes) -> list[bytes]:
        return [peer, b"", *self._topic, sequence, payload]

    def _go_on(self, answer: _Answer, now: float) -> bool:
        """Sends a part of a replay. Returns whether more can be sent at once."""
        for _ in range(min(_MAX_BURST, len(answer.messages))):
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
        """Sends a message. Returns False if the peer does not read, and None if it is gone."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            return None
        return True
