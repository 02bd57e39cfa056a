# SPDX-License-Identifier: Apache-2.0
"""Penalties on earlier tokens, and biases on any tokens, as a `logits_fn` with a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, add, put
from kvjax.checks import host_integers, static_int
from pallas_kernels.loops import varying

# Within these limits, finite logits stay finite.
MIN_REPETITION = 0.01
MAX_REPETITION = 100


class Penalties(Pytree):
    """The penalties of a request and its chosen tokens: the state of `penalize`.

    Attributes:
      frequency: f32[]; subtracted from a token's logit for each time the token was chosen.
      presence: f32[]; subtracted if the token was chosen at all.
      bias_tokens: i32[B]; biased tokens, padded with -1.
      bias: f32[B]; added to the logits of these tokens.
      chosen: i32[N]; tokens of the prompt, if there is a repetition penalty, and then the first `steps - 1` chosen
        tokens.
      steps: i32[]; number of times `penalize` has seen the request.
      repetition: f32[]; divides the positive logits of tokens in the prompt or the answer, and multiplies the negative
        logits. With None no request has this penalty, and programs contain nothing for it.
      num_prompt: i32[]; number of prompt tokens in `chosen`. None if `repetition` is None.
    """

    frequency: Any
    presence: Any
    bias_tokens: Any
    bias: Any
    chosen: Any
    steps: Any
    repetition: Any = None
    num_prompt: Any = None

    @classmethod
    def of(
        cls,
        max_tokens: int,
        frequency: float = 0.0,
        presence: float = 0.0,
        bias: Mapping[int, float] | None = None,
        *,
        repetition: float | None = None,
        prompt: Sequence[int] = (),
        max_biases: int = 300,
    ) -> Penalties:
        """The penalties of a request, with at most `max_biases` B biases.

        The requests of a batch, or of an engine, need states of the same shapes. So give all of them the same
        `max_tokens` and `max_biases`, and a `repetition` if any request has a repetition penalty. A value of 1 changes
        nothing.

        Args:
          max_tokens: N; maximum tokens chosen by the request, together with its prompt if it has a `repetition`.
          frequency: the frequency penalty.
          presence: the presence penalty.
          bias: biases by token, added to their logits.
          repetition: the repetition penalty, from 0.01 to 100. None disables it.
          prompt: token ids of the prompt, which the repetition penalty counts.
          max_biases: B.

        Raises:
          ValueError: naming the argument.
        """
        bias = {} if bias is None else bias
        if len(bias) > max_biases:
            raise ValueError(f"bias: got {len(bias)} tokens, wanted at most {max_biases}")
        for name, values in ("frequency", [frequency]), ("presence", [presence]), ("bias", bias.values()):
            if not np.all(np.isfinite(np.array([*values], np.float32))):
                raise ValueError(f"{name}: got {values}, wanted finite numbers")
        tokens = np.full((max_biases,), -1, np.int32)
        values = np.zeros((max_biases,), np.float32)
        tokens[: len(bias)] = [*bias]
        values[: len(bias)] = [*bias.values()]
        chosen = np.zeros((static_int("max_tokens", max_tokens, 1),), np.int32)
        penalties = cls(np.float32(frequency), np.float32(presence), tokens, values, chosen, np.int32(0))
        if repetition is None:
            return penalties
        if not MIN_REPETITION <= repetition <= MAX_REPETITION:
            wanted = f"wanted a number from {MIN_REPETITION} to {MAX_REPETITION}"
            raise ValueError(f"repetition: got {repetition}, {wanted}")
        tokens_before = host_integers("prompt", prompt, np.int32, "a list of token ids")
        if len(tokens_before) > len(chosen):
            raise ValueError(f"prompt: got {len(tokens_before)} tokens, wanted at most max_tokens, {len(chosen)}")
        chosen[: len(tokens_before)] = tokens_before
        return penalties.replace(repetition=np.float32(repetition), num_prompt=np.int32(len(tokens_before)))


def penalize(
    logits: jax.Array, last: jax.Array, positions: jax.Array, penalties: Penalties
) -> tuple[jax.Array, Penalties]:
    """Penalizes logits f32[S, V], and records the chosen tokens. It is a `logits_fn`.

    If no row has penalties or biases, the logits stay as they are, and no array of their size is made.

    Args:
      logits: f32[S, V].
      last: i32[S]; last token of each row, at first the last token of its prompt.
      positions: i32[S]; not used.
      penalties: penalties of each row, with a leading axis S.

    Example:
      >>> penalties = kvjax.serving.Penalties.of(max_tokens=4, frequency=0.5, bias={2: 3.0})
      >>> penalties = jax.tree.map(lambda array: jnp.asarray(array)[None], penalties)  # for a single row
      >>> logits = jnp.zeros((1, 4))
      >>> first, penalties = kvjax.serving.penalize(logits, jnp.array([0]), jnp.array([9]), penalties)
      >>> second, penalties = kvjax.serving.penalize(logits, jnp.array([1]), jnp.array([10]), penalties)  # 1 was chosen
      >>> first[0].tolist(), second[0].tolist()
      ([0.0, 0.0, 3.0, 0.0], [0.0, -0.5, 3.0, 0.0])

    Source: OpenAI's API; vLLM counts the same tokens: the generated tokens, without the prompt. The repetition penalty
    is as in transformers and vLLM, in their order: after the biases, before the other penalties.
    """
    del positions
    (rows, vocabulary) = logits.shape
    max_tokens = penalties.chosen.shape[1]
    row_index = np.arange(rows, dtype=np.int32)
    steps = penalties.steps
    end = steps if penalties.num_prompt is None else penalties.num_prompt + steps
    chosen = put(penalties.chosen, (row_index, jnp.maximum(end - 1, 0)), last, (steps > 0) & (end <= max_tokens))

    def penalized(logits: jax.Array) -> jax.Array:
        def added(to: jax.Array, tokens: jax.Array, values: Any, where: jax.Array) -> jax.Array:
            rows = jnp.broadcast_to(row_index[:, None], tokens.shape)
            return add(to, (rows, tokens), values, where & (tokens >= 0) & (tokens < vocabulary), unique=False)

        counts = jnp.zeros_like(logits)
        token_index = np.arange(max_tokens, dtype=np.int32)[None]
        is_chosen = token_index < end[:, None]
        if (num_prompt := penalties.num_prompt) is not None:
            is_chosen = is_chosen & (token_index >= num_prompt[:, None])
        counts = added(counts, chosen, 1.0, is_chosen)
        logits = added(logits, penalties.bias_tokens, penalties.bias, jnp.ones(penalties.bias.shape, jnp.bool_))
        if num_prompt is not None:
            in_text = added(counts, chosen, 1.0, token_index < num_prompt[:, None]) > 0
            factor = penalties.repetition[:, None]
            logits = jnp.where(in_text, jnp.where(logits < 0, logits * factor, logits / factor), logits)
        presence = jnp.where(counts > 0, penalties.presence[:, None], 0)
        return logits - penalties.frequency[:, None] * counts - presence

    has_any = (penalties.frequency != 0) | (penalties.presence != 0) | jnp.any(penalties.bias_tokens >= 0, axis=1)
    if penalties.repetition is not None:
        has_any = has_any | (penalties.repetition != 1)
    vary = varying((logits, last))
    logits = lax.cond(jnp.any(has_any), lambda: vary(penalized(logits)), lambda: vary(logits))
    return logits, penalties.replace(chosen=chosen, steps=steps + 1)
