# SPDX-License-Identifier: Apache-2.0
"""Publishes a cache's events over ZMQ as vLLM does, from a thread of its own.

    caller      publish: events are copied to the host and queued (`interop/feed.py`)
    publisher   a batch at a time: node map, names, payloads, history, PUB; an empty batch when idle
    replayer    ROUTER: what was missed (`replay.py`)

What does not fit the queue goes into the node map alone, and a resync is sent from the map.
"""

from __future__ import annotations

from typing import Any

from kvjax.interop.batch import Batch
from kvjax.interop.feed import Feed
from kvjax.interop.nodes import NodeMap
from kvjax.interop.sockets import Curve
from kvjax.interop.vllm.encode import Encoder
from kvjax.interop.vllm.history import Image, images_of
from kvjax.interop.vllm.outlet import Outlet
from kvjax.spec import CacheSpec


class Publisher(Feed[Encoder, tuple[list[bytes], list[Image]]]):
    """Publishes the events of a cache; readers are vLLM's, NVIDIA Dynamo, llm-d, AIBrix and `Subscriber`.

    The first message is a resync: AllBlocksCleared and the index, if any, so that what readers know of a process that
    died goes. The stream holds prompts in clear. `close`, or the end of a `with`, sends what is queued.

    Attributes:
      endpoint: where it publishes, with the port that was chosen.
      replay_endpoint: where it answers, or None.
      topic: of its messages.
    """

    _name = "publisher"

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
        super().__init__(Encoder(spec, model=model, **options), queue_bytes=queue_bytes, heartbeat=heartbeat)
        self._outlet = Outlet(
            self._encoder.nodes, self._encoder.snapshot_of, bind=bind, connect=connect, replay=replay, topic=topic,
            model=model, replay_form=replay_form, first_seq=first_seq, buffer_batches=buffer_batches,
            buffer_bytes=buffer_bytes, replay_timeout=replay_timeout, curve=curve,
        )  # fmt: skip
        self._start()

    endpoint = property(lambda self: self._outlet.endpoint)
    replay_endpoint = property(lambda self: self._outlet.replay_endpoint)
    topic = property(lambda self: self._outlet.topic)

    @property
    def last(self) -> int | None:
        """Number of the last message; a `Subscriber` whose `last` is as high has followed."""
        return self._outlet.last

    @property
    def counts(self) -> dict[str, int]:
        """Messages, resyncs, overflows of the queue, calls ignored after an error, replays, and blocks left out."""
        return {**self._outlet.counts, **super().counts}

    def _take(self, batch: Batch) -> tuple[list[bytes], list[Image]] | None:
        payloads = self._encoder.payloads(self._encoder.events(batch))
        return (payloads, images_of(batch, self._encoder.nodes)) if payloads else None

    def _send(self, told: tuple[list[bytes], list[Image]]) -> None:
        self._outlet.send(*told)

    def _send_index(self, nodes: NodeMap) -> None:
        self._outlet.resync(nodes)

    def _idle(self) -> None:
        self._outlet.send([self._encoder.idle()], [])

    def _end(self, seconds: float) -> None:
        self._outlet.close(seconds)
