# SPDX-License-Identifier: Apache-2.0
"""Reports on a log of events (`kvjax.interop.log`): reuse, lifetimes of blocks, and blocks stored again."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.research.traces import records
from kvjax.research.traces.log_lines import LogFollower, checked_line

NO_HITS = (
    "Events have no hits on single blocks: what was looked up and reused is given for each admission as a whole, in "
    "tokens."
)


@dataclasses.dataclass
class LogReport:
    """Figures of a log. `str` formats them as text.

    Times are seconds since the first line.

    Attributes:
      transitions: number of valid lines.
      refused: number of invalid lines.
      first_refused: the number of the first invalid line, and its error.
      kinds: the number of events of each kind.
      unknown: events of blocks that the file had not stored before, if it begins in the middle of a run.
      times: the times of the transitions.
      queried: prompt tokens looked up at these times.
      cached: queried tokens found in the cache.
      blocks: (on the device, on the host) at these times.
      lifetimes: the times from storing to removal of removed blocks.
      again: the times from a removal to the storing of the same content.
      again_tokens: the tokens of blocks stored again.
    """

    transitions: int = 0
    refused: int = 0
    first_refused: str = ""
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unknown: int = 0
    times: list[float] = dataclasses.field(default_factory=list)
    queried: list[int] = dataclasses.field(default_factory=list)
    cached: list[int] = dataclasses.field(default_factory=list)
    blocks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    lifetimes: list[float] = dataclasses.field(default_factory=list)
    again: list[float] = dataclasses.field(default_factory=list)
    again_tokens: int = 0

    @property
    def share(self) -> float | None:
        """Share of the queried tokens found in the cache; None if none were queried."""
        return sum(self.cached) / sum(self.queried) if sum(self.queried) else None

    def __str__(self) -> str:
        last = self.times[-1] if self.times else 0.0
        total = self.kinds.total()
        max_blocks = max((sum(blocks) for blocks in self.blocks), default=0)
        last_blocks = self.blocks[-1] if self.blocks else (0, 0)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
        lines = [f"events        {total:,} of {self.transitions:,} transitions in {duration(last)}"]
        lines += [f"              {kinds}"] * bool(kinds)
        reuse = "nothing was looked up"
        if self.share is not None:
            reuse = f"{sum(self.cached):,} of {sum(self.queried):,} tokens looked up ({self.share:.1%})"
        lines.append(f"reuse         {reuse}")
        on_device, on_host = last_blocks
        blocks = f"{on_device:,} blocks on the device, {on_host:,} on the host"
        lines.append(f"cached        {blocks}; {max_blocks:,} at most")
        lines.append(f"lifetimes     {_spread(self.lifetimes, 'blocks removed')}")
        lines.append(f"stored again  {_spread(self.again, f'blocks with {self.again_tokens:,} tokens')}")
        lines += [f"not known     {self.unknown:,} events of blocks that this file did not store"] * bool(self.unknown)
        lines += [f"refused       {self.refused:,} lines; {self.first_refused}"] * bool(self.refused)
        return "\n".join([*lines, "", NO_HITS])


def duration(seconds: float) -> str:
    """A length of time in words."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def _spread(lengths: Sequence[float], name: str) -> str:
    if not lengths:
        return "none"
    low, middle, high = (duration(length) for length in np.quantile(lengths, (0.1, 0.5, 0.9)).tolist())
    return f"{len(lengths):,} {name}; median {middle}, 8 of 10 between {low} and {high}"


def log_report(lines: Iterable[str]) -> LogReport:
    """The report of the lines of a log. It counts lines that are not valid as refused.

    Example:
      >>> from kvjax import research
      >>> line = '{"ts": 0.0, "queried": 20, "cached": 8, "events": []}'
      >>> research.log_report([line]).share
      0.4
    """
    reader = _Reader()
    for line_number, text in enumerate(lines, 1):
        if text.strip():
            reader.read(f"line {line_number}", text)
    return reader.report


class _Reader:
    """Follows a log. `report` describes the lines so far."""

    def __init__(self):
        self.report = LogReport()
        self._follower = LogFollower()
        self._gone: dict[tuple[int, bytes], float] = {}  # the time at which content left a group
        self._first: float | None = None

    def read(self, where: str, text: str) -> None:
        """Adds a line of the log to the report."""
        report = self.report
        try:
            line = checked_line(where, records.parse_json(where, text))
        except (ValueError, RecursionError) as error:  # RecursionError: the repr of a deep value
            report.refused += 1
            report.first_refused = report.first_refused or str(error)
            return
        report.transitions += 1
        self._first = line.ts if self._first is None else self._first
        now = max(line.ts - self._first, report.times[-1] if report.times else 0.0)  # a clock may be set back
        for event in line.events:
            report.kinds[event["kind"]] += 1
            self._follow(event, now)
        report.unknown = self._follower.unknown
        report.times.append(now)
        report.queried.append(line.queried)
        report.cached.append(line.cached)
        report.blocks.append((self._follower.levels[0], self._follower.levels[1]))

    def _follow(self, event: dict[str, Any], now: float) -> None:
        report = self.report
        for change, block in self._follower.follow(event, now):
            content = (event["group"], block.digest)
            if change == "stored" and content in self._gone:
                report.again.append(now - self._gone.pop(content))
                report.again_tokens += len(event["tokens"])
            elif change in ("removed", "cleared"):
                report.lifetimes.append(now - block.since)
                self._gone[content] = now
