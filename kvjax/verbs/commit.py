# SPDX-License-Identifier: Apache-2.0
"""`commit`: written blocks become findable as they fill."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax._arrays import count, fence, loop, pick, put, rank, repeated, runs
from kvjax._checks import integers, on_state
from kvjax.blocks import windows
from kvjax.blocks.holders import merge
from kvjax.blocks.publish import publish
from kvjax.blocks.rows import Chunk, write_text
from kvjax.blocks.tiers import take_over
from kvjax.blocks.twins import resolve
from kvjax.events.records import COLUMNS, Events, Records, Status
from kvjax.gpu.choice import fused, serves
from kvjax.state import CacheState
from kvjax.verbs._request import assemble, first_failure, known_text


@on_state
def commit(
    state: CacheState,
    tokens: ArrayLike,
    num_tokens: ArrayLike,
    *,
    extra_ids: ArrayLike | None = None,
    seqs: ArrayLike | None = None,
    now: ArrayLike = 0,
) -> tuple[CacheState, Events]:
    """Records that the K/V of these tokens are now written, and publishes the blocks that they fill.

    A filled block whose contents are cached already is swapped for the cached one and emptied; of equal blocks that
    fill in one call the first row's stays. A row lets go of blocks that its next token cannot see through a window.

    Args:
      state: the cache.
      tokens: i32[R, T]; each row's next tokens, from its committed length on, padded with anything.
      num_tokens: i32[R]; how many of them, at most what the row has room for; 0 leaves a row alone.
      extra_ids: i32[R, T], where the spec asks for them.
      seqs: i32[R]; the rows, all different; None for all S.
      now: i32[] ms.

    Returns:
      The cache; and events, E = R F a group for rows that fill up to F blocks: stored; and as many updated where there
      is a host tier, whose blocks give way to equal ones on the device. Status BAD_REQUEST for a row with too little
      room, swapped out or named twice, and for a negative token; the other rows are done.

    Source: vLLM's mark_blocks_as_computed and MAX's commit, which swap equal blocks likewise.
    """
    spec = state.spec
    rows = integers("seqs", np.arange(spec.max_seqs) if seqs is None else seqs, ("R",))
    tokens = integers("tokens", tokens, (rows.shape[0], "T"))
    asked, now = integers("num_tokens", num_tokens, rows.shape), integers("now", now, ())
    text = known_text(spec, tokens, extra_ids)
    exists = (rows >= 0) & (rows < spec.max_seqs)
    length, start = state.seqs.length, state.seqs.committed
    if seqs is not None:
        exists = exists & ~(repeated(rows) & (asked != 0))
        length, start = pick(length, rows), pick(start, rows)
    most = tokens.shape[1]
    steps = np.arange(most, dtype=np.int32)[None]
    bad = (~exists & (asked > 0)) | (asked < 0) | (asked > jnp.minimum(length - start, most))
    bad = bad | jnp.any((steps < asked[:, None]) & (tokens < 0), axis=1)
    bad = bad | ((asked > 0) & pick(state.seqs.rests, rows))
    end = start + jnp.where(bad, 0, asked)
    state, stored, updated = _written(state, Chunk(rows, start, end, exists & ~bad, text), now)
    return state, assemble(state, first_failure((bad, Status.BAD_REQUEST)), updated=updated, stored=stored)


Written = tuple[CacheState, list[Records], list[Records]]  # the cache; for each group the records stored, updated


def _written(state: CacheState, chunk: Chunk, now: jax.Array) -> Written:
    """`write`, as one kernel where there is one."""
    total, most = chunk.text.tokens.shape

    def kernel(state: CacheState, chunk: Chunk, now: jax.Array, *, interpret: bool = False) -> Written:
        from kvjax.gpu.fill import fill_rows  # late: to import Triton takes a tenth of a second

        del now  # only retention asks for the time
        state, stored = fill_rows(state, chunk, pass_width(total, most, state.spec.block_size), interpret)
        return state, [stored], []

    return fused(kernel, write, state, chunk, now) if serves(state, total, most) else write(state, chunk, now)


def write(state: CacheState, chunk: Chunk, now: jax.Array) -> Written:
    """Stores what the rows have written, and publishes the blocks that they fill, in every group."""
    rows, start, end, done, text = chunk
    size, most = state.spec.block_size, text.tokens.shape[1]
    group = write_text(state.groups[0], rows, start, end, text)
    state = state.replace(groups=(group, *state.groups[1:]))
    state, stored, updated = publish_filled(state, rows, start // size, end // size, most, now)
    slid = [
        windows.slide(group, group_spec, rows, start, end, most, size, now)
        for group, group_spec in zip(state.groups[1:], state.spec.groups[1:], strict=True)
    ]
    committed = put(state.seqs.committed, rows, end, done)
    state = state.replace(groups=(state.groups[0], *slid), seqs=state.seqs.replace(committed=committed))
    return state, stored, updated


_BATCH = 32  # rows: about what 256 rows fill in a step with blocks of 16, measured against 16, 64 and 256


def pass_width(total: int, max_tokens: int, size: int) -> int:
    """How many of so many rows `publish_filled` looks at in one pass."""
    return min(max(_BATCH, -(-total * max_tokens // size)), total)


def publish_filled(
    state: CacheState, rows: jax.Array, first: jax.Array, end: jax.Array, max_tokens: int, now: jax.Array
) -> tuple[CacheState, list[Records], list[Records]]:
    """Publishes the blocks that rows have just filled, or merges them with equal ones, in every group.

    Processes the rows that filled a block in passes, so that the cost follows their number alone. A pass is as wide as
    what this many tokens of each row usually fill.

    Args:
      state: the cache, the first group's `blocks.text` up to date.
      rows: i32[R]; all different.
      first: i32[R]; column of the first block that a row filled.
      end: i32[R]; column after the last one.
      max_tokens: static; the most tokens that a row has written.
      now: i32[] ms.

    Returns:
      The cache; for each group R * most records, stored, and for each with a host tier as many, updated.
    """
    total, size = rows.shape[0], state.spec.block_size
    most = (max_tokens + size - 1) // size  # blocks that a row can have filled
    batch = pass_width(total, max_tokens, size)
    fills = end > first
    order = put(jnp.zeros((total + batch,), jnp.int32), rank(fills), jnp.arange(total, dtype=jnp.int32), fills)
    num_lists = len(state.groups) + len(state.spec.host_groups)  # of stored, of updated records
    records = [jnp.zeros((total + batch, most, len(COLUMNS)), jnp.int32)] * num_lists

    def step(carry):
        done, (group, *others), records = carry
        picked = lax.dynamic_slice(order, (done,), (batch,))
        live = done + np.arange(batch, dtype=np.int32) < count(fills)
        row, start = pick(rows, picked), pick(first, picked)
        columns = runs(start, most)
        filled = live[:, None] & (columns < pick(end, picked)[:, None])
        blocks, news = fence(group.blocks, resolve(group, state.seqs, row, start, filled))
        group = group.replace(blocks=blocks)
        group, stored = publish(
            group, news.own, news.publish, news.key, news.parent, columns.reshape(-1), group.blocks.tokens.shape[1]
        )
        group, updated = take_over(group, 0, state.policy, news.own, news.target, news.merge & news.first)
        group = merge(group, state.policy, news.own, news.target, news.merge, news.first, now)
        where = (jnp.broadcast_to(row[:, None], columns.shape), columns)
        swap = news.merge.reshape(columns.shape)
        table = put(group.table, where, news.target.reshape(columns.shape), swap)
        groups, new, moved = [group.replace(table=table)], [stored], [updated]
        for number, other in enumerate(others, 1):
            other, stored, updated = windows.follow(other, number, group.blocks, news, row, columns, now)
            groups, new, moved = [*groups, other], [*new, stored], [*moved, updated]
        records = [
            lax.dynamic_update_slice(r, n.records.reshape(batch, most, -1), (done, np.int32(0), np.int32(0)))
            for r, n in zip(records, [*new, *(m for m in moved if m.block.size)], strict=True)
        ]
        return done + batch, tuple(groups), records

    _, groups, records = loop(lambda carry: carry[0] < count(fills), step, (jnp.int32(0), state.groups, records))
    lists = [Records(r[:total].reshape(total * most, -1)) for r in records]
    return state.replace(groups=groups), lists[: len(groups)], lists[len(groups) :]
