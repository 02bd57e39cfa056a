# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the arithmetic that all implementations share, so that they agree bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [..., D], whose pairs are (i, i + W / 2), in float32 and back to x's dtype.

    Args:
      x: vectors, of which the first W elements rotate, an even number; usually all D.
      angles: cosine and sine, f32[..., W / 2] each, of axes that broadcast with x's.
    """
    width = 2 * angles[0].shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], angles), x[..., width:]], axis=-1)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(rotate_halves(left, right, *angles), axis=-1).astype(x.dtype)


def rotate_halves(left: jax.Array, right: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves of rotated vectors, from those of the vectors, all float32; kernels call it too."""
    return left * cos - right * sin, right * cos + left * sin
