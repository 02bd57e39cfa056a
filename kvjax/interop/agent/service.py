# SPDX-License-Identifier: Apache-2.0
"""A gRPC server of a cache's contents, compatible with MAX's KV cache agent.

    agent         puts queued changes (`interop/hub.py`) into every stream, as updates, and also fill levels
    subscribers   a thread each: the present state, then the updates in their stream

A lock covers the start of a new stream together with the copy of the index that the other streams have reached. So no
update is lost or sent twice.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvjax.blocks.keys import Namespaces
from kvjax.checks import static_int
from kvjax.debug import stats
from kvjax.events import columns as col
from kvjax.events.host_events import pieces, runs
from kvjax.events.index import Change, NodeMap, Space
from kvjax.interop.encoder import WHOLE, EventEncoder
from kvjax.interop.hashing import Hashing
from kvjax.interop.hub import PublisherThread
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

try:
    import grpc
    import grpc_tools  # noqa: F401, with which grpc makes messages
    from google.protobuf.message import DecodeError
except ImportError as error:
    wanted = 'needs grpcio, grpcio-tools and protobuf (pip install "kvjax[agent]")'
    raise ImportError(f"kvjax.interop.agent: {wanted}") from error

messages, services = grpc.protos_and_services("kvjax/interop/agent/agent.proto")

MAX_HASHES = 20_000  # in an update: a hash and its parent's take at most 44 bytes, so an update is less than 1 MB
_TIERS = (messages.MEMORY_TIER_GPU, messages.MEMORY_TIER_CPU)  # by level
_REQUEST_BYTES = 4096
_READ_BYTES = 1 << 20  # of a request; gRPC refuses longer requests, and nothing counts them
_SPARE_THREADS = 4  # for answers to refused subscribers
_GRACE = 5.0  # seconds in which a late subscriber may still read the reason for the end of its stream


class UpdateEncoder(EventEncoder[Any]):
    """Encodes events as updates, which are messages without a sequence number."""

    def differences(self, old: NodeMap, new: NodeMap) -> list[Any]:
        """The updates that turn an index into another. In each group, removals come first."""
        updates = []
        for group_index in sorted(self.groups):
            old_rows, old_keys = self._rows_of(old, group_index)
            new_rows, new_keys = self._rows_of(new, group_index)
            common = {*old_keys} & {*new_keys}
            gone = np.array([key not in common for key in old_keys], bool)
            added = np.array([key not in common for key in new_keys], bool)
            updates += self._removed(group_index, old_rows[gone][::-1])
            updates += self._stored(group_index, new_rows[added], {})
        return updates

    def _rows_of(self, nodes: NodeMap, group_index: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Rows of a group's published blocks, parents first, and the hash and level of each."""
        group = nodes.groups[group_index]
        rows = group.table[group.live]
        rows = rows[rows[:, col.FLAGS] & self._mask == 0]
        return rows, list(zip(col.hashes_of(rows).tolist(), rows[:, col.LEVEL].tolist(), strict=True))

    def _removed(self, group_index: int, rows: np.ndarray) -> list[Any]:
        return self._updates(messages.UPDATE_TYPE_REMOVED, group_index, rows, [])

    def _stored(self, group_index: int, rows: np.ndarray, spaces: Mapping[int, Space]) -> list[Any]:
        parents = np.where(rows[:, col.DEPTH] > 0, col.hashes_of(rows, col.ABOVE), 0).tolist()
        return self._updates(messages.UPDATE_TYPE_ADDED, group_index, rows, [str(parent or "") for parent in parents])

    def _updates(self, kind: int, group_index: int, rows: np.ndarray, parents: list[str]) -> list[Any]:
        names = [str(block_hash) for block_hash in col.hashes_of(rows).tolist()]
        levels = rows[:, col.LEVEL]
        updates = []
        for start, stop in pieces(runs(levels), MAX_HASHES):
            tier = _TIERS[levels[start]]
            update = messages.KVCacheStateUpdate(update_type=kind, memory_tier=tier, group=group_index)
            update.cache_ids.extend(names[start:stop])
            update.parent_ids.extend(parents[start:stop])
            updates.append(update)
        return updates


class End(enum.Enum):
    """The reason for the end of a stream."""

    GONE = "the subscriber has gone"
    LATE = "the subscriber reads too slowly: subscribe again"
    CLOSED = "the agent is closed"


class Stream:
    """Messages for a subscriber, taken by its thread. Hold the agent's lock to put messages and to end the stream."""

    def __init__(self, groups: tuple[int, ...], max_behind: int, cancel: Callable[[], object]):
        self.groups = groups
        self.cancel = cancel  # ends the stream without a reason
        self.ended: End | None = None
        self.since = 0.0  # the time of its end
        self._max_behind = max_behind
        self._queue = queue.SimpleQueue[bytes | None]()  # None ends it

    def put(self, message: bytes) -> None:
        """Sends a message, or ends the stream if too many messages wait."""
        if self._queue.qsize() >= self._max_behind:
            self.end(End.LATE)
        elif self.ended is None:
            self._queue.put(message)

    def end(self, reason: End) -> None:
        """Ends the stream, if it has not ended. Waiting messages are sent only if the agent was closed."""
        if self.ended is None:
            self.ended = reason
            self.since = time.monotonic()
            if reason is not End.CLOSED:
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._queue.get_nowait()
            self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue.get, None)


class Agent(PublisherThread[UpdateEncoder]):
    """Serves a cache's contents to MAX's clients, and to any reader of `kvjax/interop/agent/agent.proto`.

    A subscriber gets the present state and then the changes. Each whole block comes once, as the 64-bit hash of all
    wires (`kvjax.interop.hashing`). The blocks are of the first group with K/V, unless the subscriber requests other
    groups. Without a `key`, anyone who guesses a prompt can tell from its hash whether it is cached. `close`, or the
    end of a `with`, puts queued events into the streams and ends them.

    Args:
      spec: the spec of the cache, which must be empty; otherwise call `attach`.
      host: the address of this machine to listen at. Other machines can reach "0.0.0.0" and "[::]".
      port: the port to listen at; 0 chooses a free port.
      credentials: from `grpc.ssl_server_credentials`; None disables encryption.
      names, lora_names, model, key: options of `hashing.Hashing`. Hashes include extra ids as numbers, so they must be
        the same on all replicas.
      max_subscribers: the maximum number of subscribers. Further subscribers end with RESOURCE_EXHAUSTED.
      max_behind: the maximum number of updates queued for a subscriber. A slower subscriber ends with
        RESOURCE_EXHAUSTED, and may subscribe again.
      queue_bytes: the maximum bytes of events queued for the agent's thread.
      heartbeat: seconds between updates with fill levels of the tiers; None sends them only with the present state.

    Attributes:
      address, port: the address to connect to, with the chosen port.

    Raises:
      OSError: for a port in use, or an address of another machine.
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
        limits = (("max_subscribers", max_subscribers, 1), ("max_behind", max_behind, 1), ("port", port, 0))
        for name, value, minimum in limits:
            static_int(name, value, minimum)
        self._groups = range(int(spec.bare), len(spec.groups))
        encoder = UpdateEncoder(spec, Hashing(names, lora_names, model, key), self._groups, WHOLE)
        super().__init__(encoder, queue_bytes=queue_bytes, heartbeat=heartbeat)
        self._lock = threading.RLock()
        self._streams = set[Stream]()
        self._due = 0.0
        self._sent = NodeMap(spec)  # the index of each subscriber that has read all of its stream
        self._usage: dict[tuple[int, int], tuple[int, int, float]] = {}  # (group, level): (used, total, time)
        self._max_subscribers = max_subscribers
        self._max_behind = max_behind
        counted = ("updates", "subscriptions", "subscribers_refused", "subscribers_late", "requests_refused")
        self._counts |= dict.fromkeys(counted, 0)
        self._threads = ThreadPoolExecutor(max_subscribers + _SPARE_THREADS, "kvjax-agent-stream")
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _READ_BYTES)]
        self._server = grpc.server(self._threads, options=options)
        service = messages.DESCRIPTOR.services_by_name["KVCacheAgentService"].full_name
        methods = {"SubscribeToUpdates": grpc.unary_stream_rpc_method_handler(self._subscribe)}
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
        address = f"{host}:{port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            self._threads.shutdown()
            raise OSError(f"port: got {address}, wanted a free port of this machine") from error
        self.address = f"{host}:{self.port}"
        self._server.start()
        self._thread.start()

    def set(self, state: CacheState) -> None:
        """Reads fill levels of the tiers from a state, since events do not tell them. Call it between transitions."""
        now = time.monotonic()
        for group_index in self._groups:
            counts = stats(state, group_index)
            num_used = counts.active_blocks + counts.cached_blocks
            num_used_on_host = counts.host_active_blocks + counts.host_cached_blocks
            self._usage[group_index, 0] = (num_used, counts.num_blocks, now)
            self._usage[group_index, 1] = (num_used_on_host, counts.host_blocks, now)

    @property
    def counts(self) -> dict[str, int]:
        """Updates, subscribers, refusals, overflows of the queue, calls ignored after an error, unpublished blocks."""
        return {"subscribers": len(self._streams), **super().counts}

    # Methods of the agent's thread.

    def _send(self, changes: list[Change]) -> None:
        updates = self._encoder.messages(changes)
        with self._lock:
            for change in changes:
                self._sent.write(change)
            self._broadcast(updates)
            if self._idle_seconds() == 0:
                self._idle()

    def _resync(self, nodes: NodeMap) -> None:
        updates = self._encoder.differences(self._sent, nodes)
        with self._lock:
            self._sent = nodes
            self._broadcast(updates)

    def _broadcast(self, updates: Iterable[Any]) -> None:
        """Sends each update to the streams of its group. Call it under the lock."""
        for update in updates:
            self._counts["updates"] += 1
            message = update.SerializeToString()
            for stream in self._streams:
                if update.group in stream.groups:
                    stream.put(message)

    def _idle_seconds(self) -> float | None:
        return None if self._heartbeat is None else max(0.0, self._due - time.monotonic())

    def _idle(self) -> None:
        """Sends fill levels to each stream. Drops late subscribers that do not read why their stream ended."""
        with self._lock:
            self._due = time.monotonic() + (self._heartbeat or 0)
            messages_of = {groups: self._fill(groups) for groups in {stream.groups for stream in self._streams}}
            for stream in list(self._streams):
                stream.put(messages_of[stream.groups])
                if stream.ended is not None and time.monotonic() > stream.since + _GRACE:
                    stream.cancel()

    def _end(self, seconds: float) -> None:
        with self._lock:
            for stream in self._streams:
                stream.end(End.CLOSED)
        self._server.stop(seconds).wait()
        self._threads.shutdown()

    # Methods of a subscriber's thread.

    def _subscribe(self, request: bytes, context: Any) -> Iterator[bytes]:
        """The messages of a subscription: the present state, and all updates after it."""
        groups = self._requested(request, context)
        with self._lock:
            if self._closing:
                context.abort(grpc.StatusCode.UNAVAILABLE, End.CLOSED.value)
            if len(self._streams) >= self._max_subscribers:
                self._counts["subscribers_refused"] += 1
                details = f"subscribers: got another one, wanted at most {self._max_subscribers}"
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
            stream = Stream(groups, self._max_behind, context.cancel)
            self._streams.add(stream)
            self._counts["subscriptions"] += 1
            nodes = self._sent.copy()
            end = self._fill(groups, snapshot_end=True)
        if not context.add_callback(lambda: self._leave(stream)):
            self._leave(stream)
        snapshot = self._encoder.messages([change for change in nodes.snapshot() if change.group in groups])
        for update in snapshot:
            update.in_snapshot = True
        parts = itertools.chain((update.SerializeToString() for update in snapshot), [end], stream)
        for sequence, message in enumerate(parts):  # concatenated messages are merged
            yield message + messages.KVCacheStateUpdate(sequence=sequence).SerializeToString()
        if stream.ended is End.LATE:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, End.LATE.value)
        elif stream.ended is End.CLOSED:
            context.abort(grpc.StatusCode.UNAVAILABLE, End.CLOSED.value)

    def _leave(self, stream: Stream) -> None:
        with self._lock:
            stream.end(End.GONE)
            self._streams.discard(stream)
            self._counts["subscribers_late"] += stream.ended is End.LATE

    def _requested(self, request: bytes, context: Any) -> tuple[int, ...]:
        """The requested groups, which must have K/V."""
        valid_groups = list(self._groups)
        groups = []
        complaint = ""
        try:
            groups = sorted(set(messages.SubscriptionRequest.FromString(request).groups)) or valid_groups[:1]
        except DecodeError:
            complaint = f"request: got {request!r:.80}, wanted a SubscriptionRequest"
        if not set(groups) <= set(valid_groups):
            complaint = f"groups: got {groups!r:.80}, wanted some of {valid_groups}"
        if len(request) > _REQUEST_BYTES:
            complaint = f"request: got {len(request):,} bytes, wanted at most {_REQUEST_BYTES:,}"
        if complaint:
            with self._lock:
                self._counts["requests_refused"] += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, complaint)
        return tuple(groups)

    def _fill(self, groups: tuple[int, ...], snapshot_end: bool = False) -> bytes:
        """A message without blocks, with the fill levels of the tiers. Call it under the lock."""
        kinds = {"update_type": messages.UPDATE_TYPE_ADDED, "memory_tier": messages.MEMORY_TIER_GPU}
        update = messages.KVCacheStateUpdate(**kinds, group=groups[0], snapshot_end=snapshot_end)
        for group_index in groups:
            table = self._sent.groups[group_index].table
            group = self._sent.spec.groups[group_index]
            cached = np.bincount(table[table[:, col.FILL] > 0, col.LEVEL], minlength=len(_TIERS)).tolist()
            for level, total in enumerate((group.num_blocks, group.num_host_blocks)):
                used, total, timestamp = self._usage.get((group_index, level), (None, total, 0.0))
                if total:
                    fill = update.fill.add(group=group_index, memory_tier=_TIERS[level], total_blocks=total)
                    fill.cached_blocks = cached[level]
                    if used is not None:
                        fill.used_blocks = used
                        fill.used_age_seconds = time.monotonic() - timestamp
        return update.SerializeToString()
