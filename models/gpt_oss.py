# SPDX-License-Identifier: Apache-2.0
"""GptOss: attention with learned sinks, in every other layer over a window, and experts whose gates are clamped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import kvjax

from .experts import highest
from .fields import count, layer_types, listed, number, only
from .language_config import LanguageConfig, LayerKind, read_common, write_common
from .language_model import LanguageModel, Layer, Mixing
from .rope import Angles, Rope, read_rope

KINDS = ("gpt_oss",)
FULL, SLIDING = TYPES = ("full_attention", "sliding_attention")
# The defaults of the family's own code, for fields that config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
    "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}  # fmt: skip
_ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


class SinkAttention(nnx.Module):
    """Grouped-query attention with biases, and a sink for each query head: a logit without a value."""

    def __init__(self, config: GptOssConfig, window: int | None, dtype, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, param_dtype=dtype, rngs=rngs)

        width, kv_heads, head_dim = config.hidden_size, config.kv_heads, config.head_dim
        self.kv_heads, self.head_dim, self.window = kv_heads, head_dim, window
        self.q_proj = linear(width, config.num_heads * head_dim)
        self.k_proj = linear(width, kv_heads * head_dim)
        self.v_proj = linear(width, kv_heads * head_dim)
        self.o_proj = linear(config.num_heads * head_dim, width)
        self.sinks = nnx.Param(jnp.zeros(config.num_heads, dtype))

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache."""
        return kvjax.LayerSpec(self.kv_heads, self.head_dim, self.window)

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """The mixed values [R, C, E] of x [R, C, E]; and the cache."""
        assert angles is not None
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(x).reshape(*x.shape[:2], -1, self.head_dim) for project in projections)
        sinks = self.sinks[...].astype(jnp.float32)
        y, cache = mixing.attend(cache, q, k, v, angles=angles, window=self.window, sinks=sinks)
        return self.o_proj(y.reshape(*x.shape[:2], -1)), cache


class ClampedExperts(nnx.Module):
    """The weights of all experts, as a checkpoint has them: gate and up projections alternate by columns."""

    def __init__(self, config: GptOssConfig, dtype, rngs: nnx.Rngs):
        self.alpha, self.limit = config.alpha, config.limit
        number, width, inner = config.num_experts, config.hidden_size, config.intermediate_size
        initial = nnx.initializers.lecun_normal(batch_axis=(0,))
        self.gate_up_proj = nnx.Param(initial(rngs.params(), (number, width, 2 * inner), dtype))
        self.gate_up_proj_bias = nnx.Param(jnp.zeros((number, 2 * inner), dtype))
        self.down_proj = nnx.Param(initial(rngs.params(), (number, inner, width), dtype))
        self.down_proj_bias = nnx.Param(jnp.zeros((number, width), dtype))

    def __call__(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """The weighted sum f32[R, C, E] of all experts' outputs, of x [R, C, E] and weights f32[R, C, N]."""

        def add(total, expert):
            into, into_bias, down, down_bias, weight = expert
            both = jnp.dot(x, into) + into_bias[None, None]
            gate, up = jnp.minimum(both[..., ::2], self.limit), jnp.clip(both[..., 1::2], -self.limit, self.limit)
            y = jnp.dot((up + 1) * gate * jax.nn.sigmoid(gate * self.alpha), down, preferred_element_type=jnp.float32)
            return total + weight[..., None] * (y + down_bias[None, None].astype(jnp.float32)), None

        arrays = self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias
        each = (*(array[...] for array in arrays), jnp.moveaxis(weights, -1, 0))
        total, _ = lax.scan(add, jnp.zeros(x.shape, jnp.float32), each)
        return total


class ClampedMixture(nnx.Module):
    """Experts, of which each token chooses some; their weights are a softmax over these."""

    def __init__(self, config: GptOssConfig, dtype, rngs: nnx.Rngs):
        self.per_token = config.per_token
        self.router = nnx.Linear(config.hidden_size, config.num_experts, param_dtype=dtype, rngs=rngs)
        self.experts = ClampedExperts(config, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[R, C, E] to [R, C, E]."""
        wide = jnp.float32
        logits = jnp.dot(x.astype(wide), self.router.kernel[...].astype(wide), precision=lax.Precision.HIGHEST)
        assert self.router.bias is not None
        logits = logits + self.router.bias[...].astype(wide)[None, None]
        weights = jax.nn.softmax(jnp.where(highest(logits, self.per_token), logits, -jnp.inf), axis=-1)
        return self.experts(x, weights).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(LanguageConfig):
    """GptOss.

    Attributes:
      kv_heads: K.
      head_dim: D.
      window: of the layers with a window, in tokens.
      types: full_attention or sliding_attention, of each layer.
      rope: of all layers.
      num_experts: N.
      per_token: how many a token chooses.
      alpha: factor on a gate inside its sigmoid.
      limit: bound of gates, and of what they are multiplied with.
    """

    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    kv_heads: int
    head_dim: int
    window: int
    types: tuple[str, ...]
    rope: Rope
    num_experts: int
    per_token: int
    alpha: float
    limit: float

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the fields of a config.json; a ValueError names the field, its value and what was wanted."""
        hf = {**DEFAULTS, **fields}
        only(hf, "model_type", *KINDS)
        if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
            hf["rope_parameters"] = _ROPE
        common, kv_heads = read_common(hf, bias=True), count(hf, "num_key_value_heads")
        experts, per_token = count(hf, "num_local_experts"), count(hf, "num_experts_per_tok")
        if common["num_heads"] % kv_heads:
            wanted = f"a divisor of num_attention_heads={common['num_heads']}"
            raise ValueError(f"num_key_value_heads: got {kv_heads}, wanted {wanted}")
        if count(hf, "head_dim") % 2:
            raise ValueError(f"head_dim: got {hf['head_dim']}, wanted an even number")
        if per_token > experts:
            raise ValueError(f"num_experts_per_tok: got {per_token}, wanted at most num_local_experts={experts}")
        return cls(
            **common,
            kv_heads=kv_heads,
            head_dim=count(hf, "head_dim"),
            window=count(hf, "sliding_window"),
            types=_types(hf, common["num_layers"]),
            rope=read_rope(hf).check(count(hf, "head_dim")),
            num_experts=experts,
            per_token=per_token,
            alpha=number(hf, "swiglu_alpha"),
            limit=number(hf, "swiglu_limit"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that `from_hf` reads back as this config."""
        return {
            **write_common(self, "GptOssForCausalLM"),
            "attention_bias": True,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "sliding_window": self.window,
            "layer_types": list(self.types),
            "rope_parameters": self.rope.to_hf(),
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.per_token,
            "swiglu_alpha": self.alpha,
            "swiglu_limit": self.limit,
        }

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(LayerKind(name, dense=False) for name in self.types)

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """The rope of all layers, and the width of a head."""
        return self.rope, self.head_dim


class GptOss(LanguageModel):
    """GptOss."""

    config: GptOssConfig

    def make_layer(self, number: int, dtype, rngs: nnx.Rngs) -> Layer:
        """The layer of this number."""
        config = self.config
        window = config.window if config.types[number] == SLIDING else None
        mixer = SinkAttention(config, window, dtype, rngs)
        return Layer(config, dtype, ("self_attn", mixer), ("mlp", ClampedMixture(config, dtype, rngs)))


def _types(hf: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The type of each layer."""
    types = listed(hf, "layer_types") or [TYPES[(layer + 1) % 2] for layer in range(num_layers)]
    return layer_types(types, TYPES, num_layers)
