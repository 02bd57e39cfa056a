# SPDX-License-Identifier: Apache-2.0
"""Simulators of a trace against caches in plain Python: LRU at 1,000 sizes at once, and Belady's bound at 64.

The trace is the whole conversation trace of Mooncake where it is there (`benchmarks/trace.py` says where), else its
first 2,000 requests; the report says which. Both sides answer for every single request, and the answers are compared.

`lru_curve_x`: `lru_curve` from the trace on, nothing prepared, to an OrderedDict for each size. That is timed at 10
sizes spread over all, and counted 100 times. `belady_x`: `belady` likewise, compiled before, to a heap for each size.
The heap is the fastest that we know, of next uses with the number of their blocks, which are found beforehand; one of
single blocks, as the tests have it, takes some 40 times as long. All are medians of 5 rounds, in which they take turns.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from benchmarks import common
from benchmarks.trace import TRACE, WHOLE, read_blocks
from kvjax.research import Hits, Trace, belady, lru_curve
from tests.oracle import research as oracle

BARS = {"lru_curve_x": 300, "belady_x": 2.5}


class Size(NamedTuple):
    """Requests of the trace, None for all; sizes of both rows, and those timed in plain Python; rounds."""

    requests: int | None = None
    lru_sizes: int = 1000
    lru_timed: int = 10
    belady_sizes: int = 64
    rounds: int = 5


QUICK = Size(300, 20, 4, 4, 1)


def sizes_of(trace: Trace, number: int) -> np.ndarray:
    """i32[number]; from the longest request to all blocks that there are, by equal factors."""
    return np.geomspace(int(trace.lengths.max()), trace.num_ids, number).astype(np.int32)


def require_same(name: str, ours: np.ndarray, theirs: list[list[int]]) -> None:
    """Ends the benchmark unless every request found as many blocks as in plain Python."""
    common.require(np.array_equal(ours, theirs), f"{name}: other hits than in plain Python")


def measure_lru(trace: Trace, size: Size) -> dict[str, float]:
    """Seconds of all sizes, at once and one by one."""
    sizes = sizes_of(trace, size.lru_sizes)
    timed = np.linspace(0, size.lru_sizes - 1, size.lru_timed).astype(np.int32)
    prompts, full = plain(trace), trace.full.tolist()
    programs = {
        "lru_curve": (tuple, lambda _: lru_curve(trace, sizes, "kvjax")),
        "ordered_dict": (tuple, lambda _: [oracle.lru(prompts, full, int(z), "kvjax") for z in sizes[timed]]),
    }
    took, found = common.in_turns(programs, size.rounds)
    curve: Hits = found["lru_curve"]
    require_same("lru_curve", curve.blocks[timed], found["ordered_dict"])
    scale = size.lru_sizes / size.lru_timed
    return {"lru_curve_s": took["lru_curve"].wall, "ordered_dict_s": took["ordered_dict"].wall * scale}


def measure_belady(trace: Trace, size: Size) -> dict[str, float]:
    """Seconds of all sizes, at once and with a heap each."""
    sizes, lengths = sizes_of(trace, size.belady_sizes), trace.lengths.tolist()
    coming = oracle.next_runs(oracle.next_uses(plain(trace)))
    programs = {
        "belady": (tuple, lambda _: belady(trace, sizes)),
        "heap": (tuple, lambda _: [oracle.belady_by_runs(lengths, coming, int(z)) for z in sizes]),
    }
    took, found = common.in_turns(programs, size.rounds)
    bound: Hits = found["belady"]
    require_same("belady", bound.blocks, found["heap"])
    return {"belady_s": took["belady"].wall, "heap_s": took["heap"].wall}


def plain(trace: Trace) -> list[list[int]]:
    """The ids of each prompt."""
    return [trace.blocks(request).tolist() for request in range(len(trace))]


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs; no bar")

    args = common.parse("research", __doc__, options)
    size, path = QUICK if args.quick else Size(), WHOLE if WHOLE.exists() else TRACE
    trace = read_blocks(path, size.requests)
    print(f"research: {len(trace):,} requests of {path.name}, {len(trace.ids):,} blocks, {trace.num_ids:,} ids")
    seconds = measure_lru(trace, size) | measure_belady(trace, size)
    metrics = {
        "lru_curve_x": seconds["ordered_dict_s"] / seconds["lru_curve_s"],
        "belady_x": seconds["heap_s"] / seconds["belady_s"],
    }
    details = seconds | {"requests": len(trace)}
    common.report("research", metrics, args.json, details)
    for name, bar in BARS.items():
        common.require(args.quick or metrics[name] >= bar, f"{name} is {metrics[name]:.3g}, the bar {bar}")


if __name__ == "__main__":
    main()
