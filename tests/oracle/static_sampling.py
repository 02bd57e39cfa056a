# SPDX-License-Identifier: Apache-2.0
"""Sampling with the same settings for all rows: a program for each kind, chosen while tracing."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Static(NamedTuple):
    """The sampling of all rows, in Python numbers."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


def sample(logits: jax.Array, sampling: Static, seeds: jax.Array, positions: jax.Array) -> tuple[Any, Any]:
    """Tokens i32[R] and their log-probabilities f32[R], of logits f32[R, V], seeds u32[R] and positions i32[R]."""
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(seeds, positions)
        restricted = restrict(logits / sampling.temperature, sampling)
        tokens = jax.vmap(jax.random.categorical)(keys, restricted).astype(jnp.int32)
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[:, None], axis=1)
    return tokens, scores[:, 0]


def restrict(logits: jax.Array, sampling: Static) -> jax.Array:
    """f32[R, V]: logits, with -inf for the tokens left out by top-k and then top-p."""
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
