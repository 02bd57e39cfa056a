# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token from logits, every row with a random stream of its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to choose; static. The default is greedy.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: sample among this many of the likeliest tokens only.
      top_p: sample among the fewest likeliest tokens that have this probability together.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature: got {self.temperature}, wanted at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: got {self.top_k}, wanted None or at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, wanted None or a number in (0, 1]")


def sample(
    logits: jax.Array, sampling: Sampling, seeds: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Chooses a token for each row.

    A row's choice depends on its seed and position alone, not on the batch it is in.

    Args:
      logits: f32[R, V].
      sampling: how.
      seeds: u32[R].
      positions: i32[R]; of the tokens that are chosen.

    Returns:
      i32[R] tokens; and f32[R], their log-probabilities under the logits as they came, whatever the sampling.
    """
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(seeds, positions)
        kept = restrict(logits / sampling.temperature, sampling)
        tokens = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[:, None], axis=1)
    return tokens, scores[:, 0]


def restrict(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """f32[R, V]; logits, -inf for the tokens that top-k and then top-p leave out."""
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None and sampling.top_p < 1:
        order = -jnp.sort(-logits, axis=-1)
        weights = jax.nn.softmax(order, axis=-1)
        before = jnp.cumsum(weights, axis=-1) - weights  # probability of all likelier tokens
        least = jnp.min(jnp.where(before < sampling.top_p, order, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
