# SPDX-License-Identifier: Apache-2.0
"""Replicas, and caches with divided blocks, on virtual devices which share the cores of a machine.

Replicas answer the questions of `benchmarks.serving`. Two replicas each have the cache of one. Four replicas each have
a quarter of its blocks and rows, and answer in a single batch, or in 8 batches in random order. All answers have to
equal the answers of a single cache. A prompt of 2,048 tokens is routed over 8 replicas with full caches of 4,096
blocks. The prompts begin with the same text, which all replicas have cached.

Blocks are divided on 8 devices: 2 divide heads and 4 the tokens of blocks. The decode step has 32 rows. Programs take
turns, and ratios are of medians of wall time. Each part runs in a separate process with as many virtual devices as it
needs.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import kvjax
from benchmarks import caches, common, workload
from benchmarks.common import Bar, Program, Size, benchmark
from benchmarks.workload import load_recall
from kvjax.serving import Replicas, Request, RunOptions, make_requests
from kvjax.serving.routing import hashes_of
from models import loading, recall

BARS = {
    "two_over_one": Bar("tokens a second of 2 replicas, to one", at_least=1.3),
    "reused_of_one": Bar("prompt tokens reused by 4 replicas, to one cache", at_least=0.85),
    "reused_of_one_mixed": Bar("prompt tokens reused by 4 replicas, to one cache, in random order"),
    "in_turn_reused_of_one_mixed": Bar("in random order with prompts sent in turn, to one cache"),
    "route_of_hashing": Bar("time to route a prompt over 8 replicas, to hashing its blocks", at_most=1.3),
    "context_bytes": Bar("blocks divided: K/V of a device, to an eighth of the pools", at_most=1.02),
    "context_temporaries": Bar("temporaries of a decode step, to a device's part of the pools", at_most=0.05),
    "context_books": Bar("`extend` and `commit`, to 8 devices that divide heads alone", at_most=1.1),
}
NOTES = """
Two replicas gave 1.7x to 1.9x on quiet cores in several runs, and 1.1x to 1.3x while others used the cores.
"""
VOCABULARY = 512  # of the prompts that are only routed
# Of the caches whose blocks are divided: rows; tokens of a row; calls of a verb that are timed together.
ROWS, LENGTH, TURNS = 32, 512, 20
SHAPE = {"max_seqs": ROWS, "max_length": LENGTH, "block_size": 16, "dtype": "float32"}


def prompts_of(size: Size) -> list[list[int]]:
    """The questions, or the first of them."""
    return workload.questions(size)[: size.first]


def run(replicas: Replicas, size: Size, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """The outputs of a batch."""
    requests = make_requests(prompts, max_new_tokens=size.new_tokens)
    return replicas.run_batch(requests, RunOptions(scheduler=size.scheduler))


def compare_speed(size: Size) -> dict[str, float]:
    """Measures `two_over_one`."""
    model, _ = load_recall()
    prompts = prompts_of(size)
    spec = workload.spec_of(model, size)
    programs: dict[str, Program] = {
        name: (
            functools.partial(Replicas, model, spec, jax.devices()[:count]),
            lambda replicas: [output.tokens for output in run(replicas, size, prompts)],
        )
        for name, count in (("one", 1), ("two", 2))
    }
    took, answers = common.in_turns(programs, size.rounds)
    workload.require_same(model, size, prompts, answers)
    tokens = len(prompts) * size.new_tokens
    return {
        "two_over_one": took["one"].wall / took["two"].wall,
        **{f"{name}_tokens_per_s": tokens / timing.wall for name, timing in took.items()},
    }


def compare_reuse(size: Size, batches: int = 1, name: str = "") -> dict[str, float]:
    """Measures `reused_of_one`, and the share if replicas take turns. `name` is for several batches in random order."""
    (model, _) = load_recall()
    num_replicas = size.parts
    part = size.replace(rows=size.rows // num_replicas, num_blocks=size.num_blocks // num_replicas)
    full_spec = workload.spec_of(model, size)
    part_spec = workload.spec_of(model, part)
    prompts = prompts_of(size)
    prompts = prompts if batches == 1 else random.Random(0).sample(prompts, len(prompts))
    single = Replicas(model, full_spec, jax.devices()[:1])
    routed = Replicas(model, part_spec, jax.devices()[:num_replicas])
    turns = [Replicas(model, part_spec, jax.devices()[:1]) for _ in range(num_replicas)]

    def in_turn(batch: Sequence[Any]) -> list[Any]:
        outputs: list[Any] = [None] * len(batch)
        for n, replica in enumerate(turns):
            outputs[n::num_replicas] = run(replica, size, batch[n::num_replicas])
        return outputs

    ways: dict[str, Callable[[Sequence[Any]], list[Any]]] = {
        "one": lambda batch: run(single, size, batch), "routed": lambda batch: run(routed, size, batch),
        "in_turn": in_turn,
    }  # fmt: skip
    cuts = [len(prompts) * n // batches for n in range(batches + 1)]
    outputs = {
        name: [output for begin, end in itertools.pairwise(cuts) for output in program(prompts[begin:end])]
        for name, program in ways.items()
    }
    answers = {name: [output.tokens for output in batch] for name, batch in outputs.items()}
    workload.require_same(model, size, prompts, answers)
    cached = {name: sum(output.cached_tokens for output in batch) for name, batch in outputs.items()}
    return {
        f"reused_of_one{name}": cached["routed"] / cached["one"],
        f"one_reused{name}": cached["one"] / sum(map(len, prompts)),
        f"in_turn_reused_of_one{name}": cached["in_turn"] / cached["one"],
    }


def compare_routing(size: Size) -> dict[str, float]:
    """Measures `route_of_hashing`."""
    num_replicas = size.routes
    block = workload.BLOCK
    rng = np.random.default_rng(0)
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(1, 1)], num_blocks=size.routed_blocks, max_seqs=8, max_length=size.length + block,
        block_size=block, dtype="float32",
    )  # fmt: skip
    # The price of load spreads the prompts over all replicas, so that each one gets the beginning.
    replicas = Replicas(caches.NoModel(VOCABULARY), spec, jax.devices()[:num_replicas], load_price=1.0)
    half = size.length // 2
    start = rng.integers(0, VOCABULARY, half).tolist()
    count = num_replicas * (size.routed_blocks * block // half)  # as many as all caches hold, and a few push others out
    prompts = [[*start, *rng.integers(0, VOCABULARY, half).tolist()] for _ in range(count)]
    replicas.run_batch(make_requests(prompts, max_new_tokens=1))
    cached = [int(np.sum(np.asarray(cache.state.groups[0].blocks.fill) == block)) for cache in replicas.caches]
    common.require(min(cached) > 0.9 * size.routed_blocks, f"a cache has {min(cached)} blocks, wanted a full one")
    route = list[float]()
    hashing = list[float]()
    reused = list[int]()
    for prompt in [*prompts[-64:], *prompts[-64:]]:
        array = np.asarray(prompt)
        began = time.perf_counter()
        (chosen,) = replicas.route([Request(prompt)])
        routed = time.perf_counter()
        hashes_of(array, 0, replicas.spec)
        hashing.append(time.perf_counter() - routed)
        route.append(routed - began)
        reused.append(chosen.tokens)
    common.require(min(reused) >= half and max(reused) == size.length - block, "a prompt went where it is not cached")
    medians = {"route_ms": 1e3 * statistics.median(route), "hashing_ms": 1e3 * statistics.median(hashing)}
    return {"route_of_hashing": medians["route_ms"] / medians["hashing_ms"], **medians}


def mesh_of(heads: int, context: int) -> dict[str, Any]:
    """The arguments of `Cache.create` for this number of devices to divide heads, and to divide blocks."""
    sizes = {"heads": heads} | ({"context": context} if context > 1 else {})
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), (AxisType.Auto,) * len(sizes))
    return {"mesh": mesh, **{name: name for name in sizes}}


def compare_bytes(size: Size) -> dict[str, float]:
    """Measures `context_bytes` and `context_temporaries`, of the bundled model's decode step on 2 x 4 devices."""
    where = mesh_of(2, 4)
    model, _ = loading.load(recall.CHECKPOINT, **where)
    cache = kvjax.Cache.create(kvjax.make_spec(model.layer_specs(), num_blocks=size.divided, **SHAPE), **where)
    leaves = jax.tree.leaves(cache.pools)
    device_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    def step(model: Any, cache: Any, tokens: Any) -> Any:
        cache, _ = cache.extend(np.ones(ROWS, bool))
        return kvjax.step(model, cache, tokens, np.ones(ROWS, np.int32))

    compiled = jax.jit(step, donate_argnums=1).lower(model, cache, np.zeros((ROWS, 1), np.int32)).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return {
        "context_bytes": 8 * device_bytes / sum(leaf.nbytes for leaf in leaves),
        "context_temporaries": temporaries / device_bytes,
        "context_mb_of_a_device": device_bytes / 1e6,
    }


def compare_books(size: Size) -> dict[str, float]:
    """Measures `context_books`: `extend` and `commit` on 2 x 4 devices, against 8 devices which divide heads."""
    layers = [kvjax.LayerSpec(8, 16)]
    tokens = np.ones((ROWS, 1), np.int32)
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
    programs: dict[str, Program] = {name: (functools.partial(begin, where), keep) for name, where in meshes.items()}
    took, ends = common.in_turns(programs, size.rounds)
    states = [jax.tree.leaves(jax.device_get(cache.state)) for cache in ends.values()]
    common.require(all(map(np.array_equal, *states)), "the two caches have different metadata")
    ratio = took["context"].wall / took["heads"].wall
    details = common.times({f"books_of_{name}": timing for name, timing in took.items()}, "ms", calls=TURNS)
    return {"context_books": ratio, **details}


# What is measured together, and the virtual devices that it needs.
PARTS: dict[str, tuple[Callable[[Size], dict[str, float]], int]] = {
    "speed": (compare_speed, 2),
    "reuse": (compare_reuse, 4),
    "mixed_reuse": (lambda size: compare_reuse(size, size.batches, "_mixed"), 4),
    "routing": (compare_routing, 8),
    "bytes": (compare_bytes, 8),
    "books": (compare_books, 8),
}
SIZES = {
    **workload.BATCH,
    "rows": (32, 4),
    "num_blocks": (512, 48),  # of one replica, or of the parts together
    "first": None,  # of the questions; all
    "batches": (8, 2),  # in which the questions come in random order
    "parts": (4, 2),  # replicas that share the blocks of one cache
    "routes": (8, 2),  # replicas among which prompts are routed, and blocks of each
    "routed_blocks": (4096, 64),
    "length": (2048, 128),  # tokens of each of these prompts, of which the first half is the same in all
    "divided": (16_384, 256),  # blocks of the cache that is divided by tokens
}


def measure_part(part: str, quick: bool, first: int | None, rounds: int) -> dict[str, float]:
    """Measures a part in this process. The number of virtual devices is set once, before jax starts."""
    compare, devices = PARTS[part]
    jax.config.update("jax_num_cpu_devices", devices)
    return compare(measure.size(quick, first=first, rounds=rounds))


@benchmark(BARS, SIZES, rounds=(9, 1))
def measure(size):
    for part in PARTS:
        yield common.apart("replicas", "measure_part", part, size.quick, size.first, size.rounds)
