# SPDX-License-Identifier: Apache-2.0
"""The layout of a cache's blocks. Two caches with equal layouts can share bytes."""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.spec import CacheSpec, PoolSpec


def layout_of(spec: CacheSpec) -> dict[str, Any]:
    """The properties of a spec that determine the meaning of a block's bytes, as JSON data."""
    groups = [
        {"window": group.window, "sinks": group.sink_tokens, "pools": [_pool_layout(pool) for pool in group.pools]}
        for group in spec.groups
    ]
    return {"block_size": spec.block_size, "extra_ids": spec.extra_ids, "groups": groups}


def _pool_layout(pool: PoolSpec) -> dict[str, Any]:
    arrays = [[array.name, list(array.shape), array.dtype] for array in pool.arrays]
    named = {"layers": list(pool.layers), "K": pool.kv_heads, "D": pool.head_dim, "dtype": pool.dtype}
    return named | {"values": pool.values, "arrays": arrays}


def check_layout(saved: Any, cache_layout: Any, name: str = "", *, of: str = "the save") -> None:
    """Raises a ValueError naming the first difference between a saved layout and the cache's layout."""
    if isinstance(cache_layout, Mapping) and isinstance(saved, Mapping) and saved.keys() == cache_layout.keys():
        pairs = [(f"{name}.{key}".lstrip("."), saved[key], cache_layout[key]) for key in cache_layout]
    elif isinstance(cache_layout, list) and isinstance(saved, list) and len(saved) == len(cache_layout):
        pairs = [(f"{name}[{i}]", *parts) for i, parts in enumerate(zip(saved, cache_layout, strict=True))]
    else:
        if type(saved) is not type(cache_layout) or saved != cache_layout:
            wanted = f"wanted that of {of}, {reprlib.repr(saved)}"
            raise ValueError(f"cache: got one with {name}={reprlib.repr(cache_layout)}, {wanted}")
        return
    for part_name, saved_part, cache_part in pairs:
        check_layout(saved_part, cache_part, part_name, of=of)


class Leaf(NamedTuple):
    """An array of a group's blocks.

    Attributes:
      shape: the shape of a block.
      dtype: the pool's dtype.
      axis: the axis of the tokens; None for recurrent layers, which have no tokens.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int | None

    @property
    def word(self) -> np.dtype:
        """The unsigned integer of the dtype's size, which any file format can hold."""
        return np.dtype(f"uint{8 * self.dtype.itemsize}")

    @property
    def num_bytes(self) -> int:
        """The size of a block in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def words(self, block: np.ndarray, num_tokens: int) -> np.ndarray:
        """A block [*shape] as words, with zeros after its first `num_tokens` tokens."""
        words = np.ascontiguousarray(block).view(self.word).reshape(block.shape)
        if self.axis is None or num_tokens == self.shape[self.axis]:
            return words
        words = words.copy()
        np.moveaxis(words, self.axis, 0)[num_tokens:] = 0
        return words


@functools.cache
def leaves_of(spec: CacheSpec, group_index: int) -> tuple[Leaf, ...]:
    """The arrays of a group's blocks, in the order of a tree of (arrays, scales)."""
    arrays = []
    scales = []
    for pool in spec.groups[group_index].pools:
        rows = (len(pool.layers),)
        for block in jax.tree.leaves(pool.block_shape(spec.block_size)):
            arrays.append(Leaf((*rows, *block.shape), np.dtype(block.dtype), None if pool.arrays else -2))
            if pool.quantised:
                scales.append(Leaf((*rows, *block.shape[:-1]), np.dtype(np.float32), -1))
    return *arrays, *scales
