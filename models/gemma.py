# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and Gemma 4: layers with and without windows. In Gemma 4 some layers reuse the K/V of other layers.

A file with towers for images and sound (`gemma3`, `gemma4`) has the decoder's fields under `text_config`, and only
these fields are read. Gemma 3's `attn_logit_softcapping` has no effect: transformers has the field but never caps the
scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .attention import FULL, SLIDING, LayerConfig
from .family import HEADS, Family, check_fixed, read_common, read_layers, write_common
from .fields import count, flag, number, only, read_table, write_table
from .rope import Rope, read_rope

_BOTH = {
    "intermediate_size": 9216,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_GEMMA3 = {**_BOTH, "vocab_size": 262208, "num_hidden_layers": 26, "sliding_window": 4096}
_GEMMA4 = {
    **_BOTH,
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
_DEFAULTS: dict[str, dict[str, Any]] = {"gemma3_text": _GEMMA3, "gemma4_text": _GEMMA4}
_WITH_TOWERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
_ROPES = ("default", "linear", "llama3", "proportional")  # kinds
_GEMMA4_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
# Fields that have no meaning in Gemma 3.
_OF_GEMMA4 = (
    "attention_k_eq_v",
    "enable_moe_block",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "per_layer_config",
    "use_double_wide_mlp",
)
_ACTIVATION = "hidden_activation"
_CAP = "final_logit_softcapping"


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`."""
    common = read_common(hf, activation=(_ACTIVATION, "gelu_pytorch_tanh"), biases=(False, True))
    if hf["model_type"] == "gemma3_text":
        hf = {name: value for name, value in hf.items() if name not in _OF_GEMMA4}
        check_fixed(hf, use_bidirectional_attention=False)
        options = {"attention_scale": count(hf, "query_pre_attn_scalar", 256) ** -0.5, "norm_offset": 1.0}
    else:
        only(hf, "use_bidirectional_attention", None, "vision")  # between the tokens of one image
        options = {"attention_scale": 1.0, "value_norm": True, "layer_scalar": True}
    check_fixed(hf, partial_rotary_factor=1.0, enable_moe_block=False)
    width = count(hf, "hidden_size_per_layer_input", 0, minimum=0)
    return {
        **common,
        **options,
        "layers": _layers(hf, common["num_heads"]),
        "qk_norm": True,
        "norm_in_float32": True,
        "post_norms": True,
        "embed_scale": common["hidden_size"] ** 0.5,
        "logit_soft_cap": None if hf.get(_CAP) is None else number(hf, _CAP),
        "double_wide_mlp": flag(hf, "use_double_wide_mlp"),
        "per_layer_width": width,
        "per_layer_vocab": count(hf, "vocab_size_per_layer_input") if width else 0,
    }


def _write(config: Any) -> dict[str, Any]:
    """The fields for `_read`."""
    kind = config.model_type
    layers = config.layers
    shapes = [write_table(layer, HEADS) for layer in layers]
    ropes = {FULL: Rope(1e6), SLIDING: Rope(1e4), **{layer.layer_type: layer.rope for layer in layers}}
    fields: dict[str, Any] = {
        **write_common(config, {"gemma3_text": "Gemma3", "gemma4_text": "Gemma4"}[kind], activation=_ACTIVATION),
        **shapes[0],
        "layer_types": [layer.layer_type for layer in layers],
        "sliding_window": max(layer.window or 0 for layer in layers) or _DEFAULTS[kind]["sliding_window"],
        "rope_parameters": {name: rope.to_hf() for name, rope in ropes.items()},
        _CAP: config.logit_soft_cap,
    }
    if kind == "gemma3_text":
        return {**fields, "query_pre_attn_scalar": round(config.attention_scale**-2)}
    return {
        **fields,
        "per_layer_config": {str(index): shape for index, shape in enumerate(shapes) if shape != shapes[0]},
        "attention_k_eq_v": any(layer.keys_are_values for layer in layers),
        "num_kv_shared_layers": sum(layer.reuses is not None for layer in layers),
        "use_double_wide_mlp": config.double_wide_mlp,
        "hidden_size_per_layer_input": config.per_layer_width,
        "vocab_size_per_layer_input": config.per_layer_vocab or config.vocab_size,
    }


def _select(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of only the decoder."""
    kind = fields["model_type"]
    if kind not in _WITH_TOWERS:
        return dict(fields)
    text = fields.get("text_config")
    kind = _WITH_TOWERS[kind]
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config: got {text!r:.200}, wanted the decoder's fields")
    only(text, "model_type", kind, absent=kind, section="text_config")
    above = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
    return {**text, "model_type": kind, **{name: fields[name] for name in above if fields.get(name) is not None}}


def _layers(hf: Mapping[str, Any], num_heads: int) -> tuple[LayerConfig, ...]:
    """The entry of each layer."""
    types = _layer_types(hf)
    options = {name: _options(hf, name) for name in set(types)}
    own_shapes = _own_shapes(hf, types)
    shapes = [read_table({**hf, **own_shapes.get(index, {})}, HEADS) for index in range(len(types))]
    layers = [LayerConfig(**shape, **options[name]).check(num_heads) for shape, name in zip(shapes, types, strict=True)]
    num_reusing = count(hf, "num_kv_shared_layers", 0, minimum=0)
    num_owners = max(len(types) - num_reusing, 0)
    owners = {name: index for index, name in enumerate(types[:num_owners])}  # the last of each type
    for index, name in enumerate(types[num_owners:], num_owners):
        if name not in owners:
            wanted = f"wanted some {name!r} layer before them"
            raise ValueError(f"num_kv_shared_layers: got {num_reusing} of {len(types)} layers, {wanted}")
        reuses = owners[name]
        if shapes[reuses] != shapes[index]:
            got = f"other K/V in layer {index} than in layer {reuses}"
            raise ValueError(f"per_layer_config: got {got}, which it reuses")
        layers[index] = dataclasses.replace(layers[index], reuses=reuses, keys_are_values=False)
    return tuple(layers)


def _layer_types(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """The type of each layer. The last layer of Gemma 4 has no window."""
    ends_full = hf["model_type"] == "gemma4_text"
    last = count(hf, "num_hidden_layers") - 1
    pattern = 6 if ends_full else count(hf, "sliding_window_pattern", 6)

    def absent(index: int) -> str:
        return FULL if (index + 1) % pattern == 0 or (ends_full and index == last) else SLIDING

    types = read_layers(hf, {FULL: FULL, SLIDING: SLIDING}, absent)
    if ends_full and types[-1] != FULL:
        raise ValueError(f"layer_types[{last}]: got {types[-1]!r}, wanted {FULL!r}")
    return types


def _options(hf: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """The options of the layers of a type. Older files of Gemma 3 have the ropes in three fields at the top."""
    ropes = hf.get("rope_parameters") or (_GEMMA4_ROPES if hf["model_type"] == "gemma4_text" else {})
    if not isinstance(ropes, Mapping) or not ropes.keys() <= {FULL, SLIDING}:
        wanted = f"one set of fields for each of {FULL} and {SLIDING}"
        raise ValueError(f"rope_parameters: got {ropes!r:.200}, wanted {wanted}")
    hf = {**hf, "rope_parameters": ropes}
    if layer_type == FULL:
        return {"rope": read_rope(hf, _ROPES, FULL), "keys_are_values": flag(hf, "attention_k_eq_v")}
    hf["rope_theta"] = hf["rope_local_base_freq"]
    if not ropes and isinstance(hf.get("rope_scaling"), Mapping):
        hf["rope_scaling"] = None  # an older file's, of full attention
    return {"rope": read_rope(hf, _ROPES, SLIDING), "window": count(hf, "sliding_window")}


def _own_shapes(hf: Mapping[str, Any], types: tuple[str, ...]) -> dict[int, Mapping[str, Any]]:
    """Fields with the shape of single layers, by layer.

    The keys of `per_layer_config` are layer numbers as text, perhaps with leading zeros. Without `per_layer_config`,
    only full attention has a different shape.
    """
    if "per_layer_config" not in hf:
        full = {"head_dim": count(hf, "global_head_dim", count(hf, "head_dim"))}
        if flag(hf, "attention_k_eq_v"):  # else the field is ignored
            full["num_key_value_heads"] = count(hf, "num_global_key_value_heads", count(hf, "num_key_value_heads"))
        return {index: full for index, name in enumerate(types) if name == FULL}
    entries = hf["per_layer_config"] or {}
    if not isinstance(entries, Mapping) or not all(isinstance(value, Mapping) for value in entries.values()):
        raise ValueError(f"per_layer_config: got {entries!r:.200}, wanted a set of fields for each layer number")
    shapes = {}
    for key, entry in entries.items():
        section = f"per_layer_config.{key}"
        if not str(key).isdecimal() or int(key) >= len(types):
            raise ValueError(f"{section}: wanted layer numbers 0 to {len(types) - 1}")
        for name in entry.keys() - set(HEADS):
            only(entry, name, hf.get(name), section=section)
        shapes[int(key)] = {name: count(entry, name, section=section) for name in HEADS if name in entry}
    return shapes


GEMMA = Family({**_DEFAULTS, **{name: {} for name in _WITH_TOWERS}}, _read, _write, _select)
