# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: pairs of dimensions rotated by an angle that grows with the position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import fields

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "proportional": (),
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """The frequencies of a layer's rotations.

    Attributes:
      theta: base of the frequencies.
      kind: "default", "linear" (every wavelength times `factor`), "llama3" (only the long ones) or "proportional"
        (like linear, but only the first pairs rotate).
      factor: how far wavelengths are stretched.
      low_freq_factor: llama3; wavelengths above original_max_positions / low_freq_factor are stretched in full.
      high_freq_factor: llama3; wavelengths below original_max_positions / high_freq_factor are left alone.
      original_max_positions: llama3; context length before the stretching.
      share: proportional; the share of the pairs that rotate, rounded down.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    share: float = 1.0

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], of: str) -> Rope:
        """Reads one set of rope fields of a config.json.

        Args:
          rope: the fields; an older file may say `type` instead of `rope_type`.
          of: where they are, for error messages.

        Raises:
          ValueError: naming the field, its value and what was wanted.
        """
        rope = {"rope_type": rope.get("type", "default"), **rope}
        kind = fields.only(rope, "rope_type", *_NEEDED, of=of)
        if kind != "proportional":
            fields.only(rope, "partial_rotary_factor", 1.0, absent=1.0, of=of)
        theta = fields.number(rope, "rope_theta", 10000.0, of)
        factor, *rest = (*(fields.number(rope, name, of=of) for name in _NEEDED[kind]), 1.0)
        if kind == "proportional":
            share = fields.number(rope, "partial_rotary_factor", 1.0, of)
            if share > 1:
                raise ValueError(f"{of}.partial_rotary_factor: got {share}, wanted at most 1")
            return cls(theta, kind, fields.number(rope, "factor", 1.0, of), share=share)
        if kind != "llama3":
            return cls(theta, kind, factor)
        low, high, length, _ = rest
        if high <= low:
            raise ValueError(f"{of}.high_freq_factor: got {high}, wanted more than low_freq_factor={low}")
        return cls(theta, kind, factor, low, high, int(length))

    def to_hf(self) -> dict[str, Any]:
        """The fields that `from_hf` reads back as this rope."""
        rope: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind in ("linear", "llama3") or self.factor != 1:
            rope["factor"] = self.factor
        if self.kind == "llama3":
            rope["low_freq_factor"] = self.low_freq_factor
            rope["high_freq_factor"] = self.high_freq_factor
            rope["original_max_position_embeddings"] = self.original_max_positions
        if self.kind == "proportional":
            rope["partial_rotary_factor"] = self.share
        return rope

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair of dimensions: f32[D / 2]."""
        frequency = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        if self.kind in ("linear", "proportional"):
            frequency = frequency / self.factor
            frequency[int(self.share * head_dim // 2) :] = 0
        elif self.kind == "llama3":
            # The more turns within the original context, the more of a frequency is kept.
            turns = self.original_max_positions * frequency / (2 * np.pi)
            share = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
            frequency = frequency * (share + (1 - share) / self.factor)
        return frequency.astype(np.float32)

    def angles(self, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine at `positions i32[R, C]`, each f32[R, C, 1, D / 2]."""
        frequencies = self.frequencies(head_dim)[None, None, None]
        angle = positions[:, :, None, None].astype(jnp.float32) * frequencies
        return jnp.cos(angle), jnp.sin(angle)


def rope_fields(hf: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields of a rope that all layers share, and the name of the field that has them: for `Rope.from_hf`.

    A config.json has `rope_parameters`, an older one `rope_theta` and `rope_scaling`.
    """
    new, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    if new and old:
        raise ValueError(f"rope_scaling: got {old!r:.200} beside rope_parameters, wanted one of the two")
    name, rope = ("rope_parameters", new) if new else ("rope_scaling", old or {})
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"{name}: got {rope!r:.200}, wanted one flat set of fields for all layers")
    return {"rope_theta": hf.get("rope_theta", 10000.0), **rope}, name
