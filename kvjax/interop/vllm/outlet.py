# SPDX-License-Identifier: Apache-2.0
"""The sockets of a publisher, and the numbers of its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvjax.interop._wires import zmq
from kvjax.interop.nodes import NodeMap
from kvjax.interop.sockets import LOOPBACK, Curve, attach_socket, default_topic, open_socket
from kvjax.interop.vllm.history import History, Image, Sent
from kvjax.interop.vllm.replay import REQUEST_BYTES, Replayer

_SUBSCRIPTION_BYTES = 1024  # the most of a subscription's frame
_QUEUED = 1000  # messages queued for a subscriber that reads slowly; it asks for what is dropped beyond


class Outlet:
    """Sends payloads under numbers that go up, and answers readers who missed some.

    Attributes:
      endpoint, replay_endpoint: where, with the ports that were chosen.
      topic: of the messages.
      counts: of messages, resyncs and replays.
    """

    def __init__(
        self,
        nodes: NodeMap,
        snapshot: Callable[[NodeMap], list[bytes]],
        *,
        bind: str | None = None,
        connect: str | None = None,
        replay: str | None = None,
        topic: str | None = None,
        model: str | None = None,
        replay_form: str = "",
        first_seq: int | None = None,
        buffer_batches: int = 10_000,
        buffer_bytes: int = 64 << 20,
        replay_timeout: float = 5.0,
        curve: Curve | None = None,
    ):
        """Opens the sockets; see `Publisher`. `snapshot` makes the payloads of a map."""
        if bind is not None and connect is not None:
            raise ValueError(f"connect: got {connect!r} beside bind={bind!r}, wanted one of them")
        if replay_form not in ("", "0.11"):
            raise ValueError(f"replay_form: got {replay_form!r}, wanted '' or '0.11'")
        for name, value in (
            ("first_seq", first_seq),
            ("buffer_batches", buffer_batches),
            ("buffer_bytes", buffer_bytes),
        ):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name}: got {value!r}, wanted an int of at least 0")
        self._snapshot, self._counts = snapshot, {"messages": 0, "resyncs": 0}
        self._next = time.time_ns() // 1000 if first_seq is None else first_seq
        self._history = History(nodes, buffer_batches, buffer_bytes)
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
                self._replayer = Replayer(router, self._history, snapshot, self.topic, replay_form, replay_timeout)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def send(self, payloads: Sequence[bytes], images: Sequence[Image]) -> None:
        """Sends a batch, which left `images`; a reader who has seen a message can ask for it."""
        self._history.append(Sent(self._next, payloads, images))
        self._put(payloads)

    def resync(self, nodes: NodeMap) -> None:
        """Sends AllBlocksCleared and the index of a map, which is not changed later."""
        payloads = self._snapshot(nodes)
        self._history.restart(nodes, self._next + len(payloads))
        self._put(payloads)
        self._counts["resyncs"] += 1

    @property
    def last(self) -> int | None:
        """Number of the last message."""
        return self._next - 1 if self._counts["messages"] else None

    @property
    def counts(self) -> dict[str, int]:
        """Counters."""
        return self._counts | ({} if self._replayer is None else self._replayer.counts)

    def close(self, seconds: float) -> None:
        """Closes the sockets, after at most some seconds in which readers get what was sent."""
        if self._replayer is not None:
            self._replayer.stop()
        self._socket.close(linger=int(1000 * seconds))
        self._context.term()

    def _put(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            self._socket.send_multipart((self.topic, self._next.to_bytes(8, "big"), payload))
            self._next += 1
        self._counts["messages"] += len(payloads)
