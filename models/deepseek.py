# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3 (and Kimi K2): attention over latents, and experts.

A layer keeps a latent for each token. A matrix turns it into the keys of all heads, and another into the values.
Attention is absorbed: the keys' matrix is applied to the queries, which then attend to the latents themselves, and the
values' matrix is applied to the mixed latents. So neither prefill nor decode ever computes keys and values of single
heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from pallas_kernels.rotary import rotate

from .attention import Mixer, Mixing
from .experts import read_experts, write_experts
from .family import Family, check_fixed, read_common, write_common
from .fields import Table, count, flag, number, only, read_table, write_table
from .norm import RMSNorm
from .rope import Angles, Rope, read_rope

_V3: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_interleave": True,
}
EXPERTS: Table = {
    "moe_intermediate_size": ("width", count),
    "n_routed_experts": ("num_experts", count),
    "num_experts_per_tok": ("per_token", count),
    "n_group": ("num_groups", count),
    "topk_group": ("num_chosen_groups", count),
    "norm_topk_prob": ("normalised", flag),
    "routed_scaling_factor": ("factor", number),
}
_LATENTS: Table = {
    "q_lora_rank": ("query_rank", lambda hf, name: None if hf[name] is None else count(hf, name)),
    "kv_lora_rank": ("rank", count),
    "qk_rope_head_dim": ("rope_dim", count),
    "qk_nope_head_dim": ("key_dim", count),
    "v_head_dim": ("value_dim", count),
}


class LatentAttention(nnx.Module):
    """Attention of all heads over a latent for each token."""

    def __init__(self, config: Any, latents: LatentConfig, dtype, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, param_dtype=dtype, rngs=rngs)
        width = config.hidden_size
        heads = config.num_heads
        norm_config = dataclasses.replace(config, rms_norm_eps=1e-6)
        queries = heads * (latents.key_dim + latents.rope_dim)
        self.config = latents
        self.heads = heads
        if latents.query_rank is None:
            self.q_proj = linear(width, queries)
        else:
            self.q_a_proj = linear(width, latents.query_rank)
            self.q_a_layernorm = RMSNorm(latents.query_rank, norm_config, dtype)
            self.q_b_proj = linear(latents.query_rank, queries)
        self.kv_a_proj_with_mqa = linear(width, latents.rank + latents.rope_dim)
        self.kv_a_layernorm = RMSNorm(latents.rank, norm_config, dtype)
        self.kv_b_proj = linear(latents.rank, heads * (latents.key_dim + latents.value_dim))
        self.o_proj = linear(heads * latents.value_dim, width)

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """Mixes x [R, C, E]. Returns the mixed values [R, C, E] and the cache."""
        config = self.config
        kernel = self.kv_b_proj.kernel[...].reshape(config.rank, self.heads, -1)
        to_keys, to_values = jnp.split(kernel, (config.key_dim,), axis=-1)
        q, rotated = jnp.split(self._queries(x), (config.key_dim,), axis=-1)
        absorbed = jnp.einsum("rchk,lhk->rchl", q, to_keys)
        q = jnp.concatenate([absorbed, self._rotate(rotated, angles)], axis=-1)
        latents, shared = jnp.split(self.kv_a_proj_with_mqa(x)[:, :, None], (config.rank,), axis=-1)
        latents = jnp.concatenate([self.kv_a_layernorm(latents), self._rotate(shared, angles)], axis=-1)
        y, cache = mixing.attend_latents(cache, q, latents, config.rank, config.scale)
        y = jnp.einsum("rchl,lhv->rchv", y, to_values)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def _queries(self, x: jax.Array) -> jax.Array:
        """Queries [R, C, Q, key_dim + rope_dim] of x [R, C, E]."""
        q = self.q_proj(x) if self.config.query_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.reshape(*x.shape[:2], self.heads, -1)

    def _rotate(self, x: jax.Array, angles: Angles) -> jax.Array:
        """Rotates the part of keys or queries [R, C, heads, rope_dim] with a position."""
        if angles is None:
            return x
        if self.config.interleaved:  # reorders queries and keys alike, so their products stay the same
            x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
        return rotate(x, angles)


@dataclasses.dataclass(frozen=True)
class LatentConfig(Mixer):
    """Attention over latents.

    Attributes:
      query_rank: width between the two matrices of the queries; None gives them a single matrix.
      rank: width of a latent's first part, which becomes keys and values, and is the value in the cache.
      rope_dim: width of its second part, a rotated key shared by all heads.
      key_dim: width of a head's own keys, which are not rotated.
      value_dim: width of a head's values.
      rope: rotation of the shared key; None disables it.
      interleaved: whether the two dimensions of a rotated pair lie side by side.
    """

    query_rank: int | None
    rank: int
    rope_dim: int
    key_dim: int
    value_dim: int
    rope: Rope | None = None
    interleaved: bool = False
    module: ClassVar[type[Any]] = LatentAttention

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        factor = 1.0 if self.rope is None else self.rope.score_factor
        return (self.key_dim + self.rope_dim) ** -0.5 * factor

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """The rope and its width."""
        return None if self.rope is None else (self.rope, self.rope_dim)

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache."""
        return kvjax.LayerSpec.latent(self.rank + self.rope_dim, self.rank)


def read_latents(hf: Mapping[str, Any], rope: Rope | None, interleaved: bool) -> LatentConfig:
    """Reads the latents of a config.json, defaults included."""
    only(hf, "num_key_value_heads", hf.get("num_attention_heads"), absent=hf.get("num_attention_heads"))
    latents = LatentConfig(**read_table(hf, _LATENTS), rope=rope, interleaved=interleaved)
    if rope is not None and latents.rope_dim % 2:
        raise ValueError(f"qk_rope_head_dim: got {latents.rope_dim}, wanted an even number")
    return latents


def write_latents(latents: LatentConfig, num_heads: int) -> dict[str, Any]:
    """Writes the fields of a config.json for `read_latents`."""
    return {"num_key_value_heads": num_heads, **write_table(latents, _LATENTS)}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`."""
    check_fixed(hf, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, partial_rotary_factor=1.0)
    only(hf, "index_topk", None)  # belongs to an indexer, which chooses the tokens to attend to
    num_layers = count(hf, "num_hidden_layers")
    latents = read_latents(hf, read_rope(hf, ("default", "yarn")), flag(hf, "rope_interleave"))
    return {
        **read_common(hf),
        "layers": (latents,) * num_layers,
        "experts": read_experts(hf, EXPERTS, "n_shared_experts", corrected=True),
        "dense": tuple(range(min(num_layers, count(hf, "first_k_dense_replace", minimum=0)))),
    }


def _write(config: Any) -> dict[str, Any]:
    """The fields for `_read`."""
    latents = config.layers[0]
    return {
        **write_common(config, "DeepseekV3"),
        **write_latents(latents, config.num_heads),
        **write_experts(config.experts, EXPERTS, "n_shared_experts"),
        "rope_parameters": latents.rope.to_hf(),
        "rope_interleave": latents.interleaved,
        "first_k_dense_replace": len(config.dense),
    }


DEEPSEEK = Family({"deepseek_v3": _V3, "kimi_k2": _V3}, _read, _write)
