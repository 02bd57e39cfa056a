# SPDX-License-Identifier: Apache-2.0
"""Simulators of a trace against caches in plain Python, which must find the same for every single request.

`lru_curve` and `belady` get the whole conversation trace of Mooncake where it is there (`benchmarks/trace.py` says
where), else its first 2,000 requests; the report says which. The other figures are of these 2,000.

`lru_curve_x`: `lru_curve` of 1,000 sizes from the trace on, nothing prepared, to an OrderedDict for each size. That is
timed at 10 sizes spread over all, and counted 100 times. `belady_x`: `belady` of 64 sizes likewise, to a heap for each
size. The heap is the fastest that we know, of next uses with the number of their blocks, which are found beforehand;
one of single blocks, as the tests have it, takes some 40 times as long.

`replay_slower`: `replay` of prompts' first 64 blocks in 64 caches of up to 16,384 blocks, `lru()`, to an OrderedDict
for each. `replay_growth`: a request in 4 caches of up to 65,536 blocks to one in 4 of up to 2,048. `simulate_lru_x`,
`simulate_lfu_x`: `simulate` of whole prompts in 64 caches of up to 16,384 blocks, to an OrderedDict and a heap.

`learned_gain_SIZE`: what a learned policy finds more than LRU (`benchmarks/learned.py`).

All others are medians of 5 rounds, in which both sides take turns. Compiling does not count.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from benchmarks import common, learned, simulators
from benchmarks.simulators import Figures, plain, require_same
from benchmarks.trace import TRACE, WHOLE, read_blocks
from kvjax.research import Hits, Trace, belady, lru_curve
from tests.oracle import research as oracle

AT_LEAST = {"lru_curve_x": 300, "belady_x": 2.5, "simulate_lru_x": 1, "simulate_lfu_x": 1}
AT_MOST = {"replay_slower": 6, "replay_growth": 2}


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
    common.report("research", metrics, args.json, details | {"requests": len(trace)})
    if args.quick:
        return
    for name, bar in AT_LEAST.items():
        common.require(metrics[name] >= bar, f"{name} is {metrics[name]:.3g}, the bar {bar}")
    for name, bar in AT_MOST.items():
        common.require(metrics[name] <= bar, f"{name} is {metrics[name]:.3g}, the bar {bar}")


if __name__ == "__main__":
    main()
