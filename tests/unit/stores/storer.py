# SPDX-License-Identifier: Apache-2.0
"""Blocks whose K/V follow from their hash, and processes that write and read them."""

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.stores import DiskStore

SIZE, MODEL, ROWS = 4, "a model", 8
SPEC = kvjax.make_spec(
    [kvjax.LayerSpec(1, 2), kvjax.LayerSpec(1, 2, window=6)], num_blocks=ROWS, max_seqs=2, max_length=64,
    block_size=SIZE, dtype="float32",
)  # fmt: skip
TEXTS = [[first, *np.random.default_rng(first).integers(0, 9, 6 * SIZE - 1).tolist()] for first in range(12)]


def chain(store, text):
    return store.blocks(np.asarray(text), 0)


def words_of(block):
    """The K/V of a block, f32[L, 2, K, P, D]."""
    seed = int.from_bytes(block.hash[:8], "little")
    return np.random.default_rng(seed).random((1, 2, 1, SIZE, 2), np.float32)


def pools_of(blocks):
    """Pools with these blocks in their first rows."""
    pools = kvjax.Cache.create(SPEC).pools
    array = np.zeros(pools.arrays[0][0].shape, np.float32)
    for row, block in enumerate(blocks):
        array[row] = words_of(block)
    return pools.replace(arrays=((jnp.asarray(array),), (jnp.asarray(array),)))


def opened(folder, **options):
    return DiskStore(folder, SPEC, model=MODEL, names=kvjax.Namespaces(), **options)


def write_for_ever(folder, max_bytes, seed, ready, stop=None):
    """Writes texts in a random order, and flushes now and then, until it is killed or stopped."""
    rng = np.random.default_rng(seed)
    with opened(folder, max_bytes=max_bytes) as store:
        while stop is None or not stop.is_set():
            blocks = chain(store, TEXTS[rng.integers(len(TEXTS))])
            store.write(pools_of(blocks), 0, blocks, range(len(blocks)))
            if rng.random() < 0.3:
                store.flush()
            if store.counters["evicted"]:
                ready.set()


def read_for_ever(folder, rounds, seed, found):
    """Reads random texts, refreshing its list now and then; puts its counters into a queue."""
    rng = np.random.default_rng(seed)
    with opened(folder, readonly=True) as store:
        for _ in range(rounds):
            store.refresh()
            for at in rng.permutation(len(TEXTS)).tolist():
                blocks = [block for block in chain(store, TEXTS[at]) if store.has(block, 0)]
                for block, future in [(block, store.read(block, 0)) for block in blocks]:
                    words = future.result()
                    assert words is None or np.array_equal(words[0].view(np.float32), words_of(block))
        found.put(store.counters)
