# SPDX-License-Identifier: Apache-2.0
"""The families of models: which classes serve the `model_type` of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import config, deepseek, gpt_oss, kimi_linear, qwen3_next
from .config import ModelConfig
from .decoder import Decoder
from .deepseek import DeepSeek, DeepSeekConfig
from .fields import count, only
from .gpt_oss import GptOss, GptOssConfig
from .kimi_linear import KimiLinear, KimiLinearConfig
from .language_config import LanguageConfig
from .language_model import LanguageModel
from .qwen3_next import Qwen3Next, Qwen3NextConfig

type AnyConfig = ModelConfig | LanguageConfig
type AnyModel = Decoder | LanguageModel
# Families with layers of several kinds; all others are served by `Decoder`.
_OWN: dict[str, tuple[type[LanguageConfig], type[LanguageModel]]] = {
    **dict.fromkeys(deepseek.KINDS, (DeepSeekConfig, DeepSeek)),
    **dict.fromkeys(qwen3_next.KINDS, (Qwen3NextConfig, Qwen3Next)),
    **dict.fromkeys(kimi_linear.KINDS, (KimiLinearConfig, KimiLinear)),
    **dict.fromkeys(gpt_oss.KINDS, (GptOssConfig, GptOss)),
}
# Relatives that cannot be served, and why.
_REFUSED = {"deepseek_v32": "its indexer chooses the tokens that are attended to"}


def read_config(fields: Mapping[str, Any]) -> AnyConfig:
    """The config of a config.json's fields; a ValueError names the field, its value and what was wanted."""
    kind = _kind(fields)
    return _OWN[kind][0].from_hf(fields) if kind in _OWN else ModelConfig.from_hf(fields)


def num_layers(fields: Mapping[str, Any]) -> int:
    """The number of layers that a config.json asks for, before anything is made of it; ValueErrors as above."""
    kind = _kind(fields)
    if kind not in _OWN:
        return config.num_layers(fields)
    return count({**_OWN[kind][0].defaults, **fields}, "num_hidden_layers")


def model_class(config: AnyConfig) -> type[Any]:
    """The class of the models with this config."""
    return _OWN[config.model_type][1] if config.model_type in _OWN else Decoder


def _kind(fields: Mapping[str, Any]) -> str:
    kind = fields.get("model_type")
    if kind in _REFUSED:
        raise ValueError(f"model_type: got {kind!r}, which cannot be served: {_REFUSED[kind]}")
    return only(fields, "model_type", *config.KINDS, *_OWN)
