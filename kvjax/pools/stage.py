# SPDX-License-Identifier: Apache-2.0
"""Blocks outside their pools: arrays of their own, on the way from a cache or into one."""

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
from kvjax.spec import CacheSpec


class Staged(Pytree, static=("spec",)):
    """The bytes of some blocks, K_g of each group.

    Attributes:
      arrays: per group, per pool [K_g, L, 2, K, P, D], of latents [K_g, L, 1, 1, P, D]; of recurrent layers
        {name: [K_g, L, ...]}.
      spec: static; shapes.
      scales: per group, per pool f32[K_g, L, 2, K, P] if it is quantised, else None.
    """

    arrays: tuple[tuple[Any, ...], ...]
    spec: CacheSpec
    scales: tuple[tuple[jax.Array | None, ...], ...] | None = None


def gather(pools: Pools, rows: Sequence[Any] | jax.Array) -> Staged:
    """Copies blocks out of their pools.

    Args:
      pools: the K/V.
      rows: for each group i32[K_g]; pool rows on the device; the scratch row is padding.
    """

    def read(number: int, pool: jax.Array, axes: MeshAxes) -> jax.Array:
        blocks = integers(f"rows[{number}]", rows[number], ("K",))
        if pool.ndim == 2:  # of snapshots, after how many tokens they are
            return pick(pool, blocks)
        context = pools.context(number)

        def whole(pool, blocks):
            found = pallas_kernels.call("gather_blocks", pool, blocks)
            return found if context is None else context.whole(found)

        operands = {"pool": pool, "blocks": blocks}
        return pools.over_devices(number, whole, operands, {"pool": axes}, MeshAxes(axes.heads))

    return Staged(_each(read, pools, pools.arrays), pools.spec, _each(read, pools, pools.scales))


def scatter(pools: Pools, staged: Staged, rows: Sequence[Any] | jax.Array, counts: Sequence[Any] | jax.Array) -> Pools:
    """Writes blocks into pool rows, in place if the caller donates the pools.

    Args:
      pools: the K/V.
      staged: the blocks, of a cache with the same layers and block size; None for an array of which there are none.
      rows: for each group i32[K_g]; where each goes, all different; the scratch row drops it.
      counts: for each group i32[]; how many leading ones are written. The cost follows them.
    """

    def write(number: int, pool: jax.Array, axes: MeshAxes, blocks: jax.Array) -> jax.Array:
        target = integers(f"rows[{number}]", rows[number], ("K",))
        most = jnp.asarray(counts[number], jnp.int32)
        if pool.ndim == 2:
            return put(pool, target, blocks, jnp.arange(target.shape[0], dtype=jnp.int32) < most)
        context = pools.context(number)

        def put_part(pool, staged, blocks, count):
            staged = staged if context is None else context.part(staged)
            return pallas_kernels.call("scatter_blocks", pool, staged, blocks, count)

        operands = {"pool": pool, "staged": blocks, "blocks": target, "count": most}
        of_operands = {"pool": axes, "staged": MeshAxes(axes.heads)}
        return pools.over_devices(number, put_part, operands, of_operands, axes)

    return pools.replace(
        arrays=_each(write, pools, pools.arrays, staged.arrays), scales=_each(write, pools, pools.scales, staged.scales)
    )


def _each(function: Callable[..., jax.Array], pools: Pools, *trees: Any) -> Any:
    """function(number of the group, array, its `MeshAxes`, ...) for each array of a tree of the pools' form."""
    if trees[0] is None:
        return None

    def of_pool(number: int, pool: int, axes: Any) -> Any:
        first, *others = (tree[number][pool] for tree in trees)
        of_group = functools.partial(function, number)
        if any(tree is None for tree in (first, *others)):
            return first
        return jax.tree.map(of_group, first, axes, *others)

    return tuple(
        tuple(of_pool(number, at, pool.mesh_axes) for at, pool in enumerate(group.pools))
        for number, group in enumerate(pools.spec.groups)
    )


def check_staged(staged: Any, spec: CacheSpec, columns: int) -> None:
    """Raises a ValueError unless these are `columns` blocks of each group of a cache with this layout."""
    if not isinstance(staged, Staged):
        raise ValueError(f"kv: got a {type(staged).__name__}, wanted Staged blocks, such as kvjax.stores.gather makes")
    lengths = [len(group.pools) for group in spec.groups]
    has_scales = any(pool.quantised for group in spec.groups for pool in group.pools)
    for name, part, wanted in ("arrays", staged.arrays, lengths), ("scales", staged.scales, lengths * has_scales):
        if (found := [len(of_group) for of_group in part or ()]) != wanted:
            raise ValueError(f"kv.{name}: got pools of groups {found}, wanted {wanted}")
    for number, group in enumerate(spec.groups):
        for at, pool in enumerate(group.pools):
            rows = columns, len(pool.layers)
            blocks = jax.tree.leaves(pool.block_shape(spec.block_size))
            _check(f"kv.arrays[{number}][{at}]", staged.arrays[number][at], rows, blocks)
            if staged.scales and pool.quantised:
                scales = jax.ShapeDtypeStruct(blocks[0].shape[:-1], jnp.float32)
                _check(f"kv.scales[{number}][{at}]", staged.scales[number][at], rows, [scales])


def _check(name: str, tree: Any, rows: tuple[int, ...], blocks: Sequence[jax.ShapeDtypeStruct]) -> None:
    wanted = [((*rows, *block.shape), block.dtype) for block in blocks]
    found = [(one.shape, one.dtype) for one in jax.tree.leaves(tree)]
    if found != wanted:
        raise ValueError(f"{name}: got {found}, wanted {wanted}")
