# SPDX-License-Identifier: Apache-2.0
"""Rows that leave: `retire`, the first part of a step, and the choice of rows to preempt and to swap.

Preempted requests wait again; with `Scheduler(preempt="swap")` their blocks do, on the host. A loop moves no blocks
between the tiers: it ends where a row is to be swapped out or in; the host moves the blocks, and enters it again.
Nobody is admitted while a row is swapped out.

Source: vLLM v0, whose swapped requests come before those that wait.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, count, pick, put
from kvjax.events.log import Log
from kvjax.serving.capacity import lacks_blocks, next_blocks
from kvjax.serving.decode import note
from kvjax.serving.options import Scheduler, first, last, sort_keys_by_row
from kvjax.serving.requests import Finish, Serving, Stage
from pallas_kernels.loops import while_loop


class Retired(Pytree):
    """Requests that left their rows in a step."""

    released: jax.Array  # bool[S]; rows that were released
    preempted: jax.Array  # i32[S]; slots of the requests that went back to wait, in order; -1 for none


def retire(serving: Serving, log: Log, scheduler: Scheduler, now: jax.Array) -> tuple[Serving, Log, Retired]:
    """Releases the rows of requests that are over; then preempts while the next token of some row does not fit."""
    rows = np.arange(serving.row.shape[0], dtype=np.int32)

    def more(serving: Serving) -> jax.Array:
        """bool[]; whether a row has to leave."""
        return jnp.any(serving.finished) | lacks_blocks(serving, scheduler)

    def release_one(carry):
        _, serving, log, retired = carry
        finished = serving.finished
        row = jnp.where(jnp.any(finished), jnp.argmax(finished).astype(jnp.int32), _victim(serving, scheduler))
        slot, number = pick(serving.row, row), count(retired.preempted >= 0)
        seqs = serving.cache.state.seqs
        alone = (count(serving.running & (seqs.length > 0)) == 1) & ~pick(seqs.swapped_out, row)
        serving = leave(serving, row, alone)
        released = row
        if serving.held is not None:  # a row of one that is done stays in use, with nobody's request
            holds = serving.requests[slot].stage == Stage.DONE
            released = jnp.where(holds, -1, row)
            serving = serving.replace(held=put(serving.held, slot[None], row[None], holds[None]))
        cache, events = serving.cache.release(released, now=now)
        serving, log = serving.replace(cache=cache), note(log, events)
        preempted = (rows == number) & (serving.requests[slot].stage == Stage.WAITING)
        retired = Retired(retired.released | (rows == row), jnp.where(preempted, slot, retired.preempted))
        return more(serving) & (row >= 0), serving, log, retired

    none = Retired(jnp.zeros(rows.shape, jnp.bool_), jnp.full(rows.shape, -1, jnp.int32))
    start = more(serving), serving, log, none
    _, serving, log, retired = while_loop(lambda carry: carry[0], release_one, start)
    return serving, log, retired


def _victim(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """i32[]; the row to preempt, or to end if it is the only one: the last one in order; -1 if there is none."""
    seqs = serving.cache.state.seqs
    candidates, swapped_out = serving.running & (seqs.length > 0), seqs.swapped_out
    awake = count(candidates & ~swapped_out)
    # One that is swapped out leaves only if a single other one runs, or if blocks could not be had.
    give_up = jnp.any(candidates & swapped_out) & ((awake <= 1) | (serving.refused == 1))
    return last(sort_keys_by_row(serving, scheduler), candidates & (swapped_out == give_up))


def leave(serving: Serving, row: jax.Array, ends: jax.Array) -> Serving:
    """Takes row i32[], which the caller releases, from its request: one that runs waits again, or is over if `ends`."""
    requests, running, slot = serving.requests, serving.running, pick(serving.row, row)
    preempted = pick(running, row)
    waits, ends = preempted & ~ends, preempted & ends
    requests = requests.at(
        slot, preempted, stage=jnp.where(ends, int(Stage.DONE), int(Stage.WAITING)),
        preemptions=requests[slot].preemptions + waits.astype(jnp.int32),
    )  # fmt: skip
    requests = requests.at(slot, ends, finish=int(Finish.NO_BLOCKS), ended=serving.steps)
    # Samples that hold rows until its prompt is computed. A row without a request is nobody's parent.
    samples = running & (requests[serving.row].parent == slot) & (slot >= 0)
    requests = requests.at(serving.row, samples, stage=int(Stage.WAITING)).without_parent(slot, ~waits)
    free = samples | (np.arange(samples.shape[0], dtype=np.int32) == row)
    return serving.replace(
        requests=requests, row=jnp.where(free, -1, serving.row), leads=serving.leads & ~free,
        skipped_steps=jnp.where(free, 0, serving.skipped_steps), out_of_blocks=serving.out_of_blocks & ~free,
        refused=jnp.zeros_like(serving.refused), dirty=jnp.bool_(True),
    )  # fmt: skip


class Swaps(Pytree):
    """Moves that the host is to make before the loop goes on; both -1 if none."""

    out: jax.Array  # i32[]; the row to swap out
    back: jax.Array  # i32[]; the row to swap in

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
    row = jnp.where(lacks_blocks(serving, scheduler, freed), _victim(serving, scheduler), -1)
    others = count(serving.running & (state.seqs.length > 0) & ~swapped_out) > 1
    blocks = pick(state.seqs.committed, row) // state.spec.block_size
    leaves = (row >= 0) & ~pick(swapped_out, row) & others & (blocks >= scheduler.min_swap) & (serving.refused != 1)
    return jnp.where(leaves, row, -1)


def _back(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """The first swapped-out row in order, if there are blocks for it and for what all need next, or if none runs.

    They need at least a block each, and the next chunk of a row that prefills: one that found no blocks for its chunk
    behind the return would swap a row out again.
    """
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
    # If the row's blocks could not be had, the loop preempts.
    return jnp.where((row >= 0) & (fits | ~jnp.any(awake & ~samples)) & (serving.refused != 1), row, -1)
