# SPDX-License-Identifier: Apache-2.0
"""K/V that outlive a process or come from another: a saved cache, a store on disk, and the verbs for K/V from outside.

A stored block has a single format (`values.py`). A save packs the values, and a `DiskStore` writes them separately.
`DiskStore` needs tensorstore, from the extra `stores`. The rest needs nothing beyond kvjax.
"""

from kvjax.events.records import Adopted
from kvjax.pools.stage import Staged, gather, scatter
from kvjax.stores.disk import DiskStore
from kvjax.stores.file import load, save
from kvjax.stores.manifest import SaveFolder, check_folder
from kvjax.stores.restore import Loaded
from kvjax.verbs.adopt import adopt, finish_adoption

__all__ = [
    "Adopted",
    "DiskStore",
    "Loaded",
    "SaveFolder",
    "Staged",
    "adopt",
    "check_folder",
    "finish_adoption",
    "gather",
    "load",
    "save",
    "scatter",
]
