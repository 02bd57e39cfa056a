# SPDX-License-Identifier: Apache-2.0
"""Caches of many sizes over the first requests of a trace, on the verbs and without them; called by `research`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import common
from benchmarks.trace import TRACE, read_blocks
from kvjax.policies import lfu, lru
from kvjax.research import Hits, Trace, replay, simulate
from kvjax.state import EvictionPolicy
from tests.oracle import research as oracle

RULE = "full"


class Size(NamedTuple):
    """The requests; caches, and blocks of the largest one, for comparison with plain Python; and those for growth.

    `longest` cuts the prompts for the verbs, whose rows are of one length. `simulate` takes them whole.
    """

    requests: int = 2000
    longest: int = 64
    caches: int = 64
    num_blocks: int = 16_384
    few: int = 4
    small: int = 2048
    large: int = 65_536
    rounds: int = 5


QUICK = Size(requests=30, longest=8, caches=4, num_blocks=64, small=64, large=96, rounds=1)
Figures = tuple[dict[str, float], dict[str, float]]  # metrics, and details
Program = tuple[Callable[[], Any], Callable[[Any], Any]]


def spread(caches: int, most: int) -> np.ndarray:
    """Evenly spread numbers of blocks up to the most."""
    return np.arange(1, caches + 1) * most // caches


def ours(run: Callable[..., Hits], trace: Trace, policy: EvictionPolicy, sizes: np.ndarray) -> Program:
    """All sizes in one program."""
    return tuple, lambda _: run(trace, policy, sizes, rule=RULE).blocks


def theirs(find: Callable[..., Sequence[int]], trace: Trace, sizes: np.ndarray) -> Program:
    """One size after the other."""
    prompts, full = plain(trace), trace.full.tolist()
    return tuple, lambda _: np.array([find(prompts, full, size, RULE) for size in sizes.tolist()])


def plain(trace: Trace) -> list[list[int]]:
    """The ids of each prompt."""
    return [trace.blocks(request).tolist() for request in range(len(trace))]


def require_same(name: str, ours: np.ndarray, theirs: Any) -> None:
    """Ends the benchmark unless every request found as many blocks as in plain Python."""
    common.require(np.array_equal(ours, theirs), f"{name}: other hits than in plain Python")


def side_by_side(name: str, run: Program, plain_python: Program, rounds: int) -> tuple[float, float]:
    """Seconds of a program, and of plain Python; both take turns and find the same."""
    took, found = common.in_turns({"ours": run, "theirs": plain_python}, rounds)
    require_same(name, found["ours"], found["theirs"])
    return took["ours"].wall, took["theirs"].wall


def measure_replay(size: Size) -> Figures:
    """`replay_slower`: how many times as long all sizes take on the verbs as in plain Python."""
    trace, sizes = read_blocks(TRACE, size.requests, size.longest), spread(size.caches, size.num_blocks)
    own, other = side_by_side(
        "replay", ours(replay, trace, lru(), sizes), theirs(oracle.lru, trace, sizes), size.rounds
    )
    return {"replay_slower": own / other}, {"replay_s": own, "replay_python_s": other}


def measure_growth(size: Size) -> Figures:
    """`replay_growth`: how many times as long a request takes in the large caches as in the small ones."""
    trace = read_blocks(TRACE, size.requests, size.longest)
    sizes = {most: spread(size.few, most) for most in (size.small, size.large)}
    programs = {f"{most}": ours(replay, trace, lru(), each) for most, each in sizes.items()}
    took, found = common.in_turns(programs, size.rounds)
    for most, each in sizes.items():
        _, run = theirs(oracle.lru, trace, each)
        require_same(f"replay up to {most}", found[f"{most}"], run(()))
    each = {most: 1e6 * took[f"{most}"].wall / (len(trace) * size.few) for most in sizes}
    return {"replay_growth": each[size.large] / each[size.small]}, {f"replay_us_{most}": each[most] for most in sizes}


def measure_simulate(size: Size) -> Figures:
    """`simulate_lru_x`, `simulate_lfu_x`: how many times faster than plain Python, an OrderedDict and a heap."""
    trace, sizes = read_blocks(TRACE, size.requests), spread(size.caches, size.num_blocks)
    metrics, details = {}, {}
    for name, policy, find in (("lru", lru(), oracle.lru), ("lfu", lfu(), oracle.lfu)):
        programs = ours(simulate, trace, policy, sizes), theirs(find, trace, sizes)
        own, other = side_by_side(f"simulate {name}", *programs, size.rounds)
        metrics[f"simulate_{name}_x"] = other / own
        details |= {f"simulate_{name}_s": own, f"simulate_{name}_python_s": other}
    return metrics, details
