# SPDX-License-Identifier: Apache-2.0
"""Checks a cache, and shows its contents as text, numbers and pictures."""

from kvjax.debug.counts import Stats, stats
from kvjax.debug.invariants import check
from kvjax.debug.plots import plot_blocks
from kvjax.debug.refusals import RequestError, checked
from kvjax.debug.text import show

__all__ = ["RequestError", "Stats", "check", "checked", "plot_blocks", "show", "stats"]
