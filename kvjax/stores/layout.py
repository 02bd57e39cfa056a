# SPDX-License-Identifier: Apache-2.0
"""The layout of a cache's blocks, by which two caches can have the same bytes."""

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
    """Everything of a spec that decides what a block's bytes mean, as data that JSON can hold; no number of blocks."""
    groups = [
        {"window": group.window, "sinks": group.sink_tokens, "pools": [_pool_layout(pool) for pool in group.pools]}
        for group in spec.groups
    ]
    return {"block_size": spec.block_size, "extra_ids": spec.extra_ids, "groups": groups}


def _pool_layout(pool: PoolSpec) -> dict[str, Any]:
    arrays = [[one.name, list(one.shape), one.dtype] for one in pool.arrays]
    named = {"layers": list(pool.layers), "K": pool.kv_heads, "D": pool.head_dim, "dtype": pool.dtype}
    return named | {"values": pool.values, "arrays": arrays}


def check_layout(saved: Any, own: Any, name: str = "", *, of: str = "the save") -> None:
    """Raises a ValueError that names the first part in which a saved layout differs from the cache's own."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping) and saved.keys() == own.keys():
        pairs = [(f"{name}.{key}".lstrip("."), saved[key], own[key]) for key in own]
    elif isinstance(own, list) and isinstance(saved, list) and len(saved) == len(own):
        pairs = [(f"{name}[{number}]", *both) for number, both in enumerate(zip(saved, own, strict=True))]
    else:
        if type(saved) is not type(own) or saved != own:
            wanted = f"wanted that of {of}, {reprlib.repr(saved)}"
            raise ValueError(f"cache: got one with {name}={reprlib.repr(own)}, {wanted}")
        return
    for part, one, other in pairs:
        check_layout(one, other, part, of=of)


class Leaf(NamedTuple):
    """One array of a group's blocks.

    Attributes:
      shape: of one block.
      dtype: in the pool.
      axis: the axis of the tokens; None: of recurrent layers, which have none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int | None

    @property
    def word(self) -> np.dtype:
        """The unsigned integer of the dtype's size, which every format of files can hold."""
        return np.dtype(f"uint{8 * self.dtype.itemsize}")

    @property
    def num_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * self.dtype.itemsize

    def words(self, block: np.ndarray, num_tokens: int) -> np.ndarray:
        """A block [*shape] as words, with zeros after its first tokens."""
        words = np.ascontiguousarray(block).view(self.word).reshape(block.shape)
        if self.axis is None or num_tokens == self.shape[self.axis]:
            return words
        words = words.copy()
        np.moveaxis(words, self.axis, 0)[num_tokens:] = 0
        return words


@functools.cache
def leaves_of(spec: CacheSpec, number: int) -> tuple[Leaf, ...]:
    """The arrays of a group's blocks, in the order of a tree of (arrays, scales)."""
    arrays = []
    scales = []
    for pool in spec.groups[number].pools:
        rows = (len(pool.layers),)
        for block in jax.tree.leaves(pool.block_shape(spec.block_size)):
            arrays.append(Leaf((*rows, *block.shape), np.dtype(block.dtype), None if pool.arrays else -2))
            if pool.quantised:
                scales.append(Leaf((*rows, *block.shape[:-1]), np.dtype(np.float32), -1))
    return *arrays, *scales
