# SPDX-License-Identifier: Apache-2.0
"""Numbers about a cache, for Prometheus. A scrape reads numbers that are there already, never an array of a device."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from kvjax.checks import on_state
from kvjax.debug.counts import tally
from kvjax.debug.inspect import Condition, inspect_group
from kvjax.events.log import EventLog
from kvjax.events.records import Events
from kvjax.events.totals import Totals
from kvjax.interop.hub import PublisherThread
from kvjax.interop.metrics._wires import core, prometheus_client
from kvjax.interop.metrics.observed import BOUNDS, TIERS, Observed
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

_CONDITIONS = {
    Condition.ACTIVE: ("device", "active"), Condition.CACHED: ("device", "cached"),
    Condition.EMPTY: ("device", "empty"), Condition.ON_HOST_ACTIVE: ("host", "active"),
    Condition.ON_HOST_CACHED: ("host", "cached"), Condition.ON_HOST_EMPTY: ("host", "empty"),
}  # fmt: skip
_TOTALS = {
    "queried_tokens": "Prompt tokens that were looked up.",
    "reused_tokens": "Prompt tokens that were found.",
    "stored_blocks": "Blocks that became findable.",
    "removed_blocks": "Blocks that stopped being findable.",
    "copied_blocks": "Blocks copied on the device.",
    "offloaded_blocks": "Ordered moves to the host.",
    "onboarded_blocks": "Ordered moves to the device.",
    "refused": "Rows whose request was not done.",
}
assert _TOTALS.keys() == {field.name for field in dataclasses.fields(Totals)}


class Reading(NamedTuple):
    """The figures of a state when it was set.

    Attributes:
      timestamp: when.
      blocks, slots: {(group, tier, condition): blocks, filled slots}.
      moving: {group: blocks in transit}.
      rows: active rows, and those that are free.
      levels: i64[B]; of the blocks of the first group that has K/V.
    """

    timestamp: float
    blocks: dict[tuple[int, str, str], int]
    slots: dict[tuple[int, str, str], int]
    moving: dict[int, int]
    rows: dict[str, int]
    levels: np.ndarray


class Metrics:
    """Exports numbers about a cache: what its events add up to, and how its blocks stood when it was last set.

    `observe` is a listener of `generate`, `stream` and `run_batch`. A listener gets no state, and who holds a block is
    no event: the host calls `set` when it likes, and the age of the last one is exported.
    """

    def __init__(self, registry: Any, spec: CacheSpec, *, wires: Mapping[str, PublisherThread] | None = None):
        """Registers itself, as a collector.

        Args:
          registry: a `prometheus_client.CollectorRegistry`; each cache needs its own.
          spec: of the cache.
          wires: publishers and agents whose queues are exported, by name.
        """
        self._registry, self._wires = registry, dict(wires or {})
        self._lock, self._seen = threading.Lock(), Observed(spec)
        self._groups, self._size = range(int(spec.bare), len(spec.groups)), spec.block_size
        self._reading: Reading | None = None
        self._server: Any = None
        registry.register(self)
        self._registered = True

    def observe(self, events: Events | EventLog) -> None:
        """Adds events; their arrays may be donated afterwards. Those that cannot have happened do no harm.

        Args:
          events: each once, in their order.

        Raises:
          ValueError: for anything else, and for events of blocks of another size.
        """
        with self._lock:
            self._seen.add(events, time.monotonic())

    def set(self, state: CacheState) -> None:
        """Reads how the blocks stand.

        Args:
          state: of the cache; to be called between its transitions, on the thread that makes them.
        """
        reading = _read(state, self._groups)
        with self._lock:
            self._reading = reading
            self._seen.set_levels(reading.levels)

    def serve(self, port: int, host: str = "127.0.0.1") -> str:
        """Answers scrapes from a thread of its own, until `close`.

        Args:
          port: 0 chooses one.
          host: the address of the machine to listen at.

        Returns:
          What Prometheus is pointed at.

        Raises:
          OSError: if the port is in use.
        """
        try:
            server, thread = prometheus_client.start_http_server(port, host, self._registry)
        except OSError as error:
            raise OSError(f"port: {host}:{port}: {error.strerror}") from error
        self._server = server, thread
        return f"http://{host}:{server.server_port}/metrics"

    def close(self) -> None:
        """Answers no more, and leaves the registry."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None
        if self._registered:
            self._registry.unregister(self)
            self._registered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def describe(self) -> Iterator[Any]:
        """The metrics' names, by which a registry refuses a second cache."""
        return self.collect()

    def collect(self) -> Iterator[Any]:
        """The metrics of a scrape."""
        with self._lock:
            families = [*self._of_events(), *self._of_state()]
        return itertools.chain(families, self._of_wires())

    def _of_events(self) -> Iterator[Any]:
        seen = self._seen
        for name, text in _TOTALS.items():
            yield core.CounterMetricFamily(f"kvjax_{name}", text, value=getattr(seen.totals, name))
        hits = core.CounterMetricFamily("kvjax_hit_tokens", "Prompt tokens that were found, by tier.", labels=["tier"])
        for tier, tokens in seen.hits.items():
            hits.add_metric([tier], tokens)
        moved = core.CounterMetricFamily("kvjax_moved_bytes", "Bytes of moves to a tier.", labels=["group", "to"])
        lives = core.HistogramMetricFamily(
            "kvjax_block_lifetime_seconds", "From stored to removed, of blocks whose storing was observed.",
            labels=["group"],
        )  # fmt: skip
        for number in self._groups:
            for tier in TIERS:
                moved.add_metric([str(number), tier], seen.moved[number, tier])
            counts = np.cumsum(seen.lifetimes[number].counts).tolist()
            buckets = list(zip([*map(str, map(float, BOUNDS)), "+Inf"], counts, strict=True))
            lives.add_metric([str(number)], buckets, seen.lifetimes[number].seconds)
        yield from (hits, moved, lives)

    def _of_state(self) -> Iterator[Any]:
        yield core.GaugeMetricFamily("kvjax_block_size", "Token positions of a block.", value=self._size)
        reading = self._reading
        if reading is None:
            return
        labels = ["group", "tier", "condition"]
        blocks = core.GaugeMetricFamily("kvjax_blocks", "Blocks.", labels=labels)
        slots = core.GaugeMetricFamily("kvjax_filled_slots", "Token positions whose K/V are written.", labels=labels)
        for family, values in ((blocks, reading.blocks), (slots, reading.slots)):
            for key, value in values.items():
                family.add_metric([str(part) for part in key], value)
        moving = core.GaugeMetricFamily("kvjax_in_transit_blocks", "Blocks on the move.", labels=["group"])
        for number, value in reading.moving.items():
            moving.add_metric([str(number)], value)
        rows = core.GaugeMetricFamily("kvjax_rows", "Rows for sequences.", labels=["condition"])
        for condition, value in reading.rows.items():
            rows.add_metric([condition], value)
        yield from (blocks, slots, moving, rows)
        age = time.monotonic() - reading.timestamp
        yield core.GaugeMetricFamily("kvjax_state_age_seconds", "Since blocks and rows were read.", value=age)

    def _of_wires(self) -> Iterator[Any]:
        queued = core.GaugeMetricFamily("kvjax_wire_queued_bytes", "Events that wait for a wire.", labels=["wire"])
        overflows = core.CounterMetricFamily(
            "kvjax_wire_overflows",
            "Events that did not fit a wire's queue, so that a snapshot took their place.",
            labels=["wire"],
        )
        ignored = core.CounterMetricFamily(
            "kvjax_wire_ignored", "Events that a wire ignored after impossible ones.", labels=["wire"]
        )
        for name, wire in self._wires.items():
            counts = wire.counts
            queued.add_metric([name], wire.queued_bytes)
            overflows.add_metric([name], counts["overflows"])
            ignored.add_metric([name], counts["ignored"])
        yield from (queued, overflows, ignored)


@on_state
def _read(state: CacheState, groups: range) -> Reading:
    """Reads the groups that have K/V."""
    blocks, slots, moving, rows = {}, {}, {}, {}
    inspected = {number: inspect_group(state, number) for number in groups}
    for number, seen in inspected.items():
        group = state.spec.groups[number]
        sizes = {"device": group.num_blocks, "host": group.num_host_blocks}
        for condition, (tier, name) in _CONDITIONS.items():
            of = seen.condition == condition
            if sizes[tier]:
                blocks[number, tier, name] = int(np.sum(of))
                slots[number, tier, name] = int(np.sum(seen.written[of]))
        stats = tally(state, seen)
        moving[number] = stats.in_transit_blocks
        rows = {"active": stats.active_rows, "free": stats.num_rows - stats.active_rows}
    levels = (inspected[groups.start].condition >= Condition.ON_HOST_EMPTY).astype(np.int64)
    return Reading(time.monotonic(), blocks, slots, moving, rows, levels)
