# SPDX-License-Identifier: Apache-2.0
"""Runs Mosaic kernels in Pallas's GPU simulator, which finds races.

    python -m tests.kernels.simulate_mosaic CASE [CASE ...]

A process of its own, because a kernel with a missing arrival waits for ever. It prints a line of JSON for each case.
"""

import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mosaic, mosaic_attention, tuning, xla
from tests.kernels import attention
from tests.kernels.attention import Case, check_decode, check_prefill, options_for
from tests.kernels.chosen import check_chosen

# (kv heads, queries per kv head, head width, block size), options
SHAPES = {
    "plain": (2, 2, 128, 8),
    "all": (1, 4, 64, 16),
    "sinks": (1, 8, 80, 16),
    "window": (1, 3, 32, 64),
    "soft_cap": (1, 1, 96, 128),
    "scale": (2, 1, 256, 32),
    "window_1": (1, 9, 16, 16),
    "sink_tokens": (1, 2, 32, 16),
}


def case_of(name, lengths):
    kv_heads, group, width, size = SHAPES[name]
    return Case(lengths, kv_heads=kv_heads, group=group, width=width, block_size=size, dtype="bfloat16")


def decode(name):
    case = case_of(name, [1, 0, 37, 200, 130])
    check_decode(case, "mosaic", **options_for(case, name))


def quantised(stored):
    """K/V with a byte per element, whose unreadable slots and factors are NaN."""
    for width, name in ((64, "all"), (128, "plain")):
        lengths = [1, 0, 37, 200, 130]
        case = Case(lengths, kv_heads=2, group=4, width=width, block_size=16, dtype="bfloat16", stored=stored)
        check_decode(case, "mosaic", **options_for(case, name))


def prefill(name):
    case = case_of(name, [9, 1, 0, 131, 70])
    check_prefill(case, "mosaic", [9, 1, 0, 90, 7], **options_for(case, name))


def chosen(counts):
    """Rows that read some of their blocks, through a view."""
    case = case_of("sink_tokens", [70, 33, 50])
    columns = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0]], bool)
    check_chosen(case, mosaic, counts, columns=columns, interpret=True)


def long():
    """A case with more tiles than stages, and halves of two kinds."""
    case = Case([700, 3], kv_heads=1, width=64, block_size=16, dtype="float16")
    tuning.decode_programs = lambda: 1
    check_decode(case, "mosaic")
    check_prefill(case, "mosaic", [40, 3])


def vmap():
    """Several caches at once."""
    q, table = jnp.ones((2, 1, 2, 64), jnp.bfloat16), jnp.zeros((2, 1, 4), jnp.int32)
    pool = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 1, 2, 1, 16, 64)), jnp.bfloat16)
    length = jnp.array([[1], [1]], jnp.int32)
    run = functools.partial(mosaic.decode_attention, scale=1.0, interpret=True)
    out = jax.vmap(run, in_axes=(0, 0, None, 0, 0))(q, pool, 0, table, length)
    wanted = np.broadcast_to(pool[:, 0, 0, 1, 0, None, None, 0], out.shape)
    np.testing.assert_array_equal(np.asarray(out, np.float32), wanted.astype(np.float32))


def moves():
    """Copies, gathers and scatters of blocks of several chunks, with more chunks than stages, and with none to move."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((9, 1, 2, 1, 16, 192)).astype(np.float32)
    pool[::2] = np.nan
    pool = jnp.asarray(pool, jnp.bfloat16)
    staged = jnp.asarray(rng.standard_normal((4, *pool.shape[1:])), jnp.bfloat16)
    order = jnp.asarray(rng.permutation(8), jnp.int32)
    tuning.CHUNK_BYTES = 2048
    for programs, count in ((2, 4), (3, 2), (3, 0)):
        tuning.move_programs = lambda programs=programs: programs
        num_moved = jnp.int32(count)
        args = {
            "copy_blocks": (pool, order[:4], order[4:], num_moved),
            "gather_blocks": (pool, order[:4]),
            "scatter_blocks": (pool, staged, order[:4], num_moved),
        }
        for name, arguments in args.items():
            got = getattr(mosaic, name)(*arguments, interpret=True)
            wanted = getattr(xla, name)(*arguments)
            np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, wanted)))


def writes():
    """Rotations and writes of tokens, two of which are dropped: more heads than a tile has, and 128 bytes a head."""
    rng = np.random.default_rng(0)
    slots, blocks, size = jnp.array([3, 24, 17, 22, 8, 27, 0], jnp.int32), 6, 4

    def numbers(bits, *shape):
        """Numbers of few bits. float32 holds their products exactly, whatever a compiler fuses."""
        return rng.integers(-(2**bits), 2**bits, shape) / 2**bits

    for dtype, bits, heads, kv_heads, width in (("bfloat16", 7, 64, 8, 64), ("float32", 11, 4, 1, 32)):
        shapes = [(slots.size, count, width) for count in (heads, kv_heads, kv_heads)]
        q, k, v = (jnp.asarray(numbers(bits, *shape), dtype) for shape in shapes)
        angles = [jnp.asarray(numbers(12, slots.size, 1, width // 2), jnp.float32) for _ in range(2)]
        pool = jnp.full((blocks + 1, 2, 2, kv_heads, size, width), np.nan, dtype)
        latents = jnp.full((blocks + 1, 2, 1, 1, size, width * kv_heads), np.nan, dtype)
        latent = k.reshape(slots.size, 1, -1)
        args = {
            "rope_append": [(q, k, v, *angles, pool, jnp.int32(1), slots)],
            "append_kv": [(pool, jnp.int32(1), k, v, slots)],
        }
        if latents.shape[-1] <= 256:
            args["append_kv"].append((latents, jnp.int32(0), latent, None, slots))
        for name, calls in args.items():
            for arguments in calls:
                wanted = jax.jit(getattr(xla, name))(*arguments)
                got = jax.jit(functools.partial(getattr(mosaic, name), interpret=True))(*arguments)
                jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(raw, x) for x in (got, wanted)))


def raw(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


def broken():
    """A loader which does not wait until a stage is free."""
    load, original = mosaic_attention._load, mosaic_attention.plgpu
    careless = types.SimpleNamespace(copy_gmem_to_smem=original.copy_gmem_to_smem, barrier_wait=lambda ref: None)

    def load_at_once(*args, **scratch):
        mosaic_attention.plgpu = careless
        load(*args, **scratch)
        mosaic_attention.plgpu = original

    mosaic_attention._load = load_at_once
    long()


CASES = {f"{kind.__name__}_{name}": functools.partial(kind, name) for kind in (decode, prefill) for name in SHAPES}
CASES |= {
    "chosen_decode": functools.partial(chosen, [1, 1, 1]),
    "chosen_prefill": functools.partial(chosen, [1, 20, 3]),
}
CASES |= {
    "decode_int8": functools.partial(quantised, "int8"), "decode_fp8": functools.partial(quantised, "float8_e4m3fn")
}  # fmt: skip
CASES |= {"moves": moves, "writes": writes, "long": long, "vmap": vmap, "broken": broken}


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    tuning.decode_programs = lambda: 4  # few programs, because each takes a while
    # Not jitted: the simulator's code takes longer to compile than to run.
    for name in ("decode", "prefill"):
        setattr(attention, name, getattr(attention, name).__wrapped__)
    for case in sys.argv[1:]:
        try:
            CASES[case]()
            error = None
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        print(json.dumps({"case": case, "error": error}), flush=True)
