# SPDX-License-Identifier: Apache-2.0
"""Events in the formats of other systems: CPU time of a core, and a comparison of the events which readers get.

Batches of 256 stored blocks go from the arrays of a transition to payloads. The first kind of batch has prompts of 8
blocks each, and the second kind has blocks filled by decoding rows, a block per row. Further batches also have as many
removed blocks, or are read back into a mirror. A resync is the payloads of a whole index. The batches of stored blocks
are written as TensorRT-LLM's JSON lines too. The benchmark compares the events it reads back with the events it wrote.
The slower rate counts, of prompts and of decoding rows.

`generate` of the demo's model runs with a publisher as its listener, and with all listeners together (publisher, agent,
metrics, TensorRT-LLM's lines, log and trace). Each run takes turns with a run without a listener. Each run of a pair
begins with an empty cache, the order alternates, and the median pair counts. After each run the records of publisher,
metrics, lines and log are compared with the cache. The comparison and subscribers do not count.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import prometheus_client

import kvjax
from benchmarks import common
from benchmarks.common import Bar, benchmark
from benchmarks.workload import load_recall
from kvjax.events import EventKind, Events
from kvjax.interop import combine_listeners, trtllm
from kvjax.interop.agent import Agent
from kvjax.interop.log import Log
from kvjax.interop.metrics import Metrics
from kvjax.interop.trace import Trace
from kvjax.interop.vllm import Encoder, Mirror, Publisher, Subscriber, decode
from kvjax.state import Text
from models import demo, recall

BATCH, PROMPT = 256, 8  # blocks of a batch, and those of a prompt that follow each other
VOCABULARY = 128_000
BARS = {
    "encode_per_s": Bar("arrays of the device to payloads, blocks of 16, stored alone", "/s", at_least=200_000),
    "encode_removed_per_s": Bar("arrays to payloads, blocks of 16, with as many removed", "/s", at_least=200_000),
    "encode_64_per_s": Bar("arrays to payloads, blocks of 64, stored alone", "/s", at_least=150_000),
    "mirror_per_s": Bar("payloads decoded and mirrored", "/s", at_least=200_000),
    "resync_s": Bar("resync of 65,536 blocks", "s", at_most=1),
    "trtllm_per_s": Bar("arrays to TensorRT-LLM's JSON lines, stored alone", "/s", at_least=50_000),
    "listener_ratio": Bar("wall time of `generate` with a publisher, to without", at_most=1.05),
    "listener_cpu_ratio": Bar("CPU time of `generate` with a publisher, to without"),
    "all_listeners_ratio": Bar("wall time of `generate` with all listeners, to without", at_most=1.08),
    "all_listeners_cpu_ratio": Bar("CPU time of `generate` with all listeners, to without"),
}
NOTES = """
`generate` calls listeners while the next loop runs, so a spare core hides a part of them. The cost of listeners grows
with the number of events, not with the model. The demo's model computes for less than a millisecond of CPU per event,
so its ratio is near the worst case. A listener took 8 to 21 µs per event, with the same events and no other listener:
TensorRT-LLM's lines and the publisher took the longest, trace and log the shortest. All listeners together take less
than their sum, since events are read, folded into an index and hashed once for all of them.
"""


def records(kind: EventKind, blocks: np.ndarray, generation: int) -> np.ndarray:
    """i32[n, 9]; a record of this kind for each block."""
    rows = np.zeros((len(blocks), 9), np.int32)
    rows[:, 0] = kind
    rows[:, 2] = blocks
    rows[:, 3] = generation
    rows[:, 8] = 35
    return rows


def stored(blocks: np.ndarray, generation: int, chain: int, size: int, root: tuple[int, int]) -> np.ndarray:
    """i32[n, 9]; stored blocks in chains of `chain` blocks. Each chain begins at the node `root`."""
    rows = records(EventKind.STORED, blocks, generation)
    first = np.arange(len(blocks)) % chain == 0
    rows[:, 4] = np.where(first, root[0], np.roll(blocks, 1))
    rows[:, 5] = np.where(first, root[1], generation)
    rows[:, 6] = size
    return rows


def events(rows: np.ndarray, size: int, rng: np.random.Generator) -> Events:
    """A transition's events, with random tokens."""
    tokens = rng.integers(0, VOCABULARY, (len(rows), size)).astype(np.int32)
    none = np.zeros(1, np.int32)
    return Events(rows, Text(tokens, None), none, none, none, none[0])  # pyright: ignore[reportArgumentType]


class Traffic:
    """Events of a cache, in batches."""

    def __init__(self, batches: int, size: int, chain: int):
        self.size = size
        self.chain = chain
        self.rng = np.random.default_rng(0)
        blocks = 1 + batches * BATCH
        self.spec = kvjax.make_spec(num_blocks=blocks, max_seqs=1, max_length=size, block_size=size)
        self.parts = np.split(np.arange(1, blocks), batches)
        self.generation = 1

    def root(self) -> Events:
        """The parent of all chains, and its generation with the namespace."""
        return events(stored(np.array([0]), 1, 1, self.size, (-1, 0)), self.size, self.rng)

    def batches(self, removed: bool, added: bool) -> list[Events]:
        """Batches of blocks removed, added, or both."""
        old = self.generation
        self.generation = self.generation + added
        rows = ([records(EventKind.REMOVED, blocks[::-1], old)] * removed
                + [stored(blocks, self.generation, self.chain, self.size, (0, 1))] * added
                for blocks in self.parts)  # fmt: skip
        return [events(np.concatenate(records), self.size, self.rng) for records in rows]


KINDS = {"stored": (False, True), "exchanged": (True, True), "removed": (True, False)}  # removed, added


def cpu(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and its result."""
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


class Wire(NamedTuple):
    """A format of events: functions to write and to read events, and the tokens of a read block after its prefix's."""

    encode: Callable[[Events], Any]
    follow: Callable[[Any], object]
    mirror: Any
    tokens: Callable[[Any], Iterable[int]]
    snapshot: Callable[[], Any] | None = None


def vllm_wire(traffic: Traffic) -> Wire:
    """Payloads in vLLM's format."""
    encoder = Encoder(traffic.spec)
    mirror = Mirror()
    follow = lambda payloads: [mirror.apply(decode(payload)) for payload in payloads]  # noqa: E731
    return Wire(encoder.encode, follow, mirror, lambda prefix: prefix.tokens[-traffic.size :], encoder.snapshot)


def lines_wire(traffic: Traffic) -> Wire:
    """TensorRT-LLM's JSON lines."""
    writer = trtllm.Writer(traffic.spec)
    mirror = trtllm.Mirror()
    return Wire(
        writer.lines, mirror.follow, mirror, lambda prefix: (token for token, _ in prefix.tokens[-traffic.size :])
    )


def measure_wire(
    make: Callable[[Traffic], Wire], batches: int, size: int, chain: int, repeats: int
) -> dict[str, float]:
    """Events per second of batches: stored, stored and removed, removed, and stored events read into a mirror."""
    traffic = Traffic(batches, size, chain)
    least = dict.fromkeys((*KINDS, "mirrored"), np.inf)
    wire = make(traffic)
    first = traffic.root()
    wire.follow(wire.encode(first))
    for _ in range(repeats):
        for name, kind in KINDS.items():
            sent = traffic.batches(*kind)
            seconds, written = cpu(lambda sent=sent: [wire.encode(batch) for batch in sent])
            least[name] = min(least[name], seconds)
            seconds, _ = cpu(lambda written=written: [wire.follow(payloads) for payloads in written])
            if name == "stored":
                least["mirrored"] = min(least["mirrored"], seconds)
            wanted = 1 if name == "removed" else 1 + batches * BATCH
            common.require(len(wire.mirror) == wanted, f"{len(wire.mirror)} blocks are mirrored, not {wanted}")
            if wire.snapshot is not None:
                late = Mirror()
                for payload in wire.snapshot():
                    late.apply(decode(payload))
                common.require(late.index == wire.mirror.index, "an index read one by one is not that of a snapshot")
            if name != "removed":
                stored = [batch.text.tokens[batch.kind == EventKind.STORED] for batch in [first, *sent]]
                read = sum(sum(wire.tokens(prefix)) for prefix in wire.mirror.index)
                same = read == sum(int(tokens.astype(np.int64).sum()) for tokens in stored)
                common.require(same, "the tokens read are not those stored")
    num_events = batches * BATCH
    return {name: (2 if name == "exchanged" else 1) * num_events / seconds for name, seconds in least.items()}


def measure_resync(blocks: int, repeats: int) -> float:
    """CPU seconds to write the payloads of an index."""
    traffic = Traffic(blocks // BATCH, 16, PROMPT)
    least = np.inf
    sent = [traffic.root(), *traffic.batches(*KINDS["stored"])]
    for _ in range(repeats):
        encoder = Encoder(traffic.spec)
        mirror = Mirror()
        for batch in sent:
            encoder.follow(batch)
        seconds, payloads = cpu(encoder.snapshot)
        least = min(least, seconds)
        for payload in payloads:
            mirror.apply(decode(payload))
        common.require(len(mirror) == blocks // BATCH * BATCH + 1, f"{len(mirror)} blocks were read")
    return least


NEW_TOKENS, ANY = 32, "tcp://127.0.0.1:*"
Entries = dict[tuple[int, int, tuple], tuple[int, int]]  # as `events.index_of` has them


class Work(NamedTuple):
    """The prompts to generate from, and the right first token of each answer."""

    model: Any
    spec: kvjax.CacheSpec
    prompts: Sequence[list[int]]
    answers: Sequence[int]


class Listening(NamedTuple):
    """A listener, and a function to compare its records with a cache and with the outputs."""

    listener: Callable[[Any], object] | None
    check: Callable[[kvjax.Cache, list[kvjax.serving.Output]], object]


def make_work(documents: int, questions: int) -> Work:
    """The given number of questions about each document."""
    model, _ = load_recall()
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=96, max_seqs=demo.ROWS, max_length=320, block_size=8, dtype="float32"
    )
    rng = np.random.default_rng(0)
    texts = [recall.make_document(rng, demo.FACTS) for _ in range(documents)]
    chosen = [question for text in texts for question in demo.questions(text, list(text.facts)[:questions])]
    return Work(model, spec, *zip(*chosen, strict=True))


def nobody(spec: kvjax.CacheSpec) -> contextlib.nullcontext[Listening]:
    """No listener."""
    return contextlib.nullcontext(Listening(None, lambda *_: None))


@contextlib.contextmanager
def a_publisher(spec: kvjax.CacheSpec) -> Iterator[Listening]:
    """A publisher in vLLM's format."""

    def check(cache: kvjax.Cache, outputs: list[kvjax.serving.Output]) -> None:
        index = kvjax.events.index_of(cache.state)
        wanted = sorted(path for _, _, path in index if len(path) % spec.block_size == 0)
        with Subscriber(source.endpoint, source.replay_endpoint) as sub:
            reached = sub.wait(lambda reader: reader.complete and sorted(x.tokens for x in reader.index) == wanted, 60)
            common.require(reached, f"{len(sub)} blocks were published of {len(wanted)}")

    with Publisher(spec, bind=ANY, replay=ANY) as source:
        source.flush()
        yield Listening(source.publish, check)


@contextlib.contextmanager
def all_at_once(spec: kvjax.CacheSpec) -> Iterator[Listening]:
    """All listeners, combined as in `models.generate`, and TensorRT-LLM's lines."""
    registry = prometheus_client.CollectorRegistry()
    lines = io.StringIO()
    logged = io.StringIO()
    with (
        a_publisher(spec) as published, Agent(spec, port=0) as agent, Metrics(registry, spec) as metrics,
        Trace(spec, io.StringIO()) as trace,
    ):  # fmt: skip
        writer = trtllm.Writer(spec, lines)
        log = Log(logged)
        listeners = [log.write, trace.write, published.listener, agent.publish, metrics.observe, writer.write]
        agent.flush()

        def check(cache: kvjax.Cache, outputs: list[kvjax.serving.Output]) -> None:
            index = kvjax.events.index_of(cache.state)
            published.check(cache, outputs)
            _check_lines(lines.getvalue(), index)
            entries = [json.loads(line) for line in logged.getvalue().splitlines()]
            _check_log(entries, index)
            _check_metrics(registry, entries, outputs)

        yield Listening(combine_listeners(spec, *listeners), check)


def _check_lines(lines: str, index: Entries) -> None:
    mirror = trtllm.Mirror()
    mirror.follow(lines.splitlines())
    entries = {tuple(token for token, _ in prefix.tokens): entry for prefix, entry in mirror.index.items()}
    common.require(
        mirror.complete and entries == {path: entry for (_, _, path), entry in index.items()},
        f"{len(entries)} blocks are in TensorRT-LLM's lines of {len(index)}",
    )


def _check_log(entries: list[dict[str, Any]], index: Entries) -> None:
    cached = kvjax.fold([event for entry in entries for event in entry["events"]]).index
    common.require(cached == index, f"{len(cached)} blocks are in the log of {len(index)}")


def _check_metrics(registry: Any, entries: list[dict[str, Any]], outputs: list[kvjax.serving.Output]) -> None:
    """Compares counters with the log and with the outputs."""
    kinds = [event["kind"] for entry in entries for event in entry["events"]]
    wanted = {f"{kind}_blocks": kinds.count(kind) for kind in ("stored", "removed", "copied")} | {
        "queried_tokens": sum(output.prompt_tokens for output in outputs),
        "reused_tokens": sum(output.cached_tokens for output in outputs),
    }
    counted = {name: registry.get_sample_value(f"kvjax_{name}_total") for name in wanted}
    common.require(counted == wanted, f"{counted} were counted of {wanted}")


def measure_listeners(work: Work, listening: Callable[[kvjax.CacheSpec], Any], pairs: int) -> tuple[float, float]:
    """Ratios of wall and CPU time of `generate`, with listeners to without, as medians of pairs."""

    def timed(opened: Callable[[kvjax.CacheSpec], Any]) -> np.ndarray:
        cache = jax.block_until_ready(kvjax.Cache.create(work.spec))
        with opened(work.spec) as follower:
            before = np.array([time.perf_counter(), time.process_time()])
            options = {"max_new_tokens": NEW_TOKENS, "log_events": False, "listener": follower.listener}
            outputs, cache, _ = kvjax.generate(work.model, cache, work.prompts, **options)
            took = np.array([time.perf_counter(), time.process_time()]) - before
            right = sum(output.tokens[0] == answer for output, answer in zip(outputs, work.answers, strict=True))
            common.require(right >= 0.98 * len(work.prompts), f"{right} of {len(work.prompts)} answers are right")
            follower.check(cache, outputs)
        return took

    ways = [nobody, listening]
    ratios = []
    for _ in range(pairs + 1):  # the first one compiles
        ways.reverse()
        took = {kind: timed(kind) for kind in ways}
        ratios.append(took[listening] / took[nobody])
    wall, cpu = np.median(ratios[1:], axis=0).tolist()
    return wall, cpu


SIZES = {"batches": (16, 2), "blocks": (65_536, 512), "documents": (3, 1), "questions": (16, 2), "pairs": (41, 1)}


@benchmark(BARS, SIZES, rounds=(10, 2))
def measure(size):
    measured = functools.partial(measure_wire, batches=size.batches, repeats=size.rounds)
    prompts, rows = (measured(vllm_wire, size=16, chain=chain) for chain in (PROMPT, 1))
    long = measured(vllm_wire, size=64, chain=PROMPT)
    lines = [measured(lines_wire, size=16, chain=chain) for chain in (PROMPT, 1)]
    yield {
        "encode_per_s": min(prompts["stored"], rows["stored"]),
        "encode_removed_per_s": min(prompts["exchanged"], rows["exchanged"]),
        "encode_64_per_s": long["stored"],
        "mirror_per_s": min(prompts["mirrored"], rows["mirrored"]),
        "trtllm_per_s": min(rates["stored"] for rates in lines),
        "resync_s": measure_resync(size.blocks, min(size.rounds, 3)),
    }
    work = make_work(size.documents, size.questions)
    for name, opened in (("listener", a_publisher), ("all_listeners", all_at_once)):
        wall, cpu = measure_listeners(work, opened, size.pairs)
        yield {f"{name}_ratio": wall, f"{name}_cpu_ratio": cpu}
