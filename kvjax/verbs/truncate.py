# SPDX-License-Identifier: Apache-2.0
"""`truncate` cuts a row back, in all groups."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import pick
from kvjax.blocks import holes, windows
from kvjax.blocks.holders import give_back
from kvjax.blocks.publish import forget_all, leave_index
from kvjax.blocks.rows import Row, read_row, write_row
from kvjax.checks import each_row, integers, on_state, one_or_more
from kvjax.events.records import Events, Records, Status
from kvjax.policies.retention import cut_off
from kvjax.state import NO_BLOCK, CacheState
from kvjax.verbs._request import assemble, first_failure, scan_rows


@on_state
def truncate(state: CacheState, seq: ArrayLike, length: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Cuts a row back to its first `length` tokens (rejected draft tokens, an edited prompt).

    If the cut is inside a findable block that no other row holds and that has no findable children, the block leaves
    the index. Any other findable block stays findable, and the row's next write goes to a copy of it. Several rows in a
    call are cut in order, each all or nothing.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; a row in use.
      length: i32[] or i32[R]; the new length, 1 up to the row's length.
      now: i32[]; the time in ms.

    Returns:
      The cache, and events with E = 1 record a row and group: removed. Status BAD_REQUEST, also if a window would need
      blocks that are no longer on the device, or if the cut is inside a block that `thin` took away. With recurrent
      layers you can cut off committed tokens only at the end of a block, where a state is kept.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, events = kvjax.truncate(state, 0, 6)  # a cut inside block 1, which held tokens 4 to 7
      >>> state.seqs.length.tolist(), [(event["kind"], event["block"]) for event in kvjax.to_list(events)]
      ([6, 0], [('removed', 1)])

    Source: TensorRT-LLM's rewindKVCache.
    """
    seq = one_or_more("seq", seq)
    now = integers("now", now, ())
    length = each_row("length", length, seq.shape)
    if seq.ndim > 0:
        return scan_rows(functools.partial(truncate, now=now), state, seq, length)
    row = read_row(state, seq)
    bad = ~row.exists | (length < 1) | (length > row.length) | row.swapped_out
    ok = holes.unless_inside(row.metadata, length, state.spec.block_size, ~bad)
    state, removed, ok = rewind(state, row, seq, length, ok, now)
    return state, assemble(state, first_failure((~ok, Status.BAD_REQUEST)), removed=removed)


def rewind(
    state: CacheState, row: Row, seq: jax.Array, length: jax.Array, ok: jax.Array, now: jax.Array
) -> tuple[CacheState, list[Records], jax.Array]:
    """Cuts row `seq` back to `length` tokens where ok bool[]. Also returns records, removed, and whether it was done.

    The cut is refused if a window would need blocks that have left it and are no longer on the device, or if a
    recurrent layer has no state for the new length.
    """
    block_size = state.spec.block_size
    columns = jnp.arange(row.tables[0].shape[0], dtype=jnp.int32)
    num_columns = -(-length // block_size)
    committed = jnp.minimum(row.committed, length)
    if state.spec.has_recurrent:
        ok = ok & ((length >= row.committed) | (length % block_size == 0))
    lacking = [
        (columns < num_columns) & group_spec.keeps(columns, committed, block_size) & (table < 0)
        for group_spec, table in zip(state.spec.window_groups, row.tables[1:], strict=True)
    ]
    ok, regained, tables_with_windows = windows.regain(state.window_groups, row.tables, lacking, ok)
    groups = []
    tables = []
    for group_index, (group, table) in enumerate(zip((state.groups[0], *regained), tables_with_windows, strict=True)):
        dropped = ok & (columns >= num_columns) & (table >= 0)
        policy = windows.policy_of(state, group_index)
        groups.append(give_back(group, policy, table[::-1], dropped[::-1], now))
        tables.append(jnp.where(dropped, NO_BLOCK, table))
    group = groups[0]
    block = pick(tables[0], num_columns - 1)[None]
    alone = (pick(group.blocks.fill, block) > 0) & (pick(group.blocks.refcount, block) == 1) & group.childless(block)
    groups[0], left_index = leave_index(group, 0, block, ok & (length % block_size > 0) & alone)
    state, removed = forget_all(state.replace(groups=tuple(groups)), 0, left_index)
    retention = cut_off(row.metadata.retention, length, block_size)
    metadata = row.metadata.replace(length=length, committed=committed, retention=retention)
    metadata = holes.cut_off(metadata, num_columns)
    return write_row(state, seq, ok, metadata, tables), removed, ok
