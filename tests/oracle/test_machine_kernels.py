# SPDX-License-Identifier: Apache-2.0
"""The machine with `extend`, `commit` and `trim` in their form for a GPU. They must agree with the oracle.

They must also equal the form for a CPU in every bit.
"""

import numpy as np
import pytest
from hypothesis.stateful import initialize

from tests.oracle.machine import SIZE, CacheMachine, num_blocks
from tests.unit.gpu.histories import LOWERED, Both


class LoweredMachine(CacheMachine):
    """The same requests, no wider than necessary, run by both versions."""

    config = "plain"

    @initialize(blocks=num_blocks)
    def start(self, blocks):
        super().start(self.config, blocks)
        self.verbs = Both(seed=blocks)

    def both(self, verb, wanted, *args, **kwargs):
        if verb not in LOWERED or "seqs" in kwargs or not self.narrow(verb, args):
            return super().both(verb, wanted, *args, **kwargs)
        if verb == "commit":
            tokens, counts = args
            cut = {name: ids[:, :SIZE] for name, ids in kwargs.items() if name == "extra_ids" and ids is not None}
            args, kwargs = (np.ascontiguousarray(tokens[:, :SIZE]), counts), {**kwargs, **cut}
        elif len(args) > 1:
            kwargs = {**kwargs, "max_tokens": SIZE}
        before = self.state
        self.state, events = self.verbs[verb](before, *args, **self.timely(verb, kwargs))
        return self.compare(verb, wanted, before, events)

    def narrow(self, verb, args):
        return len(args) < 2 or bool(np.all(np.asarray(args[1]) <= SIZE))


class ExtraIdsMachine(LoweredMachine):
    """The machine with an extra id for each token."""

    config = "extra ids"


TestLowered = pytest.mark.slow(LoweredMachine.TestCase)
TestExtraIds = pytest.mark.slow(ExtraIdsMachine.TestCase)
