# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: what a cache has found by prefix, it finds after a restart, in other caches too."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import Cache, LayerSpec, Namespaces
from kvjax.stores import Loaded, load, save
from kvjax.stores.contents import contents_of
from kvjax.stores.layout import leaves_of
from kvjax.stores.transport import read
from kvjax.tiers import TieredCache
from tests.drive import METHODS, lines, padded

SIZE, ROWS, WIDTH = 4, 3, 16
FULL, WINDOW = LayerSpec(2, 2), LayerSpec(2, 2, window=6, sink_tokens=2)
OPTIONS = {"max_seqs": ROWS, "max_length": WIDTH, "block_size": SIZE}
MODEL = "a model"
KINDS = {
    "plain": ([FULL], {"num_blocks": 24}),
    "tiers": ([FULL, WINDOW], {"num_blocks": 10, "num_host_blocks": 14, "retention": True, "extra_ids": True}),
    "windows": ([FULL, WINDOW, FULL], {"num_blocks": {None: 24, 6: 12}, "dtype": "float32"}),
    "int8": ([FULL, WINDOW], {"num_blocks": 20, "dtype": "int8", "retention": True}),
    "fp8": ([FULL], {"num_blocks": 20, "dtype": "float8_e4m3fn", "extra_ids": True}),
    "bare": ([WINDOW], {"num_blocks": 12, "num_host_blocks": 6}),
    "latents": ([LayerSpec.latent(4, 2), FULL], {"num_blocks": 20}),
    "recurrent": ([LayerSpec.recurrent({"state": (2, 3)}), FULL], {"num_blocks": 20}),
}  # fmt: skip
each_kind = pytest.mark.parametrize(
    "kind", [kind if kind in ("plain", "tiers") else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)


def make_spec(kind, **options):
    layers, own = KINDS[kind]
    return kvjax.make_spec(layers, **{**OPTIONS, **own, **options})


def create(spec, **options):
    return (TieredCache if spec.has_host else Cache).create(spec, **options)


def random_bytes(cache, seed=0):
    """The cache with random numbers in all pools, which are the K/V of whatever is in its blocks."""
    rng = np.random.default_rng(seed)

    def fill(x):
        words = rng.integers(0, 2**8, (*x.shape, x.dtype.itemsize), np.uint8)
        return jax.device_put(words.view(x.dtype).reshape(x.shape), x.sharding)

    if isinstance(cache, TieredCache):
        host = cache.host.replace(**jax.tree.map(fill, {"arrays": cache.host.arrays, "scales": cache.host.scales}))
        return TieredCache(random_bytes(cache.cache, seed + 1), host)
    arrays = jax.tree.map(fill, {"arrays": cache.pools.arrays, "scales": cache.pools.scales})
    return cache.replace(pools=cache.pools.replace(**arrays))


def run(cache, verb, *args, **options):
    method = getattr(cache, verb) if isinstance(cache, TieredCache) else functools.partial(METHODS[verb], cache)
    return method(*args, **options)


def history(cache, seed=0, steps=30, namespaces=1, leave=True):
    """The cache after random requests, some of which still have their rows if `leave` is False."""
    rng, spec, active = np.random.default_rng(seed), cache.state.spec, set()
    for step in range(steps):
        seq, now = int(rng.integers(ROWS)), np.int32(step)
        if seq in active:
            cache, _ = run(cache, "release", np.int32(seq), now=now)
            active.discard(seq)
            continue
        text, options = rng.integers(0, 2, rng.integers(2, WIDTH + 1)), {}
        if spec.extra_ids:
            options["extra_ids"] = padded(np.repeat(rng.integers(0, 2), len(text)), WIDTH)
        if spec.retention:
            retention = kvjax.Retention.of([(0, 4, int(rng.integers(0, 90)), 50)], decode_priority=20)
        request = options | ({"retention": retention} if spec.retention else {})
        namespace = np.int32(rng.integers(namespaces))
        cache, events = run(
            cache, "admit", np.int32(seq), padded(text, WIDTH), np.int32(len(text)), namespace=namespace, now=now,
            **request,
        )  # fmt: skip
        if not bool(events.ok):
            continue
        active.add(seq)
        start = int(cache.state.seqs.committed[seq])
        tokens, counts = lines({seq: text[start:]}, ROWS, WIDTH)
        extra = {"extra_ids": lines({seq: options["extra_ids"][start : len(text)]}, ROWS, WIDTH)[0]} if options else {}
        cache, _ = run(cache, "commit", tokens, counts, now=now, **extra)
    for seq in active if leave else ():
        cache, _ = run(cache, "release", np.int32(seq), now=np.int32(steps))
    return random_bytes(cache, seed)


def findable(cache):
    """{prefix: (bytes of each group, hits, priority and time to live)} of a cache's findable blocks."""
    state = jax.device_get(cache.state)
    contents, ids = contents_of(state)
    host, found = getattr(cache, "host", None), {}
    for at in range(len(contents.parent)):
        path = contents.path(at)
        prefix = int(contents.namespace[at]), *(contents.head(block) for block in path)
        found[prefix] = [{}, int(contents.hits[at]), contents.retention[at].tolist()]
    prefixes = list(found)
    for number, group in enumerate(state.groups):
        (at,) = np.nonzero(ids[number] >= 0)
        leaves = leaves_of(state.spec, number)
        for first, arrays in read(cache.pools, host, number, np.asarray(group.pool_row(ids[number][at]))):
            some = at[first : first + 64]
            words = [leaf.cut(array, contents.fill[some]) for leaf, array in zip(leaves, arrays, strict=True)]
            for row, index in enumerate(some):
                found[prefixes[index]][0][number] = b"".join(array[row].tobytes() for array in words)
    return found


def in_order(cache):
    """The prefixes of a cache in the order of release, on the device and on the host."""
    contents, _ = contents_of(jax.device_get(cache.state))
    names = [b"".join(contents.head(block) for block in contents.path(at)) for at in range(len(contents.parent))]
    return [[names[at] for at in np.argsort(order) if order[at] >= 0] for order in contents.order]


def total(cache):
    return sum(int(np.sum(ids >= 0)) for ids in contents_of(jax.device_get(cache.state))[1])


@each_kind
@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6)]])
def test_a_restart_finds_the_same(kind, seed, tmp_path):
    spec = make_spec(kind)
    cache = history(create(spec), seed)
    wanted = findable(cache)
    save(cache, tmp_path, names=Namespaces(), model=MODEL)
    assert findable(cache) == wanted, "save changes nothing"
    loaded, counts = load(create(spec), tmp_path, names=Namespaces(), model=MODEL)
    kvjax.check(loaded.state)
    assert counts == Loaded(total(cache), 0, 0)
    assert len(wanted) > 8 and findable(loaded) == wanted
    assert in_order(loaded) == in_order(cache)
