# SPDX-License-Identifier: Apache-2.0
"""A trace replayed through the cache's verbs in caches of many sizes, next to an OrderedDict for each size.

The requests are the first ones of a trace of Mooncake (`benchmarks/trace.py`), of each prompt the first 64 blocks, and
the least recently released blocks leave. Two figures: how much longer 64 caches of up to 16,384 blocks take in one
program than plain Python takes for all of them, and how much longer a request takes in caches of up to 65,536 blocks
than in caches of up to 2,048. Compiling does not count. Every request must find the same blocks in plain Python.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks import common
from benchmarks.trace import TRACE, read_blocks
from kvjax.policies import lru
from kvjax.research import Trace, replay
from tests.oracle import research

RULE = "full"
MAX_SLOWER, MAX_GROWTH = 6.0, 2.0


class Size(NamedTuple):
    """The trace; caches, and blocks of the largest one, beside plain Python; and those of which growth is measured."""

    requests: int = 2000
    longest: int = 64
    caches: int = 64
    num_blocks: int = 16_384
    few: int = 4
    small: int = 2048
    large: int = 65_536
    rounds: int = 5


QUICK = Size(requests=30, longest=8, caches=4, num_blocks=64, small=64, large=96, rounds=1)
Program = tuple[Callable[[], Any], Callable[[Any], Any]]


def sizes_of(caches: int, most: int) -> np.ndarray:
    """Evenly spread numbers of blocks up to the most."""
    return np.arange(1, caches + 1) * most // caches


def ours(trace: Trace, sizes: np.ndarray) -> Program:
    """All sizes in one program."""
    return tuple, lambda _: replay(trace, lru(), sizes, rule=RULE).blocks


def theirs(trace: Trace, sizes: np.ndarray) -> Program:
    """One size after the other."""
    prompts, full = [trace.blocks(request).tolist() for request in range(len(trace))], trace.full.tolist()
    return tuple, lambda _: np.array([research.lru(prompts, full, size, RULE) for size in sizes.tolist()])


def measure_slower(trace: Trace, size: Size) -> tuple[dict[str, float], dict[str, float]]:
    """The ratio to plain Python, and the seconds of both."""
    sizes = sizes_of(size.caches, size.num_blocks)
    took, found = common.in_turns({"replay": ours(trace, sizes), "python": theirs(trace, sizes)}, size.rounds)
    common.require(np.array_equal(found["replay"], found["python"]), "the verbs found other blocks than plain Python")
    seconds = {f"{name}_s": each.wall for name, each in took.items()}
    return {"replay_slower": took["replay"].wall / took["python"].wall}, seconds


def measure_growth(trace: Trace, size: Size) -> tuple[dict[str, float], dict[str, float]]:
    """The ratio of the large caches to the small ones, and microseconds of a request in one cache."""
    sizes = {most: sizes_of(size.few, most) for most in (size.small, size.large)}
    took, found = common.in_turns({f"{most}": ours(trace, sizes[most]) for most in sizes}, size.rounds)
    for most in sizes:
        _, run = theirs(trace, sizes[most])
        common.require(np.array_equal(found[f"{most}"], run(())), f"other blocks than in plain Python, up to {most}")
    each = {most: 1e6 * took[f"{most}"].wall / (len(trace) * size.few) for most in sizes}
    return {"replay_growth": each[size.large] / each[size.small]}, {f"us_{most}": each[most] for most in sizes}


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--trace", type=pathlib.Path, default=TRACE, metavar="FILE", help="another trace")
        parser.add_argument("--requests", type=int, help="how many of the trace")
        parser.add_argument("--quick", action="store_true", help="some requests: whether it runs, not how fast")

    args = common.parse("replay_sizes", __doc__, options)
    size = QUICK if args.quick else Size()
    size = size if args.requests is None else size._replace(requests=args.requests)
    trace = read_blocks(args.trace, size.requests, size.longest)
    print(f"replay_sizes: {len(trace):,} requests of {len(trace.ids):,} blocks, {size.caches} caches")
    parts = [measure(trace, size) for measure in (measure_slower, measure_growth)]
    metrics, details = ({**one, **other} for one, other in zip(*parts, strict=True))
    common.report("replay_sizes", metrics, args.json, details)
    if not args.quick:
        common.require(
            metrics["replay_slower"] <= MAX_SLOWER, f"more than {MAX_SLOWER:g} times as slow as plain Python"
        )
        common.require(metrics["replay_growth"] <= MAX_GROWTH, f"a request takes over {MAX_GROWTH:g} times as long")


if __name__ == "__main__":
    main()
