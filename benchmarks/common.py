# SPDX-License-Identifier: Apache-2.0
"""The frame of a benchmark: its command line, sizes, turns, checks of answers, bars and report.

A benchmark is a module with a decorated function at its end. It runs as a program:

    @benchmark(BARS, {"rows": (32, 4)}, rounds=(40, 1))
    def measure(size):
        took, _ = in_turns({"paged": paged, "dense": dense}, size.rounds, same=np.array_equal)
        return {"paged_over_dense": took["paged"].wall / took["dense"].wall}
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import inspect
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
Figures = Mapping[str, Any]
# What is timed: a call without arguments, or (begin, run), where begin makes the argument of run anew, untimed.
Program = Callable[[], Any] | tuple[Callable[[], Any], Callable[[Any], Any]]


class Size(types.SimpleNamespace):
    """The sizes of a run, by name. Equal to itself alone, so it is static under jit."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        return self is other

    def replace(self, **values: Any) -> Size:
        """A copy with other values."""
        return Size(**{**vars(self), **values})


class Benchmark(NamedTuple):
    """The function, bars and sizes of a module. `benchmark` makes it."""

    name: str
    measure: Callable[[Size], Figures | Iterable[Figures]]
    bars: Mapping[str, Bar]
    sizes: Mapping[str, Any]
    strict: bool

    def size(self, quick: bool = False, **values: Any) -> Size:
        """The sizes of a full or a quick run. `values` replace some of them."""
        chosen = {name: size[quick] if isinstance(size, tuple) else size for name, size in self.sizes.items()}
        return Size(**{**chosen, "quick": quick, **values})

    def run(self, size: Size) -> dict[str, Any]:
        """All figures and notes of a run."""
        measured = self.measure(size)
        parts = [measured] if isinstance(measured, Mapping) else measured
        return {name: value for part in parts for name, value in part.items()}

    def main(self, arguments: list[str] | None = None) -> None:
        """Runs a command line: measures, prints and writes the figures, and ends with an error on a missed bar."""
        about = inspect.getdoc(inspect.getmodule(self.measure))
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=about)
        parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the result there")
        parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast; no bar")
        for name, full in vars(self.size()).items():  # those that a line can say
            option = f"--{name.replace('_', '-')}"
            kind = int if full is None else type(full)
            if kind is bool and name != "quick":
                parser.add_argument(option, action="store_true", default=None)
            elif kind in (int, float, str) or issubclass(kind, pathlib.Path):
                parser.add_argument(option, type=kind, help=f"in place of {full}")
            elif kind is list:
                parser.add_argument(option, type=type(full[0]), nargs="+", help=f"in place of {full}")
        args = vars(parser.parse_args(arguments))
        file = args.pop("json")
        quick = args.pop("quick")
        figures = self.run(self.size(quick, **{name: value for name, value in args.items() if value is not None}))
        report(self.name, figures, file, self.bars)
        if self.strict and not quick:
            require_bars(figures, self.bars)


BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    bars: Mapping[str, Bar],
    sizes: Mapping[str, Any] | None = None,
    *,
    rounds: tuple[int, int] | None = None,
    strict: bool = False,
) -> Callable[[Callable[[Size], Any]], Benchmark]:
    """Makes a benchmark of a function, and runs it if its module is the program.

    The function gets a `Size`, and returns or yields figures by name, together with texts to report. It calls `require`
    to end on a wrong answer. The module's docstring begins the benchmark's section of the pages.

    Args:
      bars: a row of the pages for each figure to show.
      sizes: {name: (value, value of a quick run)}, or a single value for both. Values which can be written on the
        command line are options of the command.
      rounds: the size `rounds`: the number of times each program is timed.
      strict: whether a missed bar ends the benchmark with an error.
    """

    def decorate(measure: Callable[[Size], Any]) -> Benchmark:
        name = pathlib.Path(inspect.getfile(measure)).stem
        all_sizes = {**(sizes or {}), **({} if rounds is None else {"rounds": rounds})}
        made = BENCHMARKS[name] = Benchmark(name, measure, bars, all_sizes, strict)
        if measure.__module__ == "__main__":
            measure.__globals__[measure.__name__] = made  # as the functions of the module know it
            made.main()
        return made

    return decorate


class Took(NamedTuple):
    """Seconds of a call: the median CPU time of all cores, the median wall time, and the minimum wall time."""

    cpu: float
    wall: float
    least: float


def in_turns(
    programs: Mapping[str, Program], rounds: int, same: Callable[[Any, Any], Any] | None = None
) -> tuple[dict[str, Took], dict[str, Any]]:
    """Times programs in turns. The first round compiles, and does not count.

    Args:
      programs: programs by name.
      rounds: the number of times each program is timed.
      same: (answer, answer) -> whether they agree. The benchmark ends unless all answers agree with the first.

    Returns:
      The times, and the last result of each program.
    """
    calls: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    results: dict[str, Any] = {}
    for round_index in range(rounds + 1):
        for name, program in programs.items():
            begin, run = program if isinstance(program, tuple) else (tuple, lambda _, run=program: run())
            results.pop(name, None)  # before the next one takes as much memory
            state = jax.block_until_ready(begin())
            cpu = time.process_time()
            wall = time.perf_counter()
            results[name] = jax.block_until_ready(run(state))
            if round_index:
                calls[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    if same is not None:
        require_same(results, same)
    by_clock = {name: list(zip(*seconds, strict=True)) for name, seconds in calls.items()}
    took = {name: Took(*map(statistics.median, both), min(both[1])) for name, both in by_clock.items()}
    return took, results


def require_same(answers: Mapping[str, Any], same: Callable[[Any, Any], Any]) -> None:
    """Ends a benchmark unless all answers agree with the first."""
    (first, wanted), *others = answers.items()
    for name, answer in others:
        require(bool(same(wanted, answer)), f"{name} and {first}: their answers differ")


def times(took: Mapping[str, Took], unit: str, clock: str = "wall", calls: float = 1) -> dict[str, float]:
    """Figures NAME_UNIT of each program, divided by the number of calls. The unit ends with s, ms or us."""
    scale = {"s": 1, "ms": 1e3, "us": 1e6}[unit.split("_")[-1]] / calls
    return {f"{name}_{unit}": scale * getattr(timing, clock) for name, timing in took.items()}


def apart(module: str, function: str, *args: Any, **environment: str) -> Any:
    """The result of a benchmark's function, called in a separate process. Arguments and result pass as JSON."""
    code = f"import json, sys; from benchmarks import {module} as m; "
    code += f"print(json.dumps(m.{function}(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps(args)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    require(done.returncode == 0, f"{function} in a process of its own: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def resident() -> int:
    """Bytes of this process in memory."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def require(fact: bool, otherwise: str) -> None:
    """Ends a benchmark with wrong answers, or with a broken bound."""
    if not fact:
        raise SystemExit(f"benchmark failed: {otherwise}")


class Bar(NamedTuple):
    """A row of a benchmark's table: a metric, its unit, and its bound. Both bounds of None mean there is no bound.

    A "share" is shown in percent. The aim is a goal for later, in the direction of the bound. It is an upper limit if
    there is no bound.
    """

    what: str
    unit: str = "x"
    at_least: float | None = None
    at_most: float | None = None
    aim: float | None = None

    def reaches(self, value: float, bound: float) -> bool:
        """Whether a value meets a bound."""
        return value <= bound if self.at_least is None else value >= bound

    def verdict(self, value: float) -> str:
        """Returns "met", "missed" or "aim reached", or an empty string without a bound."""
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
        """A value with its unit, in three digits, or in more if it would look like a bound it does not reach."""
        scale, unit = (100, "%") if self.unit == "share" else (1, self.unit)
        bounds = {round(scale * bound, 9) for bound in self[2:] if bound is not None and bound != value}
        value = round(scale * value, 9)
        least = max(2 - math.floor(math.log10(abs(value))), 0) if value else 0
        decimals = next((n for n in range(least, least + 4) if round(value, n) not in bounds), least + 3)
        text = f"{value:,.{decimals}f}"
        exact = f"{value:,.9f}".rstrip("0").rstrip(".")
        return f"{min(text, exact, key=len)}{unit if unit in ('x', '/s', '') else f' {unit}'}"


def require_bars(metrics: Figures, bars: Mapping[str, Bar]) -> None:
    """Ends a benchmark with a missed bar."""
    values = {name: (metrics[name], bar) for name, bar in bars.items() if name in metrics}
    missed = {name: (value, bar) for name, (value, bar) in values.items() if bar.verdict(value) == "missed"}
    lines = [f"{name} is {bar.shown(value)}, the bar {bar.bounds()}" for name, (value, bar) in missed.items()]
    require(not lines, "; ".join(lines))


def report(
    name: str, figures: Figures, file: pathlib.Path | None = None, bars: Mapping[str, Bar] | None = None
) -> None:
    """Prints figures with their bars, and writes them together with the machine and the versions.

    Args:
      name: name of the benchmark.
      figures: numbers are rounded to six digits. Figures with a bar are the metrics, in the order of the bars, and the
        others are details. Texts are written as they are.
      file: file for the result. None writes nothing.
      bars: bars by figure.
    """
    bars = bars or {}
    numbers = {name: rounded(value) for name, value in figures.items() if isinstance(value, int | float | np.number)}
    notes = {figure: value for figure, value in figures.items() if figure not in numbers}
    command = re.sub(r" --json[ =]\S+", "", " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]))
    result: dict[str, Any] = {"benchmark": name, "command": command, **where(), **notes}
    metrics = {figure: numbers[figure] for figure in bars if figure in numbers}
    details = {figure: value for figure, value in numbers.items() if figure not in bars}
    width = max(map(len, numbers), default=0)
    for kind, values in (("metrics", metrics), ("details", details)):
        if values:
            result[kind] = values
        for figure, value in values.items():
            bounds = f"{bars[figure].bounds():24} {bars[figure].verdict(value)}" if figure in bars else ""
            print(f"  {figure:<{width}}  {value:>12,.6g}  {bounds}".rstrip())
    rows = {
        figure: {**bars[figure]._asdict(), "verdict": bars[figure].verdict(value)} for figure, value in metrics.items()
    }
    write(result | ({"rows": rows} if rows else {}), file)


def where() -> dict[str, Any]:
    """The time, the processor with the cores of this process, and the versions."""
    info = pathlib.Path("/proc/cpuinfo")
    cpu = platform.processor() or platform.machine()
    if info.exists() and (model := re.search(r"^model name\s*: (.*)$", info.read_text(), re.M)):
        cpu = model[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": date, "versions": {"python": platform.python_version(), **versions}, "cpu": f"{cpu}, {cores} cores"}


def rounded(value: float) -> float:
    """Rounds to six digits."""
    return float(f"{value:.6g}")


def write(result: dict[str, Any], file: pathlib.Path | None) -> None:
    """Writes a result as JSON, if there is a file."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")
        new.write_text(json.dumps(result, indent=2) + "\n")
        new.replace(file)  # at once: who is killed meanwhile leaves the old one whole
