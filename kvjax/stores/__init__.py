# SPDX-License-Identifier: Apache-2.0
"""K/V that outlive a process, or come from another one: verbs by which they enter a cache, a saved cache, a disk.

A stored block has one format (`values.py`): a save is a pack of the values that a `DiskStore` writes one by one.
`DiskStore` needs tensorstore, of the extra `stores`; the rest needs nothing more than kvjax does.
"""

from kvjax.events.records import Adopted
from kvjax.pools.stage import Staged, gather, scatter
from kvjax.stores.disk import DiskStore
from kvjax.stores.file import load, save
from kvjax.stores.manifest import SaveFolder, check_folder
from kvjax.stores.restore import Loaded
from kvjax.verbs.adopt import adopt, finish_adoption

__all__ = [
    "Adopted", "DiskStore", "Loaded", "SaveFolder", "Staged", "adopt", "check_folder", "finish_adoption", "gather",
    "load", "save", "scatter",
]  # fmt: skip
