# SPDX-License-Identifier: Apache-2.0
"""Chooses an eviction policy and a cache size from a trace of your workload. Nothing else imports this package."""

from kvjax.research.comparison import Comparison, compare
from kvjax.research.figures import Summary, hits_by_age, hits_by_depth, reuse_times, summary, unbounded
from kvjax.research.log_report import LogReport, log_report
from kvjax.research.simulators.belady import belady
from kvjax.research.simulators.hits import RULES, Hits, Rule
from kvjax.research.simulators.lru_curve import lru_curve, reuse_distances
from kvjax.research.simulators.replay import Overlap, in_blocks, overlapping, replay
from kvjax.research.simulators.simulate import simulate
from kvjax.research.traces.event_log import read_events
from kvjax.research.traces.generator import Sessions, Workload, draw_trace
from kvjax.research.traces.readers import read_azure, read_bailian, read_burst, read_mooncake, read_trace
from kvjax.research.traces.sessions import sessions_of, split_sessions
from kvjax.research.traces.trace import Trace, make_trace
from kvjax.research.traces.writers import write_libcachesim_csv, write_mooncake, write_oracle_general

__all__ = [
    "RULES",
    "Comparison",
    "Hits",
    "LogReport",
    "Overlap",
    "Rule",
    "Sessions",
    "Summary",
    "Trace",
    "Workload",
    "belady",
    "compare",
    "draw_trace",
    "hits_by_age",
    "hits_by_depth",
    "in_blocks",
    "log_report",
    "lru_curve",
    "make_trace",
    "overlapping",
    "read_azure",
    "read_bailian",
    "read_burst",
    "read_events",
    "read_mooncake",
    "read_trace",
    "replay",
    "reuse_distances",
    "reuse_times",
    "sessions_of",
    "simulate",
    "split_sessions",
    "summary",
    "unbounded",
    "write_libcachesim_csv",
    "write_mooncake",
    "write_oracle_general",
]
