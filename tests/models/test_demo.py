# SPDX-License-Identifier: Apache-2.0
"""The output of the demo: bars and tables that stay within the terminal, and one line that sums it up."""

import io
import os
import re
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import rich.console

import kvjax
from kvjax.stores import DiskStore
from models import demo, loading, recall, stores
from tests.drive import ROOT, TIMEOUT, output_of


def test_a_document_may_state_its_facts_several_times():
    once, twice = (recall.make_document(np.random.default_rng(0), 3, times) for times in (1, 2))
    assert once.facts == twice.facts and twice.ids == once.ids * 2


def test_a_bar_has_its_parts_in_proportion():
    bar = demo.bar("where is bob ?", demo.Turn(1684, 1263, 0.05), 80)
    assert len(bar) == 80 and bar.endswith(" 421 + 1,263   50 ms")
    assert bar.count("░") / (bar.count("█") + bar.count("░")) == pytest.approx(0.75, abs=0.03)
    assert "█░" in demo.bar("", demo.Turn(1684, 1683, 0.05), 60)  # little is not nothing


def session(store) -> demo.Session:
    one = demo.Session.__new__(demo.Session)
    one.__dict__ = {
        "prompted": 12345, "reused": 1234, "answered": 12, "right": 12, "entries": [], "store": store,
        "turns": [demo.Turn(1684, 0, 1.234)] * demo.QUESTIONS, "cache": types.SimpleNamespace(state=None),
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


def numbers(lines, name):
    """The numbers of computed, reused and stored tokens in a line of the first table."""
    (line,) = [line for line in lines if line.startswith(name)][:1]
    return [int(number.replace(",", "")) for number in line.removeprefix(name).split()[:3]]


def stored_tokens(folder):
    """The tokens of each document's whole blocks that a folder has, up to the first one that it lacks."""
    spec = demo.make_spec(loading.load(recall.CHECKPOINT)[0])
    model, names = stores.checkpoint_name(recall.CHECKPOINT), kvjax.Namespaces()
    found = []
    with DiskStore(folder, spec, model=model, names=names, readonly=True) as store:
        for document in demo.documents(np.random.default_rng(demo.SEED)):
            has = [store.has(block, 0) for block in store.blocks(document.ids)]
            found.append(demo.BLOCK * [*has, False].index(False))
    return found


@pytest.mark.slow
def test_a_killed_demo_leaves_what_it_has_computed(tmp_path):
    """The second run computes no whole block that the folder had when the first one was killed."""
    folder, command = tmp_path / "store", [sys.executable, "-m", "models.demo", "--store"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    length = len(demo.documents(np.random.default_rng(demo.SEED))[0].ids)
    whole, rest = length // demo.BLOCK, length + recall.QUESTION_TOKENS
    with subprocess.Popen([*command, folder], env=env, cwd=ROOT, stdout=subprocess.DEVNULL) as first:
        try:
            deadline = time.monotonic() + TIMEOUT
            # All of the first document, and more of the second one than the store writes at a time.
            while sum(len(name) == 32 for _, _, files in os.walk(folder) for name in files) < whole + 65:
                assert first.poll() is None and time.monotonic() < deadline
                time.sleep(0.001)
        finally:
            first.kill()
    assert first.returncode == -9
    stored = stored_tokens(folder)
    assert stored[0] == whole * demo.BLOCK and stored[1] >= 64 * demo.BLOCK
    lines = output_of(*command, str(folder), COLUMNS="100").splitlines()
    assert numbers(lines, "first question") == [rest - stored[0], stored[0], stored[0]]
    computed, reused, read = numbers(lines, "4 other documents")
    assert read == sum(stored[1:]) and computed + reused == 8 * rest
    # A second question about a document lacks its person and the question mark.
    assert computed == sum(rest - tokens for tokens in stored[1:]) + 4 * 2
    assert numbers(lines, "nothing shared")[2] == 0
    assert stored_tokens(folder) == [stored[0]] * 5
