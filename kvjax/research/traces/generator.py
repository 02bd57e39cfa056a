# SPDX-License-Identifier: Apache-2.0
"""Random traces: system prompts whose popularity drifts, sessions of several turns, one-shot prompts.

And random sessions, for published traces without the contents of prompts.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from kvjax.research.traces.trace import Trace, make_trace

KINDS = ("first", "later", "one-shot")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Parameters of a random trace. Lengths and times are means of geometric and exponential distributions.

    Attributes:
      system_prompts: the number of them. The k-th most popular one is drawn with a weight of 1/k.
      system_tokens: of a system prompt.
      user_tokens, answer_tokens: of a turn.
      one_shot: the share of arrivals that are prompts of their own: no system prompt, no second turn.
      one_shot_tokens: of such a prompt.
      turns: of a session.
      gap_ms: between arrivals of sessions and one-shot prompts.
      think_ms: between turns of a session.
      drift: arrivals after which the least popular system prompt becomes the most popular one; 0: never.
      block_size: tokens.
    """

    system_prompts: int = 8
    system_tokens: int = 400
    user_tokens: int = 120
    answer_tokens: int = 200
    one_shot: float = 0.3
    one_shot_tokens: int = 800
    turns: float = 4.0
    gap_ms: float = 500.0
    think_ms: float = 20_000.0
    drift: int = 200
    block_size: int = 16

    def __post_init__(self):
        """Raises ValueError for values out of range."""
        for name in ("system_prompts", "system_tokens", "user_tokens", "answer_tokens", "one_shot_tokens", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1")
        if not 0 <= self.one_shot <= 1:
            raise ValueError(f"one_shot: got {self.one_shot}, wanted a share from 0 to 1")
        for name in ("gap_ms", "think_ms", "drift"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 0")


def draw_trace(seed: int, requests: int = 1000, workload: Workload | None = None) -> Trace:
    """A trace drawn at random, equal for equal arguments.

    A prompt is a system prompt and all turns of its session so far, answers included. It shares with the prompt before
    it the blocks that are full there. The classes are `KINDS`.

    Args:
      seed: of numpy's generator.
      requests: R.
      workload: parameters; None: the defaults.

    Raises:
      ValueError: for fewer than one request.

    Example:
      >>> from kvjax import research
      >>> trace = research.draw_trace(seed=0, requests=50)
      >>> len(trace.time), trace.block_size, trace.kinds
      (50, 16, ('first', 'one-shot', 'later'))
      >>> bool((trace.ids == research.draw_trace(seed=0, requests=50).ids).all())
      True
    """
    if requests < 1:
        raise ValueError(f"requests: got {requests}, wanted at least 1")
    workload = Workload() if workload is None else workload
    random = np.random.default_rng(seed)
    tokens_of = lambda mean: int(random.geometric(1 / mean))  # noqa: E731
    system_ids = itertools.count(-1, -1)
    systems = []  # (tokens, ids of full blocks) of each system prompt
    for _ in range(workload.system_prompts):
        tokens = tokens_of(workload.system_tokens)
        systems.append((tokens, [next(system_ids) for _ in range(tokens // workload.block_size)]))
    first_blocks: dict[Hashable, list[int]] = {}
    waiting: list[tuple[float, int, int]] = []  # sessions: time of the next turn, number, tokens so far
    arrival, arrivals = 0.0, 0
    records = []
    while len(records) < requests:
        if waiting and waiting[0][0] < arrival:
            now, number, tokens = heapq.heappop(waiting)
            kind, tokens = "later", tokens + tokens_of(workload.user_tokens)
        else:
            now, number = arrival, arrivals
            kind, tokens, first_blocks[number] = _begin(random, workload, number, systems)
            arrival, arrivals = arrival + random.exponential(workload.gap_ms), arrivals + 1
        answer = tokens_of(workload.answer_tokens)
        records.append((now, tokens, answer, kind, number))
        if kind != "one-shot" and random.random() >= 1 / workload.turns:
            heapq.heappush(waiting, (now + random.exponential(workload.think_ms), number, tokens + answer))
    time, lengths, answers, kinds, sessions = zip(*records, strict=True)
    prompts = blocks_of(sessions, lengths, workload.block_size, first_blocks)
    return make_trace(
        time,
        lengths,
        answers,
        prompts,
        workload.block_size,
        kind=kinds,
        session=sessions,
        notes=[f"Drawn at random with seed {seed}: {workload}."],
    )


def _begin(
    random: np.random.Generator, workload: Workload, number: int, systems: list[tuple[int, list[int]]]
) -> tuple[str, int, list[int]]:
    """The kind of the `number`-th arrival, the tokens of its prompt, and the ids that this begins with."""
    if random.random() < workload.one_shot:
        return "one-shot", int(random.geometric(1 / workload.one_shot_tokens)), []
    weights = 1 / np.arange(1, len(systems) + 1)
    rank = int(random.choice(len(systems), p=weights / weights.sum()))
    turned = number // workload.drift if workload.drift else 0
    tokens, blocks = systems[(rank - turned) % len(systems)]
    return "first", tokens + int(random.geometric(1 / workload.user_tokens)), blocks


@dataclasses.dataclass(frozen=True)
class Sessions:
    """A model of sessions: a request goes on with an earlier one's prompt, or begins a session of its own.

    With probability `share` a request goes on with a session, drawn among the `open` sessions used last whose prompt it
    is longer than. Its prompt begins with the full blocks of that prompt; all others are its own. A session ends with
    its `turns`-th request. Where the source tells the sessions, those are taken instead, and nothing is drawn.

    The hit rates of such a trace are those of this model: they are no measurement.

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
        """Raises ValueError for values out of range."""
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: got {self.share}, wanted a probability")
        for name in ("turns", "open"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1")

    def draw(self, input_length: Sequence[int]) -> list[int]:
        """The session of each request, numbered from 0; equal for equal seeds and lengths.

        Example:
          >>> from kvjax import research
          >>> research.Sessions(seed=0, share=1.0).draw([100, 200, 300])  # each goes on with the one before
          [0, 0, 0]
        """
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


def blocks_of(
    sessions: Sequence[Hashable] | None,
    input_length: Sequence[int],
    block_size: int,
    system_prompts: Mapping[Hashable, list[int]] | None = None,
) -> list[list[int]]:
    """The ids, from 0, of prompts that begin with the full blocks of the prompt before them in their session.

    Without `sessions` every block is its own. A session's first prompt begins with the negative ids `system_prompts`.
    """
    prompts: list[list[int]] = []
    full: dict[Hashable, list[int]] = dict(system_prompts or {})
    begun = 0
    for number, tokens in enumerate(input_length):
        whole = tokens // block_size
        prompt = [] if sessions is None else full.get(sessions[number], [])[:whole]
        new = -(-tokens // block_size) - len(prompt)
        prompt = [*prompt, *range(begun, begun + new)]
        begun += new
        if sessions is not None:
            full[sessions[number]] = prompt[:whole]
        prompts.append(prompt)
    return prompts
