# SPDX-License-Identifier: Apache-2.0
"""The parts of the scheduler in plain Python (`scheduler.py`): options, requests, and the report of a step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal


class Stage(enum.IntEnum):
    """The stage of a request; EMPTY: the slot is free. The numbers are the library's, as in `Finish`."""

    EMPTY = 0
    WAITING = 1
    RUNNING = 2
    DONE = 3
    CANCELLED = 4


class Finish(enum.IntEnum):
    """The reason of a request's end."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    NO_BLOCKS = 3
    CANCELLED = 4


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request as submitted; `sample_of` is the number of an earlier one of the batch with the same prompt."""

    tokens: Sequence[int]
    max_tokens: int
    priority: int = 0
    namespace: int = 0
    seed: int = 0
    stop: Sequence[int] = ()
    sample_of: int = -1


@dataclasses.dataclass(eq=False)
class Request:
    """A slot for requests, and the one in it.

    Attributes:
      slot, generation: its name; no other request ever has the same.
      tokens: its prompt, then its generated tokens.
      prompt: the number of tokens of the prompt.
      max_tokens: the number of tokens at which it ends. The last one is never written into the cache.
      arrival: a number in order of submission.
      passed: the number of later requests that were admitted while it waited.
      parent: the request whose prompt it is another sample of, until that is computed.
      cached: the number of tokens found in the cache when it was first admitted.
      submitted, first_token, ended: steps of the model until then; -1: not yet.
    """

    slot: int
    generation: int = 0
    stage: Stage = Stage.EMPTY
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt: int = 0
    max_tokens: int = 0
    priority: int = 0
    arrival: int = 0
    namespace: int = 0
    seed: int = 0
    stop: Sequence[int] = ()
    parent: Request | None = None
    passed: int = 0
    finish: Finish = Finish.NONE
    cached: int = 0
    preemptions: int = 0
    submitted: int = 0
    first_token: int = -1
    ended: int = -1

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.stage in (Stage.DONE, Stage.CANCELLED)

    def end(self, finish: Finish, steps: int) -> None:
        """Ends it after so many steps."""
        self.stage = Stage.CANCELLED if finish == Finish.CANCELLED else Stage.DONE
        self.finish, self.ended = finish, steps


def by_priority(request: Request, cache: Any) -> Any:
    """The default order: higher priorities first."""
    del cache
    return -request.priority


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a scheduler, the same for all its steps.

    Attributes:
      reserve: "max_tokens": a request is admitted when blocks suffice for all tokens that it and the running ones may
        still get; "batch": the same, when no row runs; "num_tokens": when they suffice for the tokens that it has.
      chunk: the most tokens of a row that a mixed step computes.
      chunk_rows: the most rows that have chunks in a mixed step.
      budget: positions of a mixed step; each row has one, the others are for chunks. None: as many as a chunk has.
      chunks: the rows that get them: "fcfs", in order, each as many as it can use; "equal", the same number for each.
      k: the most decode steps of a block of steps.
      k_waiting: likewise while a request waits.
      watermark: blocks that "num_tokens" leaves, unless no row runs.
      max_deferrals: the number of later requests that may be admitted before one.
      max_skips: the most requests that one step passes over because they cannot be admitted.
      wait_for_prefix: whether a request waits while a row computes the next block of its prefix.
      coalesce: the number of rows that want chunks, or of blocks of steps that they waited, before a step is mixed.
      canonical: whether a step has chunks of one row, which begin at multiples of `chunk`; then what was decoded is not
        found in the cache.
      order: a key; the smallest is first, then the earliest. The last one is preempted.
    """

    reserve: Literal["max_tokens", "num_tokens", "batch"] = "max_tokens"
    chunk: int = 64
    chunk_rows: int = 4
    budget: int | None = None
    chunks: Literal["fcfs", "equal"] = "fcfs"
    k: int = 4
    k_waiting: int = 4
    watermark: int = 0
    max_deferrals: int = 64
    max_skips: int = 4
    wait_for_prefix: bool = True
    coalesce: int = 1
    canonical: bool = False
    order: Callable[[Request, Any], Any] = by_priority

    @property
    def alignment_tokens(self) -> int | None:
        """The tokens at whose multiples the reused part of a prompt may end; None: anywhere."""
        return self.chunk if self.canonical else None


@dataclasses.dataclass
class Report:
    """The report of one step of the scheduler.

    Attributes:
      released: the released rows, in order, including those of preempted requests.
      preempted: slots, in order.
      admitted: (slot, row, cached tokens), in order; without the samples that hold rows for one of these.
      n: the number of decode steps that blocks were reserved for; 0: they were refused.
      mixed: whether it was a mixed step.
      chunks: {row: tokens of its chunk}, in order.
      out_of_blocks: rows that found no block for their chunk.
      decoded: rows that computed one token, or one in each step of a block.
      chosen: {row: chosen tokens}.
    """

    released: list[int] = dataclasses.field(default_factory=list)
    preempted: list[int] = dataclasses.field(default_factory=list)
    admitted: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    n: int = 0
    mixed: bool = False
    chunks: dict[int, int] = dataclasses.field(default_factory=dict)
    out_of_blocks: list[int] = dataclasses.field(default_factory=list)
    decoded: list[int] = dataclasses.field(default_factory=list)
    chosen: dict[int, list[int]] = dataclasses.field(default_factory=dict)
