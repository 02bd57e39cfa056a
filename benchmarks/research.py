# SPDX-License-Identifier: Apache-2.0
"""Simulators of a trace against caches in plain Python, which have to find the same for every single request.

`lru_curve` and `belady` get the whole conversation trace of Mooncake if its folder exists (`benchmarks/trace.py`), else
its first 2,000 requests. The other simulators always get these 2,000. `replay` runs the real verbs, on the first 64
blocks of each prompt. `lru_curve` starts from the trace, without any preparation. The OrderedDict is timed at 10 of its
1,000 sizes, and counted 100 times. The heaps of `belady` have next uses with the number of their blocks, computed
beforehand, which was the fastest of several forms. A heap of single blocks, as in the tests, takes some 40 times as
long. Times are medians of 5 rounds, in which both sides take turns. Compiling does not count.
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
`belady` is faster on one core (`taskset -c 0`), where several runs gave 14x to 21x, than on two, with 3.2x to 3.7x. XLA
divides each gather of 64 numbers among the cores. `replay` is slower on one core: 3.4x, and 1.8x on two quiet cores.
"""


def prompts_of(trace: Trace) -> list[list[int]]:
    """The ids of each prompt."""
    return [trace.blocks(request).tolist() for request in range(len(trace))]


def side_by_side(ours: Callable[[], Any], python: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Seconds of a program and of plain Python, in turns. Both have to find the same for every request."""
    took, _ = common.in_turns({"ours": ours, "theirs": python}, rounds, np.array_equal)
    return took["ours"].wall, took["theirs"].wall


def sizes_of(trace: Trace, count: int) -> np.ndarray:
    """i32[number]; sizes from the longest request to the number of all blocks, at equal factors."""
    return np.geomspace(int(trace.lengths.max()), trace.num_ids, count).astype(np.int32)


def measure_lru(trace: Trace, size: Size) -> dict[str, float]:
    """Measures `lru_curve_x`: all sizes in a program, compared with a loop over sizes."""
    sizes = sizes_of(trace, size.lru_sizes)
    timed = np.linspace(0, size.lru_sizes - 1, size.lru_timed).astype(np.int32)
    prompts = prompts_of(trace)
    full = trace.full.tolist()
    our_s, python_s = side_by_side(
        lambda: lru_curve(trace, sizes, "kvjax").blocks[timed],
        lambda: [oracle.lru(prompts, full, int(z), "kvjax") for z in sizes[timed]], size.rounds,
    )  # fmt: skip
    python_s *= size.lru_sizes / size.lru_timed
    return {"lru_curve_x": python_s / our_s, "lru_curve_s": our_s, "ordered_dict_s": python_s}


def measure_belady(trace: Trace, size: Size) -> dict[str, float]:
    """Measures `belady_x`: all sizes in a program, compared with a heap for each."""
    sizes = sizes_of(trace, size.belady_sizes)
    lengths = trace.lengths.tolist()
    coming = oracle.next_runs(oracle.next_uses(prompts_of(trace)))
    our_s, python_s = side_by_side(
        lambda: belady(trace, sizes).blocks,
        lambda: [oracle.belady_by_runs(lengths, coming, int(z)) for z in sizes], size.rounds,
    )  # fmt: skip
    return {"belady_x": python_s / our_s, "belady_s": our_s, "heap_s": python_s}


def at_once(run: Callable[..., Any], trace: Trace, policy: EvictionPolicy, caches: int, max_blocks: int) -> Any:
    """A program for caches whose sizes are evenly spread up to `most` blocks, and the sizes."""
    sizes = np.arange(1, caches + 1) * max_blocks // caches
    return lambda: run(trace, policy, sizes, rule=RULE).blocks, sizes


def one_by_one(find: Callable[..., Sequence[int]], trace: Trace, sizes: np.ndarray) -> Callable[[], np.ndarray]:
    """A loop over sizes in plain Python."""
    prompts = prompts_of(trace)
    full = trace.full.tolist()
    return lambda: np.array([find(prompts, full, size, RULE) for size in sizes.tolist()])


def measure_caches(size: Size) -> Iterator[dict[str, float]]:
    """Compares many caches on the verbs (`replay`) and without them (`simulate`) with a loop in plain Python."""
    full = read_blocks(TRACE, size.few_requests)
    cut = read_blocks(TRACE, size.few_requests, size.longest)
    for name, run, trace, policy, find in (
        ("replay", replay, cut, lru(), oracle.lru),
        ("simulate_lru", simulate, full, lru(), oracle.lru),
        ("simulate_lfu", simulate, full, lfu(), oracle.lfu),
    ):
        program, sizes = at_once(run, trace, policy, size.caches, size.num_blocks)
        our_s, python_s = side_by_side(program, one_by_one(find, trace, sizes), size.rounds)
        yield {"replay_slower": our_s / python_s} if name == "replay" else {f"{name}_x": python_s / our_s}
        yield {f"{name}_s": our_s, f"{name}_python_s": python_s}


def measure_growth(size: Size) -> dict[str, float]:
    """Measures `replay_growth`: the time of a request in the large caches, divided by the time in the small caches."""
    trace = read_blocks(TRACE, size.few_requests, size.longest)
    both = {
        f"replay_us_{num_blocks}": at_once(replay, trace, lru(), size.few, num_blocks)
        for num_blocks in (size.small, size.large)
    }
    took, answers = common.in_turns({name: program for name, (program, _) in both.items()}, size.rounds)
    for name, (_, sizes) in both.items():
        expected = one_by_one(oracle.lru, trace, sizes)()
        common.require_same({name: answers[name], "plain Python": expected}, np.array_equal)
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
