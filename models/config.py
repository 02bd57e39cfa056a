# SPDX-License-Identifier: Apache-2.0
"""The configuration of a decoder, from a Hugging Face config.json; fields it can't serve are refused by name."""

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
# Relatives that cannot be served, and why.
_REFUSED = {"deepseek_v32": "its indexer chooses the tokens that are attended to"}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder, as `decoder.Decoder` builds it.

    Attributes:
      model_type: of Hugging Face, such as llama.
      vocab_size: V.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_heads: Q, query heads of every layer.
      layers: one entry per layer: a `LayerConfig`, or another mixer of the family's own.
      rms_norm_eps: added to the mean square in every norm.
      tie_word_embeddings: whether the embedding is the output matrix too.
      qkv_bias, out_bias, mlp_bias: which projections have a bias.
      qk_norm: whether queries and keys are normalised per head.
      value_norm: whether values are normalised too, without weights.
      norm_offset: added to the weights of every norm.
      norm_in_float32: whether a norm's weights are applied before the cast back to the stream's dtype.
      post_norms: whether the outputs of attention and MLP are normalised before they are added to the stream.
      activation: of the MLP's gate: silu or gelu_pytorch_tanh.
      attention_scale: factor on the scores; None: 1 / sqrt(D).
      embed_scale: factor on the embeddings, rounded to their dtype.
      logit_soft_cap: c makes every logit c * tanh(logit / c).
      layer_scalar: whether each layer's output is multiplied by a weight.
      double_wide_mlp: whether layers that reuse another layer's K/V have an MLP of twice the width.
      per_layer_width: width of each layer's own embeddings, which are added after its MLP; 0: there are none.
      per_layer_vocab: rows of the table of these embeddings.
      output_gate: whether a gate scales the output of attention.
      sinks: whether each query head has a sink, a logit without a value.
      experts: of layers that have them in place of an MLP; None: no layer has.
      dense: numbers of the layers that have an MLP nevertheless.
      max_positions: context length that the model was made for.
      bos_token_id: first token of a text, if the model wants one.
      eos_token_ids: tokens that end a text.
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
        """The rope of each layer, and the width of the heads that it rotates; None: a layer has none."""
        return tuple(layer.rotation for layer in self.layers)

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Reads the fields of a config.json.

        Args:
          fields: the parsed file, as any transformers version from 4.37 to 5 writes it.

        Returns:
          The config.

        Raises:
          ValueError: naming the field, its value and what was wanted.
        """
        family = _family(fields)
        return cls(**family.read(family.fields(fields)))

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that `from_hf` reads back as this config."""
        return _OF_KIND[self.model_type].write(self)


def num_layers(fields: Mapping[str, Any]) -> int:
    """The number of layers that a config.json asks for, before anything is made of it; ValueErrors as for `from_hf`."""
    return count(_family(fields).fields(fields), "num_hidden_layers")


def _family(fields: Mapping[str, Any]) -> Family:
    """The family that a config.json is of."""
    kind = fields.get("model_type")
    if kind in _REFUSED:
        raise ValueError(f"model_type: got {kind!r}, which cannot be served: {_REFUSED[kind]}")
    return _OF_KIND[only(fields, "model_type", *_OF_KIND)]
