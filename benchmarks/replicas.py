# SPDX-License-Identifier: Apache-2.0
"""Replicas, and blocks that are divided, on virtual devices, which share the cores of one machine.

Replicas answer the questions of `benchmarks.serving`: two of them, each with the cache of one; and four, each with a
quarter of its blocks and rows, in one batch, and in 8 batches in random order. All answers must be those of one cache.
A prompt of 2,048 tokens is routed over 8 replicas with full caches of 4,096 blocks; the prompts begin alike, and all
replicas have that beginning.

Blocks are divided on 8 devices, of which 2 divide heads and 4 the tokens of blocks; the decode step has 32 rows.
Programs take turns; a ratio is of medians of wall time. Each part has a process of its own, with as many virtual
devices as it needs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import kvjax
from benchmarks import batch_job, common, context_job
from benchmarks.common import Bar
from kvjax.serving import Replicas, Request, RunOptions, make_requests
from kvjax.serving.routing import hashes_of
from models import loading

ROOT = pathlib.Path(__file__).parents[1]
CHECKPOINT = ROOT / "models/checkpoints/recall"
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
Measured = tuple[dict[str, float], dict[str, float]]  # metrics, and details


class Size(NamedTuple):
    """What to run.

    Attributes:
      batch: the questions, and the cache of one replica; for `reused_of_one` that of all together.
      questions: how many of them; None: all.
      rounds: how often each way is timed.
      batches: in which the questions come in random order.
      parts: replicas that share the blocks of one cache.
      routes: replicas among which prompts are routed.
      num_blocks: of each replica among which prompts are routed.
      length: tokens of each of these prompts, of which the first half is the same in all.
      divided: blocks of the cache that is divided by tokens.
    """

    batch: batch_job.Size = batch_job.Size()
    questions: int | None = None
    rounds: int = 9
    batches: int = 8
    parts: int = 4
    routes: int = 8
    num_blocks: int = 4096
    length: int = 2048
    divided: int = 16_384

    @property
    def prompts(self) -> list[list[int]]:
        """The questions."""
        return batch_job.questions(self.batch)[: self.questions]


QUICK = Size(batch_job.QUICK._replace(rows=4, num_blocks=48), None, 1, 2, 2, 2, 64, 128, 256)


def run(replicas: Replicas, size: Size, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """The outputs of a batch."""
    requests = make_requests(prompts, max_new_tokens=size.batch.new_tokens)
    return replicas.run_batch(requests, RunOptions(scheduler=size.batch.scheduler))


def compare_speed(size: Size) -> Measured:
    """`two_over_one`."""
    model, _ = loading.load(CHECKPOINT)
    prompts, spec = size.prompts, batch_job.make_cache(model, size.batch).state.spec
    programs: Any = {
        name: (
            functools.partial(Replicas, model, spec, jax.devices()[:number]),
            lambda replicas: [output.tokens for output in run(replicas, size, prompts)],
        )
        for name, number in (("one", 1), ("two", 2))
    }
    took, answers = common.in_turns(programs, size.rounds)
    batch_job.require_same(model, size.batch, prompts, answers)
    tokens = len(prompts) * size.batch.new_tokens
    details = {f"{name}_tokens_per_s": tokens / one.wall for name, one in took.items()}
    details |= {f"{name}_cores_used": one.cpu / one.wall for name, one in took.items()}
    return {"two_over_one": took["one"].wall / took["two"].wall}, details


def compare_reuse(size: Size, batches: int = 1) -> Measured:
    """`reused_of_one`, and among details the share of replicas in turn; for several batches in random order."""
    (model, _), number = loading.load(CHECKPOINT), size.parts
    part = size.batch._replace(rows=size.batch.rows // number, num_blocks=size.batch.num_blocks // number)
    whole, quarter = (batch_job.make_cache(model, one).state.spec for one in (size.batch, part))
    prompts = size.prompts if batches == 1 else random.Random(0).sample(size.prompts, len(size.prompts))
    one, routed = Replicas(model, whole, jax.devices()[:1]), Replicas(model, quarter, jax.devices()[:number])
    turns = [Replicas(model, quarter, jax.devices()[:1]) for _ in range(number)]

    def in_turn(batch: Sequence[Any]) -> list[Any]:
        found: list[Any] = [None] * len(batch)
        for n, replica in enumerate(turns):
            found[n::number] = run(replica, size, batch[n::number])
        return found

    ways: dict[str, Callable[[Sequence[Any]], list[Any]]] = {
        "one": lambda batch: run(one, size, batch), "routed": lambda batch: run(routed, size, batch),
        "in_turn": in_turn,
    }  # fmt: skip
    cuts = [len(prompts) * n // batches for n in range(batches + 1)]
    outputs = {
        name: [output for begin, end in itertools.pairwise(cuts) for output in way(prompts[begin:end])]
        for name, way in ways.items()
    }
    answers = {name: [output.tokens for output in some] for name, some in outputs.items()}
    batch_job.require_same(model, size.batch, prompts, answers)
    cached = {name: sum(output.cached_tokens for output in some) for name, some in outputs.items()}
    most = np.bincount([output.replica for output in outputs["routed"]], minlength=number).max()
    details = {
        "one_reused": cached["one"] / sum(map(len, prompts)),
        "in_turn_reused_of_one": cached["in_turn"] / cached["one"],
        "routed_most_prompts": most / (len(prompts) / number),
    }
    return {"reused_of_one": cached["routed"] / cached["one"]}, details


def compare_mixed_reuse(size: Size) -> Measured:
    """The same for several batches in random order: all of it are details."""
    metrics, details = compare_reuse(size, size.batches)
    return {}, {f"{name}_mixed": value for name, value in (metrics | details).items()}


@jax.tree_util.Partial
def no_model(tokens: jax.Array, pools: Any, view: Any, *, last: jax.Array | None) -> tuple[jax.Array, Any]:
    """Writes nothing and chooses token 0: routing reads events alone."""
    del view
    shape = tokens.shape if last is None else last.shape
    return jax.numpy.zeros((*shape, VOCABULARY), np.float32), pools


def compare_routing(size: Size) -> Measured:
    """`route_of_hashing`."""
    number, block, rng = size.routes, batch_job.BLOCK, np.random.default_rng(0)
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(1, 1)], num_blocks=size.num_blocks, max_seqs=8, max_length=size.length + block,
        block_size=block, dtype="float32",
    )  # fmt: skip
    # The price of load spreads the prompts over all replicas, so that each one gets the beginning.
    replicas, half = Replicas(no_model, spec, jax.devices()[:number], load_price=1.0), size.length // 2
    start = rng.integers(0, VOCABULARY, half).tolist()
    count = number * (size.num_blocks * block // half)  # as many as all caches hold, and a few that push others out
    prompts = [[*start, *rng.integers(0, VOCABULARY, half).tolist()] for _ in range(count)]
    replicas.run_batch(make_requests(prompts, max_new_tokens=1))
    cached = [int(np.sum(np.asarray(cache.state.groups[0].blocks.fill) == block)) for cache in replicas.caches]
    common.require(min(cached) > 0.9 * size.num_blocks, f"a cache has {min(cached)} blocks, wanted a full one")
    route, hashing, found = list[float](), list[float](), list[int]()
    for prompt in [*prompts[-64:], *prompts[-64:]]:
        array, began = np.asarray(prompt), time.perf_counter()
        (one,) = replicas.route([Request(prompt)])
        routed = time.perf_counter()
        hashes_of(array, 0, replicas.spec)
        hashing.append(time.perf_counter() - routed)
        route.append(routed - began)
        found.append(one.tokens)
    common.require(min(found) >= half and max(found) == size.length - block, "a prompt went where it is not cached")
    took = {"route_ms": 1e3 * statistics.median(route), "hashing_ms": 1e3 * statistics.median(hashing)}
    return {"route_of_hashing": took["route_ms"] / took["hashing_ms"]}, took


class Part(NamedTuple):
    """Metrics that are measured together, and the virtual devices that they need."""

    measure: Callable[[Size], Measured]
    devices: int


PARTS = {
    "speed": Part(compare_speed, 2), "reuse": Part(compare_reuse, 4), "mixed_reuse": Part(compare_mixed_reuse, 4),
    "routing": Part(compare_routing, 8), "bytes": Part(lambda size: context_job.compare_bytes(size.divided), 8),
    "books": Part(lambda size: context_job.compare_books(size.rounds), 8),
}  # fmt: skip


def measure_apart(part: str, options: Sequence[str]) -> Measured:
    """Measures a part in a process of its own: the number of virtual devices is set once, before jax starts."""
    command = [sys.executable, "-m", "benchmarks.replicas", "--part", part, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    common.require(done.returncode == 0, f"{part}: {done.stderr[-2000:]}")
    metrics, details = json.loads(done.stdout.splitlines()[-1])
    return metrics, details


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, help="how often the ways are timed")
        parser.add_argument("--questions", type=int, help="how many of the questions, the first ones; all if absent")
        parser.add_argument("--quick", action="store_true", help="tiny: whether it runs, not how fast")
        parser.add_argument("--part", choices=PARTS, help="measure this part alone, in this process; prints JSON")

    args = common.parse("replicas", __doc__, options)
    size = (QUICK if args.quick else Size())._replace(questions=args.questions)
    size = size if args.rounds is None else size._replace(rounds=args.rounds)
    if args.part is not None:
        jax.config.update("jax_num_cpu_devices", PARTS[args.part].devices)
        print(json.dumps(PARTS[args.part].measure(size)))
        return
    chosen = [f"--{name}={value}" for name in ("rounds", "questions") if (value := getattr(args, name)) is not None]
    print(f"replicas: {len(size.prompts)} questions; each part in a process of its own")
    parts = [measure_apart(part, [*chosen, *(["--quick"] if args.quick else [])]) for part in PARTS]
    metrics, details = ({name: value for part in parts for name, value in part[n].items()} for n in (0, 1))
    common.report("replicas", metrics, args.json, details, bars=BARS)


if __name__ == "__main__":
    main()
