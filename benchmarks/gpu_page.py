# SPDX-License-Identifier: Apache-2.0
"""The page of docs/performance about GPUs, for `benchmarks.pages`: compiled, modelled and measured figures."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import gpu_first, kernels
from benchmarks.common import Bar

ROOT = pathlib.Path(__file__).parents[1]
STEPS, KERNELS = (ROOT / f"tests/data/gpu_{name}.json" for name in ("step_budgets", "budgets"))
MEASURED = ROOT / gpu_first.RESULTS / gpu_first.FILE
Table = Callable[[Sequence[str], Any], str]
INTRODUCTION = """
# On a GPU

[The decode loop on a GPU](../ideas/gpu.md) says what these programs are, which caches have fused transitions, and how
kernels are checked without a GPU. The figures are of three kinds, and a compiled or modelled one is no measurement:

- **compiled**: counts and limits that tests hold, of programs compiled for a GPU on a machine without one;
- **modelled**: computed from compiled programs and stated constants;
- **measured**: those of a GPU that ran the programs.
"""
COMPILED = """
## Compiled

### Kernels and stops of a decode step

`make gpu-counts` compiles the programs for an H200 and holds their counts at these, which are in
`tests/data/gpu_step_budgets.json`. A host stop is a point at which the device waits for the host.
"""
AFTER_STEPS = """
The rows are of caches whose transitions are fused. Others run many kernels, and stop at each of their loops.

### Attention kernels

`make gpu-kernels` compiles the kernels and holds these limits (`tests/data/gpu_budgets.json`); it prints the counts.
The table has decode for an H200, heads of 128.
"""
AFTER_KERNELS = """
Kernels are also compiled for an A100, and whole steps for four GPUs (`make test-all`): no spills, no copy of a pool,
asynchronous copies, tensor cores. Around Mosaic's prefill of 4,096 tokens in 32 rows XLA packs queries and results, in
10 launches with 83 MB of temporaries (`python -m tests.kernels.gpu_compile h200 prefill_16`; no bar yet).

Without Pallas's Triton, which is deprecated, a small Llama's decode step is 134 kernels and stops 9 times for the host,
in place of 68 and none (`pytest -m slow -s tests/kernels/test_no_triton.py` prints both).

## Modelled
"""
MEASURE = """
## Measured

`make gpu` measures on a GPU. These bars are for an H200:
"""
# Rows of the first table, by program and part.
PARTS = {
    "extend_commit_1 all": "`extend` and `commit` of 128 rows, 1 token each",
    "extend_commit_16 all": "`extend` and `commit` of 128 rows, 16 tokens each",
    "block_16 block": "around a block of 16 steps: capacity, copies, `commit`, `trim`, log",
    "block_16 step": "in each step except the model: view, choice, stop check",
    **{
        f"step_8b_{rows} middle": f"a layer of Llama 3 8B's shapes, {rows} row{'s' * (rows > 1)}"
        for rows in (1, 32, 128)
    },
    **{f"step_8b_{rows} all": f"a step of three such layers, {rows} row{'s' * (rows > 1)}" for rows in (1, 32, 128)},
    "loop_buffered block": "a loop with command buffers, around a block of 16 steps",
    "loop_buffered step": "a loop with command buffers, in each step",
}
# Rows of the second table: the field of a budget, and whether it is a least number.
LIMITS = {
    "instructions_32kb": ("warp instructions for 32 KB of K/V", False),
    "loop_global_loads": ("loads of the block table in the loop", False),
    "loop_byte_loads": ("loads of single bytes from shared memory in the loop", False),
    "loop_slow_conversions": ("slow conversions in the loop", False),
    "loop_in_flight": ("groups of asynchronous copies that go on while the loop waits", True),
    "resident": ("programs that a multiprocessor runs at once", True),
}
DTYPES = {"bf16": "16", "int8": "int8", "fp8": "fp8"}


def counts(table: Table) -> str:
    """The kernels and stops that `make gpu-counts` holds, of the newest jaxlib."""
    budgets = json.loads(STEPS.read_text())
    newest = max(budgets["budgets"], key=lambda version: [int(part) for part in version.split(".")])

    def cells(part: str) -> list[str]:
        found, bars = budgets["budgets"][newest][part], budgets["bars"].get(part, {})
        shown = []
        for kind, name in (("kernels", "kernels"), ("stops", "stops")):
            if kind in bars:
                bar = Bar("", "", at_most=bars[kind]["bar"], aim=bars[kind].get("aim"))
                shown.append(f"{name} {bar.bounds()}: {bar.verdict(found[kind])}")
        return [str(found["kernels"]), str(found["stops"]), "; ".join(shown)]

    rows = ([what, *cells(part)] for part, what in PARTS.items())
    return f"{table(('', 'kernels', 'host stops', 'bar'), rows)}\n\nOf jaxlib {newest}."


def limits(table: Table) -> str:
    """The limits that `make gpu-kernels` holds."""
    budgets = json.loads(KERNELS.read_text())
    held = {
        dtype: budgets.get(f"decode_{name} decode_attention", {})
        | budgets.get(f"h200 decode_{name} decode_attention", {})
        for dtype, name in DTYPES.items()
    }

    def cell(dtype: str, field: str, least: bool) -> str:
        return f"{'at least' if least else 'at most'} {held[dtype][field]:,}" if field in held[dtype] else ""

    rows = ([what, *(cell(dtype, field, least) for dtype in DTYPES)] for field, (what, least) in LIMITS.items())
    return table(("", *DTYPES), rows)


def measured(table: Table) -> str:
    """The bars of the kernels, with the figures of a GPU if there are some; and the summary of its sections."""
    done = json.loads(MEASURED.read_text())["sections"] if MEASURED.exists() else {}
    figures = {
        (who, metric): value
        for one in done.values()
        for who, metrics in one.get("metrics", {}).items()
        for metric, value in metrics.items()
    }
    rows = []
    for (who, metric), bar in kernels.BARS.items():
        value = figures.get((who, metric))
        text = "not measured" if value is None else f"{bar.shown(value)}: {bar.verdict(value)}"
        rows.append([f"`{metric}`", who, text, bar.bounds()])
    shown = table(("metric", "by", "value", "bar"), rows)
    if not done:
        return f"{shown}\n\n**Nothing is measured yet.** No GPU has run these kernels, nor the programs above."
    lines = gpu_first.Watch(MEASURED, [], 0).summary(gpu_first.sections(quick=False))
    return "\n".join([shown, "\n```text", *lines, "```"])


def page(modelled: Sequence[str], table: Table) -> str:
    """The page; `modelled` are sections of benchmarks that model."""
    parts = [
        INTRODUCTION, COMPILED, counts(table), AFTER_STEPS, limits(table), AFTER_KERNELS, *modelled, MEASURE,
        measured(table),
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts)
