# SPDX-License-Identifier: Apache-2.0
"""Requests that run at the same time through the cache's own verbs, each in a row of its own while it runs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.research.overlap import Overlap
from kvjax.research.traces import Trace
from kvjax.spec import CacheSpec
from kvjax.state import CacheState, EvictionPolicy
from kvjax.verbs.admit import admit
from kvjax.verbs.commit import commit
from kvjax.verbs.extend import extend
from kvjax.verbs.init import init
from kvjax.verbs.release import release


def rows_of(overlap: Overlap) -> np.ndarray:
    """i32[R]; a row for each request, the lowest that is free when it begins."""
    rows, free = np.zeros(len(overlap.blocks), np.int32), list(range(int(overlap.running.max(initial=1))))[::-1]
    for request, begins in zip(overlap.request.tolist(), overlap.admit.tolist(), strict=True):
        if begins:
            rows[request] = free.pop(free.index(min(free)))
        else:
            free.append(int(rows[request]))
    return rows


def rows_and_ends(trace: Trace, overlap: Overlap) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The arguments of `serve_together` beside the prompts.

    Returns:
      Of each request, i32[R]: its row, the blocks of its answer, and the ends from..to-1 that come before it begins and
      after the request before it began. Of each end, i32[R]: the row, and ms since the first request.
    """
    rows, ended = rows_of(overlap), ~overlap.admit
    to = np.cumsum(ended, dtype=np.int32)[overlap.admit]
    begins = {"row": rows, "answer": overlap.blocks - trace.lengths, "from": to - np.diff(to, prepend=0), "to": to}
    since = (overlap.time[ended] - trace.time[:1]).astype(np.int64).astype(np.int32)
    return begins, {"row": rows[overlap.request[ended]], "now": since}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def serve_together(
    spec: CacheSpec,
    policy: EvictionPolicy,
    longest_answer: int,
    sizes: jax.Array,
    states: Any,
    asks: dict[str, jax.Array],
    ends: dict[str, jax.Array],
    ids: jax.Array,
) -> jax.Array:
    """i32[R, Z]; blocks that each request found, or -1 where it was refused."""
    width = spec.max_blocks_per_seq

    def one(cache: CacheState, ask: dict[str, jax.Array]) -> tuple[CacheState, jax.Array]:
        def end(number, cache):
            return release(cache, ends["row"][number], now=ends["now"][number])[0]

        cache = lax.fori_loop(ask["from"], ask["to"], end, cache)
        start, row, now = ask["start"], ask["row"], ask["now"]
        cache, admitted = admit(cache, row, lax.dynamic_slice_in_dim(ids, start, width), ask["length"], now=now)
        found, ok = admitted.cached[0], admitted.ok
        tokens = lax.dynamic_slice_in_dim(ids, start + found, width)[None]
        cache, _ = commit(cache, tokens, (ask["kept"] - found)[None], seqs=row[None], now=now)
        if longest_answer:
            wanted = ask["answer"][None]
            cache, grown = extend(cache, wanted > 0, wanted, seqs=row[None], max_tokens=longest_answer, now=now)
            ok &= grown.ok
            cache, _ = release(cache, jnp.where(ok, -1, row), now=now)  # without an answer the prompt is held in vain
        return cache, jnp.where(ok, found, -1)

    caches = jax.vmap(lambda size, state: init(spec, policy, size, policy_state=state))(sizes, states)
    return lax.scan(lambda caches, ask: jax.vmap(one, in_axes=(0, None))(caches, ask), caches, asks)[1]
