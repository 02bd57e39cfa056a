# SPDX-License-Identifier: Apache-2.0
"""Which policy, and how much memory, does a workload need? Answers from a trace. Nothing imports this package."""

from kvjax.research.replay import in_blocks, replay
from kvjax.research.rules import RULES, Hits, Rule
from kvjax.research.traces import Trace, make_trace

__all__ = ["RULES", "Hits", "Rule", "Trace", "in_blocks", "make_trace", "replay"]
