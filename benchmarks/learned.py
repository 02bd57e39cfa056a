# SPDX-License-Identifier: Apache-2.0
"""Learned policies against LRU, on later requests of the trace that they were learned from, and on a random trace.

`learned_gain_SIZE`: what the learned policy finds more than LRU, 0.1 for a tenth, by the rule "papers": the mean of
three splits (learned from the first third, half, two thirds; counted in the next third, the rest, the rest) and three
seeds. In each split the 95 % interval, by drawing windows of 300 requests, has to be above 0; `learned_low_SIZE` is the
least beginning of one.

The second trace is drawn at random, like the first one but with another seed: nothing was ever chosen by it.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks import common
from benchmarks.common import Bar
from benchmarks.simulators import Figures
from benchmarks.trace import TRACE, WHOLE, read_blocks
from kvjax.research import Trace, compare_learned, draw_trace


class Size(NamedTuple):
    """Sizes of the caches; seeds of a split; requests of the traces that are drawn, and their caches' sizes."""

    sizes: tuple[int, ...] = (5859, 10_000, 30_000)
    seeds: int = 3
    drawn: int = 6000
    drawn_sizes: tuple[int, ...] = (2000, 4000, 8000)


QUICK = Size((300, 600), 1, 300, (700,))
GAINS = dict(zip(Size().sizes, (0.09, 0.06, 0.02), strict=True))
BARS = {
    **{
        f"learned_gain_{z}": Bar(f"learned: hits more than LRU's, {z:,} blocks", "share", bar)
        for z, bar in GAINS.items()
    },
    **{f"learned_low_{z}": Bar(f"learned: least end of a 95 % interval, {z:,} blocks", "share", 0) for z in GAINS},
    **{f"drawn_gain_{z}": Bar(f"learned: more hits, random trace, {z:,} blocks", "share") for z in Size().drawn_sizes},
}


def measure_learned(trace: Trace, size: Size) -> Figures:
    """The gain at each size; and the lower ends of the intervals: of each split, and the least."""
    found = compare_learned(trace, size.sizes, rule="papers", seeds=size.seeds)
    print(found)
    gains = dict(zip((f"learned_gain_{z}" for z in size.sizes), found.gain.mean(axis=0).tolist(), strict=True))
    names = (f"learned_low_{z}_split_{n + 1}" for n in range(len(found.parts)) for z in size.sizes)
    lows = dict(zip((f"learned_low_{z}" for z in size.sizes), found.low.min(axis=0).tolist(), strict=True))
    return gains, lows | dict(zip(names, found.low.reshape(-1).tolist(), strict=True))


def measure_drawn(size: Size) -> dict[str, float]:
    """The gains in a trace of seed 1, of policies that were learned from one of seed 0."""
    traces = [draw_trace(seed, size.drawn) for seed in range(2)]
    found = compare_learned(traces[0], size.drawn_sizes, rule="papers", seeds=size.seeds, on=traces[1])
    print(found)
    return {f"drawn_gain_{z}": gain for z, gain in zip(size.drawn_sizes, found.gain[0].tolist(), strict=True)}


def require_bars(gains: dict[str, float], lows: dict[str, float]) -> None:
    """Ends the benchmark unless gains reach the bars and every interval is above 0."""
    common.require_bars(gains, BARS)
    common.require(min(lows.values()) > 0, f"an interval begins at {min(lows.values()):.3g}, wanted above 0")


def measure(quick: bool) -> Figures:
    """The gains, tiny ones if quick or where the whole trace is not; and the intervals and the second trace's gains."""
    whole = WHOLE.exists() and not quick
    size = Size() if whole else QUICK
    gains, lows = measure_learned(read_blocks(WHOLE) if whole else read_blocks(TRACE, 300), size)
    if whole:
        require_bars(gains, lows)
    else:
        print("learned policies: no bar, which needs the whole trace (KVJAX_TRACES names its folder)")
    return gains, lows | measure_drawn(size)
