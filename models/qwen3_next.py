# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: three layers of a gated delta rule to one of gated attention, and experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax

from .experts import ExpertsConfig, MixtureModel
from .fields import count, flag, layer_types, listed, only
from .language_config import LanguageConfig, LayerKind, read_common, write_common
from .language_model import Mixing
from .norm import NormConfig, RMSNorm
from .recurrence import Convolution, DeltaCell, DeltaConfig, DeltaInputs, softplus_decay
from .rope import Angles, Rope, read_rope

KINDS = ("qwen3_next",)
FULL, LINEAR = TYPES = ("full_attention", "linear_attention")
# The defaults of the family's own code, for fields that config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
}  # fmt: skip


class GatedAttention(nnx.Module):
    """Grouped-query attention whose output is gated; only the first dimensions of a head have a position."""

    def __init__(self, config: Qwen3NextConfig, dtype, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, param_dtype=dtype, rngs=rngs)

        width, kv_heads, head_dim = config.hidden_size, config.kv_heads, config.head_dim
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.q_proj = linear(width, config.num_heads * head_dim * 2)  # each head's query, then its gate
        self.k_proj = linear(width, kv_heads * head_dim)
        self.v_proj = linear(width, kv_heads * head_dim)
        self.o_proj = linear(config.num_heads * head_dim, width)
        self.q_norm = RMSNorm(head_dim, config.norm, dtype)
        self.k_norm = RMSNorm(head_dim, config.norm, dtype)

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache."""
        return kvjax.LayerSpec(self.kv_heads, self.head_dim)

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """The mixed values [R, C, E] of x [R, C, E]; and the cache."""
        q, gate = jnp.split(self._of_heads(self.q_proj(x), 2 * self.head_dim), 2, axis=-1)
        k, v = (self._of_heads(project(x), self.head_dim) for project in (self.k_proj, self.v_proj))
        y, cache = mixing.attend(cache, self.q_norm(q), self.k_norm(k), v, angles=angles)
        return self.o_proj((y * jax.nn.sigmoid(gate)).reshape(*x.shape[:2], -1)), cache

    def _of_heads(self, x: jax.Array, width: int) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, width)


class GatedDeltaNet(nnx.Module):
    """The gated delta rule with a decay for each value head, and a gate on its normalised outputs."""

    def __init__(self, config: Qwen3NextConfig, dtype, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.delta = delta = config.delta
        width, (queries, _, values) = config.hidden_size, delta.parts
        self.in_proj_qkvz = linear(width, 2 * queries + 2 * values)
        self.in_proj_ba = linear(width, 2 * delta.value_heads)
        self.conv1d = Convolution(sum(delta.parts), delta.taps, dtype, rngs)
        self.A_log = nnx.Param(jnp.zeros(delta.value_heads, jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones(delta.value_heads, jnp.float32))
        self.norm = RMSNorm(delta.value_dim, NormConfig(config.rms_norm_eps, norm_in_float32=True), dtype)
        self.out_proj = linear(values, width)

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache."""
        return self.delta.spec()

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(LanguageConfig):
    """Qwen3-Next.

    Attributes:
      kv_heads: K, of the layers with attention.
      head_dim: D, of these.
      rope: of all layers; it rotates a share of a head's dimensions.
      delta: the heads of the layers with a delta rule.
      types: full_attention or linear_attention, of each layer.
      experts: of all layers but those in `dense`.
      dense: numbers of the layers with one MLP.
    """

    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    kv_heads: int
    head_dim: int
    rope: Rope
    delta: DeltaConfig
    types: tuple[str, ...]
    experts: ExpertsConfig
    dense: tuple[int, ...]

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the fields of a config.json; a ValueError names the field, its value and what was wanted."""
        hf = {**DEFAULTS, **fields}
        only(hf, "model_type", *KINDS)
        common = read_common(hf)
        kv_heads, head_dim = count(hf, "num_key_value_heads"), count(hf, "head_dim")
        if common["num_heads"] % kv_heads:
            wanted = f"a divisor of num_attention_heads={common['num_heads']}"
            raise ValueError(f"num_key_value_heads: got {kv_heads}, wanted {wanted}")
        experts = ExpertsConfig(
            num_experts=count(hf, "num_experts"),
            per_token=count(hf, "num_experts_per_tok"),
            width=count(hf, "moe_intermediate_size"),
            shared_width=count(hf, "shared_expert_intermediate_size"),
            shared_gate=True,
            softmax=True,
            normalised=flag(hf, "norm_topk_prob"),
        )
        return cls(
            **common,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=read_rope(hf).check(head_dim),
            delta=_delta(hf),
            types=_types(hf, common["num_layers"]),
            experts=experts.check(),
            dense=_dense(hf, common["num_layers"]),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that `from_hf` reads back as this config."""
        delta, experts = self.delta, self.experts
        return {
            **write_common(self, "Qwen3NextForCausalLM"),
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": self.rope.to_hf(),
            "layer_types": list(self.types),
            "linear_conv_kernel_dim": delta.taps,
            "linear_key_head_dim": delta.key_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_num_key_heads": delta.key_heads,
            "linear_num_value_heads": delta.value_heads,
            "mlp_only_layers": list(self.dense),
            "decoder_sparse_step": 1,
            "moe_intermediate_size": experts.width,
            "shared_expert_intermediate_size": experts.shared_width,
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.per_token,
            "norm_topk_prob": experts.normalised,
        }

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(LayerKind(name, number in self.dense) for number, name in enumerate(self.types))

    @property
    def norm(self) -> NormConfig:
        """The norms of the stream, and of queries and keys."""
        return NormConfig(self.rms_norm_eps, norm_offset=1.0, norm_in_float32=True)

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """The rope of all layers, and the width of a head."""
        return self.rope, self.head_dim

    def predictor(self, name: str) -> str | None:
        """The joining matrix of the layers that have a name of their own."""
        return "mtp.fc.weight" if name.startswith("mtp.") else None


class Qwen3Next(MixtureModel):
    """Qwen3-Next."""

    config: Qwen3NextConfig

    def make_mixer(self, number: int, dtype, rngs: nnx.Rngs) -> tuple[str, nnx.Module]:
        """The mixer of this layer with its name."""
        if self.config.layers[number].mixer == FULL:
            return "self_attn", GatedAttention(self.config, dtype, rngs)
        return "linear_attn", GatedDeltaNet(self.config, dtype, rngs)


def _delta(hf: Mapping[str, Any]) -> DeltaConfig:
    delta = DeltaConfig(
        key_heads=count(hf, "linear_num_key_heads"),
        value_heads=count(hf, "linear_num_value_heads"),
        key_dim=count(hf, "linear_key_head_dim"),
        value_dim=count(hf, "linear_value_head_dim"),
        taps=count(hf, "linear_conv_kernel_dim", least=2),
    )
    if delta.value_heads % delta.key_heads:
        wanted = f"a multiple of linear_num_key_heads={delta.key_heads}"
        raise ValueError(f"linear_num_value_heads: got {delta.value_heads}, wanted {wanted}")
    return delta


def _types(hf: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The type of each layer."""
    every = count(hf, "full_attention_interval", 4)
    types = listed(hf, "layer_types") or [TYPES[(number + 1) % every > 0] for number in range(num_layers)]
    return layer_types(types, TYPES, num_layers)


def _dense(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The numbers of the layers without experts."""
    every, named = count(hf, "decoder_sparse_step", 1), listed(hf, "mlp_only_layers") or []
    for index, layer in enumerate(named):
        if not isinstance(layer, int) or not 0 <= layer < num_layers:
            raise ValueError(f"mlp_only_layers[{index}]: got {layer!r:.80}, wanted a layer's number")
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % every)
