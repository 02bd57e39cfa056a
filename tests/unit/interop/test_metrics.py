# SPDX-License-Identifier: Apache-2.0
"""Exported metrics equal the cache's and its events' numbers; a scrape reads numbers; the dashboard's names exist."""

import json
import re
import subprocess
import sys
import urllib.request

import jax
import prometheus_client
import pytest

import kvjax
from kvjax.interop import metrics
from kvjax.interop.metrics import Metrics, Observed, dashboard
from kvjax.interop.vllm import Publisher
from tests.drive import BOTH, PLAIN, ROOT, TIERS, TIMEOUT, Driver, padded
from tests.unit.interop.forest import arrays_of
from tests.wire_kit import removed, stored, updated


class Watched(Driver):
    """A driver whose events are observed."""

    def __init__(self, spec):
        super().__init__(kvjax.init(spec))
        self.registry = prometheus_client.CollectorRegistry()
        self.metrics = Metrics(self.registry, spec)

    def follow(self, events):
        super().follow(events)
        self.metrics.observe(events)

    def value(self, name, **labels):
        return self.registry.get_sample_value(name, {key: str(value) for key, value in labels.items()})


def life():
    """Row 0 finds its own blocks on the device, then on the host; row 1 is active, row 2 is refused."""
    story, text = Watched(TIERS), list(range(11, 24))
    story.start(0, text)
    story.do("release", 0)
    assert story.start(0, text) == 12
    story.do("release", 0)
    for group in (0, 1):
        blocks = [block for number, block, _ in story.mirror.nodes if number == group]
        story.do("offload", padded(blocks, 8, kvjax.state.NO_BLOCK), group=group)
    assert story.start(0, text, tiers=BOTH) == 12
    story.do("release", 0)
    story.start(1, list(range(50, 56)))
    assert story.admit(1, [1, 2, 3]) != ["OK"]
    return story


@pytest.mark.slow
def test_what_is_exported_are_the_numbers_of_the_events_and_of_stats():
    story = life()
    story.metrics.set(story.state)
    for name, value in vars(story.totals).items():
        assert story.value(f"kvjax_{name}_total") == value
    assert story.totals.refused == 1 and story.totals.reused_tokens == 24
    assert [story.value("kvjax_hit_tokens_total", tier=tier) for tier in ("device", "host")] == [12, 12]
    size = TIERS.groups[0].pools[0].block_bytes(TIERS.block_size)
    assert TIERS.groups[1].pools[0].block_bytes(TIERS.block_size) == size
    for tier, blocks in (("host", story.totals.offloaded_blocks), ("device", story.totals.onboarded_blocks)):
        moved = sum(story.value("kvjax_moved_bytes_total", group=group, to=tier) for group in (0, 1))
        assert moved == size * blocks > 0
    assert story.value("kvjax_block_size") == TIERS.block_size
    for group in (0, 1):
        wanted = kvjax.debug.stats(story.state, group)
        for tier, prefix in (("device", ""), ("host", "host_")):
            for condition in ("active", "cached", "empty"):
                got = story.value("kvjax_blocks", group=group, tier=tier, condition=condition)
                assert got == getattr(wanted, f"{prefix}{condition}_blocks")
        for condition, slots in (("active", wanted.written_slots), ("cached", wanted.cached_slots)):
            assert story.value("kvjax_filled_slots", group=group, tier="device", condition=condition) == slots
        assert story.value("kvjax_in_transit_blocks", group=group) == wanted.in_transit_blocks
    host = [path for (group, _, path), (level, _) in story.mirror.index.items() if group == 0 and level]
    filled = story.value("kvjax_filled_slots", group=0, tier="host", condition="cached")
    assert filled == sum((len(path) - 1) % TIERS.block_size + 1 for path in host) > 0
    assert [story.value("kvjax_rows", condition=condition) for condition in ("active", "free")] == [1, 3]


def test_what_was_never_set_is_not_exported_and_its_age_is():
    registry = prometheus_client.CollectorRegistry()
    with Metrics(registry, PLAIN) as one:
        state = kvjax.init(PLAIN)
        assert registry.get_sample_value("kvjax_state_age_seconds") is None
        one.set(state)
        first = registry.get_sample_value("kvjax_state_age_seconds")
        assert 0 <= first < registry.get_sample_value("kvjax_state_age_seconds")
        one.set(state)
        with pytest.raises(ValueError, match=r"^state: got a Cache"):
            one.set(kvjax.Cache.create(PLAIN))
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            Metrics(registry, PLAIN)
    assert not list(registry.collect())


def test_a_scrape_reads_no_array(monkeypatch):
    """The cache may have been donated meanwhile."""
    state = jax.tree.map(lambda x: x.copy(), kvjax.init(TIERS))
    registry = prometheus_client.CollectorRegistry()
    one = Metrics(registry, TIERS)
    one.set(state)
    for array in jax.tree.leaves(state):
        array.delete()
    monkeypatch.setattr(jax, "device_get", None)
    assert registry.get_sample_value("kvjax_blocks", {"group": "0", "tier": "device", "condition": "empty"}) == 12


# Events by hand.

LEVELS = kvjax.make_spec(num_blocks=10, num_host_blocks=6, max_seqs=2, max_length=32, block_size=4)


def observed(*batches, spec=LEVELS, cached=0):
    """The metrics of some lists of events, each 2 s after the one before."""
    seen = Observed(spec)
    for number, events in enumerate(batches):
        arrays = arrays_of(events, spec)
        seen.add(arrays.replace(cached=arrays.cached + cached), 2.0 * number)
    return seen


def test_lifetimes_are_from_stored_to_removed():
    seen = observed(
        [stored(1, 1, 0, [1] * 4), stored(2, 1, 0, [2] * 4)],
        [removed(1, 1), stored(1, 2, 0, [3] * 4)],
        [removed(7, 1), removed(2, 1)],  # the store of block 7 was not observed
        [{"kind": "cleared", "group": 0}],
    )
    [lives] = seen.lifetimes
    assert lives.seconds == 2 + 4 + 4
    assert dict(zip(metrics.BOUNDS, lives.counts.tolist(), strict=False))[3] == 1
    assert lives.counts.sum() == 3 and lives.counts[4] == 2


def test_a_block_stored_and_removed_in_one_batch_lasted_no_time():
    seen = observed([stored(1, 1, 0, [1] * 4), removed(1, 1), stored(1, 2, 0, [2] * 4)], [removed(1, 2)])
    assert seen.lifetimes[0].seconds == 2 and seen.lifetimes[0].counts.sum() == 2


def test_only_what_an_admission_brings_back_is_the_hosts():
    store = [stored(1, 1, 0, [1] * 4, level=1), stored(2, 1, (1, 1), [2] * 3, level=1), stored(3, 1, 0, [3] * 4)]
    back = [updated(1, 1, 0), updated(2, 1, 0), updated(3, 1, 0, priority=80), updated(3, 1, 1)]
    assert observed(store, back, cached=0).hits == {"device": 0, "host": 0}
    seen = observed(store)
    events = arrays_of(back, LEVELS)
    seen.add(events.replace(cached=events.cached + 11), 1.0)
    assert seen.hits == {"device": 4, "host": 7}
    log = arrays_of([updated(3, 1, 0)], LEVELS, log=True)
    seen.add(log.replace(cached=log.cached + 4), 1.0)  # of a jitted loop, which finds nothing on the host
    assert seen.hits == {"device": 8, "host": 7}


def test_a_first_group_without_keys_and_values_has_no_hits():
    """It has no host tier either. The windows' groups count."""
    layers = [kvjax.LayerSpec(1, 4, window=8)]
    spec = kvjax.make_spec(layers, num_blocks=10, num_host_blocks=6, max_seqs=2, max_length=32, block_size=4)
    store = [stored(1, 1, 0, [1] * 4), stored(2, 1, 0, [1] * 4, group=1, level=1)]
    seen = observed(store, spec=spec)
    events = arrays_of([{**updated(2, 1, 0), "group": 1}], spec)
    seen.add(events.replace(cached=events.cached + 4), 1.0)
    assert spec.bare and seen.hits == {"device": 0, "host": 4}


def test_events_that_cannot_have_happened_do_no_harm():
    nonsense = [
        removed(99, 1),
        removed(-5, 1),
        updated(40, 1, 0),
        {"kind": "cleared", "group": 7},
        stored(15, 1, (3, 3), [1]),
    ]
    seen = observed(nonsense, [removed(15, 1)], cached=1)
    assert seen.lifetimes[0].counts.sum() == 1 and seen.totals.removed_blocks == 3


@pytest.mark.parametrize(
    ("events", "complaint"),
    [([], "events: got list, wanted Events or an EventLog"), (arrays_of([], PLAIN), "events: got blocks of")],
)
def test_what_is_no_event_of_this_cache_is_refused(events, complaint):
    spec = kvjax.make_spec(num_blocks=2, max_seqs=1, max_length=2, block_size=2)
    with pytest.raises(ValueError, match=f"^{complaint}"):
        Metrics(prometheus_client.CollectorRegistry(), spec).observe(events)


# The view of Prometheus and Grafana.


def test_queues_and_overflows_of_wires_are_exported():
    registry = prometheus_client.CollectorRegistry()
    wire = Publisher(LEVELS, bind="tcp://127.0.0.1:*", queue_bytes=1)
    Metrics(registry, LEVELS, wires={"vllm": wire})
    for block in (1, 2):
        wire.publish([stored(block, 1, 0, [block] * 4)])
    wire.publish([removed(9, 9)])
    assert wire.flush(20)
    wire.publish([removed(1, 1)])
    with pytest.raises(ValueError, match=r"^events: got removed"):
        wire.close()
    for name, value in (("overflows_total", 2), ("ignored_total", 1), ("queued_bytes", 0)):
        assert registry.get_sample_value(f"kvjax_wire_{name}", {"wire": "vllm"}) == value
    wire._queued = 77
    assert registry.get_sample_value("kvjax_wire_queued_bytes", {"wire": "vllm"}) == 77


def test_prometheus_reads_a_page():
    with (
        Metrics(prometheus_client.CollectorRegistry(), LEVELS) as one,
        Metrics(prometheus_client.CollectorRegistry(), PLAIN) as other,
    ):
        one.observe(arrays_of([stored(1, 1, 0, [1] * 4), removed(1, 1)], LEVELS))
        address = one.serve(0)
        with urllib.request.urlopen(address, timeout=TIMEOUT) as page:
            text = page.read().decode()
        assert "\nkvjax_stored_blocks_total 1.0\n" in text
        assert '\nkvjax_block_lifetime_seconds_bucket{group="0",le="+Inf"} 1.0\n' in text
        port = int(re.search(r":(\d+)/metrics$", address)[1])
        with pytest.raises(OSError, match=rf"^port: 127.0.0.1:{port}: Address already in use"):
            other.serve(port)


def test_every_name_in_the_dashboards_queries_is_exported():
    wire = Publisher(LEVELS, bind="tcp://127.0.0.1:*")
    registry = prometheus_client.CollectorRegistry()
    with wire, Metrics(registry, TIERS, wires={"vllm": wire}) as one:
        one.set(kvjax.init(TIERS))
        exported = {sample.name: sample.labels.keys() for family in registry.collect() for sample in family.samples}
    queried = set()
    board = dashboard()
    for panel in board["panels"]:
        for target in panel["targets"]:
            for name, labels in re.findall(r"(kvjax_\w+)(?:\{([^}]*)\})?", target["expr"]):
                queried.add(name)
                assert set(re.findall(r"(\w+)=~", labels)) - {"instance"} <= exported[name], target["expr"]
            for labels in re.findall(r"by \(([\w, ]+)\) \(\w*\(?(kvjax_\w+)", target["expr"]):
                assert set(labels[0].split(", ")) <= {*exported[labels[1]], "le", "instance"}
    unused = {name for name in exported if not name.endswith(("_count", "_sum"))} - queried
    assert unused == set(), unused
    for variable in board["templating"]["list"][1:]:
        assert re.search(r"kvjax_\w+", variable["query"]["query"])[0] in exported


def test_the_dashboard_is_printed():
    command = [sys.executable, "-m", "kvjax.interop.metrics", "--dashboard"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=TIMEOUT).stdout
    board = json.loads(out)
    assert board == dashboard()
    rates = [panel["fieldConfig"]["defaults"]["unit"] for panel in board["panels"]
             if all("rate(" in target["expr"] and " / " not in target["expr"] and "quantile" not in target["expr"]
                    for target in panel["targets"])]  # fmt: skip
    assert len(rates) == 4 and set(rates) == {"cps", "Bps"}
    positions = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(positions)) == len(positions) and len({panel["id"] for panel in board["panels"]}) == len(positions)


def test_every_total_has_a_text():
    assert all(text.endswith(".") for text in metrics._TOTALS.values())
