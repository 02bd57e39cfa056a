# SPDX-License-Identifier: Apache-2.0
"""vLLM's `KVEventBatch` in its three forms: what is written, and what is read.

    payload   array: time f64, events, data-parallel rank
    map       events as maps with "type" (vLLM since 0.24)
    array     events as arrays, the tag first, with the same fields in the same order
    array-0.11  the same, up to `medium`

Source: vLLM's `distributed/kv_events.py`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.interop._wires import msgspec
from kvjax.interop.readers.vllm import MEDIA, SALT_PREFIX
from kvjax.spec import GroupSpec

FORMS = ("map", "array", "array-0.11")
HASH_BYTES = 9
_ALWAYS = frozenset({"lora_id", "lora_name"})  # nil if there is none; other fields are left out
_NIL = b"\xc0"
_SHORT = [bytes([0x90 | length]) for length in range(16)]
_ONE = _SHORT[1]
_pack = msgspec.msgpack.Encoder().encode


class Form:
    """One of the forms, to write events in.

    Events are put together of bytes that numpy has made for many blocks at once, and of ends that are made once for
    each group, level and namespace.

    Attributes:
      has_groups: whether it has fields for windows, adapters' names, salts and extra ids.
      cleared: the event AllBlocksCleared.
    """

    def __init__(self, form: str, block_size: int):
        if form not in FORMS:
            raise ValueError(f"form: got {form!r}, wanted {' or '.join(map(repr, FORMS))}")
        self.form, self.block_size = form, block_size
        self.has_groups = form != "array-0.11"
        self.cleared: bytes = _pack({"type": "AllBlocksCleared"} if form == "map" else ["AllBlocksCleared"])
        names = ("block_hashes", "parent_block_hash", "token_ids")
        self._hashes, self._parent, self._tokens = (_pack(name) if form == "map" else b"" for name in names)
        self._ends_of_removed = functools.cache(self._make_ends_of_removed)

    def stored(self, hashes: bytes, parent: bytes, tokens: list[int], ends: tuple[bytes, bytes]) -> bytes:
        """The event BlockStored.

        Args:
          hashes: those of blocks that follow each other, as `pack_hashes` makes them.
          parent: that of the prefix before, empty at a root.
          tokens: those of the blocks.
          ends: from `ends`.
        """
        head, tail = ends
        header = _ONE if len(hashes) == HASH_BYTES else array_header(len(hashes) // HASH_BYTES)
        return b"".join((head, header, hashes, self._parent, parent or _NIL, self._tokens, _pack(tokens), tail))

    def ends(self, what: What, extra_keys: Sequence[Any], at_root: bool) -> tuple[bytes, bytes]:
        """The bytes of an event BlockStored before its hashes and after its tokens.

        Args:
          what: the group, level and namespace.
          extra_keys: for each block None or [name, offset] lists.
          at_root: whether the first block has no parent.
        """
        keys = list(extra_keys)
        if self.form == "array" and what.salt is not None and at_root:
            keys[0] = [SALT_PREFIX + what.salt, *(keys[0] or ())]
        return self._make_ends(what, keys if any(keys) else None)

    def removed(self, hashes: bytes, level: int, group: int) -> bytes:
        """The event BlockRemoved."""
        head, tail = self._ends_of_removed(level, group)
        return b"".join((head, array_header(len(hashes) // HASH_BYTES), hashes, tail))

    def _make_ends(self, what: What, extra_keys: list[Any] | None) -> tuple[bytes, bytes]:
        fields: dict[str, Any] = {"block_size": self.block_size, "lora_id": what.lora_id, "medium": MEDIA[what.level]}
        if self.has_groups:
            fields |= {"lora_name": what.lora, "extra_keys": extra_keys, "group_idx": what.group}
            fields |= {"kv_cache_spec_kind": what.kind, "kv_cache_spec_sliding_window": what.window}
        if self.form == "map":
            fields["cache_salt"] = what.salt
            fields = {name: value for name, value in fields.items() if value is not None or name in _ALWAYS}
        elif what.window is None:
            fields.pop("kv_cache_spec_sliding_window", None)
        return self._around("BlockStored", 3, fields)

    def _make_ends_of_removed(self, level: int, group: int) -> tuple[bytes, bytes]:
        return self._around(
            "BlockRemoved", 1, {"medium": MEDIA[level]} | ({"group_idx": group} if self.has_groups else {})
        )

    def _around(self, tag: str, before: int, fields: dict[str, Any]) -> tuple[bytes, bytes]:
        """The bytes of an event up to its hashes, and from `fields` on; `before` fields are between."""
        count = 1 + before + len(fields)
        if self.form == "map":
            values = [_pack(name) + _pack(value) for name, value in fields.items()]
            return bytes([0x80 | count]) + _pack("type") + _pack(tag) + self._hashes, b"".join(values)
        return bytes([0x90 | count]) + _pack(tag), b"".join(map(_pack, fields.values()))


class What(NamedTuple):
    """The fields that the blocks stored by one event have in common.

    Attributes:
      group, kind, window: the group's number, its kind by `kind_of`, and its window, None if it has none.
      level: 0 on the device, 1 on the host.
      lora_id, lora, salt: of the namespace.
    """

    group: int
    kind: str
    window: int | None
    level: int
    lora_id: int | None
    lora: str | None
    salt: str | None


def kind_of(group: GroupSpec) -> str:
    """The word for a group's layers in vLLM."""
    if group.recurrent:
        return "mamba"
    if group.window is not None:
        return "sliding_window"
    has_latents_alone = bool(group.pools) and all(pool.values is not None for pool in group.pools)
    return "mla_attention" if has_latents_alone else "full_attention"


def pack_hashes(hashes: np.ndarray) -> bytes:
    """Hashes u64[n] as ints of HASH_BYTES bytes each."""
    packed = np.empty((len(hashes), HASH_BYTES), np.uint8)
    packed[:, 0] = 0xCF
    packed[:, 1:] = hashes.astype(">u8").view(np.uint8).reshape(-1, 8)
    return packed.tobytes()


def payload(events: Sequence[bytes], time: float, rank: int) -> bytes:
    """A batch of encoded events."""
    return b"".join((b"\x93\xcb", struct.pack(">d", time), array_header(len(events)), *events, _pack(rank)))


def array_header(length: int) -> bytes:
    """The first bytes of an array."""
    if length < 16:
        return _SHORT[length]
    return struct.pack(">BH", 0xDC, length) if length < 1 << 16 else struct.pack(">BI", 0xDD, length)
