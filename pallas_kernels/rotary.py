# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of rotary position embedding. All implementations share it, so they agree bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [..., D], whose pairs are (i, i + W / 2), in float32, and rounds the result to x's dtype.

    Args:
      x: vectors. Their first W elements rotate, an even number, usually all D.
      angles: cosine and sine, f32[..., W / 2] each, with axes that broadcast with x's.
    """
    width = 2 * angles[0].shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], angles), x[..., width:]], axis=-1)
    first_half, second_half = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(rotate_halves(first_half, second_half, *angles), axis=-1).astype(x.dtype)


def rotate_halves(
    first_half: jax.Array, second_half: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rotates both halves of the vectors, all in float32. Kernels call this function too."""
    return first_half * cos - second_half * sin, second_half * cos + first_half * sin
