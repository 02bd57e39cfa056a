# SPDX-License-Identifier: Apache-2.0
"""A family of models, and the fields of config.json that all families share."""

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
    """Converts a config.json to a `ModelConfig` and back.

    Attributes:
      defaults: by model type, the values of absent fields, from the family's code in transformers.
      read: turns the fields, defaults included, into the arguments of a `ModelConfig`.
      write: turns a `ModelConfig` into the fields.
      select: picks the decoder's fields from a file's fields, and gives them their usual names.
    """

    defaults: Mapping[str, Mapping[str, Any]]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    select: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    def fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The decoder's fields in a file, defaults included."""
        selected = self.select(fields)
        return {**self.defaults[selected["model_type"]], **selected}


def read_common(
    hf: Mapping[str, Any],
    *,
    positions: str = _POSITIONS,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    biases: tuple[bool, ...] = (False,),
) -> dict[str, Any]:
    """Reads the arguments of a `ModelConfig` shared by all families.

    Args:
      hf: the fields, defaults included.
      positions: name of the field with the context length.
      activation: name of the field with the MLP's activation, and the family's activation.
      biases: the values allowed for `attention_bias`; the first is the default.
    """
    name, wanted = activation
    only(hf, "quantization_config", None)
    bias = only(hf, "attention_bias", *biases, absent=biases[0])
    values = read_table(hf, _COMMON)
    return {
        **values,
        "model_type": hf["model_type"],
        "activation": only(hf, name, wanted, absent=wanted),
        "qkv_bias": bias,
        "out_bias": bias,
        "max_positions": count(hf, positions),
        "bos_token_id": token(hf, "bos_token_id", values["vocab_size"]),
        "eos_token_ids": ids(hf, "eos_token_id", values["vocab_size"]),
    }


def write_common(
    config: Any, architecture: str, *, positions: str = _POSITIONS, activation: str = "hidden_act"
) -> dict[str, Any]:
    """Writes the fields of a config.json for `read_common`."""
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
    """Raises a ValueError unless each field is absent or has the family's value."""
    for name, value in wanted.items():
        only(hf, name, value, absent=value)


def read_layers[L](hf: Mapping[str, Any], by_type: Mapping[str, L], absent: Callable[[int], str]) -> tuple[L, ...]:
    """Picks each layer by its type in `layer_types`. If the config has no types, the type is `absent(layer_index)`."""
    num_layers = count(hf, "num_hidden_layers")
    types = listed(hf, "layer_types")
    types = [absent(layer_index) for layer_index in range(num_layers)] if types is None else types
    return tuple(by_type[name] for name in layer_types(types, by_type, num_layers))


def read_attention(hf: Mapping[str, Any], num_heads: int) -> LayerConfig:
    """Reads the attention of all layers, which have equal heads, the same rope and no window."""
    kv_heads = count(hf, "num_key_value_heads", num_heads)
    head_dim = count(hf, "head_dim", count(hf, "hidden_size") // num_heads)
    return LayerConfig(kv_heads, head_dim, rope=read_rope(hf)).check(num_heads)


def write_attention(layer: LayerConfig) -> dict[str, Any]:
    """Writes the fields of a config.json for `read_attention`."""
    return {**write_table(layer, HEADS), "rope_parameters": layer.rope.to_hf()}


def read_dense(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Reads the indices of the layers without experts.

    A config has either a type for each layer (`mlp_layer_types`), or three fields. The first `first_k_dense_replace`
    layers and the layers in `mlp_only_layers` have no experts. Of the others, every `decoder_sparse_step`-th layer has
    experts.
    """
    num_layers = count(hf, "num_hidden_layers")
    types = listed(hf, "mlp_layer_types")
    if types is not None:
        types = layer_types(types, ("dense", "sparse"), num_layers, "mlp_layer_types")
        return tuple(layer for layer, name in enumerate(types) if name == "dense")
    num_first = count(hf, "first_k_dense_replace", 0, minimum=0)
    sparse_step = count(hf, "decoder_sparse_step", 1)
    named = listed(hf, "mlp_only_layers") or []
    for index, layer in enumerate(named):
        if not isinstance(layer, int) or not 0 <= layer < num_layers:
            raise ValueError(f"mlp_only_layers[{index}]: got {layer!r:.80}, wanted a layer's number")
    return tuple(
        layer for layer in range(num_layers) if layer < num_first or layer in named or (layer + 1) % sparse_step
    )
