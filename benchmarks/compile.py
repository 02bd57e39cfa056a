# SPDX-License-Identifier: Apache-2.0
"""Counts of the programs of the scheduler's loop and of each verb, and the time of a first answer in a new process.

On a CPU XLA compiles equal fusions once, so the number of *distinct* fusions decides the cost. Fusions are distinct if
their texts differ in more than names. Large fusions cost more than small fusions. All counts are exact.

`serve` is the program of a `generate` with the bundled model, 8 rows and 96 blocks. Seconds are CPU time of this
process, without a cache of programs. Two separate processes then generate for the first time: the first without a cache
of programs, and the second with the programs of the first. Their seconds include imports and the loading of the model.
"""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import kvjax
from benchmarks import common
from benchmarks.common import Bar, benchmark
from kvjax import Cache
from kvjax.events import init_log
from kvjax.serving import Scheduler, init_serving, serve, submit, worst_step

ROWS, BLOCK = 8, 16
SHAPE: dict[str, Any] = {"num_blocks": 96, "max_seqs": ROWS, "max_length": 512, "block_size": BLOCK}
PROMPT, CHUNK, PROMPTS, STEPS = 64, 64, 8, 64
BARS = {
    "serve_ops": Bar("operations of the scheduler's loop, bundled model, 8 rows", "", aim=10_750),
    "serve_distinct": Bar("kernels of the loop that differ, each compiled once", "", aim=760),
    "serve_trace_s": Bar("CPU time to trace the loop", "s", aim=1.4),
    "serve_compile_s": Bar("CPU time to compile the loop", "s"),
    "first_cold_s": Bar("CPU time of a new process with one `generate`", "s"),
    "first_warm_s": Bar("CPU time of a new process with one `generate`, programs compiled earlier", "s", aim=4),
}
NOTES = """
The aim of the time to compile is relative: 0.8x of an earlier version of this repository. Side by side, in three turns,
it was 0.78x, 0.83x and 0.87x. The machine had no other work in the first turn.
"""
Program = tuple[Callable[..., Any], tuple[Any, ...]]


class Counts(NamedTuple):
    """Operations before XLA compiles a program, then its fusions, distinct fusions, scatters and loops."""

    ops: int
    fusions: int
    distinct: int
    scatters: int
    loops: int


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    """Shape of an i32 argument."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


EVERY = jax.ShapeDtypeStruct((ROWS,), jnp.bool_)
VERBS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "lookup": (kvjax.lookup, (i32(PROMPT), i32())),
    "admit": (kvjax.admit, (i32(), i32(PROMPT), i32())),
    "extend": (kvjax.extend, (EVERY,)),
    "commit": (kvjax.commit, (i32(ROWS, 1), i32(ROWS))),
    "trim": (functools.partial(kvjax.trim, max_tokens=BLOCK), (EVERY,)),
    "release": (kvjax.release, (i32(),)),
    "fork": (kvjax.fork, (i32(), i32())),
    "truncate": (kvjax.truncate, (i32(), i32())),
}


def programs() -> dict[str, Callable[[], Program]]:
    """All programs to count, by name: functions which return (function, shapes of its arguments)."""
    scheduler = Scheduler(chunk=CHUNK, k=BLOCK, budget=ROWS + 2 * CHUNK)

    def verb(name: str) -> Program:
        function, args = VERBS[name]
        return function, (jax.eval_shape(lambda: kvjax.init(kvjax.make_spec(**SHAPE))), *args)

    def serving() -> tuple[Any, kvjax.CacheSpec, Any]:
        model, spec = model_and_spec()
        return model, spec, jax.eval_shape(lambda: init_serving(Cache.create(spec), [PROMPT + STEPS] * PROMPTS))

    def loop() -> Program:
        model, spec, requests = serving()
        log = jax.eval_shape(lambda: init_log(4 * worst_step(spec, scheduler), BLOCK))
        run = functools.partial(serve, scheduler=scheduler)
        return lambda model, serving, log, steps: run(model, serving, log, steps=steps), (model, requests, log, i32())

    def submission() -> Program:
        args = serving()[2], i32(PROMPTS * PROMPT), i32(PROMPTS), i32(PROMPTS)
        return functools.partial(submit, scheduler=scheduler), args

    return {"serve": loop, "submit": submission, **{name: functools.partial(verb, name) for name in VERBS}}


@functools.cache
def model_and_spec() -> tuple[Any, kvjax.CacheSpec]:
    """The bundled model, and a cache for it."""
    from models import loading, recall  # late: the verbs need no model

    model, _ = loading.load(recall.CHECKPOINT)
    return model, kvjax.make_spec(model.layer_specs(), dtype="float32", **SHAPE)


def compile_program(program: Program) -> tuple[jax.stages.Lowered, jax.stages.Compiled, dict[str, float]]:
    """Traces, lowers and compiles a program. Returns both stages, and the CPU time of each."""
    function, args = program
    times = [time.process_time()]
    stages: list[Any] = []
    for stage in (jax.jit(function).trace, lambda *_: stages[0].lower(), lambda *_: stages[1].compile()):
        stages.append(stage(*args))
        times.append(time.process_time())
    seconds = (after - before for before, after in itertools.pairwise(times))
    return stages[1], stages[2], dict(zip(("trace", "lower", "compile"), seconds, strict=True))


# The attributes of an instruction that do not change what it computes.
_ATTRIBUTES = re.compile(
    r", (?:metadata|backend_config|frontend_attributes)=(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\"[^\"]*\")"
)
_NAME = re.compile(r"%[\w.\-]+")
_FUSION = re.compile(r" fusion\(.*calls=(%[\w.\-]+)")


def computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation of a compiled program."""
    instructions: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?(%[\w.\-]+) \(.*\{$", line)
        if header:
            lines = instructions.setdefault(header[1], [])
        elif line.startswith("  "):
            lines.append(line.removeprefix("  ROOT").strip())
    return instructions


def bodies(text: str) -> Iterator[tuple[str, str]]:
    """(instruction, body without names) of each fusion of a compiled program."""
    instructions = computations(text)

    @functools.cache
    def body(name: str) -> str:
        numbers: dict[str, str] = {}

        def rename(match: re.Match[str]) -> str:
            word = match[0]
            return f"{{{body(word)}}}" if word in instructions else numbers.setdefault(word, f"%{len(numbers)}")

        return "\n".join(_NAME.sub(rename, _ATTRIBUTES.sub("", line)) for line in instructions[name])

    for line in itertools.chain.from_iterable(instructions.values()):
        called = _FUSION.search(line)
        if called:
            yield line, body(called[1])


def operations(lowered: jax.stages.Lowered) -> int:
    """The number of operations of a program before XLA compiles it."""
    return len(re.findall(r"(?<![#\w])stablehlo\.(?!return)\w+", lowered.as_text()))


def count(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> Counts:
    """Counts a program."""
    text = compiled.as_text() or ""
    texts = [body for _, body in bodies(text)]
    return Counts(
        ops=operations(lowered),
        fusions=len(texts),
        distinct=len(set(texts)),
        scatters=len(re.findall(r" scatter\(", text)),
        loops=len(re.findall(r" while\(", text)),
    )


def first_answer() -> float:
    """CPU seconds of this process, up to its first answer."""
    kvjax.enable_compilation_cache()
    model, spec = model_and_spec()
    (output,), _, _ = kvjax.generate(model, Cache.create(spec), [list(range(1, PROMPT))], max_new_tokens=BLOCK)
    common.require(len(output.tokens) == BLOCK, f"got {len(output.tokens)} tokens, wanted {BLOCK}")
    return time.process_time()


# `counts`: leave out the processes that generate.
@benchmark(BARS, {"counts": (False, True), "programs": (["serve", "submit", *VERBS], ["fork", "trim"])})
def measure(size):
    jax.config.update("jax_enable_compilation_cache", False)
    compile_program(programs()["fork"]())  # what a process does once belongs to no program
    jax.clear_caches()
    for name, make in programs().items():
        if name in size.programs:
            lowered, compiled, seconds = compile_program(make())
            counts = count(lowered, compiled)
            yield {f"{name}_{field}": value for field, value in counts._asdict().items()}
            yield {f"{name}_{field}_s": value for field, value in seconds.items()}
    if not size.counts:
        with tempfile.TemporaryDirectory() as folder:
            apart = functools.partial(
                common.apart, "compile", "first_answer", JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=folder
            )
            yield {"first_cold_s": apart(), "first_warm_s": apart()}
