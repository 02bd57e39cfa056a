# SPDX-License-Identifier: Apache-2.0
"""The host tier: rates of blocks on their way to host memory and back, and a decode step's wait for them.

64 blocks of 1 MB go out, come back, and swap with as many others, by `move`. The time is from the call until the bytes
have arrived, in the host memory of the CPU backend. A plain `jax.device_put` of an array with as many bytes takes turns
with it in both directions. `device_put` always gets new memory, and a numpy copy into used memory shows how much of its
time this takes. The returned bytes are compared. A missed bar ends the benchmark.

The stall is the time of a decode step (attention of 8 rows over 8 layers, in place), alone and just after a copy of 64
blocks, or of an array as large, has started. It is timed from the call which starts the copy to the end of the step.

All times are the minimum of several rounds, in which all programs take turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import common
from benchmarks.common import Bar, Program, Size, benchmark
from kvjax.events.transfer import Transfer
from kvjax.pools.host import init_host_pools, move

BARS = {
    "to_host_of_device_put": Bar("rate to the host, to `device_put`", at_least=0.8),
    "to_device_of_device_put": Bar("rate back to the device, to `device_put`", at_least=0.8),
    "move_to_host_gb_s": Bar("rate to the host", "GB/s"),
    "move_to_device_gb_s": Bar("rate back to the device", "GB/s"),
    "numpy_copy_gb_s": Bar("a plain copy in used memory", "GB/s"),
    "step_ms": Bar("a decode step alone", "ms"),
    "step_after_offload_ms": Bar("a decode step that starts just after an offload", "ms"),
}
NOTES = """
`device_put` is slow on a CPU because it takes new pages of memory every time.
"""


BLOCK_SIZE, HEADS_PER_KV = 16, 4


class Tiers:
    """The pools of both tiers. Every use replaces them. The last device blocks are the blocks to move."""

    def __init__(self, size: Size):
        layers = [kvjax.LayerSpec(size.kv_heads, size.head_dim)] * size.layers
        held = size.rows * -(-(size.length + 1) // BLOCK_SIZE)
        self.spec = spec = kvjax.make_spec(
            layers, num_blocks=held + 2 * size.blocks, num_host_blocks=2 * size.blocks,
            max_seqs=size.rows, max_length=size.length + 1, block_size=BLOCK_SIZE, dtype="float32",
        )  # fmt: skip
        rng = np.random.default_rng(0)
        fill = jax.jit(lambda pools, key: jax.tree.map(lambda x: jax.random.normal(key, x.shape, x.dtype), pools))
        pools = fill(kvjax.init_pools(spec), jax.random.key(0))
        self.pools, self.host = init_host_pools(pools)
        self.running = []
        (pool,) = jax.tree.leaves(pools)
        self.block_bytes = pool[0].nbytes
        self.host_memory = pool.sharding.with_memory_kind("pinned_host")
        self.array = jax.device_put(jnp.ones((size.blocks * self.block_bytes // 4,), jnp.float32), pool.sharding)
        free = held + rng.permutation(2 * size.blocks)
        host_rows = spec.groups[0].num_blocks + rng.permutation(2 * size.blocks)
        on_device = free[: size.blocks]
        on_host = host_rows[: size.blocks]
        self.moved = on_device
        self.back_at = free[size.blocks :]
        self.out = transfer(on_device, on_host)
        self.back = transfer(on_host, self.back_at)
        self.swap = transfer(np.concatenate([on_device, on_host]), np.concatenate([on_host, on_device]))

    def move(self, orders: Transfer) -> Any:
        self.pools, self.host = move(self.pools, self.host, orders)
        return self.pools, self.host


def transfer(sources: np.ndarray, targets: np.ndarray) -> Transfer:
    columns = np.zeros_like(sources), sources, np.ones_like(sources), sources, targets
    return Transfer(jnp.asarray(np.stack(columns, axis=1), jnp.int32))


def least_s(tiers: Tiers, ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Minimum seconds of each program, in turns. Earlier moves are awaited before a program starts."""
    programs: dict[str, Program] = {
        name: (lambda: (tiers.pools, tiers.host, tiers.running), lambda _, run=run: run()) for name, run in ways.items()
    }
    took, _ = common.in_turns(programs, rounds)
    return {name: timing.least for name, timing in took.items()}


def rates(tiers: Tiers, size: Size) -> dict[str, float]:
    """GB/s in both directions, of blocks and of an array."""
    total = size.blocks * tiers.block_bytes
    array = tiers.array
    host = tiers.host_memory
    on_host = jax.device_put(array, host)
    plain = np.ones(total, np.uint8)
    used = np.ones(total, np.uint8)
    ways = {
        "move_to_host": lambda: tiers.move(tiers.out),
        "device_put_to_host": lambda: jax.device_put(array, host),
        "move_to_device": lambda: tiers.move(tiers.back),
        "device_put_to_device": lambda: jax.device_put(on_host, array.sharding),
        "swap": lambda: tiers.move(tiers.swap),
        "numpy_copy": lambda: np.copyto(used, plain),
    }
    seconds = least_s(tiers, ways, size.rounds)
    figures = {f"{name}_gb_s": total * (2 if name == "swap" else 1) / s / 1e9 for name, s in seconds.items()}
    for direction in ("to_host", "to_device"):
        base = figures[f"device_put_{direction}_gb_s"]
        figures[f"{direction}_of_device_put"] = figures[f"move_{direction}_gb_s"] / base
    tiers.move(tiers.out)
    return figures


def check(tiers: Tiers) -> None:
    """Requires blocks to keep their bytes on the way out and back, and through two swaps."""
    (before,) = jax.device_get(tiers.pools.arrays[0])
    tiers.move(tiers.out)
    tiers.move(tiers.back)
    (after,) = jax.device_get(tiers.pools.arrays[0])
    common.require(np.array_equal(after[tiers.back_at], before[tiers.moved]), "other bytes came back")
    tiers.move(tiers.swap)
    tiers.move(tiers.swap)
    (again,) = jax.device_get(tiers.pools.arrays[0])
    common.require(np.array_equal(again, after), "blocks that changed places twice are not what they were")


def decode_step(spec: kvjax.CacheSpec, size: Size) -> tuple[Callable[..., Any], tuple]:
    """A program (pools, ...) -> (pools, q) which donates the pools, and its other arguments: a token for each row."""
    groups = tuple(dataclasses.replace(group, num_host_blocks=0) for group in spec.groups)
    state = kvjax.init(dataclasses.replace(spec, groups=groups))  # the rows' blocks come first on the device
    tokens = 1 + np.arange(size.rows * size.length, dtype=np.int32).reshape(size.rows, -1)
    admit = jax.jit(kvjax.admit)
    for seq in range(size.rows):
        state, events = admit(state, seq, tokens[seq], size.length)
        common.require(bool(events.ok), "a row was not admitted")
    state, _ = jax.jit(kvjax.commit)(state, tokens, np.full(size.rows, size.length, np.int32))
    state, _ = jax.jit(kvjax.extend)(state, np.ones(size.rows, bool))
    view = kvjax.view(state, 1).replace(spec=spec)  # without a host tier blocks have the same rows on the device

    def step(pools, view, q):
        for layer in range(size.layers):
            kv = q[:, :, ::HEADS_PER_KV]  # from the output of the layer before: else XLA may write before it has read
            pools = kvjax.write(pools, layer, kv, kv, view)
            q = q + kvjax.attend(q, pools, layer, view)
        return pools, q

    q = jnp.ones((size.rows, 1, HEADS_PER_KV * size.kv_heads, size.head_dim))
    return jax.jit(step, donate_argnums=0), (view, q)


def stalls(tiers: Tiers, size: Size) -> dict[str, float]:
    """Milliseconds from the call which starts a copy to the end of the next step."""
    program, args = decode_step(tiers.spec, size)

    def step_after(begin: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            tiers.running[:] = [begin()]
            tiers.pools, q = program(tiers.pools, *args)
            return q

        return run

    ways = {
        "step": step_after(lambda: None),
        "step_after_offload": step_after(lambda: tiers.move(tiers.out)[1]),
        "step_after_onboard": step_after(lambda: tiers.move(tiers.back)[1]),
        "step_after_device_put": step_after(lambda: jax.device_put(tiers.array, tiers.host_memory)),
    }
    seconds = least_s(tiers, ways, size.rounds)
    figures = {f"{name}_ms": 1e3 * s for name, s in seconds.items()}
    alone = seconds.pop("step")
    return figures | {name.replace("step_after", "stall_of_step"): s / alone - 1 for name, s in seconds.items()}


# Blocks that move and their shape; rows of a step and their tokens before the step's.
SIZES = {
    "blocks": (64, 5), "layers": (8, 2), "kv_heads": (8, 2), "head_dim": (128, 8), "rows": (8, 2), "length": (255, 31),
}  # fmt: skip


@benchmark(BARS, SIZES, rounds=(10, 2), strict=True)
def measure(size):
    tiers = Tiers(size)
    check(tiers)
    yield rates(tiers, size)
    yield stalls(tiers, size)
