# SPDX-License-Identifier: Apache-2.0
"""The schedule of attention, computed on the device: a batch of ragged rows as a list of equal pieces of work.

Shapes use the legend of `pallas_kernels.xla`; W is the length of the list, a static bound on the number of pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Work(NamedTuple):
    """Pieces of work, each the queries of one row over a part of its K/V; all i32[W].

    Attributes:
      row: of the block tables.
      token: the first query's index in q.
      count: queries; 0 for a piece that only fills the list.
      position: the first query's position in its sequence; the others follow.
      begin: the first slot of the part of the K/V.
      end: the slot after it.
    """

    row: jax.Array
    token: jax.Array
    count: jax.Array
    position: jax.Array
    begin: jax.Array
    end: jax.Array


def split_lengths(lengths: jax.Array, tile: int, target: int, window: int | None = None) -> tuple[Work, jax.Array]:
    """Decode: cuts every row's K/V into parts of about total / `target` slots, so that ragged rows fill a chip evenly.

    Args:
      lengths: i32[R].
      tile: parts are multiples of this many slots.
      target: number of parts to aim for; there are at most `target` + R. With `target` <= R no row is cut.
      window: only the last `window` slots of a row count. None: all.

    Returns:
      The work, and i32[R + 1], where each row's parts begin. A row of length 0 has one empty part.
    """
    rows = lengths.shape[0]
    first = _first(lengths, tile, window)
    if target <= rows:
        return _parts(lengths, first, jnp.full((), 2**30, jnp.int32), rows)
    mean = -(-jnp.sum(lengths - first, dtype=jnp.int32) // target)
    return _parts(lengths, first, jnp.maximum(-(-mean // tile) * tile, tile), target + rows)


def is_skewed(lengths: jax.Array, tile: int, window: int | None = None) -> jax.Array:
    """bool[]; whether the longest row has more than three times the slots of the mean row, and of a tile.

    Then the list of `split_lengths` with a target of 2 R, R parts at a time, takes fewer steps than the longest row.
    The arguments are as in `split_lengths`.
    """
    slots = lengths - _first(lengths, tile, window)
    mean = jnp.sum(slots, dtype=jnp.int32) // slots.shape[0]
    return jnp.max(slots) > 3 * jnp.maximum(mean, tile)


def _first(lengths: jax.Array, tile: int, window: int | None) -> jax.Array:
    """i32[R]; the first slot of each row that counts, or one before it where a tile begins."""
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // tile * tile


def _parts(lengths: jax.Array, first: jax.Array, part: jax.Array, size: int) -> tuple[Work, jax.Array]:
    """A list of `size` parts of `part` i32[] slots, of each row from its first slot i32[R] on."""
    rows = lengths.shape[0]
    parts = jnp.maximum(-(-(lengths - first) // part), 1)
    ends = jnp.cumsum(parts, dtype=jnp.int32)
    item = jnp.arange(size, dtype=jnp.int32)
    row = jnp.minimum(_sum(item[:, None] >= ends[None]), rows - 1)
    begin = first[row] + (item - (ends - parts)[row]) * part
    real = (item < ends[-1]).astype(jnp.int32)
    work = Work(row, row, real, lengths[row] - 1, begin, jnp.minimum(begin + part, lengths[row]))
    return work, jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])


def query_tiles(
    tokens: int, lengths: jax.Array, starts: jax.Array, counts: jax.Array, max_count: int, width: int
) -> Work:
    """Prefill: cuts every row's queries into tiles of `width`, each over all K/V that its last query sees.

    Args:
      tokens: T, queries and padding together.
      lengths: i32[R]; tokens of each row, its queries included.
      starts: i32[R]; where each row's queries begin; ascending.
      counts: i32[R]; queries of each row.
      max_count: static bound on counts.
      width: queries to a tile.
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
    """The tokens of a tile, at most `width`, so that a block of `size` is cut into equal tiles, the last one aside."""
    return -(-size // -(-size // width))


def block_tiles(
    tokens: int, lengths: jax.Array, starts: jax.Array, counts: jax.Array, max_count: int, width: int, size: int
) -> tuple[Work, jax.Array]:
    """Cuts every row's tokens into tiles that end at the ends of blocks of `size`; see `query_tiles`.

    Args:
      tokens: T, tokens and padding together.
      lengths: i32[R]; tokens of each row, those that are cut included.
      starts: i32[R]; where each row's tokens begin; ascending.
      counts: i32[R]; tokens of each row.
      max_count: static bound on counts.
      width: tokens of a tile, from `tile_width`.
      size: P.

    Returns:
      The work; and i32[], the number of tiles.
    """
    per_block = -(-size // width)
    within = (lengths - counts) % size

    def tile_of(offset: jax.Array) -> jax.Array:  # counted from the row's first block on
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
