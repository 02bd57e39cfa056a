# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of docs/performance, and README's table of figures, from results of the benchmarks.

    all of it        make bench
    the pages alone  python -m benchmarks.pages --results out/bench

The page of all figures has a section for each benchmark: its docstring, its command, a table of its bars, and its
`NOTES`. Rows of a benchmark without a result say "not run". Do not edit the pages.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import pathlib
import re
import textwrap
from collections.abc import Iterable

from benchmarks import gpu_first, kernels, replay
from benchmarks.common import BENCHMARKS, ROOT, Bar, Benchmark

GROUPS = {
    "Metadata and verbs": ("bookkeeping", "compile", "memory"),
    "Attention and loops": (
        "attention",
        "sparse",
        "decode_loop",
        "scan",
        "sampling",
        "constrained",
        "speculation",
        "kinds",
    ),
    "Batches, servers and training": ("serving", "engine", "replicas", "replay", "rollout"),
    "Stores and moves": ("stores", "offload", "host_tier"),
    "Readers of events": ("events",),
    "Traces and policies": ("research",),
    "On a GPU": ("gpu_model",),
}
# The figures that a user asks for; README has the first six.
USUAL = (
    ("bookkeeping", "step_us"), ("bookkeeping", "admit_us"), ("memory", "unused_in_flight_percent"),
    ("serving", "loop_over_python"), ("decode_loop", "step_ratio"), ("compile", "first_warm_s"),
    ("serving", "over_transformers_10m"), ("serving", "reused"), ("engine", "http_x"), ("rollout", "group_x"),
    ("stores", "restart_x"), ("events", "all_listeners_ratio"),
)  # fmt: skip
TEXTS = pathlib.Path(__file__).parent / "data"  # of the first page, and about GPUs
WRITTEN = "<!-- `python -m benchmarks.pages` has written this page from results of `make bench`: edit no figure. -->"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
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


class Results:
    """The results of benchmarks in a folder, as NAME.json, and the file of measurements on a GPU."""

    def __init__(self, folder: pathlib.Path, on_gpu: pathlib.Path = ROOT / gpu_first.RESULTS / gpu_first.FILE):
        files = {path.stem: path for path in folder.glob("*.json")}
        self.found = {name: json.loads(path.read_text()) for name, path in sorted(files.items())}
        self.on_gpu = on_gpu

    def values(self, name: str) -> dict[str, float]:
        """The metrics and details of a benchmark, or none if it was not run."""
        result = self.found.get(name, {})
        return result.get("metrics", {}) | result.get("details", {})

    def command(self, name: str) -> str:
        """The command of the result, or the command to run."""
        return self.found.get(name, {}).get("command", f"python -m benchmarks.{name}")

    def run_at(self, name: str) -> str:
        """The time and the machine of a result, in a line, or an empty string without a result."""
        if name not in self.found:
            return ""
        result = self.found[name]
        versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
        return f"Run on {result['date'][:10]}: {versions}; {result['cpu']}."

    def row(self, name: str, metric: str) -> list[str]:
        """The description of a metric, its value, and its bar with the verdict."""
        bar = of_name(name).bars[metric]
        values = self.values(name)
        if metric not in values:
            return [bar.what, "not measured" if name in self.found else "not run", bar.bounds()]
        verdict = bar.verdict(values[metric]).replace("missed", "**missed**")
        return [bar.what, bar.shown(values[metric]), ": ".join(part for part in (bar.bounds(), verdict) if part)]

    def verdicts(self, name: str) -> str:
        """The number of met bars."""
        values = self.values(name)
        verdicts = [bar.verdict(values[metric]) for metric, bar in of_name(name).bars.items() if metric in values]
        missed = verdicts.count("missed")
        held = sum(map(bool, verdicts))
        if name not in self.found:
            return "not run"
        return "no bar" if not held else f"{held - missed} of {held} met"


@functools.cache
def of_name(name: str) -> Benchmark:
    """The benchmark of this name."""
    importlib.import_module(f"benchmarks.{name}")
    return BENCHMARKS[name]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [[*head], *([*row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""]) for cells in lines)


def paragraphs(*parts: str) -> str:
    return "\n\n".join(part.strip() for part in parts if part.strip())


def title(name: str) -> str:
    """The heading of a benchmark."""
    return name.replace("_", " ").capitalize().replace("Gpu", "GPU")


def link(name: str, page: str = "") -> str:
    """A link to the section of a benchmark."""
    return f"[{title(name)}]({page}#{title(name).lower().replace(' ', '-')})"


def section(name: str, results: Results) -> str:
    """The section of a benchmark."""
    module = inspect.getmodule(of_name(name).measure)
    about = [textwrap.fill(" ".join(text.split()), 120) for text in (inspect.getdoc(module) or "").split("\n\n")]
    baseline = results.found.get(name, {}).get("baseline")
    return paragraphs(
        f"### {title(name)}", *about, f"```sh\n{results.command(name)}\n```",
        table(("", "value", "bar"), (results.row(name, metric) for metric in of_name(name).bars)),
        results.run_at(name) + (f" The baseline is {baseline}." if baseline else ""),
        getattr(module, "NOTES", ""),
    )  # fmt: skip


def usual_page(results: Results) -> str:
    """The first page: the figures which users ask for, and how to read all figures."""
    rows = ([*results.row(name, metric), link(name, "all.md")] for name, metric in USUAL)
    return (TEXTS / "usual.md").read_text().replace("{usual}", table(("", "value", "bar", "of"), rows)).strip()


def all_page(results: Results, picture: str | None) -> str:
    """The page of all figures."""
    names = [name for group in GROUPS.values() for name in group]
    rows = ([link(name), f"`make bench-{name}`", results.verdicts(name)] for name in names)
    parts = ["# All figures", "[Performance](index.md) says how to read the tables."]
    parts.append(table(("benchmark", "command", "bars"), rows))
    for group, members in GROUPS.items():
        parts.append(f"## {group}")
        for name in members:
            parts.append(section(name, results))
            if name == "replay" and picture:
                parts.append(f"![Bars of each figure for each way to reserve blocks]({picture})")
    modelled = parts.pop()
    about = (TEXTS / "gpu.md").read_text()
    tables = {"counts": counts(), "limits": limits(), "modelled": modelled, "measured": measured(results.on_gpu)}
    return paragraphs(*parts, re.sub(r"^\{(\w+)\}$", lambda match: tables[match[1]], about, flags=re.M))


def counts() -> str:
    """The kernels and stops held by `make gpu-counts`, of the newest jaxlib."""
    budgets = json.loads((ROOT / "tests/data/gpu_step_budgets.json").read_text())
    newest = max(budgets["budgets"], key=lambda version: [int(part) for part in version.split(".")])

    def cells(part: str) -> list[str]:
        held = budgets["budgets"][newest][part]
        bars = budgets["bars"].get(part, {})
        shown = []
        for kind in ("kernels", "stops"):
            if kind in bars:
                bar = Bar("", "", at_most=bars[kind]["bar"], aim=bars[kind].get("aim"))
                shown.append(f"{kind} {bar.bounds()}: {bar.verdict(held[kind])}")
        return [str(held["kernels"]), str(held["stops"]), "; ".join(shown)]

    rows = ([what, *cells(part)] for part, what in PARTS.items())
    return f"{table(('', 'kernels', 'host stops', 'bar'), rows)}\n\nOf jaxlib {newest}."


def limits() -> str:
    """The limits held by `make gpu-kernels`."""
    budgets = json.loads((ROOT / "tests/data/gpu_budgets.json").read_text())
    names = {dtype: f"decode_{name} decode_attention" for dtype, name in DTYPES.items()}
    held = {dtype: budgets.get(name, {}) | budgets.get(f"h200 {name}", {}) for dtype, name in names.items()}

    def cell(dtype: str, field: str, least: bool) -> str:
        return f"{'at least' if least else 'at most'} {held[dtype][field]:,}" if field in held[dtype] else ""

    rows = ([what, *(cell(dtype, field, least) for dtype in DTYPES)] for field, (what, least) in LIMITS.items())
    return table(("", *DTYPES), rows)


def measured(file: pathlib.Path) -> str:
    """The bars of the kernels, with the figures and the summary of a GPU, if it has run them."""
    done = json.loads(file.read_text())["sections"] if file.exists() else {}
    figures = {
        (who, metric): value
        for section in done.values()
        for who, metrics in section.get("metrics", {}).items()
        for metric, value in metrics.items()
    }
    rows = []
    for (who, metric), bar in kernels.BARS.items():
        value = figures.get((who, metric))
        text = "not measured" if value is None else f"{bar.shown(value)}: {bar.verdict(value)}"
        rows.append([f"`{metric}`", who, text.replace("missed", "**missed**"), bar.bounds()])
    shown = table(("metric", "by", "value", "bar"), rows)
    if not done:
        return f"{shown}\n\n**Nothing is measured yet.** No GPU has run these kernels, nor the programs above."
    lines = gpu_first.Watch(file, [], 0).summary(gpu_first.sections(quick=False))
    return "\n".join([shown, "\n```text", *lines, "```"])


def readme(text: str, results: Results) -> str:
    """The text with a new table of figures between the markers. A text without markers stays as it is."""
    first = USUAL[:6]
    rows = ([*results.row(name, metric)[:2], f"`{results.command(name)}`"] for name, metric in first)
    machines = dict.fromkeys(results.run_at(name) for name, _ in first)
    new = "\n\n".join([table(("", "value", "command"), rows), textwrap.fill(" ".join(machines), 120)])
    return re.sub(rf"(?<={BEGIN}\n).*?(?={END})", lambda _: f"{new}\n", text, flags=re.S)


def write(results: Results, docs: pathlib.Path) -> None:
    """Writes the pages, and the picture of `replay` if it has a result."""
    docs.mkdir(parents=True, exist_ok=True)
    picture = docs / "replay.png"
    if "replay" in results.found:
        replay.plot(replay.by_way(results.values("replay")), picture)
    pages = {"index": usual_page(results), "all": all_page(results, picture.name if picture.exists() else None)}
    for name, text in pages.items():
        (docs / f"{name}.md").write_text(f"{WRITTEN}\n\n{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "out/bench", help="folder (%(default)s)")
    parser.add_argument("--docs", type=pathlib.Path, default=ROOT / "docs/performance", help="folder (%(default)s)")
    parser.add_argument("--readme", type=pathlib.Path, default=ROOT / "README.md", help="with markers (%(default)s)")
    args = parser.parse_args()
    results = Results(args.results)
    write(results, args.docs)
    args.readme.write_text(readme(args.readme.read_text(), results))
    missing = [name for group in GROUPS.values() for name in group if name not in results.found]
    print(f"{args.docs}: written from {len(results.found)} results; not run: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
