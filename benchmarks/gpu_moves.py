# SPDX-License-Identifier: Apache-2.0
"""Writing and moving K/V on a GPU, for `benchmarks.kernels`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import common, gpu
from benchmarks.gpu import Effort, Record


class Size(NamedTuple):
    """Blocks to move at once, by name, of the 16 tokens and all layers of a pool [N + 1, L, 2, K, 16, D]."""

    counts: dict[str, int]
    layers: int = 32
    heads: tuple[int, int] = (8, 128)
    tokens: int = 256  # to append
    calls: int = 4


def moves(record: Record, size: Size, effort: Effort) -> None:
    """Whole blocks copied in a pool, gathered from it and put back: read and written bytes."""
    block = (size.layers, 2, size.heads[0], 16, size.heads[1])
    half = max(size.counts.values()) * size.calls  # sources, then as many targets
    record.result["shapes"]["moves"] = {**size._asdict(), "block_bytes": 2 * int(np.prod(block))}

    def program(move, who, count):
        call = functools.partial(pallas_kernels.call, f"{move}_blocks", implementation=who)

        def run(pool, staged, sources, targets):
            gathered = []
            for i in range(size.calls):
                source, target = (x[i * count : (i + 1) * count] for x in (sources, targets))
                if move == "gather":
                    gathered.append(call(pool, source))
                else:
                    args = (source, target) if move == "copy" else (staged, target)
                    pool = call(pool, *args, jnp.int32(count))
            return gathered or pool

        return jax.jit(run, donate_argnums=() if move == "gather" else 0)

    few = jnp.arange(size.calls, dtype=jnp.int32)
    small = gpu.random_pool((2 * size.calls + 1, *block), "bfloat16")
    pool = gpu.random_pool((2 * half + 1, *block), "bfloat16")
    order = jax.random.permutation(gpu.key(0), 2 * half).astype(jnp.int32)
    for move in ("copy", "gather", "scatter"):
        check = jnp.ones((1, *block), jnp.bfloat16), few, few + size.calls
        wanted = program(move, "xla", 1)(jnp.copy(small), *check)
        for who in gpu.served(f"{move}_blocks"):
            with record.guard(f"{move} {who}"):
                got = program(move, who, 1)(jnp.copy(small), *check)
                require_same(got, wanted, who)
                for name, count in size.counts.items():
                    args = jnp.ones((count, *block), jnp.bfloat16), order[:half], order[half:]
                    run, moved = program(move, who, count), size.calls * args[0].nbytes
                    if move == "gather":
                        run, most = functools.partial(lambda run, _, *args: run(*args), run), max(2**34 // moved, 1)
                        seconds, _ = gpu.time_s(run, None, (pool, *args), effort, most)
                    else:
                        seconds, pool = gpu.time_s(run, pool, args, effort)
                    record.rate(who, f"{move}_{name}", 2 * moved / seconds, "copy_tb_s")


def require_same(got, wanted, who: str) -> None:
    """Requires that both are the same, bit for bit, but for the bits of NaN."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    common.require(all(bool(jnp.array_equal(*pair, equal_nan=True)) for pair in pairs), f"{who} differs from its twin")


def append(record: Record, size: Size, effort: Effort) -> None:
    """K/V of a step's tokens, one layer after the other, written into a pool."""
    kv_heads, width = size.heads
    pool = gpu.random_pool((size.tokens + 1, size.layers, 2, kv_heads, 16, width), "bfloat16")
    rng = np.random.default_rng(0)
    slots = jnp.asarray(rng.permutation(size.tokens * 16)[: size.tokens], jnp.int32)
    args = (*jax.random.normal(gpu.key(0), (2, size.tokens, kv_heads, width), jnp.bfloat16), slots)
    record.result["shapes"]["append"] = {"tokens": size.tokens, "kv_heads": kv_heads, "width": width}

    def run(who, pool, k, v, slots):
        for layer in range(size.layers):
            pool = pallas_kernels.call("append_kv", pool, layer, k, v, slots, implementation=who)
        return pool

    wanted = jax.jit(functools.partial(run, "xla"))(pool, *args)
    for who in gpu.served("append_kv"):
        with record.guard(f"append {who}"):
            program = jax.jit(functools.partial(run, who), donate_argnums=0)
            require_same(program(jnp.copy(pool), *args), wanted, who)
            seconds, last = gpu.time_s(program, jnp.copy(pool), args, effort)
            record.add(who, "append_us", 1e6 * seconds / size.layers)
            if gpu.has_gpu():
                gpu.profiled(record, who, "append", program, last, args, size.layers)
