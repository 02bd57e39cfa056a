# SPDX-License-Identifier: Apache-2.0
"""A family of models, and the fields of config.json that all families have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .attention import LayerConfig
from .fields import Table, count, flag, ids, layer_types, listed, number, only, read_table, token, write_table
from .rope import read_rope

_COMMON: Table = {
    "vocab_size": ("vocab_size", count),
    "hidden_size": ("hidden_size", count),
    "intermediate_size": ("intermediate_size", count),
    "num_attention_heads": ("num_heads", count),
    "rms_norm_eps": ("rms_norm_eps", number),
    "tie_word_embeddings": ("tie_word_embeddings", flag),
}
HEADS: Table = {"num_key_value_heads": ("kv_heads", count), "head_dim": ("head_dim", count)}
_POSITIONS = "max_position_embeddings"


class Family(NamedTuple):
    """The way from a config.json to a `ModelConfig` and back.

    Attributes:
      defaults: by model type, those of the family's own code for fields that the file leaves out.
      read: from the fields, defaults included, to the arguments of a `ModelConfig`.
      write: from a `ModelConfig` to the fields.
      select: from a file's fields to those of the decoder, by their usual names.
    """

    defaults: Mapping[str, Mapping[str, Any]]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    select: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    def fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The decoder's fields of a file, defaults included."""
        selected = self.select(fields)
        return {**self.defaults[selected["model_type"]], **selected}


def read_common(
    hf: Mapping[str, Any],
    *,
    positions: str = _POSITIONS,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    biases: tuple[bool, ...] = (False,),
) -> dict[str, Any]:
    """The arguments of a `ModelConfig` that all families have.

    Args:
      hf: the fields, defaults included.
      positions: name of the field with the context length.
      activation: name of the field with the MLP's activation, and the activation that the family has.
      biases: whether attention may have biases; the first is the default.
    """
    name, wanted = activation
    only(hf, "quantization_config", None)
    bias = only(hf, "attention_bias", *biases, absent=biases[0])
    found = read_table(hf, _COMMON)
    return {
        **found,
        "model_type": hf["model_type"],
        "activation": only(hf, name, wanted, absent=wanted),
        "qkv_bias": bias,
        "out_bias": bias,
        "max_positions": count(hf, positions),
        "bos_token_id": token(hf, "bos_token_id", found["vocab_size"]),
        "eos_token_ids": ids(hf, "eos_token_id", found["vocab_size"]),
    }


def write_common(
    config: Any, architecture: str, *, positions: str = _POSITIONS, activation: str = "hidden_act"
) -> dict[str, Any]:
    """The fields of a config.json that `read_common` reads."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": config.model_type,
        **write_table(config, _COMMON),
        "num_hidden_layers": len(config.layers),
        activation: config.activation,
        "attention_bias": config.out_bias,
        positions: config.max_positions,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }


def check_fixed(hf: Mapping[str, Any], **wanted: Any) -> None:
    """ValueError unless fields have the one value that the family has, or none."""
    for name, value in wanted.items():
        only(hf, name, value, absent=value)


def read_layers[L](hf: Mapping[str, Any], by_type: Mapping[str, L], absent: Callable[[int], str]) -> tuple[L, ...]:
    """The layers by the types in `layer_types`; where the config is silent, by `absent` of their numbers."""
    num_layers, types = count(hf, "num_hidden_layers"), listed(hf, "layer_types")
    types = [absent(number) for number in range(num_layers)] if types is None else types
    return tuple(by_type[name] for name in layer_types(types, by_type, num_layers))


def read_attention(hf: Mapping[str, Any], num_heads: int) -> LayerConfig:
    """The layers with attention, where all have equal heads and one rope; without a window."""
    heads = count(hf, "num_key_value_heads", num_heads), count(hf, "head_dim", count(hf, "hidden_size") // num_heads)
    return LayerConfig(*heads, rope=read_rope(hf)).check(num_heads)


def write_attention(layer: LayerConfig) -> dict[str, Any]:
    """The fields of a config.json that `read_attention` reads."""
    return {**write_table(layer, HEADS), "rope_parameters": layer.rope.to_hf()}


def read_dense(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of the layers without experts: by type, the first ones, by number, or all but some at equal steps."""
    num_layers, types = count(hf, "num_hidden_layers"), listed(hf, "mlp_layer_types")
    if types is not None:
        types = layer_types(types, ("dense", "sparse"), num_layers, "mlp_layer_types")
        return tuple(number for number, name in enumerate(types) if name == "dense")
    first, every = count(hf, "first_k_dense_replace", 0, least=0), count(hf, "decoder_sparse_step", 1)
    named = listed(hf, "mlp_only_layers") or []
    for index, layer in enumerate(named):
        if not isinstance(layer, int) or not 0 <= layer < num_layers:
            raise ValueError(f"mlp_only_layers[{index}]: got {layer!r:.80}, wanted a layer's number")
    return tuple(layer for layer in range(num_layers) if layer < first or layer in named or (layer + 1) % every)
