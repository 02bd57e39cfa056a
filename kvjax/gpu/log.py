# SPDX-License-Identifier: Apache-2.0
"""`events/log.append` as a kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from kvjax.events.log import EventLog, lookups
from kvjax.events.records import EventKind, Events
from kvjax.gpu.lanes import copy_rows, count, lanes_of, numbered, rank
from kvjax.gpu.memory import TEXT, Memory, run
from kvjax.state import Text


@functools.partial(jax.jit, static_argnames="interpret")
def append_events(log: EventLog, events: Sequence[Events], interpret: bool = False) -> EventLog:
    """Equals `events/log.append` exactly."""
    lanes = [lanes_of(transition.kind.shape[0]) for transition in events]
    reads = {}
    for i, transition in enumerate(events):
        parts = {"records": transition.records, **transition.text.parts()}
        reads |= {f"{name}{i}": part for name, part in parts.items()}
    done = run(
        functools.partial(_append, lanes=lanes),
        "append_events",
        lanes=max(lanes),
        reads=reads,
        changes={"records": log.records, "appended": log.appended, **log.text.parts()},
        makes={},
        interpret=interpret,
    )
    text = Text(done["tokens"], done.get("extra_ids"))
    return EventLog(done["records"], text, done["appended"], **lookups(log, events))


def _append(memory: Memory, *, lanes: Sequence[int]) -> None:
    """The kernel: a lane for each record of a transition, transition by transition."""
    capacity = memory.shape("records")[0]
    appended = memory.number("appended")
    for i, width in enumerate(lanes):
        lane = numbered(width)
        inside = lane < memory.shape(f"records{i}")[0]
        is_event = memory.pick(f"records{i}", (lane, 0), inside) != int(EventKind.NONE)
        index = appended + rank(is_event)
        fits = is_event & (index < capacity)
        for name in ("records", *TEXT):
            if name in memory:
                copy_rows(memory, [(f"{name}{i}", name)], lane, index, fits)
        appended = appended + count(is_event)
    memory.set_number("appended", appended)
