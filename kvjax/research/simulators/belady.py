# SPDX-License-Identifier: Apache-2.0
"""Belady's bound: the maximum number of hits of any policy, even if it knows the whole trace.

Belady evicts the block with the farthest next use, and among equal uses the deepest block. A parent is used no later
than its children, so the cached blocks stay a forest, and no policy for prefixes finds more.

This needs no simulation of a cache. A block that stays cached between two uses takes a block of space while each
request in between runs. So requests are processed in order, and each finds the blocks for which all requests in between
have left space. Space goes to the nearest next use first, which is the same as evicting the farthest next use first.
Both methods find the maximum for every beginning of the trace, so they agree for each request.

Free space is counted by its age, for each cache. Space free since request q serves all blocks last used at q or later.
A block takes the youngest space of sufficient age. Ages without space are skipped by path halving, as in union-find. So
whatever the sizes, a step costs a few gathers and scatters of an element per cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.research.simulators.hits import Hits, check_longest
from kvjax.research.traces.trace import Trace, runs


def belady(trace: Trace, sizes: Sequence[int] | np.ndarray, *, bypass: bool = False) -> Hits:
    """The hits of every request under the best possible policy, for the rule "papers".

    For the rules "kvjax" and "full" this is an upper bound that may be out of reach: the cache may hold the same
    blocks, but a reused last block does not count as a hit. All sizes run in a single program, compiled for the number
    of sizes.

    Args:
      trace: the requests.
      sizes: blocks of each cache, Z of them, in any order.
      bypass: whether the cache may leave out blocks of a request, both while it runs and at its end, like a pool that
        is separate from the GPU's memory. Otherwise it holds all of them while the request runs, and then caches them.

    Returns:
      The hits, blocks i32[Z, R].

    Raises:
      ValueError: for no sizes, or a size smaller than the longest request.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 1, 2, 3], [4] * 4, [0] * 4, [[1], [2], [3], [1]], block_size=4)
      >>> research.belady(trace, [2]).blocks.tolist()  # it knows that block 1 comes back
      [[0, 0, 0, 1]]
      >>> research.lru_curve(trace, [2], rule="papers").blocks.tolist()
      [[0, 0, 0, 0]]

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966); as a choice of intervals,
    Carlisle and Lloyd, "On the k-coloring of intervals" (1995).
    """
    checked = check_longest(trace, sizes)
    request, before, _, length = runs(trace, trace.lengths)
    # Without a request in between, only a cache with bypass may lack the blocks.
    always = (before >= 0) & (before == request - 1) & (not bypass)
    wanted = np.flatnonzero((before >= 0) & ~always)
    blocks = np.zeros((len(checked), len(trace)), np.int32)
    blocks[:, request[always]] = length[always]
    steps, run_steps = _steps(trace, request[wanted], before[wanted], length[wanted], bypass)
    num_taken = np.asarray(_serve(steps, checked, _padded(len(trace) + 2)))
    np.add.at(blocks.T, request[wanted], num_taken[run_steps])
    return Hits(trace, "papers", checked, blocks)


class _Steps(NamedTuple):
    """The steps in which space of a cache is taken and freed, in order."""

    since: jax.Array  # i32[P]; the entry of the space to take: blocks that have been free since then, or longer
    # i32[P]; blocks of a request that should have stayed since then; where `ends`, all blocks that the request takes
    wanted: jax.Array
    # bool[P]; the request has found its blocks, and runs. It takes the youngest space if the cache lacks free blocks;
    # the rest of the cache is free from now on
    ends: jax.Array


def _padded(size: int) -> int:
    """The size plus up to an eighth, so traces of similar lengths share a program."""
    unit = max(64, 1 << max((size - 1).bit_length() - 4, 0))
    return -(-size // unit) * unit


def _steps(
    trace: Trace, request: np.ndarray, before: np.ndarray, length: np.ndarray, bypass: bool
) -> tuple[_Steps, np.ndarray]:
    """The steps of a trace whose requests reuse runs of these lengths, and i64[U], the step of each run.

    Entry 0 of the space always stays empty, and entry q + 2 serves blocks last used by request q. Space free while
    request r runs serves blocks used by r - 1, and with bypass also blocks used by r.
    """
    num_requests = len(trace)
    running = np.zeros(num_requests, np.int32) if bypass else trace.lengths
    since = np.append(before + 2, np.arange(num_requests) + (2 if bypass else 1))
    order = np.argsort(np.append(request, np.arange(num_requests)), kind="stable")
    ends = np.append(np.zeros(len(request), np.bool_), np.ones(num_requests, np.bool_))
    fields = (since.astype(np.int32), np.append(length, running).astype(np.int32), ends)
    padding = (0, _padded(len(order)) - len(order))  # padded steps want nothing
    return _Steps(*(jnp.asarray(np.pad(field[order], padding)) for field in fields)), np.flatnonzero(~ends[order])


@functools.partial(jax.jit, static_argnums=2)
def _serve(steps: _Steps, sizes: jax.Array, entries: int) -> jax.Array:
    """i32[P, Z]; blocks taken by each step in caches of sizes i32[Z]."""
    shape = (entries, sizes.shape[0])
    below = jnp.maximum(jnp.arange(entries, dtype=jnp.int32) - 1, 0)[:, None]

    def step(carry: tuple[jax.Array, ...], now: _Steps) -> tuple[tuple[jax.Array, ...], jax.Array]:
        space, older, total = carry
        idle = sizes - now.wanted  # blocks that may be cached while the request runs
        wanted = jnp.where(now.ends, jnp.maximum(total - idle, 0), now.wanted)
        space, older, taken = _take(space, older, now.since, wanted)
        freed = jnp.where(now.ends, idle - total + taken, 0)
        space = space.at[now.since].add(freed)
        return (space, older, total - taken + freed), taken

    start = (jnp.zeros(shape, jnp.int32), jnp.broadcast_to(below, shape), jnp.zeros(shape[1:], jnp.int32))
    return lax.scan(step, start, steps)[1]


def _take(
    space: jax.Array, older: jax.Array, since: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes space i32[X, Z] from the entry `since` and older entries, youngest first: wanted i32[Z], or all.

    All entries between an entry and its entry in older i32[X, Z] are empty. Entry 0 is always empty, and the end.
    """
    lane = jnp.arange(wanted.shape[0], dtype=jnp.int32)

    def take(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        space, older, entry, remaining = carry
        free = space[entry, lane]
        taken = jnp.minimum(free, remaining)
        space = space.at[entry, lane].set(free - taken, unique_indices=True)
        remaining = remaining - taken
        following = older[entry, lane]
        # Path halving: the next walk from this entry skips an empty entry.
        skipped = jnp.where(space[following, lane] == 0, older[following, lane], following)
        older = older.at[entry, lane].set(skipped, unique_indices=True)
        return space, older, jnp.where(remaining > 0, skipped, entry), remaining

    entry = jnp.broadcast_to(since, wanted.shape)
    is_running = lambda carry: jnp.any((carry[3] > 0) & (carry[2] > 0))  # noqa: E731
    space, older, _, remaining = lax.while_loop(is_running, take, (space, older, entry, wanted))
    return space, older, wanted - remaining
