# SPDX-License-Identifier: Apache-2.0
"""Drafts from a row's own text: the tokens after an earlier occurrence of its last tokens."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.checks import static_int
from kvjax.serving.speculation import Drafter, Drafting, Drafts
from kvjax.serving.speculation_cost import share_of

_NAMES = "num_tokens", "max_ngram", "min_ngram", "window", "max_drafts"


def ngram(
    num_tokens: int = 6,
    *,
    max_ngram: int = 4,
    min_ngram: int = 2,
    window: int = 4096,
    max_drafts: int | None = 16,
    pass_cost: float | None = None,
) -> Drafter:
    """Makes a drafter of the tokens after an earlier occurrence of a row's last tokens in its own text.

    It needs no weights. It pays if answers repeat parts of their prompts, or themselves: rewriting, extraction, code
    edits. It proposes drafts for every pass, and compares them with the chosen tokens even if the pass verifies
    none. So it begins to draft when its guesses are right, and costs other answers next to nothing.

    Args:
      num_tokens: static; maximum drafts of a row in a pass.
      max_ngram: static; maximum number of last tokens to look up. The longest match wins, then the latest.
      min_ngram: static; minimum number of them to find.
      window: static; number of the latest tokens to search. The cost of a search follows it, and not the text.
      max_drafts: static; see `Drafter`.
      pass_cost: see `Drafter`.

    Raises:
      ValueError: naming the argument.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=1, max_length=32, block_size=8)
      >>> def next_number(tokens, pools, view, *, last):  # no layers: after 3 comes 0
      ...     return jax.nn.one_hot((tokens[jnp.arange(len(tokens)), last] + 1) % 4, 50), pools
      >>> model, cache = jax.tree_util.Partial(next_number), kvjax.Cache.create(spec)
      >>> outputs, *_ = kvjax.generate(
      ...     model, cache, [[0, 1, 2, 3, 0]], max_new_tokens=16, drafter=kvjax.serving.ngram(3)
      ... )
      >>> outputs[0].tokens, outputs[0].accepted_tokens > 4
      ([1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0], True)

    Source: prompt lookup decoding (Saxena 2023), vLLM's `ngram` and llama.cpp's lookup.
    """
    return NGram(num_tokens, max_ngram, min_ngram, window, max_drafts, share_of("pass_cost", pass_cost))


class NGram(Drafter, static=_NAMES):
    """See `ngram`."""

    max_ngram: int
    min_ngram: int
    window: int
    max_drafts: int | None
    pass_cost: Any

    def __post_init__(self):
        static_int("num_tokens", self.num_tokens, 1)
        static_int("min_ngram", self.min_ngram, 1)
        static_int("max_ngram", self.max_ngram, self.min_ngram)
        static_int("window", self.window, self.max_ngram + 1)
        check_max_drafts(self.max_drafts)

    def propose(self, drafting: Drafting) -> Drafts:
        """See `Drafter`."""
        text = drafting.text
        length = drafting.length
        assert text is not None
        size = text.shape[1]
        end = np.arange(size, dtype=np.int32)[None]  # index of the last token of an occurrence
        matches = end < length[:, None] - 1
        num_matched = jnp.zeros(text.shape, jnp.int32)
        for back in range(self.max_ngram):
            shifted = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, :size]
            last = jnp.take_along_axis(text, jnp.maximum(length - 1 - back, 0)[:, None], axis=1)
            matches = matches & (shifted == last) & (length > back)[:, None]
            num_matched += matches.astype(jnp.int32)
        score = jnp.where(num_matched >= self.min_ngram, num_matched * size + end, -1)
        best_score = jnp.max(score, axis=1)  # it says where, so there is no argmax, which would be another kernel
        is_match = best_score >= 0
        best = jnp.maximum(best_score, 0) % size
        # Beyond the end of the text, its last tokens are taken to repeat.
        period = jnp.maximum(length - 1 - best, 1)
        ahead = np.arange(self.num_tokens, dtype=np.int32)[None] % period[:, None]
        tokens = jnp.take_along_axis(text, best[:, None] + 1 + ahead, axis=1)
        count = jnp.where(drafting.wanted & is_match, self.num_tokens, 0)
        return Drafts(tokens, count, drafting.cache.pools)


def check_max_drafts(max_drafts: int | None) -> None:
    """Raises a ValueError unless this is None or a positive integer."""
    if max_drafts is not None:
        static_int("max_drafts", max_drafts, 1)
