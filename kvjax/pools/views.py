# SPDX-License-Identifier: Apache-2.0
"""The part of the cache for a model step: the slot of each token, and the blocks it may read.

A view describes the next tokens of some rows, after the committed tokens. `admit` or `extend` has reserved them. In a
block of steps, a view describes the tokens after all tokens that earlier steps have written. A view has three forms,
and a model sees a batch of rows in each:

    view(state, [3, 1, 0], max_tokens=4)       ragged(state, [3, 1, 0], size=6)
    [ a5 a6 a7 .  ]                            [ a5 a6 a7 b2 .  .  ]
    [ b2 .  .  .  ]
    [ .  .  .  .  ]                            mixed(state, [False, True, False], [0], [3], size=4)
                                               [ .  b2 .  a5 a6 a7 .  ]

Padding is written to no slot, and attention returns zeros for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import Pytree, pick, put, sum_before
from kvjax._compile import own_transfers
from kvjax.checks import each_row, integers, most_tokens, on_state, row_mask, static_int32
from kvjax.spec import CacheSpec
from kvjax.state import CacheState


class View(Pytree, static=("decodes", "fixed_split", "spec")):
    """The positions and slots of the tokens in a model step.

    A mixed view is a ragged view of S + R rows, whose first S rows have a single position each. Code that ignores
    `decodes` may treat it as ragged. Use `recur` for recurrent layers. If you write a kernel for them, row r starts at
    token `lengths - num_tokens`, from the snapshot in pool row `tables[g][r, (start - 1) // P]` of the recurrent group
    g.

    Attributes:
      tables: per group i32[R, M]; pool rows, N (scratch) where a row has no block on the device.
      positions: i32[R, C], or i32[1, T] if ragged; each token's position in its sequence. The position of padding is
        arbitrary.
      lengths: i32[R]; the number of tokens that a row's last token attends to, including this view's. A row without
        tokens in the view has 0.
      slots: per group, shaped like positions; pool row * P + offset, where each token's K/V are written. The scratch
        row for padding.
      num_tokens: i32[R]; the number of each row's tokens in this view.
      starts: i32[R]; the index of each row's first token if ragged, None if padded.
      decodes: static; S if mixed, else 0. Row i of the first S has position i of the flat batch.
      fixed_split: static; whether attention of a decode row gives the same bits whatever the other rows are. Attention
        then does not split rows by their lengths, so a GPU is used less evenly, and a CPU takes as many steps for each
        row as for the longest row.
      spec: static; the cache's spec. `write` and `attend` refuse pools of another spec. None disables this check, for a
        view made by hand.
      packed_lengths: per group i32[R] if its table lacks blocks in the middle of rows, else None. The rows are then
        packed: the columns of `tables` are the blocks to read, in order, and row r ends after `packed_lengths[g][r]`
        of their tokens. None if no group has such a table.
    """

    tables: tuple[jax.Array, ...]
    positions: jax.Array
    lengths: jax.Array
    slots: tuple[jax.Array, ...]
    num_tokens: jax.Array
    starts: jax.Array | None = None
    decodes: int = 0
    fixed_split: bool = False
    spec: CacheSpec | None = None
    packed_lengths: tuple[jax.Array | None, ...] | None = None

    def lengths_of(self, group: int) -> jax.Array:
        """i32[R]; the number of tokens in a group's table that a row's last token attends to."""
        lengths = None if self.packed_lengths is None else self.packed_lengths[group]
        return self.lengths if lengths is None else lengths

    def is_packed(self, group: int) -> bool:
        """Whether a group's table lacks blocks in the middle of rows."""
        return self.packed_lengths is not None and self.packed_lengths[group] is not None

    @property
    def num_decode_rows(self) -> int:
        """The number of leading rows that decode: all rows of a padded view with C = 1, S rows of a mixed view."""
        if self.starts is None and self.positions.shape[1] == 1:
            return self.positions.shape[0]
        return self.decodes


@on_state
def view(
    state: CacheState,
    num_tokens: ArrayLike,
    max_tokens: int | None = None,
    seqs: ArrayLike | None = None,
    *,
    written: ArrayLike = 0,
) -> View:
    """Makes a view in padded form: C tokens for each row.

    Args:
      state: the cache, with the tokens reserved.
      num_tokens: i32[R]; the number of tokens of each row, at most C. A row gets no more tokens than it has reserved.
        An int applies to all rows.
      max_tokens: C; optional if num_tokens is an int.
      seqs: i32[R]; the rows. Entries outside 0..S-1 are padding. None means all S rows.
      written: i32[R]; the number of each row's tokens whose K/V are written and not yet committed. The view is for the
        tokens after them.

    Raises:
      ValueError: if an argument has a wrong shape or dtype.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 1, np.arange(10), 10)
      >>> view = kvjax.view(state, [0, 3], 3)  # three tokens of row 1
      >>> view.positions[1].tolist(), view.slots[0].tolist()  # padding goes to the scratch row, 8
      ([0, 1, 2], [[32, 32, 32], [0, 1, 2]])
    """
    max_tokens = most_tokens(num_tokens, max_tokens)
    tables, start, count = _rows(state, num_tokens, seqs, written)
    owner, offset = np.indices((count.shape[0], max_tokens), np.int32)
    return _view(state, tables, start, jnp.minimum(count, max_tokens), owner, offset, None)


@on_state
def ragged(
    state: CacheState, num_tokens: ArrayLike, size: int, seqs: ArrayLike | None = None, *, written: ArrayLike = 0
) -> View:
    """Makes a view in ragged form: the tokens of all rows on an axis of T, row after row.

    Use it for batches of long chunks and single tokens, which the padded form would pad to the longest chunk.

    Args:
      state: the cache, with the tokens reserved.
      num_tokens: i32[R]; the number of tokens of each row. A row gets no more tokens than it has reserved, and no more
        than fit into T, so commit `num_tokens` of the view.
      size: T.
      seqs: i32[R]; the rows. Entries outside 0..S-1 are padding. None means all S rows.
      written: i32[R]; as in `view`.

    Raises:
      ValueError: if an argument has a wrong shape or dtype.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, _ = kvjax.admit(state, 1, np.arange(50, 60), 10)
      >>> view = kvjax.ragged(state, [1, 3], size=4)  # a token of row 0, three of row 1
      >>> view.positions.tolist(), view.starts.tolist(), view.lengths.tolist()
      ([[0, 0, 1, 2]], [0, 1], [1, 3])
    """
    size = static_int32("size", size, 1)
    tables, start, count = _rows(state, num_tokens, seqs, written)
    starts, count, owner, offset = _packed(count, size)
    return _view(state, tables, start, count, owner, offset, starts)


@on_state
def mixed(state: CacheState, decode: ArrayLike, seqs: ArrayLike, num_tokens: ArrayLike, size: int) -> View:
    """Makes a view in mixed form: a token of each decoding row, then chunks of other rows, all on the same axis.

    The flat batch has S + `size` positions. Position i < S is row i's. After these the chunks follow as in `ragged`. A
    model computes the whole batch at once, and `attend` serves its two parts as decode and as prefill.

    Args:
      state: the cache, with the tokens reserved.
      decode: bool[S]; rows with a token each. A row without reserved tokens gets none.
      seqs: i32[R]; the rows with chunks, all different. Entries outside 0..S-1 are padding, and so are decoding rows,
        whose tokens would be written twice.
      num_tokens: i32[R]; as in `ragged`. An int applies to all rows.
      size: the number of positions for chunks.

    Returns:
      A view of S + R rows: all S rows, then `seqs`. Commit `num_tokens[:S]` for the former, and the rest for `seqs`.

    Raises:
      ValueError: if an argument has a wrong shape or dtype.
    """
    size = static_int32("size", size, 1)
    max_seqs = state.spec.max_seqs
    decode = row_mask("decode", decode, max_seqs)
    seqs = integers("seqs", seqs, ("R",))
    chunks = jnp.where(pick(decode, seqs), 0, each_row("num_tokens", num_tokens, seqs.shape))
    all_rows = np.arange(max_seqs, dtype=np.int32)
    counts = jnp.concatenate([decode.astype(jnp.int32), chunks])
    tables, start, count = _rows(state, counts, jnp.concatenate([all_rows, seqs]), 0)
    starts, chunks, owner, offset = _packed(count[max_seqs:], size)
    return _view(
        state,
        tables,
        start,
        count=jnp.concatenate([count[:max_seqs], chunks]),
        owner=jnp.concatenate([all_rows[None], owner + max_seqs], axis=1),
        offset=jnp.concatenate([np.zeros_like(all_rows)[None], offset], axis=1),
        starts=jnp.concatenate([all_rows, starts + max_seqs]),
        decodes=max_seqs,
    )


def packed(
    table: jax.Array, lengths: jax.Array, chosen: jax.Array, scratch: int, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Moves the chosen blocks of each row to the front of its block table, in order.

    Attention has no position of a key apart from its place in the table, and the tokens of the view are the last, so
    causality and a row's last block stay as they were.

    Args:
      table: i32[R, M]; pool rows. The scratch row is a hole, which nobody can choose.
      lengths: i32[R]; the number of tokens in each row of the table.
      chosen: bool[R, M]; the columns to read. A row's last column has to be among them.
      scratch: the scratch row, which fills the rest of each row.
      block_size: P.

    Returns:
      The packed table i32[R, M], and the number of tokens in its rows i32[R].

    Example:
      >>> from kvjax.pools.views import packed
      >>> table, chosen = jnp.array([[5, 3, 8, 1]]), jnp.array([[True, False, True, True]])
      >>> packed(table, jnp.array([10]), chosen, scratch=9, block_size=4)[0].tolist()  # 10 tokens are in 3 columns
      [[5, 8, 9, 9]]
      >>> packed(table, jnp.array([10]), chosen, scratch=9, block_size=4)[1].tolist()  # without the 4 tokens of 3
      [6]
    """
    column = np.arange(table.shape[1], dtype=np.int32)[None]
    num_columns = -(-lengths // block_size)
    chosen = chosen & (column < num_columns[:, None]) & (table != scratch)
    num_chosen = jnp.cumsum(chosen, axis=1, dtype=jnp.int32)
    row = np.broadcast_to(np.arange(table.shape[0], dtype=np.int32)[:, None], table.shape)
    front = put(jnp.full_like(table, scratch), (row, num_chosen - 1), table, chosen)
    return front, lengths - (num_columns - num_chosen[:, -1]) * block_size


@own_transfers()
def rest(tokens: ArrayLike, cached: ArrayLike) -> jax.Array:
    """Moves the tokens after a hit to the left: the tokens of a prompt still to compute, then zeros.

    After a hit a row continues after its cached tokens: `step` and `commit` take its next tokens. The whole prompt
    would be refused, or be committed as the text after the hit.

    Args:
      tokens: i32[T] or i32[R, T]; a prompt, or a prompt for each row.
      cached: i32[] or i32[R]; the cached tokens of each prompt, as `events.cached` of `admit` tells. With tokens i32[T]
        and i32[R] every row has the same prompt.

    Returns:
      i32[T] or i32[R, T]; the tokens from `cached` on, padded with 0.

    Raises:
      ValueError: if an argument has a wrong shape or dtype.

    Example:
      >>> kvjax.rest(np.arange(10, 16), 4).tolist()
      [14, 15, 0, 0, 0, 0]
      >>> prompts = np.array([[1, 2, 3], [4, 5, 6]])
      >>> kvjax.rest(prompts, np.array([0, 2])).tolist()
      [[1, 2, 3], [6, 0, 0]]
    """
    tokens = integers("tokens", tokens)
    cached = integers("cached", cached)
    if tokens.ndim not in (1, 2):
        raise ValueError(f"tokens: got shape {list(tokens.shape)}, wanted [T] or [R, T]")
    rows = tokens.shape[:-1] or cached.shape[:1]
    cached = each_row("cached", cached, rows)
    shape = (*rows, tokens.shape[-1])
    index = jnp.maximum(cached, 0)[..., None] + np.indices(shape, np.int32)[-1]
    return jnp.take_along_axis(jnp.broadcast_to(tokens, shape), index, axis=-1, mode="fill", fill_value=0)


def _rows(state: CacheState, num_tokens, seqs, written):
    """Block tables [R, M] per group, and the numbers of tokens before the view i32[R] and in it i32[R]."""
    max_seqs = state.spec.max_seqs
    seqs = jnp.arange(max_seqs, dtype=jnp.int32) if seqs is None else integers("seqs", seqs, ("R",))
    num_tokens = each_row("num_tokens", num_tokens, seqs.shape)
    is_row = (seqs >= 0) & (seqs < max_seqs)
    tables = []
    for group, spec in zip(state.groups, state.spec.groups, strict=True):
        table = pick(group.table, seqs)
        pool_row = group.pool_row(table)
        on_device = is_row[:, None] & (table >= 0) & (pool_row < spec.num_blocks)
        tables.append(jnp.where(on_device, pool_row, spec.num_blocks))
    if state.seqs.holes is not None:
        tables[0] = jnp.where(pick(state.seqs.holes, seqs), state.spec.groups[0].num_blocks, tables[0])
    written = jnp.maximum(each_row("written", written, seqs.shape), 0)  # committed tokens are never written again
    start = jnp.where(is_row, pick(state.seqs.committed, seqs) + written, 0)
    num_pending = jnp.where(is_row, pick(state.seqs.length, seqs), 0) - start
    return tuple(tables), start, jnp.clip(num_tokens, 0, jnp.maximum(num_pending, 0))


def _packed(count: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Packs rows of count i32[R] tokens on an axis of `size` positions, row after row.

    Returns:
      Each row's start i32[R], how many of its tokens fit i32[R], each position's owner i32[1, size], and the index of
      the position's token in its row i32[1, size]. Padding gets an index beyond the row's tokens.
    """
    starts = jnp.minimum(sum_before(count), size)
    count = jnp.minimum(count, size - starts)
    token = jnp.arange(size, dtype=jnp.int32)[None]
    # A slot's owner is the last row that starts at or before it. A row without tokens starts where the next row does.
    owner = jnp.sum(token >= starts[:, None], axis=0, dtype=jnp.int32)[None] - 1
    return starts, count, owner, token - pick(starts, owner)


def _view(state, tables, start, count, owner, offset, starts, decodes=0) -> View:
    """The view whose tokens are at `offset` among the tokens of rows `owner`, both shaped like `View.positions`."""
    size = state.spec.block_size
    is_token = offset < pick(count, owner)
    positions = jnp.where(is_token, pick(start, owner) + offset, 0)
    slots = []
    for table, group in zip(tables, state.spec.groups, strict=True):
        pool_row = pick(table, (owner, positions // size))
        slots.append(jnp.where(is_token, pool_row, group.num_blocks) * size + positions % size)
    lengths = jnp.where(count > 0, start + count, 0)
    view = View(tables, positions, lengths, tuple(slots), count, starts, decodes, spec=state.spec)
    return _without_holes(view) if state.spec.thinning else view


def _without_holes(view: View) -> View:
    """Packs the rows of the first group's table, where `thin` has left holes."""
    assert view.spec is not None
    table, *other_tables = view.tables
    everything = jnp.ones(table.shape, jnp.bool_)
    table, lengths = packed(table, view.lengths, everything, view.spec.groups[0].num_blocks, view.spec.block_size)
    return view.replace(tables=(table, *other_tables), packed_lengths=(lengths, *(None for _ in other_tables)))
