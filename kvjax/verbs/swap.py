# SPDX-License-Identifier: Apache-2.0
"""`swap_out` moves a row off the device and `swap_in` brings it back. They order moves as `offload` does."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import compact, pick, put
from kvjax.blocks import windows
from kvjax.blocks.rows import Row, read_row
from kvjax.blocks.transfers import Outgoing, transfer
from kvjax.blocks.victims import Taken, claim
from kvjax.checks import integers, on_state, one_or_more
from kvjax.events.records import Events, Records, Status
from kvjax.state import NO_BLOCK, CacheState
from kvjax.verbs._request import conclude, first_failure, put_taken, scan_rows
from kvjax.verbs.offload import take_unheld


@on_state
def swap_out(state: CacheState, seq: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Moves the blocks that only this row holds to the host until `swap_in`. This frees their pool rows on the device.

    Blocks with other holders stay on the device, and so do blocks with children that stay. You can only release a
    swapped-out row or swap it in. Several rows at once are swapped out in order, each all or nothing.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; a row in use.
      now: i32[]; the time in ms.

    Returns:
      The cache, and events with `transfer` and E = 4 M + 1 records a row and group: removed (from a full host),
      updated. Status BAD_REQUEST, HELD (blocks of the row are still on the move) or NO_BLOCKS if the host has too few
      blocks.

    Source: vLLM's swap_out of a preempted sequence group.
    """
    seq = one_or_more("seq", seq)
    now = integers("now", now, ())
    if seq.ndim > 0:
        return scan_rows(functools.partial(swap_out, now=now), state, seq)
    row, moving = _read(state, seq)
    bad = ~row.exists | (row.length == 0) | row.swapped_out
    after = state
    taken = []
    removed = []
    for group_index in state.spec.host_groups:
        group = after.groups[group_index]
        ids = row.tables[group_index][::-1]
        private = ~bad & ~moving & (ids >= 0) & (pick(group.blocks.refcount, ids) == 1)
        findable = pick(group.blocks.fill, ids) > 0
        blocks, claimed = claim(group.blocks, ids, private & findable)
        leaves = claimed | (private & ~findable)
        blocks = blocks.replace(refcount=put(blocks.refcount, ids, 1, private))  # also of blocks that stay
        outgoing = Outgoing(ids, leaves, leaves, held=True)
        policy = windows.policy_of(state, group_index)
        taken.append(transfer(group.replace(blocks=blocks), group_index, policy, outgoing, now))
        after, records = put_taken(after, group_index, taken[-1])
        removed += records
    return _finish(state, after, seq, True, taken, removed, (bad, Status.BAD_REQUEST), (moving, Status.HELD))


@on_state
def swap_in(state: CacheState, seq: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Brings all blocks of a swapped-out row back to the device, all or nothing.

    Several rows at once are swapped in, in order.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; a swapped-out row.
      now: i32[]; the time in ms.

    Returns:
      The cache, and events with `transfer` and E = 5 M records a row and group: removed, updated (also for blocks that
      leave the device to make room). Status BAD_REQUEST, HELD (blocks of the row are still on the move) or NO_BLOCKS.

    Source: vLLM's swap_in.
    """
    seq = one_or_more("seq", seq)
    now = integers("now", now, ())
    if seq.ndim > 0:
        return scan_rows(functools.partial(swap_in, now=now), state, seq)
    row, moving = _read(state, seq)
    bad = ~row.exists | ~row.swapped_out
    after = state
    taken = []
    removed = []
    for group_index in state.spec.host_groups:
        group = after.groups[group_index]
        table = row.tables[group_index]
        on_host = ~bad & ~moving & (table >= 0) & ~group.on_device(table)
        onboarded, _ = compact(jnp.where(on_host, table, NO_BLOCK))
        taken.append(take_unheld(after, group_index, group, table.shape[0], now, onboarded=onboarded))
        after, records = put_taken(after, group_index, taken[-1])
        removed += records
    return _finish(state, after, seq, False, taken, removed, (bad, Status.BAD_REQUEST), (moving, Status.HELD))


def _read(state: CacheState, seq: jax.Array) -> tuple[Row, jax.Array]:
    """Reads the row. Also returns bool[], whether a block of it is on the move."""
    if not state.spec.has_host:
        raise ValueError("state: got a cache without a host tier, wanted num_host_blocks above 0")
    row = read_row(state, seq)
    moving = [jnp.any(group.moving(table)) for group, table in zip(state.groups, row.tables, strict=True)]
    return row, functools.reduce(jnp.logical_or, moving, jnp.bool_(False))


def _finish(
    before: CacheState,
    after: CacheState,
    seq: jax.Array,
    out: bool,
    taken: Sequence[Taken],
    removed: Sequence[Records],
    *causes: tuple[jax.Array, Status],
) -> tuple[CacheState, Events]:
    """Returns the new state, with the row's new mark, unless a cause or a lack of blocks refuses the swap."""
    enough = functools.reduce(jnp.logical_and, [result.ok for result in taken])
    swapped = put(after.seqs.swapped_out, seq[None], out, jnp.ones((1,), jnp.bool_))
    after = after.replace(seqs=after.seqs.replace(swapped=swapped))
    return conclude(before, after, first_failure(*causes, (~enough, Status.NO_BLOCKS)), taken, removed)
