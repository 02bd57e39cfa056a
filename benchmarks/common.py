# SPDX-License-Identifier: Apache-2.0
"""Command line, timing, bars and report of the benchmarks."""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


def parse(benchmark: str, about: str | None, add: Callable[[argparse.ArgumentParser], Any] | None = None):
    """The command line of a benchmark: --json, and what `add` adds."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}", description=about)
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the result there")
    if add is not None:
        add(parser)
    return parser.parse_args()


def best_of(run: Callable[..., Any], make_args: Callable[[], tuple] = tuple, repeats: int = 5) -> tuple[float, Any]:
    """The least seconds of several calls, and the last result; the first call, which compiles, does not count.

    Args:
      run: what to time.
      make_args: makes its arguments anew for each call, outside the timing: they may be donated.
      repeats: calls that count.
    """
    result = jax.block_until_ready(run(*make_args()))
    seconds = float("inf")
    for _ in range(repeats):
        args = jax.block_until_ready(make_args())
        start = time.perf_counter()
        result = jax.block_until_ready(run(*args))
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, result


class Took(NamedTuple):
    """Seconds of a call: of all cores together, and by the clock on the wall."""

    cpu: float
    wall: float


def in_turns(
    programs: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]], rounds: int
) -> tuple[dict[str, Took], dict[str, Any]]:
    """Median seconds of programs that take turns, and what each returned last.

    Each is (begin, run): begin makes the argument of run anew, outside the timing, since it may be donated. The first
    round, which compiles, does not count.
    """
    took: dict[str, list[Took]] = {name: [] for name in programs}
    results: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, (begin, run) in programs.items():
            results.pop(name, None)  # before the next one takes as much memory
            state = jax.block_until_ready(begin())
            cpu, wall = time.process_time(), time.perf_counter()
            results[name] = jax.block_until_ready(run(state))
            if number:
                took[name].append(Took(time.process_time() - cpu, time.perf_counter() - wall))
    return {name: Took(*map(statistics.median, zip(*calls, strict=True))) for name, calls in took.items()}, results


def require(fact: bool, otherwise: str) -> None:
    """Ends a benchmark whose answers are wrong or whose bound is broken."""
    if not fact:
        raise SystemExit(f"benchmark failed: {otherwise}")


class Bar(NamedTuple):
    """A row of a benchmark's table: a metric in words, and the bound that it has to keep, if there is one.

    Attributes:
      what: the metric, in a line.
      unit: after its value; "share" for a value that is shown in percent.
      at_least, at_most: the bound; None for both: no bound.
      aim: the value to come to, in the direction of the bound; downwards if there is none.
    """

    what: str
    unit: str = "x"
    at_least: float | None = None
    at_most: float | None = None
    aim: float | None = None

    def reaches(self, value: float, bound: float) -> bool:
        """Whether a value is as good as a bound."""
        return value <= bound if self.at_least is None else value >= bound

    def verdict(self, value: float) -> str:
        """Met or missed; "aim reached" where that is more; nothing where there is no bound."""
        bound = self.at_most if self.at_least is None else self.at_least
        if bound is not None and not self.reaches(value, bound):
            return "missed"
        if self.aim is not None and self.reaches(value, self.aim):
            return "aim reached"
        return "" if bound is None else "met"

    def bounds(self) -> str:
        """The bound and the aim, in words."""
        named = {"at least": self.at_least, "at most": self.at_most, "aim": self.aim}
        return ", ".join(f"{name} {self.shown(value)}" for name, value in named.items() if value is not None)

    def shown(self, value: float) -> str:
        """A value with its unit: three digits, and more where it would look like a bound that it is not."""
        scale, unit = (100, "%") if self.unit == "share" else (1, self.unit)
        bounds = {round(scale * bound, 9) for bound in self[2:] if bound is not None and bound != value}
        value = round(scale * value, 9)
        least = max(2 - math.floor(math.log10(abs(value))), 0) if value else 0
        decimals = next((n for n in range(least, least + 4) if round(value, n) not in bounds), least + 3)
        number, exact = f"{value:,.{decimals}f}", f"{value:,.9f}".rstrip("0").rstrip(".")
        return f"{min(number, exact, key=len)}{unit if unit in ('x', '/s', '') else f' {unit}'}"


def require_bars(metrics: Mapping[str, float], bars: Mapping[str, Bar]) -> None:
    """Ends a benchmark that misses a bar."""
    values = {name: (metrics[name], bar) for name, bar in bars.items() if name in metrics}
    missed = {name: one for name, one in values.items() if one[1].verdict(one[0]) == "missed"}
    lines = [f"{name} is {bar.shown(value)}, the bar {bar.bounds()}" for name, (value, bar) in missed.items()]
    require(not lines, "; ".join(lines))


def report(
    benchmark: str,
    metrics: dict[str, float],
    file: pathlib.Path | None = None,
    details: dict[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
    bars: Mapping[str, Bar] | None = None,
) -> None:
    """Prints the metrics with their bars, and writes them with where they were measured.

    Args:
      benchmark: its name.
      metrics: rounded to six digits.
      file: of the result; None: nowhere.
      details: figures more.
      notes: text, by name.
      bars: of metrics and details.
    """
    result, bars = {"benchmark": benchmark, "command": _command(benchmark), **where(), **(notes or {})}, bars or {}
    for kind, values in (("metrics", metrics), ("details", details or {})):
        if values:
            result[kind] = {name: rounded(value) for name, value in values.items()}
            width = max(map(len, values))
            for name, value in result[kind].items():
                bounds = f"{bars[name].bounds():24} {bars[name].verdict(value)}" if name in bars else ""
                print(f"  {name:<{width}}  {value:>12,.6g}  {bounds}".rstrip())
    values = result.get("metrics", {}) | result.get("details", {})
    found = {name: bar for name, bar in bars.items() if name in values}
    rows = {name: {**bar._asdict(), "verdict": bar.verdict(values[name])} for name, bar in found.items()}
    write(result | ({"rows": rows} if rows else {}), file)


def _command(benchmark: str) -> str:
    """The command line, without the file of the result."""
    return re.sub(r" --json[ =]\S+", "", " ".join(["python -m", f"benchmarks.{benchmark}", *sys.argv[1:]]))


def where() -> dict[str, Any]:
    """The time, the machine and the versions, for every result."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": date, "versions": {"python": platform.python_version(), **versions}, "cpu": _cpu()}


def rounded(value: float) -> float:
    """To six digits."""
    return float(f"{value:.6g}")


def write(result: dict[str, Any], file: pathlib.Path | None) -> None:
    """Writes a result as JSON, if there is a file to write it to."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")
        new.write_text(json.dumps(result, indent=2) + "\n")
        new.replace(file)  # at once: who is killed meanwhile leaves the old one whole


def _cpu() -> str:
    """The processor's name and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"
