# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3 (and Kimi K2): attention over latents, and experts.

A layer keeps one latent a token, from which the keys and values of all heads follow by a matrix each. Attention is
absorbed: the keys' matrix is applied to the queries, which then meet the latents themselves, and the values' matrix to
the mixed latents. So keys and values of single heads are never made, and one product serves prefill and decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from pallas_kernels.rotary import rotate

from .experts import ExpertsConfig, MixtureModel
from .fields import count, flag, number, only
from .language_config import LanguageConfig, LayerKind, read_common, write_common
from .language_model import Mixing
from .norm import NormConfig, RMSNorm
from .rope import Angles, Rope, read_rope

KINDS = ("deepseek_v3", "kimi_k2")
# The defaults of the family's own code, for fields that config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "bos_token_id": 0,
    "eos_token_id": 1, "rope_interleave": True,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Attention over latents.

    Attributes:
      query_rank: width between the two matrices of the queries; None: they have one.
      rank: width of the part of a latent from which keys and values follow; all of it is values.
      rope_dim: width of the other part, a key that all heads share and that rope rotates.
      key_dim: width of a head's own keys, which are not rotated.
      value_dim: width of a head's values.
      rope: None: the shared key is not rotated either.
      interleaved: whether the pairs that rope rotates lie side by side.
    """

    query_rank: int | None
    rank: int
    rope_dim: int
    key_dim: int
    value_dim: int
    rope: Rope | None = None
    interleaved: bool = False

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        factor = 1.0 if self.rope is None else self.rope.score_factor
        return (self.key_dim + self.rope_dim) ** -0.5 * factor


def read_latents(hf: Mapping[str, Any], rope: Rope | None, interleaved: bool) -> LatentConfig:
    """The latents of a config.json with the family's defaults."""
    only(hf, "num_key_value_heads", hf.get("num_attention_heads"), absent=hf.get("num_attention_heads"))
    latents = LatentConfig(
        query_rank=None if hf["q_lora_rank"] is None else count(hf, "q_lora_rank"),
        rank=count(hf, "kv_lora_rank"),
        rope_dim=count(hf, "qk_rope_head_dim"),
        key_dim=count(hf, "qk_nope_head_dim"),
        value_dim=count(hf, "v_head_dim"),
        rope=rope,
        interleaved=interleaved,
    )
    if rope is not None and latents.rope_dim % 2:
        raise ValueError(f"qk_rope_head_dim: got {latents.rope_dim}, wanted an even number")
    return latents


def write_latents(latents: LatentConfig, num_heads: int) -> dict[str, Any]:
    """The fields of a config.json that `read_latents` reads."""
    return {
        "num_key_value_heads": num_heads,
        "q_lora_rank": latents.query_rank,
        "kv_lora_rank": latents.rank,
        "qk_rope_head_dim": latents.rope_dim,
        "qk_nope_head_dim": latents.key_dim,
        "v_head_dim": latents.value_dim,
    }


class LatentAttention(nnx.Module):
    """Attention of all heads over one latent a token."""

    def __init__(self, width: int, heads: int, config: LatentConfig, dtype, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.config, self.heads = config, heads
        queries, low = heads * (config.key_dim + config.rope_dim), NormConfig()
        if config.query_rank is None:
            self.q_proj = linear(width, queries)
        else:
            self.q_a_proj = linear(width, config.query_rank)
            self.q_a_layernorm = RMSNorm(config.query_rank, low, dtype)
            self.q_b_proj = linear(config.query_rank, queries)
        self.kv_a_proj_with_mqa = linear(width, config.rank + config.rope_dim)
        self.kv_a_layernorm = RMSNorm(config.rank, low, dtype)
        self.kv_b_proj = linear(config.rank, heads * (config.key_dim + config.value_dim))
        self.o_proj = linear(heads * config.value_dim, width)

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache."""
        return kvjax.LayerSpec.latent(self.config.rank + self.config.rope_dim, self.config.rank)

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """The mixed values [R, C, E] of x [R, C, E]; and the cache."""
        config = self.config
        to_keys, to_values = jnp.split(
            self.kv_b_proj.kernel[...].reshape(config.rank, self.heads, -1), (config.key_dim,), axis=-1
        )
        q, rotated = jnp.split(self._queries(x), (config.key_dim,), axis=-1)
        absorbed = jnp.einsum("rchk,lhk->rchl", q, to_keys)
        q = jnp.concatenate([absorbed, self._rotate(rotated, angles)], axis=-1)
        latents, shared = jnp.split(self.kv_a_proj_with_mqa(x)[:, :, None], (config.rank,), axis=-1)
        latents = jnp.concatenate([self.kv_a_layernorm(latents), self._rotate(shared, angles)], axis=-1)
        y, cache = mixing.attend_latents(cache, q, latents, config.rank, config.scale)
        y = jnp.einsum("rchl,lhv->rchv", y, to_values)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def _queries(self, x: jax.Array) -> jax.Array:
        """[R, C, Q, both parts of a key]."""
        q = self.q_proj(x) if self.config.query_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.reshape(*x.shape[:2], self.heads, -1)

    def _rotate(self, x: jax.Array, angles: Angles) -> jax.Array:
        """The part of keys or queries [R, C, heads, rope_dim] that has a position."""
        if angles is None:
            return x
        if self.config.interleaved:  # queries and keys are put into the same order, so that their products stay
            x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
        return rotate(x, angles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(LanguageConfig):
    """DeepSeek V3.

    Attributes:
      latents: of every layer.
      experts: of every layer but the first ones.
      num_dense: of these.
    """

    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    latents: LatentConfig
    experts: ExpertsConfig
    num_dense: int

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the fields of a config.json; a ValueError names the field, its value and what was wanted."""
        hf = {**DEFAULTS, **fields}
        only(hf, "model_type", *KINDS)
        only(hf, "index_topk", None)  # of an indexer, which chooses the tokens that are attended to
        only(hf, "scoring_func", "sigmoid", absent="sigmoid")
        only(hf, "topk_method", "noaux_tc", absent="noaux_tc")
        only(hf, "moe_layer_freq", 1, absent=1)
        only(hf, "partial_rotary_factor", 1.0, absent=1.0)
        experts = ExpertsConfig(
            num_experts=count(hf, "n_routed_experts"),
            per_token=count(hf, "num_experts_per_tok"),
            width=count(hf, "moe_intermediate_size"),
            shared_width=count(hf, "moe_intermediate_size") * count(hf, "n_shared_experts"),
            corrected=True,
            num_groups=count(hf, "n_group"),
            num_chosen_groups=count(hf, "topk_group"),
            normalised=flag(hf, "norm_topk_prob"),
            factor=number(hf, "routed_scaling_factor"),
        )
        return cls(
            **read_common(hf),
            latents=read_latents(hf, read_rope(hf, ("default", "yarn")), flag(hf, "rope_interleave")),
            experts=experts.check(),
            num_dense=count(hf, "first_k_dense_replace", least=0),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that `from_hf` reads back as this config."""
        assert self.latents.rope is not None
        experts = self.experts
        return {
            **write_common(self, "DeepseekV3ForCausalLM"),
            **write_latents(self.latents, self.num_heads),
            "rope_parameters": self.latents.rope.to_hf(),
            "rope_interleave": self.latents.interleaved,
            "first_k_dense_replace": self.num_dense,
            "moe_intermediate_size": experts.width,
            "n_routed_experts": experts.num_experts,
            "n_shared_experts": experts.shared_width // experts.width,
            "num_experts_per_tok": experts.per_token,
            "n_group": experts.num_groups,
            "topk_group": experts.num_chosen_groups,
            "norm_topk_prob": experts.normalised,
            "routed_scaling_factor": experts.factor,
        }

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(LayerKind("latents", number < self.num_dense) for number in range(self.num_layers))

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """The rope of all layers, and the width that it rotates."""
        assert self.latents.rope is not None
        return self.latents.rope, self.latents.rope_dim

    def predictor(self, name: str) -> str | None:
        """The joining matrix of a layer after the last one."""
        parts = name.split(".")
        is_after = parts[:2] == ["model", "layers"] and parts[2].isdecimal() and int(parts[2]) >= self.num_layers
        return f"model.layers.{parts[2]}.eh_proj.weight" if is_after else None


class DeepSeek(MixtureModel):
    """DeepSeek V3."""

    config: DeepSeekConfig

    def make_mixer(self, number: int, dtype, rngs: nnx.Rngs) -> tuple[str, nnx.Module]:
        """The mixer of this layer with its name."""
        config = self.config
        return "self_attn", LatentAttention(config.hidden_size, config.num_heads, config.latents, dtype, rngs)
