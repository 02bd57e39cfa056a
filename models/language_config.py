# SPDX-License-Identifier: Apache-2.0
"""The fields that all configurations of a `LanguageModel` have, from a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

from .fields import count, flag, ids, number, only, token
from .norm import NormConfig
from .rope import Rope


class LayerKind(NamedTuple):
    """The modules of a layer; layers of equal kinds can be scanned (`scan.py`).

    Attributes:
      mixer: what mixes tokens; each family has its own names.
      dense: whether the layer has one MLP instead of experts.
      reuses: as in `LayerConfig`: every layer has its own part of the cache.
    """

    mixer: str
    dense: bool
    reuses: None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """The fields that all these families have.

    Attributes:
      model_type: of the family.
      vocab_size: V.
      hidden_size: width of the residual stream.
      intermediate_size: inner width of an MLP without experts.
      num_layers: of the model.
      num_heads: Q, query heads of every attention layer.
      rms_norm_eps: added to the mean square in the norms of the stream.
      tie_word_embeddings: whether the embedding is the output matrix too.
      max_positions: context length that the model was made for.
      bos_token_id: first token of a text, if the model wants one.
      eos_token_ids: tokens that end a text.
      defaults: of the family's own code, for fields that config.json leaves out.
    """

    defaults: ClassVar[Mapping[str, Any]]
    logit_soft_cap: ClassVar[None] = None  # a field of `ModelConfig`; no family here has one
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the fields of a config.json; a ValueError names the field, its value and what was wanted."""
        raise NotImplementedError

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that `from_hf` reads back as this config."""
        raise NotImplementedError

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        raise NotImplementedError

    @property
    def norm(self) -> NormConfig:
        """The norms of the stream."""
        return NormConfig(self.rms_norm_eps)

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """The rope of all layers, and the width of a head; None: there is none."""
        return None

    @property
    def rotations(self) -> tuple[tuple[Rope, int] | None, ...]:
        """The rotation of each layer."""
        return (self.rotation,) * self.num_layers

    def predictor(self, name: str) -> str | None:
        """The matrix [E, 2 E] that joins stream and embedding in the layers of a tensor; None: they have none.

        Such layers predict a token further on. A checkpoint has them after the model's, and the model leaves them out.
        """
        return None


def read_common(
    hf: Mapping[str, Any], positions: str = "max_position_embeddings", *, bias: bool = False
) -> dict[str, Any]:
    """The arguments of a `LanguageConfig`, from a config.json with the family's defaults.

    Args:
      hf: the fields.
      positions: name of the field with the context length.
      bias: whether the family's attention has biases.
    """
    only(hf, "hidden_act", "silu", absent="silu")
    only(hf, "attention_bias", bias, absent=bias)
    only(hf, "quantization_config", None)
    vocab_size = count(hf, "vocab_size")
    return {
        "model_type": hf["model_type"],
        "vocab_size": vocab_size,
        "hidden_size": count(hf, "hidden_size"),
        "intermediate_size": count(hf, "intermediate_size"),
        "num_layers": count(hf, "num_hidden_layers"),
        "num_heads": count(hf, "num_attention_heads"),
        "rms_norm_eps": number(hf, "rms_norm_eps"),
        "tie_word_embeddings": flag(hf, "tie_word_embeddings"),
        "max_positions": count(hf, positions),
        "bos_token_id": token(hf, "bos_token_id", vocab_size),
        "eos_token_ids": ids(hf, "eos_token_id", vocab_size),
    }


def write_common(
    config: LanguageConfig, architecture: str, positions: str = "max_position_embeddings"
) -> dict[str, Any]:
    """The fields of a config.json that `read_common` reads."""
    return {
        "architectures": [architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        positions: config.max_positions,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
