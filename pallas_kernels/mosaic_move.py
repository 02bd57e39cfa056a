# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks for Hopper, as a Mosaic GPU kernel: TMA moves chunks of blocks through shared memory.

A program has a ring of stages. It copies a chunk to its target as soon as the chunk has arrived, and then asks for the
chunk that is a ring further on. Shapes use the legend of `pallas_kernels.xla`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning

_BOX = 256  # the most elements of a TMA copy in each of its axes
_ALIGNED = 16  # bytes of the smallest TMA copy


class _Chunks(NamedTuple):
    """The chunks of a block, each of [rows, lanes] elements."""

    count: int
    rows: int
    lanes: int


def copy_blocks(pool, sources, targets, count, tokens=None, by_token=False, *, interpret=False):
    """Copies as `xla.copy_blocks`, but in any order: no target is a source, and no two targets are equal."""
    del by_token  # whole blocks are copied alike
    if tokens is not None:
        raise NotImplementedError("mosaic: no copies of a part of a block")
    return _move(None, pool, sources, targets, count, interpret, "copy_blocks")


def gather_blocks(pool, blocks, *, interpret=False):
    """Equals `xla.gather_blocks`."""
    count = blocks.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    blank = jax.ShapeDtypeStruct((count, *pool.shape[1:]), pool.dtype)
    return _move(pool, blank, blocks, index, jnp.int32(count), interpret, "gather_blocks")


def scatter_blocks(pool, staged, blocks, count, *, interpret=False):
    """Equals `xla.scatter_blocks`."""
    index = jnp.arange(staged.shape[0], dtype=jnp.int32)
    return _move(staged, pool, index, blocks, count, interpret, "scatter_blocks")


def _move(source, target, rows_from, rows_to, count, interpret: bool, name: str) -> jax.Array:
    """Copies the first `count` blocks from source [X, ...] to target [Y, ...].

    Args:
      source: the source, or None to copy within the target.
      target: written in place; a ShapeDtypeStruct makes a new array.
      rows_from: i32[E].
      rows_to: i32[E].
      count: i32[]; the number of blocks, which determines the cost, because programs loop over their chunks.
      interpret: whether to simulate the kernel.
      name: the function's name.
    """
    if not interpret and tuning.chip() != "hopper":
        raise NotImplementedError(f"mosaic: made for Hopper GPUs, not for {tuning.chip() or 'this device'}")
    chunks = _chunks(math.prod(target.shape[1:]), target.dtype.itemsize)
    cut = (-1, chunks.count * chunks.rows, chunks.lanes)
    programs = max(min(tuning.move_programs(), rows_from.shape[0] * chunks.count), 1)
    kernel = functools.partial(_kernel, chunks=chunks, programs=programs, dtype=target.dtype)
    is_new = isinstance(target, jax.ShapeDtypeStruct)
    out_type = jax.ShapeDtypeStruct((target.shape[0], *cut[1:]), target.dtype) if is_new else ()
    run: Any = pl.kernel(
        kernel
        if is_new or source is not None
        else lambda count, froms, tos, pool: kernel(count, froms, tos, pool, pool),
        out_type,
        mesh=plgpu.Mesh(grid=(programs,), grid_names=("program",), num_threads=1, thread_name="warpgroup"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
        name=f"mosaic_{name}",
    )
    operands = [jnp.full((1,), count, jnp.int32), rows_from, rows_to]
    operands += [] if source is None else [source.reshape(cut)]
    if is_new:
        return run(*operands).reshape(target.shape)
    # A kernel writes in place into the references among its operands.
    return pl.run_state(lambda target_ref: run(*operands, target_ref))(target.reshape(cut)).reshape(target.shape)


def _chunks(width: int, itemsize: int) -> _Chunks:
    """Cuts a block of `width` elements into equal chunks, as large as `tuning.CHUNK_BYTES` and TMA allow."""
    lanes = min(width & -width, _BOX)
    if lanes * itemsize % _ALIGNED:
        raise NotImplementedError(f"mosaic: blocks of {width} elements; wanted a multiple of {_ALIGNED // itemsize}")
    total = width // lanes
    most = min(_BOX, max(tuning.CHUNK_BYTES // (lanes * itemsize), 1))
    rows = max(size for size in range(1, most + 1) if total % size == 0)
    return _Chunks(total // rows, rows, lanes)


def _kernel(
    count_ref,  # i32[1]
    from_ref,
    to_ref,  # i32[E]
    source_ref,  # [X, chunks * rows, lanes]
    target_ref,  # [Y, chunks * rows, lanes]
    *,
    chunks: _Chunks,
    programs: int,
    dtype,
):
    first = lax.axis_index("program")
    num_items = jnp.maximum(count_ref[0] * chunks.count - first + (programs - 1), 0) // np.int32(programs)
    stages = tuning.MOSAIC_MOVE_STAGES

    def moved(buffer, full):
        def place(item):
            item = first + item * programs
            block = lax.div(item, np.int32(chunks.count))
            return block, pl.ds(lax.rem(item, np.int32(chunks.count)) * chunks.rows, chunks.rows)

        def load(item):
            block, part = place(item)
            stage = lax.rem(item, np.int32(stages))
            plgpu.copy_gmem_to_smem(source_ref.at[from_ref[block], part], buffer.at[stage], full.at[stage])

        for item in range(stages):
            pl.when(item < num_items)(functools.partial(load, jnp.int32(item)))

        def step(item, _):
            block, part = place(item)
            stage = lax.rem(item, np.int32(stages))
            plgpu.barrier_wait(full.at[stage])
            plgpu.copy_smem_to_gmem(buffer.at[stage], target_ref.at[to_ref[block], part])
            # The other stages' loads go on while this stage is read.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(item + stages < num_items)(functools.partial(load, item + stages))

        lax.fori_loop(0, num_items, step, None)
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        moved,
        plgpu.SMEM((stages, chunks.rows, chunks.lanes), dtype),
        plgpu.Barrier(num_barriers=stages),
        collective_axes="warpgroup",
    )
