# SPDX-License-Identifier: Apache-2.0
"""The workers of the Mosaic GPU kernel of paged attention. `mosaic_attention` describes both roles and has the loader.

A worker is a warpgroup with 64 rows of Q. For each tile of K/V it computes a product, a step of the running softmax in
base 2, and another product.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tuning import Tiles

ROWS = 64  # of a worker's products: the M of wgmma
_LOWEST = np.float32(-1e30)  # finite: score - maximum is never inf - inf
_LOG2E = np.float32(math.log2(math.e))
_LN2 = np.float32(math.log(2))
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


class Static(NamedTuple):
    """The static parameters of a kernel."""

    pool: tuple[int, ...]  # [N + 1, L, 2, K, P, D]
    tiles: Tiles
    group: int  # G
    scale: float
    window: int | None
    sink_tokens: int  # seen whatever the window
    soft_cap: float | None
    has_sinks: bool
    has_scales: bool = False  # K/V have a byte per element, and a factor per slot


class Piece(NamedTuple):
    """A piece of work, as scalars."""

    first: jax.Array  # the position of its first query
    begin: jax.Array  # its first slot
    end: jax.Array  # the slot after its last slot
    tiles: jax.Array  # the number of tiles from `begin` to `end`
    is_first: jax.Array  # whether it begins its row's K/V


def attend_tiles(
    q_ref,  # [X, D]
    sinks_ref,  # f32[workers * 64]
    out_ref,  # [X, D]
    lse_ref,  # f32[X]
    worker,
    piece: Piece,
    static: Static,
    *,
    q_smem,
    k_smem,
    v_smem,
    lse_smem,
    q_full,
    k_full,
    v_full,
    k_free,
    v_free,
    turn,
    out_smem=None,
    p_smem=None,
    k_bytes=None,
    v_bytes=None,
    k_scales=None,
    v_scales=None,
):
    """A worker: attention of its rows of Q over the loader's tiles."""
    slots, stages, workers = static.tiles
    q = q_smem.at[worker]
    rows = pl.ds(worker * ROWS, min(q_ref.shape[0], ROWS))
    _load_queries(q_ref.at[rows], q.at[pl.ds(0, rows.size)], q_full.at[worker])
    row = worker * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_BY_ROW)
    position = piece.first + row // static.group

    def take_turns():
        if workers > 1:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    def step(tile_index, carry, masked):
        mixed, highest, total = carry
        stage = lax.rem(tile_index, np.int32(stages))
        slot = piece.begin + tile_index * slots
        plgpu.barrier_wait(k_full.at[stage])
        k, factors = _operand(k_smem, k_bytes, k_scales, k_free, stage)
        score = _products(q, k, take_turns)
        if factors is None:
            plgpu.barrier_arrive(k_free.at[stage])
        else:
            score *= lax.broadcast_in_dim(factors, score.shape, [1])
        score, factor = _cap(score, static)
        if masked:
            low = None if static.window is None else position - static.window - slot
            sink_end = static.sink_tokens - slot if static.sink_tokens else None
            score = _mask(score, low, jnp.minimum(position, piece.end - 1) - slot, sink_end)
        new_highest = jnp.maximum(highest, jnp.max(score, axis=1) * factor)
        shrink = jnp.exp2(highest - new_highest)
        weight = jnp.exp2(score * factor - lax.broadcast_in_dim(new_highest, score.shape, [0]))
        mixed *= lax.broadcast_in_dim(shrink, mixed.shape, [0])
        total = total * shrink + jnp.sum(weight, axis=1)
        plgpu.barrier_wait(v_full.at[stage])
        v, factors = _operand(v_smem, v_bytes, v_scales, v_free, stage)
        if factors is not None:
            scaled = weight * lax.broadcast_in_dim(factors, weight.shape, [1])
            # The factor of an unseen slot may be NaN.
            weight = jnp.where(weight > 0, scaled, 0.0) if masked else scaled
        weight = weight.astype(q.dtype)
        take_turns()
        if masked:
            _clean_edges(v, worker, slot, piece, static)
        mixed = _accumulate(mixed, weight, v, None if p_smem is None else p_smem.at[worker])
        if factors is None:
            plgpu.barrier_arrive(v_free.at[stage])
        return mixed, new_highest, total

    carry = _begin(sinks_ref, worker, q.shape, piece, static)
    pl.when(worker == 1)(take_turns)
    carry = _over_tiles(step, carry, piece, static)
    pl.when(worker == 0)(take_turns)
    out = q if out_smem is None else out_smem.at[worker]  # over Q, if it has the same dtype
    _write(out_ref.at[rows], lse_ref.at[rows], out, lse_smem, worker, carry)


def _operand(smem, raw, scales, free, stage) -> tuple[Any, Any]:
    """A tile as the product wants it, and its factors f32[slots]; None if it is the loader's, which is still in use.

    Bytes are converted into the tile `smem`, and their stage is free again. Between two conversions of K lies one of V,
    whose commit waits for all threads, and the other way round.
    """
    if raw is None:
        return smem.at[stage], None
    tile = plgpu.load(raw.at[stage], layout=plgpu.Layout.WGMMA_8BIT)
    if not jnp.issubdtype(raw.dtype, jnp.integer):  # the hardware converts fp8 to float16 alone
        tile = tile.astype(jnp.float16).astype(jnp.float32)
    smem[...] = tile.astype(smem.dtype)
    factors = plgpu.load(scales.at[stage], layout=_BY_COLUMN)
    plgpu.commit_smem()
    plgpu.barrier_arrive(free.at[stage])
    return smem, factors


def _load_queries(q_ref, q_smem, full) -> None:
    """Copies a worker's rows of Q into shared memory."""
    plgpu.copy_gmem_to_smem(q_ref, q_smem, full)
    plgpu.barrier_wait(full)


def _begin(sinks_ref, worker, shape: tuple[int, int], piece: Piece, static: Static):
    """The initial state of the running softmax: mixed f32[64, D], highest f32[64], total f32[64]."""
    highest = plgpu.layout_cast(jnp.full((ROWS,), _LOWEST), _BY_ROW)
    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _BY_ROW)
    if static.has_sinks:  # an additional score with a value of zero, in the first part of the row's K/V
        sink = plgpu.load(sinks_ref.at[pl.ds(worker * ROWS, ROWS)], layout=_BY_ROW) * _LOG2E
        highest = jnp.where(piece.is_first, sink, highest)
        total = jnp.where(piece.is_first, 1.0, total)
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA), highest, total


def _over_tiles(step, carry, piece: Piece, static: Static):
    """Calls step(tile index, carry, masked) for all tiles of the piece. Only tiles at an edge are masked."""
    num_unmasked = 0
    slots = static.tiles.slots
    if static.window is None:  # every query sees all of these tiles
        num_unmasked = jnp.clip((jnp.minimum(piece.first + 1, piece.end) - piece.begin) // slots, 0, piece.tiles)
        carry = lax.fori_loop(0, num_unmasked, functools.partial(step, masked=False), carry)
    return lax.fori_loop(num_unmasked, piece.tiles, functools.partial(step, masked=True), carry)


def _products(q_ref, k_ref, take_turns):
    """Q K', f32[64, slots]. The turn ends when the product has begun."""

    def product(score_ref):
        plgpu.wgmma(score_ref, q_ref, k_ref.transpose((1, 0)))
        take_turns()
        return score_ref[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, k_ref.shape[0]), jnp.float32))


def _cap(score, static: Static):
    """Scores from products, and the factor for their conversion to base 2."""
    if static.soft_cap is None:
        return score, np.float32(static.scale) * _LOG2E
    # tanh(score / cap) by exp2, since the hardware's own tanh is too coarse; the factor has the cap
    score = 1 - 2 / (jnp.exp2(score * np.float32(2 * static.scale / static.soft_cap * _LOG2E)) + 1)
    return score, np.float32(static.soft_cap) * _LOG2E


def _mask(score, low, high, sink_end):
    """Scores [64, slots] with -inf outside the columns low[row] + 1 to high[row], or from column 0 if `low` is None.

    Columns below `sink_end` are seen too. None means there are no such columns.
    """
    column = plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=plgpu.Layout.WGMMA)
    is_seen = column <= lax.broadcast_in_dim(high, score.shape, [0])
    if low is not None:
        in_window = column > lax.broadcast_in_dim(low, score.shape, [0])
        is_seen &= in_window if sink_end is None else in_window | (column < sink_end)
    return jnp.where(is_seen, score, -jnp.inf)


def _accumulate(mixed, weight, v_ref, p_ref):
    """Returns mixed + weight @ V. The simulator's wgmma takes no operand from registers, so it uses p_ref."""
    if p_ref is None:

        def product(mixed_ref):
            plgpu.wgmma(mixed_ref, weight, v_ref)

        return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(mixed))

    def product_of_refs(update_ref):
        plgpu.wgmma(update_ref, p_ref, v_ref)
        return update_ref[...]

    p_ref[...] = weight
    plgpu.commit_smem()
    return mixed + pl.run_scoped(product_of_refs, plgpu.WGMMAAccumulatorRef(mixed.shape, jnp.float32))


def _clean_edges(v_ref, worker, slot, piece: Piece, static: Static) -> None:
    """Zeroes the rows of the V tile from `slot` on that no query of the piece sees."""
    low = 0 if static.window is None or static.sink_tokens else piece.first - (static.window - 1) - slot
    high = piece.end - slot
    # The first worker does it for both, because the second worker's turn comes later.
    has_unseen = (worker == 0) & ((low > 0) | (high < v_ref.shape[0]))
    pl.when(has_unseen)(functools.partial(_clean, v_ref, low, high))


def _clean(v_ref, low, high):
    """Zeroes the rows of a V tile outside `low` to `high` - 1, since they may be NaN, and 0 * NaN is NaN."""
    slots, width = v_ref.shape
    columns = 64 if width % 64 == 0 else width  # at a time, because registers are scarce here
    for i, j in itertools.product(range(0, slots, ROWS), range(0, width, columns)):
        part = v_ref.at[pl.ds(i, ROWS), pl.ds(j, columns)]
        values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA) + i
        part[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros((), values.dtype))
    plgpu.commit_smem()


def _write(out_ref, lse_ref, out_smem, lse_smem, worker, carry) -> None:
    """Writes the results of a worker's rows, and their log-sum-exp, from the running softmax."""
    mixed, highest, total = carry
    divisor = jnp.where(total > 0, total, 1.0)
    out_smem[...] = (mixed / lax.broadcast_in_dim(divisor, mixed.shape, [0])).astype(out_smem.dtype)
    lse_smem[worker] = jnp.where(total > 0, highest * _LN2 + jnp.log(divisor), -jnp.inf)
    plgpu.commit_smem()
    stored = pl.ds(0, out_ref.shape[0])
    plgpu.copy_smem_to_gmem(out_smem.at[stored], out_ref)
    plgpu.copy_smem_to_gmem(lse_smem.at[worker, stored], lse_ref)
    plgpu.wait_smem_to_gmem(0)
