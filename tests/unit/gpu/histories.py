# SPDX-License-Identifier: Apache-2.0
"""Random histories of a cache in which verbs also run in the form that they have on a GPU. Both must be equal.

On a GPU verbs skip what they need not do, and find equal entries without a sort. A CPU can run that form too.
"""

from __future__ import annotations

import collections
from typing import Any

import chex
import jax
import numpy as np

import kvjax
from kvjax.policies.ring import Ring
from pallas_kernels import lowering_for
from tests import drive

LOWERED = ("extend", "commit", "trim")


def lowered(name: str) -> Any:
    """A verb in its form for a GPU, on the device of this process."""

    def call(state, *args, **options):
        with lowering_for("cuda"):
            return drive.verb(name)(state, *args, **options)

    return call


FOR_GPU = drive.Verbs(lowered)


class Both(dict[str, Any]):
    """Verbs by name. Verbs of a decode step run both ways, on a state and on variants of it.

    Attributes:
      for_gpu: the verbs in their form for a GPU.
      plain: the verbs of this platform.
      rng: makes the other states.
      reached: the cases compared so far, by name.
    """

    def __init__(self, seed: int, for_gpu: drive.Verbs = FOR_GPU, plain: drive.Verbs = drive.VERBS):
        super().__init__()
        self.for_gpu, self.plain, self.rng = for_gpu, plain, np.random.default_rng(seed)
        self.reached: collections.Counter[str] = collections.Counter()

    def __missing__(self, name: str) -> Any:
        return self.both(name) if name in LOWERED else self.plain[name]

    def both(self, name: str) -> Any:
        def call(state, *args, **options):
            before = jax.device_get(state)
            for variant in variants(before, self.rng) if name == "extend" else ():
                self.compare(name, variant, *args, **options)
            return self.compare(name, before, *args, **options)

        return call

    def compare(self, name: str, state: Any, *args: Any, **options: Any) -> Any:
        plain = self.plain[name](state, *args, **options)
        on_gpu = self.for_gpu[name](state, *args, **options)
        chex.assert_trees_all_equal(*(jax.device_get(result[0]) for result in (on_gpu, plain)))
        chex.assert_trees_all_equal(*(meant(result[1]) for result in (on_gpu, plain)))
        self.note(name, state, *plain)
        return plain

    def note(self, name: str, before: Any, after: Any, events: Any) -> None:
        self.reached.update(f"{name}: {status}" for status in set(drive.names(events)))
        kinds = collections.Counter(event["kind"] for event in kvjax.to_list(events))
        self.reached.update(f"{name}: {kind}" for kind in kinds)
        old, new = before.groups[0], jax.device_get(after).groups[0]
        claims = np.asarray(events.kind == 0) & np.asarray(events.block > 0) & ~np.asarray(events.ok)
        marks = {
            "squeezed": new.policy.tail - old.policy.tail < 0,
            "copied twice": kinds["copied"]
            > len({e["source"] for e in kvjax.to_list(events) if e["kind"] == "copied"}),
            "merged": name == "commit" and np.any(new.table != old.table),
            "merged with a cached block": name == "commit" and new.num_cached < old.num_cached,
            "collided": name == "commit" and collided(before, new),
            "trimmed": name == "trim" and new.num_empty > old.num_empty,
            "a victim refused": name == "extend" and claims[: claims.size // 2].any(),
        }
        self.reached.update(mark for mark, reached in marks.items() if reached)


def meant(events: Any) -> Any:
    """The events without padding, whose contents and places mean nothing."""
    events = jax.device_get(events)
    kept = events.kind != 0
    stored = kept & (events.kind == kvjax.events.EventKind.STORED)
    text = jax.tree.map(lambda x: np.where(stored[:, None], x, 0)[kept], events.text)
    return events.replace(records=events.records[kept], text=text)


def collided(before: Any, group: Any) -> bool:
    """Whether a row has a full block which is not findable although its prefix is."""
    full = (before.seqs.committed // group.blocks.tokens.shape[1])[:, None] > np.arange(group.table.shape[1])
    return bool(np.any(group.blocks.fill[group.table[full]] == 0))


def variants(state: Any, rng: np.random.Generator) -> list[Any]:
    """The state with a ring full of dead entries, and with cached blocks in another order of release."""
    (group,), ring = state.groups, state.groups[0].policy
    if not isinstance(ring, Ring):
        return []
    size = ring.order.shape[0]

    def having(ring):
        return state.replace(groups=(group.replace(policy=ring),))

    positions = np.arange(ring.head, ring.tail, dtype=np.int32)
    ids = ring.order[positions & (size - 1)]
    live = (ring.stamp[ids] == positions) & (group.blocks.refcount[ids] == 0) & (group.blocks.fill[ids] > 0)
    order, stamp, shuffled = ring.order.copy(), ring.stamp.copy(), rng.permutation(ids[live])
    order[positions[live] & (size - 1)], stamp[shuffled] = shuffled, positions[live]
    return [having(ring._replace(head=ring.tail - np.int32(size))), having(ring._replace(order=order, stamp=stamp))]


class History:
    """A cache with random requests.

    Attributes:
      spec: its shapes.
      most: maximum tokens which a row can ask for, or commit, in a call.
      verbs: the `Both` which compares.
    """

    def __init__(
        self, spec: kvjax.CacheSpec, seed: int, *, most: int | None = None, num_blocks: int | None = None,
        verbs: Both | None = None,
    ):  # fmt: skip
        self.verbs, self.rng = Both(seed) if verbs is None else verbs, np.random.default_rng(seed)
        self.spec, self.most, self.rows = spec, most or spec.block_size, np.arange(spec.max_seqs, dtype=np.int32)
        self.driver = drive.Driver(kvjax.init(spec, num_blocks=num_blocks), self.verbs, verified=False)

    def run(self, steps: int) -> collections.Counter[str]:
        """Runs so many steps, and returns the cases reached."""
        kinds = [self.admit, self.release, self.truncate, self.fork, self.commit, self.trim, self.extend]
        for _ in range(steps):
            self.rng.choice(kinds, p=(0.15, 0.08, 0.12, 0.15, 0.09, 0.03, 0.38))()
            kvjax.check(self.driver.state)
        return self.verbs.reached

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray(self.driver.state.seqs.length)

    @property
    def reserved(self) -> np.ndarray:
        return self.lengths - np.asarray(self.driver.state.seqs.committed)

    def a_row(self, used: bool) -> int:
        """A row in use, or a free row, or any other row if there is none."""
        rows = np.flatnonzero((self.lengths > 0) == used)
        return int(self.rng.choice(rows if rows.size else self.spec.max_seqs))

    def text(self, *shape: int) -> np.ndarray:
        """Tokens, of which many are equal."""
        return self.rng.integers(0, self.rng.choice((1, 1, 2)), shape, dtype=np.int32)

    def ids(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        rare = self.rng.random() < 0.3
        return (
            {"extra_ids": (self.rng.random(tokens.shape) < 0.2 * rare).astype(np.int32)} if self.spec.extra_ids else {}
        )

    def admit(self) -> None:
        length = int(self.rng.integers(1, self.spec.max_length + 1))
        tokens, seq = self.text(length), self.a_row(used=False)
        options = {}
        if self.spec.extra_ids:
            options["extra_ids"] = np.zeros(self.spec.max_length + 1, np.int32)
        if self.driver.admit(seq, tokens, namespace=int(self.rng.choice((0, 0, 0, 1))), **options) == ["OK"]:
            while self.reserved[seq] and self.rng.random() < 0.95:
                counts = np.where(self.rows == seq, min(self.reserved[seq], self.most), 0).astype(np.int32)
                rest = np.resize(tokens[self.lengths[seq] - self.reserved[seq] :], (len(self.rows), self.most))
                self.written(self.rows, rest, counts)

    def written(self, seqs: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        self.driver.ask("commit", tokens, counts, seqs=seqs, **self.ids(tokens))

    def release(self) -> None:
        self.driver.ask("release", self.a_row(used=True))

    def truncate(self) -> None:
        seq = self.a_row(used=True)
        self.driver.ask("truncate", seq, int(self.rng.integers(1, max(self.lengths[seq], 1) + 1)))

    def fork(self) -> None:
        """Forks into a row or all free rows, at the row's end or before. Each may then write into the same block."""
        src = self.a_row(used=True)
        if self.lengths[src] and self.rng.random() < 0.7:
            self.driver.ask("truncate", src, int(self.rng.integers(1, self.lengths[src] + 1)))
        for _ in range(self.rng.integers(1, self.spec.max_seqs)):
            self.driver.ask("fork", src, self.a_row(used=False))
        self.extend()

    def commit(self) -> None:
        """Commits many rows at once, in any order. Rows may not exist or come twice, and tokens be too many or bad."""
        seqs = self.rng.permutation(self.rows)
        counts = np.minimum(self.reserved[seqs], self.most).astype(np.int32)
        counts = self.rng.integers(0, counts + 1, dtype=np.int32) if self.rng.random() < 0.5 else counts
        tokens = self.text(len(seqs), self.most)
        if self.rng.random() < 0.3:  # all rows have equal contents
            tokens[:] = tokens[0]
        fault = self.rng.choice(("none",) * 7 + ("too many", "token", "twice", "nowhere"))
        index = self.rng.integers(len(seqs))
        counts[index] += fault == "too many"
        tokens[index, 0] -= 3 * (fault == "token")
        seqs[index] = {"twice": seqs[0], "nowhere": -1}.get(str(fault), seqs[index])
        self.written(seqs, tokens, counts)

    def trim(self) -> None:
        """Trims some rows. Free rows, and rows with much reserved or without a token, are refused."""
        active = self.rng.random(len(self.rows)) < 0.6
        self.driver.ask("trim", active, max_tokens=self.spec.block_size)

    def extend(self) -> None:
        """Extends some rows or all, also by more than a row can hold, by a negative number, and free rows."""
        rows, reserved = len(self.rows), self.spec.max_length - self.lengths
        active = (self.lengths > 0) & (self.rng.random(rows) < self.rng.choice((0.4, 1.0, 1.0)))
        counts = self.rng.integers(0, self.most + 1, rows, dtype=np.int32)
        fault = self.rng.choice(("none",) * 5 + ("full", "negative", "free"))
        if fault != "full":
            counts = np.minimum(counts, np.maximum(reserved, 0)).astype(np.int32)
        row = self.rng.integers(rows)
        active[row] = active[row] | (fault == "free")
        counts[row] -= (self.most + 1) * (fault == "negative")
        self.driver.ask("extend", active, counts, max_tokens=self.most)
