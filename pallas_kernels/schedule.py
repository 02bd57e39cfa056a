# SPDX-License-Identifier: Apache-2.0
"""The schedule of attention, computed on the device: divides a batch of ragged rows into equal pieces of work.

Shapes use the legend of `pallas_kernels.xla`. W is the length of the list, a static bound on the number of pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Work(NamedTuple):
    """Pieces of work, each with queries of a single row over a part of its K/V. All arrays are i32[W].

    Attributes:
      row: the row of the block tables.
      token: the first query's index in q.
      count: the number of queries; 0 for a piece that only pads the list.
      position: the first query's position in its sequence; the others follow.
      begin: the first slot of the part of the K/V.
      end: the slot after the part's last slot.
    """

    row: jax.Array
    token: jax.Array
    count: jax.Array
    position: jax.Array
    begin: jax.Array
    end: jax.Array


def split_lengths(lengths: jax.Array, tile: int, target: int, window: int | None = None) -> tuple[Work, jax.Array]:
    """Decode: cuts every row's K/V into parts of about total / `target` slots, so ragged rows fill a chip evenly.

    Args:
      lengths: i32[R].
      tile: parts are multiples of this number of slots.
      target: number of parts to aim for; there are at most `target` + R. With `target` <= R no row is cut.
      window: only the last `window` slots of a row count. None means all slots.

    Returns:
      The work, and i32[R + 1], the index of each row's first part. A row of length 0 has an empty part.
    """
    rows = lengths.shape[0]
    first = _first(lengths, tile, window)
    if target <= rows:
        return _parts(lengths, first, jnp.full((), 2**30, jnp.int32), rows)
    mean = -(-jnp.sum(lengths - first, dtype=jnp.int32) // target)
    return _parts(lengths, first, jnp.maximum(-(-mean // tile) * tile, tile), target + rows)


def is_skewed(lengths: jax.Array, tile: int, window: int | None = None) -> jax.Array:
    """Whether bool[] the longest row has more than three times the slots of the mean row, and of a tile.

    If so, running the parts of `split_lengths` with a target of 2 R, R parts at a time, takes fewer steps than the
    longest row. The arguments are as in `split_lengths`.
    """
    slots = lengths - _first(lengths, tile, window)
    mean = jnp.sum(slots, dtype=jnp.int32) // slots.shape[0]
    return jnp.max(slots) > 3 * jnp.maximum(mean, tile)


def _first(lengths: jax.Array, tile: int, window: int | None) -> jax.Array:
    """The first slot i32[R] of each row that counts, rounded down to the beginning of a tile."""
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // tile * tile


def _parts(lengths: jax.Array, first: jax.Array, part: jax.Array, size: int) -> tuple[Work, jax.Array]:
    """A list of `size` parts of `part` i32[] slots, from the first slot i32[R] of each row on."""
    rows = lengths.shape[0]
    parts = jnp.maximum(-(-(lengths - first) // part), 1)
    ends = jnp.cumsum(parts, dtype=jnp.int32)
    item = jnp.arange(size, dtype=jnp.int32)
    row = jnp.minimum(_sum(item[:, None] >= ends[None]), rows - 1)
    begin = first[row] + (item - (ends - parts)[row]) * part
    is_real = (item < ends[-1]).astype(jnp.int32)
    work = Work(row, row, is_real, lengths[row] - 1, begin, jnp.minimum(begin + part, lengths[row]))
    return work, jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])


def query_tiles(
    tokens: int, lengths: jax.Array, starts: jax.Array, counts: jax.Array, max_count: int, width: int
) -> Work:
    """Prefill: cuts every row's queries into tiles of `width`, each over all K/V that its last query sees.

    Args:
      tokens: T, the number of queries and padding together.
      lengths: i32[R]; the number of tokens of each row, its queries included.
      starts: i32[R]; the index of each row's first query, ascending.
      counts: i32[R]; the number of queries of each row.
      max_count: static bound on counts.
      width: the number of queries per tile.
    """
    rows = starts.shape[0]
    tiles = -(-counts // width)
    size = min((tokens + rows * (width - 1)) // width, rows * -(-max_count // width))
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    item = jnp.arange(size, dtype=jnp.int32)
    row = jnp.minimum(_sum(item[:, None] >= ends[None]), rows - 1)
    skipped = (item - (ends - tiles)[row]) * width
    count = jnp.clip(counts[row] - skipped, 0, width)
    position = (lengths - counts)[row] + skipped
    token = starts[row] + skipped
    return Work(row, token, count, position, jnp.zeros_like(row), jnp.where(count > 0, position + count, 0))


def tile_width(width: int, size: int) -> int:
    """The largest tile of at most `width` tokens that cuts blocks of `size` into equal tiles, except for the last."""
    return -(-size // -(-size // width))


def block_tiles(
    tokens: int, lengths: jax.Array, starts: jax.Array, counts: jax.Array, max_count: int, width: int, size: int
) -> tuple[Work, jax.Array]:
    """Cuts every row's tokens into tiles that end at the ends of blocks of `size`, like `query_tiles`.

    Args:
      tokens: T, the number of tokens and padding together.
      lengths: i32[R]; the number of tokens of each row, including the tokens to cut.
      starts: i32[R]; the index of each row's first token to cut, ascending.
      counts: i32[R]; the number of tokens to cut of each row.
      max_count: static bound on counts.
      width: the number of tokens per tile, from `tile_width`.
      size: P.

    Returns:
      The work, and the number of tiles i32[].
    """
    per_block = -(-size // width)
    within = (lengths - counts) % size

    def tile_of(offset: jax.Array) -> jax.Array:  # counted from the row's first block
        return offset // size * per_block + offset % size // width

    def begin_of(tile: jax.Array) -> jax.Array:
        return tile // per_block * size + jnp.minimum(tile % per_block * width, size)

    first = tile_of(within)
    tiles = jnp.where(counts > 0, tile_of(within + counts - 1) - first + 1, 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    item = jnp.arange(min(tokens, starts.shape[0] * max_count), dtype=jnp.int32)
    row = jnp.minimum(_sum(item[:, None] >= ends[None]), starts.shape[0] - 1)
    tile = first[row] + item - (ends - tiles)[row]
    begin = jnp.maximum(begin_of(tile) - within[row], 0)
    count = jnp.clip(begin_of(tile + 1) - within[row] - begin, 0, jnp.maximum(counts[row] - begin, 0))
    position = (lengths - counts)[row] + begin
    return Work(row, starts[row] + begin, count, position, jnp.zeros_like(row), position + count), ends[-1]


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, dtype=jnp.int32)
