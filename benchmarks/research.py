# SPDX-License-Identifier: Apache-2.0
"""Simulators of a trace against caches in plain Python, which must find the same for every single request.

`lru_curve` and `belady` get the whole conversation trace of Mooncake where its folder is found (`benchmarks/trace.py`),
else its first 2,000 requests. The other simulators get these 2,000; `replay` runs the real verbs, on the first 64
blocks of each prompt. `lru_curve` starts from the trace, nothing prepared; the OrderedDict is timed at 10 of its 1,000
sizes, and counted 100 times. The heaps of `belady` are of next uses with the number of their blocks, which are found
beforehand, the fastest form that was tried; one of single blocks, as the tests have it, takes some 40 times as long.
Times are medians of 5 rounds, in which both sides take turns. Compiling does not count.

Learned policies are compared with LRU by hits, rule "papers", on later requests of the whole trace than those that they
were learned from: means of three splits and three seeds (`benchmarks/learned.py`). Without the whole trace they have no
figures. A second trace is random, and counted in one of another seed. A missed bar ends the benchmark.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from benchmarks import common, learned, simulators
from benchmarks.common import Bar
from benchmarks.simulators import Figures, plain, require_same
from benchmarks.trace import TRACE, WHOLE, read_blocks
from kvjax.research import Hits, Trace, belady, lru_curve
from tests.oracle import research as oracle

CACHES = "64 caches of up to 16,384 blocks"
BARS = {
    "requests": Bar("requests of the trace of `lru_curve` and `belady`", ""),
    "lru_curve_x": Bar("speed of `lru_curve`, 1,000 sizes, to an OrderedDict for each", at_least=300),
    "belady_x": Bar("speed of `belady`, 64 sizes, to a heap for each", at_least=2.5),
    "replay_slower": Bar(f"time of `replay`, {CACHES}, to an OrderedDict for each", at_most=6),
    "replay_growth": Bar("time of a request, caches of up to 65,536 blocks, to 2,048", at_most=2),
    "simulate_lru_x": Bar(f"speed of `simulate`, `lru()`, {CACHES}, to an OrderedDict for each", at_least=1),
    "simulate_lfu_x": Bar(f"speed of `simulate`, `lfu()`, {CACHES}, to a heap for each", at_least=1),
    **learned.BARS,
}
NOTES = """
`belady` is faster on one core (`taskset -c 0`), where several runs gave 14x to 21x, than on two, 3.2x to 3.7x: XLA
divides each gather of 64 numbers among the cores. `replay` is the other way round: 3.4x, and 1.8x on two quiet cores.
"""


class Size(NamedTuple):
    """Requests of the trace, None for all; sizes of both rows, and those timed in plain Python; rounds; the others'."""

    requests: int | None = None
    lru_sizes: int = 1000
    lru_timed: int = 10
    belady_sizes: int = 64
    rounds: int = 5
    caches: simulators.Size = simulators.Size()


QUICK = Size(300, 20, 4, 4, 1, simulators.QUICK)
MEASURES = (simulators.measure_replay, simulators.measure_growth, simulators.measure_simulate)


def sizes_of(trace: Trace, number: int) -> np.ndarray:
    """i32[number]; from the longest request to all blocks that there are, by equal factors."""
    return np.geomspace(int(trace.lengths.max()), trace.num_ids, number).astype(np.int32)


def measure_lru(trace: Trace, size: Size) -> Figures:
    """`lru_curve_x`: all sizes at once, to one by one."""
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
    own, other = took["lru_curve"].wall, took["ordered_dict"].wall * size.lru_sizes / size.lru_timed
    return {"lru_curve_x": other / own}, {"lru_curve_s": own, "ordered_dict_s": other}


def measure_belady(trace: Trace, size: Size) -> Figures:
    """`belady_x`: all sizes at once, to a heap for each."""
    sizes, lengths = sizes_of(trace, size.belady_sizes), trace.lengths.tolist()
    coming = oracle.next_runs(oracle.next_uses(plain(trace)))
    programs = {
        "belady": (tuple, lambda _: belady(trace, sizes)),
        "heap": (tuple, lambda _: [oracle.belady_by_runs(lengths, coming, int(z)) for z in sizes]),
    }
    took, found = common.in_turns(programs, size.rounds)
    bound: Hits = found["belady"]
    require_same("belady", bound.blocks, found["heap"])
    own, other = took["belady"].wall, took["heap"].wall
    return {"belady_x": other / own}, {"belady_s": own, "heap_s": other}


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs; no bar")

    args = common.parse("research", __doc__, options)
    size, path = QUICK if args.quick else Size(), WHOLE if WHOLE.exists() else TRACE
    trace = read_blocks(path, size.requests)
    print(f"research: {len(trace):,} requests of {path.name}, {len(trace.ids):,} blocks, {trace.num_ids:,} ids")
    parts = [measure(trace, size) for measure in (measure_lru, measure_belady)]
    parts += [measure(size.caches) for measure in MEASURES] + [learned.measure(args.quick)]
    metrics, details = (
        {name: value for part in side for name, value in part.items()} for side in zip(*parts, strict=True)
    )
    common.report("research", metrics, args.json, details | {"requests": len(trace)}, bars=BARS)
    common.require_bars({} if args.quick else metrics, BARS)


if __name__ == "__main__":
    main()
