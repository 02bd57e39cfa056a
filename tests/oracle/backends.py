# SPDX-License-Identifier: Apache-2.0
"""Two caches with the same few methods, for the scenario runner: the cache in plain Python and the library's.

Rows are numbered. `append` is `extend` and then `commit`, or with a number k, blocks of up to k steps, if all of it
fits. Each method returns the results which a scenario can check. The library's programs are compiled once for a small
set of rounded shapes, since the pool's true size is a traced number.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.serving.capacity import num_steps
from tests import drive
from tests.oracle.cache import NO_BLOCK, Oracle, Priority, Result, Retention

_NUM_STEPS = jax.jit(num_steps, static_argnames="k")
_AMPLE = 2**30  # the free records of an unbounded log


class Prompt(NamedTuple):
    """Tokens, with everything else needed to match them."""

    tokens: list[int]
    extra_ids: list[int]
    salt: str | None = None
    lora: int | None = None


class Size(NamedTuple):
    """The needs of a scenario: at most `rows` sequences at once, of at most `length` tokens."""

    block_size: int
    num_blocks: int
    rows: int
    length: int
    partial_reuse: bool
    extra_ids: bool
    retention: bool = False  # with eviction by priority
    windows: tuple[int | None, ...] = (None,)
    num_host_blocks: int = 0
    offload_min_priority: int = 0

    @property
    def groups(self) -> list[int]:
        """The numbers of the scenario's groups in both caches, where group 0 has full attention."""
        order = [None, *sorted(window for window in self.windows if window is not None)]
        return [order.index(window) for window in self.windows]


class Outcome(NamedTuple):
    """The report of an operation: success, tokens found in the cache, and events by kind."""

    ok: bool
    cached: int | None
    events: collections.Counter[str]


def done(cached: int | None = None) -> Outcome:
    """The outcome of an operation which cannot fail and reports no events."""
    return Outcome(True, cached, collections.Counter())


class OracleBackend:
    """The cache in plain Python."""

    def __init__(self, size: Size, k: int | None = None):
        self.k = None if k is None else min(k, size.block_size)
        blocks_per_row = -(-size.length // size.block_size)
        windows = [(window, 0, size.num_blocks) for window in sorted(w for w in size.windows if w is not None)]
        bare = size.rows * blocks_per_row + len(windows) * size.num_blocks
        first = size.num_blocks if None in size.windows else bare
        self.cache = Oracle(
            first, size.block_size, size.rows, blocks_per_row, size.partial_reuse, windows=windows,
            num_host_blocks=size.num_host_blocks, offload_min_priority=size.offload_min_priority,
            bare=None not in size.windows,
        )  # fmt: skip
        self.groups = size.groups
        if size.retention:
            self.cache.score = self.cache.priority
        self.numbers: dict[tuple[str | None, int | None], int] = {}

    def admit(self, row: int, prompt: Prompt, now: int, retention: dict[str, Any]) -> Outcome:
        options: dict[str, Any] = {"namespace": self._namespace(prompt), "extra_ids": prompt.extra_ids}
        self.cache.now = now
        ranges = [(r["start"], r["end"], Priority(r["priority"], r.get("ttl"))) for r in retention.get("ranges", ())]
        generated = Priority(retention.get("decode_priority", 35), retention.get("decode_ttl"))
        return self._outcome(
            self.cache.admit(row, prompt.tokens, retention=Retention(ranges, generated), tiers=True, **options)
        )

    def compute(self, row: int, prompt: Prompt, now: int) -> Outcome:
        rows, self.cache.now = range(len(self.cache.rows)), now
        tokens = [prompt.tokens if seq == row else [] for seq in rows]
        extra_ids = [prompt.extra_ids if seq == row else [] for seq in rows]
        return self._outcome(self.cache.commit(tokens, [len(new) for new in tokens], extra_ids=extra_ids))

    def append(self, row: int, prompt: Prompt, now: int) -> Outcome:
        self.cache.now = now
        fits = copy.deepcopy(self.cache).extend(self._at(row, True), len(prompt.tokens), tiers=True).ok
        return _in_blocks(self, row, prompt, now) if self.k and fits else _at_once(self, row, prompt, now)

    def extend(self, row: int, num_tokens: int, now: int) -> Outcome:
        self.cache.now = now
        return self._outcome(self.cache.extend(self._at(row, True), num_tokens, tiers=True))

    def num_steps(self, row: int) -> int:
        capacity = self.cache.block_size * self.cache.max_blocks_per_seq - self.cache.rows[row].length
        return self.cache.num_steps(self._at(row, min(self.k, capacity)), self.k, _AMPLE)

    def trim(self, row: int) -> Outcome:
        return self._outcome(self.cache.trim(self._at(row, True), self.k))

    def release(self, row: int, now: int) -> Outcome:
        self.cache.now = now
        return self._outcome(self.cache.release(row))

    def fork(self, row: int, new: int) -> Outcome:
        return self._outcome(self.cache.fork(row, new))

    def truncate(self, row: int, length: int) -> Outcome:
        return self._outcome(self.cache.truncate(row, length))

    def pin(self, blocks: Sequence[int]) -> Outcome:
        return self._outcome(self.cache.pin(blocks))

    def unpin(self, blocks: Sequence[int], now: int) -> Outcome:
        self.cache.now = now
        return self._outcome(self.cache.unpin(blocks))

    def lookup(self, prompt: Prompt) -> Outcome:
        namespace = self._namespace(prompt)
        return done(self.cache.lookup(prompt.tokens, namespace=namespace, extra_ids=prompt.extra_ids))

    def reset(self) -> Outcome:
        return self._outcome(self.cache.reset())

    def table(self, row: int, group: int = 0) -> list[int]:
        return self.cache.tables(self.groups[group])[row]

    def priorities(self, row: int) -> list[int]:
        return [self.cache.blocks[block].requested_priority.priority for block in self.table(row)]

    def findable(self, row: int) -> list[int]:
        return [block for block in self.cache.tables()[row] if self.cache.blocks[block].node]

    def used_and_free(self, group: int = 0) -> tuple[int, int]:
        counts = self.cache.counts(self.groups[group])
        return counts["active"], counts["empty"] + counts["cached"]

    def state(self) -> Any:
        return self.cache.snapshot()

    def is_state(self, before: Any) -> bool:
        return self.cache.snapshot() == before

    def _at(self, row: int, value: Any) -> list[Any]:
        """A list with an entry for each row: `value` at `row`, zero elsewhere."""
        return [value if seq == row else type(value)(0) for seq in range(len(self.cache.rows))]

    def _outcome(self, result: Result) -> Outcome:
        self.cache.complete(result.moves, True)
        kinds = collections.Counter(event.kind for event in result.events if event.group in self.groups)
        return Outcome(result.ok, sum(result.cached), kinds)

    def _namespace(self, prompt: Prompt) -> int:
        return self.numbers.setdefault((prompt.salt, prompt.lora), len(self.numbers))


class LibraryBackend:
    """The library, jitted. Arrays are padded, so scenarios share programs."""

    def __init__(self, size: Size, k: int | None = None):
        self.k = None if k is None else min(k, size.block_size)
        self.spec, self.groups, self.namespaces = spec_of(size), size.groups, kvjax.Namespaces()
        state = _with_host_blocks(_init()(self.spec, np.int32(size.num_blocks)), size.num_host_blocks)
        self.driver = drive.Driver(state, verified=False)  # large pools; the scenario has the expectations

    def admit(self, row: int, prompt: Prompt, now: int, retention: dict[str, Any]) -> Outcome:
        tokens, length, options = self._request(prompt)
        if self.spec.retention:
            ranges = [(r["start"], r["end"], r["priority"], r.get("ttl")) for r in retention.get("ranges", ())]
            decode = {name: retention[name] for name in ("decode_priority", "decode_ttl") if name in retention}
            options["retention"] = kvjax.Retention.of(ranges, max_ranges=8, **decode)
        return self._do("admit", row, tokens, length, now=now, **options)

    def compute(self, row: int, prompt: Prompt, now: int) -> Outcome:
        width = self.spec.max_length
        tokens, num_tokens = drive.lines({row: prompt.tokens}, self.spec.max_seqs, width)
        extra = {"extra_ids": self._at(row, drive.padded(prompt.extra_ids, width))} if self.spec.extra_ids else {}
        return self._do("commit", tokens, num_tokens, now=now, **extra)

    def append(self, row: int, prompt: Prompt, now: int) -> Outcome:
        ahead = drive.Driver(self.value, verified=False)  # the value stays as it is
        fits = self.k is not None and self._extend(ahead, row, len(prompt.tokens), now).ok
        return _in_blocks(self, row, prompt, now) if fits else _at_once(self, row, prompt, now)

    def extend(self, row: int, num_tokens: int, now: int) -> Outcome:
        return self._extend(self.driver, row, num_tokens, now)

    def _extend(self, driver: drive.Driver, row: int, num_tokens: int, now: int) -> Outcome:
        active, count = self._at(row, True), self._at(row, num_tokens)
        return self._do("extend", active, count, max_tokens=self.spec.max_length, now=now, driver=driver)

    def num_steps(self, row: int) -> int:
        capacity = self.spec.max_length - int(self.value.seqs.length[row])
        return int(_NUM_STEPS(self.value, self._at(row, min(self.k, capacity)), self.k, np.int32(_AMPLE)))

    def trim(self, row: int) -> Outcome:
        return self._do("trim", self._at(row, True), max_tokens=self.spec.max_length)

    def release(self, row: int, now: int) -> Outcome:
        return self._do("release", row, now=now)

    def fork(self, row: int, new: int) -> Outcome:
        return self._do("fork", row, new)

    def truncate(self, row: int, length: int) -> Outcome:
        return self._do("truncate", row, length)

    def pin(self, blocks: Sequence[int]) -> Outcome:
        return self._do("pin", self._list(blocks))

    def unpin(self, blocks: Sequence[int], now: int) -> Outcome:
        return self._do("unpin", self._list(blocks), now=now)

    def lookup(self, prompt: Prompt) -> Outcome:
        tokens, length, options = self._request(prompt)
        return done(int(drive.VERBS["lookup"](self.value, tokens, length, **options).cached_tokens))

    def reset(self) -> Outcome:
        return self._do("reset")

    def table(self, row: int, group: int = 0) -> list[int]:
        blocks, size = np.asarray(self.value.groups[self.groups[group]].table)[row], self.spec.block_size
        return blocks[: -(-int(self.value.seqs.length[row]) // size)].tolist()

    def priorities(self, row: int) -> list[int]:
        retention = self.value.groups[0].blocks.retention
        return [35 if retention is None else int(retention[block, 0]) for block in self.table(row)]

    def findable(self, row: int) -> list[int]:
        group = self.value.groups[0]
        table, fill = np.asarray(group.table)[row], np.asarray(group.blocks.fill)
        return [int(block) for block in table if block != NO_BLOCK and fill[block]]

    def used_and_free(self, group: int = 0) -> tuple[int, int]:
        group = self.value.groups[self.groups[group]]
        return int(group.num_blocks - group.num_empty - group.num_cached), int(group.num_empty) + int(group.num_cached)

    def state(self) -> Any:
        return self.value  # nothing is donated here, so it stays valid

    def is_state(self, before: Any) -> bool:
        pairs = zip(jax.tree.leaves(self.value), jax.tree.leaves(before), strict=True)
        return all(np.array_equal(np.asarray(new), np.asarray(old)) for new, old in pairs)

    @property
    def value(self) -> Any:
        return self.driver.state

    def _do(self, verb: str, *args: Any, driver: drive.Driver | None = None, **kwargs: Any) -> Outcome:
        if verb in ("admit", "extend") and self.spec.has_host:
            kwargs["tiers"] = drive.BOTH
        events = (driver or self.driver).ask(verb, *args, **kwargs)
        kinds = collections.Counter(e["kind"] for e in kvjax.to_list(events) if e["group"] in self.groups)
        return Outcome(bool(events.ok), int(np.sum(np.asarray(events.cached))) if verb == "admit" else None, kinds)

    def _request(self, prompt: Prompt) -> tuple[np.ndarray, np.int32, dict[str, Any]]:
        options: dict[str, Any] = {"namespace": np.int32(self.namespaces(salt=prompt.salt, lora=prompt.lora))}
        if self.spec.extra_ids:
            options["extra_ids"] = drive.padded(prompt.extra_ids, self.spec.max_length)
        return drive.padded(prompt.tokens, self.spec.max_length), np.int32(len(prompt.tokens)), options

    def _at(self, row: int, value: Any) -> np.ndarray:
        """An array with an entry for each row: `value` at `row`, zero elsewhere."""
        value = np.asarray(value)
        rows = np.zeros((self.spec.max_seqs, *value.shape), bool if value.dtype == bool else np.int32)
        rows[row] = value
        return rows

    def _list(self, blocks: Sequence[int]) -> np.ndarray:
        return drive.padded(blocks, self.spec.max_blocks_per_seq, NO_BLOCK)


BACKENDS = {"library": LibraryBackend, "oracle": OracleBackend}


@functools.cache
def spec_of(size: Size) -> Any:
    """The spec of the library's cache. Scenarios with the same spec share their programs."""
    layers = [kvjax.LayerSpec(1, 1, window) for window in size.windows] if size.windows != (None,) else []
    return kvjax.make_spec(
        layers,
        num_blocks=_power_of_two(size.num_blocks, 1024),
        max_seqs=_power_of_two(size.rows, 32),
        max_length=_power_of_two(size.length, max(256, 32 * size.block_size)),
        block_size=size.block_size,
        extra_ids=size.extra_ids,
        partial_reuse=size.partial_reuse,
        retention=size.retention,
        num_host_blocks=32 if size.num_host_blocks else 0,
        offload_min_priority=size.offload_min_priority,
    )


def _with_host_blocks(state: Any, number: int) -> Any:
    """A state with only so many empty blocks on the host."""
    groups = [
        group if group.host is None else replace(group, host=replace(group.host, num_empty=jnp.int32(number)))
        for group in state.groups
    ]
    return replace(state, groups=tuple(groups))


@functools.cache
def _init() -> Any:
    def init(spec, num_blocks):
        return kvjax.init(spec, kvjax.policies.priority() if spec.retention else kvjax.lru(), num_blocks)

    return jax.jit(init, static_argnums=0)


def _at_once(cache: Any, row: int, prompt: Prompt, now: int) -> Outcome:
    """Extends by all tokens, then commits all of them."""
    extended = cache.extend(row, len(prompt.tokens), now)
    return _then(extended, cache.compute(row, prompt, now)) if extended.ok else extended


def _in_blocks(cache: Any, row: int, prompt: Prompt, now: int) -> Outcome:
    """Appends in blocks of up to k steps, like a decode loop which only sees the end when it comes, and stops early.

    As in the loop, a refused block of steps becomes a single step. A block of steps which stops early may have evicted
    up to one block in each group in vain. `test_scenarios.py` would name files whose expectations this changes.
    """
    outcome, done = Outcome(True, None, collections.Counter()), 0
    while done < len(prompt.tokens):
        n = cache.num_steps(row)
        extended = cache.extend(row, n, now)
        if not extended.ok and n > 1:
            n, extended = 1, cache.extend(row, 1, now)
        if not extended.ok:
            return _then(outcome, extended)
        end = min(done + n, len(prompt.tokens))
        part = prompt._replace(tokens=prompt.tokens[done:end], extra_ids=prompt.extra_ids[done:end])
        for each in (extended, cache.compute(row, part, now), cache.trim(row)):
            outcome = _then(outcome, each)
        done = end
    return outcome


def _then(first: Outcome, second: Outcome) -> Outcome:
    return Outcome(second.ok, None, first.events + second.events)


def _power_of_two(value: int, least: int) -> int:
    return max(least, 1 << (value - 1).bit_length())
