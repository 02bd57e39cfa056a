# SPDX-License-Identifier: Apache-2.0
"""Compares learned policies with LRU, Belady's bound and other policies, on requests not used for learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.checks import static_int
from kvjax.research.learning.learned import Learned, learn_policy
from kvjax.research.simulators.belady import belady
from kvjax.research.simulators.hits import RULES, Rule
from kvjax.research.simulators.lru_curve import lru_curve
from kvjax.research.simulators.simulate import simulate
from kvjax.research.traces.trace import Trace
from kvjax.state import EvictionPolicy

_WINDOW = 300
_DRAWS = 2000


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The hits of policies in parts of a trace. `str` formats them as text.

    Attributes:
      rule: the rule of hits.
      sizes: i32[Z]; blocks of each cache.
      parts: (first, last) of the counted requests of each part. Earlier requests only warm the cache.
      learned_from: the number of leading requests from which each part's policies were learned.
      rates: f64[P, Z] for each policy; the share of blocks found. "learned" is the mean of its seeds, "bound" is
        Belady's by the rule "papers".
      gains: f64[P, S, Z]; the gain of each seed's policy over LRU in blocks found. 0.1 means a tenth more.
      low, high: f64[P, Z]; the 95 % interval of the mean gain, by resampling windows of 300 requests.
    """

    rule: Rule
    sizes: np.ndarray
    parts: tuple[tuple[int, int], ...]
    learned_from: tuple[int, ...]
    rates: dict[str, np.ndarray]
    gains: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def gain(self) -> np.ndarray:
        """f64[P, Z]; the mean gain of all seeds."""
        return self.gains.mean(axis=1)

    @property
    def closed(self) -> np.ndarray:
        """f64[P, Z]; the share of the distance from LRU to the bound that the policy closes."""
        lru = self.rates["lru"]
        return (self.rates["learned"] - lru) / np.maximum(self.rates["bound"] - lru, 1e-12)

    def __str__(self) -> str:
        names = [name for name in self.rates if name != "bound"]
        head = "    blocks     gain   from     to  closed" + "".join(f"{name:>11}" for name in [*names, "bound"])
        lines: list[str] = []
        for part, (first, last) in enumerate(self.parts):
            lines += [f"learned from {self.learned_from[part]:,} requests, counted in {first:,} to {last - 1:,}", head]
            for index, size in enumerate(self.sizes.tolist()):
                statistics = (values[part, index] for values in (self.gain, self.low, self.high, self.closed))
                rates = (self.rates[name][part, index] for name in [*names, "bound"])
                shares = "{:>+9.1%}{:>+7.1%}{:>+7.1%}{:>8.0%}".format(*statistics)
                lines.append(f"{size:>10,}{shares}" + "".join(f"{rate:>11.4f}" for rate in rates))
        if len(self.parts) > 1:
            means = zip(self.gain.mean(axis=0), self.sizes, strict=True)
            lines.append("mean gain    " + ", ".join(f"{gain:+.1%} at {size:,}" for gain, size in means))
        lines += [
            f'Blocks found of blocks requested. Rule "{self.rule}": {RULES[self.rule]}.',
            f"gain: of the mean of {self.gains.shape[1]} seeds over LRU, with its 95 % interval (windows of {_WINDOW} "
            "requests drawn 2,000 times).",
            'closed: the share of the distance from LRU to the bound, which is Belady\'s under the rule "papers".',
            "Later requests of the same trace are no clean test of what was chosen while looking at them; a second "
            "trace is.",
        ]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """All figures, as values of JSON."""
        arrays = {"gain": self.gain, "low": self.low, "high": self.high, "closed": self.closed, "gains": self.gains}
        return {
            "rule": self.rule,
            "sizes": self.sizes.tolist(),
            "parts": [list(part) for part in self.parts],
            "learned_from": list(self.learned_from),
            "rates": {name: x.tolist() for name, x in self.rates.items()},
            **{name: x.tolist() for name, x in arrays.items()},
        }


def compare_learned(
    trace: Trace,
    sizes: Sequence[int] | np.ndarray,
    *,
    rule: Rule = "full",
    seeds: int = 3,
    policies: Mapping[str, EvictionPolicy] | None = None,
    on: Trace | None = None,
) -> Comparison:
    """Learns policies from a part of a trace, and counts hits in a later part.

    There are three splits: learned from the first third and counted in the second, learned from the first half and
    counted in the rest, and learned from two thirds and counted in the rest. The same policy warms the cache with the
    earlier requests.

    Args:
      trace: the requests to learn from.
      sizes: i32[Z]; blocks of each cache, at least the longest request's.
      rule: the rule of hits.
      seeds: number of seeds from 0, S, each with a learned policy.
      policies: other policies to compare with, by name.
      on: a second trace to count hits in; then the policies are learned from all of the first trace.

    Raises:
      ImportError: without optax.
      ValueError: for fewer than 1 seed, a trace of fewer than 6 requests or without reuse in a part, or a size smaller
        than the longest request.
    """
    seeds = static_int("seeds", seeds, 1)
    tested = trace if on is None else on
    parts = _splits(len(trace)) if on is None else [_Part(len(trace), 0, len(on))]
    lru = lru_curve(tested, sizes, rule)
    bound = belady(tested, sizes)
    fixed = {name: simulate(tested, policy, lru.sizes, rule=rule).blocks for name, policy in (policies or {}).items()}
    learned = [learn_policy(trace[: part.end], rule=rule, seed=seed) for part in parts for seed in range(seeds)]
    plain = [learn_policy(trace[: part.end], rule=rule, hazard="counted") for part in parts]
    num_found = _simulated(tested, [*learned, *plain], lru.sizes, rule)
    rates = []
    gains = []
    intervals = []
    for index, part in enumerate(parts):
        learned_blocks = num_found[index * seeds : (index + 1) * seeds, :, part.first : part.last]
        others = {"counted": num_found[len(learned) + index], "lru": lru.blocks, **fixed, "bound": bound.blocks}
        others = {name: blocks[:, part.first : part.last] for name, blocks in others.items()}
        num_references = max(int(tested.lengths[part.first : part.last].sum()), 1)
        blocks_of = {"learned": learned_blocks.mean(axis=0), **others}
        rates.append({name: blocks.sum(axis=-1) / num_references for name, blocks in blocks_of.items()})
        gains.append(learned_blocks.sum(axis=-1) / np.maximum(others["lru"].sum(axis=-1), 1) - 1)
        intervals.append(_interval(learned_blocks.mean(axis=0), others["lru"]))
    low, high = np.stack(intervals, axis=1)
    return Comparison(
        rule,
        lru.sizes,
        tuple((part.first, part.last) for part in parts),
        tuple(part.end for part in parts),
        {name: np.stack([part_rates[name] for part_rates in rates]) for name in rates[0]},
        np.stack(gains),
        low,
        high,
    )


class _Part(NamedTuple):
    """Counts requests first..last-1, for a policy learned from the first `end` requests."""

    end: int
    first: int
    last: int


def _splits(num_requests: int) -> list[_Part]:
    if num_requests < 6:
        raise ValueError(f"trace: got {num_requests} requests, wanted at least 6")
    third = num_requests // 3
    half = num_requests // 2
    two_thirds = 2 * num_requests // 3
    return [
        _Part(third, third, two_thirds),
        _Part(half, half, num_requests),
        _Part(two_thirds, two_thirds, num_requests),
    ]


def _simulated(trace: Trace, learned: Sequence[Learned], sizes: np.ndarray, rule: Rule) -> np.ndarray:
    """i32[len(learned), Z, R]; blocks found by each request. A single program: the policies differ in their weights."""
    blank = Learned(np.zeros_like(learned[0].lengths), np.zeros_like(learned[0].table), {})
    blocks = []
    for policy in learned:
        state = policy.state(int(sizes.max()))
        states = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(sizes), *x.shape)), state)
        blocks.append(simulate(trace, blank.policy, sizes, rule=rule, policy_state=states).blocks)
    return np.stack(blocks)


def _interval(learned: np.ndarray, lru: np.ndarray) -> np.ndarray:
    """f64[2, Z]; the 95 % interval of the gain of learned f64[Z, R] over lru i32[Z, R], by a bootstrap of windows."""
    begins = np.arange(0, learned.shape[1], _WINDOW)
    window_sums = [np.add.reduceat(blocks.astype(np.float64), begins, axis=1) for blocks in (learned, lru)]
    sampled = np.random.default_rng(0).integers(0, len(begins), (_DRAWS, len(begins)))
    learned_sums, lru_sums = (sums[:, sampled].sum(axis=-1) for sums in window_sums)
    return np.quantile(learned_sums / np.maximum(lru_sums, 1) - 1, (0.025, 0.975), axis=1)
