# SPDX-License-Identifier: Apache-2.0
"""A report of a file of events: counts, reuse, lifetimes, and what was stored again after it had been evicted.

A digest of its whole prefix identifies the content of a block, so that memory does not grow with the prefix's length.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.events.mirror import Node
from kvjax.events.records import EventKind
from kvjax.interop.hashing import block_hash, root_hash

_KINDS = tuple(kind.name.lower() for kind in EventKind if kind)
_MOST, _WORD = 1 << 53, 1 << 31  # numbers are below: what float64 has exactly, and i32
NO_HITS = (
    "Events have no hits on single blocks: what was looked up and reused is given for each admission as a whole, in "
    "tokens."
)


@dataclasses.dataclass
class _Cached:
    """A block that is cached: the digest of its prefix, its level, and since when."""

    digest: bytes
    level: int
    since: float


@dataclasses.dataclass
class Report:
    """Figures of a file. Times are in seconds since the first line, or numbers of events in files that have no times.

    Attributes:
      unit: "s" or "events".
      transitions: lines that were read; 0 in a file of bare events.
      refused: lines that are no entries.
      first_refused: the first of them by its number, and what is wrong with it.
      kinds: events of each kind.
      unknown: events of blocks that the file had not stored before: it began in the middle.
      times: of the transitions, or of the events.
      queried, cached: prompt tokens looked up at these times, and those that were found.
      blocks: (device, host) blocks that were cached at these times.
      lifetimes: of blocks that were removed, from stored to removed.
      again: times from the removal of a block to the storing of one with the same content.
      again_tokens: tokens of these blocks.
    """

    unit: str = "events"
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
        """Share of the queried tokens that were found; None if the file has none that were looked up."""
        return sum(self.cached) / sum(self.queried) if sum(self.queried) else None

    def __str__(self) -> str:
        last = self.times[-1] if self.times else 0.0
        total, most = self.kinds.total(), max((sum(blocks) for blocks in self.blocks), default=0)
        left = self.blocks[-1] if self.blocks else (0, 0)
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in self.kinds.most_common())
        length = f" in {self.duration(last)}" if self.unit == "s" else ""
        lines = [f"events        {total:,}{f' of {self.transitions:,} transitions' * bool(self.transitions)}{length}"]
        lines += [f"              {kinds}"] * bool(kinds)
        if self.share is None:
            lines.append("reuse         the file does not have what was looked up")
        else:
            lines.append(
                f"reuse         {sum(self.cached):,} of {sum(self.queried):,} tokens looked up ({self.share:.1%})"
            )
        lines.append(f"cached        {left[0]:,} blocks on the device, {left[1]:,} on the host; {most:,} at most")
        lines.append(f"lifetimes     {self._spread(self.lifetimes, 'blocks removed')}")
        lines.append(f"stored again  {self._spread(self.again, f'blocks with {self.again_tokens:,} tokens')}")
        lines += [f"not known     {self.unknown:,} events of blocks that this file did not store"] * bool(self.unknown)
        lines += [f"refused       {self.refused:,} lines; {self.first_refused}"] * bool(self.refused)
        return "\n".join([*lines, "", NO_HITS])

    def duration(self, length: float) -> str:
        """A length of time in words."""
        if self.unit == "events":
            return f"{length:,.0f} events"
        return f"{length:,.1f} s" if length >= 1 else f"{length * 1e3:,.1f} ms"

    def _spread(self, lengths: Sequence[float], what: str) -> str:
        if not lengths:
            return "none"
        low, middle, high = (self.duration(float(one)) for one in np.quantile(lengths, (0.1, 0.5, 0.9)))
        return f"{len(lengths):,} {what}; median {middle}, 8 of 10 between {low} and {high}"


def report(lines: Iterable[str]) -> Report:
    """The report of lines: those of `Log`, or bare events, one a line, as older versions wrote them.

    What is no entry is counted as refused, and the first such line is named.
    """
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        if line.strip():
            reader.read(number, line)
    return reader.report


class _Reader:
    """Follows a file.

    Attributes:
      report: of the lines so far.
    """

    def __init__(self):
        self.report = Report()
        self._nodes: dict[Node, _Cached] = {}
        self._gone: dict[tuple[int, bytes], float] = {}  # when content left a group
        self._levels = [0, 0]
        self._first: float | None = None

    def read(self, number: int, line: str) -> None:
        """Follows a line; `number` is its number in the file."""
        report = self.report
        try:
            events, queried, cached, now = _parsed(line)
        except (ValueError, RecursionError) as error:
            report.refused += 1
            report.first_refused = report.first_refused or f"line {number}: {error}"
            return
        bare = now is None
        if now is not None:
            report.unit, self._first = "s", now if self._first is None else self._first
            now = max(now - self._first, report.times[-1] if report.times else 0.0)  # clocks are set back
        report.transitions += not bare
        for event in events:
            report.kinds[event["kind"]] += 1
            self._follow(event, float(report.kinds.total()) if now is None else now)
        report.times.append(float(report.kinds.total()) if now is None else now)
        report.queried.append(queried)
        report.cached.append(cached)
        report.blocks.append((self._levels[0], self._levels[1]))

    def _follow(self, event: dict[str, Any], now: float) -> None:
        kind, group = event["kind"], event["group"]
        if kind in ("created", "cleared"):
            for node in [node for node in self._nodes if node[0] == group]:
                self._remove(node, now, ends_life=kind == "cleared")
            return
        if kind == "copied":
            return
        node = (group, event["block"], event["generation"])
        if kind == "stored":
            self._store(node, event, now)
        elif node not in self._nodes:
            self.report.unknown += 1
        elif kind == "removed":
            self._remove(node, now)
        else:
            self._levels[self._nodes[node].level] -= 1
            self._nodes[node].level = event["level"]
            self._levels[event["level"]] += 1

    def _store(self, node: Node, event: dict[str, Any], now: float) -> None:
        if node in self._nodes:
            self._remove(node, now, ends_life=False)
        parent, tokens = event.get("parent"), event["tokens"]
        before = None if parent is None else self._nodes.get((0, *parent))
        if before is not None:
            prefix = before.digest
        else:  # a root, or a parent that the file has not stored
            prefix = root_hash(salt=str(event["namespace"] if parent is None else parent))
            self.report.unknown += parent is not None
        digest = block_hash(prefix, tokens, event.get("extra_ids"))
        self._nodes[node] = _Cached(digest, event["level"], now)
        self._levels[event["level"]] += 1
        left = self._gone.pop((node[0], digest), None)
        if left is not None:
            self.report.again.append(now - left)
            self.report.again_tokens += len(tokens)

    def _remove(self, node: Node, now: float, ends_life: bool = True) -> None:
        """Forgets a block that was removed, or whose end is not in the file: it goes on with another cache."""
        block = self._nodes.pop(node)
        self._levels[block.level] -= 1
        if ends_life:
            self.report.lifetimes.append(now - block.since)
            self._gone[node[0], block.digest] = now


def _parsed(line: str) -> tuple[list[dict[str, Any]], int, int, float | None]:
    """The events, queried, cached and ts of a line; a bare event has no ts. ValueErrors name the field."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"got {line!r:.60}, wanted JSON") from error
    if not isinstance(entry, dict):
        raise ValueError(f"got {entry!r:.80}, wanted an object")
    if "kind" in entry:  # a bare event
        return _checked([entry]), 0, 0, None
    queried, cached = (_integer(name, entry.get(name), 0, _MOST) for name in ("queried", "cached"))
    now = entry.get("ts")
    if not isinstance(now, int | float) or isinstance(now, bool) or not -_MOST < now < _MOST:  # NaN is not
        raise ValueError(f"ts: got {now!r:.80}, wanted a number of seconds below {_MOST}")
    return _checked(_list("events", entry.get("events"))), queried, cached, float(now)


def _checked(events: list[Any]) -> list[dict[str, Any]]:
    """Events that have all that is read of them."""
    for event in events:
        if not isinstance(event, dict) or event.get("kind") not in _KINDS:
            raise ValueError(f"events: got {event!r:.80}, wanted an event as to_list makes it")
        kind = event["kind"]
        for name in ("group", "block", "generation") if kind in ("stored", "removed", "updated") else ("group",):
            _integer(name, event.get(name), -_WORD, _WORD)
        if kind in ("stored", "updated"):
            _integer("level", event.get("level"), 0, 2)
        if kind == "stored":
            _check_stored(event)
    return events


def _check_stored(event: dict[str, Any]) -> None:
    """Checks the prefix of a stored event, and its tokens with their extra ids."""
    parent, tokens = event.get("parent"), _list("tokens", event.get("tokens"))
    extra_ids = _list("extra_ids", event.get("extra_ids", tokens))
    if not tokens or len(extra_ids) != len(tokens):
        wanted = "wanted at least one, and one id each"
        raise ValueError(f"tokens: got {len(tokens)} with {len(extra_ids)} extra ids, {wanted}")
    if parent is not None and len(_list("parent", parent)) != 2:
        raise ValueError(f"parent: got {parent!r:.80}, wanted a block and its generation")
    prefix = {"namespace": [event.get("namespace")]} if parent is None else {"parent": parent}
    for name, values in {"tokens": tokens, "extra_ids": extra_ids, **prefix}.items():
        for value in values:
            _integer(name, value, -_WORD, _WORD)


def _integer(name: str, value: Any, least: int, end: int) -> int:
    if type(value) is not int or not least <= value < end:
        raise ValueError(f"{name}: got {value!r:.80}, wanted an int of at least {least} and below {end}")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: got {value!r:.80}, wanted an array")
    return value
