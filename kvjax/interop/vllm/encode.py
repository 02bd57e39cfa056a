# SPDX-License-Identifier: Apache-2.0
"""Encodes events of a cache as payloads of vLLM's wire: `KVEventBatch` in three forms.

    payload     array: time f64, events, data-parallel rank
    map         events as maps with "type" (vLLM since 0.24)
    array       events as arrays, the tag first, with the same fields in the same order
    array-0.11  like "array", up to the field `medium`

An event consists of a middle, which numpy makes for many blocks at once, and of two ends, made once for each group,
level and namespace.

Most readers silently drop a message that breaks one of these rules:

- Hashes are ints, and the parent is nil at a root. Parents come before children, and no hash comes twice in an event.
- There are only whole blocks. Consecutive stored blocks of the same chain, group, level and namespace form an event,
  and so do consecutive removals from the same group and level.
- A change of level is a removal and a store (`interop/encoder.py`).
- AllBlocksCleared empties every group at its reader. It is sent only when all groups are empty.

Source: vLLM's `distributed/kv_events.py`.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.blocks.keys import Namespaces
from kvjax.checks import static_int
from kvjax.events import columns as col
from kvjax.events.host_events import pieces, runs
from kvjax.events.index import NodeMap, Space
from kvjax.interop._wires import msgspec
from kvjax.interop.encoder import WHOLE, EventEncoder, omitted_salts
from kvjax.interop.hashing import Hashing, salt_text
from kvjax.interop.readers.vllm import MEDIA, SALT_PREFIX
from kvjax.spec import CacheSpec, GroupSpec, Kind

FORMS = ("map", "array", "array-0.11")
# Bytes.
_HASH = 9
_TOKEN = 5  # at most
_FRAME = 512  # around hashes and tokens, usually
_ALWAYS = frozenset({"lora_id", "lora_name"})  # nil if absent; other absent fields are omitted
_NIL = b"\xc0"
_pack = msgspec.msgpack.Encoder().encode


class Encoder(EventEncoder[bytes]):
    """Encodes events as payloads for your own transport. `Publisher` includes a transport.

    If all layers of a spec have windows, only the windows are published. NVIDIA Dynamo's indexer accepts none of these.

    Args:
      spec: the spec of the cache, which must be empty; otherwise call `attach`.
      names, lora_names, model, key: options of `hashing.Hashing`.
      salts: "digest" publishes a hash of each salt, from which short salts can be guessed without a `key`; "plain" the
        salt, and "omit" no blocks of prompts with a salt.
      extra_name: from an extra id to its name, the same on all replicas. None omits blocks with extra ids other than 0,
        and all blocks below them.
      form: "map", "array" or "array-0.11". vLLM 0.11's decoder, AIBrix and kthena refuse the default. The form
        "array-0.11" has no field for adapters' names, salts, extra ids and windows, and omits such blocks.
      rank: the data-parallel rank.
      max_message: the maximum bytes of a payload; larger batches are divided. A single block with very long names may
        exceed it.

    Example:
      >>> from kvjax.interop.vllm import Encoder, decode
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> (payload,) = Encoder(spec).encode(events, now=0.0)
      >>> (stored,) = decode(payload).events
      >>> len(stored.hashes), stored.size  # two blocks of four tokens
      (2, 4)
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        names: Namespaces | None = None,
        lora_names: Mapping[int, str] | None = None,
        model: str | None = None,
        key: bytes = b"",
        salts: str = "digest",
        extra_name: Callable[[int], str] | None = None,
        form: str = "map",
        rank: int = 0,
        max_message: int = 1 << 20,
    ):
        if form not in FORMS:
            raise ValueError(f"form: got {form!r}, wanted {' or '.join(map(repr, FORMS))}")
        self._form = form
        self._has_groups = form != "array-0.11"
        without_field = () if self._has_groups else (col.SALT, col.LORA, col.EXTRA)
        unpublished = WHOLE | ({col.EXTRA: "extra_id_without_name"} if extra_name is None else {})
        unpublished |= dict.fromkeys(without_field, "form_without_field") | omitted_salts(salts)
        groups = range(int(spec.bare), len(spec.groups) if self._has_groups else 1)
        super().__init__(spec, Hashing(names, lora_names, model, key), groups, unpublished)
        self._salt = functools.partial(salt_text, salts=salts, key=key)
        self._extra_name = extra_name
        self._name_of = functools.cache(self._make_name)
        self.max_message = static_int("max_message", max_message, 4 * (_FRAME + _HASH + _TOKEN * spec.block_size))
        self.rank = static_int("rank", rank, 0)
        self._max_blocks = max_message // 2 // (_HASH + _TOKEN * spec.block_size)
        self._max_hashes = max_message // 2 // _HASH
        self._all_cleared = _pack({"type": "AllBlocksCleared"} if form == "map" else ["AllBlocksCleared"])
        names_of_fields = ("block_hashes", "parent_block_hash", "token_ids")
        self._hashes, self._parent, self._tokens = (_pack(name) if form == "map" else b"" for name in names_of_fields)
        self._ends = functools.lru_cache(4096)(self._make_ends)
        self._ends_of_removed = functools.cache(self._make_ends_of_removed)

    def encode(self, events: Any, now: float | None = None) -> list[bytes]:
        """The payloads of events; an empty list if nothing is published.

        Args:
          events: `Events`, an `EventLog`, or decoded events, possible after all events so far.
          now: seconds since 1970; defaults to the present time.
        """
        return self.payloads(self.messages(self.follow(events)), now)

    def snapshot(self, now: float | None = None) -> list[bytes]:
        """The payloads that replace a reader's contents by the present index: AllBlocksCleared, then stores."""
        return self.snapshot_of(self.nodes, now)

    def snapshot_of(self, nodes: NodeMap, now: float | None = None) -> list[bytes]:
        """The snapshot of a copy of the index."""
        return self.payloads([self._all_cleared, *self.messages(nodes.snapshot())], now)

    def idle(self) -> bytes:
        """The payload of an empty batch."""
        return self._payload([], time.time())

    def payloads(self, events: Sequence[bytes], now: float | None = None) -> list[bytes]:
        """Encoded events as payloads of at most `max_message` bytes."""
        timestamp = time.time() if now is None else now
        payloads = []
        batch = []
        size = _FRAME
        for event in events:
            if batch and size + len(event) > self.max_message:
                payloads.append(self._payload(batch, timestamp))
                batch = []
                size = _FRAME
            batch.append(event)
            size += len(event)
        return [*payloads, self._payload(batch, timestamp)] if batch else payloads

    def _payload(self, events: Sequence[bytes], timestamp: float) -> bytes:
        header = b"\x93\xcb" + struct.pack(">d", timestamp) + _array_header(len(events))
        return b"".join((header, *events, _pack(self.rank)))

    def _removed(self, group_index: int, rows: np.ndarray) -> list[bytes]:
        """Encodes consecutive removals from the same level as an event."""
        hashes = _packed(col.hashes_of(rows))
        levels = rows[:, col.LEVEL]
        events = []
        for start, stop in pieces(runs(levels), self._max_hashes):
            head, tail = self._ends_of_removed(group_index, int(levels[start]))
            events.append(b"".join((head, _array_header(stop - start), hashes[start * _HASH : stop * _HASH], tail)))
        return events

    def _cleared(self) -> list[bytes]:
        return [self._all_cleared]

    def _stored(self, group_index: int, rows: np.ndarray, spaces: Mapping[int, Space]) -> list[bytes]:
        """Encodes each chain of consecutive blocks as an event."""
        size = self.nodes.spec.block_size
        tokens, extra_ids = np.split(rows[:, col.TEXT :], [size], axis=1)
        tokens = tokens.reshape(-1).tolist()
        extra_keys = self._extra_keys(extra_ids)
        hashes = _packed(col.hashes_of(rows))
        parents = _packed(col.hashes_of(rows, col.ABOVE))
        columns = rows[:, [col.LEVEL, col.NAMESPACE, col.DEPTH]].tolist()

        def chain(start: int, stop: int) -> bytes:
            """Encodes a chain of blocks as a stored event."""
            level, namespace, depth = columns[start]
            space = spaces[namespace]
            num_roots = 0 if depth else stop - start
            if extra_keys:
                head, tail = self._make_ends(group_index, level, space, num_roots, extra_keys[start:stop])
            else:
                head, tail = self._ends(group_index, level, space, num_roots)
            first = start * _HASH
            parts = [head, _array_header(stop - start), hashes[first : stop * _HASH]]
            parts += [self._parent, parents[first : first + _HASH] if depth else _NIL]
            parts += [self._tokens, _pack(tokens[start * size : stop * size]), tail]
            return b"".join(parts)

        events = []
        for start, stop in pieces(col.chains_of(rows, col.LEVEL, col.NAMESPACE), self._max_blocks):
            event = chain(start, stop)
            if len(event) + _FRAME <= self.max_message:
                events.append(event)
            else:  # with very long names a chain does not fit a message
                events += [chain(block, block + 1) for block in range(start, stop)]
        return events

    def _extra_keys(self, ids: np.ndarray) -> list[list[Any] | None]:
        """[name, offset] of each run of equal extra ids i32[n, P or 0] except 0, for each row; [] if all are 0."""
        if not ids.any():
            return []
        begins = ids != 0
        begins[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        extra_keys: list[list[Any]] = [[] for _ in ids]
        for row, offset in np.argwhere(begins).tolist():
            extra_keys[row].append([self._name_of(int(ids[row, offset])), offset])
        return [keys or None for keys in extra_keys]

    def _make_name(self, extra_id: int) -> str:
        assert self._extra_name is not None, "blocks with extra ids are unpublished without `extra_name`"
        name = self._extra_name(extra_id)
        if not isinstance(name, str):
            raise ValueError(f"extra_name: got {name!r} for extra id {extra_id}, wanted text")
        return name

    def _make_ends(
        self, group_index: int, level: int, space: Space, num_roots: int, extra_keys: Sequence[Any] = ()
    ) -> tuple[bytes, bytes]:
        """The bytes of a BlockStored event before the number of its hashes and after its tokens.

        `num_roots` is the number of its blocks if the first block has no parent, else 0. `extra_keys` has None or a
        list of [name, offset] for each block. It is empty if no block has any.
        """
        group = self.nodes.spec.groups[group_index]
        window = group.window if group.kind is Kind.WINDOW else None
        salt = self._salt(space.salt)
        keys = list(extra_keys)
        if self._form == "array" and salt is not None and num_roots:
            keys = keys or [None] * num_roots
            keys[0] = [SALT_PREFIX + salt, *(keys[0] or ())]
        size = self.nodes.spec.block_size
        fields: dict[str, Any] = {"block_size": size, "lora_id": space.lora_id, "medium": MEDIA[level]}
        if self._has_groups:
            fields |= {"lora_name": space.lora, "extra_keys": keys if any(keys) else None, "group_idx": group_index}
            fields |= {"kv_cache_spec_kind": _kind_of(group), "kv_cache_spec_sliding_window": window}
        if self._form == "map":
            fields["cache_salt"] = salt
            fields = {name: value for name, value in fields.items() if value is not None or name in _ALWAYS}
        elif window is None:
            fields.pop("kv_cache_spec_sliding_window", None)
        return self._around("BlockStored", 3, fields)

    def _make_ends_of_removed(self, group_index: int, level: int) -> tuple[bytes, bytes]:
        """The bytes of a BlockRemoved event before the number of its hashes and after its hashes."""
        group = {"group_idx": group_index} if self._has_groups else {}
        return self._around("BlockRemoved", 1, {"medium": MEDIA[level], **group})

    def _around(self, tag: str, num_before: int, fields: dict[str, Any]) -> tuple[bytes, bytes]:
        """The bytes of an event up to its hashes, and from `fields` on. Another `num_before` fields come in between."""
        count = 1 + num_before + len(fields)
        if self._form == "map":
            values = [_pack(name) + _pack(value) for name, value in fields.items()]
            return bytes([0x80 | count]) + _pack("type") + _pack(tag) + self._hashes, b"".join(values)
        return bytes([0x90 | count]) + _pack(tag), b"".join(map(_pack, fields.values()))


def _kind_of(group: GroupSpec) -> str:
    """The name of a group's layers in vLLM."""
    if group.kind is not Kind.FULL:
        return "mamba" if group.kind is Kind.RECURRENT else "sliding_window"
    has_latents_alone = bool(group.pools) and all(pool.values is not None for pool in group.pools)
    return "mla_attention" if has_latents_alone else "full_attention"


def _packed(hashes: np.ndarray) -> bytes:
    """Hashes u64[n] as ints of 9 bytes each."""
    packed = np.empty((len(hashes), _HASH), np.uint8)
    packed[:, 0] = 0xCF
    packed[:, 1:] = hashes.astype(">u8").view(np.uint8).reshape(-1, 8)
    return packed.tobytes()


def _array_header(length: int) -> bytes:
    """The first bytes of an array."""
    if length < 16:
        return bytes([0x90 | length])
    return struct.pack(">BH", 0xDC, length) if length < 1 << 16 else struct.pack(">BI", 0xDD, length)
