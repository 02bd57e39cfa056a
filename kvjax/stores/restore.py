# SPDX-License-Identifier: Apache-2.0
"""Restores the blocks of a saved cache: chooses and orders them, and adopts them chain by chain."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from kvjax._compile import OutermostJit
from kvjax.blocks.holders import give_back, hold
from kvjax.blocks.windows import policy_of
from kvjax.cache import AnyCache, Cache
from kvjax.state import NO_BLOCK, CacheState, Text
from kvjax.stores.adoption import adopt_prefix
from kvjax.stores.contents import Contents, blocks_with
from kvjax.stores.values import Values
from kvjax.tiered import joined


class Loaded(NamedTuple):
    """Counts of the blocks of a save, in all groups.

    Attributes:
      taken: blocks now in the cache.
      left: blocks that did not fit into the cache, or whose LoRA this process lacks.
      broken: blocks whose bytes differ from the save, and their descendants.
    """

    taken: int
    left: int
    broken: int


class Saved:
    """The blocks of a save, read block by block.

    Attributes:
      contents: the contents of the save.
      broken: bool[G, n]; blocks whose bytes turned out to differ from the save.
    """

    def __init__(self, values: Values, contents: Contents, roots: Mapping[int, bytes], file: IO[bytes]):
        """`roots` has the hash of each namespace's empty prefix. `file` has the values, as written by `save`."""
        self.contents = contents
        self._values = values
        self._file = file
        self._blocks = contents.blocks(values, roots)
        exists = contents.order >= 0
        self.broken = np.zeros_like(exists)
        self._starts = values.starts(exists)

    def read(self, group_index: int, block_index: int) -> list[np.ndarray] | None:
        """The words of a block's arrays, or None if they differ from the save."""
        if not self._values.has_bytes(group_index):
            return []
        value = b""
        with contextlib.suppress(OSError):  # a failing disk makes the block broken
            value = os.pread(
                self._file.fileno(), self._values.sizes[group_index], int(self._starts[group_index, block_index])
            )
        words = self._values.decode(self._blocks[block_index], group_index, value)
        self.broken[group_index, block_index] |= words is None
        return words

    def sound(self, path: list[int]) -> list[int]:
        """The path up to its first broken block."""
        broken_columns = [column for column, block_index in enumerate(path) if self.broken[0, block_index]]
        return path[: broken_columns[0]] if broken_columns else path


def restore(cache: AnyCache, saved: Saved, namespaces: Mapping[int, int], now: np.ndarray) -> tuple[AnyCache, Loaded]:
    """Adopts the blocks of a save in the namespaces with a number, chain by chain. Donates the cache."""
    contents = saved.contents
    state = jax.device_get(cache.state)
    wanted = _chosen(contents, namespaces, state)
    available = [int(group.available) for group in state.groups]
    is_leaf = wanted[0].copy()
    parents = contents.parent[wanted[0]]
    is_leaf[parents[parents >= 0]] = False
    (leaves,) = np.nonzero(is_leaf)
    for leaf in leaves[np.argsort(contents.order[0, leaves])].tolist():
        path = contents.path(leaf)
        while path := saved.sound(path):
            have = _have(path, wanted, contents, available)
            cache, missing = _adopt_chain(cache, saved, path, have, namespaces, now)
            if not missing:
                break
            path = path[: len(path) - missing]
    ids = blocks_with(contents, namespaces, jax.device_get(cache.state))
    order = [
        _by_release(group, group_ids, ranks)
        for group, group_ids, ranks in zip(state.groups, ids, contents.order, strict=True)
    ]
    state = _release_again(cache.state, order, now)
    return joined(Cache(state, cache.pools), cache.host), _counted(saved, ids)


def _chosen(contents: Contents, namespaces: Mapping[int, int], state: CacheState) -> np.ndarray:
    """The saved blocks bool[G, n] that fit into the cache, the most recently released first."""
    order = contents.order
    ids = blocks_with(contents, namespaces, state)
    eligible = np.isin(contents.namespace, np.array(list(namespaces), np.int32))
    chosen = []
    for group, group_ids, ranks in zip(state.groups, ids, order, strict=True):
        is_held = (group_ids >= 0) & (group.blocks.refcount[group_ids] > 0)
        blocks_in_use = int(group.num_blocks) + len(group.blocks.refcount) - len(group.empty)
        budget = blocks_in_use - int(np.sum(group.blocks.refcount > 0))
        (latest,) = np.nonzero(eligible & (ranks >= 0) & ~is_held)
        latest = latest[np.argsort(-ranks[latest])][:budget]
        group_chosen = eligible & (ranks >= 0) & is_held
        group_chosen[latest] = True
        chosen.append(group_chosen)
        eligible = chosen[0]  # blocks of the other groups need their blocks of the first group
    return np.stack(chosen)


def _have(path: list[int], wanted: np.ndarray, contents: Contents, available: list[int]) -> np.ndarray:
    """The columns bool[G, len(path)] of a chain to adopt, in a window group no more than fit on the device."""
    have = wanted[:, path]
    for group_index, num_available in enumerate(available[1:], 1):
        (columns,) = np.nonzero(have[group_index])
        by_release = columns[np.argsort(contents.order[group_index, path][columns])]
        have[group_index, by_release[: max(0, len(by_release) - num_available)]] = False
    return have


def _adopt_chain(
    cache: AnyCache, saved: Saved, path: list[int], have: np.ndarray, namespaces: Mapping[int, int], now: np.ndarray
) -> tuple[AnyCache, int]:
    """Adopts the blocks of a chain that the cache lacks.

    Returns:
      The cache, and the number of missing blocks. If blocks are missing, none was adopted.
    """
    spec = cache.state.spec
    contents = saved.contents
    ends: list[int] = []  # per group, the first column that could not be read

    def read(group_index: int, columns: list[int]) -> dict[int, list[np.ndarray]]:
        end = ends[0] if ends else len(path)  # the other groups read nothing after the first group's end
        columns = [column for column in columns if column < end]
        words_by_column = {}
        for column in columns:
            words = saved.read(group_index, path[column])
            if words is not None:
                words_by_column[column] = words
        ends.append(min(set(columns) - words_by_column.keys(), default=len(path)))
        return words_by_column

    options = {"hits": contents.hits[path]}
    requested_priority = contents.retention[path, : 2 * spec.retention]
    if requested_priority.size:
        options["requested_priority"] = requested_priority
    parts: list[Any] = [part[path] if part.size else None for part in (contents.tokens, contents.extra_ids)]
    cache, events = adopt_prefix(
        cache,
        Text(*parts),
        have,
        read,
        length=(len(path) - 1) * spec.block_size + int(contents.fill[path[-1]]),
        namespace=namespaces[int(contents.namespace[path[0]])],
        now=now,
        **options,
    )
    if bool(events.ok):
        return cache, 0
    return cache, max(1, int(np.sum(np.asarray(events.shortfall))))


def _by_release(group: Any, ids: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The blocks ids i32[n], ordered by order i32[n] and padded with NO_BLOCK to i32[B]."""
    (indices,) = np.nonzero(ids >= 0)
    ordered = np.full(len(group.blocks.fill), NO_BLOCK, np.int32)
    ordered[: len(indices)] = ids[indices[np.argsort(order[indices])]]
    return ordered


def _release_again(state: CacheState, order: Sequence[Any], now: Any) -> CacheState:
    """Holds blocks order[g] i32[B] of each group, and releases them in this order, which has children first."""
    groups = []
    for group_index, (group, ids) in enumerate(zip(state.groups, order, strict=True)):
        group = hold(group, ids, ids >= 0, hit=False)
        groups.append(give_back(group, policy_of(state, group_index), ids, ids >= 0, now))
    return state.replace(groups=tuple(groups))


_release_again = OutermostJit(_release_again, donate_argnums=0)


def _counted(saved: Saved, ids: np.ndarray) -> Loaded:
    contents = saved.contents
    broken = saved.broken
    exists = contents.order >= 0
    is_broken = broken[0].copy()
    for block_index, parent_index in enumerate(contents.parent.tolist()):
        is_broken[block_index] |= parent_index >= 0 and is_broken[parent_index]
    is_lost = exists & (ids < 0) & (is_broken | broken)
    taken = int(np.sum(ids >= 0))
    num_broken = int(np.sum(is_lost))
    return Loaded(taken, int(np.sum(exists)) - taken - num_broken, num_broken)
