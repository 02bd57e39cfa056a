# SPDX-License-Identifier: Apache-2.0
"""Sampling by row, in a program for all rows: each row's temperature, top-k, top-p and `min_tokens` are arrays.

32 rows choose among 128,256 tokens, some steps in a jitted loop, as in decoding. A separate call would also get new
memory from the system, for outputs it does not use. A greedy batch is compared with the plain choice: argmax, and the
log-probability of the chosen token. Batches with sampling are compared with a program for their single way of sampling
(`tests/oracle/static_sampling.py`), without a bar. All programs have to choose the same tokens with the same
log-probabilities. They take turns, so a noisy machine is noisy for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import common
from benchmarks.common import Bar, Program, Size, benchmark
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


def plain(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The plain greedy choice."""
    del sampling, positions
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[:, None], axis=1)
    return tokens, scores[:, 0]


def by_row(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The choice by arrays, with stop tokens and log-probabilities as in decoding, after 4 generated tokens."""
    stop = jnp.array([1, 2, -1], jnp.int32)
    generated = jnp.full(positions.shape, 4, jnp.int32)
    chosen = sample(logits, sampling, positions.astype(jnp.uint32), positions, stop=stop, generated=generated)
    return chosen.tokens, chosen.logprobs


def static(options: Static) -> Choose:
    """A program for a single way of sampling."""
    return lambda logits, _, positions: static_sampling.sample(logits, options, positions.astype(jnp.uint32), positions)


def loop(choose: Choose, size: Size) -> Callable[[jax.Array, Sampling], Any]:
    """A jitted loop which makes `steps` choices from different logits. Returns tokens and scores [steps, R]."""

    @jax.jit
    def run(logits, sampling):
        def step(step_index, carry):
            logits, tokens, scores = carry
            positions = step_index + np.arange(size.rows, dtype=np.int32) * 7
            chosen = choose(logits, sampling, positions)
            return (
                logits.at[:, step_index].add(30.0),
                tokens.at[step_index].set(chosen[0]),
                scores.at[step_index].set(chosen[1]),
            )

        shape = (size.steps, size.rows)
        start = logits, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        return lax.fori_loop(0, size.steps, step, start)[1:]

    return run


def compare(programs: dict[str, Choose], sampling: Sampling, size: Size, rounds: int) -> dict[str, float]:
    """Minimum seconds of a step of each program. Ends the benchmark if their choices differ."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(3 * rng.standard_normal((size.rows, size.vocab), np.float32))
    per_row = jax.tree.map(lambda leaf: np.repeat(leaf, size.rows), sampling)
    loops: dict[str, Program] = {
        name: functools.partial(loop(choose, size), logits, per_row) for name, choose in programs.items()
    }
    took, _ = common.in_turns(loops, rounds, lambda result, expected: all(map(np.array_equal, result, expected)))
    return {name: seconds.least / size.steps for name, seconds in took.items()}


# R rows choose among V tokens, so many steps a call; greedy calls are timed more often than the slow ones.
SIZES = {"rows": (32, 4), "vocab": (128_256, 512), "steps": (8, 2), "slow_rounds": (3, 1)}


@benchmark(BARS, SIZES, rounds=(40, 1), strict=True)
def measure(size):
    """Milliseconds of a step, and ratios of sampling by row to a program for a single way of sampling."""
    seconds = compare({"plain": plain, "by_row": by_row}, Sampling(min_tokens=3), size, size.rounds)
    yield {f"greedy_{name}_ms": 1e3 * took for name, took in seconds.items()}
    yield {"greedy_ratio": seconds["by_row"] / seconds["plain"]}
    for name, options in WAYS.items():
        programs = {"static": static(options), "by_row": by_row}
        seconds = compare(programs, Sampling(*options), size, size.slow_rounds)
        yield {f"{name}_{which}_ms": 1e3 * took for which, took in seconds.items()}
        yield {f"{name}_ratio": seconds["by_row"] / seconds["static"]}
