# SPDX-License-Identifier: Apache-2.0
"""Events as they happen, in a file of JSON lines, and reports and plots of such files.

A line for each transition: ts in seconds since 1970, events as `to_list` gives them, queried, cached. In a report a
digest of its whole prefix identifies the content of a block, so that memory does not grow with the prefix's length.

`python -m kvjax.interop.log FILE [--plot out.png]` prints a report.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from kvjax import _pictures as pictures
from kvjax._files import LineFile
from kvjax.events.log import EventLog
from kvjax.events.mirror import Node, snapshot_log, to_list
from kvjax.events.records import EventKind, Events
from kvjax.interop.events import arrays
from kvjax.interop.hashing import block_hash, root_hash
from kvjax.state import CacheState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Log", "Report", "entry", "plot", "report"]

_KINDS = tuple(kind.name.lower() for kind in EventKind if kind)
_MOST, _WORD = 1 << 53, 1 << 31  # numbers are below: what float64 has exactly, and i32
NO_HITS = (
    "Events have no hits on single blocks: what was looked up and reused is given for each admission as a whole, in "
    "tokens."
)
_BARS = 40  # of the plot


class Log:
    """Writes a cache's events to a file; `write` is a listener of `generate`, `stream` and `run_batch`.

    The file has prompts in clear.

    Args:
      file: a text file, which the caller closes.
      clock: gives the time in seconds.

    Example:
      >>> import io
      >>> from kvjax.interop.log import Log
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, events = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> file = io.StringIO()
      >>> Log(file, clock=lambda: 5.0).write(events)
      >>> print(file.getvalue(), end="")
      {"ts": 5.0, "events": [], "queried": 10, "cached": 0}
    """

    def __init__(self, file: TextIO, *, clock: Callable[[], float] = time.time):
        self._file, self._clock = LineFile(file), clock

    def write(self, events: Events | EventLog) -> None:
        """Writes a line: a listener."""
        self._file.write([json.dumps(entry(events, self._clock()))])

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty: writes a line of what would build its index."""
        self.write(snapshot_log(state))


def entry(events: Events | EventLog, now: float | None = None) -> dict[str, Any]:
    """The fields of a line, of a transition or of a jitted loop; `now` is the ts, None: by the clock.

    Example:
      >>> from kvjax.interop.log import entry
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, events = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> entry(events, now=5.0)
      {'ts': 5.0, 'events': [], 'queried': 10, 'cached': 0}
    """
    events = arrays(events)
    sums = {name: int(np.sum(getattr(events, name))) for name in ("queried", "cached")}
    return {"ts": time.time() if now is None else now, "events": to_list(events), **sums}


@dataclasses.dataclass
class Report:
    """Figures of a file. Times are seconds since the first line, or numbers of events in files that have no times."""

    unit: str = "events"  # or "s"
    transitions: int = 0  # lines that were read; 0 in a file of bare events
    refused: int = 0  # lines that are no entries
    first_refused: str = ""  # the first of them by its number, and what is wrong with it
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # events of each kind
    unknown: int = 0  # events of blocks that the file had not stored before: it began in the middle
    times: list[float] = dataclasses.field(default_factory=list)  # of the transitions, or of the events
    queried: list[int] = dataclasses.field(default_factory=list)  # prompt tokens looked up at these times
    cached: list[int] = dataclasses.field(default_factory=list)  # those of them that were found
    blocks: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # on device and host at these times
    lifetimes: list[float] = dataclasses.field(default_factory=list)  # of removed blocks, since they were stored
    again: list[float] = dataclasses.field(default_factory=list)  # from a removal to the storing of the same content
    again_tokens: int = 0  # of these blocks

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
        reuse = "the file does not have what was looked up"
        if self.share is not None:
            reuse = f"{sum(self.cached):,} of {sum(self.queried):,} tokens looked up ({self.share:.1%})"
        lines.append(f"reuse         {reuse}")
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
    """The report of lines of `Log`, or of bare events, as older versions wrote them; it counts others as refused.

    Example:
      >>> from kvjax.interop.log import report
      >>> line = '{"ts": 0.0, "queried": 20, "cached": 8, "events": []}'
      >>> report([line]).share
      0.4
    """
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        if line.strip():
            reader.read(number, line)
    return reader.report


class _Reader:
    """Follows a file; `report` is that of the lines so far."""

    def __init__(self):
        self.report = Report()
        self._nodes: dict[Node, tuple[bytes, int, float]] = {}  # digest of the prefix, level, and since when
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
        if now is not None:
            report.transitions += 1
            report.unit, self._first = "s", now if self._first is None else self._first
            now = max(now - self._first, report.times[-1] if report.times else 0.0)  # clocks are set back
        for event in events:
            report.kinds[event["kind"]] += 1
            self._follow(event, float(report.kinds.total()) if now is None else now)
        report.times.append(float(report.kinds.total()) if now is None else now)
        report.queried.append(queried)
        report.cached.append(cached)
        report.blocks.append((self._levels[0], self._levels[1]))

    def _follow(self, event: dict[str, Any], now: float) -> None:
        kind, node = event["kind"], (event["group"], event.get("block", -1), event.get("generation", -1))
        if kind in ("created", "cleared"):
            for other in [other for other in self._nodes if other[0] == node[0]]:
                self._remove(other, now, ends_life=kind == "cleared")
        elif kind == "stored":
            self._store(node, event, now)
        elif kind != "copied" and node not in self._nodes:
            self.report.unknown += 1
        elif kind == "removed":
            self._remove(node, now)
        elif kind == "updated":
            digest, level, since = self._nodes[node]
            self._nodes[node] = digest, event["level"], since
            self._levels[level] -= 1
            self._levels[event["level"]] += 1

    def _store(self, node: Node, event: dict[str, Any], now: float) -> None:
        if node in self._nodes:
            self._remove(node, now, ends_life=False)
        parent, tokens = event.get("parent"), event["tokens"]
        if parent is not None and (0, *parent) in self._nodes:
            prefix, *_ = self._nodes[0, *parent]
        else:  # a root, or a parent that the file has not stored
            prefix = root_hash(salt=str(event["namespace"] if parent is None else parent))
            self.report.unknown += parent is not None
        digest = block_hash(prefix, tokens, event.get("extra_ids"))
        self._nodes[node] = digest, event["level"], now
        self._levels[event["level"]] += 1
        left = self._gone.pop((node[0], digest), None)
        if left is not None:
            self.report.again.append(now - left)
            self.report.again_tokens += len(tokens)

    def _remove(self, node: Node, now: float, ends_life: bool = True) -> None:
        """Forgets a block that was removed, or whose end is not in the file: it goes on with another cache."""
        digest, level, since = self._nodes.pop(node)
        self._levels[level] -= 1
        if ends_life:
            self.report.lifetimes.append(now - since)
            self._gone[node[0], digest] = now


def _parsed(line: str) -> tuple[list[dict[str, Any]], int, int, float | None]:
    """The events, queried, cached and ts of a line; a bare event has no ts. ValueErrors name the field."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"got {line!r:.60}, wanted JSON") from error
    if not isinstance(entry, dict):
        raise ValueError(f"got {entry!r:.80}, wanted an object")
    if "kind" in entry:  # a bare event
        _check(entry)
        return [entry], 0, 0, None
    queried, cached = (_integer(name, entry.get(name), 0, _MOST) for name in ("queried", "cached"))
    now, events = entry.get("ts"), _list("events", entry.get("events"))
    if not isinstance(now, int | float) or isinstance(now, bool) or not -_MOST < now < _MOST:  # NaN is not
        raise ValueError(f"ts: got {now!r:.80}, wanted a number of seconds below {_MOST}")
    for event in events:
        _check(event)
    return events, queried, cached, float(now)


def _check(event: Any) -> None:
    """Checks that an event has all that is read of it."""
    kind = event.get("kind") if isinstance(event, dict) else None
    if kind not in _KINDS:
        raise ValueError(f"events: got {event!r:.80}, wanted an event as to_list makes it")
    names = ("group", "block", "generation") if kind in ("stored", "removed", "updated") else ("group",)
    integers = {name: [event.get(name)] for name in names}
    if kind in ("stored", "updated"):
        _integer("level", event.get("level"), 0, 2)
    if kind == "stored":
        parent, tokens = event.get("parent"), _list("tokens", event.get("tokens"))
        extra_ids = _list("extra_ids", event.get("extra_ids", tokens))
        if not tokens or len(extra_ids) != len(tokens):
            wanted = "wanted at least one, and one id each"
            raise ValueError(f"tokens: got {len(tokens)} with {len(extra_ids)} extra ids, {wanted}")
        if parent is not None and len(_list("parent", parent)) != 2:
            raise ValueError(f"parent: got {parent!r:.80}, wanted a block and its generation")
        integers |= {"namespace": [event.get("namespace")]} if parent is None else {"parent": parent}
        integers |= {"tokens": tokens, "extra_ids": extra_ids}
    for name, values in integers.items():
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


@pictures.picture
def plot(report: Report, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws a report: reuse and blocks over time, lifetimes, and times until blocks were stored again.

    Args:
      report: from `report`.
      path: where to save the picture, if anywhere; the suffix chooses the format.

    Returns:
      The figure.
    """
    figure = pictures.new_figure(11, 7)
    (reuse, blocks), (lives, again) = figure.subplots(2, 2)
    end = max(report.times, default=0.0) or 1.0
    _draw_reuse(reuse, report, end)
    _draw_blocks(blocks, report, end)
    _draw_lengths(lives, report, report.lifetimes, "Lifetimes of blocks, from stored to removed", pictures.AMBER)
    _draw_lengths(again, report, report.again, "Stored again after it was evicted: the time between", pictures.PINK)
    for ax in (reuse, blocks, lives, again):
        ax.yaxis.get_major_locator().set_params(integer=True)
    pictures.legend_below(figure)
    figure.suptitle(NO_HITS, x=0.01, ha="left", fontsize=9, color=pictures.FAINT)
    if path is not None:
        figure.savefig(path)
    return figure


def _draw_reuse(ax: Axes, report: Report, end: float) -> None:
    """Tokens looked up in each of some spans, those reused among them, and the share so far."""
    share = report.share
    ax.set_title("Prompt tokens" if share is None else f"Prompt tokens: {share:.1%} reused")
    if share is None:
        return _nothing(ax, "the file does not have what was looked up")
    edges = np.linspace(0, end, _BARS + 1)
    looked_up = np.array([report.queried, report.cached], float)  # large ones would wrap as integers
    queried, cached = (np.histogram(report.times, edges, weights=w)[0] for w in looked_up)
    width = edges[1] - edges[0]
    ax.bar(edges[:-1], cached, width, align="edge", color=pictures.BLUE, label="reused")
    ax.bar(edges[:-1], queried - cached, width, bottom=cached, align="edge", color=pictures.PALE, label="computed")
    ax.set_xlim(0, end)
    pictures.finish(ax, _unit(report), "tokens")
    share_ax = ax.twinx()
    total, reused = np.cumsum(looked_up, axis=1)
    some = total > 0
    so_far = reused[some] / total[some]
    share_ax.plot(np.array(report.times)[some], so_far, color=pictures.INK, linewidth=1.2, drawstyle="steps-post")
    share_ax.set_ylim(0, 1.02)
    pictures.finish(share_ax, "", "reused so far, %", percent=True)
    share_ax.spines["left"].set_visible(False)
    share_ax.spines["right"].set_visible(True)


def _draw_blocks(ax: Axes, report: Report, end: float) -> None:
    ax.set_title("Findable blocks")
    if not report.times:
        return _nothing(ax, "no events")
    levels = np.array(report.blocks).T
    labels = ["on the device", "on the host"] if levels[1].any() else []
    ax.stackplot(report.times, levels, colors=[pictures.AMBER, pictures.GREEN], labels=labels, step="post")
    ax.set_xlim(0, end)
    ax.set_ylim(bottom=0)
    pictures.finish(ax, _unit(report), "blocks")


def _draw_lengths(ax: Axes, report: Report, lengths: Sequence[float], title: str, colour: str) -> None:
    """A histogram of lengths of time, on a logarithmic axis."""
    ax.set_title(title)
    if not lengths:
        return _nothing(ax, "none")
    values = np.array(lengths)
    least = max(float(values[values > 0].min(initial=1.0)), float(values.max()) / 1e6, 1e-6)
    most = max(float(values.max()), 2 * least)
    ax.hist(np.clip(values, least, most), np.geomspace(least, most, 31).tolist(), color=colour)
    middle = float(np.median(values))
    ax.axvline(max(middle, least), color=pictures.INK, linewidth=1.0, linestyle="--")
    ax.set_xscale("log")
    pictures.round_ticks(ax)
    pictures.finish(ax, f"{_unit(report)}; median {report.duration(middle)} of {len(lengths):,}", "blocks")


def _unit(report: Report) -> str:
    return "seconds" if report.unit == "s" else "events"


def _nothing(ax: Axes, text: str) -> None:
    ax.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
    ax.text(0.5, 0.5, text, ha="center", va="center", color=pictures.FAINT, transform=ax.transAxes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; see --help."""
    about = (
        "Prints a report of a file of events: counts, reuse, lifetimes, and what was stored again after it had been "
        "evicted. python -m kvjax.interop.log events.jsonl --plot events.png"
    )
    parser = argparse.ArgumentParser(prog="python -m kvjax.interop.log", description=about)
    parser.add_argument("file", metavar="FILE", type=pathlib.Path, help="what Log or models.generate --events wrote")
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw it there")
    args = parser.parse_args(arguments)
    try:
        with args.file.open(errors="replace") as lines:
            found = report(lines)
        print(found)
        if args.plot is not None:
            plot(found, args.plot)
    except (OSError, ValueError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
