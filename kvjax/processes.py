# SPDX-License-Identifier: Apache-2.0
"""Makes the host code of several processes with a common cache decide alike.

Each process runs the same program on its own devices, with the same arguments. jax does not check that the numbers of
all processes are equal, and would keep different states. So the processes have to agree first on anything that only
one of them sees. If all devices belong to a single process, each function returns its argument.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.state import CacheState

__all__ = ["agreed_time", "failed_anywhere"]


def agreed_time(state: CacheState, time: int) -> int:
    """The first process's time, i32, for the `now` of verbs.

    Args:
      state: the cache.
      time: this process's reading of its clock.
    """
    return int(_of_each_device(state, time)[0])


def failed_anywhere(state: CacheState, failed: bool) -> bool:
    """Whether something failed in any process, such as a move between the tiers.

    Args:
      state: the cache.
      failed: whether it failed in this process.
    """
    return bool(_of_each_device(state, failed).any())


def _of_each_device(state: CacheState, value: int) -> np.ndarray:
    """i32[devices]; the values of the processes with the state's devices, in the order of the processes."""
    devices = sorted(state.seqs.length.sharding.device_set, key=lambda device: (device.process_index, device.id))
    if devices[0].process_index == devices[-1].process_index:
        return np.array([value], np.int32)
    mesh = Mesh(np.array(devices), ("devices",))
    values = jax.make_array_from_callback(
        (len(devices),), NamedSharding(mesh, P("devices")), lambda _: np.array([value], np.int32)
    )
    return np.asarray(jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, P()))(values))
