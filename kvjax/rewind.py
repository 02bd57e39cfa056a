# SPDX-License-Identifier: Apache-2.0
"""Cutting a row back in all groups: the decisions behind `cache.truncate`, in order."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _row, windows
from kvjax._arrays import pick
from kvjax.group import give_back, hold
from kvjax.state import NO_BLOCK, CacheState
from kvjax.store import withdraw


def rewind(
    state: CacheState, row: _row.Row, seq: jax.Array, length: jax.Array, ok: jax.Array, now: jax.Array
) -> tuple[CacheState, list[jax.Array], jax.Array]:
    """Cuts row `seq` back to `length` tokens where ok bool[]; also returns records, removed, and whether it was done.

    It is not where a window goes back over blocks that have left it and are no longer on the device.
    """
    size, place = state.spec.block_size, jnp.arange(row.tables[0].shape[0], dtype=jnp.int32)
    keep, committed = -(-length // size), jnp.minimum(row.committed, length)
    again = [
        windows.regain(group, row.tables[0], (place < keep) & of.keeps(place, committed, size) & (table < 0))
        for group, of, table in zip(state.groups[1:], state.spec.groups[1:], row.tables[1:], strict=True)
    ]
    ok = functools.reduce(jnp.logical_and, [there for _, there in again], ok)
    groups, tables = [], []
    for number, (group, table) in enumerate(zip(state.groups, row.tables, strict=True)):
        if number > 0:
            blocks = again[number - 1][0]
            group = hold(group, blocks, ok & (blocks >= 0))
            table = jnp.where(ok & (table < 0), blocks, table)
        dropped = ok & (place >= keep) & (table >= 0)
        policy = windows.policy_of(number, state.policy)
        groups.append(give_back(group, policy, table[::-1], dropped[::-1], now))
        tables.append(jnp.where(dropped, NO_BLOCK, table))
    group, block = groups[0], pick(tables[0], keep - 1)[None]
    alone = (pick(group.blocks.fill, block) > 0) & (pick(group.blocks.refcount, block) == 1) & group.childless(block)
    groups[0], gone = withdraw(group, block, ok & (length % size > 0) & alone)
    state, removed = windows.forget_all(dataclasses.replace(state, groups=tuple(groups)), gone)
    retention = row.retention
    if retention is not None:  # what comes after the cut is generated, whatever was said of the prompt there
        kept = np.arange(retention.shape[0], dtype=np.int32) * size < length
        retention = jnp.where(kept[:, None], retention, retention[-1:])
    return _row.write(state, seq, ok, tables, length, committed, row.namespace, retention), removed, ok
