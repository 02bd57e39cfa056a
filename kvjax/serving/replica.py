# SPDX-License-Identifier: Apache-2.0
"""A replica: a device or a mesh, with the model's weights and a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.model import Model
from kvjax.serving.generation import run_batch
from kvjax.serving.interrupt import GenerationInterrupted
from kvjax.serving.request import Request, RunOptions
from kvjax.serving.requests import Output
from kvjax.serving.routing import CachedPrefixes


class Replica:
    """A model and a cache on a device, or on a mesh.

    Args:
      device: a device, or a mesh.
      model: the model, with its weights there.
      make_cache: makes an empty cache there.

    Attributes:
      cache: the latest cache, or None if a failure has cost it, until `recover`.
      prefixes: prefixes of the cache, from its events.
    """

    def __init__(self, device: Any, model: Model, make_cache: Callable[[], Any]):
        self._device = device
        self.model = model
        self._make_cache = make_cache
        self.cache = self._empty()
        self.prefixes = CachedPrefixes(self.cache.state.spec)

    def run(self, requests: Sequence[Request], options: RunOptions) -> list[Output]:
        """Runs requests like `run_batch`, on this thread. A GenerationInterrupted leaves its cache here."""
        try:
            with on(self._device):
                outputs, self.cache, _ = run_batch(self.model, self.cache, requests, options)
        except GenerationInterrupted as error:
            self.cache = error.cache
            raise
        return outputs

    def recover(self) -> bool:
        """Continues with the cache that a failure left, or with an empty cache. Returns whether the cache was lost."""
        is_lost = self.cache is None
        if is_lost:
            self.cache = self._empty()
        self.prefixes.attach(self.cache.state)
        return is_lost

    def _empty(self) -> Any:
        """Makes an empty cache, committed to its devices like the caches of runs, so jax compiles only once."""
        with on(self._device):
            return jax.tree.map(lambda x: jax.device_put(x, x.sharding), self._make_cache())


def check_devices(devices: Sequence[Any], heads: str | None) -> None:
    """Raises a ValueError naming the argument, unless each replica has separate devices of this process."""
    if not devices:
        raise ValueError("devices: got none, wanted at least one device or mesh")
    seen = set[jax.Device]()
    for place in devices:
        if not isinstance(place, jax.Device | Mesh):
            raise ValueError(f"devices: got {place!r:.80}, wanted devices and meshes")
        if isinstance(place, Mesh) and heads not in place.axis_names:
            raise ValueError(f"heads: got {heads!r}, wanted one of the mesh's axes {place.axis_names}")
        for device in place.devices.flat if isinstance(place, Mesh) else [place]:
            if device in seen:
                raise ValueError(f"devices: got {device} twice, wanted other devices for each replica")
            if device.process_index != jax.process_index():
                raise ValueError(f"devices: got {device} of process {device.process_index}, wanted this process")
            seen.add(device)
    if heads is not None and not any(isinstance(place, Mesh) for place in devices):
        raise ValueError(f"heads: got {heads!r} without a mesh, wanted None")


def on(device: Any) -> Any:
    """A context in which programs run on a device, or on a mesh."""
    if isinstance(device, Mesh):
        return jax.set_mesh(device) if AxisType.Explicit in device.axis_types else contextlib.nullcontext()
    return jax.default_device(device)


def with_weights(model: Model, device: Any) -> Model:
    """Moves the model's weights there. On a mesh each weight keeps its `PartitionSpec`."""
    if not isinstance(device, Mesh):
        return jax.device_put(model, device)

    def put(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(device, spec))

    return jax.tree.map(put, model)
