# SPDX-License-Identifier: Apache-2.0
"""A saved cache's blocks on their way into a cache: which of them, in what order, and by what programs."""

from __future__ import annotations

import bisect
import contextlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax._compile import OutermostJit
from kvjax.blocks.holders import give_back, hold
from kvjax.blocks.windows import policy_of
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState, Text
from kvjax.stores.adoption import AnyCache, adopt_prefix, with_state
from kvjax.stores.contents import Contents, blocks_with
from kvjax.stores.layout import leaves_of
from kvjax.stores.manifest import open_file
from kvjax.stores.transport import checksum


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


def tensor_name(at: int) -> str:
    """The name of a group's array in a file."""
    return f"array{at}"


class Saved:
    """The blocks of a save, read one by one.

    Attributes:
      contents: of the save.
      broken: bool[G, n]; blocks whose bytes were found not to be those that were saved.
    """

    def __init__(
        self,
        spec: CacheSpec,
        contents: Contents,
        starts: np.ndarray,
        crc: np.ndarray,
        parts: Sequence[tuple[Mapping[str, Any], Any]],
    ):
        """`parts` are those of the manifest, each with its open file, or None."""
        self.contents, self._starts, self._crc, self._spec = contents, starts, crc, spec
        self.broken = np.zeros(contents.order.shape, np.bool_)
        exists = contents.order >= 0
        self._position = np.cumsum(exists, axis=1) - exists
        self._parts: list[list[tuple[int, int, Any]]] = [[] for _ in spec.groups]
        for part, opened in sorted(parts, key=lambda each: each[0]["first"]):
            if opened is not None and 0 <= part["group"] < len(spec.groups):
                self._parts[part["group"]].append((part["first"], part["count"], opened))

    def read(self, number: int, at: int) -> list[np.ndarray] | None:
        """The words of a block's arrays, or None if they are not those that were saved."""
        found = self._read(number, int(self._position[number, at]))
        if found is None or checksum(int(self._starts[at]), found) != int(self._crc[number, at]):
            self.broken[number, at] = True
            return None
        return found

    def _read(self, number: int, position: int) -> list[np.ndarray] | None:
        leaves = leaves_of(self._spec, number)
        if not leaves:
            return []
        at = bisect.bisect_right(self._parts[number], position, key=lambda part: part[0]) - 1
        if at < 0:
            return None
        first, count, opened = self._parts[number][at]
        row = position - first
        if row >= count:
            return None
        try:
            found = [opened.get_slice(tensor_name(leaf))[row : row + 1] for leaf in range(len(leaves))]
        except Exception:  # whatever safetensors raises
            return None
        pairs = zip(found, leaves, strict=True)
        fits = all(x.shape == (1, *leaf.shape) and x.dtype == leaf.word for x, leaf in pairs)
        return [x[0] for x in found] if fits else None

    def sound(self, path: list[int]) -> list[int]:
        """The path up to its first broken block."""
        ends = [column for column, at in enumerate(path) if self.broken[0, at]]
        return path[: ends[0]] if ends else path


def open_part(folder: pathlib.Path, part: Mapping[str, Any], stack: contextlib.ExitStack) -> Any:
    """An open file, which a later save may delete, until `stack` closes it; None if it cannot be opened."""
    from safetensors import safe_open

    path = folder / part["file"]
    try:
        open_file(path, part["bytes"]).close()
        return stack.enter_context(safe_open(path, framework="numpy"))
    except Exception:  # whatever safetensors raises
        return None


def restore(cache: AnyCache, saved: Saved, namespaces: Mapping[int, int], now: np.ndarray) -> tuple[AnyCache, Loaded]:
    """Adopts the blocks of a save, of the namespaces with a number, chain by chain; donates the cache."""
    contents, state = saved.contents, jax.device_get(cache.state)
    wanted, available = _chosen(contents, namespaces, state), [int(group.available) for group in state.groups]
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
    return with_state(cache, _release_again(cache.state, order, now), cache.pools), _counted(saved, ids)


def _chosen(contents: Contents, namespaces: Mapping[int, int], state: CacheState) -> np.ndarray:
    """bool[G, n]; the saved blocks that a cache has blocks for, those first that were released last."""
    order, ids = contents.order, blocks_with(contents, namespaces, state)
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
    spec, contents = cache.state.spec, saved.contents
    ends: list[int] = []

    def read(number: int, columns: list[int]) -> dict[int, list[np.ndarray]]:
        columns = [at for at in columns if at < min(ends[:1], default=len(path))]
        found = {at: words for at in columns if (words := saved.read(number, path[at])) is not None}
        ends.append(min(set(columns) - found.keys(), default=len(path)))  # behind the first group's nothing is read
        return found

    options, stated = {"hits": contents.hits[path]}, contents.retention[path][:, : 2 * spec.retention]
    if stated.size:
        options["stated"] = stated
    parts: list[Any] = [part[path] if part.size else None for part in (contents.tokens, contents.extra_ids)]
    cache, events = adopt_prefix(
        cache, Text(*parts), have, read,
        length=(len(path) - 1) * spec.block_size + int(contents.fill[path[-1]]),
        namespace=namespaces[int(contents.namespace[path[0]])], now=now, **options,
    )  # fmt: skip
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
    contents, broken = saved.contents, saved.broken
    exists, is_broken = contents.order >= 0, broken[0].copy()
    for at, above in enumerate(contents.parent.tolist()):
        is_broken[at] |= above >= 0 and is_broken[above]
    lost = exists & (ids < 0) & (is_broken | broken)
    taken, num_broken = int(np.sum(ids >= 0)), int(np.sum(lost))
    return Loaded(taken, int(np.sum(exists)) - taken - num_broken, num_broken)
