# SPDX-License-Identifier: Apache-2.0
"""Trials of eviction policies."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import pick
from kvjax.debug.text import seqs
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState, EvictionPolicy
from kvjax.testing.requests import SMALL, random_requests
from kvjax.testing.trial import Trial, assert_equal
from kvjax.verbs.init import init

_NUM_NAMED = 8  # victims of a probe at most


def check_policy(
    policy: EvictionPolicy,
    *,
    seed: int = 0,
    steps: int = 300,
    spec: CacheSpec = SMALL,
    must_admit: bool = True,
    policy_state: Any = None,
) -> collections.Counter[str]:
    """Runs random requests on a small cache with a policy, and verifies the cache after each. See `Trial`.

    After every step: `check(state)` holds. The events so far give the index. No held or pinned block was evicted, and
    no block before its children. A refused verb changed nothing. Every row would read its own K/V. The policy is also
    asked for victims of the cache: it must name evictable blocks, children first. The error names the first other
    block, and its holder. At the end a policy with `idle` must be idle, and padding among the ids of `touch` and
    `forget` must change nothing: neither NO_BLOCK nor, without `idle`, the number of ids, which a cache then passes.

    Args:
      policy: the policy on trial.
      seed: the seed of the requests.
      steps: number of requests.
      spec: the spec of the cache. Keep it small, so blocks run short. With windows or a host tier, set
        `must_admit=False`.
      must_admit: whether the policy finds every victim: prompts must be admitted if empty and cached blocks suffice.
      policy_state: the policy's initial state; defaults to the state made by its `init`.

    Returns:
      Counts of successful requests by verb, of statuses, and of events. `["removed"]` counts the policy's choices.

    Raises:
      AssertionError: for a violated rule, with the step and its request.
    """
    trial = Trial(init(spec, policy, policy_state=policy_state), must_admit=must_admit)
    for step, request in enumerate(itertools.islice(random_requests(seed, spec), steps)):
        try:
            trial.do(request)
            check_victims(trial.state, step % _NUM_NAMED + 1)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"step {step} of seed {seed}, {request}: {error}") from error
    if policy.idle:
        _check_idle(policy, trial.state)
    _check_padding(policy, trial.state)
    return trial.tally


@jax.jit
def _victims(state: CacheState, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Asks the policy for at most `wanted` i32[] victims. Returns i32[K], their number, and bool[B], who may leave."""
    group = state.groups[0]
    blocks = group.blocks

    def eligible(ids: jax.Array) -> jax.Array:
        return group.evictable(ids) & (pick(blocks.refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)

    may_leave = eligible(group.ids)
    wanted = jnp.minimum(wanted, jnp.sum(may_leave, dtype=jnp.int32))
    ids, _ = state.policy.chosen(group.policy, blocks, eligible, wanted, jnp.int32(0), _NUM_NAMED)
    return ids, wanted, may_leave


def check_victims(state: CacheState, wanted: int) -> None:
    """Verifies the victims named by the policy now: evictable blocks, children first, each once."""
    ids, num_wanted, may_leave = jax.device_get(_victims(state, np.int32(wanted)))
    blocks = jax.device_get(state.groups[0].blocks)
    named: list[int] = []
    for block in ids[:num_wanted].tolist():
        if block == NO_BLOCK:
            continue
        if not 0 <= block < len(may_leave) or not may_leave[block]:
            raise AssertionError(f"victims of {state.policy} named block {block}, {_reason(state, block)}")
        assert block not in named, f"victims of {state.policy} named block {block} twice"
        above = (blocks.parent == [block, blocks.generation[block].astype(np.int32)]).all(axis=1) & (blocks.fill > 0)
        children = [child for child in np.flatnonzero(above).tolist() if child not in named]
        assert not children, f"victims of {state.policy} named block {block} before its child {(children or [0])[0]}"
        named.append(block)


def _reason(state: CacheState, block: int) -> str:
    """The reason why a block may not leave: its holder, if it has any."""
    group = jax.device_get(state.groups[0])
    if not 0 <= block < len(group.blocks.refcount):
        return f"which does not exist: ids are 0..{len(group.blocks.refcount) - 1}"
    holders = np.flatnonzero((group.table == block).any(axis=1)).tolist()
    if holders:
        return f"which {seqs(holders)} hold{'s' if len(holders) == 1 else ''}"
    if group.blocks.refcount[block] > 0:
        return "which a pin holds"
    if group.blocks.fill[block] == 0:
        return "which is empty"
    return "which is on the host or moving, or has a child there"


def _check_padding(policy: EvictionPolicy, state: CacheState) -> None:
    """Verifies padding among the ids, which must change nothing.

    A cache passes only one of the kinds. The other keeps a policy right if it becomes `idle`, or another calls it.
    """
    group = state.groups[0]
    num_ids = len(group.blocks.fill)
    zero = np.int32(0)
    cached = np.flatnonzero((np.asarray(group.blocks.fill) > 0) & (np.asarray(group.blocks.refcount) == 0))[:3]
    ids = cached.astype(np.int32) if len(cached) else np.zeros(1, np.int32)
    calls = {"touch": lambda ids: policy.touch(group.policy, group.blocks, ids, zero)}
    if policy.forget is not None:
        calls["forget"] = functools.partial(policy.forget, group.policy)
    kinds = {"NO_BLOCK is padding among the ids (take jnp.where(ids >= 0, ids, num_ids))": NO_BLOCK}
    if not policy.idle:
        kinds["the number of ids is padding among the ids"] = num_ids
    for name, call in calls.items():
        without = jax.device_get(jax.jit(call)(ids))
        for kind, value in kinds.items():
            for padded in _with_padding(ids, value):
                changed = jax.device_get(jax.jit(call)(padded))
                assert_equal(without, changed, f"{name}: {kind}")


def _with_padding(ids: np.ndarray, padding: int) -> list[np.ndarray]:
    """The ids with padding after each, and with much padding around them."""
    after_each = np.stack([ids, np.full_like(ids, padding)], axis=1).reshape(-1)
    around = np.pad(ids, len(ids) + 2, constant_values=padding)
    return [np.append(after_each, np.int32(padding)), around]


def _check_idle(policy: EvictionPolicy, state: CacheState) -> None:
    """Verifies a policy with an empty request, which must leave its state unchanged."""
    group = state.groups[0]
    no_ids = np.full(3, NO_BLOCK, np.int32)
    zero = np.int32(0)
    calls: dict[str, Callable[..., Any]] = {
        "touch": lambda before, blocks: policy.touch(before, blocks, no_ids, zero),
        "victims": lambda before, blocks: policy.victims(before, blocks, lambda ids: ids >= 0, zero, zero, 3)[1],
        "forget": lambda before, blocks: before if policy.forget is None else policy.forget(before, no_ids),
    }
    for name, call in calls.items():
        after = jax.jit(call)(group.policy, group.blocks)
        assert_equal(jax.device_get(group.policy), jax.device_get(after), f"{name}: an idle policy, an empty request")
