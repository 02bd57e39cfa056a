# SPDX-License-Identifier: Apache-2.0
"""The norm of the decoder's layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """Scales the last axis to a mean square of 1, in float32, and by weights unless `weights` is False.

    `config` is the `ModelConfig`. A norm that differs from the model's other norms gets a copy with other fields.
    """

    def __init__(self, width: int, config: Any, dtype, weights: bool = True):
        self.scale = nnx.Param(jnp.full((width,), 1 - config.norm_offset, dtype)) if weights else None
        self.eps = config.rms_norm_eps
        self.offset = config.norm_offset
        self.wide = config.norm_in_float32

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x [..., D], in its own dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.scale is None:
            return wide.astype(x.dtype)
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        if self.wide:
            return (wide * (scale.astype(jnp.float32) + self.offset)).astype(x.dtype)
        return wide.astype(x.dtype) * (scale + self.offset)
