# SPDX-License-Identifier: Apache-2.0
"""Adopts a prefix whose bytes are on the host. It takes few programs for any length, and a few blocks at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from kvjax._compile import OutermostJit
from kvjax.cache import AnyCache, Cache
from kvjax.events.records import Events
from kvjax.state import Text
from kvjax.stores.transport import compile_pieces, write
from kvjax.tiered import FailedTransfer, TieredCache, joined
from kvjax.verbs.adopt import adopt, finish_adoption

COLUMNS = 8  # of the smallest program
GROWTH = 4  # the ratio of a program's columns to those of the next smaller program

_adopt = OutermostJit(adopt, donate_argnums=0, static_argnames="tiers")
_finish_adoption = OutermostJit(finish_adoption, donate_argnums=0)


def widths() -> Iterator[int]:
    """Yields the number of columns of each program, forever."""
    return (COLUMNS * GROWTH**n for n in itertools.count())


def adopt_prefix(
    cache: AnyCache,
    text: Text,
    have: np.ndarray,
    read: Callable[[int, list[int]], dict[int, list[np.ndarray]]],
    *,
    length: int,
    namespace: int,
    now: Any,
    **options: np.ndarray,
) -> tuple[AnyCache, Events]:
    """Adopts a prefix of n blocks: reserves them, writes their bytes, and makes the blocks that arrived findable.

    Args:
      cache: donated.
      text: i32[n, P].
      have: bool[G, n]; the blocks whose bytes `read` may return.
      read: (group, columns) -> {column: the words of each array}, with the columns that arrived. Called once for each
        group, in order.
      length: the number of tokens in the prefix.
      namespace: the prefix's namespace.
      now: i32[] ms.
      options: `requested_priority` i32[n, 2] and `hits` i32[n] of `adopt`.

    Returns:
      The cache, and the events of both verbs as one value.

    Raises:
      FailedTransfer: if a move between the tiers fails. Then nothing is reserved.
    """
    count = len(text.tokens)
    columns = next(size for size in widths() if size >= count)

    def padded(x: Any) -> np.ndarray:
        return np.pad(x, [(0, columns - count), *[(0, 0)] * (np.ndim(x) - 1)])

    text = jax.tree.map(lambda part: padded(part).reshape(-1), text)
    cache, events = _reserve(
        cache,
        text.tokens,
        np.int32(length),
        padded(have.T).T,
        namespace=np.int32(namespace),
        extra_ids=text.extra_ids,
        now=now,
        **jax.tree.map(padded, options),
    )
    adopted: Any = events.adopted
    if not bool(events.ok):
        return cache, events.replace(adopted=None)
    is_reserved = np.asarray(adopted.blocks) >= 0
    arrived = np.zeros_like(is_reserved)
    pools = cache.pools
    pool_rows = np.asarray(adopted.pool_rows)
    for group_index, columns_reserved in enumerate(is_reserved):
        words_by_column = read(group_index, np.flatnonzero(columns_reserved).tolist())
        arrived_columns = list(words_by_column)
        arrived[group_index, arrived_columns] = True
        pools = write(pools, group_index, pool_rows[group_index], arrived_columns, list(words_by_column.values()))
    state, landed = _finish_adoption(cache.state, adopted, arrived, now=now)
    return joined(Cache(state, pools), cache.host), events.followed_by(landed)


def compile_adoption(cache: AnyCache, columns: int, *, now: Any) -> tuple[AnyCache, Events]:
    """Compiles all programs of `adopt_prefix` for a number of blocks from `widths`, by adopting an empty prefix.

    The empty prefix is refused, so the returned cache is unchanged.
    """
    spec = cache.state.spec
    tokens = np.zeros((columns * spec.block_size,), np.int32)
    have = np.zeros((len(spec.groups), columns), np.bool_)
    cache, events = _reserve(cache, tokens, np.int32(0), have, namespace=np.int32(0), extra_ids=None, now=now)
    assert not events.ok
    adopted: Any = events.adopted
    for group_index, pool_rows in enumerate(np.asarray(adopted.pool_rows)):
        compile_pieces(cache.pools, group_index, pool_rows)
    state, landed = _finish_adoption(cache.state, adopted, np.zeros(adopted.blocks.shape, np.bool_), now=now)
    return joined(Cache(state, cache.pools), cache.host), events.followed_by(landed)


def _reserve(cache: AnyCache, *args: Any, **options: Any) -> tuple[AnyCache, Events]:
    """Calls `adopt`, and makes the moves that it orders. If a move fails, nothing is reserved."""
    if not isinstance(cache, TieredCache):
        state, events = _adopt(cache.state, *args, **options)
        return Cache(state, cache.pools), events
    try:
        return cache._adopt(*args, **options)
    except FailedTransfer as failure:
        adopted: Any = failure.events.adopted
        nothing = np.zeros(adopted.blocks.shape, np.bool_)
        state, _ = _finish_adoption(failure.tiered.state, adopted, nothing, now=options["now"])
        tiered = failure.tiered.replace(Cache(state, failure.tiered.pools))
        raise FailedTransfer(str(failure), tiered, failure.lost, failure.events, failure.removed) from failure
