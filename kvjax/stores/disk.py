# SPDX-License-Identifier: Apache-2.0
"""`DiskStore`: blocks on a disk, for generations that begin later, here or in another process.

    with kvjax.stores.DiskStore("store", spec, model="gemma-3-4b", names=names, max_bytes=10 << 30) as store:
        outputs, cache, events = kvjax.generate(model, cache, prompts, store=store, names=names)

Values go through tensorstore's KvStore, which writes each of them whole or not at all. One thread of the store copies
blocks from the device and writes them; a few others read them and check what they have read.
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
_RECENCY = "recency"
_RECENCY_BYTES = 1 << 30  # its name, and the most that is read of it
_MOST_ROOTS = 4096  # that need not be hashed anew


class DiskStore:
    """Whole blocks of prefixes on a disk, by their contents; for `store=` of `generate` and `RunOptions`.

    A block is found by the hash of its prefix: model, salt, LoRA and all tokens. Then its tokens and its parent's hash
    are compared. A value that is not what it has to be is a miss, and is deleted. A location that fails costs a request
    nothing but the hit. Prompts are in the store in clear; a folder is readable for its owner only.

    Attributes:
      spec: the layout of its blocks; the number of blocks, rows and tiers do not matter.
      patience_ms: how long a generation's first loop waits for blocks.
      readonly: whether nothing is written.
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
        patience_ms: int = 1000,
        readonly: bool = False,
    ):
        """Opens a store, and makes it if there is none.

        Args:
          location: a folder, which is made readable for its owner only; or a URL that tensorstore takes (`memory://`,
            `s3://bucket/path/`, `gs://bucket/path/`), or an open `tensorstore.KvStore`: of these no more than one
            writer must be open at a time, which only a folder can check.
          spec: of the caches.
          model: the name of the model and its weights. Another one's blocks are never found.
          names: the namespaces of the caches' rows.
          loras: the names of the LoRAs, by the numbers that `names` knows them by.
          key: a secret of at most 64 bytes, without which the names of blocks cannot be computed.
          max_bytes: what the values may take; beyond it those that were used least recently leave. Needed by a writer.
          max_in_flight: bytes that are read ahead, and bytes that wait to be written; what comes beyond is not written.
          patience_ms: how long a generation's first loop waits for blocks of the first prompts.
          readonly: for any number of readers beside one writer.

        Raises:
          ValueError: naming the argument; for a folder that has another writer, or other files.
          ImportError: without tensorstore, which `pip install "kvjax[stores]"` brings.
        """
        if importlib.util.find_spec("tensorstore") is None:
            raise ImportError('kvjax.stores.DiskStore: needs tensorstore (pip install "kvjax[stores]")')
        if not isinstance(spec, CacheSpec):
            raise ValueError(f"spec: got a {type(spec).__name__}, wanted a CacheSpec")
        self.spec = spec
        self.names = names
        self.readonly = bool(readonly)
        self.values = Values(spec, key)
        of_names = names, checked_names(names, model, loras), model, key
        self._root_of = functools.lru_cache(_MOST_ROOTS)(lambda namespace: namespace_root(namespace, *of_names))
        if max_bytes is not None or not readonly:
            max_bytes = static_int("max_bytes", max_bytes, max(self.values.sizes))
        self.max_bytes = max_bytes
        self.patience_ms = static_int("patience_ms", patience_ms, 0)
        self.max_in_flight = static_int("max_in_flight", max_in_flight, max(self.values.sizes))
        self._location = Location(location, self.readonly)
        self._lock = threading.Lock()
        self._names = OrderedDict[str, int]()
        self._used = 0  # name: bytes; the least recently used one first
        self._writing = set[str]()
        self._in_flight = 0
        self._counters = Counter[str]()
        self._failure = ""
        self._has_warned = False
        self._writer = ThreadPoolExecutor(1, "kvjax-store-writer")
        self._readers = ThreadPoolExecutor(READERS, "kvjax-store-reader")
        self._closed = False
        self.refresh(self._recency())
        if not readonly:
            self._evict_for(0)

    @property
    def counters(self) -> dict[str, int]:
        """Blocks since the store was opened, a block of each group counted by itself, and bytes.

        read, missed: found, and not (any more). broken: found, but not what they have to be; they count as missed too.
        written. dropped: not written, since too much waited. failed: not read or not written since the location failed.
        evicted. bytes_read, bytes_written.
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

    def has(self, block: Block, number: int) -> bool:
        """Whether a block's K/V of one group are in the store, as far as it is known here, or there are none."""
        return not self.values.has_bytes(number) or self.values.name(block, number) in self._names

    def touch(self, blocks: Sequence[Block]) -> None:
        """Notes that a prefix was used, behind what waits to be written: its last block leaves before its first one."""
        if not self.readonly:
            self._writer.submit(self._touch, blocks)

    def _touch(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            for block in reversed(blocks):
                for number in range(len(self.spec.groups)):
                    if (name := self.values.name(block, number)) in self._names:
                        self._names.move_to_end(name)

    def refresh(self, recency: Sequence[str] = ()) -> None:
        """Lists the store's blocks; a reader does so at the beginning of each generation."""
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
            self._used = sum(listed.values())

    def read(self, block: Block, number: int) -> Future[list[np.ndarray] | None]:
        """The words of each array of a block of one group, or None; read and checked by another thread."""
        self._check_open()
        return self._readers.submit(self._read, block, number)

    def _read(self, block: Block, number: int) -> list[np.ndarray] | None:
        name = self.values.name(block, number)
        found = None
        outcome = "missed"
        with self._failures_noted():
            value = self._location.read(name, self.values.sizes[number])
            if value is not None:
                found = self.values.decode(block, number, value)
                outcome = "broken" if found is None else "read"
        with self._lock:
            self._counters[outcome] += 1
            if found is not None:
                self._counters["bytes_read"] += self.values.sizes[number]
                if name in self._names:
                    self._names.move_to_end(name)
                return found
            self._counters["missed"] += outcome == "broken"
            self._used -= self._names.pop(name, 0)
        if outcome == "broken" and not self.readonly:
            self._delete(name)
        return None

    def write(self, pools: Pools, number: int, blocks: Sequence[Block], pool_rows: Sequence[int]) -> None:
        """Copies blocks of one group out of the pools, those that the store lacks, and writes them on its thread.

        Args:
          pools: the device's; free to be donated when this returns.
          number: of the group.
          blocks: what they are.
          pool_rows: where each is.
        """
        self._check_open()
        self._warn()
        if self.readonly or not self.values.has_bytes(number):
            return
        size = self.values.sizes[number]
        wanted = dict[str, tuple[Block, int]]()
        with self._lock:
            for block, row in zip(blocks, pool_rows, strict=True):
                name = self.values.name(block, number)
                if name in self._names or name in self._writing or name in wanted:
                    continue
                if self._in_flight + size * (len(wanted) + 1) > self.max_in_flight:
                    self._counters["dropped"] += 1
                    continue
                wanted[name] = block, row
            self._writing |= wanted.keys()
            self._in_flight += size * len(wanted)
        chosen = list(wanted.values())
        for some, leaves in gather_blocks(pools, [row for _, row in chosen], number):
            self._writer.submit(self._write, number, [block for block, _ in chosen[some]], leaves)

    def _write(self, number: int, blocks: list[Block], leaves: list[Any]) -> None:
        """Writes blocks, whose bytes are the leaves' rows. Runs on the store's thread."""
        size = self.values.sizes[number]
        futures = dict[str, Any]()
        arrays = None
        with self._failures_noted():  # of the computation that makes them, too
            arrays = jax.device_get(leaves)
        for at, block in enumerate(blocks):
            name = self.values.name(block, number)
            if arrays is None or not self._evict_for(size):
                self._written(name, size, "dropped")
                continue
            value = b"".join(self.values.encode(block, number, [array[at] for array in arrays]))
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
        """Notes what became of a block that was to be written."""
        with self._lock:
            self._writing.discard(name)
            self._in_flight -= size
            self._counters[outcome] += 1
            if outcome == "written":
                self._names[name] = size
                self._counters["bytes_written"] += size
            elif outcome == "":  # its bytes were counted when room was made
                self._used -= size

    def _evict_for(self, size: int) -> bool:
        """Evicts until `size` more bytes fit, and counts them; False if they cannot."""
        while True:
            with self._lock:
                if self._used + size <= (self.max_bytes or 0):
                    self._used += size
                    return True
                if not self._names:
                    return False
                name, freed = self._names.popitem(last=False)
                self._used -= freed
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
        except Exception as error:  # whatever tensorstore raises
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
        """Waits until all that waits is written, at most `timeout` seconds, and writes down what was used last.

        Returns:
          Whether it was all done in this time.
        """
        self._check_open()
        settled = self._writer.submit(self._write_recency)  # its thread does one after the other
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
        """The names as they were used, the least recent first; those that came later are not among them."""
        value = None
        with contextlib.suppress(Exception):  # whatever tensorstore raises
            value = self._location.read(_RECENCY, _RECENCY_BYTES)
        return (value or b"").decode(errors="replace").split("\n")

    def close(self) -> None:
        """Writes what waits, and closes the store."""
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
        size = human(self._used) + (f" of {human(self.max_bytes)}" if self.max_bytes else "")
        return f"DiskStore({str(self._location)!r}; {len(self._names):,} blocks, {size})"
