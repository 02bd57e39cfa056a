# SPDX-License-Identifier: Apache-2.0
"""Growing rows in all groups at once: the decisions behind `cache.extend`, in order."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _row, cow, windows
from kvjax import tiers as tiers_
from kvjax._arrays import count, pick, put, rank, runs
from kvjax.admission import all_or_nothing
from kvjax.events import EventKind, record
from kvjax.group import available, take
from kvjax.retention import apply_retention
from kvjax.state import CacheState, pytree


@pytree()
class Growth:
    """What became of it: whether every row could grow, the records of each group, and blocks missing at most."""

    ok: jax.Array
    removed: list[jax.Array]
    copied: list[jax.Array]
    shortfall: jax.Array
    updated: list[jax.Array]
    moves: list[jax.Array]


def grow(
    state: CacheState, grown: jax.Array, max_tokens: int, now: jax.Array, tiers: tuple[str, ...]
) -> tuple[CacheState, Growth]:
    """Gives the rows blocks for `grown` i32[S] tokens, at most max_tokens more than they have; all rows or none."""
    spec, seqs, size = state.spec, state.seqs, state.spec.block_size
    rows = np.arange(spec.max_seqs, dtype=np.int32)
    first = seqs.length // size
    inside = (grown > seqs.length) & (seqs.length % size > 0)
    place = runs(first, (max_tokens + size - 2) // size + 1)
    beyond = (place * size < grown[:, None]) & (place * size >= seqs.length[:, None])
    written = jnp.maximum(seqs.committed - first * size, 0)  # in the block that the row is in

    shared = [cow.unshare(group, _row.entry(group, rows, first), inside) for group in state.groups]
    new = [beyond.at[:, 0].set(beyond[:, 0] | shares.copies) for _, shares in shared]
    lacks = [count(n) - available(group) for n, (group, _) in zip(new, shared, strict=True)]
    had = functools.reduce(jnp.logical_and, [lack <= 0 for lack in lacks])
    worth = tiers_.worth(state, now) if "host" in tiers else None
    groups, removed, copied, taken = [], [], [], []
    for number, (of, (group, shares), wanted) in enumerate(zip(spec.groups, shared, new, strict=True)):
        policy = windows.policy_of(number, state.policy)
        if taken:  # what the first group has lost is not findable in the others either
            group, forgotten = windows.forget(group, number, taken[0].removed)
            removed.insert(0, forgotten)
        need, most = jnp.where(had, count(wanted), 0), min(wanted.size, of.num_blocks)
        if worth is None or group.host is None:
            new = take(group, policy, need, most, now, number=number)
        else:
            new = tiers_.take(
                group, policy, need, most, now, value=worth[number], least=spec.offload_min_priority, number=number
            )
        had = had & new.ok
        taken.append(new)
        group = cow.settle(new.group, policy, shares, had, now)
        ids = pick(new.ids, rank(wanted.reshape(-1)).reshape(wanted.shape))
        table = put(group.table, (jnp.broadcast_to(rows[:, None], wanted.shape), place), ids, wanted & had)
        copies = shares.copies & had & (written > 0)
        group = dataclasses.replace(group, table=table)
        if number == 0:
            group = _row.copy_tokens(group, ids[:, 0], shares.block, copies)
            if seqs.retention is not None:
                stated = pick(seqs.retention, (rows[:, None], place))
                group = dataclasses.replace(group, blocks=apply_retention(group.blocks, ids, stated, wanted & had))
        groups.append(group)
        removed.append(new.removed)
        copied.append(
            record(EventKind.COPIED, copies, group=number, block=group.pool_row(ids[:, 0]),
                   source=group.pool_row(shares.block), num_tokens=written)
        )  # fmt: skip
    shortfall = jnp.where(had, 0, jnp.maximum(jnp.max(jnp.stack(lacks)), 1))
    state, removed, updated, moves = all_or_nothing(
        state, dataclasses.replace(state, groups=tuple(groups)), had, removed, [new.updated for new in taken],
        [new.moves for new in taken],
    )  # fmt: skip
    return state, Growth(had, removed, copied, shortfall, updated, moves)
