# SPDX-License-Identifier: Apache-2.0
"""`--store` of replicas: each of them writes to a folder of its own, and finds blocks in the folders of all.

DIR/0  DIR/1  ...    a `DiskStore` each, with a writer or left by an earlier one
DIR                  may be the store of a server without replicas, which is only read
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

import numpy as np

import kvjax
from kvjax.stores import DiskStore
from kvjax.stores.values import Block

REFRESH_SECONDS = 5.0  # between two lists of the blocks of others


class SharedStore(DiskStore):
    """A store in a folder that several processes share.

    A block of another process is found within `REFRESH_SECONDS` after it was written. `max_bytes` limits the folder of
    each writer.
    """

    def __init__(self, folder: pathlib.Path, spec: kvjax.CacheSpec, **options: Any):
        """Opens the first of the folders 0, 1, 2 ... without a writer. `options` are those of `DiskStore`.

        Raises:
          ValueError: as by `DiskStore`.
        """
        for index in itertools.count():
            try:
                super().__init__(folder / str(index), spec, **options)
                break
            except ValueError as error:
                if "which has a writer" not in str(error):
                    raise
        self._folder = folder
        self._own_folder = folder / str(index)
        self._options = {**options, "readonly": True, "max_bytes": None}
        self._others = dict[pathlib.Path, DiskStore]()
        self._ends = threading.Event()
        self._follow()
        self._thread = threading.Thread(target=self._refresh, name="kvjax-store-others", daemon=True)
        self._thread.start()

    def _refresh(self) -> None:
        while not self._ends.wait(REFRESH_SECONDS):
            for store in self._others.values():
                store.refresh()
            self._follow()

    def _follow(self) -> None:
        """Opens the stores of others that are new."""
        with contextlib.suppress(OSError):  # the next time
            folders = [self._folder, *(path for path in self._folder.iterdir() if path.name.isdecimal())]
            for path in folders:
                if path != self._own_folder and path not in self._others:
                    with contextlib.suppress(ValueError):  # it is no store, or not yet
                        store = DiskStore(path, self.spec, **self._options)
                        self._others = {**self._others, path: store}

    def _holders(self, block: Block, group_index: int) -> list[DiskStore]:
        return [store for store in self._others.values() if store.has(block, group_index)]

    def has(self, block: Block, group_index: int) -> bool:
        """Whether a store is known to have a block's K/V of a group. True if the group has no K/V."""
        return super().has(block, group_index) or bool(self._holders(block, group_index))

    def read(self, block: Block, group_index: int) -> Future[list[np.ndarray] | None]:
        """Reads and checks a block of a group in another thread: the words of each array, or None."""
        holders = [] if super().has(block, group_index) else self._holders(block, group_index)
        return holders[0].read(block, group_index) if holders else super().read(block, group_index)

    @property
    def counters(self) -> dict[str, int]:
        """The counters of `DiskStore`, with the blocks that were read from others."""
        totals = Counter(super().counters)
        for store in self._others.values():
            totals.update(store.counters)
        return dict(totals)

    def close(self) -> None:
        """Writes all waiting blocks, and closes the store."""
        if not self._ends.is_set():
            self._ends.set()
            self._thread.join()
            for store in self._others.values():
                store.close()
        super().close()
