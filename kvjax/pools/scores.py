# SPDX-License-Identifier: Apache-2.0
"""Scores of the blocks of a view's rows, to choose some of them with `select_blocks`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.checks import floats
from kvjax.layers import MeshAxes
from kvjax.pools.device import Pools, attention_pool, check_fit
from kvjax.pools.views import View
from pallas_kernels.by_token import blocks_by_head, is_by_token

_LOWEST = np.float32(-1e30)  # finite: score - maximum is never inf - inf


def block_mass(
    q: jax.Array,
    pools: Pools,
    layer: int | jax.Array,
    view: View,
    *,
    index: ArrayLike | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    last: int | None = None,
) -> jax.Array:
    """Attention mass of each block: the weights of its tokens, summed over a view's tokens and their query heads.

    A token gives each kv head a mass of Q / K in total. The softmax is causal and over all blocks of the view, and has
    no sinks. A single pass reads all keys, and takes memory for a score of each slot of the table.

    Args:
      q: [R, C, Q, D], or [1, T, Q, D] for a flat view; as in `attend`.
      pools: the K/V, already written for the view's tokens.
      layer: the model's layer number, of a layer with full attention; traced as in `attend`.
      view: the positions of the tokens. Its table says which blocks have a score.
      index: i32[]; the layer's index in its pool, as in `attend`.
      scale: factor on the scores. Defaults to 1 / sqrt(D).
      soft_cap: bound of the scores as in `attend`. None disables it.
      last: the number of last tokens of each row to sum over. None means all.

    Returns:
      f32[R, K, M], zeros for a column without tokens.

    Raises:
      ValueError: if an argument does not fit, as in `attend`, or a mesh divides the tokens of blocks.

    Example:
      >>> layers = [kvjax.LayerSpec(kv_heads=1, head_dim=2)]
      >>> spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=1, max_length=16, block_size=4, dtype="float32")
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> view = kvjax.view(state, 10)
      >>> q = jnp.zeros((1, 10, 1, 2))  # equal scores: the last token gives each of 10 tokens a tenth
      >>> kvjax.pools.block_mass(q, kvjax.init_pools(spec), 0, view, last=1)[0, 0].round(3).tolist()
      [0.4000000059604645, 0.4000000059604645, 0.20000000298023224, 0.0]

    Source: the scores of H2O and SnapKV, here for blocks.
    """
    check_fit(pools, view)
    group, pool, index, array, spec = attention_pool(pools, layer, index)
    _check_whole(pools, group)
    q = floats("q", q)
    width = spec.head_dim
    if q.shape[:2] != view.positions.shape or q.shape[3] != width:
        raise ValueError(f"q: got shape {q.shape}, wanted {(*view.positions.shape, 'Q', width)}")
    factor = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)

    def compute(q, pool, index, scales, table, lengths, num_tokens, starts):
        def of_row(queries, first, table, length, count):
            keys = _keys(pool, index, scales, table, width)
            score = _scores(queries.astype(jnp.float32) * factor, keys)  # [K, C, G, M, P]
            if soft_cap is not None:
                score = np.float32(soft_cap) * jnp.tanh(score / np.float32(soft_cap))
            offset = np.arange(queries.shape[0], dtype=np.int32) - first
            is_counted = (offset >= (0 if last is None else count - last)) & (offset >= 0) & (offset < count)
            slot = np.arange(table.shape[0] * keys.shape[2], dtype=np.int32).reshape(-1, keys.shape[2])
            is_seen = slot[None] <= (length - count + offset)[:, None, None]
            score = jnp.where(is_seen[None, :, None], score, -jnp.inf)
            highest = jnp.max(score, axis=(3, 4), keepdims=True, initial=_LOWEST)
            weight = jnp.exp(score - highest)
            mass = jnp.sum(weight, axis=4) / jnp.sum(weight, axis=(3, 4))[..., None]
            return jnp.sum(jnp.where(is_counted[None, :, None, None], mass, 0.0), axis=(1, 2))

        if starts is None:
            return jax.vmap(of_row)(q, jnp.zeros_like(lengths), table, lengths, num_tokens)
        return jax.lax.map(lambda row: of_row(q[0], *row), (starts, table, lengths, num_tokens))

    operands = {
        "q": q,
        "pool": array,
        "index": index,
        "scales": pools.scales_of(group, pool),
        "table": view.tables[group],
        "lengths": view.lengths_of(group),
        "num_tokens": view.num_tokens,
        "starts": view.starts,
    }
    heads = MeshAxes(2 if spec.values is None else None)
    axes = {"q": heads, "pool": spec.mesh_axes, "scales": spec.mesh_axes}
    with jax.named_scope("block_mass"):
        out_axes = MeshAxes(1 if spec.values is None else None)
        return pools.over_devices(group, compute, operands, axes, out_axes)


def key_bounds(
    pools: Pools, layer: int | jax.Array, view: View, *, index: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest key of each block, element by element.

    They bound the scores of a block's keys from above: a query's largest score is at most the sum over its elements of
    q * low or q * high, whichever is larger. To keep bounds from step to step, compute those of the view's own blocks
    anew: `select_blocks(view, no columns)` moves them to the front of the table.

    Args:
      pools: the K/V, already written for the view's tokens.
      layer: the model's layer number; traced as in `attend`.
      view: the blocks, and how many of their tokens count.
      index: i32[]; the layer's index in its pool, as in `attend`.

    Returns:
      Minima and maxima, f32[R, K, M, D] each. A column without tokens has +inf and -inf.

    Raises:
      ValueError: as `block_mass`.

    Example:
      >>> layers = [kvjax.LayerSpec(kv_heads=1, head_dim=2)]
      >>> spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=1, max_length=8, block_size=4, dtype="float32")
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(6), 6)
      >>> view = kvjax.view(state, 6)
      >>> k = jnp.arange(12.0).reshape(1, 6, 1, 2)
      >>> low, high = kvjax.pools.key_bounds(kvjax.write(kvjax.init_pools(spec), 0, k, k, view), 0, view)
      >>> low[0, 0].tolist(), high[0, 0].tolist()  # four keys, then two
      ([[0.0, 1.0], [8.0, 9.0]], [[6.0, 7.0], [10.0, 11.0]])

    Source: Quest.
    """
    check_fit(pools, view)
    group, pool, index, array, spec = attention_pool(pools, layer, index)
    _check_whole(pools, group)

    def compute(pool, index, scales, table, lengths):
        keys = jax.vmap(lambda row: _keys(pool, index, scales, row, spec.head_dim))(table)  # [R, M, K, P, D]
        slot = np.arange(keys.shape[1] * keys.shape[3], dtype=np.int32).reshape(1, keys.shape[1], 1, keys.shape[3], 1)
        is_token = slot < lengths.reshape(-1, 1, 1, 1, 1)
        low = jnp.min(jnp.where(is_token, keys, jnp.inf), axis=3)
        high = jnp.max(jnp.where(is_token, keys, -jnp.inf), axis=3)
        return low.swapaxes(1, 2), high.swapaxes(1, 2)

    operands = {
        "pool": array,
        "index": index,
        "scales": pools.scales_of(group, pool),
        "table": view.tables[group],
        "lengths": view.lengths_of(group),
    }
    axes = {"pool": spec.mesh_axes, "scales": spec.mesh_axes}
    with jax.named_scope("key_bounds"):
        out_axes = MeshAxes(1 if spec.values is None else None)
        return pools.over_devices(group, compute, operands, axes, (out_axes, out_axes))


def _keys(pool: jax.Array, index: jax.Array | int, scales: jax.Array | None, table: jax.Array, width: int) -> jax.Array:
    """The keys f32[M, K, P, D] of the blocks of a row's table i32[M]."""
    rows = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    if is_by_token(pool):
        blocks = pool.at[table, index].get(**rows).astype(jnp.float32)
        return blocks_by_head(blocks[:, None], width)[:, 0, 0]
    keys = pool.at[table, index, 0].get(**rows).astype(jnp.float32)
    for scale in jax.tree.leaves(scales):  # a quantised pool has one array of them, others none
        keys = keys * scale.at[table, index, 0].get(**rows)[..., None]
    return keys


def _scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Scores f32[K, C, G, M, P] of queries f32[C, Q, D], which are scaled, with keys [M, K, P, D]."""
    queries = queries.reshape(queries.shape[0], keys.shape[1], -1, queries.shape[-1])
    return jnp.einsum("ckgd,mkpd->kcgmp", queries, keys, preferred_element_type=jnp.float32)


def _check_whole(pools: Pools, group: int) -> None:
    if (context := pools.context(group)) is not None:
        raise ValueError(f"pools: got blocks whose tokens axis {context.axis!r} divides, wanted whole blocks")
