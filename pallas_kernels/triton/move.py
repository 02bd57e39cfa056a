# SPDX-License-Identifier: Apache-2.0
"""Kernels that write K/V into a pool, and that copy blocks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import tuning
from pallas_kernels.by_token import slot_axis
from pallas_kernels.quantise import quantise
from pallas_kernels.triton.attention import check_reach
from pallas_kernels.triton.rope import check_append, slot_row


def append_kv(pool, layer, k, v, slots, scales=None, *, interpret=False):
    """Writes as `xla.append_kv`: a program writes K and V of a token, all heads, or its latent."""
    tokens, kv_heads, width = k.shape
    scratch_slot = (pool.shape[0] - 1) * pool.shape[4]
    parts = pool.shape[2]
    check_append(pool)
    heads = pl.next_power_of_2(kv_heads)
    columns = pl.next_power_of_2(width)

    def kernel(
        layer_ref,  # i32[1]
        *refs,  # K and V [T, K, D]; slots i32[T]; twice [(N + 1) L 2 K P, D], and scales f32[(N + 1) L 2 K P] if any
    ):
        new_refs = refs[:parts]
        slots_ref = refs[parts]
        (pool_ref, *scales_refs) = refs[parts + 1 + len(arrays) :]
        token = pl.program_id(0)
        slot = slots_ref[token]
        head = jnp.arange(heads, dtype=jnp.int32)[:, None]
        column = jnp.arange(columns, dtype=jnp.int32)[None, :]
        inside = jnp.logical_and(
            jnp.broadcast_to(head < kv_heads, (heads, columns)), jnp.broadcast_to(column < width, (heads, columns))
        )
        is_written = inside & (slot < scratch_slot)
        for part_index, ref in enumerate(new_refs):
            new = plt.load(ref.at[token, head, column], mask=inside, other=0.0)
            row = slot_row(pool.shape, slot, layer_ref[0], part_index, head)
            if scales_refs:
                new, scale = quantise(new, pool.dtype)
                plt.store(scales_refs[0].at[row], scale, mask=(head < kv_heads) & (slot < scratch_slot))
            plt.store(pool_ref.at[row, column], new.astype(pool.dtype), mask=is_written)

    arrays = [pool.reshape(-1, width), *([] if scales is None else [scales.reshape(-1)])]
    num_warps = min(max(heads * columns * pool.dtype.itemsize // (32 * 16), 1), 4)  # 16 bytes per thread
    pool_out, *scales_out = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        grid=(tokens,),
        input_output_aliases={2 + parts + i: i for i in range(len(arrays))},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="append_kv",
    )(jnp.full((1,), layer, jnp.int32), *([k] if v is None else [k, v]), slots, *arrays)
    pool = pool_out.reshape(pool.shape)
    return pool if scales is None else (pool, scales_out[0].reshape(scales.shape))


def copy_blocks(pool, sources, targets, count, tokens=None, by_token=False, *, interpret=False):
    """Copies as `xla.copy_blocks`, but in any order: no target is a source, and no two targets are equal."""
    flat = pool.reshape(pool.shape[0], -1)
    axis = slot_axis(by_token)
    part = () if tokens is None else (tokens, math.prod(pool.shape[axis + 1 :]), pool.shape[axis])
    out = _move(None, flat, sources, targets, count, interpret, "copy_blocks", part)
    return out.reshape(pool.shape)


def gather_blocks(pool, blocks, *, interpret=False):
    """Equals `xla.gather_blocks`."""
    count = blocks.shape[0]
    flat = pool.reshape(pool.shape[0], -1)
    blank = jax.ShapeDtypeStruct((count, flat.shape[1]), flat.dtype)
    index = jnp.arange(count, dtype=jnp.int32)
    out = _move(flat, blank, blocks, index, jnp.int32(count), interpret, "gather_blocks")
    return out.reshape(count, *pool.shape[1:])


def scatter_blocks(pool, staged, blocks, count, *, interpret=False):
    """Equals `xla.scatter_blocks`."""
    flat = pool.reshape(pool.shape[0], -1)
    index = jnp.arange(staged.shape[0], dtype=jnp.int32)
    out = _move(staged.reshape(staged.shape[0], -1), flat, index, blocks, count, interpret, "scatter_blocks")
    return out.reshape(pool.shape)


def _move(source, target, rows_from, rows_to, count, interpret: bool, name: str, part=()) -> jax.Array:
    """Copies the first `count` rows from source [X, B] to target [Y, B].

    Args:
      source: the source, or None to copy within the target.
      target: written in place; a ShapeDtypeStruct makes a new array.
      rows_from: i32[E].
      rows_to: i32[E].
      count: i32[]; the number of rows, which determines the cost, because programs loop over their chunks.
      interpret: whether plain jax runs the kernel.
      name: the kernel's name.
      part: (tokens i32[E], D, P) copies only the first tokens of each row's tiles [P, D], with source None. D is
        the size of a slot. () copies
        whole rows.
    """
    for array in (source, target):
        if array is not None:
            check_reach(array)
    width = target.shape[1]
    chunk = min(tuning.CHUNK_BYTES // target.dtype.itemsize, pl.next_power_of_2(width))
    chunks = -(-width // chunk)
    programs = max(min(tuning.move_programs(), rows_from.shape[0] * chunks), 1)
    in_place = not isinstance(target, jax.ShapeDtypeStruct)

    def kernel(
        count_ref,  # i32[1]
        from_ref,
        to_ref,  # i32[E]
        *refs,  # tokens i32[E] of a part; source [X, B], unless None; target [Y, B], twice if in place
    ):
        source_ref = refs[-1] if source is None else refs[0]
        target_ref = refs[-1]
        first = pl.program_id(0)

        def step(i, _):
            item = first + i * programs
            row = item // chunks
            column = item % chunks * chunk + jnp.arange(chunk, dtype=jnp.int32)
            mask = None if width % chunk == 0 else column < width
            if part:
                # Avoids // and %, whose handling of signs would hide from Triton that 16 bytes share a mask.
                copied = lax.rem(lax.div(column, np.int32(part[1])), np.int32(part[2])) < refs[0][row]
                mask = copied if mask is None else mask & copied
            data = plt.load(source_ref.at[from_ref[row], column], mask=mask)
            plt.store(target_ref.at[to_ref[row], column], data, mask=mask)

        lax.fori_loop(0, (count_ref[0] * chunks - first + programs - 1) // programs, step, None)

    operands = [jnp.full((1,), count, jnp.int32), rows_from, rows_to, *part[:1]]
    operands += [] if source is None else [source]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(target.shape, target.dtype),
        grid=(programs,),
        input_output_aliases={len(operands): 0} if in_place else {},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands, *([target] if in_place else []))
