# SPDX-License-Identifier: Apache-2.0
"""The Mosaic GPU kernel that merges the parts of each row's attention.

A program has a row, up to 64 heads and some columns. TMA brings the row's parts through a ring of stages, some parts
ahead, and a running softmax over their log-sum-exp weighs them. Shapes use the legend of `pallas_kernels.xla`.
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

_TILE = 64  # rows of a warpgroup's layout, and columns that a program takes
_LOWEST = np.float32(-1e30)  # finite: score - maximum is never inf - inf
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)


def merge(
    parts: jax.Array, lse: jax.Array, starts: jax.Array, group: int, dtype, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Merges parts of rows by their log-sum-exp. Row r has the parts starts[r] to starts[r + 1] - 1.

    Args:
      parts: f32[W, K, X, D]; X is G or more, and the first G rows of X are heads.
      lse: f32[W, K, X].
      starts: i32[R + 1].
      group: G.
      dtype: the result's dtype.
      interpret: whether to simulate the kernel.

    Returns:
      [R, Q, D] and its log-sum-exp f32[R, Q].
    """
    num_parts, kv_heads, padded, width = parts.shape
    rows = starts.shape[0] - 1
    heads_per_tile = math.gcd(kv_heads, max(_TILE // padded, 1))
    lines = heads_per_tile * padded
    columns = math.gcd(width, _TILE)
    shapes = jax.ShapeDtypeStruct((rows, kv_heads * group, width), dtype), (rows, kv_heads * padded)
    run: Any = pl.kernel(
        functools.partial(_kernel, group=group, padded=padded, lines=lines, columns=columns, dtype=dtype),
        (shapes[0], jax.ShapeDtypeStruct(shapes[1], jnp.float32)),
        mesh=plgpu.Mesh(
            grid=(rows, kv_heads // heads_per_tile, width // columns),
            grid_names=("row", "tile", "column"),
            num_threads=1,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
        name="mosaic_merge_attention",
    )
    out, merged_lse = run(starts, parts.reshape(num_parts, -1, width), lse.reshape(num_parts, -1))
    merged_lse = merged_lse.reshape(rows, kv_heads, padded)[:, :, :group].reshape(rows, -1)
    return out, merged_lse


def _kernel(
    starts_ref,  # i32[R + 1]
    parts_ref,  # f32[W, K X, D]
    lse_ref,  # f32[W, K X]
    out_ref,  # [R, Q, D]
    merged_lse_ref,  # f32[R, K X]
    *,
    group: int,
    padded: int,
    lines: int,
    columns: int,
    dtype,
):
    row = lax.axis_index("row")
    tile = lax.axis_index("tile")
    column = lax.axis_index("column")
    stages = tuning.MOSAIC_MERGE_STAGES
    first = starts_ref[row]
    num_parts = starts_ref[row + 1] - first
    used = pl.ds(0, lines)
    tile_lines = pl.ds(tile * lines, lines)
    tile_columns = pl.ds(column * columns, columns)

    def merged(part_smem, part_lse_smem, out_smem, lse_smem, full, free):
        def load(index):
            stage = lax.rem(index, np.int32(stages))
            part = first + index
            plgpu.copy_gmem_to_smem(
                parts_ref.at[part, tile_lines, tile_columns], part_smem.at[stage, used], full.at[stage]
            )
            plgpu.copy_gmem_to_smem(lse_ref.at[part, tile_lines], part_lse_smem.at[stage, used], full.at[stage])

        for index in range(stages):
            pl.when(index < num_parts)(functools.partial(load, jnp.int32(index)))

        def step(index, carry):
            mixed, highest, total = carry
            stage = lax.rem(index, np.int32(stages))
            plgpu.barrier_wait(full.at[stage])
            part = plgpu.load(part_smem.at[stage], layout=plgpu.Layout.WGMMA)
            score = plgpu.load(part_lse_smem.at[stage], layout=_BY_ROW)
            plgpu.barrier_arrive(free.at[stage])  # all threads arrive: the stage is in their registers
            plgpu.barrier_wait(free.at[stage])
            pl.when(index + stages < num_parts)(functools.partial(load, index + stages))
            new_highest = jnp.maximum(highest, score)
            shrink = jnp.exp(highest - new_highest)
            weight = jnp.exp(score - new_highest)
            mixed = mixed * lax.broadcast_in_dim(shrink, mixed.shape, [0])
            mixed += part * lax.broadcast_in_dim(weight, mixed.shape, [0])
            return mixed, new_highest, total * shrink + weight

        zeros = plgpu.layout_cast(jnp.zeros((_TILE, columns), jnp.float32), plgpu.Layout.WGMMA)
        begin = [plgpu.layout_cast(jnp.full((_TILE,), x, jnp.float32), _BY_ROW) for x in (_LOWEST, 0.0)]
        mixed, highest, total = lax.fori_loop(0, num_parts, step, (zeros, *begin))
        divisor = jnp.where(total > 0, total, 1.0)
        out_smem[...] = (mixed / lax.broadcast_in_dim(divisor, mixed.shape, [0])).astype(dtype)
        lse_smem[...] = jnp.where(total > 0, highest + jnp.log(divisor), -jnp.inf)
        plgpu.commit_smem()
        for head in range(lines // padded):  # the padding between heads stays
            heads = pl.ds((tile * (lines // padded) + head) * group, group)
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(head * padded, group)], out_ref.at[row, heads, tile_columns])
        pl.when(column == 0)(lambda: plgpu.copy_smem_to_gmem(lse_smem.at[used], merged_lse_ref.at[row, tile_lines]))
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        merged,
        plgpu.SMEM((stages, _TILE, columns), jnp.float32),
        plgpu.SMEM((stages, _TILE), jnp.float32),
        plgpu.SMEM((_TILE, columns), dtype),
        plgpu.SMEM((_TILE,), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        collective_axes="warpgroup",
    )
