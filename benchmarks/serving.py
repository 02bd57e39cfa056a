# SPDX-License-Identifier: Apache-2.0
"""Continuous batching in one program against other ways to run the same batch.

512 questions about 32 documents, 16 in a row about each, are answered greedily by the bundled recall model in 32 rows,
64 tokens each. Ways to run them: one program (`serve`, and `run_batch` from prompts to outputs); `serve_step` of one
step, called from Python, which reads the tokens of a step while the next one runs, as schedulers on the host do; blocks
of steps from Python; and `generate` of transformers in batches of 32, where it is installed, for this model and for one
of 10 million parameters. All must choose the same tokens. They take turns; ratios are of CPU time, the median of
several rounds, and the result has those of wall time too.

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
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import caches, common, steady_step, transformers_batches, workload
from benchmarks.common import Bar, Program, Size, benchmark
from benchmarks.workload import BLOCK, load_recall, make_cache, run_batch, submitted
from models import loading, recall
from models.decoder import Decoder
from tests.oracle import scheduler as oracle
from tests.oracle.cache import Oracle

BARS = {
    "loop_over_python": Bar("speed of one program, to steps of one token that Python calls", at_least=1.5, aim=2.5),
    "loop_over_blocks_from_python": Bar("speed of one program, to blocks of steps that Python calls"),
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
one core, and 1.9x to 2.5x on two; 1.4x to 2.0x and 1.6x to 1.7x as fast as blocks of steps. A steady step took 1.3x to
1.8x of its verbs on one core (97 to 161 µs), and 1.8x to 2.0x on two (310 to 400 µs), where it misses its bars. In
blocks of 16 it took 1.5x to 1.85x and 1.65x to 1.83x.

By `jax.profiler` about half of `run_batch`'s time is decode steps, which transformers takes too, and a quarter mixed
steps. Chunks, rows and budgets of other sizes were slower.
"""


def ratios(took: dict[str, common.Took], name: str, slow: str, fast: str) -> dict[str, float]:
    """How many times longer the slow way takes than the fast one, by CPU time, and by the clock."""
    return {name: took[slow].cpu / took[fast].cpu, f"{name}_wall": took[slow].wall / took[fast].wall}


def compare_ways(model: Any, size: Size) -> dict[str, float]:
    """One program against steps from Python."""
    prompts, scheduler = workload.questions(size), size.scheduler
    begin = functools.partial(submitted, model, size, prompts, [size.new_tokens] * len(prompts))
    one, single = workload.one_program(scheduler), dataclasses.replace(scheduler, k=1, k_waiting=1)
    programs: dict[str, Program] = {
        "loop": (begin, lambda state: one(model, *state)[0]),
        "python": (begin, lambda state: workload.from_python(single, model, *state)[0]),
        "blocks_from_python": (begin, lambda state: workload.from_python(scheduler, model, *state)[0]),
        "run_batch": (lambda: make_cache(model, size), functools.partial(run_batch, model, size, prompts)),
    }
    took, ends = common.in_turns(programs, size.rounds)
    outputs = {name: end if isinstance(end, list) else workload.answers(end) for name, end in ends.items()}
    workload.require_same(model, size, prompts, outputs)
    return {
        **ratios(took, "loop_over_python", "python", "loop"),
        **ratios(took, "loop_over_blocks_from_python", "blocks_from_python", "loop"),
        **{f"{name}_{kind}_s": getattr(each, kind) for name, each in took.items() for kind in ("cpu", "wall")},
    }


def compare_transformers(size: Size) -> dict[str, float]:
    """`run_batch` against transformers, for two models; nothing where that is not installed."""
    if not transformers_batches.installed():
        return {}
    figures = against_transformers("over_transformers", load_recall()[0], recall.CHECKPOINT, size)
    with tempfile.TemporaryDirectory() as folder:
        larger = Decoder(caches.LLAMA, rngs=nnx.Rngs(0))
        loading.save(larger, folder)
        few = size.replace(documents=min(size.documents, 8))
        return figures | against_transformers("over_transformers_10m", larger, folder, few)


def against_transformers(name: str, model: Any, folder: str | pathlib.Path, size: Size) -> dict[str, float]:
    """`run_batch` against transformers, with a model that is in a folder."""
    theirs, prompts = transformers_batches.Theirs(folder), workload.questions(size)
    programs: dict[str, Program] = {
        "run_batch": (lambda: make_cache(model, size), functools.partial(run_batch, model, size, prompts)),
        "transformers": lambda: theirs.generate(prompts, size.new_tokens, size.rows),
    }
    took, outputs = common.in_turns(programs, min(size.rounds, 2))
    workload.require_same(model, size, prompts, outputs)
    return ratios(took, name, "transformers", "run_batch")


def shares(model: Any, size: Size, lengths: Sequence[int]) -> dict[str, float]:
    """How much of the prompts, of the decode slots and of the budget of mixed steps is used, for answers so long."""
    prompts, spec = workload.questions(size), workload.spec_of(model, size)
    serving, steps = workload.from_python(size.scheduler, model, *submitted(model, size, prompts, lengths))
    cached = int(np.sum(serving.requests.cached))
    plain, options = Oracle(size.num_blocks, BLOCK, size.rows, spec.max_blocks_per_seq), size.scheduler
    wanted = oracle.cached_tokens(plain, workload.oracle_options(options), prompts, workload.answers(serving))
    common.require(cached == wanted, f"{cached} prompt tokens were reused, {wanted} by the scheduler in plain Python")
    decoded, held = tokens_of_steps(jax.device_get(steps))
    return {
        "reused": cached / sum(map(len, prompts)),
        "slots_used": decoded / (size.rows * int(serving.steps)),
        "budget_used": sum(held) / (len(held) * (size.rows + options.chunk_tokens(spec))),
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


def warm_up(quick: bool) -> float:
    """The CPU seconds of a first `run_batch` less those of a second one; for a process of its own."""
    size, (model, _), seconds = measure.size(quick), load_recall(), []
    for _ in range(2):
        cache = jax.block_until_ready(make_cache(model, size))
        began = time.process_time()
        run_batch(model, size, workload.questions(size), cache)
        seconds.append(time.process_time() - began)
    return seconds[0] - seconds[1]


@benchmark(BARS, {**workload.BATCH, **steady_step.SIZES}, rounds=(5, 1))
def measure(size):
    model, _ = load_recall()
    yield compare_ways(model, size)
    yield compare_transformers(size)
    yield steady_step.measure(size)
    requests = size.documents * size.questions
    drawn = np.random.default_rng(1).integers(size.shortest, size.longest + 1, requests).tolist()
    yield shares(model, size, [size.new_tokens] * requests)
    yield {f"{name}_mixed_lengths": share for name, share in shares(model, size, drawn).items()}
    yield {"warmup_cpu_s": common.apart("serving", "warm_up", size.quick, JAX_ENABLE_COMPILATION_CACHE="0")}
