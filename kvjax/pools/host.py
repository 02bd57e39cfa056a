# SPDX-License-Identifier: Apache-2.0
"""The bytes of the host tier: blocks move between the device's pools and pools in pinned host memory.

No other file uses jax's memory kinds. A host pool has the shape of its device pool, without the scratch row. A move
copies a block from an array into another array, in place:

    for each move of a batch:  target = dynamic_update_slice(target, dynamic_slice(source, row), row)

The reasons (`benchmarks.offload` measures them, tests/unit/pools/test_host_pool.py compiles the move for a GPU):
- On a CPU, moving a block is a copy at the speed of memory. To collect a batch in an array first, as `jax.device_put`
  of a batch does, takes five times as long, since the system has to provide new pages.
- For a GPU, XLA turns each update of a host pool into a kernel on a separate stream, which writes to the host's memory
  and aliases the pool. A scatter, or an index in host memory, becomes code for the host instead. A loop of unknown
  length would wait for the host before each turn, so batches have fixed sizes.
- On a CPU a program that reshapes a pool to `[N + 1, -1]` copies the whole pool if L, K or P is 1. Keep the axes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, compact, pick
from kvjax._compile import own_transfers
from kvjax.events.transfer import Transfer
from kvjax.pools.device import Pools
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK
from pallas_kernels.by_token import blocks_by_head
from pallas_kernels.loops import while_loop

# The numbers of moves in a program, the largest first. Any number of moves is a sum of these sizes, so no batch is
# padded.
BATCHES = (64, 16, 4, 1)


class HostPools(Pytree, static=("spec",)):
    """The K/V of the host tier, in pinned host memory. Valid only together with the state and the pools used with it.

    Attributes:
      arrays: per group and pool [H, L, 2, K, P, D], or [H, L, P, R, W] with layout="tokens"; index h is pool row N + h.
      spec: static; shapes.
      scales: per group and pool f32[H, L, 2, K, P] if it is quantised, else None.
    """

    arrays: tuple[tuple[jax.Array, ...], ...]
    spec: CacheSpec
    scales: tuple[tuple[jax.Array | None, ...], ...] | None = None


class TransferError(RuntimeError):
    """Moves that failed. Report the failure to the state by `complete(state, transfer, ok=False)`.

    Attributes:
      pools: the device's pools to continue with, since the pools given to `move` may be gone. The contents of the
        targets are undefined.
      host: the host's pools to continue with.
      overwritten: bool[K]; moves whose source is also the target of another move. Their bytes may be lost.
    """

    def __init__(self, message: str, pools: Pools, host: HostPools, overwritten: np.ndarray):
        super().__init__(message)
        self.pools = pools
        self.host = host
        self.overwritten = overwritten


@own_transfers()
def init_host_pools(pools: Pools) -> tuple[Pools, HostPools]:
    """Makes host pools, divided among devices like the device's pools. Their contents are undefined.

    The returned device pools are committed to their devices, without a copy, because moves commit them too. jax
    compiles a program again for committed arrays, and a decode step must not be compiled again when the first block
    comes back. The results of a program are committed if one of its arguments is. So commit a state that you use in the
    same programs as the pools.

    Args:
      pools: the device's pools, to be replaced by the returned pools. Their spec has the host blocks of each group.

    Returns:
      The device's pools and the host's.
    """
    pools = jax.tree.map(lambda x: jax.device_put(x, x.sharding), pools)

    host = HostPools(pools.arrays, pools.spec, pools.scales)
    for group_index, group in enumerate(pools.spec.groups):
        allocate = functools.partial(_allocate, num_blocks=group.num_host_blocks)
        host = _with(host, group_index, jax.tree.map(allocate, arrays_of(pools, group_index)))
    return pools, host


@own_transfers()
def move(pools: Pools, host: HostPools, transfer: Transfer) -> tuple[Pools, HostPools]:
    """Makes the moves between the tiers that a transition ordered.

    Both pools are donated and updated in place, after the programs that already use them and before later programs.
    Call it from host code, not under `jit`: it reads the orders, so it waits for their transition, but not for any
    copy. If a device fails during a copy, you get the error when you wait for the pools, as with any step.

    Args:
      pools: the device's K/V.
      host: the host's K/V.
      transfer: the ordered moves.

    Returns:
      The pools after the moves, or the given pools if there are no moves.

    Raises:
      ValueError: before any copy, if a move is not between the tiers.
      TransferError: if a copy cannot be started. The error has the pools to continue with.

    Source: TensorRT-LLM's KVCacheTransferManager (onboard, offload); vLLM's swap_blocks.
    """
    records = np.asarray(transfer.records)
    for group_index, *moves in _sorted(records[records[:, 1] != NO_BLOCK], pools.spec):
        tiers = [arrays_of(pools, group_index), arrays_of(host, group_index)]
        try:
            _move(tiers, *moves)
        except Exception as error:
            failed = (
                f"group {group_index}: {len(moves[0])} blocks to the host and {len(moves[1])} to the device: {error}"
            )
            remaining_pools = _with(pools, group_index, tiers[0]), _with(host, group_index, tiers[1])
            raise TransferError(failed, *remaining_pools, _overwritten(records)) from error
        pools = _with(pools, group_index, tiers[0])
        host = _with(host, group_index, tiers[1])
    return pools, host


def move_inside(pools: Pools, host: HostPools, transfer: Transfer) -> tuple[Pools, HostPools]:
    """Makes moves inside a program, such as a jitted loop, which carries both pools. Donate both.

    All moves of a call go in the same direction, so no move overwrites the source of another. The program's later
    operations come after them.

    Args:
      pools: the device's K/V.
      host: the host's K/V.
      transfer: the ordered moves.
    """
    for group_index in pools.spec.host_groups:
        num_device_blocks = pools.spec.groups[group_index].num_blocks
        is_move = (transfer.block != NO_BLOCK) & (transfer.group == group_index)
        to_host = is_move & (transfer.target >= num_device_blocks)
        index = jnp.arange(is_move.size, dtype=jnp.int32)
        tiers = [arrays_of(pools, group_index), arrays_of(host, group_index)]
        for where, first, second in (to_host, 0, 1), (is_move & ~to_host, 1, 0):
            order, num_moves = compact(jnp.where(where, index, -1))
            sources, targets = (
                pick(rows, order) - num_device_blocks * (tier == 1)
                for rows, tier in ((transfer.source, first), (transfer.target, second))
            )
            tiers[second] = _copy_counted(tiers[second], tiers[first], sources, targets, num_moves)
        pools = _with(pools, group_index, tiers[0])
        host = _with(host, group_index, tiers[1])
    return pools, host


def _copy_counted(targets: Any, sources: Any, source_rows: jax.Array, target_rows: jax.Array, count: jax.Array) -> Any:
    """Copies the first i32[] `count` of the blocks source_rows i32[K] to target_rows i32[K], in any memory."""

    def copy(carry):
        turn, targets = carry

        def put(target, source):
            block = _block(source, pick(source_rows, turn), jax.typeof(target).memory_space)
            row = pick(target_rows, turn)
            return lax.dynamic_update_index_in_dim(target, block, row, 0, allow_negative_indices=False)

        return turn + 1, jax.tree.map(put, targets, sources)

    return while_loop(lambda carry: carry[0] < count, copy, (jnp.int32(0), targets))[1]


def read_blocks(host: HostPools, group_index: int, index: np.ndarray) -> Any:
    """Blocks index i32[n] of a group's host pools, by head, on the device: a tree of (arrays, scales)."""
    pools = host.spec.groups[group_index].pools
    arrays, scales = _read(arrays_of(host, group_index), index)
    arrays = tuple(
        blocks_by_head(blocks, pool.head_dim) if pool.by_token else blocks
        for pool, blocks in zip(pools, arrays, strict=True)
    )
    return arrays, scales


def _sorted(records: np.ndarray, spec: CacheSpec) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Sorts moves by group: (group index, to_host i32[n, 2], to_device i32[m, 2]), as indices into the tiers' pools."""
    moves = []
    for group_index in np.unique(records[:, 0]).tolist():
        pool_rows = records[records[:, 0] == group_index, 3:]
        if not 0 <= group_index < len(spec.groups):
            raise ValueError(f"transfer: got a move in group {group_index}, wanted one of {len(spec.groups)}")
        num_device_blocks = spec.groups[group_index].num_blocks
        num_ids = spec.groups[group_index].num_ids
        on_host = pool_rows >= num_device_blocks
        is_wrong = (on_host[:, 0] == on_host[:, 1]) | np.any((pool_rows < 0) | (pool_rows >= num_ids), axis=1)
        if is_wrong.any():
            source, target = pool_rows[is_wrong][0].tolist()
            raise ValueError(
                f"transfer: got a move from row {source} to {target} in group {group_index}, wanted one between the "
                f"device's, 0..{num_device_blocks - 1}, and the host's, {num_device_blocks}..{num_ids - 1}"
            )
        tier_rows = pool_rows - np.int32(num_device_blocks) * on_host
        moves.append((group_index, tier_rows[on_host[:, 1]], tier_rows[on_host[:, 0]]))
    return moves


def _move(tiers: list[Any], to_host: np.ndarray, to_device: np.ndarray) -> None:
    """Moves blocks of a group. Replaces `tiers`, (device, host), in steps, so a failure leaves the latest arrays."""
    # First stage the sources that an offload overwrites on the device, so each source is read before it is overwritten.
    is_early = np.isin(to_device[:, 0], to_host[:, 1])
    staged = [(_read(tiers[1], batch[0]), batch[1]) for batch in _batches(to_device[is_early])]
    for batch in _batches(to_host):
        tiers[1] = _copy(tiers[1], tiers[0], batch)
    for batch in _batches(to_device[~is_early]):
        tiers[0] = _copy(tiers[0], tiers[1], batch)
    for blocks, targets in staged:
        tiers[0] = _copy(tiers[0], blocks, np.stack([np.arange(targets.size, dtype=np.int32), targets]))


def _batches(moves: np.ndarray) -> list[np.ndarray]:
    """Splits moves i32[n, 2] into batches i32[2, B] of sources and targets, with B in BATCHES."""
    batches = []
    for size in BATCHES:
        while len(moves) >= size:
            batches.append(np.ascontiguousarray(moves[:size].T))
            moves = moves[size:]
    return batches


def _copy_blocks(targets: Any, sources: Any, index: jax.Array) -> Any:
    """Copies blocks from index[0, i] of each source to index[1, i] of its target, in any memory."""
    index = lax.platform_dependent(index, cpu=_weighty, default=lambda index: index)

    def copy(i, targets):
        def put(target, source):
            block = _block(source, index[0, i], jax.typeof(target).memory_space)
            return lax.dynamic_update_index_in_dim(target, block, index[1, i], 0, allow_negative_indices=False)

        return jax.tree.map(put, targets, sources)

    return lax.fori_loop(0, index.shape[1], copy, targets)


def _weighty(index: jax.Array) -> jax.Array:
    """Adds a zero computed by a thousand operations, because XLA runs smaller CPU programs in the calling thread."""
    zero = jnp.minimum(0, jnp.max(index.reshape(-1)[0] ^ lax.iota(jnp.int32, 1024)))
    return index + zero


def _read_blocks(sources: Any, index: jax.Array) -> Any:
    """Blocks index[i] of arrays in host memory, stacked in arrays on the device."""
    index = lax.platform_dependent(index, cpu=_weighty, default=lambda index: index)

    def read(i):
        return jax.tree.map(lambda source: _block(source, i, jax.memory.Space.Device)[0], sources)

    return lax.map(read, index)


def _block(source: jax.Array, index: jax.Array, memory: Any) -> jax.Array:
    return jax.device_put(lax.dynamic_index_in_dim(source, index, allow_negative_indices=False), memory)


# One program for each batch size, direction and group: the targets are donated.
_copy = jax.jit(_copy_blocks, donate_argnums=0)
_read = jax.jit(_read_blocks)


def compile_moves(pools: Pools, host: HostPools, group_index: int) -> None:
    """Compiles the programs of a group's moves ahead of time, without a copy."""
    on_device = arrays_of(pools, group_index)
    on_host = arrays_of(host, group_index)
    for size in BATCHES:
        index = np.zeros((2, size), np.int32)
        for target, source in (on_host, on_device), (on_device, on_host), (on_device, _read(on_host, index[0])):
            _copy.lower(target, source, index).compile()


def arrays_of(pools: Any, group_index: int) -> Any:
    """The arrays of a group of `Pools`, `HostPools` or `Staged`, with its scales if there are any."""
    return pools.arrays[group_index], None if pools.scales is None else pools.scales[group_index]


def _with[T: (Pools, HostPools)](pools: T, group_index: int, arrays: Any) -> T:
    """Replaces a group's arrays in the pools."""

    def put(old, new):
        return None if old is None else (*old[:group_index], new, *old[group_index + 1 :])

    return pools.replace(arrays=put(pools.arrays, arrays[0]), scales=put(pools.scales, arrays[1]))


def _allocate(like: jax.Array, num_blocks: int) -> jax.Array:
    """An array allocated by XLA in host memory, without a copy on the device first. It can be donated."""

    def make():
        return jax.device_put(jnp.empty((num_blocks, *like.shape[1:]), like.dtype), jax.memory.Space.Host)

    return jax.jit(make, out_shardings=like.sharding.with_memory_kind("pinned_host"))()


def _overwritten(records: np.ndarray) -> np.ndarray:
    sources, targets = (records[:, 0].astype(np.int64) << 32 | records[:, column] for column in (3, 4))
    return (records[:, 1] != NO_BLOCK) & np.isin(sources, targets)
