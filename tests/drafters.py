# SPDX-License-Identifier: Apache-2.0
"""A drafter for tests whose drafts are right, wrong or random. All of them share a program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.serving.speculation import Drafting, Drafts
from kvjax.serving.speculation_models import ModelDrafter

RIGHT, WRONG, RANDOM = range(3)


class Guesses(ModelDrafter, static=("num_tokens", "max_drafts", "vocabulary")):
    """The choices of the model itself, changed by a mode. Every pass is wide unless `pass_cost` is positive.

    Attributes:
      mode: i32[]; RIGHT, WRONG, or RANDOM numbers of drafts, a third of which are wrong.
      vocabulary: static.
    """

    mode: np.int32 = np.int32(RANDOM)
    vocabulary: int = 0

    hope = 0.0

    @classmethod
    def of(cls, model, vocabulary, mode=RANDOM, num_tokens=3, max_drafts=None, pass_cost=-1.0):
        return cls(num_tokens, model, max_drafts, np.float32(pass_cost), np.int32(mode), vocabulary)

    def __post_init__(self):
        """Checks nothing."""

    def propose(self, drafting: Drafting) -> Drafts:
        drafts = super().propose(drafting)
        seqs = drafting.cache.state.seqs
        key = jax.random.fold_in(jax.random.key(0), jnp.sum(seqs.committed + drafting.written))
        is_wrong = jax.random.randint(key, drafts.tokens.shape, 0, 3) == 0
        is_wrong = (self.mode == WRONG) | ((self.mode == RANDOM) & is_wrong)
        tokens = jnp.where(is_wrong, (drafts.tokens + 1) % self.vocabulary, drafts.tokens)
        count = jax.random.randint(key, drafts.count.shape, 0, self.num_tokens + 1)
        count = jnp.where(self.mode == RANDOM, jnp.minimum(count, drafts.count), drafts.count)
        return Drafts(tokens, count, drafts.pools)
