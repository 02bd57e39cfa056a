# SPDX-License-Identifier: Apache-2.0
"""A wide pass: the model computes the last tokens and the drafts of all rows as a flat batch, and each row chooses."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from kvjax._arrays import fence, leading, once, pick, put, runs
from kvjax.cache import Cache
from kvjax.model import Model, forward
from kvjax.pools.device import Pools
from kvjax.pools.views import View
from kvjax.serving.decode import Rows, SampledTokens, Sampler
from kvjax.serving.sampling import Choice
from kvjax.spec import Kind
from pallas_kernels.loops import scan


class PassResult(NamedTuple):
    """The result of a pass, for C columns: the last token and the drafts."""

    pools: Pools
    state: Any  # state of `logits_fn` for each row after its choices
    chosen: SampledTokens  # C columns
    num_accepted: jax.Array  # i32[S]


def verify(
    model: Model,
    cache: Cache,
    rows: Rows,
    batch: jax.Array,
    num_tokens: jax.Array,
    written: jax.Array,
    choose: Sampler,
    size: int,
) -> PassResult:
    """Runs the model on the first num_tokens i32[S] of batch i32[S, C], a flat batch of T = `size`, and chooses."""
    row_index = np.arange(num_tokens.size, dtype=np.int32)
    column: Any = np.arange(batch.shape[1], dtype=np.int32)[None]
    view = cache.ragged(num_tokens, size, written=written)
    all_positions: Any = np.arange(size, dtype=np.int32)
    owners = _owners(view)
    logits, pools = forward(model, _flat(batch, view, owners)[None], cache.pools, view, all_positions)
    state = rows.state
    states = None
    if choose.logits_fn is not None:
        logits, states = _changed_logits(logits, view, batch, rows, choose)
    choice = _choices(choose, logits, rows, owners, view.positions[0] + 1)
    index = jnp.minimum(runs(_starts(view), batch.shape[1]), size - 1)
    is_token = column < num_tokens[:, None]
    chosen = SampledTokens(SampledTokens.of(choice).bits[:, index, 0]).only(is_token)
    tokens = chosen.tokens
    is_draft = column[:, 1:] < num_tokens[:, None]
    is_stop = jnp.any(tokens[:, :-1, None] == jnp.reshape(choose.stop, (-1, 1, choose.stop.shape[-1])), axis=2)
    num_accepted = leading((tokens[:, :-1] == batch[:, 1:]) & is_draft & ~is_stop)
    if states is not None:  # each row's state after its last choice
        state = jax.tree.map(lambda x: x[num_accepted, row_index], states)
    pools = _without_rejected(model, cache, pools, view, batch, num_tokens, num_accepted, written)
    return PassResult(pools, state, chosen, num_accepted)


def _starts(view: View) -> jax.Array:
    """i32[S]; the index of each row's first token in a ragged view."""
    assert view.starts is not None
    return view.starts


def _owners(view: View) -> jax.Array:
    """i32[T]; the row of each token of a ragged view. Padding belongs to the last row with tokens."""
    token = np.arange(view.positions.shape[1], dtype=np.int32)[None]
    return jnp.sum(token >= _starts(view)[:, None], axis=0, dtype=jnp.int32) - 1


def _flat(values: jax.Array, view: View, owners: jax.Array) -> jax.Array:
    """i32[T]; the values i32[S, C] of the tokens of a ragged view, whose rows are owners i32[T]. 0 for padding."""
    column = np.arange(view.positions.shape[1], dtype=np.int32) - pick(_starts(view), owners)
    return jnp.where(column < pick(view.num_tokens, owners), pick(values, (owners, column)), 0)


def _choices(choose: Sampler, logits: jax.Array, rows: Rows, owners: jax.Array, positions: jax.Array) -> Choice:
    """The choices of rows owners i32[T] from logits f32[T, V] after `logits_fn`, for positions i32[T].

    On a CPU they choose S at a time, by the programs of a plain step, since equal shapes are compiled only once.
    """
    num_rows = rows.token.size
    sampling = None if choose.sampling is None else choose.sampling.each_row(num_rows)
    stop = jnp.broadcast_to(choose.stop, (num_rows, choose.stop.shape[-1]))
    rows = rows.replace(state=None)

    def some_choices(args: tuple[jax.Array, jax.Array, jax.Array]) -> Choice:
        logits, owners, positions = args
        stop_of_owners, sampling_of_owners, owner_rows = pick((stop, sampling, rows), owners)
        sampler = choose._replace(stop=stop_of_owners, sampling=sampling_of_owners, logits_fn=None)
        return sampler(logits, owner_rows, positions)[0]

    args = logits, owners, positions
    size = owners.size
    if size <= num_rows or pallas_kernels.lowers_for("cuda"):
        return some_choices(args)
    num_parts = -(-size // num_rows)

    def parts(array: jax.Array) -> jax.Array:
        padding = [(0, num_parts * num_rows - size)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(num_parts, num_rows, *array.shape[1:])

    _, choice = scan(lambda carry, args: (carry, some_choices(args)), (), jax.tree.map(parts, args))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:])[:size], choice)


def _changed_logits(
    logits: jax.Array, view: View, batch: jax.Array, rows: Rows, choose: Sampler
) -> tuple[jax.Array, Any]:
    """Calls `logits_fn` column after column on logits f32[T, V]. The next column follows if its draft is accepted.

    Also returns the state of each row after each column [C, S, ...], or None without a state.
    """
    logits_fn = choose.logits_fn
    assert logits_fn is not None
    starts = _starts(view)
    position = pick(view.positions[0], starts)

    def one_column(carry: tuple[jax.Array, Any], column: Any) -> tuple[tuple[jax.Array, Any], Any]:
        logits, state = carry
        column_index, tokens = column
        index = starts + column_index
        args = pick(logits, index), tokens, position + column_index + 1
        if state is None:
            new = logits_fn(*args)
        else:
            new, state = logits_fn(*args, state)
        return (put(logits, index, new, column_index < view.num_tokens), state), state

    columns = np.arange(batch.shape[1], dtype=np.int32), batch.T
    (logits, _), states = scan(one_column, (logits, rows.state), columns)
    return logits, states


def _without_rejected(
    model: Model,
    cache: Cache,
    pools: Pools,
    view: View,
    batch: jax.Array,
    num_tokens: jax.Array,
    num_accepted: jax.Array,
    written: jax.Array,
) -> Pools:
    """The pools after a pass. If a draft was rejected, recurrent layers run the accepted tokens again.

    Attention needs none of this: the next pass overwrites the slots of rejected drafts.
    """
    pools, snapshots = Snapshots.before(cache.pools, view, pools)
    if not snapshots.groups:
        return pools
    num_right = jnp.where(num_tokens > 0, 1 + num_accepted, 0)

    def run_again(pools: Pools) -> Pools:
        again = cache.ragged(num_right, view.positions.shape[1], written=written)
        last: Any = np.zeros((1,), np.int32)
        tokens = _flat(batch, again, _owners(again))
        return forward(model, tokens[None], snapshots.put_back(pools), again, last)[1]

    return once(jnp.any(num_right < num_tokens), run_again, pools)


class Snapshots(NamedTuple):
    """The snapshots of recurrent layers from which rows continue.

    The snapshot in a block is the state after the last token of a view in this block. If this token was a rejected
    draft, the row gets its earlier snapshot back.
    """

    groups: tuple[int, ...]  # groups of recurrent layers
    pool_rows: tuple[jax.Array, ...]  # i32[S] of each group; the scratch row for rows without tokens in the view
    arrays: tuple[Any, ...]  # of each group, leaves [S, ...]

    @classmethod
    def before(cls, pools: Pools, view: View, written: Pools) -> tuple[Pools, Snapshots]:
        """Reads them from the pools before a view's tokens. Also returns the written pools, fenced from the reads."""
        spec = pools.spec
        groups = tuple(index for index, group in enumerate(spec.groups) if group.kind is Kind.RECURRENT)
        if not groups:
            return written, cls((), (), ())
        row_index = np.arange(view.num_tokens.size, dtype=np.int32)
        column = jnp.maximum(view.lengths - view.num_tokens - 1, 0) // spec.block_size
        pool_rows = []
        arrays = []
        for group_index in groups:
            pool_row = pick(view.tables[group_index], (row_index, column))
            pool_row = jnp.where(view.num_tokens > 0, pool_row, spec.groups[group_index].num_blocks)
            pool_rows.append(pool_row)
            arrays.append(pick(pools.arrays[group_index], pool_row))
        written, arrays = fence(written, arrays)
        return written, cls(groups, tuple(pool_rows), tuple(arrays))

    def put_back(self, pools: Pools) -> Pools:
        """Writes the snapshots where they were."""
        arrays = list(pools.arrays)
        for group_index, pool_row, snapshot in zip(self.groups, self.pool_rows, self.arrays, strict=True):
            write = functools.partial(_set_rows, pool_row)
            arrays[group_index] = jax.tree.map(write, arrays[group_index], snapshot)
        return pools.replace(arrays=tuple(arrays))


def _set_rows(pool_rows: jax.Array, array: jax.Array, new: jax.Array) -> jax.Array:
    """Replaces rows of an array."""
    return array.at[pool_rows].set(new)
