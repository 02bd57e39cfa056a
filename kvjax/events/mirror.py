# SPDX-License-Identifier: Apache-2.0
"""Events on the host: decoded, and replayed on a mirror of the index."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from kvjax._compile import own_transfers
from kvjax.checks import on_state
from kvjax.events.log import EventLog
from kvjax.events.records import COLUMNS, EventKind, Events
from kvjax.state import CacheState

_KINDS = {int(kind): kind.name.lower() for kind in EventKind}
_ABOUT_GROUPS = frozenset({int(EventKind.CREATED), int(EventKind.CLEARED)})
_LEVELLED = frozenset({int(EventKind.STORED), int(EventKind.UPDATED)})


@own_transfers()
def to_list(events: Events | EventLog) -> list[dict[str, Any]]:
    """Decodes events on the host: a dict for each event, stored blocks with their tokens and parent node.

    Padding is dropped. The list lacks the events lost by a full log, which `EventLog.lost` counts.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> _, events = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> for event in kvjax.to_list(events):
      ...     print(event["kind"], event["block"], event["parent"], event["tokens"])
      stored 0 None [0, 1, 2, 3]
      stored 1 (0, 1) [4, 5, 6, 7]
    """
    size = events.tokens.shape[-1]
    records = np.asarray(events.records).reshape(-1, len(COLUMNS))
    records = records[: int(events.appended) if isinstance(events, EventLog) else None]
    used = np.flatnonzero(records[:, 0])
    stored = np.flatnonzero(records[:, 0] == EventKind.STORED)
    parts = {name: np.asarray(x).reshape(-1, size)[stored].tolist() for name, x in events.text.parts().items()}
    texts = zip(*parts.values(), strict=True)
    return [_decode(record, parts, texts) for record in records[used].tolist()]


def _decode(record: list[int], parts: Iterable[str], texts: Iterator[tuple[list[int], ...]]) -> dict[str, Any]:
    """The event of a record. A stored record takes the next of `texts`, whose parts have these names."""
    kind, group, block, generation, source, source_generation, num_tokens, level, priority = record
    event: dict[str, Any] = {"kind": _KINDS[kind], "group": group}
    if kind in _ABOUT_GROUPS:
        return event
    event["block"] = block
    if kind == EventKind.COPIED:
        event["source"] = source
        event["num_tokens"] = num_tokens
        return event
    event["generation"] = generation
    if kind == EventKind.STORED:
        if source < 0:
            event["parent"] = None
            event["namespace"] = source_generation
        else:
            event["parent"] = source, source_generation
        for name, part in zip(parts, next(texts), strict=True):
            event[name] = part[:num_tokens]
    if kind in _LEVELLED:
        event["level"] = level
        event["priority"] = priority
    return event


Node = tuple[int, int, int]  # group, block, generation
Entry = tuple[int, tuple, int, int]  # namespace, token path, level, priority


@dataclasses.dataclass(frozen=True)
class Mirror:
    """The cache's index, rebuilt only from events.

    Attributes:
      nodes: {(group, block, generation): (namespace, token path, level, priority)}.
    """

    nodes: dict[Node, Entry] = dataclasses.field(default_factory=dict)

    @property
    def index(self) -> dict[tuple[int, int, tuple], tuple[int, int]]:
        """{(group, namespace, token path): (level, priority)}. With extra ids a path has pairs (token, id)."""
        return {(node[0], ns, path): (level, priority) for node, (ns, path, level, priority) in self.nodes.items()}


_LACKS = "wanted a node of the mirror: fold(events, mirror), with the mirror of all events before these"


def fold(events: Iterable[dict[str, Any]], mirror: Mirror | None = None) -> Mirror:
    """Replays decoded events on a mirror and returns the new mirror. The default mirror is empty.

    Raises:
      ValueError: if a cache in the mirror's state cannot have made these events.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, events = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> mirror = kvjax.fold(kvjax.to_list(events))
      >>> sorted(path for group, namespace, path in mirror.index)
      [(0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7)]
      >>> mirror.index == kvjax.events.index_of(state)
      True
    """
    nodes = dict(mirror.nodes) if mirror else {}
    for event in decoded(events):
        kind = event["kind"]
        if kind == "cleared":
            nodes = {node: entry for node, entry in nodes.items() if node[0] != event["group"]}
        if kind not in ("stored", "removed", "updated"):
            continue
        node = node_of(event, nodes, _LACKS)
        if kind == "stored":
            nodes[node] = _stored(event, nodes)
        elif kind == "removed":
            del nodes[node]
        else:
            nodes[node] = (*nodes[node][:2], event["level"], event["priority"])
    return Mirror(nodes)


def decoded(events: Any) -> Iterable[dict[str, Any]]:
    """The events. Arrays of events are an error."""
    if isinstance(events, Events | EventLog):
        raise ValueError(f"events: got {type(events).__name__}, wanted a list from to_list")
    return events


def node_of(event: dict[str, Any], nodes: Mapping[Node, Any], lacks: str) -> Node:
    """The node of a stored, removed or updated event. `lacks` ends the error message for a missing node."""
    node = (event["group"], event["block"], event["generation"])
    if (node in nodes) != (event["kind"] != "stored"):
        wanted = "wanted a new node" if node in nodes else lacks
        raise ValueError(f"events: got {event['kind']} of node {node}, {wanted}")
    return node


def parent_of[E](event: dict[str, Any], nodes: Mapping[Node, E], lacks: str) -> E | None:
    """The entry of a stored event's parent, or None at a root."""
    if event["parent"] is None:
        return None
    parent = (0, *event["parent"])  # the first group links prefixes for all groups
    if parent not in nodes:
        raise ValueError(f"events: got stored under node {parent}, {lacks}")
    return nodes[parent]


def _stored(event: dict[str, Any], nodes: dict[Node, Entry]) -> Entry:
    tokens = event["tokens"]
    path = tuple(zip(tokens, event["extra_ids"], strict=True)) if "extra_ids" in event else tuple(tokens)
    parent = parent_of(event, nodes, _LACKS)
    if parent is None:
        return event["namespace"], path, event["level"], event["priority"]
    namespace, before, *_ = parent
    return namespace, before + path, event["level"], event["priority"]


@on_state
def snapshot(state: CacheState) -> list[dict[str, Any]]:
    """The events that build the cache's index, for a reader who joins late: created, then stored.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> [event["kind"] for event in kvjax.events.snapshot(state)]
      ['created', 'stored', 'stored']
      >>> kvjax.fold(kvjax.events.snapshot(state)).index == kvjax.events.index_of(state)
      True
    """
    return [event for event in to_list(snapshot_log(state)) if event["kind"] != "cleared"]


@own_transfers()
@on_state
def snapshot_log(state: CacheState) -> EventLog:
    """A snapshot on the host as an `EventLog`, for any reader: created, cleared, then stored.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, _ = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> kvjax.events.snapshot_log(state)
      EventLog(4 of 4; 1 created, 1 cleared, 2 stored)
    """
    host: Any = jax.device_get(state.groups)
    begin = [(kind, group_index) for kind in (EventKind.CREATED, EventKind.CLEARED) for group_index in range(len(host))]
    parts = [np.pad(np.array(begin, np.int32), ((0, 0), (0, len(COLUMNS) - 2)))]
    group0_ids = [np.zeros(len(begin), np.int32)]  # blocks of the first group, which has the text of each record
    for group_index, group in enumerate(host):
        blocks = group.blocks
        findable = np.flatnonzero(blocks.fill > 0)
        age = (blocks.clock - blocks.stored)[findable].astype(np.int64)
        ids = findable[np.argsort(-age, kind="stable")].astype(np.int32)  # parents before children
        columns = group.group0_blocks(ids), group.on_device(ids), blocks.requested_priority(ids)
        group0_blocks, on_device, priority = jax.device_get(columns)
        kinds = np.full((len(ids), 2), (EventKind.STORED, group_index))
        node = ids, blocks.generation[ids], *host[0].blocks.parent[group0_blocks].T
        parts.append(np.column_stack((kinds, *node, blocks.fill[ids], ~on_device, priority)).astype(np.int32))
        group0_ids.append(group0_blocks)
    records = np.concatenate(parts)
    text_ids = np.concatenate(group0_ids)
    is_text = np.arange(state.spec.block_size) < records[:, COLUMNS.index("num_tokens"), None]
    text = jax.tree.map(lambda x: np.where(is_text, x[text_ids], 0), host[0].blocks.text)
    zero = np.zeros((), np.int32)
    unusable = zero if state.spec.has_recurrent else None
    arrays: Any = records, text, np.array(len(records), np.int32), zero, zero, unusable
    return EventLog(*arrays)


@on_state
def index_of(state: CacheState) -> dict[tuple[int, int, tuple], tuple[int, int]]:
    """{(group, namespace, token path): (level, priority)} of every findable block.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [6], seqs=[0])
      >>> kvjax.events.index_of(state)  # on the device, with the default priority
      {(0, 0, (0, 1, 2, 3)): (0, 35)}
    """
    return fold(snapshot(state), Mirror()).index
