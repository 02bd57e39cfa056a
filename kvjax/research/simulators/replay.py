# SPDX-License-Identifier: Apache-2.0
"""Runs a trace through the cache's own verbs, in caches of several sizes at once.

Requests follow one another, or run at the same time, each in its own row.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.events.records import Status
from kvjax.policies.scores import cost_aware
from kvjax.research.simulators.hits import Hits, Rule, check_rule, check_sizes, num_cached
from kvjax.research.traces.trace import Trace
from kvjax.spec import CacheSpec, make_spec
from kvjax.state import CacheState, EvictionPolicy
from kvjax.verbs._request import checked_policy
from kvjax.verbs.admit import admit
from kvjax.verbs.commit import commit
from kvjax.verbs.extend import extend
from kvjax.verbs.init import init
from kvjax.verbs.release import release


@dataclasses.dataclass(frozen=True, eq=False)
class Overlap:
    """Admits and releases in the order of time. The times are fixed in advance, so a hit does not shorten a request.

    Attributes:
      time: f64[2R] ms; the time of each step.
      request: i32[2R]; the request of each step.
      admit: bool[2R]; whether the request begins. Otherwise it ends, and releases its blocks.
      blocks: i32[R]; blocks held by each request for its prompt and its answer.
      held: i32[2R]; blocks held after each step. A block held by several requests counts once.
      running: i32[2R]; running requests after each step.
    """

    time: np.ndarray
    request: np.ndarray
    admit: np.ndarray
    blocks: np.ndarray
    held: np.ndarray
    running: np.ndarray

    @property
    def max_held(self) -> int:
        """The maximum number of blocks held at the same time, which a cache needs to serve the trace at this speed."""
        return int(self.held.max(initial=0))


def overlapping(trace: Trace, tokens_per_s: float = 10_000, ms_a_token: float = 50) -> Overlap:
    """The beginnings and ends of requests, if no request has to wait.

    A request begins when it comes. It ends when its prompt has been computed, at `tokens_per_s`, and its answer
    generated, at `ms_a_token`. From beginning to end it holds the blocks of both. At equal times, releases come first.

    Args:
      trace: a trace of R requests.
      tokens_per_s: tokens of a prompt computed per second.
      ms_a_token: time per token of an answer.

    Raises:
      ValueError: for a speed out of range.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 100], [8, 8], [4, 4], [[1, 2], [1, 3]], block_size=4)
      >>> steps = research.overlapping(trace, tokens_per_s=1000, ms_a_token=50)  # 208 ms each
      >>> steps.admit.tolist(), steps.held.tolist(), steps.max_held
      ([True, True, False, False], [3, 5, 3, 0], 5)
    """
    if not (math.isfinite(tokens_per_s) and tokens_per_s > 0):
        raise ValueError(f"tokens_per_s: got {tokens_per_s}, wanted a finite number above 0")
    if not (math.isfinite(ms_a_token) and ms_a_token >= 0):
        raise ValueError(f"ms_a_token: got {ms_a_token}, wanted a finite number of at least 0")
    num_requests = len(trace)
    takes = trace.input_length / tokens_per_s * 1000 + trace.output_length * float(ms_a_token)
    time = np.concatenate([trace.time, trace.time + takes])
    admit = np.arange(2 * num_requests) < num_requests
    order = np.lexsort((np.arange(2 * num_requests), admit, time))
    request = np.tile(np.arange(num_requests, dtype=np.int32), 2)[order]
    admit = admit[order]
    total = trace.input_length.astype(np.int64) + trace.output_length
    blocks = -(-total // trace.block_size)
    change = np.where(admit, 1, -1)
    answers = np.cumsum(change * (blocks - trace.lengths)[request])
    return Overlap(
        time[order],
        request,
        admit,
        blocks.astype(np.int32),
        (answers + _prompts_held(trace, order)).astype(np.int32),
        np.cumsum(change).astype(np.int32),
    )


def _prompts_held(trace: Trace, order: np.ndarray) -> np.ndarray:
    """i64[2R]; prompts' blocks held after each step. `order` sorts the R admits and the R releases."""
    num_requests = len(trace)
    owner = trace.owners
    step_of = np.empty(2 * num_requests, np.int64)
    step_of[order] = np.arange(2 * num_requests)
    step = np.concatenate([step_of[owner], step_of[owner + num_requests]])
    ids = np.tile(trace.ids, 2)
    change = np.repeat(np.array([1, -1]), len(owner))
    along = np.lexsort((step, ids))
    # The changes of each id sum to 0, so a single running sum counts the holders of every id.
    holders = np.cumsum(change[along])
    begins = (holders == 1) & (change[along] == 1)
    ends = holders == 0
    held = np.zeros(2 * num_requests, np.int64)
    np.add.at(held, step[along], begins.astype(np.int64) - ends)
    return np.cumsum(held)


def replay(
    trace: Trace,
    policy: EvictionPolicy | None,
    sizes: Sequence[int] | np.ndarray,
    *,
    rule: Rule = "full",
    overlap: tuple[float, float] | None = None,
    policy_state: Any = None,
) -> Hits:
    """Serves the requests in order: admits each, commits its blocks, and releases it.

    With `overlap` requests run at the same time, as in `overlapping`, each in its own row. A request then also holds
    the blocks of its answer, and is refused if the blocks of its prompt and answer do not fit.

    Accepts any policy that works without `retention`. All caches run in a single program, compiled for each policy,
    number of sizes, largest size, longest prompt, and number of requests and blocks. A request costs about the same in
    small and large caches, and its cost grows with the longest prompt.

    For these caches a block is a token, so positions count blocks, and the balance of `cost_aware` is divided by the
    trace's block size (`in_blocks`).

    Args:
      trace: the requests. The time in ms since the first request is the policy's `now`.
      policy: the eviction policy; defaults to `lru()`.
      sizes: i32[Z]; blocks of each cache.
      overlap: (prompt tokens/s, ms per token of an answer), the speed of requests; None disables overlap.
      rule: "full" or "kvjax". The verbs never take the last block of a prompt from the cache, so "papers" is invalid.
      policy_state: the policy's initial state (weights, parameters), as for `init`, but with a leading axis Z; defaults
        to the state made by the policy's `init`.

    Returns:
      Hits of every request. A request longer than a cache is refused there and finds nothing.

    Raises:
      ValueError: for the rule "papers", no sizes, a size below 1, a policy or state that `init` refuses, and a policy
        that names ineligible blocks, or too few.
    """
    check_rule(rule)
    if rule == "papers":
        raise ValueError('rule: got "papers", wanted "kvjax" or "full" (admit never takes the last block of a prompt)')
    blocks = check_sizes(sizes)
    policy = in_blocks(checked_policy(policy), trace.block_size)
    requests = request_arrays(trace, rule)
    if overlap is None:
        spec, ids = _caches(blocks, trace, trace.lengths, 1)
        num_found, sound = _serve(spec, policy, 0, blocks, policy_state, requests, None, ids)
        check_sound(policy, sound)
        return Hits(trace, rule, blocks, np.asarray(num_found).T)
    plan = overlapping(trace, *overlap)
    spec, ids = _caches(blocks, trace, plan.blocks, int(plan.running.max(initial=1)))
    begins, ends = _rows_and_ends(trace, plan)
    longest_answer = int(begins["answer"].max(initial=0))
    num_found, sound = _serve(spec, policy, longest_answer, blocks, policy_state, requests | begins, ends, ids)
    check_sound(policy, sound)
    num_found = np.asarray(num_found).T
    return Hits(trace, rule, blocks, np.maximum(num_found, 0), np.sum(num_found < 0, axis=1, dtype=np.int32))


def in_blocks(policy: EvictionPolicy, block_size: int) -> EvictionPolicy:
    """The same policy for a cache in which a block is a token. It divides the balance of `cost_aware`, a position.

    Example:
      >>> from kvjax import policies, research
      >>> research.in_blocks(policies.cost_aware(balance=4096.0), block_size=16)
      cost_aware(balance=256.0)
    """
    balance = dict(policy.parameters).get("balance", 0)
    return cost_aware(balance / block_size) if policy == cost_aware(balance) else policy


def check_sound(policy: EvictionPolicy, sound: Any) -> None:
    """Raises a ValueError unless all of sound bool[...] hold: the policy named only blocks that may leave."""
    if not np.all(sound):
        raise ValueError(
            f"policy: got {policy}, which named ineligible blocks, or too few; wanted a policy that passes "
            "kvjax.testing.check_policy"
        )


def request_arrays(trace: Trace, rule: Rule) -> dict[str, np.ndarray]:
    """i32[R] each: the start of a prompt in `ids`, its blocks, the number of blocks cached at its end, and ms."""
    since = trace.time - trace.time[:1]
    return {
        "start": trace.starts[:-1],
        "length": trace.lengths,
        "cached": num_cached(trace, rule),
        "now": since.astype(np.int64).astype(np.int32),  # times are compared by difference, and may wrap
    }


def _caches(sizes: np.ndarray, trace: Trace, held: np.ndarray, rows: int) -> tuple[CacheSpec, np.ndarray]:
    """The spec of caches with rows of held i32[R] blocks, and the ids, padded so no slice is cut off."""
    width = int(held.max(initial=1))
    spec = make_spec(num_blocks=int(sizes.max()), max_seqs=rows, max_length=width, block_size=1, partial_reuse=False)
    return spec, np.concatenate([trace.ids, np.zeros(width, np.int32)])


def _rows_and_ends(trace: Trace, overlap: Overlap) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Further arrays of overlapping requests besides `request_arrays`, and arrays of their ends, i32[R] each.

    A request has its row (the lowest free row), the blocks of its answer, and the ends from..to-1 since the previous
    request. An end has its row, and ms since the first request.
    """
    rows = np.zeros(len(trace), np.int32)
    free = list(range(int(overlap.running.max(initial=1))))
    for request, begins in zip(overlap.request.tolist(), overlap.admit.tolist(), strict=True):
        if begins:
            rows[request] = heapq.heappop(free)
        else:
            heapq.heappush(free, int(rows[request]))
    ended = ~overlap.admit
    to = np.cumsum(ended, dtype=np.int32)[overlap.admit]
    begins = {"row": rows, "answer": overlap.blocks - trace.lengths, "from": to - np.diff(to, prepend=0), "to": to}
    since = (overlap.time[ended] - trace.time[:1]).astype(np.int64).astype(np.int32)
    return begins, {"row": rows[overlap.request[ended]], "now": since}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _serve(
    spec: CacheSpec,
    policy: EvictionPolicy,
    longest_answer: int,
    sizes: jax.Array,
    states: Any,
    requests: dict[str, jax.Array],
    ends: dict[str, jax.Array] | None,
    ids: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """i32[R, Z]; blocks found by each request in a cache of each size, or -1 if it was refused for lack of blocks.

    Also returns bool[R, Z], false where a request was refused though there were enough blocks.
    """
    serve = functools.partial(_serve_request, ids, ends, longest_answer)
    caches = jax.vmap(lambda size, state: init(spec, policy, size, policy_state=state))(sizes, states)
    step = lambda caches, request: jax.vmap(serve, in_axes=(0, None))(caches, request)  # noqa: E731
    return lax.scan(step, caches, requests)[1]


def _serve_request(
    ids: jax.Array,
    ends: dict[str, jax.Array] | None,
    longest_answer: int,
    cache: CacheState,
    request: dict[str, jax.Array],
) -> tuple[CacheState, tuple[jax.Array, jax.Array]]:
    """Releases the requests that end before this request begins, admits it, and reserves blocks for its answer.

    Without `ends` requests do not overlap, so this request is released too. Also returns the two results of `_serve`.
    """
    row = 0 if ends is None else request["row"]
    seqs = None if ends is None else request["row"][None]
    if ends is not None:
        rows = ends["row"]
        times = ends["now"]
        end = lambda index, cache: release(cache, rows[index], now=times[index])[0]  # noqa: E731
        cache = lax.fori_loop(request["from"], request["to"], end, cache)
    start = request["start"]
    now = request["now"]
    width = cache.spec.max_blocks_per_seq
    num_available = cache.groups[0].available
    cache, admitted = admit(cache, row, lax.dynamic_slice_in_dim(ids, start, width), request["length"], now=now)
    num_found = admitted.cached[0]
    ok = admitted.ok
    sound = (admitted.status[0] != Status.NO_BLOCKS) | (request["length"] > num_available)
    tokens = lax.dynamic_slice_in_dim(ids, start + num_found, width)[None]
    cache, _ = commit(cache, tokens, (request["cached"] - num_found)[None], seqs=seqs, now=now)
    if longest_answer:
        wanted = request["answer"][None]
        num_available = cache.groups[0].available
        cache, extended = extend(cache, wanted > 0, wanted, seqs=seqs, max_tokens=longest_answer, now=now)
        sound &= (extended.status[0] != Status.NO_BLOCKS) | (request["answer"] > num_available)
        ok &= extended.ok
        cache, _ = release(cache, jnp.where(ok, -1, row), now=now)  # without an answer the prompt's blocks are useless
    if ends is None:
        # A partly filled block is not committed, so it becomes empty when the row is released. After a refused request
        # the row is free, so commit and release are refused too.
        cache, _ = release(cache, row, now=now)
        return cache, (num_found, sound)
    return cache, (jnp.where(ok, num_found, -1), sound)
