# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the rows of the block table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, pick, put, runs
from kvjax.state import NO_BLOCK, CacheState, Group, Sequences, Text


class Prompt(NamedTuple):
    """A checked prompt."""

    text: Text  # i32[F, P]
    length: jax.Array  # i32[]
    namespace: jax.Array  # i32[]
    valid: jax.Array  # bool[]; whether all values are in range


class Chunk(NamedTuple):
    """Tokens written by rows."""

    rows: jax.Array  # i32[R]
    start: jax.Array  # i32[R]; the first position of each row
    end: jax.Array  # i32[R]; the position after the last
    done: jax.Array  # bool[R]; whether the row's write is valid
    text: Text  # i32[R, T]
    exact: jax.Array | None = None  # bool[R]; whether the K/V are exact, None if not or if the spec is not sparse

    @property
    def span(self) -> Span:
        """The positions of the chunk, without the text."""
        return Span(self.rows, self.start, self.end, self.text.tokens.shape[1])


class Span(NamedTuple):
    """Positions start..end-1 of rows."""

    rows: jax.Array  # i32[R]
    start: jax.Array  # i32[R]
    end: jax.Array  # i32[R]
    max_tokens: int  # static; the largest number of positions of a row

    def most_filled(self, block_size: int) -> int:
        """The largest number of blocks that can end in the span."""
        return self.rows.shape[0] * -(-self.max_tokens // block_size)


def most_columns(num_tokens: int, block_size: int) -> int:
    """The largest number of columns that the next `num_tokens` tokens of a row can touch."""
    return (num_tokens + block_size - 2) // block_size + 1


class Row(Pytree):
    """One row of the block tables."""

    exists: jax.Array  # bool[]; whether the row's index is in range
    metadata: Sequences  # the row's part of `Sequences`, without the axis S
    tables: tuple[jax.Array, ...]  # i32[M]; the row's blocks, for each group

    length = property(lambda self: self.metadata.length)
    committed = property(lambda self: self.metadata.committed)
    namespace = property(lambda self: self.metadata.namespace)
    swapped_out = property(lambda self: self.metadata.swapped_out)


def read_row(state: CacheState, seq: jax.Array) -> Row:
    """Reads row `seq` i32[]. If seq is out of range, it returns some row with `exists` False."""
    exists = (seq >= 0) & (seq < state.spec.max_seqs)
    return Row(exists, pick(state.seqs, seq), tuple(pick(group.table, seq) for group in state.groups))


def write_row(
    state: CacheState, seq: jax.Array, ok: jax.Array, metadata: Sequences, tables: Sequence[jax.Array]
) -> CacheState:
    """Writes row `seq` where `ok` bool[]; tables i32[...], one per group, are cut or padded to M."""
    seq = jnp.atleast_1d(seq)
    ok = jnp.atleast_1d(ok)
    width = state.spec.max_blocks_per_seq
    metadata = jax.tree.map(lambda x: jnp.asarray(x)[None], metadata)
    groups = [
        group.replace(table=put(group.table, seq, fit(table, width, NO_BLOCK)[None], ok))
        for group, table in zip(state.groups, tables, strict=True)
    ]
    return state.replace(groups=tuple(groups), seqs=put(state.seqs, seq, metadata, ok))


def fit(x: jax.Array, num_entries: int, fill: int) -> jax.Array:
    """Cuts or pads x to `num_entries` entries."""
    padding = [(0, max(num_entries - x.shape[0], 0))] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x[:num_entries], padding, constant_values=fill)


def table_entry(group: Group, rows, column: jax.Array) -> jax.Array:
    """i32[...]; table[rows, column]. It is NO_BLOCK before the first column, and arbitrary beyond the last."""
    ids = pick(group.table, (rows, column))
    return jnp.where(column >= 0, ids, NO_BLOCK)


def write_prompt(group: Group, block: jax.Array, where: jax.Array, prompt: Prompt, index: jax.Array) -> Group:
    """Stores in `block` i32[1], where bool[1], the text of the prompt's block `index` i32[]."""
    text = put(group.blocks.text, block, pick(prompt.text, index[None]), where)
    return group.replace(blocks=group.blocks.replace(text=text))


def copy_text(group: Group, block: jax.Array, source: jax.Array, where: jax.Array) -> Group:
    """Stores in each block i32[K], where bool[K], the text of its source i32[K]."""
    text = group.blocks.text
    return group.replace(blocks=group.blocks.replace(text=put(text, block, pick(text, source), where)))


def write_text(group: Group, rows, start: jax.Array, end: jax.Array, text: Text) -> Group:
    """Stores text i32[R, T] in the rows' blocks at positions start..end-1 i32[R]."""
    block_size = group.blocks.tokens.shape[1]
    position = runs(start, text.tokens.shape[1])
    where = position < end[:, None]
    entry = (table_entry(group, rows[:, None], position // block_size), position % block_size)
    return group.replace(blocks=group.blocks.replace(text=put(group.blocks.text, entry, text, where)))
