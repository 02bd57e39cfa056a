# SPDX-License-Identifier: Apache-2.0
"""The devices of replicas: each has one, or a mesh of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.model import Model


def check_devices(devices: Sequence[Any], heads: str | None) -> None:
    """Raises a ValueError that names the argument unless each replica has devices of its own, in this process."""
    if not devices:
        raise ValueError("devices: got none, wanted at least one device or mesh")
    seen = set[jax.Device]()
    for one in devices:
        if not isinstance(one, jax.Device | Mesh):
            raise ValueError(f"devices: got {one!r:.80}, wanted devices and meshes")
        if isinstance(one, Mesh) and heads not in one.axis_names:
            raise ValueError(f"heads: got {heads!r}, wanted one of the mesh's axes {one.axis_names}")
        for device in one.devices.flat if isinstance(one, Mesh) else [one]:
            if device in seen:
                raise ValueError(f"devices: got {device} twice, wanted other devices for each replica")
            if device.process_index != jax.process_index():
                raise ValueError(f"devices: got {device} of process {device.process_index}, wanted those of this one")
            seen.add(device)
    if heads is not None and not any(isinstance(one, Mesh) for one in devices):
        raise ValueError(f"heads: got {heads!r} without a mesh, wanted None")


def where(device: Any, heads: str | None) -> dict[str, Any]:
    """The arguments of `Cache.create`."""
    return {"mesh": device, "heads": heads} if isinstance(device, Mesh) else {}


def on(device: Any) -> Any:
    """A context in which programs run on a device, or on a mesh."""
    if isinstance(device, Mesh):
        return jax.set_mesh(device) if AxisType.Explicit in device.axis_types else contextlib.nullcontext()
    return jax.default_device(device)


def with_weights(model: Model, device: Any) -> Any:
    """The model with its weights there; on a mesh each keeps its `PartitionSpec`."""
    if not isinstance(device, Mesh):
        return jax.device_put(model, device)

    def put(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(device, spec))

    return jax.tree.map(put, model)
