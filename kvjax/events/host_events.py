# SPDX-License-Identifier: Apache-2.0
"""A cache's events on the host: only records of changes to the index, without padding."""

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

_KINDS = (EventKind.REMOVED, EventKind.UPDATED, EventKind.STORED, EventKind.CLEARED)  # the kinds that change an index


@dataclasses.dataclass(frozen=True, eq=False)
class HostEvents:
    """The events of a call, copied to the host. All listeners of `combine_listeners` share the copy."""

    spec: CacheSpec
    records: np.ndarray  # i32[n, 9]; the columns of `Records`; only kinds removed, updated, stored and cleared
    text: np.ndarray  # i32[m, P] or i32[m, 2 P]; tokens of the stored records in their order, then extra ids, if any
    events: Events | EventLog | None = None  # the original events as numpy arrays; None if decoded events were given
    is_shared: bool = False  # whether several listeners get this object
    _results: dict[object, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def begins_anew(self) -> bool:
        """Whether these events describe a whole cache, because they begin with cleared groups."""
        return self.records[:1, 0].tolist() == [EventKind.CLEARED]

    @property
    def lost(self) -> int:
        """The number of events lost by a full log. Above 0, an index built from these events is wrong."""
        return int(self.events.lost) if isinstance(self.events, EventLog) else 0

    @functools.cached_property
    def steps(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Splits the records into few runs of the same kind: (kind, records, text of the stored records).

        Removed records move before stored records where this does not change the result.
        """
        records = self.records
        kinds = records[:, 0]
        result = []
        num_texts = 0
        exchange = (kinds == EventKind.REMOVED) | (kinds == EventKind.STORED)
        for start, stop in runs(np.where(exchange, 0, kinds)):
            if not exchange[start]:
                result.append((int(kinds[start]), records[start:stop], self.text[:0]))
                continue
            cuts = _cuts(records[start:stop])
            for first, last in itertools.pairwise([start, *(start + cut for cut in cuts), stop]):
                part = records[first:last]
                stored = part[part[:, 0] == EventKind.STORED]
                result.append((EventKind.REMOVED, part[part[:, 0] == EventKind.REMOVED], self.text[:0]))
                result.append((EventKind.STORED, stored, self.text[num_texts : num_texts + len(stored)]))
                num_texts += len(stored)
        return [step for step in result if len(step[1])]

    def once(self, owner: object, compute: Callable[[HostEvents], Any]) -> Any:
        """Computes a value for an owner when it first asks, and keeps the value or the error."""
        if owner not in self._results:
            try:
                self._results[owner] = compute(self)
            except ValueError as error:
                self._results[owner] = error
        if isinstance(self._results[owner], ValueError):
            raise self._results[owner]
        return self._results[owner]


def host_events(events: Any, spec: CacheSpec) -> HostEvents:
    """Copies events to the host. You may donate their arrays afterwards.

    Args:
      events: `Events`, also with the leading axes of a scan, an `EventLog`, `HostEvents`, or a list from `to_list`.
      spec: the spec of the cache.

    Raises:
      ValueError: for blocks of another size.
    """
    if isinstance(events, HostEvents):
        return events if events.spec == spec or events.events is None else _of_arrays(events.events, spec)
    if isinstance(events, Events | EventLog):
        return _of_arrays(jax.device_get(events), spec)
    if isinstance(events, str | bytes) or not isinstance(events, Iterable):
        raise ValueError(f"events: got {type(events).__name__}, wanted Events, an EventLog or a list from to_list")
    return _of_list(list(events), spec)


def listened(events: Any, spec: CacheSpec) -> HostEvents:
    """The events of a listener's call on the host. Decoded events are an error.

    Example:
      >>> from kvjax.events import listened
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> listened(events, spec).text.tolist()  # the two stored blocks
      [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    return host_events(events if isinstance(events, HostEvents) else arrays(events), spec)


def arrays(events: Any) -> Events | EventLog:
    """A listener's `Events`, `EventLog` or `HostEvents` as `Events` or an `EventLog` of numpy arrays."""
    if isinstance(events, HostEvents) and events.events is not None:
        return events.events
    if not isinstance(events, Events | EventLog):
        raise ValueError(f"events: got {type(events).__name__}, wanted Events or an EventLog")
    return jax.device_get(events)


def records_of(events: Events | EventLog) -> np.ndarray:
    """i32[n, 9]; the records, without the padding of a log."""
    records = np.asarray(events.records).reshape(-1, len(COLUMNS))
    return records[: int(events.appended)] if isinstance(events, EventLog) else records


def runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """The (start, stop) of runs of equal values."""
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return ((start, stop) for start, stop in itertools.pairwise(cuts) if start < stop)


def _cuts(records: np.ndarray) -> list[int]:
    """The cuts between records, such that no part stores a block and removes it again."""
    cuts = []
    stored = set[tuple[int, int]]()
    if np.all(records[1:, 0] >= records[:-1, 0]):  # REMOVED < STORED: one transition's records, usually
        return cuts
    for index, (kind, *block) in enumerate(records[:, :3].tolist()):
        if kind == EventKind.STORED:
            stored.add(tuple(block))
        elif tuple(block) in stored:
            cuts.append(index)
            stored.clear()
    return cuts


def pieces(parts: Iterable[tuple[int, int]], max_size: int) -> Iterator[tuple[int, int]]:
    """Divides parts (start, stop) into pieces of at most `max_size`."""
    for start, stop in parts:
        while stop - start > max_size:
            yield start, start + max_size
            start += max_size
        yield start, stop


def parts_of(spec: CacheSpec) -> tuple[str, ...]:
    """The parts of a block's text."""
    return ("tokens", "extra_ids")[: 1 + spec.extra_ids]


def _of_arrays(events: Events | EventLog, spec: CacheSpec) -> HostEvents:
    block_size = spec.block_size
    parts = events.text.parts()
    records = records_of(events)
    sizes = {name: part.shape[-1] for name, part in parts.items()}
    wanted = dict.fromkeys(parts_of(spec), block_size)
    if sizes != wanted:
        raise ValueError(f"events: got blocks of {sizes}, wanted {wanted}")
    kinds = records[:, 0]
    stored = np.flatnonzero(kinds == EventKind.STORED)
    text = np.concatenate([np.asarray(parts[name]).reshape(-1, block_size)[stored] for name in wanted], axis=1)
    changing = (kinds >= _KINDS[0]) & (kinds <= _KINDS[-1]) & (kinds != EventKind.COPIED)
    return HostEvents(spec, records[changing], text, events)  # an index by an array makes a copy


def _of_list(events: list[dict[str, Any]], spec: CacheSpec) -> HostEvents:
    block_size = spec.block_size
    parts = parts_of(spec)
    rows = []
    texts = []
    for event in events:
        try:
            kind = EventKind[event["kind"].upper()]
            if kind not in _KINDS:
                continue
            row = {"kind": kind, **{name: event[name] for name in COLUMNS if name in event and name != "kind"}}
            if kind == EventKind.STORED:
                parent = (-1, event["namespace"]) if event["parent"] is None else event["parent"]
                row |= {"source": parent[0], "source_generation": parent[1], "num_tokens": len(event["tokens"])}
                text = np.zeros((len(parts), block_size), np.int32)
                text[:, : len(event["tokens"])] = [event[name] for name in parts]
                texts.append(text.reshape(-1))
            rows.append([row.get(name, 0) for name in COLUMNS])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"events: got {event!r:.200}, wanted an event of to_list") from error
    records = np.array(rows, np.int32).reshape(-1, len(COLUMNS))
    return HostEvents(spec, records, np.array(texts, np.int32).reshape(-1, len(parts) * block_size))
