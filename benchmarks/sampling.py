# SPDX-License-Identifier: Apache-2.0
"""Sampling by row, in one program for all: each row's temperature, top-k, top-p and `min_tokens` are arrays.

32 rows choose among 128,256 tokens, some steps in one jitted loop, as in decoding: a call of its own would also take
new memory from the system for what it does not use. A batch that is greedy throughout is compared with the plain
choice: argmax, and the log-probability of the chosen token. Batches that sample are compared with a program for that
one way of sampling (`tests/oracle/static_sampling.py`), without a bar. All must choose the same tokens with the same
log-probabilities. The programs take turns, so that a noisy machine is noisy for all of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import common
from benchmarks.common import Bar
from benchmarks.decode_loop import take_turns
from kvjax.serving.sampling import Sampling, sample
from tests.oracle import static_sampling
from tests.oracle.static_sampling import Static

BARS = {
    "greedy_ratio": Bar("greedy, to the plain choice", at_most=1.05),
    "greedy_by_row_ms": Bar("greedy, a step", "ms"),
    "temperature_ratio": Bar("temperature, to a program for it alone"),
    "top_k_ratio": Bar("top-k of 40, to a program for it alone"),
    "top_p_ratio": Bar("top-p of 0.9, to a program for it alone"),
    "top_k_top_p_ratio": Bar("top-k of 40 and top-p of 0.9, to a program for them alone"),
    "top_k_top_p_by_row_ms": Bar("top-k of 40 and top-p of 0.9, a step", "ms"),
}
NOTES = """
Rows that sample from a part of the vocabulary share one sort, whichever top-k and top-p they have. A program for a
fixed top-k alone needs none, so that it is faster.
"""
WAYS = {
    "temperature": Static(0.7),
    "top_k": Static(0.7, 40),
    "top_p": Static(0.7, None, 0.9),
    "top_k_top_p": Static(0.7, 40, 0.9),
}
Choose = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array]]


class Size(NamedTuple):
    """R rows choose among V tokens, so many steps a call; greedy calls are timed more often than the slow ones."""

    rows: int = 32
    vocab: int = 128_256
    steps: int = 8
    rounds: int = 40
    slow_rounds: int = 3
    clock: Callable[[], float] = time.perf_counter


QUICK = Size(rows=4, vocab=512, steps=2, rounds=1, slow_rounds=1)


def plain(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The greedy choice, as one would write it."""
    del sampling, positions
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[:, None], axis=1)
    return tokens, scores[:, 0]


def by_row(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The choice by arrays, with stop tokens and log-probabilities as in decoding; 4 tokens were generated."""
    stop, generated = jnp.array([1, 2, -1], jnp.int32), jnp.full(positions.shape, 4, jnp.int32)
    chosen = sample(logits, sampling, positions.astype(jnp.uint32), positions, stop=stop, generated=generated)
    return chosen.tokens, chosen.logprobs


def static(way: Static) -> Choose:
    """A program for one way of sampling."""
    return lambda logits, _, positions: static_sampling.sample(logits, way, positions.astype(jnp.uint32), positions)


def loop(choose: Choose, size: Size) -> Callable[[jax.Array, Sampling], Any]:
    """Jitted: chooses `steps` times, each time by logits that differ in one token; tokens and scores [steps, R]."""

    @jax.jit
    def run(logits, sampling):
        def one(number, carry):
            logits, tokens, scores = carry
            positions = number + np.arange(size.rows, dtype=np.int32) * 7
            chosen = choose(logits, sampling, positions)
            return logits.at[:, number].add(30.0), tokens.at[number].set(chosen[0]), scores.at[number].set(chosen[1])

        shape = (size.steps, size.rows)
        start = logits, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        return lax.fori_loop(0, size.steps, one, start)[1:]

    return run


def compare(programs: dict[str, Choose], sampling: Sampling, size: Size, rounds: int) -> dict[str, float]:
    """The least seconds of a step of each program; ends the benchmark if they choose differently."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(3 * rng.standard_normal((size.rows, size.vocab), np.float32))
    each = jax.tree.map(lambda leaf: np.repeat(leaf, size.rows), sampling)
    loops = {name: loop(choose, size) for name, choose in programs.items()}
    turns = {name: (lambda: (logits, each), lambda state, run=run: (state, run(*state))) for name, run in loops.items()}
    seconds, ends = take_turns(turns, size.clock, rounds)
    tokens, scores = zip(*(end[1][-1] for end in ends.values()), strict=True)
    common.require(all(map(functools.partial(np.array_equal, tokens[0]), tokens)), "programs chose different tokens")
    common.require(all(map(functools.partial(np.array_equal, scores[0]), scores)), "log-probabilities differ")
    return {name: took / size.steps for name, took in seconds.items()}


def measure(size: Size) -> dict[str, float]:
    """Milliseconds of a step, and what sampling by row takes to what a program for that one way takes."""
    greedy = {"plain": plain, "by_row": by_row}
    seconds = compare(greedy, Sampling(min_tokens=3), size, size.rounds)
    metrics = {f"greedy_{name}_ms": 1e3 * took for name, took in seconds.items()}
    metrics["greedy_ratio"] = seconds["by_row"] / seconds["plain"]
    for name, way in WAYS.items():
        seconds = compare({"static": static(way), "by_row": by_row}, Sampling(*way), size, size.slow_rounds)
        metrics |= {f"{name}_{which}_ms": 1e3 * took for which, took in seconds.items()}
        metrics[f"{name}_ratio"] = seconds["by_row"] / seconds["static"]
    return metrics


def main() -> None:
    def options(parser):
        parser.add_argument("--quick", action="store_true", help="a tiny vocabulary: whether it runs, not how fast")
        parser.add_argument("--cpu-time", action="store_true", help="of all cores together; for a busy machine")

    args = common.parse("sampling", __doc__, options)
    size = QUICK if args.quick else Size()
    size = size._replace(clock=time.process_time) if args.cpu_time else size
    print(f"sampling: {size.rows} rows choose among {size.vocab:,} tokens")
    metrics = measure(size)
    common.report("sampling", metrics, args.json, bars=BARS)
    common.require_bars({} if args.quick else metrics, BARS)


if __name__ == "__main__":
    main()
