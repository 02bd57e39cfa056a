# SPDX-License-Identifier: Apache-2.0
"""Sparse views: attention over some blocks of each row, as a function of a view."""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike

from kvjax.checks import flags, static_int
from kvjax.pools.views import View, packed


def select_blocks(view: View, columns: ArrayLike, group: int = 0) -> View:
    """A view that reads only some blocks of each row. The blocks of the view's own tokens are always read.

    `attend` then equals dense attention over the tokens in these blocks: its cost follows their number. Each layer may
    have a view of its own. Positions, slots to write and the number of tokens stay as they are, so `write` and rotary
    positions need no change.

    Columns are columns of the view's table. A view of packed rows has fewer of them than the row: those it reads.
    Blocks that a window group no longer holds stay unread, and its sinks are always read. The `window` of `attend`
    counts the tokens that are read.

    Args:
      view: a view in any form.
      columns: bool[R, M]; the blocks to read. bool[M] applies to all rows.
      group: the index of the group of layers whose table is packed. Others keep theirs.

    Raises:
      ValueError: if an argument has a wrong shape or dtype, the group is recurrent, or the view has no spec.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, _ = kvjax.commit(state, np.arange(18).reshape(2, 9), [9, 0])
      >>> view = kvjax.view(state, 1)
      >>> view.tables[0][0].tolist()  # 10 tokens in blocks 0, 1, 2
      [0, 1, 2, 8, 8, 8, 8, 8]
      >>> recent = kvjax.pools.select_blocks(view, np.arange(8) < 1)  # the first block
      >>> recent.tables[0][0].tolist(), recent.lengths_of(0).tolist(), recent.positions[0].tolist()
      ([0, 2, 8, 8, 8, 8, 8, 8], [6, 0], [9])

    Source: Quest reads chosen pages of a paged cache; here the choice is an argument.
    """
    if not isinstance(view, View) or view.spec is None:
        raise ValueError(f"view: got {view!r:.80}, wanted a View of a cache, such as kvjax.view makes")
    group = static_int("group", group, 0)
    if group >= len(view.tables) or view.spec.groups[group].recurrent:
        raise ValueError(f"group: got {group}, wanted one of the {len(view.tables)} groups with K/V or latents")
    spec = view.spec.groups[group]
    size = view.spec.block_size
    table = view.tables[group]
    lengths = view.lengths_of(group)
    column = np.arange(table.shape[1], dtype=np.int32)[None]
    first_own = (lengths - view.num_tokens) // size
    chosen = (
        flags("columns", columns, table.shape) | (column >= first_own[:, None]) | (column * size < spec.sink_tokens)
    )
    table, lengths = packed(table, lengths, chosen, spec.num_blocks, size)
    return view.replace(
        tables=_with(view.tables, group, table),
        packed_lengths=_with(view.packed_lengths or (None,) * len(view.tables), group, lengths),
    )


def _with[T](items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])
