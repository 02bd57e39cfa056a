# SPDX-License-Identifier: Apache-2.0
"""Continuous batching in one program against other ways to run the same batch.

512 questions about 32 documents, 16 in a row about each, are answered greedily by the bundled recall model in 32 rows,
64 tokens each. Ways to run them: one program (`serve`, and `run_batch` from prompts to outputs); `serve_step` of one
step, called from Python, which reads the tokens of a step while the next one runs, as schedulers on the host do; blocks
of steps from Python; `generate` as it was before the scheduler, with batches admitted on the host; and `generate` of
transformers in batches of 32, where it is installed, for this model and for one of 10 million parameters. All must
choose the same tokens. They take turns; ratios are of CPU time, the median of several rounds, and the result has those
of wall time too.

The shares are of the same batch: prompt tokens found in the cache, as many as the scheduler in plain Python finds;
tokens that decode steps chose, of rows times steps, where a row that is empty, computes its prompt or idles in a block
of steps is unused; and positions of mixed steps that held a token. The result has those with answers of 33 to 95 tokens
too.

A steady step is one of 256 rows that decode in a full cache of 65,536 blocks, without a model
(`benchmarks/steady_step.py`). Warm-up is the CPU time of a first `run_batch` in a new process without a compile cache,
less that of a second one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

import kvjax
from benchmarks import common, decode_loop, static_batches, steady_step, transformers_batches
from benchmarks.batch_job import (
    BLOCK,
    QUICK,
    Size,
    answers,
    from_python,
    make_cache,
    one_program,
    oracle_options,
    questions,
    require_same,
    submitted,
)
from benchmarks.common import Bar
from kvjax.serving import Scheduler
from models import loading
from models.decoder import Decoder
from tests.oracle import scheduler as oracle
from tests.oracle.cache import Oracle

ROOT = pathlib.Path(__file__).parents[1]
CHECKPOINT = ROOT / "models/checkpoints/recall"
Programs = dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]


BARS = {
    "loop_over_python": Bar("speed of one program, to steps of one token that Python calls", at_least=1.5, aim=2.5),
    "loop_over_blocks_from_python": Bar("speed of one program, to blocks of steps that Python calls"),
    "over_generate": Bar("speed of `run_batch`, to `generate` with batches admitted on the host", at_least=1.3, aim=2),
    "over_transformers": Bar("speed of `run_batch`, to transformers' `generate`", at_least=15, aim=40),
    "over_transformers_10m": Bar("speed of `run_batch`, to transformers', 10 million parameters", at_least=1.2, aim=2),
    "reused": Bar("prompt tokens found in the cache", "share", at_least=0.88, aim=0.92),
    "slots_used": Bar("tokens that decode steps chose, of rows times steps", "share", at_least=0.96, aim=0.98),
    "budget_used": Bar("positions of mixed steps that held a token", "share", at_least=0.6, aim=0.8),
    "step_over_verbs": Bar("time of a steady step, to its `extend` and `commit` alone", at_most=1.7, aim=1.3),
    "block_over_verbs": Bar("time of a steady step in blocks of 16, to its verbs alone", at_most=1.7, aim=1.3),
    "step_us": Bar("CPU time of a steady step of 256 rows", "µs", at_most=200),
    "warmup_cpu_s": Bar("warm-up of a `run_batch` without a compile cache", "s", at_most=45, aim=25),
}
NOTES = """
Figures are better on one core (`taskset -c 0`) than on two, where XLA divides even small operations: that costs a step
without a model more than it saves. In several runs one program was 2.1x to 2.8x as fast as single steps from Python on
one core, and 1.9x to 2.5x on two; 1.4x to 2.0x and 1.6x to 1.7x as fast as blocks of steps. `run_batch` was 1.22x to
1.33x as fast as batches admitted on the host, and 1.04x to 1.23x: it misses that bar in most runs. A steady step took
1.3x to 1.8x of its verbs on one core (97 to 161 µs), and 1.8x to 2.0x on two (310 to 400 µs), where it misses its bars.
In blocks of 16 it took 1.5x to 1.85x and 1.65x to 1.83x.

By `jax.profiler` about half of `run_batch`'s time is decode steps, which transformers and `generate` take too, and a
quarter mixed steps. Chunks, rows and budgets of other sizes were slower.
"""


def run_batch(model: Any, size: Size, prompts: Sequence[Sequence[int]], cache: kvjax.Cache) -> list[list[int]]:
    """The tokens of each prompt, by the public function."""
    requests = kvjax.serving.make_requests(prompts, max_new_tokens=size.new_tokens)
    options = kvjax.serving.RunOptions(scheduler=size.scheduler, log_events=False)
    outputs, _, _ = kvjax.run_batch(model, cache, requests, options)
    return [output.tokens for output in outputs]


def single(scheduler: Scheduler) -> Scheduler:
    """The same in steps of one token."""
    return dataclasses.replace(scheduler, k=1, k_waiting=1)


def ratios(took: dict[str, common.Took], name: str, slow: str, fast: str) -> tuple[dict[str, float], dict[str, float]]:
    """How many times longer the slow way takes than the fast one: the metric by CPU time, and by the clock."""
    one, other = took[slow], took[fast]
    return {name: one.cpu / other.cpu}, {f"{name}_wall": one.wall / other.wall}


def compare_ways(model: Any, size: Size) -> tuple[dict[str, float], dict[str, float]]:
    """One program against steps from Python and `generate` as it was; metrics and details."""
    prompts, scheduler = questions(size), size.scheduler
    begin = functools.partial(submitted, model, size, prompts, [size.new_tokens] * len(prompts))
    cache = functools.partial(make_cache, model, size)
    programs: Programs = {
        "loop": (begin, lambda state: one_program(scheduler)(model, *state)[0]),
        "python": (begin, lambda state: from_python(single(scheduler), model, *state)[0]),
        "blocks_from_python": (begin, lambda state: from_python(scheduler, model, *state)[0]),
        "run_batch": (cache, functools.partial(run_batch, model, size, prompts)),
        "generate": (cache, lambda cache: static_batches.generate(model, cache, prompts, size.new_tokens)[0]),
    }
    took, ends = common.in_turns(programs, size.rounds)
    outputs = {name: end if isinstance(end, list) else answers(end) for name, end in ends.items()}
    require_same(model, size, prompts, outputs)
    metrics, details = {}, {}
    for name, slow, fast in (
        ("loop_over_python", "python", "loop"), ("over_generate", "generate", "run_batch"),
        ("loop_over_blocks_from_python", "blocks_from_python", "loop"),
    ):  # fmt: skip
        ratio, wall = ratios(took, name, slow, fast)
        (metrics if name in BARS else details).update(ratio)
        details |= wall
    for name, seconds in took.items():
        details |= {f"{name}_cpu_s": seconds.cpu, f"{name}_wall_s": seconds.wall}
    return metrics, details


def compare_transformers(size: Size) -> tuple[dict[str, float], dict[str, float]]:
    """`run_batch` against transformers, for two models; nothing where that is not installed."""
    if not transformers_batches.installed():
        return {}, {}
    recall, _ = loading.load(CHECKPOINT)
    metrics, details = against_transformers("over_transformers", recall, CHECKPOINT, size)
    with tempfile.TemporaryDirectory() as folder:
        larger = Decoder(decode_loop.Size().config, rngs=nnx.Rngs(0))
        loading.save(larger, folder)
        few = size._replace(documents=min(size.documents, 8))
        more = against_transformers("over_transformers_10m", larger, folder, few)
    return metrics | more[0], details | more[1]


def against_transformers(
    name: str, model: Any, folder: str | pathlib.Path, size: Size
) -> tuple[dict[str, float], dict[str, float]]:
    """`run_batch` against transformers, with a model that is in a folder."""
    theirs, prompts = transformers_batches.Theirs(folder), questions(size)
    programs: Programs = {
        "run_batch": (functools.partial(make_cache, model, size), functools.partial(run_batch, model, size, prompts)),
        "transformers": (lambda: None, lambda _: theirs.generate(prompts, size.new_tokens, size.rows)),
    }
    took, outputs = common.in_turns(programs, min(size.rounds, 2))
    require_same(model, size, prompts, outputs)
    return ratios(took, name, "transformers", "run_batch")


def shares(model: Any, size: Size, lengths: Sequence[int]) -> dict[str, float]:
    """How much of the prompts, of the decode slots and of the budget of mixed steps is used, for answers so long."""
    prompts, spec = questions(size), make_cache(model, size).state.spec
    serving, steps = from_python(size.scheduler, model, *submitted(model, size, prompts, lengths))
    cached = int(np.sum(serving.requests.cached))
    wanted = oracle_reuse(size, spec, prompts, answers(serving))
    common.require(cached == wanted, f"{cached} prompt tokens were reused, {wanted} by the scheduler in plain Python")
    decoded, held = tokens_of_steps(jax.device_get(steps))
    return {
        "reused": cached / sum(map(len, prompts)),
        "slots_used": decoded / (size.rows * int(serving.steps)),
        "budget_used": sum(held) / (len(held) * (size.rows + size.scheduler.chunk_tokens(spec))),
        "model_steps": int(serving.steps),
        "mixed_steps": len(held),
    }


def tokens_of_steps(steps: Sequence[Any]) -> tuple[int, list[int]]:
    """Tokens that decode slots chose in steps of the scheduler; and for each mixed step the tokens on its line."""
    decoded, held = 0, []
    for step in steps:
        chosen = np.sum(step.chosen.tokens >= 0, axis=1)
        chosen[step.chunks.rows[step.chunks.count > 0]] = 0  # chosen at the end of a chunk
        decoded += int(np.sum(chosen))
        if step.mixed:
            held.append(int(np.sum(chosen)) + int(np.sum(step.chunks.count)))
    return decoded, held


def oracle_reuse(size: Size, spec: kvjax.CacheSpec, prompts: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Prompt tokens that the scheduler in plain Python finds in its cache."""
    cache = Oracle(size.num_blocks, BLOCK, size.rows, spec.max_blocks_per_seq)
    return oracle.cached_tokens(cache, oracle_options(size.scheduler), prompts, outputs)


def warm_up(quick: bool) -> None:
    """Prints the CPU seconds of a first `run_batch` less those of a second one; for a process of its own."""
    size, (model, _) = QUICK if quick else Size(), loading.load(CHECKPOINT)
    seconds = []
    for _ in range(2):
        cache = jax.block_until_ready(make_cache(model, size))
        began = time.process_time()
        run_batch(model, size, questions(size), cache)
        seconds.append(time.process_time() - began)
    print(json.dumps(seconds[0] - seconds[1]))


def measure_warm_up(quick: bool) -> float:
    """The same, measured in a fresh process that has no compile cache."""
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, "-c", f"from benchmarks import serving; serving.warm_up({quick})"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    common.require(done.returncode == 0, f"the process that warms up: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(size: Size, quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics, in the order of `BARS`, and details."""
    model, _ = loading.load(CHECKPOINT)
    metrics, details = compare_ways(model, size)
    for more in (compare_transformers(size), steady_step.measure(steady_step.QUICK if quick else steady_step.Size())):
        metrics, details = metrics | more[0], details | more[1]
    for suffix, lengths in (("", [size.new_tokens] * size.requests), ("_mixed_lengths", size.drawn_lengths())):
        for name, value in shares(model, size, lengths).items():
            (metrics if name in BARS and not suffix else details)[name + suffix] = value
    metrics["warmup_cpu_s"] = measure_warm_up(quick)
    return {name: metrics[name] for name in BARS if name in metrics}, details


def main() -> None:
    def options(parser):
        parser.add_argument("--rounds", type=int, help="how often the ways are timed")
        parser.add_argument("--quick", action="store_true", help="a tiny batch: whether it runs, not how fast")

    args = common.parse("serving", __doc__, options)
    size = QUICK if args.quick else Size()
    size = size if args.rounds is None else size._replace(rounds=args.rounds)
    print(f"serving: {size.requests} questions about {size.documents} documents, {size.rows} rows")
    metrics, details = measure(size, args.quick)
    common.report("serving", metrics, args.json, details, bars=BARS)


if __name__ == "__main__":
    main()
