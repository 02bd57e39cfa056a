# SPDX-License-Identifier: Apache-2.0
"""The part of the cache for a model step: the slot of each token, and the blocks it may read.

A view is for the next tokens of some rows, after the committed tokens, reserved by `admit` or `extend`. In a block of
steps it is for the tokens after all that earlier steps have written. A view has three forms, and a model sees a batch
of rows in each:

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
from kvjax._compile import own_transfers
from kvjax.checks import each_row, integers, most_tokens, on_state, row_mask, static_int32
from kvjax.spec import CacheSpec
from kvjax.state import CacheState


class View(Pytree, static=("decodes", "fixed_split", "spec")):
    """The positions and slots of the tokens in a model step.

    A mixed view is a ragged view of S + R rows, whose first S rows have a single position each. Code that ignores
    `decodes` may treat it as ragged. `recur` runs recurrent layers. If you write a kernel for them, row r starts at
    token `lengths - num_tokens`, from the snapshot in pool row `tables[g][r, (start - 1) // P]` of the recurrent group
    g.

    Attributes:
      tables: per group i32[R, M]; pool rows, N (scratch) where a row has no block on the device.
      positions: i32[R, C], or i32[1, T] if ragged; each token's position in its sequence. Padding has some position
        too.
      lengths: i32[R]; the number of tokens that a row's last token attends to, including this view's. A row without
        tokens in the view has 0.
      slots: per group, shaped like positions; pool row * P + offset, where each token's K/V are written. The scratch
        row for padding.
      num_tokens: i32[R]; the number of each row's tokens in this view.
      starts: i32[R]; the index of each row's first token if ragged, None if padded.
      decodes: static; S if mixed, else 0. Row i of the first S has position i of the flat batch.
      fixed_split: static; whether attention of a decode row gives the same bits whatever the other rows are. Then its
        work is not cut into parts by the rows' lengths, which fills a GPU less evenly, and costs a CPU the longest
        row's steps for all rows.
      spec: static; the cache's spec. `write` and `attend` refuse pools of another spec. None disables this check, for a
        view made by hand.
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
    """A view in padded form: C tokens for each row.

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
    """A view in ragged form: all rows' tokens on an axis of T, row after row.

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
    """A view in mixed form: a token of each decoding row, then chunks of other rows, all on the same axis.

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
    # A slot's owner is the last row that starts there or before: a row without tokens starts where the next one does.
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
    return View(tables, positions, lengths, tuple(slots), count, starts, decodes, spec=state.spec)
