# SPDX-License-Identifier: Apache-2.0
"""Rows that are swapped out: their blocks wait on the host until there is room again (`Scheduler(preempt="swap")`).

A loop moves no blocks between the tiers. It ends where a row is to be swapped out or in; the host moves the blocks, and
enters it again. Nobody is admitted while a row is swapped out.

Source: vLLM v0, whose swapped requests come before those that wait.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, count, pick, put
from kvjax.serving.capacity import lacks_blocks, next_blocks
from kvjax.serving.options import Scheduler
from kvjax.serving.order import first, sort_keys_by_row
from kvjax.serving.preempt import victim
from kvjax.serving.requests import Serving


class Swaps(Pytree):
    """Moves that the host is to make before the loop goes on; both -1 if none.

    Attributes:
      out: i32[]; the row to swap out.
      back: i32[]; the row to swap in.
    """

    out: jax.Array
    back: jax.Array

    @property
    def any(self) -> jax.Array:
        """bool[]."""
        return (self.out >= 0) | (self.back >= 0)


def swaps(serving: Serving, scheduler: Scheduler) -> Swaps:
    """The row to swap out now, and the one to swap in."""
    if scheduler.preempt != "swap":
        return Swaps(jnp.int32(-1), jnp.int32(-1))
    return Swaps(_out(serving, scheduler), _back(serving, scheduler))


def _out(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """The row that would be preempted, if its tokens cost more to compute than to move; or -1."""
    state, swapped_out = serving.cache.state, serving.cache.state.seqs.swapped_out
    finished = serving.finished  # they leave their rows before anybody is preempted
    freed = [
        count(finished[:, None] & (group.table >= 0) & (pick(group.blocks.refcount, group.table) == 1))
        for group in state.groups
    ]
    row = jnp.where(lacks_blocks(serving, scheduler, freed), victim(serving, scheduler), -1)
    others = count(serving.running & (state.seqs.length > 0) & ~swapped_out) > 1
    blocks = pick(state.seqs.committed, row) // state.spec.block_size
    leaves = (row >= 0) & ~pick(swapped_out, row) & others & (blocks >= scheduler.min_swap) & (serving.refused != 1)
    return jnp.where(leaves, row, -1)


def _back(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """The first swapped-out row in order, if there is room for it and for what all rows need next, or if none runs.

    At least a block for each row, and the next chunk of each row that prefills: one that found no blocks for its chunk
    behind the return would swap a row out again. -1 if the row's blocks could not be had: the loop preempts then.
    """
    state = serving.cache.state
    swapped_out = serving.running & state.seqs.swapped_out
    row = first(sort_keys_by_row(serving, scheduler), swapped_out)
    samples = serving.running & (serving.by_row.parent >= 0)  # they wait for their parent
    awake = (serving.row >= 0) & ~state.seqs.swapped_out
    after = _awake(serving, row)
    fits = jnp.bool_(True)
    for group, blocks in zip(state.groups, next_blocks(after, scheduler, after.prefilling), strict=True):
        table = pick(group.table, row)
        absent = count((table >= 0) & ~group.on_device(table))
        fits = fits & (absent + jnp.maximum(count(awake) + 1, blocks) + scheduler.watermark <= group.available)
    return jnp.where((row >= 0) & (fits | ~jnp.any(awake & ~samples)) & (serving.refused != 1), row, -1)


def _awake(serving: Serving, row: jax.Array) -> Serving:
    """The requests as if row i32[] were not swapped out."""
    state = serving.cache.state
    swapped = put(state.seqs.swapped_out, row, False, row >= 0)
    state = state.replace(seqs=state.seqs.replace(swapped=swapped))
    return serving.replace(cache=serving.cache.replace(state=state))
