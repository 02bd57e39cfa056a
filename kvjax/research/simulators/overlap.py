# SPDX-License-Identifier: Apache-2.0
"""Requests that run at the same time: the begin and end of each at a given speed, and the blocks that they hold."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kvjax.research.traces.trace import Trace


@dataclasses.dataclass(frozen=True, eq=False)
class Overlap:
    """Admits and releases in the order of time. They are fixed beforehand: a hit makes no request shorter.

    Attributes:
      time: f64[2R] ms.
      request: i32[2R].
      admit: bool[2R]; whether the request begins; else it ends, and releases its blocks.
      blocks: i32[R]; blocks that each request holds for its prompt and its answer.
      held: i32[2R]; blocks held after each step. A prompt's block that several hold is held once.
      running: i32[2R]; requests that run after each step.
    """

    time: np.ndarray
    request: np.ndarray
    admit: np.ndarray
    blocks: np.ndarray
    held: np.ndarray
    running: np.ndarray

    @property
    def most(self) -> int:
        """The most blocks that are held at once: a cache needs as many to serve the trace at this speed."""
        return int(self.held.max(initial=0))


def overlapping(trace: Trace, tokens_per_s: float = 10_000, ms_a_token: float = 50) -> Overlap:
    """The begins and ends of requests if none waits for another.

    A request begins when it comes. It ends after its whole prompt was computed, at `tokens_per_s`, and its answer made,
    at `ms_a_token`. From its beginning it holds the blocks of both. Where times are equal, releases come first.

    Args:
      trace: of R requests.
      tokens_per_s: tokens of a prompt.
      ms_a_token: of an answer.

    Raises:
      ValueError: for a speed out of range.
    """
    if not (math.isfinite(tokens_per_s) and tokens_per_s > 0):
        raise ValueError(f"tokens_per_s: got {tokens_per_s}, wanted a finite number above 0")
    if not (math.isfinite(ms_a_token) and ms_a_token >= 0):
        raise ValueError(f"ms_a_token: got {ms_a_token}, wanted a finite number of at least 0")
    number = len(trace)
    takes = trace.input_length / tokens_per_s * 1000 + trace.output_length * float(ms_a_token)
    time = np.concatenate([trace.time, trace.time + takes])
    admit = np.arange(2 * number) < number
    order = np.lexsort((np.arange(2 * number), admit, time))
    request = np.tile(np.arange(number, dtype=np.int32), 2)[order]
    admit = admit[order]
    total = trace.input_length.astype(np.int64) + trace.output_length
    blocks = -(-total // trace.block_size)
    change = np.where(admit, 1, -1)
    answers = np.cumsum(change * (blocks - trace.lengths)[request])
    return Overlap(
        time[order], request, admit, blocks.astype(np.int32),
        (answers + _prompts_held(trace, order)).astype(np.int32), np.cumsum(change).astype(np.int32),
    )  # fmt: skip


def _prompts_held(trace: Trace, order: np.ndarray) -> np.ndarray:
    """i64[2R]; prompts' blocks that are held after each step; `order` sorts the R admits and the R releases."""
    number, owner = len(trace), trace.owners
    step = np.empty(2 * number, np.int64)
    step[order] = np.arange(2 * number)
    at = np.concatenate([step[owner], step[owner + number]])
    ids = np.tile(trace.ids, 2)
    change = np.repeat(np.array([1, -1]), len(owner))
    along = np.lexsort((at, ids))
    # Each id's changes sum to 0, so one running sum counts the holders of every id.
    holders = np.cumsum(change[along])
    begins = (holders == 1) & (change[along] == 1)
    ends = holders == 0
    held = np.zeros(2 * number, np.int64)
    np.add.at(held, at[along], begins.astype(np.int64) - ends)
    return np.cumsum(held)
