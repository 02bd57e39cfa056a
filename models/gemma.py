# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and Gemma 4: layers of two kinds, with and without windows; in Gemma 4 some reuse the K/V of others.

A file with towers for images and sound (`gemma3`, `gemma4`) has the decoder's fields under `text_config`; only these
are read. Gemma 3's `attn_logit_softcapping` has no effect: transformers has the field but never caps the scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .attention import LayerConfig
from .family import FULL, SLIDING, Family, read_common, write_common
from .fields import count, flag, layer_types, listed, number, only
from .rope import Rope

_TYPES = (FULL, SLIDING)
_BOTH = {
    "intermediate_size": 9216, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "max_position_embeddings": 131072, "tie_word_embeddings": True, "bos_token_id": 2,
    "eos_token_id": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GEMMA3 = {**_BOTH, "vocab_size": 262208, "num_hidden_layers": 26, "sliding_window": 4096}
_GEMMA4 = {
    **_BOTH, "vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512, "global_head_dim": 512,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {"gemma3_text": _GEMMA3, "gemma4_text": _GEMMA4}
_SHAPE = ("num_key_value_heads", "head_dim")
_WITH_TOWERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
_ROPES = ("default", "linear", "llama3", "proportional")  # kinds
_THETAS = {FULL: 1e6, SLIDING: 1e4}
_GEMMA4_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_ACTIVATION, _CAP = "hidden_activation", "final_logit_softcapping"


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`."""
    kind = hf["model_type"]
    common = read_common(hf, activation=(_ACTIVATION, "gelu_pytorch_tanh"), biases=(False, True))
    only(hf, "partial_rotary_factor", 1.0, absent=1.0)
    arguments = {
        **common,
        "layers": _layers(hf, kind, common["num_heads"]),
        "qk_norm": True,
        "norm_in_float32": True,
        "post_norms": True,
        "embed_scale": common["hidden_size"] ** 0.5,
        "logit_soft_cap": None if hf.get(_CAP) is None else number(hf, _CAP),
    }
    if kind == "gemma3_text":
        only(hf, "use_bidirectional_attention", False, absent=False)
        scale = count(hf, "query_pre_attn_scalar", 256) ** -0.5
        return {**arguments, "norm_offset": 1.0, "attention_scale": scale}
    only(hf, "use_bidirectional_attention", None, "vision")  # between the tokens of one image
    only(hf, "enable_moe_block", False, absent=False)
    width = count(hf, "hidden_size_per_layer_input", 0, least=0)
    return {
        **arguments,
        "attention_scale": 1.0,
        "value_norm": True,
        "layer_scalar": True,
        "double_wide_mlp": flag(hf, "use_double_wide_mlp"),
        "per_layer_width": width,
        "per_layer_vocab": count(hf, "vocab_size_per_layer_input") if width else 0,
    }


def _write(config: Any) -> dict[str, Any]:
    """The fields that `_read` reads."""
    first, kind = config.layers[0], config.model_type
    types = [FULL if layer.window is None else SLIDING for layer in config.layers]
    ropes = dict(zip(types, (layer.rope.to_hf() for layer in config.layers), strict=True))
    fields: dict[str, Any] = {
        **write_common(config, {"gemma3_text": "Gemma3", "gemma4_text": "Gemma4"}[kind], activation=_ACTIVATION),
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "layer_types": types,
        "sliding_window": max(layer.window or 0 for layer in config.layers) or _DEFAULTS[kind]["sliding_window"],
        "rope_parameters": {name: ropes.get(name, Rope(_THETAS[name]).to_hf()) for name in _TYPES},
        _CAP: config.logit_soft_cap,
    }
    if kind == "gemma3_text":
        assert config.attention_scale is not None
        return {**fields, "query_pre_attn_scalar": round(config.attention_scale**-2)}
    shapes = {str(n): (layer.kv_heads, layer.head_dim) for n, layer in enumerate(config.layers)}
    return {
        **fields,
        "per_layer_config": {
            n: {"num_key_value_heads": kv_heads, "head_dim": head_dim}
            for n, (kv_heads, head_dim) in shapes.items()
            if (kv_heads, head_dim) != shapes["0"]
        },
        "attention_k_eq_v": any(layer.keys_are_values for layer in config.layers),
        "num_kv_shared_layers": sum(layer.reuses is not None for layer in config.layers),
        "use_double_wide_mlp": config.double_wide_mlp,
        "hidden_size_per_layer_input": config.per_layer_width,
        "vocab_size_per_layer_input": config.per_layer_vocab or config.vocab_size,
    }


def _select(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the decoder alone."""
    kind = fields["model_type"]
    if kind not in _WITH_TOWERS:
        return dict(fields)
    text, kind = fields.get("text_config"), _WITH_TOWERS[kind]
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config: got {text!r:.200}, wanted the decoder's fields")
    only(text, "model_type", kind, absent=kind, of="text_config")
    above = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
    return {**text, "model_type": kind, **{name: fields[name] for name in above if fields.get(name) is not None}}


def _layers(hf: Mapping[str, Any], kind: str, num_heads: int) -> tuple[LayerConfig, ...]:
    """One entry per layer."""
    types = _layer_types(hf, kind)
    ropes = {name: _rope(hf, kind, name) for name in set(types)}
    window = count(hf, "sliding_window") if SLIDING in types else None
    own_shapes = _own_shapes(hf, types) if kind == "gemma4_text" else {}
    shapes = [[count({**hf, **own_shapes.get(index, {})}, name) for name in _SHAPE] for index in range(len(types))]
    layers = [
        LayerConfig(
            *shapes[index],
            window=window if name == SLIDING else None,
            rope=ropes[name],
            keys_are_values=kind == "gemma4_text" and name == FULL and flag(hf, "attention_k_eq_v"),
        ).check(num_heads)
        for index, name in enumerate(types)
    ]
    owners = len(layers) - count(hf, "num_kv_shared_layers", 0, least=0) if kind == "gemma4_text" else len(layers)
    for index in range(owners, len(layers)):
        reuses = max((n for n in range(max(owners, 0)) if types[n] == types[index]), default=None)
        if reuses is None:
            raise ValueError(
                f"num_kv_shared_layers: got {len(layers) - owners} of {len(layers)} layers, "
                f"wanted some {types[index]!r} layer before them"
            )
        if shapes[reuses] != shapes[index]:
            raise ValueError(
                f"per_layer_config: got other K/V in layer {index} than in layer {reuses}, which it reuses"
            )
        layers[index] = dataclasses.replace(layers[index], reuses=reuses, keys_are_values=False)
    return tuple(layers)


def _layer_types(hf: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    num_layers = count(hf, "num_hidden_layers")
    pattern = count(hf, "sliding_window_pattern", 6) if kind == "gemma3_text" else 6
    types = listed(hf, "layer_types")
    if types is None:
        types = [SLIDING if (number + 1) % pattern else FULL for number in range(num_layers)]
        if kind == "gemma4_text":
            types[-1] = FULL
    types = layer_types(types, _TYPES, num_layers)
    if kind == "gemma4_text" and types[-1] != FULL:
        raise ValueError(f"layer_types[{num_layers - 1}]: got {types[-1]!r}, wanted {FULL!r}")
    return types


def _rope(hf: Mapping[str, Any], kind: str, name: str) -> Rope:
    """The rope of one type of layers; older files of Gemma 3 have the ropes in three fields at the top."""
    new, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    if new and old:
        raise ValueError(f"rope_scaling: got {old!r:.200} beside rope_parameters, wanted one of the two")
    if new is None and kind == "gemma4_text":
        new = _GEMMA4_ROPES
    if new and not (isinstance(new, Mapping) and all(n in _TYPES and isinstance(new[n] or {}, Mapping) for n in new)):
        raise ValueError(
            f"rope_parameters: got {new!r:.200}, wanted one set of fields for each of {' and '.join(_TYPES)}"
        )
    theta = hf.get("rope_theta" if name == FULL else "rope_local_base_freq", _THETAS[name])
    if new:
        return Rope.from_hf({"rope_theta": theta, **(new.get(name) or {})}, f"rope_parameters.{name}", kinds=_ROPES)
    if not isinstance(old or {}, Mapping):
        raise ValueError(f"rope_scaling: got {old!r:.200}, wanted a set of fields")
    rope = (old or {}) if name == FULL else {}
    return Rope.from_hf({"rope_theta": theta, **rope}, "rope_scaling", kinds=_ROPES)


def _own_shapes(hf: Mapping[str, Any], types: tuple[str, ...]) -> dict[int, Mapping[str, Any]]:
    """The fields of shape that layers of Gemma 4 have of their own.

    `per_layer_config` has them by layer numbers as text, perhaps with leading zeros. Without it full attention has its
    own shape.
    """
    if "per_layer_config" not in hf:
        full = {"head_dim": count(hf, "global_head_dim")}
        if flag(hf, "attention_k_eq_v"):  # else the field is ignored
            full["num_key_value_heads"] = count(hf, "num_global_key_value_heads", count(hf, "num_key_value_heads"))
        return {index: full for index, name in enumerate(types) if name == FULL}
    entries = hf["per_layer_config"] or {}
    if not isinstance(entries, Mapping) or not all(isinstance(value, Mapping) for value in entries.values()):
        raise ValueError(f"per_layer_config: got {entries!r:.200}, wanted a set of fields for each layer number")
    own = {}
    for key, entry in entries.items():
        of = f"per_layer_config.{key}"
        if not str(key).isdecimal() or int(key) >= len(types):
            raise ValueError(f"{of}: wanted layer numbers 0 to {len(types) - 1}")
        for name in entry.keys() - set(_SHAPE):
            only(entry, name, hf.get(name), of=of)
        own[int(key)] = {name: count(entry, name, of=of) for name in _SHAPE if name in entry}
    return own


GEMMA = Family({**_DEFAULTS, **{name: {} for name in _WITH_TOWERS}}, _read, _write, _select)
