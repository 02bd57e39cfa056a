# SPDX-License-Identifier: Apache-2.0
"""The host tier: the names to import for it."""

from kvjax.events.transfer import Transfer
from kvjax.pools.host import HostPools, TransferError, init_host_pools, move
from kvjax.tiered import FailedTransfer, TieredCache
from kvjax.verbs.backup import backup
from kvjax.verbs.offload import complete, offload, onboard, watermark
from kvjax.verbs.swap import swap_in, swap_out

__all__ = [
    "FailedTransfer",
    "HostPools",
    "TieredCache",
    "Transfer",
    "TransferError",
    "backup",
    "complete",
    "init_host_pools",
    "move",
    "offload",
    "onboard",
    "swap_in",
    "swap_out",
    "watermark",
]
