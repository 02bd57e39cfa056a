# SPDX-License-Identifier: Apache-2.0
"""The configuration of a decoder, from a Hugging Face config.json. An error names unsupported fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .attention import LayerConfig
from .deepseek import DEEPSEEK
from .experts import ExpertsConfig
from .family import Family
from .fields import count, only
from .gemma import GEMMA
from .gpt_oss import GPT_OSS
from .kimi_linear import KIMI_LINEAR
from .llama import LLAMA
from .qwen3_next import QWEN3_NEXT
from .rope import Rope

_FAMILIES = (LLAMA, GEMMA, DEEPSEEK, QWEN3_NEXT, KIMI_LINEAR, GPT_OSS)
_OF_KIND: dict[str, Family] = {kind: family for family in _FAMILIES for kind in family.defaults}
# Related model types without support, and the reasons.
_REFUSED = {"deepseek_v32": "its indexer chooses the tokens that are attended to"}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The configuration of a `decoder.Decoder`.

    Attributes:
      model_type: the type in Hugging Face's config.json, such as llama.
      vocab_size: V.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_heads: Q, query heads of every layer.
      layers: an entry for each layer: a `LayerConfig`, or another mixer of the family.
      rms_norm_eps: addend to the mean square in every norm.
      tie_word_embeddings: whether the embedding is also the output matrix.
      qkv_bias, out_bias, mlp_bias: whether the projections have a bias.
      qk_norm: whether queries and keys are normalised per head.
      value_norm: whether values are normalised too, without weights.
      norm_offset: addend to the weights of every norm.
      norm_in_float32: whether a norm's weights are applied before the cast back to the stream's dtype.
      post_norms: whether the outputs of attention and MLP are normalised before they are added to the stream.
      activation: activation of the MLP's gate: silu or gelu_pytorch_tanh.
      attention_scale: factor on the scores; None defaults to 1 / sqrt(D).
      embed_scale: factor on the embeddings, rounded to their dtype.
      logit_soft_cap: c turns every logit into c * tanh(logit / c); None disables the cap.
      layer_scalar: whether each layer's output is multiplied by a weight.
      double_wide_mlp: whether layers with reused K/V have an MLP of twice the width.
      per_layer_width: width of each layer's own embeddings, which are added after its MLP; 0 disables them.
      per_layer_vocab: rows in the table of these embeddings.
      output_gate: whether a gate scales the output of attention.
      sinks: whether each query head has a sink, a logit without a value.
      experts: experts in place of the MLP; None gives every layer an MLP.
      dense: indices of layers with an MLP in a model with experts.
      max_positions: context length of the model's training.
      bos_token_id: first token of a text, or None.
      eos_token_ids: tokens to end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[LayerConfig | Any, ...]
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    norm_offset: float = 0.0
    norm_in_float32: bool = False
    post_norms: bool = False
    activation: str = "silu"
    attention_scale: float | None = None
    embed_scale: float = 1.0
    logit_soft_cap: float | None = None
    layer_scalar: bool = False
    double_wide_mlp: bool = False
    per_layer_width: int = 0
    per_layer_vocab: int = 0
    output_gate: bool = False
    sinks: bool = False
    experts: ExpertsConfig | None = None
    dense: tuple[int, ...] = ()
    max_positions: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rotations(self) -> tuple[tuple[Rope, int] | None, ...]:
        """The rope of each layer, and the width of the heads it rotates, or None for a layer without a rope."""
        return tuple(layer.rotation for layer in self.layers)

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Reads the fields of a config.json.

        Args:
          fields: the parsed file, from any transformers version from 4.37 to 5.

        Returns:
          The config.

        Raises:
          ValueError: the message has the field, its value and the wanted value.
        """
        family = _family(fields)
        return cls(**family.read(family.fields(fields)))

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json, which `from_hf` reads back as this config."""
        return _OF_KIND[self.model_type].write(self)


def num_layers(fields: Mapping[str, Any]) -> int:
    """The number of layers in a config.json. It raises the ValueErrors of `from_hf` only for this field."""
    return count(_family(fields).fields(fields), "num_hidden_layers")


def _family(fields: Mapping[str, Any]) -> Family:
    """The family of a config.json."""
    kind = fields.get("model_type")
    if kind in _REFUSED:
        raise ValueError(f"model_type: got {kind!r}, which cannot be served: {_REFUSED[kind]}")
    return _OF_KIND[only(fields, "model_type", *_OF_KIND)]
