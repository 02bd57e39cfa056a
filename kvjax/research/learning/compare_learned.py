# SPDX-License-Identifier: Apache-2.0
"""Learned policies on requests that they have not seen, beside LRU, Belady's bound and policies that learn nothing."""

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

_WINDOW, _DRAWS = 300, 2000


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The hits of policies in parts of a trace; `str` gives them as text.

    Attributes:
      rule: what counts as a hit.
      sizes: i32[Z]; blocks of each cache.
      parts: (first, last) of the requests that count, for each part; those before them warm the cache.
      learned_from: how many requests the policies of each part were learned from, the first ones.
      rates: for each policy, f64[P, Z]: blocks found of blocks requested. "learned" is the mean of its seeds, "bound"
        that of Belady by the rule "papers".
      gains: f64[P, S, Z]; blocks that each seed's policy finds more than LRU, of LRU's: 0.1 for a tenth.
      low, high: f64[P, Z]; the 95 % interval of the mean gain, by drawing windows of 300 requests.
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
        """f64[P, Z]; the mean of all seeds."""
        return self.gains.mean(axis=1)

    @property
    def closed(self) -> np.ndarray:
        """f64[P, Z]; the share of the distance from LRU to the bound."""
        lru = self.rates["lru"]
        return (self.rates["learned"] - lru) / np.maximum(self.rates["bound"] - lru, 1e-12)

    def __str__(self) -> str:
        names = [name for name in self.rates if name != "bound"]
        head = "    blocks     gain   from     to  closed" + "".join(f"{name:>11}" for name in [*names, "bound"])
        lines: list[str] = []
        for part, (first, last) in enumerate(self.parts):
            lines += [f"learned from {self.learned_from[part]:,} requests, counted in {first:,} to {last - 1:,}", head]
            for at, size in enumerate(self.sizes.tolist()):
                numbers = (each[part, at] for each in (self.gain, self.low, self.high, self.closed))
                found = (self.rates[name][part, at] for name in [*names, "bound"])
                shares = "{:>+9.1%}{:>+7.1%}{:>+7.1%}{:>8.0%}".format(*numbers)
                lines.append(f"{size:>10,}{shares}" + "".join(f"{rate:>11.4f}" for rate in found))
        if len(self.parts) > 1:
            means = zip(self.gain.mean(axis=0), self.sizes, strict=True)
            lines.append("mean gain    " + ", ".join(f"{gain:+.1%} at {size:,}" for gain, size in means))
        return "\n".join(
            [
                *lines,
                f'Blocks found of blocks requested. Rule "{self.rule}": {RULES[self.rule]}.',
                f"gain: of the mean of {self.gains.shape[1]} seeds over LRU, with its 95 % interval (windows of {_WINDOW} "
                "requests drawn 2,000 times).",
                'closed: the share of the distance from LRU to the bound, which is Belady\'s under the rule "papers".',
                "Later requests of the same trace are no clean test of what was chosen while looking at them; a second "
                "trace is.",
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """All figures, in values of JSON."""
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
    """Learns from a part of a trace, and counts hits in a part that comes later.

    Three splits: learned from the first third and counted in the second; from the first half and counted in the rest;
    from two thirds and counted in the rest. The cache is warmed by the same policy over the part before.

    Args:
      trace: the requests to learn from.
      sizes: i32[Z]; blocks of each cache, no fewer than the longest request has.
      rule: what counts as a hit.
      seeds: S; policies are learned with the seeds from 0.
      policies: others to compare with, by name.
      on: a second trace, to count hits in instead: the policies are learned from all of the first one.

    Raises:
      ImportError: without optax.
      ValueError: for fewer than 1 seed; for a trace of fewer than 6 requests, or of which a part says nothing; for a
        size that the longest request does not fit into.
    """
    seeds = static_int("seeds", seeds, 1)
    tested, parts = (trace, _splits(len(trace))) if on is None else (on, [_Part(len(trace), 0, len(on))])
    lru, bound = lru_curve(tested, sizes, rule), belady(tested, sizes)
    fixed = {name: simulate(tested, each, lru.sizes, rule=rule).blocks for name, each in (policies or {}).items()}
    learned = [learn_policy(trace[: part.end], rule=rule, seed=seed) for part in parts for seed in range(seeds)]
    plain = [learn_policy(trace[: part.end], rule=rule, hazard="counted") for part in parts]
    found = _simulated(tested, [*learned, *plain], lru.sizes, rule)
    rates, gains, intervals = [], [], []
    for at, part in enumerate(parts):
        own = found[at * seeds : (at + 1) * seeds, :, part.first : part.last]
        others = {"counted": found[len(learned) + at], "lru": lru.blocks, **fixed, "bound": bound.blocks}
        others = {name: blocks[:, part.first : part.last] for name, blocks in others.items()}
        references = max(int(tested.lengths[part.first : part.last].sum()), 1)
        rates.append({name: x.sum(axis=-1) / references for name, x in {"learned": own.mean(axis=0), **others}.items()})
        gains.append(own.sum(axis=-1) / np.maximum(others["lru"].sum(axis=-1), 1) - 1)
        intervals.append(_interval(own.mean(axis=0), others["lru"]))
    low, high = np.stack(intervals, axis=1)
    return Comparison(
        rule,
        lru.sizes,
        tuple((part.first, part.last) for part in parts),
        tuple(part.end for part in parts),
        {name: np.stack([each[name] for each in rates]) for name in rates[0]},
        np.stack(gains),
        low,
        high,
    )


class _Part(NamedTuple):
    """Requests first..last-1 count, for a policy that was learned from the first `end` ones."""

    end: int
    first: int
    last: int


def _splits(number: int) -> list[_Part]:
    if number < 6:
        raise ValueError(f"trace: got {number} requests, wanted at least 6")
    third, half, thirds = number // 3, number // 2, 2 * number // 3
    return [_Part(third, third, thirds), _Part(half, half, number), _Part(thirds, thirds, number)]


def _simulated(trace: Trace, learned: Sequence[Learned], sizes: np.ndarray, rule: Rule) -> np.ndarray:
    """i32[len(learned), Z, R]; the blocks of each request found. One program: the policies differ in their weights."""
    found, blank = [], Learned(np.zeros_like(learned[0].lengths), np.zeros_like(learned[0].table), {})
    for each in learned:
        state = each.state(int(sizes.max()))
        states = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(sizes), *x.shape)), state)
        found.append(simulate(trace, blank.policy, sizes, rule=rule, policy_state=states).blocks)
    return np.stack(found)


def _interval(own: np.ndarray, lru: np.ndarray) -> np.ndarray:
    """f64[2, Z]; the 95 % interval of the gain of own f64[Z, R] over lru i32[Z, R], by the bootstrap over windows."""
    begins = np.arange(0, own.shape[1], _WINDOW)
    sums = [np.add.reduceat(blocks.astype(np.float64), begins, axis=1) for blocks in (own, lru)]
    sampled = np.random.default_rng(0).integers(0, len(begins), (_DRAWS, len(begins)))
    ours, theirs = (each[:, sampled].sum(axis=-1) for each in sums)
    return np.quantile(ours / np.maximum(theirs, 1) - 1, (0.025, 0.975), axis=1)
