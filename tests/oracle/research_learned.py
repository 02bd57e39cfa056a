# SPDX-License-Identifier: Apache-2.0
"""A learned policy, its counts and its evictions, in plain Python, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.research import Trace
from tests.oracle.research_policies import NONE, Scored, cached_part

HITS, AGES = (1, 2, 4), 52


def age_range(age: int) -> int:
    """The range of an age: two ranges an octave, from 32 on."""
    octave = max(age, 32).bit_length() - 1
    return 2 * (octave - 5) + (max(age, 32) >= 1.5 * 2**octave)


def label(hits: int, length: int, is_last: bool, lengths: Sequence[int]) -> int:
    """The class of a block."""
    often, long = sum(hits >= least for least in HITS), sum(length >= least for least in lengths)
    return (often * (len(lengths) + 1) + long) * 2 + is_last


def density(hazard: Sequence[float], limits: Sequence[float]) -> list[float]:
    """The best ratio of hits to time over all horizons, for each age."""
    best = []
    for age in range(len(hazard)):
        survival, hits, time, density = 1.0, 0.0, 0.0, 0.0
        for later in range(age, len(hazard)):
            hits += survival * hazard[later]
            time += survival * (limits[later + 1] - limits[later]) * (1 - hazard[later] / 2)
            survival *= 1 - hazard[later]
            density = max(density, hits / time)
        best.append(density)
    return best


def counts(trace: Trace, rule: str, lengths: Sequence[int], first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """The releases of requests first..last-1 in a cache without bound: (used again, seen), by class and age."""
    clock, hits, out = 0, {}, {}
    used, seen = np.zeros((2, (len(HITS) + 1) * (len(lengths) + 1) * 2, AGES))

    def over(block: int, again: bool) -> None:
        label_of_block, released, counted = out.pop(block)
        if not counted:
            return
        age = age_range(clock - released)
        seen[label_of_block, :age] += 1
        seen[label_of_block, age] += 1 if again else 0.5
        used[label_of_block, age] += again

    for request in range(last):
        ids = cached_part(trace, request, rule)
        for block in ids:
            if block in hits:
                over(block, True)
        clock += sum(block not in hits for block in ids)
        for block in ids:
            hits[block] = hits.get(block, NONE) + 1
        for depth in reversed(range(len(ids))):
            block_label = label(hits[ids[depth]], len(ids), depth + 1 == len(ids), lengths)
            out[ids[depth]] = (block_label, clock, request >= first)
            clock += 1
    for block in list(out):
        over(block, False)
    return used, seen


class Classed(Scored):
    """A cache which compares the oldest leaves of all classes, and evicts the leaf with the lowest hit density."""

    def __init__(self, size: int, table: np.ndarray, lengths: Sequence[int]):
        super().__init__(size, lambda cache: cache.stored)
        self.table, self.lengths, self.label = table, lengths, np.zeros(size, np.int64)

    def serve(self, ids: list[int], published: int, taken: int) -> int:
        num_hits = super().serve(ids, published, taken)
        if len(ids) <= len(self.holds):
            for depth, block_id in enumerate(ids[:published]):
                block = self.of[block_id]
                self.label[block] = label(int(self.hits[block]), published, depth + 1 == published, self.lengths)
        return num_hits

    def evict(self, count: int) -> list[int]:
        gone = []
        while len(gone) < count:
            leaves = np.flatnonzero((self.holds != NONE) & (self.holders == 0) & (self.children == 0)).tolist()
            heads: dict[int, int] = {}
            for block in sorted(leaves, key=lambda block: self.released[block]):
                heads.setdefault(int(self.label[block]), block)
            ages = {label: age_range(int(self.clock - self.released[block])) for label, block in heads.items()}
            density = {label: self.table[label, age] for label, age in ages.items()}
            block = heads[min(density, key=lambda label: (density[label], label))]
            gone.append(block)
            del self.of[self.holds[block]]
            self.holds[block] = NONE
            if self.parent[block] != NONE:
                self.children[self.parent[block]] -= 1
        return gone


def learned_hits(trace: Trace, size: int, rule: str, table: np.ndarray, lengths: Sequence[int]) -> list[int]:
    """Blocks which each request finds in a cache with a learned table."""
    cache, hits = Classed(size, table, lengths), []
    for request, length in enumerate(trace.lengths.tolist()):
        taken = length if rule == "papers" else length - 1
        hits.append(cache.serve(trace.blocks(request).tolist(), len(cached_part(trace, request, rule)), taken))
    return hits
