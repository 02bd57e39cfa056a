# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: three layers of a gated delta rule to one of gated attention, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import LayerConfig, Mixing
from .experts import ExpertsConfig
from .family import FULL, LINEAR, Family, read_attention, read_common, read_dense, write_attention, write_common
from .fields import Table, count, flag, layer_types, listed, read_table, write_table
from .norm import NormConfig, RMSNorm
from .recurrence import Convolution, DeltaCell, DeltaConfig, DeltaInputs, softplus_decay
from .rope import Angles

_DEFAULTS: dict[str, dict[str, Any]] = {"qwen3_next": {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
}}  # fmt: skip
_DELTA: Table = {
    "linear_num_key_heads": ("key_heads", count),
    "linear_num_value_heads": ("value_heads", count),
    "linear_key_head_dim": ("key_dim", count),
    "linear_value_head_dim": ("value_dim", count),
    "linear_conv_kernel_dim": ("taps", lambda hf, name: count(hf, name, least=2)),
}
_EXPERTS: Table = {
    "num_experts": ("num_experts", count),
    "num_experts_per_tok": ("per_token", count),
    "moe_intermediate_size": ("width", count),
    "shared_expert_intermediate_size": ("shared_width", count),
    "norm_topk_prob": ("normalised", flag),
}
_FIXED: dict[str, Any] = {"shared_gate": True, "softmax": True}  # of the experts


class GatedDelta(DeltaConfig):
    """The heads of a `GatedDeltaNet`."""

    name: ClassVar[str] = "linear_attn"

    def module(self, config: Any, dtype, rngs: nnx.Rngs) -> GatedDeltaNet:
        """The module."""
        return GatedDeltaNet(config.hidden_size, config.rms_norm_eps, self, dtype, rngs)


class GatedDeltaNet(nnx.Module):
    """The gated delta rule with a decay for each value head, and a gate on its normalised outputs."""

    def __init__(self, width: int, eps: float, delta: DeltaConfig, dtype, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.delta, (queries, _, values) = delta, delta.parts
        self.in_proj_qkvz = linear(width, 2 * queries + 2 * values)
        self.in_proj_ba = linear(width, 2 * delta.value_heads)
        self.conv1d = Convolution(sum(delta.parts), delta.taps, dtype, rngs)
        self.A_log = nnx.Param(jnp.zeros(delta.value_heads, jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones(delta.value_heads, jnp.float32))
        self.norm = RMSNorm(delta.value_dim, NormConfig(eps, norm_in_float32=True), dtype)
        self.out_proj = linear(values, width)

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """The mixed values [R, C, E] of x [R, C, E]; and the cache."""
        qkv, gate = self._projected(x)
        beta, step = self._of_value_heads(self.in_proj_ba(x).astype(jnp.float32))
        decay = softplus_decay(step + self.dt_bias[...][None, None], self.A_log[...])
        inputs = DeltaInputs(qkv, decay[..., None], jax.nn.sigmoid(beta))
        y, cache = mixing.recur(cache, DeltaCell(self.delta, self.conv1d.filters), inputs)
        y = self.norm(y) * jax.nn.silu(gate.astype(jnp.float32).reshape(y.shape))
        return self.out_proj(y.astype(x.dtype).reshape(*x.shape[:2], -1)), cache

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries, keys and values one after the other [R, C, columns]; and the gate [R, C, columns of values]."""
        delta = self.delta
        values = delta.value_heads // delta.key_heads * delta.value_dim
        x = self.in_proj_qkvz(x).reshape(*x.shape[:2], delta.key_heads, -1)
        parts = jnp.split(x, (delta.key_dim, 2 * delta.key_dim, 2 * delta.key_dim + values), axis=-1)
        *qkv, gate = (part.reshape(*x.shape[:2], -1) for part in parts)
        return jnp.concatenate(qkv, axis=-1), gate

    def _of_value_heads(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Two numbers [R, C, H] of each value head; in x they lie side by side for each key head."""
        parts = jnp.split(x.reshape(*x.shape[:2], self.delta.key_heads, -1), 2, axis=-1)
        return tuple(part.reshape(*x.shape[:2], -1) for part in parts)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`."""
    common, num_layers, every = read_common(hf), count(hf, "num_hidden_layers"), count(hf, "full_attention_interval", 4)
    delta, experts = GatedDelta(**read_table(hf, _DELTA)), ExpertsConfig(**read_table(hf, _EXPERTS), **_FIXED)
    if delta.value_heads % delta.key_heads:
        wanted = f"a multiple of linear_num_key_heads={delta.key_heads}"
        raise ValueError(f"linear_num_value_heads: got {delta.value_heads}, wanted {wanted}")
    by_type = {FULL: read_attention(hf, common["num_heads"]), LINEAR: delta}
    types = listed(hf, "layer_types") or [LINEAR if (number + 1) % every else FULL for number in range(num_layers)]
    return {
        **common,
        "layers": tuple(by_type[name] for name in layer_types(types, by_type, num_layers)),
        "qk_norm": True,
        "norm_offset": 1.0,
        "norm_in_float32": True,
        "output_gate": True,
        "experts": experts.check(),
        "dense": read_dense(hf, num_layers),
    }


def _write(config: Any) -> dict[str, Any]:
    """The fields that `_read` reads."""
    types = [LINEAR if isinstance(layer, DeltaConfig) else FULL for layer in config.layers]
    by_type = {FULL: LayerConfig(config.num_heads, 256), **dict(zip(types, config.layers, strict=True))}
    return {
        **write_common(config, "Qwen3Next"),
        **(write_table(by_type[LINEAR], _DELTA) if LINEAR in by_type else {}),
        **write_table(config.experts, _EXPERTS),
        **write_attention(by_type[FULL]),
        "partial_rotary_factor": by_type[FULL].rope.share,
        "layer_types": types,
        "mlp_only_layers": list(config.dense),
        "decoder_sparse_step": 1,
    }


QWEN3_NEXT = Family(_DEFAULTS, _read, _write)
