# SPDX-License-Identifier: Apache-2.0
"""Continuous batching in a single program, against other ways to run the same batch.

The bundled recall model answers 512 questions about 32 documents greedily in 32 rows, with 64 tokens each. The 16
questions about a document come in a row. The first way is a single program: `serve`, and `run_batch` from prompts to
outputs. The second calls `serve_step` from Python for each step, and reads the tokens of a step while the next step
runs, as schedulers on the host do. The third calls blocks of steps from Python. The last is `generate` of transformers
in batches of 32, if it is installed, with this model and with a model of 10 million parameters. All ways have to choose
the same tokens. They take turns, and ratios are of CPU time, the median of several rounds. The result also has ratios
of wall time.

The shares belong to the same batch. The first is the share of prompt tokens found in the cache, which has to equal the
share of the scheduler in plain Python. The second is tokens chosen by decode steps, divided by rows times steps. A row
is unused if it is empty, computes its prompt or idles in a block of steps. The third is the share of positions of mixed
steps with a token. The result also has these shares for answers of 33 to 95 tokens.

A steady step is a step of 256 decoding rows in a full cache of 65,536 blocks, so each new block evicts another. No
request waits, and no row is close to its `max_tokens`. There is no model, and there are no K/V. The scheduler's events
go into a log, and the verbs alone have no log. Both have to leave the same rows with the same blocks. Warm-up is the
CPU time of a first `run_batch` in a new process without a compile cache, less the CPU time of the second.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import kvjax
from benchmarks import caches, common, workload
from benchmarks.caches import NoModel, copy_of, full_state
from benchmarks.common import Bar, Program, Size, benchmark
from benchmarks.workload import BLOCK, load_recall, make_cache, run_batch, submitted
from kvjax import Cache, CacheState
from kvjax.events import init_log
from kvjax.serving import Scheduler, Serving, init_serving, serve, submit, worst_step
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


PROMPT, LENGTH = 48, 2048  # of the rows of a steady step
STEADY = {"steady_rows": (256, 4), "steady_blocks": (65_536, 512), "steps": (64, 16), "calls": (40, 1)}


def ratios(took: dict[str, common.Took], name: str, slow: str, fast: str) -> dict[str, float]:
    """The slow program's time divided by the fast program's, in CPU time and in wall time."""
    return {name: took[slow].cpu / took[fast].cpu, f"{name}_wall": took[slow].wall / took[fast].wall}


def compare_ways(model: Any, size: Size) -> dict[str, float]:
    """Compares a single program with steps from Python."""
    prompts = workload.questions(size)
    scheduler = size.scheduler
    begin = functools.partial(submitted, model, size, prompts, [size.new_tokens] * len(prompts))
    run_all = workload.one_program(scheduler)
    single = dataclasses.replace(scheduler, k=1, k_waiting=1)
    programs: dict[str, Program] = {
        "loop": (begin, lambda state: run_all(model, *state)[0]),
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
        **{f"{name}_{kind}_s": getattr(timing, kind) for name, timing in took.items() for kind in ("cpu", "wall")},
    }


def transformers_batches(folder: str | pathlib.Path, new_tokens: int, rows: int) -> Callable[[Any], list[list[int]]]:
    """`generate` of transformers: prompts -> tokens, in left-padded batches, greedy, on the CPU in float32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.float32).eval()
    # No token ends a text, so that every answer is as long as wanted.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def generate(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), rows):
            batch = prompts[start : start + rows]
            width = max(map(len, batch))
            pads = [width - len(prompt) for prompt in batch]
            ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(pads, batch, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
            with torch.inference_mode():
                answers = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens)
            outputs += answers[:, width:].tolist()
        return outputs

    return generate


def compare_transformers(size: Size) -> dict[str, float]:
    """Compares `run_batch` with transformers, for two models. Returns nothing if transformers is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return {}
    figures = against_transformers("over_transformers", load_recall()[0], recall.CHECKPOINT, size)
    with tempfile.TemporaryDirectory() as folder:
        larger = Decoder(caches.LLAMA, rngs=nnx.Rngs(0))
        loading.save(larger, folder)
        fewer = size.replace(documents=min(size.documents, 8))
        return figures | against_transformers("over_transformers_10m", larger, folder, fewer)


def against_transformers(name: str, model: Any, folder: str | pathlib.Path, size: Size) -> dict[str, float]:
    """Compares `run_batch` with transformers, with a model in a folder."""
    transformers = transformers_batches(folder, size.new_tokens, size.rows)
    prompts = workload.questions(size)
    programs: dict[str, Program] = {
        "run_batch": (lambda: make_cache(model, size), functools.partial(run_batch, model, size, prompts)),
        "transformers": lambda: transformers(prompts),
    }
    took, outputs = common.in_turns(programs, min(size.rounds, 2))
    workload.require_same(model, size, prompts, outputs)
    return ratios(took, name, "transformers", "run_batch")


def shares(model: Any, size: Size, lengths: Sequence[int]) -> dict[str, float]:
    """The shares of prompts, of decode slots and of the budget of mixed steps in use, for answers of these lengths."""
    prompts = workload.questions(size)
    spec = workload.spec_of(model, size)
    serving, steps = workload.from_python(size.scheduler, model, *submitted(model, size, prompts, lengths))
    cached = int(np.sum(serving.requests.cached))
    plain = Oracle(size.num_blocks, BLOCK, size.rows, spec.max_blocks_per_seq)
    options = size.scheduler
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
    """Tokens chosen by decode slots in steps of the scheduler, and the number of tokens in each mixed step."""
    decoded = 0
    held = []
    for step in steps:
        chosen = np.sum(step.chosen.tokens >= 0, axis=1)
        chosen[step.chunks.rows[step.chunks.count > 0]] = 0  # chosen at the end of a chunk
        decoded += int(np.sum(chosen))
        if step.mixed:
            held.append(int(np.sum(chosen)) + int(np.sum(step.chunks.count)))
    return decoded, held


def steady_scheduler(k: int) -> Scheduler:
    """A scheduler with a chunk as long as a row's whole prompt."""
    return Scheduler(k=k, chunk=PROMPT + BLOCK)


@functools.cache
def steps_of(k: int, size: Size) -> Callable[..., Any]:
    """The scheduler's steps: (serving, steps) -> (serving, log)."""

    def run(serving: Serving, steps: jax.Array) -> Any:
        spec = serving.cache.state.spec
        usual = size.steps * size.steady_rows // 4  # a block that is entered evicts one, and is stored when full
        log = init_log(usual + 2 * worst_step(spec, steady_scheduler(k)) + 4 * spec.max_blocks_per_seq, BLOCK)
        return serve(NoModel(), serving, log, scheduler=steady_scheduler(k), steps=steps)

    return jax.jit(run, donate_argnums=0, compiler_options=kvjax.serving.compiler_options())


@functools.partial(jax.jit, static_argnames=("k", "size"), donate_argnums=0)
def verbs_of(state: CacheState, k: int, size: Size) -> CacheState:
    """The same number of steps as verbs, in blocks of k: `extend` and `commit`."""
    every = jnp.ones(size.steady_rows, jnp.bool_)
    tokens = jnp.zeros((size.steady_rows, k), jnp.int32)
    counts = jnp.full(size.steady_rows, k, jnp.int32)

    def block(_, state: CacheState) -> CacheState:
        state, _ = kvjax.extend(state, every, counts, max_tokens=k)
        return kvjax.commit(state, tokens, counts)[0]

    return lax.fori_loop(0, size.steps // k, block, state)


def decoding(size: Size) -> Serving:
    """Decoding requests, each in a row, in a cache without K/V."""
    spec = kvjax.make_spec(
        num_blocks=size.steady_blocks, max_seqs=size.steady_rows, max_length=LENGTH, block_size=BLOCK
    )
    state = full_state(spec, lambda prompt_index: (1 + prompt_index) * LENGTH + jnp.arange(LENGTH, dtype=jnp.int32))
    lengths = PROMPT + np.arange(size.steady_rows, dtype=np.int32) % BLOCK  # they do not all fill a block at once
    line = np.random.default_rng(0).integers(1 << 24, 1 << 25, int(lengths.sum()), np.int32)
    serving = init_serving(Cache(state, kvjax.init_pools(spec)), [LENGTH] * size.steady_rows, greedy=True)
    submitted = jax.jit(functools.partial(submit, scheduler=steady_scheduler(1)), donate_argnums=0)
    serving, status, *_ = submitted(serving, line, lengths, LENGTH - lengths)
    common.require(not np.any(status), "a prompt was refused")
    while not np.all(serving.requests.num_tokens > serving.requests.prompt):
        serving, _ = steps_of(1, size)(serving, np.int32(size.steps))
    common.require(bool(np.all(serving.requests.ended < 0)), "a request is over before all have begun")
    return serving


def require_steady(after: Serving, log: Any, state: CacheState, before: Serving, size: Size) -> None:
    """Requires steady steps, and the same rows and blocks as the verbs have."""
    common.require(int(after.steps - before.steps) == size.steps, "the scheduler has run other steps")
    ours = after.cache.state
    expected = state
    same = [(ours.seqs.committed, expected.seqs.committed), (ours.groups[0].table, expected.groups[0].table)]
    common.require(all(np.array_equal(a, b) for a, b in same), "the scheduler has other blocks than the verbs")
    blocks = size.steady_rows * size.steps // BLOCK
    counts = {name: int(kvjax.events.counts(log)[name]) for name in ("removed", "stored")}
    common.require(counts == {"removed": blocks, "stored": blocks}, f"{counts} in the log, wanted {blocks} of each")


def measure_steady(size: Size) -> dict[str, float]:
    """Compares a steady step with its verbs, in CPU time and in wall time."""
    start = decoding(size)
    programs = {}
    for k in (1, BLOCK):
        run = steps_of(k, size)
        programs[f"steps_{k}"] = copy_of(start), lambda serving, run=run: run(serving, np.int32(size.steps))
        programs[f"verbs_{k}"] = copy_of(start.cache.state), functools.partial(verbs_of, k=k, size=size)
    took, ends = common.in_turns(programs, size.calls)
    for k in (1, BLOCK):
        require_steady(*ends[f"steps_{k}"], ends[f"verbs_{k}"], start, size)
    names = {1: "step_over_verbs", BLOCK: "block_over_verbs"}
    return {
        **{name: took[f"steps_{k}"].cpu / took[f"verbs_{k}"].cpu for k, name in names.items()},
        **{f"{name}_wall": took[f"steps_{k}"].wall / took[f"verbs_{k}"].wall for k, name in names.items()},
        **common.times(took, "us", "cpu", size.steps),
        "step_us": 1e6 * took["steps_1"].cpu / size.steps,
    }


def warm_up(quick: bool) -> float:
    """CPU seconds of a first `run_batch` less the seconds of the second. Call it in a separate process."""
    size = measure.size(quick)
    (model, _) = load_recall()
    seconds = []
    for _ in range(2):
        cache = jax.block_until_ready(make_cache(model, size))
        began = time.process_time()
        run_batch(model, size, workload.questions(size), cache)
        seconds.append(time.process_time() - began)
    return seconds[0] - seconds[1]


@benchmark(BARS, {**workload.BATCH, **STEADY}, rounds=(5, 1))
def measure(size):
    model, _ = load_recall()
    yield compare_ways(model, size)
    yield compare_transformers(size)
    yield measure_steady(size)
    requests = size.documents * size.questions
    drawn = np.random.default_rng(1).integers(size.shortest, size.longest + 1, requests).tolist()
    yield shares(model, size, [size.new_tokens] * requests)
    yield {f"{name}_mixed_lengths": share for name, share in shares(model, size, drawn).items()}
    yield {"warmup_cpu_s": common.apart("serving", "warm_up", size.quick, JAX_ENABLE_COMPILATION_CACHE="0")}
