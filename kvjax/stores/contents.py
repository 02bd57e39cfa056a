# SPDX-License-Identifier: Apache-2.0
"""The findable contents of a cache without a block number: a list of prefixes, parents before their children."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.policies.retention import UNSTATED
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState
from kvjax.stores.values import Block, Values


class Contents(NamedTuple):
    """Blocks of the first group; those of the others belong to the same prefixes.

    Attributes:
      parent: i32[n]; the index of the block before each, less than its own; -1 at a root.
      namespace: i32[n].
      tokens: i32[n, P]; 0 behind the block's last token.
      extra_ids: i32[n, P]; likewise; P = 0 where the layout has none.
      fill: i32[n]; tokens of each.
      hits: i32[n].
      retention: i32[n, 2]; stated priority and time to live; UNSTATED where the spec has none.
      order: i32[G, n]; ranks in the order of release in each group, children first; held blocks come last. -1 where
        the group has no block.
    """

    parent: np.ndarray
    namespace: np.ndarray
    tokens: np.ndarray
    extra_ids: np.ndarray
    fill: np.ndarray
    hits: np.ndarray
    retention: np.ndarray
    order: np.ndarray

    def text(self, at: int) -> bytes:
        """A block's tokens, then its extra ids; i32, little-endian."""
        fill = self.fill[at]
        return b"".join(part[at, :fill].astype("<i4", copy=False).tobytes() for part in (self.tokens, self.extra_ids))

    def blocks(self, values: Values, roots: Mapping[int, bytes]) -> list[Block]:
        """The blocks by their hashes, of which each namespace's empty prefix has its own."""
        found: list[Block] = []
        for at, above in enumerate(self.parent.tolist()):
            parent = found[above].hash if above >= 0 else roots[int(self.namespace[at])]
            found.append(values.block(parent, self.text(at)))
        return found

    def to_bytes(self) -> bytes:
        """All arrays, one after the other; i32, little-endian."""
        return b"".join(array.astype("<i4", copy=False).tobytes() for array in self)

    @classmethod
    def from_bytes(cls, data: bytes, spec: CacheSpec, count: int) -> Contents:
        """The contents of so many blocks that `to_bytes` has written for this layout.

        Raises:
          ValueError: naming the array that no cache can have.
        """
        limits = _limits(spec, count)
        words = np.frombuffer(data, "<i4").astype(np.int32, copy=False)
        start = 0
        arrays = {}
        for name, (shape, least, largest) in limits.items():
            array = arrays[name] = words[start : start + math.prod(shape)].reshape(shape)
            if array.size and not least <= array.min() <= array.max() <= largest:
                raise ValueError(f"{name} from {array.min()} to {array.max()}")
            start += array.size
        contents = cls(**arrays)
        if rule := contents.broken_rule():
            raise ValueError(f"arrays that break a rule: {rule}")
        return contents

    def path(self, at: int) -> list[int]:
        """The indices of a block's prefix, from the root to the block."""
        found = []
        while at >= 0:
            found.append(at)
            at = int(self.parent[at])
        return found[::-1]

    def broken_rule(self) -> str:
        """The first rule of a cache's contents that arrays of the right shapes and ranges break, or ""."""
        (child,) = np.nonzero(self.parent >= 0)
        is_token = np.arange(self.tokens.shape[1]) < self.fill[:, None]
        above = self.parent[child]
        ranks = [row[row >= 0] for row in self.order]
        columns = self.parent[:, None], self.namespace[:, None], self.fill[:, None], self.tokens, self.extra_ids
        prefixes = {row.tobytes() for row in np.concatenate(columns, axis=1)}
        rules = {
            "parents come before their children": above < child,
            "children have the namespace of their parents": self.namespace[above] == self.namespace[child],
            "parents are whole": self.fill[above] == self.tokens.shape[1],
            "tokens end with the block's last one": (self.tokens == 0) | is_token,
            "extra_ids end with the block's last one": (self.extra_ids == 0) | is_token[:, : self.extra_ids.shape[1]],
            "no prefix is there twice": len(prefixes) == len(self.parent),
            "order has all blocks of the first group": self.order[0] >= 0,
            "order has each rank of a group once": [np.array_equal(np.sort(row), np.arange(len(row))) for row in ranks],
            "order has children before their parents": self.order[0, child] < self.order[0, above],
        }
        return next((rule for rule, holds in rules.items() if not np.all(holds)), "")


def num_bytes(spec: CacheSpec, count: int) -> int:
    """The bytes of the contents of so many blocks."""
    return sum(4 * math.prod(shape) for shape, *_ in _limits(spec, count).values())


def _limits(spec: CacheSpec, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """The shape, the least and the largest number of each array of the contents of so many blocks."""
    size = spec.block_size
    largest = np.iinfo(np.int32).max
    any_number = np.iinfo(np.int32).min, largest
    return {
        "parent": ((count,), -1, count - 1),
        "namespace": ((count,), 0, largest),
        "tokens": ((count, size), 0, largest),
        "extra_ids": ((count, size * spec.extra_ids), *any_number),
        "fill": ((count,), 1, size),
        "hits": ((count,), *any_number),  # the cache's counter wraps too
        "retention": ((count, 2), *any_number),
        "order": ((len(spec.groups), count), -1, count - 1),
    }


def contents_of(state: Any) -> tuple[Contents, np.ndarray]:
    """The contents of a `CacheState` on the host; and i32[G, n], each group's blocks, NO_BLOCK where it has none.

    Blocks on the move are left out, with what follows them.
    """
    group = state.groups[0]
    blocks = state.groups[0].blocks
    listed = _depth_first(blocks.parent[:, 0], (blocks.fill > 0) & np.asarray(group.arrived(group.ids)))
    index = np.full(blocks.fill.shape[0] + 1, -1, np.int32)  # the last one for NO_BLOCK
    index[listed] = np.arange(len(listed))
    parent = index[blocks.parent[listed, 0]]
    fill = blocks.fill[listed]
    namespace = blocks.parent[listed, 1].copy()
    for at in np.flatnonzero(parent >= 0).tolist():
        namespace[at] = namespace[parent[at]]
    ids = [np.asarray(each.in_this_group(listed)).astype(np.int32) for each in state.groups]
    ids = [np.where(np.asarray(each.arrived(own)), own, NO_BLOCK) for each, own in zip(state.groups, ids, strict=True)]
    is_token = np.arange(blocks.tokens.shape[1]) < fill[:, None]
    text = {name: np.where(is_token, words[listed], 0) for name, words in blocks.text.parts().items()}
    extra_ids = text.get("extra_ids", text["tokens"][:, :0])
    retention = np.full((len(listed), 2), UNSTATED, np.int32)
    for stated in jax.tree.leaves(blocks.retention):  # None has no leaves
        retention = stated[listed]
    order = [_released(each.blocks, own) for each, own in zip(state.groups, ids, strict=True)]
    depth = blocks.depth[listed]
    order[0] = latest_below(parent, order[0])
    ranks = np.stack([_ranks(released, depth, own >= 0) for released, own in zip(order, ids, strict=True)])
    hits = blocks.hits[listed]
    return Contents(parent, namespace, text["tokens"], extra_ids, fill, hits, retention, ranks), np.stack(ids)


def _depth_first(parent: np.ndarray, is_wanted: np.ndarray) -> np.ndarray:
    """i32[n]; the wanted blocks whose prefixes are wanted too, each chain in one piece."""
    children: dict[int, list[int]] = {}
    for block in np.flatnonzero(is_wanted).tolist():
        children.setdefault(int(parent[block]), []).append(block)
    found = []
    waiting = children.get(NO_BLOCK, [])[::-1]
    while waiting:
        found.append(block := waiting.pop())
        waiting.extend(children.get(block, ()))
    return np.array(found, np.int32)


def _released(blocks: Any, ids: np.ndarray) -> np.ndarray:
    """i64[n]; times of release of blocks ids i32[n], none more than 0; held ones have 1."""
    age = (np.int64(blocks.clock) - blocks.released[ids].astype(np.int64)).astype(np.int32)
    return np.where(blocks.refcount[ids] > 0, 1, -age.astype(np.int64))


def latest_below(parent: np.ndarray, order: np.ndarray) -> np.ndarray:
    """i64[n]; the latest of each block's and its descendants' order i64[n]."""
    latest = order.astype(np.int64)
    for at in range(len(parent) - 1, -1, -1):
        if (above := parent[at]) >= 0:
            latest[above] = max(latest[above], latest[at])
    return latest


def _ranks(order: np.ndarray, depth: np.ndarray, where: np.ndarray) -> np.ndarray:
    """i32[n]; the ranks by order i64[n], among equals of the deeper ones first; -1 elsewhere."""
    ranks = np.full(len(order), -1, np.int32)
    (at,) = np.nonzero(where)
    ranks[at[np.lexsort((-depth[at], order[at]))]] = np.arange(len(at))
    return ranks


def blocks_with(contents: Contents, namespaces: Mapping[int, int], state: CacheState) -> np.ndarray:
    """i32[G, n]; the blocks of a state on the host that have these contents, NO_BLOCK where it has none.

    `namespaces` has the number of each saved namespace; blocks of others are not looked for.
    """
    own, ids = contents_of(state)
    cached = {(int(own.parent[at]), int(own.namespace[at]), own.text(at)): at for at in range(len(own.parent))}
    found = np.full(len(contents.parent) + 1, -1, np.int32)  # the last one for a root
    for at in range(len(contents.parent)):
        above = int(contents.parent[at])
        namespace = namespaces.get(int(contents.namespace[at]), -1)
        if above < 0 or found[above] >= 0:
            found[at] = cached.get((int(found[above]), namespace, contents.text(at)), -1)
    found = found[:-1]
    return np.where(found >= 0, ids[:, found], NO_BLOCK) if ids.size else np.full((len(ids), len(found)), NO_BLOCK)
