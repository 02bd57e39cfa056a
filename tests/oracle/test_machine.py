# SPDX-License-Identifier: Apache-2.0
"""The library and the oracle run every verb together, and must agree after each step."""

import hypothesis
import pytest

from tests.oracle.machine import AdoptingMachine, CacheMachine

TestMachine = CacheMachine.TestCase
TestMachine.settings = hypothesis.settings(stateful_step_count=50)
TestAdoptions = pytest.mark.slow(AdoptingMachine.TestCase)
