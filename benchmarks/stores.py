# SPDX-License-Identifier: Apache-2.0
"""`kvjax.stores`: blocks that enter a cache from outside, a saved cache, and prefixes on a disk.

Metadata: `adopt` and `land` of a prefix of 128 blocks in a full pool of 65,536, to `admit` and `release` of as many,
inside `scan`. All rows are admitted before the first one is released, so that each admission evicts as many blocks as
an adoption does; but it publishes none. `admit`, `commit` and `release` also publish them.

Bytes: 64 blocks of 1 MB from numpy into pools, in place, and back, to one `jax.device_put` of as many bytes of numpy,
which copies them into new memory; and to disk, checksums and adoption included, to one file of as many bytes that is
written and synced, and read after its pages were dropped.

Generations with a store (`benchmarks/stored_prefixes.py`): an answer of one token to a stored prompt of 2,048 tokens in
an empty cache, the store being opened and its pages dropped; CPU time of a generation whose store writes all that it
computes, `flush` included, and of one whose blocks are all in the cache and in the store; and the growth of resident
memory while 1 GB is written and then read, the larger of both.

Ways take turns, and the median of several rounds counts. Bytes and tokens are compared.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvjax
from benchmarks import common, stored_prefixes
from benchmarks.common import Bar
from kvjax.stores import DiskStore, Staged, adopt, gather, land, load, save, scatter

BARS = {
    "adopt_over_admit": Bar("`adopt` and `land`, to `admit` and `release`", at_most=2),
    "adopt_over_computed": Bar("`adopt` and `land`, to `admit`, `commit` and `release`"),
    "scatter_of_device_put": Bar("rate from numpy into pools, to `device_put`", at_least=0.5),
    "gather_of_device_put": Bar("rate from pools to numpy, to `device_put`", at_least=0.8),
    "save_of_file": Bar("rate of `save`, to a file that is written and synced", at_least=0.4),
    "load_of_file": Bar("rate of `load`, to a file that is read cold", at_least=0.4),
    "store_write_of_file": Bar("rate of `DiskStore.write` and `flush`, to a file written and synced", at_least=0.4),
    "store_read_of_file": Bar("rate of `DiskStore.read`, to a file that is read cold", at_least=0.25),
    "restart_x": Bar("time to compute a prompt of 2,048 tokens, to finding it in the store", at_least=6),
    "writing_x": Bar("CPU time of `generate` with a store that writes all, to without", at_most=1.25),
    "idle_x": Bar("CPU time of `generate` with a store that has nothing to do, to without", at_most=1.02),
    "rss_of_in_flight": Bar("growth of resident memory while 1 GB passes, to `max_in_flight`", at_most=2),
}
NOTES = """
`load` takes a fifth of its time to read the file, a third to check values and a quarter to copy them. In several runs
its rate was 0.32x to 0.46x of a file's: it misses its bar on a busy machine. `DiskStore` wrote at 0.37x to 0.61x, and
missed its bar once.
"""
MODEL = "a model"
Figures = tuple[dict[str, float], dict[str, float]]  # metrics and details


class Size(NamedTuple):
    """Blocks of the pool and of a prefix for the verbs; blocks that move and their shape."""

    num_blocks: int = 65_536
    prefix: int = 128
    calls: int = 32
    blocks: int = 64
    layers: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    rounds: int = 11


QUICK = Size(64, 8, 1, 3, 2, 2, 8, 4, 1)


def full_state(size: Size) -> kvjax.CacheState:
    """A cache with all rows free, whose blocks are all findable."""
    length = size.prefix * size.block_size
    spec = kvjax.make_spec(
        num_blocks=size.num_blocks, max_seqs=size.calls, max_length=length, block_size=size.block_size
    )

    def fill(state: kvjax.CacheState, number: jax.Array):
        return computed(state, tokens_of(number, length), length)

    state, ok = jax.jit(lambda state, numbers: lax.scan(fill, state, numbers), donate_argnums=0)(
        kvjax.init(spec), jnp.arange(size.num_blocks // size.prefix, dtype=jnp.int32)
    )
    full = int(state.groups[0].num_cached) == size.num_blocks
    common.require(bool(jnp.all(ok)) and full, "the cache could not be filled")
    return state


def tokens_of(number: jax.Array, length: int) -> jax.Array:
    """i32[T]; the tokens of a prompt, all different from those of others from the first one on."""
    return jnp.arange(length, dtype=jnp.int32) * 7 + number * 104_729


def computed(state: kvjax.CacheState, tokens: jax.Array, length: int) -> tuple[kvjax.CacheState, jax.Array]:
    """Admits a prompt that is not cached, commits all of it and releases it."""
    state, admitted = kvjax.admit(state, 0, tokens, length)
    zero = jnp.zeros((1,), jnp.int32)
    state, committed = kvjax.commit(state, tokens[None], zero + length, seqs=zero)
    state, released = kvjax.release(state, 0)
    return state, admitted.ok & committed.ok & released.ok & (admitted.cached[0] == 0)


def emptied(state: kvjax.CacheState, tokens: jax.Array, length: int) -> tuple[kvjax.CacheState, jax.Array]:
    """Admits a prompt that is not cached and releases it, which empties its blocks."""
    state, admitted = kvjax.admit(state, 0, tokens, length)
    state, released = kvjax.release(state, 0)
    return state, admitted.ok & released.ok & (admitted.cached[0] == 0)


def adopted(state: kvjax.CacheState, tokens: jax.Array, length: int) -> tuple[kvjax.CacheState, jax.Array]:
    """Adopts a prompt that is not cached."""
    columns = length // state.spec.block_size
    every = np.ones((columns,), np.bool_)
    state, reserved = adopt(state, tokens, length, every)
    state, landed = land(state, reserved.adopted, every)
    stored = kvjax.events.counts(landed)["stored"]
    return state, reserved.ok & landed.ok & (stored == columns)


def measure_verbs(size: Size) -> Figures:
    """`adopt_over_admit` and `adopt_over_computed`, and microseconds a prefix."""
    start, length = full_state(size), size.prefix * size.block_size
    calls = jnp.arange(size.calls, dtype=jnp.int32)

    def prompt(call: jax.Array) -> jax.Array:
        return tokens_of(call + size.num_blocks // size.prefix, length)

    def admitted(state: kvjax.CacheState) -> tuple[kvjax.CacheState, jax.Array]:
        def admit(state: kvjax.CacheState, row: jax.Array):
            state, events = kvjax.admit(state, row, prompt(row), length)
            return state, events.ok & (kvjax.events.counts(events)["removed"] == size.prefix)

        def release(state: kvjax.CacheState, row: jax.Array):
            state, events = kvjax.release(state, row)
            return state, events.ok

        state, ok = lax.scan(admit, state, calls)
        state, released = lax.scan(release, state, calls)
        return state, ok & released

    def one_by_one(verb: Callable[..., Any]):
        return lambda state: lax.scan(lambda state, call: verb(state, prompt(call), length), state, calls)

    runs = {verb.__name__: one_by_one(verb) for verb in (adopted, computed, emptied)} | {"admitted": admitted}
    copy = functools.partial(jax.tree.map, jnp.copy, start)
    programs = {name: (copy, jax.jit(run, donate_argnums=0)) for name, run in runs.items()}
    took, results = common.in_turns(programs, size.rounds)
    for name, (state, ok) in results.items():
        common.require(bool(jnp.all(ok)), f"a prefix was not {name}")
        kvjax.check(state)
    ways = {"admit": "admitted", "computed": "computed", "emptied": "emptied"}
    ratios = {f"adopt_over_{way}": took["adopted"].wall / took[name].wall for way, name in ways.items()}
    details = {"adopt_over_emptied": ratios.pop("adopt_over_emptied")}
    return ratios, details | {f"{name}_us": 1e6 * one.wall / size.calls for name, one in took.items()}


class Bytes:
    """A cache whose blocks have random bytes, and these bytes.

    Attributes:
      tokens: i32[T]; the prompt whose blocks they are.
      data: f32[B, L, 2, K, P, D]; by numpy, in memory that jax copies and does not share.
      cache: has them all.
    """

    def __init__(self, size: Size):
        self.size, self.names = size, kvjax.Namespaces()
        length = size.blocks * size.block_size
        self.spec = kvjax.make_spec(
            [kvjax.LayerSpec(size.kv_heads, size.head_dim)] * size.layers, num_blocks=size.blocks + 1, max_seqs=1,
            max_length=length + 1, block_size=size.block_size, dtype="float32",
        )  # fmt: skip
        shape = size.blocks, size.layers, 2, size.kv_heads, size.block_size, size.head_dim
        self.data = unaligned(np.random.default_rng(0).standard_normal(shape, np.float32))
        self.tokens = np.arange(1, length + 1, dtype=np.int32)
        self.cache, events = jax.jit(kvjax.Cache.adopt)(
            self.empty(), self.tokens, length, self.staged, np.ones((size.blocks,), np.bool_)
        )
        common.require(bool(events.ok), "the blocks were not adopted")

    @property
    def staged(self) -> Staged:
        """The bytes for `scatter`."""
        return Staged(((self.data,),), self.spec)

    def empty(self) -> kvjax.Cache:
        """A cache that has none of the blocks."""
        return kvjax.Cache.create(self.spec)

    def rows_in(self, cache: kvjax.Cache) -> np.ndarray:
        """i32[B]; the pool rows of the blocks in a cache; it must have all of them."""
        state, events = kvjax.admit(cache.state, 0, np.append(self.tokens, 0), len(self.tokens) + 1)
        common.require(int(events.cached[0]) == len(self.tokens), "a cache lacks blocks")
        return np.asarray(state.groups[0].table[0])[: self.size.blocks]

    def require_in(self, cache: kvjax.Cache, name: str) -> None:
        """Requires of a cache that it has the blocks, with their bytes."""
        (array,) = jax.device_get(cache.pools.arrays[0])
        require_equal(array[self.rows_in(cache)], self.data, name)


def unaligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins 16 bytes behind a multiple of 64, as numpy's own large arrays do: jax would share others."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + 16
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def require_equal(found: Any, wanted: np.ndarray, name: str) -> None:
    """Requires that arrays have the same bytes."""
    same = np.array_equal(np.asarray(found).view(np.uint32), wanted.view(np.uint32))
    common.require(same, f"{name}: other bytes than were written")


def measure_device(given: Bytes) -> Figures:
    """`scatter_of_device_put` and `gather_of_device_put`."""
    size, rows = given.size, [np.random.default_rng(1).permutation(given.size.blocks).astype(np.int32)]
    write = jax.jit(lambda pools, staged: scatter(pools, staged, rows, [size.blocks]), donate_argnums=0)
    read = jax.jit(lambda pools: gather(pools, rows))
    pools = [jax.block_until_ready(kvjax.init_pools(given.spec))]

    def put(_: Any) -> None:
        pools[:] = [jax.block_until_ready(write(pools[0], given.staged))]

    programs: Any = {
        "device_put": (tuple, lambda _: jax.device_put(given.data)),
        "scatter": (tuple, put),
        "gather": (tuple, lambda _: np.asarray(read(pools[0]).arrays[0][0])),
    }
    took, results = common.in_turns(programs, size.rounds)
    require_equal(results["gather"], given.data, "gather")
    rates = {f"{name}_of_device_put": took["device_put"].wall / took[name].wall for name in ("scatter", "gather")}
    return rates, {f"{name}_gb_s": given.data.nbytes / one.wall / 1e9 for name, one in took.items()}


class Folders:
    """New folders on the disk, each in place of its last one."""

    def __init__(self, root: pathlib.Path):
        self.root, self.number = root, 0

    def new(self, name: str) -> pathlib.Path:
        """An empty folder; the last one of this name is deleted."""
        for old in self.root.glob(f"{name}-*"):
            shutil.rmtree(old)
        self.number += 1
        folder = self.root / f"{name}-{self.number}"
        folder.mkdir()
        return folder


def write_file(path: pathlib.Path, data: np.ndarray) -> None:
    """Writes an array to a new file, and syncs it."""
    with open(path, "wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def measure_disk(given: Bytes, root: pathlib.Path) -> Figures:
    """`save`, `load`, and both ways of `DiskStore`, to one file."""
    folders, options = Folders(root), {"names": given.names, "model": MODEL}
    saved, stored, path = folders.new("saved") / "cache", folders.new("stored") / "store", root / "file"
    write_file(path, given.data)
    save(given.cache, saved, **options)
    rows, in_flight = given.rows_in(given.cache).tolist(), 2 * given.data.nbytes
    limits = {"max_bytes": 4 * given.data.nbytes, "max_in_flight": in_flight}
    opened: dict[str, DiskStore] = {"read": DiskStore(stored, given.spec, **options, **limits)}
    blocks = opened["read"].blocks(given.tokens)

    def write(store: DiskStore) -> None:
        store.write(given.cache.pools, 0, blocks, rows)
        store.flush()

    def new_store() -> DiskStore:
        if "write" in opened:
            opened.pop("write").close()
        opened["write"] = DiskStore(folders.new("written") / "store", given.spec, **options, **limits)
        return opened["write"]

    def read(_: Any) -> list[Any]:
        return [future.result() for future in [opened["read"].read(block, 0) for block in blocks]]

    def empty() -> kvjax.Cache:
        stored_prefixes.drop_pages(saved)
        return given.empty()

    write(opened["read"])
    programs: Any = {
        "file_write": (lambda: folders.new("file") / "file", lambda path: write_file(path, given.data)),
        "save": (lambda: folders.new("save") / "cache", lambda folder: save(given.cache, folder, **options)),
        "store_write": (new_store, write),
        "file_read": (lambda: stored_prefixes.drop_pages(path), lambda _: np.fromfile(path, np.float32)),
        "load": (empty, lambda cache: load(cache, saved, **options)),
        "store_read": (lambda: stored_prefixes.drop_pages(stored), read),
    }
    try:
        took, results = common.in_turns(programs, given.size.rounds)
        require_written(opened["write"], blocks, given.data)
    finally:
        for store in opened.values():
            store.close()
    require_equal(results["file_read"], given.data.reshape(-1), "file")
    given.require_in(results["load"][0], "load")
    words = results["store_read"]
    common.require(None not in words, "a store lacks blocks")
    require_equal(np.stack([arrays[0] for arrays in words]), given.data, "store")
    ways = {"save": "file_write", "store_write": "file_write", "load": "file_read", "store_read": "file_read"}
    rates = {f"{name}_of_file": took[file].wall / took[name].wall for name, file in ways.items()}
    return rates, {f"{name}_gb_s": given.data.nbytes / one.wall / 1e9 for name, one in took.items()}


def require_written(store: DiskStore, blocks: list[Any], data: np.ndarray) -> None:
    """Requires of a store that it has written these blocks, with their bytes."""
    words = [store.read(block, 0).result() for block in blocks]
    common.require(store.counters["written"] == len(blocks) and None not in words, "blocks were not written")
    require_equal(np.stack([arrays[0] for arrays in words]), data, "store")


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, help="how often the ways are timed")
        parser.add_argument("--quick", action="store_true", help="tiny: whether it runs, not how fast")
        parser.add_argument(
            "--folder", type=pathlib.Path, help="on the disk to measure; that of temporary files if None"
        )

    args = common.parse("stores", __doc__, options)
    size, generation = (QUICK, stored_prefixes.QUICK) if args.quick else (Size(), stored_prefixes.Size())
    if args.rounds is not None:
        size, generation = (
            size._replace(rounds=args.rounds),
            generation._replace(rounds=args.rounds, batch_rounds=args.rounds),
        )
    metrics, details = measure_verbs(size)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        given, root = Bytes(size), pathlib.Path(folder)
        parts = [measure_device(given), measure_disk(given, root)]
        parts += [measure(generation, root) for measure in stored_prefixes.MEASURES]
    for more in parts:
        metrics, details = metrics | more[0], details | more[1]
    common.report("stores", metrics, args.json, details, bars=BARS)


if __name__ == "__main__":
    main()
