# SPDX-License-Identifier: Apache-2.0
"""The host tier of a generation: blocks move between two loops, since a loop moves none between the tiers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._compile import OutermostJit
from kvjax.cache import Cache
from kvjax.events.records import Events
from kvjax.serving.admit import has_row
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.preempt import leave, swaps
from kvjax.tiered import FailedTransfer, TieredCache

_has_row = OutermostJit(has_row, donate_argnums=0)
_leave = OutermostJit(leave, donate_argnums=0)
_swaps = OutermostJit(swaps, static_argnames="scheduler")


class HostTier[C: (Cache, TieredCache)]:
    """Offloads, onboards and swaps blocks of a generation; `steps` are the most steps of the model in a loop.

    Where a move cannot be made, the next step preempts.
    """

    def __init__(self, state: GenerationState[C], scheduler: Scheduler, steps: int):
        self.state, self.scheduler, self.steps = state, scheduler, steps
        self.spec = state.cache.state.spec
        self.groups = () if state.host is None else self.spec.host_groups

    def empty_blocks(self) -> None:
        """Offloads blocks until as many are empty as the next loop may take, if the host has space for them."""
        if not self.groups:
            return
        requests, slots = self.state.serving.requests, np.asarray(self.state.serving.row)
        num_tokens, max_tokens = (
            np.asarray(values)[slots[slots >= 0]] for values in (requests.num_tokens, requests.max_tokens)
        )
        size, rows = self.spec.block_size, self.spec.max_seqs
        need = int(np.sum(-(-np.minimum(max_tokens - num_tokens, self.steps) // size) + 1))
        most = rows * (-(-self.steps // size) + 1)  # in any loop: static
        if len(self.spec.groups) > 1:  # prompts take their blocks chunk by chunk
            need += int(np.sum(-(-num_tokens // size)))
            most += rows * self.spec.max_blocks_per_seq
        for number in self.groups:
            blocks = self.spec.groups[number].num_blocks
            target, options = min(need, blocks), {"most": min(most, blocks), "group": number}
            while (empty := int(self.state.cache.state.groups[number].num_empty)) < target:
                events, _ = self._call(TieredCache.watermark, target, **options)
                target = empty if events.ok else (empty + target) // 2

    def empty_refused(self) -> None:
        """Empties blocks that the loop was refused, since their children are on the host."""
        before = [int(group.num_empty) for group in self.state.cache.state.groups]
        self.empty_blocks()
        groups = self.state.cache.state.groups
        if any(int(group.num_empty) > number for group, number in zip(groups, before, strict=True)):
            self.state.serving = self.state.serving.replace(refused=jnp.int32(0))

    def onboard(self, requests: Any, slot: int, row: int) -> None:
        """Admits a request, in numpy arrays, with its blocks on the host; without them if that cannot be done."""
        num_tokens = int(requests.num_tokens[slot])
        tokens = np.zeros((1, self.state.serving.width), np.int32)
        tokens[0, :num_tokens] = requests.text[requests.start[slot] :][:num_tokens]
        options = {
            "namespace": requests.namespace[slot][None],
            "retention": jax.tree.map(lambda x: x[slot][None], requests.retention),
            "reserve_tokens": self.scheduler.chunk if len(self.spec.groups) > 1 else None,
        }
        lost = [row]
        while row in lost:  # once in any case; a move that fails takes its blocks out of the index
            events, lost = self._call(
                TieredCache.admit, np.array([row], np.int32), tokens, np.array([num_tokens], np.int32), **options
            )
        placed = np.array([slot, row], np.int32)
        self.state.serving = _has_row(self.state.serving, placed, events.cached[0], events.ok)

    def swap(self) -> bool:
        """Swaps a row out or in, if one is to be; whether there was one."""
        if self.scheduler.preempt != "swap":
            return False
        rows = jax.device_get(_swaps(self.state.serving, scheduler=self.scheduler))
        if not rows.any:
            return False
        verb, row = (TieredCache.swap_out, rows.out) if rows.out >= 0 else (TieredCache.swap_in, rows.back)
        events, _ = self._call(verb, row)
        if not bool(events.ok):
            self.state.serving = self.state.serving.replace(refused=jnp.int32(1))
        return True

    def _call(self, verb: Callable[..., Any], *args: Any, **options: Any) -> tuple[Events, list[int]]:
        """Calls a verb that moves blocks; returns the events, and rows whose K/V failed moves lost, with a warning."""
        state, lost, removed, failed = self.state, [], [], None
        try:
            tiered, events = verb(state.result, *args, now=state.now(), **options)
        except FailedTransfer as failure:
            tiered, events, lost = failure.tiered, failure.events, failure.lost
            removed, failed = [failure.removed], str(failure)
        state.serving, state.host = state.serving.replace(cache=tiered.cache), tiered.host
        state.publish(events, *removed)
        if failed is not None:  # behind what must not be lost, since a warning may be made an error
            warnings.warn(f"what was lost is computed again: {failed}", RuntimeWarning, stacklevel=2)
        for row in lost:  # their requests wait again, and find less in the cache the next time
            state.serving = _leave(state.serving, np.int32(row), np.bool_(False))
        return events, lost
