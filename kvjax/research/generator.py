# SPDX-License-Identifier: Apache-2.0
"""Traces drawn at random: system prompts whose popularity drifts, sessions of several turns, one-shot prompts."""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import numpy as np

from kvjax.research.traces import Trace, make_trace

KINDS = ("first", "later", "one-shot")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Parameters of a workload. Lengths and times are means of geometric and exponential distributions.

    Attributes:
      system_prompts: how many there are. Of those, the k-th most popular one is drawn with a weight of 1/k.
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
        """Raises ValueError for what cannot be drawn."""
        for name in ("system_prompts", "system_tokens", "user_tokens", "answer_tokens", "one_shot_tokens", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1")
        if not 0 <= self.one_shot <= 1:
            raise ValueError(f"one_shot: got {self.one_shot}, wanted a share from 0 to 1")
        for name in ("gap_ms", "think_ms", "drift"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 0")


@dataclasses.dataclass
class _Session:
    """A session that goes on: its number, what its last prompt had in full blocks, and its text so far."""

    number: int
    kind: str
    full: list[int]
    tokens: int


def draw_trace(seed: int, requests: int = 1000, workload: Workload | None = None) -> Trace:
    """A trace drawn at random, equal for equal arguments.

    A prompt is a system prompt and all turns of its session so far, answers included. It shares with the prompt before
    it the blocks that are full there. The classes are `KINDS`.

    Args:
      seed: of what is drawn.
      requests: R.
      workload: what is drawn; None: the defaults.

    Raises:
      ValueError: for fewer than one request.
    """
    if requests < 1:
        raise ValueError(f"requests: got {requests}, wanted at least 1")
    workload = Workload() if workload is None else workload
    random = np.random.default_rng(seed)
    tokens_of = lambda mean: int(random.geometric(1 / mean))  # noqa: E731
    fresh = itertools.count()
    systems = []
    for _ in range(workload.system_prompts):
        tokens = tokens_of(workload.system_tokens)
        systems.append((tokens, [next(fresh) for _ in range(tokens // workload.block_size)]))
    waiting: list[tuple[float, int, _Session]] = []  # (when its next turn comes, its number, it)
    arrival, arrivals = 0.0, 0
    lines = []
    while len(lines) < requests:
        if waiting and waiting[0][0] < arrival:
            now, _, session = heapq.heappop(waiting)
            session.tokens += tokens_of(workload.user_tokens)
        else:
            now, session = arrival, _begin(random, workload, arrivals, systems)
            arrival, arrivals = arrival + random.exponential(workload.gap_ms), arrivals + 1
        answer = tokens_of(workload.answer_tokens)
        whole = session.tokens // workload.block_size
        begun = -(-session.tokens // workload.block_size)
        prompt = [*session.full, *itertools.islice(fresh, begun - len(session.full))]
        lines.append((now, session.tokens, answer, prompt, session.kind, session.number))
        if session.kind != "one-shot" and random.random() >= 1 / workload.turns:
            session.full, session.kind, session.tokens = prompt[:whole], "later", session.tokens + answer
            heapq.heappush(waiting, (now + random.exponential(workload.think_ms), session.number, session))
    time, lengths, answers, prompts, kinds, sessions = zip(*lines, strict=True)
    return make_trace(
        time, lengths, answers, prompts, workload.block_size, kind=kinds, session=sessions,
        notes=[f"Drawn at random with seed {seed}: {workload}."],
    )  # fmt: skip


def _begin(
    random: np.random.Generator, workload: Workload, number: int, systems: list[tuple[int, list[int]]]
) -> _Session:
    """The `number`-th arrival: a session's first turn, or a one-shot prompt."""
    if random.random() < workload.one_shot:
        return _Session(number, "one-shot", [], int(random.geometric(1 / workload.one_shot_tokens)))
    weights = 1 / np.arange(1, len(systems) + 1)
    rank = int(random.choice(len(systems), p=weights / weights.sum()))
    turned = number // workload.drift if workload.drift else 0
    tokens, blocks = systems[(rank - turned) % len(systems)]
    return _Session(number, "first", blocks, tokens + int(random.geometric(1 / workload.user_tokens)))
