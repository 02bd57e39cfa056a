# SPDX-License-Identifier: Apache-2.0
"""K/V that outlive a process, or come from another one: the verbs by which they enter a cache, and a saved cache.

`save` and `load` need safetensors, of the extra `stores`; the rest needs nothing more than kvjax does.
"""

from kvjax.events.records import Adopted
from kvjax.pools.stage import Staged, gather, scatter
from kvjax.stores.file import load, save
from kvjax.stores.restore import Loaded
from kvjax.verbs.adopt import adopt, land

__all__ = ["Adopted", "Loaded", "Staged", "adopt", "gather", "land", "load", "save", "scatter"]
