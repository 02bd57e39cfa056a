# SPDX-License-Identifier: Apache-2.0
"""Serves what a cache holds over gRPC as MAX's KV cache agent does.

    agent         what `publish` queues (`interop/hub.py`), as updates that are put into every stream; fill levels
    subscribers   a thread each: the present state, then what is put into their stream

A new stream and a copy of the index that the others have are taken under one lock, so that no update is lost or sent
twice.
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
    import grpc_tools  # noqa: F401, which grpc makes messages with
    from google.protobuf.message import DecodeError
except ImportError as error:
    wanted = 'needs grpcio, grpcio-tools and protobuf (pip install "kvjax[agent]")'
    raise ImportError(f"kvjax.interop.agent: {wanted}") from error

messages, services = grpc.protos_and_services("kvjax/interop/agent/agent.proto")

MOST_HASHES = 20_000  # in an update: one and its parent's have at most 44 bytes, so that it stays below 1 MB
_TIERS = (messages.MEMORY_TIER_GPU, messages.MEMORY_TIER_CPU)  # by level
_REQUEST_BYTES = 4096
_READ_BYTES = 1 << 20  # of a request; a longer one gRPC refuses by itself, and nobody counts it
_SPARE_THREADS = 4  # for answers to those that are refused
_GRACE = 5.0  # seconds in which a subscriber that is late may still read why its stream ends


class UpdateEncoder(EventEncoder[Any]):
    """Makes updates of events: messages that have no number yet."""

    def differences(self, old: NodeMap, new: NodeMap) -> list[Any]:
        """Updates from one index to another; group by group, what is gone before what is new."""
        found = []
        for number in sorted(self.groups):
            (old_rows, old_keys), (new_rows, new_keys) = (self._rows_of(nodes, number) for nodes in (old, new))
            both = {*old_keys} & {*new_keys}
            gone, added = (np.array([key not in both for key in keys], bool) for keys in (old_keys, new_keys))
            found += self._removed(number, old_rows[gone][::-1])
            found += self._stored(number, new_rows[added], {})
        return found

    def _rows_of(self, nodes: NodeMap, number: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Rows of a group's published blocks, parents first, and for each its hash and level."""
        group = nodes.groups[number]
        rows = group.table[group.live]
        rows = rows[rows[:, col.FLAGS] & self._mask == 0]
        return rows, list(zip(col.hashes_of(rows).tolist(), rows[:, col.LEVEL].tolist(), strict=True))

    def _removed(self, number: int, rows: np.ndarray) -> list[Any]:
        return self._updates(messages.UPDATE_TYPE_REMOVED, number, rows, [])

    def _stored(self, number: int, rows: np.ndarray, spaces: Mapping[int, Space]) -> list[Any]:
        parents = np.where(rows[:, col.DEPTH] > 0, col.hashes_of(rows, col.ABOVE), 0).tolist()
        return self._updates(messages.UPDATE_TYPE_ADDED, number, rows, [str(parent or "") for parent in parents])

    def _updates(self, kind: int, number: int, rows: np.ndarray, parents: list[str]) -> list[Any]:
        names, levels, found = [str(one) for one in col.hashes_of(rows).tolist()], rows[:, col.LEVEL], []
        for start, stop in pieces(runs(levels), MOST_HASHES):
            update = messages.KVCacheStateUpdate(update_type=kind, memory_tier=_TIERS[levels[start]], group=number)
            update.cache_ids.extend(names[start:stop])
            update.parent_ids.extend(parents[start:stop])
            found.append(update)
        return found


class End(enum.Enum):
    """Why a stream ends."""

    GONE = "the subscriber has gone"
    LATE = "the subscriber reads too slowly: subscribe again"
    CLOSED = "the agent is closed"


class Stream:
    """Messages that wait for a subscriber, whose thread takes them; who has the agent's lock puts them and ends it."""

    def __init__(self, groups: tuple[int, ...], max_behind: int, cancel: Callable[[], object]):
        self.groups, self.cancel, self._most = groups, cancel, max_behind  # `cancel` ends it without a word
        self.ended: End | None = None
        self.since = 0.0  # when it ended
        self._queue = queue.SimpleQueue[bytes | None]()  # None ends it

    def put(self, message: bytes) -> None:
        """Sends a message, or ends the stream if too many wait."""
        if self._queue.qsize() >= self._most:
            self.end(End.LATE)
        elif self.ended is None:
            self._queue.put(message)

    def end(self, why: End) -> None:
        """Ends it, if it has not ended. What waits is sent in a stream that is closed, and in no other."""
        if self.ended is None:
            self.ended, self.since = why, time.monotonic()
            if why is not End.CLOSED:
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._queue.get_nowait()
            self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue.get, None)


class Agent(PublisherThread[UpdateEncoder]):
    """Serves what is cached to subscribers: MAX's, and whoever reads `kvjax/interop/agent/agent.proto`.

    A subscriber gets the present state and then differences: whole blocks, once each, by the hashes of 64 bits that all
    wires use (`kvjax.interop.hashing`), of the first group that has K/V, unless it asks for others. Without a `key`,
    who guesses a prompt learns from its hash whether it is cached. `close`, or the end of a `with`, puts what is queued
    into the streams, and ends these. A port in use, or an address of another machine, is an OSError.

    Args:
      spec: of the cache, which is empty; see `attach` for others.
      host: the address of the machine to listen at. Other machines see "0.0.0.0" and "[::]".
      port: 0 chooses one.
      credentials: from `grpc.ssl_server_credentials`; None: in clear.
      names, lora_names, model, key: as for `hashing.Hashing`. Extra ids are part of hashes too, as numbers: let them be
        the same on all replicas.
      max_subscribers: the most at a time; others end with RESOURCE_EXHAUSTED.
      max_behind: the most updates that wait for a subscriber; one that is later ends with RESOURCE_EXHAUSTED, and may
        come again.
      queue_bytes: the most events that wait for the agent's thread.
      heartbeat: seconds between two updates with how full the tiers are; None: there is one.

    Attributes:
      address, port: where it listens, with the port that was chosen.
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
        limits = ("max_subscribers", max_subscribers, 1), ("max_behind", max_behind, 1), ("port", port, 0)
        for name, value, least in limits:
            static_int(name, value, least)
        self._groups = range(int(spec.bare), len(spec.groups))
        encoder = UpdateEncoder(spec, Hashing(names, lora_names, model, key), self._groups, WHOLE)
        super().__init__(encoder, queue_bytes=queue_bytes, heartbeat=heartbeat)
        self._lock, self._streams, self._due = threading.RLock(), set[Stream](), 0.0
        self._sent = NodeMap(spec)  # the index that each subscriber has once it has read its stream
        self._usage: dict[tuple[int, int], tuple[int, int, float]] = {}  # by group and level: used, in all, and when
        self._max_subscribers, self._max_behind = max_subscribers, max_behind
        counted = "updates", "subscriptions", "subscribers_refused", "subscribers_late", "requests_refused"
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
            raise OSError(f"port: got {address}, wanted one of this machine that is not in use") from error
        self.address = f"{host}:{self.port}"
        self._server.start()
        self._thread.start()

    def set(self, state: CacheState) -> None:
        """Reads from the state how many blocks rows hold or find, which is no event; call it between transitions."""
        now = time.monotonic()
        for number in self._groups:
            s = stats(state, number)
            self._usage[number, 0] = s.active_blocks + s.cached_blocks, s.num_blocks, now
            self._usage[number, 1] = s.host_active_blocks + s.host_cached_blocks, s.host_blocks, now

    @property
    def counts(self) -> dict[str, int]:
        """Updates, subscribers and refusals, overflows of the queue, calls ignored after an error, blocks left out."""
        return {"subscribers": len(self._streams), **super().counts}

    # The agent's thread.

    def _send(self, changes: list[Change]) -> None:
        updates = self._encoder.messages(changes)
        with self._lock:
            for change in changes:
                self._sent.write(change)
            self._broadcast(updates)
            if self._patience() == 0:
                self._idle()

    def _resync(self, nodes: NodeMap) -> None:
        updates = self._encoder.differences(self._sent, nodes)
        with self._lock:
            self._sent = nodes
            self._broadcast(updates)

    def _broadcast(self, updates: Iterable[Any]) -> None:
        """Sends each update to the streams of its group; needs the lock."""
        for update in updates:
            self._counts["updates"] += 1
            message = update.SerializeToString()
            for stream in self._streams:
                if update.group in stream.groups:
                    stream.put(message)

    def _patience(self) -> float | None:
        return None if self._heartbeat is None else max(0.0, self._due - time.monotonic())

    def _idle(self) -> None:
        """Sends each stream how full the tiers are, and gives up the subscribers that do not read why theirs ended."""
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

    # A subscriber's thread.

    def _subscribe(self, request: bytes, context: Any) -> Iterator[bytes]:
        """The messages of a subscription: the present state, and all updates after it."""
        groups = self._requested(request, context)
        with self._lock:
            if self._closing:
                context.abort(grpc.StatusCode.UNAVAILABLE, End.CLOSED.value)
            if len(self._streams) >= self._max_subscribers:
                self._counts["subscribers_refused"] += 1
                why = f"subscribers: got another one, wanted at most {self._max_subscribers}"
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            stream = Stream(groups, self._max_behind, context.cancel)
            self._streams.add(stream)
            self._counts["subscriptions"] += 1
            nodes, end = self._sent.copy(), self._fill(groups, snapshot_end=True)
        if not context.add_callback(lambda: self._leave(stream)):
            self._leave(stream)
        snapshot = self._encoder.messages([change for change in nodes.snapshot() if change.group in groups])
        for update in snapshot:
            update.in_snapshot = True
        parts = itertools.chain((update.SerializeToString() for update in snapshot), [end], stream)
        for sequence, message in enumerate(parts):  # messages that are joined are merged
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
        """The groups that a request asks for, which must have K/V."""
        numbers, wrong, groups = list(self._groups), "", []
        try:
            groups = sorted(set(messages.SubscriptionRequest.FromString(request).groups)) or numbers[:1]
        except DecodeError:
            wrong = f"request: got {request!r:.80}, wanted a SubscriptionRequest"
        if not set(groups) <= set(numbers):
            wrong = f"groups: got {groups!r:.80}, wanted some of {numbers}"
        if len(request) > _REQUEST_BYTES:
            wrong = f"request: got {len(request):,} bytes, wanted at most {_REQUEST_BYTES:,}"
        if wrong:
            with self._lock:
                self._counts["requests_refused"] += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        return tuple(groups)

    def _fill(self, groups: tuple[int, ...], snapshot_end: bool = False) -> bytes:
        """A message without blocks, with how full the tiers are; needs the lock."""
        kinds = {"update_type": messages.UPDATE_TYPE_ADDED, "memory_tier": messages.MEMORY_TIER_GPU}
        update = messages.KVCacheStateUpdate(**kinds, group=groups[0], snapshot_end=snapshot_end)
        for number in groups:
            table, group = self._sent.groups[number].table, self._sent.spec.groups[number]
            cached = np.bincount(table[table[:, col.FILL] > 0, col.LEVEL], minlength=len(_TIERS)).tolist()
            for level, total in enumerate((group.num_blocks, group.num_host_blocks)):
                used, total, then = self._usage.get((number, level), (None, total, 0.0))
                if total:
                    fill = update.fill.add(group=number, memory_tier=_TIERS[level], total_blocks=total)
                    fill.cached_blocks = cached[level]
                    if used is not None:
                        fill.used_blocks, fill.used_age_seconds = used, time.monotonic() - then
        return update.SerializeToString()
