# SPDX-License-Identifier: Apache-2.0
"""The cell of layers with a gated delta rule, behind a short causal convolution.

Each head has a memory, a matrix from keys to values. A token first lets it decay, by one factor a head (Qwen3-Next) or
one a channel of the keys (Kimi Linear); then it replaces a part `beta` of the value under its key by its own value,
and reads the value under its query:

    memory = decay * memory
    memory = memory + beta * key (value - key memory)
    output = query memory

A cell carries the states of a row from one part of its tokens to the next: the memory, and the last inputs of the
convolution. `delta_by_token` computes the rule as it is written above. `delta_by_chunk` computes the same for a chunk
of tokens at a time, by the solution of a triangular system: what a token writes depends on what those before it in
the chunk have written, linearly.

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

# Tokens of a chunk. With a decay a channel the decays between all pairs of a chunk's tokens are an array of its own.
BY_HEAD, BY_CHANNEL = 64, 16


@dataclasses.dataclass(frozen=True)
class DeltaConfig(Mixer):
    """The heads of a layer with a gated delta rule.

    Attributes:
      key_heads: heads of queries and keys; each serves value_heads / key_heads value heads.
      value_heads: H.
      key_dim: K.
      value_dim: V.
      taps: tokens that the convolution sees, the current one included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layer_type: ClassVar[str] = LINEAR

    @property
    def parts(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values, which all go through the convolution."""
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
        """The layer's part of the cache; devices divide the channels and the heads."""
        return kvjax.LayerSpec.recurrent(self.shapes, axes={"conv": 1, "memory": 0})


class DeltaInputs(NamedTuple):
    """The inputs of the cell for each token.

    Attributes:
      qkv: [B, C, columns of all parts]; before the convolution.
      decay: f32[B, C, H, 1] or f32[B, C, H, K]; logarithms, not above 0.
      beta: f32[B, C, H]; between 0 and 1.
    """

    qkv: jax.Array
    decay: jax.Array
    beta: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class DeltaCell:
    """A cell for `kvjax.recur`.

    Attributes:
      config: the heads.
      filters: f32[taps, columns of all parts]; the last tap is the current token's.
    """

    config: DeltaConfig
    filters: jax.Array

    def __call__(self, states: dict[str, Any], inputs: DeltaInputs, count: jax.Array):
        """The outputs f32[B, C, H, V] of the first `count` i32[B] tokens of each row, and the states after them."""
        config, wide = self.config, jnp.float32
        qkv, conv = convolve(states["conv"], inputs.qkv.astype(wide), self.filters, count)
        real = jnp.arange(qkv.shape[1])[None] < count[:, None]
        # Padding leaves the memory alone: it does not decay, and nothing is written. Whatever padding holds is dropped.
        qkv = jnp.where(real[..., None], qkv, 0)
        decay = jnp.where(real[..., None, None], inputs.decay, 0)
        beta = jnp.where(real[..., None], inputs.beta, 0)
        queries, keys, _ = config.parts
        heads = config.key_heads, config.key_heads, config.value_heads
        parts = zip(jnp.split(qkv, (queries, queries + keys), axis=-1), heads, strict=True)
        q, k, v = (part.reshape(*part.shape[:2], number, -1) for part, number in parts)
        q, k = (jnp.repeat(_unit(x), config.value_heads // config.key_heads, axis=2) for x in (q, k))
        rule = delta_by_token if qkv.shape[1] == 1 else delta_by_chunk
        outputs, memory = rule(states["memory"], q * config.key_dim**-0.5, k, v, decay, beta)
        return outputs, {"conv": conv, "memory": memory}

    def zeros(self, rows: int) -> dict[str, jax.Array]:
        """The states before the first token."""
        return {name: jnp.zeros((rows, *shape), jnp.float32) for name, shape in self.config.shapes.items()}


class Convolution(nnx.Module):
    """A causal convolution of each column with a filter of its own; the weights are those of a checkpoint."""

    def __init__(self, columns: int, taps: int, dtype, rngs: nnx.Rngs):
        shape = columns, 1, taps
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * taps**-0.5)

    @property
    def filters(self) -> jax.Array:
        """f32[taps, columns]."""
        return self.weight[...][:, 0].T.astype(jnp.float32)


def softplus_decay(step: jax.Array, log_rate: jax.Array) -> jax.Array:
    """The logarithm of the decay, of steps f32[R, C, H, 1 or K] and the rates' logarithms, f32 with H elements."""
    return -jnp.exp(log_rate).reshape(1, 1, -1, 1) * jax.nn.softplus(step)


def convolve(last: jax.Array, x: jax.Array, filters: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A causal convolution of each column of x [B, C, columns] with its filter [taps, columns], then silu.

    `last` [B, taps - 1, columns] are the inputs of the tokens before. Those of the last taps - 1 tokens, up to the last
    of `count` i32[B] real ones, are returned after the outputs.
    """
    taps, length = filters.shape[0], x.shape[1]
    seen = jnp.concatenate([last, x], axis=1)
    y = sum(seen[:, tap : tap + length] * filters[tap][None, None] for tap in range(taps))
    after = count[:, None] + jnp.arange(taps - 1, dtype=count.dtype)[None]
    return jax.nn.silu(y), jnp.take_along_axis(seen, after[..., None], axis=1)


def delta_by_token(memory, q, k, v, decay, beta) -> tuple[jax.Array, jax.Array]:
    """The rule, token by token; the outputs f32[B, C, H, V], and the memory after the last token.

    The inputs are the memory f32[B, H, K, V], q and k f32[B, C, H, K], v f32[B, C, H, V], the logarithms of the decay
    f32[B, C, H, 1 or K], and beta f32[B, C, H].
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
    """The same as `delta_by_token`, `width` tokens at a time; None: as many as its decays are good for."""
    width = min(q.shape[1], width or (BY_HEAD if decay.shape[-1] == 1 else BY_CHANNEL))
    padding = -q.shape[1] % width

    def chunks(x):
        """[B, C, H, ...] as [chunks, B, H, width, ...]; padding is zeros, which leave the memory alone."""
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, width, *x.shape[2:]), (1, 3), (0, 2))

    memory, outputs = lax.scan(_chunk, memory, [chunks(x) for x in (q, k, v, decay, beta[..., None])])
    outputs = jnp.moveaxis(outputs, (0, 2), (1, 3))
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, : q.shape[1]], memory


def _chunk(memory, tokens):
    """One chunk of the rule: memory [B, H, K, V], and of the tokens [B, H, width, ...]."""
    q, k, v, decay, beta = tokens
    since = jnp.exp(jnp.cumsum(decay, axis=2))  # the chunk's beginning
    between = _decays_between(decay)
    left = between[:, :, -1]  # of what a token writes, at the chunk's end
    written = jnp.tril(beta * _products(k, k, between), -1)
    new = beta * (v - jnp.einsum("bhik,bhkv->bhiv", k * since, memory))
    new = lax.linalg.triangular_solve(written, new, left_side=True, lower=True, unit_diagonal=True)
    outputs = jnp.einsum("bhik,bhkv->bhiv", q * since, memory)
    outputs = outputs + jnp.einsum("bhij,bhjv->bhiv", _products(q, k, between), new)
    memory = memory * jnp.moveaxis(since[:, :, -1:], 2, 3) + jnp.einsum("bhik,bhiv->bhkv", k * left, new)
    return memory, outputs


def _decays_between(decay: jax.Array) -> jax.Array:
    """[B, H, i, j, 1 or K]; the decay from token j to token i, 0 where j comes after i, of logarithms [B, H, i, ...].

    The logarithms are added up for each j by itself: a difference of two sums from the chunk's beginning would lose
    the digits of small decays after large ones.
    """
    order = jnp.arange(decay.shape[2])
    after = (order[:, None] > order[None])[None, None, :, :, None]
    total = jnp.cumsum(jnp.where(after, decay[:, :, :, None], 0), axis=2)
    before = (order[:, None] < order[None])[None, None, :, :, None]
    return jnp.where(before, 0, jnp.exp(total))


def _products(x: jax.Array, k: jax.Array, between: jax.Array) -> jax.Array:
    """[B, H, i, j]; products of x at token i with the decayed keys of token j."""
    if between.shape[-1] == 1:
        return jnp.einsum("bhik,bhjk->bhij", x, k) * between[..., 0]
    return jnp.einsum("bhik,bhijk->bhij", x, k[:, :, None] * between)


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length one."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
