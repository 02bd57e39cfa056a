# SPDX-License-Identifier: Apache-2.0
"""What JAX offers a tier of blocks in pinned host memory, for `benchmarks.kernels`.

Which program updates an array of several gigabytes there in place, and how fast do bytes go each way?
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import SingleDeviceSharding

from benchmarks import common, gpu
from benchmarks.gpu import Effort, Record


class Size(NamedTuple):
    """Blocks of a host array, how many of them are written at once, and bytes to transfer."""

    blocks: int = 2048
    block: int = 2**20  # numbers of two bytes
    moved: int = 32
    sent_bytes: int = 2**28


QUICK = Size(32, 128, 4, 2**12)
HOST = jax.memory.Space.Host


def target(i):
    """The row of the host array where block i is written."""
    return i * 7 + 3


def scatter(pool, staged, ids):
    return pool.at[ids].set(staged, unique_indices=True, mode="promise_in_bounds", wrap_negative_indices=False)


def slices(pool, staged, ids):
    for i in range(ids.size):
        pool = lax.dynamic_update_slice_in_dim(pool, staged[i : i + 1], ids[i], 0, allow_negative_indices=False)
    return pool


def fixed_slices(pool, staged, ids):
    """To rows that the compiler knows: what do rows cost that it does not know?"""
    for i in range(ids.size):
        pool = pool.at[target(i)].set(staged[i])
    return pool


def host_code(pool, staged, ids):
    """By the host's processor."""
    run: Any = compute_on(scatter, compute_type="device_host", out_memory_spaces=HOST)
    return run(pool, staged, ids)


def measure(record: Record, size: Size, effort: Effort) -> None:
    """GB/s each way; milliseconds to write blocks into a large host array, and whether it kept its memory."""
    host, device = (SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in ("pinned_host", "device"))
    record.result["shapes"]["host"] = {**size._asdict(), "array_bytes": 2 * size.blocks * size.block}
    x = jnp.ones((size.sent_bytes // 2,), jnp.bfloat16)
    for name, array, to in (("to_host", x, host), ("to_device", jax.device_put(x, host), device)):
        seconds, _ = gpu.time_s(lambda _, array, to: jax.device_put(array, to), None, (array, to), effort)
        record.add("device", f"device_put_{name}_gb_s", array.nbytes / seconds / 1e9)
    staged = jnp.ones((size.moved, size.block), jnp.bfloat16)
    ids = target(jnp.arange(size.moved, dtype=jnp.int32))
    for way in (scatter, slices, fixed_slices, host_code):
        with record.guard(f"host {way.__name__}", ours=False):
            pool = jax.device_put(jnp.zeros((size.blocks, size.block), jnp.bfloat16), host)
            before = pool.unsafe_buffer_pointer()

            def put(pool, staged, ids, way=way):
                return way(pool, *jax.device_put((staged, ids), HOST))

            program = jax.jit(put, donate_argnums=0, out_shardings=host)
            seconds, pool = gpu.time_s(program, pool, (staged, ids), effort)
            total = float(jnp.sum(jax.device_put(pool, device), dtype=jnp.float32))
            common.require(total == staged.size, f"{total} ones were written, wanted {staged.size}")
            record.add("device", f"host_{way.__name__}_same_memory", float(pool.unsafe_buffer_pointer() == before))
            record.add("device", f"host_{way.__name__}_ms", 1e3 * seconds)
            record.add("device", f"host_{way.__name__}_gb_s", staged.nbytes / seconds / 1e9)
