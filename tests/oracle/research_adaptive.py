# SPDX-License-Identifier: Apache-2.0
"""The policy `adaptive` in plain Python: its notes, counts and densities, and the blocks that it evicts, one at a time.

Sums are floats of 64 bits, and the library's of 32.
"""

from __future__ import annotations

import collections
import dataclasses
import math

import numpy as np

from kvjax.research import Trace
from tests.oracle.research_policies import NONE, Scored, cached_part

LEVELS, AGES, VALUES = 8, 52, 16
STARTS = [0.0] + [2.0 ** (5 + n // 2) * (1 + n % 2 / 2) for n in range(1, AGES + 1)]
NAMES = ("turns", "new", "uses", "gap", "level")


def mix(word: int) -> int:
    """MurmurHash3's finaliser."""
    word = (word ^ word >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ word >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ word >> 16


def age_range(age: int) -> int:
    """The last range that begins at or before this age."""
    return max(n for n in range(AGES) if n == 0 or STARTS[n] <= age)


def log_odds(share: float) -> float:
    return math.log(share) - math.log1p(-share)


@dataclasses.dataclass
class Note:
    """The last release of an id: when, its values by name, and its uses."""

    id: int
    clock: int
    values: dict[str, int]
    uses: int


class Adaptive(Scored):
    """A cache that learns from each request, and evicts by density."""

    def __init__(self, size: int, slots: int):
        super().__init__(size, lambda cache: cache.stored)
        self.slots = slots
        self.of_block: dict[int, Note] = {}  # of blocks since they were published
        self.of_slot: dict[int, Note] = {}
        self.seen: set[int] = set()  # blocks ever released
        self.released_by, self.reused_by = ({name: [0.0] * VALUES for name in NAMES} for _ in range(2))
        self.ages, self.squares = [0.0] * AGES, 0.0
        self.density = [[0.0] * AGES for _ in range(LEVELS)]
        self.level = np.zeros(size, np.int64)
        self.parked: set[int] = set()
        self.due = NONE

    def publish(self, block: int, number: int, parent: int, depth: int) -> None:
        super().publish(block, number, parent, depth)
        self.of_block.pop(block, None)

    def release(self, row: list[int]) -> None:
        cached = [block for block in row if self.holds[block] != NONE]
        super().release(row)
        if cached:
            self.learn(cached)

    def note_of(self, block: int) -> Note | None:
        if block in self.of_block:
            return self.of_block[block]
        note = self.of_slot.get(self.slot(block))
        return note if note is not None and note.id == self.holds[block] else None

    def slot(self, block: int) -> int:
        return mix(mix(int(self.holds[block]))) % self.slots

    def learn(self, row: list[int]) -> None:
        """Counts the reuse of a request's blocks, and notes them."""
        notes = [self.note_of(block) for block in row]
        begin = int(self.released[row].min()) - sum(block not in self.of_block for block in row)
        known = [column for column, note in enumerate(notes) if note]
        deepest = max(known, default=-1)
        self.seen |= set(row)
        factor = 2 ** (-len(row) / (64 * len(self.seen)))
        for table in (*self.released_by.values(), *self.reused_by.values(), self.ages):
            table[:] = [value * factor for value in table]
        self.squares *= factor
        age = {column: max(begin - notes[column].clock, 0) for column in known}
        for column in known:
            self.ages[age_range(age[column])] += 1
            for name, value in notes[column].values.items():
                self.reused_by[name][value] += 1
        turns = min(notes[deepest].uses + 1, 255) if known else 0
        common = {
            "turns": sum(turns >= least for least in (1, 2, 3, 4, 6, 10, 20)),
            "new": min((len(row) - 1 - deepest).bit_length(), 15),
            "gap": 1 + min((age[deepest] // 32).bit_length(), 14) if known else 0,
        }
        values, uses = [], []
        for column, note in enumerate(notes):
            uses.append(min(note.uses + 1, 255) if note else turns if column < deepest else 0)
            values.append(common | {"uses": sum(uses[-1] >= least for least in (1, 2, 3, 4, 8, 16))})
        levels = [self.level_of(each) for each in values]  # before this request is counted
        for column in reversed(range(len(row))):
            each = values[column] | {"level": levels[column]}
            block = row[column]
            note = Note(int(self.holds[block]), int(self.released[block]), each, uses[column])
            self.of_block[block] = self.of_slot[self.slot(block)] = note
            self.level[block] = levels[column]
            self.parked.discard(block)
            for name, value in each.items():
                self.released_by[name][value] += 1
        self.squares += len(row) ** 2
        self.density = [self.density_of(level) for level in range(LEVELS)]

    def weight(self) -> float:
        return 4 * max(self.squares / max(sum(self.released_by["turns"]), 1), 1)

    def level_of(self, values: dict[str, int]) -> int:
        if not sum(self.ages):
            return LEVELS // 2
        average = (sum(self.ages) + 1) / (sum(self.released_by["turns"]) + 2)
        odds = base = log_odds(min(max(average, 1e-3), 1 - 1e-3))
        for name, value in values.items():
            more = self.weight()
            share = (self.reused_by[name][value] + more * average) / (self.released_by[name][value] + more)
            odds += 0.7 * (log_odds(min(max(share, 1e-4), 1 - 1e-4)) - base)
        return min(max(math.floor(odds) + LEVELS // 2, 0), LEVELS - 1)

    def density_of(self, level: int) -> list[float]:
        """Expected hits over expected time from each range of ages on, never rising."""
        released = max(sum(self.released_by["turns"]), 1)
        average, more = max(sum(self.ages) / released, 1e-6), self.weight()
        share = (self.reused_by["level"][level] + more * average) / (self.released_by["level"][level] + more)
        times = min(share, 0.98) / average
        hits, time, before = [], [], 0.0
        for n in range(AGES):
            reused = times * self.ages[n] / released
            remaining = max(1 - before, 1e-3)
            hazard = min(reused / remaining, 1 - 1e-6)
            discount = math.exp(-STARTS[n] / (16 * len(self.seen)))
            hits.append(discount * remaining * hazard)
            time.append(discount * remaining * (STARTS[n + 1] - STARTS[n]) * (1 - hazard / 2))
            before += reused
        density: list[float] = []
        for n in range(AGES):
            here = sum(hits[n:]) / sum(time[n:]) if sum(time[n:]) > 0 else 0.0
            density.append(min(here, density[-1]) if density else here)
        return density

    def density_at(self, block: int) -> float:
        """The density of a block now, on a line between two ranges."""
        age = int(self.clock - self.released[block])
        n = age_range(age)
        here, after = (self.density[self.level[block]][min(k, AGES - 1)] for k in (n, n + 1))
        return here + (after - here) * (age - STARTS[n]) / (STARTS[n + 1] - STARTS[n])

    def evict(self, number: int) -> list[int]:
        gone: list[int] = []
        queues = collections.defaultdict(collections.deque)
        for block in np.argsort(self.released, kind="stable").tolist():
            if self.holds[block] != NONE and not self.holders[block] and block not in self.parked:
                queues[int(self.level[block])].append(block)
        while len(gone) < number:
            block = self.due
            self.due = NONE
            if block == NONE or self.holders[block] or self.holds[block] == NONE or self.children[block]:
                heads = {level: queue[0] for level, queue in queues.items() if queue}
                oldest = min(self.released[block] for block in heads.values())
                factor = {level: 0.6 if self.released[block] == oldest else 1 for level, block in heads.items()}
                densities = {level: factor[level] * self.density_at(block) for level, block in heads.items()}
                level = min(densities, key=lambda level: (densities[level], level))
                block = queues[level].popleft()
                if self.children[block]:
                    self.parked.add(block)
                    continue
            gone.append(block)
            self.parked.discard(block)
            del self.of[self.holds[block]]
            self.holds[block] = NONE
            parent = int(self.parent[block])
            if parent != NONE:
                self.children[parent] -= 1
                if parent in self.parked and not self.children[parent]:
                    self.due = parent
        return gone


def adaptive_hits(trace: Trace, size: int, rule: str, slots: int) -> tuple[list[int], Adaptive]:
    """Blocks that each request finds, and the cache at the end."""
    cache, hits = Adaptive(size, slots), []
    for request, length in enumerate(trace.lengths.tolist()):
        taken = length if rule == "papers" else length - 1
        hits.append(cache.serve(trace.blocks(request).tolist(), len(cached_part(trace, request, rule)), taken))
    return hits, cache
