# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, which rotates pairs of dimensions by angles that grow with the position.

`Rope.from_hf` reads a rope from a config's fields, and `rotary_tables` computes cosines and sines for all layers.

A cache keeps rotated keys, so frequencies must not depend on the sequence. In transformers some ropes change their
frequencies beyond a length. Here such a rope always uses the frequencies of a single length, and a longer cache is
refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import fields

Angles = tuple[jax.Array, jax.Array] | None  # cosine and sine; None leaves vectors as they are
_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
# The required fields of each kind, and its optional fields.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "proportional": ((), ("factor",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "dynamic": (("factor",), ("sequence_length",)),
    "longrope": (("factor", "short_factor", "long_factor", _ORIGINAL), ("attention_factor", "sequence_length")),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_ZERO_IS_NONE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclasses.dataclass(frozen=True)
class Rope:
    """The frequencies of a layer's rotations.

    Attributes:
      theta: base of the frequencies.
      kind: "default", "linear" (every wavelength times `factor`), "proportional" (like linear, but only the first pairs
        rotate), "llama3" (only long wavelengths are stretched), "yarn" (pairs are stretched by a ramp), "dynamic" (the
        base grows with the sequence), or "longrope" (a factor for each pair, by the length of the sequence).
      factor: factor on wavelengths.
      original_max_position_embeddings: context length before the stretching.
      low_freq_factor: llama3; wavelengths above the original length / low_freq_factor are stretched in full.
      high_freq_factor: llama3; wavelengths below the original length / high_freq_factor are left alone.
      share: share of a head's dimensions to rotate, from the first; in a proportional rope share of its pairs, rounded
        down.
      attention_factor: yarn, longrope; factor on rotated vectors. None derives it from `factor`.
      beta_fast: yarn; pairs with more turns within the original length keep their frequency. None defaults to 32.
      beta_slow: yarn; pairs with fewer turns are stretched in full. None defaults to 1.
      mscale: yarn; weight of log(factor) in the numerator of the factor on rotated vectors.
      mscale_all_dim: yarn; weight of log(factor) in its denominator, and in DeepSeek's `score_factor`.
      truncate: yarn; whether the ramp begins and ends at whole pairs. None defaults to True.
      short_factor: longrope; factor on each pair in sequences of at most the original length.
      long_factor: longrope; factor on each pair in longer sequences.
      sequence_length: dynamic, longrope; number of tokens in the sequences to take the frequencies from, for shorter
        sequences too. None defaults to the original length.

    Source: https://arxiv.org/abs/2309.00071 (yarn, dynamic), https://arxiv.org/abs/2402.13753 (longrope)
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    share: float = 1.0
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    sequence_length: int | None = None

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], section: str, *, positions: int, kinds: Iterable[str] = _FIELDS) -> Rope:
        """Reads a set of rope fields of a config.json.

        Args:
          rope: the fields; an older file may say `type` instead of `rope_type`.
          section: name of the field with this set, for error messages.
          positions: the config's context length, which gives some fields their defaults.
          kinds: the family's kinds of ropes.

        Raises:
          ValueError: the message has the field, its value and the wanted value.
        """
        rope = {name: value for name, value in rope.items() if value or name not in _ZERO_IS_NONE}
        rope = {name: value for name, value in rope.items() if value is not None}
        rope.setdefault("rope_type", rope.get("type", "default"))
        kind = fields.only(rope, "rope_type", *kinds, section=section)
        needed, optional = _FIELDS[kind]
        if _ORIGINAL in needed:
            rope.setdefault(_ORIGINAL, positions)
            if kind != "llama3":
                rope.setdefault("factor", positions / fields.count(rope, _ORIGINAL, section=section))
        values = {name: _read(rope, name, section) for name in (*needed, *optional) if name in needed or name in rope}
        if kind == "dynamic":
            values[_ORIGINAL] = positions
        share = fields.number(rope, _SHARE, 1.0, section)
        if share > 1:
            raise ValueError(f"{section}.{_SHARE}: got {share}, wanted at most 1")
        if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
            wanted = f"more than low_freq_factor={values['low_freq_factor']}"
            raise ValueError(f"{section}.high_freq_factor: got {values['high_freq_factor']}, wanted {wanted}")
        return cls(fields.number(rope, "rope_theta", 10000.0, section), kind, share=share, **values)

    def to_hf(self) -> dict[str, Any]:
        """The fields of this rope, for `from_hf`."""
        rope: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        needed, optional = _FIELDS[self.kind]
        for name in needed + optional:
            value = getattr(self, name)
            if name in needed or not (value is None or (name, value) == ("factor", 1.0)):
                rope[name] = list(value) if isinstance(value, tuple) else value
        if self.kind == "proportional" or self.share != 1:
            rope[_SHARE] = self.share
        return rope

    def check(self, head_dim: int) -> Rope:
        """Returns this rope. Raises a ValueError if it does not fit heads of this width."""
        min_width = 4 if self.kind == "dynamic" else 2
        if self.width(head_dim) % 2 or self.width(head_dim) < min_width:
            wanted = f"an even number of at least {min_width} of head_dim={head_dim}"
            raise ValueError(f"{_SHARE}: got {self.share}, which is {self.width(head_dim)} dimensions, wanted {wanted}")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != self.width(head_dim) // 2:
                wanted = f"{self.width(head_dim) // 2}, one for each pair"
                raise ValueError(f"{name}: got {len(factors)} numbers, wanted {wanted}")
        return self

    def width(self, head_dim: int) -> int:
        """The number of dimensions with angles, counted from a head's first."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.share)

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest sequences with these frequencies in transformers, or None for no limit."""
        if self.kind not in ("dynamic", "longrope"):
            return None
        return max(self.sequence_length or 0, self.original_max_position_embeddings)

    @property
    def amplitude(self) -> float:
        """The factor on rotated vectors."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))
        if self.kind == "yarn" and self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0) if self.kind == "yarn" else 1.0

    @property
    def score_factor(self) -> float:
        """The factor on the scores of DeepSeek's attention."""
        return self._growth(self.mscale_all_dim or 0.0) ** 2

    def _growth(self, mscale: float) -> float:
        """Yarn's factor on a vector, which grows with the logarithm of the stretching."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair of dimensions: f32[width / 2]."""
        width = self.width(head_dim)
        theta = self.theta
        factor = self.factor
        original = self.original_max_position_embeddings
        length = self.sequence_length or 0
        if self.kind == "dynamic":
            theta *= (factor * max(length, original) / original - (factor - 1)) ** (width / (width - 2))
        if self.kind == "longrope":
            factor = np.array(self.long_factor if length > original else self.short_factor)
        frequency = theta ** -(np.arange(0, width, 2) / width)
        stretched = self._stretched(frequency)
        frequency = frequency * (1 - stretched) + frequency / factor * stretched
        if self.kind == "proportional":
            frequency[int(self.share * head_dim // 2) :] = 0
        return frequency.astype(np.float32)

    def _stretched(self, frequency: np.ndarray) -> np.ndarray | float:
        """The extent to which each pair's frequency is divided by `factor`, from 0 to 1."""
        original = self.original_max_position_embeddings
        width = 2 * frequency.size
        if self.kind == "llama3":
            # The more turns a pair makes within the original context, the less its frequency is stretched.
            turns = original * frequency / (2 * np.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            return 1 - np.clip(kept, 0, 1)
        if self.kind != "yarn":
            return 0.0 if self.kind == "dynamic" else 1.0

        def pair(turns: float) -> float:
            """The index, as a fraction, of the pair with this number of turns within the original context."""
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low = pair(self.beta_fast or 32.0)
        high = pair(self.beta_slow or 1.0)
        if self.truncate is not False:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, width - 1)
        return np.clip((np.arange(width // 2) - low) / (high - low or 0.001), 0, 1)

    def angles(self, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine at `positions i32[R, C]`, times the factor on vectors: each f32[R, C, 1, width / 2]."""
        frequencies = self.frequencies(head_dim)[None, None, None]
        angle = positions[:, :, None, None].astype(jnp.float32) * frequencies
        cos = jnp.cos(angle)
        sin = jnp.sin(angle)
        return (cos, sin) if self.amplitude == 1 else (cos * self.amplitude, sin * self.amplitude)


def read_rope(hf: Mapping[str, Any], kinds: Iterable[str] = _FIELDS, layer_type: str | None = None) -> Rope:
    """Reads the rope of all layers of a config.json, or the rope of `layer_type` where each type has its own.

    A file has `rope_parameters`, and an older file `rope_theta` and `rope_scaling`. `partial_rotary_factor` and
    `original_max_position_embeddings` may also be at the top of the file. There, `original_max_position_embeddings`
    has precedence, as in transformers.
    """
    new = hf.get("rope_parameters")
    old = hf.get("rope_scaling")
    if new and old:
        raise ValueError(f"rope_scaling: got {old!r:.200} together with rope_parameters, wanted one of the two")
    name, rope = ("rope_parameters", new) if new else ("rope_scaling", old or {})
    if new and layer_type is not None:
        name = f"{name}.{layer_type}"
        rope = new.get(layer_type) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        wanted = "one flat set of fields for all layers" if layer_type is None else "a set of fields"
        raise ValueError(f"{name}: got {rope!r:.200}, wanted {wanted}")
    top = {field: hf[field] for field in ("rope_theta", _SHARE, _ORIGINAL) if hf.get(field) is not None}
    original = top.get(_ORIGINAL, rope.get(_ORIGINAL))
    positions = fields.count(hf, "max_position_embeddings", 2048)
    return Rope.from_hf({**top, **rope, _ORIGINAL: original}, name, positions=positions, kinds=kinds)


def rotary_tables(config: Any, positions: jax.Array, max_length: int) -> list[Angles]:
    """Computes the cosine and sine of each layer's rope at `positions i32[R, C]`. Layers with equal ropes share them.

    Raises:
      ValueError: a rope has other frequencies in sequences of `max_length` tokens, the longest in the cache.
    """
    limit = rope_limit(config)
    if limit is not None and max_length > limit:
        got = f"got {max_length} (in whole blocks), wanted at most {limit}"
        reason = "in longer sequences the rope has other frequencies (`sequence_length` of rope_parameters)"
        raise ValueError(f"max_length: {got}: {reason}")
    rotations = dict.fromkeys(filter(None, config.rotations))
    tables: dict[Any, Angles] = {(rope, width): rope.angles(positions, width) for rope, width in rotations}
    return [tables.get(rotation) for rotation in config.rotations]


def rope_limit(config: Any) -> int | None:
    """Tokens of the longest sequence with the frequencies of a config's ropes, or None for no limit."""
    limits = [rope.max_length for rope, _ in filter(None, config.rotations)]
    return min(filter(None, limits), default=None)


def _read(rope: Mapping[str, Any], name: str, section: str) -> Any:
    """The value of a rope's field."""
    if name == "truncate":
        return fields.only(rope, name, True, False, section=section)
    if name in (_ORIGINAL, "sequence_length"):
        return fields.count(rope, name, minimum=2, section=section)
    if name not in ("short_factor", "long_factor"):
        return fields.number(rope, name, section=section)
    numbers = fields.listed(rope, name)
    if not numbers:
        raise ValueError(f"{section}.{name}: got {numbers!r:.80}, wanted a list of numbers")
    return tuple(fields.number({name: value}, name, section=section) for value in numbers)
