# SPDX-License-Identifier: Apache-2.0
"""The bytes of the host tier: blocks that move between the device's pools and pools in pinned host memory.

This is the only file that knows of memory kinds. A host pool has the shape of the device pool beside it, less the
scratch row, and a move copies one block out of one array into the other, in place:

    for each move of a batch:  target = dynamic_update_slice(target, dynamic_slice(source, row), row)

Why so (`benchmarks.offload` measures it, tests/unit/pools/test_host_pool.py compiles it for a GPU):
- On CPU a block costs one copy at the speed of memory. To collect a batch in an array of its own first, which a
  `jax.device_put` of it is as well, takes five times as long: the system has to hand out fresh pages.
- For a GPU, XLA makes each update of a host pool a kernel that writes to the host's memory, on a stream of its own, and
  aliases the pool. A scatter, or an index that lies in host memory, becomes code for the host instead. A loop whose
  length the compiler does not know asks the host before each turn, hence batches of fixed sizes.
- On CPU a program that looks at a pool as rows `[N + 1, -1]` copies all of it where L, K or P is 1: keep the axes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree
from kvjax.events.transfer import Transfer
from kvjax.pools.device import Pools
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK

# Moves of one program, the largest first. Any number of moves is a sum of these, so that nothing is padded.
BATCHES = (64, 16, 4, 1)


class HostPools(Pytree, static=("spec",)):
    """The K/V of the host tier, in pinned host memory. Valid only beside the state and the pools used with it.

    Attributes:
      arrays: per group, per pool [H, L, 2, K, P, D]; row h is block N + h.
      spec: static; shapes.
      scales: per group, per pool f32[H, L, 2, K, P] if that is quantised, else None.
    """

    arrays: tuple[tuple[jax.Array, ...], ...]
    spec: CacheSpec
    scales: tuple[tuple[jax.Array | None, ...], ...] | None = None


class TransferError(RuntimeError):
    """Moves that failed; the state learns of it by `complete(state, transfer, ok=False)`.

    Attributes:
      pools: the device's pools to go on with: those given to `move` may be gone. What the targets hold is undefined.
      host: likewise, the host's pools.
      overwritten: bool[K]; moves whose source is also the target of a move, so that no copy of theirs may be left.
    """

    def __init__(self, message: str, pools: Pools, host: HostPools, overwritten: np.ndarray):
        super().__init__(message)
        self.pools, self.host, self.overwritten = pools, host, overwritten


def init_host_pools(pools: Pools) -> tuple[Pools, HostPools]:
    """Host pools, divided among devices as the device's pools are; what they hold is undefined.

    The device's pools come back committed to their devices, as moves leave them, without a copy: for committed arrays
    jax compiles a program anew, which should not happen to a decode step when the first block comes back. Results are
    committed where an argument was, so a state that goes through one program with the pools is best committed as well.

    Args:
      pools: the device's pools, given up; their spec says how many host blocks each group has.

    Returns:
      The pools, and those of the host.
    """
    pools = jax.tree.map(lambda x: jax.device_put(x, x.sharding), pools)

    host = HostPools(pools.arrays, pools.spec, pools.scales)
    for number, group in enumerate(pools.spec.groups):
        allocate = functools.partial(_allocate, num_blocks=group.num_host_blocks)
        host = _with(host, number, jax.tree.map(allocate, _of(pools, number)))
    return pools, host


def move(pools: Pools, host: HostPools, transfer: Transfer) -> tuple[Pools, HostPools]:
    """Copies blocks between the tiers as a transition ordered.

    Both pools are donated and updated in place, after what uses them already and before what will. For host code, not
    under `jit`: it reads the orders, so it waits for the transition that gave them, but for no copy. If a device fails
    while it copies, that shows when the pools are awaited, as for any step.

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
    for g, *moves in _sorted(records[records[:, 1] != NO_BLOCK], pools.spec):
        tiers = [_of(pools, g), _of(host, g)]
        try:
            _move(tiers, *moves)
        except Exception as error:
            failed = f"group {g}: {len(moves[0])} blocks to the host and {len(moves[1])} to the device: {error}"
            left = _with(pools, g, tiers[0]), _with(host, g, tiers[1])
            raise TransferError(failed, *left, _overwritten(records)) from error
        pools, host = _with(pools, g, tiers[0]), _with(host, g, tiers[1])
    return pools, host


def _sorted(records: np.ndarray, spec: CacheSpec) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """(group, offloads i32[n, 2], onboards i32[m, 2]): sources and targets, each counted from its own tier's start."""
    found = []
    for g in np.unique(records[:, 0]).tolist():
        rows = records[records[:, 0] == g, 3:]
        if not 0 <= g < len(spec.groups):
            raise ValueError(f"transfer: got a move in group {g}, wanted one of {len(spec.groups)}")
        n, ids = spec.groups[g].num_blocks, spec.groups[g].num_ids
        on_host = rows >= n
        wrong = (on_host[:, 0] == on_host[:, 1]) | np.any((rows < 0) | (rows >= ids), axis=1)
        if wrong.any():
            source, target = rows[wrong][0].tolist()
            raise ValueError(
                f"transfer: got a move from row {source} to {target} in group {g}, wanted one between the device's, "
                f"0..{n - 1}, and the host's, {n}..{ids - 1}"
            )
        rows = rows - np.int32(n) * on_host
        found.append((g, rows[on_host[:, 1]], rows[on_host[:, 0]]))
    return found


def _move(tiers: list[Any], offloads: np.ndarray, onboards: np.ndarray) -> None:
    """Replaces the arrays of one group in `tiers`, (device, host), one by one: after a failure they are as they are."""
    # All sources are read before any target is written: offloads go first, but what they overwrite is read before.
    early = np.isin(onboards[:, 0], offloads[:, 1])
    read = [(_read(tiers[1], batch[0]), batch[1]) for batch in _batches(onboards[early])]
    for batch in _batches(offloads):
        tiers[1] = _copy(tiers[1], tiers[0], batch)
    for batch in _batches(onboards[~early]):
        tiers[0] = _copy(tiers[0], tiers[1], batch)
    for blocks, targets in read:
        tiers[0] = _copy(tiers[0], blocks, np.stack([np.arange(targets.size, dtype=np.int32), targets]))


def _batches(moves: np.ndarray) -> list[np.ndarray]:
    """i32[2, B] each; the sources and targets of moves i32[n, 2], B one of BATCHES."""
    batches = []
    for size in BATCHES:
        while len(moves) >= size:
            batches.append(np.ascontiguousarray(moves[:size].T))
            moves = moves[size:]
    return batches


def _copy_blocks(targets: Any, sources: Any, rows: jax.Array) -> Any:
    """Copies blocks, row rows[0, i] of each source to row rows[1, i] of its target, whatever memory these are in."""
    rows = lax.platform_dependent(rows, cpu=_weighty, default=lambda rows: rows)

    def copy(i, targets):
        def put(target, source):
            block = _block(source, rows[0, i], jax.typeof(target).memory_space)
            return lax.dynamic_update_index_in_dim(target, block, rows[1, i], 0, allow_negative_indices=False)

        return jax.tree.map(put, targets, sources)

    return lax.fori_loop(0, rows.shape[1], copy, targets)


def _weighty(rows: jax.Array) -> jax.Array:
    """The same rows, by a thousand operations: XLA runs a CPU program of fewer in the thread that calls it."""
    zero = jnp.minimum(0, jnp.max(rows.reshape(-1)[0] ^ lax.iota(jnp.int32, 1024)))
    return rows + zero


def _read_blocks(sources: Any, rows: jax.Array) -> Any:
    """Blocks rows[i] of arrays in host memory, one after the other in arrays on the device."""
    rows = lax.platform_dependent(rows, cpu=_weighty, default=lambda rows: rows)

    def read(row):
        return jax.tree.map(lambda source: _block(source, row, jax.memory.Space.Device)[0], sources)

    return lax.map(read, rows)


def _block(source: jax.Array, row: jax.Array, memory: Any) -> jax.Array:
    return jax.device_put(lax.dynamic_index_in_dim(source, row, allow_negative_indices=False), memory)


# One program for each batch size, direction and group: the targets are donated.
_copy = jax.jit(_copy_blocks, donate_argnums=0)
_read = jax.jit(_read_blocks)


def _of(pools: Pools | HostPools, group: int) -> Any:
    """The arrays of one group, with its scales if there are any."""
    return pools.arrays[group], None if pools.scales is None else pools.scales[group]


def _with[T: (Pools, HostPools)](pools: T, group: int, arrays: Any) -> T:
    """These pools with one group's arrays replaced by others."""

    def put(rows, new):
        return None if rows is None else (*rows[:group], new, *rows[group + 1 :])

    return pools.replace(arrays=put(pools.arrays, arrays[0]), scales=put(pools.scales, arrays[1]))


def _allocate(like: jax.Array, num_blocks: int) -> jax.Array:
    """An array in host memory that XLA owns, so that it can be donated, and that never was in the device's."""

    def make():
        return jax.device_put(jnp.empty((num_blocks, *like.shape[1:]), like.dtype), jax.memory.Space.Host)

    return jax.jit(make, out_shardings=like.sharding.with_memory_kind("pinned_host"))()


def _overwritten(records: np.ndarray) -> np.ndarray:
    sources, targets = (records[:, 0].astype(np.int64) << 32 | records[:, column] for column in (3, 4))
    return (records[:, 1] != NO_BLOCK) & np.isin(sources, targets)
