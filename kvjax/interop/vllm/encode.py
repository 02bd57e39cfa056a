# SPDX-License-Identifier: Apache-2.0
"""Events of a cache as payloads of vLLM's wire, `KVEventBatch` in one of three forms.

    payload     array: time f64, events, data-parallel rank
    map         events as maps with "type" (vLLM since 0.24)
    array       events as arrays, the tag first, with the same fields in the same order
    array-0.11  the same, up to `medium`

Events are put together of bytes that numpy has made for many blocks at once, and of ends that are made once for each
group, level and namespace.

What readers do with a message that breaks a rule is mostly to drop it in silence. The rules:

- Hashes are ints, the parent nil at a root; parents come before children, no hash twice in an event.
- Whole blocks alone. Consecutive stored blocks that chain, of one group, level and namespace, are one event;
  consecutive removals of one group and level too.
- A change of level is a removal and a store (`interop/encoder.py`).
- AllBlocksCleared empties every group at its reader. It is sent only when no group keeps anything.

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
_HASH, _TOKEN, _FRAME = 9, 5, 512  # bytes of a hash, the most of a token, and usually of what is around them
_ALWAYS = frozenset({"lora_id", "lora_name"})  # nil if there is none; other fields are left out
_NIL = b"\xc0"
_pack = msgspec.msgpack.Encoder().encode


class Encoder(EventEncoder[bytes]):
    """Makes payloads of events, for whoever has a transport of their own; `Publisher` has one.

    A spec whose layers all have windows publishes its windows alone; NVIDIA Dynamo's indexer takes nothing of these.

    Args:
      spec: of the cache, which is empty; see `attach` for others.
      names, lora_names, model, key: as for `hashing.Hashing`.
      salts: "digest" publishes a hash of each salt (without `key` short ones can be guessed from it), "plain" the salt,
        and "omit" no blocks of prompts with a salt.
      extra_name: the name of an extra id, the same on all replicas. None: blocks with extra ids other than 0, and what
        is below them, are not published.
      form: "map", "array" or "array-0.11". The default is refused by vLLM 0.11's decoder, AIBrix and kthena. The last
        has no field for adapters' names, salts, extra ids and windows: such blocks are not published.
      rank: data-parallel rank.
      max_message: the most bytes of a payload; larger batches are several. One block with very long names may have
        more.

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
        self._form, self._has_groups = form, form != "array-0.11"
        without_field = () if self._has_groups else (col.SALT, col.LORA, col.EXTRA)
        unpublished = WHOLE | ({col.EXTRA: "extra_id_without_name"} if extra_name is None else {})
        unpublished |= dict.fromkeys(without_field, "form_without_field") | omitted_salts(salts)
        groups = range(int(spec.bare), len(spec.groups) if self._has_groups else 1)
        super().__init__(spec, Hashing(names, lora_names, model, key), groups, unpublished)
        self._salt, self._extra_name = functools.partial(salt_text, salts=salts, key=key), extra_name
        self._name_of = functools.cache(self._make_name)
        self.max_message = static_int("max_message", max_message, 4 * (_FRAME + _HASH + _TOKEN * spec.block_size))
        self.rank = static_int("rank", rank, 0)
        self._most_blocks = max_message // 2 // (_HASH + _TOKEN * spec.block_size)
        self._most_hashes = max_message // 2 // _HASH
        self._all_cleared = _pack({"type": "AllBlocksCleared"} if form == "map" else ["AllBlocksCleared"])
        names_of_fields = ("block_hashes", "parent_block_hash", "token_ids")
        self._hashes, self._parent, self._tokens = (_pack(name) if form == "map" else b"" for name in names_of_fields)
        self._ends = functools.lru_cache(4096)(self._make_ends)
        self._ends_of_removed = functools.cache(self._make_ends_of_removed)

    def encode(self, events: Any, now: float | None = None) -> list[bytes]:
        """The payloads of events; none if nothing of them is published.

        Args:
          events: `Events`, an `EventLog`, or decoded events, which must be possible after those so far.
          now: seconds since 1970; None: by the clock.
        """
        return self.payloads(self.messages(self.follow(events)), now)

    def snapshot(self, now: float | None = None) -> list[bytes]:
        """The payloads that bring a reader to the present contents from any others: AllBlocksCleared, then stores."""
        return self.snapshot_of(self.nodes, now)

    def snapshot_of(self, nodes: NodeMap, now: float | None = None) -> list[bytes]:
        """The same for a copy of the index."""
        return self.payloads([self._all_cleared, *self.messages(nodes.snapshot())], now)

    def idle(self) -> bytes:
        """The payload of an empty batch."""
        return self._payload([], time.time())

    def payloads(self, events: Sequence[bytes], now: float | None = None) -> list[bytes]:
        """Encoded events as payloads of at most `max_message` bytes."""
        timestamp, found, some, size = time.time() if now is None else now, [], [], _FRAME
        for event in events:
            if some and size + len(event) > self.max_message:
                found.append(self._payload(some, timestamp))
                some, size = [], _FRAME
            some.append(event)
            size += len(event)
        return [*found, self._payload(some, timestamp)] if some else found

    def _payload(self, events: Sequence[bytes], timestamp: float) -> bytes:
        header = b"\x93\xcb" + struct.pack(">d", timestamp) + _array_header(len(events))
        return b"".join((header, *events, _pack(self.rank)))

    def _removed(self, number: int, rows: np.ndarray) -> list[bytes]:
        """Consecutive removals from one level are one event."""
        hashes, levels, found = _packed(col.hashes_of(rows)), rows[:, col.LEVEL], []
        for start, stop in pieces(runs(levels), self._most_hashes):
            head, tail = self._ends_of_removed(number, int(levels[start]))
            found.append(b"".join((head, _array_header(stop - start), hashes[start * _HASH : stop * _HASH], tail)))
        return found

    def _cleared(self) -> list[bytes]:
        return [self._all_cleared]

    def _stored(self, number: int, rows: np.ndarray, spaces: Mapping[int, Space]) -> list[bytes]:
        """Consecutive blocks that chain are one event."""
        size = self.nodes.spec.block_size
        tokens, extra_ids = np.split(rows[:, col.TEXT :], [size], axis=1)
        tokens, extra_keys = tokens.reshape(-1).tolist(), self._extra_keys(extra_ids)
        hashes, parents = _packed(col.hashes_of(rows)), _packed(col.hashes_of(rows, col.ABOVE))
        columns = rows[:, [col.LEVEL, col.NAMESPACE, col.DEPTH]].tolist()

        def chain(start: int, stop: int) -> bytes:
            """The event that stores a chain."""
            level, namespace, depth = columns[start]
            space, roots = spaces[namespace], 0 if depth else stop - start
            if extra_keys:
                head, tail = self._make_ends(number, level, space, roots, extra_keys[start:stop])
            else:
                head, tail = self._ends(number, level, space, roots)
            first, last = start * _HASH, stop * _HASH
            parent = parents[first : first + _HASH] if depth else _NIL
            return b"".join(
                (
                    head,
                    _array_header(stop - start),
                    hashes[first:last],
                    self._parent,
                    parent,
                    self._tokens,
                    _pack(tokens[start * size : stop * size]),
                    tail,
                )
            )

        found = []
        for start, stop in pieces(col.chains_of(rows, col.LEVEL, col.NAMESPACE), self._most_blocks):
            event = chain(start, stop)
            if len(event) + _FRAME <= self.max_message:
                found.append(event)
            else:  # names are so long that it does not fit a message
                found += [chain(at, at + 1) for at in range(start, stop)]
        return found

    def _extra_keys(self, ids: np.ndarray) -> list[list[Any] | None]:
        """[name, offset] of each run of equal extra ids i32[n, P or 0] but 0, for each row; [] if no row has any."""
        if not ids.any():
            return []
        begins = ids != 0
        begins[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        found: list[list[Any]] = [[] for _ in ids]
        for row, offset in np.argwhere(begins).tolist():
            found[row].append([self._name_of(int(ids[row, offset])), offset])
        return [keys or None for keys in found]

    def _make_name(self, extra_id: int) -> str:
        assert self._extra_name is not None, "blocks with extra ids are left out without `extra_name`"
        name = self._extra_name(extra_id)
        if not isinstance(name, str):
            raise ValueError(f"extra_name: got {name!r} for extra id {extra_id}, wanted text")
        return name

    def _make_ends(
        self, number: int, level: int, space: Space, roots: int, extra_keys: Sequence[Any] = ()
    ) -> tuple[bytes, bytes]:
        """The bytes of an event BlockStored before the number of its hashes and after its tokens.

        `roots` is the number of its blocks if the first one has no parent, else 0. `extra_keys` has for each block None
        or [name, offset] lists, or is empty if no block has any.
        """
        group = self.nodes.spec.groups[number]
        window = group.window if group.kind is Kind.WINDOW else None
        salt, keys = self._salt(space.salt), list(extra_keys)
        if self._form == "array" and salt is not None and roots:
            keys = keys or [None] * roots
            keys[0] = [SALT_PREFIX + salt, *(keys[0] or ())]
        size = self.nodes.spec.block_size
        fields: dict[str, Any] = {"block_size": size, "lora_id": space.lora_id, "medium": MEDIA[level]}
        if self._has_groups:
            fields |= {"lora_name": space.lora, "extra_keys": keys if any(keys) else None, "group_idx": number}
            fields |= {"kv_cache_spec_kind": _kind_of(group), "kv_cache_spec_sliding_window": window}
        if self._form == "map":
            fields["cache_salt"] = salt
            fields = {name: value for name, value in fields.items() if value is not None or name in _ALWAYS}
        elif window is None:
            fields.pop("kv_cache_spec_sliding_window", None)
        return self._around("BlockStored", 3, fields)

    def _make_ends_of_removed(self, number: int, level: int) -> tuple[bytes, bytes]:
        """The same of an event BlockRemoved."""
        group = {"group_idx": number} if self._has_groups else {}
        return self._around("BlockRemoved", 1, {"medium": MEDIA[level], **group})

    def _around(self, tag: str, before: int, fields: dict[str, Any]) -> tuple[bytes, bytes]:
        """The bytes of an event up to its hashes, and from `fields` on; `before` fields are between."""
        count = 1 + before + len(fields)
        if self._form == "map":
            values = [_pack(name) + _pack(value) for name, value in fields.items()]
            return bytes([0x80 | count]) + _pack("type") + _pack(tag) + self._hashes, b"".join(values)
        return bytes([0x90 | count]) + _pack(tag), b"".join(map(_pack, fields.values()))


def _kind_of(group: GroupSpec) -> str:
    """The word for a group's layers in vLLM."""
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
