# SPDX-License-Identifier: Apache-2.0
"""Specs of all kinds of saved caches, and random bytes for them."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax import LayerSpec
from kvjax.tiers import TieredCache

SIZE, ROWS, WIDTH = 4, 3, 16
FULL, WINDOW = LayerSpec(2, 2), LayerSpec(2, 2, window=6, sink_tokens=2)
OPTIONS = {"max_seqs": ROWS, "max_length": WIDTH, "block_size": SIZE}
KINDS = {
    "plain": ([FULL], {"num_blocks": 24}),
    "tiers": (
        [FULL, WINDOW],
        {
            "num_blocks": {None: 10, 6: 8}, "num_host_blocks": {None: 14, 6: 6}, "retention": True, "extra_ids": True,
        },
    ),
    "windows": ([FULL, WINDOW, FULL], {"num_blocks": {None: 24, 6: 12}, "dtype": "float32"}),
    "int8": ([FULL, WINDOW], {"num_blocks": 20, "dtype": "int8", "retention": True}),
    "fp8": ([FULL], {"num_blocks": 20, "dtype": "float8_e4m3fn", "extra_ids": True}),
    "bare": ([WINDOW], {"num_blocks": 12, "num_host_blocks": 6}),
    "latents": ([LayerSpec.latent(4, 2), FULL], {"num_blocks": 20}),
    "recurrent": ([LayerSpec.recurrent({"state": (2, 3)}), FULL], {"num_blocks": 20, "dtype": "int8"}),
}  # fmt: skip
each_kind = pytest.mark.parametrize(
    "kind", ["plain", *[pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "plain"]]
)


def make_spec(kind, **options):
    layers, own = KINDS[kind]
    return kvjax.make_spec(layers, **{**OPTIONS, **own, **options})


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
