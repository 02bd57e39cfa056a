# SPDX-License-Identifier: Apache-2.0
"""The library and the oracle run every verb together, and must agree after each step."""

import hypothesis
import pytest

from tests.oracle.machine import AdoptingMachine, CacheMachine

TestMachine = CacheMachine.TestCase
TestAdoptions = pytest.mark.slow(AdoptingMachine.TestCase)
TestMachine.settings = TestAdoptions.settings = hypothesis.settings(
    backend="anew", max_examples=max(hypothesis.settings.default.max_examples, 30), stateful_step_count=50
)
