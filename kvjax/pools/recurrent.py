# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over paged snapshots: the state after the last written token of each block.

A row that continues reads the snapshot of the block before its first token, and leaves one in each block that it
writes. Chunks go through the layer as tiles that end at block ends, one after the other, with the states carried:

    blocks of 4       [ a0 a1 a2 a3 ] [ a4 a5 a6 a7 ] [ a8 .  .  .  ]     a row with 6 tokens goes on with a6 a7 a8
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
    """Runs a recurrent layer over a view's tokens, from each row's snapshot, and keeps new ones.

    Rows that decode are one call of the cell; chunks are tiles of at most `width` tokens. A row whose snapshot is not
    the state after exactly the tokens before gets NaN: one that was computed twice, or cut back into a block.

    Args:
      cell: (states, inputs [B, C, ...], count i32[B]) -> (outputs [B, C, ...], states); states are a dict of the
        layer's arrays, [B, ...] each, zeros before the first token. Of each row the first `count` tokens are real; the
        others must leave its states alone.
      pools: the snapshots of the tokens before.
      layer: the model's layer number. It may be traced, i32[], where the spec has exactly one pool.
      view: where the tokens are.
      inputs: a tree of arrays [R, C, ...]; [1, T, ...] for a flat view, ragged or mixed.
      index: i32[]; the layer's index in its pool, as in `write`. None: the layer's own.
      keep: whether to write the new snapshots. Speculation verifies draft tokens without, then runs the accepted ones.
      width: static; the most tokens of a tile.

    Returns:
      The outputs, shaped like the view's tokens, zeros where it has padding; and the pools, in place if donated.

    Raises:
      ValueError: on an argument that does not fit, while tracing; on a layer that is not recurrent.

    Source: chunks by tiles with a carried state as in Mamba-2 and Gated DeltaNet; snapshots at block ends as in vLLM.
    """
    check_fit(pools, view)
    group, pool, index, arrays = pools.at(layer, index)
    if not isinstance(arrays, dict):
        raise ValueError(f"layer: got {layer}, which has K/V, wanted a recurrent layer; `attend` serves this one")
    width = static_int("width", width, 1)
    _check_inputs(inputs, view)
    shape = view.positions.shape
    size = pools.spec.block_size
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), inputs)
    slots = view.slots[group].reshape(-1) // size
    snapshots = _Snapshots(arrays, index)
    rows = _Rows.of(view, view.tables[group], size)
    outputs = []
    decodes = shape[0] if view.starts is None and shape[1] == 1 else view.decodes
    with jax.named_scope("recur"):
        if decodes:
            done, snapshots = _decode(cell, snapshots, rows.part(slice(0, decodes)), flat, slots, keep)
            outputs.append(done)
        if decodes < view.num_tokens.shape[0]:
            rest = rows.part(slice(decodes, None))
            rest = rest._replace(token=rest.token - decodes)
            flat = jax.tree.map(lambda x: x[decodes:], flat)
            most = int(np.prod(shape)) - decodes if view.starts is not None else shape[1]
            done, snapshots = _chunks(cell, snapshots, rest, flat, slots[decodes:], keep, most, size, width)
            outputs.append(done)
    outputs = jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
    outputs = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), outputs)
    return outputs, pools.with_pool(group, pool, snapshots.arrays) if keep else pools


class _Rows(NamedTuple):
    """Rows of a view.

    Attributes:
      before: i32[R]; the pool row with the snapshot to begin with.
      start: i32[R]; tokens before the view's.
      count: i32[R]; tokens in the view.
      token: i32[R]; index of the first one among all tokens.
    """

    before: jax.Array
    start: jax.Array
    count: jax.Array
    token: jax.Array

    @classmethod
    def of(cls, view: View, table: jax.Array, size: int) -> _Rows:
        row = jnp.arange(table.shape[0], dtype=jnp.int32)
        start = view.lengths - view.num_tokens
        before = pick(table, (row, jnp.maximum(start - 1, 0) // size))
        token = row * view.positions.shape[1] if view.starts is None else view.starts
        return cls(before, start, view.num_tokens, token)

    def part(self, which: slice) -> _Rows:
        return _Rows(*(x[which] for x in self))


class _Snapshots(NamedTuple):
    """The snapshots of a layer: the pool's arrays, and the layer's index in them."""

    arrays: States
    index: jax.Array | int

    def read(self, rows: _Rows) -> States:
        """The states of rows before their tokens."""
        found = {name: array.at[rows.before, self.index].get(mode="clip") for name, array in self.arrays.items()}
        is_right = found.pop(NUM_TOKENS) == rows.start

        def begin(state: jax.Array) -> jax.Array:
            shape = (-1,) + (1,) * (state.ndim - 1)
            otherwise = jnp.where(rows.start == 0, 0.0, jnp.nan).astype(state.dtype).reshape(shape)
            return jnp.where((is_right & (rows.start > 0)).reshape(shape), state, otherwise)

        return {name: begin(state) for name, state in found.items()}

    def write(self, slots: jax.Array, states: States, num_tokens: jax.Array) -> _Snapshots:
        """Puts states [R, ...] after num_tokens i32[R] into pool rows slots i32[R]; the scratch row is left out."""
        scratch = self.arrays[NUM_TOKENS].shape[0] - 1
        # Each one that is left out gets an index of its own, so that XLA may take all as distinct.
        slots = jnp.where(slots < scratch, slots, scratch + 1 + jnp.arange(slots.size, dtype=jnp.int32))
        new = {NUM_TOKENS: num_tokens, **states}
        written = {
            name: array.at[slots, self.index].set(new[name], mode="drop", unique_indices=True)
            for name, array in self.arrays.items()
        }
        return self._replace(arrays=written)

    def put(self, slot: jax.Array, states: States, num_tokens: jax.Array) -> _Snapshots:
        """The same for one row."""
        new = {NUM_TOKENS: num_tokens[None], **states}
        written = {
            name: lax.dynamic_update_slice(array, new[name][None], (slot, self.index, *[0] * (array.ndim - 2)))
            for name, array in self.arrays.items()
        }
        return self._replace(arrays=written)


def _decode(
    cell: Cell, snapshots: _Snapshots, rows: _Rows, inputs: Any, slots: jax.Array, keep: bool
) -> tuple[Any, _Snapshots]:
    """Rows of one token each, the first ones of inputs [T, ...]; outputs [R, ...]."""
    num = rows.count.shape[0]
    first = jax.tree.map(lambda x: x[:num, None], inputs)
    outputs, states = _run(cell, snapshots.read(rows), first, rows.count)
    outputs = jax.tree.map(lambda x: _masked(x[:, 0], rows.count > 0), outputs)
    return outputs, snapshots.write(slots[:num], states, rows.start + rows.count) if keep else snapshots


def _chunks(
    cell: Cell,
    snapshots: _Snapshots,
    rows: _Rows,
    inputs: Any,
    slots: jax.Array,
    keep: bool,
    max_count: int,
    size: int,
    width: int,
) -> tuple[Any, _Snapshots]:
    """Rows of several tokens, as tiles one after the other; outputs [T, ...]."""
    total = slots.size
    width = tile_width(width, size)
    work, num_tiles = block_tiles(total, rows.start + rows.count, rows.token, rows.count, max_count, width, size)
    # All rows' snapshots before the loop: read inside, XLA would copy the pool that is written there.
    begin = snapshots.read(rows)
    states = {name: jnp.zeros_like(state[:1]) for name, state in begin.items()}
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, width)] + [(0, 0)] * (x.ndim - 1)), inputs)
    tile = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, width, *x.shape[1:]), x.dtype), inputs)
    out = jax.eval_shape(lambda *args: _run(cell, *args)[0], states, tile, jax.ShapeDtypeStruct((1,), jnp.int32))
    outputs = jax.tree.map(lambda x: jnp.zeros((total + width, *x.shape[2:]), x.dtype), out)

    def step(i, carry):
        outputs, states, snapshots = carry
        one = Work(*(lax.dynamic_index_in_dim(x, i, keepdims=False) for x in work))
        is_first = one.token == rows.token[one.row]
        own = {name: lax.dynamic_index_in_dim(state, one.row) for name, state in begin.items()}
        states = {name: jnp.where(is_first, own[name], state) for name, state in states.items()}
        tokens = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, one.token, width)[None], padded)
        new, states = _run(cell, states, tokens, one.count[None])
        real = jnp.arange(width, dtype=jnp.int32) < one.count
        outputs = jax.tree.map(
            lambda all_, x: lax.dynamic_update_slice_in_dim(all_, _masked(x[0], real), one.token, 0), outputs, new
        )
        if keep:
            snapshots = snapshots.put(slots[one.token + one.count - 1], states, one.position + one.count)
        return outputs, states, snapshots

    outputs, _, snapshots = fori_loop(0, num_tiles, step, (outputs, states, snapshots))
    return jax.tree.map(lambda x: x[:total], outputs), snapshots


def _run(cell: Cell, states: States, inputs: Any, count: jax.Array) -> tuple[Any, States]:
    """Calls the cell, and checks what it returns."""
    outputs, new = cell(states, inputs, count)
    batch = jax.tree.leaves(inputs)[0].shape[:2]
    for x in jax.tree.leaves(outputs):
        if x.shape[:2] != batch:
            raise ValueError(
                f"cell: got outputs of shape {x.shape}, wanted [{batch[0]}, {batch[1]}, ...] like its inputs"
            )
    got, wanted = ({name: f"{x.dtype}{list(x.shape)}" for name, x in of.items()} for of in (new, states))
    if got != wanted:
        raise ValueError(f"cell: got states {got}, wanted {wanted}")
    return outputs, new


def _masked(x: jax.Array, real: jax.Array) -> jax.Array:
    """Zeros in place of x [n, ...] where not real bool[n]."""
    return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def _check_inputs(inputs: Any, view: View) -> None:
    leaves = jax.tree.leaves(inputs)
    batch = view.positions.shape
    wrong = next((x.shape for x in leaves if x.shape[:2] != batch), None)
    if wrong is not None or not leaves:
        raise ValueError(f"inputs: got shape {wrong}, wanted [{batch[0]}, {batch[1]}, ...] as the view's tokens")
