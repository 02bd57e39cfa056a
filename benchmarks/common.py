# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: their command line, timing, and the report."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
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


def report(
    benchmark: str,
    metrics: dict[str, float],
    file: pathlib.Path | None = None,
    details: dict[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Prints the metrics, and writes them with where they were measured; details are figures more, notes text."""
    result = {"benchmark": benchmark, **where(), **(notes or {})}
    for kind, values in (("metrics", metrics), ("details", details or {})):
        if values:
            result[kind] = {name: rounded(value) for name, value in values.items()}
            width = max(map(len, values))
            for name, value in result[kind].items():
                print(f"  {name:<{width}}  {value:>12,.6g}")
    write(result, file)


def show_bars(metrics: Mapping[str, float], at_least: Mapping[str, float], at_most: Mapping[str, float]) -> None:
    """Prints each metric beside its bar."""
    print(f"  {'':22} {'':>9} {'bar':>8}")
    for name, value in metrics.items():
        bar = at_most.get(name, at_least.get(name, 0))
        is_met = value <= bar if name in at_most else value >= bar
        print(f"  {name:22} {value:9.4f} {'<=' if name in at_most else '>='} {bar:5g}  {'met' if is_met else 'missed'}")


def where() -> dict[str, Any]:
    """The machine and the versions, for every result."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {"versions": {"python": platform.python_version(), **versions}, "cpu": _cpu()}


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
