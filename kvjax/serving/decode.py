# SPDX-License-Identifier: Apache-2.0
"""A step of given tokens, and the decode loop, which does the bookkeeping of up to k steps at once.

    grow        `extend` once: blocks for the next tokens of each decoding row, min(n, the row's remaining tokens)
    compute     n times view -> model -> choice; the K/V of each step go to the next slot of these blocks
    commit      the written tokens of each row, which makes full blocks findable
    trim        rows give back unused blocks after an early stop

`num_steps` finds n before anything changes, so `extend` succeeds unless the count was inexact. Tokens,
log-probabilities and lengths are the same as with single steps. Without eviction, so are the index and, except for
their order, the events. With eviction, a row may take a block up to n - 1 steps before it needs the block.

Source: MAX's multi-step decoding.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, pick
from kvjax.cache import AnyCache, Cache
from kvjax.events.log import EventLog, Log, append, init_log, num_free
from kvjax.events.records import Events
from kvjax.model import Model, forward
from kvjax.pools.device import Pools
from kvjax.serving.capacity import num_steps, worst_events
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Serving, Stage
from kvjax.serving.sampling import Choice, Sampling, sample
from kvjax.spec import CacheSpec
from pallas_kernels.loops import fori_loop, while_loop

# (logits f32[S, V], last tokens i32[S], positions i32[S]) -> logits; or (..., state) -> (logits, state), of each row
LogitsFn = Callable[..., Any]


def step[C: AnyCache](
    model: Model,
    cache: C,
    tokens: jax.Array,
    count: jax.Array,
    seqs: jax.Array | None = None,
    *,
    now: Any = 0,
    logits: Literal["last", "all"] = "last",
    exact: Any = None,
) -> tuple[C, jax.Array, Events]:
    """Computes and commits the next tokens of rows for which `admit` or `extend` made room. Jit and donate it.

    Args:
      model: see `Model`. It is called with `last=None` for `logits="all"` only. `jit` takes only pytrees: if your model
        is a function with weights, pass `jax.tree_util.Partial(fn, weights)`.
      cache: the cache. A `TieredCache` is for host code: `step` then runs and donates it in a program of its own.
      tokens: i32[R, C]; each row's next tokens, padded with valid ids.
      count: i32[R]; number of tokens of each row; 0 leaves the row alone.
      seqs: i32[R]; the rows, padded with -1. None means all S rows.
      now: i32[] ms.
      logits: static; "last", or "all" for speculation and the log-probabilities of a prompt.
      exact: bool[] or bool[R]; see `commit`.

    Returns:
      The cache, logits f32[R, V] after each row's last token or f32[R, C, V] after every token, and the events. Logits
      of a refused row (see `commit`) are NaN.

    Raises:
      ValueError: if the cache was donated before, an argument has another shape or dtype, the model returns something
        else, or cannot give all logits; also for `exact` in a context of `sparse_attention`.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> def next_number(tokens, pools, view, *, last):  # no layers: the next token is the last token plus 1
      ...     return jax.nn.one_hot(tokens[jnp.arange(len(tokens)), last] + 1, 50), pools
      >>> cache, _ = kvjax.Cache.create(spec).admit(0, np.arange(10), 10)
      >>> tokens, model = np.stack([np.arange(10)] * 2), jax.tree_util.Partial(next_number)
      >>> cache, logits, _ = jax.jit(kvjax.step)(model, cache, tokens, np.array([10, 0]))
      >>> logits[0].argmax().item(), cache.state.seqs.committed.tolist()
      (10, [10, 0])
    """
    check_cache(cache)
    return cache.step(model, tokens, count, seqs, now=now, logits=logits, exact=exact)


def check_cache(cache: Any) -> None:
    """Raises a ValueError unless this is a cache with its pools."""
    if not isinstance(cache, AnyCache):
        raise ValueError(f"cache: got a {type(cache).__name__}, wanted a Cache(state, pools) or a TieredCache")


class Rows(Pytree):
    """The rows of a decode loop, all [S].

    Attributes:
      token: i32; the last chosen token, which is not in the cache yet.
      active: bool; whether the row goes on.
      remaining: i32; number of tokens still to choose.
      seed: u32; seed of the row's random stream.
      prompt: i32; number of tokens of the row's prompt. None means all rows choose greedily (`sampling` is None).
      state: a tree of arrays [S, ...]; the state of `logits_fn` for each row. None means `logits_fn` has no state.
    """

    token: jax.Array
    active: jax.Array
    remaining: jax.Array
    seed: jax.Array
    prompt: jax.Array | None = None
    state: Any = None

    def with_state(self, where: jax.Array, state: Any) -> Rows:
        """Replaces the state of rows where bool[S]."""

        def select(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(where.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return self.replace(state=jax.tree.map(select, state, self.state))


class SampledTokens(Pytree):
    """Chosen tokens with their log-probabilities, in a single array, since each written array is a kernel on a GPU."""

    bits: jax.Array  # i32[2 + 2 T, S, n]; tokens, bits of their log-probabilities, and both for the T likeliest

    @property
    def tokens(self) -> jax.Array:
        """i32[S, n]; -1 for none."""
        return self.bits[0]

    @property
    def logprobs(self) -> jax.Array:
        """f32[S, n]; 0 where there is no token."""
        return lax.bitcast_convert_type(self.bits[1], jnp.float32)

    @property
    def top(self) -> tuple[jax.Array, jax.Array]:
        """i32[S, n, T], the likeliest tokens, and f32[S, n, T], their log-probabilities."""
        tokens, logprobs = jnp.split(jnp.moveaxis(self.bits[2:], 0, -1), 2, axis=-1)
        return tokens, lax.bitcast_convert_type(logprobs, jnp.float32)

    @classmethod
    def none(cls, rows: int, size: int, top: int = 0) -> SampledTokens:
        """No tokens, with space for `size` tokens of each row, and for the `top` likeliest tokens of each."""
        return cls(jnp.broadcast_to(_nothing(2 + 2 * top), (2 + 2 * top, rows, size)))

    @classmethod
    def of(cls, choice: Choice) -> SampledTokens:
        """The choices of a step, for each of S rows."""
        top = None if choice.top_tokens is None else (choice.top_tokens, choice.top_logprobs)
        return cls(chosen_bits(choice.tokens, choice.logprobs, top)[:, :, None])

    def only(self, where: jax.Array) -> SampledTokens:
        """Keeps the tokens where bool[S, n]."""
        return SampledTokens(jnp.where(where[None], self.bits, _nothing(self.bits.shape[0])))

    def put(self, other: SampledTokens, start: jax.Array) -> SampledTokens:
        """Replaces columns from i32[] `start` on by the other tokens."""
        return SampledTokens(lax.dynamic_update_slice_in_dim(self.bits, other.bits, start, axis=2))


def chosen_bits(tokens: jax.Array, logprobs: jax.Array, top: Any) -> jax.Array:
    """i32[2 + 2 T, ...]; tokens [...] laid out like `SampledTokens`.

    `top` has the likeliest tokens and their log-probabilities, both [..., T], or is None.
    """

    def bits(logprobs: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(logprobs.astype(jnp.float32), jnp.int32)

    columns = [tokens, bits(logprobs)]
    if top is not None:
        columns += [*jnp.moveaxis(top[0], -1, 0), *jnp.moveaxis(bits(top[1]), -1, 0)]
    return jnp.stack(columns)


def _nothing(num_columns: int) -> np.ndarray:
    """i32[num_columns, 1, 1]; no token, and zeros."""
    return np.array([-1, *[0] * (num_columns - 1)], np.int32)[:, None, None]


class DecodeBlock(Pytree):
    """The result of a block of decode steps."""

    count: jax.Array  # i32[S]; number of tokens of each row whose K/V were written
    chosen: SampledTokens  # the choice after each written token; k columns
    state: Any = None  # state of `logits_fn` for each row after the block

    def text(self, first: jax.Array) -> jax.Array:
        """i32[S, k]; the written tokens. The first, i32[S], were chosen before the block."""
        return jnp.concatenate([first[:, None], self.chosen.tokens[:, :-1]], axis=1)


class Sampler(NamedTuple):
    """Chooses the rows' tokens from logits."""

    stop: jax.Array  # i32[K], or i32[S, K] for each row
    sampling: Sampling | None  # leaves [] or [S]; None means greedy
    logits_fn: LogitsFn | None
    top: int = 0  # T
    logprobs: str = "raw"

    @classmethod
    def of(cls, serving: Serving, logits_fn: LogitsFn | None) -> Sampler:
        """The sampler for the rows' requests."""
        request = serving.by_row
        return cls(request.stop, request.sampling, logits_fn, serving.requests.num_top, serving.logprobs)

    def __call__(self, logits: jax.Array, rows: Rows, positions: jax.Array) -> tuple[Choice, Any]:
        """Chooses the next token of each row, at positions i32[S]. Also returns the rows' new state."""
        state = rows.state
        if self.logits_fn is not None and state is None:
            logits = self.logits_fn(logits, rows.token, positions)
        elif self.logits_fn is not None:
            logits, state = self.logits_fn(logits, rows.token, positions, state)
        options: dict[str, Any] = {"top_logprobs": self.top, "logprobs": self.logprobs}
        if self.sampling is not None:
            if rows.prompt is None:
                raise ValueError("rows.prompt: got None, wanted the tokens of each row's prompt, or sampling=None")
            options |= {"stop": self.stop, "generated": positions - rows.prompt}
        return sample(logits, self.sampling, rows.seed, positions, **options), state


def last_tokens(serving: Serving) -> jax.Array:
    """i32[S]; the last token of each row's request."""
    request = serving.by_row
    return pick(serving.requests.text, request.start + jnp.maximum(request.num_tokens - 1, 0))


def rows_of(serving: Serving, active: jax.Array) -> Rows:
    """The rows of a block of decode steps, active where bool[S]."""
    request = serving.by_row
    remaining = request.max_tokens - request.num_tokens
    return Rows(last_tokens(serving), active, remaining, request.seed, request.prompt, request.logits_state)


def grow(
    serving: Serving,
    scheduler: Scheduler,
    k: int,
    max_steps: jax.Array | int,
    single: jax.Array,
    log_room: jax.Array,
    now: jax.Array,
) -> tuple[Serving, Events, jax.Array, jax.Array]:
    """Takes blocks for the next tokens of all decoding rows: for k steps, or for a step where `single` bool[].

    It takes blocks for at most `max_steps` i32[], and for fewer if blocks or log_room i32[] for events are short. Also
    returns the number of steps i32[], 0 if blocks were refused, and the token limits i32[S] of decoding rows.
    """
    requests = serving.requests
    request = serving.by_row
    seqs = serving.cache.state.seqs
    decode = serving.decoding
    remaining = jnp.where(decode, request.max_tokens - request.num_tokens, 0)
    new = jnp.minimum(remaining, k)
    any_waiting = jnp.any(requests.stage == Stage.WAITING)
    # While a request waits, a block of steps also ends where the first row is sure to end.
    first_end = jnp.min(jnp.where(decode, remaining, k))
    limit = jnp.minimum(max_steps, jnp.where(any_waiting, jnp.minimum(first_end, scheduler.k_waiting), k))
    fitting = jnp.minimum(limit, num_steps(serving.cache.state, new, k, log_room))
    limit = jnp.where(single | (serving.refused > 1), 1, fitting)
    new = jnp.minimum(new, limit)
    missing = jnp.maximum(new - (seqs.length - seqs.committed), 0)
    cache, events = serving.cache.extend(decode & (missing > 0), jnp.where(decode, missing, 0), max_tokens=k, now=now)
    n = jnp.where(events.ok, limit, 0)
    refused = jnp.where(events.ok, 0, limit)
    return serving.replace(cache=cache, refused=refused), events, n, jnp.where(events.ok, new, 0)


def compute(
    model: Model,
    cache: Cache,
    rows: Rows,
    new: jax.Array,
    steps: jax.Array,
    choose: Sampler,
    k: int,
    fixed_steps: bool,
    *,
    fixed_split: bool = False,
) -> tuple[Pools, Rows, DecodeBlock]:
    """Runs up to `steps` i32[] steps of the model, at most k, for all active rows. The metadata stay as they are.

    An active row has everything except `rows.token` committed, and blocks for min(new, steps) tokens, new i32[S]. The
    loop ends when no row is active. With `fixed_steps` it always takes k turns. For `fixed_split` see `View`. Returns
    the pools, whose new K/V are not committed yet, the rows, and the written tokens.
    """
    committed = cache.state.seqs.committed
    max_length = cache.state.spec.max_length

    # Besides the model, a step is a handful of kernels on a GPU. An operation on a scalar would add a kernel, and so
    # would the loop's condition. So each row counts the steps, and the step computes whether to continue.
    def run_step(carry):
        step_number, _, pools, rows, written, chosen = carry
        active = rows.active & (step_number < jnp.minimum(new, steps))
        view = cache.view(active.astype(jnp.int32), 1, written=written).replace(fixed_split=fixed_split)
        logits, pools = forward(model, rows.token[:, None], pools, view, jnp.zeros_like(rows.token))
        written = written + active.astype(jnp.int32)
        choice, state = choose(logits, rows, committed + written)
        chosen = chosen.put(SampledTokens.of(choice), step_number[0])
        rows = rows.with_state(active, state)
        rows = advance(rows, active, choice.tokens, choose.stop, committed + written < max_length)
        step_number = step_number + 1
        return step_number, jnp.any(rows.active & (step_number < steps)), pools, rows, written, chosen

    zeros = jnp.zeros_like(new)
    no_tokens = SampledTokens.none(new.shape[0], k, choose.top)
    start = zeros, jnp.any(rows.active & (steps > 0)), cache.pools, rows, zeros, no_tokens
    if fixed_steps:
        _, _, pools, rows, written, chosen = fori_loop(0, k, lambda _, carry: run_step(carry), start)
    else:
        _, _, pools, rows, written, chosen = while_loop(lambda carry: carry[1], run_step, start)
    chosen = chosen.only(written[:, None] > np.arange(k, dtype=np.int32)[None])
    return pools, rows, DecodeBlock(written, chosen, rows.state)


def advance(rows: Rows, chose: jax.Array, token: jax.Array, stop: jax.Array, fits: jax.Array) -> Rows:
    """Advances the rows where bool[S] `chose` took `token` i32[S]; bool[S] `fits` says whether the row can hold it."""
    stop_columns = jnp.moveaxis(stop, -1, 0)  # each [], or [S]
    stopped = functools.reduce(operator.or_, [token == column for column in stop_columns], jnp.zeros_like(chose))
    remaining = rows.remaining - chose.astype(jnp.int32)
    goes_on = rows.active & (~chose | (~stopped & (remaining > 0) & fits))
    return rows.replace(token=jnp.where(chose, token, rows.token), remaining=remaining, active=goes_on)


class Decoded(NamedTuple):
    """The choices of a jitted loop: tokens i32[S, steps] (-1: none), logprobs f32[S, steps]; whether blocks ran out."""

    tokens: jax.Array
    logprobs: jax.Array
    out_of_blocks: jax.Array


def decode_log(spec: CacheSpec, steps: int) -> EventLog:
    """Makes a log with room for at least `steps` steps in ordinary use. The loop ends if the log is nearly full."""
    usual_events = steps * spec.max_seqs * len(spec.groups) // 2
    return init_log(
        usual_events + 2 * worst_events(spec, spec.max_seqs), spec.block_size, spec.extra_ids, spec.has_recurrent
    )


def append_events(log: Log, *events: Events) -> Log:
    """Appends events to the log, if there is one."""
    return None if log is None else append(log, *events)


def decode(
    model: Model,
    cache: Cache,
    rows: Rows,
    log: Log,
    *,
    steps: int,
    stop: jax.Array,
    sampling: Sampling | None,
    logits_fn: LogitsFn | None = None,
    k: int | None = None,
    fixed_steps: bool = False,
    now: Any = 0,
) -> tuple[Cache, Rows, Log, Decoded]:
    """Runs up to `steps` decode steps for all active rows, in blocks of up to k. Jit and donate it.

    Before the call, you admit rows and compute their prompts, for example with `step`. (`serve` admits requests
    itself.) The loop ends early if no row is active, if the pool has too few blocks for all rows, or if the log is
    nearly full. The choices do not depend on k.

    Args:
      model: see `step`.
      cache: the cache, in which active rows have everything except `rows.token` committed, and no block for it yet.
      rows: the state of each row.
      log: a `decode_log` for the events. None disables events.
      steps: static.
      stop: i32[K], or i32[S, K] for each row; stop tokens.
      sampling: leaves [] or [S]. Idle rows should be greedy. None means all rows are greedy, and compiles only this
        case.
      logits_fn: see `RunOptions`.
      k: static; maximum steps of a block, 1 to P. None means P.
      fixed_steps: static; see `RunOptions`.
      now: i32[] ms, the same for all steps.

    Raises:
      ValueError: if k is out of range, or `rows.prompt` is missing.
    """
    spec = cache.state.spec
    k = Scheduler(k=k).max_steps(spec)
    choose = Sampler(stop, sampling, logits_fn)

    def goes_on(num_done: jax.Array, rows: Rows, log: Log, out_of_blocks: jax.Array) -> jax.Array:
        enough = num_free(log) >= worst_events(spec, spec.max_seqs)
        return jnp.any(rows.active & (num_done < steps) & ~out_of_blocks & enough)

    def block(carry):
        _, num_done, cache, rows, log, chosen, refused, _ = carry
        free_slots = spec.max_length - cache.state.seqs.length
        want = jnp.minimum(jnp.minimum(rows.remaining, free_slots), jnp.minimum(steps - num_done, k))
        want = jnp.where(rows.active, jnp.maximum(want, 1), 0)
        n = jnp.where(refused, 1, jnp.minimum(num_steps(cache.state, want, k, num_free(log)), steps - num_done))
        cache, extended = cache.extend(rows.active, jnp.minimum(want, n), max_tokens=k, now=now)
        begun = rows.active & extended.ok
        first = rows.token
        granted = jnp.where(extended.ok, n, 0)
        pools, rows, written = compute(model, cache, rows, want, granted, choose, k, fixed_steps)
        cache, committed = cache.replace(pools=pools).commit(written.text(first), written.count, now=now)
        if k > 1:
            cache, _ = cache.trim(begun, max_tokens=k)
        log = append_events(log, extended, committed)
        chosen = chosen.put(written.chosen, num_done)
        num_done = num_done + jnp.max(written.count)
        refused = ~extended.ok
        out_of_blocks = ~extended.ok & (n == 1)
        has_more = goes_on(num_done, rows, log, out_of_blocks)  # here, because the loop's condition would be a kernel
        return has_more, num_done, cache, rows, log, chosen, refused, out_of_blocks

    zero = jnp.int32(0)
    false = jnp.bool_(False)
    chosen = SampledTokens.none(spec.max_seqs, steps + k - 1)  # the last block may begin anywhere
    start = goes_on(zero, rows, log, false), zero, cache, rows, log, chosen, false, false
    _, _, cache, rows, log, chosen, _, out_of_blocks = while_loop(lambda carry: carry[0], block, start)
    return cache, rows, log, Decoded(chosen.tokens[:, :steps], chosen.logprobs[:, :steps], out_of_blocks)
