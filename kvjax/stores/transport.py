# SPDX-License-Identifier: Apache-2.0
"""Moves the bytes of blocks between a cache and the host, a few blocks at a time. No pool is copied."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import pick
from kvjax.pools.device import Pools
from kvjax.pools.host import arrays_of, read_blocks
from kvjax.pools.stage import Staged, gather, scatter
from kvjax.spec import CacheSpec
from kvjax.stores.layout import leaves_of

MAX_BLOCKS = 64  # blocks of a large program
FEW = 8  # blocks of a small program
_PIECE_BYTES = 16 << 20  # larger pieces do not fit into the processor's caches, and each needs new memory


def most_blocks(spec: CacheSpec, group_index: int) -> int:
    """The largest number of blocks of a group in a program."""
    block_bytes = sum(leaf.num_bytes for leaf in leaves_of(spec, group_index))
    return MAX_BLOCKS if MAX_BLOCKS * block_bytes <= _PIECE_BYTES else FEW


def batch_size(count: int) -> int:
    """The number of blocks of the program for `count` blocks."""
    return FEW if count <= FEW else MAX_BLOCKS


def read(
    pools: Pools, host: Any, group_index: int, pool_rows: np.ndarray
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields the blocks of a group piece by piece: their indices i64[n], and each array [n, *shape].

    Args:
      pools: the device's pools.
      host: the `HostPools`, if pool rows can be on the host.
      group_index: the group.
      pool_rows: i32[n].
    """
    num_on_device = pools.spec.groups[group_index].num_blocks
    max_blocks = most_blocks(pools.spec, group_index)
    (on_device,) = np.nonzero(pool_rows < num_on_device)
    (on_host,) = np.nonzero(pool_rows >= num_on_device)
    for piece, leaves in gather_blocks(pools, pool_rows[on_device], group_index):
        yield on_device[piece], [np.asarray(leaf) for leaf in leaves]
    context = pools.context(group_index)
    for first in range(0, len(on_host), max_blocks):
        piece = on_host[first : first + max_blocks]
        rows = np.zeros(batch_size(len(piece)), np.int32)
        rows[: len(piece)] = pool_rows[piece] - num_on_device
        blocks = [np.asarray(leaf)[: len(piece)] for leaf in jax.tree.leaves(read_blocks(host, group_index, rows))]
        if context is not None:  # the host's blocks are the parts of all devices, in order
            blocks = [context.ordered(block) for block in blocks]
        yield piece, blocks


def gather_blocks(pools: Pools, pool_rows: Any, group_index: int) -> Iterator[tuple[slice, list[jax.Array]]]:
    """Yields blocks i32[n] of a group on the device, in pieces without padding: a slice, and each array [n, *shape]."""
    first = 0
    max_blocks = most_blocks(pools.spec, group_index)
    while remaining := len(pool_rows) - first:
        count = next(size for size in (max_blocks, FEW, 1) if size <= remaining)
        piece = slice(first, first + count)
        yield piece, _gather(pools, np.array(pool_rows[piece], np.int32), group_index)
        first += count


@functools.partial(jax.jit, static_argnames="group_index")
def _gather(pools: Pools, rows: jax.Array, group_index: int) -> list[jax.Array]:
    """The arrays of a group's blocks. XLA drops the others."""
    first_row = jnp.zeros((1,), jnp.int32)
    staged = gather(pools, [rows if group == group_index else first_row for group in range(len(pools.arrays))])
    return jax.tree.leaves(arrays_of(staged, group_index))


def write(
    pools: Pools, group_index: int, pool_rows: np.ndarray, columns: Sequence[int], blocks: Sequence[list[np.ndarray]]
) -> Pools:
    """Writes blocks, each a list of words, into pool_rows i32[F] of a group, at these columns. Donates the pools."""
    leaves = leaves_of(pools.spec, group_index)
    max_blocks = most_blocks(pools.spec, group_index)
    for first in range(0, len(columns) if leaves else 0, max_blocks):
        piece = columns[first : first + max_blocks]
        index = np.full(batch_size(len(piece)), -1, np.int32)
        index[: len(piece)] = piece
        arrays = []
        for leaf_index, leaf in enumerate(leaves):
            words = _aligned((len(index), *leaf.shape), leaf.word)
            words[len(piece) :] = 0
            # Copied block by block, because a list of all blocks would be copied twice.
            for row, block in enumerate(blocks[first : first + max_blocks]):
                words[row] = block[leaf_index]
            arrays.append(words.view(leaf.dtype))
        pools = _scatter(pools, arrays, pool_rows, index, group_index)
    return pools


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """New memory at a multiple of 64 bytes, which jax's CPU backend uses without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="group_index")
def _scatter(pools: Pools, leaves: list[jax.Array], pool_rows: jax.Array, index: jax.Array, group_index: int) -> Pools:
    """Writes the leading blocks with an index of at least 0."""
    spec = pools.spec
    groups = range(len(pools.arrays))
    arrays, scales = jax.tree.unflatten(jax.tree.structure(arrays_of(pools, group_index)), leaves)
    nothing = [(None,) * len(group.pools) for group in spec.groups]
    staged = Staged(
        tuple(arrays if i == group_index else nothing[i] for i in groups),
        spec,
        tuple((scales or nothing[i]) if i == group_index else nothing[i] for i in groups),
    )
    rows = jnp.where(index >= 0, pick(pool_rows, index), spec.groups[group_index].num_blocks)
    return scatter(pools, staged, [rows] * len(groups), [jnp.sum(index >= 0, dtype=jnp.int32)] * len(groups))


def compile_pieces(pools: Pools, group_index: int, pool_rows: np.ndarray) -> None:
    """Compiles the programs of a group's pieces ahead of time.

    Args:
      pools: the device's pools; nothing is written.
      group_index: the group.
      pool_rows: i32[F], as in `write`.
    """
    leaves = leaves_of(pools.spec, group_index)
    for size in (1, FEW, most_blocks(pools.spec, group_index)) if leaves else ():
        _gather(pools, np.zeros((size,), np.int32), group_index)
        arrays = [np.zeros((size, *leaf.shape), leaf.dtype) for leaf in leaves]
        if size in (FEW, MAX_BLOCKS):
            _scatter.lower(pools, arrays, pool_rows, np.zeros((size,), np.int32), group_index).compile()
