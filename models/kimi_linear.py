# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: three layers of Kimi delta attention to one of attention over latents without positions, and experts.

Kimi delta attention is the gated delta rule with a decay for each channel of the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax

from .deepseek import LatentAttention, LatentConfig, read_latents, write_latents
from .experts import ExpertsConfig, MixtureModel
from .fields import count, flag, layer_types, listed, number, only
from .language_config import LanguageConfig, LayerKind, read_common, write_common
from .language_model import Mixing
from .norm import NormConfig, RMSNorm
from .recurrence import Convolution, DeltaCell, DeltaConfig, DeltaInputs, softplus_decay
from .rope import Angles

KINDS = ("kimi_linear",)
FULL, LINEAR = TYPES = ("full_attention", "linear_attention")
POSITIONS = "model_max_length"  # the field that others call max_position_embeddings
# The defaults of the family's own code, for fields that config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_shared_experts": 1, "num_experts": 256,
    "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 8,
    "first_k_dense_replace": 1, "moe_renormalize": True, POSITIONS: 1048576, "rms_norm_eps": 1e-5,
    "bos_token_id": 163584, "eos_token_id": 163586,
}  # fmt: skip
# Names that other families have for some fields.
ALIASES = {
    "max_position_embeddings": POSITIONS, "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}  # fmt: skip


class KimiDeltaAttention(nnx.Module):
    """The gated delta rule with a decay for each channel of the keys, and a gate on its normalised outputs."""

    def __init__(self, config: KimiLinearConfig, dtype, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.delta = delta = config.delta
        width, low, (columns, _, _) = config.hidden_size, delta.key_dim, delta.parts
        self.q_proj, self.k_proj, self.v_proj = (linear(width, columns) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            Convolution(columns, delta.taps, dtype, rngs) for _ in range(3)
        )  # fmt: skip
        self.f_a_proj, self.f_b_proj = linear(width, low), linear(low, columns)
        self.A_log = nnx.Param(jnp.zeros((1, 1, delta.value_heads, 1), jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones(columns, jnp.float32))
        self.b_proj = linear(width, delta.value_heads)
        self.g_a_proj, self.g_b_proj = linear(width, low), linear(low, columns)
        self.o_norm = RMSNorm(delta.value_dim, NormConfig(config.rms_norm_eps, norm_in_float32=True), dtype)
        self.o_proj = linear(columns, width)

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache."""
        return self.delta.spec()

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(LanguageConfig):
    """Kimi Linear.

    Attributes:
      latents: of the layers with attention.
      delta: the heads of the layers with a delta rule.
      types: full_attention or linear_attention, of each layer.
      experts: of all layers but those in `dense`.
      dense: numbers of the layers with one MLP.
    """

    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    latents: LatentConfig
    delta: DeltaConfig
    types: tuple[str, ...]
    experts: ExpertsConfig
    dense: tuple[int, ...]

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the fields of a config.json; a ValueError names the field, its value and what was wanted."""
        only(fields, "model_type", *KINDS)
        hf = {**DEFAULTS, **{ALIASES.get(name, name): value for name, value in fields.items()}}
        only(hf, "mla_use_nope", True, absent=True)  # with positions no checkpoint has been released
        only(hf, "mla_use_output_gate", False, absent=False)
        only(hf, "attn_res_block_size", 0, absent=0)
        only(hf, "moe_router_activation_func", "sigmoid", absent="sigmoid")
        only(hf, "use_grouped_topk", True, absent=True)
        only(hf, "moe_layer_freq", 1, absent=1)
        common = read_common(hf, POSITIONS)
        experts = ExpertsConfig(
            num_experts=count(hf, "num_experts"),
            per_token=count(hf, "num_experts_per_token"),
            width=count(hf, "moe_intermediate_size"),
            shared_width=count(hf, "moe_intermediate_size") * count(hf, "num_shared_experts"),
            corrected=True,
            num_groups=count(hf, "num_expert_group"),
            num_chosen_groups=count(hf, "topk_group"),
            normalised=flag(hf, "moe_renormalize"),
            factor=number(hf, "routed_scaling_factor"),
        )
        return cls(
            **common,
            latents=read_latents(hf, rope=None, interleaved=False),
            delta=_delta(hf),
            types=_types(hf, common["num_layers"]),
            experts=experts.check(),
            dense=_dense(hf, common["num_layers"]),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that `from_hf` reads back as this config."""
        numbers = {name: [n for n, kind in enumerate(self.types, 1) if kind == name] for name in TYPES}
        delta, experts = self.delta, self.experts
        return {
            **write_common(self, "KimiLinearForCausalLM", POSITIONS),
            **write_latents(self.latents, self.num_heads),
            "mla_use_nope": True,
            "linear_attn_config": {
                "full_attn_layers": numbers[FULL],
                "kda_layers": numbers[LINEAR],
                "head_dim": delta.key_dim,
                "num_heads": delta.value_heads,
                "short_conv_kernel_size": delta.taps,
            },
            "mlp_layer_types": ["dense" if n in self.dense else "sparse" for n in range(self.num_layers)],
            "moe_intermediate_size": experts.width,
            "num_experts": experts.num_experts,
            "num_shared_experts": experts.shared_width // experts.width,
            "num_experts_per_token": experts.per_token,
            "num_expert_group": experts.num_groups,
            "topk_group": experts.num_chosen_groups,
            "moe_renormalize": experts.normalised,
            "routed_scaling_factor": experts.factor,
        }

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(LayerKind(name, number in self.dense) for number, name in enumerate(self.types))


class KimiLinear(MixtureModel):
    """Kimi Linear."""

    config: KimiLinearConfig

    mixture, expert_names = "block_sparse_moe", ("w1", "w3", "w2")

    def make_mixer(self, number: int, dtype, rngs: nnx.Rngs) -> tuple[str, nnx.Module]:
        """The mixer of this layer with its name."""
        config = self.config
        if config.layers[number].mixer == FULL:
            return "self_attn", LatentAttention(config.hidden_size, config.num_heads, config.latents, dtype, rngs)
        return "self_attn", KimiDeltaAttention(config, dtype, rngs)


def _delta(hf: Mapping[str, Any]) -> DeltaConfig:
    """The heads of the layers with a delta rule; keys and values have as many, of the same width."""
    own, of = _linear(hf), "linear_attn_config"
    heads = count(own, "num_heads", hf.get("linear_num_heads", 32), of=of)
    width = count(own, "head_dim", hf.get("linear_head_dim", 128), of=of)
    taps = count(own, "short_conv_kernel_size", hf.get("linear_conv_kernel_dim", 4), least=2, of=of)
    return DeltaConfig(heads, heads, width, width, taps)


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
    return layer_types(types, TYPES, num_layers)


def _dense(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The numbers of the layers without experts: from `mlp_layer_types`, or the first ones."""
    types = listed(hf, "mlp_layer_types")
    if types is None:
        return tuple(range(min(num_layers, count(hf, "first_k_dense_replace", least=0))))
    for index, name in enumerate(types):
        if name not in ("dense", "sparse"):
            raise ValueError(f"mlp_layer_types[{index}]: got {name!r:.80}, wanted 'dense' or 'sparse'")
    if len(types) != num_layers:
        raise ValueError(f"mlp_layer_types: got {len(types)} entries, wanted num_hidden_layers={num_layers}")
    return tuple(number for number, name in enumerate(types) if name == "dense")
