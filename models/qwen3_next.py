# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: three layers with a gated delta rule, then a layer with gated attention, and so on, with experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import FULL, LINEAR, LayerConfig, Mixing
from .experts import ExpertsConfig
from .family import Family, read_attention, read_common, read_dense, read_layers, write_attention, write_common
from .fields import Table, count, flag, read_table, write_table
from .norm import RMSNorm
from .recurrence import Convolution, DeltaCell, DeltaConfig, DeltaInputs, softplus_decay
from .rope import Angles

_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    }
}
_DELTA: Table = {
    "linear_num_key_heads": ("key_heads", count),
    "linear_num_value_heads": ("value_heads", count),
    "linear_key_head_dim": ("key_dim", count),
    "linear_value_head_dim": ("value_dim", count),
    "linear_conv_kernel_dim": ("taps", lambda hf, name: count(hf, name, minimum=2)),
}
_EXPERTS: Table = {
    "num_experts": ("num_experts", count),
    "num_experts_per_tok": ("per_token", count),
    "moe_intermediate_size": ("width", count),
    "shared_expert_intermediate_size": ("shared_width", count),
    "norm_topk_prob": ("normalised", flag),
}


class GatedDeltaNet(nnx.Module):
    """The gated delta rule with a decay for each value head, and a gate on its normalised outputs."""

    def __init__(self, config: Any, delta: DeltaConfig, dtype, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, param_dtype=dtype, rngs=rngs)
        queries, _, values = delta.parts
        self.delta = delta
        self.in_proj_qkvz = linear(config.hidden_size, 2 * queries + 2 * values)
        self.in_proj_ba = linear(config.hidden_size, 2 * delta.value_heads)
        self.conv1d = Convolution(sum(delta.parts), delta.taps, dtype, rngs)
        self.A_log = nnx.Param(jnp.zeros(delta.value_heads, jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones(delta.value_heads, jnp.float32))
        self.norm = RMSNorm(delta.value_dim, dataclasses.replace(config, norm_offset=0.0), dtype)
        self.out_proj = linear(values, config.hidden_size)

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """Mixes x [R, C, E]. Returns the mixed values [R, C, E] and the cache."""
        keys = self.delta.key_dim
        values = self.delta.value_heads // self.delta.key_heads * self.delta.value_dim
        *qkv, gate = self._parts(self.in_proj_qkvz(x), (keys, 2 * keys, 2 * keys + values))
        beta, step = self._parts(self.in_proj_ba(x).astype(jnp.float32), 2)
        decay = softplus_decay((step + self.dt_bias[...][None, None])[..., None], self.A_log[...])
        inputs = DeltaInputs(jnp.concatenate(qkv, axis=-1), decay, jax.nn.sigmoid(beta))
        y, cache = mixing.recur(cache, DeltaCell(self.delta, self.conv1d.filters), inputs)
        y = self.norm(y) * jax.nn.silu(gate.astype(jnp.float32).reshape(y.shape))
        return self.out_proj(y.astype(x.dtype).reshape(*x.shape[:2], -1)), cache

    def _parts(self, x: jax.Array, ends: int | tuple[int, ...]) -> list[jax.Array]:
        """Splits x [R, C, columns] into parts for all heads. In x the parts of each key head lie side by side."""
        parts = jnp.split(x.reshape(*x.shape[:2], self.delta.key_heads, -1), ends, axis=-1)
        return [part.reshape(*x.shape[:2], -1) for part in parts]


class GatedDelta(DeltaConfig):
    """The heads of a `GatedDeltaNet`."""

    name = "linear_attn"
    module = GatedDeltaNet


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`."""
    common = read_common(hf)
    interval = count(hf, "full_attention_interval", 4)
    delta = GatedDelta(**read_table(hf, _DELTA))
    experts = ExpertsConfig(**read_table(hf, _EXPERTS), shared_gate=True, softmax=True)
    if delta.value_heads % delta.key_heads:
        wanted = f"a multiple of linear_num_key_heads={delta.key_heads}"
        raise ValueError(f"linear_num_value_heads: got {delta.value_heads}, wanted {wanted}")
    by_type = {FULL: read_attention(hf, common["num_heads"]), LINEAR: delta}
    return {
        **common,
        "layers": read_layers(hf, by_type, lambda layer_index: LINEAR if (layer_index + 1) % interval else FULL),
        "qk_norm": True,
        "norm_offset": 1.0,
        "norm_in_float32": True,
        "output_gate": True,
        "experts": experts.check(),
        "dense": read_dense(hf),
    }


def _write(config: Any) -> dict[str, Any]:
    """The fields for `_read`."""
    by_type = {FULL: LayerConfig(config.num_heads, 256), **{layer.layer_type: layer for layer in config.layers}}
    return {
        **write_common(config, "Qwen3Next"),
        **(write_table(by_type[LINEAR], _DELTA) if LINEAR in by_type else {}),
        **write_table(config.experts, _EXPERTS),
        **write_attention(by_type[FULL]),
        "partial_rotary_factor": by_type[FULL].rope.share,
        "layer_types": [layer.layer_type for layer in config.layers],
        "mlp_only_layers": list(config.dense),
        "decoder_sparse_step": 1,
    }


QWEN3_NEXT = Family(_DEFAULTS, _read, _write)
