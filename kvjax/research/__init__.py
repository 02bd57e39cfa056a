# SPDX-License-Identifier: Apache-2.0
"""Which policy, and how much memory, does a workload need? Answers from a trace. Nothing imports this package."""

from kvjax.research.rules import Hits, Rule
from kvjax.research.traces import Trace, make_trace

__all__ = ["Hits", "Rule", "Trace", "make_trace"]
