# SPDX-License-Identifier: Apache-2.0
"""The host tier inside a program: a step copies the next victims to the host, and admissions bring blocks back."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import either, once
from kvjax.blocks import windows
from kvjax.blocks.backups import lacks_backups
from kvjax.blocks.rows import Prompt, most_columns
from kvjax.blocks.tiers import priorities
from kvjax.cache import Cache
from kvjax.events.log import Log
from kvjax.events.records import Events
from kvjax.events.transfer import Transfer
from kvjax.pools.host import HostPools, move_inside
from kvjax.serving.decode import append_events
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Serving
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState, Match
from kvjax.verbs._request import TIERS
from kvjax.verbs.admit import find
from kvjax.verbs.backup import backup
from kvjax.verbs.offload import complete


def num_ahead(spec: CacheSpec, scheduler: Scheduler, width: int, group_index: int) -> int:
    """The number of victims to copy ahead: the blocks taken by a step and an admission, at most."""
    columns = most_columns(max(scheduler.max_steps(spec), scheduler.chunk_width(spec)), spec.block_size)
    num_taken = spec.max_seqs * columns + -(-width // spec.block_size)
    return min(num_taken, spec.groups[group_index].num_blocks)


def backup_events(spec: CacheSpec, scheduler: Scheduler, width: int) -> int:
    """The maximum events of `back_up`: blocks evicted by the host, and in the first group the blocks of all windows."""
    sizes = {index: num_ahead(spec, scheduler, width, index) for index in spec.host_groups}
    return sum(size * (len(spec.groups) if index == 0 else 1) for index, size in sizes.items())


def back_up(serving: Serving, log: Log, scheduler: Scheduler, now: jax.Array) -> tuple[Serving, Log]:
    """Copies the next victims without a copy to the host, if a step with an admission could evict them."""
    spec = serving.cache.state.spec
    for group_index in spec.host_groups:
        max_blocks = num_ahead(spec, scheduler, serving.width, group_index)
        state = serving.cache.state
        policy = windows.policy_of(state, group_index)
        is_kept = None
        if spec.offload_min_priority > 0:
            is_kept = priorities(state, now)[group_index] >= spec.offload_min_priority
        lacks_any = lacks_backups(state.groups[group_index], policy, max_blocks, now, is_kept)

        def copy(carry: tuple[Serving, Log], max_blocks: int = max_blocks, group: int = group_index):
            serving, log = carry
            state, events = backup(serving.cache.state, max_blocks=max_blocks, now=now, group=group)
            serving = moved(serving.replace(cache=serving.cache.replace(state=state)), events)
            state, _ = complete(serving.cache.state, events.transfer, True, max_removed=1)
            return serving.replace(cache=serving.cache.replace(state=state)), append_events(log, events)

        serving, log = once(lacks_any, copy, (serving, log))
    return serving, log


def moved(serving: Serving, events: Events) -> Serving:
    """Makes the moves of events between the cache's pools and the host's."""
    transfer = cast(Transfer, events.transfer)
    pools, host = move_inside(serving.cache.pools, cast(HostPools, serving.host_pools), transfer)
    return serving.replace(cache=Cache(serving.cache.state, pools), host_pools=host)


def find_on_both(state: CacheState, prompt: Prompt, scheduler: Scheduler) -> Match:
    """Finds the longest prefix of a prompt on both tiers, for `admit_row` in a program.

    Blocks on the host count if there are at least `min_onboard` of them. They are never the source of a copy.
    """
    block_size = state.spec.block_size
    on_device, match = (find(state, prompt, tiers, scheduler.alignment_tokens) for tiers in TIERS)
    sources = [group.in_this_group(match.source[None]) for group in state.groups]
    is_far = jnp.any(
        jnp.stack([(ids >= 0) & ~group.on_device(ids) for group, ids in zip(state.groups, sources, strict=True)])
    )
    num_blocks = jnp.where(is_far, match.num_uncopied, match.num_blocks)
    columns = np.arange(match.blocks.shape[0], dtype=np.int32)
    reusable = match.replace(
        blocks=jnp.where(columns < num_blocks, match.blocks, NO_BLOCK),
        num_blocks=num_blocks,
        source=jnp.where(is_far, NO_BLOCK, match.source),
        shared=jnp.where(is_far, 0, match.shared),
        device_tokens=jnp.where(is_far, num_blocks * block_size, match.device_tokens),
        host_tokens=jnp.where(is_far, 0, match.host_tokens),
    )
    return either(match.host_tokens >= scheduler.min_onboard * block_size, reusable, on_device)
