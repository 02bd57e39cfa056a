# SPDX-License-Identifier: Apache-2.0
"""The result of a prompt."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Output:
    """One prompt's result.

    Attributes:
      tokens: the generated tokens, the stop token included.
      logprobs: their log-probabilities.
      top_logprobs: for each of them the likeliest tokens with their log-probabilities, the likeliest first; empty if
        that was not asked for.
      prompt_tokens: tokens of the prompt.
      cached_tokens: those that were found in the cache and not computed, when it was first admitted.
      preemptions: how often it had to give its row up and wait again.
      finish: "stop" (a stop token), "length" (as many as wanted), "row_full", "no_blocks", "cancelled", "bad_request";
        None while it goes on, and if the generation was interrupted.
    """

    prompt_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    finish: str | None = None
    preemptions: int = 0
    top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
