# SPDX-License-Identifier: Apache-2.0
"""Random histories of possible events, without a cache, and the right contents of each wire's mirror."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

import kvjax
from kvjax import LayerSpec
from kvjax.blocks.hashes import first_64_bits
from kvjax.events import EventLog, Events, Mirror
from kvjax.events.records import COLUMNS, EventKind
from kvjax.interop import hashing, trtllm
from kvjax.interop.vllm import Prefix
from kvjax.state import Text

SIZE = 4
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {}, "extra ids": {"extra_ids": True}, "windows": {"layers": [None, 8]}, "bare": {"layers": [8, 12]},
}  # fmt: skip


def spec_of(shape: str, blocks: int = 10) -> kvjax.CacheSpec:
    """A spec with a host tier."""
    options = dict(SHAPES[shape])
    layers = [LayerSpec(1, 4, window=window) for window in options.pop("layers", [None])]
    return kvjax.make_spec(
        layers, num_blocks=blocks, num_host_blocks=6, max_seqs=2, max_length=32, block_size=SIZE, **options
    )


def namespaces() -> kvjax.Namespaces:
    """Four namespaces: a plain namespace, a salt, an adapter, and both."""
    namespaces_made = kvjax.Namespaces()
    namespaces_made(salt="tenant a"), namespaces_made(lora=3), namespaces_made(salt="tenant b", lora=3)
    return namespaces_made


class Forest:
    """Draws events which keep the cache's rules: children are removed first, windows' blocks with the first group's.

    Attributes:
      mirror: the cached blocks, by `fold`.
    """

    def __init__(self, spec: kvjax.CacheSpec, seed: int, num_namespaces: int = 4):
        self.spec, self.rng, self.num_namespaces = spec, random.Random(seed), num_namespaces
        self.mirror = Mirror()
        self.generations: dict[tuple[int, int], int] = {}

    def draw(self, count: int) -> list[dict[str, Any]]:
        """The events of so many changes."""
        events: list[dict[str, Any]] = []
        for _ in range(count):
            change = self.rng.choices([self._store, self._remove, self._update, self._clear], [60, 30, 20, 1])[0]
            new = change()
            self.mirror = kvjax.fold(new, self.mirror)
            events += new
        return events

    def _nodes(self, group: int = 0) -> list[tuple[int, int, int]]:
        return [node for node in self.mirror.nodes if node[0] == group]

    def _event(self, kind: str, node: tuple[int, int, int], **more: Any) -> dict[str, Any]:
        return {"kind": kind, "group": node[0], "block": node[1], "generation": node[2], **more}

    def _free(self, group: int) -> list[int]:
        used = {block for _, block, _ in self._nodes(group)}
        return [block for block in range(self.spec.groups[group].num_ids) if block not in used]

    def _store(self) -> list[dict[str, Any]]:
        """Stores a new block under a whole block or at a root, and also in some of the windows' groups."""
        events, nodes, rng = [], self.mirror.nodes, self.rng
        parents = [node for node in self._nodes() if len(nodes[node][1]) % SIZE == 0]
        parent = rng.choice([None, *parents])
        namespace, path = (rng.randrange(self.num_namespaces), ()) if parent is None else nodes[parent][:2]
        count = SIZE if rng.random() < 0.8 else rng.randrange(1, SIZE)
        tokens = [rng.choice([0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1]) for _ in range(count)]
        ids = [rng.choice([0, 0, 7, 9]) for _ in range(count)]
        items = tuple(zip(tokens, ids, strict=True)) if self.spec.extra_ids else tuple(tokens)
        taken = {(group, ns, prefix) for (group, *_), (ns, prefix, *_) in nodes.items()}
        for group in range(len(self.spec.groups)):
            free = self._free(group)
            exists = (group, namespace, path + items) in taken
            if not free or exists or (group and (not events or rng.random() < 0.3)):
                continue
            block = rng.choice(free)
            generation = self.generations[group, block] = self.generations.get((group, block), 0) + 1
            text = {"tokens": tokens} | ({"extra_ids": ids} if self.spec.extra_ids else {})
            above = {"parent": None, "namespace": namespace} if parent is None else {"parent": parent[1:]}
            level, priority = rng.randrange(2), rng.choice([35, 80])
            events.append(self._event("stored", (group, block, generation), **above, **text, level=level,
                                      priority=priority))  # fmt: skip
        return events

    def _remove(self) -> list[dict[str, Any]]:
        """Removes a window's block, or a block with its descendants, in all groups, children first."""
        nodes = self.mirror.nodes
        if not nodes:
            return []
        chosen = self.rng.choice(list(nodes))
        if chosen[0] > 0:
            return [self._event("removed", chosen)]
        namespace, path = nodes[chosen][:2]
        doomed = [n for n, (ns, prefix, *_) in nodes.items() if ns == namespace and prefix[: len(path)] == path]
        return [self._event("removed", node) for node in sorted(doomed, key=lambda n: (-len(nodes[n][1]), -n[0]))]

    def _update(self) -> list[dict[str, Any]]:
        """Changes the level or priority of some blocks, in any order, perhaps back and forth."""
        nodes = list(self.mirror.nodes)
        chosen = self.rng.choices(nodes, k=self.rng.randrange(1, 6)) if nodes else []
        return [
            self._event("updated", node, level=self.rng.randrange(2), priority=self.rng.choice([35, 80]))
            for node in chosen
        ]

    def _clear(self) -> list[dict[str, Any]]:
        return [{"kind": "cleared", "group": group} for group in range(len(self.spec.groups))]


def arrays_of(events: Iterable[dict[str, Any]], spec: kvjax.CacheSpec, *, log: bool = False) -> Events | EventLog:
    """Decoded events as arrays with padding between, or as a log with garbage after them and beyond each text."""
    events = list(events)
    total = 2 * len(events) + 3
    records, text = np.zeros((total, len(COLUMNS)), np.int32), np.full((2, total, spec.block_size), 77, np.int32)
    indices = range(len(events)) if log else range(1, total, 2)
    for index, event in zip(indices, events, strict=False):
        row = {**event, "kind": EventKind[event["kind"].upper()]}
        if event["kind"] == "stored":
            source = (-1, event["namespace"]) if event["parent"] is None else event["parent"]
            row |= {"source": source[0], "source_generation": source[1], "num_tokens": len(event["tokens"])}
            for part, name in enumerate(("tokens", "extra_ids")):
                text[part, index, : len(event["tokens"])] = event.get(name, 0)
        records[index] = [row.get(name, 0) for name in COLUMNS]
    parts = Text(text[0], text[1] if spec.extra_ids else None)
    if log:
        records[len(events) :] = 4
        return EventLog(records, parts, *(np.int32(value) for value in (len(events), 0, 0)))
    zero = np.zeros(1, np.int32)
    return Events(records, parts, zero, zero, zero, zero[0])


def with_foreign(payload: bytes, rng: random.Random) -> bytes:
    """A payload of vLLM's wire with events of others among its own, which leave the index as it is.

    The others are an offloading connector, which copies the stored blocks to a disk and deletes them there, and groups
    which skip blocks. Some events are unreadable.
    """
    time, events, rank = msgspec.msgpack.decode(payload)
    foreign = [
        ["BlockStored", [b"unknown"], None, [], 0, None, "CPU"], ["BlockStored", [b"unknown"], 1, [1] * 8, 4, None],
        ["BlockRemoved", [b"unknown"], "CPU", 1], ["BlockMoved", [1]], {"type": "BlockStored"}, None, [["BlockStored"]],
        ["BlockStored", [b"unknown"], None, ["text"] * 4, 4, None], ["BlockStored", [b"unknown"], None, [1] * 3, 0],
    ]  # fmt: skip
    mixed = []
    for event in events:
        mixed += [rng.choice(foreign), event]
        fields = event if isinstance(event, dict) else {"type": event[0], "block_hashes": (event[1:] or [[]])[0]}
        group = event.get("group_idx") if isinstance(event, dict) else (*event, *[None] * 9)[9]
        if fields["type"] == "BlockStored" and rng.random() < 0.5:
            hashes = fields["block_hashes"]
            mixed.append(["BlockStored", [*hashes, b"unknown"], None, [], 0, None, "DISK", None, None, group])
            mixed.append(["BlockRemoved", [*hashes, *hashes], "DISK", group])
    return msgspec.msgpack.encode([time, mixed, rank])


def projected(
    mirror: Mirror, spec: kvjax.CacheSpec, names: kvjax.Namespaces, *, key: bytes = b"", salts: str = "digest",
    loras: dict[int, str] | None = None, extra_name: Any = None, groups: Iterable[int] | None = None,
) -> dict[Prefix, tuple[str, ...]]:  # fmt: skip
    """The part of an index carried by vLLM's wire: {prefix: media}."""
    carried, wired = {}, {}
    published = set(range(1 if spec.bare else 0, len(spec.groups)) if groups is None else groups)
    nodes = sorted(mirror.nodes.items(), key=lambda item: len(item[1][1]))
    for (group, *_), (namespace, path, level, _) in nodes:
        if group in published and len(path) % spec.block_size == 0 and namespace in names:
            wired[group, namespace, path] = ("GPU", "CPU")[level]
    for (group, namespace, path), medium in wired.items():
        salt, adapter = names.describe(namespace)
        lora = None if adapter is None else (loras or {}).get(adapter, str(adapter))
        items = list(path) if spec.extra_ids else [(token, 0) for token in path]
        if any(extra for _, extra in items) and extra_name is None:
            continue
        if salt is not None and salts == "omit":
            continue
        wire = hashing.salt_hash(salt, key=key) if salt is not None and salts == "digest" else salt
        start = _start(wired, namespace, path, spec.block_size, group)
        after = None
        if start:
            root = hashing.root_hash(None, salt, lora, key=key)
            wire, after = None, first_64_bits(digest_of(path[:start], spec.block_size, root, key=key))
        tokens = tuple(token for token, _ in items)[start:]
        extra = tuple(
            (index - start, extra_name(ids))
            for index, (_, ids) in enumerate(items)
            if ids and (index % spec.block_size == 0 or items[index - 1][1] != ids)
        )
        carried[Prefix(group, lora, wire, tokens, extra, after)] = (medium,)
    return carried


def written(
    mirror: Mirror, spec: kvjax.CacheSpec, names: kvjax.Namespaces, *, key: bytes = b"", salts: str = "digest"
) -> dict[trtllm.Prefix, tuple[int, int]]:
    """The part of an index carried by TensorRT-LLM's form: {prefix: (level, priority)}."""
    carried, size = {}, spec.block_size
    wired = {
        (group, namespace, path): level_and_priority
        for (group, *_), (namespace, path, *level_and_priority) in mirror.nodes.items()
        if (group or not spec.bare) and namespace in names
    }
    for (group, namespace, path), (level, priority) in wired.items():
        salt, adapter = names.describe(namespace)
        lora, wire, after = None if adapter is None else str(adapter), salt, None
        if salt is not None and salts == "omit":
            continue
        if salt is not None and salts == "digest":
            wire = hashing.salt_hash(salt, key=key)
        start = _start(wired, namespace, path, size, group)
        if start:
            root = hashing.root_hash(None, salt, lora, key=key)
            after = first_64_bits(digest_of(path[:start], size, root, extra=spec.extra_ids, key=key))
        tokens = path[start:] if spec.extra_ids else tuple((token, 0) for token in path[start:])
        window = spec.groups[group].window
        window = spec.max_length if window is None else min(window, spec.max_length - 1)
        carried[trtllm.Prefix(window, group, lora, wire, tokens, after)] = level, priority
    return carried


def digest_of(path: tuple, size: int, root: bytes, *, extra: bool = False, key: bytes = b"") -> bytes:
    """The hash of a prefix, from its root's. With `extra` its items are (token, extra id)."""
    for start in range(0, len(path), size):
        items = path[start : start + size]
        root = hashing.block_hash(root, *(map(list, zip(*items, strict=True)) if extra else [items]), key=key)
    return root


class Lines:
    """A writer of TensorRT-LLM's lines, and a mirror to read them."""

    def __init__(self, spec: kvjax.CacheSpec, names: kvjax.Namespaces, *, key: bytes = b""):
        self.names, self.key, self.mirror = names, key, trtllm.Mirror()
        self.writer = trtllm.Writer(spec, names=names, key=key)
        self.follow([])  # the groups

    def follow(self, events: Any) -> None:
        self.mirror.follow(self.writer.lines(events))

    def agrees(self, mirror: Mirror) -> bool:
        """Whether the mirror equals the part of an index carried by the form, and is complete."""
        wanted = written(mirror, self.writer.nodes.spec, self.names, key=self.key)
        assert self.mirror.index == wanted, set(self.mirror.index.items()) ^ set(wanted.items())
        return self.mirror.complete and self.mirror.counts["refused"] == 0


def _start(wired: dict[Any, Any], namespace: int, path: tuple, size: int, group: int) -> int:
    """The start of the known part of a path. Blocks before it, outside of every group's index, are unknown."""
    groups = {group_index for group_index, *_ in wired}
    last = len(path) - (len(path) - 1) % size - 1  # the start of the last block, perhaps a partial one
    for end in range(last, -1, -size):
        if end and not any((group_index, namespace, path[:end]) in wired for group_index in {group, *groups}):
            return end
    return 0


def named(
    mirror: Mirror, spec: kvjax.CacheSpec, names: kvjax.Namespaces, *, groups: Iterable[int] | None = None,
    key: bytes = b"", model: str | None = None, loras: dict[int, str] | None = None,
) -> dict[tuple[int, str], int]:  # fmt: skip
    """The part of an index carried by the agent's wire: {(group, cache id): level}, by default of a single group."""
    groups, carried = {int(spec.bare)} if groups is None else set(groups), {}
    for (group, *_), (namespace, path, level, _) in mirror.nodes.items():
        if group in groups and len(path) % spec.block_size == 0 and namespace in names:
            salt, adapter = names.describe(namespace)
            lora = None if adapter is None else (loras or {}).get(adapter, str(adapter))
            root = hashing.root_hash(model, salt, lora, key=key)
            digest = digest_of(path, spec.block_size, root, extra=spec.extra_ids, key=key)
            carried[group, str(first_64_bits(digest))] = level
    return carried
