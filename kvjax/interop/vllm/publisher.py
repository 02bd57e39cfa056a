# SPDX-License-Identifier: Apache-2.0
"""Publishes a cache's events over ZMQ as vLLM does, from a thread of its own.

caller      publish: what events change in the index is queued (`interop/hub.py`)
publisher   payloads, history, PUB; an empty batch when idle
replayer    ROUTER: what was missed (`replay.py`)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvjax.interop._wires import zmq
from kvjax.interop.hub import PublisherThread
from kvjax.interop.index import Change, NodeMap
from kvjax.interop.sockets import LOOPBACK, Curve, attach_socket, default_topic, open_socket
from kvjax.interop.vllm.encode import Encoder
from kvjax.interop.vllm.history import History, Sent
from kvjax.interop.vllm.replay import REQUEST_BYTES, Replayer
from kvjax.spec import CacheSpec

_SUBSCRIPTION_BYTES = 1024  # the most of a subscription's frame
_QUEUED = 1000  # messages queued for a subscriber that reads slowly; it asks for what is dropped beyond


class Publisher(PublisherThread[Encoder]):
    """Publishes the events of a cache; readers are vLLM's, NVIDIA Dynamo, llm-d, AIBrix and `Subscriber`.

    The first message is a resync: AllBlocksCleared and the index, if any, so that what readers know of a process that
    died goes. The stream holds prompts in clear. `close`, or the end of a `with`, sends what is queued.

    Attributes:
      endpoint: where it publishes, with the port that was chosen.
      replay_endpoint: where it answers, or None.
      topic: of its messages.
      nodes: what is cached by the events so far.
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
        """Begins with an empty cache; see `attach` for others.

        Args:
          spec: of the cache.
          bind: where readers connect to; None: tcp://127.0.0.1:5557. Other machines see `tcp://*:5557`.
          connect: where a reader binds (llm-d's central mode), in place of `bind`.
          replay: where to answer readers who missed messages; None: nowhere.
          topic: of the messages; None: `kv@<host>:<port>@<model>`.
          model: as for `Encoder`.
          replay_form: "0.11" leaves the topic out of answers, as vLLM 0.11 does.
          first_seq: number of the first message; None: the clock in microseconds, so that a process that takes the
            place of another begins with a higher one. A resync needs some numbers below.
          queue_bytes: the most events that wait for the publisher's thread.
          buffer_batches: the most batches that are kept for replays.
          buffer_bytes: the most bytes.
          heartbeat: after so many idle seconds an empty batch is sent, since a lost last message shows no gap; None:
            never.
          replay_timeout: seconds after which a peer that does not read its replay is given up.
          curve: keys; None: in clear.
          options: as for `Encoder`: names, lora_names, key, salts, extra_name, form, rank, max_message.

        Raises:
          ValueError: naming the argument.
          OSError: if an endpoint cannot be bound.
        """
        if not replay_timeout > 0:
            raise ValueError(f"replay_timeout: got {replay_timeout!r}, wanted more than 0")
        if bind is not None and connect is not None:
            raise ValueError(f"connect: got {connect!r} beside bind={bind!r}, wanted one of them")
        if replay_form not in ("", "0.11"):
            raise ValueError(f"replay_form: got {replay_form!r}, wanted '' or '0.11'")
        limits = {"first_seq": first_seq, "buffer_batches": buffer_batches, "buffer_bytes": buffer_bytes}
        for name, value in limits.items():
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name}: got {value!r}, wanted an int of at least 0")
        super().__init__(Encoder(spec, model=model, **options), queue_bytes=queue_bytes, heartbeat=heartbeat)
        self._counts |= {"messages": 0, "resyncs": 0}
        self._next = time.time_ns() // 1000 if first_seq is None else first_seq
        self._history = History(NodeMap(spec), buffer_batches, buffer_bytes)
        self._context, self._replayer, self.replay_endpoint = zmq.Context(), None, None
        try:
            self._socket = open_socket(self._context, zmq.PUB, curve, _SUBSCRIPTION_BYTES, _QUEUED)
            name, given = ("bind", bind or LOOPBACK) if connect is None else ("connect", connect)
            self.endpoint = attach_socket(self._socket, name, given, bind=connect is None)
            default = default_topic(self.endpoint, model, bound=connect is None)
            self.topic = default if topic is None else topic.encode()
            if replay is not None:
                router = open_socket(self._context, zmq.ROUTER, curve, REQUEST_BYTES, 64)
                self.replay_endpoint = attach_socket(router, "replay", replay, bind=True)
                snapshot = self._encoder.snapshot_of
                self._replayer = Replayer(router, self._history, snapshot, self.topic, replay_form, replay_timeout)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._start()

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
            self._history.append(Sent(self._next, payloads, changes))  # a reader who has seen a message can ask for it
            self._put(payloads)

    def _resync(self, nodes: NodeMap) -> None:
        payloads = self._encoder.snapshot_of(nodes)
        self._history.restart(nodes, self._next + len(payloads))
        self._put(payloads)
        self._counts["resyncs"] += 1

    def _idle(self) -> None:
        payload = self._encoder.idle()
        self._history.append(Sent(self._next, [payload], []))
        self._put([payload])

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
