# SPDX-License-Identifier: Apache-2.0
"""`commit`: written blocks become findable as they fill."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax._arrays import count, fence, loop, pick, put, rank, repeated
from kvjax.blocks import windows
from kvjax.blocks.dedup import Filled, resolve
from kvjax.blocks.holders import merge
from kvjax.blocks.publish import publish
from kvjax.blocks.rows import Chunk, Span, write_text
from kvjax.blocks.tiers import take_over
from kvjax.checks import integers, on_state
from kvjax.events.records import COLUMNS, Events, Records, Status
from kvjax.gpu.choice import fused, serves
from kvjax.state import CacheState
from kvjax.verbs._request import assemble, checked_text, first_failure


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
      num_tokens: i32[R]; how many of them, at most what the row has reserved; 0 leaves a row alone.
      extra_ids: i32[R, T], where the spec asks for them.
      seqs: i32[R]; the rows, all different; None for all S.
      now: i32[] ms.

    Returns:
      The cache; and events, E = R F a group for rows that fill up to F blocks: stored; and as many updated where there
      is a host tier, whose blocks give way to equal ones on the device. Status BAD_REQUEST for a row that has
      reserved fewer, is swapped out or named twice, and for a negative token; the other rows are done.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, events = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> [(event["kind"], event["tokens"]) for event in kvjax.to_list(events)]  # the third block is not full
      [('stored', [0, 1, 2, 3]), ('stored', [4, 5, 6, 7])]

    Source: vLLM's mark_blocks_as_computed and MAX's commit, which swap equal blocks likewise.
    """
    spec = state.spec
    rows = integers("seqs", np.arange(spec.max_seqs) if seqs is None else seqs, ("R",))
    tokens = integers("tokens", tokens, (rows.shape[0], "T"))
    num_tokens, now = integers("num_tokens", num_tokens, rows.shape), integers("now", now, ())
    text = checked_text(spec, tokens, extra_ids)
    exists, start, bad = _checked_rows(state, None if seqs is None else rows, tokens, num_tokens)
    end = start + jnp.where(bad, 0, num_tokens)
    chunk, served = Chunk(rows, start, end, exists & ~bad, text), serves(state, rows.shape[0], tokens.shape[1])
    state, stored, updated = fused(write_fused, write, state, chunk, now) if served else write(state, chunk, now)
    return state, assemble(state, first_failure((bad, Status.BAD_REQUEST)), updated=updated, stored=stored)


def is_refused(state: CacheState, tokens: jax.Array, num_tokens: jax.Array, seqs: jax.Array | None) -> jax.Array:
    """bool[R]; the rows for which `commit` answers BAD_REQUEST, for who computes before it."""
    return _checked_rows(state, seqs, tokens, num_tokens)[2]


def _checked_rows(
    state: CacheState, seqs: jax.Array | None, tokens: jax.Array, num_tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """bool[R], the rows that exist; i32[R], their committed lengths; bool[R], the rows that are refused."""
    rows = jnp.asarray(np.arange(state.spec.max_seqs, dtype=np.int32)) if seqs is None else seqs
    exists = (rows >= 0) & (rows < state.spec.max_seqs)
    length, start = state.seqs.length, state.seqs.committed
    if seqs is not None:
        exists = exists & ~(repeated(rows) & (num_tokens != 0))
        length, start = pick(length, rows), pick(start, rows)
    most = tokens.shape[1]
    steps = np.arange(most, dtype=np.int32)[None]
    bad = (~exists & (num_tokens > 0)) | (num_tokens < 0) | (num_tokens > jnp.minimum(length - start, most))
    bad = bad | jnp.any((steps < num_tokens[:, None]) & (tokens < 0), axis=1)
    bad = bad | ((num_tokens > 0) & pick(state.seqs.swapped_out, rows))
    return exists, start, bad


Written = tuple[CacheState, list[Records], list[Records]]  # the cache; for each group the records stored, updated


def write_fused(state: CacheState, chunk: Chunk, now: jax.Array, *, spare: int = 0, interpret: bool = False) -> Written:
    """`write` as one kernel, for a state that `choice.serves`; with so many records more, of kind NONE."""
    from kvjax.gpu.commit import fill_rows  # late: to import Triton takes a tenth of a second

    del now  # only retention asks for the time
    total, most = chunk.text.tokens.shape
    state, stored = fill_rows(state, chunk, pass_width(total, most, state.spec.block_size), spare, interpret)
    return state, [stored], []


def write(state: CacheState, chunk: Chunk, now: jax.Array) -> Written:
    """Stores what the rows have written, and publishes the blocks that they fill, in every group."""
    total, most = chunk.text.tokens.shape
    return publish_spans(store(state, chunk), [chunk.span], pass_width(total, most, state.spec.block_size), now)


def store(state: CacheState, chunk: Chunk) -> CacheState:
    """Stores what the rows have written; `publish_spans` is to follow."""
    group = write_text(state.groups[0], chunk.rows, chunk.start, chunk.end, chunk.text)
    committed = put(state.seqs.committed, chunk.rows, chunk.end, chunk.done)
    return state.replace(groups=(group, *state.window_groups), seqs=state.seqs.replace(committed=committed))


def publish_spans(state: CacheState, spans: Sequence[Span], width: int, now: jax.Array) -> Written:
    """Publishes the blocks that end in stored spans, in every group, `width` in a pass; then the windows move on."""
    size, columns = state.spec.block_size, [-(-span.most // state.spec.block_size) for span in spans]
    filled = [
        Filled.of(span.rows, span.start // size, span.end // size, most)
        for span, most in zip(spans, columns, strict=True)
    ]
    together = jax.tree.map(lambda *parts: jnp.concatenate(parts), *filled)
    state, stored, updated = publish_filled(state, together, width, now, several=max(columns) > 1)
    for span in spans:
        state = slide(state, span, now)
    return state, stored, updated


def slide(state: CacheState, span: Span, now: jax.Array) -> CacheState:
    """Moves the windows of rows on, over a stored span."""
    first, *others = state.groups
    others = [
        windows.slide(group, spec, *span, state.spec.block_size, now)
        for group, spec in zip(others, state.spec.window_groups, strict=True)
    ]
    return state.replace(groups=(first, *others))


_BATCH = 32  # blocks: about what 256 rows fill in a step with blocks of 16, measured against 16, 64 and 256


def pass_width(total: int, max_tokens: int, size: int) -> int:
    """The number of blocks in a pass of `publish_filled`: as many as so many tokens of each row usually fill."""
    return min(max(_BATCH, -(-total * max_tokens // size)), total * -(-max_tokens // size))


def publish_filled(state: CacheState, filled: Filled, width: int, now: jax.Array, *, several: bool) -> Written:
    """Publishes blocks [K] that rows have just filled, or merges them with equal ones, in every group.

    Goes in passes of `width` over a packed list of them, so that the cost follows their number alone. The first group's
    `blocks.text` is up to date. `several` says whether a row can have filled more than one; it is static, as the width.
    Also returns for each group K records, stored, and for each with a host tier as many, updated.
    """
    total, number = filled.row.shape[0], count(filled.where)
    order = jnp.zeros((total + width,), jnp.int32)
    order = put(order, rank(filled.where), jnp.arange(total, dtype=jnp.int32), filled.where)
    num_lists = len(state.groups) + len(state.spec.host_groups)  # of stored, of updated records
    records = [jnp.zeros((total + width, len(COLUMNS)), jnp.int32)] * num_lists

    def step(carry):
        done, (group, *others), records = carry
        ours = pick(filled, lax.dynamic_slice(order, (done,), (width,)))
        ours = ours._replace(where=done + np.arange(width, dtype=np.int32) < number)
        blocks, dedup = fence(group.blocks, resolve(group, state.seqs, ours, several=several))
        group = group.replace(blocks=blocks)
        group, stored = publish(
            group, dedup.own, dedup.publish, dedup.key, dedup.parent, ours.column, group.blocks.tokens.shape[1]
        )
        group, updated = take_over(group, 0, state.policy, dedup.own, dedup.target, dedup.merge & dedup.first)
        group = merge(group, state.policy, dedup.own, dedup.target, dedup.merge, dedup.first, now)
        table = put(group.table, (ours.row, ours.column), dedup.target, dedup.merge)
        groups, new, moved = [group.replace(table=table)], [stored], [updated]
        for at, other in enumerate(others, 1):
            other, stored, updated = windows.follow(other, at, group.blocks, dedup, ours, now)
            other = windows.mark_passed(other, group, dedup, now)
            groups, new, moved = [*groups, other], [*new, stored], [*moved, updated]
        records = [
            lax.dynamic_update_slice(r, n.records, (done, np.int32(0)))
            for r, n in zip(records, [*new, *(m for m in moved if m.block.size)], strict=True)
        ]
        return done + width, tuple(groups), records

    _, groups, records = loop(lambda carry: carry[0] < number, step, (jnp.int32(0), state.groups, records))
    lists = [Records(r[:total]) for r in records]
    return state.replace(groups=groups), lists[: len(groups)], lists[len(groups) :]
