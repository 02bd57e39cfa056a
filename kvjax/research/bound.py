# SPDX-License-Identifier: Apache-2.0
"""Belady's bound: the most that any policy could find, if it knew the whole trace beforehand.

Belady evicts the block whose next use is farthest away, of equal ones the deepest. A parent is used no later than its
children, so what is cached stays a forest, and no policy that caches prefixes finds more.

No cache has to be simulated for the answer. A block that is kept from one use to the next takes one block of the cache
while each request in between runs. So requests are taken in order, and each finds what all requests in between have
left room for. Room goes to the nearest next use first, which is evicting the farthest first: both ways find the most
that can be found in every beginning of the trace, so they are equal request by request.

Room is counted by its age. Room that has been free since request q serves all blocks that were last used at q or later;
a block takes the youngest room that is old enough.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from kvjax.research._runs import check_sizes, runs
from kvjax.research.rules import Hits
from kvjax.research.traces import Trace


def belady(trace: Trace, sizes: Sequence[int] | np.ndarray, *, bypass: bool = False) -> Hits:
    """The hits of every request under the best policy there could be, for the rule "papers".

    For the rules "kvjax" and "full" this is an upper bound, not the best: whatever their caches hold, this one may hold
    too, but there a last block comes back for nothing. Runs in plain Python, some milliseconds a size for 12,000
    requests.

    Args:
      trace: the requests.
      sizes: blocks of each cache, Z of them, in any order.
      bypass: the cache need not take the blocks of a request, neither while it runs nor when it ends: a pool apart from
        the GPU's memory. False: it holds all of them while the request runs, and then caches them.

    Returns:
      The hits, blocks i32[Z, R].

    Raises:
      ValueError: for a size smaller than the longest request.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966); as a choice of intervals,
    Carlisle and Lloyd, "On the k-coloring of intervals" (1995).
    """
    checked = check_sizes(trace, sizes)
    request, before, _, length = runs(trace, trace.lengths)
    # No request in between: only a pool that need not take them can lack them.
    at_hand = (before >= 0) & (before == request - 1) & (not bypass)
    wanted = (before >= 0) & ~at_hand
    edges = np.searchsorted(request[wanted], np.arange(len(trace) + 1)).tolist()
    of_trace = list(zip(before[wanted].tolist(), length[wanted].tolist(), strict=True))
    of_request = [of_trace[first:last] for first, last in itertools.pairwise(edges)]
    running = [0] * len(trace) if bypass else trace.lengths.tolist()
    blocks = np.zeros((len(checked), len(trace)), np.int32)
    blocks[:, request[at_hand]] = length[at_hand]
    for size, hits in zip(checked.tolist(), blocks, strict=True):
        hits += _kept(size, of_request, running, bypass)
    return Hits(trace, "papers", checked, blocks)


def _kept(size: int, of_request: list[list[tuple[int, int]]], running: list[int], bypass: bool) -> np.ndarray:
    """i32[R]; how many blocks a cache of one size keeps for each request.

    Args:
      size: blocks of the cache.
      of_request: (last request that used them, how many) of the blocks that each request wants kept, latest first.
      running: blocks that each request takes while it runs.
      bypass: a block has to be kept from the end of the last request that used it; False: from the one after that.
    """
    hits = np.zeros(len(running), np.int32)
    since: list[int] = []  # ascending: free[i] blocks of the cache have been free since request since[i]
    free: list[int] = []
    in_all = 0
    for request, wanted in enumerate(of_request):
        for before, number in wanted:
            taken = _take(since, free, bisect.bisect_right(since, before), number)
            hits[request] += taken
            in_all -= taken
        room = size - running[request]
        if in_all > room:
            _take(since, free, len(since), in_all - room)
        elif in_all < room:
            since.append(request if bypass else request - 1)
            free.append(room - in_all)
        in_all = room
    return hits


def _take(since: list[int], free: list[int], end: int, wanted: int) -> int:
    """Takes room from the first `end` entries, the youngest first; returns how many blocks, at most those wanted."""
    at, left = end, wanted
    while at and free[at - 1] <= left:
        at -= 1
        left -= free[at]
    del since[at:end], free[at:end]
    if at and left:
        free[at - 1] -= left
        left = 0
    return wanted - left
