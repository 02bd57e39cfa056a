# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of K/V with a byte per element. All implementations share it, so they agree bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def quantise(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Converts vectors [..., D] to int8 or float8_e4m3fn. Also returns the factors f32[..., 1] that restore them.

    A vector's largest element becomes the dtype's largest number. A vector of zeros has the factor 1. Kernels also call
    this function, so it uses only Triton's operations.
    """
    x = x.astype(jnp.float32)
    scale = scale_for(jnp.max(jnp.abs(x), axis=-1, keepdims=True), dtype)
    return round_by(x, scale, dtype), scale


def scale_for(highest: jax.Array, dtype) -> jax.Array:
    """The factors of vectors whose largest elements are `highest`, both f32[..., 1]."""
    scale = highest * np.float32(1 / largest(dtype))
    return jnp.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)


def round_by(x: jax.Array, scale: jax.Array, dtype) -> jax.Array:
    """Rounds elements f32[...] of vectors with these factors, or of parts of vectors, to a dtype."""
    # Multiplies by the reciprocal, since XLA replaces some quotients by such products. The bounds keep XLA from fusing
    # the product with the sum below.
    x = jnp.clip(x * (np.float32(1) / scale), -largest(dtype), largest(dtype))
    if jnp.issubdtype(dtype, jnp.integer):  # rounds to nearest even: after the shift float32's last bit counts ones
        shift = np.float32(1.5 * 2**23)
        x = lax.bitcast_convert_type(x + shift, jnp.int32) - shift.view(np.int32)
    return x.astype(dtype)


def largest(dtype) -> float:
    """The largest finite number of a dtype: 127 of int8, 448 of float8_e4m3fn."""
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)
