# SPDX-License-Identifier: Apache-2.0
"""Belady's bound: the most that any policy could find, if it knew the whole trace beforehand.

Belady evicts the block whose next use is farthest away, of equal ones the deepest. A parent is used no later than its
children, so what is cached stays a forest, and no policy that caches prefixes finds more.

No cache has to be simulated for the answer. A block that is kept from one use to the next takes one block of the cache
while each request in between runs. So requests are taken in order, and each finds what all requests in between have
left room for. Room goes to the nearest next use first, which is evicting the farthest first: both ways find the most
that can be found in every beginning of the trace, so they are equal request by request.

Room is counted by its age, of each cache for itself. Room that has been free since request q serves all blocks that
were last used at q or later; a block takes the youngest room that is old enough. Ages without room are skipped as by
union-find. So a step costs some gathers and scatters of one element a cache, whatever the sizes are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.research._runs import check_sizes, runs
from kvjax.research.rules import Hits
from kvjax.research.traces import Trace


def belady(trace: Trace, sizes: Sequence[int] | np.ndarray, *, bypass: bool = False) -> Hits:
    """The hits of every request under the best policy there could be, for the rule "papers".

    For the rules "kvjax" and "full" this is an upper bound, not the best: whatever their caches hold, this one may hold
    too, but there a last block comes back for nothing. All sizes run at once in one program, which is compiled anew for
    another number of sizes.

    Args:
      trace: the requests.
      sizes: blocks of each cache, Z of them, in any order.
      bypass: the cache need not take the blocks of a request, neither while it runs nor when it ends: a pool apart from
        the GPU's memory. False: it holds all of them while the request runs, and then caches them.

    Returns:
      The hits, blocks i32[Z, R].

    Raises:
      ValueError: for a size smaller than the longest request.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966); as a choice of intervals,
    Carlisle and Lloyd, "On the k-coloring of intervals" (1995).
    """
    checked = check_sizes(trace, sizes)
    request, before, _, length = runs(trace, trace.lengths)
    # No request in between: only a pool that need not take them can lack them.
    at_hand = (before >= 0) & (before == request - 1) & (not bypass)
    wanted = np.flatnonzero((before >= 0) & ~at_hand)
    blocks = np.zeros((len(checked), len(trace)), np.int32)
    blocks[:, request[at_hand]] = length[at_hand]
    steps, of_run = _steps(trace, request[wanted], before[wanted], length[wanted], bypass)
    kept = np.asarray(_kept(steps, checked, _padded(len(trace) + 2)))
    np.add.at(blocks.T, request[wanted], kept[of_run])
    return Hits(trace, "papers", checked, blocks)


class _Steps(NamedTuple):
    """The steps that take and free the room of a cache, in order.

    Attributes:
      since: i32[P]; the entry of the room that is taken: what has been free since then, or longer.
      wanted: i32[P]; blocks that a request wants kept since then; where `ends`, all that it takes while it runs.
      ends: bool[P]; the request has found what it finds, and runs. It takes the youngest room where the cache has less
        than it needs besides; what the cache has more is free from now on.
    """

    since: jax.Array
    wanted: jax.Array
    ends: jax.Array


def _padded(number: int) -> int:
    """Up to an eighth more, so that traces of about one length share a program."""
    unit = max(64, 1 << max((number - 1).bit_length() - 4, 0))
    return -(-number // unit) * unit


def _steps(
    trace: Trace, request: np.ndarray, before: np.ndarray, length: np.ndarray, bypass: bool
) -> tuple[_Steps, np.ndarray]:
    """The steps of a trace whose requests want runs of these lengths kept; and i64[U], which step each run is.

    Entry 0 of the room always stays empty, and entry q + 2 serves what request q used last. Room that is free while
    request r runs serves what r - 1 used; with bypass it serves what r used, too.
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
def _kept(steps: _Steps, sizes: jax.Array, entries: int) -> jax.Array:
    """i32[P, Z]; how many blocks caches of sizes i32[Z] have kept for each step; where it `ends`, what was taken."""
    shape = entries, sizes.shape[0]
    below = jnp.maximum(jnp.arange(entries, dtype=jnp.int32) - 1, 0)[:, None]

    def step(carry: tuple[jax.Array, ...], now: _Steps) -> tuple[tuple[jax.Array, ...], jax.Array]:
        room, older, in_all = carry
        idle = sizes - now.wanted  # may be kept for later while the request runs
        wanted = jnp.where(now.ends, jnp.maximum(in_all - idle, 0), now.wanted)
        room, older, taken = _take(room, older, now.since, wanted)
        freed = jnp.where(now.ends, idle - in_all + taken, 0)
        room = room.at[now.since].add(freed)
        return (room, older, in_all - taken + freed), taken

    carry = jnp.zeros(shape, jnp.int32), jnp.broadcast_to(below, shape), jnp.zeros(shape[1:], jnp.int32)
    return lax.scan(step, carry, steps)[1]


def _take(
    room: jax.Array, older: jax.Array, since: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes room i32[X, Z] from the entry `since` and older ones, youngest first: as much as wanted i32[Z], or all.

    Between an entry and the one that older i32[X, Z] names all are empty. Entry 0 is always empty, and the end.
    """
    lane = jnp.arange(wanted.shape[0], dtype=jnp.int32)

    def going(carry: tuple[jax.Array, ...]) -> jax.Array:
        _, _, at, left = carry
        return jnp.any((left > 0) & (at > 0))

    def take(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        room, older, at, left = carry
        there = room[at, lane]
        taken = jnp.minimum(there, left)
        room = room.at[at, lane].set(there - taken, unique_indices=True)
        left = left - taken
        following = older[at, lane]
        # Path halving: the next one who passes here skips an empty entry.
        skipped = jnp.where(room[following, lane] == 0, older[following, lane], following)
        older = older.at[at, lane].set(skipped, unique_indices=True)
        return room, older, jnp.where(left > 0, skipped, at), left

    at = jnp.broadcast_to(since, wanted.shape)
    room, older, _, left = lax.while_loop(going, take, (room, older, at, wanted))
    return room, older, wanted - left
