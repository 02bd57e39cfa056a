# SPDX-License-Identifier: Apache-2.0
"""The findable contents of a cache, without block numbers: a list of prefixes, parents before their children."""

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
    """Blocks of the first group. The blocks of the other groups belong to the same prefixes.

    Attributes:
      parent: i32[n]; the index of the block before each block, less than the block's index, or -1 at a root.
      namespace: i32[n].
      tokens: i32[n, P]; 0 after the block's last token.
      extra_ids: i32[n, P]; 0 after the last token. P = 0 if the layout has no extra ids.
      fill: i32[n]; the number of tokens in each block.
      hits: i32[n].
      retention: i32[n, 2]; requested priority and time to live, or UNSTATED if the spec has no retention.
      order: i32[G, n]; ranks in the order of release in each group, children first, held blocks last, or -1 where the
        group has no block.
    """

    parent: np.ndarray
    namespace: np.ndarray
    tokens: np.ndarray
    extra_ids: np.ndarray
    fill: np.ndarray
    hits: np.ndarray
    retention: np.ndarray
    order: np.ndarray

    def text(self, block_index: int) -> bytes:
        """A block's tokens, then its extra ids, as little-endian i32."""
        fill = self.fill[block_index]
        return b"".join(
            part[block_index, :fill].astype("<i4", copy=False).tobytes() for part in (self.tokens, self.extra_ids)
        )

    def blocks(self, values: Values, roots: Mapping[int, bytes]) -> list[Block]:
        """The blocks with their hashes. `roots` has the hash of each namespace's empty prefix."""
        blocks: list[Block] = []
        for block_index, parent_index in enumerate(self.parent.tolist()):
            parent = blocks[parent_index].hash if parent_index >= 0 else roots[int(self.namespace[block_index])]
            blocks.append(values.block(parent, self.text(block_index)))
        return blocks

    def to_bytes(self) -> bytes:
        """All arrays one after the other, as little-endian i32."""
        return b"".join(array.astype("<i4", copy=False).tobytes() for array in self)

    @classmethod
    def from_bytes(cls, data: bytes, spec: CacheSpec, count: int) -> Contents:
        """The contents of `count` blocks, as written by `to_bytes` for this layout.

        Raises:
          ValueError: naming the array, if no cache can have these values.
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

    def path(self, block_index: int) -> list[int]:
        """The indices of a block's prefix, from the root to the block."""
        indices = []
        while block_index >= 0:
            indices.append(block_index)
            block_index = int(self.parent[block_index])
        return indices[::-1]

    def broken_rule(self) -> str:
        """The first rule of a cache's contents that these arrays break, or ""."""
        (child,) = np.nonzero(self.parent >= 0)
        is_token = np.arange(self.tokens.shape[1]) < self.fill[:, None]
        parent = self.parent[child]
        ranks = [row[row >= 0] for row in self.order]
        columns = self.parent[:, None], self.namespace[:, None], self.fill[:, None], self.tokens, self.extra_ids
        prefixes = {row.tobytes() for row in np.concatenate(columns, axis=1)}
        rules = {
            "parents come before their children": parent < child,
            "children have the namespace of their parents": self.namespace[parent] == self.namespace[child],
            "parents are whole": self.fill[parent] == self.tokens.shape[1],
            "tokens end with the block's last one": (self.tokens == 0) | is_token,
            "extra_ids end with the block's last one": (self.extra_ids == 0) | is_token[:, : self.extra_ids.shape[1]],
            "no prefix is there twice": len(prefixes) == len(self.parent),
            "order has all blocks of the first group": self.order[0] >= 0,
            "order has each rank of a group once": [np.array_equal(np.sort(row), np.arange(len(row))) for row in ranks],
            "order has children before their parents": self.order[0, child] < self.order[0, parent],
        }
        return next((rule for rule, holds in rules.items() if not np.all(holds)), "")


def num_bytes(spec: CacheSpec, count: int) -> int:
    """The size in bytes of the contents of `count` blocks."""
    return sum(4 * math.prod(shape) for shape, *_ in _limits(spec, count).values())


def _limits(spec: CacheSpec, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """The shape, the smallest and the largest value of each array in the contents of `count` blocks."""
    size = spec.block_size
    largest = np.iinfo(np.int32).max
    any_value = np.iinfo(np.int32).min, largest
    return {
        "parent": ((count,), -1, count - 1),
        "namespace": ((count,), 0, largest),
        "tokens": ((count, size), 0, largest),
        "extra_ids": ((count, size * spec.extra_ids), *any_value),
        "fill": ((count,), 1, size),
        "hits": ((count,), *any_value),  # the cache's counter wraps too
        "retention": ((count, 2), *any_value),
        "order": ((len(spec.groups), count), -1, count - 1),
    }


def contents_of(state: Any) -> tuple[Contents, np.ndarray]:
    """The contents of a `CacheState` on the host, and each group's blocks i32[G, n], NO_BLOCK where a group has none.

    Blocks on the move are left out, together with their descendants.
    """
    group = state.groups[0]
    blocks = state.groups[0].blocks
    listed = _depth_first(blocks.parent[:, 0], (blocks.fill > 0) & np.asarray(group.arrived(group.ids)))
    index = np.full(blocks.fill.shape[0] + 1, -1, np.int32)  # the last entry is for NO_BLOCK
    index[listed] = np.arange(len(listed))
    parent = index[blocks.parent[listed, 0]]
    fill = blocks.fill[listed]
    namespace = blocks.parent[listed, 1].copy()
    for block_index in np.flatnonzero(parent >= 0).tolist():
        namespace[block_index] = namespace[parent[block_index]]
    ids = []
    for group in state.groups:
        group_ids = np.asarray(group.in_this_group(listed)).astype(np.int32)
        ids.append(np.where(np.asarray(group.arrived(group_ids)), group_ids, NO_BLOCK))
    is_token = np.arange(blocks.tokens.shape[1]) < fill[:, None]
    text = {name: np.where(is_token, words[listed], 0) for name, words in blocks.text.parts().items()}
    extra_ids = text.get("extra_ids", text["tokens"][:, :0])
    retention = np.full((len(listed), 2), UNSTATED, np.int32)
    for leaf in jax.tree.leaves(blocks.retention):  # None has no leaves
        retention = leaf[listed]
    order = [_released(group.blocks, group_ids) for group, group_ids in zip(state.groups, ids, strict=True)]
    depth = blocks.depth[listed]
    order[0] = latest_below(parent, order[0])
    ranks = [_ranks(released, depth, group_ids >= 0) for released, group_ids in zip(order, ids, strict=True)]
    hits = blocks.hits[listed]
    return Contents(parent, namespace, text["tokens"], extra_ids, fill, hits, retention, np.stack(ranks)), np.stack(ids)


def _depth_first(parent: np.ndarray, is_wanted: np.ndarray) -> np.ndarray:
    """The wanted blocks i32[n] whose prefixes are wanted too, depth first."""
    children: dict[int, list[int]] = {}
    for block in np.flatnonzero(is_wanted).tolist():
        children.setdefault(int(parent[block]), []).append(block)
    ordered = []
    stack = children.get(NO_BLOCK, [])[::-1]
    while stack:
        ordered.append(block := stack.pop())
        stack.extend(children.get(block, ()))
    return np.array(ordered, np.int32)


def _released(blocks: Any, ids: np.ndarray) -> np.ndarray:
    """The times of release i64[n] of blocks ids i32[n], at most 0. Held blocks have 1."""
    age = (np.int64(blocks.clock) - blocks.released[ids].astype(np.int64)).astype(np.int32)
    return np.where(blocks.refcount[ids] > 0, 1, -age.astype(np.int64))


def latest_below(parent: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The latest order i64[n] of each block and its descendants."""
    latest = order.astype(np.int64)
    for block_index in range(len(parent) - 1, -1, -1):
        if (parent_index := parent[block_index]) >= 0:
            latest[parent_index] = max(latest[parent_index], latest[block_index])
    return latest


def _ranks(order: np.ndarray, depth: np.ndarray, is_ranked: np.ndarray) -> np.ndarray:
    """The ranks i32[n] by order i64[n], deeper blocks first among equals. Blocks outside of `is_ranked` get -1."""
    ranks = np.full(len(order), -1, np.int32)
    (indices,) = np.nonzero(is_ranked)
    ranks[indices[np.lexsort((-depth[indices], order[indices]))]] = np.arange(len(indices))
    return ranks


def blocks_with(contents: Contents, namespaces: Mapping[int, int], state: CacheState) -> np.ndarray:
    """The blocks i32[G, n] of a state on the host with these contents, NO_BLOCK where it has no such block.

    `namespaces` has the number of each saved namespace. Blocks of other namespaces are not looked up.
    """
    cached, ids = contents_of(state)
    index_of = {
        (int(cached.parent[index]), int(cached.namespace[index]), cached.text(index)): index
        for index in range(len(cached.parent))
    }
    cached_index = np.full(len(contents.parent) + 1, -1, np.int32)  # the last entry is for a root
    for index in range(len(contents.parent)):
        parent = int(contents.parent[index])
        namespace = namespaces.get(int(contents.namespace[index]), -1)
        if parent < 0 or cached_index[parent] >= 0:
            cached_index[index] = index_of.get((int(cached_index[parent]), namespace, contents.text(index)), -1)
    cached_index = cached_index[:-1]
    if not ids.size:
        return np.full((len(ids), len(cached_index)), NO_BLOCK)
    return np.where(cached_index >= 0, ids[:, cached_index], NO_BLOCK)
