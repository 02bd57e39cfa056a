# SPDX-License-Identifier: Apache-2.0
"""Events on the host, as arrays without padding: what a node map takes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.events.log import EventLog
from kvjax.events.records import COLUMNS, EventKind, Events
from kvjax.spec import CacheSpec

_KINDS = (EventKind.REMOVED, EventKind.UPDATED, EventKind.STORED, EventKind.CLEARED)  # what changes an index
WIDTH = len(COLUMNS)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The events of one call that change an index, copied to the host.

    Attributes:
      records: i32[n, 9]; the columns of `Records`, of kinds removed, updated, stored and cleared alone.
      text: i32[m, P] or i32[m, 2 P]; the tokens of the stored records in their order, followed by the extra ids where
        the spec has them.
    """

    records: np.ndarray
    text: np.ndarray

    def __len__(self) -> int:
        return len(self.records)

    @property
    def nbytes(self) -> int:
        """The number of bytes it holds."""
        return self.records.nbytes + self.text.nbytes

    def namespaces(self) -> set[int]:
        """The namespaces of the blocks that are stored at a root."""
        kind, source, number = self.records[:, 0], self.records[:, 4], self.records[:, 5]
        return set(number[(kind == EventKind.STORED) & (source < 0)].tolist())

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """The events in as few steps as follow each other; their order within a step does not matter."""
        return tuple(self._steps())

    def _steps(self) -> Iterator[Step]:
        kinds, texts = self.records[:, 0], 0
        exchange = (kinds == EventKind.REMOVED) | (kinds == EventKind.STORED)
        classes = np.where(exchange, 0, kinds)
        for start, stop in runs(classes):
            if classes[start]:
                yield Step(int(classes[start]), self.records[start:stop], self.records[:0], self.text[:0])
                continue
            cuts = [start, *(start + cut for cut in _cuts(self.records[start:stop])), stop]
            for first, last in itertools.pairwise(cuts):
                records = self.records[first:last]
                stored = records[records[:, 0] == EventKind.STORED]
                removed = records[records[:, 0] == EventKind.REMOVED]
                yield Step(EventKind.NONE, removed, stored, self.text[texts : texts + len(stored)])
                texts += len(stored)


class Step(NamedTuple):
    """Some of a batch's events.

    Attributes:
      kind: UPDATED or CLEARED; or NONE, where blocks are removed and then others stored.
      records: i32[n, 9]; those of this kind, or the removed ones.
      stored: i32[m, 9]; the stored ones.
      text: i32[m, .]; what these hold.
    """

    kind: int
    records: np.ndarray
    stored: np.ndarray
    text: np.ndarray


def runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """The (start, stop) of runs of equal values."""
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return ((start, stop) for start, stop in itertools.pairwise(cuts) if start < stop)


def pieces(parts: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Parts (start, stop) in pieces of at most `most`."""
    for start, stop in parts:
        while stop - start > most:
            yield start, start + most
            start += most
        yield start, stop


def _cuts(records: np.ndarray) -> list[int]:
    """The cuts between removed and stored records, so that all that a part removes was there before it.

    A block that is stored and later removed again needs a cut between the two.
    """
    kinds = records[:, 0]
    if np.all(kinds[1:] >= kinds[:-1]):  # REMOVED < STORED: one transition's records, usually
        return []
    block = records[:, 1].astype(np.int64) << 32 | records[:, 2]
    order = np.argsort(block, kind="stable")
    again = np.flatnonzero((block[order][1:] == block[order][:-1]) & (kinds[order][:-1] == EventKind.STORED))
    cuts, last = [], 0
    for stop, start in sorted(zip(order[again + 1].tolist(), order[again].tolist(), strict=True)):
        if start >= last:  # else the last cut is between them
            cuts.append(last := stop)
    return cuts


@dataclasses.dataclass(frozen=True)
class Heard:
    """Events of one call as all listeners of `together` get them.

    Attributes:
      events: a copy on the host.
      spec: of the cache that they come from.
      batch: those that change an index.
    """

    events: Events | EventLog
    spec: CacheSpec
    batch: Batch


def together(spec: CacheSpec, *listeners: Callable[[Any], object]) -> Callable[[Events | EventLog], None]:
    """One listener for several: events are copied to the host and read once for all of them.

    One that raises keeps those after it from hearing.

    Args:
      spec: of the cache.
      listeners: methods of what `kvjax.interop` has, such as `Log.write` and `Publisher.publish`: they get a `Heard`.

    Returns:
      The listener; it raises a ValueError for anything but `Events` and an `EventLog`, and for blocks of another size.
    """

    def listen(events: Events | EventLog) -> None:
        events = on_host(events)
        heard = Heard(events, spec, _of_arrays(events, spec))
        for listener in listeners:
            listener(heard)

    return listen


def on_host(events: Any) -> Any:
    """The events of a transition or a jitted loop, or of a `Heard`, as numpy arrays.

    Raises:
      ValueError: for anything else.
    """
    if isinstance(events, Heard):
        return events.events
    if not isinstance(events, Events | EventLog):
        raise ValueError(f"events: got {type(events).__name__}, wanted Events or an EventLog")
    return jax.device_get(events)


def read(events: Any, spec: CacheSpec) -> Batch:
    """Copies events to the host; their arrays may be donated afterwards.

    Args:
      events: `Events`, also with leading axes (of a scan); an `EventLog`; a `Heard`; or decoded events, from `to_list`.
      spec: of the cache that they come from.

    Raises:
      ValueError: for anything else, and for blocks of another size.
    """
    if isinstance(events, Heard):
        return events.batch if events.spec == spec else _of_arrays(events.events, spec)
    if isinstance(events, Events | EventLog):
        return _of_arrays(events, spec)
    if isinstance(events, str | bytes) or not isinstance(events, Iterable):
        raise ValueError(f"events: got {type(events).__name__}, wanted Events, an EventLog or what to_list makes of it")
    return _of_list(list(events), spec)


def parts_of(spec: CacheSpec) -> tuple[str, ...]:
    """The parts of a block's text."""
    return ("tokens", "extra_ids")[: 1 + spec.extra_ids]


def _of_arrays(events: Events | EventLog, spec: CacheSpec) -> Batch:
    size = spec.block_size
    given, names = events.text.parts(), parts_of(spec)
    got = {name: part.shape[-1] for name, part in given.items()}
    if got != dict.fromkeys(names, size):
        raise ValueError(f"events: got blocks of {got}, wanted {dict.fromkeys(names, size)}")
    parts = [given[name] for name in names]
    limit = events.size if isinstance(events, EventLog) else None
    records, parts, limit = jax.device_get((events.records, parts, limit))
    records = records.reshape(-1, WIDTH)[: None if limit is None else int(limit)]
    kinds = records[:, 0]
    stored = np.flatnonzero(kinds == EventKind.STORED)
    text = np.concatenate([part.reshape(-1, size)[stored] for part in parts], axis=1)
    telling = (kinds >= _KINDS[0]) & (kinds <= _KINDS[-1]) & (kinds != EventKind.COPIED)
    return Batch(records[telling], text)  # an index by an array makes a copy


def _of_list(events: list[dict[str, Any]], spec: CacheSpec) -> Batch:
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
    records = np.array(rows, np.int32).reshape(-1, WIDTH)
    return Batch(records, np.array(texts, np.int32).reshape(-1, len(parts) * size))
