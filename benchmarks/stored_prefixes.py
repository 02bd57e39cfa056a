# SPDX-License-Identifier: Apache-2.0
"""Generations with a store: what a stored prompt saves, what writing costs, and the memory that both take."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from benchmarks import common, decode_loop
from kvjax.stores import DiskStore
from models.config import ModelConfig
from models.decoder import Decoder

ROOT = pathlib.Path(__file__).parents[1]
MODEL = "a model"


class Size(NamedTuple):
    """A stored prompt; a batch that is written; blocks and bytes that pass through a store."""

    config: ModelConfig = decode_loop.Size().config
    prompt: int = 2048
    rows: int = 8
    batch_prompt: int = 256
    new: int = 64
    block_size: int = 16
    total: int = 1000  # blocks
    piece: int = 24  # blocks of one `write`
    layers: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    max_in_flight: int = 256 << 20
    rounds: int = 11
    batch_rounds: int = 25  # the batch's CPU time differs by little


QUICK = Size(decode_loop.QUICK.config, 16, 2, 8, 4, 4, 40, 3, 2, 2, 64, 1 << 16, 1, 1)


def drop_pages(path: pathlib.Path) -> None:
    """Syncs a file, or all files of a folder, and drops their pages from memory."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class Job:
    """Prompts that a model answers greedily, with or without a store."""

    def __init__(self, size: Size, rows: int, prompt: int, new: int):
        self.model, self.new, self.names = Decoder(size.config, rngs=nnx.Rngs(0)), new, kvjax.Namespaces()
        rng = np.random.default_rng(prompt)
        self.prompts = rng.integers(0, size.config.vocab_size, (rows, prompt)).tolist()
        self.spec = kvjax.make_spec(
            self.model.layer_specs(), num_blocks=2 * rows * -(-(prompt + new) // size.block_size), max_seqs=rows,
            max_length=prompt + new, block_size=size.block_size, dtype="float32",
        )  # fmt: skip

    def empty(self) -> kvjax.Cache:
        return kvjax.Cache.create(self.spec)

    def open(self, folder: pathlib.Path) -> DiskStore:
        return DiskStore(folder, self.spec, model=MODEL, names=self.names, max_bytes=1 << 30, patience_ms=60_000)

    def answer(self, cache: kvjax.Cache, store: DiskStore | None = None) -> tuple[list[Any], kvjax.Cache]:
        outputs, cache, _ = kvjax.generate(
            self.model, cache, self.prompts, max_new_tokens=self.new, names=self.names, log_events=False, store=store
        )
        return outputs, cache


def require_same(found: list[Any], wanted: list[Any]) -> None:
    """Requires that outputs have the same tokens."""
    same = all(one.tokens == other.tokens for one, other in zip(found, wanted, strict=True))
    common.require(same, "other tokens with a store")


def measure_restart(size: Size, root: pathlib.Path) -> tuple[dict[str, float], dict[str, float]]:
    """`restart_x`: an answer to a stored prompt, the store being opened, to one that is computed."""
    job, folder, opened = Job(size, 1, size.prompt, 1), root / "restart", list[DiskStore]()
    with job.open(folder) as store:
        job.answer(job.empty(), store)

    def close() -> kvjax.Cache:
        while opened:
            opened.pop().close()
        drop_pages(folder)
        return job.empty()

    def restart(cache: kvjax.Cache) -> list[Any]:
        opened.append(job.open(folder))
        return job.answer(cache, opened[-1])[0]

    programs: Any = {"computed": (job.empty, lambda cache: job.answer(cache)[0]), "stored": (close, restart)}
    took, results = common.in_turns(programs, size.rounds)
    close()
    require_same(results["stored"], results["computed"])
    (output,) = results["stored"]
    common.require(output.stored_tokens >= size.prompt - size.block_size, f"{output.stored_tokens} tokens were stored")
    millis = {f"{name}_ms": 1e3 * one.wall for name, one in took.items()}
    return {"restart_x": took["computed"].wall / took["stored"].wall}, millis


def measure_writing(size: Size, root: pathlib.Path) -> tuple[dict[str, float], dict[str, float]]:
    """`writing_x` and `idle_x`: CPU time of a generation with a store, to one without."""
    job, idle = Job(size, size.rows, size.batch_prompt, size.new), root / "idle"
    writing = list[DiskStore]()
    with job.open(idle) as store:
        _, warm = job.answer(job.empty(), store)
        store.flush()
        before = store.counters

        def begin() -> kvjax.Cache:
            while writing:
                writing.pop().close()
            shutil.rmtree(root / "writing", ignore_errors=True)
            writing.append(job.open(root / "writing"))
            return job.empty()

        def write(cache: kvjax.Cache) -> list[Any]:
            outputs, _ = job.answer(cache, writing[-1])
            writing[-1].flush()
            return outputs

        copy = lambda: jax.tree.map(jnp.copy, warm)  # noqa: E731
        programs: Any = {
            "without": (job.empty, lambda cache: job.answer(cache)[0]),
            "writing": (begin, write),
            "warm": (copy, lambda cache: job.answer(cache)[0]),
            "idle": (copy, lambda cache: job.answer(cache, store)[0]),
        }
        took, results = common.in_turns(programs, size.batch_rounds)
        common.require(store.counters == before, "an idle store was read or written")
    counters = writing[0].counters
    writing[0].close()
    for outputs in results.values():
        require_same(outputs, results["without"])
    blocks = size.rows * ((size.batch_prompt + size.new - 1) // size.block_size)
    common.require(counters["written"] == blocks, f"{counters['written']} blocks were written, not {blocks}")
    metrics = {
        "writing_x": took["writing"].cpu / took["without"].cpu, "idle_x": took["idle"].cpu / took["warm"].cpu,
    }  # fmt: skip
    return metrics, {f"{name}_ms": 1e3 * one.cpu for name, one in took.items()}


def measure_memory(size: Size, root: pathlib.Path) -> tuple[dict[str, float], dict[str, float]]:
    """`rss_of_in_flight`: each way in a fresh process, in whose memory nothing else has left holes."""
    grown = {}
    for way in ("write", "read"):
        code = "import sys; from benchmarks import stored_prefixes; stored_prefixes.pass_through(*sys.argv[1:])"
        command = [sys.executable, "-c", code, way, str(root / "memory"), str(int(size.total == QUICK.total))]
        done = subprocess.run(command, env=dict(os.environ), cwd=ROOT, capture_output=True, text=True, check=False)
        common.require(done.returncode == 0, f"the process that measures memory: {done.stderr[-2000:]}")
        grown[way] = json.loads(done.stdout.splitlines()[-1])
    return {"rss_of_in_flight": max(grown.values())}, {f"rss_of_{way}": value for way, value in grown.items()}


def pass_through(way: str, folder: str, quick: str) -> None:
    """Prints how much memory grows at most while blocks are written or read, to what may be in flight."""
    size = QUICK if int(quick) else Size()
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(size.kv_heads, size.head_dim)] * size.layers, num_blocks=size.piece, max_seqs=1,
        max_length=size.piece * size.block_size, block_size=size.block_size, dtype="float32",
    )  # fmt: skip
    pools = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype), kvjax.init_pools(spec))
    tokens = np.arange(size.total * size.block_size, dtype=np.int32)
    options: Any = {"model": MODEL, "names": kvjax.Namespaces(), "max_bytes": 1 << 40}
    with DiskStore(folder, spec, **options, max_in_flight=size.max_in_flight) as store:
        blocks = store.blocks(tokens)
        if way == "write":
            store.write(pools, 0, other := store.blocks(tokens[::-1])[: size.piece], list(range(len(other))))
            store.flush()  # programs are compiled
            with growth() as peak:
                write_all(store, pools, blocks, size.piece)
        else:
            wanted = jax.device_get(pools.arrays[0][0])
            drop_pages(pathlib.Path(folder))
            with growth() as peak:
                read_all(store, blocks, wanted, size.piece)
    print(json.dumps(peak() / size.max_in_flight))


def write_all(store: DiskStore, pools: Any, blocks: list[Any], piece: int) -> None:
    """Writes blocks a piece at a time, as soon as one more may be in flight."""
    size, submitted, before = store.values.sizes[0], 0, store.counters["written"]
    for first in range(0, len(blocks), piece):
        some = blocks[first : first + piece]
        while (submitted + len(some) - (store.counters["written"] - before)) * size > store.max_in_flight:
            time.sleep(1e-4)
        store.write(pools, 0, some, list(range(len(some))))
        submitted += len(some)
    store.flush()
    written = store.counters["written"] - before
    common.require(written == len(blocks), f"{written} blocks were written, not {len(blocks)}")


def read_all(store: DiskStore, blocks: list[Any], wanted: np.ndarray, piece: int) -> None:
    """Reads blocks, as many at a time as may be in flight, and compares their bytes."""
    most = store.max_in_flight // store.values.sizes[0]
    for first in range(0, len(blocks), most):
        futures = [store.read(block, 0) for block in blocks[first : first + most]]
        concurrent.futures.wait(futures)
        for at, future in enumerate(futures, first):
            (words,) = future.result()
            common.require(np.array_equal(words, wanted[at % piece].view(words.dtype)), "other bytes than were written")


@contextlib.contextmanager
def growth() -> Iterator[Callable[[], int]]:
    """Samples resident memory; yields () -> the most bytes by which it has grown."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # what compilation has freed
    start = most = resident()
    stop = threading.Event()

    def sample() -> None:
        nonlocal most
        while not stop.wait(1e-3):
            most = max(most, resident())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: max(most, resident()) - start
    finally:
        stop.set()
        thread.join()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


MEASURES = measure_restart, measure_writing, measure_memory
