# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and Gemma 4: their config.json as the arguments of a `ModelConfig`, and back.

A file with towers for images and sound (`gemma3`, `gemma4`) has the decoder's fields under `text_config`; only these
are read. Gemma 3's `attn_logit_softcapping` has no effect: transformers has the field but never caps the scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .fields import count, either, flag, ids, listed, number, only, token
from .layer_config import LayerConfig
from .rope import Rope

_FULL, _SLIDING = _TYPES = ("full_attention", "sliding_attention")
_BOTH = {
    "intermediate_size": 9216, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "max_position_embeddings": 131072, "tie_word_embeddings": True, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
# The defaults of each family's own code, for fields that config.json leaves out: the released files leave out many.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {**_BOTH, "vocab_size": 262208, "num_hidden_layers": 26, "sliding_window": 4096},
    "gemma4_text": {
        **_BOTH, "vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512, "global_head_dim": 512,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    },
}  # fmt: skip
_SHAPE = ("num_key_value_heads", "head_dim")
_WITH_TOWERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
_THETAS = {_FULL: 1e6, _SLIDING: 1e4}
_ROPES = ("default", "linear", "llama3", "proportional")  # kinds
_GEMMA4_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
KINDS = (*_DEFAULTS, *_WITH_TOWERS)


def read(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `ModelConfig`; ValueErrors as for `ModelConfig.from_hf`."""
    kind, hf = text_fields(fields)
    _refuse(hf, kind)
    hidden_size, num_heads = count(hf, "hidden_size"), count(hf, "num_attention_heads")
    bias, cap = flag(hf, "attention_bias"), "final_logit_softcapping"
    vocab_size = count(hf, "vocab_size")
    arguments = {
        "model_type": kind,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": count(hf, "intermediate_size"),
        "num_heads": num_heads,
        "layers": _layers(hf, kind, num_heads),
        "rms_norm_eps": number(hf, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": flag(hf, "tie_word_embeddings"),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "norm_in_float32": True,
        "post_norms": True,
        "activation": "gelu_pytorch_tanh",
        "embed_scale": hidden_size**0.5,
        "logit_soft_cap": None if hf.get(cap) is None else number(hf, cap),
        "max_positions": count(hf, "max_position_embeddings"),
        "bos_token_id": token(hf, "bos_token_id", vocab_size),
        "eos_token_ids": ids(hf, "eos_token_id", vocab_size),
    }
    if kind == "gemma3_text":
        scale = count(hf, "query_pre_attn_scalar", 256) ** -0.5
        return {**arguments, "norm_offset": 1.0, "attention_scale": scale}
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


def write(config: Any) -> dict[str, Any]:
    """The fields of a config.json that `read` turns into this `ModelConfig`."""
    first, kind = config.layers[0], config.model_type
    types = [_TYPES[layer.window is not None] for layer in config.layers]
    ropes = dict(zip(types, (layer.rope.to_hf() for layer in config.layers), strict=True))
    fields: dict[str, Any] = {
        "architectures": [{"gemma3_text": "Gemma3ForCausalLM", "gemma4_text": "Gemma4ForCausalLM"}[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "hidden_activation": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "layer_types": types,
        "sliding_window": max(layer.window or 0 for layer in config.layers) or _DEFAULTS[kind]["sliding_window"],
        "rope_parameters": {name: ropes.get(name, Rope(_THETAS[name]).to_hf()) for name in _TYPES},
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.out_bias,
        "final_logit_softcapping": config.logit_soft_cap,
        "max_position_embeddings": config.max_positions,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
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


def has_towers(fields: Mapping[str, Any]) -> bool:
    """Whether these are the fields of a checkpoint that also has towers for images or sound."""
    return fields.get("model_type") in _WITH_TOWERS


def text_fields(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model type of the decoder alone, and its fields, defaults included."""
    kind = only(fields, "model_type", *KINDS)
    text: Any = fields
    if kind in _WITH_TOWERS:
        text, kind = fields.get("text_config"), _WITH_TOWERS[kind]
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config: got {text!r:.200}, wanted the decoder's fields")
        only(text, "model_type", kind, absent=kind, of="text_config")
        above = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
        text = {**text, **{name: fields[name] for name in above if fields.get(name) is not None}}
    return kind, {**_DEFAULTS[kind], **text}


def _refuse(hf: Mapping[str, Any], kind: str) -> None:
    only(hf, "hidden_activation", "gelu_pytorch_tanh", absent="gelu_pytorch_tanh")
    only(hf, "partial_rotary_factor", 1.0, absent=1.0)
    only(hf, "quantization_config", None)
    if kind == "gemma3_text":
        only(hf, "use_bidirectional_attention", False, absent=False)
    else:
        only(hf, "use_bidirectional_attention", None, "vision")  # between the tokens of one image
        only(hf, "enable_moe_block", False, absent=False)


def _layers(hf: Mapping[str, Any], kind: str, num_heads: int) -> tuple[LayerConfig, ...]:
    """One entry per layer."""
    types = _layer_types(hf, kind)
    ropes = {name: _rope(hf, kind, name) for name in set(types)}
    window = count(hf, "sliding_window") if _SLIDING in types else None
    shapes = _shapes(hf, kind, types)
    layers = [
        LayerConfig(
            *shapes[index],
            window=window if name == _SLIDING else None,
            rope=ropes[name],
            keys_are_values=kind == "gemma4_text" and name == _FULL and flag(hf, "attention_k_eq_v"),
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


def _layer_types(hf: Mapping[str, Any], kind: str) -> list[str]:
    num_layers = count(hf, "num_hidden_layers")
    pattern = count(hf, "sliding_window_pattern", 6) if kind == "gemma3_text" else 6
    types = listed(hf, "layer_types")
    if types is None:
        types = [_TYPES[(index + 1) % pattern > 0] for index in range(num_layers)]
        if kind == "gemma4_text":
            types[-1] = _FULL
    if len(types) != num_layers:
        raise ValueError(f"layer_types: got {len(types)} entries, wanted num_hidden_layers={num_layers}")
    for index, name in enumerate(types):
        wanted = (_FULL,) if kind == "gemma4_text" and index == num_layers - 1 else _TYPES
        if name not in wanted:
            raise ValueError(f"layer_types[{index}]: got {name!r:.80}, wanted {either(wanted)}")
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
    theta = hf.get("rope_theta" if name == _FULL else "rope_local_base_freq", _THETAS[name])
    if new:
        return Rope.from_hf({"rope_theta": theta, **(new.get(name) or {})}, f"rope_parameters.{name}", kinds=_ROPES)
    if not isinstance(old or {}, Mapping):
        raise ValueError(f"rope_scaling: got {old!r:.200}, wanted a set of fields")
    rope = (old or {}) if name == _FULL else {}
    return Rope.from_hf({"rope_theta": theta, **rope}, "rope_scaling", kinds=_ROPES)


def _shapes(hf: Mapping[str, Any], kind: str, types: list[str]) -> list[tuple[int, int]]:
    """(kv heads, head width) of each layer. In Gemma 4 full attention has its own shape, or each layer may."""
    shape = {name: count(hf, name) for name in _SHAPE}
    own: dict[int, Mapping[str, Any]] = {}
    if kind == "gemma4_text" and "per_layer_config" in hf:
        own = _own_shapes(hf["per_layer_config"] or {}, hf, len(types))
    elif kind == "gemma4_text":
        full = {"head_dim": count(hf, "global_head_dim")}
        if flag(hf, "attention_k_eq_v"):  # else the field is ignored
            full["num_key_value_heads"] = count(hf, "num_global_key_value_heads", shape["num_key_value_heads"])
        own = {index: full for index, name in enumerate(types) if name == _FULL}
    found = ({**shape, **own.get(index, {})} for index in range(len(types)))
    return [(one["num_key_value_heads"], one["head_dim"]) for one in found]


def _own_shapes(entries: Any, hf: Mapping[str, Any], num_layers: int) -> dict[int, Mapping[str, Any]]:
    """`per_layer_config`, whose keys are layer numbers as text, perhaps with leading zeros."""
    if not isinstance(entries, Mapping) or not all(isinstance(value, Mapping) for value in entries.values()):
        raise ValueError(f"per_layer_config: got {entries!r:.200}, wanted a set of fields for each layer number")
    own = {}
    for key, entry in entries.items():
        of = f"per_layer_config.{key}"
        if not str(key).isdecimal() or int(key) >= num_layers:
            raise ValueError(f"{of}: wanted layer numbers 0 to {num_layers - 1}")
        for name in entry.keys() - set(_SHAPE):
            only(entry, name, hf.get(name), of=of)
        own[int(key)] = {name: count(entry, name, of=of) for name in _SHAPE if name in entry}
    return own
