# SPDX-License-Identifier: Apache-2.0
"""The scheduler's options, and the order in which requests are admitted and get chunks; the last one is preempted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from kvjax._arrays import pick
from kvjax.checks import check_bool
from kvjax.layers import set_ints
from kvjax.serving.requests import Requests, Serving
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

Order = Callable[[Requests, CacheState], jax.Array]
SortKeys = tuple[jax.Array, ...]  # of one shape; the first decides


def by_priority(requests: Requests, state: CacheState) -> jax.Array:
    """i32[W]; the default order: higher priorities first."""
    del state
    return -requests.priority


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """The options of the scheduler; static.

    Attributes:
      reserve: when a request is admitted. "max_tokens": when blocks suffice for all that it and the running ones can
        still become; nothing is ever preempted. "num_tokens": when they suffice for the tokens that it has, and
        `watermark` more; running requests are preempted where blocks run out. "batch": as "max_tokens", when no row
        runs.
      chunk: the most tokens of a row that a mixed step computes.
      chunk_rows: R, the most rows that have chunks in a mixed step.
      budget: positions of a mixed step: one for each of the S rows, the others for chunks. None: S + `chunk`.
      chunks: "fcfs": rows get as many of them as they can use, in order; "equal": the same number each.
      k: the most decode steps of a block, 1 to P; None: P.
      k_waiting: the same while a request waits.
      watermark: blocks that stay available when "num_tokens" admits, unless no row runs.
      patience: how many later requests may be admitted before a request is late. Late requests are first in the order,
        and no later one is admitted before them. A row is late after so many mixed steps without a chunk.
      preempt: "recompute": a preempted request waits, and computes again what it does not find in the cache when it
        comes back. "swap": in `run_batch`, with a host tier, it keeps its row and its blocks wait on the host, if it
        has computed at least `min_swap` blocks and the host has space for them; else as "recompute".
      min_swap: as above: as many as cost more to compute than to move.
      max_skips: the most requests that one step passes over since they cannot be admitted.
      wait_for_prefix: whether a request waits while a row computes the next block of its prefix.
      min_onboard: blocks that a request has to have on the host, so that they are brought back. That is done between
        loops: a loop ends for it.
      coalesce: a step is mixed once so many rows have chunks pending, or after so many blocks of steps.
      canonical: whether a request's tokens and log-probabilities are the same bits whatever was cached and whoever runs
        beside it, if nothing was ever computed otherwise over this cache. Then a chunk is of one row, begins at a
        multiple of `chunk` and is computed apart from decode steps; reuse ends at these multiples, and generated tokens
        are not found in the cache. Needs `reserve` "max_tokens" or "batch", and a `chunk` of whole blocks.
      order: (requests, state) -> [W]; requests with the smallest value come first, then the earliest. They are admitted
        and get chunks in this order; the last one is preempted.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> kvjax.serving.Scheduler(chunk=8).most_steps(spec)  # of a block of decode steps: P
      4
      >>> try:
      ...     kvjax.serving.Scheduler(chunk=8, k=5).check(spec)
      ... except ValueError as error:
      ...     print(error)
      k: got 5, wanted at most the block size, 4

    Source: TensorRT-LLM's GUARANTEED_NO_EVICT, MAX_UTILIZATION and STATIC_BATCH ("max_tokens", "num_tokens", "batch"),
    and its duplicate deferral (`wait_for_prefix`); vLLM's token budget and watermark; MAX's prefill coalescing.
    """

    reserve: Literal["max_tokens", "num_tokens", "batch"] = "max_tokens"
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
    canonical: bool = False
    order: Order = by_priority

    def __post_init__(self):
        positive = ("chunk", "chunk_rows", "k_waiting", "patience", "max_skips", "min_onboard", "min_swap", "coalesce")
        stated = [name for name in ("budget", "k") if getattr(self, name) is not None]
        set_ints(self, 1, *positive, *stated)
        set_ints(self, 0, "watermark")
        kinds = {
            "reserve": ("max_tokens", "num_tokens", "batch"),
            "chunks": ("fcfs", "equal"),
            "preempt": ("recompute", "swap"),
        }
        for name, values in kinds.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wanted one of {values}")
        for name in ("wait_for_prefix", "canonical"):
            check_bool(name, getattr(self, name))
        if self.canonical and self.reserve == "num_tokens":
            raise ValueError("reserve: got 'num_tokens' with canonical=True, wanted 'max_tokens' or 'batch'")
        if self.canonical and self.budget is not None:
            raise ValueError(f"budget: got {self.budget} with canonical=True, wanted None")
        if not callable(self.order):
            raise ValueError(f"order: got {self.order!r}, wanted a function of the requests and the state")

    def check(self, spec: CacheSpec) -> None:
        """Raises a ValueError if an option does not fit a spec."""
        self.most_steps(spec)
        self.chunk_tokens(spec)
        if self.canonical and self.chunk % spec.block_size:
            raise ValueError(f"chunk: got {self.chunk}, wanted a multiple of the block size, {spec.block_size}")
        if self.preempt == "swap" and not spec.has_host:
            raise ValueError("preempt: got 'swap', wanted 'recompute' (the cache has no host tier)")

    def most_steps(self, spec: CacheSpec) -> int:
        """The most decode steps of a block; a ValueError if k is out of range."""
        k = spec.block_size if self.k is None else self.k
        if k > spec.block_size:
            raise ValueError(f"k: got {k}, wanted at most the block size, {spec.block_size}")
        return k

    def chunk_tokens(self, spec: CacheSpec) -> int:
        """B: positions of a mixed step that are for chunks; a ValueError if there are none."""
        if self.budget is None:
            return self.chunk
        if self.budget <= spec.max_seqs:
            raise ValueError(f"budget: got {self.budget}, wanted more than the {spec.max_seqs} rows")
        return self.budget - spec.max_seqs

    def most_chunks(self, spec: CacheSpec) -> int:
        """R: the most rows with chunks in a mixed step."""
        return 1 if self.canonical else min(self.chunk_rows, spec.max_seqs)

    @property
    def alignment_tokens(self) -> int | None:
        """The tokens at whose multiples the reused part of a prompt may end; None: anywhere."""
        return self.chunk if self.canonical else None

    def chunk_width(self, spec: CacheSpec) -> int:
        """The most tokens of one chunk."""
        return min(self.chunk, self.chunk_tokens(spec))


def sort_keys(serving: Serving, scheduler: Scheduler) -> SortKeys:
    """The sort keys of the requests, all [W]: late ones first, then the smallest `order`, then the earliest."""
    requests = serving.requests
    key = scheduler.order(requests, serving.cache.state)
    return late_first(requests.passed >= scheduler.patience, key, requests.arrival)


def sort_keys_by_row(serving: Serving, scheduler: Scheduler) -> SortKeys:
    """The sort keys of the rows' requests, all [S]."""
    return pick(sort_keys(serving, scheduler), serving.row)


def late_first(late: jax.Array, *keys: jax.Array) -> SortKeys:
    """Sort keys, of which the last is the arrival, with those that are late, bool[W], before the others."""
    *others, arrival = keys
    return (~late).astype(jnp.int32), *(jnp.where(late, jnp.zeros_like(key), key) for key in others), arrival


def first(keys: SortKeys, where: jax.Array) -> jax.Array:
    """i32[]; the first entry in order, of those where bool[W]; -1 if none."""
    return _extreme(keys, where, jnp.min, jnp.max)


def last(keys: SortKeys, where: jax.Array) -> jax.Array:
    """i32[]; the last entry in order, of those where bool[W]; -1 if none."""
    return _extreme(keys, where, jnp.max, jnp.min)


def _extreme(keys: SortKeys, where: jax.Array, best, worst) -> jax.Array:
    for key in keys:
        where = where & (key == best(jnp.where(where, key, worst(key))))
    return jnp.where(jnp.any(where), jnp.argmax(where).astype(jnp.int32), -1)
