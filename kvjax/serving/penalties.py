# SPDX-License-Identifier: Apache-2.0
"""Penalties on tokens that were chosen before, and biases on any tokens: a `logits_fn` with the state that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, add, put
from kvjax.checks import static_int
from pallas_kernels.loops import varying


class Penalties(Pytree):
    """The penalties of a request, and the tokens that it has chosen; a state of `penalize`.

    Attributes:
      frequency: f32[]; is subtracted from a token's logit once for each time that it was chosen.
      presence: f32[]; is subtracted once if it was.
      bias_tokens: i32[B]; -1: none.
      bias: f32[B]; is added to their logits.
      chosen: i32[N]; the first `steps - 1` of them.
      steps: i32[]; how often `penalize` has seen the request.
    """

    frequency: Any
    presence: Any
    bias_tokens: Any
    bias: Any
    chosen: Any
    steps: Any

    @classmethod
    def of(
        cls, max_tokens: int, frequency: float = 0.0, presence: float = 0.0, bias: Mapping[int, float] | None = None,
        *, most: int = 300,
    ) -> Penalties:  # fmt: skip
        """Those of a request that chooses at most `max_tokens` N tokens, with at most `most` B biases.

        Raises:
          ValueError: naming the argument.
        """
        bias = {} if bias is None else bias
        if len(bias) > most:
            raise ValueError(f"bias: got {len(bias)} tokens, wanted at most {most}")
        for name, values in ("frequency", [frequency]), ("presence", [presence]), ("bias", bias.values()):
            if not np.all(np.isfinite(np.array([*values], np.float32))):
                raise ValueError(f"{name}: got {values}, wanted finite numbers")
        tokens, values = np.full((most,), -1, np.int32), np.zeros((most,), np.float32)
        tokens[: len(bias)], values[: len(bias)] = [*bias], [*bias.values()]
        chosen = np.zeros((static_int("max_tokens", max_tokens, 1),), np.int32)
        return cls(np.float32(frequency), np.float32(presence), tokens, values, chosen, np.int32(0))


def penalize(
    logits: jax.Array, last: jax.Array, positions: jax.Array, penalties: Penalties
) -> tuple[jax.Array, Penalties]:
    """Penalized logits f32[S, V], and what was chosen so far; a `logits_fn`.

    Where no row has penalties or biases, the logits stay as they are, and no array of their size is made.

    Args:
      logits: f32[S, V].
      last: i32[S]; the last token of each row: of its prompt, at the first time.
      positions: i32[S]; not used.
      penalties: of each row, with a leading axis S.

    Example:
      >>> penalties = kvjax.serving.Penalties.of(max_tokens=4, frequency=0.5, bias={2: 3.0})
      >>> penalties = jax.tree.map(lambda array: jnp.asarray(array)[None], penalties)  # of one row
      >>> logits = jnp.zeros((1, 4))
      >>> first, penalties = kvjax.serving.penalize(logits, jnp.array([0]), jnp.array([9]), penalties)
      >>> second, penalties = kvjax.serving.penalize(logits, jnp.array([1]), jnp.array([10]), penalties)  # 1 was chosen
      >>> first[0].tolist(), second[0].tolist()
      ([0.0, 0.0, 3.0, 0.0], [0.0, -0.5, 3.0, 0.0])

    Source: OpenAI's API; vLLM counts the same tokens: those that were generated, without the prompt's.
    """
    del positions
    (rows, vocabulary), most = logits.shape, penalties.chosen.shape[1]
    each, steps = np.arange(rows, dtype=np.int32), penalties.steps
    chosen = put(penalties.chosen, (each, jnp.maximum(steps - 1, 0)), last, (steps > 0) & (steps <= most))

    def penalized(logits: jax.Array) -> jax.Array:
        def added(to: jax.Array, tokens: jax.Array, values: Any, where: jax.Array) -> jax.Array:
            rows = jnp.broadcast_to(each[:, None], tokens.shape)
            return add(to, (rows, tokens), values, where & (tokens >= 0) & (tokens < vocabulary), unique=False)

        counts = added(jnp.zeros_like(logits), chosen, 1.0, np.arange(most, dtype=np.int32)[None] < steps[:, None])
        logits = added(logits, penalties.bias_tokens, penalties.bias, jnp.ones(penalties.bias.shape, jnp.bool_))
        presence = jnp.where(counts > 0, penalties.presence[:, None], 0)
        return logits - penalties.frequency[:, None] * counts - presence

    has_any = (penalties.frequency != 0) | (penalties.presence != 0) | jnp.any(penalties.bias_tokens >= 0, axis=1)
    vary = varying((logits, last))
    logits = lax.cond(jnp.any(has_any), lambda: vary(penalized(logits)), lambda: vary(logits))
    return logits, penalties.replace(chosen=chosen, steps=steps + 1)
