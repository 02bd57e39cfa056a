# SPDX-License-Identifier: Apache-2.0
"""Drafts from a row's own text: the tokens after an earlier occurrence of its last tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvjax.checks import static_int
from kvjax.serving.speculation import Drafter, Drafting, Drafts

_NAMES = "num_tokens", "max_ngram", "min_ngram", "window", "max_drafts", "pass_cost"


def ngram(
    num_tokens: int = 6,
    *,
    max_ngram: int = 4,
    min_ngram: int = 2,
    window: int = 4096,
    max_drafts: int | None = 16,
    pass_cost: float = 0.7,
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
      pass_cost: static; see `Drafter`.

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
    return NGram(num_tokens, max_ngram, min_ngram, window, max_drafts, pass_cost)


class NGram(Drafter, static=_NAMES):
    """See `ngram`."""

    max_ngram: int
    min_ngram: int
    window: int
    max_drafts: int | None
    pass_cost: float

    def __post_init__(self):
        static_int("num_tokens", self.num_tokens, 1)
        static_int("min_ngram", self.min_ngram, 1)
        static_int("max_ngram", self.max_ngram, self.min_ngram)
        static_int("window", self.window, self.max_ngram + 1)
        check_costs(self)

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
        best = jnp.argmax(score, axis=1).astype(jnp.int32)
        is_match = jnp.max(score, axis=1) >= 0
        # Beyond the end of the text, its last tokens are taken to repeat.
        period = jnp.maximum(length - 1 - best, 1)
        ahead = np.arange(self.num_tokens, dtype=np.int32)[None] % period[:, None]
        tokens = jnp.take_along_axis(text, best[:, None] + 1 + ahead, axis=1)
        count = jnp.where(drafting.wanted & is_match, self.num_tokens, 0)
        return Drafts(tokens, count, drafting.cache.pools)


def check_costs(drafter: Drafter) -> None:
    """Raises a ValueError unless a drafter's `max_drafts` and `pass_cost` are in range."""
    if drafter.max_drafts is not None:
        static_int("max_drafts", drafter.max_drafts, 1)
    if not isinstance(drafter.pass_cost, int | float) or not drafter.pass_cost >= 0:
        raise ValueError(f"pass_cost: got {drafter.pass_cost!r}, wanted a number of at least 0")
