# SPDX-License-Identifier: Apache-2.0
"""The Mosaic GPU kernel of paged attention. Shapes use the legend of `pallas_kernels.xla` and of `schedule`.

It serves decode and prefill. As in `triton.attention`, a thread block takes a piece of work and a kv head, and packs
the head's query heads into the rows of the matrix products, query after query. Its warpgroups have two roles:

    loader     ids of blocks | K tile | V tile | K tile | V tile | ...       by TMA, some tiles ahead
    worker     wait for K | S = Q K' | softmax | wait for V | O += P V | ...       64 rows of Q; products by wgmma

K and V each have a ring of stages in shared memory: `full[s]` signals a filled stage s, `free[s]` signals the end of
its use by all workers. Two workers take turns (ping-pong): a worker uses the tensor cores while the other computes its
softmax.

K/V with a byte per element arrive with their factors. The worker converts each tile for wgmma, in shared memory. The
factors of K scale the scores, and those of V the weights.

Source: the roles and the turns come from FlashAttention-3 (Shah et al., 2024).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_worker import ROWS, Piece, Static, attend_tiles
from pallas_kernels.schedule import Work
from pallas_kernels.tuning import Tiles


def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    tables: jax.Array,
    work: Work,
    tiles: Tiles,
    group: int,
    dtype,
    *,
    scale,
    window,
    sink_tokens,
    soft_cap,
    sinks,
    scales=None,
    interpret,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every piece of work. The results of pieces with count 0 are never written.

    Args:
      q: [W, K, X, D]; row x is query x // G of the piece, in head x % G of the group. At most 64 rows per worker.
      pool: [N + 1, L, 2, K, P, D].
      layer: i32[].
      tables: i32[R, M].
      work: i32[W] each.
      tiles: the kernel's tile sizes.
      group: G, the number of query heads per kv head.
      dtype: the result's dtype.
      scale: see `xla.decode_attention` for this and the following arguments.
      window: the number of tokens that a token attends to, or None.
      sink_tokens: the number of first tokens seen whatever the window.
      soft_cap: bound of the scores, or None.
      sinks: f32[Q], or None.
      scales: f32[N + 1, L, 2, K, P] of a quantised pool, or None. Needs a single worker.
      interpret: whether to simulate the kernel.

    Returns:
      [W, K, X, D] and its log-sum-exp f32[W, K, X].
    """
    pieces, kv_heads, rows, width = q.shape
    size = pool.shape[4]
    packed = tiles.workers * ROWS
    static = Static(
        pool.shape, tiles, group, scale, window, sink_tokens, soft_cap, sinks is not None, scales is not None
    )
    if sinks is None:
        sinks = jnp.zeros((kv_heads, packed), jnp.float32)
    else:  # row x has the sink of head x % G
        sinks = jnp.resize(sinks.astype(jnp.float32).reshape(kv_heads, group).T, (packed, kv_heads)).T
    run = min(size, tiles.slots)

    def kernel(*refs, **scratch):
        _kernel(*refs, static=static, **scratch)

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((pieces, kv_heads, rows, width), dtype),
            jax.ShapeDtypeStruct((pieces, kv_heads, rows), jnp.float32),
        ),
        scratch_types=_scratch(tiles, run, width, q.dtype, dtype, interpret, None if scales is None else pool.dtype),
        grid=(kv_heads, pieces),
        grid_names=("head", "piece"),
        num_threads=tiles.workers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=1024, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name="mosaic_prefill_attention" if tiles.workers > 1 else "mosaic_decode_attention",
    )(
        work.row,
        work.count,
        work.position,
        work.begin,
        work.end,
        jnp.full((1,), layer, jnp.int32),
        q,
        pool.reshape(-1, run, width),
        tables,
        sinks,
        *([] if scales is None else [scales.reshape(-1, run)]),
    )


def _scratch(tiles: Tiles, run: int, width: int, dtype, result, interpret: bool, stored: Any = None) -> dict[str, Any]:
    """Buffers in shared memory, and barriers: q_smem [workers, 64, D], k_smem and v_smem [stages, slots, D], and so on.

    The barriers are arrays too, with an entry per worker or per stage of a ring.
    """

    def matrices(*shape, dtype=dtype):
        """A buffer [..., rows, columns] laid out for wgmma and TMA."""
        columns = shape[-1]
        swizzle = plgpu.find_swizzle(columns * jnp.dtype(dtype).itemsize * 8)
        tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
        swizzled = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzled))

    slots, stages, workers = tiles
    tile = (stages, slots, width) if stored is None else (slots, width)
    arrivals = slots // run * (1 if stored is None else 2)
    scratch = {
        "q_smem": matrices(workers, ROWS, width),
        "k_smem": matrices(*tile),
        "v_smem": matrices(*tile),
        "lse_smem": plgpu.SMEM((workers, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=workers),
        "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        "turn": plgpu.Barrier(num_arrivals=workers),
    }
    if stored is not None:
        scratch |= {name: matrices(stages, slots, width, dtype=stored) for name in ("k_bytes", "v_bytes")}
        scratch |= {name: plgpu.SMEM((stages, slots), jnp.float32) for name in ("k_scales", "v_scales")}
    if result != dtype:  # else the result overwrites Q
        scratch["out_smem"] = matrices(workers, ROWS, width, dtype=result)
    if interpret:
        scratch["p_smem"] = matrices(workers, ROWS, slots)
    return scratch


def _kernel(
    row_ref,
    count_ref,
    position_ref,
    begin_ref,
    end_ref,  # i32[W]
    layer_ref,  # i32[1]
    q_ref,  # [W, K, X, D]
    kv_ref,  # [.., run, D]; contiguous slots: all of a block, or as many as a tile has
    tables_ref,  # i32[R, M]
    sinks_ref,  # f32[K, workers * 64]
    *refs,  # scales f32[.., run], if any; [W, K, X, D]; f32[W, K, X]
    static: Static,
    **scratch,
):
    *scales_refs, out_ref, lse_ref = refs
    kv_refs = (kv_ref, *scales_refs)
    head = lax.axis_index("head")
    piece_index = lax.axis_index("piece")
    warpgroup = lax.axis_index("warpgroup")
    slots = static.tiles.slots
    workers = static.tiles.workers
    window = None if static.sink_tokens else static.window

    def piece() -> Piece:
        """The piece. Each role computes it separately, to save registers."""
        first = position_ref[piece_index]
        begin = begin_ref[piece_index]
        end = end_ref[piece_index]
        start = 0 if window is None else jnp.maximum(first - (window - 1), 0) // slots * slots
        is_first = begin <= start
        begin = jnp.maximum(begin, start)
        return Piece(first, begin, end, lax.div(jnp.maximum(end - begin, 0) + (slots - 1), np.int32(slots)), is_first)

    @pl.when((count_ref[piece_index] > 0) & (warpgroup == workers))
    def _():
        if workers > 1:  # setmaxnreg: the workers get the registers that the loader does not need
            plgpu.set_max_registers(40, action="decrease")
        _load(kv_refs, tables_ref.at[row_ref[piece_index]], head, layer_ref[0], piece(), static, **scratch)

    @pl.when((count_ref[piece_index] > 0) & (warpgroup < workers))
    def _():
        if workers > 1:
            plgpu.set_max_registers(232, action="increase")
        refs = (
            q_ref.at[piece_index, head],
            sinks_ref.at[head],
            out_ref.at[piece_index, head],
            lse_ref.at[piece_index, head],
        )
        attend_tiles(*refs, warpgroup, piece(), static, **scratch)


def _load(
    kv_refs,  # [.., run, D], and f32[.., run]
    table_ref,  # i32[M]
    head,
    layer,
    piece: Piece,
    static: Static,
    *,
    k_smem,
    v_smem,
    k_full,
    v_full,
    k_free,
    v_free,
    k_bytes=None,
    v_bytes=None,
    k_scales=None,
    v_scales=None,
    **_,
):
    """The loader: copies the piece's tiles of K and V into stages as they become free."""
    _, layers, _, kv_heads, size, _ = static.pool
    slots, stages, _ = static.tiles
    run = kv_refs[0].shape[1]
    k_targets: tuple[Any, ...] = (k_bytes, k_scales) if static.has_scales else (k_smem,)
    v_targets: tuple[Any, ...] = (v_bytes, v_scales) if static.has_scales else (v_smem,)
    last = table_ref.shape[0] - 1
    runs = size // run  # in a block

    def load_tile(tile_index, _):
        stage = lax.rem(tile_index, np.int32(stages))
        slot = piece.begin + tile_index * slots
        # All ids are read before the first wait.
        blocks = [table_ref[jnp.minimum((slot + i) // size, last)] for i in range(0, slots, run)]
        indices = [(((block * layers + layer) * 2) * kv_heads + head) * runs + slot % size // run for block in blocks]
        for offset, targets, full, free in (
            (0, k_targets, k_full.at[stage], k_free.at[stage]),
            (kv_heads * runs, v_targets, v_full.at[stage], v_free.at[stage]),
        ):
            pl.when(tile_index >= stages)(functools.partial(plgpu.barrier_wait, free))
            for i, index in enumerate(indices):
                for ref, smem in zip(kv_refs, targets, strict=True):
                    plgpu.copy_gmem_to_smem(ref.at[index + offset], smem.at[stage, pl.ds(i * run, run)], full)

    lax.fori_loop(0, piece.tiles, load_tile, None)
