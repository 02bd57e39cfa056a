# SPDX-License-Identifier: Apache-2.0
"""The configuration of one attention layer."""

from __future__ import annotations

import dataclasses

from .rope import Rope


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One attention layer: K kv heads of width D, its window (None: full attention) and its rope.

    A token attends to the last `window` tokens, itself included.

    Attributes:
      kv_heads: K.
      head_dim: D, of queries, keys and values.
      window: in tokens.
      rope: how queries and keys are rotated.
      keys_are_values: whether the values are the keys' projection (before norm and rope) instead of their own.
      reuses: number of the earlier layer whose keys and values this one attends to; it has none itself.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    rope: Rope = dataclasses.field(default_factory=Rope)
    keys_are_values: bool = False
    reuses: int | None = None

    def check(self, num_heads: int) -> LayerConfig:
        """Returns itself; ValueError if K does not divide the query heads, D is odd, or the rope does not fit."""
        if num_heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads: got {self.kv_heads}, wanted a divisor of num_attention_heads={num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, wanted an even number")
        self.rope.check(self.head_dim)
        return self
