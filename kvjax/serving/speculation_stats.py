# SPDX-License-Identifier: Apache-2.0
"""Statistics of drafts: how often they were right lately, and which of them a pass should verify."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree

# The share of the old counts left after a pass with drafts. A row forgets half of them in four passes.
_DECAY = 0.85
# The counts of a new request. A draft is verified after another one was right.
_RIGHT = 0.5
_WRONG = 1.0


class DraftStats(Pytree):
    """Counts of the drafts of some requests, all [W].

    Attributes:
      right: f32; number of right drafts lately, verified or not.
      wrong: f32; number of wrong drafts lately.
      drafted: i32; verified drafts.
      accepted: i32; verified and right drafts.
    """

    right: Any
    wrong: Any
    drafted: Any
    accepted: Any

    @classmethod
    def start(cls, num_requests: int) -> DraftStats:
        """The counts of new requests, as numpy arrays."""
        right = np.full((num_requests,), _RIGHT, np.float32)
        wrong = np.full((num_requests,), _WRONG, np.float32)
        zeros = np.zeros((num_requests,), np.int32)
        return cls(right, wrong, zeros, zeros.copy())

    @property
    def chance(self) -> jax.Array:
        """f32[W]; estimated probability of a right draft after right drafts."""
        return self.right / (self.right + self.wrong)

    def after(self, num_tried: jax.Array, num_right: jax.Array, num_drafts: jax.Array, hope: jax.Array) -> DraftStats:
        """The counts after a pass.

        Args:
          num_tried: i32[W]; drafts whose tokens are known by now.
          num_right: i32[W]; number of right drafts before the first wrong draft.
          num_drafts: i32[W]; verified drafts.
          hope: f32[W]; added to the right drafts of a request without tried drafts.
        """
        is_tried = num_tried > 0
        kept = jnp.where(is_tried, np.float32(_DECAY), np.float32(1))
        is_wrong = (num_right < num_tried).astype(jnp.float32)
        return DraftStats(
            right=self.right * kept + jnp.where(is_tried, num_right.astype(jnp.float32), hope),
            wrong=self.wrong * kept + is_wrong,
            drafted=self.drafted + num_drafts,
            accepted=self.accepted + jnp.minimum(num_right, num_drafts),
        )


def best_drafts(
    chance: jax.Array, num_drafts: jax.Array, max_drafts: int, max_total: int
) -> tuple[jax.Array, jax.Array]:
    """Chooses the likeliest drafts of all rows, at most `max_total` of them.

    Args:
      chance: f32[S]; probability of a right draft after right drafts.
      num_drafts: i32[S]; drafts of each row, at most `max_drafts`.
      max_drafts: static.
      max_total: static.

    Returns:
      i32[S], the number of chosen drafts of each row, and f32[], how many of them are expected to be right.

    Example:
      >>> from kvjax.serving.speculation_stats import best_drafts
      >>> chosen, expected = best_drafts(jnp.array([0.9, 0.5]), jnp.array([3, 3]), 3, max_total=4)
      >>> chosen.tolist(), round(float(expected), 2)  # 0.9 + 0.81 + 0.73 + 0.5
      ([3, 1], 2.94)
    """
    depth = np.arange(1, max_drafts + 1, dtype=np.int32)[None]
    is_draft = depth <= num_drafts[:, None]
    expected = jnp.where(is_draft, chance[:, None] ** depth.astype(np.float32), 0.0)
    if max_total < expected.size:
        is_draft = is_draft & (_rank(expected.reshape(-1)) < max_total).reshape(expected.shape)
        expected = jnp.where(is_draft, expected, 0.0)
    return jnp.sum(is_draft, axis=1, dtype=jnp.int32), jnp.sum(expected)


def _rank(values: jax.Array) -> jax.Array:
    """i32[K]; the number of larger values, and of equal values before it, for each of values f32[K].

    It compares all pairs, which takes a single kernel on a GPU. A sort takes several.
    """
    index = jnp.arange(values.size, dtype=jnp.int32)
    is_equal_before = (values[None] == values[:, None]) & (index[None] < index[:, None])
    return jnp.sum((values[None] > values[:, None]) | is_equal_before, axis=1, dtype=jnp.int32)
