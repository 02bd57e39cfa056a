# SPDX-License-Identifier: Apache-2.0
"""Caches of a single size over a trace, in plain Python, block by block: LRU under each rule, and Belady's choice.

A prompt is a list of ids. Each function returns the hits of every request.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
from collections.abc import Sequence

Prompts = Sequence[Sequence[int]]


def lru(prompts: Prompts, full: Sequence[int], size: int, rule: str) -> list[int]:
    """Evicts the least recently used block, and the last block of a prompt. Refuses a prompt longer than the cache.

    Args:
      prompts: the ids of each request's blocks.
      full: the number of full blocks of each request.
      size: blocks of the cache.
      rule: a key of `kvjax.research.RULES`.
    """
    cached: collections.OrderedDict[int, None] = collections.OrderedDict()  # in the order of eviction
    hits = []
    for prompt, num_full in zip(prompts, full, strict=True):
        if len(prompt) > size:
            hits.append(0)
            continue
        storable = prompt[:num_full] if rule == "full" else prompt
        num_hits = 0
        for block in storable if rule == "papers" else storable[: len(prompt) - 1]:
            if block not in cached:
                break
            num_hits += 1
        hits.append(num_hits)
        for block in prompt[:num_hits]:
            del cached[block]
        while len(cached) + len(prompt) > size:
            cached.popitem(last=False)
        for block in reversed(storable):
            cached[block] = None
            cached.move_to_end(block)
    return hits


def lfu(prompts: Prompts, full: Sequence[int], size: int, rule: str) -> list[int]:
    """Evicts the least often reused block, and the least recently used among equals, as `lru` but with a heap.

    A block is reused no more often than the block before it, so the blocks of a prompt leave from its end. Blocks
    reused more than 120 times count as equal.
    """
    reused: dict[int, int] = {}  # of the cached blocks
    keys: dict[int, int] = {}  # of those that no request holds: (reuses, time of release)
    heap: list[tuple[int, int]] = []  # (key, block); outdated entries are skipped
    clock, hits = 0, []
    for prompt, num_full in zip(prompts, full, strict=True):
        if len(prompt) > size:
            hits.append(0)
            continue
        storable = prompt[:num_full] if rule == "full" else prompt
        num_hits = 0
        for block in storable if rule == "papers" else storable[: len(prompt) - 1]:
            if block not in keys:
                break
            num_hits += 1
        hits.append(num_hits)
        for block in prompt[:num_hits]:
            del keys[block]
        while len(keys) + len(prompt) > size:
            key, block = heapq.heappop(heap)
            if keys.get(block) == key:
                del keys[block], reused[block]
        for block in reversed(storable):
            times = reused[block] = reused.get(block, -1) + 1
            keys[block] = key = (min(times, 120) << 40) + clock
            heapq.heappush(heap, (key, block))
            clock += 1
    return hits


def next_uses(prompts: Prompts) -> list[list[int]]:
    """For each block of each prompt, the next request with it, or the number of requests if there is none."""
    coming: dict[int, int] = {}
    uses = []
    for request in reversed(range(len(prompts))):
        uses.append([coming.get(block, len(prompts)) for block in prompts[request]])
        coming.update(dict.fromkeys(prompts[request], request))
    return uses[::-1]


def belady(prompts: Prompts, uses: list[list[int]], size: int, bypass: bool = False) -> list[int]:
    """Evicts the block with the farthest next use, and the deepest among equals, with rule "papers".

    Args:
      prompts: the ids of each request's blocks.
      uses: their `next_uses`.
      size: blocks of the cache.
      bypass: whether a request's own blocks may leave at once.
    """
    cached: dict[int, int] = {}  # id -> its next use
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, id); outdated entries are skipped
    hits = []
    for prompt, coming in zip(prompts, uses, strict=True):
        num_hits = 0
        for block in prompt:
            if block not in cached:
                break
            num_hits += 1
        hits.append(num_hits)
        for block in prompt[:num_hits]:
            del cached[block]
        if not bypass:
            _evict(cached, heap, size - len(prompt))
        for depth, (block, use) in enumerate(zip(prompt, coming, strict=True)):
            cached[block] = use
            heapq.heappush(heap, (-use, -depth, block))
        _evict(cached, heap, size)
    return hits


def _evict(cached: dict[int, int], heap: list[tuple[int, int, int]], capacity: int) -> None:
    while len(cached) > capacity:
        use, _, block = heapq.heappop(heap)
        if cached.get(block) == -use:
            del cached[block]


def belady_by_runs(lengths: Sequence[int], coming: list[list[tuple[int, int]]], size: int) -> list[int]:
    """`belady` without bypass, faster: it counts the blocks of equal next use instead of naming them.

    Args:
      lengths: blocks of each prompt.
      coming: (next use, number of blocks) of each prompt, see `next_runs`.
      size: blocks of the cache.
    """
    cached = [0] * (len(lengths) + 1)  # by next use
    heap: list[int] = []  # -next use
    hits, in_all = [], 0
    for request, (length, runs) in enumerate(zip(lengths, coming, strict=True)):
        hits.append(cached[request])
        in_all -= cached[request]
        cached[request] = 0
        while in_all > size - length:
            use = -heap[0]
            in_all -= cached[use]
            cached[use] = max(size - length - in_all, 0)
            in_all += cached[use]
            if not cached[use]:
                heapq.heappop(heap)
        for use, count in runs:
            if not cached[use]:
                heapq.heappush(heap, -use)
            cached[use] += count
        in_all += length
    return hits


def next_runs(uses: list[list[int]]) -> list[list[tuple[int, int]]]:
    """(next use, number of blocks) of each prompt, from the `next_uses` of its blocks."""
    return [[(use, len(list(run))) for use, run in itertools.groupby(of_prompt)] for of_prompt in uses]


def most_hits(prompts: Prompts, size: int, bypass: bool = False) -> int:
    """The maximum hits of any cache, by trying every way to evict, with rule "papers", for tiny traces."""

    @functools.cache
    def best(request: int, cached: frozenset[int]) -> int:
        if request == len(prompts):
            return 0
        prompt = prompts[request]
        num_hits = sum(1 for _ in itertools.takewhile(cached.__contains__, prompt))
        stays = frozenset() if bypass else frozenset(prompt)
        others = sorted((cached | set(prompt)) - stays)
        choices = itertools.combinations(others, min(len(others), size - len(stays)))
        return num_hits + max(best(request + 1, stays.union(kept)) for kept in choices)

    return best(0, frozenset())
