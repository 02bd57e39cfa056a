# SPDX-License-Identifier: Apache-2.0
"""Belady's bound: the most that any policy could find that has the whole trace beforehand.

Belady evicts the block whose next use is farthest away, of equal ones the deepest. A parent is used no later than its
children, so the cached blocks stay a forest, and no policy that caches prefixes finds more.

No cache has to be simulated for the answer. A block that stays cached from one use to the next takes one block of space
while each request in between runs. So requests are taken in order, and each finds the blocks for which all requests in
between have left space. Space goes to the nearest next use first, which is evicting the farthest first. Both ways find
the most that can be found in every beginning of the trace, so they are equal request by request.

Free space is counted by its age, for each cache. Space that has been free since request q serves all blocks that were
last used at q or later. A block takes the youngest space that is old enough. Ages without space are skipped by path
halving, as in union-find. So a step costs some gathers and scatters of one element a cache, for any sizes.
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
    """The hits of every request under the best policy there could be, for the rule "papers".

    For the rules "kvjax" and "full" this is an upper bound that may be out of reach: this cache may hold what theirs
    hold, but there a last block that comes back does not hit. All sizes run in one program, compiled for their number.

    Args:
      trace: the requests.
      sizes: blocks of each cache, Z of them, in any order.
      bypass: the cache need not take the blocks of a request, neither while it runs nor when it ends: a pool apart from
        the GPU's memory. False: it holds all of them while the request runs, and then caches them.

    Returns:
      The hits, blocks i32[Z, R].

    Raises:
      ValueError: for no sizes, or one smaller than the longest request.

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
    # With no request in between only a cache with bypass may lack them.
    always = (before >= 0) & (before == request - 1) & (not bypass)
    wanted = np.flatnonzero((before >= 0) & ~always)
    blocks = np.zeros((len(checked), len(trace)), np.int32)
    blocks[:, request[always]] = length[always]
    steps, of_run = _steps(trace, request[wanted], before[wanted], length[wanted], bypass)
    found = np.asarray(_serve(steps, checked, _padded(len(trace) + 2)))
    np.add.at(blocks.T, request[wanted], found[of_run])
    return Hits(trace, "papers", checked, blocks)


class _Steps(NamedTuple):
    """The steps that take and free the space of a cache, in order."""

    since: jax.Array  # i32[P]; the entry of the space that is taken: blocks that have been free since then, or longer
    # i32[P]; blocks of a request that should have stayed since then; where `ends`, all that it takes while it runs
    wanted: jax.Array
    # bool[P]; the request has found its blocks, and runs. It takes the youngest space where the cache has less than it
    # needs besides; the rest of the cache is free from now on
    ends: jax.Array


def _padded(number: int) -> int:
    """Up to an eighth more, so that traces of about one length share a program."""
    unit = max(64, 1 << max((number - 1).bit_length() - 4, 0))
    return -(-number // unit) * unit


def _steps(
    trace: Trace, request: np.ndarray, before: np.ndarray, length: np.ndarray, bypass: bool
) -> tuple[_Steps, np.ndarray]:
    """The steps of a trace whose requests use runs of these lengths again; and i64[U], the step of each run.

    Entry 0 of the space always stays empty, and entry q + 2 serves blocks that request q used last. Space that is free
    while request r runs serves those that r - 1 used; with bypass those that r used, too.
    """
    number = len(trace)
    running = np.zeros(number, np.int32) if bypass else trace.lengths
    since = np.append(before + 2, np.arange(number) + (2 if bypass else 1))
    order = np.argsort(np.append(request, np.arange(number)), kind="stable")
    ends = np.append(np.zeros(len(request), np.bool_), np.ones(number, np.bool_))
    fields = since.astype(np.int32), np.append(length, running).astype(np.int32), ends
    more = (0, _padded(len(order)) - len(order))  # these want nothing
    return _Steps(*(jnp.asarray(np.pad(field[order], more)) for field in fields)), np.flatnonzero(~ends[order])


@functools.partial(jax.jit, static_argnums=2)
def _serve(steps: _Steps, sizes: jax.Array, entries: int) -> jax.Array:
    """i32[P, Z]; blocks that each step has taken in caches of sizes i32[Z]."""
    shape = entries, sizes.shape[0]
    below = jnp.maximum(jnp.arange(entries, dtype=jnp.int32) - 1, 0)[:, None]

    def step(carry: tuple[jax.Array, ...], now: _Steps) -> tuple[tuple[jax.Array, ...], jax.Array]:
        space, older, in_all = carry
        idle = sizes - now.wanted  # may hold other blocks while the request runs
        wanted = jnp.where(now.ends, jnp.maximum(in_all - idle, 0), now.wanted)
        space, older, taken = _take(space, older, now.since, wanted)
        freed = jnp.where(now.ends, idle - in_all + taken, 0)
        space = space.at[now.since].add(freed)
        return (space, older, in_all - taken + freed), taken

    start = jnp.zeros(shape, jnp.int32), jnp.broadcast_to(below, shape), jnp.zeros(shape[1:], jnp.int32)
    return lax.scan(step, start, steps)[1]


def _take(
    space: jax.Array, older: jax.Array, since: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes space i32[X, Z] from the entry `since` and older ones, youngest first: as much as wanted i32[Z], or all.

    Between an entry and the one that older i32[X, Z] names all are empty. Entry 0 is always empty, and the end.
    """
    lane = jnp.arange(wanted.shape[0], dtype=jnp.int32)

    def take(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        space, older, at, left = carry
        free = space[at, lane]
        taken = jnp.minimum(free, left)
        space = space.at[at, lane].set(free - taken, unique_indices=True)
        left = left - taken
        following = older[at, lane]
        # Path halving: the next walk that passes here skips an empty entry.
        skipped = jnp.where(space[following, lane] == 0, older[following, lane], following)
        older = older.at[at, lane].set(skipped, unique_indices=True)
        return space, older, jnp.where(left > 0, skipped, at), left

    at = jnp.broadcast_to(since, wanted.shape)
    going = lambda carry: jnp.any((carry[3] > 0) & (carry[2] > 0))  # noqa: E731
    space, older, _, left = lax.while_loop(going, take, (space, older, at, wanted))
    return space, older, wanted - left
