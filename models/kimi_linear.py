# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: three layers with Kimi delta attention, then a layer with attention over latents, and so on.

Kimi delta attention is the gated delta rule with a decay for each channel of the keys. Latents have no positions. Most
layers have experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import FULL, LINEAR, Mixer, Mixing
from .deepseek import EXPERTS, read_latents, write_latents
from .experts import read_experts, write_experts
from .family import Family, check_fixed, read_common, read_dense, read_layers, write_common
from .fields import Table, count, listed
from .norm import RMSNorm
from .recurrence import Convolution, DeltaCell, DeltaConfig, DeltaInputs, softplus_decay
from .rope import Angles

_POSITIONS = "model_max_length"  # other families' max_position_embeddings
_DEFAULTS: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_shared_experts": 1,
        "num_experts": 256,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_experts_per_token": 8,
        "first_k_dense_replace": 1,
        "moe_renormalize": True,
        _POSITIONS: 1048576,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
    }
}
# Other families' names for some fields.
_ALIASES = {
    "max_position_embeddings": _POSITIONS,
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
}
_EXPERTS: Table = {_ALIASES.get(name, name): entry for name, entry in EXPERTS.items()}
_NUMBERS = {"full_attn_layers": FULL, "kda_layers": LINEAR}  # fields of linear_attn_config with layers from 1 on


class KimiDeltaAttention(nnx.Module):
    """The gated delta rule with a decay for each channel of the keys, and a gate on its normalised outputs."""

    def __init__(self, config: Any, delta: DeltaConfig, dtype, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, param_dtype=dtype, rngs=rngs)
        width = config.hidden_size
        rank = delta.key_dim
        columns, _, _ = delta.parts
        convolution = partial(Convolution, columns, delta.taps, dtype, rngs)
        self.delta = delta
        self.q_proj, self.k_proj, self.v_proj = (linear(width, columns) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (convolution() for _ in range(3))
        self.f_a_proj = linear(width, rank)
        self.f_b_proj = linear(rank, columns)
        self.A_log = nnx.Param(jnp.zeros((1, 1, delta.value_heads, 1), jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones(columns, jnp.float32))
        self.b_proj = linear(width, delta.value_heads)
        self.g_a_proj = linear(width, rank)
        self.g_b_proj = linear(rank, columns)
        self.o_norm = RMSNorm(delta.value_dim, dataclasses.replace(config, norm_in_float32=True), dtype)
        self.o_proj = linear(columns, width)

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """Mixes x [R, C, E]. Returns the mixed values [R, C, E] and the cache."""
        qkv = jnp.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        step = self.f_b_proj(self.f_a_proj(x)).astype(jnp.float32) + self.dt_bias[...][None, None]
        decay = softplus_decay(self._by_head(step), self.A_log[...])
        inputs = DeltaInputs(qkv, decay, jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32)))
        filters = [conv.filters for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
        y, cache = mixing.recur(cache, DeltaCell(self.delta, jnp.concatenate(filters, axis=1)), inputs)
        gate = self._by_head(self.g_b_proj(self.g_a_proj(x)).astype(jnp.float32))
        y = (self.o_norm(y) * jax.nn.sigmoid(gate)).astype(x.dtype)
        return self.o_proj(y.reshape(*x.shape[:2], -1)), cache

    def _by_head(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.delta.value_heads, -1)


class KimiDelta(DeltaConfig):
    """The heads of a `KimiDeltaAttention`."""

    module = KimiDeltaAttention


def _select(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under this family's names."""
    return {_ALIASES.get(name, name): value for name, value in fields.items()}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`."""
    check_fixed(hf, mla_use_nope=True)  # no checkpoint with positions has been released
    check_fixed(hf, mla_use_output_gate=False, attn_res_block_size=0, use_grouped_topk=True, moe_layer_freq=1)
    check_fixed(hf, moe_router_activation_func="sigmoid")
    names = {"name": "block_sparse_moe", "matrices": ("w1", "w3", "w2")}
    return {
        **read_common(hf, positions=_POSITIONS),
        "layers": _layers(hf),
        "experts": read_experts(hf, _EXPERTS, "num_shared_experts", corrected=True, **names),
        "dense": read_dense(hf),
    }


def _write(config: Any) -> dict[str, Any]:
    """The fields for `_read`."""
    by_type = {layer.layer_type: layer for layer in config.layers}
    linear = {
        name: [position for position, layer in enumerate(config.layers, 1) if layer.layer_type == layer_type]
        for name, layer_type in _NUMBERS.items()
    }
    if LINEAR in by_type:
        delta = by_type[LINEAR]
        linear |= {"head_dim": delta.key_dim, "num_heads": delta.value_heads, "short_conv_kernel_size": delta.taps}
    return {
        **write_common(config, "KimiLinear", positions=_POSITIONS),
        **(write_latents(by_type[FULL], config.num_heads) if FULL in by_type else {}),
        **write_experts(config.experts, _EXPERTS, "num_shared_experts"),
        "mla_use_nope": True,
        "linear_attn_config": linear,
        "mlp_layer_types": ["dense" if n in config.dense else "sparse" for n in range(len(config.layers))],
    }


def _layers(hf: Mapping[str, Any]) -> tuple[Mixer, ...]:
    """Reads the layers from `layer_types`, or from their numbers in `linear_attn_config`, which begin with 1.

    Keys and values of the delta rule have the same heads, with the same width.
    """
    section = "linear_attn_config"
    entries = hf.get(section) or {}
    if not isinstance(entries, Mapping):
        raise ValueError(f"{section}: got {entries!r:.80}, wanted a set of fields")
    heads = count(entries, "num_heads", hf.get("linear_num_heads", 32), section=section)
    width = count(entries, "head_dim", hf.get("linear_head_dim", 128), section=section)
    taps = count(entries, "short_conv_kernel_size", hf.get("linear_conv_kernel_dim", 4), minimum=2, section=section)
    delta = KimiDelta(heads, heads, width, width, taps)
    num_layers = count(hf, "num_hidden_layers")
    named = {position: kind for name, kind in _NUMBERS.items() for position in listed(entries, name) or ()}
    if hf.get("layer_types") is None and sorted(named, key=str) != sorted(range(1, num_layers + 1), key=str):
        wanted = f"each of 1 to {num_layers} in full_attn_layers or in kda_layers"
        raise ValueError(f"{section}: got {entries!r:.200}, wanted {wanted}")
    by_type = {FULL: read_latents(hf, rope=None, interleaved=False), LINEAR: delta}
    return read_layers(hf, by_type, lambda layer_index: named[layer_index + 1])


KIMI_LINEAR = Family(_DEFAULTS, _read, _write, _select)
