# SPDX-License-Identifier: Apache-2.0
"""The library and the oracle step together through every verb, and must agree after each step."""

from tests.oracle.machine import CacheMachine

TestMachine = CacheMachine.TestCase
