# SPDX-License-Identifier: Apache-2.0
"""Serves what a cache holds over gRPC as MAX's KV cache agent does.

    caller        publish: what events change in the index is queued (`interop/hub.py`)
    agent         encodes it as updates, which are put into every stream; fill levels
    subscribers   a thread each: the present state, then what is put into their stream

A new stream and a copy of the index that the others have are taken under one lock, so that no update is lost or sent
twice.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from kvjax.blocks.keys import Namespaces
from kvjax.debug import stats
from kvjax.interop import columns as col
from kvjax.interop.agent._wires import DecodeError, grpc, messages
from kvjax.interop.agent.streams import Broadcaster, End, Stream
from kvjax.interop.agent.updates import TIERS, UpdateEncoder, numbered
from kvjax.interop.encoder import WHOLE
from kvjax.interop.hashing import Hashing
from kvjax.interop.hub import PublisherThread
from kvjax.interop.index import Change, NodeMap
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

_REQUEST_BYTES = 4096
_READ_BYTES = 1 << 20  # of a request; a longer one gRPC refuses by itself, and nobody counts it
_SPARE_THREADS = 4  # for answers to those that are refused
_GRACE = 5.0  # seconds in which a subscriber that is late may still read why its stream ends


class Usage(NamedTuple):
    """Blocks that are not empty and blocks in all, by level, as a state had them at a time."""

    used: tuple[int, int]
    total: tuple[int, int]
    timestamp: float


class Agent(PublisherThread[UpdateEncoder]):
    """Serves what is cached to subscribers: MAX's, and whoever reads `kvjax/interop/agent/agent.proto`.

    A subscriber gets the present state and then differences: whole blocks, once each, by the hashes of 64 bits that all
    wires use (`kvjax.interop.hashing`), of the first group that has K/V, unless it asks for others. Without a `key`,
    who guesses a prompt learns from its hash whether it is cached. `close`, or the end of a `with`, puts what is queued
    into the streams, and ends these.

    Attributes:
      address: where it listens, with the port that was chosen.
      port: the port.
      nodes: what is cached by the events so far.
    """

    _name = "agent"

    def __init__(
        self,
        spec: CacheSpec,
        *,
        host: str = "127.0.0.1",
        port: int = 50051,
        credentials: Any = None,
        names: Namespaces | None = None,
        lora_names: Mapping[int, str] | None = None,
        model: str | None = None,
        key: bytes = b"",
        max_subscribers: int = 16,
        max_behind: int = 10_000,
        queue_bytes: int = 64 << 20,
        heartbeat: float | None = 1.0,
    ):
        """Begins with an empty cache; see `attach` for others.

        Args:
          spec: of the cache.
          host: the address of the machine to listen at. Other machines see "0.0.0.0" and "[::]".
          port: 0 chooses one.
          credentials: from `grpc.ssl_server_credentials`; None: in clear.
          names: the `Namespaces` of the cache; None: all prompts have namespace 0.
          lora_names: adapter number to name; an adapter without one is called by its number.
          model: part of all hashes, as for `hashing.root_hash`.
          key: a secret of at most 64 bytes, the same on all replicas, without which hashes cannot be made. Extra ids
            are part of hashes too, as numbers: let them be the same on all replicas.
          max_subscribers: the most at a time; others end with RESOURCE_EXHAUSTED.
          max_behind: the most updates that wait for a subscriber; one that is later ends with RESOURCE_EXHAUSTED, and
            may come again.
          queue_bytes: the most events that wait for the agent's thread.
          heartbeat: seconds between two updates with how full the tiers are; None: there is one.

        Raises:
          ValueError: naming the argument.
          OSError: if the port is in use, or the address is not this machine's.
        """
        limits = ("max_subscribers", max_subscribers, 1), ("max_behind", max_behind, 1), ("port", port, 0)
        for name, value, least in limits:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: got {value!r}, wanted an int of at least {least}")
        self._groups = range(int(spec.bare), len(spec.groups))
        encoder = UpdateEncoder(spec, Hashing(names, lora_names, model, key), self._groups, WHOLE)
        super().__init__(encoder, queue_bytes=queue_bytes, heartbeat=heartbeat)
        self._lock, self._broadcaster, self._due = threading.Lock(), Broadcaster(NodeMap(spec)), 0.0
        self._usage: dict[int, Usage] = {}
        self._max_subscribers, self._max_behind = max_subscribers, max_behind
        self._counts |= {"subscriptions": 0, "subscribers_refused": 0, "subscribers_late": 0, "requests_refused": 0}
        self._threads = ThreadPoolExecutor(max_subscribers + _SPARE_THREADS, "kvjax-agent-stream")
        self._server = grpc.server(
            self._threads,
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _READ_BYTES)],
        )
        service = messages.DESCRIPTOR.services_by_name["KVCacheAgentService"].full_name
        methods = {"SubscribeToUpdates": grpc.unary_stream_rpc_method_handler(self._subscribe)}
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
        self.port = self._bind(f"{host}:{port}", credentials)
        self.address = f"{host}:{self.port}"
        self._server.start()
        self._start()

    def _bind(self, address: str, credentials: Any) -> int:
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            self._threads.shutdown()
            raise OSError(f"port: got {address}, wanted one of this machine that is not in use") from error

    def set(self, state: CacheState) -> None:
        """Reads how many blocks rows hold or find: who holds a block is no event.

        Args:
          state: of the cache; to be called between its transitions.
        """
        now = time.monotonic()
        for number in self._groups:
            s = stats(state, number)
            used = s.active_blocks + s.cached_blocks, s.host_active_blocks + s.host_cached_blocks
            self._usage[number] = Usage(used, (s.num_blocks, s.host_blocks), now)

    @property
    def counts(self) -> dict[str, int]:
        """Updates, subscribers and refusals, overflows of the queue, calls ignored after an error, blocks left out."""
        broadcaster = self._broadcaster
        return {"updates": broadcaster.updates, "subscribers": len(broadcaster.streams), **super().counts}

    # The agent's thread.

    def _send(self, changes: list[Change]) -> None:
        updates = self._encoder.messages(changes)
        with self._lock:
            for change in changes:
                self._broadcaster.nodes.write(change)
            self._broadcaster.send(updates)
            if self._patience() == 0:
                self._send_fill()

    def _resync(self, nodes: NodeMap) -> None:
        updates = self._encoder.differences(self._broadcaster.nodes, nodes)
        with self._lock:
            self._broadcaster.nodes = nodes
            self._broadcaster.send(updates)

    def _idle(self) -> None:
        with self._lock:
            self._send_fill()

    def _patience(self) -> float | None:
        return None if self._heartbeat is None else max(0.0, self._due - time.monotonic())

    def _send_fill(self) -> None:
        """Sends each stream how full the tiers are, and gives up the subscribers that do not read why theirs ended."""
        self._due = time.monotonic() + (self._heartbeat or 0)
        messages_of: dict[tuple[int, ...], bytes] = {}
        for stream in list(self._broadcaster.streams):
            if stream.groups not in messages_of:
                messages_of[stream.groups] = self._fill(stream.groups)
            stream.put(messages_of[stream.groups])
            if stream.ended is not None and time.monotonic() > stream.since + _GRACE:
                stream.cancel()

    def _end(self, seconds: float) -> None:
        with self._lock:
            for stream in self._broadcaster.streams:
                stream.end(End.CLOSED)
        self._server.stop(seconds).wait()
        self._threads.shutdown()

    # A subscriber's thread.

    def _subscribe(self, request: bytes, context: Any) -> Iterator[bytes]:
        """The messages of a subscription."""
        stream, parts = self._join(self._requested(request, context), context)
        if not context.add_callback(lambda: self._leave(stream)):
            self._leave(stream)
        for sequence, message in enumerate(parts):
            yield numbered(message, sequence)
        if stream.ended is End.LATE:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, End.LATE.value)
        elif stream.ended is End.CLOSED:
            context.abort(grpc.StatusCode.UNAVAILABLE, End.CLOSED.value)

    def _join(self, groups: tuple[int, ...], context: Any) -> tuple[Stream, Iterator[bytes]]:
        """A stream that gets all updates from now on; and what it sends, which begins with the present state."""
        with self._lock:
            if self._closing:
                context.abort(grpc.StatusCode.UNAVAILABLE, End.CLOSED.value)
            if len(self._broadcaster.streams) >= self._max_subscribers:
                self._counts["subscribers_refused"] += 1
                why = f"subscribers: got another one, wanted at most {self._max_subscribers}"
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            stream = Stream(groups, self._max_behind, context.cancel)
            self._broadcaster.streams.add(stream)
            self._counts["subscriptions"] += 1
            return stream, itertools.chain(
                self._snapshot(self._broadcaster.nodes.copy(), groups), [self._fill(groups, snapshot_end=True)], stream
            )

    def _snapshot(self, nodes: NodeMap, groups: tuple[int, ...]) -> Iterator[bytes]:
        """The messages that add all of some groups."""
        changes = [change for change in nodes.snapshot() if change.group in groups]
        for update in self._encoder.messages(changes):
            yield update.message(in_snapshot=True)

    def _leave(self, stream: Stream) -> None:
        stream.end(End.GONE)
        with self._lock:
            self._broadcaster.streams.discard(stream)
            self._counts["subscribers_late"] += stream.ended is End.LATE

    def _requested(self, request: bytes, context: Any) -> tuple[int, ...]:
        """The groups that a request asks for, which must have K/V."""
        numbers, wrong, groups = list(self._groups), "", ()
        try:
            groups = tuple(sorted(set(messages.SubscriptionRequest.FromString(request).groups))) or (numbers[0],)
        except DecodeError:
            wrong = f"request: got {request!r:.80}, wanted a SubscriptionRequest"
        if not set(groups) <= set(numbers):
            wrong = f"groups: got {list(groups)!r:.80}, wanted some of {numbers}"
        if len(request) > _REQUEST_BYTES:
            wrong = f"request: got {len(request):,} bytes, wanted at most {_REQUEST_BYTES:,}"
        if wrong:
            with self._lock:
                self._counts["requests_refused"] += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        return groups

    def _fill(self, groups: tuple[int, ...], snapshot_end: bool = False) -> bytes:
        """A message without blocks, with how full the tiers are; needs the lock."""
        return messages.KVCacheStateUpdate(
            update_type=messages.UPDATE_TYPE_ADDED, memory_tier=messages.MEMORY_TIER_GPU, group=groups[0],
            fill=[fill for number in groups for fill in self._fill_of(number)], snapshot_end=snapshot_end,
        ).SerializeToString()  # fmt: skip

    def _fill_of(self, number: int) -> Iterator[Any]:
        """The fill of each tier of a group, if it has any blocks."""
        nodes = self._broadcaster.nodes
        table, spec = nodes.groups[number].table, nodes.spec.groups[number]
        cached = np.bincount(table[table[:, col.FILL] > 0, col.LEVEL], minlength=len(TIERS)).tolist()
        usage = self._usage.get(number)
        total = (spec.num_blocks, spec.num_host_blocks) if usage is None else usage.total
        for level, tier in enumerate(TIERS):
            used = {}
            if usage is not None:
                used = {"used_blocks": usage.used[level], "used_age_seconds": time.monotonic() - usage.timestamp}
            if total[level]:
                yield messages.Fill(
                    group=number, memory_tier=tier, cached_blocks=cached[level], total_blocks=total[level], **used
                )
