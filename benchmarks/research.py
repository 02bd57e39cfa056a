# SPDX-License-Identifier: Apache-2.0
"""Simulators of a trace against caches in plain Python, which must find the same for every single request.

`lru_curve` and `belady` get the whole conversation trace of Mooncake where its folder is found (`benchmarks/trace.py`),
else its first 2,000 requests. The other simulators get these 2,000; `replay` runs the real verbs, on the first 64
blocks of each prompt. `lru_curve` starts from the trace, nothing prepared; the OrderedDict is timed at 10 of its 1,000
sizes, and counted 100 times. The heaps of `belady` are of next uses with the number of their blocks, which are found
beforehand, the fastest form that was tried; one of single blocks, as the tests have it, takes some 40 times as long.
Times are medians of 5 rounds, in which both sides take turns. Compiling does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import Bar, Size, benchmark
from benchmarks.trace import TRACE, WHOLE, read_blocks
from kvjax.policies import lfu, lru
from kvjax.research import Trace, belady, lru_curve, replay, simulate
from kvjax.state import EvictionPolicy
from tests.oracle import research as oracle

RULE = "full"
CACHES = "64 caches of up to 16,384 blocks"
BARS = {
    "requests": Bar("requests of the trace of `lru_curve` and `belady`", ""),
    "lru_curve_x": Bar("speed of `lru_curve`, 1,000 sizes, to an OrderedDict for each", at_least=300),
    "belady_x": Bar("speed of `belady`, 64 sizes, to a heap for each", at_least=2.5),
    "replay_slower": Bar(f"time of `replay`, {CACHES}, to an OrderedDict for each", at_most=6),
    "replay_growth": Bar("time of a request, caches of up to 65,536 blocks, to 2,048", at_most=2),
    "simulate_lru_x": Bar(f"speed of `simulate`, `lru()`, {CACHES}, to an OrderedDict for each", at_least=1),
    "simulate_lfu_x": Bar(f"speed of `simulate`, `lfu()`, {CACHES}, to a heap for each", at_least=1),
}
NOTES = """
`belady` is faster on one core (`taskset -c 0`), where several runs gave 14x to 21x, than on two, 3.2x to 3.7x: XLA
divides each gather of 64 numbers among the cores. `replay` is the other way round: 3.4x, and 1.8x on two quiet cores.
"""


def prompts_of(trace: Trace) -> list[list[int]]:
    """The ids of each prompt."""
    return [trace.blocks(request).tolist() for request in range(len(trace))]


def side_by_side(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Seconds of a program, and of plain Python; both take turns, and find the same for every request."""
    took, _ = common.in_turns({"ours": ours, "theirs": theirs}, rounds, np.array_equal)
    return took["ours"].wall, took["theirs"].wall


def sizes_of(trace: Trace, number: int) -> np.ndarray:
    """i32[number]; from the longest request to all blocks that there are, by equal factors."""
    return np.geomspace(int(trace.lengths.max()), trace.num_ids, number).astype(np.int32)


def measure_lru(trace: Trace, size: Size) -> dict[str, float]:
    """`lru_curve_x`: all sizes at once, to one by one."""
    sizes = sizes_of(trace, size.lru_sizes)
    timed = np.linspace(0, size.lru_sizes - 1, size.lru_timed).astype(np.int32)
    prompts, full = prompts_of(trace), trace.full.tolist()
    ours, theirs = side_by_side(
        lambda: lru_curve(trace, sizes, "kvjax").blocks[timed],
        lambda: [oracle.lru(prompts, full, int(z), "kvjax") for z in sizes[timed]], size.rounds,
    )  # fmt: skip
    theirs *= size.lru_sizes / size.lru_timed
    return {"lru_curve_x": theirs / ours, "lru_curve_s": ours, "ordered_dict_s": theirs}


def measure_belady(trace: Trace, size: Size) -> dict[str, float]:
    """`belady_x`: all sizes at once, to a heap for each."""
    sizes, lengths = sizes_of(trace, size.belady_sizes), trace.lengths.tolist()
    coming = oracle.next_runs(oracle.next_uses(prompts_of(trace)))
    ours, theirs = side_by_side(
        lambda: belady(trace, sizes).blocks,
        lambda: [oracle.belady_by_runs(lengths, coming, int(z)) for z in sizes], size.rounds,
    )  # fmt: skip
    return {"belady_x": theirs / ours, "belady_s": ours, "heap_s": theirs}


def at_once(run: Callable[..., Any], trace: Trace, policy: EvictionPolicy, caches: int, most: int) -> Any:
    """Caches whose sizes are evenly spread up to the most blocks, in one program; and the sizes."""
    sizes = np.arange(1, caches + 1) * most // caches
    return lambda: run(trace, policy, sizes, rule=RULE).blocks, sizes


def one_by_one(find: Callable[..., Sequence[int]], trace: Trace, sizes: np.ndarray) -> Callable[[], np.ndarray]:
    """One size after the other, in plain Python."""
    prompts, full = prompts_of(trace), trace.full.tolist()
    return lambda: np.array([find(prompts, full, size, RULE) for size in sizes.tolist()])


def measure_caches(size: Size) -> Iterator[dict[str, float]]:
    """Many caches on the verbs (`replay`) and without them (`simulate`), to plain Python, one after the other."""
    whole, cut = read_blocks(TRACE, size.few_requests), read_blocks(TRACE, size.few_requests, size.longest)
    for name, run, trace, policy, find in (
        ("replay", replay, cut, lru(), oracle.lru),
        ("simulate_lru", simulate, whole, lru(), oracle.lru),
        ("simulate_lfu", simulate, whole, lfu(), oracle.lfu),
    ):
        program, sizes = at_once(run, trace, policy, size.caches, size.num_blocks)
        ours, theirs = side_by_side(program, one_by_one(find, trace, sizes), size.rounds)
        yield {"replay_slower": ours / theirs} if name == "replay" else {f"{name}_x": theirs / ours}
        yield {f"{name}_s": ours, f"{name}_python_s": theirs}


def measure_growth(size: Size) -> dict[str, float]:
    """`replay_growth`: how many times as long a request takes in the large caches as in the small ones."""
    trace = read_blocks(TRACE, size.few_requests, size.longest)
    both = {f"replay_us_{most}": at_once(replay, trace, lru(), size.few, most) for most in (size.small, size.large)}
    took, found = common.in_turns({name: program for name, (program, _) in both.items()}, size.rounds)
    for name, (_, each) in both.items():
        common.require_same({name: found[name], "plain Python": one_by_one(oracle.lru, trace, each)()}, np.array_equal)
    micros = {name: 1e6 * took[name].wall / (len(trace) * size.few) for name in both}
    small, large = micros.values()
    return {"replay_growth": large / small, **micros}


SIZES = {
    # Requests of the trace, None for all; sizes of caches, and those that are timed in plain Python.
    "requests": (None, 300), "lru_sizes": (1000, 20), "lru_timed": (10, 4), "belady_sizes": (64, 4),
    # The other simulators' requests; blocks of a prompt for `replay`, whose rows are of one length; caches.
    "few_requests": (2000, 30), "longest": (64, 8), "caches": (64, 4), "num_blocks": (16_384, 64),
    "few": 4, "small": (2048, 64), "large": (65_536, 96),
}  # fmt: skip


@benchmark(BARS, SIZES, rounds=(5, 1), strict=True)
def measure(size):
    trace = read_blocks(WHOLE if WHOLE.exists() else TRACE, size.requests)
    yield {"requests": len(trace)}
    yield measure_lru(trace, size)
    yield measure_belady(trace, size)
    yield from measure_caches(size)
    yield measure_growth(size)
