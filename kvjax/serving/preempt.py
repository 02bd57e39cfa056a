# SPDX-License-Identifier: Apache-2.0
"""The step in which requests leave their rows (`retire`), and the choice of rows to preempt and to swap.

A preempted request waits again. With `Scheduler(preempt="swap")` its blocks wait on the host. A loop moves no blocks
between the tiers, so it ends if a row has to be swapped out or in. The host moves the blocks and starts the loop again.
No request is admitted while a row is swapped out.

Source: vLLM v0, whose swapped requests come before waiting requests.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, count, pick, put
from kvjax.events.log import Log
from kvjax.serving.capacity import lacks_blocks, next_blocks
from kvjax.serving.decode import append_events
from kvjax.serving.options import Scheduler, first, last, sort_keys_by_row
from kvjax.serving.requests import Finish, Serving, Stage
from pallas_kernels.loops import while_loop


class Retired(Pytree):
    """The requests leaving their rows in a step."""

    released: jax.Array  # bool[S]; released rows
    preempted: jax.Array  # i32[S]; slots of the requests that wait again, in order, padded with -1


def retire(serving: Serving, log: Log, scheduler: Scheduler, now: jax.Array) -> tuple[Serving, Log, Retired]:
    """Releases the rows of finished requests, then preempts requests until the next tokens of all rows fit."""
    row_ids = np.arange(serving.row.shape[0], dtype=np.int32)

    def must_leave(serving: Serving) -> jax.Array:
        """bool[]; whether a row has to leave."""
        return jnp.any(serving.finished) | lacks_blocks(serving, scheduler)

    def release_one(carry):
        _, serving, log, retired = carry
        finished = serving.finished
        row = jnp.where(jnp.any(finished), jnp.argmax(finished).astype(jnp.int32), _victim(serving, scheduler))
        slot = pick(serving.row, row)
        num_preempted = count(retired.preempted >= 0)
        seqs = serving.cache.state.seqs
        runs_alone = (count(serving.running & (seqs.length > 0)) == 1) & ~pick(seqs.swapped_out, row)
        serving = leave(serving, row, runs_alone)
        released = row
        if serving.kept_rows is not None:  # the row of a finished request stays in use, without a request
            is_kept = serving.requests[slot].stage == Stage.DONE
            released = jnp.where(is_kept, -1, row)
            serving = serving.replace(kept_rows=put(serving.kept_rows, slot[None], row[None], is_kept[None]))
        cache, events = serving.cache.release(released, now=now)
        serving = serving.replace(cache=cache)
        log = append_events(log, events)
        preempted = (row_ids == num_preempted) & (serving.requests[slot].stage == Stage.WAITING)
        retired = Retired(retired.released | (row_ids == row), jnp.where(preempted, slot, retired.preempted))
        return must_leave(serving) & (row >= 0), serving, log, retired

    nothing = Retired(jnp.zeros(row_ids.shape, jnp.bool_), jnp.full(row_ids.shape, -1, jnp.int32))
    start = must_leave(serving), serving, log, nothing
    _, serving, log, retired = while_loop(lambda carry: carry[0], release_one, start)
    return serving, log, retired


def _victim(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """i32[]; the row to preempt, or to end if it is the only row: the last row in order, or -1."""
    seqs = serving.cache.state.seqs
    candidates = serving.running & (seqs.length > 0)
    swapped_out = seqs.swapped_out
    awake = count(candidates & ~swapped_out)
    # A swapped-out row leaves only if a single other row runs, or if blocks were refused.
    gives_up = jnp.any(candidates & swapped_out) & ((awake <= 1) | (serving.refused == 1))
    return last(sort_keys_by_row(serving, scheduler), candidates & (swapped_out == gives_up))


def leave(serving: Serving, row: jax.Array, ends: jax.Array) -> Serving:
    """Takes row i32[] from its request, for the caller to release. A running request waits again, or ends if `ends`."""
    requests = serving.requests
    running = serving.running
    slot = pick(serving.row, row)
    preempted = pick(running, row)
    waits = preempted & ~ends
    ends = preempted & ends
    requests = requests.at(
        slot,
        preempted,
        stage=jnp.where(ends, int(Stage.DONE), int(Stage.WAITING)),
        preemptions=requests[slot].preemptions + waits.astype(jnp.int32),
    )
    requests = requests.at(slot, ends, finish=int(Finish.NO_BLOCKS), ended=serving.steps)
    # Its samples keep rows until the prompt is computed. A row without a request has no samples.
    samples = running & (requests[serving.row].parent == slot) & (slot >= 0)
    requests = requests.at(serving.row, samples, stage=int(Stage.WAITING)).without_parent(slot, ~waits)
    is_free = samples | (np.arange(samples.shape[0], dtype=np.int32) == row)
    return serving.replace(
        requests=requests,
        row=jnp.where(is_free, -1, serving.row),
        leads=serving.leads & ~is_free,
        skipped_steps=jnp.where(is_free, 0, serving.skipped_steps),
        out_of_blocks=serving.out_of_blocks & ~is_free,
        refused=jnp.zeros_like(serving.refused),
        dirty=jnp.bool_(True),
    )


class Swaps(Pytree):
    """The rows that the host has to move before the loop continues, or -1."""

    out: jax.Array  # i32[]; row to swap out
    back: jax.Array  # i32[]; row to swap in

    @property
    def any(self) -> jax.Array:
        """bool[]; whether there is a move."""
        return (self.out >= 0) | (self.back >= 0)


def swaps(serving: Serving, scheduler: Scheduler) -> Swaps:
    """Finds the row to swap out now, and the row to swap in."""
    if scheduler.preempt != "swap":
        return Swaps(jnp.int32(-1), jnp.int32(-1))
    return Swaps(_out(serving, scheduler), _back(serving, scheduler))


def _out(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """i32[]; the row to preempt, if computing its tokens again costs more than moving its blocks, or -1."""
    state = serving.cache.state
    swapped_out = serving.cache.state.seqs.swapped_out
    finished = serving.finished  # finished requests leave their rows before any row is preempted
    freed = [
        count(finished[:, None] & (group.table >= 0) & (pick(group.blocks.refcount, group.table) == 1))
        for group in state.groups
    ]
    row = jnp.where(lacks_blocks(serving, scheduler, freed), _victim(serving, scheduler), -1)
    others_run = count(serving.running & (state.seqs.length > 0) & ~swapped_out) > 1
    blocks = pick(state.seqs.committed, row) // state.spec.block_size
    leaves = (row >= 0) & ~pick(swapped_out, row) & others_run & (blocks >= scheduler.min_swap) & (serving.refused != 1)
    return jnp.where(leaves, row, -1)


def _back(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """i32[]; the first swapped-out row in order, if no row runs or blocks suffice for it and for all next tokens."""
    state = serving.cache.state
    swapped_out = serving.running & state.seqs.swapped_out
    row = first(sort_keys_by_row(serving, scheduler), swapped_out)
    samples = serving.running & (serving.by_row.parent >= 0)  # they wait for their parent
    awake = (serving.row >= 0) & ~state.seqs.swapped_out
    seqs = state.seqs.replace(swapped=put(state.seqs.swapped_out, row, False, row >= 0))
    after = serving.replace(cache=serving.cache.replace(state=state.replace(seqs=seqs)))  # as if it were back
    fits = jnp.bool_(True)
    for group, blocks in zip(state.groups, next_blocks(after, scheduler, after.prefilling), strict=True):
        table = pick(group.table, row)
        absent = count((table >= 0) & ~group.on_device(table))
        fits = fits & (absent + jnp.maximum(count(awake) + 1, blocks) + scheduler.watermark <= group.available)
    # If the row's blocks were refused, the loop preempts.
    return jnp.where((row >= 0) & (fits | ~jnp.any(awake & ~samples)) & (serving.refused != 1), row, -1)
