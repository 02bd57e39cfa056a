# SPDX-License-Identifier: Apache-2.0
"""The bytes of blocks between a cache and the host, a few blocks at a time: no pool is copied."""

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

MOST = 64
FEW = 8  # blocks of one program
_PIECE_BYTES = 16 << 20  # larger pieces leave the processor's caches, and need new memory each


def most_blocks(spec: CacheSpec, number: int) -> int:
    """The most blocks of one group that a program serves."""
    return MOST if MOST * sum(leaf.num_bytes for leaf in leaves_of(spec, number)) <= _PIECE_BYTES else FEW


def batch_size(count: int) -> int:
    """The blocks of a program that serves so many."""
    return FEW if count <= FEW else MOST


def read(pools: Pools, host: Any, number: int, pool_rows: np.ndarray) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """The blocks of one group, some at a time: which of them i64[n], and each array [n, *shape].

    Args:
      pools: the device's.
      host: the `HostPools`, if pool rows can be on the host.
      number: of the group.
      pool_rows: i32[n].
    """
    num_on_device = pools.spec.groups[number].num_blocks
    most = most_blocks(pools.spec, number)
    (on_device,) = np.nonzero(pool_rows < num_on_device)
    (on_host,) = np.nonzero(pool_rows >= num_on_device)
    for piece, leaves in gather_blocks(pools, pool_rows[on_device], number):
        yield on_device[piece], [np.asarray(leaf) for leaf in leaves]
    context = pools.context(number)
    for first in range(0, len(on_host), most):
        piece = on_host[first : first + most]
        rows = np.zeros(batch_size(len(piece)), np.int32)
        rows[: len(piece)] = pool_rows[piece] - num_on_device
        blocks = [np.asarray(leaf)[: len(piece)] for leaf in jax.tree.leaves(read_blocks(host, number, rows))]
        if context is not None:  # the host's blocks are parts of devices, one after the other
            blocks = [context.ordered(block) for block in blocks]
        yield piece, blocks


def gather_blocks(pools: Pools, pool_rows: Any, number: int) -> Iterator[tuple[slice, list[jax.Array]]]:
    """The blocks i32[n] of one group on the device, in pieces without padding: a slice, and each array [n, *shape]."""
    first = 0
    most = most_blocks(pools.spec, number)
    while left := len(pool_rows) - first:
        count = next(size for size in (most, FEW, 1) if size <= left)
        piece = slice(first, first + count)
        yield piece, _gather(pools, np.array(pool_rows[piece], np.int32), number)
        first += count


@functools.partial(jax.jit, static_argnames="number")
def _gather(pools: Pools, rows: jax.Array, number: int) -> list[jax.Array]:
    """The arrays of one group's blocks; XLA drops the others."""
    one = jnp.zeros((1,), jnp.int32)
    staged = gather(pools, [rows if other == number else one for other in range(len(pools.arrays))])
    return jax.tree.leaves(arrays_of(staged, number))


def write(
    pools: Pools, number: int, pool_rows: np.ndarray, columns: Sequence[int], blocks: Sequence[list[np.ndarray]]
) -> Pools:
    """Writes blocks, each a list of words, into pool_rows i32[F] at these columns, of one group; donates the pools."""
    leaves = leaves_of(pools.spec, number)
    most = most_blocks(pools.spec, number)
    for first in range(0, len(columns) if leaves else 0, most):
        some = columns[first : first + most]
        index = np.full(batch_size(len(some)), -1, np.int32)
        index[: len(some)] = some
        arrays = []
        for at, leaf in enumerate(leaves):
            words = _aligned((len(index), *leaf.shape), leaf.word)
            words[len(some) :] = 0
            for row, block in enumerate(blocks[first : first + most]):  # as one list they would be copied twice
                words[row] = block[at]
            arrays.append(words.view(leaf.dtype))
        pools = _scatter(pools, arrays, pool_rows, index, number)
    return pools


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """New memory that begins at a multiple of 64 bytes: jax' CPU backend takes it as it is, and copies any other."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="number")
def _scatter(pools: Pools, leaves: list[jax.Array], pool_rows: jax.Array, index: jax.Array, number: int) -> Pools:
    """Writes the leading blocks with an index of at least 0."""
    spec = pools.spec
    groups = range(len(pools.arrays))
    arrays, scales = jax.tree.unflatten(jax.tree.structure(arrays_of(pools, number)), leaves)
    nothing = [(None,) * len(group.pools) for group in spec.groups]
    staged = Staged(
        tuple(arrays if other == number else nothing[other] for other in groups),
        spec,
        tuple((scales or nothing[other]) if other == number else nothing[other] for other in groups),
    )
    rows = jnp.where(index >= 0, pick(pool_rows, index), spec.groups[number].num_blocks)
    return scatter(pools, staged, [rows] * len(groups), [jnp.sum(index >= 0, dtype=jnp.int32)] * len(groups))


def compile_pieces(pools: Pools, number: int, pool_rows: np.ndarray) -> None:
    """Compiles the programs of one group's pieces, for whoever must not wait for them later.

    Args:
      pools: the device's; nothing is written.
      number: of the group.
      pool_rows: i32[F], as of `write`.
    """
    leaves = leaves_of(pools.spec, number)
    for size in (1, FEW, most_blocks(pools.spec, number)) if leaves else ():
        _gather(pools, np.zeros((size,), np.int32), number)
        arrays = [np.zeros((size, *leaf.shape), leaf.dtype) for leaf in leaves]
        if size in (FEW, MOST):
            _scatter.lower(pools, arrays, pool_rows, np.zeros((size,), np.int32), number).compile()
