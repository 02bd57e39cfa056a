# SPDX-License-Identifier: Apache-2.0
"""The bytes and the books of a cache whose blocks are divided among devices, for `benchmarks.replicas`."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import kvjax
from benchmarks import common
from models import loading

CHECKPOINT = pathlib.Path(__file__).parents[1] / "models/checkpoints/recall"
ROWS, LENGTH, TURNS = 32, 512, 20  # rows of the caches; tokens of a row; calls of a verb that are timed together
SHAPE = {"max_seqs": ROWS, "max_length": LENGTH, "block_size": 16, "dtype": "float32"}


def mesh_of(heads: int, context: int) -> dict[str, Any]:
    """The arguments of `Cache.create` for so many devices that divide heads, and blocks."""
    sizes = {"heads": heads} | ({"context": context} if context > 1 else {})
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), (AxisType.Auto,) * len(sizes))
    return {"mesh": mesh, **{name: name for name in sizes}}


def compare_bytes(num_blocks: int) -> tuple[dict[str, float], dict[str, float]]:
    """`context_bytes` and `context_temporaries`, of the bundled model's decode step on 2 x 4 devices."""
    where = mesh_of(2, 4)
    model, _ = loading.load(CHECKPOINT, **where)
    cache = kvjax.Cache.create(kvjax.make_spec(model.layer_specs(), num_blocks=num_blocks, **SHAPE), **where)
    leaves = jax.tree.leaves(cache.pools)
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    def step(model: Any, cache: Any, tokens: Any) -> Any:
        cache, _ = cache.extend(np.ones(ROWS, bool))
        return kvjax.step(model, cache, tokens, np.ones(ROWS, np.int32))

    compiled = jax.jit(step, donate_argnums=1).lower(model, cache, np.zeros((ROWS, 1), np.int32)).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    metrics = {"context_bytes": 8 * own / sum(leaf.nbytes for leaf in leaves), "context_temporaries": temporaries / own}
    return metrics, {"context_mb_of_a_device": own / 1e6}


def compare_books(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """`context_books`: `extend` and `commit` on 2 x 4 devices to those on as many that divide heads alone."""
    layers, tokens = [kvjax.LayerSpec(8, 16)], np.ones((ROWS, 1), np.int32)
    spec = kvjax.make_spec(layers, num_blocks=ROWS * LENGTH // 16, **SHAPE)
    admit = jax.jit(kvjax.Cache.admit)

    @functools.partial(jax.jit, donate_argnums=0)
    def keep(cache: Any) -> Any:
        for _ in range(TURNS):
            cache, _ = cache.extend(np.ones(ROWS, bool))
            cache, _ = cache.commit(tokens, np.ones(ROWS, np.int32))
        return cache

    def begin(where: dict[str, Any]) -> Any:
        prompts = np.arange(ROWS * 8, dtype=np.int32).reshape(ROWS, 8)
        cache, events = admit(kvjax.Cache.create(spec, **where), np.arange(ROWS), prompts, np.full(ROWS, 8, np.int32))
        cache, committed = jax.jit(kvjax.Cache.commit)(cache, prompts, np.full(ROWS, 8, np.int32))
        common.require(bool(events.ok.all() & committed.ok), "a prompt was refused")
        return cache

    meshes = {"context": mesh_of(2, 4), "heads": mesh_of(8, 1)}
    took, caches = common.in_turns(
        {name: (functools.partial(begin, where), keep) for name, where in meshes.items()}, rounds
    )
    states = [jax.tree.leaves(jax.device_get(cache.state)) for cache in caches.values()]
    common.require(all(map(np.array_equal, *states)), "the two caches have different metadata")
    details = {f"books_of_{name}_ms": 1e3 * one.wall / TURNS for name, one in took.items()}
    return {"context_books": took["context"].wall / took["heads"].wall}, details
