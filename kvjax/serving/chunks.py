# SPDX-License-Identifier: Apache-2.0
"""A mixed step: the next token of every decode row and chunks of prompts, computed on one line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, pick, put, runs, sum_before
from kvjax.cache import Cache
from kvjax.events.log import EventLog
from kvjax.model import Model, forward
from kvjax.pools.views import mixed
from kvjax.serving.loops import note
from kvjax.serving.requests import Serving
from kvjax.serving.scheduler import Scheduler, late_first, needs, places_of_rows, prefilling, running, wanted


class Chunks(Pytree):
    """Rows whose prompts are computed in a step, in order, all i32[R].

    Attributes:
      rows: -1 for none.
      count: how many tokens of each.
    """

    rows: jax.Array
    count: jax.Array


def plan(serving: Serving, scheduler: Scheduler, size: int) -> tuple[Serving, Chunks]:
    """Deals `size` tokens of the line out to the first rows in order that want chunks.

    Rows that got none too often come before the others, the earliest request first.
    """
    want, prefill = wanted(serving), prefilling(serving)
    place = late_first(serving.starved >= scheduler.patience, *places_of_rows(serving, scheduler))
    rows = jnp.lexsort((*reversed(place), ~prefill)).astype(jnp.int32)[: scheduler.chunk_rows]  # the last key decides
    real = pick(prefill, rows)
    ask = jnp.where(real, jnp.minimum(pick(want, rows), scheduler.chunk), 0)
    if scheduler.chunks == "equal":
        levels = np.arange(1, scheduler.chunk + 1, dtype=np.int32)[:, None]
        total = jnp.sum(jnp.minimum(ask[None], levels), axis=1, dtype=jnp.int32)
        share = jnp.maximum(jnp.sum(total <= size, dtype=jnp.int32), 1)
        ask = jnp.minimum(ask, share)
    before = sum_before(ask)
    chunks = Chunks(jnp.where(real, rows, -1), jnp.clip(size - before, 0, ask))
    dealt = put(jnp.zeros_like(prefill), rows, True, chunks.count > 0)
    starved = jnp.where(prefill & ~dealt, serving.starved + 1, 0)
    return serving.replace(starved=starved), chunks


def make_room(
    serving: Serving, log: EventLog, scheduler: Scheduler, chunks: Chunks, now: jax.Array
) -> tuple[Serving, EventLog, Chunks]:
    """Extends the rows so that they have room for their chunks, where a prompt has no room as a whole: with windows.

    In order, as long as blocks suffice; the others are stalled.
    """
    state = serving.cache.state
    if len(state.groups) == 1:
        return serving, log, chunks
    rows, seqs = chunks.rows, state.seqs
    end = put(seqs.length, rows, pick(seqs.committed, rows) + chunks.count, (rows >= 0) & (chunks.count > 0))
    fits = jnp.ones(rows.shape, jnp.bool_)
    for group, need in zip(state.groups, needs(state, end), strict=True):
        needed = jnp.where(rows >= 0, pick(need, rows), 0)
        fits = fits & (sum_before(needed) + needed <= group.available)
    count = jnp.where(fits, chunks.count, 0)
    more = jnp.maximum(pick(seqs.committed, rows) + count - pick(seqs.length, rows), 0)
    more = jnp.where(count > 0, more, 0)
    cache, events = serving.cache.extend(more > 0, more, seqs=rows, max_tokens=scheduler.chunk, now=now)
    count = jnp.where(events.ok, count, 0)
    stalled = put(jnp.zeros_like(serving.stalled), rows, count == 0, (rows >= 0) & (chunks.count > 0))
    refused = jnp.where(events.ok, serving.refused, 1)
    return serving.replace(cache=cache, stalled=stalled, refused=refused), note(log, events), Chunks(rows, count)


def compute_line(
    model: Model,
    serving: Serving,
    log: EventLog,
    scheduler: Scheduler,
    chunks: Chunks,
    decode: jax.Array,
    size: int,
    now: jax.Array,
) -> tuple[Serving, EventLog, jax.Array]:
    """Computes the next token of the rows where decode bool[S], and chunks; commits the chunks.

    Args:
      model: see `kvjax.step`.
      serving: its rows have room for all of it.
      log: takes the events.
      scheduler: static.
      chunks: of rows that do not decode.
      decode: as above; the K/V of these rows' tokens are written, and not committed.
      size: static; B, positions for chunks.
      now: i32[] ms.

    Returns:
      The requests and the log; and the logits f32[S, V] after each row's last token.
    """
    width = min(scheduler.chunk, size)
    requests, cache = serving.requests, serving.cache
    seqs, rows = cache.state.seqs, chunks.rows
    view = mixed(cache.state, decode, rows, chunks.count, size)
    slots, first = pick(serving.row, rows), pick(seqs.committed, rows)
    tokens = requests.tokens(slots, first, width)
    starts = sum_before(chunks.count)
    place = runs(starts, width)
    inside = jnp.arange(width, dtype=jnp.int32)[None] < chunks.count[:, None]
    line = put(jnp.zeros((size,), jnp.int32), place.reshape(-1), tokens.reshape(-1), inside.reshape(-1))
    line = jnp.concatenate([last_tokens(serving), line])[None]
    ends = decode.shape[0] + starts + chunks.count - 1
    last = put(jnp.arange(decode.shape[0], dtype=jnp.int32), rows, ends, chunks.count > 0)
    logits, pools = forward(model, line, cache.pools, view, last)
    cache, events = Cache(cache.state, pools).commit(tokens, chunks.count, seqs=rows, now=now)
    return serving.replace(cache=cache), note(log, events), logits


def prefilled(serving: Serving, chunks: Chunks) -> jax.Array:
    """bool[S]; rows whose prompt is computed with these chunks."""
    done = (chunks.count > 0) & (pick(wanted(serving), chunks.rows) == 0)
    return put(jnp.zeros(serving.row.shape, jnp.bool_), chunks.rows, True, done)


def fork_samples(serving: Serving, logits: jax.Array, ready: jax.Array) -> tuple[Serving, jax.Array, jax.Array]:
    """Lets samples go on from the prompts that are computed now: each row becomes a copy of its parent's.

    Args:
      serving: the requests.
      logits: f32[S, V].
      ready: bool[S]; rows whose prompt is computed.

    Returns:
      The requests; the logits, a sample's are its parent's; and `ready` with the samples' rows.
    """
    rows = np.arange(ready.shape[0], dtype=np.int32)

    def fork(carry):
        serving, source, dst, left = carry
        src = pick(left, dst)
        cache, _ = serving.cache.fork(src, dst)
        slot = pick(serving.row, dst)[None]
        requests = serving.requests.at(
            slot, jnp.ones((1,), jnp.bool_), parent=-1, cached=pick(serving.requests.prompt, slot)
        )
        left = jnp.where(rows == dst, -1, left)
        source = jnp.where(rows == dst, src, source)
        return serving.replace(cache=cache, requests=requests), source, jnp.argmax(left >= 0).astype(jnp.int32), left

    parent = jnp.where(running(serving), pick(serving.requests.parent, serving.row), -1)
    is_parent = (parent[:, None] == serving.row[None]) & (parent >= 0)[:, None] & (ready & serving.leads)[None]
    left = jnp.where(jnp.any(is_parent, axis=1), jnp.argmax(is_parent, axis=1).astype(jnp.int32), -1)
    start = serving, rows + jnp.zeros_like(left), jnp.argmax(left >= 0).astype(jnp.int32), left
    serving, source, _, _ = lax.while_loop(lambda carry: jnp.any(carry[3] >= 0), fork, start)
    return serving.replace(leads=serving.leads & ~ready), pick(logits, source), ready | (source != rows)


def last_tokens(serving: Serving) -> jax.Array:
    """i32[S]; the last known token of each row's request."""
    requests = serving.requests
    return pick(
        requests.text, pick(requests.start, serving.row) + jnp.maximum(pick(requests.known, serving.row) - 1, 0)
    )
