# SPDX-License-Identifier: Apache-2.0
"""A step of given tokens, and the decode loop for rows that the caller has admitted; what both tell of the log."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache import Cache
from kvjax.events.log import EventLog, append, init_log
from kvjax.events.records import Events
from kvjax.gpu.choice import MAX_RECORDS, fused
from kvjax.model import Model
from kvjax.serving.capacity import num_steps, worst_events
from kvjax.serving.decode import Chosen, LogitsFn, Rows, compute
from kvjax.serving.options import steps_of_a_block
from kvjax.serving.sampling import Sampling
from kvjax.spec import CacheSpec
from kvjax.tiered import TieredCache


class Decoded(NamedTuple):
    """Choices of a jitted loop: tokens i32[S, steps] (-1: none), logprobs f32[S, steps], and whether blocks ran out."""

    tokens: jax.Array
    logprobs: jax.Array
    out_of_blocks: jax.Array


def step[C: (Cache, TieredCache)](
    model: Model,
    cache: C,
    tokens: jax.Array,
    count: jax.Array,
    seqs: jax.Array | None = None,
    *,
    now: Any = 0,
    logits: Literal["last", "all"] = "last",
) -> tuple[C, jax.Array, Events]:
    """Computes and commits the next tokens of some rows, for which `admit` or `extend` made room; jit and donate it.

    Args:
      model: called as `model(tokens i32[R, C], pools, view, last=i32[R])`, it returns `(logits f32[R, V], pools)`: the
        logits of position `last` of each row, and the pools with the tokens' K/V. With `last=None` it returns all
        logits, f32[R, C, V]; a model needs that for `logits="all"` only. See `Model`. An argument of `jit` has
        to be a pytree: a function closed over its weights goes in as `jax.tree_util.Partial(fn, weights)`.
      cache: the cache. One with a host tier is for host code: its own program takes and donates it.
      tokens: i32[R, C]; each row's next tokens, padded with valid ids.
      count: i32[R]; how many they are; 0 leaves a row alone.
      seqs: i32[R]; the rows, -1 for padding; None for all S.
      now: i32[] ms.
      logits: static; "last", or "all" for speculation and the log-probabilities of a prompt.

    Returns:
      The cache; logits f32[R, V] after each row's last token, or f32[R, C, V] after every token; and the events.

    Raises:
      ValueError: if the cache was donated before, an argument has another shape or dtype, the model returns something
        else, or cannot give all logits.
    """
    check_cache(cache)
    return cast(Any, cache.step(model, tokens, count, seqs, now=now, logits=logits))  # of the kind of `cache`


def check_cache(cache: Any) -> None:
    """Raises a ValueError if this is no cache with its pools."""
    if not isinstance(cache, Cache | TieredCache):
        raise ValueError(f"cache: got a {type(cache).__name__}, wanted a Cache(state, pools) or a TieredCache")


def decode_log(spec: CacheSpec, steps: int) -> EventLog:
    """A log that holds at least `steps` steps' events in ordinary use; the loop stops early if it is nearly full."""
    usual = steps * spec.max_seqs * len(spec.groups) // 2
    return init_log(usual + 2 * worst_events(spec, spec.max_seqs), spec.block_size, spec.extra_ids)


def note(log: EventLog, *events: Events) -> EventLog:
    """`append`, as one kernel where there is one."""

    def kernel(log: EventLog, *events: Events, interpret: bool = False) -> EventLog:
        from kvjax.gpu.log import append_events  # late: to import Triton takes a tenth of a second

        return append_events(log, events, interpret)

    few = max(transition.kind.shape[0] for transition in events) <= MAX_RECORDS
    return fused(kernel, append, log, *events) if few else append(log, *events)


def decode(
    model: Model,
    cache: Cache,
    rows: Rows,
    log: EventLog,
    *,
    steps: int,
    stop: jax.Array,
    sampling: Sampling | None,
    logits_fn: LogitsFn | None = None,
    k: int | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Cache, Rows, EventLog, Decoded]:
    """Up to `steps` decode steps for all active rows, in blocks of up to k; jit and donate it.

    For callers who admit rows and compute their prompts themselves, as with `step`. It admits nobody: see `serve`.
    Ends early if no row is active, if the pool has too few blocks for all of them, or if the log is nearly full. What
    it chooses does not depend on k.

    Args:
      model: see `step`.
      cache: its active rows have all but `rows.token` committed, and no room yet for that.
      rows: where each row stands.
      log: of `decode_log`; takes the events.
      steps: static.
      stop: i32[K], or i32[S, K] for each row; stop tokens.
      sampling: how each row chooses, leaves [] or [S]; idle rows should be greedy. None: all are, and nothing else is
        compiled.
      logits_fn: static; (logits f32[S, V], last tokens i32[S], positions i32[S]) -> logits.
      k: static; the most steps of a block, 1 to P; P if None. See `serving/decode.py`.
      fixed_steps: static; every block runs k steps of the model, even if fewer are wanted. For a GPU without command
        buffers, where the device waits for the host at each turn of a loop of unknown length.
      now: i32[] ms, the same for all steps.

    Raises:
      ValueError: if k is out of range, or `rows.prompt` is missing.
    """
    spec = cache.state.spec
    k = steps_of_a_block(spec, k)
    loop = functools.partial(
        compute, model, k=k, stop=stop, sampling=sampling, logits_fn=logits_fn, fixed_steps=fixed_steps
    )  # fmt: skip

    def going(number: jax.Array, rows: Rows, log: EventLog, out_of_blocks: jax.Array) -> jax.Array:
        enough = log.room >= worst_events(spec, spec.max_seqs)
        return jnp.any(rows.active & (number < steps) & ~out_of_blocks & enough)

    def block(carry):
        _, number, cache, rows, log, chosen, refused, _ = carry
        room = spec.max_length - cache.state.seqs.length
        want = jnp.minimum(jnp.minimum(rows.left, room), jnp.minimum(steps - number, k))
        want = jnp.where(rows.active, jnp.maximum(want, 1), 0)
        n = jnp.where(refused, 1, jnp.minimum(num_steps(cache.state, want, k, log.room), steps - number))
        cache, extended = cache.extend(rows.active, jnp.minimum(want, n), max_tokens=k, now=now)
        begun, first = rows.active & extended.ok, rows.token
        pools, rows, done = loop(cache, rows, want, jnp.where(extended.ok, n, 0))
        cache, committed = cache.replace(pools=pools).commit(done.text(first), done.count, now=now)
        if k > 1:
            cache, _ = cache.trim(begun, max_tokens=k)
        log = note(log, extended, committed)
        chosen, number = chosen.put(done.chosen, number), number + jnp.max(done.count)
        refused, out_of_blocks = ~extended.ok, ~extended.ok & (n == 1)
        more = going(number, rows, log, out_of_blocks)  # here, so that the loop's condition is no kernel
        return more, number, cache, rows, log, chosen, refused, out_of_blocks

    zero, false = jnp.int32(0), jnp.bool_(False)
    chosen = Chosen.none(spec.max_seqs, steps + k - 1)  # the last block may begin anywhere
    start = going(zero, rows, log, false), zero, cache, rows, log, chosen, false, false
    _, _, cache, rows, log, chosen, _, out_of_blocks = lax.while_loop(lambda carry: carry[0], block, start)
    return cache, rows, log, Decoded(chosen.tokens[:, :steps], chosen.logprobs[:, :steps], out_of_blocks)
