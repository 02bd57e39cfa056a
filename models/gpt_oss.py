# SPDX-License-Identifier: Apache-2.0
"""GptOss: attention with learned sinks, over a window in every other layer, and experts with clamped gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .attention import FULL, SLIDING
from .experts import Experts, ExpertsConfig, highest, random_matrices
from .family import Family, read_attention, read_common, read_layers, write_attention, write_common
from .fields import Table, count, number, read_table, write_table

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_EXPERTS: Table = {
    "intermediate_size": ("width", count),
    "num_local_experts": ("num_experts", count),
    "num_experts_per_tok": ("per_token", count),
    "swiglu_alpha": ("alpha", number),
    "swiglu_limit": ("limit", number),
}


class ClampedExperts(Experts):
    """Experts with clamped gates. Columns of gate and up projections alternate, as in checkpoints."""

    def __init__(self, width: int, config: ClampedConfig, dtype, rngs: nnx.Rngs):
        self.alpha = config.alpha
        self.limit = config.limit
        num_experts = config.num_experts
        inner = config.width
        self.gate_up_proj = random_matrices(rngs, (num_experts, width, 2 * inner), dtype)
        self.gate_up_proj_bias = nnx.Param(jnp.zeros((num_experts, 2 * inner), dtype))
        self.down_proj = random_matrices(rngs, (num_experts, inner, width), dtype)
        self.down_proj_bias = nnx.Param(jnp.zeros((num_experts, width), dtype))

    def _arrays(self) -> list[jax.Array]:
        params = self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias
        return [param[...] for param in params]

    def _output(self, x: jax.Array, *arrays: jax.Array) -> jax.Array:
        gate_up, gate_up_bias, down, down_bias = arrays
        projected = jnp.dot(x, gate_up) + gate_up_bias[None, None]
        gate = jnp.minimum(projected[..., ::2], self.limit)
        up = jnp.clip(projected[..., 1::2], -self.limit, self.limit)
        y = jnp.dot((up + 1) * gate * jax.nn.sigmoid(gate * self.alpha), down, preferred_element_type=jnp.float32)
        return y + down_bias[None, None].astype(jnp.float32)


class ClampedMixture(nnx.Module):
    """Experts to choose from for each token. The weights are a softmax over the chosen experts."""

    def __init__(self, width: int, config: ClampedConfig, dtype, rngs: nnx.Rngs):
        self.per_token = config.per_token
        self.router = nnx.Linear(width, config.num_experts, param_dtype=dtype, rngs=rngs)
        self.experts = ClampedExperts(width, config, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [R, C, E] to [R, C, E]."""
        kernel = self.router.kernel[...].astype(jnp.float32)
        logits = jnp.dot(x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
        assert self.router.bias is not None
        logits = logits + self.router.bias[...].astype(jnp.float32)[None, None]
        weights = jax.nn.softmax(jnp.where(highest(logits, self.per_token), logits, -jnp.inf), axis=-1)
        return self.experts(x, weights).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class ClampedConfig(ExpertsConfig):
    """Experts with a bias and clamped gates.

    Attributes:
      alpha: factor on a gate inside its sigmoid.
      limit: bound on gates, and on the values they scale.
    """

    alpha: float = 1.702
    limit: float = 7.0
    module = ClampedMixture


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`."""
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf = {**hf, "rope_parameters": _ROPE}
    common = read_common(hf, biases=(True,))
    experts = ClampedConfig(**read_table(hf, _EXPERTS))
    if experts.per_token > experts.num_experts:
        wanted = f"at most num_local_experts={experts.num_experts}"
        raise ValueError(f"num_experts_per_tok: got {experts.per_token}, wanted {wanted}")
    full = read_attention(hf, common["num_heads"])
    by_type = {FULL: full, SLIDING: dataclasses.replace(full, window=count(hf, "sliding_window"))}
    layers = read_layers(hf, by_type, lambda layer_index: FULL if layer_index % 2 else SLIDING)
    return {**common, "layers": layers, "sinks": True, "experts": experts}


def _write(config: Any) -> dict[str, Any]:
    """The fields for `_read`."""
    return {
        **write_common(config, "GptOss"),
        **write_table(config.experts, _EXPERTS),
        **write_attention(config.layers[0]),
        "sliding_window": max(layer.window or 0 for layer in config.layers) or _DEFAULTS["gpt_oss"]["sliding_window"],
        "layer_types": [layer.layer_type for layer in config.layers],
    }


GPT_OSS = Family(_DEFAULTS, _read, _write)
