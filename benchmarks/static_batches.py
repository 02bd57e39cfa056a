# SPDX-License-Identifier: Apache-2.0
"""`generate` as it was before the scheduler, for comparison: the host admits batches, and rows that end idle.

Waiting prompts get the free rows. One jitted loop computes these prompts as a whole, in chunks, while the other rows
wait; another one decodes for up to `steps` steps; then the rows that are done are released. Greedy, on one tier, with
blocks enough for all rows.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvjax
from benchmarks import common
from kvjax import Cache, serving
from kvjax.events import EventLog, append, init_log
from kvjax.serving.sampling import sample

_admit = jax.jit(Cache.admit, donate_argnums=0)
_release = jax.jit(Cache.release, donate_argnums=0)


def prefill(
    model: Any, cache: Cache, seqs: jax.Array, prompts: jax.Array, log: EventLog, *, chunk: int
) -> tuple[Cache, EventLog, jax.Array]:
    """Computes what is not cached of admitted prompts, in chunks, and chooses their first tokens.

    Args:
      model: see `kvjax.step`.
      cache: with blocks for the whole prompts.
      seqs: i32[R]; the rows; -1 is padding.
      prompts: i32[R, T].
      log: takes the events.
      chunk: static; tokens of each row that one model call computes.

    Returns:
      The cache, the log, and the tokens i32[R], -1 for padding.
    """

    def remaining(cache: Cache) -> jax.Array:
        rows = cache.state.seqs
        return jnp.where(seqs >= 0, rows.length[seqs] - rows.committed[seqs], 0)

    def one(carry):
        cache, log, tokens = carry
        left, start = remaining(cache), cache.state.seqs.committed[seqs]
        count = jnp.minimum(left, chunk)
        positions = start[:, None] + np.arange(chunk, dtype=np.int32)[None]
        new = jnp.take_along_axis(prompts, jnp.minimum(positions, prompts.shape[1] - 1), axis=1)
        cache, logits, committed = kvjax.step(model, cache, new, count, seqs)
        chosen = sample(logits, None, jnp.zeros(seqs.shape, jnp.uint32), start + count)
        return cache, append(log, committed), jnp.where((count > 0) & (count == left), chosen.tokens, tokens)

    start = cache, log, jnp.full(seqs.shape, -1, jnp.int32)
    return lax.while_loop(lambda carry: jnp.any(remaining(carry[0]) > 0), one, start)


_prefill = jax.jit(prefill, static_argnames="chunk", donate_argnames=("cache", "log"))
_decode = jax.jit(
    functools.partial(serving.decode, sampling=None), static_argnames="steps", donate_argnames=("cache", "log")
)


def generate(
    model: Any, cache: Cache, prompts: Sequence[Sequence[int]], new_tokens: int, *, chunk: int = 64, steps: int = 32
) -> tuple[list[list[int]], int, Cache]:
    """Generates `new_tokens` tokens, at least 2, for each prompt.

    Returns:
      The tokens of each prompt, how many tokens of prompts were found in the cache, and the cache.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting, free = collections.deque(range(len(prompts))), list(range(cache.state.spec.max_seqs))
    live: dict[int, int] = {}  # row -> prompt
    cached = 0
    while waiting or live:
        batch = {free.pop(0): waiting.popleft() for _ in range(min(len(free), len(waiting)))}
        if batch:
            cache, found = _compute_prompts(model, cache, prompts, batch, outputs, chunk)
            live, cached = live | batch, cached + found
        cache = _decode_rows(model, cache, live, outputs, new_tokens, steps)
        over = [row for row, number in live.items() if len(outputs[number]) == new_tokens]
        if over:
            seqs = np.full(_padded(len(over)), -1, np.int32)
            seqs[: len(over)] = over
            cache, _ = _release(cache, seqs)
            free += over
            live = {row: number for row, number in live.items() if row not in over}
    return outputs, cached, cache


def _compute_prompts(
    model: Any, cache: Cache, prompts: Sequence[Sequence[int]], batch: dict[int, int], outputs: list[list[int]],
    chunk: int,
) -> tuple[Cache, int]:  # fmt: skip
    """Admits prompts {row: number} and computes them; returns how many of their tokens were cached, too."""
    size, block = _padded(len(batch)), cache.state.spec.block_size
    blocks = _padded(-(-max(len(prompts[number]) for number in batch.values()) // block))
    tokens, lengths = np.zeros((size, blocks * block), np.int32), np.zeros(size, np.int32)
    seqs = np.full(size, -1, np.int32)
    for i, (row, number) in enumerate(batch.items()):
        tokens[i, : len(prompts[number])] = prompts[number]
        lengths[i], seqs[i] = len(prompts[number]), row
    cache, events = _admit(cache, seqs, tokens, lengths)
    cached, status = np.asarray(events.cached), np.asarray(events.status)
    common.require(not np.any(status[seqs >= 0]), "static batches: there are too few blocks")
    log = init_log(3 * size * (blocks + 1), block)  # a block is entered, copied and filled at most
    cache, _, first = _prefill(model, cache, seqs, tokens, log, chunk=chunk)
    for number, token in zip(batch.values(), np.asarray(first).tolist(), strict=False):
        outputs[number].append(token)
    return cache, int(np.sum(cached[seqs >= 0]))


def _decode_rows(
    model: Any, cache: Cache, live: dict[int, int], outputs: list[list[int]], new_tokens: int, steps: int
) -> Cache:
    """One jitted loop over rows {row: prompt}; adds what they chose to the outputs."""
    token, active, left, seed = (np.zeros(cache.state.spec.max_seqs, t) for t in ("i4", "?", "i4", "u4"))
    for row, number in live.items():
        token[row], active[row], left[row] = outputs[number][-1], True, new_tokens - len(outputs[number])
    rows = serving.Rows(*map(jnp.asarray, (token, active, left, seed)))
    log, stop = serving.decode_log(cache.state.spec, steps), np.zeros(0, np.int32)
    cache, _, _, decoded = _decode(model, cache, rows, log, steps=steps, stop=stop)
    common.require(not bool(decoded.out_of_blocks), "static batches: there are too few blocks")
    tokens = np.asarray(decoded.tokens)
    for row, number in live.items():
        outputs[number] += tokens[row][tokens[row] >= 0].tolist()
    return cache


def _padded(number: int) -> int:
    """A power of two, so that few shapes are compiled."""
    return 1 << (number - 1).bit_length()
