# SPDX-License-Identifier: Apache-2.0
"""The two forms of stored blocks, a save and a `DiskStore`, of caches whose K/V are their tokens."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.blocks.hashes import root_hash
from kvjax.stores import DiskStore, load, save
from kvjax.stores.contents import Contents, contents_of
from kvjax.stores.manifest import read_manifest
from kvjax.stores.values import Values
from tests.drive import Driver

SIZE, WIDTH, MODEL, ROWS = 4, 16, "a model", 16
SPEC = kvjax.make_spec(
    [kvjax.LayerSpec(1, 2), kvjax.LayerSpec(1, 2, window=6)], num_blocks=ROWS, max_seqs=2, max_length=WIDTH,
    block_size=SIZE, dtype="float32",
)  # fmt: skip
VALUES = Values(SPEC)
BYTES = VALUES.sizes[0]  # of a value, in both groups
ROOT = root_hash(MODEL)


def words_of(block):
    """The K/V of a block, f32[L, 2, K, P, D], with zeros after its tokens."""
    tokens = np.frombuffer(block.text.ljust(4 * SIZE, b"\0"), np.int32)
    return np.broadcast_to(tokens[:, None], (1, 2, 1, SIZE, 2)).astype(np.float32)


def pools_of(blocks):
    """Pools with these blocks in their first rows."""
    pools = kvjax.Cache.create(SPEC).pools
    array = np.zeros(pools.arrays[0][0].shape, np.float32)
    for row, block in enumerate(blocks):
        array[row] = words_of(block)
    return pools.replace(arrays=((jnp.asarray(array),), (jnp.asarray(array),)))


def chain(store, text):
    return store.blocks(np.asarray(text), 0)


def cache_of(*texts):
    """A cache with computed texts. After their tokens the K/V are NaN."""
    driver = Driver(kvjax.Cache.create(SPEC), verified=False)
    for text in texts:
        driver.start(0, text)
        driver.do("release", 0)
    cache = driver.cache
    arrays = [np.full(pool[0].shape, np.nan, np.float32) for pool in cache.pools.arrays]
    contents, ids = contents_of(jax.device_get(cache.state))
    for column, block in enumerate(contents.blocks(VALUES, {0: ROOT})):
        for array, block_id in zip(arrays, ids[:, column], strict=True):
            if block_id >= 0:
                array[block_id, ..., : contents.fill[column], :] = words_of(block)[..., : contents.fill[column], :]
    return cache.replace(pools=cache.pools.replace(arrays=tuple((jnp.asarray(array),) for array in arrays)))


def blocks_of(cache):
    """{(group, hash)} of a sound cache's blocks, whose bytes are verified."""
    kvjax.check(cache.state)
    contents, ids = contents_of(jax.device_get(cache.state))
    right = set()
    for column, block in enumerate(contents.blocks(VALUES, {0: ROOT})):
        for group_index, block_id in enumerate(ids[:, column].tolist()):
            if block_id >= 0:
                fill, kv = contents.fill[column], np.asarray(cache.pools.arrays[group_index][0][block_id])
                assert np.array_equal(kv[..., :fill, :], words_of(block)[..., :fill, :])
                right.add((group_index, block.hash))
    return right


def opened(location, spec=SPEC, **options):
    return DiskStore(location, spec, **{"model": MODEL, "names": kvjax.Namespaces(), "max_bytes": 1 << 20, **options})


def is_right(store, block, group_index=0):
    """Whether a block is read as it was written. False if it is missing."""
    words = store.read(block, group_index).result(60)
    if words is None:
        return False
    assert np.array_equal(words[0].view(np.float32), words_of(block)), "wrong bytes"
    return True


class Save:
    """A folder written by `save`."""

    location = "folder"

    def write(self, folder, cache):
        save(cache, folder, model=MODEL)

    def read(self, folder):
        """{(group, hash)} of the loaded blocks, and the number of broken blocks."""
        cache, counts = load(kvjax.Cache.create(SPEC), folder, model=MODEL)
        assert counts.left == 0
        return blocks_of(cache), counts.broken

    def slices(self, folder):
        """{(group, hash): (file, slice)} of the values."""
        saved = read_manifest(folder)
        index, pack = (folder / f"{saved['name']}.{name}" for name in ("index", "values"))
        contents = Contents.from_bytes(index.read_bytes(), SPEC, saved["num_blocks"])
        starts, starts_of = VALUES.starts(contents.order >= 0), {}
        for column, block in enumerate(contents.blocks(VALUES, {0: ROOT})):
            for group_index in np.flatnonzero(contents.order[:, column] >= 0).tolist():
                start = int(starts[group_index, column])
                starts_of[group_index, block.hash] = pack, slice(start, start + BYTES)
        return starts_of

    def write_for_ever(self, folder, caches, ready, stop):
        for index in itertools.count():
            self.write(folder, caches[index % len(caches)])
            if index >= len(caches):
                ready.set()


class Store:
    """The folder of a `DiskStore`. `texts` are the texts whose blocks it may have."""

    location = "location"

    def __init__(self, texts=(), max_bytes=1 << 20):
        self.texts, self.max_bytes = texts, max_bytes

    def put(self, store, cache):
        state = jax.device_get(cache.state)
        contents, ids = contents_of(state)
        blocks = contents.blocks(VALUES, {0: ROOT})
        for group_index, group in enumerate(state.groups):
            (block_ids,) = np.nonzero((contents.fill == SIZE) & (ids[group_index] >= 0))
            rows = np.asarray(group.pool_row(ids[group_index, block_ids]))
            store.write(cache.pools, group_index, [blocks[index] for index in block_ids], rows.tolist())

    def write(self, folder, cache):
        with opened(folder, max_bytes=self.max_bytes) as store:
            self.put(store, cache)

    def read(self, folder, **options):
        """{(group, hash)} of the blocks read, and the number of broken blocks."""
        with opened(folder, **options) as store:
            blocks = [block for text in self.texts for block in chain(store, text)]
            blocks_read = {
                (group_index, block.hash)
                for block in blocks
                for group_index in (0, 1)
                if is_right(store, block, group_index)
            }
            return blocks_read, store.counters["broken"]

    def slices(self, folder):
        names = [path for path in sorted(folder.glob("*/*")) if path.is_file()]
        return {(int(path.parent.name.split("-")[1]), bytes.fromhex(path.name)): (path, slice(None)) for path in names}

    def write_for_ever(self, folder, caches, ready, stop):
        """Flushes now and then, and evicts when `max_bytes` are few."""
        with opened(folder, max_bytes=self.max_bytes) as store:
            for index in itertools.count():
                if stop.is_set():
                    break
                self.put(store, caches[index % len(caches)])
                if index % 3 == 0:
                    store.flush()
                if store.counters["evicted"]:
                    ready.set()


def write_for_ever(form, folder, caches, ready, stop):
    """Writes pickled caches by turns, until it is killed or stopped. Runs in a process of its own."""
    form.write_for_ever(folder, pickle.loads(caches), ready, stop)


def read_for_ever(form, folder, rounds, counts):
    """Reads while another process writes. Puts the numbers of blocks and of broken blocks into a queue."""
    results = [form.read(folder, readonly=True) for _ in range(rounds)]
    counts.put((sum(len(blocks_read) for blocks_read, _ in results), sum(broken for _, broken in results)))
