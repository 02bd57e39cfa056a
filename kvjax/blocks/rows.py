# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the rows of the block table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, pick, put, runs
from kvjax.state import NO_BLOCK, CacheState, Group


class Prompt(NamedTuple):
    """A checked prompt: tokens and extra ids in blocks i32[F, P], length i32[], and whether its values are in range."""

    tokens: jax.Array
    extra_ids: jax.Array | None
    length: jax.Array
    namespace: jax.Array
    valid: jax.Array


class Row(Pytree):
    """One row: `exists` bool[] whether its number is in range; the others as in `Sequences`, tables i32[M] a group."""

    exists: jax.Array
    length: jax.Array
    committed: jax.Array
    namespace: jax.Array
    tables: tuple[jax.Array, ...]
    retention: jax.Array | None
    swapped: jax.Array


def read_row(state: CacheState, seq: jax.Array) -> Row:
    """Row `seq` i32[]; out of range it reads as some row with `exists` false."""
    seqs = state.seqs
    return Row(
        exists=(seq >= 0) & (seq < state.spec.max_seqs),
        length=pick(seqs.length, seq),
        committed=pick(seqs.committed, seq),
        namespace=pick(seqs.namespace, seq),
        tables=tuple(pick(group.table, seq) for group in state.groups),
        retention=None if seqs.retention is None else pick(seqs.retention, seq),
        swapped=jnp.bool_(False) if seqs.swapped is None else pick(seqs.swapped, seq),
    )


def write_row(
    state: CacheState,
    seq: jax.Array,
    ok: jax.Array,
    tables: Sequence[jax.Array],
    length: jax.Array | int,
    committed: jax.Array | int,
    namespace: jax.Array | int,
    retention: jax.Array | None = None,
) -> CacheState:
    """The state, where `ok` bool[], with a new row `seq`; tables i32[...], one a group, are cut or padded to M.

    Of retention i32[M + 1, 2] None leaves what there is.
    """
    seq, ok = jnp.atleast_1d(seq), jnp.atleast_1d(ok)
    stated, width = state.seqs.retention, state.spec.max_blocks_per_seq
    if stated is not None and retention is not None:
        stated = put(stated, seq, retention[None], ok)
    seqs = state.seqs.replace(
        length=put(state.seqs.length, seq, length, ok),
        committed=put(state.seqs.committed, seq, committed, ok),
        namespace=put(state.seqs.namespace, seq, namespace, ok),
        retention=stated,
        swapped=None if state.seqs.swapped is None else put(state.seqs.swapped, seq, False, ok),
    )
    groups = [
        group.replace(table=put(group.table, seq, fit(table, width, NO_BLOCK)[None], ok))
        for group, table in zip(state.groups, tables, strict=True)
    ]
    return state.replace(groups=tuple(groups), seqs=seqs)


def fit(x: jax.Array, size: int, fill: int) -> jax.Array:
    """Cuts x to its first `size` entries, or fills it up to so many."""
    padding = [(0, max(size - x.shape[0], 0))] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x[:size], padding, constant_values=fill)


def table_entry(group: Group, rows, place: jax.Array) -> jax.Array:
    """table[rows, place] i32[...], NO_BLOCK for a place before the row; beyond its end some entry."""
    ids = group.table.at[rows, place].get(mode="clip", wrap_negative_indices=False)
    return jnp.where(place >= 0, ids, NO_BLOCK)


def write_prompt(group: Group, block: jax.Array, where: jax.Array, ask: Prompt, place: jax.Array) -> Group:
    """Notes in `block` i32[1], where bool[1], the tokens of the prompt's block at `place` i32[]."""
    blocks = group.blocks
    tokens = put(blocks.tokens, block, pick(ask.tokens, place)[None], where)
    extra = blocks.extra_ids
    if extra is not None and ask.extra_ids is not None:
        extra = put(extra, block, pick(ask.extra_ids, place)[None], where)
    return group.replace(blocks=blocks.replace(tokens=tokens, extra_ids=extra))


def copy_tokens(group: Group, block: jax.Array, source: jax.Array, where: jax.Array) -> Group:
    """Notes in each block i32[K], where bool[K], the tokens that its source holds."""
    blocks = group.blocks
    tokens = put(blocks.tokens, block, pick(blocks.tokens, source), where)
    extra = blocks.extra_ids
    if extra is not None:
        extra = put(extra, block, pick(extra, source), where)
    return group.replace(blocks=blocks.replace(tokens=tokens, extra_ids=extra))


def note_tokens(
    group: Group, rows, start: jax.Array, end: jax.Array, tokens: jax.Array, extra_ids: jax.Array | None
) -> Group:
    """Notes tokens i32[R, T] in the rows' blocks at positions start..end-1 i32[R]."""
    size = group.blocks.tokens.shape[1]
    position = runs(start, tokens.shape[1])
    where = position < end[:, None]
    at = (table_entry(group, rows[:, None], position // size), position % size)
    blocks = group.blocks
    noted = put(blocks.tokens, at, tokens, where)
    extra = blocks.extra_ids
    if extra is not None and extra_ids is not None:
        extra = put(extra, at, extra_ids, where)
    return group.replace(blocks=blocks.replace(tokens=noted, extra_ids=extra))
