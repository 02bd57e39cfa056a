# SPDX-License-Identifier: Apache-2.0
"""Sparse views: attention over some blocks of each row, as a function of a view."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from kvjax.checks import flags, static_int
from kvjax.pools.views import View, packed
from kvjax.spec import CacheSpec

_chosen_by = jax.make_user_context(None)  # a part of the keys of jax's caches


def sparse_attention(choose: Callable[..., View]) -> contextlib.AbstractContextManager[None]:
    """A context of model calls in which the layers with full attention read the blocks that a function chooses.

    `attend` calls `choose(q, pools, layer, view, index=, scale=, soft_cap=)`, with arguments that `block_mass` takes
    too, and reads the view that it returns. Layers with windows read all blocks as before. A jitted function is traced
    anew for each `choose`, so use one function for many calls.

    K/V computed in the context are approximate, so `view` has to be of a cache with `make_spec(sparse=True)`; see
    `select_blocks`.

    Args:
      choose: a function to return `select_blocks` of the view, or the view itself.

    Example:
      >>> spec = kvjax.make_spec(
      ...     [kvjax.LayerSpec(1, 2)],
      ...     num_blocks=8,
      ...     max_seqs=1,
      ...     max_length=32,
      ...     block_size=4,
      ...     dtype="float32",
      ...     sparse=True,
      ... )
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(12), 12)
      >>> view, v = kvjax.view(state, 12), jnp.arange(24.0).reshape(1, 12, 1, 2)
      >>> pools = kvjax.write(kvjax.init_pools(spec), 0, jnp.zeros_like(v), v, view)
      >>> state, _ = kvjax.commit(state, np.arange(12)[None], [11])
      >>> def first_block(q, pools, layer, view, **options):
      ...     return kvjax.pools.select_blocks(view, np.arange(8) < 1)
      >>> with kvjax.pools.sparse_attention(first_block):  # equal scores: the mean of blocks 0 and 2
      ...     out = kvjax.attend(jnp.zeros((1, 1, 1, 2)), pools, 0, kvjax.view(state, 1))
      >>> float(out[0, 0, 0, 0]), float(v[0, [0, 1, 2, 3, 8, 9, 10, 11], 0, 0].mean())
      (11.0, 11.0)
    """
    return _chosen_by(choose)


def check_whole(exact: Any) -> None:
    """Raises a ValueError if K/V of a model call in this context are said to be exact."""
    if exact is not None and exact is not False and _chosen_by.value is not None:
        raise ValueError(f"exact: got {exact!r:.80} in a context of sparse_attention, wanted None: K/V are approximate")


def chosen_view(view: View, window: int | None, *args: Any, **options: Any) -> View:
    """The view that a layer reads: the view itself, except in a context of `sparse_attention`."""
    choose = _chosen_by.value
    if choose is None:
        return view
    _check_sparse(view.spec)
    return view if window is not None else choose(*args, view, **options)


def _check_sparse(spec: CacheSpec | None) -> None:
    if spec is not None and not spec.sparse:
        raise ValueError("view: got one of a cache with sparse=False, wanted make_spec(..., sparse=True)")


def select_blocks(view: View, columns: ArrayLike, group: int = 0) -> View:
    """A view that reads only some blocks of each row. The blocks of the view's own tokens are always read.

    `attend` then equals dense attention over the tokens in these blocks: its cost follows their number. Each layer may
    have a view of its own. Positions, slots to write and the number of tokens stay as they are, so `write` and rotary
    positions need no change.

    Columns are columns of the view's table. A view of packed rows has fewer of them than the row: those it reads.
    Blocks that a window group no longer holds stay unread, and its sinks are always read. The `window` of `attend`
    counts the tokens that are read.

    K/V that a model computes from such a view are approximate. So the cache has to be made with
    `make_spec(sparse=True)`: after a `commit` without `exact=True` a row publishes nothing, and no other request can
    find these K/V.

    Args:
      view: a view in any form.
      columns: bool[R, M]; the blocks to read. bool[M] applies to all rows.
      group: the index of the group of layers whose table is packed. Others keep theirs.

    Raises:
      ValueError: if an argument has a wrong shape or dtype, the group is recurrent, or the view has no spec, or one
        that is not sparse.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4, sparse=True)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, _ = kvjax.commit(state, np.arange(18).reshape(2, 9), [9, 0])
      >>> view = kvjax.view(state, 1)
      >>> view.tables[0][0].tolist()  # 10 tokens in blocks 0, 1, 2
      [0, 1, 2, 8, 8, 8, 8, 8]
      >>> recent = kvjax.pools.select_blocks(view, np.arange(8) < 1)  # the first block
      >>> recent.tables[0][0].tolist(), recent.lengths_of(0).tolist(), recent.positions[0].tolist()
      ([0, 2, 8, 8, 8, 8, 8, 8], [6, 0], [9])

    Source: Quest, which reads chosen pages of a paged cache. Here you pass the choice.
    """
    if not isinstance(view, View) or view.spec is None:
        raise ValueError(f"view: got {view!r:.80}, wanted a View of a cache, such as kvjax.view makes")
    _check_sparse(view.spec)
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
