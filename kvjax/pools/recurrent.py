# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over paged snapshots: the state after the last written token of each block.

A row continues from the snapshot of the block before its first token, and leaves a snapshot in each block it writes.
Chunks go through the layer in tiles, in order. Each tile ends at the end of a block, and passes its states on:

    blocks of 4       [ a0 a1 a2 a3 ] [ a4 a5 a6 a7 ] [ a8 .  .  .  ]     a row with 6 tokens continues: a6 a7 a8
    snapshots after           a3            a5, a7            a8          it reads that after a5, writes a7 and a8
    tiles                                [ a6 a7 ]        [ a8 ]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax._arrays import pick
from kvjax.layers import NUM_TOKENS, static_int
from kvjax.pools.device import Pools, check_fit
from kvjax.pools.lineage import layer_at, note, note_skipped, note_write
from kvjax.pools.views import View
from pallas_kernels.loops import fori_loop
from pallas_kernels.schedule import Work, block_tiles, tile_width

States = dict[str, jax.Array]
Cell = Callable[[States, Any, jax.Array], tuple[Any, States]]


def recur(
    cell: Cell,
    pools: Pools,
    layer: int | jax.Array,
    view: View,
    inputs: Any,
    *,
    index: ArrayLike | None = None,
    keep: bool = True,
    width: int = 64,
) -> tuple[Any, Pools]:
    """Runs a recurrent layer over a view's tokens, from each row's snapshot, and writes new snapshots.

    Decoding rows are a single call of the cell. Chunks are tiles of at most `width` tokens. The output is NaN if the
    stored snapshot does not match the row's position, for example after recomputing a token or truncating inside a
    block.

    Args:
      cell: (states, inputs [B, C, ...], count i32[B]) -> (outputs [B, C, ...], states). States are a dict of the
        layer's arrays, [B, ...] each, zeros before the first token. The first `count` tokens of each row are real. The
        others must not change the states.
      pools: the snapshots of the tokens before.
      layer: the model's layer number. It may be traced, i32[], if the spec has a single pool.
      view: the positions of the tokens.
      inputs: a tree of arrays [R, C, ...]; [1, T, ...] for a flat view, ragged or mixed.
      index: i32[]; the layer's index in its pool, as in `write`. None takes the index from `layer`.
      keep: whether to write the new snapshots. Speculation verifies draft tokens with keep=False, then runs the
        accepted tokens.
      width: static; the largest number of tokens in a tile.

    Returns:
      The outputs, shaped like the view's tokens, with zeros where it has padding, and the pools, in place if donated.

    Raises:
      ValueError: while tracing, if an argument does not fit, or if the layer is not recurrent.

    Source: tiles with a carried state as in Mamba-2 and Gated DeltaNet, snapshots at block ends as in vLLM.
    """
    check_fit(pools, view)
    given_index = index
    group, pool, index, arrays = pools.at(layer, index)
    if not isinstance(arrays, dict):
        raise ValueError(f"layer: got {layer}, which has K/V, wanted a recurrent layer; `attend` serves this one")
    layer_number = layer_at(pools, (group, pool), layer, given_index)
    width = static_int("width", width, 1)
    _check_inputs(inputs, view)
    shape = view.positions.shape
    block_size = pools.spec.block_size
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), inputs)
    slots = view.slots[group].reshape(-1) // block_size
    snapshots = _Snapshots(arrays, index)
    rows = _Rows.of(view, view.tables[group], block_size)
    outputs = []
    num_decodes = view.num_decode_rows
    with jax.named_scope("recur"):
        if num_decodes:
            decode_rows = rows.part(slice(0, num_decodes))
            decode_outputs, snapshots = _decode(cell, snapshots, decode_rows, flat, slots, keep)
            outputs.append(decode_outputs)
        if num_decodes < view.num_tokens.shape[0]:
            chunk_rows = rows.part(slice(num_decodes, None))
            chunk_rows = chunk_rows._replace(token=chunk_rows.token - num_decodes)
            flat = jax.tree.map(lambda x: x[num_decodes:], flat)
            max_count = int(np.prod(shape)) - num_decodes if view.starts is not None else shape[1]
            chunk_outputs, snapshots = _chunks(
                cell, snapshots, chunk_rows, flat, slots[num_decodes:], keep, max_count, block_size, width
            )
            outputs.append(chunk_outputs)
    outputs = jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
    outputs = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), outputs)
    note(layer_number, inputs=inputs, outputs=outputs)
    if not keep:
        note_skipped((group, pool), layer_number)
        return outputs, pools
    result = pools.with_pool(group, pool, snapshots.arrays)
    return outputs, note_write(pools, result, (group, pool), layer_number)


class _Rows(NamedTuple):
    """Rows of a view.

    Attributes:
      before: i32[R]; the pool row with the snapshot to begin with.
      start: i32[R]; the number of tokens before the view's.
      count: i32[R]; the number of tokens in the view.
      token: i32[R]; the index of the row's first token among all tokens.
    """

    before: jax.Array
    start: jax.Array
    count: jax.Array
    token: jax.Array

    @classmethod
    def of(cls, view: View, table: jax.Array, block_size: int) -> _Rows:
        row = jnp.arange(table.shape[0], dtype=jnp.int32)
        start = view.lengths - view.num_tokens
        before = pick(table, (row, jnp.maximum(start - 1, 0) // block_size))
        token = row * view.positions.shape[1] if view.starts is None else view.starts
        return cls(before, start, view.num_tokens, token)

    def part(self, rows: slice) -> _Rows:
        return _Rows(*(x[rows] for x in self))


class _Snapshots(NamedTuple):
    """The snapshots of a layer: the pool's arrays, and the layer's index in them."""

    arrays: States
    index: jax.Array | int

    def read(self, rows: _Rows) -> States:
        """The states of rows before their tokens."""
        snapshots = {name: array.at[rows.before, self.index].get(mode="clip") for name, array in self.arrays.items()}
        is_valid = snapshots.pop(NUM_TOKENS) == rows.start

        def initial_state(state: jax.Array) -> jax.Array:
            shape = (-1,) + (1,) * (state.ndim - 1)
            default = jnp.where(rows.start == 0, 0.0, jnp.nan).astype(state.dtype).reshape(shape)
            return jnp.where((is_valid & (rows.start > 0)).reshape(shape), state, default)

        return {name: initial_state(state) for name, state in snapshots.items()}

    def write(self, slots: jax.Array, states: States, num_tokens: jax.Array) -> _Snapshots:
        """Puts states [R, ...] after num_tokens i32[R] into pool rows slots i32[R], except for the scratch row."""
        scratch = self.arrays[NUM_TOKENS].shape[0] - 1
        # Each dropped row gets a different index, so XLA may assume distinct indices.
        slots = jnp.where(slots < scratch, slots, scratch + 1 + jnp.arange(slots.size, dtype=jnp.int32))
        new = {NUM_TOKENS: num_tokens, **states}
        written = {
            name: array.at[slots, self.index].set(new[name], mode="drop", unique_indices=True)
            for name, array in self.arrays.items()
        }
        return self._replace(arrays=written)

    def put(self, slot: jax.Array, states: States, num_tokens: jax.Array) -> _Snapshots:
        """Puts the states of a single row into a pool row."""
        new = {NUM_TOKENS: num_tokens[None], **states}
        written = {
            name: lax.dynamic_update_slice(array, new[name][None], (slot, self.index, *[0] * (array.ndim - 2)))
            for name, array in self.arrays.items()
        }
        return self._replace(arrays=written)


def _decode(
    cell: Cell, snapshots: _Snapshots, rows: _Rows, inputs: Any, slots: jax.Array, keep: bool
) -> tuple[Any, _Snapshots]:
    """Runs rows of a single token each, the first rows of inputs [T, ...], to outputs [R, ...]."""
    num_rows = rows.count.shape[0]
    first = jax.tree.map(lambda x: x[:num_rows, None], inputs)
    outputs, states = _run(cell, snapshots.read(rows), first, rows.count)
    outputs = jax.tree.map(lambda x: _masked(x[:, 0], rows.count > 0), outputs)
    return outputs, snapshots.write(slots[:num_rows], states, rows.start + rows.count) if keep else snapshots


def _chunks(
    cell: Cell,
    snapshots: _Snapshots,
    rows: _Rows,
    inputs: Any,
    slots: jax.Array,
    keep: bool,
    max_count: int,
    block_size: int,
    width: int,
) -> tuple[Any, _Snapshots]:
    """Runs rows of several tokens, tile by tile, to outputs [T, ...]."""
    total = slots.size
    width = tile_width(width, block_size)
    work, num_tiles = block_tiles(total, rows.start + rows.count, rows.token, rows.count, max_count, width, block_size)
    # Reads all snapshots before the loop. For a read inside the loop, XLA would copy the pool that the loop writes.
    begin = snapshots.read(rows)
    states = {name: jnp.zeros_like(state[:1]) for name, state in begin.items()}
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, width)] + [(0, 0)] * (x.ndim - 1)), inputs)
    tile_inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, width, *x.shape[1:]), x.dtype), inputs)
    output_shapes = jax.eval_shape(
        lambda *args: _run(cell, *args)[0], states, tile_inputs, jax.ShapeDtypeStruct((1,), jnp.int32)
    )
    outputs = jax.tree.map(lambda x: jnp.zeros((total + width, *x.shape[2:]), x.dtype), output_shapes)

    def step(i, carry):
        outputs, states, snapshots = carry
        tile_work = Work(*(lax.dynamic_index_in_dim(x, i, keepdims=False) for x in work))
        is_first = tile_work.token == rows.token[tile_work.row]
        row_states = {name: lax.dynamic_index_in_dim(state, tile_work.row) for name, state in begin.items()}
        states = {name: jnp.where(is_first, row_states[name], state) for name, state in states.items()}
        tokens = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tile_work.token, width)[None], padded)
        tile_outputs, states = _run(cell, states, tokens, tile_work.count[None])
        is_token = jnp.arange(width, dtype=jnp.int32) < tile_work.count
        outputs = jax.tree.map(
            lambda buffer, x: lax.dynamic_update_slice_in_dim(buffer, _masked(x[0], is_token), tile_work.token, 0),
            outputs,
            tile_outputs,
        )
        if keep:
            snapshots = snapshots.put(
                slots[tile_work.token + tile_work.count - 1], states, tile_work.position + tile_work.count
            )
        return outputs, states, snapshots

    outputs, _, snapshots = fori_loop(0, num_tiles, step, (outputs, states, snapshots))
    return jax.tree.map(lambda x: x[:total], outputs), snapshots


def _run(cell: Cell, states: States, inputs: Any, count: jax.Array) -> tuple[Any, States]:
    """Calls the cell, and checks its outputs and states."""
    outputs, new = cell(states, inputs, count)
    batch = jax.tree.leaves(inputs)[0].shape[:2]
    for x in jax.tree.leaves(outputs):
        if x.shape[:2] != batch:
            raise ValueError(
                f"cell: got outputs of shape {x.shape}, wanted [{batch[0]}, {batch[1]}, ...] like its inputs"
            )
    got = _shapes(new)
    wanted = _shapes(states)
    if got != wanted:
        raise ValueError(f"cell: got states {got}, wanted {wanted}")
    return outputs, new


def _shapes(states: States) -> dict[str, str]:
    """Dtype and shape of each array, for errors."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in states.items()}


def _masked(x: jax.Array, is_token: jax.Array) -> jax.Array:
    """Zeros in x [n, ...] wherever is_token bool[n] is False."""
    return jnp.where(is_token.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def _check_inputs(inputs: Any, view: View) -> None:
    leaves = jax.tree.leaves(inputs)
    batch = view.positions.shape
    wrong_shape = next((x.shape for x in leaves if x.shape[:2] != batch), None)
    if wrong_shape is not None or not leaves:
        raise ValueError(f"inputs: got shape {wrong_shape}, wanted [{batch[0]}, {batch[1]}, ...] as the view's tokens")
