# SPDX-License-Identifier: Apache-2.0
"""Explanations of missing blocks: in outputs, and once a run in the log `kvjax`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax._compile import log
from kvjax.serving.capacity import max_blocks
from kvjax.serving.options import Scheduler
from kvjax.state import CacheState


class Shortage(NamedTuple):
    """The blocks that a request lacks."""

    reason: str  # the group, the blocks wanted, and the blocks there
    is_held: bool  # whether the whole cache has enough blocks, so that rows and pins hold the missing ones


def explain(state: CacheState, scheduler: Scheduler, num_tokens: int) -> Shortage:
    """The group in which a request of `num_tokens` tokens lacks most blocks, with the blocks wanted and there."""
    wanted: list[Any] = max_blocks(state.spec, scheduler, np.int32(num_tokens + 1))  # numpy, so nothing is compiled
    counts = jax.device_get([(group.num_blocks, group.available) for group in state.groups])
    lacks = [int(blocks) - int(available) for blocks, (_, available) in zip(wanted, counts, strict=True)]
    index = int(np.argmax(lacks))
    num_blocks, available = map(int, counts[index])
    is_held = int(wanted[index]) <= num_blocks
    reason = (
        f"{state.spec.group_name(index)}{int(wanted[index])} blocks wanted for {num_tokens} tokens, {num_blocks} in "
        f"the cache, {available} of them free{'; rows and pins hold the others' if is_held else ''}"
    )
    return Shortage(reason, is_held)


class ShortageLog:
    """Writes the first shortage of each kind of a run to the log `kvjax`, at level WARNING."""

    def __init__(self) -> None:
        self._written: set[str] = set()

    def has(self, kind: str) -> bool:
        """Whether a shortage of this kind has been written."""
        return kind in self._written

    def write(self, kind: str, request_number: int, reason: str) -> None:
        """Writes the reason for this kind of shortage, and the request, if it is the first of the kind."""
        if not self.has(kind):
            self._written.add(kind)
            log.warning(
                "request %d %s: %s; only the first such request of a run is reported", request_number, kind, reason
            )
