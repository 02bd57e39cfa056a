# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: pairs of dimensions turned by an angle that grows with the position."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rope:
    """Which frequencies a layer turns with.

    Attributes:
      theta: base of the frequencies.
      kind: "default", "linear" (every wavelength times `factor`) or "llama3" (only the long ones).
      factor: how far wavelengths are stretched.
      low_freq_factor: llama3; wavelengths above original_max_positions / low_freq_factor are stretched in full.
      high_freq_factor: llama3; wavelengths below original_max_positions / high_freq_factor are left alone.
      original_max_positions: llama3; context length before the stretching.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair of dimensions: f32[D / 2]."""
        frequency = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        if self.kind == "linear":
            frequency = frequency / self.factor
        elif self.kind == "llama3":
            # The more turns within the original context, the more of a frequency is kept.
            turns = self.original_max_positions * frequency / (2 * np.pi)
            kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
            frequency = frequency * (kept + (1 - kept) / self.factor)
        return frequency.astype(np.float32)

    def angles(self, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine at `positions i32[R, C]`, each f32[R, C, 1, D / 2]."""
        frequencies = self.frequencies(head_dim)[None, None, None]
        angle = positions[:, :, None, None].astype(jnp.float32) * frequencies
        return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns `x [R, C, heads, D]`, whose pairs are (i, i + D / 2), in float32 and back to x's dtype."""
    cos, sin = angles
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
