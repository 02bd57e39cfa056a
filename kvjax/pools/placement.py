# SPDX-License-Identifier: Apache-2.0
"""Pools on several devices: each device has its share of the kv heads of every block, and computes with these alone.

Latents have one kv head: each device has a copy of all of them, and computes its share of the query heads.

XLA would gather whole pools around a kernel, which it cannot divide. So `write`, `attend` and `apply` map their kernel
calls over the devices; nothing else touches a pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.spec import CacheSpec, PoolSpec


@dataclasses.dataclass(frozen=True)
class Placement:
    """One axis of a mesh, over which the kv heads of all pools are divided; along the others the pools are copies.

    Attributes:
      mesh: the mesh; another one that is in context takes its place.
      heads: the name of the axis.
    """

    mesh: AbstractMesh
    heads: str

    def over_heads(
        self, function: Callable[..., Any], operands: Mapping[str, Any], axes: Mapping[str, int], out_axes: Any
    ) -> Any:
        """function(**operands), on each device with its own heads.

        Args:
          function: computes each head by itself. It must not close over an array.
          operands: arrays, ints or None.
          axes: which axis of an operand has the heads; -1, and for operands that are not named: all have the same.
          out_axes: likewise for the results, a tree.

        Raises:
          ValueError: if the mesh in context lacks the axis or does not divide an operand's heads, or a pool of Explicit
            axes is not divided over it.
        """
        mesh = self._mesh()
        if self.heads in mesh.manual_axes:  # the caller has mapped the whole step: these are a device's own heads
            return function(**operands)
        for name, axis in axes.items():
            x = operands[name]
            if axis >= 0 and x is not None and x.shape[axis] % mesh.shape[self.heads]:
                devices = f"that the {mesh.shape[self.heads]} devices of mesh axis {self.heads!r} divide"
                raise ValueError(f"{name}: got {x.shape[axis]} heads, wanted a number of them {devices}")
        specs = {name: self.partition(axes.get(name, -1)) for name in operands}
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
        if explicit:
            operands = {name: _placed(name, x, NamedSharding(mesh, specs[name])) for name, x in operands.items()}
        return jax.shard_map(
            lambda operands: function(**operands),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=jax.tree.map(self.partition, out_axes),
            axis_names={self.heads, *explicit},
            check_vma=False,
        )(dict(operands))

    def _mesh(self) -> AbstractMesh:
        """The mesh in context, else the pools' own."""
        mesh = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if mesh.empty else mesh
        if self.heads not in mesh.axis_names:
            raise ValueError(
                f"mesh: got axes {mesh.axis_names} in context, wanted {self.heads!r}, which divides the pools"
            )
        return mesh

    def partition(self, axis: int) -> P:
        """The partition of an array that has the heads in this axis; -1: that is the same everywhere."""
        return P() if axis < 0 else P(*[None] * axis, self.heads)


def _placed(name: str, x: Any, wanted: NamedSharding) -> Any:
    """An operand of Explicit axes as the map wants it. A pool that lies otherwise is refused: it would be gathered."""
    if x is None or isinstance(x, int):
        return x
    have, spec = jax.typeof(x).sharding.spec, P(*wanted.spec, *[None] * (x.ndim - len(wanted.spec)))
    if name in ("pool", "scales") and have != spec:
        raise ValueError(f"pools: got arrays divided as {have}, wanted {spec}, as kvjax.init_pools(mesh=) makes them")
    return jax.sharding.reshard(x, wanted.update(spec=spec))


def placement_of(
    spec: CacheSpec, mesh: Mesh | None, heads: str | None
) -> tuple[Placement | None, Callable[[int], NamedSharding] | None]:
    """The placement of pools, and the sharding of an array by its axis of heads; None without a mesh: `init_pools`."""
    if mesh is None and heads is None:
        return None, None
    num_shards(spec, mesh, heads)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: got {mesh!r}, wanted a jax.sharding.Mesh, which has devices")
    if AxisType.Explicit in mesh.axis_types and jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            "mesh: got Explicit axes and no mesh in context, wanted `with jax.set_mesh(mesh):` around the cache and "
            "all that uses it, or axis_types=(jax.sharding.AxisType.Auto,) * n in jax.make_mesh"
        )
    placement = Placement(mesh.abstract_mesh, cast(str, heads))
    return placement, lambda axis: NamedSharding(mesh, placement.partition(axis))


def num_shards(spec: CacheSpec, mesh: Mesh | AbstractMesh | None, heads: str | None) -> int:
    """The number of parts into which the axis `heads` of a mesh divides the pools; ValueError if it cannot."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh: got {mesh!r}, wanted a jax.sharding.Mesh, such as jax.make_mesh makes")
    if heads not in mesh.axis_names:
        raise ValueError(f"heads: got {heads!r}, wanted one of the mesh's axes {mesh.axis_names}")
    shards = mesh.shape[heads]
    for pool in (pool for group in spec.groups for pool in group.pools):
        for size, what in _divided(pool):
            if size % shards:
                raise ValueError(
                    f"heads: got axis {heads!r} of {shards} devices, wanted one that divides the {size} {what} "
                    f"of layers {list(pool.layers)}"
                )
    return shards


def _divided(pool: PoolSpec) -> list[tuple[int, str]]:
    """The sizes that a mesh has to divide, with names; a latent is the same on each device."""
    if pool.arrays:
        return [(one.shape[one.axis], f"parts of {one.name!r}") for one in pool.arrays if one.axis is not None]
    return [(pool.kv_heads, "kv heads")] if pool.values is None else []
