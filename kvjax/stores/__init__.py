# SPDX-License-Identifier: Apache-2.0
"""K/V outside of a cache: saves, a store on disk, and the verbs that bring K/V into a cache.

A stored block has a single format (`values.py`). A save packs the values, and a `DiskStore` writes them separately.
`DiskStore` needs tensorstore, from the extra `stores`. The rest needs no extra.
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
