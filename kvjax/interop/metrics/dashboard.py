# SPDX-License-Identifier: Apache-2.0
"""A dashboard of a cache, as Grafana imports it."""

from __future__ import annotations

from typing import Any, NamedTuple

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT = 12, 8  # of Grafana's 24 columns


class Panel(NamedTuple):
    """A graph.

    Attributes:
      title: above it.
      unit: as Grafana calls it; "cps" is a count a second.
      queries: (PromQL, legend).
      stacked: whether its lines add up.
      text: what it shows.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False
    text: str = ""


PANELS = (
    Panel("Blocks", "short", (
        ('sum by (tier, condition) (kvjax_blocks{group=~"$group", instance=~"$instance"})', "{{tier}} {{condition}}"),
    ), stacked=True, text="Active blocks are held by rows or pins; cached ones can be reused or evicted."),
    Panel("Share of the slots that are filled", "percentunit", (
        ('sum by (group, tier) (kvjax_filled_slots{group=~"$group", instance=~"$instance"}) / '
         'sum by (group, tier) (kvjax_blocks{group=~"$group", instance=~"$instance"} * on (instance) group_left () '
         'kvjax_block_size)', "group {{group}} {{tier}}"),
    )),
    Panel("Share of prompt tokens found", "percentunit", (
        ('sum(rate(kvjax_reused_tokens_total{instance=~"$instance"}[$__rate_interval])) / '
         'sum(rate(kvjax_queried_tokens_total{instance=~"$instance"}[$__rate_interval]))', "found"),
    )),
    Panel("Prompt tokens found, by tier", "cps", (
        ('sum by (tier) (rate(kvjax_hit_tokens_total{instance=~"$instance"}[$__rate_interval]))', "{{tier}}"),
        ('sum(rate(kvjax_queried_tokens_total{instance=~"$instance"}[$__rate_interval]))', "looked up"),
    )),
    Panel("Blocks stored and removed", "cps", (
        ('sum(rate(kvjax_stored_blocks_total{instance=~"$instance"}[$__rate_interval]))', "stored"),
        ('sum(rate(kvjax_removed_blocks_total{instance=~"$instance"}[$__rate_interval]))', "removed"),
        ('sum(rate(kvjax_copied_blocks_total{instance=~"$instance"}[$__rate_interval]))', "copied"),
    )),
    Panel("Lifetime of blocks", "s", tuple(
        (f'histogram_quantile({quantile}, sum by (le) (rate(kvjax_block_lifetime_seconds_bucket{{group=~"$group", '
         f'instance=~"$instance"}}[$__rate_interval])))', f"{name}")
        for quantile, name in ((0.5, "median"), (0.9, "90 %"))
    ), text="From stored to removed."),
    Panel("Moves between the tiers", "Bps", (
        ('sum by (to) (rate(kvjax_moved_bytes_total{group=~"$group", instance=~"$instance"}[$__rate_interval]))',
         "to the {{to}}"),
    )),
    Panel("Moves and refusals", "cps", (
        ('sum(rate(kvjax_offloaded_blocks_total{instance=~"$instance"}[$__rate_interval]))', "to the host"),
        ('sum(rate(kvjax_onboarded_blocks_total{instance=~"$instance"}[$__rate_interval]))', "to the device"),
        ('sum(rate(kvjax_refused_total{instance=~"$instance"}[$__rate_interval]))', "rows refused"),
    )),
    Panel("Blocks in transit", "short", (
        ('sum by (group) (kvjax_in_transit_blocks{group=~"$group", instance=~"$instance"})', "group {{group}}"),
    ), text="On the move between the tiers when the state was read; nobody finds them."),
    Panel("Rows", "short", (
        ('sum by (condition) (kvjax_rows{instance=~"$instance"})', "{{condition}}"),
    ), stacked=True),
    Panel("Age of blocks and rows", "s", (
        ('max by (instance) (kvjax_state_age_seconds{instance=~"$instance"})', "{{instance}}"),
    ), text="Since the host read the state: what the other graphs show of blocks and rows is so old."),
    Panel("Queues of the wires", "bytes", (
        ('sum by (wire) (kvjax_wire_queued_bytes{instance=~"$instance"})', "{{wire}}"),
    )),
    Panel("Wires that told all anew, or nothing", "short", (
        ('sum by (wire) (increase(kvjax_wire_overflows_total{instance=~"$instance"}[$__rate_interval]))',
         "{{wire}} overflows"),
        ('sum by (wire) (increase(kvjax_wire_ignored_total{instance=~"$instance"}[$__rate_interval]))',
         "{{wire}} ignored"),
    )),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as the JSON that Grafana imports; it asks for the data source."""
    return {
        "uid": "kvjax",
        "title": "kvjax",
        "tags": ["kvjax"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), _variable("instance"), _variable("group")]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    row, column = divmod(number, 24 // _WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(label: str) -> dict[str, Any]:
    """A choice among the values of a label."""
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f"label_values(kvjax_moved_bytes_total, {label})", "refId": label},
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
