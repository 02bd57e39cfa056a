# SPDX-License-Identifier: Apache-2.0
"""The outputs of requests, on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from kvjax.serving.requests import Finish, Serving, Stage


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

    def update(self, requests: Any, slot: int) -> list[int]:
        """Adds what a request in numpy arrays has got meanwhile; returns its new tokens."""
        start = int(requests.start[slot])
        new = slice(start + self.prompt_tokens + len(self.tokens), start + int(requests.num_tokens[slot]))
        tokens = requests.text[new].tolist()
        self.tokens += tokens
        self.logprobs += requests.logprobs[new].tolist()
        if requests.top is not None:
            likeliest, logprobs = (column[new].tolist() for column in requests.top)
            self.top_logprobs += [dict(zip(*one, strict=True)) for one in zip(likeliest, logprobs, strict=True)]
        self.cached_tokens = int(requests.cached[slot])
        self.preemptions = int(requests.preemptions[slot])
        finish = Finish(int(requests.finish[slot]))
        self.finish = None if finish == Finish.NONE else finish.name.lower()
        return tokens


def results(serving: Serving) -> dict[tuple[int, int], Output]:
    """The output of each request so far, by (slot, generation), on the host."""
    requests: Any = jax.device_get(serving.requests)
    found = {}
    for slot in np.flatnonzero(requests.stage != Stage.EMPTY).tolist():
        output = found[slot, int(requests.generation[slot])] = Output(int(requests.prompt[slot]))
        output.update(requests, slot)
    return found
