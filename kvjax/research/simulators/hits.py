# SPDX-License-Identifier: Apache-2.0
"""Rules of hits, and the hits of every request with their rates."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from kvjax.checks import host_integers
from kvjax.research.traces.trace import Trace

Rule = Literal["kvjax", "papers", "full"]
RULES: dict[str, str] = {
    "kvjax": "the last block of a prompt is never taken from the cache: its space is needed before it is merged",
    "papers": "every block may hit, the last one of a prompt too",
    "full": "partly filled blocks are held while their request runs and never cached; the last block of a prompt is "
    "never taken from the cache",
}


def check_rule(rule: str) -> None:
    """Refuses an unknown rule with a ValueError."""
    if rule not in get_args(Rule):
        raise ValueError(f"rule: got {rule!r}, wanted one of {', '.join(map(repr, RULES))}")


def num_cached(trace: Trace, rule: Rule) -> np.ndarray:
    """i32[R]; the number of leading blocks of each prompt to be cached at the end of its request."""
    return trace.full if rule == "full" else trace.lengths


def num_hittable(trace: Trace, rule: Rule) -> np.ndarray:
    """i32[R]; the number of leading blocks of each prompt that may hit."""
    return trace.lengths if rule == "papers" else trace.lengths - 1


def check_longest(trace: Trace, sizes: Sequence[int] | np.ndarray, name: str = "sizes") -> np.ndarray:
    """i32[Z]; sizes of caches. A size smaller than the longest request is a ValueError."""
    checked = check_sizes(sizes, name)
    longest = int(trace.lengths.max(initial=1))
    if checked.min() < longest:
        raise ValueError(f"{name}: got {checked.min()}, wanted at least {longest} blocks, the longest request")
    return checked


def check_sizes(sizes: Sequence[int] | np.ndarray, name: str = "sizes") -> np.ndarray:
    """i32[Z]; sizes of caches, perhaps too small for some requests. Other sizes are a ValueError."""
    wanted = "at least one number of blocks, each at least 1 and below 2**31"
    blocks = host_integers(name, sizes, np.int32, wanted)
    if not blocks.size or blocks.min() < 1:
        raise ValueError(f"{name}: got {reprlib.repr(sizes)}, wanted {wanted}")
    return blocks


@dataclasses.dataclass(frozen=True, eq=False)
class Hits:
    """The hits of every request in caches of several sizes.

    Requests follow one another unless `replay` has an `overlap`. Answers are not stored (see `summary`).

    Attributes:
      trace: the requests.
      rule: the rule of hits.
      sizes: i32[Z]; blocks of each cache.
      blocks: i32[Z, R]; blocks found by each request, 0 if the request is longer than the cache and refused.
      unserved: i32[Z]; the number of refused requests if requests overlap, else None.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 5, 9], [12, 8, 12], [0, 0, 0], [[1, 2, 3], [4, 5], [1, 2, 6]], block_size=4)
      >>> hits = research.lru_curve(trace, [4])
      >>> hits.blocks.tolist(), hits.rate.tolist()  # 2 of 8 blocks, in a cache of 4
      ([[0, 0, 2]], [0.25])
    """

    trace: Trace
    rule: Rule
    sizes: np.ndarray
    blocks: np.ndarray
    unserved: np.ndarray | None = None

    @property
    def refused(self) -> np.ndarray:
        """i32[Z]; requests without blocks, such as requests longer than the cache. They count as requested."""
        if self.unserved is not None:
            return self.unserved
        return np.sum(self.trace.lengths > self.sizes[:, None], axis=1, dtype=np.int32)

    @property
    def rate(self) -> np.ndarray:
        """f64[Z]; the share of requested blocks that were found."""
        return self.blocks.sum(axis=1) / max(len(self.trace.ids), 1)

    @property
    def uncached_tokens(self) -> np.ndarray:
        """i64[Z, R]; prompt tokens of each request that were not found, so a model computes them."""
        tokens = np.minimum(self.blocks.astype(np.int64) * self.trace.block_size, self.trace.input_length)
        return self.trace.input_length - tokens

    @property
    def token_rate(self) -> np.ndarray:
        """f64[Z]; the share of requested tokens that were found."""
        total = max(int(self.trace.input_length.sum(dtype=np.int64)), 1)
        return 1 - self.uncached_tokens.sum(axis=1) / total

    @property
    def mean_rate(self) -> np.ndarray:
        """f64[Z]; the share of a request's blocks that were found, averaged over requests."""
        return np.mean(self.blocks / np.maximum(self.trace.lengths, 1), axis=1)
