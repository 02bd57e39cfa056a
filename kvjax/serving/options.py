# SPDX-License-Identifier: Apache-2.0
"""The scheduler's options, and the order in which requests are admitted and get chunks, and are preempted."""

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
SortKeys = tuple[jax.Array, ...]  # all of the same shape; the first key is the most significant


def by_priority(requests: Requests, state: CacheState) -> jax.Array:
    """i32[W]; the default order: higher priorities first."""
    del state
    return -requests.priority


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """The options of the scheduler; static.

    Attributes:
      reserve: condition for admitting a request. "max_tokens": blocks suffice for the maximum length of this request
        and the running requests, so nothing is ever preempted. "num_tokens": blocks suffice for its present tokens,
        with `watermark` blocks to spare; running requests are preempted if blocks run out. "batch": like "max_tokens",
        but only while no row runs.
      chunk: maximum tokens of a row in a mixed step.
      chunk_rows: R, maximum rows with chunks in a mixed step.
      budget: positions of a mixed step: a position for each of the S rows, the rest for chunks. None means S + `chunk`.
      chunks: division of these positions: "fcfs" gives rows as many as they can use, in order; "equal" gives each the
        same.
      k: maximum decode steps of a block, 1 to P. None means P.
      k_waiting: the same limit while a request waits.
      watermark: blocks kept available when "num_tokens" admits, unless no row runs.
      max_deferrals: number of later requests admitted before a request is late. Late requests are first in
        the order, and no later request is admitted before them. A row is late after this many mixed steps without a
        chunk.
      preempt: "recompute" lets a preempted request wait. When it comes back, it computes the tokens it does not
        find in the cache. "swap" applies to `run_batch` with a host tier: the request keeps its row, and its blocks
        wait on the host, if it has computed at least `min_swap` blocks and the host has space; otherwise it is as
        "recompute".
      min_swap: minimum number of blocks to swap. Set it to the number from which computing costs more than moving.
      max_skips: maximum requests passed over by a step because they cannot be admitted.
      wait_for_prefix: whether a request waits while a row computes the next block of its prefix.
      min_onboard: minimum number of a request's host blocks to bring back. To do so, the loop ends.
      stop_before_loss: whether the loop ends before a step that would evict blocks without copies on the host
        (`make_spec(backups=True)`), so the host can copy them first. A loop always runs its first step.
      coalesce: a step is mixed if this many rows have pending chunks, or after this many blocks of steps.
      canonical: whether the bits of tokens and log-probabilities depend neither on the cache nor on other requests,
        provided that only canonical runs have used this cache. Each chunk then belongs to a single row, begins at a
        multiple of `chunk` and is computed separately from decode steps. Reuse ends at these multiples, and generated
        tokens are not found in the cache. Needs `reserve` "max_tokens" or "batch", and a `chunk` of whole blocks.
      order: (requests, state) -> [W]; requests with the smallest value come first, then the earliest. They are admitted
        and get chunks in this order, and the last request is preempted.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> kvjax.serving.Scheduler(chunk=8).max_steps(spec)  # of a block of decode steps: P
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
    max_deferrals: int = 64
    max_skips: int = 4
    wait_for_prefix: bool = True
    min_onboard: int = 1
    stop_before_loss: bool = False
    coalesce: int = 1
    canonical: bool = False
    order: Order = by_priority

    def __post_init__(self):
        positive = (
            "chunk",
            "chunk_rows",
            "k_waiting",
            "max_deferrals",
            "max_skips",
            "min_onboard",
            "min_swap",
            "coalesce",
        )
        given = [name for name in ("budget", "k") if getattr(self, name) is not None]
        set_ints(self, 1, *positive, *given)
        set_ints(self, 0, "watermark")
        kinds = {
            "reserve": ("max_tokens", "num_tokens", "batch"),
            "chunks": ("fcfs", "equal"),
            "preempt": ("recompute", "swap"),
        }
        for name, values in kinds.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wanted one of {values}")
        for name in ("wait_for_prefix", "stop_before_loss", "canonical"):
            check_bool(name, getattr(self, name))
        if self.canonical and self.reserve == "num_tokens":
            raise ValueError("reserve: got 'num_tokens' with canonical=True, wanted 'max_tokens' or 'batch'")
        if self.canonical and self.budget is not None:
            raise ValueError(f"budget: got {self.budget} with canonical=True, wanted None")
        if not callable(self.order):
            raise ValueError(f"order: got {self.order!r}, wanted a function of the requests and the state")

    def check(self, spec: CacheSpec) -> None:
        """Raises a ValueError if an option does not fit a spec."""
        self.max_steps(spec)
        self.chunk_tokens(spec)
        if self.canonical and self.chunk % spec.block_size:
            raise ValueError(f"chunk: got {self.chunk}, wanted a multiple of the block size, {spec.block_size}")
        if self.preempt == "swap" and not spec.has_host:
            raise ValueError("preempt: got 'swap', wanted 'recompute' (the cache has no host tier)")
        if self.stop_before_loss and not spec.backups:
            raise ValueError("stop_before_loss: got True, wanted False (the spec was made with backups=False)")

    def max_steps(self, spec: CacheSpec) -> int:
        """The maximum decode steps of a block. Raises a ValueError if k is out of range."""
        k = spec.block_size if self.k is None else self.k
        if k > spec.block_size:
            raise ValueError(f"k: got {k}, wanted at most the block size, {spec.block_size}")
        return k

    def chunk_tokens(self, spec: CacheSpec) -> int:
        """B, the positions of a mixed step for chunks. Raises a ValueError if there are none."""
        if self.budget is None:
            return self.chunk
        if self.budget <= spec.max_seqs:
            raise ValueError(f"budget: got {self.budget}, wanted more than the {spec.max_seqs} rows")
        return self.budget - spec.max_seqs

    def max_chunks(self, spec: CacheSpec) -> int:
        """R, the maximum rows with chunks in a mixed step."""
        return 1 if self.canonical else min(self.chunk_rows, spec.max_seqs)

    @property
    def alignment_tokens(self) -> int | None:
        """The reused part of a prompt ends at multiples of this number of tokens. None means anywhere."""
        return self.chunk if self.canonical else None

    def chunk_width(self, spec: CacheSpec) -> int:
        """The maximum tokens of a chunk."""
        return min(self.chunk, self.chunk_tokens(spec))


def sort_keys(serving: Serving, scheduler: Scheduler) -> SortKeys:
    """The sort keys of the requests, all [W]: late requests first, then the smallest `order`, then the earliest."""
    requests = serving.requests
    key = scheduler.order(requests, serving.cache.state)
    return late_first(requests.passed >= scheduler.max_deferrals, key, requests.arrival)


def sort_keys_by_row(serving: Serving, scheduler: Scheduler) -> SortKeys:
    """The sort keys of the rows' requests, all [S]."""
    return pick(sort_keys(serving, scheduler), serving.row)


def late_first(late: jax.Array, *keys: jax.Array) -> SortKeys:
    """Moves late entries, bool[W], to the front. The last of the keys is the arrival."""
    *others, arrival = keys
    return (~late).astype(jnp.int32), *(jnp.where(late, jnp.zeros_like(key), key) for key in others), arrival


def first(keys: SortKeys, where: jax.Array) -> jax.Array:
    """i32[]; the first entry in order where bool[W], or -1."""
    return _extreme(keys, where, jnp.min, jnp.max)


def last(keys: SortKeys, where: jax.Array) -> jax.Array:
    """i32[]; the last entry in order where bool[W], or -1."""
    return _extreme(keys, where, jnp.max, jnp.min)


def _extreme(keys: SortKeys, where: jax.Array, best, worst) -> jax.Array:
    for key in keys:
        where = where & (key == best(jnp.where(where, key, worst(key))))
    return jnp.where(jnp.any(where), jnp.argmax(where).astype(jnp.int32), -1)
