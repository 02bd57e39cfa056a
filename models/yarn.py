# SPDX-License-Identifier: Apache-2.0
"""Yarn: rope whose long waves are stretched, whose short ones are kept, and whose scores grow with the stretching."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import fields
from .rope import Rope, rope_fields


@dataclasses.dataclass(frozen=True)
class Yarn:
    """The frequencies of a layer's rotations, stretched by a ramp over the pairs of dimensions.

    Attributes:
      theta: base of the frequencies.
      factor: how far long wavelengths are stretched.
      original_max_positions: context length before the stretching.
      beta_fast: pairs that turn more often than this within the original context are kept.
      beta_slow: pairs that turn less often are stretched in full.
      mscale: rotated vectors are multiplied by `amplitude` at it, over that at `mscale_all_dim`.
      mscale_all_dim: see `score_factor`; 0 leaves the scores alone.
      truncate: whether the ramp begins and ends at whole pairs.

    Source: https://arxiv.org/abs/2309.00071
    """

    theta: float
    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], of: str) -> Yarn:
        """Reads one set of rope fields of a config.json, as `Rope.from_hf`."""
        fields.only(rope, "attention_factor", None, of=of)

        def optional(name: str, absent: float) -> float:
            return fields.number(rope, name, of=of) if rope.get(name) else absent

        return cls(
            theta=fields.number(rope, "rope_theta", 10000.0, of),
            factor=fields.number(rope, "factor", of=of),
            original_max_positions=fields.count(rope, "original_max_position_embeddings", of=of),
            beta_fast=optional("beta_fast", 32.0),
            beta_slow=optional("beta_slow", 1.0),
            mscale=optional("mscale", 0.0),
            mscale_all_dim=optional("mscale_all_dim", 0.0),
            truncate=fields.only(rope, "truncate", True, False, absent=True, of=of),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields that `from_hf` reads back as this rope."""
        return {
            "rope_type": "yarn",
            "rope_theta": self.theta,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_positions,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            **({"mscale": self.mscale} if self.mscale else {}),
            **({"mscale_all_dim": self.mscale_all_dim} if self.mscale_all_dim else {}),
            **({} if self.truncate else {"truncate": False}),
        }

    @property
    def score_factor(self) -> float:
        """The factor on the scores of DeepSeek's attention."""
        return self.amplitude(self.mscale_all_dim) ** 2

    def amplitude(self, mscale: float) -> float:
        """The factor on a vector; it grows with the logarithm of the stretching."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair of dimensions: f32[D / 2]."""
        frequency = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        low, high = self._pair(self.beta_fast, head_dim), self._pair(self.beta_slow, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        stretched = np.clip((np.arange(head_dim // 2) - low) / (high - low or 0.001), 0, 1)
        return (frequency * (1 - stretched) + frequency / self.factor * stretched).astype(np.float32)

    def _pair(self, turns: float, head_dim: int) -> float:
        """The pair that turns so often within the original context, as a fraction."""
        return head_dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

    def angles(self, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine at `positions i32[R, C]`, times the factor on rotated vectors: each f32[R, C, 1, D / 2]."""
        angle = positions[:, :, None, None].astype(jnp.float32) * self.frequencies(head_dim)[None, None, None]
        if self.mscale and self.mscale_all_dim:
            factor = self.amplitude(self.mscale) / self.amplitude(self.mscale_all_dim)
        else:
            factor = self.amplitude(1.0)
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def read_rope(hf: Mapping[str, Any]) -> Rope | Yarn:
    """The rope of all layers of a config.json: plain, or stretched by yarn. `partial_rotary_factor` is the caller's."""
    rope, name = rope_fields(hf)
    rope = {"rope_type": rope.get("type", "default"), **rope, "partial_rotary_factor": 1.0}
    kind = fields.only(rope, "rope_type", "default", "yarn", of=name)
    return (Yarn if kind == "yarn" else Rope).from_hf(rope, name)
