# SPDX-License-Identifier: Apache-2.0
"""A cache on a time axis: Chrome's trace JSON, which Perfetto (https://ui.perfetto.dev) and Chrome open.

    slices     admissions, jitted loops, moves, and other transitions: from the call of the listener before to this one
    instants   evictions, at the end of the slice that made them
    counters   findable blocks of each group and tier, whole and partly filled, by the events; with `set(state)` also
               active, cached and empty ones
    prompts    a track for each prompt of a `stream`, by `show`: which turns gave it tokens

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TextIO

import numpy as np

from kvjax.debug.counts import stats
from kvjax.events import columns as col
from kvjax.events.host_events import arrays, listened, records_of
from kvjax.events.index import NodeMap
from kvjax.events.log import EventLog
from kvjax.events.records import EventKind, Events
from kvjax.events.totals import Totals
from kvjax.serving.generation import Progress
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

__all__ = ["Trace"]

_CACHE, _PROMPTS = 1, 2  # processes: groups of tracks
_TRACKS = {"admission": "admissions", "loop": "loops", "move": "moves", "transition": "other transitions"}
_LEVELS = ("device", "host")


class Trace:
    """Writes a trace; `write` is a listener of `generate`, `stream` and `run_batch`.

    `close`, or the end of a `with`, ends the file; one that was not closed is read too.

    Args:
      spec: of the cache, which is empty; see `attach` for others.
      file: a text file, which the caller closes.
      clock: gives the time in seconds.

    Example:
      >>> import io, json
      >>> from kvjax.interop.trace import Trace
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> _, events = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> file = io.StringIO()
      >>> with Trace(spec, file, clock=lambda: 5.0) as trace:
      ...     trace.write(events)
      >>> [(event["name"], event["args"]) for event in json.loads(file.getvalue()) if event["ph"] == "X"]
      [('admission', {'queried': 10})]
    """

    def __init__(self, spec: CacheSpec, file: TextIO, *, clock: Callable[[], float] = time.perf_counter):
        self.nodes, self._file, self._clock = NodeMap(spec), file, clock
        self._groups = range(int(spec.bare), len(spec.groups))
        self._tiers = [  # group, level, name
            (number, level, f"{_LEVELS[level]}{f', group {number}' if len(self._groups) > 1 else ''}")
            for number in self._groups
            for level in range(1 + bool(spec.groups[number].num_host_blocks))
        ]
        self._begin = self._turn = self._start = clock()
        self._prompts: set[int] = set()
        self._file.write("[\n")
        self._separator, self._closed = "", False
        self._event(ph="M", name="process_name", pid=_CACHE, tid=0, args={"name": "cache"})
        for track, name in enumerate(_TRACKS.values(), 1):
            self._name_track(name, _CACHE, track)

    def write(self, events: Events | EventLog) -> None:
        """Writes a slice that ends now, with its evictions and counters: a listener. The events must be possible."""
        read = listened(events, self.nodes.spec)
        self.nodes.fold(read)
        events = arrays(read)
        now, begin, records = self._clock(), self._begin, records_of(events)
        self._begin, args = now, _args_of(events, records)
        name = _name_of(events, args)
        track = [*_TRACKS].index(name) + 1
        self._slice(name, begin, now, _CACHE, track, args)
        removed = records[records[:, 0] == EventKind.REMOVED]
        for number in sorted(set(removed[:, 1].tolist())):
            blocks = removed[removed[:, 1] == number, 2].tolist()
            args = {"group": number, "count": len(blocks), "blocks": blocks}
            self._event(ph="i", name="evicted", ts=self._us(now), pid=_CACHE, tid=track, s="t", args=args)
        self._count(now)

    def show(self, progress: Progress[Any]) -> None:
        """Writes the tokens of a `stream`'s prompts, from each `Progress` as it comes; the next slice begins then."""
        now = self._clock()
        for number, tokens in progress.new.items():
            output = progress.outputs[number]
            first = len(output.tokens) == len(tokens)  # prompts of the next stream have the same numbers
            if number not in self._prompts:
                self._prompts.add(number)
                if len(self._prompts) == 1:
                    self._event(ph="M", name="process_name", pid=_PROMPTS, tid=0, args={"name": "prompts"})
                self._name_track(f"prompt {number}", _PROMPTS, number + 1)
            args = {"tokens": len(tokens), "prompt_tokens": output.prompt_tokens, "cached_tokens": output.cached_tokens}
            args |= {} if output.finish is None else {"finish": output.finish}
            self._slice("prefill and decode" if first else "decode", self._turn, now, _PROMPTS, number + 1, args)
        self.mark()

    def set(self, state: CacheState) -> None:
        """Counts the blocks of a state by tier and condition, which are no events; the next slice begins then."""
        now, found = self._clock(), {number: stats(state, number) for number in self._groups}
        for number, level, name in self._tiers:
            fields = {of: f"{('', 'host_')[level]}{of}_blocks" for of in ("active", "cached", "empty")}
            self._counter(f"blocks, {name}", now, {of: getattr(found[number], field) for of, field in fields.items()})
        self.mark()

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty, was restored, or goes on without its events."""
        self.nodes.attach(state)
        self.mark()
        self._count(self._begin)

    def mark(self) -> None:
        """The next slice begins now, and not at the call before: after a pause."""
        self._begin = self._turn = self._clock()

    def close(self) -> None:
        """Ends the list."""
        if not self._closed:
            self._file.write("\n]\n")
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _count(self, now: float) -> None:
        """Counters of the findable blocks."""
        for number, level, name in self._tiers:
            table = self.nodes.groups[number].table
            fill = table[table[:, col.LEVEL] == level, col.FILL]
            whole = np.count_nonzero(fill == self.nodes.spec.block_size)
            filled = {"whole": whole, "partly filled": np.count_nonzero(fill) - whole}
            self._counter(f"findable blocks, {name}", now, filled)

    def _slice(self, name: str, begin: float, end: float, process: int, track: int, args: dict[str, Any]) -> None:
        length = max(self._us(end) - self._us(begin), 0)
        self._event(ph="X", name=name, ts=self._us(begin), dur=length, pid=process, tid=track, args=args)

    def _counter(self, name: str, now: float, numbers: Mapping[str, Any]) -> None:
        args = {what: int(number) for what, number in numbers.items()}
        self._event(ph="C", name=name, ts=self._us(now), pid=_CACHE, tid=0, args=args)

    def _name_track(self, name: str, process: int, track: int) -> None:
        """Names a track, and has viewers sort it by number: by name, 10 comes before 2."""
        self._event(ph="M", name="thread_name", pid=process, tid=track, args={"name": name})
        self._event(ph="M", name="thread_sort_index", pid=process, tid=track, args={"sort_index": track})

    def _event(self, **fields: Any) -> None:
        if self._closed:
            raise ValueError("write: got events for a trace that is closed, wanted an open one")
        self._file.write(self._separator + json.dumps(fields))
        self._separator = ",\n"

    def _us(self, timestamp: float) -> int:
        return round((timestamp - self._start) * 1e6)


def _args_of(events: Events | EventLog, records: np.ndarray) -> dict[str, int]:
    """The arguments of a slice: events of each kind, tokens looked up and reused, moves, refusals; no zeros."""
    kinds = np.bincount(records[:, 0], minlength=len(EventKind)).tolist()
    args, totals = {kind.name.lower(): kinds[kind] for kind in EventKind if kind}, Totals().add(events)
    args |= {"queried": totals.queried_tokens, "cached": totals.reused_tokens}
    args |= {"to_host": totals.offloaded_blocks, "to_device": totals.onboarded_blocks, "refused": totals.refused}
    return {name: count for name, count in args.items() if count}


def _name_of(events: Events | EventLog, args: dict[str, int]) -> str:
    """The name of a slice."""
    if isinstance(events, EventLog):
        return "loop"
    if "queried" in args:
        return "admission"
    return "move" if "to_host" in args or "to_device" in args else "transition"
