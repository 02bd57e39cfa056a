# SPDX-License-Identifier: Apache-2.0
"""`extend`: reserves blocks for the next tokens, in all groups at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import Pytree, count, pick, put, rank, repeated, runs, skip_unless
from kvjax.blocks import windows
from kvjax.blocks.copy_on_write import settle, unshare
from kvjax.blocks.publish import forget
from kvjax.blocks.rows import copy_text, most_columns, table_entry
from kvjax.blocks.take import take
from kvjax.blocks.tiers import priorities
from kvjax.checks import each_row, integers, most_tokens, on_state, row_mask
from kvjax.events.records import EventKind, Events, Records, Status, record
from kvjax.events.transfer import Transfer
from kvjax.policies.retention import apply_retention
from kvjax.state import CacheState, Sequences
from kvjax.verbs._request import all_or_nothing, assemble, checked_tiers, first_failure


@on_state
def extend(
    state: CacheState,
    active: ArrayLike,
    num_tokens: ArrayLike = 1,
    *,
    seqs: ArrayLike | None = None,
    max_tokens: int | None = None,
    now: ArrayLike = 0,
    tiers: tuple[str, ...] = ("device",),
) -> tuple[CacheState, Events]:
    """Reserves blocks for the next tokens of every active row, or of none.

    A row writes only into blocks that no other row holds. If its last block is shared or findable, the row gets a
    private copy. If all holders of a shared block are active and the block is not findable, the last of them keeps it.
    With `seqs` the cost depends on R instead of S.

    Args:
      state: the cache.
      active: bool[R]; rows to grow.
      num_tokens: a static number for all rows, or i32[R].
      seqs: i32[R]; the rows, all different. Use -1 as padding, which must not be active. None means all S rows.
      max_tokens: static; the largest number of tokens to reserve for a row. Required if `num_tokens` is an array, even
        a traced scalar.
      now: i32[]; the time in ms.
      tiers: static; see `admit`.

    Returns:
      The cache, unchanged unless `events.ok`, and events with E = 2 R F records a group for rows touching up to F
      blocks (more with both tiers): removed, updated, copied. A row that cannot grow has the status ROW_FULL,
      BAD_REQUEST (it is free, unknown or named twice) or HELD (it is swapped out). All active rows have the status
      NO_BLOCKS if blocks are missing: `events.shortfall` is their number in the group with the largest shortage.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.extend(state, [True, False], 4)
      >>> state.seqs.length.tolist(), state.groups[0].table[0, :5].tolist()  # a fourth block
      ([14, 0], [0, 1, 2, 3, -1])
      >>> _, events = kvjax.extend(state, [True, True], 4)  # row 1 is free: nothing is done
      >>> [kvjax.Status(status) for status in events.status.tolist()]
      [Status.OK, Status.BAD_REQUEST]

    Source: vLLM's append_slots with copy-on-write, for a whole batch in one pass.
    """
    spec = state.spec
    block_size = state.spec.block_size
    rows = None if seqs is None else integers("seqs", seqs, ("R",))
    metadata = _metadata(state, rows)
    length = metadata.length
    active = row_mask("active", active, length.shape[0])
    now = integers("now", now, ())
    max_tokens = most_tokens(num_tokens, max_tokens)
    num_tokens = each_row("num_tokens", num_tokens, active.shape)
    bad = active & ((length == 0) | (num_tokens < 0) | (num_tokens > max_tokens))
    if rows is not None:
        bad = bad | (active & ((rows < 0) | (rows >= spec.max_seqs) | repeated(rows)))
    grown = length + jnp.where(active & ~bad, num_tokens, 0)
    full = active & (-(-grown // block_size) > spec.max_blocks_per_seq)
    held = active & metadata.swapped_out
    fine = ~jnp.any(bad | held | full)
    state, grew = grow(state, rows, jnp.where(fine, grown, length), max_tokens, now, checked_tiers(tiers))
    status = first_failure(
        (bad, Status.BAD_REQUEST), (held, Status.HELD), (full, Status.ROW_FULL), (active & ~grew.ok, Status.NO_BLOCKS)
    )
    ok = fine & grew.ok
    if rows is None:
        after = metadata.replace(length=jnp.where(ok, grown, length))
    else:
        after = state.seqs.replace(length=put(state.seqs.length, rows, grown, active & ok))
    state = state.replace(seqs=after)
    return state, assemble(
        state,
        status,
        removed=grew.removed,
        updated=grew.updated,
        copied=grew.copied,
        shortfall=grew.shortfall,
        moves=grew.orders,
    )


class Growth(Pytree):
    """The outcome of `grow`."""

    ok: jax.Array  # bool[]; whether every row could grow
    removed: list[Records]  # of each group, as the lists below
    copied: list[Records]
    shortfall: jax.Array  # i32[]; blocks missing in the group with the largest shortage
    updated: list[Records]
    orders: list[Transfer]


def _metadata(state: CacheState, rows: jax.Array | None) -> Sequences:
    """Reads the metadata of rows i32[R]; None means all rows."""
    return state.seqs if rows is None else pick(state.seqs, rows)


def grow(
    state: CacheState, rows: jax.Array | None, grown: jax.Array, max_tokens: int, now: jax.Array, tiers: tuple[str, ...]
) -> tuple[CacheState, Growth]:
    """Gives rows i32[R] blocks for grown i32[R] tokens, at most `max_tokens` more than now. All rows grow or none.

    Growing rows are all different. A row without growth has its present length in `grown`, and may be repeated.
    The lengths in the state do not change.
    """
    spec = state.spec
    metadata = _metadata(state, rows)
    block_size = state.spec.block_size
    seqs = np.arange(spec.max_seqs, dtype=np.int32) if rows is None else rows
    first_column = metadata.length // block_size
    inside = (grown > metadata.length) & (metadata.length % block_size > 0)
    columns = runs(first_column, most_columns(max_tokens, block_size))
    beyond = (columns * block_size < grown[:, None]) & (columns * block_size >= metadata.length[:, None])
    num_written = jnp.maximum(metadata.committed - first_column * block_size, 0)  # tokens of the row's last block

    shared = [unshare(group, table_entry(group, seqs, first_column), inside) for group in state.groups]
    needs_block = [beyond.at[:, 0].set(beyond[:, 0] | writers.copies) for _, writers in shared]
    lacks = [count(needed) - group.available for needed, (group, _) in zip(needs_block, shared, strict=True)]
    ok = functools.reduce(jnp.logical_and, [lack <= 0 for lack in lacks])
    block_priorities = priorities(state, now, tiers)
    groups = []
    removed = []
    copied = []
    taken = []
    new_blocks = []
    for group_index, (group_spec, (group, writers), needed) in enumerate(
        zip(spec.groups, shared, needs_block, strict=True)
    ):
        policy = windows.policy_of(state, group_index)
        if taken:  # blocks that left the first group's index leave the index of the other groups too
            group, forgotten = forget(group, group_index, taken[0].removed)
            removed.insert(0, forgotten)
        new = take(
            group,
            group_index,
            policy,
            jnp.where(ok, count(needed), 0),
            min(needed.size, group_spec.num_blocks),
            now,
            priorities=block_priorities[group_index],
            min_priority=spec.offload_min_priority,
        )
        ok = ok & new.ok
        taken.append(new)
        group = settle(new.group, policy, writers, ok, now)
        ids = pick(new.ids, rank(needed.reshape(-1)).reshape(needed.shape))
        table = put(group.table, (jnp.broadcast_to(seqs[:, None], needed.shape), columns), ids, needed & ok)
        copies = writers.copies & ok & (num_written > 0)
        group = group.replace(table=table)
        groups.append(group)
        new_blocks.append((ids, writers.block, copies, needed & ok))
        removed.append(new.removed)
        copied.append(
            record(
                EventKind.COPIED,
                copies,
                group=group_index,
                block=group.pool_row(ids[:, 0]),
                source=group.pool_row(writers.block),
                num_tokens=num_written,
            )
        )
    ids, old_block, copies, placed = new_blocks[0]
    group = skip_unless(
        lambda: jnp.any(copies), lambda group: copy_text(group, ids[:, 0], old_block, copies), groups[0]
    )
    requested_priority = pick(state.seqs.retention, (seqs[:, None], columns))
    groups[0] = group.replace(blocks=apply_retention(group.blocks, ids, requested_priority, placed))
    shortfall = jnp.where(ok, 0, jnp.maximum(jnp.max(jnp.stack(lacks)), 1))
    updated = [new.updated for new in taken]
    orders = [new.orders for new in taken]
    state, removed, updated, orders = all_or_nothing(
        state, state.replace(groups=tuple(groups)), ok, removed, updated, orders
    )
    return state, Growth(ok, removed, copied, shortfall, updated, orders)
