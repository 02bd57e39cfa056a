# SPDX-License-Identifier: Apache-2.0
"""Verifies the rules that the library relies on in an eviction policy."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import jax
import numpy as np

from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState, EvictionPolicy
from kvjax.testing.random_requests import random_requests
from kvjax.testing.request import SMALL
from kvjax.testing.trial import Trial, assert_equal
from kvjax.verbs.init import init


def check_policy(
    policy: EvictionPolicy,
    *,
    seed: int = 0,
    steps: int = 300,
    spec: CacheSpec = SMALL,
    delivers: bool = True,
    pstate: Any = None,
) -> collections.Counter[str]:
    """Runs random requests on a small cache under a policy and verifies the cache after each; see `Trial`.

    After every step: `check(state)` holds; the events so far give the index; nothing that was held or pinned was
    evicted, and no block before its children; a refused verb changed nothing; every row would read its own K/V. At the
    end a policy that says `idle` must be idle.

    Args:
      policy: on trial.
      seed: of the requests.
      steps: how many requests.
      spec: of the cache; keep it small, so that blocks run short. With windows or a host tier `delivers` must be False.
      delivers: whether the policy claims to find every victim: then a prompt that fits by the count of empty and
        cached blocks must be admitted.
      pstate: the policy's own state to begin with, None for what its `init` makes.

    Returns:
      How often each verb was done, each status came and each kind of event; `["removed"]` tells whether the policy
      had anything to choose.

    Raises:
      AssertionError: naming the step and its request.
    """
    trial = Trial(init(spec, policy, policy_state=pstate), delivers=delivers)
    for step, request in enumerate(itertools.islice(random_requests(seed, spec), steps)):
        try:
            trial.do(request)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"step {step} of seed {seed}, {request}: {error}") from error
    if policy.idle:
        _check_idle(policy, trial.state)
    return trial.tally


def _check_idle(policy: EvictionPolicy, state: CacheState) -> None:
    """Verifies that a policy returns its state unchanged for an empty request."""
    group, nobody, zero = state.groups[0], np.full(3, NO_BLOCK, np.int32), np.int32(0)
    calls = {
        "touch": lambda pstate, blocks: policy.touch(pstate, blocks, nobody, zero),
        "victims": lambda pstate, blocks: policy.victims(pstate, blocks, lambda ids: ids >= 0, zero, zero, 3)[1],
        "forget": lambda pstate, blocks: pstate if policy.forget is None else policy.forget(pstate, nobody),
    }
    for name, call in calls.items():
        after = jax.jit(call)(group.policy, group.blocks)
        assert_equal(jax.device_get(group.policy), jax.device_get(after), f"{name}: an idle policy, an empty request")
