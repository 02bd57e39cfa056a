# SPDX-License-Identifier: Apache-2.0
"""Two thousand production requests through the scheduler, by a virtual clock, for each way to reserve blocks.

The requests are the first of a trace of Mooncake, with lengths divided by 16 (`benchmarks/trace.py`). The cache has 32
rows and 8,192 blocks, so no request is preempted. A step of the model is 250 ms of the trace. A request is submitted
when its time has come, or at the end of the block of steps in which it comes. Without reuse, the requests would take
3,400 steps. They arrive within 2,676, so the system is always loaded, and reuse decides whether it keeps up.

No model runs: each step chooses token 0. So a "second" counts the scheduler's own time, and a "virtual second" the
steps of a model. Steps to the first token are counted from the time at which the request was due.

The first 60 requests, or as many as you set with `--checked`, are also given to the scheduler in plain Python. It has
to find the same tokens in its cache, and choose each request's first and last token in the same step.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from benchmarks import common
from benchmarks.caches import NoModel, copy_of
from benchmarks.common import Bar, Size, benchmark
from benchmarks.trace import MS_A_STEP, TRACE, Request, read_trace
from benchmarks.workload import BLOCK, oracle_options
from kvjax import Cache
from kvjax._pictures import AMBER, BLUE, finish, legend_below, new_figure, picture
from kvjax.events import init_log
from kvjax.serving import Scheduler, init_serving, serve, submit, worst_step
from tests.oracle import scheduler as oracle
from tests.oracle.cache import Oracle
from tests.oracle.requests import Ask

AT_ONCE = 64  # steps between two looks at the clock, at most
# How blocks are reserved, and whether a request waits for a prefix that a row is about to compute.
WAYS = list(itertools.product(("max_tokens", "num_tokens", "batch"), (True, False)))


def way_name(reserve: str, waits: bool) -> str:
    return f"{reserve}_{'waits' if waits else 'alone'}"


COLUMNS = {
    "tokens_a_virtual_second": Bar("tokens a virtual second", ""), "reused": Bar("prompt tokens reused", ""),
    "first_token_p50": Bar("steps to the first token, median", ""),
    "first_token_p99": Bar("steps to the first token, 99 %", ""),
    "tokens_a_second": Bar("tokens a second without a model", ""),
}  # fmt: skip
BARS = {
    f"{way_name(reserve, waits)}_{metric}": bar._replace(
        what=f"{bar.what}: `{reserve}`{'' if waits else ', no waiting'}"
    )
    for reserve, waits in WAYS
    for metric, bar in [*COLUMNS.items()][: None if waits else 2]
}
NOTES = """
The ways are the values of `Scheduler(reserve=)`. "No waiting" is `wait_for_prefix=False`: a request does not wait for a
prefix which a row is about to compute. With `--checked 2000` the scheduler in plain Python has done the same with all
requests, in each of the six ways.
"""


FIELDS = "cached", "first_token", "ended", "preemptions"  # what came of a request: tokens, steps, and a count


class Library:
    """The library's scheduler. Every `run` is a call of a program."""

    def __init__(self, requests: Sequence[Request], size: Size, scheduler: Scheduler):
        self.width = max(len(request.prompt) for request in requests)
        max_tokens = [len(request.prompt) + request.new_tokens for request in requests]
        longest = -(-max(max_tokens) // BLOCK) * BLOCK
        spec = kvjax.make_spec(num_blocks=size.num_blocks, max_seqs=size.rows, max_length=longest, block_size=BLOCK)
        self.serving = init_serving(Cache.create(spec), max_tokens, greedy=True)
        # Enough that the log never ends a block of steps: plain Python has none.
        blocks = AT_ONCE * (size.chunks // BLOCK + size.rows) + 4 * spec.max_blocks_per_seq
        capacity = 4 * blocks + 2 * worst_step(spec, scheduler)

        def run(serving: Any, steps: jax.Array) -> Any:
            log = init_log(capacity, BLOCK)
            serving, _ = serve(NoModel(), serving, log, scheduler=scheduler, steps=steps)
            return serving, (serving.steps, serving.busy)

        self._run = jax.jit(run, donate_argnums=0, compiler_options=kvjax.serving.compiler_options())
        self._submit = jax.jit(functools.partial(submit, scheduler=scheduler), donate_argnums=0)
        self.steps = 0
        self.busy = False

    def submit(self, request: Request) -> None:
        """Submits a request."""
        line = np.zeros(self.width, np.int32)
        line[: len(request.prompt)] = request.prompt
        length = np.array([len(request.prompt)], np.int32)
        new = np.array([request.new_tokens], np.int32)
        self.serving, status, *_ = self._submit(self.serving, line, length, new)
        common.require(int(status[0]) == kvjax.Status.OK, f"a request was refused: {int(status[0])}")
        self.busy = True

    def run(self, steps: int) -> None:
        """Runs up to `steps` steps, while there is work."""
        self.serving, counts = self._run(self.serving, np.int32(min(steps, AT_ONCE)))
        self.steps, self.busy = (array.item() for array in jax.device_get(counts))

    def ended(self, count: int) -> dict[str, np.ndarray]:
        """`FIELDS` of the first requests, i64[number] each."""
        requests = self.serving.requests
        return {name: np.asarray(getattr(requests, name))[:count].astype(np.int64) for name in FIELDS}


class Plain:
    """The scheduler in plain Python."""

    def __init__(self, requests: Sequence[Request], size: Size, scheduler: Scheduler):
        max_tokens = [len(request.prompt) + request.new_tokens for request in requests]
        cache = Oracle(size.num_blocks, BLOCK, size.rows, -(-max(max_tokens) // BLOCK))
        self.scheduler = oracle.Scheduler(cache, oracle_options(scheduler), lambda request, step: 0, max_tokens)
        self.steps = 0

    @property
    def busy(self) -> bool:
        return any(self.scheduler.rows) or any(request.stage == 1 for request in self.scheduler.requests)

    def submit(self, request: Request) -> None:
        prompt = request.prompt.tolist()
        ((status, *_),) = self.scheduler.submit([Ask(prompt, len(prompt) + request.new_tokens)])
        common.require(status == kvjax.Status.OK, f"plain Python refused a request: {status}")

    def run(self, steps: int) -> None:
        end = self.steps + min(steps, AT_ONCE)
        while self.busy and self.steps < end:
            self.scheduler.step()
            self.steps = self.scheduler.steps

    def ended(self, count: int) -> dict[str, np.ndarray]:
        requests = self.scheduler.requests[:count]
        return {name: np.array([getattr(request, name) for request in requests]) for name in FIELDS}


def replay(system: Library | Plain, requests: Sequence[Request]) -> tuple[np.ndarray, int]:
    """Submits each request when it is due, and runs until all are done.

    While there is no work the clock goes on, but the system's steps do not.

    Returns:
      The step of the system at which each request was due, i64[requests], and the clock at the end.
    """
    idle = 0
    due = []
    for request in requests:
        while system.busy and system.steps + idle < request.due:
            system.run(request.due - system.steps - idle)
        idle = max(idle, request.due - system.steps)
        due.append(request.due - idle)
        system.submit(request)
    while system.busy:
        system.run(AT_ONCE)
    return np.array(due), system.steps + idle


def require_same(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Ends the benchmark if the library and plain Python served the requests in different ways."""
    for name, values in ours.items():
        otherwise = f"{name} is {values}, and {expected[name]} in plain Python"
        common.require(np.array_equal(values, expected[name]), otherwise)


def measure_way(requests: Sequence[Request], size: Size, scheduler: Scheduler) -> dict[str, float]:
    """Replays the first requests, which compiles the programs, also in plain Python. Then replays and times all."""
    first = requests[: max(size.checked, 1)]
    system = Library(requests, size, scheduler)
    initial = copy_of(system.serving)()
    replay(system, first)
    if size.checked:
        plain = Plain(requests, size, scheduler)
        replay(plain, first)
        require_same(system.ended(len(first)), plain.ended(len(first)))
    system.serving = initial
    system.steps = 0
    system.busy = False
    began = time.perf_counter()
    due, clock = replay(system, requests)
    seconds = time.perf_counter() - began
    ended = system.ended(len(requests))
    generated = sum(request.new_tokens for request in requests)
    waited = ended["first_token"] - due
    return {
        "tokens_a_second": generated / seconds,
        "tokens_a_virtual_second": generated / (clock * MS_A_STEP / 1000),
        "first_token_p50": float(np.percentile(waited, 50)),
        "first_token_p99": float(np.percentile(waited, 99)),
        "reused": int(np.sum(ended["cached"])),
        "preemptions": int(np.sum(ended["preemptions"])),
    }


def by_way(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The metrics of a result, grouped by way."""
    by_name = {name: {} for name in itertools.starmap(way_name, WAYS)}
    for name, values in by_name.items():
        values |= {metric.removeprefix(f"{name}_"): metrics[metric] for metric in metrics if metric.startswith(name)}
    return by_name


@picture
def plot(figures: dict[str, dict[str, float]], file: pathlib.Path) -> None:
    """Draws bars of each figure, side by side with and without waiting."""
    panels = {
        "tokens_a_second": "tokens a second, no model", "tokens_a_virtual_second": "tokens a virtual second",
        "first_token_p50": "steps to first token, median", "first_token_p99": "steps to first token, 99 %",
        "reused": "prompt tokens reused",
    }  # fmt: skip
    figure = new_figure(13, 3.2)
    reserves = list(dict.fromkeys(reserve for reserve, _ in WAYS))
    for axes, (metric, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for i, (waits, label) in enumerate(((True, "waits for prefixes"), (False, "does not"))):
            ways = [(x, way_name(reserve, waits)) for x, reserve in enumerate(reserves)]
            bars = [(x + 0.4 * i - 0.2, figures[name][metric]) for x, name in ways if name in figures]
            axes.bar(*zip(*bars, strict=True), 0.38, label=label, color=(BLUE, AMBER)[i])
        finish(axes)
        axes.set_title(title)
        axes.set_xticks(range(len(reserves)), [reserve.replace("_", "\n") for reserve in reserves])
    legend_below(figure)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


# The cache; tokens of prompts that a step computes, of a row and of all; requests, and those that Python runs.
SIZES = {
    "rows": (32, 4), "num_blocks": (8192, 400), "chunk": 256, "chunks": 512, "requests": (2000, 12),
    "checked": (60, 12), "trace": TRACE,
}  # fmt: skip


@benchmark(BARS, SIZES)
def measure(size):
    requests = read_trace(size.trace, size.requests)
    for reserve, waits in WAYS:
        scheduler = Scheduler(reserve=reserve, wait_for_prefix=waits, chunk=size.chunk, budget=size.rows + size.chunks)
        name = way_name(reserve, waits)
        yield {f"{name}_{figure}": value for figure, value in measure_way(requests, size, scheduler).items()}
