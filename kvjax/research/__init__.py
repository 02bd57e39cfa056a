# SPDX-License-Identifier: Apache-2.0
"""Which policy, and how much memory, does a workload need? Answers from a trace. Nothing imports this package."""

from kvjax.research.bound import belady
from kvjax.research.curves import lru_curve
from kvjax.research.rules import RULES, Hits, Rule
from kvjax.research.traces import Trace, make_trace

__all__ = ["RULES", "Hits", "Rule", "Trace", "belady", "lru_curve", "make_trace"]
