# SPDX-License-Identifier: Apache-2.0
"""Events: what a transition did, as data; the orders that move bytes and the news for everybody else.

Inside `jit` they are arrays of a fixed size with padding between; on the host a list of dicts. The law they obey:
`fold(events)` gives exactly the index of the state they came with, from any snapshot, for any interleaving.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, put, rank
from kvjax.transfer import Transfer


class EventKind(enum.IntEnum):
    """What happened to a block. NONE marks padding."""

    NONE = 0
    CREATED = 1
    REMOVED = 2
    UPDATED = 3
    STORED = 4
    COPIED = 5
    CLEARED = 6


class Status(enum.IntEnum):
    """Why a row's request was done (OK) or not; a request that was not done has changed nothing."""

    OK = 0
    NO_BLOCKS = 1
    ROW_FULL = 2
    BAD_REQUEST = 3
    HELD = 4


COLUMNS = (
    "kind", "group", "block", "generation", "source", "source_generation", "num_tokens", "level", "priority",
)  # fmt: skip
DEFAULT_PRIORITY = 35


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Events:
    """The events of one transition, in the order removed, updated, stored, copied.

    Attributes:
      records: i32[E, 9]; the columns below, one event a row, rows of kind NONE are padding.
      tokens: i32[E, P]; the contents of stored blocks.
      extra_ids: i32[E, P]; likewise, or None.
      status: i32[R]; a `Status` for each row of the request.
      queried: i32[R]; prompt tokens that were looked up.
      cached: i32[R]; those of them that were found.
      shortfall: i32[]; blocks that were missing.
      transfer: moves between tiers to be executed before anything else; None where there can be none.

    Columns, each also a property of this class:
      kind: an `EventKind`.
      group: which attention window.
      block, generation: the node that the event is about; of a copy, the pool row to copy to.
      source, source_generation: of a stored block its parent node in the first group, or (NO_BLOCK, namespace) at a
        root; of a copy the pool row to copy from.
      num_tokens: tokens stored, or leading tokens to copy.
      level: 0 on the device, 1 on the host.
      priority: the stated retention priority.
    """

    records: jax.Array
    tokens: jax.Array
    extra_ids: jax.Array | None
    status: jax.Array
    queried: jax.Array
    cached: jax.Array
    shortfall: jax.Array
    transfer: Transfer | None = None

    @property
    def ok(self) -> jax.Array:
        """bool[]; whether every row of the request was done."""
        return jnp.all(self.status == Status.OK)

    kind = property(lambda self: self.records[..., 0])
    group = property(lambda self: self.records[..., 1])
    block = property(lambda self: self.records[..., 2])
    generation = property(lambda self: self.records[..., 3])
    source = property(lambda self: self.records[..., 4])
    source_generation = property(lambda self: self.records[..., 5])
    num_tokens = property(lambda self: self.records[..., 6])
    level = property(lambda self: self.records[..., 7])
    priority = property(lambda self: self.records[..., 8])


def record(kind: EventKind, where: jax.Array, **columns: jax.Array | int) -> jax.Array:
    """i32[K, 9]; one row for each entry of where bool[K], of kind NONE where it does not hold."""
    values = {"kind": jnp.where(where, np.int32(kind), 0), "priority": DEFAULT_PRIORITY, **columns}
    return jnp.stack(
        [jnp.broadcast_to(jnp.asarray(values.get(c, 0), jnp.int32), where.shape) for c in COLUMNS], axis=-1
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EventLog:
    """Events of many steps, packed without padding, for the carry of a jitted loop.

    Attributes:
      records: i32[C, 9]; as in `Events`.
      tokens: i32[C, P].
      extra_ids: i32[C, P] or None.
      size: i32[]; events in the log.
    """

    records: jax.Array
    tokens: jax.Array
    extra_ids: jax.Array | None
    size: jax.Array

    @property
    def room(self) -> jax.Array:
        """i32[]; events that still fit; a loop stops while this is at least its step's worst case."""
        return self.records.shape[0] - self.size


def init_log(capacity: int, block_size: int, extra_ids: bool = False) -> EventLog:
    """An empty log for `capacity` events."""
    return EventLog(
        records=jnp.zeros((capacity, len(COLUMNS)), jnp.int32),
        tokens=jnp.zeros((capacity, block_size), jnp.int32),
        extra_ids=jnp.zeros((capacity, block_size), jnp.int32) if extra_ids else None,
        size=jnp.int32(0),
    )


def append(log: EventLog, events: Events) -> EventLog:
    """Adds a transition's events to the log. The caller has checked `log.room`: what does not fit is lost."""
    real = events.kind != EventKind.NONE
    place = log.size + rank(real)
    where = real & (place < log.records.shape[0])
    return EventLog(
        records=put(log.records, place, events.records, where),
        tokens=put(log.tokens, place, events.tokens, where),
        extra_ids=None if log.extra_ids is None else put(log.extra_ids, place, events.extra_ids, where),
        size=jnp.minimum(log.size + count(real), log.records.shape[0]),
    )


def to_list(events: Events | EventLog) -> list[dict[str, Any]]:
    """Decodes events on the host: one dict each, padding dropped, stored blocks with tokens and parent node."""
    records = np.asarray(events.records).reshape(-1, len(COLUMNS))
    size = events.tokens.shape[-1]
    tokens = np.asarray(events.tokens).reshape(-1, size)
    extra = None if events.extra_ids is None else np.asarray(events.extra_ids).reshape(-1, size)
    limit = int(events.size) if isinstance(events, EventLog) else len(records)
    return [
        _decode(records[i], tokens[i], None if extra is None else extra[i]) for i in np.flatnonzero(records[:limit, 0])
    ]


def _decode(row: np.ndarray, tokens: np.ndarray, extra_ids: np.ndarray | None) -> dict[str, Any]:
    named = dict(zip(COLUMNS, row.tolist(), strict=True))
    kind = EventKind(named["kind"])
    event: dict[str, Any] = {"kind": kind.name.lower(), "group": named["group"]}
    if kind in (EventKind.CREATED, EventKind.CLEARED):
        return event
    event["block"] = named["block"]
    if kind is EventKind.COPIED:
        return event | {"source": named["source"], "num_tokens": named["num_tokens"]}
    event["generation"] = named["generation"]
    if kind is EventKind.STORED:
        n = named["num_tokens"]
        at_root = named["source"] < 0
        event |= {"parent": None if at_root else (named["source"], named["source_generation"])}
        event |= {"namespace": named["source_generation"]} if at_root else {}
        event |= {"tokens": tokens[:n].tolist(), "level": named["level"], "priority": named["priority"]}
        event |= {} if extra_ids is None else {"extra_ids": extra_ids[:n].tolist()}
    if kind is EventKind.UPDATED:
        event |= {"level": named["level"], "priority": named["priority"]}
    return event


@dataclasses.dataclass(frozen=True)
class Mirror:
    """What somebody knows who has only heard the events.

    Attributes:
      nodes: {(group, block, generation): (namespace, token path, level, priority)}.
    """

    nodes: dict[tuple[int, int, int], tuple[int, tuple, int, int]] = dataclasses.field(default_factory=dict)

    @property
    def index(self) -> dict[tuple[int, int, tuple], tuple[int, int]]:
        """{(group, namespace, token path): (level, stated priority)}; with extra ids a path is of (token, extra id)."""
        return {(node[0], ns, path): (level, priority) for node, (ns, path, level, priority) in self.nodes.items()}


_LACKS = "wanted one that the mirror has: fold(events, mirror), with the mirror of all events before these"


def fold(events: Iterable[dict[str, Any]], mirror: Mirror | None = None) -> Mirror:
    """Replays decoded events on a mirror (default: of an empty cache) and returns the new mirror.

    Raises:
      ValueError: if the events cannot have come from a cache in the mirror's state.
    """
    if isinstance(events, Events | EventLog):
        raise ValueError(f"events: got {type(events).__name__}, wanted the list that to_list makes of it")
    nodes = dict(mirror.nodes) if mirror else {}
    for event in events:
        kind = event["kind"]
        if kind == "cleared":
            nodes = {node: entry for node, entry in nodes.items() if node[0] != event["group"]}
        if kind not in ("stored", "removed", "updated"):
            continue
        node = (event["group"], event["block"], event["generation"])
        if (node in nodes) != (kind != "stored"):
            raise ValueError(
                f"events: got {kind} of node {node}, {'wanted one that is new' if node in nodes else _LACKS}"
            )
        if kind == "stored":
            nodes[node] = _stored(event, nodes)
        elif kind == "removed":
            del nodes[node]
        else:
            nodes[node] = (*nodes[node][:2], event["level"], event["priority"])
    return Mirror(nodes)


def _stored(event: dict[str, Any], nodes: dict) -> tuple[int, tuple, int, int]:
    tokens = event["tokens"]
    path = tuple(zip(tokens, event["extra_ids"], strict=True)) if "extra_ids" in event else tuple(tokens)
    if event["parent"] is None:
        return event["namespace"], path, event["level"], event["priority"]
    parent = (0, *event["parent"])  # the first group links the prefixes of all
    if parent not in nodes:
        raise ValueError(f"events: got stored under node {parent}, {_LACKS}")
    namespace, before, *_ = nodes[parent]
    return namespace, before + path, event["level"], event["priority"]


def counts(events: Events | EventLog) -> dict[str, jax.Array]:
    """How many events of each kind, as i32[] scalars; works under `jit`."""
    kinds = events.records[..., 0]
    return {k.name.lower(): jnp.sum(kinds == k.value, dtype=jnp.int32) for k in EventKind if k}
