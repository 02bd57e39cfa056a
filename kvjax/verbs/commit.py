# SPDX-License-Identifier: Apache-2.0
"""`commit`: written blocks become findable when they are full."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

import pallas_kernels
from kvjax._arrays import count, fence, loop, pick, put, rank, repeated, skip_unless, some
from kvjax.blocks import holes, windows
from kvjax.blocks.dedup import Dedup, Filled, resolve
from kvjax.blocks.holders import merge
from kvjax.blocks.publish import publish
from kvjax.blocks.rows import Chunk, Span, write_text
from kvjax.blocks.tiers import take_over
from kvjax.checks import flags, integers, on_state
from kvjax.events.records import COLUMNS, Events, Records, Status, no_records
from kvjax.spec import CacheSpec
from kvjax.state import CacheState, EvictionPolicy, Group
from kvjax.verbs._request import assemble, checked_text, first_failure


@on_state
def commit(
    state: CacheState,
    tokens: ArrayLike,
    num_tokens: ArrayLike,
    *,
    extra_ids: ArrayLike | None = None,
    seqs: ArrayLike | None = None,
    exact: ArrayLike | None = None,
    now: ArrayLike = 0,
) -> tuple[CacheState, Events]:
    """Records that the K/V of these tokens are now written, and publishes the filled blocks.

    If a filled block's contents are cached already, the row takes the cached block and its own becomes empty. If
    several rows fill equal blocks in a call, the first row's block stays. With a window, a row releases the blocks that
    its next token cannot see.

    Args:
      state: the cache.
      tokens: i32[R, T]; each row's next tokens, from its committed length on, with any padding.
      num_tokens: i32[R]; the number of tokens to commit, at most the row's reserved tokens. 0 leaves a row unchanged.
      extra_ids: i32[R, T]; extra ids of the tokens, if the spec has them.
      seqs: i32[R]; the rows, all different. None means all S rows.
      exact: bool[] or bool[R]; whether the K/V of these tokens were computed with full attention. Only for a spec with
        sparse=True. There, None means no: the row publishes nothing any more, and neither do its forks, until it is
        released. Other caches take all K/V to be exact.
      now: i32[]; the time in ms.

    Returns:
      The cache, and events with E = R F records a group for rows filling up to F blocks: stored. With a host tier there
      are as many updated records, for host blocks that equal blocks on the device replace. Status BAD_REQUEST for a row
      that has too few reserved tokens, is swapped out or is named twice, and for a negative token. The other rows are
      committed.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, events = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> [(event["kind"], event["tokens"]) for event in kvjax.to_list(events)]  # the third block is not full
      [('stored', [0, 1, 2, 3]), ('stored', [4, 5, 6, 7])]

    Raises:
      ValueError: if `exact` is given and the spec is not sparse.

    Source: vLLM's mark_blocks_as_computed and MAX's commit, which swap equal blocks in the same way.
    """
    spec = state.spec
    rows = integers("seqs", np.arange(spec.max_seqs) if seqs is None else seqs, ("R",))
    tokens = integers("tokens", tokens, (rows.shape[0], "T"))
    num_tokens = integers("num_tokens", num_tokens, rows.shape)
    now = integers("now", now, ())
    text = checked_text(spec, tokens, extra_ids)
    exists, start, bad = _checked_rows(state, None if seqs is None else rows, tokens, num_tokens)
    end = start + jnp.where(bad, 0, num_tokens)
    chunk = Chunk(rows, start, end, exists & ~bad, text, _exact_rows(spec, exact, rows.shape))
    state, stored, updated = write(state, chunk, now)
    return state, assemble(state, first_failure((bad, Status.BAD_REQUEST)), updated=updated, stored=stored)


def _exact_rows(spec: CacheSpec, exact: ArrayLike | None, shape: tuple[int, ...]) -> jax.Array | None:
    if exact is None:
        return None
    if not spec.sparse:
        raise ValueError("exact: got a value for a cache with sparse=False, wanted None: all its K/V are exact")
    return flags("exact", exact, shape)


def is_refused(state: CacheState, tokens: jax.Array, num_tokens: jax.Array, seqs: jax.Array | None) -> jax.Array:
    """bool[R]; the rows that `commit` would refuse with BAD_REQUEST, so you can skip their computation."""
    return _checked_rows(state, seqs, tokens, num_tokens)[2]


def _checked_rows(
    state: CacheState, seqs: jax.Array | None, tokens: jax.Array, num_tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns bool[R], the existing rows, i32[R], their committed lengths, and bool[R], the refused rows."""
    rows = jnp.asarray(np.arange(state.spec.max_seqs, dtype=np.int32)) if seqs is None else seqs
    exists = (rows >= 0) & (rows < state.spec.max_seqs)
    length = state.seqs.length
    start = state.seqs.committed
    if seqs is not None:
        exists = exists & ~(repeated(rows) & (num_tokens != 0))
        length = pick(length, rows)
        start = pick(start, rows)
    max_tokens = tokens.shape[1]
    steps = np.arange(max_tokens, dtype=np.int32)[None]
    bad = (~exists & (num_tokens > 0)) | (num_tokens < 0) | (num_tokens > jnp.minimum(length - start, max_tokens))
    bad = bad | some((num_tokens[:, None] > steps) & (tokens < 0))
    bad = bad | ((num_tokens > 0) & pick(state.seqs.swapped_out, rows))
    return exists, start, bad


WriteResult = tuple[CacheState, list[Records], list[Records]]  # the cache; records stored, updated of each group


def write(state: CacheState, chunk: Chunk, now: jax.Array) -> WriteResult:
    """Stores the written tokens of rows, and publishes the filled blocks in every group."""
    num_rows, max_tokens = chunk.text.tokens.shape
    width = pass_width(num_rows, max_tokens, state.spec.block_size)
    return publish_spans(store(state, chunk), [chunk.span], width, now)


def store(state: CacheState, chunk: Chunk) -> CacheState:
    """Stores the written tokens of rows; call `publish_spans` afterwards."""
    group = write_text(state.groups[0], chunk.rows, chunk.start, chunk.end, chunk.text)
    committed = put(state.seqs.committed, chunk.rows, chunk.end, chunk.done)
    seqs = holes.with_approximate(state.seqs.replace(committed=committed), chunk)
    return state.replace(groups=(group, *state.window_groups), seqs=seqs)


def publish_spans(state: CacheState, spans: Sequence[Span], width: int, now: jax.Array) -> WriteResult:
    """Publishes the blocks that end in stored spans, in every group, `width` in a pass, then moves the windows."""
    block_size = state.spec.block_size
    max_filled = [-(-span.max_tokens // block_size) for span in spans]
    filled = [
        Filled.of(span.rows, span.start // block_size, span.end // block_size, span_max)
        for span, span_max in zip(spans, max_filled, strict=True)
    ]
    all_filled = jax.tree.map(lambda *parts: jnp.concatenate(parts), *filled)
    all_filled = holes.without_private(state.seqs, all_filled)
    state, stored, updated = publish_filled(state, all_filled, width, now, several=max(max_filled) > 1)
    for span in spans:
        state = slide(state, span, now)
    return state, stored, updated


def slide(state: CacheState, span: Span, now: jax.Array) -> CacheState:
    """Moves the windows of rows forward over a stored span."""
    first, *window_groups = state.groups
    window_groups = [
        windows.slide(group, spec, *span, state.spec.block_size, now)
        for group, spec in zip(window_groups, state.spec.window_groups, strict=True)
    ]
    return state.replace(groups=(first, *window_groups))


_BATCH = 32  # blocks: about what 256 rows fill in a step with blocks of 16, measured against 16, 64 and 256


def pass_width(num_rows: int, max_tokens: int, block_size: int) -> int:
    """The number of blocks in a pass of `publish_filled`: about as many as `max_tokens` tokens of each row fill."""
    return min(max(_BATCH, -(-num_rows * max_tokens // block_size)), num_rows * -(-max_tokens // block_size))


def publish_filled(state: CacheState, filled: Filled, width: int, now: jax.Array, *, several: bool) -> WriteResult:
    """Publishes newly filled blocks [K], or merges them with equal blocks, in every group.

    The passes go over a packed list of these blocks, `width` at a time, so the cost depends only on their number. The
    first group's `blocks.text` must be up to date. `width` and `several` are static; `several` says whether a row can
    have filled several blocks. Also returns K records, stored, of each group, and K records, updated, of each group
    with a host tier.
    """
    total = filled.row.shape[0]
    if total <= width and pallas_kernels.lowers_for("cuda"):
        lists = [no_records(total) for _ in range(len(state.groups) + len(state.spec.host_groups))]
        groups, lists = skip_unless(
            lambda: jnp.any(filled.where),
            lambda carry: _publish_batch(state, carry[0], filled, now, several),
            (state.groups, lists),
            scope="usually",
        )
        return state.replace(groups=groups), lists[: len(groups)], lists[len(groups) :]
    num_filled = count(filled.where)
    order = jnp.zeros((total + width,), jnp.int32)
    order = put(order, rank(filled.where), jnp.arange(total, dtype=jnp.int32), filled.where)
    num_lists = len(state.groups) + len(state.spec.host_groups)  # a list of stored records each, or of updated records
    records = [jnp.zeros((total + width, len(COLUMNS)), jnp.int32)] * num_lists

    def step(carry):
        done, groups, records = carry
        batch = pick(filled, lax.dynamic_slice(order, (done,), (width,)))
        batch = batch._replace(where=done + np.arange(width, dtype=np.int32) < num_filled)
        groups, lists = _publish_batch(state, groups, batch, now, several)
        records = [
            lax.dynamic_update_slice(r, n.records, (done, np.int32(0))) for r, n in zip(records, lists, strict=True)
        ]
        return done + width, groups, records

    _, groups, records = loop(lambda carry: carry[0] < num_filled, step, (jnp.int32(0), state.groups, records))
    lists = [Records(r[:total]) for r in records]
    return state.replace(groups=groups), lists[: len(groups)], lists[len(groups) :]


def _publish_batch(
    state: CacheState, groups: tuple[Group, ...], batch: Filled, now: jax.Array, several: bool
) -> tuple[tuple[Group, ...], list[Records]]:
    """Publishes or merges the blocks of a pass. Returns the groups, and the lists of `publish_filled` in its order."""
    (group, *window_groups) = groups
    blocks, dedup = fence(group.blocks, resolve(group, state.seqs, batch, several=several))
    group = group.replace(blocks=blocks)
    group, stored = publish(
        group, dedup.block, dedup.publish, dedup.key, dedup.parent, batch.column, group.blocks.tokens.shape[1]
    )
    group, updated = skip_unless(
        lambda: jnp.any(dedup.merge),
        lambda carry: _merge(carry[0], state.policy, batch, dedup, now),
        (group, no_records(batch.row.size * group.tiered)),
    )
    new_groups = [group]
    new = [stored]
    moved = [updated]
    for group_index, window_group in enumerate(window_groups, 1):
        window_group, stored, updated = windows.follow(window_group, group_index, group.blocks, dedup, batch, now)
        window_group = windows.mark_passed(window_group, group, dedup, now)
        new_groups.append(window_group)
        new.append(stored)
        moved.append(updated)
    return tuple(new_groups), [*new, *(m for m in moved if m.block.size)]


def _merge(group: Group, policy: EvictionPolicy, batch: Filled, dedup: Dedup, now: jax.Array) -> tuple[Group, Records]:
    """Gives rows the cached blocks that equal theirs. Also returns records, updated, if the group has a host tier."""
    group, updated = take_over(group, 0, policy, dedup.block, dedup.target, dedup.merge & dedup.first)
    group = merge(group, policy, dedup.block, dedup.target, dedup.merge, dedup.first, now)
    table = put(group.table, (batch.row, batch.column), dedup.target, dedup.merge)
    return group.replace(table=table), updated
