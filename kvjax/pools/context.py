# SPDX-License-Identifier: Apache-2.0
"""Divides the tokens of each block among devices, so each device has a part of every sequence's context.

Token t of a block is on shard t mod C, in slot t div C. A block of 8 tokens on C = 2 shards is

    shard 0  [ t0 t2 t4 t6 ]
    shard 1  [ t1 t3 t5 t7 ]

A shard's tokens of a sequence fill the first slots of its part of the blocks, as on a single device. Each shard
computes attention over its own tokens. A maximum and a sum over the shards turn the results into attention over all
tokens.

Source: decode context parallelism of vLLM; the merge by log-sum-exp comes from flash decoding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SLOTS = 4  # the axis of P in an array of a pool, and of its scales
_LOWEST = np.float32(-1e30)  # finite: lse - maximum is never inf - inf


@dataclasses.dataclass(frozen=True)
class Context:
    """The mesh axis over which the P tokens of a block are divided. Its methods are for code mapped over this axis.

    Attributes:
      axis: the axis's name.
      size: C, the number of shards, a divisor of P.
    """

    axis: str
    size: int

    def shard(self) -> jax.Array:
        """The index i32[] of this device along the axis."""
        return lax.axis_index(self.axis)

    def own_slots(self, slots: jax.Array, pool: jax.Array) -> jax.Array:
        """The slots i32[T] in this device's part of a pool. Tokens of other shards get its scratch row."""
        part_size = pool.shape[_SLOTS]
        row = slots // (part_size * self.size)
        token = slots % (part_size * self.size)
        row = jnp.where(token % self.size == self.shard(), row, pool.shape[0] - 1)
        return row * part_size + token // self.size

    def own_lengths(self, lengths: jax.Array) -> jax.Array:
        """The number i32[R] of a row's first `lengths` i32[R] tokens on this device."""
        return (lengths - self.shard() + self.size - 1) // self.size

    def merge(self, out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Merges the attention of each device into attention over the tokens of all shards.

        Args:
          out: [T, Q, D]; this device's attention over its own tokens, zeros without any.
          lse: f32[T, Q]; its log-sum-exp without sinks, -inf without tokens.
          sinks: f32[Q], or None.
        """
        sinks = None if sinks is None else sinks.astype(jnp.float32)[None]
        # The maximum cancels out, so it needs no derivative.
        highest = jnp.maximum(lax.pmax(lax.stop_gradient(lse), self.axis), _LOWEST)
        if sinks is not None:
            highest = jnp.maximum(highest, lax.stop_gradient(sinks))
        weight = jnp.where(lse > -jnp.inf, jnp.exp(lse - highest), 0.0)[..., None]
        total = lax.psum(jnp.concatenate([out.astype(jnp.float32) * weight, weight], axis=-1), self.axis)
        mixed = total[..., :-1]
        denominator = total[..., -1]
        if sinks is not None:
            denominator += jnp.exp(sinks - highest)
        divisor = jnp.where(denominator > 0, denominator, 1.0)
        lse = jnp.where(denominator > 0, highest + jnp.log(divisor), -jnp.inf)
        return (mixed / divisor[..., None]).astype(out.dtype), lse

    def whole(self, blocks: jax.Array) -> jax.Array:
        """Whole blocks, with their tokens in order, from each device's part [B, L, 2, K, P / C, ...]."""
        # Sends integers: XLA's CPU backend sends narrow floats as float32, which changes the bits of a NaN.
        words = lax.bitcast_convert_type(blocks, f"uint{8 * blocks.dtype.itemsize}")
        parts = lax.bitcast_convert_type(lax.all_gather(words, self.axis, axis=_SLOTS + 1), blocks.dtype)
        return parts.reshape(*blocks.shape[:_SLOTS], -1, *blocks.shape[_SLOTS + 1 :])

    def part(self, blocks: jax.Array) -> jax.Array:
        """This device's part of whole blocks [B, L, 2, K, P, ...]."""
        shape = *blocks.shape[:_SLOTS], -1, self.size, *blocks.shape[_SLOTS + 1 :]
        return lax.dynamic_index_in_dim(blocks.reshape(shape), self.shard(), _SLOTS + 1, keepdims=False)

    def ordered[T: (np.ndarray, jax.Array)](self, blocks: T) -> T:
        """Blocks with their tokens in order, from an array of all devices' parts, such as an array of a pool."""
        shape = blocks.shape
        parts = blocks.reshape(*shape[:_SLOTS], self.size, -1, *shape[_SLOTS + 1 :])
        return parts.swapaxes(_SLOTS, _SLOTS + 1).reshape(shape)
