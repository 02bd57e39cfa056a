# SPDX-License-Identifier: Apache-2.0
"""The cell of layers with a gated delta rule after a short causal convolution.

Each head has a memory, a matrix from keys to values. First, a token lets the memory decay, by a factor for each head
(Qwen3-Next) or for each channel of the keys (Kimi Linear). Then it replaces a part `beta` of the value under its key by
its own value. Finally it reads the value under its query:

    memory = decay * memory
    memory = memory + beta * key (value - key memory)
    output = query memory

Between the parts of a row's tokens, a cell carries two states: the memory, and the last inputs of the convolution.
`delta_by_token` computes the rule as written above. `delta_by_chunk` computes the same for a chunk of tokens at a time.
A token's write depends linearly on the writes before it in the chunk, so the writes are the solution of a triangular
system.

Shapes: B rows of C tokens, H heads with keys of width K and values of width V.

Source: https://arxiv.org/abs/2412.06464 (the rule, and its form in chunks), https://arxiv.org/abs/2510.26692 (a decay
for each channel)
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import kvjax

from .attention import LINEAR, Mixer

# Tokens of a chunk. With a decay for each channel, the decays between all pairs of tokens need a large array.
BY_HEAD = 64
BY_CHANNEL = 16


@dataclasses.dataclass(frozen=True)
class DeltaConfig(Mixer):
    """The heads of a layer with a gated delta rule.

    Attributes:
      key_heads: heads of queries and keys; each serves value_heads / key_heads value heads.
      value_heads: H.
      key_dim: K.
      value_dim: V.
      taps: number of tokens in the convolution, the current token included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layer_type: ClassVar[str] = LINEAR

    @property
    def parts(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values. All go through the convolution."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a row's states."""
        return {
            "conv": (self.taps - 1, sum(self.parts)),
            "memory": (self.value_heads, self.key_dim, self.value_dim),
        }

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache. Devices divide the channels and the heads."""
        return kvjax.LayerSpec.recurrent(self.shapes, axes={"conv": 1, "memory": 0})


class DeltaInputs(NamedTuple):
    """The inputs of the cell for each token.

    Attributes:
      qkv: [B, C, columns]; queries, keys and values before the convolution.
      decay: f32[B, C, H, 1] or f32[B, C, H, K]; logarithms of the decay, at most 0.
      beta: f32[B, C, H]; part of the value to replace, from 0 to 1.
    """

    qkv: jax.Array
    decay: jax.Array
    beta: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class DeltaCell:
    """A cell for `kvjax.recur`.

    Attributes:
      config: the heads.
      filters: f32[taps, columns]; the last tap is the current token's.
    """

    config: DeltaConfig
    filters: jax.Array

    def __call__(self, states: dict[str, Any], inputs: DeltaInputs, count: jax.Array):
        """The outputs f32[B, C, H, V] of the first `count` i32[B] tokens of each row, and the states after them."""
        config = self.config
        qkv, conv = convolve(states["conv"], inputs.qkv.astype(jnp.float32), self.filters, count)
        is_token = jnp.arange(qkv.shape[1])[None] < count[:, None]
        # Padding has no decay and no beta, so it does not change the memory.
        qkv = jnp.where(is_token[..., None], qkv, 0)
        decay = jnp.where(is_token[..., None, None], inputs.decay, 0)
        beta = jnp.where(is_token[..., None], inputs.beta, 0)
        queries, keys, _ = config.parts
        heads = config.key_heads, config.key_heads, config.value_heads
        parts = zip(jnp.split(qkv, (queries, queries + keys), axis=-1), heads, strict=True)
        q, k, v = (part.reshape(*part.shape[:2], num_heads, -1) for part, num_heads in parts)
        q, k = (jnp.repeat(_unit(x), config.value_heads // config.key_heads, axis=2) for x in (q, k))
        rule = delta_by_token if qkv.shape[1] == 1 else delta_by_chunk
        outputs, memory = rule(states["memory"], q * config.key_dim**-0.5, k, v, decay, beta)
        return outputs, {"conv": conv, "memory": memory}

    def zeros(self, rows: int) -> dict[str, jax.Array]:
        """The states before the first token."""
        return {name: jnp.zeros((rows, *shape), jnp.float32) for name, shape in self.config.shapes.items()}


class Convolution(nnx.Module):
    """A causal convolution of each column with a filter of its own. The weights have the shape in checkpoints."""

    def __init__(self, columns: int, taps: int, dtype, rngs: nnx.Rngs):
        shape = columns, 1, taps
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * taps**-0.5)

    @property
    def filters(self) -> jax.Array:
        """f32[taps, columns]."""
        return self.weight[...][:, 0].T.astype(jnp.float32)


def softplus_decay(step: jax.Array, log_rate: jax.Array) -> jax.Array:
    """Computes the logarithm of the decay from steps f32[R, C, H, 1 or K] and the logarithms of H rates."""
    return -jnp.exp(log_rate).reshape(1, 1, -1, 1) * jax.nn.softplus(step)


def convolve(last: jax.Array, x: jax.Array, filters: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Convolves each column of x causally with its filter, then applies silu.

    Args:
      last: [B, taps - 1, columns]; inputs of the tokens before x.
      x: [B, C, columns].
      filters: [taps, columns].
      count: i32[B]; tokens of each row, without padding.

    Returns:
      The outputs [B, C, columns], and the inputs [B, taps - 1, columns] of each row's last tokens, up to `count`.
    """
    taps = filters.shape[0]
    length = x.shape[1]
    seen = jnp.concatenate([last, x], axis=1)
    y = sum(seen[:, tap : tap + length] * filters[tap][None, None] for tap in range(taps))
    after = count[:, None] + jnp.arange(taps - 1, dtype=count.dtype)[None]
    return jax.nn.silu(y), jnp.take_along_axis(seen, after[..., None], axis=1)


def delta_by_token(memory, q, k, v, decay, beta) -> tuple[jax.Array, jax.Array]:
    """Computes the rule token by token.

    Args:
      memory: f32[B, H, K, V].
      q: f32[B, C, H, K].
      k: f32[B, C, H, K].
      v: f32[B, C, H, V].
      decay: f32[B, C, H, 1 or K]; logarithms of the decay.
      beta: f32[B, C, H].

    Returns:
      The outputs f32[B, C, H, V], and the memory after the last token.
    """

    def step(memory, token):
        q, k, v, decay, beta = token
        memory = memory * jnp.exp(decay)[..., None]
        error = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, memory))
        memory = memory + k[..., None] * error[..., None, :]
        return memory, jnp.einsum("bhk,bhkv->bhv", q, memory)

    memory, outputs = lax.scan(step, memory, [jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta)])
    return jnp.moveaxis(outputs, 0, 1), memory


def delta_by_chunk(memory, q, k, v, decay, beta, width: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Computes the same as `delta_by_token`, `width` tokens at a time.

    A `width` of None defaults to `BY_HEAD` or `BY_CHANNEL`.
    """
    width = min(q.shape[1], width or (BY_HEAD if decay.shape[-1] == 1 else BY_CHANNEL))
    padding = -q.shape[1] % width

    def chunks(x):
        """Reshapes [B, C, H, ...] to [chunks, B, H, width, ...]. Zeros as padding leave the memory alone."""
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, width, *x.shape[2:]), (1, 3), (0, 2))

    memory, outputs = lax.scan(_chunk, memory, [chunks(x) for x in (q, k, v, decay, beta[..., None])])
    outputs = jnp.moveaxis(outputs, (0, 2), (1, 3))
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, : q.shape[1]], memory


def _chunk(memory, tokens):
    """Computes the rule for a chunk: memory [B, H, K, V], and tokens with arrays [B, H, width, ...]."""
    q, k, v, decay, beta = tokens
    since_start = jnp.exp(jnp.cumsum(decay, axis=2))  # decay since the chunk's beginning
    between = _decays_between(decay)
    until_end = between[:, :, -1]  # decay of a token's write, until the chunk's end
    system = jnp.tril(beta * _products(k, k, between), -1)
    writes = beta * (v - jnp.einsum("bhik,bhkv->bhiv", k * since_start, memory))
    writes = lax.linalg.triangular_solve(system, writes, left_side=True, lower=True, unit_diagonal=True)
    outputs = jnp.einsum("bhik,bhkv->bhiv", q * since_start, memory)
    outputs = outputs + jnp.einsum("bhij,bhjv->bhiv", _products(q, k, between), writes)
    memory = memory * jnp.moveaxis(since_start[:, :, -1:], 2, 3)
    memory = memory + jnp.einsum("bhik,bhiv->bhkv", k * until_end, writes)
    return memory, outputs


def _decays_between(decay: jax.Array) -> jax.Array:
    """The decay [B, H, i, j, 1 or K] from token j to token i, 0 if j comes after i, from logarithms [B, H, i, ...].

    The logarithms are summed separately from each j. A difference of two sums from the chunk's beginning would lose the
    digits of small decays after large decays.
    """
    order = jnp.arange(decay.shape[2])
    after = (order[:, None] > order[None])[None, None, :, :, None]
    total = jnp.cumsum(jnp.where(after, decay[:, :, :, None], 0), axis=2)
    before = (order[:, None] < order[None])[None, None, :, :, None]
    return jnp.where(before, 0, jnp.exp(total))


def _products(x: jax.Array, k: jax.Array, between: jax.Array) -> jax.Array:
    """Products [B, H, i, j] of x at token i with the decayed keys of token j."""
    if between.shape[-1] == 1:
        return jnp.einsum("bhik,bhjk->bhij", x, k) * between[..., 0]
    return jnp.einsum("bhik,bhijk->bhij", x, k[:, :, None] * between)


def _unit(x: jax.Array) -> jax.Array:
    """Scales vectors to length 1."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
