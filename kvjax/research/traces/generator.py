# SPDX-License-Identifier: Apache-2.0
"""Generates random traces of system prompts whose popularity drifts, sessions of several turns, and one-shot prompts.

Also draws random sessions, for published traces that lack the contents of prompts.
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
      system_prompts: number of system prompts. The k-th most popular prompt has a weight of 1/k.
      system_tokens: tokens of a system prompt.
      user_tokens, answer_tokens: tokens of a turn.
      one_shot: the share of one-shot arrivals, which have no system prompt and no second turn.
      one_shot_tokens: tokens of a one-shot prompt.
      turns: turns of a session.
      gap_ms: time between arrivals of sessions and one-shot prompts.
      think_ms: time between turns of a session.
      drift: number of arrivals until the least popular system prompt becomes the most popular; 0 disables drift.
      block_size: tokens of a block.
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
    """Generates a random trace. Equal arguments give equal traces.

    A prompt is a system prompt and all turns of its session so far, including answers. It shares the full blocks of the
    session's previous prompt. The classes are `KINDS`.

    Args:
      seed: the seed of numpy's generator.
      requests: number of requests, R.
      workload: parameters; defaults to `Workload()`.

    Raises:
      ValueError: for `requests` below 1.

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
    waiting: list[tuple[float, int, int]] = []  # sessions: time of the next turn, index, tokens so far
    next_arrival = 0.0
    num_arrivals = 0
    records = []
    while len(records) < requests:
        if waiting and waiting[0][0] < next_arrival:
            now, session, tokens = heapq.heappop(waiting)
            kind = "later"
            tokens += tokens_of(workload.user_tokens)
        else:
            now = next_arrival
            session = num_arrivals
            kind, tokens, first_blocks[session] = _begin(random, workload, session, systems)
            next_arrival += random.exponential(workload.gap_ms)
            num_arrivals += 1
        answer = tokens_of(workload.answer_tokens)
        records.append((now, tokens, answer, kind, session))
        if kind != "one-shot" and random.random() >= 1 / workload.turns:
            heapq.heappush(waiting, (now + random.exponential(workload.think_ms), session, tokens + answer))
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
        notes=[f"Generated at random with seed {seed}: {workload}."],
    )


def _begin(
    random: np.random.Generator, workload: Workload, session: int, systems: list[tuple[int, list[int]]]
) -> tuple[str, int, list[int]]:
    """The kind of an arrival, the tokens of its prompt, and the prompt's first ids."""
    if random.random() < workload.one_shot:
        return "one-shot", int(random.geometric(1 / workload.one_shot_tokens)), []
    weights = 1 / np.arange(1, len(systems) + 1)
    rank = int(random.choice(len(systems), p=weights / weights.sum()))
    shift = session // workload.drift if workload.drift else 0
    tokens, blocks = systems[(rank - shift) % len(systems)]
    return "first", tokens + int(random.geometric(1 / workload.user_tokens)), blocks


@dataclasses.dataclass(frozen=True)
class Sessions:
    """A model of sessions: a request continues an earlier request's prompt, or begins a session.

    With probability `share` a request continues a session, drawn from the `open` most recently used sessions with
    shorter prompts. The request's prompt begins with the full blocks of the session's prompt, and its other blocks are
    unique. A session ends after `turns` requests. If the source has sessions, they are used instead, and nothing is
    random.

    The hit rates of such a trace are properties of this model, not measurements.

    Attributes:
      seed: the seed of numpy's generator.
      share: from 0 to 1.
      turns: the maximum number of requests of a session.
      open: the maximum number of sessions that may continue.
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
        """The session of each request, numbered from 0. Equal seeds and lengths give equal sessions.

        Example:
          >>> from kvjax import research
          >>> research.Sessions(seed=0, share=1.0).draw([100, 200, 300])  # each continues the session
          [0, 0, 0]
        """
        random = np.random.default_rng(self.seed)
        last: dict[int, tuple[int, int]] = {}  # session -> (tokens of its last prompt, requests so far), oldest first
        sessions: list[int] = []
        num_sessions = 0
        for tokens in input_length:
            continues = random.random() < self.share
            fits = [session for session, (previous, _) in last.items() if previous < tokens] if continues else []
            if fits:
                session = fits[random.integers(len(fits))]
                turn = last.pop(session)[1] + 1
            else:
                session = num_sessions
                turn = 1
                num_sessions += 1
            if turn < self.turns:
                last[session] = (tokens, turn)
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
    """The ids, from 0, of prompts. Each begins with the full blocks of the previous prompt of its session.

    Without `sessions` every block is unique. A session's first prompt begins with its negative ids in `system_prompts`.
    """
    prompts: list[list[int]] = []
    full: dict[Hashable, list[int]] = dict(system_prompts or {})
    next_id = 0
    for request, tokens in enumerate(input_length):
        num_full = tokens // block_size
        prompt = [] if sessions is None else full.get(sessions[request], [])[:num_full]
        num_new = -(-tokens // block_size) - len(prompt)
        prompt = [*prompt, *range(next_id, next_id + num_new)]
        next_id += num_new
        if sessions is not None:
            full[sessions[request]] = prompt[:num_full]
        prompts.append(prompt)
    return prompts
