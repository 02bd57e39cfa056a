# SPDX-License-Identifier: Apache-2.0
"""A saved cache's blocks on their way into a cache: which of them, in what order, and by what programs."""

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
    """The blocks of a save, counted in all groups.

    Attributes:
      taken: those that the cache has now.
      left: those that it has no blocks for, or no LoRA.
      broken: those whose bytes are not what was saved, and what follows them.
    """

    taken: int
    left: int
    broken: int


class Saved:
    """The blocks of a save, read one by one.

    Attributes:
      contents: of the save.
      broken: bool[G, n]; blocks whose bytes were found not to be those that were saved.
    """

    def __init__(self, values: Values, contents: Contents, roots: Mapping[int, bytes], file: IO[bytes]):
        """`roots` has the hash of each namespace's empty prefix; `file` has the values, as `save` writes them."""
        self.contents = contents
        self._values = values
        self._file = file
        self._blocks = contents.blocks(values, roots)
        exists = contents.order >= 0
        self.broken = np.zeros_like(exists)
        self._starts = values.starts(exists)

    def read(self, number: int, at: int) -> list[np.ndarray] | None:
        """The words of a block's arrays, or None if they are not those that were saved."""
        if not self._values.has_bytes(number):
            return []
        value = b""
        with contextlib.suppress(OSError):  # of a disk: no sound block
            value = os.pread(self._file.fileno(), self._values.sizes[number], int(self._starts[number, at]))
        words = self._values.decode(self._blocks[at], number, value)
        self.broken[number, at] |= words is None
        return words

    def sound(self, path: list[int]) -> list[int]:
        """The path up to its first broken block."""
        ends = [column for column, at in enumerate(path) if self.broken[0, at]]
        return path[: ends[0]] if ends else path


def restore(cache: AnyCache, saved: Saved, namespaces: Mapping[int, int], now: np.ndarray) -> tuple[AnyCache, Loaded]:
    """Adopts the blocks of a save, of the namespaces with a number, chain by chain; donates the cache."""
    contents = saved.contents
    state = jax.device_get(cache.state)
    wanted = _chosen(contents, namespaces, state)
    available = [int(group.available) for group in state.groups]
    is_leaf = wanted[0].copy()
    above = contents.parent[wanted[0]]
    is_leaf[above[above >= 0]] = False
    (leaves,) = np.nonzero(is_leaf)
    for leaf in leaves[np.argsort(contents.order[0, leaves])].tolist():
        path = contents.path(leaf)
        while path := saved.sound(path):
            cache, missing = _adopt_chain(cache, saved, path, _have(path, wanted, contents, available), namespaces, now)
            if not missing:
                break
            path = path[: len(path) - missing]
    ids = blocks_with(contents, namespaces, jax.device_get(cache.state))
    order = [_by_release(*each) for each in zip(state.groups, ids, contents.order, strict=True)]
    state = _release_again(cache.state, order, now)
    return joined(Cache(state, cache.pools), cache.host), _counted(saved, ids)


def _chosen(contents: Contents, namespaces: Mapping[int, int], state: CacheState) -> np.ndarray:
    """bool[G, n]; the saved blocks that a cache has blocks for, those first that were released last."""
    order = contents.order
    ids = blocks_with(contents, namespaces, state)
    chosen = np.isin(contents.namespace, np.array(list(namespaces), np.int32))
    found = []
    for group, own, rank in zip(state.groups, ids, order, strict=True):
        is_held = (own >= 0) & (group.blocks.refcount[own] > 0)
        blocks_in_use = int(group.num_blocks) + len(group.blocks.refcount) - len(group.empty)
        budget = blocks_in_use - int(np.sum(group.blocks.refcount > 0))
        (latest,) = np.nonzero(chosen & (rank >= 0) & ~is_held)
        latest = latest[np.argsort(-rank[latest])][:budget]
        own_chosen = chosen & (rank >= 0) & is_held
        own_chosen[latest] = True
        found.append(own_chosen)
        chosen = found[0]  # blocks of the other groups need those of the first one
    return np.stack(found)


def _have(path: list[int], wanted: np.ndarray, contents: Contents, available: list[int]) -> np.ndarray:
    """bool[G, len(path)]; the columns of a chain to adopt: of a window group no more than its device holds."""
    have = wanted[:, path]
    for number, most in enumerate(available[1:], 1):
        (columns,) = np.nonzero(have[number])
        by_release = columns[np.argsort(contents.order[number, path][columns])]
        have[number, by_release[: max(0, len(by_release) - most)]] = False
    return have


def _adopt_chain(
    cache: AnyCache, saved: Saved, path: list[int], have: np.ndarray, namespaces: Mapping[int, int], now: np.ndarray
) -> tuple[AnyCache, int]:
    """Adopts the blocks of a chain that the cache lacks; also returns how many blocks were too many: none was taken."""
    spec = cache.state.spec
    contents = saved.contents
    ends: list[int] = []

    def read(number: int, columns: list[int]) -> dict[int, list[np.ndarray]]:
        columns = [at for at in columns if at < min(ends[:1], default=len(path))]
        found = {at: words for at in columns if (words := saved.read(number, path[at])) is not None}
        ends.append(min(set(columns) - found.keys(), default=len(path)))  # behind the first group's nothing is read
        return found

    options = {"hits": contents.hits[path]}
    stated = contents.retention[path, : 2 * spec.retention]
    if stated.size:
        options["stated"] = stated
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
    return cache, 0 if bool(events.ok) else max(1, int(np.sum(np.asarray(events.shortfall))))


def _by_release(group: Any, ids: np.ndarray, order: np.ndarray) -> np.ndarray:
    """i32[B]; the blocks ids i32[n] by their order i32[n], then NO_BLOCK."""
    (at,) = np.nonzero(ids >= 0)
    found = np.full(len(group.blocks.fill), NO_BLOCK, np.int32)
    found[: len(at)] = ids[at[np.argsort(order[at])]]
    return found


def _release_again(state: CacheState, order: Sequence[Any], now: Any) -> CacheState:
    """Holds blocks order[g] i32[B] of each group, and gives them back in this order, which has children first."""
    groups = []
    for number, (group, ids) in enumerate(zip(state.groups, order, strict=True)):
        group = hold(group, ids, ids >= 0, hit=False)
        groups.append(give_back(group, policy_of(state, number), ids, ids >= 0, now))
    return state.replace(groups=tuple(groups))


_release_again = OutermostJit(_release_again, donate_argnums=0)


def _counted(saved: Saved, ids: np.ndarray) -> Loaded:
    contents = saved.contents
    broken = saved.broken
    exists = contents.order >= 0
    is_broken = broken[0].copy()
    for at, above in enumerate(contents.parent.tolist()):
        is_broken[at] |= above >= 0 and is_broken[above]
    lost = exists & (ids < 0) & (is_broken | broken)
    taken = int(np.sum(ids >= 0))
    num_broken = int(np.sum(lost))
    return Loaded(taken, int(np.sum(exists)) - taken - num_broken, num_broken)
