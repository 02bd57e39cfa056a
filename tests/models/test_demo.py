# SPDX-License-Identifier: Apache-2.0
"""The output of the demo: bars and tables that stay within the terminal, and one line that sums it up."""

import io
import re
import sys
import types

import numpy as np
import pytest
import rich.console

from models import demo, recall
from tests.drive import output_of


def test_a_document_may_state_its_facts_several_times():
    once, twice = (recall.make_document(np.random.default_rng(0), 3, times) for times in (1, 2))
    assert once.facts == twice.facts and twice.ids == once.ids * 2


def test_a_bar_has_its_parts_in_proportion():
    bar = demo.bar("where is bob ?", demo.ChatTurn(1684, 1263, 0.05), 80)
    assert len(bar) == 80 and bar.endswith(" 421 + 1,263   50 ms")
    assert bar.count("░") / (bar.count("█") + bar.count("░")) == pytest.approx(0.75, abs=0.03)
    assert "█░" in demo.bar("", demo.ChatTurn(1684, 1683, 0.05), 60)  # little is not nothing


def session(store) -> demo.Session:
    one = demo.Session.__new__(demo.Session)
    one.__dict__ = {
        "prompted": 12345, "reused": 1234, "answered": 12, "right": 12, "entries": [], "store": store,
        "turns": [demo.ChatTurn(1684, 0, 1.234)] * demo.QUESTIONS, "cache": types.SimpleNamespace(state=None),
    }  # fmt: skip
    return one


@pytest.mark.parametrize("store", [None, "a store"])
@pytest.mark.parametrize("width", [60, 80])
def test_bars_and_tables_stay_within_the_columns(monkeypatch, width, store):
    """Maps are not among them: `kvjax.show` gets the width, and keeps within it."""
    widths = []
    monkeypatch.setattr(demo.kvjax, "show", lambda state, **options: widths.append(options["width"]) or "map")
    parts, first = demo.Parts(*[session(store)] * 10, "map"), session(store)
    parts = parts._replace(first=first, repeat=types.SimpleNamespace(**{**vars(first), "turns": []}))
    parts.repeat.tokens, parts.repeat.records = parts.first.tokens, parts.first.records
    console = rich.console.Console(file=io.StringIO(), width=width, highlight=False)
    demo.show(console, parts, ["beatrix"] * demo.QUESTIONS)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    assert sum("reused  stored" in line for line in lines) == (store is not None)
    assert widths == [width] * 2 and sum("where is beatrix ?" in line for line in lines) == demo.QUESTIONS


@pytest.mark.slow
def test_the_demo_shows_what_the_cache_is_for():
    """The demo writes to a pipe of 60 columns. The first token comes several times sooner, even on a busy machine."""
    lines = output_of(sys.executable, "-m", "models.demo", COLUMNS="60").splitlines()
    assert max(map(len, lines)) <= 60
    share, times = re.fullmatch(
        r"(\d+)% of prompt tokens reused, first token ([\d.]+) times sooner", lines[-1]
    ).groups()
    assert int(share) > 85 and float(times) > 2
