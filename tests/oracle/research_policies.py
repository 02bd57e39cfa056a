# SPDX-License-Identifier: Apache-2.0
"""What requests find in a cache whose blocks of the lowest score leave, in plain Python: one block at a time.

Requests follow one another. A block is a number here, an id of the trace; equal ids are equal prefixes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from kvjax.research import Trace

NONE = -1


def cached_part(trace: Trace, request: int, rule: str) -> list[int]:
    """The blocks of a request that are cached when it is over."""
    ids = trace.blocks(request).tolist()
    return ids[: trace.full[request]] if rule == "full" else ids


class Scored:
    """A cache whose leaves of the lowest score leave, told as arrays with an entry for each block of memory.

    Attributes:
      holds: the id that each block holds, NONE if none.
      parent: the block before it, NONE at a root.
      children: cached blocks after it.
      depth, hits, stored, released: as in `kvjax.state.Blocks`.
      held: whether the request that is served holds it.
      clock: counts publications and releases.
      empty: a stack; the last one is taken first.
      of: the block of each id that is cached.
    """

    def __init__(self, size: int, score: Callable[[Scored], np.ndarray]):
        self.score = score
        self.holds, self.parent = np.full(size, NONE), np.full(size, NONE)
        self.children, self.depth, self.hits, self.stored, self.released = np.zeros((5, size), np.int64)
        self.held = np.zeros(size, bool)
        self.clock = 0
        self.empty = list(range(size))[::-1]
        self.of: dict[int, int] = {}

    def serve(self, ids: list[int], kept: int, taken: int) -> int:
        """Serves a request that leaves the first `kept` of its blocks; how many of the first `taken` it finds."""
        if len(ids) > len(self.holds):
            return 0
        found = next((i for i, each in enumerate(ids[:taken]) if each not in self.of), taken)
        row = [self.of[each] for each in ids[:found]]
        self.held[row] = True
        self.hits[row] += 1
        row += self.take(len(ids) - found)
        self.held[row] = True
        for i in range(found, kept):
            if ids[i] in self.of:  # a last block, which was cached and is not any longer needed twice
                self.hits[self.of[ids[i]]] += 1
                self.empty.append(row[i])
                row[i] = self.of[ids[i]]
            else:
                self.publish(row[i], ids[i], row[i - 1] if i else NONE, i)
        for block in row[::-1]:
            if self.holds[block] == NONE:
                self.empty.append(block)
            else:
                self.released[block] = self.clock
                self.clock += 1
        self.held[:] = False
        return found

    def publish(self, block: int, number: int, parent: int, depth: int) -> None:
        self.holds[block], self.of[number] = number, block
        self.parent[block], self.depth[block], self.hits[block], self.stored[block] = parent, depth, 0, self.clock
        self.clock += 1
        if parent != NONE:
            self.children[parent] += 1

    def take(self, number: int) -> list[int]:
        """Empty blocks, then those of the leaves of the lowest scores.

        Of equal scores that of the lower block leaves first; a parent that becomes a leaf stands in its last child's
        place.
        """
        taken = [self.empty.pop() for _ in range(min(number, len(self.empty)))]
        if len(taken) == number:
            return taken
        scores = self.score(self)
        idle = (self.holds != NONE) & ~self.held
        leaves = np.flatnonzero(idle & (self.children == 0))
        order = leaves[np.argsort(scores[leaves], kind="stable")].tolist()
        front = [(scores[block], place, block) for place, block in enumerate(order)]  # sorted, so a heap
        while len(taken) < number:
            _, place, block = heapq.heappop(front)
            taken.append(block)
            parent = self.parent[block]
            del self.of[self.holds[block]]
            self.holds[block] = NONE
            if parent != NONE:
                self.children[parent] -= 1
                if idle[parent] and not self.children[parent]:
                    heapq.heappush(front, (scores[parent], place, int(parent)))
        return taken


def score_hits(trace: Trace, size: int, rule: str, score: Callable[[Scored], np.ndarray]) -> list[int]:
    """Blocks that each request finds if the leaf of the lowest score leaves, again and again."""
    cache, hits = Scored(size, score), []
    for request, length in enumerate(trace.lengths.tolist()):
        taken = length if rule == "papers" else length - 1
        hits.append(cache.serve(trace.blocks(request).tolist(), len(cached_part(trace, request, rule)), taken))
    return hits


def lru(cache: Scored) -> np.ndarray:
    """The least recently released leaves first."""
    return cache.released


def lfu(cache: Scored) -> np.ndarray:
    """The least often reused one, among equals the least recently released; 120 times is often enough."""
    return np.minimum(cache.hits, 120) * 2.0**40 + cache.released


def fifo(cache: Scored) -> np.ndarray:
    """The one that was stored first."""
    return cache.stored


def cost_aware(balance: float) -> Callable[[Scored], np.ndarray]:
    """The lowest cost / age in float32, where positions and the balance count blocks."""

    def score(cache: Scored) -> np.ndarray:
        cost = np.float32(balance) + (cache.depth.astype(np.float32) + np.float32(0.5))
        return cost / np.maximum(cache.clock - cache.released, 1).astype(np.float32)

    return score
