# SPDX-License-Identifier: Apache-2.0
"""The host tier of a driver. Blocks move between the tiers before and after a loop, because a loop cannot move them.

In a cache with backups, blocks are copied before the loop that may evict them. Otherwise they leave the device ahead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from kvjax._compile import OutermostJit
from kvjax.cache import AnyCache
from kvjax.events.records import Events
from kvjax.pools.host import HostPools, compile_moves
from kvjax.serving.admit import has_row
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.preempt import leave, swaps
from kvjax.serving.requests import Stage
from kvjax.tiered import FailedTransfer, TieredCache

_has_row = OutermostJit(has_row, donate_argnums=0)
_leave = OutermostJit(leave, donate_argnums=0)
_swaps = OutermostJit(swaps, static_argnames="scheduler")


class HostTier[C: AnyCache]:
    """Moves blocks between the tiers, for loops of at most `steps` steps. If it cannot, a step preempts requests."""

    def __init__(self, state: GenerationState[C], scheduler: Scheduler, steps: int):
        self.state = state
        self.scheduler = scheduler
        self.steps = steps
        self.spec = state.cache.state.spec
        self.groups = () if state.host is None else self.spec.host_groups

    def compile(self) -> None:
        """Compiles all programs for moving blocks, before the first request. Changes nothing."""
        state = self.state
        host = self.state.host
        for group_index in self.groups:
            compile_moves(state.cache.pools, cast(HostPools, host), group_index)
            if self.spec.backups:
                self.call(TieredCache.backup, num_blocks=0, max_blocks=self._max_copied(group_index), group=group_index)
            else:
                self.call(TieredCache.watermark, 0, max_blocks=self._max_taken(group_index), group=group_index)
        if self.groups:
            self.onboard(jax.device_get(state.serving.requests), 0, 0)  # refused, because it has no tokens
            state.serving = _leave(state.serving, np.int32(0), np.bool_(False))
        if self.scheduler.preempt == "swap":
            rows = jax.device_get(_swaps(state.serving, scheduler=self.scheduler))
            for verb in (TieredCache.swap_out, TieredCache.swap_in):
                self.call(verb, rows.out)  # refused, because there is no row

    def _max_taken(self, group_index: int) -> int:
        """The maximum blocks of a group taken by a loop."""
        columns = -(-self.steps // self.spec.block_size) + 1
        if len(self.spec.groups) > 1:  # prompts take their blocks chunk by chunk
            columns += self.spec.max_blocks_per_seq
        return min(self.spec.max_seqs * columns, self.spec.groups[group_index].num_blocks)

    def _max_copied(self, group_index: int) -> int:
        """The maximum blocks of a group to copy before a loop: those for its steps and for prompts in all rows."""
        columns = -(-self.state.serving.width // self.spec.block_size)
        num_taken = self._max_taken(group_index) + self.spec.max_seqs * columns
        return min(num_taken, self.spec.groups[group_index].num_blocks)

    def _num_needed(self, with_prompts: bool) -> int:
        """The maximum blocks taken by the next loop: for its steps, and for waiting prompts if `with_prompts`."""
        requests = self.state.serving.requests
        num_tokens = np.asarray(requests.num_tokens)
        slots = np.asarray(self.state.serving.row)
        slots = slots[slots >= 0]
        num_remaining = np.asarray(requests.max_tokens)[slots] - num_tokens[slots]
        block_size = self.spec.block_size
        num_needed = int(np.sum(-(-np.minimum(num_remaining, self.steps) // block_size) + 1))
        if with_prompts:
            is_waiting = np.asarray(requests.stage) == Stage.WAITING
            num_needed += int(np.sum(-(-num_tokens[is_waiting] // block_size) + 1))
        if len(self.spec.groups) > 1:
            num_needed += int(np.sum(-(-num_tokens[slots] // block_size)))
        return num_needed

    def back_up(self, num_needed: int) -> bool:
        """Copies the next victims to the host, if fewer than `num_needed` blocks of their group are empty.

        Returns whether it has copied any.
        """
        has_copied = False
        for group_index in self.groups:
            target = min(num_needed, self.spec.groups[group_index].num_blocks)
            num_victims = target - int(self.state.cache.state.groups[group_index].num_empty)
            if num_victims > 0:
                options = {"max_blocks": self._max_copied(group_index), "group": group_index}
                events: Any = self.call(TieredCache.backup, num_blocks=num_victims, **options)[0]
                has_copied = has_copied or bool(np.any(np.asarray(events.transfer.block) >= 0))
        return has_copied

    def empty_blocks(self) -> None:
        """Makes it possible for the next loop to take blocks without a loss, as far as the host has space.

        It copies blocks to the host, or offloads blocks until enough are empty.
        """
        if not self.groups:
            return
        if self.spec.backups:
            self.back_up(self._num_needed(with_prompts=True))
            return
        num_needed = self._num_needed(with_prompts=False)
        for group_index in self.groups:
            target = min(num_needed, self.spec.groups[group_index].num_blocks)
            options = {"max_blocks": self._max_taken(group_index), "group": group_index}
            while (num_empty := int(self.state.cache.state.groups[group_index].num_empty)) < target:
                events, _, has_failed = self.call(TieredCache.watermark, target, **options)
                is_over = events.ok or has_failed  # fewer moves would fail as well
                target = num_empty if is_over else (num_empty + target) // 2

    def prepare(self, blocks: int) -> None:
        """Makes it possible to take this many blocks of each group without a loss, as far as the host has space."""
        if self.spec.backups:
            self.back_up(blocks)
        else:
            self.make_empty(blocks)

    def make_empty(self, blocks: int) -> None:
        """Offloads blocks until this many are empty in each group, as far as the host has space."""
        for group_index in self.groups:
            max_taken = self._max_taken(group_index)
            group_spec = self.spec.groups[group_index]
            num_empty = int(self.state.cache.state.groups[group_index].num_empty)
            before = -1
            while before < num_empty < min(blocks, group_spec.num_blocks):
                target = min(num_empty + max_taken, blocks, group_spec.num_blocks)
                before = num_empty
                self.call(TieredCache.watermark, target, max_blocks=max_taken, group=group_index)
                num_empty = int(self.state.cache.state.groups[group_index].num_empty)

    def empty_refused(self) -> None:
        """Empties or copies blocks that the loop could not take, because they have children on the host."""
        if self.spec.backups:
            if self.back_up(self.spec.groups[0].num_ids):
                self._set_refused(0)
            return
        before = [int(group.num_empty) for group in self.state.cache.state.groups]
        self.empty_blocks()
        groups = self.state.cache.state.groups
        if any(int(group.num_empty) > num_before for group, num_before in zip(groups, before, strict=True)):
            self._set_refused(0)

    def _set_refused(self, value: int) -> None:
        """Sets `refused`. The array is committed like the old array. Otherwise jax would compile the loop again."""
        old = self.state.serving.refused
        new = jax.device_put(np.int32(value), old.sharding if old.committed else None)
        self.state.serving = self.state.serving.replace(refused=new)

    def onboard(self, requests: Any, slot: int, row: int) -> None:
        """Admits a request, given as numpy arrays, and brings back its blocks on the host if possible."""
        num_tokens = int(requests.num_tokens[slot])
        tokens = np.zeros((1, self.state.serving.width), np.int32)
        tokens[0, :num_tokens] = requests.text[requests.start[slot] :][:num_tokens]
        options = {
            "namespace": requests.namespace[slot][None],
            "retention": jax.tree.map(lambda x: x[slot][None], requests.retention),
            "reserve_tokens": self.scheduler.chunk if len(self.spec.groups) > 1 else None,
            "alignment_tokens": self.scheduler.alignment_tokens,
        }
        arguments = np.array([row], np.int32), tokens, np.array([num_tokens], np.int32)
        events, lost, _ = self.call(TieredCache.admit, *arguments, **options)
        if row in lost:  # a move failed, and may fail every time
            events, *_ = self.call(TieredCache.admit, *arguments, tiers=("device",), **options)
        placed = np.array([slot, row], np.int32)
        self.state.serving = _has_row(self.state.serving, placed, events.cached[0], events.ok)

    def swap(self) -> bool:
        """Swaps a row out or in, if a swap is due. Returns whether it did."""
        if self.scheduler.preempt != "swap":
            return False
        rows = jax.device_get(_swaps(self.state.serving, scheduler=self.scheduler))
        if not rows.any:
            return False
        verb, row = (TieredCache.swap_out, rows.out) if rows.out >= 0 else (TieredCache.swap_in, rows.back)
        events, *_ = self.call(verb, row)
        if not bool(events.ok):
            self._set_refused(1)
        return True

    def call(self, verb: Callable[..., Any], *args: Any, **options: Any) -> tuple[Events, list[int], bool]:
        """Calls a verb. Returns the events, rows whose K/V were lost, and whether moves failed, after a warning."""
        state = self.state
        lost = []
        removed = []
        failed = None
        try:
            cache, events = verb(state.result, *args, now=state.now(), **options)
        except FailedTransfer as failure:
            cache = failure.tiered
            events = failure.events
            lost = failure.lost
            removed = [failure.removed]
            failed = str(failure)
        state.replace(cache)
        state.publish(events, *removed)
        if failed is not None:  # comes last, because a filter may turn the warning into an error
            warnings.warn(f"lost K/V are computed again: {failed}", RuntimeWarning, stacklevel=2)
        for row in lost:  # their requests wait again, and will find less in the cache
            state.serving = _leave(state.serving, np.int32(row), np.bool_(False))
        return events, lost, failed is not None
