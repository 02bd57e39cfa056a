# SPDX-License-Identifier: Apache-2.0
"""Rows of a published table: single blocks as in simple Python, and the conversation trace's figures."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import published
from kvjax.research import write_mooncake
from tests.unit.research import cases

ORDERS = {published.lfu: lambda uses, depth, time: (uses, time), published.length_aware: lambda *order: order}


@pytest.mark.parametrize("order", ORDERS)
@given(trace=cases.forests(), size=st.integers(1, 20))
def test_blocks_leave_singly_in_their_order(order, trace, size):
    cached, hits, time = {}, 0, 0
    for prompt in cases.prompts_of(trace):
        for depth, block in enumerate(prompt):
            hits += block in cached
            uses = cached.get(block, (0,))[0] + 1
            if block not in cached and len(cached) == size:
                del cached[min(cached, key=lambda each: ORDERS[order](*cached[each]))]
            cached[block] = uses, depth, time
            time += 1
    assert published.singly(trace, size, order) == hits / len(trace.ids)


@pytest.mark.parametrize("is_theirs", [False, True])
def test_published_rows_are_listed_with_the_trace_that_they_are_of(is_theirs, tmp_path, monkeypatch, capsys):
    file = tmp_path / "mooncake_trace.jsonl"
    write_mooncake(cases.cut(40), file)
    monkeypatch.setattr(published, "CAPACITIES", (3000, 250))
    if is_theirs:
        monkeypatch.setattr(published, "REQUESTS", 40)
    monkeypatch.setattr(sys, "argv", ["published", "--trace", str(file), "--json", str(tmp_path / "rates.json")])
    published.main()
    metrics = json.loads((tmp_path / "rates.json").read_text())["metrics"]
    assert list(metrics) == [f"{name}_{size}" for name in (*published.TABLE, "Belady") for size in ("inf", 3000, 250)]
    assert capsys.readouterr().out.count("  published") == 3 * is_theirs


@pytest.mark.slow
def test_the_conversation_traces_rows_at_the_published_capacities():
    found = {name: [round(rate, 4) for rate in row] for name, row in published.rates(cases.whole()).items()}
    assert found["LRU"] == [0.3664, 0.3637, 0.3546, 0.3257, 0.2116, 0.0445]
    assert found["LFU"] == [0.3664, 0.3631, 0.3438, 0.2759, 0.1318, 0.0481]
    assert found["Belady"] == [0.3664, 0.3664, 0.3664, 0.3664, 0.3664, 0.1792]
