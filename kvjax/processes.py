# SPDX-License-Identifier: Apache-2.0
"""Decisions of host code about a cache that several processes share: the same in all of them.

Each process runs the same program on its own devices, with the same arguments: jax does not check that numbers passed
by each process are equal, and would keep states that differ. So what a process sees alone has to be agreed on first.
With the devices of one process each function returns what it is given.
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
    """The first process's time, i32, for the verbs' `now`.

    Args:
      state: the cache.
      time: this process's reading of its clock.
    """
    return int(_of_each_device(state, time)[0])


def failed_anywhere(state: CacheState, failed: bool) -> bool:
    """Whether something failed in any process, such as a move between the tiers.

    Args:
      state: the cache.
      failed: whether it failed in this one.
    """
    return bool(_of_each_device(state, failed).any())


def _of_each_device(state: CacheState, number: int) -> np.ndarray:
    """i32[devices]; the numbers of the processes that have the state's devices, those of the first process first."""
    devices = sorted(state.seqs.length.sharding.device_set, key=lambda device: (device.process_index, device.id))
    if devices[0].process_index == devices[-1].process_index:
        return np.array([number], np.int32)
    mesh = Mesh(np.array(devices), ("devices",))
    numbers = jax.make_array_from_callback(
        (len(devices),), NamedSharding(mesh, P("devices")), lambda _: np.array([number], np.int32)
    )
    return np.asarray(jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, P()))(numbers))
