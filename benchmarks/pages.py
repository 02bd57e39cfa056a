# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of docs/performance, and README's table of figures, from results of the benchmarks.

    all of it        make bench
    the pages alone  python -m benchmarks.pages --results out/bench

A page has a section for each benchmark: its docstring, its command, a table by its `BARS`, and its `NOTES`. Benchmarks
without a result have rows that say so. Nobody edits the pages.
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
from types import ModuleType

from benchmarks import gpu_page, replay
from benchmarks.common import Bar

ROOT = pathlib.Path(__file__).parents[1]
GROUPS = {
    "Metadata and verbs": ("bookkeeping", "compile", "memory"),
    "Attention and loops": ("attention", "decode_loop", "scan", "sampling", "kinds"),
    "Batches, servers and training": ("serving", "engine", "replicas", "replay", "rollout"),
    "Stores and moves": ("stores", "offload"),
    "Readers of events": ("events",),
    "Traces and policies": ("research", "published"),
}
ON_GPU = ("gpu_model",)
FIRST = (
    ("bookkeeping", "step_us"), ("bookkeeping", "admit_us"), ("memory", "unused_in_flight_percent"),
    ("serving", "loop_over_python"), ("attention", "large_2k_over_contiguous"), ("compile", "first_warm_s"),
)  # fmt: skip
WRITTEN = "<!-- `python -m benchmarks.pages` has written this page from results of `make bench`: edit no figure. -->"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
INDEX = """
All figures come from commands of the repository, which also check the answers. `make bench` runs them and writes these
pages; a benchmark has its bars next to the code that measures. Each page names the command of each table.

- **x** is a ratio: both sides are measured in turns in one run, so that a busy machine is busy for both. "A, to B" is
  the value of A divided by that of B.
- Seconds and rates are those of one machine, which others share: they varied by a third from run to run.
- **at least** and **at most** are the bar of a row, followed by met or missed. An aim is the value to come to. Rows
  without a bar are for information.
- Bars are the same on every machine. A missed one is shown as missed, with the reason below its table, if it is clear.
"""
PAGES = """
[On a CPU](cpu.md) has the benchmarks that need no GPU. [On a GPU](gpu.md) has compiled, modelled and measured figures,
apart.

```{toctree}
:hidden:

cpu
gpu
```
"""


class Results:
    """The results of benchmarks, by name, as they are in a folder.

    Args:
      folder: has a file NAME.json of each that was run.
    """

    def __init__(self, folder: pathlib.Path):
        files = {path.stem: path for path in folder.glob("*.json")}
        self.found = {name: json.loads(path.read_text()) for name, path in sorted(files.items())}

    def values(self, name: str) -> dict[str, float]:
        """The metrics and details of a benchmark; none if it was not run."""
        result = self.found.get(name, {})
        return result.get("metrics", {}) | result.get("details", {})

    def command(self, name: str) -> str:
        """The command that has given the result, or would give it."""
        return self.found.get(name, {}).get("command", f"python -m benchmarks.{name}")

    def run_at(self, name: str) -> str:
        """The time and the machine of a result, in a line; nothing if there is none."""
        if name not in self.found:
            return ""
        result = self.found[name]
        versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
        return f"Run on {result['date'][:10]}: {versions}; {result['cpu']}."

    def cells(self, name: str, metric: str) -> tuple[str, str]:
        """A metric's value, and its bar with the verdict."""
        bar, values = module(name).BARS[metric], self.values(name)
        if metric not in values:
            return "not measured" if name in self.found else "not run", bar.bounds()
        return bar.shown(values[metric]), with_verdict(bar, values[metric])


@functools.cache
def module(name: str) -> ModuleType:
    """A benchmark."""
    return importlib.import_module(f"benchmarks.{name}")


def with_verdict(bar: Bar, value: float) -> str:
    """The bounds of a bar and the verdict on a value."""
    verdict = bar.verdict(value)
    verdict = "**missed**" if verdict == "missed" else verdict
    return ": ".join(part for part in (bar.bounds(), verdict) if part)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [[*head], *([*row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""]) for cells in lines)


def about(name: str) -> str:
    """The docstring of a benchmark, as paragraphs of a page."""
    paragraphs = (inspect.getdoc(module(name)) or "").split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(one.split()), 120) for one in paragraphs)


def title(name: str) -> str:
    """The heading of a benchmark."""
    return name.replace("_", " ").capitalize().replace("Gpu", "GPU")


def section(name: str, results: Results, level: int = 3) -> str:
    """The section of a benchmark."""
    rows = ([bar.what, *results.cells(name, metric)] for metric, bar in module(name).BARS.items())
    baseline = results.found.get(name, {}).get("baseline")
    parts = [
        f"{'#' * level} {title(name)}",
        about(name),
        f"```sh\n{results.command(name)}\n```",
        table(("", "value", "bar"), rows),
        results.run_at(name) + (f" The baseline is {baseline}." if baseline else ""),
        getattr(module(name), "NOTES", "").strip(),
    ]
    return "\n\n".join(part for part in parts if part)


def verdicts(name: str, results: Results) -> str:
    """The number of bars of a benchmark that are met."""
    bars, values = module(name).BARS, results.values(name)
    found = [bar.verdict(values[metric]) for metric, bar in bars.items() if metric in values]
    missed, held = found.count("missed"), sum(bool(verdict) for verdict in found)
    if name not in results.found:
        return "not run"
    return "no bar" if not held else f"{held - missed} of {held} met"


def index_page(results: Results) -> str:
    """The first page: reading the others, and a list of the benchmarks."""
    pages = [("cpu", names) for names in GROUPS.values()] + [("gpu", ON_GPU)]
    rows = []
    for page, name in ((page, name) for page, names in pages for name in names):
        anchor = title(name).lower().replace(" ", "-")
        rows.append([f"[{title(name)}]({page}.md#{anchor})", f"`make bench-{name}`", verdicts(name, results)])
    parts = ["# Performance", INDEX.strip(), table(("benchmark", "command", "bars"), rows), PAGES.strip()]
    return "\n\n".join(parts)


def cpu_page(results: Results, picture: str | None) -> str:
    """The page of all benchmarks that need no GPU."""
    parts = ["# On a CPU", "[Performance](index.md) says how to read the tables."]
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        for name in names:
            parts.append(section(name, results))
            if name == "replay" and picture:
                parts.append(f"![Bars of each figure for each way to reserve blocks]({picture})")
    return "\n\n".join(parts)


def readme(text: str, results: Results) -> str:
    """README with its table of figures, between the markers; as it is without them."""
    rows = ([module(name).BARS[metric].what, results.cells(name, metric)[0], f"`{results.command(name)}`"]
            for name, metric in FIRST)  # fmt: skip
    machines = dict.fromkeys(results.run_at(name) for name, _ in FIRST)
    new = "\n\n".join([table(("", "value", "command"), rows), textwrap.fill(" ".join(machines), 120)])
    return re.sub(rf"(?<={BEGIN}\n).*?(?={END})", lambda _: f"{new}\n", text, flags=re.S)


def write(results: Results, docs: pathlib.Path) -> None:
    """Writes the pages; and the picture of `replay`, if there is a result."""
    docs.mkdir(parents=True, exist_ok=True)
    picture = docs / "replay.png"
    if "replay" in results.found:
        replay.plot(replay.by_way(results.values("replay")), picture)
    pages = {
        "index": index_page(results),
        "cpu": cpu_page(results, picture.name if picture.exists() else None),
        "gpu": gpu_page.page([section(name, results) for name in ON_GPU], table),
    }
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
    missing = [name for names in (*GROUPS.values(), ON_GPU) for name in names if name not in results.found]
    print(
        f"{args.docs}: written from {len(results.found)} results" + (f"; not run: {', '.join(missing)}" * bool(missing))
    )


if __name__ == "__main__":
    main()
