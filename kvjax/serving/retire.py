# SPDX-License-Identifier: Apache-2.0
"""The first two parts of a step: rows that are done leave, and the others get room for their next tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, count, pick
from kvjax.events.log import EventLog
from kvjax.events.records import Events
from kvjax.serving.capacity import lacks_blocks, num_steps
from kvjax.serving.loops import note
from kvjax.serving.requests import Finish, Serving, Stage
from kvjax.serving.scheduler import Scheduler, decoding, last, places_of_rows, running


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

    def over(serving: Serving) -> jax.Array:
        """bool[S]; rows whose request is over."""
        return (serving.row >= 0) & ~running(serving)

    def more(serving: Serving) -> jax.Array:
        """bool[]; whether a row has to leave."""
        return jnp.any(over(serving)) | lacks_blocks(serving, scheduler)

    def let_go(carry):
        _, serving, log, retired = carry
        done = over(serving)
        row = jnp.where(jnp.any(done), jnp.argmax(done).astype(jnp.int32), victim(serving, scheduler))
        slot, number = pick(serving.row, row), count(retired.preempted >= 0)
        serving, log = _let_go(serving, log, row, now)
        waits = pick(serving.requests.stage, slot) == Stage.WAITING
        retired = Retired(
            retired.released | (rows == row), jnp.where((rows == number) & waits, slot, retired.preempted)
        )
        return more(serving) & (row >= 0), serving, log, retired

    none = Retired(jnp.zeros(rows.shape, jnp.bool_), jnp.full(rows.shape, -1, jnp.int32))
    start = more(serving), serving, log, none
    _, serving, log, retired = jax.lax.while_loop(lambda carry: carry[0], let_go, start)
    return serving, log, retired


def victim(serving: Serving, scheduler: Scheduler) -> jax.Array:
    """i32[]; the row to preempt, or to end if it is the only one; -1 if there is none.

    The last one in order; one that is swapped out only if a single other one runs, or if blocks could not be had.
    """
    having, swapped_out = running(serving) & (serving.cache.state.seqs.length > 0), serving.cache.state.seqs.swapped_out
    give_up = jnp.any(having & swapped_out) & ((count(having & ~swapped_out) <= 1) | (serving.refused == 1))
    return last(places_of_rows(serving, scheduler), having & (swapped_out == give_up))


def _let_go(serving: Serving, log: EventLog, row: jax.Array, now: jax.Array) -> tuple[Serving, EventLog]:
    """Releases row i32[]; a request that runs waits again, or ends if it is alone."""
    seqs = serving.cache.state.seqs
    alone = (count(running(serving) & (seqs.length > 0)) == 1) & ~pick(seqs.swapped_out, row)
    serving = leave(serving, row, alone)
    cache, events = serving.cache.release(row, now=now)
    return serving.replace(cache=cache), note(log, events)


def leave(serving: Serving, row: jax.Array, ends: jax.Array) -> Serving:
    """Takes row i32[] from its request; one that runs waits again, with its place in the order, or where bool[] ends.

    The cache's row is as before: it is to be released, or has been. A row without a request changes no request.
    """
    requests, runs, slot = serving.requests, running(serving), pick(serving.row, row)
    preempted = pick(runs, row)
    waits, ends = preempted & ~ends, preempted & ends
    requests = requests.at(
        slot[None], preempted[None], stage=jnp.where(ends, int(Stage.DONE), int(Stage.WAITING)),
        preemptions=pick(requests.preemptions, slot) + waits.astype(jnp.int32),
    )  # fmt: skip
    requests = requests.at(slot[None], ends[None], finish=int(Finish.NO_BLOCKS), ended=serving.steps)
    # Samples that hold rows until its prompt is computed. A row without a request is nobody's parent.
    held = runs & (pick(requests.parent, serving.row) == slot) & (slot >= 0)
    requests = requests.at(serving.row, held, stage=int(Stage.WAITING)).without_parent(slot, ~waits)
    free = held | (np.arange(held.shape[0], dtype=np.int32) == row)
    return serving.replace(
        requests=requests,
        row=jnp.where(free, -1, serving.row),
        leads=serving.leads & ~free,
        skipped_steps=jnp.where(free, 0, serving.skipped_steps),
        out_of_blocks=serving.out_of_blocks & ~free,
        refused=jnp.zeros_like(serving.refused),
        dirty=jnp.bool_(True),
    )


def grow(
    serving: Serving, scheduler: Scheduler, most: int, single: jax.Array, log_room: jax.Array, now: jax.Array
) -> tuple[Serving, Events, jax.Array, jax.Array]:
    """Makes room for the next tokens of all decode rows.

    While a request waits for a row or for blocks, a block of steps ends where the first row is known to end.

    Args:
      serving: its decode rows' next tokens fit.
      scheduler: static.
      most: static; k.
      single: bool[]; whether to run one step only.
      log_room: i32[]; events that the log holds for the block of steps.
      now: i32[] ms.

    Returns:
      The requests and the events; i32[], the number n of steps, 0 if blocks were refused; and i32[S], how many tokens
      each decode row may write in them.
    """
    requests, seqs = serving.requests, serving.cache.state.seqs
    decode = decoding(serving)
    left = jnp.where(decode, pick(requests.goal, serving.row) - pick(requests.known, serving.row), 0)
    want = jnp.minimum(left, most)
    waiting = jnp.any(requests.stage == Stage.WAITING)
    first_end = jnp.min(jnp.where(decode, left, most))
    limit = jnp.where(waiting, jnp.minimum(first_end, scheduler.k_waiting), most)
    limit = jnp.where(
        single | (serving.refused > 1), 1, jnp.minimum(limit, num_steps(serving.cache.state, want, most, log_room))
    )
    want = jnp.minimum(want, limit)
    more = jnp.maximum(want - (seqs.length - seqs.committed), 0)
    cache, events = serving.cache.extend(decode & (more > 0), jnp.where(decode, more, 0), max_tokens=most, now=now)
    n = jnp.where(events.ok, limit, 0)
    refused = jnp.where(events.ok, 0, limit)
    return serving.replace(cache=cache, refused=refused), events, n, jnp.where(events.ok, want, 0)
