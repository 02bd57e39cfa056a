# SPDX-License-Identifier: Apache-2.0
"""Preemption: the row that leaves, and its request, which waits again. `swap.py` moves its blocks to the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, pick
from kvjax.serving.options import Scheduler
from kvjax.serving.order import last, sort_keys_by_row
from kvjax.serving.requests import Finish, Serving, Stage


def victim(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """i32[]; the row to preempt, or to end if it is the only one; -1 if there is none.

    The last one in order; one that is swapped out only if a single other one runs, or if blocks could not be had.
    """
    seqs = serving.cache.state.seqs
    candidates, swapped_out = serving.running & (seqs.length > 0), seqs.swapped_out
    awake = count(candidates & ~swapped_out)
    give_up = jnp.any(candidates & swapped_out) & ((awake <= 1) | (serving.refused == 1))
    return last(sort_keys_by_row(serving, scheduler), candidates & (swapped_out == give_up))


def leave(serving: Serving, row: jax.Array, ends: jax.Array) -> Serving:
    """Takes row i32[] from its request; one that runs waits again, with its place in the order, or where bool[] ends.

    The cache's row is as before: it is to be released, or has been. A row without a request changes no request.
    """
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
        requests=requests,
        row=jnp.where(free, -1, serving.row),
        leads=serving.leads & ~free,
        skipped_steps=jnp.where(free, 0, serving.skipped_steps),
        out_of_blocks=serving.out_of_blocks & ~free,
        refused=jnp.zeros_like(serving.refused),
        dirty=jnp.bool_(True),
    )
