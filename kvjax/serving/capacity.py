# SPDX-License-Identifier: Apache-2.0
"""Capacity: blocks that rows and requests need, now and at most; steps for which they suffice; events of a step.

Nothing here changes a state: the caller decides.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, pick
from kvjax.blocks.rows import table_entry
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Serving
from kvjax.spec import CacheSpec, Kind
from kvjax.state import CacheState, Group


def may_copy(state: CacheState, group: Group) -> jax.Array:
    """bool[S]; rows whose last block is partly filled, and shared or findable: a write into it copies it first."""
    size, length = state.spec.block_size, state.seqs.length
    last = table_entry(group, np.arange(length.shape[0], dtype=np.int32), length // size)
    shared = (pick(group.blocks.refcount, last) > 1) | (pick(group.blocks.fill, last) > 0)
    return shared & (length % size > 0)


def needs(state: CacheState, end: jax.Array) -> list[jax.Array]:
    """For each group i32[S]: blocks that the rows need up to token end i32[S], copies of shared blocks included."""
    size, length = state.spec.block_size, state.seqs.length
    end = jnp.maximum(end, length)
    new = -(-end // size) - -(-length // size)
    return [new + (may_copy(state, group) & (end > length)).astype(jnp.int32) for group in state.groups]


def next_blocks(serving: Serving, scheduler: Scheduler, chunks: jax.Array) -> list[jax.Array]:
    """For each group i32[]: blocks for the next token of each row that decodes, and the next chunks where bool[S]."""
    state, pending = serving.cache.state, serving.num_pending
    next_tokens = jnp.where(serving.decoding, 1, jnp.where(chunks, jnp.minimum(pending, scheduler.chunk), 0))
    need = needs(state, state.seqs.committed + next_tokens)
    return [jnp.sum(blocks, dtype=jnp.int32) for blocks in need]


def lacks_blocks(serving: Serving, scheduler: Scheduler, freed: Sequence[jax.Array | int] | None = None) -> jax.Array:
    """bool[]; whether the `next_blocks` are missing, also for chunks that found none; `freed` come back before."""
    groups = serving.cache.state.groups
    need = next_blocks(serving, scheduler, serving.out_of_blocks)
    lacks = serving.refused == 1
    for group, blocks, more in zip(groups, need, freed or [0] * len(groups), strict=True):
        lacks = lacks | (blocks > group.available + more)
    return lacks


def most_blocks(spec: CacheSpec, scheduler: Scheduler, max_tokens: jax.Array) -> list[jax.Array]:
    """For each group i32[...]: the most blocks that a request of up to max_tokens i32[...] holds at a time."""
    size, ahead = spec.block_size, max(scheduler.chunk, scheduler.most_steps(spec))
    return [group.max_blocks(-(-(max_tokens - 1) // size), size, ahead) for group in spec.groups]


def sample_blocks(
    spec: CacheSpec, scheduler: Scheduler, max_tokens: jax.Array, prompt: jax.Array, samples: jax.Array
) -> list[jax.Array]:
    """For each group i32[...]: the most blocks that samples bool[..., K], of max_tokens i32[K], add to their leader's.

    They share the whole blocks of their prompt, i32[...] tokens, with it; in a window group each may release them at
    another time. All sharers of a last block are counted as copying it: one more than do.
    """
    shared, cut = prompt // spec.block_size, jnp.any(samples, axis=-1) & (prompt % spec.block_size > 0)
    found = []
    for group, most in zip(spec.groups, most_blocks(spec, scheduler, max_tokens), strict=True):
        more = jnp.broadcast_to(most, samples.shape)
        more = jnp.maximum(more - shared[..., None], 0) if group.kind is Kind.FULL else more
        found.append(jnp.sum(jnp.where(samples, more, 0), axis=-1, dtype=jnp.int32) + cut.astype(jnp.int32))
    return found


def reserved(serving: Serving, scheduler: Scheduler) -> list[tuple[jax.Array, jax.Array]]:
    """For each group, i32[] each: blocks that the running rows may come to need, and their limit.

    Without a window a row keeps what it shares as long as it runs: it needs what it does not hold yet. With a window
    rows release shared blocks one after the other, and each may then need as many as alone.
    """
    state, request = serving.cache.state, serving.by_row
    most = most_blocks(state.spec, scheduler, request.max_tokens)
    # A leader keeps a block for the copy of a sample, since the samples are counted without it.
    leads = serving.leads & (request.prompt % state.spec.block_size > 0)
    found = []
    for group, spec, each in zip(state.groups, state.spec.groups, most, strict=True):
        copies = may_copy(state, group).astype(jnp.int32) + leads.astype(jnp.int32)
        held = (group.table >= 0) & serving.running[:, None]
        if spec.kind is Kind.FULL:
            need = jnp.maximum(each - jnp.sum(held, axis=1, dtype=jnp.int32), 0) + copies
            limit = group.available
        else:
            need = each + copies
            limit = group.num_blocks - (jnp.sum(group.blocks.refcount, dtype=jnp.int32) - count(held.reshape(-1)))
        found.append((jnp.sum(jnp.where(serving.running, need, 0), dtype=jnp.int32), limit))
    return found


def num_steps(state: CacheState, new: jax.Array, k: int, log_room: jax.Array) -> jax.Array:
    """The most steps, i32[] from 1 to k, for which each group has the blocks, and the log room for the events.

    new i32[S] are the most tokens that each row can write. Sharers of a last block are counted as if each copied it,
    although its last holder may keep it. So 1 is no promise: a step may be refused, or succeed in spite of the count.
    """
    size, length, committed = state.spec.block_size, state.seqs.length[None], state.seqs.committed[None]
    steps = np.arange(1, k + 1, dtype=np.int32)[:, None]
    end = committed + jnp.minimum(new[None], steps)  # i32[k, S]
    target = jnp.maximum(end, length)  # a row may have blocks already, for the rest of its prompt

    def copies(group: Group) -> jax.Array:
        """i32[k, S]; whether each row may have to copy its last block."""
        return ((end > length) & may_copy(state, group)[None]).astype(jnp.int32)

    entered = (target + size - 1) // size - (length + size - 1) // size
    counted = [entered, end // size - committed // size, *map(copies, state.groups)]
    entered, filled, *copied = jnp.sum(jnp.stack(counted), axis=-1, dtype=jnp.int32)
    most_copied = functools.reduce(jnp.maximum, copied)
    fits = most_events(state.spec, entered + most_copied, most_copied, filled) <= log_room
    for group, copies_of_group in zip(state.groups, copied, strict=True):
        fits = fits & (entered + copies_of_group <= group.available)
    return jnp.maximum(count(fits), 1)


def most_events(spec: CacheSpec, entered: Any, copied: Any, filled: Any) -> Any:
    """The most events of extending and committing rows that enter, copy and fill so many blocks in each group.

    Each block that is entered may remove one, and those beside it if it is the first group's. With a host tier a block
    that is stored may also replace one there.
    """
    groups, host_groups = len(spec.groups), len(spec.host_groups)
    return entered * (2 * groups - 1) + copied * groups + filled * (groups + host_groups)


def worst_events(spec: CacheSpec, blocks: int) -> int:
    """The most events of single steps while rows enter and fill so many blocks in each group."""
    return most_events(spec, blocks, blocks, blocks)


def admission_events(spec: CacheSpec, width: int) -> int:
    """The most events of admitting a prompt of up to `width` tokens."""
    return worst_events(spec, -(-width // spec.block_size) + 1)


def worst_step(spec: CacheSpec, scheduler: Scheduler) -> int:
    """The most events of a step of the scheduler, without admissions: each of them checks the log for itself."""
    rows, groups = spec.max_seqs, len(spec.groups)
    chunk = scheduler.most_chunks(spec) * (-(-scheduler.chunk // spec.block_size) + 1)
    return 2 * worst_events(spec, rows) + worst_events(spec, chunk) + rows * groups
