# SPDX-License-Identifier: Apache-2.0
"""Compares policies with LRU and with Belady's bound on unseen sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.research.simulators.belady import belady
from kvjax.research.simulators.hits import Hits, Rule
from kvjax.research.simulators.lru_curve import lru_curve
from kvjax.research.simulators.replay import replay
from kvjax.research.simulators.simulate import missing_fields, simulate
from kvjax.research.traces.sessions import sessions_of
from kvjax.research.traces.trace import Trace
from kvjax.state import EvictionPolicy

SHARES = (0.02, 0.1, 0.3)
_DRAWS = 2000


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Hits and uncached tokens of policies at a few sizes. `str` formats them as a table.

    Attributes:
      name: name of the trace, or of its half.
      rule: the rule of hits.
      shares: f64[Z]; the size of each cache as a share of the distinct blocks.
      sizes: i32[Z]; blocks of each cache: the share, but at least the longest request.
      rates: f64[Z] for each policy, "lru" and "bound"; the share of blocks found. "bound" is Belady's by the rule
        "papers".
      low, high: f64[Z] for each policy; the 95 % interval of its rate minus LRU's, by resampling sessions.
      uncached: f64[Z, 3] for each policy and "lru"; the median, 95th and 99th percentile over requests of uncached
        prompt tokens.
    """

    name: str
    rule: Rule
    shares: np.ndarray
    sizes: np.ndarray
    rates: dict[str, np.ndarray]
    low: dict[str, np.ndarray]
    high: dict[str, np.ndarray]
    uncached: dict[str, np.ndarray]

    def closed(self, policy: str) -> np.ndarray:
        """f64[Z]; the share of the distance from LRU to the bound closed by a policy, 0 without a distance."""
        lru = self.rates["lru"]
        distance = self.rates["bound"] - lru
        return np.where(distance > 1e-9, (self.rates[policy] - lru) / np.maximum(distance, 1e-9), 0.0)

    def __str__(self) -> str:
        head = "    blocks  policy           found   - LRU     95 % interval  closed  uncached: p50      p95      p99"
        lines = [f'{self.name}, rule "{self.rule}"', head]
        for index, size in enumerate(self.sizes.tolist()):
            for policy, tokens in self.uncached.items():
                gains = self._gains(policy, index) if policy in self.low else ""
                percentiles = "".join(f"{value:>9,.0f}" for value in tokens[index])
                lines.append(
                    f"{size:>10,}  {policy:<14.14}{self.rates[policy][index]:>8.2%}{gains:34}{percentiles:>31}"
                )
            lines.append(f"{size:>10,}  {'bound':<14}{self.rates['bound'][index]:>8.2%}")
        return "\n".join(lines)

    def _gains(self, policy: str, index: int) -> str:
        """The columns of a policy's gain over LRU at a size."""
        gain = 100 * (self.rates[policy][index] - self.rates["lru"][index])
        interval = f"{100 * self.low[policy][index]:+.2f} to {100 * self.high[policy][index]:+.2f}"
        return f"{gain:>+8.2f}{interval:>18}{self.closed(policy)[index]:>8.0%}"

    def as_json(self) -> dict[str, Any]:
        """All figures, as values of JSON."""
        lists = lambda arrays: {name: array.tolist() for name, array in arrays.items()}  # noqa: E731
        return {
            "name": self.name,
            "rule": self.rule,
            "shares": self.shares.tolist(),
            "sizes": self.sizes.tolist(),
            "rates": lists(self.rates),
            "closed": {name: self.closed(name).tolist() for name in self.low},
            "low": lists(self.low),
            "high": lists(self.high),
            "uncached": lists(self.uncached),
        }


NOTES = (
    "- LRU: in points of a percent. Its interval is from sessions drawn 2,000 times.",
    'closed: the share of the distance from LRU to the bound, which is Belady\'s under the rule "papers".',
    "uncached: percentiles over requests of prompt tokens that were not found.",
)


def compare(
    trace: Trace,
    policies: Mapping[str, EvictionPolicy],
    *,
    shares: Sequence[float] = SHARES,
    rule: Rule = "full",
    name: str = "trace",
) -> Comparison:
    """Counts the hits of policies, LRU and Belady's bound at shares of a trace's distinct blocks.

    For a clean test pass a half of `split_sessions`: choose and change policies by the first half alone, and look at
    the second half once.

    Args:
      trace: the requests.
      policies: the policies by name.
      shares: sizes of the caches as shares of the trace's distinct blocks, above 0. A cache holds at least the longest
        request.
      rule: the rule of hits; see `RULES`.
      name: name of the trace for `str`.

    Raises:
      ValueError: for an empty trace, a share out of range, or a policy named "lru" or "bound".

    Example:
      >>> from kvjax import policies, research
      >>> first, second = research.split_sessions(research.draw_trace(seed=0, requests=200))
      >>> comparison = research.compare(first, {"lfu": policies.lfu()}, shares=[0.2])
      >>> comparison.sizes.tolist() == [max(first.num_ids // 5, first.lengths.max())]
      True
    """
    chosen = np.asarray(shares, np.float64).reshape(-1)
    if not len(trace):
        raise ValueError("trace: got no requests, wanted at least one")
    if not chosen.size or not np.all((chosen > 0) & (chosen <= 10)):
        raise ValueError(f"shares: got {shares!r}, wanted shares of the distinct blocks, above 0 and at most 10")
    if taken := {"lru", "bound"} & set(policies):
        raise ValueError(f"policies: got the name {taken.pop()!r}, which the table uses, wanted another name")
    sizes = np.maximum((chosen * trace.num_ids).astype(np.int32), trace.lengths.max())
    hits = {"lru": lru_curve(trace, sizes, rule)}
    hits |= {policy: _hits(trace, value, sizes, rule) for policy, value in policies.items()}
    session = sessions_of(trace)
    intervals = {policy: _interval(trace, session, hits[policy], hits["lru"]) for policy in policies}
    return Comparison(
        name,
        rule,
        chosen,
        sizes,
        {policy: counted.rate for policy, counted in hits.items()} | {"bound": belady(trace, sizes).rate},
        {policy: low for policy, (low, _) in intervals.items()},
        {policy: high for policy, (_, high) in intervals.items()},
        {policy: np.quantile(counted.uncached_tokens, (0.5, 0.95, 0.99), axis=1).T for policy, counted in hits.items()},
    )


def _hits(trace: Trace, policy: EvictionPolicy, sizes: np.ndarray, rule: Rule) -> Hits:
    run = replay if missing_fields(policy, int(sizes.max())) else simulate
    return run(trace, policy, sizes, rule=rule)


def _interval(trace: Trace, session: np.ndarray, hits: Hits, lru: Hits) -> np.ndarray:
    """f64[2, Z]; the 95 % interval of the difference of two rates, by a bootstrap of sessions i64[R]."""
    num_sessions = int(session.max()) + 1
    sums = lambda values: np.bincount(session, values, num_sessions)  # noqa: E731
    gained = np.stack([sums(difference) for difference in hits.blocks - lru.blocks])  # [Z, sessions]
    requested = sums(trace.lengths)
    random = np.random.default_rng(0)
    rates = np.empty((_DRAWS, len(gained)))
    for draw in range(_DRAWS):
        drawn = np.bincount(random.integers(0, num_sessions, num_sessions), minlength=num_sessions)
        rates[draw] = gained @ drawn / max(requested @ drawn, 1)
    return np.quantile(rates, (0.025, 0.975), axis=0)
