# SPDX-License-Identifier: Apache-2.0
"""Computes log-probabilities of given completions. Each prompt is computed once for its group, or found cached."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import pick
from kvjax._compile import own_transfers
from kvjax.cache import Cache
from kvjax.checks import each_row, integers, static_int
from kvjax.events.log import Log
from kvjax.model import Model
from kvjax.serving.decode import append_events
from kvjax.serving.rollout import checked_prompts
from kvjax.verbs.free_rows import free_rows
from pallas_kernels.loops import scan, while_loop


@own_transfers()
def score(
    model: Model,
    cache: Cache,
    prompts: ArrayLike,
    completions: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    completion_lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    namespace: ArrayLike = 0,
    chunk: int = 128,
    log: Log = None,
    now: Any = 0,
) -> tuple[jax.Array, Cache, Log]:
    """Computes log-probabilities of completions inside a program. It is pure: use `jit`, `vmap` and `shard_map`.

    Prompts are computed in turn: first the missing part, in chunks, then all completions in a single call
    of the model, each in a row sharing the prompt's blocks.

    Args:
      model: see `step`. It must be able to return all logits (`last=None`).
      cache: a cache without a host tier. Donate it.
      prompts: i32[B, P]; padded with valid ids.
      completions: i32[B, G, T]; padded with valid ids.
      lengths: i32[B]; number of tokens of each prompt, at the front of its row. With None, `mask` marks the tokens.
      completion_lengths: i32[B, G]; number of tokens of each completion. None means all T.
      mask: bool[B, P]; marks the tokens of each prompt, which are contiguous, as in `rollout`.
      temperature: f32[] or f32[B]; divides the logits.
      namespace: i32[] or i32[B].
      chunk: static; maximum tokens of a prompt in a call of the model.
      log: a log for the events, with space for the events of all blocks. None disables events.
      now: i32[] ms.

    Returns:
      f32[B, G, T], 0 beyond the end of a completion, NaN if rows or blocks were missing, or if prompt and completion do
      not fit into a row; the cache, with everything released and cached; and the log.

    Raises:
      ValueError: while tracing, naming the argument; also if the model cannot return all logits.
    """
    prompts, start, lengths = checked_prompts(model, cache, prompts, lengths, mask)
    num_prompts, width = prompts.shape
    completions = integers("completions", completions)
    if completions.ndim != 3 or completions.shape[0] != num_prompts or 0 in completions.shape:
        raise ValueError(f"completions: got shape {list(completions.shape)}, wanted [{num_prompts}, G, T]")
    _, num_completions, max_length = completions.shape
    if num_completions > cache.state.spec.max_seqs:
        rows = cache.state.spec.max_seqs
        raise ValueError(
            f"completions: got {num_completions} for a prompt, wanted at most the {rows} rows of the cache"
        )
    if completion_lengths is None:
        completion_lengths = np.full((num_prompts, num_completions), max_length, np.int32)
    ends = jnp.clip(integers("completion_lengths", completion_lengths, (num_prompts, num_completions)), 0, max_length)
    temperature = jnp.asarray(temperature, jnp.float32)
    if temperature.shape not in ((), (num_prompts,)):
        raise ValueError(f"temperature: got shape {list(temperature.shape)}, wanted [] or [{num_prompts}]")
    group = _Group(model, chunk := static_int("chunk", chunk, 1), integers("now", now, ()))

    def score_prompt(carry: tuple[Cache, Log], x: tuple[jax.Array, ...]) -> tuple[tuple[Cache, Log], jax.Array]:
        prompt, start, length, namespace, completion, ends, temperature = x
        # The prompt from its first token on, with padding that a chunk may read.
        prompt = pick(jnp.pad(prompt, (0, chunk)), start + np.arange(width + chunk, dtype=np.int32))
        cache, log, logits = group.logits(*carry, prompt, length, namespace, completion, ends)
        scores = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
        token_scores = jnp.take_along_axis(scores, completion[:, :, None], axis=-1)[:, :, 0]
        return (cache, log), jnp.where(np.arange(max_length, dtype=np.int32)[None] < ends[:, None], token_scores, 0.0)

    inputs = prompts, start, lengths, each_row("namespace", namespace, (num_prompts,)), completions, ends
    (cache, log), logprobs = scan(score_prompt, (cache, log), (*inputs, jnp.broadcast_to(temperature, (num_prompts,))))
    return logprobs, cache, log


class _Group:
    """Computes a prompt, and then its completions."""

    def __init__(self, model: Model, chunk: int, now: jax.Array):
        self.model = model
        self.chunk = chunk
        self.now = now

    def logits(
        self,
        cache: Cache,
        log: Log,
        prompt: jax.Array,
        length: jax.Array,
        namespace: jax.Array,
        completions: jax.Array,
        ends: jax.Array,
    ) -> tuple[Cache, Log, jax.Array]:
        """The logits [G, T, V] for each token of completions i32[G, T] with i32[G] `ends` tokens.

        Logits are NaN if they cannot be computed. Also returns the cache and the log.
        """
        num_completions, max_length = completions.shape
        rows, _ = free_rows(cache.state, num_completions)
        leader = jnp.where(rows[-1] >= 0, rows[0], -1)
        width = prompt.shape[0] - self.chunk
        fits = (length <= width) & (length + jnp.max(ends) - 1 <= cache.state.spec.max_length)
        cache, events = cache.admit(
            leader[None],
            prompt[None, :width],
            jnp.where(fits, length, 0)[None],
            namespace=namespace[None],
            reserve_tokens=self.chunk,
            now=self.now,
        )
        log = append_events(log, events)
        ok = events.ok
        no_tokens = jnp.zeros((1, self.chunk), jnp.int32), jnp.zeros((1,), jnp.int32), leader[None]
        _, last, _ = jax.eval_shape(functools.partial(cache.step, self.model), *no_tokens)
        cache, log, ok, first = prefill(
            self.model,
            cache,
            log,
            ok,
            leader,
            prompt,
            length,
            jnp.zeros(last.shape[1:], last.dtype),
            lambda before, start, count, logits: logits,
            chunk=self.chunk,
            now=self.now,
        )
        admitted = jnp.where(events.ok, leader, -1)
        cache, _ = cache.fork(leader, jnp.where(ok, rows, -1)[1:])
        rows = jnp.where(ok, rows, -1)
        logits = jnp.broadcast_to(first, (num_completions, 1, *first.shape))
        if max_length > 1:
            num_more = jnp.where(ok, jnp.maximum(ends - 1, 0), 0)
            cache, events = cache.extend(num_more > 0, num_more, seqs=rows, max_tokens=max_length - 1, now=self.now)
            ok = ok & (events.ok | ~jnp.any(num_more > 0))
            log = append_events(log, events)
            cache, later_logits, events = cache.step(
                self.model, completions[:, :-1], jnp.where(ok, num_more, 0), rows, now=self.now, logits="all"
            )
            logits = jnp.concatenate([logits, later_logits], axis=1)
            log = append_events(log, events)
        rows = rows.at[0].set(admitted)  # if the prompt could not be computed, only its row is in use
        cache, events = cache.release(rows, now=self.now)
        return cache, append_events(log, events), jnp.where(ok, logits, jnp.nan)


def prefill[T](
    model: Model,
    cache: Cache,
    log: Log,
    ok: jax.Array,
    row: jax.Array,
    prompt: jax.Array,
    length: jax.Array,
    notes: T,
    note_logits: Callable[[T, jax.Array, jax.Array, jax.Array], T],
    *,
    chunk: int,
    now: jax.Array,
    logits: Literal["last", "all"] = "last",
) -> tuple[Cache, Log, jax.Array, T]:
    """Computes the missing part of the first `length` i32[] tokens of a row's prompt, chunk by chunk.

    `prompt` i32[N] is padded for the reads of a chunk. After each chunk `note_logits` gets the notes so
    far, the position of the chunk's first token i32[], its number of tokens i32[], and the logits: f32[V] after the
    last token, or f32[C, V] after each. Returns the cache, the log, whether there were blocks for all, and the notes.
    """

    def compute(carry):
        cache, log, ok, notes = carry
        seqs = cache.state.seqs
        committed = pick(seqs.committed, row)
        count = jnp.minimum(length - committed, chunk)
        missing = jnp.maximum(committed + count - pick(seqs.length, row), 0)
        cache, events = cache.extend((missing > 0)[None], missing[None], seqs=row[None], max_tokens=chunk, now=now)
        ok = events.ok | (missing == 0)
        log = append_events(log, events)
        tokens = jax.lax.dynamic_slice_in_dim(prompt, committed, chunk)
        count = jnp.where(ok, count, 0)
        cache, chunk_logits, events = cache.step(model, tokens[None], count[None], row[None], now=now, logits=logits)
        return cache, append_events(log, events), ok, note_logits(notes, committed, count, chunk_logits[0])

    start = cache, log, ok, notes
    return while_loop(lambda c: c[2] & (pick(c[0].state.seqs.committed, row) < length), compute, start)
