# SPDX-License-Identifier: Apache-2.0
"""LRU at every size at once: the number of blocks that a cache needs to find each block of a trace.

Caches of all sizes are the tops of one stack, which has the blocks in the order of their last use, and of one prompt
the first block on top. A cache finds a block if its position in the stack, when the request comes, is less than the
number of blocks that the cache has then. That is its size, or one less:

- "papers": always its size.
- "kvjax": the last block of a prompt is not taken from the cache. It gets space of its own, and merges with its cached
  copy, if there is one: that leaves one block empty. A copy that is the last of `size` blocks is evicted for the space.
- "full": that, and a last block filled in part is not cached when its request ends: that leaves one empty, too.

The next request always takes the block that is empty. So the size that finds a block depends only on its own position
and on that of the last block of the request before. All larger sizes find it too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvjax.research.simulators.hits import Hits, Rule, check_longest, check_rule, num_cached, num_hittable
from kvjax.research.traces.trace import Runs, Trace, runs

_NEVER = np.iinfo(np.int32).max - 1  # the position of a block that was never used


def lru_curve(trace: Trace, sizes: Sequence[int] | np.ndarray, rule: Rule = "full") -> Hits:
    """The hits of every request under `kvjax.lru` in caches of any number of sizes, at the cost of one.

    Exact. Runs in numpy: a trace of 288,500 blocks takes some hundredths of a second, and 1,000 sizes little more.

    Args:
      trace: the requests.
      sizes: blocks of each cache, Z of them, in any order.
      rule: what counts as a hit; see `RULES`.

    Returns:
      The hits, blocks i32[Z, R].

    Raises:
      ValueError: for no sizes; for a size smaller than the longest request: `replay` and `simulate` refuse single
        requests, after which the caches are no longer one stack. And for a rule that does not exist.

    Example:
      >>> from kvjax import research
      >>> prompts = [[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 5, 8]]  # ids of blocks
      >>> trace = research.make_trace([0, 1, 2, 3], [12] * 4, [0] * 4, prompts, block_size=4)
      >>> hits = research.lru_curve(trace, sizes=[4, 8])
      >>> hits.blocks.tolist(), hits.blocks.sum(axis=1).tolist()  # of each request; of all
      ([[0, 0, 1, 1], [0, 0, 2, 2]], [2, 4])
    """
    check_rule(rule)
    checked = check_longest(trace, sizes)
    request, needed = _needed(trace, rule)
    # A block counts at the least size that finds it; a size finds what the next smaller one finds, too.
    order = np.argsort(checked, kind="stable")
    row = np.searchsorted(checked[order], needed)
    found = row < len(checked)
    blocks = np.zeros((len(checked), len(trace)), np.int32)
    np.add.at(blocks, (order[row[found]], request[found]), np.int32(1))
    for smaller, size in itertools.pairwise(order):
        blocks[size] += blocks[smaller]
    return Hits(trace, rule, checked, blocks)


def reuse_distances(trace: Trace, rule: Rule = "papers") -> np.ndarray:
    """i32[K']; the blocks that an LRU cache needs to find each block that comes again.

    Under "papers" that is the block's position in the stack of last uses and one, the reuse distance of other work.

    Raises:
      ValueError: for a rule that does not exist.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 1, 2], [4] * 3, [0] * 3, [[1], [2], [1]], block_size=4)
      >>> research.reuse_distances(trace).tolist()  # a cache of two blocks finds the third prompt's
      [2]
    """
    check_rule(rule)
    return _needed(trace, rule)[1]


def _needed(trace: Trace, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """(i32[K'], i32[K']): the request of each block that may hit, and the size that it needs."""
    used = num_cached(trace, rule)
    reused = runs(trace, used)
    top = _positions(reused, used)
    old = np.flatnonzero(reused.before >= 0)
    fields = reused.request, reused.depth, top
    request, depth, position = (np.repeat(field[old], reused.length[old]) for field in fields)
    within = np.arange(len(request)) - np.repeat(_sums_before(reused.length[old])[:-1], reused.length[old])
    position = position + within.astype(np.int32)
    if rule == "papers":
        return request, position + 1
    empty = np.append(np.int32(_NEVER), _emptied(trace, used, reused, top)[:-1])
    may_hit = depth + within < num_hittable(trace, rule)[request]
    needed = position + 1 + (position > empty[request]).astype(np.int32)
    return request[may_hit], needed[may_hit]


def _emptied(trace: Trace, used: np.ndarray, reused: Runs, top: np.ndarray) -> np.ndarray:
    """i32[R]; the position p of each request's last block: it leaves a block empty in caches of p + 2 blocks or more.

    -1 where the last block is filled in part and not cached: that leaves one in all of them.
    """
    emptied = np.where(used < trace.lengths, np.int32(-1), np.int32(_NEVER))
    last = np.append(reused.request[1:] != reused.request[:-1], True)[: len(reused.request)]
    last &= (reused.before >= 0) & (used == trace.lengths)[reused.request]
    emptied[reused.request[last]] = top[last] + reused.length[last] - 1
    return emptied


def _positions(reused: Runs, used: np.ndarray) -> np.ndarray:
    """i32[U]; the position in the stack of the first block of each run; the others of the run follow it.

    Above it are the blocks that the requests in between used. Each counts once, at its first use in between: that is
    where its run was last used no later than this one was. What requests up to then used always counts so, and is
    taken off again.
    """
    earlier = np.searchsorted(reused.request, reused.request)
    counted = _weight_below(reused.before + 1, reused.length, earlier, reused.before + 2)
    return np.where(reused.before >= 0, counted - _sums_before(used)[reused.before + 1], _NEVER).astype(np.int32)


def _weight_below(values: np.ndarray, weights: np.ndarray, prefix: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """i64[U]; for each query, the sum of the weights of values[:prefix] that are less than the bound.

    A wavelet matrix: entries are parted by their values' bits, highest first, and stay in order within each part. A
    query is a range of entries on every level. Where the bound has a one, those with a zero are less.
    """
    low, high = np.zeros_like(prefix), prefix
    total = np.zeros(len(bound), np.int64)
    for bit in reversed(range(int(bound.max(initial=0)).bit_length())):
        zero = (values >> bit & 1) == 0
        zeros, weight = _sums_before(zero), _sums_before(np.where(zero, weights, 0))
        one = (bound >> bit & 1) == 1
        total += np.where(one, weight[high] - weight[low], 0)
        low, high = (np.where(one, zeros[-1] + at - zeros[at], zeros[at]) for at in (low, high))
        order = np.argsort(~zero, kind="stable")
        values, weights = values[order], weights[order]
    return total


def _sums_before(counts: np.ndarray) -> np.ndarray:
    """i64[K + 1]; the sum of the counts before each entry, and of all."""
    return np.append(0, np.cumsum(counts))
