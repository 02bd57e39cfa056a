# SPDX-License-Identifier: Apache-2.0
"""Hits of requests in a cache which evicts the block with the lowest score, in plain Python, block by block.

Requests follow each other. A block is an id of the trace, and equal ids are equal prefixes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import numpy as np

from kvjax.research import Overlap, Trace

NONE = -1


def cached_part(trace: Trace, request: int, rule: str) -> list[int]:
    """The blocks of a request which stay cached after it."""
    ids = trace.blocks(request).tolist()
    return ids[: trace.full[request]] if rule == "full" else ids


class Scored:
    """A cache which evicts the leaf with the lowest score. Its arrays have an entry for each block of memory.

    Attributes:
      holds: the id in each block, or NONE.
      parent: the block before it, NONE at a root.
      children: cached blocks after it.
      depth: depth, as in `kvjax.state.Blocks`. The same holds for `hits`, `stored` and `released`.
      holders: rows which hold it.
      clock: counts publications and releases.
      empty: a stack. The last block is taken first.
      of: the block of each cached id.
    """

    def __init__(self, size: int, score: Callable[[Scored], np.ndarray]):
        self.score = score
        self.holds, self.parent = np.full(size, NONE), np.full(size, NONE)
        self.children, self.depth, self.hits, self.stored, self.released = np.zeros((5, size), np.int64)
        self.holders = np.zeros(size, np.int64)
        self.clock = 0
        self.empty = list(range(size))[::-1]
        self.of: dict[int, int] = {}

    def serve(self, ids: list[int], published: int, taken: int) -> int:
        """Serves a request which publishes its first blocks. Returns how many of its first `taken` blocks it finds."""
        if len(ids) > len(self.holds):
            return 0
        num_hits, row = self.admit(ids, taken)
        self.commit(ids, num_hits, published, row)
        self.release(row)
        return num_hits

    def admit(self, ids: list[int], taken: int) -> tuple[int, list[int]]:
        """The number of a prompt's first `taken` blocks in the cache, and its row: these and new blocks."""
        num_hits = next((i for i, block_id in enumerate(ids[:taken]) if block_id not in self.of), taken)
        row = [self.of[block_id] for block_id in ids[:num_hits]]
        self.holders[row] += 1
        self.hits[row] += 1
        return num_hits, row + self.take(len(ids) - num_hits)

    def commit(self, ids: list[int], num_hits: int, published: int, row: list[int]) -> None:
        """Publishes the first blocks of a row. A cached block replaces the row's equal block."""
        for i in range(num_hits, published):
            if ids[i] in self.of:
                self.hits[self.of[ids[i]]] += 1
                self.give_back(row[i])
                row[i] = self.of[ids[i]]
                self.holders[row[i]] += 1
            else:
                self.publish(row[i], ids[i], row[i - 1] if i else NONE, i)

    def release(self, row: list[int]) -> None:
        """Gives back a row's blocks, the last first."""
        for block in row[::-1]:
            self.give_back(block)

    def give_back(self, block: int) -> None:
        """Drops a row's hold on a block. If nobody else holds it, it is empty or cached."""
        self.holders[block] -= 1
        if not self.holders[block]:
            if self.holds[block] == NONE:
                self.empty.append(block)
            else:
                self.released[block] = self.clock
                self.clock += 1

    def publish(self, block: int, block_id: int, parent: int, depth: int) -> None:
        self.holds[block], self.of[block_id] = block_id, block
        self.parent[block], self.depth[block], self.hits[block], self.stored[block] = parent, depth, 0, self.clock
        self.clock += 1
        if parent != NONE:
            self.children[parent] += 1

    def take(self, count: int) -> list[int]:
        """Takes empty blocks, then the leaves with the lowest scores.

        Among equal scores the lower block leaves first. A parent which becomes a leaf gets the rank of its last child.
        """
        taken = [self.empty.pop() for _ in range(min(count, len(self.empty)))]
        if len(taken) < count:
            taken += self.evict(count - len(taken))
        self.holders[taken] = 1
        return taken

    def evict(self, count: int) -> list[int]:
        """Evicts so many leaves, the lowest score first."""
        scores = self.score(self)
        idle = (self.holds != NONE) & (self.holders == 0)
        leaves = np.flatnonzero(idle & (self.children == 0))
        order = leaves[np.argsort(scores[leaves], kind="stable")].tolist()
        front = [(scores[block], rank, block) for rank, block in enumerate(order)]  # sorted, so a heap
        gone = []
        while len(gone) < count:
            _, rank, block = heapq.heappop(front)
            gone.append(block)
            parent = self.parent[block]
            del self.of[self.holds[block]]
            self.holds[block] = NONE
            if parent != NONE:
                self.children[parent] -= 1
                if idle[parent] and not self.children[parent]:
                    heapq.heappush(front, (scores[parent], rank, int(parent)))
        return gone

    def num_available(self) -> int:
        """The number of empty or evictable blocks."""
        return int(np.sum(self.holders == 0))


def score_hits(trace: Trace, size: int, rule: str, score: Callable[[Scored], np.ndarray]) -> list[int]:
    """The number of blocks which each request finds in a cache which evicts the leaf with the lowest score."""
    cache, hits = Scored(size, score), []
    for request, length in enumerate(trace.lengths.tolist()):
        taken = length if rule == "papers" else length - 1
        hits.append(cache.serve(trace.blocks(request).tolist(), len(cached_part(trace, request, rule)), taken))
    return hits


def overlapped_hits(
    trace: Trace, overlap: Overlap, size: int, rule: str, score: Callable[[Scored], np.ndarray]
) -> tuple[list[int], int]:
    """The number of blocks which each of several overlapping requests finds, and the number of requests without blocks.

    A request's blocks are published when it begins. A request without blocks for its answer gives back its prompt's at
    once.
    """
    cache, rows, hits, refused = Scored(size, score), {}, [0] * len(trace), 0
    for request, begins in zip(overlap.request.tolist(), overlap.admit.tolist(), strict=True):
        if not begins:
            cache.release(rows.pop(request, []))
            continue
        ids, published = trace.blocks(request).tolist(), len(cached_part(trace, request, rule))
        cached = list(itertools.takewhile(cache.of.__contains__, ids[:-1]))
        idle = sum(1 for block_id in cached if not cache.holders[cache.of[block_id]])
        if len(ids) - len(cached) > cache.num_available() - idle:
            refused += 1
            continue
        num_hits, row = cache.admit(ids, len(ids) - 1)
        cache.commit(ids, num_hits, published, row)
        answer = int(overlap.blocks[request]) - len(ids)
        if answer > cache.num_available():
            refused += 1
            cache.release(row)
            continue
        rows[request] = row + cache.take(answer)
        hits[request] = num_hits
    return hits, refused


def lru(cache: Scored) -> np.ndarray:
    """The score of LRU: the least recently released block leaves first."""
    return cache.released


def lfu(cache: Scored) -> np.ndarray:
    """The score of LFU: the least often reused block (at most 120 times), among equals the least recently released."""
    return np.minimum(cache.hits, 120) * 2.0**40 + cache.released


def fifo(cache: Scored) -> np.ndarray:
    """The score of FIFO: the block stored first."""
    return cache.stored


def cost_aware(balance: float) -> Callable[[Scored], np.ndarray]:
    """The score cost / age in float32, where positions and the balance count blocks."""

    def score(cache: Scored) -> np.ndarray:
        cost = np.float32(balance) + (cache.depth.astype(np.float32) + np.float32(0.5))
        return cost / np.maximum(cache.clock - cache.released, 1).astype(np.float32)

    return score
