# SPDX-License-Identifier: Apache-2.0
"""The configuration of a decoder, from a Hugging Face config.json; fields it can't serve are refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import gemma_config
from .fields import count, either, flag, ids, listed, number, only, token
from .layer_config import LayerConfig
from .rope import Rope, read_rope

# The defaults of each family's own code, for fields that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}
_TYPES = ("full_attention", "sliding_attention")
KINDS = (*_DEFAULTS, *gemma_config.KINDS)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama or Gemma kind, as `decoder.Decoder` builds it.

    Attributes:
      model_type: llama, mistral, qwen2, qwen3, gemma3_text or gemma4_text.
      vocab_size: V.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_heads: Q, query heads of every layer.
      layers: one entry per layer.
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
      max_positions: context length that the model was made for.
      bos_token_id: first token of a text, if the model wants one.
      eos_token_ids: tokens that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[LayerConfig, ...]
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
    max_positions: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rotations(self) -> tuple[tuple[Rope, int], ...]:
        """The rope of each layer, and the width of a head."""
        return tuple((layer.rope, layer.head_dim) for layer in self.layers)

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
        kind = only(fields, "model_type", *KINDS)
        if kind in gemma_config.KINDS:
            return cls(**gemma_config.read(fields))
        hf = {**_DEFAULTS[kind], **fields}
        only(hf, "hidden_act", "silu", absent="silu")
        only(hf, "quantization_config", None)
        hidden_size, num_heads = count(hf, "hidden_size"), count(hf, "num_attention_heads")
        vocab_size = count(hf, "vocab_size")
        bias = flag(hf, "attention_bias") and kind in ("llama", "qwen3")
        return cls(
            model_type=kind,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=count(hf, "intermediate_size"),
            num_heads=num_heads,
            layers=_layers(hf, kind, hidden_size, num_heads),
            rms_norm_eps=number(hf, "rms_norm_eps", 1e-6),
            tie_word_embeddings=flag(hf, "tie_word_embeddings"),
            qkv_bias=bias or kind == "qwen2",
            out_bias=bias,
            mlp_bias=flag(hf, "mlp_bias") and kind == "llama",
            qk_norm=kind == "qwen3",
            max_positions=count(hf, "max_position_embeddings", 2048),
            bos_token_id=token(hf, "bos_token_id", vocab_size),
            eos_token_ids=ids(hf, "eos_token_id", vocab_size),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that `from_hf` reads back as this config."""
        if self.model_type in gemma_config.KINDS:
            return gemma_config.write(self)
        first = self.layers[0]
        names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        window = max((layer.window or 0 for layer in self.layers), default=0) or None
        fields = {
            "architectures": [f"{names[self.model_type]}ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": first.kv_heads,
            "head_dim": first.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": first.rope.to_hf(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.out_bias,
            "mlp_bias": self.mlp_bias,
            "max_position_embeddings": self.max_positions,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        if self.model_type != "llama":
            fields["sliding_window"] = window
        if self.model_type.startswith("qwen"):
            fields["use_sliding_window"] = window is not None
            fields["layer_types"] = [_TYPES[layer.window is not None] for layer in self.layers]
        return fields


def num_layers(fields: Mapping[str, Any]) -> int:
    """The number of layers that a config.json asks for, before anything is made of it; ValueErrors as for `from_hf`."""
    kind = only(fields, "model_type", *KINDS)
    text = gemma_config.text_fields(fields)[1] if kind in gemma_config.KINDS else fields
    return count(text, "num_hidden_layers")


def _layers(hf: Mapping[str, Any], kind: str, hidden_size: int, num_heads: int) -> tuple[LayerConfig, ...]:
    """One entry per layer, with its window."""
    kv_heads = count(hf, "num_key_value_heads", num_heads)
    layer = LayerConfig(kv_heads, count(hf, "head_dim", hidden_size // num_heads), rope=read_rope(hf)).check(num_heads)
    return tuple(dataclasses.replace(layer, window=window) for window in _windows(hf, kind))


def _windows(hf: Mapping[str, Any], kind: str) -> list[int | None]:
    """Attention window of each layer."""
    num_layers = count(hf, "num_hidden_layers")
    slides = {"llama": False, "mistral": True}.get(kind, flag(hf, "use_sliding_window"))
    window = count(hf, "sliding_window") if slides and hf.get("sliding_window") is not None else None
    first = 0 if kind == "mistral" else count(hf, "max_window_layers", num_layers, least=0)
    types = listed(hf, "layer_types") or [_TYPES[window is not None and n >= first] for n in range(num_layers)]
    if len(types) != num_layers:
        raise ValueError(f"layer_types: got {len(types)} entries, wanted num_hidden_layers={num_layers}")
    wanted = _TYPES[:1] if window is None else _TYPES[1:] if kind == "mistral" else _TYPES
    for index, name in enumerate(types):
        if name not in wanted:
            raise ValueError(
                f"layer_types[{index}]: got {name!r:.80}, wanted {either(wanted)} (sliding_window={window})"
            )
    return [window if name == _TYPES[True] else None for name in types]
