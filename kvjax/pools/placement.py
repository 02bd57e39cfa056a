# SPDX-License-Identifier: Apache-2.0
"""Pools on several devices: each has its share of the kv heads of every block, and computes with these alone.

Latents have one kv head: each device has a copy of all of them, and computes its share of the query heads. A second
axis of the mesh can divide the tokens of every block (`pools/context.py`), where no window bounds what is read.

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

from kvjax.layers import MeshAxes
from kvjax.pools.context import Context
from kvjax.spec import CacheSpec, GroupSpec, Kind, PoolSpec


@dataclasses.dataclass(frozen=True)
class Placement:
    """The axes of a mesh that divide pools: the kv heads, and the tokens of a block; along others the pools are copies.

    Attributes:
      mesh: the mesh; another one that is in context takes its place.
      heads: the name of the axis that divides the kv heads.
      context: the axis that divides blocks; None: each device has whole ones.
    """

    mesh: AbstractMesh
    heads: str
    context: Context | None = None

    def of_group(self, group: GroupSpec) -> Placement:
        """The placement of one group's pools: without full attention its blocks are whole on each device."""
        return self if group.kind is Kind.FULL else dataclasses.replace(self, context=None)

    def over_devices(
        self,
        function: Callable[..., Any],
        operands: Mapping[str, Any],
        axes: Mapping[str, MeshAxes],
        out_axes: Any,
    ) -> Any:
        """function(**operands), on each device with its own heads and tokens.

        Args:
          function: computes each head by itself, and with the methods of `context` each token. It must not close over
            an array.
          operands: arrays, ints or None.
          axes: the axes of an operand that are divided; of operands that are not named: all devices have the same.
          out_axes: likewise for the results, a tree.

        Raises:
          ValueError: if the mesh in context lacks an axis or does not divide an operand's heads, if a pool of Explicit
            axes is not divided over them, or if the caller has mapped the axis that divides blocks.
        """
        mesh = self._mesh()
        names = {self.heads, *([self.context.axis] if self.context else [])} - {*mesh.manual_axes}
        if not names:  # the caller has mapped the whole step: these are a device's own heads
            return function(**operands)
        parts = mesh.shape[self.heads] if self.heads in names else 1
        for name, axis in axes.items():
            x = operands[name]
            if axis.heads is not None and x is not None and x.shape[axis.heads] % parts:
                devices = f"that the {parts} devices of mesh axis {self.heads!r} divide"
                raise ValueError(f"{name}: got {x.shape[axis.heads]} heads, wanted a number of them {devices}")
        specs = {name: self.partition(axes.get(name, MeshAxes()), names) for name in operands}
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
        if explicit:
            operands = {name: _placed(name, x, NamedSharding(mesh, specs[name])) for name, x in operands.items()}
        return jax.shard_map(
            lambda operands: function(**operands),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=jax.tree.map(lambda axes: self.partition(axes, names), out_axes),
            axis_names={*names, *explicit},
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
        if self.context and dict(mesh.shape).get(self.context.axis) != self.context.size:
            axis = f"an axis {self.context.axis!r} of {self.context.size} devices"
            raise ValueError(f"mesh: got {dict(mesh.shape)} in context, wanted {axis}, which divides the pools")
        if self.context and self.context.axis in mesh.manual_axes:
            raise ValueError(
                f"context: got a step whose caller has mapped axis {self.context.axis!r} of the mesh, wanted one that "
                "leaves it to write, attend and apply"
            )
        return mesh

    def partition(self, axes: MeshAxes, names: set[str] | None = None) -> P:
        """The partition of an array over the axes of these names, all if None."""
        divided = [(axes.heads, self.heads), (axes.slots, self.context.axis if self.context else None)]
        at = {axis: name for axis, name in divided if axis is not None and (names is None or name in names) and name}
        return P(*(at.get(axis) for axis in range(max(at, default=-1) + 1)))


def _placed(name: str, x: Any, wanted: NamedSharding) -> Any:
    """An operand of Explicit axes as the map wants it. A pool that lies otherwise is refused: it would be gathered."""
    if x is None or isinstance(x, int):
        return x
    have = jax.typeof(x).sharding.spec
    spec = P(*wanted.spec, *[None] * (x.ndim - len(wanted.spec)))
    if name in ("pool", "scales") and have != spec:
        raise ValueError(f"pools: got arrays divided as {have}, wanted {spec}, as kvjax.init_pools(mesh=) makes them")
    return jax.sharding.reshard(x, wanted.update(spec=spec))


def placement_of(
    spec: CacheSpec, mesh: Mesh | None, heads: str | None, context: str | None
) -> tuple[Placement | None, Callable[[GroupSpec, MeshAxes], NamedSharding] | None]:
    """The placement of pools, and the sharding of an array of a group; None without a mesh: `init_pools`."""
    if mesh is None and heads is None and context is None:
        return None, None
    _, parts = num_shards(spec, mesh, heads, context)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: got {mesh!r}, wanted a jax.sharding.Mesh, which has devices")
    if AxisType.Explicit in mesh.axis_types and jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            "mesh: got Explicit axes and no mesh in context, wanted `with jax.set_mesh(mesh):` around the cache and "
            "all that uses it, or axis_types=(jax.sharding.AxisType.Auto,) * n in jax.make_mesh"
        )
    divided = None if context is None else Context(context, parts)
    placement = Placement(mesh.abstract_mesh, cast(str, heads), divided)
    return placement, lambda group, axes: NamedSharding(mesh, placement.of_group(group).partition(axes))


def num_shards(
    spec: CacheSpec, mesh: Mesh | AbstractMesh | None, heads: str | None, context: str | None
) -> tuple[int, int]:
    """The numbers of parts into which these axes of a mesh divide heads and blocks; ValueError if they cannot."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh: got {mesh!r}, wanted a jax.sharding.Mesh, such as jax.make_mesh makes")
    if heads not in mesh.axis_names:
        raise ValueError(f"heads: got {heads!r}, wanted one of the mesh's axes {mesh.axis_names}")
    if context is not None and (context not in mesh.axis_names or context == heads):
        others = tuple(name for name in mesh.axis_names if name != heads)
        raise ValueError(f"context: got {context!r}, wanted one of the mesh's axes {others}, or None")
    shards = mesh.shape[heads]
    parts = 1 if context is None else mesh.shape[context]
    for pool in (pool for group in spec.groups for pool in group.pools):
        for size, what in _divided(pool):
            if size % shards:
                raise ValueError(
                    f"heads: got axis {heads!r} of {shards} devices, wanted one that divides the {size} {what} "
                    f"of layers {list(pool.layers)}"
                )
    if spec.block_size % parts:
        raise ValueError(
            f"context: got axis {context!r} of {parts} devices, wanted one that divides blocks of {spec.block_size} "
            "tokens"
        )
    return shards, parts


def _divided(pool: PoolSpec) -> list[tuple[int, str]]:
    """The sizes that a mesh has to divide, with names; a latent is the same on each device."""
    if pool.arrays:
        return [(one.shape[one.axis], f"parts of {one.name!r}") for one in pool.arrays if one.axis is not None]
    return [(pool.kv_heads, "kv heads")] if pool.values is None else []
