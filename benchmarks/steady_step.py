# SPDX-License-Identifier: Apache-2.0
"""A steady step of the scheduler against its `extend` and `commit` alone.

256 rows decode in a cache of 65,536 blocks that is full, so that every new block is an evicted one. Nobody waits, and
no row is close to its `max_tokens`. The model is none: it chooses token 0, and neither writes K/V nor reads them. The
scheduler's events go into a log; the verbs alone have none. Each is a loop in one program, which is given a copy of the
same state each time, and both must leave the same rows with the same blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvjax
from benchmarks import common
from benchmarks.caches import NoModel, copy_of, full_state
from benchmarks.common import Size
from kvjax import Cache, CacheState
from kvjax.events import init_log
from kvjax.serving import Scheduler, Serving, init_serving, serve, submit, worst_step

BLOCK, PROMPT, LENGTH = 16, 48, 2048
SIZES = {"steady_rows": (256, 4), "steady_blocks": (65_536, 512), "steps": (64, 16), "calls": (40, 1)}


def scheduler(k: int) -> Scheduler:
    """The options; a row's whole prompt is one chunk."""
    return Scheduler(k=k, chunk=PROMPT + BLOCK)


@functools.cache
def steps_of(k: int, size: Size) -> Callable[..., Any]:
    """(serving, steps) -> (serving, log); the scheduler's steps."""

    def run(serving: Serving, steps: jax.Array) -> Any:
        spec = serving.cache.state.spec
        usual = size.steps * size.steady_rows // 4  # a block that is entered evicts one, and is stored when full
        log = init_log(usual + 2 * worst_step(spec, scheduler(k)) + 4 * spec.max_blocks_per_seq, BLOCK)
        return serve(NoModel(), serving, log, scheduler=scheduler(k), steps=steps)

    return jax.jit(run, donate_argnums=0, compiler_options=kvjax.serving.compiler_options())


@functools.partial(jax.jit, static_argnames=("k", "size"), donate_argnums=0)
def verbs_of(state: CacheState, k: int, size: Size) -> CacheState:
    """As many steps, in blocks of k: `extend` for the tokens, and their commit."""
    every, tokens = jnp.ones(size.steady_rows, jnp.bool_), jnp.zeros((size.steady_rows, k), jnp.int32)
    counts = jnp.full(size.steady_rows, k, jnp.int32)

    def block(_, state: CacheState) -> CacheState:
        state, _ = kvjax.extend(state, every, counts, max_tokens=k)
        return kvjax.commit(state, tokens, counts)[0]

    return lax.fori_loop(0, size.steps // k, block, state)


def decoding(size: Size) -> Serving:
    """Requests that all decode, in a row each, in a cache without K/V."""
    spec = kvjax.make_spec(
        num_blocks=size.steady_blocks, max_seqs=size.steady_rows, max_length=LENGTH, block_size=BLOCK
    )
    state = full_state(spec, lambda number: (1 + number) * LENGTH + jnp.arange(LENGTH, dtype=jnp.int32))
    lengths = PROMPT + np.arange(size.steady_rows, dtype=np.int32) % BLOCK  # they do not all fill a block at once
    line = np.random.default_rng(0).integers(1 << 24, 1 << 25, int(lengths.sum()), np.int32)
    serving = init_serving(Cache(state, kvjax.init_pools(spec)), [LENGTH] * size.steady_rows, greedy=True)
    submitted = jax.jit(functools.partial(submit, scheduler=scheduler(1)), donate_argnums=0)
    serving, status, *_ = submitted(serving, line, lengths, LENGTH - lengths)
    common.require(not np.any(status), "a prompt was refused")
    while not np.all(serving.requests.num_tokens > serving.requests.prompt):
        serving, _ = steps_of(1, size)(serving, np.int32(size.steps))
    common.require(bool(np.all(serving.requests.ended < 0)), "a request is over before all have begun")
    return serving


def check(after: Serving, log: Any, state: CacheState, before: Serving, size: Size) -> None:
    """Requires that the steps were steady, and left what the verbs left."""
    common.require(int(after.steps - before.steps) == size.steps, "the scheduler has run other steps")
    ours, theirs = after.cache.state, state
    same = [(ours.seqs.committed, theirs.seqs.committed), (ours.groups[0].table, theirs.groups[0].table)]
    common.require(all(np.array_equal(a, b) for a, b in same), "the scheduler has other blocks than the verbs")
    blocks = size.steady_rows * size.steps // BLOCK
    counts = {name: int(kvjax.events.counts(log)[name]) for name in ("removed", "stored")}
    common.require(counts == {"removed": blocks, "stored": blocks}, f"{counts} in the log, wanted {blocks} of each")


def measure(size: Size) -> dict[str, float]:
    """The figures by CPU time, and the same by the clock with what they are made of."""
    start, programs = decoding(size), {}
    for k in (1, BLOCK):
        run = steps_of(k, size)
        programs[f"steps_{k}"] = copy_of(start), lambda serving, run=run: run(serving, np.int32(size.steps))
        programs[f"verbs_{k}"] = copy_of(start.cache.state), functools.partial(verbs_of, k=k, size=size)
    took, ends = common.in_turns(programs, size.calls)
    for k in (1, BLOCK):
        check(*ends[f"steps_{k}"], ends[f"verbs_{k}"], start, size)
    names = {1: "step_over_verbs", BLOCK: "block_over_verbs"}
    return {
        **{name: took[f"steps_{k}"].cpu / took[f"verbs_{k}"].cpu for k, name in names.items()},
        **{f"{name}_wall": took[f"steps_{k}"].wall / took[f"verbs_{k}"].wall for k, name in names.items()},
        **common.times(took, "us", "cpu", size.steps),
        "step_us": 1e6 * took["steps_1"].cpu / size.steps,
    }
