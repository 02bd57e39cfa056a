# SPDX-License-Identifier: Apache-2.0
"""What a decoder is made of, read from a Hugging Face config.json; what it can't serve is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.rope import Rope

# What each family's own code assumes where config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}
_TYPES = ("full_attention", "sliding_attention")
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One attention layer: K kv heads of width D, its window (None: full attention) and its rope.

    A token attends to the last `window` tokens, itself included.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    rope: Rope = dataclasses.field(default_factory=Rope)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama kind, as `decoder.Decoder` builds it.

    Attributes:
      model_type: llama, mistral, qwen2 or qwen3.
      vocab_size: V.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_heads: Q, query heads of every layer.
      layers: one entry per layer.
      rms_norm_eps: added to the mean square in every norm.
      tie_word_embeddings: whether the embedding is the output matrix too.
      qkv_bias, out_bias, mlp_bias: which projections have a bias.
      qk_norm: whether queries and keys are normalised per head.
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
    max_positions: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Reads the fields of a config.json.

        Args:
          fields: the parsed file, as any transformers version from 4.37 to 5 writes it.

        Returns:
          The config.

        Raises:
          ValueError: naming the field, what came and what was wanted.
        """
        kind = _only(fields, "model_type", *_DEFAULTS)
        hf = {**_DEFAULTS[kind], **fields}
        _only(hf, "hidden_act", "silu", absent="silu")
        _only(hf, "partial_rotary_factor", 1.0, absent=1.0)
        _only(hf, "quantization_config", None)
        hidden_size, num_heads = _count(hf, "hidden_size"), _count(hf, "num_attention_heads")
        bias = _flag(hf, "attention_bias") and kind in ("llama", "qwen3")
        return cls(
            model_type=kind,
            vocab_size=_count(hf, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(hf, "intermediate_size"),
            num_heads=num_heads,
            layers=_layers(hf, kind, hidden_size, num_heads),
            rms_norm_eps=_number(hf, "rms_norm_eps", 1e-6),
            tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
            qkv_bias=bias or kind == "qwen2",
            out_bias=bias,
            mlp_bias=_flag(hf, "mlp_bias") and kind == "llama",
            qk_norm=kind == "qwen3",
            max_positions=_count(hf, "max_position_embeddings", 2048),
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=_ids(hf.get("eos_token_id")),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that `from_hf` reads back as this config."""
        first = self.layers[0]
        names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        rope: dict[str, Any] = {"rope_type": first.rope.kind, "rope_theta": first.rope.theta}
        if first.rope.kind != "default":
            rope["factor"] = first.rope.factor
        if first.rope.kind == "llama3":
            rope["low_freq_factor"] = first.rope.low_freq_factor
            rope["high_freq_factor"] = first.rope.high_freq_factor
            rope["original_max_position_embeddings"] = first.rope.original_max_positions
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
            "rope_parameters": rope,
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


def _layers(hf: Mapping[str, Any], kind: str, hidden_size: int, num_heads: int) -> tuple[LayerConfig, ...]:
    """One entry per layer, with its window."""
    kv_heads = _count(hf, "num_key_value_heads", num_heads)
    if num_heads % kv_heads:
        raise ValueError(f"num_key_value_heads: got {kv_heads}, wanted a divisor of num_attention_heads={num_heads}")
    head_dim = _count(hf, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"head_dim: got {head_dim}, wanted an even number")
    layer = LayerConfig(kv_heads, head_dim, rope=_rope(hf))
    return tuple(dataclasses.replace(layer, window=window) for window in _windows(hf, kind))


def _windows(hf: Mapping[str, Any], kind: str) -> list[int | None]:
    """Attention window of each layer."""
    num_layers = _count(hf, "num_hidden_layers")
    slides = {"llama": False, "mistral": True}.get(kind, _flag(hf, "use_sliding_window"))
    window = _count(hf, "sliding_window") if slides and hf.get("sliding_window") is not None else None
    first = 0 if kind == "mistral" else _count(hf, "max_window_layers", num_layers, least=0)
    types = hf.get("layer_types") or [_TYPES[window is not None and n >= first] for n in range(num_layers)]
    if len(types) != num_layers:
        raise ValueError(f"layer_types: got {len(types)} entries, wanted num_hidden_layers={num_layers}")
    wanted = _TYPES[:1] if window is None else _TYPES[1:] if kind == "mistral" else _TYPES
    for number, name in enumerate(types):
        if name not in wanted:
            raise ValueError(f"layer_types[{number}]: got {name!r}, wanted {_either(wanted)} (sliding_window={window})")
    return [window if name == _TYPES[True] else None for name in types]


def _rope(hf: Mapping[str, Any]) -> Rope:
    """The rope of all layers, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    new, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    if new and old:
        raise ValueError(f"rope_scaling: got {old!r} beside rope_parameters, wanted one of the two")
    field, rope = ("rope_parameters", new) if new else ("rope_scaling", old or {})
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"{field}: got {rope!r}, wanted one flat set of fields for all layers")
    rope = {"rope_type": rope.get("type", "default"), **rope}
    kind = _only(rope, "rope_type", "default", "linear", "llama3", of=field)
    _only(rope, "partial_rotary_factor", 1.0, absent=1.0, of=field)
    theta = _number({**hf, **rope}, "rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta)
    needed = _LLAMA3_FIELDS if kind == "llama3" else _LLAMA3_FIELDS[:1]
    factor, *rest = (_number(rope, name, of=field) for name in needed)
    if kind == "linear":
        return Rope(theta, kind, factor)
    low, high, length = rest
    if high <= low:
        raise ValueError(f"{field}.high_freq_factor: got {high}, wanted more than low_freq_factor={low}")
    return Rope(theta, kind, factor, low, high, int(length))


def _either(wanted) -> str:
    return " or ".join(repr(value) for value in wanted)


def _only(hf: Mapping[str, Any], name: str, *wanted, absent=None, of: str = "") -> Any:
    """The field's value, which must be one of `wanted`."""
    value = hf.get(name)
    value = absent if value is None else value
    if value not in wanted:
        raise ValueError(f"{of}{'.' * bool(of)}{name}: got {value!r}, wanted {_either(wanted)}")
    return value


def _count(hf: Mapping[str, Any], name: str, absent: int | None = None, least: int = 1) -> int:
    value = hf.get(name)
    value = absent if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: got {value!r}, wanted an int of at least {least}")
    return value


def _number(hf: Mapping[str, Any], name: str, absent: float | None = None, of: str = "") -> float:
    value = hf.get(name, absent)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{of}{'.' * bool(of)}{name}: got {value!r}, wanted a positive number")
    return float(value)


def _flag(hf: Mapping[str, Any], name: str) -> bool:
    value = hf.get(name) or False
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, wanted true or false")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids given as null, one number or a list."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)
