# SPDX-License-Identifier: Apache-2.0
"""The engine and the HTTP server against `run_batch`; their waits, memory and idle time.

The recall model answers 512 prompts in 32 rows: by `run_batch`, by an engine to which all are submitted at once, and by
a server with 32 open streams, whose clients are a process of their own and not counted. All answers must be those of
`run_batch`. Programs take turns; a ratio is of medians.

With Poisson arrivals at half the capacity, turns from a request to its first token are counted, less the chunks of its
prompt that no prompt before it had computed when it came. Waits of the device are those of a model of 10 million
parameters, with all rows busy and all streams read.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import collections
import contextlib
import gc
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx

import kvjax
from benchmarks import common, decode_loop
from benchmarks.batch_job import QUICK as QUICK_BATCH
from benchmarks.batch_job import Size as Batch
from benchmarks.batch_job import make_cache, questions, require_same
from benchmarks.common import Bar
from kvjax.serving import Engine, Handle, Request, RunOptions, driver, make_requests
from models import loading, serve
from models.config import ModelConfig
from models.decoder import Decoder

ROOT = pathlib.Path(__file__).parents[1]
CHECKPOINT = ROOT / "models/checkpoints/recall"
BARS = {
    "engine_x": Bar("CPU time of `run_batch`, to that of an engine", at_least=0.8),
    "http_x": Bar("CPU time of `run_batch`, to that of a server", at_least=0.6),
    "ttft_steps_p99": Bar("turns to the first token, less those of its chunks, 99 %", "", at_most=3),
    "bubble": Bar("time in which the device waits between steps, of the steps' time", "share", at_most=0.05),
    "idle_cpu": Bar("CPU time of an idle engine, of the time", "share", at_most=0.005),
    "memory_growth": Bar("memory after 10,000 requests, to that after 1,000", at_most=1.02),
}
NOTES = """
A server takes more steps than `run_batch`, since rows are free while clients come back. Its ratio was 0.58x to 0.66x in
several runs: it misses its bar in some of them. The engine's was 0.93x to 1.01x.
"""


class Size(NamedTuple):
    """What to run."""

    batch: Batch = Batch()
    open: int = 32  # streams
    arrivals: int = 512
    config: ModelConfig = decode_loop.Size().config
    rows: int = 16
    new: int = 96  # tokens of each of the larger model's rows
    idle: float = 3.0  # seconds
    requests: int = 1000  # the first ones
    times: int = 10


QUICK = Size(QUICK_BATCH, 2, 6, decode_loop.QUICK.config, 2, 8, 0.2, 8, 2)


class Clients:
    """Clients in a process of their own."""

    def __init__(self):
        command = [sys.executable, "-c", "from benchmarks import http_clients; http_clients.main()"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answers(self, port: int, prompts: Sequence[Sequence[int]], new_tokens: int, open: int, streams: bool) -> Any:
        """The texts of the answers."""
        assert self._process.stdin and self._process.stdout
        job = {"port": port, "prompts": prompts, "new_tokens": new_tokens, "open": open, "streams": streams}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        common.require(bool(line), "the clients have failed")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        with self._process:  # closes its standard input, and waits
            pass


@contextlib.contextmanager
def serving(batch: Batch) -> Iterator[int]:
    """A server of the bundled model, with a cache of the batch's size; its port."""
    parser = serve.make_parser()
    args = parser.parse_args([
        "--checkpoint", str(CHECKPOINT), "--rows", str(batch.rows), "--blocks", str(batch.num_blocks),
        "--chunk", str(batch.scheduler.chunk), "--top-logprobs", "0", "--max-length", str(-(-batch.longest // 16) * 16),
    ])  # fmt: skip
    with serve.served(parser, args) as found, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        is_open = threading.Event()
        server = serve.http_server(args, found, is_open.set)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        is_open.wait()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def measure_batch(size: Size, rounds: int, clients: Clients) -> tuple[dict[str, float], dict[str, float]]:
    """`engine_x` and `http_x`."""
    (model, tokenizer), batch = loading.load(CHECKPOINT), size.batch
    prompts, opened = questions(batch), contextlib.ExitStack()

    def run_batch(cache: kvjax.Cache) -> list[list[int]]:
        requests = make_requests(prompts, max_new_tokens=batch.new_tokens)
        outputs, _, _ = kvjax.run_batch(model, cache, requests, RunOptions(scheduler=batch.scheduler, log_events=False))
        return [output.tokens for output in outputs]

    def run_engine(engine: Engine[Any]) -> list[list[int]]:
        handles = [engine.submit(Request(prompt, max_new_tokens=batch.new_tokens)) for prompt in prompts]
        found = [handle.result().tokens for handle in handles]
        engine.close()
        return found

    def run_server(port: int) -> list[str]:
        return clients.answers(port, prompts, batch.new_tokens, size.open, True)

    def new_server() -> int:
        opened.close()
        return opened.enter_context(serving(batch))

    programs: Any = {
        "run_batch": (lambda: make_cache(model, batch), run_batch),
        "engine": (lambda: Engine(model, make_cache(model, batch), RunOptions(scheduler=batch.scheduler)), run_engine),
        "http": (new_server, run_server),
    }
    with opened:
        took, results = common.in_turns(programs, rounds)
    texts = results.pop("http")
    require_same(model, batch, prompts, results)
    wanted = [tokenizer.decode(tokens) for tokens in results["run_batch"]]
    same = sum(one.split() == other.split() for one, other in zip(texts, wanted, strict=True))
    common.require(same >= 0.99 * len(texts), f"{len(texts) - same} answers over HTTP differ")
    metrics: dict[str, float] = {f"{name}_x": took["run_batch"].cpu / took[name].cpu for name in ("engine", "http")}
    details: dict[str, float] = {
        f"{name}_{kind}_s": getattr(one, kind) for name, one in took.items() for kind in ("cpu", "wall")
    }
    return metrics, details | {"http_answers_that_differ": len(texts) - same}


class Turns:
    """When the turns of an engine were dispatched, and when they were done, by a thread that waits for each."""

    def __init__(self) -> None:
        self.dispatched, self.done = list[float](), list[float]()
        self._outputs, self._more = collections.deque[Any](), threading.Semaphore(0)
        self._whole, self._thread = driver.turn, threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while self._more.acquire() and self._outputs:
            jax.block_until_ready(self._outputs.popleft())
            self.done.append(time.monotonic())

    def __enter__(self) -> Turns:
        def turn(*args: Any, **options: Any) -> Any:
            found = self._whole(*args, **options)
            self.dispatched.append(time.monotonic())
            self._outputs.append(found[-1].numbers)
            self._more.release()
            return found

        driver.turn = cast(Any, turn)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        driver.turn = self._whole
        self._more.release()
        self._thread.join()


async def listened_to(engine: Engine[Any], prompts: Sequence[Any], new: int, gap: float) -> list[Handle]:
    """Requests that come one by one, a gap apart in the mean, and are read as their tokens come."""
    rng = random.Random(0)

    async def one(prompt: Any) -> Handle:
        handle = engine.submit(Request(prompt, max_new_tokens=new))
        common.require([token async for token in handle] == handle.output.tokens, "a stream differs from its output")
        return handle

    tasks = list[asyncio.Task[Handle]]()
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt)))
        await asyncio.sleep(rng.expovariate(1 / gap) if gap else 0)
    return await asyncio.gather(*tasks)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that two prompts begin with in common."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def measure_first_tokens(size: Size) -> tuple[dict[str, float], dict[str, float]]:
    """`ttft_steps_p99`."""
    (model, _), batch = loading.load(CHECKPOINT), size.batch
    prompts = random.Random(1).sample(questions(batch), size.arrivals)
    with Engine(model, make_cache(model, batch), RunOptions(scheduler=batch.scheduler)) as engine:
        began = time.monotonic()
        asyncio.run(listened_to(engine, prompts, batch.new_tokens, 0))
        gap = 2 * (time.monotonic() - began) / len(prompts)
        with Turns() as turns:
            handles = asyncio.run(listened_to(engine, prompts, batch.new_tokens, gap))
    steps, seconds = [], []
    for prompt, handle in zip(prompts, handles, strict=True):
        times, computed = handle.times, 0
        assert times.first_token is not None
        for other, before in zip(prompts, handles, strict=True):
            if before.times.first_token is not None and before.times.first_token <= times.queued:
                computed = max(computed, common_prefix(prompt[:-1], other))
        chunks = -(-(len(prompt) - computed) // batch.scheduler.chunk)
        waited = bisect.bisect(turns.done, times.first_token) - bisect.bisect(turns.done, times.queued)
        steps.append(waited - chunks)
        seconds.append(times.first_token - times.queued)
    found = {"ttft_steps_p99": float(np.percentile(steps, 99, method="higher"))}
    more = {"ttft_steps_p50": statistics.median(steps), "ttft_p99_ms": 1e3 * float(np.percentile(seconds, 99))}
    return found, more | {"arrivals_per_s": 1 / gap}


def measure_bubble(size: Size) -> tuple[dict[str, float], dict[str, float]]:
    """`bubble`, and `idle_cpu` of the same engine."""
    model, rng = Decoder(size.config, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    prompts = rng.integers(0, size.config.vocab_size, (size.rows, 32)).tolist()
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=2 * size.rows * -(-(32 + size.new) // 16), max_seqs=size.rows,
        max_length=32 + size.new, block_size=16, dtype="float32",
    )  # fmt: skip
    with Engine(model, kvjax.Cache.create(spec)) as engine:
        with Turns() as turns:
            handles = asyncio.run(listened_to(engine, prompts, size.new, 0))
        engine.drain()
        cpu, wall = time.process_time(), time.monotonic()
        time.sleep(size.idle)
        idle = (time.process_time() - cpu) / (time.monotonic() - wall)
    outputs, _, _ = kvjax.run_batch(model, kvjax.Cache.create(spec), make_requests(prompts, max_new_tokens=size.new))
    same = [one.output.tokens == other.tokens for one, other in zip(handles, outputs, strict=True)]
    common.require(all(same), "the engine's tokens are not those of run_batch")
    # Without the first turns, which have prompts, and the last ones, in which rows end.
    steady = range(size.rows // 2, len(turns.done) - 2)
    waits = sum(max(turns.dispatched[n + 1] - turns.done[n], 0.0) for n in steady)
    steps = sum(turns.done[n] - max(turns.dispatched[n], turns.done[n - 1]) for n in steady)
    return {"bubble": waits / steps, "idle_cpu": idle}, {"step_ms": 1e3 * steps / len(steady)}


def measure_memory(size: Size, clients: Clients) -> tuple[dict[str, float], dict[str, float]]:
    """`memory_growth`."""
    rng, megabytes = np.random.default_rng(2), list[float]()
    with serving(size.batch) as port:
        for _ in range(size.times):
            prompts = rng.integers(3, 60, (size.requests, 24)).tolist()
            clients.answers(port, prompts, 4, size.open, False)
            gc.collect()
            resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            megabytes.append(resident * os.sysconf("SC_PAGE_SIZE") / 1e6)
    return {"memory_growth": megabytes[-1] / megabytes[0]}, {"memory_mb": megabytes[0]}


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=5, help="how often the ways are timed (%(default)s)")
        parser.add_argument("--quick", action="store_true", help="tiny: whether it runs, not how fast")

    args = common.parse("engine", __doc__, options)
    size = QUICK if args.quick else Size()
    with contextlib.closing(Clients()) as clients:
        parts = [
            measure_memory(size, clients), measure_batch(size, args.rounds, clients), measure_first_tokens(size),
            measure_bubble(size),
        ]  # fmt: skip
    found, details = ({name: value for part in parts for name, value in part[n].items()} for n in (0, 1))
    common.report("engine", {name: found[name] for name in BARS}, args.json, details, bars=BARS)


if __name__ == "__main__":
    main()
