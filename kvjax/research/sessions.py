# SPDX-License-Identifier: Apache-2.0
"""Equal blocks, drawn at random, for traces that say nothing about the contents of prompts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

NO_CONTENTS = "The source does not say what prompts have in common: every block is its own, and nothing can hit."


@dataclasses.dataclass(frozen=True)
class Sessions:
    """A model of sessions: a request goes on with an earlier one's prompt, or begins a session of its own.

    With probability `share` a request goes on with a session, drawn among the `open` sessions used last whose prompt it
    is longer than. Its prompt begins with the full blocks of that prompt; all others are its own. A session ends with
    its `turns`-th request. Where the source tells the sessions, those are taken instead, and nothing is drawn.

    What such a trace says about hit rates is what this model says: it is no measurement.

    Attributes:
      seed: of what is drawn.
      share: from 0 to 1.
      turns: the most requests of a session.
      open: the most sessions that may go on.
    """

    seed: int = 0
    share: float = 0.5
    turns: int = 8
    open: int = 64

    def __post_init__(self):
        """Raises ValueError for what is no model."""
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: got {self.share}, wanted a probability")
        for name in ("turns", "open"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1")

    def draw(self, input_length: Sequence[int]) -> list[int]:
        """The session of each request, numbered from 0; equal for equal seeds and lengths."""
        random = np.random.default_rng(self.seed)
        last: dict[int, tuple[int, int]] = {}  # session -> (tokens of its last prompt, requests so far), oldest first
        sessions: list[int] = []
        begun = 0
        for tokens in input_length:
            goes_on = random.random() < self.share
            fits = [session for session, (least, _) in last.items() if least < tokens] if goes_on else []
            if fits:
                session = fits[random.integers(len(fits))]
                turn = last.pop(session)[1] + 1
            else:
                session, turn, begun = begun, 1, begun + 1
            if turn < self.turns:
                last[session] = tokens, turn
                if len(last) > self.open:
                    del last[next(iter(last))]
            sessions.append(session)
        return sessions


def blocks_of(sessions: Sequence[Hashable] | None, input_length: Sequence[int], block_size: int) -> list[list[int]]:
    """The ids of prompts that begin with the full blocks of the prompt before them in their session.

    Args:
      sessions: what tells each request's session; None: every block is its own.
      input_length: tokens of each prompt.
      block_size: tokens.
    """
    prompts: list[list[int]] = []
    full: dict[Hashable, list[int]] = collections.defaultdict(list)
    begun = 0
    for number, tokens in enumerate(input_length):
        whole = tokens // block_size
        prompt = [] if sessions is None else full[sessions[number]][:whole]
        new = -(-tokens // block_size) - len(prompt)
        prompt = [*prompt, *range(begun, begun + new)]
        begun += new
        if sessions is not None:
            full[sessions[number]] = prompt[:whole]
        prompts.append(prompt)
    return prompts
