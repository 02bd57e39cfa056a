# SPDX-License-Identifier: Apache-2.0
"""The machine with `extend` and `commit` as kernels. They must agree with the oracle, and with plain jax in every bit.

A kernel serves calls for all rows with at most a block of tokens. Other calls of the machine do not change.
"""

import numpy as np
import pytest
from hypothesis.stateful import initialize

from tests.oracle.machine import SIZE, CacheMachine, num_blocks
from tests.unit.gpu.histories import FUSED, Both


class KernelsMachine(CacheMachine):
    """The same requests, no wider than necessary, run by both versions."""

    config = "plain"

    @initialize(blocks=num_blocks)
    def start(self, blocks):
        super().start(self.config, blocks)
        self.verbs = Both(seed=blocks)

    def both(self, verb, wanted, *args, **kwargs):
        if verb not in FUSED or "seqs" in kwargs or not self.narrow(verb, args):
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


class ExtraIdsMachine(KernelsMachine):
    """The machine with an extra id for each token."""

    config = "extra ids"


TestKernels = pytest.mark.slow(KernelsMachine.TestCase)
TestExtraIds = pytest.mark.slow(ExtraIdsMachine.TestCase)
