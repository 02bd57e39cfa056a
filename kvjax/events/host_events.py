# SPDX-License-Identifier: Apache-2.0
"""A cache's events on the host: the records that change an index, without padding."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from kvjax.events.log import EventLog
from kvjax.events.records import COLUMNS, EventKind, Events
from kvjax.spec import CacheSpec

_KINDS = (EventKind.REMOVED, EventKind.UPDATED, EventKind.STORED, EventKind.CLEARED)  # what changes an index


@dataclasses.dataclass(frozen=True, eq=False)
class HostEvents:
    """The events of one call, copied to the host; the listeners of `together` share one."""

    spec: CacheSpec
    records: np.ndarray  # i32[n, 9]; the columns of `Records`, of kinds removed, updated, stored and cleared alone
    text: np.ndarray  # i32[m, P] or i32[m, 2 P]; tokens of the stored records in their order, then extra ids, if any
    events: Events | EventLog | None = None  # all of them as numpy arrays; None if decoded events were given
    is_shared: bool = False  # whether several listeners get this
    _found: dict[object, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def begins_anew(self) -> bool:
        """Whether these say the whole of a cache, by themselves: they begin with groups that are cleared."""
        return self.records[:1, 0].tolist() == [EventKind.CLEARED]

    @property
    def lost(self) -> int:
        """The number of events that a full log has lost: an index that follows these events is wrong above 0."""
        return int(self.events.lost) if isinstance(self.events, EventLog) else 0

    @functools.cached_property
    def steps(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(kind, records, text of the stored ones) in as few runs of one kind as follow each other.

        Removed and stored records trade places where that changes nothing: first all that are removed.
        """
        records, text, kinds, texts, found = self.records, self.text, self.records[:, 0], 0, []
        exchange = (kinds == EventKind.REMOVED) | (kinds == EventKind.STORED)
        for start, stop in runs(np.where(exchange, 0, kinds)):
            if not exchange[start]:
                found.append((int(kinds[start]), records[start:stop], text[:0]))
                continue
            cuts = _cuts(records[start:stop])
            for first, last in itertools.pairwise([start, *(start + cut for cut in cuts), stop]):
                some = records[first:last]
                removed, stored = (some[some[:, 0] == kind] for kind in (EventKind.REMOVED, EventKind.STORED))
                found.append((EventKind.REMOVED, removed, text[:0]))
                found.append((EventKind.STORED, stored, text[texts : texts + len(stored)]))
                texts += len(stored)
        return [step for step in found if len(step[1])]

    def once(self, owner: object, compute: Callable[[HostEvents], Any]) -> Any:
        """Computes something for an owner on its first request, and keeps it, an error too."""
        if owner not in self._found:
            try:
                self._found[owner] = compute(self)
            except ValueError as error:
                self._found[owner] = error
        if isinstance(self._found[owner], ValueError):
            raise self._found[owner]
        return self._found[owner]


def host_events(events: Any, spec: CacheSpec) -> HostEvents:
    """Copies events to the host; their arrays may be donated afterwards. Blocks of another size are a ValueError.

    Args:
      events: `Events`, also with leading axes (of a scan); an `EventLog`; `HostEvents`; or what `to_list` makes.
      spec: of the cache that they come from.
    """
    if isinstance(events, HostEvents):
        return events if events.spec == spec or events.events is None else _of_arrays(events.events, spec)
    if isinstance(events, Events | EventLog):
        return _of_arrays(jax.device_get(events), spec)
    if isinstance(events, str | bytes) or not isinstance(events, Iterable):
        raise ValueError(f"events: got {type(events).__name__}, wanted Events, an EventLog or what to_list makes of it")
    return _of_list(list(events), spec)


def listened(events: Any, spec: CacheSpec) -> HostEvents:
    """The same of what a listener gets: no decoded events.

    Example:
      >>> from kvjax.events import listened
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> listened(events, spec).text.tolist()  # of the two stored blocks
      [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    return host_events(events if isinstance(events, HostEvents) else arrays(events), spec)


def arrays(events: Any) -> Events | EventLog:
    """The events that a listener gets, `Events`, an `EventLog` or `HostEvents`, as numpy arrays."""
    if isinstance(events, HostEvents) and events.events is not None:
        return events.events
    if not isinstance(events, Events | EventLog):
        raise ValueError(f"events: got {type(events).__name__}, wanted Events or an EventLog")
    return jax.device_get(events)


def records_of(events: Events | EventLog) -> np.ndarray:
    """i32[n, 9]; the records, those of a log without its padding."""
    records = np.asarray(events.records).reshape(-1, len(COLUMNS))
    return records[: int(events.appended)] if isinstance(events, EventLog) else records


def runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """The (start, stop) of runs of equal values."""
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return ((start, stop) for start, stop in itertools.pairwise(cuts) if start < stop)


def _cuts(records: np.ndarray) -> list[int]:
    """The cuts between removed and stored records that leave no part with a block stored and later removed again."""
    cuts, stored = [], set[tuple[int, int]]()
    if np.all(records[1:, 0] >= records[:-1, 0]):  # REMOVED < STORED: one transition's records, usually
        return cuts
    for at, (kind, *block) in enumerate(records[:, :3].tolist()):
        if kind == EventKind.STORED:
            stored.add(tuple(block))
        elif tuple(block) in stored:
            cuts.append(at)
            stored.clear()
    return cuts


def pieces(parts: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Parts (start, stop) in pieces of at most `most`."""
    for start, stop in parts:
        while stop - start > most:
            yield start, start + most
            start += most
        yield start, stop


def parts_of(spec: CacheSpec) -> tuple[str, ...]:
    """The parts of a block's text."""
    return ("tokens", "extra_ids")[: 1 + spec.extra_ids]


def _of_arrays(events: Events | EventLog, spec: CacheSpec) -> HostEvents:
    size, parts, records = spec.block_size, events.text.parts(), records_of(events)
    got, wanted = {name: part.shape[-1] for name, part in parts.items()}, dict.fromkeys(parts_of(spec), size)
    if got != wanted:
        raise ValueError(f"events: got blocks of {got}, wanted {wanted}")
    kinds = records[:, 0]
    stored = np.flatnonzero(kinds == EventKind.STORED)
    text = np.concatenate([np.asarray(parts[name]).reshape(-1, size)[stored] for name in wanted], axis=1)
    changing = (kinds >= _KINDS[0]) & (kinds <= _KINDS[-1]) & (kinds != EventKind.COPIED)
    return HostEvents(spec, records[changing], text, events)  # an index by an array makes a copy


def _of_list(events: list[dict[str, Any]], spec: CacheSpec) -> HostEvents:
    size, parts = spec.block_size, parts_of(spec)
    rows, texts = [], []
    for event in events:
        try:
            kind = EventKind[event["kind"].upper()]
            if kind not in _KINDS:
                continue
            row = {"kind": kind, **{name: event[name] for name in COLUMNS if name in event and name != "kind"}}
            if kind == EventKind.STORED:
                parent = (-1, event["namespace"]) if event["parent"] is None else event["parent"]
                row |= {"source": parent[0], "source_generation": parent[1], "num_tokens": len(event["tokens"])}
                text = np.zeros((len(parts), size), np.int32)
                text[:, : len(event["tokens"])] = [event[name] for name in parts]
                texts.append(text.reshape(-1))
            rows.append([row.get(name, 0) for name in COLUMNS])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"events: got {event!r:.200}, wanted an event as to_list makes it") from error
    records = np.array(rows, np.int32).reshape(-1, len(COLUMNS))
    return HostEvents(spec, records, np.array(texts, np.int32).reshape(-1, len(parts) * size))
