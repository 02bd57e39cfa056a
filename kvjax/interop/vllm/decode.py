# SPDX-License-Identifier: Apache-2.0
"""Payloads of vLLM's wire, of any engine and in any form, read with limits on everything."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from kvjax.interop.vllm._wires import msgspec
from kvjax.interop.vllm.forms import MEDIA, SALT_PREFIX

Hash = int | bytes
Key = str | int | float | bytes | tuple  # an extra key; (name, offset) of an image
TOKEN_BYTES = 8
_LONGEST = 4096  # characters of a name, bytes of a hash, keys of a block
_GROUPS, _BLOCK = 1 << 10, 1 << 16  # the most groups, and the most tokens of a block


class Stored(NamedTuple):
    """Blocks that follow each other are cached.

    Attributes:
      hashes, parent: their names, and that of the prefix before them, None at a root.
      tokens: i64[n * size] as bytes.
      size: tokens of a block.
      lora, salt: of the prompts; where an event does not tell the salt, its parent's is meant.
      keys: for each block its extra keys; empty if no block has any.
      medium: where they are.
      group, kind, window: the group's number, its kind ("full_attention", "sliding_window", None if not told), and its
        window.
    """

    hashes: Sequence[Hash]
    parent: Hash | None
    tokens: bytes
    size: int
    lora: str | None
    salt: str | None
    keys: Sequence[tuple[Key, ...]]
    medium: str
    group: int
    kind: str | None
    window: int | None


class Removed(NamedTuple):
    """Blocks are no longer cached there."""

    hashes: Sequence[Hash]
    medium: str
    group: int


class Cleared(NamedTuple):
    """Nothing is cached any more, in any group."""


class Batch(NamedTuple):
    """The contents of a payload: seconds since 1970, events in their order, data-parallel rank."""

    time: float
    events: list[Stored | Removed | Cleared]
    rank: int | None


_Hash = Annotated[bytes, msgspec.Meta(max_length=_LONGEST)] | int
_Name = Annotated[str, msgspec.Meta(max_length=_LONGEST)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=_GROUPS)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=_BLOCK)]


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: _Size
    lora_id: int | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: Any = None
    group_idx: _Number | None = None
    kv_cache_spec_kind: _Name | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: _Name | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: _Name | None = None
    group_idx: _Number | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Maps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class _MapOfMaps(msgspec.Struct, gc=False):  # some versions of vLLM have the batch as a map too
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


_DECODERS = [msgspec.msgpack.Decoder(kind).decode for kind in (_Maps, _Arrays, _MapOfMaps)]


def decode(payload: bytes) -> Batch:
    """Reads a payload of any of the forms, with hashes that are ints or bytes.

    Raises:
      ValueError: for anything else.
    """
    errors = []
    for read in _DECODERS:
        try:
            batch = read(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            errors.append(str(error))
            continue
        return Batch(batch.ts, [_checked(event) for event in batch.events], batch.data_parallel_rank)
    raise ValueError(f"payload: got {payload[:40]!r}, wanted a KVEventBatch: {errors[0]}; {errors[1]}")


def _checked(event: Any) -> Stored | Removed | Cleared:
    if isinstance(event, _Cleared):
        return Cleared()
    hashes = event.block_hashes
    if len(hashes) > 1 and len(set(hashes)) < len(hashes):
        raise ValueError("block_hashes: got one twice, wanted each once")
    group, medium = event.group_idx or 0, event.medium or MEDIA[0]
    if isinstance(event, _Removed):
        return Removed(hashes, medium, group)
    size, lora, salt, keys = event.block_size, event.lora_name, event.cache_salt, []
    if len(event.token_ids) != len(hashes) * size:
        raise ValueError(f"token_ids: got {len(event.token_ids)}, wanted {size} for each of {len(hashes)} blocks")
    if lora is None and event.lora_id is not None:
        lora = str(event.lora_id)
    try:
        tokens = array.array("q", event.token_ids).tobytes()
    except OverflowError as error:
        raise ValueError("token_ids: got one of more than 63 bits, wanted smaller ones") from error
    if event.extra_keys is not None:
        keys, told = _keys(event.extra_keys, len(hashes), lora, event.parent_block_hash is None)
        salt = told if salt is None else salt
    window = event.kv_cache_spec_sliding_window
    return Stored(
        hashes, event.parent_block_hash, tokens, size, lora, salt, keys, medium, group, event.kv_cache_spec_kind, window
    )


def _keys(given: Any, number: int, lora: str | None, at_root: bool) -> tuple[list[tuple[Key, ...]], str | None]:
    """The extra keys of each block without the adapter's name, and the salt.

    vLLM's keys have no names. A text in the first block that is not the adapter's is taken for the salt: then a block
    may be found by fewer prompts than have it, and never by others.
    """
    _wanted(isinstance(given, list) and len(given) == number, "extra_keys: got another number than of blocks")
    found, salt = [], None
    for at, of_block in enumerate(given):
        keys: list[Key] = []
        _wanted(
            of_block is None or (isinstance(of_block, list) and len(of_block) <= _LONGEST), "extra_keys: got no list"
        )
        for key in of_block or ():
            key = tuple(key) if isinstance(key, list) else key
            parts = key if isinstance(key, tuple) else (key,)
            plain = all(isinstance(part, str | int | float | bytes) and not _long(part) for part in parts)
            _wanted(plain and len(parts) <= 8, "extra_keys: got what is no key")
            if isinstance(key, str) and (key.startswith(SALT_PREFIX) or (at_root and at == 0 and key != lora)):
                salt = key.removeprefix(SALT_PREFIX)
            elif key != lora:
                keys.append(key)
        found.append(tuple(keys))
    return (found if any(found) else []), salt


def _long(part: Any) -> bool:
    return isinstance(part, str | bytes) and len(part) > _LONGEST


def _wanted(fact: bool, otherwise: str) -> None:
    if not fact:
        raise ValueError(otherwise)
