# SPDX-License-Identifier: Apache-2.0
"""Blocks outside of pools, in separate arrays, on their way out of a cache or into a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from kvjax._arrays import Pytree, pick, put
from kvjax.checks import integers
from kvjax.layers import MeshAxes
from kvjax.pools.device import Pools
from kvjax.spec import CacheSpec, PoolSpec
from pallas_kernels.by_token import blocks_by_head, blocks_by_token


class Staged(Pytree, static=("spec",)):
    """The bytes of some blocks, K_g of each group.

    Attributes:
      arrays: per group and pool [K_g, L, 2, K, P, D], or [K_g, L, 1, 1, P, D] for latents; for recurrent layers {name:
        [K_g, L, ...]}.
      spec: static; shapes.
      scales: per group and pool f32[K_g, L, 2, K, P] if it is quantised, else None.
    """

    arrays: tuple[tuple[Any, ...], ...]
    spec: CacheSpec
    scales: tuple[tuple[jax.Array | None, ...], ...] | None = None


def gather(pools: Pools, rows: Sequence[Any] | jax.Array) -> Staged:
    """Copies blocks out of their pools.

    Args:
      pools: the K/V.
      rows: for each group i32[K_g]; pool rows on the device. The scratch row is padding.
    """

    def read(group_index: int, spec: PoolSpec, pool: jax.Array, axes: MeshAxes) -> jax.Array:
        blocks = integers(f"rows[{group_index}]", rows[group_index], ("K",))
        if pool.ndim == 2:  # the number of tokens before each snapshot
            return pick(pool, blocks)
        context = pools.context(group_index)

        def gather_whole(pool, blocks):
            gathered = pallas_kernels.call("gather_blocks", pool, blocks)
            gathered = blocks_by_head(gathered, spec.head_dim) if spec.by_token else gathered
            return gathered if context is None else context.whole(gathered)

        operands = {"pool": pool, "blocks": blocks}
        return pools.over_devices(group_index, gather_whole, operands, {"pool": axes}, MeshAxes(axes.heads))

    return Staged(_each(read, pools, pools.arrays), pools.spec, _each(read, pools, pools.scales))


def scatter(pools: Pools, staged: Staged, rows: Sequence[Any] | jax.Array, counts: Sequence[Any] | jax.Array) -> Pools:
    """Writes blocks into pool rows. If you donate the pools, they are updated in place.

    Args:
      pools: the K/V.
      staged: blocks of a cache with the same layers and block size; None in place of an array without blocks.
      rows: for each group i32[K_g]; the pool row of each block, all different. The scratch row drops a block.
      counts: for each group i32[]; the number of leading blocks to write, which determines the cost.
    """

    def write(group_index: int, spec: PoolSpec, pool: jax.Array, axes: MeshAxes, blocks: jax.Array) -> jax.Array:
        target = integers(f"rows[{group_index}]", rows[group_index], ("K",))
        num_blocks = jnp.asarray(counts[group_index], jnp.int32)
        if pool.ndim == 2:
            return put(pool, target, blocks, jnp.arange(target.shape[0], dtype=jnp.int32) < num_blocks)
        context = pools.context(group_index)

        def put_part(pool, staged, blocks, count):
            staged = staged if context is None else context.part(staged)
            staged = blocks_by_token(staged, pool.shape[3:]) if spec.by_token else staged
            return pallas_kernels.call("scatter_blocks", pool, staged, blocks, count)

        operands = {"pool": pool, "staged": blocks, "blocks": target, "count": num_blocks}
        axes_of = {"pool": axes, "staged": MeshAxes(axes.heads)}
        return pools.over_devices(group_index, put_part, operands, axes_of, axes)

    return pools.replace(
        arrays=_each(write, pools, pools.arrays, staged.arrays), scales=_each(write, pools, pools.scales, staged.scales)
    )


def _each(function: Callable[..., jax.Array], pools: Pools, *trees: Any) -> Any:
    """Calls function(group index, pool's spec, array, its `MeshAxes`, ...) for each array of a tree of pools' form."""
    if trees[0] is None:
        return None

    def map_pool(group_index: int, pool_index: int, spec: PoolSpec) -> Any:
        first, *others = (tree[group_index][pool_index] for tree in trees)
        if any(tree is None for tree in (first, *others)):
            return first
        return jax.tree.map(functools.partial(function, group_index, spec), first, spec.mesh_axes, *others)

    return tuple(
        tuple(map_pool(group_index, pool_index, pool) for pool_index, pool in enumerate(group.pools))
        for group_index, group in enumerate(pools.spec.groups)
    )


def check_staged(staged: Any, spec: CacheSpec, columns: int) -> None:
    """Raises a ValueError unless these are `columns` blocks of each group of a cache with this layout."""
    if not isinstance(staged, Staged):
        raise ValueError(f"kv: got a {type(staged).__name__}, wanted Staged blocks, such as kvjax.stores.gather makes")
    lengths = [len(group.pools) for group in spec.groups]
    has_scales = any(pool.quantised for group in spec.groups for pool in group.pools)
    for name, part, wanted in ("arrays", staged.arrays, lengths), ("scales", staged.scales, lengths * has_scales):
        if (num_pools := [len(pools) for pools in part or ()]) != wanted:
            raise ValueError(f"kv.{name}: got pools of groups {num_pools}, wanted {wanted}")
    for group_index, group in enumerate(spec.groups):
        for pool_index, pool in enumerate(group.pools):
            rows = columns, len(pool.layers)
            blocks = jax.tree.leaves(pool.block_shape(spec.block_size))
            _check(f"kv.arrays[{group_index}][{pool_index}]", staged.arrays[group_index][pool_index], rows, blocks)
            if staged.scales and pool.quantised:
                scales = jax.ShapeDtypeStruct(blocks[0].shape[:-1], jnp.float32)
                _check(
                    f"kv.scales[{group_index}][{pool_index}]", staged.scales[group_index][pool_index], rows, [scales]
                )


def _check(name: str, tree: Any, rows: tuple[int, ...], blocks: Sequence[jax.ShapeDtypeStruct]) -> None:
    wanted = [((*rows, *block.shape), block.dtype) for block in blocks]
    got = [(array.shape, array.dtype) for array in jax.tree.leaves(tree)]
    if got != wanted:
        raise ValueError(f"{name}: got {got}, wanted {wanted}")
