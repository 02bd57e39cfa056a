# SPDX-License-Identifier: Apache-2.0
"""Metrics of a cache for Prometheus, and a dashboard for Grafana.

A scrape reads existing counters on the host, never an array on a device.
`python -m kvjax.interop.metrics --dashboard` prints the dashboard.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.resources
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np

from kvjax.checks import on_state
from kvjax.debug.counts import tally
from kvjax.debug.inspect import Condition, inspect_group
from kvjax.events.host_events import arrays, listened
from kvjax.events.log import EventLog
from kvjax.events.records import EventKind, Events
from kvjax.events.totals import Totals
from kvjax.interop.hub import PublisherThread
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

try:
    import prometheus_client
    from prometheus_client import core
except ImportError as error:
    raise ImportError('kvjax.interop.metrics: needs prometheus-client (pip install "kvjax[metrics]")') from error

__all__ = ["Metrics", "dashboard"]

Counter = core.CounterMetricFamily
Gauge = core.GaugeMetricFamily
Histogram = core.HistogramMetricFamily
BOUNDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)  # seconds
_TIERS = ("device", "host")  # by level
_TOTALS = {
    "queried_tokens": "Looked-up prompt tokens.",
    "reused_tokens": "Prompt tokens found in the cache.",
    "unusable_tokens": "Cached prompt tokens without a usable state of the recurrent layers.",
    "stored_blocks": "Blocks made findable.",
    "removed_blocks": "Blocks no longer findable.",
    "copied_blocks": "Blocks copied on the device.",
    "offloaded_blocks": "Ordered moves to the host.",
    "onboarded_blocks": "Ordered moves to the device.",
    "refused": "Rows whose request was refused.",
}
assert _TOTALS.keys() == {field.name for field in dataclasses.fields(Totals)}


def dashboard() -> dict[str, Any]:
    """The dashboard as JSON. Grafana asks for the data source when you import it."""
    return json.loads(importlib.resources.files("kvjax.interop").joinpath("dashboard.json").read_text(encoding="utf-8"))


class Lifetimes:
    """The lifetimes of a group's findable blocks: a count up to each of `BOUNDS`, and a count of longer lifetimes."""

    def __init__(self, num_ids: int):
        self.counts = np.zeros(len(BOUNDS) + 1, np.int64)  # by the lowest bound above
        self.seconds = 0.0  # the sum of all lifetimes
        self.since = np.full(num_ids, np.nan)  # the time of storing, NaN if it was not observed

    def end(self, blocks: np.ndarray, now: float) -> None:
        """Ends the lifetimes of removed blocks."""
        lasted = now - self.since[blocks]
        lasted = lasted[~np.isnan(lasted)]
        self.counts += np.bincount(np.searchsorted(BOUNDS, lasted), minlength=len(self.counts))
        self.seconds += float(lasted.sum())
        self.since[blocks] = np.nan


class Observed:
    """Adds up events on the host. It counts only the given events, and accepts impossible events."""

    def __init__(self, spec: CacheSpec):
        self.spec = spec
        self.totals = Totals()
        self.hits = dict.fromkeys(_TIERS, 0)  # tokens found by admissions
        self.moved = {(group_index, tier): 0 for group_index in range(len(spec.groups)) for tier in _TIERS}  # bytes
        self.lifetimes = [Lifetimes(group.num_ids) for group in spec.groups]
        self._block_bytes = [sum(p.block_bytes(spec.block_size) for p in group.pools) for group in spec.groups]
        # The first group with K/V. It has all tokens that an admission finds, or their part inside a window.
        self._first = int(spec.bare)
        self._fill = np.full(spec.groups[self._first].num_ids, spec.block_size)
        self.levels = np.zeros(spec.groups[self._first].num_ids, np.int64)

    def add(self, events: Events | EventLog, now: float) -> None:
        """Adds events observed at a time in seconds."""
        read = listened(events, self.spec)
        events = arrays(read)
        if isinstance(events, Events):  # keeps the moves off the device
            events = events.replace(transfer=jax.device_get(events.moves))
        self.totals = self.totals.add(events)
        onboarded = sum(self._follow(kind, records, now) for kind, records, _ in read.steps)
        cached = int(np.sum(events.cached))
        from_host = 0  # a jitted loop finds no blocks on the host
        if isinstance(events, Events):
            from_host = min(onboarded, cached)
            self._add_moves(events)
        self.hits["host"] += from_host
        self.hits["device"] += cached - from_host

    def _add_moves(self, events: Events) -> None:
        moves = events.moves
        for group_index, num_bytes in enumerate(self._block_bytes):  # the host has the greater pool rows
            in_group = (moves.block >= 0) & (moves.group == group_index)
            self.moved[group_index, "host"] += num_bytes * int(np.sum(in_group & (moves.target > moves.source)))
            self.moved[group_index, "device"] += num_bytes * int(np.sum(in_group & (moves.target < moves.source)))

    def _follow(self, kind: int, records: np.ndarray, now: float) -> int:
        """Follows records i32[n, 9] of the same kind. Returns the tokens of the first group's onboarded blocks."""
        onboarded = 0
        for group_index, lives in enumerate(self.lifetimes):
            in_group = (records[:, 1] == group_index) & (records[:, 2] >= 0) & (records[:, 2] < len(lives.since))
            blocks, fill, levels = records[in_group][:, [2, 6, 7]].T
            if kind == EventKind.CLEARED and len(blocks):
                lives.end(np.arange(len(lives.since)), now)
            elif kind == EventKind.REMOVED:
                lives.end(blocks, now)
            elif kind == EventKind.STORED:
                lives.since[blocks] = now
                if group_index == self._first:
                    self.levels[blocks] = levels
                    self._fill[blocks] = fill
            elif kind == EventKind.UPDATED and group_index == self._first:
                onboarded = int(self._fill[np.unique(blocks[(levels == 0) & (self.levels[blocks] == 1)])].sum())
                self.levels[blocks] = levels
        return onboarded


class Metrics:
    """Exports metrics of a cache: the totals of its events, and the condition of its blocks at the last `set`.

    Use `observe` as a listener of `generate`, `stream` and `run_batch`. Events do not tell which blocks are held. Call
    `set` with a state from time to time to export this. The age of the last `set` is exported too.

    Args:
      registry: a `prometheus_client.CollectorRegistry` to register with. Each cache needs its own.
      spec: the spec of the cache.
      wires: publishers and agents, by name; their queues are exported.

    Example:
      >>> import prometheus_client
      >>> from kvjax.interop.metrics import Metrics
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> _, events = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> registry = prometheus_client.CollectorRegistry()
      >>> Metrics(registry, spec).observe(events)
      >>> int(registry.get_sample_value("kvjax_queried_tokens_total"))
      10
    """

    def __init__(self, registry: Any, spec: CacheSpec, *, wires: Mapping[str, PublisherThread] | None = None):
        self._registry = registry
        self._wires = dict(wires or {})
        self._lock = threading.Lock()
        self._seen = Observed(spec)
        self._groups = range(int(spec.bare), len(spec.groups))
        self._size = spec.block_size
        self._gauges: list[tuple[str, str, list[str], dict[Any, int]]] = []  # of the state at the last `set`
        self._set_at = 0.0
        self._open = contextlib.ExitStack()
        registry.register(self)
        self._open.callback(registry.unregister, self)

    def observe(self, events: Events | EventLog) -> None:
        """Adds events, each once and in order, as a listener. Impossible events do no harm."""
        with self._lock:
            self._seen.add(events, time.monotonic())

    def set(self, state: CacheState) -> None:
        """Reads the condition of a state's blocks. Call it between transitions, on the thread that makes them."""
        gauges, levels = _read(state, self._groups)
        with self._lock:
            self._gauges = gauges
            self._set_at = time.monotonic()
            self._seen.levels[:] = levels  # some events may not have been observed

    def serve(self, port: int, host: str = "127.0.0.1") -> str:
        """Answers scrapes on a thread, until `close`.

        Args:
          port: the port to listen at; 0 chooses a free port.
          host: the address of this machine to listen at.

        Returns:
          The URL to configure in Prometheus.

        Raises:
          OSError: if the port is in use.
        """
        try:
            server, thread = prometheus_client.start_http_server(port, host, self._registry)
        except OSError as error:
            raise OSError(f"port: {host}:{port}: {error.strerror}") from error
        for end in (thread.join, server.server_close, server.shutdown):  # called in reverse
            self._open.callback(end)
        return f"http://{host}:{server.server_port}/metrics"

    def close(self) -> None:
        """Stops answering, and leaves the registry."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def describe(self) -> Iterator[Any]:
        """The metrics. By their names, a registry refuses a second cache."""
        return self.collect()

    def collect(self) -> Iterator[Any]:
        """The metrics of a scrape."""
        with self._lock:
            families = list(self._cache_families())
        return itertools.chain(families, self._wire_families())

    def _cache_families(self) -> Iterator[Any]:
        seen = self._seen
        for name, text in _TOTALS.items():
            yield Counter(f"kvjax_{name}", text, value=getattr(seen.totals, name))
        yield _family(Counter, "kvjax_hit_tokens", "Prompt tokens found in the cache, by tier.", ["tier"], seen.hits)
        moved = {key: num_bytes for key, num_bytes in seen.moved.items() if key[0] in self._groups}
        yield _family(Counter, "kvjax_moved_bytes", "Bytes of moves to a tier.", ["group", "to"], moved)
        text = "From stored to removed, of blocks whose storing was observed."
        lives = Histogram("kvjax_block_lifetime_seconds", text, labels=["group"])
        for group_index in self._groups:
            counts = np.cumsum(seen.lifetimes[group_index].counts).tolist()
            buckets = list(zip([*map(str, map(float, BOUNDS)), "+Inf"], counts, strict=True))
            lives.add_metric([str(group_index)], buckets, seen.lifetimes[group_index].seconds)
        yield lives
        yield Gauge("kvjax_block_size", "Token positions of a block.", value=self._size)
        for gauge in self._gauges:
            yield _family(Gauge, *gauge)
        if self._gauges:
            age = time.monotonic() - self._set_at
            yield Gauge("kvjax_state_age_seconds", "Since blocks and rows were read.", value=age)

    def _wire_families(self) -> Iterator[Any]:
        queued = {name: wire.queued_bytes for name, wire in self._wires.items()}
        yield _family(Gauge, "kvjax_wire_queued_bytes", "Events queued for a wire.", ["wire"], queued)
        for name, text in {
            "overflows": "Events replaced by a snapshot because they did not fit a wire's queue.",
            "ignored": "Events ignored by a wire after impossible events.",
        }.items():
            counts = {wire_name: wire.counts[name] for wire_name, wire in self._wires.items()}
            yield _family(Counter, f"kvjax_wire_{name}", text, ["wire"], counts)


def _family(kind: Any, name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Any:
    """A family of metrics. The keys of its values are a label or a tuple of labels."""
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric([str(part) for part in (key if isinstance(key, tuple) else (key,))], value)
    return family


@on_state
def _read(state: CacheState, groups: range) -> tuple[list[Any], np.ndarray]:
    """(name, text, labels, values) of gauges of groups with K/V, and the levels i64[B] of the first group's blocks."""
    blocks = {}
    slots = {}
    moving = {}
    rows = {}
    inspected = {group_index: inspect_group(state, group_index) for group_index in groups}
    for group_index, seen in inspected.items():
        group = state.spec.groups[group_index]
        for tier, prefix in zip(_TIERS, ("", "ON_HOST_")[: 1 + bool(group.num_host_blocks)], strict=False):
            has_backups = prefix and state.spec.backups
            for name in ("active", "cached", "empty", *(("backup",) if has_backups else ())):
                has_condition = seen.condition == Condition[prefix + name.upper()]
                blocks[group_index, tier, name] = int(np.sum(has_condition))
                slots[group_index, tier, name] = int(np.sum(seen.written[has_condition]))
        stats = tally(state, seen)
        moving[group_index] = stats.in_transit_blocks
        rows = {"active": stats.active_rows, "free": stats.num_rows - stats.active_rows}
    levels = (inspected[groups.start].condition >= Condition.ON_HOST_EMPTY).astype(np.int64)
    labels = ["group", "tier", "condition"]
    gauges = [
        ("kvjax_blocks", "Blocks.", labels, blocks),
        ("kvjax_filled_slots", "Token positions whose K/V are written.", labels, slots),
        ("kvjax_in_transit_blocks", "Blocks on the move.", ["group"], moving),
        ("kvjax_rows", "Rows for sequences.", ["condition"], rows),
    ]
    return gauges, levels


if __name__ == "__main__":
    about = "Prints a dashboard for Grafana. python -m kvjax.interop.metrics --dashboard > kvjax.json"
    parser = argparse.ArgumentParser(prog="python -m kvjax.interop.metrics", description=about)
    parser.add_argument("--dashboard", action="store_true", required=True, help="print the JSON to import into Grafana")
    parser.parse_args()
    print(json.dumps(dashboard(), indent=1))
