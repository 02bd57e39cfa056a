# SPDX-License-Identifier: Apache-2.0
"""Checks of each kernel on this machine: small cases, each run twice. `pytest -m gpu` runs them.

Attention is compared with float64, over pools of NaN except for the visible tokens. Moves are compared with their twins
in XLA, and verbs in their form for a GPU with those on the host, bit for bit. A second run has to give the same bits.
Without a GPU Triton's kernels run in Pallas's interpreter. `benchmarks.gpu_first` calls each check, and switches off
wrong kernels. The checks need no pytest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
import pallas_kernels
from pallas_kernels import lowering_for, xla
from tests.kernels import attention

TRANSITIONS = "transitions"
MOVES = "append_kv", "rope_append", "copy_blocks", "gather_blocks", "scatter_blocks"
# (function, implementation): all that can be wrong by itself.
CHECKS = [
    *((function, who) for function in ("decode_attention", "prefill_attention") for who in ("triton", "mosaic")),
    *((move, who) for move in MOVES for who in ("triton", "mosaic")),
    (TRANSITIONS, "xla"),
]
WIDE = {"kv_heads": 8, "group": 4, "width": 128, "block_size": 16, "dtype": "bfloat16"}
LATENT = {"kv_heads": 1, "group": 16, "width": 576, "values": 512, "block_size": 16, "dtype": "bfloat16"}
KINDS = [WIDE, {**WIDE, "stored": "int8"}, {**WIDE, "stored": "float8_e4m3fn"}, LATENT]
SMALL = {"kv_heads": 2, "group": 2, "width": 16, "block_size": 4}


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def require(fact: bool, otherwise: str) -> None:
    if not fact:
        raise AssertionError(otherwise)


def check(function: str, who: str) -> None:
    """Runs a check.

    Raises:
      AssertionError: naming the difference.
      NotImplementedError: if this machine cannot run the kernel.
    """
    if who == "mosaic" and not has_gpu():
        raise NotImplementedError("no GPU: Pallas's simulator of Mosaic would take minutes")
    if function == TRANSITIONS:
        check_transitions()
    elif function.endswith("attention"):
        check_attention(function, who)
    else:
        check_move(function, who)


def check_attention(function: str, who: str) -> None:
    """Decode or prefill, without options and with all, over each kind of pool which the kernel serves."""
    lengths, max_length = ([9, 1, 0, 131, 4000], 300) if has_gpu() else ([9, 1, 0, 37], 12)
    counts, served = np.minimum(lengths, max_length), 0
    for kind in KINDS if has_gpu() else [SMALL]:
        for name in ("plain", "all"):
            case = attention.Case(lengths, **kind)
            options = attention.options_for(case, name)
            try:
                if function == "decode_attention":
                    attention.check_decode(case, who, **options)
                else:
                    attention.check_prefill(case, who, counts, **options)
                check_bits(case, function, who, counts)
            except NotImplementedError:
                continue
            served += 1
    if not served:
        raise NotImplementedError(f"{function}: {who} serves none of the cases on this machine")


def check_bits(case: Any, function: str, who: str, counts: np.ndarray) -> None:
    """Requires the same bits from two runs."""
    rows = jnp.asarray(case.tables), jnp.asarray(case.lengths, jnp.int32)
    options = {"implementation": who, "scale": 0.1, "scales": case.scales, "values": case.values}
    if function == "decode_attention":
        args, run = (case.queries(len(case.lengths)), case.pool, case.layer, *rows), attention.decode
    else:
        starts = jnp.asarray(np.cumsum(counts) - counts, jnp.int32)
        args = (case.queries(int(counts.sum())), case.pool, case.layer, *rows, starts, jnp.asarray(counts, jnp.int32))
        run, options = attention.prefill, {**options, "max_count": int(counts.max())}
    first, second = (np.asarray(run(*args, **options)[0], np.float32) for _ in range(2))
    np.testing.assert_array_equal(first, second, "two runs gave other bits")


def check_move(function: str, who: str) -> None:
    """Writes, with rotation and without, and copies of blocks, of a pool half of which is NaN."""
    heads, width = (8, 128) if has_gpu() else (2, 16)
    rng, blocks = np.random.default_rng(0), 12
    pool = rng.standard_normal((blocks + 1, 2, 2, heads, 16, width)).astype(np.float32)
    pool[::2] = np.nan
    pool = jnp.asarray(pool, jnp.bfloat16)
    order = jnp.asarray(rng.permutation(blocks), jnp.int32)
    new = jnp.asarray(rng.standard_normal((2, 20, heads, width)), jnp.bfloat16)
    slots = jnp.asarray(rng.permutation(blocks * 16)[:20], jnp.int32)
    q = jnp.asarray(rng.standard_normal((20, 4 * heads, width)), jnp.bfloat16)
    # Of 12 bits, so that float32 holds the products exactly: whether a compiler fuses them with sums shows nowhere.
    angles = jnp.asarray(rng.integers(-4095, 4096, (2, 20, 1, width // 2)) / 4096, jnp.float32)
    staged, num_moved = jnp.asarray(rng.standard_normal((6, *pool.shape[1:])), jnp.bfloat16), jnp.int32(5)
    args: dict[str, tuple[Any, ...]] = {
        "append_kv": (pool, 1, *new, slots), "rope_append": (q, *new, *angles, pool, 1, slots),
        "copy_blocks": (pool, order[:6], order[6:], num_moved),
        "gather_blocks": (pool, order[:6]), "scatter_blocks": (pool, staged, order[:6], num_moved),
    }  # fmt: skip
    call = functools.partial(pallas_kernels.call, function, **attention.how(who))
    wanted = jax.jit(getattr(xla, function))(*args[function])
    for _ in range(2):
        got = jax.jit(call)(*args[function])
        for pair in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            rows = blocks if pair[0].shape == pool.shape else None  # the scratch row may hold anything
            same = jnp.array_equal(*(x[:rows] for x in pair), equal_nan=True)
            require(bool(same), f"{who} differs from its twin")


def check_transitions() -> None:
    """`extend`, `commit` and `trim`, over a history with eviction, copies on write and equal blocks."""
    spec = kvjax.make_spec(num_blocks=20, max_seqs=6, max_length=32, block_size=4)
    rng, rows = np.random.default_rng(1), np.arange(6, dtype=np.int32)

    def programs(context: Any) -> dict[str, Callable[..., Any]]:
        def program(verb: Callable[..., Any], **options: Any) -> Callable[..., Any]:
            jitted = jax.jit(functools.partial(verb, **options))

            def call(*args: Any) -> Any:
                with context():
                    return jax.device_get(jitted(*args))

            return call

        verbs = {"extend": program(kvjax.extend, max_tokens=3), "trim": program(kvjax.trim, max_tokens=3)}
        return {**verbs, "commit": program(kvjax.commit)}

    on_the_host = functools.partial(jax.default_device, jax.devices("cpu")[0])
    on_gpu = programs(contextlib.nullcontext if has_gpu() else functools.partial(lowering_for, "cuda"))
    plain, others = programs(on_the_host), {"admit": jax.jit(kvjax.admit), "release": jax.jit(kvjax.release)}
    state, _ = others["admit"](kvjax.init(spec), rows[:3], rng.integers(0, 2, (3, 9)).astype(np.int32), np.full(3, 9))
    state, _ = jax.jit(kvjax.fork)(state, 0, 4)

    def both(verb: str, *args: Any) -> Any:
        before = jax.device_get(state)
        wanted = plain[verb](before, *args)
        for _ in range(2):
            got = on_gpu[verb](before, *args)
            leaves = [jax.tree.leaves((after, events.status)) for after, events in (got, wanted)]
            require(all(map(np.array_equal, *leaves)), f"{verb} differs from the host's")
            require(kvjax.to_list(got[1]) == kvjax.to_list(wanted[1]), f"{verb}: other events than the host's")
        return wanted

    for step in range(24):
        used = np.asarray(state.seqs.length) > 0
        counts = np.where(used & (rng.random(6) < 0.8), rng.integers(1, 4, 6), 0).astype(np.int32)
        tokens = rng.integers(0, 2, (6, 3)).astype(np.int32)
        state, events = both("extend", counts > 0, counts)
        if bool(events.ok):
            state, _ = both("commit", tokens, np.maximum(counts - 1, np.minimum(counts, 1)))
            state, _ = both("trim", used)
        if step % 4 == 3:
            state, _ = others["release"](state, np.int32(rng.choice(np.flatnonzero(used))) if used.any() else 0)
        prompt = rng.integers(0, 2, 7).astype(np.int32)
        state, _ = others["admit"](state, np.int32(rng.integers(6)), prompt, np.int32(7))
