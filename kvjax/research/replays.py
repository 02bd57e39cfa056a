# SPDX-License-Identifier: Apache-2.0
"""A trace through the cache's own verbs, in caches of several sizes at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from kvjax.policies.scores import cost_aware
from kvjax.research._together import rows_and_ends, serve_together
from kvjax.research.overlap import overlapping
from kvjax.research.rules import Hits, Rule, check_rule
from kvjax.research.traces import Trace
from kvjax.spec import CacheSpec, make_spec
from kvjax.state import CacheState, EvictionPolicy
from kvjax.verbs._request import checked_policy
from kvjax.verbs.admit import admit
from kvjax.verbs.commit import commit
from kvjax.verbs.init import init
from kvjax.verbs.release import release


def replay(
    trace: Trace,
    policy: EvictionPolicy | None,
    sizes: Sequence[int] | np.ndarray,
    *,
    rule: Rule = "full",
    overlap: tuple[float, float] | None = None,
    policy_state: Any = None,
) -> Hits:
    """Serves the requests one after the other: each is admitted, its blocks committed, and released.

    With `overlap` they run at the same time, as `overlapping` says, each in a row of its own. Then a request holds the
    blocks of its answer, too; it is refused where they, or those of its prompt, do not fit beside the others'.

    Any policy does, one of `by_score` in one line too, but for those that need a spec with `retention`. All caches run
    in one program, compiled for each policy, number of sizes, largest size, longest prompt, and number of requests and
    blocks. A request costs about the same in small and large caches, and more the longer the longest prompt is.

    A block is one token to these caches, so positions count blocks: the balance of `cost_aware` is divided by the
    trace's block size (`in_blocks`).

    Args:
      trace: the requests; the time in ms since the first one is the policy's `now`.
      policy: the eviction policy, `lru()` if None.
      sizes: i32[Z]; blocks of each cache.
      overlap: (tokens/s, ms a token): how fast prompts are computed and answers made; None: in no time.
      rule: "full" or "kvjax". A cache never takes the last block of a prompt from the cache, so "papers" is none.
      policy_state: the policy's own state to begin with (weights, parameters), as for `init`, but with a leading axis
        Z; None: what the policy's `init` makes.

    Returns:
      Hits of every request. One that is longer than a cache is refused there and finds none.

    Raises:
      ValueError: for rule "papers"; for no sizes, or one below 1; for a policy or a state that `init` refuses.
    """
    check_rule(rule)
    if rule == "papers":
        raise ValueError('rule: got "papers", wanted "kvjax" or "full" (admit never takes the last block of a prompt)')
    blocks = numbers_of_blocks(sizes)
    policy = in_blocks(checked_policy(policy), trace.block_size)
    asks = asks_of(trace, rule)
    if overlap is None:
        spec, ids = _caches(blocks, trace, trace.lengths, 1)
        found = _serve(spec, policy, blocks, policy_state, asks, ids)
        return Hits(trace, rule, blocks, np.asarray(found).T)
    plan = overlapping(trace, *overlap)
    spec, ids = _caches(blocks, trace, plan.blocks, int(plan.running.max(initial=1)))
    more, ends = rows_and_ends(trace, plan)
    answer = int(more["answer"].max(initial=0))
    found = np.asarray(serve_together(spec, policy, answer, blocks, policy_state, asks | more, ends, ids)).T
    return Hits(trace, rule, blocks, np.maximum(found, 0), np.sum(found < 0, axis=1, dtype=np.int32))


def _caches(sizes: np.ndarray, trace: Trace, held: np.ndarray, rows: int) -> tuple[CacheSpec, np.ndarray]:
    """The caches' description, whose rows hold i32[R] blocks; and the ids, padded so that no slice is cut off."""
    width = int(held.max(initial=1))
    spec = make_spec(num_blocks=int(sizes.max()), max_seqs=rows, max_length=width, block_size=1, partial_reuse=False)
    return spec, np.concatenate([trace.ids, np.zeros(width, np.int32)])


def numbers_of_blocks(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """i32[Z]; sizes of caches, any but 0.

    Raises:
      ValueError: for no sizes, or one below 1.
    """
    blocks = np.asarray(sizes)
    if blocks.ndim != 1 or not np.issubdtype(blocks.dtype, np.integer) or not blocks.size or blocks.min() < 1:
        raise ValueError(f"sizes: got {sizes}, wanted at least one number of blocks, each at least 1")
    return blocks.astype(np.int32)


def in_blocks(policy: EvictionPolicy, block_size: int) -> EvictionPolicy:
    """The same policy for a cache that takes a block for one token: `cost_aware` counts positions in its balance."""
    balance = dict(policy.parameters).get("balance", 0)
    return cost_aware(balance / block_size) if policy == cost_aware(balance) else policy


def asks_of(trace: Trace, rule: Rule) -> dict[str, np.ndarray]:
    """i32[R] each: where a prompt begins in `ids`, its blocks, how many of them are cached, and ms."""
    since = trace.time - trace.time[:1]
    return {
        "start": trace.starts[:-1],
        "length": trace.lengths,
        "kept": trace.full if rule == "full" else trace.lengths,
        "now": since.astype(np.int64).astype(np.int32),  # times are compared by difference, and may wrap
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _serve(
    spec: CacheSpec, policy: EvictionPolicy, sizes: jax.Array, states: Any, asks: dict[str, jax.Array], ids: jax.Array
) -> jax.Array:
    """i32[R, Z]; blocks that each request found in a cache of each size."""
    width = spec.max_blocks_per_seq

    def one(cache: CacheState, ask: dict[str, jax.Array]) -> tuple[CacheState, jax.Array]:
        start, now = ask["start"], ask["now"]
        cache, admitted = admit(cache, 0, lax.dynamic_slice_in_dim(ids, start, width), ask["length"], now=now)
        found = admitted.cached[0]
        # A block that is not committed, filled in part, becomes empty when the row is released. Where the request was
        # refused the row is free, so that both verbs are refused too.
        tokens = lax.dynamic_slice_in_dim(ids, start + found, width)[None]
        cache, _ = commit(cache, tokens, (ask["kept"] - found)[None], now=now)
        cache, _ = release(cache, 0, now=now)
        return cache, found

    caches = jax.vmap(lambda size, state: init(spec, policy, size, policy_state=state))(sizes, states)
    return lax.scan(lambda caches, ask: jax.vmap(one, in_axes=(0, None))(caches, ask), caches, asks)[1]
