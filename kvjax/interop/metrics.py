# SPDX-License-Identifier: Apache-2.0
"""Numbers about a cache for Prometheus, and a dashboard for Grafana.

A scrape reads numbers that are there already, never an array of a device.
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

Counter, Gauge, Histogram = core.CounterMetricFamily, core.GaugeMetricFamily, core.HistogramMetricFamily
BOUNDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)  # seconds
_TIERS = ("device", "host")  # by level
_TOTALS = {
    "queried_tokens": "Prompt tokens that were looked up.",
    "reused_tokens": "Prompt tokens that were found.",
    "unusable_tokens": "Prompt tokens that only layers without a state had.",
    "stored_blocks": "Blocks that became findable.",
    "removed_blocks": "Blocks that stopped being findable.",
    "copied_blocks": "Blocks copied on the device.",
    "offloaded_blocks": "Ordered moves to the host.",
    "onboarded_blocks": "Ordered moves to the device.",
    "refused": "Rows whose request was not done.",
}
assert _TOTALS.keys() == {field.name for field in dataclasses.fields(Totals)}


def dashboard() -> dict[str, Any]:
    """The dashboard as the JSON that Grafana imports; it asks for the data source."""
    return json.loads(importlib.resources.files("kvjax.interop").joinpath("dashboard.json").read_text(encoding="utf-8"))


class Lifetimes:
    """The times for which the blocks of a group were findable: how many lasted up to each of `BOUNDS`, or longer."""

    def __init__(self, num_ids: int):
        self.counts, self.seconds = np.zeros(len(BOUNDS) + 1, np.int64), 0.0  # by the least bound; in all
        self.since = np.full(num_ids, np.nan)  # when blocks were stored, NaN for those whose beginning nobody saw

    def end(self, blocks: np.ndarray, now: float) -> None:
        """Blocks are removed."""
        lasted = now - self.since[blocks]
        lasted = lasted[~np.isnan(lasted)]
        self.counts += np.bincount(np.searchsorted(BOUNDS, lasted), minlength=len(self.counts))
        self.seconds += float(lasted.sum())
        self.since[blocks] = np.nan


class Observed:
    """Adds up events on the host; it counts what it has seen, whatever came before, and also impossible events."""

    def __init__(self, spec: CacheSpec):
        self.spec, self.totals = spec, Totals()
        self.hits = dict.fromkeys(_TIERS, 0)  # tokens that admissions found
        self.moved = {(number, tier): 0 for number in range(len(spec.groups)) for tier in _TIERS}  # bytes
        self.lifetimes = [Lifetimes(group.num_ids) for group in spec.groups]
        self._block_bytes = [sum(p.block_bytes(spec.block_size) for p in group.pools) for group in spec.groups]
        # Of the first group that has K/V: all that an admission finds, or what a window still sees of it.
        self._first = int(spec.bare)
        self._fill = np.full(spec.groups[self._first].num_ids, spec.block_size)
        self.levels = np.zeros(spec.groups[self._first].num_ids, np.int64)

    def add(self, events: Events | EventLog, now: float) -> None:
        """Adds events, at a time in seconds."""
        read = listened(events, self.spec)
        events = arrays(read)
        if isinstance(events, Events):  # nothing is computed on a device
            events = events.replace(transfer=jax.device_get(events.moves))
        self.totals = self.totals.add(events)
        back = sum(self._follow(kind, records, now) for kind, records, _ in read.steps)
        found, from_host = int(np.sum(events.cached)), 0  # a jitted loop finds nothing on the host
        if isinstance(events, Events):
            from_host, moves = min(back, found), events.moves
            for number, size in enumerate(self._block_bytes):  # between tiers the greater pool row is on the host
                of_group = (moves.block >= 0) & (moves.group == number)
                self.moved[number, "host"] += size * int(np.sum(of_group & (moves.target > moves.source)))
                self.moved[number, "device"] += size * int(np.sum(of_group & (moves.target < moves.source)))
        self.hits["host"] += from_host
        self.hits["device"] += found - from_host

    def _follow(self, kind: int, records: np.ndarray, now: float) -> int:
        """Follows records i32[n, 9] of one kind. The tokens in blocks of the first group that left the host."""
        back = 0
        for number, lives in enumerate(self.lifetimes):
            in_group = (records[:, 1] == number) & (records[:, 2] >= 0) & (records[:, 2] < len(lives.since))
            blocks, fill, levels = records[in_group][:, [2, 6, 7]].T
            if kind == EventKind.CLEARED and len(blocks):
                lives.end(np.arange(len(lives.since)), now)
            elif kind == EventKind.REMOVED:
                lives.end(blocks, now)
            elif kind == EventKind.STORED:
                lives.since[blocks] = now  # it begins
                if number == self._first:
                    self.levels[blocks], self._fill[blocks] = levels, fill
            elif kind == EventKind.UPDATED and number == self._first:
                back = int(self._fill[np.unique(blocks[(levels == 0) & (self.levels[blocks] == 1)])].sum())
                self.levels[blocks] = levels
        return back


class Metrics:
    """Exports numbers about a cache: what its events add up to, and how its blocks stood when it was last set.

    `observe` is a listener of `generate`, `stream` and `run_batch`. A listener gets no state, and who holds a block is
    no event: the host calls `set` when it likes, and the age of the last one is exported.

    Args:
      registry: a `prometheus_client.CollectorRegistry`, which this registers with; each cache needs its own.
      spec: of the cache.
      wires: publishers and agents whose queues are exported, by name.

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
        self._registry, self._wires = registry, dict(wires or {})
        self._lock, self._seen = threading.Lock(), Observed(spec)
        self._groups, self._size = range(int(spec.bare), len(spec.groups)), spec.block_size
        self._gauges: list[tuple[str, str, list[str], dict[Any, int]]] = []  # of the state that was set, and when
        self._set_at = 0.0
        self._open = contextlib.ExitStack()
        registry.register(self)
        self._open.callback(registry.unregister, self)

    def observe(self, events: Events | EventLog) -> None:
        """Adds events, each once and in their order: a listener. Those that cannot have happened do no harm."""
        with self._lock:
            self._seen.add(events, time.monotonic())

    def set(self, state: CacheState) -> None:
        """Reads how the blocks of a state stand; call it between transitions, on the thread that makes them."""
        gauges, levels = _read(state, self._groups)
        with self._lock:
            self._gauges, self._set_at = gauges, time.monotonic()
            self._seen.levels[:] = levels  # not all events may have been observed

    def serve(self, port: int, host: str = "127.0.0.1") -> str:
        """Answers scrapes from a thread of its own, until `close`.

        Args:
          port: 0 chooses one.
          host: the address of the machine to listen at.

        Returns:
          What Prometheus is pointed at. A port in use is an OSError.
        """
        try:
            server, thread = prometheus_client.start_http_server(port, host, self._registry)
        except OSError as error:
            raise OSError(f"port: {host}:{port}: {error.strerror}") from error
        for end in (thread.join, server.server_close, server.shutdown):  # the last one is called first
            self._open.callback(end)
        return f"http://{host}:{server.server_port}/metrics"

    def close(self) -> None:
        """Answers no more, and leaves the registry."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def describe(self) -> Iterator[Any]:
        """The metrics' names, by which a registry refuses a second cache."""
        return self.collect()

    def collect(self) -> Iterator[Any]:
        """The metrics of a scrape."""
        with self._lock:
            families = list(self._of_cache())
        return itertools.chain(families, self._of_wires())

    def _of_cache(self) -> Iterator[Any]:
        seen = self._seen
        for name, text in _TOTALS.items():
            yield Counter(f"kvjax_{name}", text, value=getattr(seen.totals, name))
        yield _family(Counter, "kvjax_hit_tokens", "Prompt tokens that were found, by tier.", ["tier"], seen.hits)
        moved = {key: num_bytes for key, num_bytes in seen.moved.items() if key[0] in self._groups}
        yield _family(Counter, "kvjax_moved_bytes", "Bytes of moves to a tier.", ["group", "to"], moved)
        text = "From stored to removed, of blocks whose storing was observed."
        lives = Histogram("kvjax_block_lifetime_seconds", text, labels=["group"])
        for number in self._groups:
            counts = np.cumsum(seen.lifetimes[number].counts).tolist()
            buckets = list(zip([*map(str, map(float, BOUNDS)), "+Inf"], counts, strict=True))
            lives.add_metric([str(number)], buckets, seen.lifetimes[number].seconds)
        yield lives
        yield Gauge("kvjax_block_size", "Token positions of a block.", value=self._size)
        for gauge in self._gauges:
            yield _family(Gauge, *gauge)
        if self._gauges:
            age = time.monotonic() - self._set_at
            yield Gauge("kvjax_state_age_seconds", "Since blocks and rows were read.", value=age)

    def _of_wires(self) -> Iterator[Any]:
        queued = {name: wire.queued_bytes for name, wire in self._wires.items()}
        yield _family(Gauge, "kvjax_wire_queued_bytes", "Events that wait for a wire.", ["wire"], queued)
        for what, text in {
            "overflows": "Events that did not fit a wire's queue, so that a snapshot took their place.",
            "ignored": "Events that a wire ignored after impossible ones.",
        }.items():
            counts = {name: wire.counts[what] for name, wire in self._wires.items()}
            yield _family(Counter, f"kvjax_wire_{what}", text, ["wire"], counts)


def _family(kind: Any, name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Any:
    """A family of metrics, whose values have the label or the tuple of labels as their key."""
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric([str(part) for part in (key if isinstance(key, tuple) else (key,))], value)
    return family


@on_state
def _read(state: CacheState, groups: range) -> tuple[list[Any], np.ndarray]:
    """(name, text, labels, values) of gauges of the groups that have K/V, and the levels i64[B] of the first one."""
    blocks, slots, moving, rows = {}, {}, {}, {}
    inspected = {number: inspect_group(state, number) for number in groups}
    for number, seen in inspected.items():
        group = state.spec.groups[number]
        for tier, prefix in zip(_TIERS, ("", "ON_HOST_")[: 1 + bool(group.num_host_blocks)], strict=False):
            for name in ("active", "cached", "empty"):
                of = seen.condition == Condition[prefix + name.upper()]
                blocks[number, tier, name] = int(np.sum(of))
                slots[number, tier, name] = int(np.sum(seen.written[of]))
        stats = tally(state, seen)
        moving[number] = stats.in_transit_blocks
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
    parser.add_argument("--dashboard", action="store_true", required=True, help="print the JSON that Grafana imports")
    parser.parse_args()
    print(json.dumps(dashboard(), indent=1))
