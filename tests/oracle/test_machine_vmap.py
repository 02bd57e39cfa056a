# SPDX-License-Identifier: Apache-2.0
"""Two caches of different sizes under one vmap, each against its own oracle. Their answers may differ."""

import os
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis.stateful import initialize, invariant, rule

from tests import drive
from tests.oracle.machine import CONFIGS, CacheMachine, joined, num_blocks

pytestmark = pytest.mark.slow  # tests/unit/verbs/test_vmap.py runs by day
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
NAMES = [name for name in CONFIGS if "host" not in name] if NIGHTLY else ["windows, retention", "recurrent"]
SHARED = (
    "admit", "admit_batch", "extend", "commit", "fork", "beam_step", "truncate", "trim", "release", "forget_namespaces",
    "reset",
)  # fmt: skip


def batched(name):
    """A verb under vmap, of states alone: both caches get the same request."""
    verb = drive.verb(name)

    def run(states, *args, **options):
        return jax.vmap(lambda state: verb(state, *args, **options))(states)

    return run


VERBS = drive.Verbs(batched)


class Recorder:
    """An oracle that records the calls of its verbs, until they are cleared."""

    def __init__(self, oracle):
        self.__dict__.update(oracle=oracle, calls=[])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.oracle, name)
        if name not in SHARED:
            return value

        def call(*args, **options):
            self.calls.append((name, args, options))
            return value(*args, **options)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.oracle, name, value)


class TwoCachesMachine(CacheMachine):
    """The requests are drawn for this machine's cache, and the second cache gets the same ones."""

    # These name blocks, which have other numbers in the second cache.
    pin = pin_cached = unpin = unpin_what_a_row_holds = evict = None

    @initialize(config=st.sampled_from(NAMES), blocks=num_blocks, others=num_blocks)
    def start(self, config, blocks, others):
        super().start(config, blocks)
        self.oracle, self.second = Recorder(self.oracle), CacheMachine()
        self.second.start(config, others)

    @rule(ms=st.sampled_from((1, 4, 5)))
    def wait(self, ms):
        self.oracle.now += ms

    def both(self, verb, wanted, *args, **kwargs):
        self.second.oracle.now, calls = self.oracle.now, self.oracle.calls[:]
        self.oracle.calls.clear()
        answers = [getattr(self.second.oracle, name)(*args, **options) for name, args, options in calls]
        answers = [each for answer in answers for each in (answer if isinstance(answer, list) else [answer])]
        before = self.state, self.second.state
        together = jax.tree.map(lambda *x: jnp.stack(x), *before)
        results = VERBS[verb](together, *args, **self.timely(verb, kwargs))
        for number, (machine, answer) in enumerate(((self, wanted), (self.second, joined(answers)))):
            machine.state, events = jax.tree.map(lambda x, number=number: x[number], results)
            machine.compare(verb, answer, before[number], events)

    @invariant()
    def agree(self):
        super().agree()
        if hasattr(self, "second"):
            self.second.agree()


TestTwoCaches = TwoCachesMachine.TestCase
