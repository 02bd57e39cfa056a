# SPDX-License-Identifier: Apache-2.0
"""Capacity: the blocks that rows and requests need, now and at most; the steps these allow; the events of a step.

These functions only count. They change no state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, pick
from kvjax.blocks import backups, windows
from kvjax.blocks.rows import most_columns, table_entry
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Serving
from kvjax.spec import CacheSpec, Kind
from kvjax.state import CacheState, Group


def may_copy(state: CacheState, group: Group) -> jax.Array:
    """bool[S]; rows that copy their last block before a write, because it is partly filled and shared or findable."""
    block_size = state.spec.block_size
    length = state.seqs.length
    last_block = table_entry(group, np.arange(length.shape[0], dtype=np.int32), length // block_size)
    is_shared = (pick(group.blocks.refcount, last_block) > 1) | (pick(group.blocks.fill, last_block) > 0)
    return is_shared & (length % block_size > 0)


def needs(state: CacheState, end: jax.Array) -> list[jax.Array]:
    """For each group i32[S]: the blocks for rows up to token end i32[S], including copies of shared blocks."""
    block_size = state.spec.block_size
    length = state.seqs.length
    end = jnp.maximum(end, length)
    num_new = -(-end // block_size) - -(-length // block_size)
    return [num_new + (may_copy(state, group) & (end > length)).astype(jnp.int32) for group in state.groups]


def next_blocks(serving: Serving, scheduler: Scheduler, chunks: jax.Array) -> list[jax.Array]:
    """For each group i32[]: blocks for a token of each decoding row, and for the next chunk where bool[S] `chunks`."""
    state = serving.cache.state
    pending = serving.num_pending
    next_tokens = jnp.where(serving.decoding, 1, jnp.where(chunks, jnp.minimum(pending, scheduler.chunk), 0))
    needed = needs(state, state.seqs.committed + next_tokens)
    return [jnp.sum(blocks, dtype=jnp.int32) for blocks in needed]


def would_lose(serving: Serving, scheduler: Scheduler, now: jax.Array) -> jax.Array:
    """bool[]; whether the next step may evict blocks that have no copy on the host."""
    state = serving.cache.state
    spec = state.spec
    request = serving.by_row
    k = scheduler.max_steps(spec)
    decoded = jnp.minimum(request.max_tokens - request.num_tokens, k)
    chunks = jnp.minimum(serving.num_pending, scheduler.chunk)
    next_tokens = jnp.where(serving.decoding, decoded, jnp.where(serving.prefilling, chunks, 0))
    needed = needs(state, state.seqs.committed + next_tokens)
    loses = jnp.bool_(False)
    for group_index, (group, blocks) in enumerate(zip(state.groups, needed, strict=True)):
        columns = most_columns(max(k, scheduler.chunk), spec.block_size)
        size = min(spec.max_seqs * columns, spec.groups[group_index].num_blocks)
        policy = windows.policy_of(state, group_index)
        loses = loses | backups.would_lose(group, policy, jnp.sum(blocks, dtype=jnp.int32), size, now)
    return loses


def lacks_blocks(serving: Serving, scheduler: Scheduler, freed: Sequence[jax.Array | int] | None = None) -> jax.Array:
    """bool[]; whether blocks for `next_blocks` and for refused chunks are missing, after `freed` become available."""
    groups = serving.cache.state.groups
    needed = next_blocks(serving, scheduler, serving.out_of_blocks)
    lacks = serving.refused == 1
    for group, num_needed, num_freed in zip(groups, needed, freed or [0] * len(groups), strict=True):
        lacks = lacks | (num_needed > group.available + num_freed)
    return lacks


def max_blocks(spec: CacheSpec, scheduler: Scheduler, max_tokens: Any) -> list[jax.Array]:
    """For each group i32[...]: the maximum blocks held at a time by a request of up to max_tokens i32[...]."""
    block_size = spec.block_size
    ahead = max(scheduler.chunk, scheduler.max_steps(spec))
    return [group.max_blocks(-(-(max_tokens - 1) // block_size), block_size, ahead) for group in spec.groups]


def sample_blocks(
    spec: CacheSpec, scheduler: Scheduler, max_tokens: jax.Array, prompt: jax.Array, samples: jax.Array
) -> list[jax.Array]:
    """For each group i32[...]: the maximum blocks added by samples bool[..., K], of max_tokens i32[K], to the leader's.

    The samples share the whole blocks of their prompt, i32[...] tokens, with the leader. In a window group they may
    release these blocks at different times. The count assumes a copy of the last block for each of its sharers,
    although the last sharer keeps the original.
    """
    num_shared = prompt // spec.block_size
    has_copy = jnp.any(samples, axis=-1) & (prompt % spec.block_size > 0)
    added_blocks = []
    for group, group_blocks in zip(spec.groups, max_blocks(spec, scheduler, max_tokens), strict=True):
        added = jnp.broadcast_to(group_blocks, samples.shape)
        if group.kind is Kind.FULL:
            added = jnp.maximum(added - num_shared[..., None], 0)
        total = jnp.sum(jnp.where(samples, added, 0), axis=-1, dtype=jnp.int32)
        added_blocks.append(total + has_copy.astype(jnp.int32))
    return added_blocks


def reserved(serving: Serving, scheduler: Scheduler) -> list[tuple[jax.Array, jax.Array]]:
    """For each group, two i32[]: the blocks possibly needed by running rows, and their limit.

    Without a window a row keeps its shared blocks as long as it runs, so it needs the blocks it does not hold yet.
    With a window, rows release shared blocks at different times, so each may need as many blocks as if it were alone.
    """
    state = serving.cache.state
    request = serving.by_row
    blocks_of_rows = max_blocks(state.spec, scheduler, request.max_tokens)
    # A leader reserves a block for the copy of a sample, because the samples are counted without it.
    leads = serving.leads & (request.prompt % state.spec.block_size > 0)
    needs_and_limits = []
    for group, spec, row_blocks in zip(state.groups, state.spec.groups, blocks_of_rows, strict=True):
        copies = may_copy(state, group).astype(jnp.int32) + leads.astype(jnp.int32)
        is_held = (group.table >= 0) & serving.running[:, None]
        if spec.kind is Kind.FULL:
            num_held = jnp.sum(is_held, axis=1, dtype=jnp.int32)
            needed = jnp.maximum(row_blocks - num_held, 0) + copies
            limit = group.available
        else:
            needed = row_blocks + copies
            held_by_others = jnp.sum(group.blocks.refcount, dtype=jnp.int32) - count(is_held.reshape(-1))
            limit = group.num_blocks - held_by_others
        needs_and_limits.append((jnp.sum(jnp.where(serving.running, needed, 0), dtype=jnp.int32), limit))
    return needs_and_limits


def num_steps(state: CacheState, new: jax.Array, k: int, log_room: jax.Array) -> jax.Array:
    """The maximum number of steps, i32[] from 1 to k, for which each group has blocks, and the log has room.

    Each row writes at most new i32[S] tokens. The count assumes that each sharer of a last block copies it, although
    its last holder may keep it. So a result of 1 is not a guarantee: a step may be refused, or may succeed although the
    count was too low.
    """
    block_size = state.spec.block_size
    length = state.seqs.length[None]
    committed = state.seqs.committed[None]
    steps = np.arange(1, k + 1, dtype=np.int32)[:, None]
    end = committed + jnp.minimum(new[None], steps)  # i32[k, S]
    reserved_end = jnp.maximum(end, length)  # a row may have blocks already, for the rest of its prompt

    def copies(group: Group) -> jax.Array:
        """i32[k, S]; whether each row may have to copy its last block."""
        return ((end > length) & may_copy(state, group)[None]).astype(jnp.int32)

    # Stacked, so a single sum over the rows gives all counts, each i32[k].
    entered_by_row = (reserved_end + block_size - 1) // block_size - (length + block_size - 1) // block_size
    filled_by_row = end // block_size - committed // block_size
    copied_by_row = map(copies, state.groups)
    counts = jnp.sum(jnp.stack([entered_by_row, filled_by_row, *copied_by_row]), axis=-1, dtype=jnp.int32)
    entered, filled, *copied = counts

    most_copied = functools.reduce(jnp.maximum, copied)
    fits = max_events(state.spec, entered + most_copied, most_copied, filled) <= log_room
    for group, num_copied in zip(state.groups, copied, strict=True):
        fits = fits & (entered + num_copied <= group.available)
    return jnp.maximum(count(fits), 1)


def max_events(spec: CacheSpec, entered: Any, copied: Any, filled: Any) -> Any:
    """The maximum events of `extend` and `commit` while rows enter, copy and fill this many blocks in each group.

    Each entered block may remove a block, and in the first group also the blocks of the other groups. With a host tier
    a stored block may also replace a block there.
    """
    groups = len(spec.groups)
    host_groups = len(spec.host_groups)
    return entered * (2 * groups - 1) + copied * groups + filled * (groups + host_groups)


def worst_events(spec: CacheSpec, blocks: int) -> int:
    """The maximum events of single steps while rows enter and fill this many blocks in each group."""
    return max_events(spec, blocks, blocks, blocks)


def admission_events(spec: CacheSpec, width: int) -> int:
    """The maximum events of admitting a prompt of up to `width` tokens."""
    return worst_events(spec, -(-width // spec.block_size) + 1)


def worst_step(spec: CacheSpec, scheduler: Scheduler) -> int:
    """The maximum events of a step of the scheduler, except for admissions, which check the log themselves."""
    rows = spec.max_seqs
    groups = len(spec.groups)
    chunk_blocks = scheduler.max_chunks(spec) * (-(-scheduler.chunk // spec.block_size) + 1)
    return 2 * worst_events(spec, rows) + worst_events(spec, chunk_blocks) + rows * groups
