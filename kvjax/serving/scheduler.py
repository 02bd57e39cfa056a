# SPDX-License-Identifier: Apache-2.0
"""The scheduler's options, the order of the requests, and what each row wants to compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import pick
from kvjax._checks import static_int
from kvjax.serving.requests import Requests, Serving, Stage
from kvjax.serving.steps import steps_of_a_block
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

Order = Callable[[Requests, CacheState], jax.Array]


def by_priority(requests: Requests, state: CacheState) -> jax.Array:
    """i32[W]; the default order: higher priorities first."""
    del state
    return -requests.priority


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """The options of the scheduler; static.

    Attributes:
      reserve: when a request is admitted. "goal": when blocks suffice for all that it and the running ones can still
        become; nothing is ever preempted. "known": when they suffice for the tokens that it has, and `watermark` more;
        running requests are preempted where blocks run out. "batch": as "goal", when no row runs.
      chunk: the most tokens of a row that a mixed step computes.
      chunk_rows: R, the most rows that have chunks in a mixed step.
      budget: positions of a mixed step: one for each of the S rows, the others for chunks. None: S + `chunk`.
      chunks: who gets them: "fcfs", as many as they can use in their order; "equal", the same number each.
      k: the most decode steps of a block, 1 to P; None: P. `serve` returns behind whole blocks alone, so tokens come
        as many at a time.
      k_waiting: the same while a request waits.
      watermark: blocks that stay available when "known" admits, unless no row runs.
      patience: how often later requests may be admitted before one; then it is late: late requests come first in
        the order, and none that came after them is admitted before they are. Also for how many mixed steps others may
        have chunks before a row.
      preempt: what becomes of a request that is preempted. "recompute": it waits, and computes again what it does not
        find in the cache when it comes back. "swap": in `run_batch`, with a host tier, it keeps its row, and its blocks
        wait on the host, if it has computed at least `min_swap` of them: as many as cost more to compute than to move.
        Where the host has no room for them, it waits as by "recompute".
      min_swap: as above.
      max_skips: the most requests that one step passes over since they cannot be admitted.
      wait_for_prefix: whether a request waits while a row computes the next block of its prefix.
      min_onboard: blocks that a request has to have on the host, so that they are brought back. That is done between
        loops: a loop ends for it.
      coalesce: how many rows want chunks, or for how many blocks they have waited, before a step is mixed.
      order: (requests, state) -> [W]; who is first: the smallest, then the earliest. They are admitted and have chunks
        in this order; preempted is the last.

    Source: TensorRT-LLM's GUARANTEED_NO_EVICT, MAX_UTILIZATION and STATIC_BATCH ("goal", "known", "batch"), and its
    duplicate deferral (`wait_for_prefix`); vLLM's token budget and watermark; MAX's prefill coalescing.
    """

    reserve: Literal["goal", "known", "batch"] = "goal"
    chunk: int = 128
    chunk_rows: int = 4
    budget: int | None = None
    chunks: Literal["fcfs", "equal"] = "fcfs"
    k: int | None = None
    k_waiting: int = 4
    watermark: int = 0
    preempt: Literal["recompute", "swap"] = "recompute"
    min_swap: int = 1
    patience: int = 64
    max_skips: int = 4
    wait_for_prefix: bool = True
    min_onboard: int = 1
    coalesce: int = 1
    order: Order = by_priority

    def __post_init__(self):
        for name in (
            "chunk",
            "chunk_rows",
            "k_waiting",
            "patience",
            "max_skips",
            "min_onboard",
            "min_swap",
            "coalesce",
        ):
            static_int(name, getattr(self, name), 1)
        static_int("watermark", self.watermark, 0)
        for name in ("budget", "k"):
            if getattr(self, name) is not None:
                static_int(name, getattr(self, name), 1)
        kinds = {"reserve": ("goal", "known", "batch"), "chunks": ("fcfs", "equal"), "preempt": ("recompute", "swap")}
        for name, known in kinds.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wanted one of {known}")
        if not isinstance(self.wait_for_prefix, bool | np.bool_):
            raise ValueError(f"wait_for_prefix: got {self.wait_for_prefix!r}, wanted a bool")
        if not callable(self.order):
            raise ValueError(f"order: got {self.order!r}, wanted a function of the requests and the state")

    def check(self, spec: CacheSpec) -> None:
        """Raises a ValueError if an option does not fit a spec."""
        self.most_steps(spec)
        self.chunk_tokens(spec)
        if self.preempt == "swap" and not spec.has_host:
            raise ValueError("preempt: got 'swap', wanted 'recompute' (the cache has no host tier)")

    def most_steps(self, spec: CacheSpec) -> int:
        """The most decode steps of a block; a ValueError if k is out of range."""
        return steps_of_a_block(spec, self.k)

    def chunk_tokens(self, spec: CacheSpec) -> int:
        """B: positions of a mixed step that are for chunks; a ValueError if there are none."""
        if self.budget is None:
            return self.chunk
        if self.budget <= spec.max_seqs:
            raise ValueError(f"budget: got {self.budget}, wanted more than the {spec.max_seqs} rows")
        return self.budget - spec.max_seqs

    def chunk_width(self, spec: CacheSpec) -> int:
        """The most tokens of one chunk."""
        return min(self.chunk, self.chunk_tokens(spec))


def running(serving: Serving) -> jax.Array:
    """bool[S]; rows whose request runs."""
    return (serving.row >= 0) & (pick(serving.requests.stage, serving.row) == Stage.RUNNING)


def wanted(serving: Serving) -> jax.Array:
    """i32[S]; tokens that each row wants to compute: 1 is decode, more is prefill.

    0 where it waits for its parent, or is swapped out.
    """
    requests, row, seqs = serving.requests, serving.row, serving.cache.state.seqs
    own = running(serving) & (pick(requests.parent, row) < 0) & ~seqs.swapped_out
    return jnp.where(own, pick(requests.known, row) - seqs.committed, 0)


def decoding(serving: Serving) -> jax.Array:
    """bool[S]; rows that want one token, and whose prompt no samples wait for."""
    return (wanted(serving) == 1) & ~serving.leads


def prefilling(serving: Serving) -> jax.Array:
    """bool[S]; rows that want chunks."""
    return (wanted(serving) > 0) & ~decoding(serving)


def places(requests: Requests, scheduler: Scheduler, key: jax.Array) -> tuple[jax.Array, ...]:
    """Each request's place in the order, all [W], the first decides: late ones, then by key [W], then by arrival."""
    return late_first(requests.passed >= scheduler.patience, key, requests.arrival)


def late_first(late: jax.Array, *place: jax.Array) -> tuple[jax.Array, ...]:
    """Places, all [W], whose last is the arrival, with those that are late, bool[W], before the others."""
    *keys, arrival = place
    return (~late).astype(jnp.int32), *(jnp.where(late, jnp.zeros_like(key), key) for key in keys), arrival


def places_of_rows(serving: Serving, scheduler: Scheduler) -> tuple[jax.Array, ...]:
    """The places of the rows' requests, all [S]."""
    key = scheduler.order(serving.requests, serving.cache.state)
    return pick(places(serving.requests, scheduler, key), serving.row)


def first(place: tuple[jax.Array, ...], where: jax.Array) -> jax.Array:
    """i32[]; the entry with the smallest place, each [W], where bool[W]; -1 if none."""
    for values in place:
        where = where & (values == jnp.min(jnp.where(where, values, jnp.max(values))))
    return jnp.where(jnp.any(where), jnp.argmax(where).astype(jnp.int32), -1)


def last(place: tuple[jax.Array, ...], where: jax.Array) -> jax.Array:
    """i32[]; the entry with the largest place, each [W], where bool[W]; -1 if none."""
    for values in place:
        where = where & (values == jnp.max(jnp.where(where, values, jnp.min(values))))
    return jnp.where(jnp.any(where), jnp.argmax(where).astype(jnp.int32), -1)
