# SPDX-License-Identifier: Apache-2.0
"""A steady step of the scheduler against its `extend` and `commit` alone.

256 rows decode in a cache of 65,536 blocks that is full, so that every new block is an evicted one. Nobody waits, and
no row is near its goal. The model is none: it chooses token 0, and neither writes nor reads K/V. The scheduler's events
go into a log; the verbs alone have none. Both run in a loop of one program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvjax
from benchmarks import bookkeeping, common
from kvjax import Cache, CacheState
from kvjax._arrays import Pytree
from kvjax.events import init_log
from kvjax.serving import Scheduler, Serving, init_serving, serve, submit, worst_step

BLOCK, PROMPT, MOST = 16, 48, 16
SLACK = 4096  # events that the log has room for, beside those of the steps: the loop wants to admit a prompt as well


class NoModel(Pytree):
    """Chooses token 0, and leaves the pools as they are."""

    def __call__(self, tokens, pools, view, *, last):
        del view
        last = tokens if last is None else last
        return jnp.zeros((*last.shape, 1), jnp.float32), pools


class Size(NamedTuple):
    """Rows, blocks, steps of a call, and calls."""

    rows: int = 256
    num_blocks: int = 65_536
    steps: int = 64
    calls: int = 30


QUICK = Size(rows=4, num_blocks=256, steps=16, calls=1)


def options(k: int) -> Scheduler:
    return Scheduler(k=k, k_waiting=k, chunk_rows=8, chunk=PROMPT + BLOCK)


def full_cache(size: Size) -> Cache:
    """A cache without K/V whose rows are free, and whose blocks are all findable."""
    spec = kvjax.make_spec(
        num_blocks=size.num_blocks, max_seqs=size.rows, max_length=bookkeeping.LENGTH, block_size=BLOCK
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(state):
        def one(state, number):
            tokens = number * bookkeeping.LENGTH + jnp.arange(bookkeeping.LENGTH, dtype=jnp.int32) + 1
            state, _ = kvjax.admit(state, 0, tokens, bookkeeping.LENGTH)
            state, _ = kvjax.commit(state, tokens[None], jnp.full((1,), bookkeeping.LENGTH), seqs=jnp.zeros(1, jnp.int32))
            state, _ = kvjax.release(state, 0)
            return state, None

        return lax.scan(one, state, jnp.arange(size.num_blocks * BLOCK // bookkeeping.LENGTH, dtype=jnp.int32))[0]

    cache = Cache.create(spec)
    cache = cache.replace(state=fill(cache.state))
    common.require(int(cache.state.groups[0].num_empty) == 0, "a block is empty")
    return cache


def decoding(size: Size) -> Serving:
    """Requests that all decode, with 1,800 tokens to go."""
    scheduler = options(1)
    lengths = PROMPT + np.arange(size.rows, dtype=np.int32) % BLOCK  # so that not all rows fill a block at once
    goals = np.full(size.rows, bookkeeping.LENGTH - PROMPT - BLOCK, np.int32)
    serving = init_serving(full_cache(size), [bookkeeping.LENGTH] * size.rows, greedy=True)
    line = -np.ones(0) if not size.rows else np.random.default_rng(0).integers(1 << 24, 1 << 25, lengths.sum())
    serving, status, *_ = jax.jit(functools.partial(submit, scheduler=scheduler))(
        serving, line.astype(np.int32), lengths, goals
    )
    common.require(not np.any(status), "a prompt was refused")
    for _ in range(8 * size.rows):
        if np.all(serving.requests.known > serving.requests.prompt):
            return serving
        serving, _ = program(1)(serving, make_log(serving, size), np.int32(1))
    raise SystemExit("benchmark failed: the prompts are not computed")
