# SPDX-License-Identifier: Apache-2.0
"""A block of steps: the bookkeeping of up to k decode steps at once.

    grow        `extend` once: blocks for the next tokens of each row that decodes, min(n, what the row can still write)
    compute     n times view -> model -> choice; the K/V of each step go to the next slot of those blocks
    commit      what each row has written; blocks that filled become findable
    trim        rows that stopped early give back the blocks that they did not use

`num_steps` finds n before anything is changed, so that `extend` succeeds wherever counting can tell. Tokens,
log-probabilities and lengths are those of single steps. So are the index and the events, in another order, where
nothing is evicted; otherwise a row may take a block up to n - 1 steps earlier than it needs it.

Source: MAX's multi-step decoding.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, pick
from kvjax.cache import Cache
from kvjax.events.records import Events
from kvjax.model import Model, forward
from kvjax.pools.device import Pools
from kvjax.serving.capacity import num_steps
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Serving, Stage
from kvjax.serving.sampling import Choice, Sampling, sample

LogitsFn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Rows(Pytree):
    """The rows of a decode loop, all [S].

    Attributes:
      token: i32; the last token chosen, not yet in the cache.
      active: bool; whether to go on.
      left: i32; tokens still to choose.
      seed: u32; of the row's random stream.
      prompt: i32; tokens of the row's prompt; None if all choose greedily (`sampling` is None).
    """

    token: jax.Array
    active: jax.Array
    left: jax.Array
    seed: jax.Array
    prompt: jax.Array | None = None


class Chosen(Pytree):
    """Tokens that were chosen, with their log-probabilities; one array, since each write is a kernel on a GPU.

    Attributes:
      bits: i32[2 + 2 T, S, n]; the tokens, -1 for none, and the bits of the log-probabilities; then the T likeliest
        tokens, and the bits of theirs.
    """

    bits: jax.Array

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
    def none(cls, rows: int, size: int, top: int = 0) -> Chosen:
        """No tokens, in an array for `size` of each row, each with the `top` likeliest."""
        return cls(jnp.broadcast_to(_nothing(2 + 2 * top), (2 + 2 * top, rows, size)))

    @classmethod
    def of(cls, choice: Choice) -> Chosen:
        """The choices of one step, for each of S rows."""
        bits = [choice.tokens, _bits(choice.logprobs)]
        if choice.top_tokens is not None and choice.top_logprobs is not None:
            bits += [*choice.top_tokens.T, *_bits(choice.top_logprobs).T]
        return cls(jnp.stack(bits)[:, :, None])

    def only(self, where: jax.Array) -> Chosen:
        """Those where bool[S, n], none elsewhere."""
        return Chosen(jnp.where(where[None], self.bits, _nothing(self.bits.shape[0])))

    def put(self, others: Chosen, start: jax.Array) -> Chosen:
        """These, with the others from column start i32[] on."""
        return Chosen(lax.dynamic_update_slice_in_dim(self.bits, others.bits, start, axis=2))


def _bits(logprobs: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(logprobs.astype(jnp.float32), jnp.int32)


def _nothing(number: int) -> np.ndarray:
    """i32[number, 1, 1]; no token, and 0 for all that is said of it."""
    return np.array([-1, *[0] * (number - 1)], np.int32)[:, None, None]


class Written(Pytree):
    """The result of a block of steps.

    Attributes:
      count: i32[S]; tokens of each row whose K/V were written.
      chosen: what was chosen after each of them; k columns.
    """

    count: jax.Array
    chosen: Chosen

    def text(self, first: jax.Array) -> jax.Array:
        """i32[S, k]; the tokens that were written, of which the first i32[S] had been chosen before."""
        return jnp.concatenate([first[:, None], self.chosen.tokens[:, :-1]], axis=1)


def last_tokens(serving: Serving) -> jax.Array:
    """i32[S]; the last token of each row's request."""
    request = serving.by_row
    return pick(serving.requests.text, request.start + jnp.maximum(request.num_tokens - 1, 0))


def rows_of(serving: Serving, active: jax.Array) -> Rows:
    """The rows of a block of steps, which are active where bool[S]."""
    request = serving.by_row
    left = request.max_tokens - request.num_tokens
    return Rows(last_tokens(serving), active, left, request.seed, request.prompt)


def grow(
    serving: Serving, scheduler: Scheduler, k: int, single: jax.Array, log_room: jax.Array, now: jax.Array
) -> tuple[Serving, Events, jax.Array, jax.Array]:
    """Takes blocks for the next tokens of all rows that decode: for k steps, or for one where `single` bool[].

    Fewer, if there are too few blocks, or log_room i32[] for events. While a request waits for a row or for blocks, a
    block of steps also ends where the first row is sure to end.

    Returns:
      The requests and the events; i32[], the number n of steps, 0 if blocks were refused; and i32[S], how many tokens
      each decode row may write in them.
    """
    requests, request, seqs, decode = serving.requests, serving.by_row, serving.cache.state.seqs, serving.decoding
    left = jnp.where(decode, request.max_tokens - request.num_tokens, 0)
    new = jnp.minimum(left, k)
    waiting = jnp.any(requests.stage == Stage.WAITING)
    first_end = jnp.min(jnp.where(decode, left, k))
    limit = jnp.where(waiting, jnp.minimum(first_end, scheduler.k_waiting), k)
    fitting = jnp.minimum(limit, num_steps(serving.cache.state, new, k, log_room))
    limit = jnp.where(single | (serving.refused > 1), 1, fitting)
    new = jnp.minimum(new, limit)
    more = jnp.maximum(new - (seqs.length - seqs.committed), 0)
    cache, events = serving.cache.extend(decode & (more > 0), jnp.where(decode, more, 0), max_tokens=k, now=now)
    n, refused = jnp.where(events.ok, limit, 0), jnp.where(events.ok, 0, limit)
    return serving.replace(cache=cache, refused=refused), events, n, jnp.where(events.ok, new, 0)


def compute(
    model: Model,
    cache: Cache,
    rows: Rows,
    new: jax.Array,
    steps: jax.Array,
    *,
    k: int,
    stop: jax.Array,
    sampling: Sampling | None,
    top: int = 0,
    logits_fn: LogitsFn | None = None,
    fixed_steps: bool = False,
) -> tuple[Pools, Rows, Written]:
    """Steps of the model for all active rows, into blocks that `extend` has taken; the metadata stay as they are.

    Args:
      model: see `kvjax.step`.
      cache: its active rows have all but `rows.token` committed, and blocks for min(new, steps) tokens.
      rows: the state of each row.
      new: i32[S]; the most tokens that each row can write.
      steps: i32[]; how many steps, 0 to k; it ends early once no row is active.
      k: static; the most steps.
      stop: i32[K], or i32[S, K] for each row; stop tokens.
      sampling: leaves [] or [S]; None: greedy.
      top: static; T, of how many of the likeliest tokens to note the log-probabilities.
      logits_fn: static; as in `decode`.
      fixed_steps: static; always loops k times.

    Returns:
      The pools with the K/V of `Written.count` tokens of each row, to be committed; the rows; and what was written.
    """
    committed, max_length = cache.state.seqs.committed, cache.state.spec.max_length

    # What a step does beside the model is a handful of kernels on a GPU. An operation on a scalar would be another, and
    # so would the loop's condition: each row has its own number of the step, and the step says whether to go on.
    def one(carry):
        number, _, pools, rows, written, chosen = carry
        active = rows.active & (number < jnp.minimum(new, steps))
        view = cache.view(active.astype(jnp.int32), 1, written=written)
        logits, pools = forward(model, rows.token[:, None], pools, view, jnp.zeros_like(rows.token))
        written = written + active.astype(jnp.int32)
        choice = choose(logits, rows, committed + written, stop, sampling, logits_fn, top)
        chosen = chosen.put(Chosen.of(choice), number[0])
        rows, number = advance(rows, active, choice.tokens, stop, committed + written < max_length), number + 1
        return number, jnp.any(rows.active & (number < steps)), pools, rows, written, chosen

    zeros = jnp.zeros_like(new)
    none = Chosen.none(new.shape[0], k, top)
    start = zeros, jnp.any(rows.active & (steps > 0)), cache.pools, rows, zeros, none
    if fixed_steps:
        _, _, pools, rows, written, chosen = lax.fori_loop(0, k, lambda _, carry: one(carry), start)
    else:
        _, _, pools, rows, written, chosen = lax.while_loop(lambda carry: carry[1], one, start)
    return pools, rows, Written(written, chosen.only(written[:, None] > np.arange(k, dtype=np.int32)[None]))


def choose(
    logits: jax.Array,
    rows: Rows,
    positions: jax.Array,
    stop: jax.Array,
    sampling: Sampling | None,
    logits_fn: LogitsFn | None,
    top: int = 0,
) -> Choice:
    """The next token of each row, at positions i32[S]; stop i32[K] or i32[S, K]."""
    if logits_fn is not None:
        logits = logits_fn(logits, rows.token, positions)
    if sampling is None:
        return sample(logits, None, rows.seed, positions, top_logprobs=top)
    if rows.prompt is None:
        raise ValueError("rows.prompt: got None, wanted the tokens of each row's prompt, or sampling=None")
    generated = positions - rows.prompt
    return sample(logits, sampling, rows.seed, positions, stop=stop, generated=generated, top_logprobs=top)


def advance(rows: Rows, chose: jax.Array, token: jax.Array, stop: jax.Array, fits: jax.Array) -> Rows:
    """The rows after each row where chose bool[S] took `token` i32[S]; fits bool[S]: the row can hold it."""
    each = jnp.moveaxis(stop, -1, 0)  # of [], or [S]
    stopped = functools.reduce(operator.or_, [token == one for one in each], jnp.zeros_like(chose))
    left = rows.left - chose.astype(jnp.int32)
    on = rows.active & (~chose | (~stopped & (left > 0) & fits))
    return rows.replace(token=jnp.where(chose, token, rows.token), left=left, active=on)
