# SPDX-License-Identifier: Apache-2.0
"""`DiskStore`: blocks on a disk, for later generations in this process or another.

    with kvjax.stores.DiskStore("store", spec, model="gemma-3-4b", names=names, max_bytes=10 << 30) as store:
        outputs, cache, events = kvjax.generate(model, cache, prompts, store=store, names=names)

Values go through tensorstore's KvStore, which writes each value completely or not at all. A thread of the store copies
blocks from the device and writes them. A few other threads read blocks and check them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from kvjax.blocks.hashes import namespace_root
from kvjax.blocks.keys import Namespaces
from kvjax.checks import static_int
from kvjax.ledger import human
from kvjax.pools.device import Pools
from kvjax.spec import CacheSpec
from kvjax.state import Text
from kvjax.stores.file import checked_names
from kvjax.stores.layout import check_layout, layout_of
from kvjax.stores.location import Location
from kvjax.stores.transport import gather_blocks
from kvjax.stores.values import Block, Values, size_of

READERS = 8  # threads
_RECENCY = "recency"  # the name of the list of used blocks
_RECENCY_BYTES = 1 << 30  # a longer list is not read
_MOST_ROOTS = 4096  # cached hashes of empty prefixes


class DiskStore:
    """Stores whole blocks of prefixes on a disk, found by their contents. Pass it as `store=` to `generate`.

    A block is found by the hash of its prefix: model, salt, LoRA and all tokens. Then its tokens and its parent's hash
    are compared. An invalid value counts as a miss, and is deleted. If the location fails, a request only loses the
    hit. Prompts are stored in plain text. Only the owner of a folder can read it.

    Attributes:
      spec: the layout of the blocks. The numbers of blocks, rows and tiers do not matter.
      read_timeout_ms: the time that a generation's first loop waits for blocks.
      readonly: whether the store writes nothing.
    """

    def __init__(
        self,
        location: Any,
        spec: CacheSpec,
        *,
        model: str,
        names: Namespaces,
        loras: Mapping[int, str] | None = None,
        key: bytes = b"",
        max_bytes: int | None = None,
        max_in_flight: int = 256 << 20,
        read_timeout_ms: int = 1000,
        readonly: bool = False,
    ):
        """Opens a store, and creates it if missing.

        Args:
          location: a folder, which becomes readable for its owner only, a URL for tensorstore (`memory://`,
            `s3://bucket/path/`, `gs://bucket/path/`), or an open `tensorstore.KvStore`. Open a URL or a KvStore with a
            single writer at a time: only folders check this.
          spec: the caches' spec.
          model: the name of the model and its weights. Blocks of another model are never found.
          names: the namespaces of the caches' rows.
          loras: the names of the LoRAs, by their numbers in `names`.
          key: a secret of at most 64 bytes. Without it, nobody can compute the names of blocks.
          max_bytes: limit on the size of the values. Beyond it the least recently used values are evicted. Required
            unless readonly.
          max_in_flight: limit on the bytes that are read ahead, and on the bytes waiting to be written. Blocks beyond
            it are not written.
          read_timeout_ms: the time that a generation's first loop waits for blocks of the first prompts.
          readonly: allows any number of readers next to a writer.

        Raises:
          ValueError: naming the argument; also for a folder with another writer or with other files.
          ImportError: without tensorstore. Install it with `pip install "kvjax[stores]"`.
        """
        if importlib.util.find_spec("tensorstore") is None:
            raise ImportError('kvjax.stores.DiskStore: needs tensorstore (pip install "kvjax[stores]")')
        if not isinstance(spec, CacheSpec):
            raise ValueError(f"spec: got a {type(spec).__name__}, wanted a CacheSpec")
        self.spec = spec
        self.names = names
        self.readonly = bool(readonly)
        self.values = Values(spec, key)
        lora_names = checked_names(names, model, loras)
        self._root_of = functools.lru_cache(_MOST_ROOTS)(
            lambda namespace: namespace_root(namespace, names, lora_names, model, key)
        )

        largest_value = max(self.values.sizes)
        if max_bytes is not None or not readonly:
            max_bytes = static_int("max_bytes", max_bytes, largest_value)
        self.max_bytes = max_bytes
        self.read_timeout_ms = static_int("read_timeout_ms", read_timeout_ms, 0)
        self.max_in_flight = static_int("max_in_flight", max_in_flight, largest_value)

        self._location = Location(location, self.readonly)
        self._lock = threading.Lock()
        self._names = OrderedDict[str, int]()  # name: bytes, the least recently used name first
        self._used_bytes = 0
        self._writing = set[str]()
        self._in_flight = 0
        self._counters = Counter[str]()
        self._failure = ""
        self._has_warned = False
        self._closed = False

        self._writer = ThreadPoolExecutor(1, "kvjax-store-writer")
        self._readers = ThreadPoolExecutor(READERS, "kvjax-store-reader")
        self.refresh(self._recency())
        if not readonly:
            self._evict_for(0)

    @property
    def counters(self) -> dict[str, int]:
        """Blocks and bytes since the store was opened. A block of each group counts separately.

        read, missed: blocks found or not found. broken: blocks found with invalid contents, which count as missed too.
        written. dropped: blocks not written because too many bytes were waiting. failed: blocks not read or not written
        because the location failed. evicted. bytes_read, bytes_written.
        """
        names = "read", "missed", "broken", "written", "dropped", "failed", "evicted", "bytes_read", "bytes_written"
        with self._lock:
            return {name: self._counters[name] for name in names}

    def check(self, spec: CacheSpec, namespaces: Iterable[int], names: Namespaces | None) -> None:
        """Raises a ValueError unless a generation with this cache, in these namespaces, can use the store."""
        self._check_open()
        check_layout(layout_of(self.spec), layout_of(spec), of="the store")
        if names is not None and names is not self.names:
            raise ValueError("names: got others than the store's, wanted the Namespaces that the store was opened with")
        for namespace in namespaces:
            self.root(namespace)

    def root(self, namespace: int) -> bytes:
        """The hash of a namespace's empty prefix."""
        return self._root_of(namespace)

    def blocks(self, tokens: Any, namespace: int = 0, extra_ids: Any = None) -> list[Block]:
        """The whole blocks of a prompt i32[n]."""
        return self.values.blocks(self.root(namespace), Text(tokens, extra_ids))

    def has(self, block: Block, group_index: int) -> bool:
        """Whether the store is known to have a block's K/V of a group. True if the group has no K/V."""
        return not self.values.has_bytes(group_index) or self.values.name(block, group_index) in self._names

    def touch(self, blocks: Sequence[Block]) -> None:
        """Marks a prefix as used, after all waiting writes. Its blocks will be evicted from the last to the first."""
        if not self.readonly:
            self._writer.submit(self._touch, blocks)

    def _touch(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            for block in reversed(blocks):
                for group_index in range(len(self.spec.groups)):
                    if (name := self.values.name(block, group_index)) in self._names:
                        self._names.move_to_end(name)

    def refresh(self, recency: Sequence[str] = ()) -> None:
        """Lists the store's blocks. A reader calls it at the start of each generation."""
        listed = None
        with self._failures_noted():
            names = [name.decode(errors="replace") for name in self._location.kv.list().result()]
            listed = {name: size for name in names if (size := size_of(name)) is not None}
        if listed is None:
            return
        named = [name for name in recency if name in listed]
        with self._lock:
            self._names = OrderedDict.fromkeys(listed.keys() - set(named), 0)
            self._names.update(dict.fromkeys(named, 0))
            self._names.update(listed)
            self._used_bytes = sum(listed.values())

    def read(self, block: Block, group_index: int) -> Future[list[np.ndarray] | None]:
        """Reads and checks a block of a group in another thread: the words of each array, or None."""
        self._check_open()
        return self._readers.submit(self._read, block, group_index)

    def _read(self, block: Block, group_index: int) -> list[np.ndarray] | None:
        name = self.values.name(block, group_index)
        words = None
        outcome = "missed"
        with self._failures_noted():
            value = self._location.read(name, self.values.sizes[group_index])
            if value is not None:
                words = self.values.decode(block, group_index, value)
                outcome = "broken" if words is None else "read"
        with self._lock:
            self._counters[outcome] += 1
            if words is not None:
                self._counters["bytes_read"] += self.values.sizes[group_index]
                if name in self._names:
                    self._names.move_to_end(name)
                return words
            self._counters["missed"] += outcome == "broken"
            self._used_bytes -= self._names.pop(name, 0)
        if outcome == "broken" and not self.readonly:
            self._delete(name)
        return None

    def write(self, pools: Pools, group_index: int, blocks: Sequence[Block], pool_rows: Sequence[int]) -> None:
        """Copies a group's blocks that the store lacks out of the pools, and writes them on the store's thread.

        Args:
          pools: the device's pools, which you may donate after this returns.
          group_index: the group.
          blocks: the blocks' names and contents.
          pool_rows: the blocks' pool rows.
        """
        self._check_open()
        self._warn()
        if self.readonly or not self.values.has_bytes(group_index):
            return
        size = self.values.sizes[group_index]
        wanted = dict[str, tuple[Block, int]]()
        with self._lock:
            for block, row in zip(blocks, pool_rows, strict=True):
                name = self.values.name(block, group_index)
                if name in self._names or name in self._writing or name in wanted:
                    continue
                if self._in_flight + size * (len(wanted) + 1) > self.max_in_flight:
                    self._counters["dropped"] += 1
                    continue
                wanted[name] = block, row
            self._writing |= wanted.keys()
            self._in_flight += size * len(wanted)
        chosen = list(wanted.values())
        for piece, leaves in gather_blocks(pools, [row for _, row in chosen], group_index):
            self._writer.submit(self._write, group_index, [block for block, _ in chosen[piece]], leaves)

    def _write(self, group_index: int, blocks: list[Block], leaves: list[Any]) -> None:
        """Writes blocks, whose bytes are the leaves' rows, on the store's thread."""
        size = self.values.sizes[group_index]
        futures = dict[str, Any]()
        arrays = None
        with self._failures_noted():  # including failures while these leaves are computed
            arrays = jax.device_get(leaves)
        for row, block in enumerate(blocks):
            name = self.values.name(block, group_index)
            if arrays is None or not self._evict_for(size):
                self._written(name, size, "dropped")
                continue
            value = b"".join(self.values.encode(block, group_index, [array[row] for array in arrays]))
            futures[name] = self._location.kv.write(name, value)
        for name, future in futures.items():
            self._finish(name, future, size)

    def _finish(self, name: str, future: Any, size: int) -> None:
        outcome = ""
        with self._failures_noted():
            future.result()
            self._location.protect(name)
            outcome = "written"
        self._written(name, size, outcome)

    def _written(self, name: str, size: int, outcome: str) -> None:
        """Updates the counters after a block was written or not written."""
        with self._lock:
            self._writing.discard(name)
            self._in_flight -= size
            self._counters[outcome] += 1
            if outcome == "written":
                self._names[name] = size
                self._counters["bytes_written"] += size
            elif outcome == "":  # its bytes were counted before the write
                self._used_bytes -= size

    def _evict_for(self, size: int) -> bool:
        """Evicts until `size` more bytes fit, and counts these bytes. Returns False if they cannot fit."""
        while True:
            with self._lock:
                if self._used_bytes + size <= (self.max_bytes or 0):
                    self._used_bytes += size
                    return True
                if not self._names:
                    return False
                name, freed = self._names.popitem(last=False)
                self._used_bytes -= freed
                self._counters["evicted"] += 1
            self._delete(name)

    def _delete(self, name: str) -> None:
        with self._failures_noted():
            self._location.kv.write(name, None).result()

    @contextlib.contextmanager
    def _failures_noted(self) -> Iterator[None]:
        """Counts an error of the location, and ends the `with` block."""
        try:
            yield
        except Exception as error:  # tensorstore may raise anything
            with self._lock:
                self._counters["failed"] += 1
                self._failure = self._failure or f"{type(error).__name__}: {error}"

    def _warn(self) -> None:
        """Warns of the first failure, on the caller's thread."""
        if self._failure and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._location}: blocks were not read or not written: {self._failure}", RuntimeWarning, stacklevel=3
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds until all waiting blocks are written, then saves the order of use.

        Returns:
          Whether all was written in time.
        """
        self._check_open()
        settled = self._writer.submit(self._write_recency)  # the thread runs jobs in order
        try:
            settled.result(timeout)
        except TimeoutError:
            return False
        self._warn()
        return True

    def _write_recency(self) -> None:
        if self.readonly:
            return
        with self._lock:
            names = "\n".join(self._names).encode()
        with self._failures_noted():
            self._location.kv.write(_RECENCY, names).result()
            self._location.protect(_RECENCY)

    def _recency(self) -> list[str]:
        """The names in order of use, the least recent first. Names written later are missing."""
        value = None
        with contextlib.suppress(Exception):  # whatever tensorstore raises
            value = self._location.read(_RECENCY, _RECENCY_BYTES)
        return (value or b"").decode(errors="replace").split("\n")

    def close(self) -> None:
        """Writes all waiting blocks, and closes the store."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._location.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("store: got one that is closed, wanted an open one")

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        size = human(self._used_bytes) + (f" of {human(self.max_bytes)}" if self.max_bytes else "")
        return f"DiskStore({str(self._location)!r}; {len(self._names):,} blocks, {size})"
