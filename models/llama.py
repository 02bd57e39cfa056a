# SPDX-License-Identifier: Apache-2.0
"""Llama 3, Mistral, Qwen2 and Qwen3: grouped-query attention, perhaps with windows, and an MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .attention import FULL, SLIDING, LayerConfig, Mixer
from .family import Family, read_attention, read_common, read_layers, write_attention, write_common
from .fields import count, flag

_ALL = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_QWEN = {**_ALL, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS = {
    "llama": _ALL,
    "mistral": {**_ALL, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
_NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`."""
    kind = hf["model_type"]
    common = read_common(hf, biases=(False, True))
    bias = common["out_bias"] and kind in ("llama", "qwen3")
    return {
        **common,
        "layers": _layers(hf, kind, read_attention(hf, common["num_heads"])),
        "qkv_bias": bias or kind == "qwen2",
        "out_bias": bias,
        "mlp_bias": flag(hf, "mlp_bias") and kind == "llama",
        "qk_norm": kind == "qwen3",
    }


def _write(config: Any) -> dict[str, Any]:
    """The fields for `_read`."""
    kind = config.model_type
    window = max(layer.window or 0 for layer in config.layers) or None
    fields = {
        **write_common(config, _NAMES[kind]),
        **write_attention(config.layers[0]),
        "mlp_bias": config.mlp_bias,
    }
    if kind != "llama":
        fields["sliding_window"] = window
    if kind.startswith("qwen"):
        fields["use_sliding_window"] = window is not None
        fields["layer_types"] = [layer.layer_type for layer in config.layers]
    return fields


def _layers(hf: Mapping[str, Any], kind: str, full: LayerConfig) -> tuple[Mixer, ...]:
    """All layers. A layer with a window differs from `full` only by its window."""
    slides = {"llama": False, "mistral": True}.get(kind, flag(hf, "use_sliding_window"))
    if not slides or hf.get("sliding_window") is None:
        return read_layers(hf, {FULL: full}, lambda layer_index: FULL)
    sliding = dataclasses.replace(full, window=count(hf, "sliding_window"))
    if kind == "mistral":
        return read_layers(hf, {SLIDING: sliding}, lambda layer_index: SLIDING)
    num_full = count(hf, "max_window_layers", count(hf, "num_hidden_layers"), minimum=0)
    by_type = {FULL: full, SLIDING: sliding}
    return read_layers(hf, by_type, lambda layer_index: FULL if layer_index < num_full else SLIDING)


LLAMA = Family(_DEFAULTS, _read, _write)
