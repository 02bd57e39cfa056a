# SPDX-License-Identifier: Apache-2.0
"""A mixed step: the next token of every decode row and chunks of prompts, computed on one line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, pick, put, runs, sum_before
from kvjax.blocks.rows import Chunk, Span
from kvjax.cache import Cache
from kvjax.events.log import EventLog
from kvjax.events.records import Events, Records, Status
from kvjax.gpu.choice import fused, serves
from kvjax.model import Model, forward
from kvjax.pools.views import mixed
from kvjax.serving.capacity import needs
from kvjax.serving.loops import note
from kvjax.serving.requests import Serving
from kvjax.serving.scheduler import Scheduler, late_first, places_of_rows, prefilling, running, wanted
from kvjax.state import CacheState
from kvjax.verbs._request import assemble, checked_text
from kvjax.verbs.commit import Written, pass_width, publish_spans, store, write, write_fused

Arrays = tuple[jax.Array, jax.Array, jax.Array]


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
    place = late_first(serving.skipped_steps >= scheduler.patience, *places_of_rows(serving, scheduler))
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
    skipped_steps = jnp.where(prefill & ~dealt, serving.skipped_steps + 1, 0)
    return serving.replace(skipped_steps=skipped_steps), chunks


def make_room(
    serving: Serving, log: EventLog, scheduler: Scheduler, chunks: Chunks, now: jax.Array
) -> tuple[Serving, EventLog, Chunks]:
    """Extends the rows so that they have room for their chunks, where a prompt has no room as a whole: with windows.

    In order, as long as blocks suffice; the others compute nothing in this step.
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
    out_of_blocks = put(jnp.zeros_like(serving.out_of_blocks), rows, count == 0, (rows >= 0) & (chunks.count > 0))
    refused = jnp.where(events.ok, serving.refused, 1)
    return (
        serving.replace(cache=cache, out_of_blocks=out_of_blocks, refused=refused),
        note(log, events),
        Chunks(rows, count),
    )


def compute_line(
    model: Model,
    serving: Serving,
    log: EventLog,
    scheduler: Scheduler,
    chunks: Chunks,
    decode: jax.Array,
    size: int,
    k: int,
    now: jax.Array,
) -> tuple[Serving, EventLog, jax.Array]:
    """Computes the next token of the rows where decode bool[S], and chunks, whose text it stores.

    Args:
      model: see `kvjax.step`.
      serving: its rows have room for all of it.
      log: takes the events.
      scheduler: static.
      chunks: of rows that do not decode.
      decode: as above; the K/V of these rows' tokens are written, and not committed.
      size: static; B, positions for chunks.
      k: static; see `_store_chunks`.
      now: i32[] ms.

    Returns:
      The requests and the log; and the logits f32[S, V] after each row's last token.
    """
    width = scheduler.chunk_width(serving.cache.state.spec)
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
    chunk = Chunk(rows, first, first + chunks.count, chunks.count > 0, checked_text(cache.state.spec, tokens, None))
    state, log = _store_chunks(cache.state, log, chunk, k, now)
    return serving.replace(cache=Cache(state, pools)), log, logits


def _store_chunks(
    state: CacheState, log: EventLog, chunk: Chunk, k: int, now: jax.Array
) -> tuple[CacheState, EventLog]:
    """Stores chunks; `commit_step` publishes them, with what rows decode.

    Where that is one kernel, which takes at most a block of each row, they are published here.

    Args:
      state: the cache.
      log: takes the events.
      chunk: of some rows.
      k: static; the most tokens of a row that decodes.
      now: i32[] ms.
    """

    def commit(
        state: CacheState, log: EventLog, chunk: Chunk, now: jax.Array, *, interpret: bool = False
    ) -> tuple[CacheState, EventLog]:
        del interpret  # plain jax, beside a kernel
        state, stored, updated = write(state, chunk, now)
        return state, note(log, _committed(state, stored, updated))

    def keep(state: CacheState, log: EventLog, chunk: Chunk, now: jax.Array) -> tuple[CacheState, EventLog]:
        del now
        return store(state, chunk), log

    args = state, log, chunk, now
    return fused(commit, keep, *args) if serves(state, state.spec.max_seqs, k) else keep(*args)


def commit_step(
    state: CacheState, chunks: Chunks, width: int, count: jax.Array, tokens: jax.Array, now: jax.Array
) -> tuple[CacheState, Events]:
    """`commit` of what a step has written: stored chunks, and what each row has decoded. Nothing is checked.

    Args:
      state: the cache.
      chunks: their blocks are published first.
      width: static; the most tokens of one.
      count: i32[S]; how many tokens each row has decoded.
      tokens: i32[S, k]; those, padded with anything.
      now: i32[] ms.
    """
    size, (rows, k), start = state.spec.block_size, tokens.shape, state.seqs.committed
    every = jnp.arange(rows, dtype=jnp.int32)
    decoded = Chunk(every, start, start + count, count > 0, checked_text(state.spec, tokens, None))
    end = pick(start, chunks.rows)
    span = Span(chunks.rows, end - chunks.count, end, width)

    def plain(state: CacheState, decoded: Chunk, arrays: Arrays, now: jax.Array) -> Written:
        spans = [Span(*arrays, width), decoded.span]
        return publish_spans(store(state, decoded), spans, pass_width(rows, k, size), now)

    def kernel(
        state: CacheState, decoded: Chunk, arrays: Arrays, now: jax.Array, *, interpret: bool = False
    ) -> Written:
        del arrays  # `_store_chunks` has published them
        return write_fused(state, decoded, now, spare=span.most_filled(size), interpret=interpret)

    args = state, decoded, span[:3], now
    state, stored, updated = fused(kernel, plain, *args) if serves(state, rows, k) else plain(*args)
    return state, _committed(state, stored, updated)


def _committed(state: CacheState, stored: list[Records], updated: list[Records]) -> Events:
    return assemble(state, jnp.full((1,), Status.OK, jnp.int32), updated=updated, stored=stored)


def prefilled(serving: Serving, chunks: Chunks) -> jax.Array:
    """bool[S]; rows whose prompt is computed with these chunks."""
    done = (chunks.count > 0) & (pick(wanted(serving), chunks.rows) == 0)
    return put(jnp.zeros(serving.row.shape, jnp.bool_), chunks.rows, True, done)


def prompts_of_samples(serving: Serving, ready: jax.Array) -> jax.Array:
    """i32[S]; for each row that waits for the prompt of a row where bool[S], that row; else -1."""
    parent = jnp.where(running(serving), pick(serving.requests.parent, serving.row), -1)
    is_parent = (parent[:, None] == serving.row[None]) & (parent >= 0)[:, None] & ready[None]
    return jnp.where(jnp.any(is_parent, axis=1), jnp.argmax(is_parent, axis=1).astype(jnp.int32), -1)


def fork_samples(serving: Serving, ready: jax.Array) -> Serving:
    """Lets samples go on from the prompts of rows where bool[S]: each row that waits for one becomes a copy of it."""
    rows = np.arange(ready.shape[0], dtype=np.int32)

    def fork(carry: tuple[Serving, jax.Array]) -> tuple[Serving, jax.Array]:
        serving, source = carry
        row = jnp.argmax(source >= 0).astype(jnp.int32)
        cache, _ = serving.cache.fork(pick(source, row), row)
        slot = pick(serving.row, row)[None]
        requests = serving.requests.at(
            slot, jnp.ones((1,), jnp.bool_), parent=-1, cached=pick(serving.requests.prompt, slot)
        )
        return serving.replace(cache=cache, requests=requests), jnp.where(rows == row, -1, source)

    start = serving, prompts_of_samples(serving, ready)
    return lax.while_loop(lambda carry: jnp.any(carry[1] >= 0), fork, start)[0]


def last_tokens(serving: Serving) -> jax.Array:
    """i32[S]; the last known token of each row's request."""
    requests = serving.requests
    return pick(
        requests.text, pick(requests.start, serving.row) + jnp.maximum(pick(requests.known, serving.row) - 1, 0)
    )
