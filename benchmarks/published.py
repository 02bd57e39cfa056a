# SPDX-License-Identifier: Apache-2.0
"""Hit rates of a trace of Mooncake, in the form in which a paper has published those of another one.

Table 1 of Mooncake's paper on arXiv (2407.00079) has the hit rates of three policies at six capacities. They are of a
trace of 23,608 requests, `FAST25-release/arxiv-trace/mooncake_trace.jsonl` in its repository: `--trace` takes it. No
copy of it was at hand, so that no row has been compared; nothing was tuned until it fits. For any other trace the
published rows are left out. Without `--trace` it is the conversation trace (`benchmarks/trace.py`), or its first 2,000
requests.

All blocks may hit (rule "papers"). LRU and Belady's bound are those of prefixes, by `lru_curve` and `belady`. LFU and
LengthAware count blocks singly, each by itself, whatever became of the blocks before it: uses since it was stored;
among equals LFU holds the most recently used ones, and LengthAware those late in their prompt, as we read the paper.
"""

from __future__ import annotations

import argparse
import heapq
import pathlib
from collections.abc import Callable

from benchmarks import common
from benchmarks.common import Bar
from benchmarks.trace import TRACE, WHOLE, read_blocks
from kvjax.research import Trace, belady, lru_curve, unbounded

CAPACITIES = (100_000, 50_000, 30_000, 10_000, 1_000)  # and one without bound, which comes first
REQUESTS = 23_608
TABLE = {
    "LRU": (0.51, 0.51, 0.50, 0.48, 0.40, 0.30),
    "LFU": (0.51, 0.51, 0.49, 0.43, 0.35, 0.30),
    "LengthAware": (0.51, 0.50, 0.48, 0.42, 0.35, 0.30),
}
BARS = {
    f"{name}_{size}": Bar(f"hit rate, {name}, {size:,} blocks", "share")
    for name in ("LRU", "LFU", "Belady")
    for size in CAPACITIES[1::2]
} | {"requests": Bar("requests of the trace", "")}
Order = Callable[[int, int, int], tuple[int, ...]]  # of (uses, depth, time): the lowest leaves first


def lfu(uses: int, depth: int, time: int) -> tuple[int, ...]:
    """The least often used, of those the least recently."""
    del depth
    return uses, time


def length_aware(uses: int, depth: int, time: int) -> tuple[int, ...]:
    """The least often used, of those the first ones of a prompt."""
    return uses, depth, time


def singly(trace: Trace, size: int, order: Order) -> float:
    """The share of references that find their block, where each block is an object of its own."""
    cached: dict[int, tuple[int, tuple[int, ...]]] = {}  # id -> its uses, its place in the order of eviction
    heap: list[tuple[tuple[int, ...], int]] = []  # (order, id); what is no longer so is skipped
    hits = 0
    ids, starts = trace.ids.tolist(), trace.starts.tolist()
    for request in range(len(trace)):
        for depth, time in enumerate(range(starts[request], starts[request + 1])):
            block, uses = ids[time], 1
            if block in cached:
                hits, uses = hits + 1, cached[block][0] + 1
            elif len(cached) == size:
                _evict(cached, heap)
            cached[block] = uses, order(uses, depth, time)
            heapq.heappush(heap, (cached[block][1], block))
    return hits / len(ids)


def _evict(cached: dict[int, tuple[int, tuple[int, ...]]], heap: list[tuple[tuple[int, ...], int]]) -> None:
    while True:
        order, block = heapq.heappop(heap)
        if block in cached and cached[block][1] == order:
            del cached[block]
            return


def rates(trace: Trace) -> dict[str, list[float]]:
    """The rows, from no bound to the smallest capacity."""
    most = float(unbounded(trace, "papers").rate[0])
    return {
        "LRU": [most, *lru_curve(trace, CAPACITIES, "papers").rate.tolist()],
        "LFU": [most, *(singly(trace, size, lfu) for size in CAPACITIES)],
        "LengthAware": [most, *(singly(trace, size, length_aware) for size in CAPACITIES)],
        "Belady": [most, *belady(trace, CAPACITIES).rate.tolist()],
    }


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="a trace of Mooncake's form")

    args = common.parse("published", __doc__, options)
    path = args.trace or (WHOLE if WHOLE.exists() else TRACE)
    trace = read_blocks(path)
    print(f"published: {len(trace):,} requests of {path.name}, {len(trace.ids):,} blocks, {trace.num_ids:,} ids")
    print(f"{'blocks':12}{'Inf':>9}" + "".join(f"{size:>9,}" for size in CAPACITIES))
    found = rates(trace)
    for name, row in found.items():
        print(f"{name:12}" + "".join(f"{rate:>9.4f}" for rate in row))
        if name in TABLE and len(trace) == REQUESTS:
            print(f"{'  published':12}" + "".join(f"{rate:>9.2f}" for rate in TABLE[name]))
    names = ("inf", *CAPACITIES)
    metrics = {f"{name}_{size}": rate for name, row in found.items() for size, rate in zip(names, row, strict=True)}
    common.report("published", metrics, args.json, {"requests": len(trace)}, bars=BARS)


if __name__ == "__main__":
    main()
