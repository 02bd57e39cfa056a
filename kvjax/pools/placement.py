# SPDX-License-Identifier: Apache-2.0
"""Pools on several devices: each has a share of the kv heads of every block, and computes only with these heads.

Latents have a single kv head. Each device has a copy of all latents, and computes its share of the query heads. A
second axis of the mesh can divide the tokens of every block (`pools/context.py`), in groups with full attention.

XLA cannot divide a kernel among devices, and would gather whole pools for it. So `write`, `attend` and `apply` map
their kernel calls over the devices. Nothing else touches a pool.
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
from pallas_kernels.by_token import token_rows


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh axes to divide pools: their kv heads, and the tokens of a block.

    Along other axes of the mesh the pools are replicated.

    Attributes:
      mesh: the mesh; a mesh in context replaces it.
      heads: the name of the axis to divide the kv heads.
      context: the axis to divide blocks. None means whole blocks on each device.
    """

    mesh: AbstractMesh
    heads: str
    context: Context | None = None

    def of_group(self, group: GroupSpec) -> Placement:
        """The placement of a group's pools. Unless it has full attention, each device has whole blocks."""
        return self if group.kind is Kind.FULL else dataclasses.replace(self, context=None)

    def over_devices(
        self,
        function: Callable[..., Any],
        operands: Mapping[str, Any],
        axes: Mapping[str, MeshAxes],
        out_axes: Any,
    ) -> Any:
        """Calls function(**operands) on each device with its heads and tokens.

        Args:
          function: computes each head separately. It may combine tokens of several devices only with the methods of
            `context`. It must not close over an array.
          operands: arrays, ints or None.
          axes: the divided axes of each operand. Operands without an entry are the same on all devices.
          out_axes: the divided axes of the results, a tree.

        Raises:
          ValueError: if the mesh in context lacks an axis or does not divide an operand's heads, a pool of Explicit
            axes is not divided over them, or the caller has mapped the axis that divides blocks.
        """
        mesh = self._mesh()
        names = {self.heads, *([self.context.axis] if self.context else [])} - {*mesh.manual_axes}
        if not names:  # the caller has mapped the whole step, so the operands belong to one device
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
        """The mesh in context, else the mesh of the pools."""
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
        """The partition of an array over the axes of these names. None means all axes."""
        divided = [(axes.heads, self.heads), (axes.slots, self.context.axis if self.context else None)]
        mesh_axis_of = {
            axis: name for axis, name in divided if axis is not None and (names is None or name in names) and name
        }
        return P(*(mesh_axis_of.get(axis) for axis in range(max(mesh_axis_of, default=-1) + 1)))


def _placed(name: str, x: Any, wanted: NamedSharding) -> Any:
    """Gives an operand of Explicit axes the map's partition. Refuses pools of another partition, to avoid a gather."""
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
    """The placement of pools, and the sharding of a group's array. None without a mesh (see `init_pools`)."""
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
    """The number of shards of heads and of blocks along these axes. Raises a ValueError if they cannot divide them."""
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
        for size, size_name in _divided(pool):
            if size % shards:
                raise ValueError(
                    f"heads: got axis {heads!r} of {shards} devices, wanted one that divides the {size} {size_name} "
                    f"of layers {list(pool.layers)}"
                )
    if spec.block_size % parts:
        raise ValueError(
            f"context: got axis {context!r} of {parts} devices, wanted one that divides blocks of {spec.block_size} "
            "tokens"
        )
    if parts > 1 and any(pool.by_token for group in spec.groups for pool in group.pools):
        raise ValueError("context: got a mesh axis for K/V with layout='tokens', wanted None, or layout='heads'")
    return shards, parts


def _divided(pool: PoolSpec) -> list[tuple[int, str]]:
    """The sizes for a mesh to divide, with names. Latents have none: they are the same on each device."""
    if pool.arrays:
        return [
            (array.shape[array.axis], f"parts of {array.name!r}") for array in pool.arrays if array.axis is not None
        ]
    if pool.by_token:
        rows, _ = token_rows(pool.kv_heads, pool.head_dim)
        return [(rows, "rows of kv heads") if rows < pool.kv_heads else (pool.kv_heads, "kv heads")]
    return [(pool.kv_heads, "kv heads")] if pool.values is None else []
