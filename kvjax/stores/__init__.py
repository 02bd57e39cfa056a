# SPDX-License-Identifier: Apache-2.0
"""K/V that outlive a process, or come from another one: the verbs by which they enter a cache."""

from kvjax.events.records import Adopted
from kvjax.pools.stage import Staged, gather, scatter
from kvjax.verbs.adopt import adopt, land

__all__ = ["Adopted", "Staged", "adopt", "gather", "land", "scatter"]
