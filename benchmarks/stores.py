# SPDX-License-Identifier: Apache-2.0
"""`kvjax.stores`: blocks which enter a cache from outside, a saved cache, and prefixes on a disk.

Metadata: `adopt` and `finish_adoption` of a prefix of 128 blocks in a full pool of 65,536, compared with `admit` and
`release` of as many blocks, inside `scan`. All rows are admitted before the first is released, so each admission evicts
as many blocks as an adoption does, but it publishes none. `admit`, `commit` and `release` also publish blocks.

Bytes: 64 blocks of 1 MB go from numpy into pools, in place, and back. They are compared with a `jax.device_put` of as
many bytes of numpy, which copies them into new memory. Blocks also go to disk, checksums and adoption included. They
are compared with a file of as many bytes, which is written and synced, and read after its pages were dropped.

Generations with a store: the first figure is the time of an answer of one token to a stored prompt of 2,048 tokens in
an empty cache, after the store was opened and its pages were dropped. The next two are the CPU time of a generation
whose store writes all computed blocks, `flush` included, and of a generation whose blocks are all in the cache and in
the store. The last is the growth of resident memory while 1 GB is written and while it is read, the larger of both.

Programs take turns, and the median of several rounds counts. Bytes and tokens are compared.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import operator
import os
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import kvjax
from benchmarks import caches, common
from benchmarks.common import Bar, Program, Size, benchmark
from kvjax.stores import DiskStore, Staged, adopt, finish_adoption, gather, load, save, scatter
from models.decoder import Decoder

BARS = {
    "adopt_over_admit": Bar("`adopt` and `finish_adoption`, to `admit` and `release`", at_most=2),
    "adopt_over_computed": Bar("`adopt` and `finish_adoption`, to `admit`, `commit` and `release`"),
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
its rate was 0.32x to 0.46x of a file's, so it misses its bar on a busy machine. `DiskStore` wrote at 0.37x to 0.61x,
and missed its bar once.
"""
MODEL = "a model"


def tokens_of(prompt_index: jax.Array, length: int) -> jax.Array:
    """i32[T]; the tokens of a prompt. Prompts differ in every token."""
    return jnp.arange(length, dtype=jnp.int32) * 7 + prompt_index * 104_729


def computed(state: kvjax.CacheState, tokens: jax.Array, length: int) -> tuple[kvjax.CacheState, jax.Array]:
    """Admits an uncached prompt, commits all of it and releases it."""
    state, admitted = kvjax.admit(state, 0, tokens, length)
    zero = jnp.zeros((1,), jnp.int32)
    state, committed = kvjax.commit(state, tokens[None], zero + length, seqs=zero)
    state, released = kvjax.release(state, 0)
    return state, admitted.ok & committed.ok & released.ok & (admitted.cached[0] == 0)


def adopted(state: kvjax.CacheState, tokens: jax.Array, length: int) -> tuple[kvjax.CacheState, jax.Array]:
    """Adopts an uncached prompt."""
    columns = length // state.spec.block_size
    every = np.ones((columns,), np.bool_)
    state, reserved = adopt(state, tokens, length, every)
    state, landed = finish_adoption(state, reserved.adopted, every)
    stored = kvjax.events.counts(landed)["stored"]
    return state, reserved.ok & landed.ok & (stored == columns)


def measure_verbs(size: Size) -> dict[str, float]:
    """Measures `adopt_over_admit` and `adopt_over_computed`, and microseconds per prefix."""
    length = size.prefix * size.block_size
    full = size.num_blocks // size.prefix
    spec = kvjax.make_spec(
        num_blocks=size.num_blocks, max_seqs=size.calls, max_length=length, block_size=size.block_size
    )
    start = caches.full_state(spec, lambda prompt_index: tokens_of(prompt_index, length))
    calls = jnp.arange(size.calls, dtype=jnp.int32)

    def admitted(state: kvjax.CacheState) -> tuple[kvjax.CacheState, jax.Array]:
        def admit(state: kvjax.CacheState, row: jax.Array):
            state, events = kvjax.admit(state, row, tokens_of(row + full, length), length)
            return state, events.ok & (kvjax.events.counts(events)["removed"] == size.prefix)

        def release(state: kvjax.CacheState, row: jax.Array):
            state, events = kvjax.release(state, row)
            return state, events.ok

        state, ok = lax.scan(admit, state, calls)
        state, released = lax.scan(release, state, calls)
        return state, ok & released

    def one_by_one(verb: Callable[..., Any], state: kvjax.CacheState):
        return lax.scan(lambda state, call: verb(state, tokens_of(call + full, length), length), state, calls)

    runs = {verb.__name__: functools.partial(one_by_one, verb) for verb in (adopted, computed)}
    runs["admitted"] = admitted
    programs: dict[str, Program] = {
        name: (caches.copy_of(start), jax.jit(run, donate_argnums=0)) for name, run in runs.items()
    }
    took, results = common.in_turns(programs, size.rounds)
    for name, (state, ok) in results.items():
        common.require(bool(jnp.all(ok)), f"a prefix was not {name}")
        kvjax.check(state)
    ways = {"admit": "admitted", "computed": "computed"}
    ratios = {f"adopt_over_{base}": took["adopted"].wall / took[name].wall for base, name in ways.items()}
    return ratios | common.times(took, "us", calls=size.calls)


class Bytes:
    """A cache of random blocks, their bytes f32[B, L, 2, K, P, D], and their prompt i32[T]."""

    def __init__(self, size: Size):
        self.size = size
        self.names = kvjax.Namespaces()
        length = size.blocks * size.block_size
        self.spec = spec_of_bytes(size, size.blocks + 1, length + 1)
        shape = size.blocks, size.layers, 2, size.kv_heads, size.block_size, size.head_dim
        self.data = unaligned(np.random.default_rng(0).standard_normal(shape, np.float32))
        self.tokens = np.arange(1, length + 1, dtype=np.int32)
        self.staged = Staged(((self.data,),), self.spec)
        self.cache, events = jax.jit(kvjax.Cache.adopt)(
            kvjax.Cache.create(self.spec), self.tokens, length, self.staged, np.ones((size.blocks,), np.bool_)
        )
        common.require(bool(events.ok), "the blocks were not adopted")

    def rows_in(self, cache: kvjax.Cache) -> np.ndarray:
        """i32[B]; the pool rows of the blocks in a cache, which has to contain all of them."""
        state, events = kvjax.admit(cache.state, 0, np.append(self.tokens, 0), len(self.tokens) + 1)
        common.require(int(events.cached[0]) == len(self.tokens), "a cache lacks blocks")
        return np.asarray(state.groups[0].table[0])[: self.size.blocks]

    def rates(self, took: dict[str, common.Took], bases: dict[str, str], unit: str) -> dict[str, float]:
        """The rate of each program divided by its base's, and all rates in GB/s."""
        ratios = {f"{name}_of_{unit}": took[base].wall / took[name].wall for name, base in bases.items()}
        return ratios | {f"{name}_gb_s": self.data.nbytes / timing.wall / 1e9 for name, timing in took.items()}


def spec_of_bytes(size: Size, num_blocks: int, max_length: int) -> kvjax.CacheSpec:
    """A cache of a single row with blocks of 1 MB."""
    return kvjax.make_spec(
        [kvjax.LayerSpec(size.kv_heads, size.head_dim)] * size.layers, num_blocks=num_blocks, max_seqs=1,
        max_length=max_length, block_size=size.block_size, dtype="float32",
    )  # fmt: skip


def unaligned(array: np.ndarray) -> np.ndarray:
    """A copy which begins 16 bytes after a multiple of 64, as numpy's large arrays do. jax shares aligned arrays."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + 16
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def require_equal(array: Any, wanted: np.ndarray, name: str) -> None:
    """Requires equal bytes."""
    same = np.array_equal(np.asarray(array).view(np.uint32), wanted.view(np.uint32))
    common.require(same, f"{name}: other bytes than were written")


def measure_device(given: Bytes) -> dict[str, float]:
    """Measures `scatter_of_device_put` and `gather_of_device_put`."""
    size = given.size
    rows = [np.random.default_rng(1).permutation(given.size.blocks).astype(np.int32)]
    write = jax.jit(lambda pools, staged: scatter(pools, staged, rows, [size.blocks]), donate_argnums=0)
    read = jax.jit(lambda pools: gather(pools, rows))
    pools = [jax.block_until_ready(kvjax.init_pools(given.spec))]

    def put() -> None:
        pools[:] = [jax.block_until_ready(write(pools[0], given.staged))]

    programs: dict[str, Program] = {
        "device_put": lambda: jax.device_put(given.data),
        "scatter": put,
        "gather": lambda: np.asarray(read(pools[0]).arrays[0][0]),
    }
    took, results = common.in_turns(programs, size.rounds)
    require_equal(results["gather"], given.data, "gather")
    return given.rates(took, dict.fromkeys(("scatter", "gather"), "device_put"), "device_put")


def new_folder(root: pathlib.Path, name: str) -> pathlib.Path:
    """Makes an empty folder, and removes an older folder with this name."""
    shutil.rmtree(root / name, ignore_errors=True)
    (root / name).mkdir()
    return root / name


def write_file(path: pathlib.Path, data: np.ndarray) -> None:
    """Writes an array to a new file, and syncs it."""
    with open(path, "wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def measure_disk(given: Bytes, root: pathlib.Path) -> dict[str, float]:
    """Compares `save`, `load`, and reads and writes of a `DiskStore` with a file."""
    options: Any = {"names": given.names, "model": MODEL}
    saved = root / "saved"
    stored = root / "stored"
    path = root / "file"
    write_file(path, given.data)
    save(given.cache, saved, **options)
    rows = given.rows_in(given.cache).tolist()
    limits = {"max_bytes": 4 * given.data.nbytes, "max_in_flight": 2 * given.data.nbytes}
    opened: dict[str, DiskStore] = {"read": DiskStore(stored, given.spec, **options, **limits)}
    blocks = opened["read"].blocks(given.tokens)

    def write(store: DiskStore) -> None:
        store.write(given.cache.pools, 0, blocks, rows)
        store.flush()

    def new_store() -> DiskStore:
        if "write" in opened:
            opened.pop("write").close()
        opened["write"] = DiskStore(new_folder(root, "written") / "store", given.spec, **options, **limits)
        return opened["write"]

    def read(store: DiskStore) -> list[Any]:
        return [future.result() for future in [store.read(block, 0) for block in blocks]]

    def empty() -> kvjax.Cache:
        drop_pages(saved)
        return kvjax.Cache.create(given.spec)

    write(opened["read"])
    programs: dict[str, Program] = {
        "file_write": (lambda: new_folder(root, "files") / "file", lambda path: write_file(path, given.data)),
        "save": (lambda: new_folder(root, "save") / "cache", lambda folder: save(given.cache, folder, **options)),
        "store_write": (new_store, write),
        "file_read": (lambda: drop_pages(path), lambda _: np.fromfile(path, np.float32)),
        "load": (empty, lambda cache: load(cache, saved, **options)),
        "store_read": (lambda: drop_pages(stored), lambda _: read(opened["read"])),
    }
    try:
        took, results = common.in_turns(programs, given.size.rounds)
        written = opened["write"].counters["written"]
        common.require(written == len(blocks), f"{written} blocks were written, not {len(blocks)}")
        answers = {"written": read(opened["write"]), "store": results["store_read"]}
    finally:
        for store in opened.values():
            store.close()
    for name, words in answers.items():
        common.require(None not in words, f"{name}: blocks are missing")
        require_equal(np.stack([arrays[0] for arrays in words]), given.data, name)
    require_equal(results["file_read"], given.data.reshape(-1), "file")
    cache = results["load"][0]
    require_equal(jax.device_get(cache.pools.arrays[0][0])[given.rows_in(cache)], given.data, "load")
    bases = {"save": "file_write", "store_write": "file_write", "load": "file_read", "store_read": "file_read"}
    return given.rates(took, bases, "file")


def drop_pages(path: pathlib.Path) -> None:
    """Syncs a file, or all files of a folder, and drops their pages from memory."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class Job:
    """Prompts for a model to answer greedily, with or without a store."""

    def __init__(self, size: Size, rows: int, prompt: int, new: int):
        self.model = Decoder(size.config, rngs=nnx.Rngs(0))
        self.new = new
        self.names = kvjax.Namespaces()
        self.prompts = caches.random_prompts(size.config.vocab_size, (rows, prompt), prompt).tolist()
        num_blocks = 2 * rows * -(-(prompt + new) // size.block_size)
        self.spec = caches.spec_of(self.model, rows, prompt + new, num_blocks, size.block_size)

    def empty(self) -> kvjax.Cache:
        return kvjax.Cache.create(self.spec)

    def open(self, folder: pathlib.Path) -> DiskStore:
        return DiskStore(folder, self.spec, model=MODEL, names=self.names, max_bytes=1 << 30, read_timeout_ms=60_000)

    def answer(self, cache: kvjax.Cache, store: DiskStore | None = None) -> tuple[list[Any], list[int], kvjax.Cache]:
        """The tokens of each answer, the number of stored tokens of each prompt, and the cache."""
        outputs, cache, _ = kvjax.generate(
            self.model, cache, self.prompts, max_new_tokens=self.new, names=self.names, log_events=False, store=store
        )
        return [output.tokens for output in outputs], [output.stored_tokens for output in outputs], cache


def measure_restart(size: Size, root: pathlib.Path) -> dict[str, float]:
    """Measures `restart_x`: the time to compute an answer, divided by the time if the prompt is stored."""
    job = Job(size, 1, size.prompt, 1)
    folder = root / "restart"
    opened = list[DiskStore]()
    with job.open(folder) as store:
        job.answer(job.empty(), store)

    def close() -> kvjax.Cache:
        while opened:
            opened.pop().close()
        drop_pages(folder)
        return job.empty()

    def restart(cache: kvjax.Cache) -> Any:
        opened.append(job.open(folder))
        return job.answer(cache, opened[-1])

    programs: dict[str, Program] = {"computed": (job.empty, job.answer), "stored": (close, restart)}
    took, results = common.in_turns(programs, size.rounds, lambda result, expected: result[0] == expected[0])
    close()
    (stored,) = results["stored"][1]
    common.require(stored >= size.prompt - size.block_size, f"{stored} tokens were stored")
    return {"restart_x": took["computed"].wall / took["stored"].wall, **common.times(took, "ms")}


def measure_writing(size: Size, root: pathlib.Path) -> dict[str, float]:
    """Measures `writing_x` and `idle_x`: CPU time of a generation with a store, divided by the time without."""
    job = Job(size, size.rows, size.batch_prompt, size.new)
    idle = root / "idle"
    writing = list[DiskStore]()
    with job.open(idle) as store:
        *_, warm = job.answer(job.empty(), store)
        store.flush()
        before = store.counters

        def begin() -> kvjax.Cache:
            while writing:
                writing.pop().close()
            shutil.rmtree(root / "writing", ignore_errors=True)
            writing.append(job.open(root / "writing"))
            return job.empty()

        def write(cache: kvjax.Cache) -> list[Any]:
            tokens, *_ = job.answer(cache, writing[-1])
            writing[-1].flush()
            return tokens

        programs: dict[str, Program] = {
            "without": (job.empty, lambda cache: job.answer(cache)[0]),
            "writing": (begin, write),
            "warm": (caches.copy_of(warm), lambda cache: job.answer(cache)[0]),
            "idle": (caches.copy_of(warm), lambda cache: job.answer(cache, store)[0]),
        }
        took, _ = common.in_turns(programs, size.batch_rounds, operator.eq)
        common.require(store.counters == before, "an idle store was read or written")
    written = writing[0].counters["written"]
    writing[0].close()
    blocks = size.rows * ((size.batch_prompt + size.new - 1) // size.block_size)
    common.require(written == blocks, f"{written} blocks were written, not {blocks}")
    ratios = {"writing_x": took["writing"].cpu / took["without"].cpu, "idle_x": took["idle"].cpu / took["warm"].cpu}
    return ratios | common.times(took, "ms", "cpu")


def pass_through(direction: str, folder: str, quick: bool) -> float:
    """The maximum growth of memory while blocks pass through, divided by `max_in_flight`. Needs a new process."""
    size = measure.size(quick)
    spec = spec_of_bytes(size, size.piece, size.piece * size.block_size)
    pools = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype), kvjax.init_pools(spec))
    tokens = np.arange(size.total * size.block_size, dtype=np.int32)
    options: Any = {"model": MODEL, "names": kvjax.Namespaces(), "max_bytes": 1 << 40}
    with DiskStore(folder, spec, **options, max_in_flight=size.max_in_flight) as store:
        blocks = store.blocks(tokens)
        if direction == "write":
            store.write(pools, 0, unrelated := store.blocks(tokens[::-1])[: size.piece], list(range(len(unrelated))))
            store.flush()  # programs are compiled
            run = functools.partial(write_all, store, pools, blocks, size.piece)
        else:
            wanted = jax.device_get(pools.arrays[0][0])
            drop_pages(pathlib.Path(folder))
            run = functools.partial(read_all, store, blocks, wanted, size.piece)
        with growth() as grown:
            run()
    return max(grown) / size.max_in_flight


def write_all(store: DiskStore, pools: Any, blocks: list[Any], piece: int) -> None:
    """Writes blocks in pieces, each as soon as it fits into `max_in_flight`."""
    size = store.values.sizes[0]
    submitted = 0
    before = store.counters["written"]
    for first in range(0, len(blocks), piece):
        chunk = blocks[first : first + piece]
        while (submitted + len(chunk) - (store.counters["written"] - before)) * size > store.max_in_flight:
            time.sleep(1e-4)
        store.write(pools, 0, chunk, list(range(len(chunk))))
        submitted += len(chunk)
    store.flush()
    written = store.counters["written"] - before
    common.require(written == len(blocks), f"{written} blocks were written, not {len(blocks)}")


def read_all(store: DiskStore, blocks: list[Any], wanted: np.ndarray, piece: int) -> None:
    """Reads as many blocks as `max_in_flight` allows at a time, and compares their bytes."""
    max_blocks = store.max_in_flight // store.values.sizes[0]
    for first in range(0, len(blocks), max_blocks):
        futures = [store.read(block, 0) for block in blocks[first : first + max_blocks]]
        concurrent.futures.wait(futures)
        for index, future in enumerate(futures, first):
            (words,) = future.result()
            same = np.array_equal(words, wanted[index % piece].view(words.dtype))
            common.require(same, "other bytes than were written")


@contextlib.contextmanager
def growth() -> Iterator[list[int]]:
    """Samples resident memory. Yields a list, which gets the growth in bytes."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # what compilation has freed
    start = common.resident()
    grown = [0]
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(1e-3):
            grown.append(common.resident() - start)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield grown
    finally:
        stop.set()
        thread.join()


SIZES = {
    # Blocks of the pool and of a prefix for the verbs; blocks that move and their shape.
    "num_blocks": (65_536, 64), "prefix": (128, 8), "calls": (32, 1), "blocks": (64, 3), "layers": (8, 2),
    "kv_heads": (8, 2), "head_dim": (128, 8), "block_size": (16, 4),
    # A stored prompt; a batch that is written; blocks that pass through a store, and those of one `write`.
    "config": caches.CONFIGS, "prompt": (2048, 16), "rows": (8, 2), "batch_prompt": (256, 8), "new": (64, 4),
    "total": (1000, 40), "piece": (24, 3), "max_in_flight": (256 << 20, 1 << 14),
    "batch_rounds": (25, 1),  # the batch's CPU time differs by little
    "folder": pathlib.Path(tempfile.gettempdir()),  # on the disk to measure
}  # fmt: skip


@benchmark(BARS, SIZES, rounds=(11, 1))
def measure(size):
    yield measure_verbs(size)
    with tempfile.TemporaryDirectory(dir=size.folder) as folder:
        given = Bytes(size)
        root = pathlib.Path(folder)
        yield measure_device(given)
        yield measure_disk(given, root)
        yield measure_restart(size, root)
        yield measure_writing(size, root)
        # Each way in a process of its own, in whose memory nothing else has left holes.
        memory = str(root / "memory")
        growths = {}
        for direction in ("write", "read"):
            growths[f"rss_of_{direction}"] = common.apart("stores", "pass_through", direction, memory, size.quick)
    yield {"rss_of_in_flight": max(growths.values()), **growths}
