# SPDX-License-Identifier: Apache-2.0
"""Hits, stops and copies of a host tier over a trace: blocks leave ahead, or have copies, or move inside the program.

The trace is in Mooncake's JSON lines, or in the form of `benchmarks/data`. A request takes a block for each of its ids
and one to three for its answer. The cache is metadata alone, with a single row. A loop is a program that admits up to
16 requests in turn, each after the release of the one before. It stops for the host in four ways:

- "ahead", without backups: where the next request finds blocks on the host, or would evict any. The host admits it.
- "copies": where the next request finds blocks on the host. The next victims have copies on the host (`backup`), so
  evictions stop nothing. Blocks without a copy are lost.
- "strict": also where an eviction would lose a block, as with `Scheduler(stop_before_loss=True)`.
- "program": never. Each admission brings blocks back inside the loop. Before it, the loop copies the next victims, as
  many as an admission can take.

Hits are shares of the tokens of all requests. A stop is an admission by the host. The first `--checked` requests are
also given to the cache in plain Python, for "ahead" and "copies". It has to count the same.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import common
from benchmarks.common import Bar, Size, benchmark
from benchmarks.trace import TRACE, read_blocks
from kvjax import tiers
from kvjax._arrays import once
from kvjax.blocks.backups import lacks_backups, would_lose
from kvjax.events.records import EventKind
from kvjax.serving import Scheduler
from kvjax.serving.program_tier import find_on_both
from kvjax.state import NO_BLOCK
from kvjax.verbs._request import checked_prompt, checked_text
from kvjax.verbs.admit import admit_row
from tests.oracle.cache import Oracle

WAYS = ("ahead", "copies", "strict", "program")
FIGURES = {
    "hits": "tokens found on either tier, %",
    "device_hits": "of these, on the device",
    "stops": "stops for the host",
    "copies_out": "blocks copied to the host",
    "copies_back": "blocks copied back",
    "lost": "blocks lost in loops",
}
BARS = {f"{way}_{name}": Bar(f"{text}: {way}", "") for way in WAYS for name, text in FIGURES.items()}
NOTES = """
`--trace` takes another trace, `--requests` its first requests, and `--ahead` the number of victims that get copies
before a loop.
"""
BOTH = ("device", "host")
TALLY = ("removed", "left", "device", "host", "out", "back")


def counts(events: Any, num_device_blocks: int) -> dict[str, jax.Array]:
    """The numbers of blocks that an event list removed, moved to the host without a copy, or ordered to be copied."""
    records = events.records
    left = (records[:, 0] == EventKind.UPDATED) & (records[:, 7] == 1)
    found = {"removed": records[:, 0] == EventKind.REMOVED, "left": left}
    if events.transfer is not None:
        is_move = events.transfer.block != NO_BLOCK
        to_host = events.transfer.target >= num_device_blocks
        found |= {"out": is_move & to_host, "back": is_move & ~to_host}
    return {name: jnp.sum(where, dtype=jnp.int32) for name, where in found.items()}


def added(tally: dict[str, jax.Array], *more: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The sums of counts."""
    for part in more:
        tally = tally | {name: tally[name] + value for name, value in part.items()}
    return tally


class Run:
    """The programs of one way over a trace."""

    def __init__(self, way: str, size: Size, prompts: np.ndarray, lengths: np.ndarray):
        self.way = way
        self.size = size
        self.ahead = min(size.width if way == "program" else size.ahead, size.num_blocks)
        self.prompts = jnp.asarray(prompts)
        self.lengths = jnp.asarray(lengths)
        spec = kvjax.make_spec(
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            max_seqs=1,
            max_length=prompts.shape[1],
            block_size=1,
            partial_reuse=False,
            backups=way != "ahead",
        )
        self.state = kvjax.init(spec)
        self.loop = jax.jit(self._loop, donate_argnums=0)
        self.between = jax.jit(self._between, donate_argnums=0)
        self.copy_ahead = jax.jit(self._copy_ahead, donate_argnums=0)

    def _serve(self, state: Any, tokens: jax.Array, length: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        """Writes the rest of an admitted request, and releases it."""
        done = state.seqs.committed[0]
        rest = jnp.roll(tokens, -done)
        num_new = jnp.where(state.seqs.length[0] > 0, length - done, 0)
        state, committed = kvjax.commit(state, rest[None], num_new[None], seqs=jnp.zeros(1, jnp.int32))
        state, _ = kvjax.release(state, 0)
        return state, {"removed": counts(committed, self.size.num_blocks)["removed"]}

    def _stops(self, state: Any, match: Any, length: jax.Array) -> jax.Array:
        need = length - match.cached_tokens
        if self.way == "program":
            return jnp.bool_(False)
        stops = match.host_tokens > 0
        if self.way == "ahead":
            stops = stops | (need > state.groups[0].num_empty)
        if self.way == "strict":
            width = self.prompts.shape[1]
            stops = stops | would_lose(state.groups[0], state.policy, need, width, jnp.int32(0), spared=match.blocks)
        return stops

    def _admit(self, state: Any, tokens: jax.Array, length: jax.Array, match: Any) -> tuple[Any, Any]:
        """Admits a request in the loop."""
        if self.way != "program":
            return kvjax.admit(state, 0, tokens, length)
        prompt = checked_prompt(checked_text(state.spec, tokens, None), length, 0, 1)
        match = find_on_both(state, prompt, Scheduler())
        state, events, _ = admit_row(state, jnp.int32(0), prompt, match, None, jnp.int32(0), None, BOTH[:1], 0, True)
        return state, events

    def _loop(self, state: Any, start: jax.Array, end: jax.Array) -> Any:
        zeros = {name: jnp.int32(0) for name in TALLY}

        def step(carry):
            state, number, tally, _ = carry
            if self.way == "program":
                lacks = lacks_backups(state.groups[0], state.policy, self.ahead, jnp.int32(0))
                state, tally = once(lacks, lambda carry: self._backed_up(*carry), (state, tally))
            tokens, length = self.prompts[number], self.lengths[number]
            match = kvjax.lookup(state, tokens, length, tiers=BOTH)
            stops = self._stops(state, match, length)

            def serve(carry):
                state, tally = carry
                state, events = self._admit(state, tokens, length, match)
                found = {"device": events.cached[0]}
                if self.way == "program":
                    found = {"device": match.device_tokens, "host": match.host_tokens}
                admitted = counts(events, self.size.num_blocks)
                state, served = self._serve(state, tokens, length)
                return state, added(tally, admitted, served, found)

            state, tally = once(~stops, serve, (state, tally))
            return state, number + ~stops, tally, stops

        carry = state, start, zeros, jnp.bool_(False)
        return jax.lax.while_loop(lambda carry: (carry[1] < end) & ~carry[3], step, carry)

    def _backed_up(self, state: Any, tally: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        state, events = tiers.backup(state, max_blocks=self.ahead)
        out = counts(events, self.size.num_blocks)["out"]
        state, _ = tiers.complete(state, events.transfer, True, max_removed=1)
        return state, added(tally, {"out": out})

    def _copy_ahead(self, state: Any) -> tuple[Any, dict[str, jax.Array]]:
        return self._backed_up(state, {"out": jnp.int32(0)})

    def _between(self, state: Any, number: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        tokens, length = self.prompts[number], self.lengths[number]
        match = kvjax.lookup(state, tokens, length, tiers=BOTH)
        state, events = kvjax.admit(state, 0, tokens, length, tiers=BOTH)
        state, _ = tiers.complete(state, events.transfer, True, max_removed=1)
        moved = {name: value for name, value in counts(events, self.size.num_blocks).items() if name in ("out", "back")}
        state, _ = self._serve(state, tokens, length)
        return state, moved | {"device": match.device_tokens, "host": match.host_tokens}

    def figures(self) -> dict[str, float]:
        """Runs the whole trace."""
        number = 0
        self.num_stops = 0
        self.total = total = dict.fromkeys(TALLY, 0)

        def add(tally: dict[str, jax.Array]) -> None:
            for name, value in jax.device_get(tally).items():
                total[name] += int(value)

        state = self.state
        while number < len(self.lengths):
            if self.way in ("copies", "strict"):
                state, tally = self.copy_ahead(state)
                add(tally)
            end = min(number + self.size.requests_a_loop, len(self.lengths))
            state, reached, tally, stopped = self.loop(state, np.int32(number), np.int32(end))
            add(tally)
            number = int(reached)
            if bool(stopped):
                state, tally = self.between(state, np.int32(number))
                add(tally)
                number += 1
                self.num_stops += 1
        kvjax.check(state)
        tokens = int(np.sum(self.lengths))
        return {
            "hits": 100 * (total["device"] + total["host"]) / tokens,
            "device_hits": 100 * total["device"] / tokens,
            "stops": self.num_stops,
            "copies_out": total["out"],
            "copies_back": total["back"],
            "lost": total["removed"],
        }


class Plain:
    """The same requests on the cache in plain Python."""

    def __init__(self, way: str, size: Size, prompts: np.ndarray, lengths: np.ndarray):
        self.way = way
        self.size = size
        self.requests = [row[:length].tolist() for row, length in zip(prompts, lengths, strict=True)]
        options = {"partial_reuse": False, "num_host_blocks": size.num_host_blocks, "backups": way != "ahead"}
        self.oracle = Oracle(size.num_blocks, 1, 1, prompts.shape[1], **options)
        self.total = dict.fromkeys(TALLY, 0)

    def _count(self, result: Any) -> None:
        for _, block, _ in result.moves:
            copied = self.oracle.blocks[block]
            self.total["out" if copied.host or copied.copying else "back"] += 1
        self.oracle.complete(result.moves, True)

    def _serve(self, tokens: list[int], between: bool) -> None:
        on_device, on_both = (self.oracle.lookup(tokens, tiers=both) for both in (False, True))
        self.total["device"] += on_device
        self.total["host"] += on_both - on_device if between else 0
        admitted = self.oracle.admit(0, tokens, tiers=between)
        common.require(admitted.ok, "plain Python refused a request")
        self._count(admitted)
        rest = tokens[len(self.oracle.rows[0].tokens) :]
        committed = self.oracle.commit([rest], [len(rest)])
        self.oracle.release(0)
        if not between:
            events = [*admitted.events, *committed.events]
            self.total["removed"] += sum(event.kind == "removed" for event in events)

    def _stops(self, tokens: list[int]) -> bool:
        on_device, on_both = (self.oracle.lookup(tokens, tiers=both) for both in (False, True))
        num_lacking = len(tokens) - on_both - self.oracle.counts()["empty"]
        if self.way == "ahead":
            return on_both > on_device or num_lacking > 0
        return on_both > on_device

    def counts(self) -> tuple[int, dict[str, int]]:
        """Runs all requests. Returns the number of stops, and the counts."""
        stops = number = 0
        while number < len(self.requests):
            if self.way != "ahead":
                self._count(self.oracle.backup(min(self.size.ahead, self.size.num_blocks)))
            for tokens in self.requests[number : number + self.size.requests_a_loop]:
                number += 1
                if self._stops(tokens):
                    self._serve(tokens, True)
                    stops += 1
                    break
                self._serve(tokens, False)
        return stops, {name: self.total[name] for name in ("device", "host", "out", "back", "removed")}


def require_equal(way: str, size: Size, prompts: np.ndarray, lengths: np.ndarray) -> None:
    """Ends the benchmark unless plain Python counts the same for these requests."""
    run = Run(way, size, prompts, lengths)
    run.figures()
    got = run.num_stops, {name: run.total[name] for name in ("device", "host", "out", "back", "removed")}
    wanted = Plain(way, size, prompts, lengths).counts()
    common.require(got == wanted, f"{way}: got {got} for {len(lengths)} requests, in plain Python {wanted}")


def read_requests(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of each request, i32[requests, width], and their numbers."""
    trace = read_blocks(size.trace, size.requests)
    fresh = 10_000_000  # the ids of generated blocks
    rows, lengths = [], []
    prompts = np.split(trace.ids, trace.starts[1:-1])
    for ids, output_tokens in zip(prompts, trace.output_length, strict=True):
        num_new = min(3, -(-int(output_tokens) // 512)) if len(ids) <= size.width - 4 else 1
        row = [*ids[: size.width - 4], *range(fresh, fresh + num_new)]
        fresh += num_new
        rows.append(row + [0] * (size.width - len(row)))
        lengths.append(len(row))
    return np.array(rows, np.int32), np.array(lengths, np.int32)


@benchmark(
    BARS,
    {
        "trace": (TRACE, TRACE),
        "requests": (1000, 12),
        "checked": (60, 12),
        "num_blocks": (512, 24),
        "num_host_blocks": (4096, 64),
        "ahead": (512, 24),
        "requests_a_loop": 16,
        "width": (128, 16),
        "ways": (list(WAYS), list(WAYS)),
    },
)
def measure(size: Size) -> Iterator[dict[str, Any]]:
    prompts, lengths = read_requests(size)
    for way in size.ways:
        if way in ("ahead", "copies") and size.checked:
            require_equal(way, size, prompts[: size.checked], lengths[: size.checked])
        figures = Run(way, size, prompts, lengths).figures()
        yield {f"{way}_{name}": value for name, value in figures.items()}
    yield {"notes": NOTES, "trace": pathlib.Path(size.trace).name}
