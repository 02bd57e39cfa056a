# SPDX-License-Identifier: Apache-2.0
"""Writes of K/V into a pool for Hopper, as Mosaic GPU kernels. A program has a token, and TMA moves its heads.

    append_kv     K and V, or a latent, to shared memory, and from there to their slot
    rope_append   Q, K and V to shared memory; Q and K are rotated; Q leaves, and K and V go to their slot

A token for the scratch block goes nowhere. Shapes use the legend of `pallas_kernels.xla`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.by_token import check_by_head
from pallas_kernels.rotary import rotate_halves

_TILE = 64  # the heads in registers at once: the rows of a warpgroup's layout
_BOX = 256  # the most elements of a TMA copy in each of its axes
_ALIGNED = 128  # bytes between the parts of a copy in shared memory
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def append_kv(pool, layer, k, v, slots, scales=None, *, interpret=False):
    """Writes as `xla.append_kv`, to a pool without scales."""
    new = [x.astype(pool.dtype) for x in (k, v) if x is not None]
    _check(pool, scales, pool.shape[3], interpret)
    kernel = functools.partial(_append, shape=pool.shape, dtype=pool.dtype)
    operands = jnp.full((1,), layer, jnp.int32), slots, *new
    return _written(kernel, "append_kv", pool, operands, (), interpret)[1]


def rope_append(q, k, v, cos, sin, pool, layer, slots, scales=None, *, interpret=False):
    """Rotates and writes as `xla.rope_append`, to a pool without scales and of q's dtype."""
    if not q.dtype == k.dtype == v.dtype == pool.dtype:
        got = f"{q.dtype}, {k.dtype}, {v.dtype} and a pool of {pool.dtype}"
        raise NotImplementedError(f"mosaic: got q, k and v of {got}, wanted one dtype")
    heads, width = q.shape[-2:]
    total = heads + 2 * k.shape[-2]
    _check(pool, scales, heads, interpret)
    if width % 16 or total > _BOX:
        raise NotImplementedError(f"mosaic: {total} heads of {width}; wanted at most {_BOX}, and a multiple of 16")
    tokens = slots.size
    # Rows of all heads: XLA recognises slices of the same product only without a reshape in between.
    x = jnp.concatenate([x.reshape(tokens, -1) for x in (q, k, v)], axis=1).reshape(tokens, total, width)
    angles = [x.reshape(tokens, width // 2) for x in (cos, sin)]
    kernel = functools.partial(_rope_append, shape=pool.shape, heads=heads, dtype=pool.dtype)
    out_type = jax.ShapeDtypeStruct((tokens, heads, width), q.dtype)
    operands = jnp.full((1,), layer, jnp.int32), slots, x, *angles
    new_q, pool = _written(kernel, "rope_append", pool, operands, out_type, interpret)
    return new_q.reshape(q.shape), pool


def _check(pool, scales, heads: int, interpret: bool) -> None:
    """Raises NotImplementedError for a pool, or heads before those of K, that the kernels do not support."""
    check_by_head("mosaic", pool)
    kv_heads, _, width = pool.shape[3:]
    if not interpret and tuning.chip() != "hopper":
        raise NotImplementedError(f"mosaic: made for Hopper GPUs, not for {tuning.chip() or 'this device'}")
    if scales is not None:
        raise NotImplementedError("mosaic: nothing rounds K/V to a byte per element")
    if any(count * width * pool.dtype.itemsize % _ALIGNED for count in (heads, kv_heads)):
        got = f"{heads} and {kv_heads} heads of {width} in {pool.dtype}"
        raise NotImplementedError(f"mosaic: got {got}, wanted multiples of {_ALIGNED} bytes")
    if kv_heads > _BOX or width > _BOX:
        raise NotImplementedError(f"mosaic: {kv_heads} kv heads of {width}; wanted at most {_BOX} of each")


def _written(kernel, name: str, pool: jax.Array, operands, out_type: Any, interpret: bool) -> tuple[Any, jax.Array]:
    """Runs a program for each token. Returns its results, and the pool, into which it has written in place."""
    run: Any = pl.kernel(
        kernel,
        out_type,
        mesh=plgpu.Mesh(grid=(operands[1].shape[0],), grid_names=("token",), num_threads=1, thread_name="warpgroup"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
        name=f"mosaic_{name}",
    )
    rows, *outer, size, width = pool.shape

    def write(refs):
        pool_ref, result_refs = refs
        results = run(*operands, pool_ref)
        jax.tree.map(lambda ref, result: ref.set(result), result_refs, results)

    # Nobody reads these zeros, so XLA never writes them.
    blank = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_type)
    pool_out, results = pl.run_state(write)((pool.reshape(rows, math.prod(outer), size, width), blank))
    return results, pool_out.reshape(pool.shape)


def _slot_of(pool_ref, layer_ref, slot, part: int, shape: tuple[int, ...]):
    """The reference [K, D] of a slot's K (`part` 0) or V (1)."""
    _, _, parts, kv_heads, size, _ = shape
    first = (layer_ref[0] * parts + part) * kv_heads
    return pool_ref.at[lax.div(slot, np.int32(size)), pl.ds(first, kv_heads), lax.rem(slot, np.int32(size))]


def _append(
    layer_ref,  # i32[1]
    slots_ref,  # i32[T]
    *refs,  # K and V [T, K, D], or a latent; the pool [N + 1, L 2 K, P, D]
    shape: tuple[int, ...],
    dtype,
):
    *new_refs, pool_ref = refs
    token = lax.axis_index("token")
    slot = slots_ref[token]

    def move(buffer, full):
        for part, ref in enumerate(new_refs):
            plgpu.copy_gmem_to_smem(ref.at[token], buffer.at[part], full)
        plgpu.barrier_wait(full)
        for part in range(len(new_refs)):
            plgpu.copy_smem_to_gmem(buffer.at[part], _slot_of(pool_ref, layer_ref, slot, part, shape))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(slot < (shape[0] - 1) * shape[4])
    def _():
        pl.run_scoped(
            move,
            plgpu.SMEM((len(new_refs), shape[3], shape[5]), dtype),
            plgpu.Barrier(num_arrivals=len(new_refs)),
            collective_axes="warpgroup",
        )


def _rope_append(
    layer_ref,  # i32[1]
    slots_ref,  # i32[T]
    x_ref,  # [T, Q + K + K, D]
    cos_ref,
    sin_ref,  # f32[T, D / 2]
    pool_ref,  # [N + 1, L 2 K, P, D]
    q_ref,  # [T, Q, D]
    *,
    shape: tuple[int, ...],
    heads: int,
    dtype,
):
    kv_heads, width = shape[3], shape[5]
    tiles = pl.cdiv(heads + kv_heads, _TILE)
    rows = max(tiles * _TILE, heads + 2 * kv_heads)
    token = lax.axis_index("token")
    slot = slots_ref[token]

    def move(x_smem, rotated_smem, cos_smem, sin_smem, full):
        plgpu.copy_gmem_to_smem(x_ref.at[token], x_smem.at[pl.ds(0, heads + 2 * kv_heads)], full)
        plgpu.copy_gmem_to_smem(cos_ref.at[token], cos_smem, full)
        plgpu.copy_gmem_to_smem(sin_ref.at[token], sin_smem, full)
        plgpu.barrier_wait(full)
        for tile in range(tiles):
            _rotate(x_smem, rotated_smem, cos_smem, sin_smem, pl.ds(tile * _TILE, _TILE))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(rotated_smem.at[pl.ds(0, heads)], q_ref.at[token])

        @pl.when(slot < (shape[0] - 1) * shape[4])
        def _():
            new_k = rotated_smem.at[pl.ds(heads, kv_heads)]
            new_v = x_smem.at[pl.ds(heads + kv_heads, kv_heads)]
            plgpu.copy_smem_to_gmem(new_k, _slot_of(pool_ref, layer_ref, slot, 0, shape))
            plgpu.copy_smem_to_gmem(new_v, _slot_of(pool_ref, layer_ref, slot, 1, shape))

        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        move,
        plgpu.SMEM((rows, width), dtype),
        plgpu.SMEM((tiles * _TILE, width), dtype),
        plgpu.SMEM((width // 2,), jnp.float32),
        plgpu.SMEM((width // 2,), jnp.float32),
        plgpu.Barrier(num_arrivals=3),
        collective_axes="warpgroup",
    )


def _rotate(x_smem, rotated_smem, cos_smem, sin_smem, rows) -> None:
    """Rotates heads of one token in shared memory."""
    half = cos_smem.shape[0]
    first, second = pl.ds(0, half), pl.ds(half, half)
    parts = [plgpu.load(x_smem.at[rows, columns], layout=plgpu.Layout.WGMMA) for columns in (first, second)]
    angles = [plgpu.load(ref, layout=_BY_COLUMN) for ref in (cos_smem, sin_smem)]
    parts = [part.astype(jnp.float32) for part in parts]
    angles = [lax.broadcast_in_dim(angle, (rows.size, half), [1]) for angle in angles]
    for columns, part in zip((first, second), rotate_halves(*parts, *angles), strict=True):
        rotated_smem[rows, columns] = part.astype(rotated_smem.dtype)
