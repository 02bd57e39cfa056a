# SPDX-License-Identifier: Apache-2.0
"""Chooses the next token of each row from its logits, with its own options and random stream."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import count, in_any, put
from kvjax.checks import integers, is_integer, static_int
from pallas_kernels.loops import varying

_DTYPES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_tokens": np.int32,
    "min_p": np.float32,
}


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options for choosing a token. The default is greedy.

    It is a pytree: each leaf is a number for all rows, or an array with a number for each row. Numbers, lists and numpy
    arrays are checked and become numpy arrays. A jax array is taken as it is, traced or not.

    Attributes:
      temperature: f32; divides the logits; 0 takes the likeliest token.
      top_k: i32; sample among this number of the likeliest tokens. None or 0 means no limit.
      top_p: f32; sample among the fewest likeliest tokens with this total probability. None or 1 means no
        limit.
      min_tokens: i32; number of tokens before which no stop token is chosen.
      min_p: f32; sample among tokens with at least this share of the likeliest token's probability. 0 means no limit.
        None removes the leaf, so programs contain nothing for it.

    Raises:
      ValueError: naming the field, if a value is no number or out of range.

    Example:
      >>> sampling = kvjax.Sampling(temperature=[0.0, 0.5], top_p=0.75)  # row 0 is greedy
      >>> sampling.temperature.tolist(), sampling.top_p.tolist()
      ([0.0, 0.5], 0.75)
      >>> try:
      ...     kvjax.Sampling(top_p=1.5)
      ... except ValueError as error:
      ...     print(error)
      top_p: got 1.5, wanted None or a number in (0, 1]
    """

    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = None
    min_tokens: Any = 0
    min_p: Any = None

    def __post_init__(self):
        for name, off, holds, valid in (
            ("temperature", None, lambda x: x >= 0, "at least 0"),
            ("top_k", 0, lambda x: x >= 0, "None or an integer of at least 0"),
            ("top_p", 1.0, lambda x: (x > 0) & (x <= 1), "None or a number in (0, 1]"),
            ("min_tokens", None, lambda x: x >= 0, "an integer of at least 0"),
            ("min_p", None, lambda x: (x >= 0) & (x <= 1), "None or a number in [0, 1]"),
        ):
            value = getattr(self, name)
            if isinstance(value, jax.Array) or (name == "min_p" and value is None):
                continue
            numbers = _host_numbers(off if value is None else value, _DTYPES[name])
            if numbers is None or not np.all(holds(numbers)):
                raise ValueError(f"{name}: got {reprlib.repr(value)}, wanted {valid}")
            object.__setattr__(self, name, numbers)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values in some fields."""
        return dataclasses.replace(self, **changes)

    def each_row(self, rows: int) -> Sampling:
        """The same options with leaves [rows]. Raises a ValueError for a leaf other than this or a number."""

        def broadcast(name: str, dtype: Any) -> jax.Array:
            leaf = jnp.asarray(getattr(self, name))
            if leaf.shape not in ((), (rows,)):
                raise ValueError(f"sampling.{name}: got shape {list(leaf.shape)}, wanted [] or [{rows}]")
            return jnp.broadcast_to(leaf.astype(dtype), (rows,))

        leaves = {name: dtype for name, dtype in _DTYPES.items() if getattr(self, name) is not None}
        return Sampling(**{name: broadcast(name, dtype) for name, dtype in leaves.items()})

    def with_min_p(self) -> Self:
        """The same options with a leaf `min_p`, which is 0 if it was None."""
        return self.replace(min_p=0.0) if self.min_p is None else self

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """The leaves, with their names."""
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in _DTYPES], None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Any) -> Self:
        """Takes the leaves without checks, because jax also puts in values other than numbers."""
        sampling = object.__new__(cls)
        for name, leaf in zip(_DTYPES, leaves, strict=True):
            object.__setattr__(sampling, name, leaf)
        return sampling


def _host_numbers(values: Any, dtype: Any) -> np.ndarray | None:
    """Numbers of the host as a numpy array of a dtype, with larger integers clipped, or None for other values."""
    try:
        numbers = np.asarray(values)
    except ValueError:  # lists of different lengths
        return None
    integral = np.issubdtype(dtype, np.integer)
    if numbers.dtype.kind not in ("iu" if integral else "iuf"):
        return None
    return np.asarray(np.minimum(numbers, np.iinfo(dtype).max) if integral else numbers, dtype)


class Choice(NamedTuple):
    """The token chosen for each row, with log-probabilities of the raw logits unless `logprobs` says otherwise."""

    tokens: jax.Array  # i32[R]
    logprobs: jax.Array  # f32[R]
    top_tokens: jax.Array | None = None  # i32[R, n]; the likeliest tokens, the likeliest first, or None if n is 0
    top_logprobs: jax.Array | None = None  # f32[R, n], or None if n is 0


def sample(
    logits: jax.Array,
    sampling: Sampling | None,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    stop: jax.Array | None = None,
    generated: jax.Array | None = None,
    top_logprobs: int = 0,
    logprobs: str = "raw",
) -> Choice:
    """Chooses a token for each row. It depends only on the row's logits, sampling, seed and position.

    A batch of greedy rows draws nothing, and a batch without top-k and top-p does not sort.

    Args:
      logits: f32[R, V].
      sampling: leaves [] or [R]. None means greedy, and traces nothing else.
      seeds: u32[R].
      positions: i32[R]; positions of the chosen tokens.
      stop: i32[K] or i32[R, K]; stop tokens, for `min_tokens`; ids outside 0..V-1 are padding. None means no stop
        tokens.
      generated: i32[R]; number of tokens generated by each row so far; needed with `stop`.
      top_logprobs: static; n, always for the raw logits.
      logprobs: static; see `RunOptions`.

    Raises:
      ValueError: if a leaf of `sampling`, `stop` or `generated` has another shape, or n is negative or above V.
    """
    num_top = static_int("top_logprobs", top_logprobs, 0)
    vocabulary = logits.shape[-1]
    if num_top > vocabulary:
        raise ValueError(f"top_logprobs: got {num_top}, wanted at most the vocabulary, {vocabulary}")

    def scored(tokens: jax.Array, scaled: jax.Array | None = None) -> Choice:
        """The choice of tokens i32[R]. `scaled` f32[R, V] are the logits they were drawn by, None if all are greedy."""
        scores = jax.nn.log_softmax(logits, axis=-1)
        if logprobs == "raw":
            chosen = _at(scores, tokens)
        elif scaled is None or sampling is None:
            chosen = jnp.zeros((len(logits),), jnp.float32)
        else:
            chosen = jnp.where(sampling.temperature > 0, _at(jax.nn.log_softmax(scaled, axis=-1), tokens), 0.0)
        if num_top == 0:
            return Choice(tokens, chosen)
        top_scores, top = lax.top_k(scores, num_top)
        return Choice(tokens, chosen, top.astype(jnp.int32), top_scores)

    if sampling is None:
        return scored(_likeliest(logits))
    rows = len(logits)
    sampling = sampling.each_row(rows)
    if stop is None:
        stop = jnp.zeros((rows, 0), jnp.int32)
        is_early = jnp.zeros((rows,), jnp.bool_)
    else:
        stop = integers("stop", stop, ("K",) if jnp.ndim(stop) == 1 else (rows, "K"))
        is_early = integers("generated", generated, (rows,)) < sampling.min_tokens  # too early for a stop token
        stop = jnp.broadcast_to(stop, (rows, stop.shape[-1]))
    needed, programs = _programs(logits, sampling, seeds, positions, stop, is_early)
    # Each branch computes the scores. The greedy branch finds the largest logit, which the scores need, with the token.
    vary = varying((logits, seeds))
    return lax.switch(needed, [lambda program=program: vary(scored(*program())) for program in programs])


def _programs(
    logits: jax.Array, sampling: Sampling, seeds: jax.Array, positions: jax.Array, stop: jax.Array, early: jax.Array
) -> tuple[jax.Array, tuple[Callable[[], tuple[jax.Array, ...]], ...]]:
    """The index i32[] of the smallest program that serves all rows, and four programs in ascending order.

    Each program also serves the rows of earlier programs. It returns the tokens i32[R], and the logits f32[R, V]
    that they were drawn by, if any was drawn.
    """
    size = logits.shape[-1]
    draws = sampling.temperature > 0
    restricts = draws & (((sampling.top_k > 0) & (sampling.top_k < size)) | (sampling.top_p < 1))

    def draw(limit: Callable[[jax.Array, Sampling], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Draws like `jax.random.categorical`, without noise for greedy rows."""
        keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(seeds, positions)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys)
        allowed = _without(logits, stop, early).astype(jnp.float32)
        scores = limit(allowed / jnp.where(draws, sampling.temperature, 1)[:, None], sampling)
        return _likeliest(scores + jnp.where(draws[:, None], noise, 0)), scores

    programs = (
        lambda: (_likeliest(logits),),
        lambda: (_likeliest(_without(logits, stop, early)),),
        lambda: draw(_above_min_p),
        lambda: draw(restrict),
    )
    least = jnp.where(draws, jnp.where(restricts, np.int32(3), np.int32(2)), early.astype(jnp.int32))
    needed = in_any(jnp.max(least) > np.arange(len(programs) - 1, dtype=np.int32))
    return count(needed), programs


def check_logprobs(logprobs: Any) -> None:
    """Raises a ValueError unless this names a kind of log-probabilities."""
    if logprobs not in ("raw", "sampling"):
        raise ValueError(f"logprobs: got {logprobs!r}, wanted 'raw' or 'sampling'")


def output_seeds(seed: Any, num_outputs: int) -> jax.Array:
    """u32[num_outputs]; a random stream for each output: 32 bits of the seed's key folded with the output's number."""
    key = seed_key(seed)
    return jax.vmap(lambda n: jax.random.bits(jax.random.fold_in(key, n)))(np.arange(num_outputs, dtype=np.int32))


def seed_key(seed: Any) -> jax.Array:
    """The jax key of a seed, which is a key, the words of a key (`jax.random.PRNGKey`), or an integer modulo 2**32."""
    if is_integer(seed):
        seed = np.uint32(int(seed) % 2**32)
    try:
        words = jnp.asarray(seed)
    except (TypeError, ValueError, OverflowError):
        words = jnp.zeros((0,))
    if jnp.issubdtype(words.dtype, jax.dtypes.prng_key) and words.ndim == 0:
        return words
    if words.dtype == jnp.uint32 and words.shape == jax.eval_shape(jax.random.PRNGKey, 0).shape:
        return jax.random.wrap_key_data(words)
    if words.ndim or not jnp.issubdtype(words.dtype, jnp.integer):
        raise ValueError(f"seed: got {seed!r:.80}, wanted an integer or a jax key")
    return jax.random.key(words.astype(jnp.uint32))


def _at(scores: jax.Array, tokens: jax.Array) -> jax.Array:
    """f32[R]; the scores [R, V] of tokens i32[R]."""
    return jnp.take_along_axis(scores, tokens[:, None], axis=1)[:, 0]


def _likeliest(logits: jax.Array) -> jax.Array:
    """i32[R]."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _without(logits: jax.Array, ids: jax.Array, where: jax.Array) -> jax.Array:
    """f32[R, V]; logits, with -inf for tokens ids i32[R, K] in rows where bool[R]."""
    rows, size = logits.shape
    row_index = jnp.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], ids.shape)
    return put(logits, (row_index, ids), -jnp.inf, where[:, None] & (ids >= 0) & (ids < size), unique=False)


def restrict(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """f32[R, V]; logits, with -inf for tokens excluded by a row's top-k, top-p or min-p. Equally likely tokens stay.

    The top-p applies to the tokens left by top-k. The min-p is relative to the likeliest token, which always stays.

    Source: transformers' warpers, in their order.
    """
    rows, size = logits.shape
    sampling = sampling.each_row(rows)
    order = _descending(logits)
    last = jnp.where((sampling.top_k > 0) & (sampling.top_k < size), sampling.top_k, size) - 1
    least_of_top_k = jnp.take_along_axis(order, last[:, None], axis=1)
    order = jnp.where(order < least_of_top_k, -jnp.inf, order)
    weights = jax.nn.softmax(order, axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights  # probability of all likelier tokens
    top_p = sampling.top_p[:, None]
    least_of_top_p = jnp.min(jnp.where(before < top_p, order, jnp.inf), axis=-1, keepdims=True)
    least_of_top_p = jnp.where(top_p < 1, jnp.minimum(least_of_top_p, order[:, :1]), -jnp.inf)
    return _above_min_p(jnp.where(logits < jnp.maximum(least_of_top_k, least_of_top_p), -jnp.inf, logits), sampling)


def _above_min_p(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """f32[R, V]; logits, with -inf for tokens excluded by the row's min-p, without a sort."""
    if sampling.min_p is None:
        return logits
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p)[:, None]
    return jnp.where(logits < least, -jnp.inf, logits)


def _descending(x: jax.Array) -> jax.Array:
    """f32[R, V]; each row in descending order. Integers sort in a quarter of the time on a CPU."""

    def turn(bits: jax.Array) -> jax.Array:
        """Converts bits of numbers to integers in the same order, and back again."""
        return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)

    keys = turn(lax.bitcast_convert_type(x, jnp.int32))
    return lax.bitcast_convert_type(turn(~lax.sort(~keys, is_stable=False)), jnp.float32)
