# SPDX-License-Identifier: Apache-2.0
"""What listeners cost: time of `generate` with the demo's model, to the same without; and whether all tell the truth.

Each of a pair begins with an empty cache; pairs alternate in who comes first, and the median pair counts. A publisher
listens alone, or with it all that kvjax has: an agent, metrics, TensorRT-LLM's lines, a log and a trace. After each run
what they publish is compared with the cache; this takes no part in the time, and so does no subscriber.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc
import jax
import numpy as np
import prometheus_client

import kvjax
from benchmarks import common
from kvjax.interop import hashing, together, trtllm
from kvjax.interop.agent import Agent, messages, services
from kvjax.interop.log import Log
from kvjax.interop.metrics import Metrics
from kvjax.interop.trace import Trace
from kvjax.interop.vllm import Publisher, Subscriber
from models import demo, load, recall

NEW_TOKENS, ANY = 32, "tcp://127.0.0.1:*"

Entries = dict[tuple[int, int, tuple], tuple[int, int]]  # as `events.index_of` has them


class Work(NamedTuple):
    """What is generated, and the right first token of each answer."""

    model: Any
    spec: kvjax.CacheSpec
    prompts: Sequence[list[int]]
    answers: Sequence[int]


class Listening(NamedTuple):
    """A listener, and a check of what it published against a cache and what was generated."""

    listener: Callable[[Any], object] | None
    check: Callable[[kvjax.Cache, list[kvjax.serving.Output]], object]


def make_work(documents: int, questions: int) -> Work:
    """So many questions about each of so many documents."""
    model, _ = load(recall.CHECKPOINT)
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=96, max_seqs=demo.ROWS, max_length=320, block_size=8, dtype="float32"
    )
    rng = np.random.default_rng(0)
    texts = [recall.make_document(rng, demo.FACTS) for _ in range(documents)]
    chosen = [one for text in texts for one in demo.questions(text, list(text.facts)[:questions])]
    return Work(model, spec, *zip(*chosen, strict=True))


@contextlib.contextmanager
def nobody(spec: kvjax.CacheSpec) -> Iterator[Listening]:
    """No listener."""
    yield Listening(None, lambda *_: None)


@contextlib.contextmanager
def a_publisher(spec: kvjax.CacheSpec) -> Iterator[Listening]:
    """A publisher as vLLM's."""

    def check(cache: kvjax.Cache, outputs: list[kvjax.serving.Output]) -> None:
        index = kvjax.events.index_of(cache.state)
        wanted = sorted(path for _, _, path in index if len(path) % spec.block_size == 0)
        with Subscriber(source.endpoint, source.replay_endpoint) as sub:
            reached = sub.wait(lambda one: one.complete and sorted(prefix.tokens for prefix in one.index) == wanted, 60)
            common.require(reached, f"{len(sub)} blocks were published of {len(wanted)}")

    with Publisher(spec, bind=ANY, replay=ANY) as source:
        source.flush()
        yield Listening(source.publish, check)


@contextlib.contextmanager
def all_at_once(spec: kvjax.CacheSpec) -> Iterator[Listening]:
    """All of them, as `models.generate` puts them together, and TensorRT-LLM's lines."""
    registry, lines, slices, events = prometheus_client.CollectorRegistry(), io.StringIO(), io.StringIO(), io.StringIO()
    with (
        a_publisher(spec) as published, Agent(spec, port=0) as agent, Metrics(registry, spec) as metrics,
        Trace(spec, slices) as trace,
    ):  # fmt: skip
        writer, log = trtllm.Writer(spec, lines), Log(events)
        listeners = [log.write, trace.write, published.listener, agent.publish, metrics.observe, writer.write]
        agent.flush()

        def check(cache: kvjax.Cache, outputs: list[kvjax.serving.Output]) -> None:
            index = kvjax.events.index_of(cache.state)
            published.check(cache, outputs)
            agent.flush()
            _check_agent(agent.address, spec, index)
            _check_lines(lines.getvalue(), index)
            entries = [json.loads(line) for line in events.getvalue().splitlines()]
            _check_log(entries, index)
            _check_metrics(registry, entries, outputs)
            trace.close()
            _check_trace(slices.getvalue(), len(entries), index, spec.block_size)

        yield Listening(together(spec, *listeners), check)


def _check_agent(address: str, spec: kvjax.CacheSpec, index: Entries) -> None:
    """A new subscriber gets the hashes of all whole blocks."""
    hashes, size, wanted = {(): hashing.root_hash()}, spec.block_size, set[str]()
    for path in sorted((path for _, _, path in index), key=len):
        start = (len(path) - 1) // size * size
        hashes[path] = hashing.block_hash(hashes[path[:start]], path[start:])
        if len(path) % size == 0:
            wanted.add(str(hashing.first_64_bits(hashes[path])))
    entries: list[str] = []
    with grpc.insecure_channel(address) as channel:
        stub = services.KVCacheAgentServiceStub(channel)
        for update in stub.SubscribeToUpdates(messages.SubscriptionRequest()):
            entries += update.cache_ids
            if update.snapshot_end:
                break
    common.require(sorted(entries) == sorted(wanted), f"{len(entries)} blocks were served of {len(wanted)}")


def _check_lines(lines: str, index: Entries) -> None:
    mirror = trtllm.Mirror()
    mirror.follow(lines.splitlines())
    entries = {tuple(token for token, _ in prefix.tokens): entry for prefix, entry in mirror.index.items()}
    common.require(
        mirror.complete and entries == {path: entry for (_, _, path), entry in index.items()},
        f"{len(entries)} blocks are in TensorRT-LLM's lines of {len(index)}",
    )


def _check_log(entries: list[dict[str, Any]], index: Entries) -> None:
    logged = kvjax.fold([event for entry in entries for event in entry["events"]]).index
    common.require(logged == index, f"{len(logged)} blocks are in the log of {len(index)}")


def _check_metrics(registry: Any, entries: list[dict[str, Any]], outputs: list[kvjax.serving.Output]) -> None:
    """Counters equal what was logged and what was generated."""
    kinds = [event["kind"] for entry in entries for event in entry["events"]]
    wanted = {f"{kind}_blocks": kinds.count(kind) for kind in ("stored", "removed", "copied")} | {
        "queried_tokens": sum(output.prompt_tokens for output in outputs),
        "reused_tokens": sum(output.cached_tokens for output in outputs),
    }
    counted = {name: registry.get_sample_value(f"kvjax_{name}_total") for name in wanted}
    common.require(counted == wanted, f"{counted} were counted of {wanted}")


def _check_trace(text: str, calls: int, index: Entries, size: int) -> None:
    """There is a slice for each call, and the last counters are those of the cache."""
    slices = json.loads(text)
    counters = [one["args"] for one in slices if one["ph"] == "C"][-1]
    whole = sum(len(path) % size == 0 for _, _, path in index)
    wanted = {"whole": whole, "partly filled": len(index) - whole}
    common.require(
        sum(one["ph"] == "X" for one in slices) == calls and counters == wanted, f"{counters} is drawn of {wanted}"
    )


def measure(work: Work, listening: Callable[[kvjax.CacheSpec], Any], pairs: int) -> tuple[float, float]:
    """Wall and CPU time of `generate` with listeners, to one without: the medians of pairs."""

    def timed(opened: Callable[[kvjax.CacheSpec], Any]) -> np.ndarray:
        cache = jax.block_until_ready(kvjax.Cache.create(work.spec))
        with opened(work.spec) as own:
            before = np.array([time.perf_counter(), time.process_time()])
            outputs, cache, _ = kvjax.generate(
                work.model, cache, work.prompts, max_new_tokens=NEW_TOKENS, log_events=False, listener=own.listener
            )
            took = np.array([time.perf_counter(), time.process_time()]) - before
            right = sum(output.tokens[0] == answer for output, answer in zip(outputs, work.answers, strict=True))
            common.require(right >= 0.98 * len(work.prompts), f"{right} of {len(work.prompts)} answers are right")
            own.check(cache, outputs)
        return took

    ways, ratios = [nobody, listening], []
    for _ in range(pairs + 1):  # the first one compiles
        ways.reverse()
        took = {way: timed(way) for way in ways}
        ratios.append(took[listening] / took[nobody])
    wall, cpu = np.median(ratios[1:], axis=0).tolist()
    return wall, cpu
