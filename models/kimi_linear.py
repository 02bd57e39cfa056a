# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: three layers of Kimi delta attention to one of attention over latents without positions, and experts.

Kimi delta attention is the gated delta rule with a decay for each channel of the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import Mixing
from .deepseek import read_latents, write_latents
from .experts import read_experts, write_experts
from .family import FULL, LINEAR, Family, read_common, read_dense, write_common
from .fields import Table, count, flag, layer_types, listed, number, only
from .norm import NormConfig, RMSNorm
from .recurrence import Convolution, DeltaCell, DeltaConfig, DeltaInputs, softplus_decay
from .rope import Angles

_POSITIONS = "model_max_length"  # the field that others call max_position_embeddings
_DEFAULTS: dict[str, dict[str, Any]] = {"kimi_linear": {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_shared_experts": 1, "num_experts": 256,
    "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 8,
    "first_k_dense_replace": 1, "moe_renormalize": True, _POSITIONS: 1048576, "rms_norm_eps": 1e-5,
    "bos_token_id": 163584, "eos_token_id": 163586,
}}  # fmt: skip
# Names that other families have for some fields.
_ALIASES = {
    "max_position_embeddings": _POSITIONS, "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}  # fmt: skip
_EXPERTS: Table = {
    "moe_intermediate_size": ("width", count),
    "num_experts": ("num_experts", count),
    "num_experts_per_token": ("per_token", count),
    "num_expert_group": ("num_groups", count),
    "topk_group": ("num_chosen_groups", count),
    "moe_renormalize": ("normalised", flag),
    "routed_scaling_factor": ("factor", number),
}
_FIXED: dict[str, Any] = {"corrected": True, "name": "block_sparse_moe", "matrices": ("w1", "w3", "w2")}  # of experts


class KimiDelta(DeltaConfig):
    """The heads of a `KimiDeltaAttention`."""

    def module(self, config: Any, dtype, rngs: nnx.Rngs) -> KimiDeltaAttention:
        """The module."""
        return KimiDeltaAttention(config.hidden_size, config.rms_norm_eps, self, dtype, rngs)


class KimiDeltaAttention(nnx.Module):
    """The gated delta rule with a decay for each channel of the keys, and a gate on its normalised outputs."""

    def __init__(self, width: int, eps: float, delta: DeltaConfig, dtype, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.delta, low, (columns, _, _) = delta, delta.key_dim, delta.parts
        self.q_proj, self.k_proj, self.v_proj = (linear(width, columns) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            Convolution(columns, delta.taps, dtype, rngs) for _ in range(3)
        )  # fmt: skip
        self.f_a_proj, self.f_b_proj = linear(width, low), linear(low, columns)
        self.A_log = nnx.Param(jnp.zeros((1, 1, delta.value_heads, 1), jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones(columns, jnp.float32))
        self.b_proj = linear(width, delta.value_heads)
        self.g_a_proj, self.g_b_proj = linear(width, low), linear(low, columns)
        self.o_norm = RMSNorm(delta.value_dim, NormConfig(eps, norm_in_float32=True), dtype)
        self.o_proj = linear(columns, width)

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """The mixed values [R, C, E] of x [R, C, E]; and the cache."""
        wide = jnp.float32
        qkv = jnp.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        step = self.f_b_proj(self.f_a_proj(x)).astype(wide) + self.dt_bias[...][None, None]
        decay = softplus_decay(self._of_heads(step), self.A_log[...].reshape(-1))
        inputs = DeltaInputs(qkv, decay, jax.nn.sigmoid(self.b_proj(x).astype(wide)))
        filters = [conv.filters for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
        y, cache = mixing.recur(cache, DeltaCell(self.delta, jnp.concatenate(filters, axis=1)), inputs)
        gate = self._of_heads(self.g_b_proj(self.g_a_proj(x)).astype(wide))
        y = (self.o_norm(y) * jax.nn.sigmoid(gate)).astype(x.dtype)
        return self.o_proj(y.reshape(*x.shape[:2], -1)), cache

    def _of_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.delta.value_heads, -1)


def _select(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by this family's names."""
    return {_ALIASES.get(name, name): value for name, value in fields.items()}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`."""
    only(hf, "mla_use_nope", True, absent=True)  # with positions no checkpoint has been released
    only(hf, "mla_use_output_gate", False, absent=False)
    only(hf, "attn_res_block_size", 0, absent=0)
    only(hf, "moe_router_activation_func", "sigmoid", absent="sigmoid")
    only(hf, "use_grouped_topk", True, absent=True)
    only(hf, "moe_layer_freq", 1, absent=1)
    num_layers = count(hf, "num_hidden_layers")
    by_type = {FULL: read_latents(hf, rope=None, interleaved=False), LINEAR: _delta(hf)}
    return {
        **read_common(hf, positions=_POSITIONS),
        "layers": tuple(by_type[name] for name in _types(hf, num_layers)),
        "experts": read_experts(hf, _EXPERTS, "num_shared_experts", **_FIXED),
        "dense": read_dense(hf, num_layers),
    }


def _write(config: Any) -> dict[str, Any]:
    """The fields that `_read` reads."""
    types = [LINEAR if isinstance(layer, KimiDelta) else FULL for layer in config.layers]
    numbers = {name: [n for n, found in enumerate(types, 1) if found == name] for name in (FULL, LINEAR)}
    by_type = dict(zip(types, config.layers, strict=True))
    linear = {"full_attn_layers": numbers[FULL], "kda_layers": numbers[LINEAR]}
    if LINEAR in by_type:
        delta = by_type[LINEAR]
        linear |= {
            "head_dim": delta.key_dim, "num_heads": delta.value_heads, "short_conv_kernel_size": delta.taps
        }  # fmt: skip
    return {
        **write_common(config, "KimiLinear", positions=_POSITIONS),
        **(write_latents(by_type[FULL], config.num_heads) if FULL in by_type else {}),
        **write_experts(config.experts, _EXPERTS, "num_shared_experts"),
        "mla_use_nope": True,
        "linear_attn_config": linear,
        "mlp_layer_types": ["dense" if n in config.dense else "sparse" for n in range(len(config.layers))],
    }


def _delta(hf: Mapping[str, Any]) -> KimiDelta:
    """The heads of the layers with a delta rule; keys and values have as many, of the same width."""
    own, of = _linear(hf), "linear_attn_config"
    heads = count(own, "num_heads", hf.get("linear_num_heads", 32), of=of)
    width = count(own, "head_dim", hf.get("linear_head_dim", 128), of=of)
    taps = count(own, "short_conv_kernel_size", hf.get("linear_conv_kernel_dim", 4), least=2, of=of)
    return KimiDelta(heads, heads, width, width, taps)


def _linear(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    own = hf.get("linear_attn_config") or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"linear_attn_config: got {own!r:.80}, wanted a set of fields")
    return own


def _types(hf: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The type of each layer: from `layer_types`, or from the numbers in `linear_attn_config`, which begin with 1."""
    own, types = _linear(hf), listed(hf, "layer_types")
    if types is None:
        numbers = {"full_attn_layers": FULL, "kda_layers": LINEAR}
        named = {n: kind for name, kind in numbers.items() for n in listed(own, name) or ()}
        if sorted(named, key=str) != sorted(range(1, num_layers + 1), key=str):
            wanted = f"each of 1 to {num_layers} in full_attn_layers or in kda_layers"
            raise ValueError(f"linear_attn_config: got {own!r:.200}, wanted {wanted}")
        types = [named[n] for n in range(1, num_layers + 1)]
    return layer_types(types, (FULL, LINEAR), num_layers)


KIMI_LINEAR = Family(_DEFAULTS, _read, _write, _select)
