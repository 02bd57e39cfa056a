# SPDX-License-Identifier: Apache-2.0
"""Computes LRU for all sizes at once, by the cache size needed to find each block of a trace.

The caches of all sizes are the top parts of the same stack. The stack has the blocks in the order of their last use,
the latest first, and a prompt's first block before its others. A cache finds a block if, when the request arrives, the
block's position in the stack is below the number of blocks in the cache. This number is the cache's size, or one less:

- "papers": always the size.
- "kvjax": the last block of a prompt is not taken from the cache. It gets separate space, and then merges with its
  cached copy, if there is a copy, which leaves an empty block. If the copy is the last of `size` blocks, it is evicted
  to make this space.
- "full": like "kvjax", but a partly filled last block is not cached when its request ends, which also leaves an empty
  block.

The next request always takes the empty block. So the size needed for a block depends only on the position of the block
and on the position of the previous request's last block. All larger sizes find the block too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvjax.research.simulators.hits import Hits, Rule, check_longest, check_rule, num_cached, num_hittable
from kvjax.research.traces.trace import Runs, Trace, runs

_NEVER = np.iinfo(np.int32).max - 1  # the position of an unused block


def lru_curve(trace: Trace, sizes: Sequence[int] | np.ndarray, rule: Rule = "full") -> Hits:
    """The hits of every request under `kvjax.lru` in caches of any number of sizes, at the cost of a single size.

    The result is exact. It runs in numpy: a trace of 288,500 blocks takes some hundredths of a second, and 1,000 sizes
    take little more.

    Args:
      trace: the requests.
      sizes: blocks of each cache, Z of them, in any order.
      rule: the rule of hits; see `RULES`.

    Returns:
      The hits, blocks i32[Z, R].

    Raises:
      ValueError: for no sizes, an unknown rule, or a size smaller than the longest request. After a refused request the
        caches would no longer be parts of the same stack. Use `replay` or `simulate` for such sizes.

    Example:
      >>> from kvjax import research
      >>> prompts = [[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 5, 8]]  # ids of blocks
      >>> trace = research.make_trace([0, 1, 2, 3], [12] * 4, [0] * 4, prompts, block_size=4)
      >>> hits = research.lru_curve(trace, sizes=[4, 8])
      >>> hits.blocks.tolist(), hits.blocks.sum(axis=1).tolist()  # for each request, and in total
      ([[0, 0, 1, 1], [0, 0, 2, 2]], [2, 4])
    """
    check_rule(rule)
    checked = check_longest(trace, sizes)
    request, needed = _needed(trace, rule)
    # A block counts at the smallest size that finds it. Each size also finds all blocks of the next smaller size.
    order = np.argsort(checked, kind="stable")
    row = np.searchsorted(checked[order], needed)
    is_found = row < len(checked)
    blocks = np.zeros((len(checked), len(trace)), np.int32)
    np.add.at(blocks, (order[row[is_found]], request[is_found]), np.int32(1))
    for smaller, size in itertools.pairwise(order):
        blocks[size] += blocks[smaller]
    return Hits(trace, rule, checked, blocks)


def reuse_distances(trace: Trace, rule: Rule = "papers") -> np.ndarray:
    """i32[K']; the number of blocks in the smallest LRU cache to find each reused block.

    Under "papers" it is the block's position in the stack of last uses plus one, known as the reuse distance.

    Raises:
      ValueError: for an unknown rule.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 1, 2], [4] * 3, [0] * 3, [[1], [2], [1]], block_size=4)
      >>> research.reuse_distances(trace).tolist()  # a cache of two blocks finds the third prompt's
      [2]
    """
    check_rule(rule)
    return _needed(trace, rule)[1]


def _needed(trace: Trace, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """(i32[K'], i32[K']): the request of each hittable block, and the needed size."""
    used = num_cached(trace, rule)
    reused = runs(trace, used)
    top = _positions(reused, used)
    old = np.flatnonzero(reused.before >= 0)
    fields = (reused.request, reused.depth, top)
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
    """Positions i32[R]: the last block of each request, at p, leaves an empty block in caches of p + 2 blocks or more.

    -1 if the last block is partly filled and not cached, which leaves an empty block in all caches.
    """
    emptied = np.where(used < trace.lengths, np.int32(-1), np.int32(_NEVER))
    last = np.append(reused.request[1:] != reused.request[:-1], True)[: len(reused.request)]
    last &= (reused.before >= 0) & (used == trace.lengths)[reused.request]
    emptied[reused.request[last]] = top[last] + reused.length[last] - 1
    return emptied


def _positions(reused: Runs, used: np.ndarray) -> np.ndarray:
    """i32[U]; the position in the stack of the first block of each run. The run's other blocks follow it.

    Above it are the blocks used by the requests in between. Each of them counts once, at its first use in between. At
    this use, its run was last used no later than this run. The sum also contains all uses of earlier requests, which
    are subtracted.
    """
    earlier = np.searchsorted(reused.request, reused.request)
    counted = _weight_below(reused.before + 1, reused.length, earlier, reused.before + 2)
    return np.where(reused.before >= 0, counted - _sums_before(used)[reused.before + 1], _NEVER).astype(np.int32)


def _weight_below(values: np.ndarray, weights: np.ndarray, prefix: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """i64[U]; for each query, the sum of the weights of values[:prefix] below the bound.

    It is a wavelet matrix: entries are divided by the bits of their values, highest bit first, and stay in order within
    each part. On every level, a query is a range of entries. If the bound's bit is 1, the entries with a bit of 0 are
    below the bound.
    """
    low = np.zeros_like(prefix)
    high = prefix
    total = np.zeros(len(bound), np.int64)
    for bit in reversed(range(int(bound.max(initial=0)).bit_length())):
        is_zero = (values >> bit & 1) == 0
        zeros = _sums_before(is_zero)
        weight = _sums_before(np.where(is_zero, weights, 0))
        is_one = (bound >> bit & 1) == 1
        total += np.where(is_one, weight[high] - weight[low], 0)
        low = np.where(is_one, zeros[-1] + low - zeros[low], zeros[low])
        high = np.where(is_one, zeros[-1] + high - zeros[high], zeros[high])
        order = np.argsort(~is_zero, kind="stable")
        values = values[order]
        weights = weights[order]
    return total


def _sums_before(counts: np.ndarray) -> np.ndarray:
    """i64[K + 1]; the sum of the counts before each entry, and the total."""
    return np.append(0, np.cumsum(counts))
