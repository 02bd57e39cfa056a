# SPDX-License-Identifier: Apache-2.0
"""The library and the oracle run every verb together, and must agree after each step."""

from tests.oracle.machine import CacheMachine

TestMachine = CacheMachine.TestCase
