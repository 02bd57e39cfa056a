# SPDX-License-Identifier: Apache-2.0
"""The bytes of a cache, on the device and on the host. They follow the events."""

from kvjax.pools.attention import attend
from kvjax.pools.device import Pools, apply, init_pools, write
from kvjax.pools.host import HostPools, TransferError, init_host_pools, move
from kvjax.pools.recurrent import recur
from kvjax.pools.rotary import rope_write
from kvjax.pools.views import View, mixed, ragged, rest, view

__all__ = [
    "HostPools",
    "Pools",
    "TransferError",
    "View",
    "apply",
    "attend",
    "init_host_pools",
    "init_pools",
    "mixed",
    "move",
    "ragged",
    "recur",
    "rest",
    "rope_write",
    "view",
    "write",
]
