# SPDX-License-Identifier: Apache-2.0
"""The part of the cache that a model step needs: where each token is written, and what it may read.

A view is for the next tokens of some rows, those after the committed ones, which `admit` or `extend` has reserved; in a
block of steps, for those after the ones that earlier steps have written. It has one of three forms, and a model sees a
batch of rows in each:

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

from kvjax._arrays import Pytree, pick, sum_before
from kvjax.checks import each_row, integers, most_tokens, on_state, row_mask, static_int32
from kvjax.spec import CacheSpec
from kvjax.state import CacheState


class View(Pytree, static=("decodes", "fixed_split", "spec")):
    """The positions and slots of the tokens of one model step.

    A mixed view is a ragged one of S + R rows, of which the first S have one position each: what does not heed
    `decodes` may treat it as ragged. `recur` runs recurrent layers; a kernel of one's own begins row r, which starts at
    `lengths - num_tokens`, with the snapshot in pool row `tables[g][r, (start - 1) // P]`, of g the recurrent group.

    Attributes:
      tables: per group i32[R, M]; pool rows, N (scratch) where a row has no block on the device.
      positions: i32[R, C]; of each token in its sequence; i32[1, T] if ragged. Padding has some position too.
      lengths: i32[R]; tokens that a row's last token attends to, those of this view included; 0 for a row without
        tokens in it.
      slots: per group, shaped like positions; pool row * P + offset, where each token's K/V go; the scratch
        row for padding.
      num_tokens: i32[R]; tokens of each row in this view.
      starts: i32[R]; if ragged, where each row's tokens start; None if padded.
      decodes: static; S if mixed, else 0. Row i of the first S has position i of the flat batch.
      fixed_split: static; whether attention of a decode row gives the same bits whatever the other rows are. It is not
        cut into parts by their lengths then, which fills a GPU less evenly, and costs a CPU the longest row's steps for
        all rows.
      spec: static; of the cache. `write` and `attend` refuse the pools of another spec. None, as in a view made by
        hand: they compare nothing.
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


@on_state
def view(
    state: CacheState,
    num_tokens: ArrayLike,
    max_tokens: int | None = None,
    seqs: ArrayLike | None = None,
    *,
    written: ArrayLike = 0,
) -> View:
    """A view in padded form: C tokens for each row.

    Args:
      state: the cache, with the tokens reserved.
      num_tokens: i32[R]; how many tokens of each row, at most C. A row that has reserved fewer gets these. An
        int stands for all rows.
      max_tokens: C; may be left out if num_tokens is an int.
      seqs: i32[R]; the rows; entries outside 0..S-1 are padding. None: all S rows.
      written: i32[R]; tokens of each row whose K/V are written and not yet committed; the view is for those after them.

    Raises:
      ValueError: on arguments of the wrong shape or dtype.

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
    """A view in ragged form: all rows' tokens on one axis of T, one row after the other.

    For batches that mix long chunks with single tokens, which the padded form would pad to the longest.

    Args:
      state: the cache, with the tokens reserved.
      num_tokens: i32[R]; how many tokens of each row. A row that has reserved fewer gets these, and so does a
        row that reaches the end of T: commit `num_tokens` of the view.
      size: T.
      seqs: i32[R]; the rows; entries outside 0..S-1 are padding. None: all S rows.
      written: as in `view`.

    Raises:
      ValueError: on arguments of the wrong shape or dtype.

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
    """A view in mixed form: one token of each row that decodes, then chunks of other rows, all on one axis.

    The flat batch has S + `size` positions: i is row i's, and after these S the chunks are as in `ragged`. A model
    computes it at once; `attend` serves the two parts as decode and as prefill.

    Args:
      state: the cache, with the tokens reserved.
      decode: bool[S]; rows with a token each. A row that has reserved none has none.
      seqs: i32[R]; the rows with chunks, all different; entries outside 0..S-1 are padding, and so are rows that
        decode, whose tokens would be written twice.
      num_tokens: i32[R]; as in `ragged`. An int stands for all rows.
      size: positions for chunks.

    Returns:
      A view of S + R rows: all S, then `seqs`. Commit `num_tokens[:S]` of it for the former, the rest for `seqs`.

    Raises:
      ValueError: on arguments of the wrong shape or dtype.
    """
    size = static_int32("size", size, 1)
    most = state.spec.max_seqs
    decode = row_mask("decode", decode, most)
    seqs = integers("seqs", seqs, ("R",))
    chunks = jnp.where(pick(decode, seqs), 0, each_row("num_tokens", num_tokens, seqs.shape))
    row = np.arange(most, dtype=np.int32)
    counts = jnp.concatenate([decode.astype(jnp.int32), chunks])
    tables, start, count = _rows(state, counts, jnp.concatenate([row, seqs]), 0)
    starts, chunks, owner, offset = _packed(count[most:], size)
    return _view(
        state,
        tables,
        start,
        count=jnp.concatenate([count[:most], chunks]),
        owner=jnp.concatenate([row[None], owner + most], axis=1),
        offset=jnp.concatenate([np.zeros_like(row)[None], offset], axis=1),
        starts=jnp.concatenate([row, starts + most]),
        decodes=most,
    )


def _rows(state: CacheState, num_tokens, seqs, written):
    """Block tables [R, M] per group, tokens i32[R] before the view's, and those i32[R] that each row has reserved."""
    max_seqs = state.spec.max_seqs
    seqs = jnp.arange(max_seqs, dtype=jnp.int32) if seqs is None else integers("seqs", seqs, ("R",))
    num_tokens = each_row("num_tokens", num_tokens, seqs.shape)
    real = (seqs >= 0) & (seqs < max_seqs)
    tables = []
    for group, spec in zip(state.groups, state.spec.groups, strict=True):
        table = pick(group.table, seqs)
        pool_row = group.pool_row(table)
        on_device = real[:, None] & (table >= 0) & (pool_row < spec.num_blocks)
        tables.append(jnp.where(on_device, pool_row, spec.num_blocks))
    written = jnp.maximum(each_row("written", written, seqs.shape), 0)  # committed tokens are never written again
    start = jnp.where(real, pick(state.seqs.committed, seqs) + written, 0)
    num_pending = jnp.where(real, pick(state.seqs.length, seqs), 0) - start
    return tuple(tables), start, jnp.clip(num_tokens, 0, jnp.maximum(num_pending, 0))


def _packed(count: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows of count i32[R] tokens on one axis of `size` positions, one after the other.

    Returns i32[R], where each row starts; i32[R], how many of its tokens fit; and i32[1, size], each position's owner
    and which of its tokens that is, from 0 on, or beyond them for padding.
    """
    starts = jnp.minimum(sum_before(count), size)
    count = jnp.minimum(count, size - starts)
    token = jnp.arange(size, dtype=jnp.int32)[None]
    # A slot's owner is the last row that starts there or before: a row without tokens starts where the next one does.
    owner = jnp.sum(token >= starts[:, None], axis=0, dtype=jnp.int32)[None] - 1
    return starts, count, owner, token - pick(starts, owner)


def _view(state, tables, start, count, owner, offset, starts, decodes=0) -> View:
    """The view whose tokens are the offset-th ones of rows owner; both shaped like `View.positions`."""
    size = state.spec.block_size
    real = offset < pick(count, owner)
    positions = jnp.where(real, pick(start, owner) + offset, 0)
    slots = []
    for table, group in zip(tables, state.spec.groups, strict=True):
        pool_row = pick(table, (owner, positions // size))
        slots.append(jnp.where(real, pool_row, group.num_blocks) * size + positions % size)
    lengths = jnp.where(count > 0, start + count, 0)
    return View(tables, positions, lengths, tuple(slots), count, starts, decodes, spec=state.spec)
