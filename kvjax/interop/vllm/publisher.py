# SPDX-License-Identifier: Apache-2.0
"""Publishes a cache's events over ZMQ as vLLM does, from a thread of its own.

    caller      publish: events are copied to the host and queued
    publisher   a batch at a time: node map, names, payloads, history, PUB; an empty batch when idle
    replayer    ROUTER: what was missed (`replay.py`)

What does not fit the queue is not dropped: the caller folds the queue and its own events into the node map, without
hashing and encoding, and the publisher sends a resync from the map. It holds the map for one batch at a time.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from types import TracebackType
from typing import Any, Self

from kvjax.interop.batch import Batch
from kvjax.interop.nodes import NodeMap
from kvjax.interop.vllm.encode import Encoder
from kvjax.interop.vllm.history import Image, images_of
from kvjax.interop.vllm.outlet import Outlet
from kvjax.interop.vllm.sockets import Curve
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

log = logging.getLogger("kvjax.interop")


class Publisher:
    """Publishes the events of a cache; readers are vLLM's, NVIDIA Dynamo, llm-d, AIBrix and `Subscriber`.

    The first message is a resync: AllBlocksCleared and the index, if any, so that what readers know of a process that
    died goes. The stream holds prompts in clear. `close`, or the end of a `with`, sends what is queued.

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
        for name, value in (("heartbeat", heartbeat), ("replay_timeout", replay_timeout), ("queue_bytes", queue_bytes)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value!r}, wanted more than 0")
        self._encoder = Encoder(spec, model=model, **options)
        self._heartbeat, self._queue_bytes = heartbeat, queue_bytes
        self._queue: collections.deque[Batch] = collections.deque()
        self._queued, self._resync, self._closing, self._busy = 0, True, False, True
        self._error: Exception | None = None
        self._map_lock, self._wake = threading.Lock(), threading.Condition()  # taken in this order
        self._counts = {"overflows": 0, "ignored": 0}
        self._outlet = Outlet(
            self._encoder.nodes, self._encoder.snapshot_of, bind=bind, connect=connect, replay=replay, topic=topic,
            model=model, replay_form=replay_form, first_seq=first_seq, buffer_batches=buffer_batches,
            buffer_bytes=buffer_bytes, replay_timeout=replay_timeout, curve=curve,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="kvjax-publisher", daemon=True)
        self._thread.start()

    endpoint = property(lambda self: self._outlet.endpoint)
    replay_endpoint = property(lambda self: self._outlet.replay_endpoint)
    topic = property(lambda self: self._outlet.topic)

    def publish(self, events: Any) -> None:
        """Publishes events; their arrays may be donated afterwards.

        Events that cannot have happened never reach the caller: the publisher sends AllBlocksCleared, says so once in
        the log of `kvjax.interop`, ignores what follows until `attach`, and `close` raises the error.

        Args:
          events: `Events`, an `EventLog` or decoded events (`progress.events`); each once, in their order.

        Raises:
          ValueError: for anything else, or once it is closed.
        """
        batch = self._encoder.read(events)
        if not len(batch):
            return
        with self._wake:
            self._refuse_closed()
            if self._error is not None:
                self._counts["ignored"] += 1
                return
            fits = self._queued + batch.nbytes <= self._queue_bytes
            if fits:
                self._push(batch)
        if not fits:
            self._overflow(batch)

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty, was restored, or goes on after events that were impossible.

        What is queued is dropped, as it is part of the state; a resync is sent.

        Args:
          state: the cache; events published later are those after it.

        Raises:
          ValueError: if it is of another spec, or once the publisher is closed.
        """
        with self._map_lock, self._wake:
            self._refuse_closed()
            self._encoder.attach(state)
            self._queue.clear()
            self._queued, self._resync, self._error = 0, True, None
            self._wake.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until what was published is sent, at most `timeout` seconds; whether it is."""
        with self._wake:
            return self._wake.wait_for(lambda: not (self._queue or self._resync or self._busy), timeout)

    @property
    def last(self) -> int | None:
        """Number of the last message; a `Subscriber` whose `last` is as high has followed."""
        return self._outlet.last

    @property
    def counts(self) -> dict[str, int]:
        """Messages, resyncs, overflows of the queue, calls ignored after an error, replays, and blocks left out."""
        return {**self._outlet.counts, **self._counts, **self._encoder.naming.left_out}

    def close(self, timeout: float = 5.0) -> None:
        """Sends what is queued, and ends.

        Args:
          timeout: the most seconds to wait for it.

        Raises:
          ValueError: what was wrong with events that cannot have happened, if `attach` has not mended it.
          TimeoutError: if not all could be sent.
        """
        deadline = time.monotonic() + timeout
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)
        with self._wake:
            left = len(self._queue) + self._resync
            self._queue.clear()
            self._resync = False
        self._thread.join()  # of its present batch
        self._outlet.close(max(0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        if left:
            raise TimeoutError(f"close: got {timeout} s, wanted more: {left} batches were not sent")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            self.close()
        except (ValueError, TimeoutError):
            if kind is None:
                raise
            log.exception("the publisher ended with an error")

    def _refuse_closed(self) -> None:
        if self._closing:
            raise ValueError("publish: got events for a publisher that is closed, wanted an open one")

    def _push(self, batch: Batch) -> None:
        self._queue.append(batch)
        self._queued += batch.nbytes
        self._wake.notify_all()

    def _overflow(self, batch: Batch) -> None:
        """Folds what is queued, and a batch that does not fit, into the node map."""
        with self._map_lock, self._wake:
            self._refuse_closed()
            if self._queued + batch.nbytes <= self._queue_bytes:  # by now
                return self._push(batch)
            self._counts["overflows"] += 1
            batches = [*self._queue, batch]
            self._queue.clear()
            self._queued, self._resync = 0, True
            try:
                for one in batches:
                    for step in one.steps():
                        self._encoder.nodes.follow(step)
            except Exception as error:
                self._fail(error)
            self._wake.notify_all()

    # The publisher's thread.

    def _run(self) -> None:
        while self._wait():
            with self._map_lock:
                with self._wake:
                    resync, self._resync = self._resync, False
                    batch = self._queue.popleft() if self._queue and not resync else None
                    self._queued -= 0 if batch is None else batch.nbytes
                nodes = self._encoder.nodes.copy() if resync else None
                payloads, images = ([], []) if batch is None else self._follow(batch)
            if nodes is not None:
                self._send_resync(nodes)
            elif payloads:
                self._outlet.send(payloads, images)
            elif batch is None:
                self._outlet.send([self._encoder.idle()], [])

    def _wait(self) -> bool:
        """Waits for something to do, or until an empty batch is due; False when all is done."""
        with self._wake:
            self._busy = False
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._queue or self._resync or self._closing, self._heartbeat)
            self._busy = bool(self._queue or self._resync)
            return self._busy or not self._closing

    def _follow(self, batch: Batch) -> tuple[list[bytes], list[Image]]:
        """The payloads of a batch, and what it left; holds the map."""
        try:
            payloads = self._encoder.payloads(self._encoder.events(batch))
            return payloads, images_of(batch, self._encoder.nodes)
        except Exception as error:
            with self._wake:
                self._fail(error)
            return [], []

    def _send_resync(self, nodes: NodeMap) -> None:
        """Sends the index of a copy of the map, which may go on meanwhile and then learns the names."""
        try:
            self._outlet.resync(nodes)
        except Exception as error:
            with self._map_lock, self._wake:
                return self._fail(error)
        with self._map_lock:
            self._encoder.nodes.adopt(nodes)

    def _fail(self, error: Exception) -> None:
        """Forgets everything, for events that cannot have happened or an `extra_name` that raises."""
        log.error("events cannot be published any more, until `attach`: %s", error)
        self._error, self._resync, self._queued = error, True, 0
        self._queue.clear()
        self._encoder.nodes = NodeMap(self._encoder.nodes.spec)
