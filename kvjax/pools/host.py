# SPDX-License-Identifier: Apache-2.0
"""The bytes of the host tier: blocks that move between the device's pools and pools in pinned host memory.

This is the only file that knows of memory kinds. A host pool has the shape of the device pool beside it, less the
scratch row, and a move copies one block out of one array into the other, in place:

    for each move of a batch:  target = dynamic_update_slice(target, dynamic_slice(source, row), row)

Why so (`benchmarks.offload` measures it, tests/unit/pools/test_host_pool.py compiles it for a GPU):
- On CPU a block costs one copy at the speed of memory. Collecting a batch in an array of its own first, as a
  `jax.device_put` of it does too, takes five times as long: the system has to hand out fresh pages.
- For a GPU, XLA makes each update of a host pool a kernel that writes to the host's memory, on a stream of its own, and
  aliases the pool. A scatter, or an index that lies in host memory, becomes code for the host instead. A loop whose
  length the compiler does not know asks the host before each turn, hence batches of fixed sizes.
- On CPU a program that reshapes a pool to `[N + 1, -1]` copies all of it where L, K or P is 1: keep the axes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree
from kvjax._compile import own_transfers
from kvjax.events.transfer import Transfer
from kvjax.pools.device import Pools
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK

# Moves of one program, the largest first. Any number of moves is a sum of these, so that nothing is padded.
BATCHES = (64, 16, 4, 1)


class HostPools(Pytree, static=("spec",)):
    """The K/V of the host tier, in pinned host memory. Valid only beside the state and the pools used with it.

    Attributes:
      arrays: per group, per pool [H, L, 2, K, P, D]; index h is pool row N + h.
      spec: static; shapes.
      scales: per group, per pool f32[H, L, 2, K, P] if it is quantised, else None.
    """

    arrays: tuple[tuple[jax.Array, ...], ...]
    spec: CacheSpec
    scales: tuple[tuple[jax.Array | None, ...], ...] | None = None


class TransferError(RuntimeError):
    """Moves that failed; the state learns of it by `complete(state, transfer, ok=False)`.

    Attributes:
      pools: the device's pools to go on with: those given to `move` may be gone. What the targets hold is undefined.
      host: likewise, the host's pools.
      overwritten: bool[K]; moves whose source is also the target of a move, so that their bytes may be lost.
    """

    def __init__(self, message: str, pools: Pools, host: HostPools, overwritten: np.ndarray):
        super().__init__(message)
        self.pools = pools
        self.host = host
        self.overwritten = overwritten


@own_transfers()
def init_host_pools(pools: Pools) -> tuple[Pools, HostPools]:
    """Host pools, divided among devices as the device's pools are; their contents are undefined.

    The device's pools come back committed to their devices, as moves leave them, without a copy: jax compiles a program
    anew for committed arrays, and a decode step should not recompile when the first block comes back. A program's
    results are committed if an argument is, so commit a state that shares a program with the pools.

    Args:
      pools: the device's pools, to be replaced by the returned ones; their spec has the host blocks of each group.

    Returns:
      The pools, and those of the host.
    """
    pools = jax.tree.map(lambda x: jax.device_put(x, x.sharding), pools)

    host = HostPools(pools.arrays, pools.spec, pools.scales)
    for number, group in enumerate(pools.spec.groups):
        allocate = functools.partial(_allocate, num_blocks=group.num_host_blocks)
        host = _with(host, number, jax.tree.map(allocate, arrays_of(pools, number)))
    return pools, host


@own_transfers()
def move(pools: Pools, host: HostPools, transfer: Transfer) -> tuple[Pools, HostPools]:
    """Copies blocks between the tiers as a transition ordered.

    Both pools are donated and updated in place, after the programs that use them already and before later ones. For
    host code, not under `jit`: reading the orders waits for the transition that gave them, and for no copy. A device
    that fails during a copy shows when the pools are awaited, as for any step.

    Args:
      pools: the device's K/V.
      host: the host's.
      transfer: the orders.

    Returns:
      The pools after the moves; the given ones if there are none.

    Raises:
      ValueError: on a move that is not from tier to tier, before any is made.
      TransferError: if a copy cannot be started; the error has the pools to go on with.

    Source: TensorRT-LLM's KVCacheTransferManager (onboard, offload); vLLM's swap_blocks.
    """
    records = np.asarray(transfer.records)
    for number, *moves in _sorted(records[records[:, 1] != NO_BLOCK], pools.spec):
        tiers = [arrays_of(pools, number), arrays_of(host, number)]
        try:
            _move(tiers, *moves)
        except Exception as error:
            failed = f"group {number}: {len(moves[0])} blocks to the host and {len(moves[1])} to the device: {error}"
            left = _with(pools, number, tiers[0]), _with(host, number, tiers[1])
            raise TransferError(failed, *left, _overwritten(records)) from error
        pools = _with(pools, number, tiers[0])
        host = _with(host, number, tiers[1])
    return pools, host


def read_blocks(host: HostPools, number: int, index: np.ndarray) -> Any:
    """The blocks index i32[n] of one group's host pools, on the device: a tree of (arrays, scales)."""
    return _read(arrays_of(host, number), index)


def _sorted(records: np.ndarray, spec: CacheSpec) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """(group number, to_host i32[n, 2], to_device i32[m, 2]): sources and targets, indices into their tiers' pools."""
    found = []
    for number in np.unique(records[:, 0]).tolist():
        pool_rows = records[records[:, 0] == number, 3:]
        if not 0 <= number < len(spec.groups):
            raise ValueError(f"transfer: got a move in group {number}, wanted one of {len(spec.groups)}")
        n = spec.groups[number].num_blocks
        ids = spec.groups[number].num_ids
        on_host = pool_rows >= n
        wrong = (on_host[:, 0] == on_host[:, 1]) | np.any((pool_rows < 0) | (pool_rows >= ids), axis=1)
        if wrong.any():
            source, target = pool_rows[wrong][0].tolist()
            raise ValueError(
                f"transfer: got a move from row {source} to {target} in group {number}, wanted one between the "
                f"device's, 0..{n - 1}, and the host's, {n}..{ids - 1}"
            )
        index = pool_rows - np.int32(n) * on_host
        found.append((number, index[on_host[:, 1]], index[on_host[:, 0]]))
    return found


def _move(tiers: list[Any], to_host: np.ndarray, to_device: np.ndarray) -> None:
    """Replaces the arrays of one group in `tiers`, (device, host), one by one: a failure leaves the latest ones."""
    # A source that an offload overwrites is staged on the device first: every source is read before it is overwritten.
    early = np.isin(to_device[:, 0], to_host[:, 1])
    staged = [(_read(tiers[1], batch[0]), batch[1]) for batch in _batches(to_device[early])]
    for batch in _batches(to_host):
        tiers[1] = _copy(tiers[1], tiers[0], batch)
    for batch in _batches(to_device[~early]):
        tiers[0] = _copy(tiers[0], tiers[1], batch)
    for blocks, targets in staged:
        tiers[0] = _copy(tiers[0], blocks, np.stack([np.arange(targets.size, dtype=np.int32), targets]))


def _batches(moves: np.ndarray) -> list[np.ndarray]:
    """i32[2, B] each; the sources and targets of moves i32[n, 2], B one of BATCHES."""
    batches = []
    for size in BATCHES:
        while len(moves) >= size:
            batches.append(np.ascontiguousarray(moves[:size].T))
            moves = moves[size:]
    return batches


def _copy_blocks(targets: Any, sources: Any, index: jax.Array) -> Any:
    """Copies blocks, from index[0, i] of each source to index[1, i] of its target, in any memory."""
    index = lax.platform_dependent(index, cpu=_weighty, default=lambda index: index)

    def copy(i, targets):
        def put(target, source):
            block = _block(source, index[0, i], jax.typeof(target).memory_space)
            return lax.dynamic_update_index_in_dim(target, block, index[1, i], 0, allow_negative_indices=False)

        return jax.tree.map(put, targets, sources)

    return lax.fori_loop(0, index.shape[1], copy, targets)


def _weighty(index: jax.Array) -> jax.Array:
    """The index plus a zero of a thousand operations: XLA runs a smaller CPU program in the thread that calls it."""
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


def compile_moves(pools: Pools, host: HostPools, number: int) -> None:
    """Compiles the programs of one group's moves, for whoever must not wait for them later; copies nothing."""
    on_device = arrays_of(pools, number)
    on_host = arrays_of(host, number)
    for size in BATCHES:
        index = np.zeros((2, size), np.int32)
        for target, source in (on_host, on_device), (on_device, on_host), (on_device, _read(on_host, index[0])):
            _copy.lower(target, source, index).compile()


def arrays_of(pools: Any, number: int) -> Any:
    """The arrays of one group of `Pools`, `HostPools` or `Staged`, with its scales if there are any."""
    return pools.arrays[number], None if pools.scales is None else pools.scales[number]


def _with[T: (Pools, HostPools)](pools: T, number: int, arrays: Any) -> T:
    """These pools with one group's arrays replaced by others."""

    def put(old, new):
        return None if old is None else (*old[:number], new, *old[number + 1 :])

    return pools.replace(arrays=put(pools.arrays, arrays[0]), scales=put(pools.scales, arrays[1]))


def _allocate(like: jax.Array, num_blocks: int) -> jax.Array:
    """An array that XLA allocates in host memory, so that it can be donated, without one on the device first."""

    def make():
        return jax.device_put(jnp.empty((num_blocks, *like.shape[1:]), like.dtype), jax.memory.Space.Host)

    return jax.jit(make, out_shardings=like.sharding.with_memory_kind("pinned_host"))()


def _overwritten(records: np.ndarray) -> np.ndarray:
    sources, targets = (records[:, 0].astype(np.int64) << 32 | records[:, column] for column in (3, 4))
    return (records[:, 1] != NO_BLOCK) & np.isin(sources, targets)
