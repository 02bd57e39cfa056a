# SPDX-License-Identifier: Apache-2.0
"""A mixed step: the next token of every decoding row and chunks of prompts, computed as a flat batch.

`commit_step`, at the end of each step, makes full blocks findable.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, fence, once, pick, put, runs, sum_before
from kvjax.blocks.rows import Chunk, Span
from kvjax.cache import Cache
from kvjax.events.log import Log
from kvjax.events.records import Events, Records, Status
from kvjax.model import Model, forward
from kvjax.pools.device import Pools
from kvjax.pools.views import mixed
from kvjax.serving.capacity import needs
from kvjax.serving.decode import LogitsFn, SampledTokens, Sampler, append_events, last_tokens, rows_of
from kvjax.serving.options import Scheduler, late_first, sort_keys_by_row
from kvjax.serving.requests import Serving
from kvjax.state import CacheState
from kvjax.verbs._request import assemble, checked_text
from kvjax.verbs.commit import pass_width, publish_spans, slide, store
from pallas_kernels.loops import while_loop


class Chunks(Pytree):
    """Rows whose prompts are computed in a step, in order, all i32[R]."""

    rows: jax.Array  # padded with -1
    count: jax.Array  # number of tokens of each chunk


def mixed_step(
    model: Model,
    serving: Serving,
    log: Log,
    scheduler: Scheduler,
    where: jax.Array,
    decode: jax.Array,
    k: int,
    *,
    logits_fn: LogitsFn | None,
    now: jax.Array,
) -> tuple[Serving, Log, Chunks, SampledTokens]:
    """Runs the mixed step, if bool[] `where`. Also returns the chunks and the rows' choices in k columns."""
    spec = serving.cache.state.spec
    rows = decode.shape[0]
    num_positions = scheduler.chunk_tokens(spec)
    no_tokens = SampledTokens.none(rows, k, serving.requests.num_top)

    def step(carry):
        serving, log, *_ = carry
        serving, chunks = plan(serving, scheduler, num_positions)
        serving, log, chunks = extend_for_chunks(serving, log, scheduler, chunks, now)
        pools, logits, chunk = compute_flat(model, serving, chunks, decode, num_positions, scheduler.chunk_width(spec))
        state = store(serving.cache.state, chunk)
        serving = serving.replace(cache=Cache(state, pools))
        prefilled = (chunks.count > 0) & (pick(serving.num_pending, chunks.rows) == 0)
        ready = put(jnp.zeros(serving.row.shape, jnp.bool_), chunks.rows, True, prefilled)
        prompt_row = _prompts_of_samples(serving, ready & serving.leads)
        serving = serving.replace(leads=serving.leads & ~ready)
        ready = ready | (prompt_row >= 0)
        logits = pick(logits, jnp.where(prompt_row >= 0, prompt_row, np.arange(rows, dtype=np.int32)))
        last_rows = rows_of(serving, decode)
        positions = serving.by_row.num_tokens
        choice, state = Sampler.of(serving, logits_fn)(logits, last_rows, positions)
        serving = serving.with_logits_state(last_rows.with_state(decode | ready, state).state)
        chosen = SampledTokens.of(choice).only((decode | ready)[:, None])
        # The requests' text is written after the loop, and the fence avoids a copy of it.
        requests, chosen = fence(serving.requests, chosen)
        return serving.replace(requests=requests), log, chunks, no_tokens.put(chosen, jnp.int32(0))

    no_rows = jnp.full((scheduler.max_chunks(spec),), -1, jnp.int32)
    return once(where, step, (serving, log, Chunks(no_rows, jnp.zeros_like(no_rows)), no_tokens))


def plan(serving: Serving, scheduler: Scheduler, size: int) -> tuple[Serving, Chunks]:
    """Assigns `size` positions to the first prefilling rows in order. Rows deferred too often come first."""
    num_pending = serving.num_pending
    is_prefilling = serving.prefilling
    spec = serving.cache.state.spec
    keys = late_first(serving.skipped_steps >= scheduler.max_deferrals, *sort_keys_by_row(serving, scheduler))
    order = jnp.lexsort((*reversed(keys), ~is_prefilling)).astype(jnp.int32)  # the last key decides
    rows = order[: scheduler.max_chunks(spec)]
    is_row = pick(is_prefilling, rows)
    wanted = jnp.where(is_row, jnp.minimum(pick(num_pending, rows), scheduler.chunk), 0)
    if scheduler.chunks == "equal":
        levels = np.arange(1, scheduler.chunk + 1, dtype=np.int32)[:, None]
        total = jnp.sum(jnp.minimum(wanted[None], levels), axis=1, dtype=jnp.int32)
        share = jnp.maximum(jnp.sum(total <= size, dtype=jnp.int32), 1)
        wanted = jnp.minimum(wanted, share)
    num_before = sum_before(wanted)
    chunks = Chunks(jnp.where(is_row, rows, -1), jnp.clip(size - num_before, 0, wanted))
    served = put(jnp.zeros_like(is_prefilling), rows, True, chunks.count > 0)
    skipped_steps = jnp.where(is_prefilling & ~served, serving.skipped_steps + 1, 0)
    return serving.replace(skipped_steps=skipped_steps), chunks


def extend_for_chunks(
    serving: Serving, log: Log, scheduler: Scheduler, chunks: Chunks, now: jax.Array
) -> tuple[Serving, Log, Chunks]:
    """Takes blocks for chunks, in order, as long as they suffice. The other rows compute nothing in this step."""
    state = serving.cache.state
    if len(state.groups) == 1:  # without windows a prompt got all its blocks when it was admitted
        return serving, log, chunks
    rows = chunks.rows
    seqs = state.seqs
    end = put(seqs.length, rows, pick(seqs.committed, rows) + chunks.count, (rows >= 0) & (chunks.count > 0))
    fits = jnp.ones(rows.shape, jnp.bool_)
    for group, row_blocks in zip(state.groups, needs(state, end), strict=True):
        chunk_blocks = jnp.where(rows >= 0, pick(row_blocks, rows), 0)
        fits = fits & (sum_before(chunk_blocks) + chunk_blocks <= group.available)
    count = jnp.where(fits, chunks.count, 0)
    missing = jnp.maximum(pick(seqs.committed, rows) + count - pick(seqs.length, rows), 0)
    missing = jnp.where(count > 0, missing, 0)
    cache, events = serving.cache.extend(missing > 0, missing, seqs=rows, max_tokens=scheduler.chunk, now=now)
    count = jnp.where(events.ok, count, 0)
    out_of_blocks = put(jnp.zeros_like(serving.out_of_blocks), rows, count == 0, (rows >= 0) & (chunks.count > 0))
    refused = jnp.where(events.ok, serving.refused, 1)
    serving = serving.replace(cache=cache, out_of_blocks=out_of_blocks, refused=refused)
    return serving, append_events(log, events), Chunks(rows, count)


def compute_flat(
    model: Model, serving: Serving, chunks: Chunks, decode: jax.Array, size: int, width: int
) -> tuple[Pools, jax.Array, Chunk]:
    """Runs the model on the next token of rows where bool[S] `decode`, and on chunks of others, B = `size` positions.

    Returns the pools, the logits f32[S, V] after each row's last token, and the chunks to store, each of up to `width`
    tokens.
    """
    cache = serving.cache
    rows = chunks.rows
    num_rows = decode.shape[0]
    view = mixed(cache.state, decode, rows, chunks.count, size)
    slots = pick(serving.row, rows)
    first = pick(cache.state.seqs.committed, rows)
    tokens = serving.requests.tokens(slots, first, width)
    starts = sum_before(chunks.count)
    index = runs(starts, width)
    is_inside = jnp.arange(width, dtype=jnp.int32)[None] < chunks.count[:, None]
    flat = put(jnp.zeros((size,), jnp.int32), index.reshape(-1), tokens.reshape(-1), is_inside.reshape(-1))
    flat = jnp.concatenate([last_tokens(serving), flat])[None]
    ends = num_rows + starts + chunks.count - 1
    last_index = put(jnp.arange(num_rows, dtype=jnp.int32), rows, ends, chunks.count > 0)
    logits, pools = forward(model, flat, cache.pools, view, last_index)
    text = checked_text(cache.state.spec, tokens, None)
    return pools, logits, Chunk(rows, first, first + chunks.count, chunks.count > 0, text)


def commit_step(
    state: CacheState, chunks: Chunks, scheduler: Scheduler, count: jax.Array, tokens: jax.Array, now: jax.Array
) -> tuple[CacheState, Events]:
    """Commits stored chunks, and then i32[S] `count` decoded tokens i32[S, k], without checks."""
    width = scheduler.chunk_width(state.spec)
    block_size = state.spec.block_size
    (rows, k) = tokens.shape
    start = state.seqs.committed
    all_rows = jnp.arange(rows, dtype=jnp.int32)
    decoded = Chunk(all_rows, start, start + count, count > 0, checked_text(state.spec, tokens, None))
    end = pick(start, chunks.rows)
    span = Span(chunks.rows, end - chunks.count, end, width)

    def publish_all(state, decoded, of_rows, start, end, now):
        spans = [Span(of_rows, start, end, width), decoded.span]
        return publish_spans(store(state, decoded), spans, pass_width(rows, k, block_size), now)

    def publish_chunks(state, decoded, of_rows, start, end, now):
        """Does not publish decoded tokens, because the program that computed them is not the program for chunks."""
        spans = [Span(of_rows, start, end, width)]
        state, stored, updated = publish_spans(state, spans, pass_width(of_rows.size, width, block_size), now)
        return slide(store(state, decoded), decoded.span, now), stored, updated

    args = state, decoded, *span[:3], now
    publish = publish_chunks if scheduler.canonical else publish_all
    state, stored, updated = publish(*args)
    return state, _committed(state, stored, updated)


def _committed(state: CacheState, stored: list[Records], updated: list[Records]) -> Events:
    """The events of a commit, which is never refused."""
    return assemble(state, jnp.full((1,), Status.OK, jnp.int32), updated=updated, stored=stored)


def _prompts_of_samples(serving: Serving, ready: jax.Array) -> jax.Array:
    """i32[S]; for each row that waits for a prompt whose row is `ready` bool[S], this row, or -1."""
    parent = jnp.where(serving.running, serving.by_row.parent, -1)
    is_parent = (parent[:, None] == serving.row[None]) & (parent >= 0)[:, None] & ready[None]
    return jnp.where(jnp.any(is_parent, axis=1), jnp.argmax(is_parent, axis=1).astype(jnp.int32), -1)


def fork_samples(serving: Serving, ready: jax.Array) -> Serving:
    """Forks samples off the prompts of rows where bool[S]: each row waiting for such a prompt becomes its copy."""
    rows = np.arange(ready.shape[0], dtype=np.int32)

    def fork(carry: tuple[Serving, jax.Array]) -> tuple[Serving, jax.Array]:
        serving, prompt_row = carry
        row = jnp.argmax(prompt_row >= 0).astype(jnp.int32)
        cache, _ = serving.cache.fork(pick(prompt_row, row), row)
        slot = pick(serving.row, row)
        requests = serving.requests
        requests = requests.at(slot, jnp.bool_(True), parent=-1, cached=requests[slot].prompt)
        return serving.replace(cache=cache, requests=requests), jnp.where(rows == row, -1, prompt_row)

    start = serving, _prompts_of_samples(serving, ready)
    return while_loop(lambda carry: jnp.any(carry[1] >= 0), fork, start)[0]
