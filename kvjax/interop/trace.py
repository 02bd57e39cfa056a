# SPDX-License-Identifier: Apache-2.0
"""A trace of a cache on a time axis, in Chrome's JSON. Open it in Perfetto (https://ui.perfetto.dev) or Chrome.

    slices     admissions, jitted loops, moves, and other transitions; each begins at the listener's previous call
    instants   evictions, at the end of their slice
    counters   findable blocks of each group and tier, whole and partly filled, from the events; with `set(state)` also
               active, cached and empty blocks
    prompts    a track for each prompt of a `stream`, from `show`: the turns with tokens for the prompt

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

# Processes: groups of tracks.
_CACHE = 1
_PROMPTS = 2
_TRACKS = {"admission": "admissions", "loop": "loops", "move": "moves", "transition": "other transitions"}
_LEVELS = ("device", "host")


class Trace:
    """Writes a trace. Use `write` as a listener of `generate`, `stream` and `run_batch`.

    `close`, or the end of a `with`, completes the file. Viewers also open an incomplete file.

    Args:
      spec: the spec of the cache, which must be empty; otherwise call `attach`.
      file: a text file. You close it yourself.
      clock: returns the time in seconds.

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
        self.nodes = NodeMap(spec)
        self._file = file
        self._clock = clock
        self._groups = range(int(spec.bare), len(spec.groups))
        self._tiers = [  # group, level, name
            (group_index, level, f"{_LEVELS[level]}{f', group {group_index}' if len(self._groups) > 1 else ''}")
            for group_index in self._groups
            for level in range(1 + bool(spec.groups[group_index].num_host_blocks))
        ]
        self._begin = self._turn = self._start = clock()
        self._prompts: set[int] = set()
        self._file.write("[\n")
        self._separator = ""
        self._closed = False
        self._event(ph="M", name="process_name", pid=_CACHE, tid=0, args={"name": "cache"})
        for track, name in enumerate(_TRACKS.values(), 1):
            self._name_track(name, _CACHE, track)

    def write(self, events: Events | EventLog) -> None:
        """Writes a slice up to now, with its evictions and counters; for use as a listener.

        Args:
          events: `Events` or an `EventLog`, possible after all events so far.
        """
        read = listened(events, self.nodes.spec)
        self.nodes.fold(read)
        events = arrays(read)
        now = self._clock()
        begin = self._begin
        records = records_of(events)
        args = _args_of(events, records)
        self._begin = now
        name = _name_of(events, args)
        track = [*_TRACKS].index(name) + 1
        self._slice(name, begin, now, _CACHE, track, args)
        removed = records[records[:, 0] == EventKind.REMOVED]
        for group_index in sorted(set(removed[:, 1].tolist())):
            blocks = removed[removed[:, 1] == group_index, 2].tolist()
            args = {"group": group_index, "count": len(blocks), "blocks": blocks}
            self._event(ph="i", name="evicted", ts=self._us(now), pid=_CACHE, tid=track, s="t", args=args)
        self._count(now)

    def show(self, progress: Progress[Any]) -> None:
        """Writes the tokens of a `stream`'s prompts. Call it with each new `Progress`; the next slice begins now."""
        now = self._clock()
        for prompt_index, tokens in progress.new.items():
            output = progress.outputs[prompt_index]
            first = len(output.tokens) == len(tokens)  # the next stream uses the same indices again
            track = prompt_index + 1
            if prompt_index not in self._prompts:
                self._prompts.add(prompt_index)
                if len(self._prompts) == 1:
                    self._event(ph="M", name="process_name", pid=_PROMPTS, tid=0, args={"name": "prompts"})
                self._name_track(f"prompt {prompt_index}", _PROMPTS, track)
            args = {"tokens": len(tokens), "prompt_tokens": output.prompt_tokens, "cached_tokens": output.cached_tokens}
            args |= {} if output.finish is None else {"finish": output.finish}
            self._slice("prefill and decode" if first else "decode", self._turn, now, _PROMPTS, track, args)
        self.mark()

    def set(self, state: CacheState) -> None:
        """Counts the blocks of a state by tier and condition, which events do not tell. The next slice begins now."""
        now = self._clock()
        group_stats = {group_index: stats(state, group_index) for group_index in self._groups}
        for group_index, level, name in self._tiers:
            prefix = ("", "host_")[level]
            fields = {condition: f"{prefix}{condition}_blocks" for condition in ("active", "cached", "empty")}
            values = {condition: getattr(group_stats[group_index], field) for condition, field in fields.items()}
            self._counter(f"blocks, {name}", now, values)
        self.mark()

    def attach(self, state: CacheState) -> None:
        """Takes over the index of a cache that is not empty, was restored, or whose events were missed."""
        self.nodes.attach(state)
        self.mark()
        self._count(self._begin)

    def mark(self) -> None:
        """Begins the next slice now, instead of at the previous call. Call it after a pause."""
        self._begin = self._turn = self._clock()

    def close(self) -> None:
        """Ends the JSON list."""
        if not self._closed:
            self._file.write("\n]\n")
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _count(self, now: float) -> None:
        """Writes counters of the findable blocks."""
        for group_index, level, name in self._tiers:
            table = self.nodes.groups[group_index].table
            fill = table[table[:, col.LEVEL] == level, col.FILL]
            num_whole = np.count_nonzero(fill == self.nodes.spec.block_size)
            filled = {"whole": num_whole, "partly filled": np.count_nonzero(fill) - num_whole}
            self._counter(f"findable blocks, {name}", now, filled)

    def _slice(self, name: str, begin: float, end: float, process: int, track: int, args: dict[str, Any]) -> None:
        length = max(self._us(end) - self._us(begin), 0)
        self._event(ph="X", name=name, ts=self._us(begin), dur=length, pid=process, tid=track, args=args)

    def _counter(self, name: str, now: float, values: Mapping[str, Any]) -> None:
        args = {key: int(value) for key, value in values.items()}
        self._event(ph="C", name=name, ts=self._us(now), pid=_CACHE, tid=0, args=args)

    def _name_track(self, name: str, process: int, track: int) -> None:
        """Names a track, and makes viewers sort tracks by index. Sorted by name, 10 would come before 2."""
        self._event(ph="M", name="thread_name", pid=process, tid=track, args={"name": name})
        self._event(ph="M", name="thread_sort_index", pid=process, tid=track, args={"sort_index": track})

    def _event(self, **fields: Any) -> None:
        if self._closed:
            raise ValueError("write: got events for a closed trace, wanted an open trace")
        self._file.write(self._separator + json.dumps(fields))
        self._separator = ",\n"

    def _us(self, timestamp: float) -> int:
        return round((timestamp - self._start) * 1e6)


def _args_of(events: Events | EventLog, records: np.ndarray) -> dict[str, int]:
    """The arguments of a slice: events of each kind, tokens looked up and reused, moves, refusals. Omits zeros."""
    kinds = np.bincount(records[:, 0], minlength=len(EventKind)).tolist()
    args = {kind.name.lower(): kinds[kind] for kind in EventKind if kind}
    totals = Totals().add(events)
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
