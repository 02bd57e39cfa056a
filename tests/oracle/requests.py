# SPDX-License-Identifier: Apache-2.0
"""The parts of the scheduler in plain Python (`scheduler.py`): options, requests, and the report of a step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal


class Stage(enum.IntEnum):
    """The stage of a request. EMPTY means the slot is free. The numbers are the library's, as in `Finish`."""

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
    """A request as submitted. `sample_of` is the number of an earlier request of the batch with the same prompt."""

    tokens: Sequence[int]
    max_tokens: int
    priority: int = 0
    namespace: int = 0
    seed: int = 0
    stop: Sequence[int] = ()
    sample_of: int = -1


@dataclasses.dataclass(eq=False)
class Request:
    """A slot for requests, and its request.

    Attributes:
      slot: its slot.
      generation: makes its name unique, together with the slot.
      tokens: its prompt, then its generated tokens.
      prompt: the number of tokens of the prompt.
      max_tokens: the number of tokens at which it ends. The last token is never written into the cache.
      arrival: a number in order of submission.
      passed: the number of later requests admitted while it waited.
      parent: the request with the same prompt which it waits for, until the prompt is computed.
      cached: the number of tokens found in the cache when it was first admitted.
      submitted: steps of the model before its submission.
      first_token: steps of the model before its first token, or -1.
      ended: steps of the model before its end, or -1.
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
      reserve: "max_tokens": a request is admitted when blocks suffice for all tokens which it and the running requests
        may still get. "batch": the same, when no row runs. "num_tokens": when blocks suffice for its present tokens.
      chunk: maximum tokens of a row in a mixed step.
      chunk_rows: maximum rows with chunks in a mixed step.
      budget: positions of a mixed step. Each row has one, and the others are for chunks. None means as many as a chunk
        has.
      chunks: the rows which get them. "fcfs": in order, each as many as it can use. "equal": the same number for each.
      k: maximum decode steps of a block of steps.
      k_waiting: the same while a request waits.
      watermark: blocks left over by "num_tokens", unless no row runs.
      max_deferrals: maximum later requests admitted before a request.
      max_skips: maximum requests passed over in a step because they cannot be admitted.
      wait_for_prefix: whether a request waits while a row computes the next block of its prefix.
      coalesce: the number of rows which want chunks, or of blocks of steps which they waited, before a step is mixed.
      canonical: whether a step has chunks of a single row, which begin at multiples of `chunk`. Decoded tokens are not
        found in the cache then.
      order: a key. The smallest comes first, then the earliest. The last is preempted.
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
        """The reused part of a prompt ends at a multiple of these tokens. None means it ends anywhere."""
        return self.chunk if self.canonical else None


@dataclasses.dataclass
class Report:
    """The report of a step of the scheduler.

    Attributes:
      released: the released rows, in order, including rows of preempted requests.
      preempted: slots, in order.
      admitted: (slot, row, cached tokens), in order, without samples which hold rows for an admitted request.
      n: the number of decode steps with reserved blocks. 0 means they were refused.
      mixed: whether it was a mixed step.
      chunks: {row: tokens of its chunk}, in order.
      out_of_blocks: rows without blocks for their chunk.
      decoded: rows which computed a token, or a token in each step of a block.
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
