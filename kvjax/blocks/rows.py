# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the rows of the block table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, pick, put, runs
from kvjax.state import NO_BLOCK, CacheState, Group, Sequences, Text


class Prompt(NamedTuple):
    """A checked prompt: text in blocks i32[F, P], length and namespace i32[], valid bool[] (values are in range)."""

    text: Text
    length: jax.Array
    namespace: jax.Array
    valid: jax.Array


class Chunk(NamedTuple):
    """Writes of rows i32[R]: text i32[R, T] at positions start..end-1 i32[R]; `done` bool[R]: nothing is wrong."""

    rows: jax.Array
    start: jax.Array
    end: jax.Array
    done: jax.Array
    text: Text

    @property
    def span(self) -> Span:
        """The positions it covers, without the text."""
        return Span(self.rows, self.start, self.end, self.text.tokens.shape[1])


class Span(NamedTuple):
    """Positions start..end-1 i32[R] of rows i32[R], at most `most` of each (static)."""

    rows: jax.Array
    start: jax.Array
    end: jax.Array
    most: int

    def most_filled(self, size: int) -> int:
        """The most blocks of `size` tokens that end there."""
        return self.rows.shape[0] * -(-self.most // size)


def most_columns(num_tokens: int, size: int) -> int:
    """The most columns of a row's table, of blocks of `size` tokens, that its next tokens are in."""
    return (num_tokens + size - 2) // size + 1


class Row(Pytree):
    """One row of the block tables."""

    exists: jax.Array  # bool[]; whether the row's number is in range
    metadata: Sequences  # the row's part of `Sequences`, without the axis S
    tables: tuple[jax.Array, ...]  # i32[M]; the row's blocks, for each group

    length = property(lambda self: self.metadata.length)
    committed = property(lambda self: self.metadata.committed)
    namespace = property(lambda self: self.metadata.namespace)
    swapped_out = property(lambda self: self.metadata.swapped_out)


def read_row(state: CacheState, seq: jax.Array) -> Row:
    """Row `seq` i32[]; some row with `exists` False if seq is out of range."""
    exists = (seq >= 0) & (seq < state.spec.max_seqs)
    return Row(exists, pick(state.seqs, seq), tuple(pick(group.table, seq) for group in state.groups))


def write_row(
    state: CacheState, seq: jax.Array, ok: jax.Array, metadata: Sequences, tables: Sequence[jax.Array]
) -> CacheState:
    """Writes row `seq` where `ok` bool[]; tables i32[...], one for each group, are cut or padded to M."""
    seq, ok, width = jnp.atleast_1d(seq), jnp.atleast_1d(ok), state.spec.max_blocks_per_seq
    metadata = jax.tree.map(lambda x: jnp.asarray(x)[None], metadata)
    groups = [
        group.replace(table=put(group.table, seq, fit(table, width, NO_BLOCK)[None], ok))
        for group, table in zip(state.groups, tables, strict=True)
    ]
    return state.replace(groups=tuple(groups), seqs=put(state.seqs, seq, metadata, ok))


def fit(x: jax.Array, size: int, fill: int) -> jax.Array:
    """Cuts or pads x to `size` entries."""
    padding = [(0, max(size - x.shape[0], 0))] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x[:size], padding, constant_values=fill)


def table_entry(group: Group, rows, column: jax.Array) -> jax.Array:
    """table[rows, column] i32[...]; NO_BLOCK before the first column, some entry beyond the last."""
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
    size = group.blocks.tokens.shape[1]
    position = runs(start, text.tokens.shape[1])
    where = position < end[:, None]
    at = (table_entry(group, rows[:, None], position // size), position % size)
    return group.replace(blocks=group.blocks.replace(text=put(group.blocks.text, at, text, where)))
