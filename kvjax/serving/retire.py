# SPDX-License-Identifier: Apache-2.0
"""The first part of a step: rows whose request is over are released, then others are preempted if blocks are short."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, count, pick
from kvjax.events.log import EventLog
from kvjax.serving.capacity import lacks_blocks
from kvjax.serving.loops import note
from kvjax.serving.options import Scheduler
from kvjax.serving.preempt import leave, victim
from kvjax.serving.requests import Serving, Stage


class Retired(Pytree):
    """Requests that left their rows in a step.

    Attributes:
      released: bool[S]; rows that were released.
      preempted: i32[S]; slots of the requests that went back to wait, in order; -1 for none.
    """

    released: jax.Array
    preempted: jax.Array


def retire(serving: Serving, log: EventLog, scheduler: Scheduler, now: jax.Array) -> tuple[Serving, EventLog, Retired]:
    """Releases the rows of requests that are over; then preempts while the next token of some row does not fit.

    The last row in order goes first, and never the only one. A request that is alone and does not fit is over.
    """
    rows = np.arange(serving.row.shape[0], dtype=np.int32)

    def more(serving: Serving) -> jax.Array:
        """bool[]; whether a row has to leave."""
        return jnp.any(serving.finished) | lacks_blocks(serving, scheduler)

    def release_one(carry):
        _, serving, log, retired = carry
        finished = serving.finished
        row = jnp.where(jnp.any(finished), jnp.argmax(finished).astype(jnp.int32), victim(serving, scheduler))
        slot, number = pick(serving.row, row), count(retired.preempted >= 0)
        seqs = serving.cache.state.seqs
        alone = (count(serving.running & (seqs.length > 0)) == 1) & ~pick(seqs.swapped_out, row)
        serving = leave(serving, row, alone)
        cache, events = serving.cache.release(row, now=now)
        serving, log = serving.replace(cache=cache), note(log, events)
        preempted = (rows == number) & (serving.requests[slot].stage == Stage.WAITING)
        retired = Retired(retired.released | (rows == row), jnp.where(preempted, slot, retired.preempted))
        return more(serving) & (row >= 0), serving, log, retired

    none = Retired(jnp.zeros(rows.shape, jnp.bool_), jnp.full(rows.shape, -1, jnp.int32))
    start = more(serving), serving, log, none
    _, serving, log, retired = jax.lax.while_loop(lambda carry: carry[0], release_one, start)
    return serving, log, retired
