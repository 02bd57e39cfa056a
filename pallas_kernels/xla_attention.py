# SPDX-License-Identifier: Apache-2.0
"""The attention of `pallas_kernels.xla`, with its shape legend: W tiles of C queries, all of the same row.

A single loop over tiles of slots keeps a running softmax in float32. Its trip count depends on the longest row, not on
the width of the tables. It reads only the blocks in use. If a row of a decode step is much longer than the mean, the
rows are first cut into parts of about equal length (flash-decoding), so the short rows do not go through the long row's
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import lowers_for
from pallas_kernels.by_token import head_shape, is_by_token
from pallas_kernels.loops import fori_loop, unless_mapped, varying
from pallas_kernels.schedule import is_skewed, query_tiles, split_lengths

# The initial running maximum. It is finite, so score - maximum is never inf - inf.
_LOWEST = np.float32(-1e30)
# Decode cuts rows into parts only if a row can have this many tiles, and only for this number of rows. With fewer rows,
# the longest row is hardly longer than the mean. With more rows, the merge costs too much, because it is quadratic in
# the number of rows.
_TILES_IN_PARTS = 16
_ROWS_IN_PARTS = range(8, 257)
# The smallest and largest number of a row's queries in a tile. Each tile reads the row's K/V once.
_QUERY_TILES = 16, 64


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    sink_tokens: int = 0,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    scales: jax.Array | None = None,
    values: int | None = None,
    return_lse: bool = False,
    fixed_split: bool = False,
    attend: Callable[..., Any] | None = None,
):
    """Attention of a query token per row, the row's last token, over the row's paged K/V.

    Args:
      q: [R, Q, D]; query heads g * Q / K to (g + 1) * Q / K - 1 share kv head g.
      pool: [N + 1, L, 2, K, P, D].
      layer: i32[]; the layer's index in the pool.
      tables: i32[R, M]; pool rows.
      lengths: i32[R]; the number of tokens that a row attends to, including the query's. Rows of length 0 give zeros.
      scale: factor on the scores.
      window: a token attends to the last `window` tokens, itself included. None means no limit.
      sink_tokens: with a window a token attends to the row's first `sink_tokens` tokens too. The table then has to lack
        the blocks between these tokens and the window, and `lengths` their tokens: all blocks of a row are read.
      soft_cap: a soft cap c replaces every score by c * tanh(score / c). None disables it.
      sinks: f32[Q]; an additional logit per query head in the softmax's denominator, without a value.
      scales: f32[N + 1, L, 2, K, P] of a quantised pool. None means the pool is not quantised.
      values: the number of leading columns of K that are V, for a pool of latents. None means K and V are separate.
      return_lse: whether to return the logarithm of the softmax's denominator too.
      fixed_split: whether a row's result must have the same bits whatever the other rows are. If so, no row is cut into
        parts, however long it is.
      attend: a function to compute the tiles. Defaults to the loops below.

    Returns:
      [R, Q, D] like q, or [R, Q, values]. With `return_lse` also f32[R, Q], -inf where the denominator is empty.
    """
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "scales": scales, "values": values}
    options["sink_tokens"] = sink_tokens
    reach = None if sink_tokens else window
    shape = head_shape(pool.shape, q.shape[-1])
    tile = _tile_blocks(q.shape[0], shape) * shape[4]

    def uncut():
        tiles = q[:, None], pool, layer, tables, lengths - 1, (lengths > 0).astype(jnp.int32)
        return (attend or _attend)(*tiles, sinks=sinks, **options)

    def in_parts():
        return _attend_parts(q, pool, layer, tables, lengths, sinks, tile, **options)

    max_slots = tables.shape[1] * shape[4]
    max_slots = max_slots if reach is None else min(max_slots, reach)
    if attend is None and not fixed_split and q.shape[0] in _ROWS_IN_PARTS and max_slots >= _TILES_IN_PARTS * tile:
        out, lse = lax.cond(unless_mapped(is_skewed(lengths, tile, reach)), in_parts, uncut)
    else:
        out, lse = uncut()
    return (out[:, 0], lse[:, 0]) if return_lse else out[:, 0]


def prefill_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    tables: jax.Array,
    lengths: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    max_count: int,
    scale: float,
    window: int | None = None,
    sink_tokens: int = 0,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    scales: jax.Array | None = None,
    values: int | None = None,
    return_lse: bool = False,
    stride: int = 1,
    offset: jax.Array | int = 0,
    attend: Callable[..., Any] | None = None,
):
    """Causal attention of each row's last tokens, any number of them, over the row's paged K/V.

    Args:
      q: [T, Q, D]; row r's queries are q[starts[r] : starts[r] + counts[r]]. The rest is padding.
      pool: [N + 1, L, 2, K, P, D].
      layer: i32[].
      tables: i32[R, M]; pool rows.
      lengths: i32[R]; the number of tokens of each row, including its queries.
      starts: i32[R]; ascending.
      counts: i32[R]; at most the row's length.
      max_count: static bound on counts.
      scale: see `decode_attention` for this and the following arguments.
      window: the number of tokens that a token attends to, or None.
      sink_tokens: the number of first tokens seen whatever the window.
      soft_cap: bound of the scores, or None.
      sinks: f32[Q], or None.
      scales: f32[N + 1, L, 2, K, P], or None.
      values: the number of V's columns in a latent, or None.
      return_lse: whether to return the logarithm of the softmax's denominator too.
      stride: slot j of a row holds its token j * stride + `offset`, so a row's K/V can be divided among `stride` pools.
        A stride above 1 excludes a window.
      offset: i32[]; from 0 to stride - 1.
      attend: a function to compute the tiles. Defaults to the loops below.

    Returns:
      [T, Q, D] like q, or [T, Q, values], zeros where q is padding. With `return_lse` also f32[T, Q], undefined where q
      is padding.
    """
    tokens = q.shape[0]
    min_width, max_width = _QUERY_TILES
    width = min(
        max_count, max(min_width, min(-(-tokens // counts.shape[0]), max_width))
    )  # the mean number of a row's tokens, within these bounds
    work = query_tiles(tokens, lengths, starts, counts, max_count, width)
    token = work.token[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    out, lse = (attend or _attend)(
        q.at[token].get(mode="clip", wrap_negative_indices=False),
        pool,
        layer,
        tables[work.row],
        work.position,
        work.count,
        scale=scale,
        window=window,
        sink_tokens=sink_tokens,
        soft_cap=soft_cap,
        sinks=sinks,
        scales=scales,
        values=values,
        stride=stride,
        offset=offset,
    )
    # Maps queries back to tokens: token t is query `offset` of its row.
    row = _sum(jnp.arange(tokens, dtype=jnp.int32)[:, None] >= starts[None, :]) - 1
    offset = jnp.arange(tokens, dtype=jnp.int32) - starts[row]
    tiles = -(-counts // width)
    index = (jnp.cumsum(tiles, dtype=jnp.int32) - tiles)[row] * width + offset
    is_query = (row >= 0) & (offset < counts[row])
    out, lse = (x.reshape(-1, *x.shape[2:]).at[index].get(mode="clip", wrap_negative_indices=False) for x in (out, lse))
    out = jnp.where(is_query[:, None, None], out, jnp.zeros((), q.dtype))
    return (out, lse) if return_lse else out


def _attend_parts(q, pool, layer, tables, lengths, sinks, tile, **options):
    """`decode_attention` with long rows cut into parts of whole tiles: [R, 1, Q, D] and f32[R, 1, Q], as `_attend`."""
    num_rows, heads = q.shape[:2]
    reach = None if options["sink_tokens"] else options["window"]
    work, _ = split_lengths(lengths, tile, 2 * num_rows, reach)

    def attend(work):
        tiles = q[work.row][:, None].astype(jnp.float32), pool, layer, tables[work.row], work.position
        count = (work.begin < work.end).astype(jnp.int32)
        return _attend(*tiles, count, part=(work.begin, work.end), sinks=None, **options)

    # Runs R parts at a time, for R rows. After the last part of the list the loops end.
    out, lse = lax.map(attend, jax.tree.map(lambda x: x.reshape(-1, num_rows), work))
    out = out.reshape(-1, *out.shape[-2:]).swapaxes(0, 1)
    lse = lse.reshape(-1, heads).T
    # The merge is attention too: the parts are the slots, with their lse as scores, and the rows are the queries.
    is_part_of_row = work.row[None] == jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    score = jnp.where(is_part_of_row[None], lse[:, None], -jnp.inf)
    start = _start(sinks, (1, heads, num_rows, 1), out.shape[-1])
    highest, denominator, mixed = _fold(start, score[None], out[None], jnp.ones((1,), bool), None)
    out = _mean(mixed, denominator)
    lse = highest + jnp.log(denominator)
    return out.transpose(2, 0, 1, 3).astype(q.dtype), lse.transpose(2, 0, 1)


def _attend(
    q,
    pool,
    layer,
    tables,
    first,
    count,
    *,
    scale,
    window,
    sink_tokens,
    soft_cap,
    sinks,
    scales,
    values,
    stride=1,
    offset: Any = 0,
    part=None,
):
    """Attention of W tiles of C queries, each over the K/V of a table, tile of slots by tile of slots.

    q [W, C, Q, D] are the queries at positions first i32[W], first + 1 and so on, over pool [N + 1, L, 2, K, P, D] by
    tables i32[W, M]. The leading count i32[W] queries of a tile are real, and the others return zeros. `part` has a
    begin, at the beginning of a block, and an end, i32[W] each: a tile sees no slots outside. See `decode_attention`
    for the other arguments. Returns [W, C, Q, D], or [W, C, Q, values], and the log-sum-exp f32[W, C, Q].
    """
    num_tiles, chunk, heads, width = q.shape
    shape = head_shape(pool.shape, width)
    kv_heads, size = shape[3:5]
    run = _run(size, width) if values is None else size
    precision = _precision(pool)
    split = (num_tiles, kv_heads, chunk, heads // kv_heads)  # the axes of a score before its slot
    queries = (q.astype(jnp.float32) * np.float32(scale)).reshape(num_tiles, chunk, kv_heads, -1, width)
    queries = queries.swapaxes(1, 2).reshape(num_tiles, kv_heads, -1, width)
    position, length = seen_slots(first, count, chunk, window, stride, offset)
    first = first if stride == 1 else position[:, 0]
    blocks = min(_tile_blocks(num_tiles, shape), tables.shape[1])
    tile_slots = blocks * size
    reach = None if sink_tokens else window
    base, length, num_unmasked, num_steps = _extent(first, length, count, reach, part, size, tile_slots)
    tables = tables if reach is None and part is None else _columns(tables, base, tables.shape[1])

    def fetch(row):
        kv = rows(pool, row, run, jnp.float32).reshape(num_tiles, kv_heads, tile_slots, width)
        return kv if scales is None else kv * rows(scales, row, run, jnp.float32).reshape(*kv.shape[:3], 1)

    def read(row, stride, block):  # K of a tile of blocks, and a function that gives V
        if is_by_token(pool):
            keys, v = _by_token(pool, layer, block, run, width)
            return keys, lambda row: v
        keys = fetch(row)
        # V of latents is K with its other columns: a part would be copied.
        return keys, lambda row: fetch(row + stride) if values is None else keys

    def step(tile, carry, block, live, masked):
        row, stride, order = _runs(shape, run, layer, block)
        slot = ((base + tile * blocks) * size)[:, None] + order[None]
        keys, fetch_values = read(row, stride, block)
        score = _scores(queries, keys, precision)
        if soft_cap is not None:
            score = np.float32(soft_cap) * jnp.tanh(score / np.float32(soft_cap))
        is_seen = _seen(slot, position, length if masked else None, window, sink_tokens)
        if is_seen is not None:
            score = jnp.where(is_seen[:, None, :, None], score.reshape(*split, -1), -jnp.inf).reshape(score.shape)
        # With the barrier, V is fetched after the use of K, into the same memory. Both would not fit into a CPU's
        # caches.
        score, row = lax.optimization_barrier((score, row))
        v = fetch_values(row)
        if masked:  # 0 * NaN is NaN
            v = jnp.where((slot < length[:, None])[:, None, :, None], v, 0.0)
        return _fold(carry, score, v, live, precision)

    def unmasked_step(i, carry):
        block = lax.dynamic_slice_in_dim(tables, i * blocks, blocks, axis=1, allow_negative_indices=False)
        return step(i, carry, block, i < num_unmasked, masked=False)

    def masked_step(i, carry):
        tile = num_unmasked + i
        return step(tile, carry, _columns(tables, tile * blocks, blocks), tile < num_steps, masked=True)

    carry = varying((q, pool, tables, first))(_start(sinks, split, width))
    carry = fori_loop(0, jnp.max(num_unmasked), unmasked_step, carry)
    highest, denominator, mixed = fori_loop(0, jnp.max(num_steps - num_unmasked), masked_step, carry)
    is_query = (jnp.arange(chunk, dtype=jnp.int32)[None] < count[:, None])[:, :, None, None]
    out = _mean(mixed, denominator).reshape(*split, width).swapaxes(1, 2).reshape(q.shape).astype(q.dtype)
    out = out if values is None else out[..., :values]
    lse = (highest + jnp.log(denominator)).reshape(split).swapaxes(1, 2).reshape(q.shape[:-1])
    return jnp.where(is_query, out, jnp.zeros((), q.dtype)), lse


def _extent(first, length, count, window, part, size, tile_slots):
    """The slots that W tiles of queries go through, all i32[W], from queries at `first` and `length` slots.

    They start at block `base`, the first that the first query sees. Apart from the window, every query sees all slots
    of the first `num_unmasked` tiles. The other tiles, up to `num_steps`, need masks. Returns base, length,
    num_unmasked and num_steps.
    """
    base = jnp.zeros_like(first) if window is None else jnp.maximum(first - (window - 1), 0) // size
    if part is not None:
        begin, end = part
        base = jnp.maximum(base, begin // size)
        first = jnp.minimum(first, end - 1)
        length = jnp.minimum(length, end)
    num_unmasked = jnp.where(count > 0, (first + 1 - base * size) // tile_slots, 0)
    return base, length, num_unmasked, -((base * size - length) // tile_slots)


def _columns(tables, start, count):
    """The next `count` columns of each table i32[W, M] from start i32[W]. Beyond a table its last column repeats."""
    column = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.take_along_axis(tables, column, axis=1, mode="clip")


def seen_slots(first, count, chunk, window, stride, offset):
    """The slots that W tiles of C queries see, where slot j holds token j * `stride` + `offset`.

    Returns the last slot i32[W, C] that each query sees, or -1, and the number i32[W] of slots that the real queries
    see.
    """
    position = first[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
    length = jnp.where(count > 0, first + count, 0)
    if stride == 1:
        return position, length
    if window is not None:
        raise NotImplementedError(f"xla: got a window of {window} with a stride of {stride}, wanted one of the two")
    return (position - offset) // stride, (length - offset + stride - 1) // stride


def _runs(shape, run, layer, block):
    """The rows with the K of a tile of blocks i32[W, B], in a pool seen as rows with a run of slots each.

    A tile interleaves its blocks: the first run of every block, then the second run of every block, and so on.
    Attention does not depend on the order of slots. Reading several blocks in turn keeps more memory requests of a CPU
    in flight than reading block after block.

    Returns:
      Rows i32[W, K, P / run, B], the number of rows from K to V, 0 for latents, and the tile's slots in its order,
      i32[B * P].
    """
    _, layers, parts, kv_heads, size, _ = shape
    num_runs = size // run
    row = (block * layers + layer) * (parts * kv_heads)
    row = row[:, None] + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    row = (row * num_runs)[:, :, None] + jnp.arange(num_runs, dtype=jnp.int32)[None, None, :, None]
    order = np.arange(block.shape[1] * size, dtype=np.int32).reshape(block.shape[1], num_runs, -1)
    return row, (parts - 1) * kv_heads * num_runs, order.swapaxes(0, 1).reshape(-1)


def _by_token(pool, layer, block, run, width):
    """K and V f32[W, K, B * P, D] of a tile of blocks i32[W, B] in a pool by token, in the order of `_runs`."""
    gathered = pool.at[block, layer].get(mode="promise_in_bounds", wrap_negative_indices=False)
    num_tiles, blocks, size, _, row_width = gathered.shape
    num_runs = size // run
    if row_width > width and lowers_for("tpu"):
        return _narrow_heads(gathered.reshape(num_tiles, blocks, num_runs, run, -1, row_width), width)
    gathered = lax.optimization_barrier(gathered.astype(jnp.float32))
    kv = gathered.reshape(num_tiles, blocks, num_runs, run, -1, 2, width)
    return kv.transpose(5, 0, 4, 2, 1, 3, 6).reshape(2, num_tiles, -1, blocks * size, width)


def _narrow_heads(tokens, width):
    """K and V f32[W, K, B * P, D] of tokens [W, B, P / run, run, R, row width], where heads share a row.

    They are cut out of the rows: a TPU fills up an axis of width D to 128 elements, in each step of a reshape.
    """
    num_tiles, blocks, num_runs, run, num_rows, row_width = tokens.shape
    num_slots = blocks * num_runs * run
    tokens = tokens.transpose(0, 4, 2, 1, 3, 5).reshape(num_tiles, num_rows, num_slots, row_width)
    parts = [tokens[..., begin : begin + width] for begin in range(0, row_width, width)]
    by_row = (jnp.stack(part, axis=2).astype(jnp.float32) for part in (parts[::2], parts[1::2]))
    keys, values = (part.reshape(num_tiles, -1, num_slots, width) for part in by_row)
    return keys, values


def _run(size: int, width: int) -> int:
    """The number of slots in a run: the smallest divisor of the block size with 128 elements. Shorter runs are slow."""
    return min(run for run in range(1, size + 1) if size % run == 0 and (run * width >= 128 or run == size))


def _precision(pool):
    """The precision of products with a pool's K and V. None means the precision of the platform.

    A TPU multiplies float32 as bfloat16 by default. XLA would then convert all of a float32 pool before the loop.
    """
    return lax.Precision.HIGHEST if pool.dtype == jnp.float32 and lowers_for("tpu") else None


def _scores(queries, keys, precision):
    """Scores f32[W, K, X, T] from queries [W, K, X, D] and keys [W, K, T, D].

    Up to four queries are multiplied separately, because XLA's CPU backend rearranges K for a product of two to four
    rows.
    """
    if queries.shape[2] > 4:
        return jnp.einsum("wkqd,wktd->wkqt", queries, keys, precision=precision, preferred_element_type=jnp.float32)
    scores = [jnp.einsum("wkd,wktd->wkt", query, keys, precision=precision) for query in jnp.unstack(queries, axis=2)]
    return jnp.stack(scores, axis=2)


def _fold(carry, score, values, live, precision):
    """Folds scores [W, K, X, T] and values [W, K, T, D] into the running softmax of the live tiles bool[W]."""
    highest, denominator, mixed = carry
    new_highest = jnp.maximum(highest, jnp.max(score, axis=-1))
    weight = jnp.exp(score - new_highest[..., None])
    shrink = jnp.exp(highest - new_highest)
    update = jnp.einsum("wkqt,wktd->wkqd", weight, values, precision=precision, preferred_element_type=jnp.float32)
    live = live[:, None, None]
    return (
        jnp.where(live, new_highest, highest),
        jnp.where(live, denominator * shrink + jnp.sum(weight, axis=-1), denominator),
        jnp.where(live[..., None], mixed * shrink[..., None] + update, mixed),
    )


def _mean(mixed, denominator):
    """The mean of the values, or zero without values."""
    return mixed / jnp.where(denominator > 0, denominator, 1.0)[..., None]


def _start(sinks, split, width):
    """The initial maximum, denominator and mixed values. A sink is a first score with a value of zero."""
    num_tiles, kv_heads, chunk, group = split
    shape = (num_tiles, kv_heads, chunk * group)
    if sinks is None:
        highest = jnp.full(shape, _LOWEST)
        denominator = jnp.zeros(shape, jnp.float32)
    else:
        sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, 1, group)
        highest = jnp.broadcast_to(sinks, split).reshape(shape)
        denominator = jnp.ones(shape, jnp.float32)
    return highest, denominator, jnp.zeros((*shape, width), jnp.float32)


def _seen(slot, position, length, window, sink_tokens):
    """Whether bool[W, C, T] the queries at positions i32[W, C] see the slots i32[W, T]. None means all."""
    slot = slot[:, None]
    position = position[:, :, None]
    in_window = None if window is None else slot > position - window
    if in_window is not None and sink_tokens:
        in_window |= slot < sink_tokens
    if length is None:
        return in_window
    is_seen = (slot <= position) & (slot < length[:, None, None])
    return is_seen if in_window is None else is_seen & in_window


def rows(array: jax.Array, row: jax.Array, run: int, dtype) -> jax.Array:
    """Rows of a pool, or of its scales, seen as a matrix with a run of slots in each row.

    The barrier keeps XLA from fusing later operations into the gather. Its inner loop would no longer be a long run,
    and on a CPU it would take up to twice as long.
    """
    matrix = array.reshape(-1, run * math.prod(array.shape[5:]))
    gathered = matrix.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return lax.optimization_barrier(gathered.astype(dtype))


def _tile_blocks(num_rows: int, shape: tuple[int, ...]) -> int:
    """The number of blocks in a tile of each of `num_rows` rows, for a pool of this shape."""
    _, _, _, kv_heads, size, width = shape
    return max(_slots_per_tile(num_rows * kv_heads * width) // size, 1)


def _slots_per_tile(elements: int) -> int:
    """The number of slots of each row in a tile. Over all rows and heads a slot has `elements` elements.

    A larger tile would not stay in a CPU's caches, and a smaller tile would make more steps, each with a fixed cost.
    """
    return min(max(2**20 // elements, 64), 128)


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, dtype=jnp.int32)
