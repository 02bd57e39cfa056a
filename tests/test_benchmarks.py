# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: timing that allows donation, and the form of their report. And that each of them runs.

The benchmarks check their own answers, so that a tiny one is a test of the parts it times; its times mean nothing.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, bookkeeping, common, decode_loop, memory
from benchmarks.memory import read_lengths


def test_report_writes_what_was_measured_where(tmp_path, capsys):
    file = tmp_path / "new" / "result.json"
    common.report("toy", {"step_us": 61.23456789, "steps": 3}, file)
    result = json.loads(file.read_text())
    assert set(result) == {"benchmark", "versions", "cpu", "metrics"}
    assert result["benchmark"] == "toy"
    assert result["versions"]["jax"] == jax.__version__
    assert result["metrics"] == {"step_us": 61.2346, "steps": 3.0}
    assert "cores" in result["cpu"]
    assert "61.2346" in capsys.readouterr().out


def test_best_of_makes_donated_arguments_anew():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    seconds, result = common.best_of(step, lambda: (jnp.arange(1000),), repeats=3)
    assert 0 < seconds < 10
    assert int(result[-1]) == 1000


def test_a_broken_bound_ends_the_benchmark():
    common.require(True, "fine")
    with pytest.raises(SystemExit, match="benchmark failed: too slow"):
        common.require(False, "too slow")


def test_the_lengths_are_those_of_the_trace():
    lengths = read_lengths()
    assert lengths.shape == (502, 2)
    assert lengths[0].tolist() == [6758, 500]
    assert lengths.min() >= 1


@pytest.mark.long
def test_decode_loop_agrees_with_the_contiguous_one(tmp_path, monkeypatch):
    file = tmp_path / "decode_loop.json"
    monkeypatch.setattr(sys, "argv", ["decode_loop", "--quick", "--json", str(file)])
    decode_loop.main()
    result = json.loads(file.read_text())
    assert result["benchmark"] == "decode_loop"
    assert {"step_ratio", "attention_ratio", "bookkeeping_us"} <= set(result["metrics"])
    assert all(value > 0 for value in result["metrics"].values())


def test_attention_agrees_with_contiguous_attention():
    shape = attention.Shape(rows=2, length=64, heads=4, kv_heads=2, width=8, layers=2)
    metrics = attention.measure("tiny", shape, rounds=1)
    assert all(value > 0 for value in metrics.values())


@pytest.mark.slow
def test_bookkeeping_evicts_stores_and_merges(monkeypatch):
    for name, value in {"ROWS": 32, "LENGTH": 256, "STEPS": 32, "CALLS": 2}.items():
        monkeypatch.setattr(bookkeeping, name, value)
    assert bookkeeping.checked_steps(1024, repeats=1) > 0
    assert bookkeeping.measure_calls(1024, repeats=1) > 0
    assert bookkeeping.measure_admit(1024, repeats=1) > 0


@pytest.mark.long
def test_memory_counts_unused_slots(monkeypatch):
    for name, value in {"ROWS": 2, "NUM_BLOCKS": 256, "MAX_UNUSED": 1.0}.items():
        monkeypatch.setattr(memory, name, value)
    with jax.numpy_rank_promotion("allow"):
        metrics = memory.unused(np.array([[700, 60], [520, 90], [1024, 33]]))
    assert 0 < metrics["unused_percent"] < 4


@pytest.mark.long
def test_the_decode_loop_updates_the_pools_in_place():
    metrics = memory.in_place()
    assert metrics["step_temporaries_percent_of_pool"] < 5
    assert metrics["donated_percent_of_pool"] >= 100
