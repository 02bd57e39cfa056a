# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's event JSON read, of any engine, with limits on everything."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

Name = int | str  # of a block: 64 bits, or the hexadecimal digits of newer hashes
_LONGEST_LINE, _LONGEST_NAME = 64 << 20, 4096  # characters
_BLOCK, _GROUPS = 1 << 16, 1 << 10  # the most tokens of a block, and the most groups


class Diff(NamedTuple):
    """A number that changed."""

    new: int
    old: int


class Created(NamedTuple):
    """A group begins, empty: its blocks on each level."""

    num_blocks: tuple[int, ...]


class Block(NamedTuple):
    """A block that is cached; a token is (token id, extra id)."""

    name: Name
    tokens: tuple[tuple[int, int], ...]
    level: int
    priority: int


class Stored(NamedTuple):
    """Blocks that follow each other are cached; `parent` is the prefix before them, None at a root."""

    parent: Name | None
    blocks: tuple[Block, ...]
    salt: str | None
    lora: str | None


class Removed(NamedTuple):
    """Blocks are no longer cached."""

    names: tuple[Name, ...]


class Updated(NamedTuple):
    """A block has another level or priority."""

    name: Name
    level: Diff | None
    priority: Diff | None


class Event(NamedTuple):
    """A line.

    Attributes:
      number: the event_id.
      data: what happened.
      window: the window_size.
      group: the layer_group_id, None if there is none: then groups are told apart by their windows alone.
      rank: the attention_dp_rank, or None.
    """

    number: int
    data: Created | Stored | Removed | Updated
    window: int
    group: int | None
    rank: int | None


def parse(lines: str | bytes | Iterable[str | bytes | dict[str, Any]]) -> list[Event]:
    """Reads events.

    Args:
      lines: a text of lines, such as a file's; or lines, or dicts.

    Raises:
      ValueError: if one of them is no event, with its number.
    """
    if isinstance(lines, str | bytes):
        lines = [line for line in lines.splitlines() if line.strip()]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse_line(line))
        except ValueError as error:
            raise ValueError(f"lines: got no event in line {number}: {error}") from error
    return found


def parse_line(line: str | bytes | dict[str, Any]) -> Event:
    """Reads one event.

    Raises:
      ValueError: if it is none.
    """
    if isinstance(line, str | bytes):
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"got {len(line)} characters, wanted at most {_LONGEST_LINE}")
        try:
            line = json.loads(line)
        except RecursionError as error:
            raise ValueError(f"got {line[:40]!r}, wanted JSON that is less deep") from error
    fields = _dict("event", line)
    data, group, rank = _dict("data", fields.get("data")), fields.get("layer_group_id"), fields.get("attention_dp_rank")
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"type: got {kind!r:.80}, wanted {', '.join(_KINDS)}")
    return Event(
        _number("event_id", fields.get("event_id")),
        _KINDS[kind](data),
        _number("window_size", fields.get("window_size")),
        None if group is None else _number("layer_group_id", group, _GROUPS),
        None if rank is None else _number("attention_dp_rank", rank),
    )


def _created(data: dict[str, Any]) -> Created:
    levels = _list("num_blocks_per_cache_level", data.get("num_blocks_per_cache_level"))
    return Created(tuple(_number("num_blocks_per_cache_level", number) for number in levels))


def _stored(data: dict[str, Any]) -> Stored:
    blocks = tuple(_block(_dict("blocks", block)) for block in _list("blocks", data.get("blocks")))
    _once([block.name for block in blocks])
    parent = data.get("parent_hash")
    return Stored(
        None if parent is None else _name("parent_hash", parent),
        blocks,
        _text("cache_salt", data.get("cache_salt")),
        _text("lora_name", data.get("lora_name")),
    )


def _block(block: dict[str, Any]) -> Block:
    tokens = _list("tokens", block.get("tokens"))
    if not 1 <= len(tokens) <= _BLOCK:
        raise ValueError(f"tokens: got {len(tokens)}, wanted 1 to {_BLOCK}")
    return Block(
        _name("block_hash", block.get("block_hash")),
        tuple(_token(_dict("tokens", token)) for token in tokens),
        _number("cache_level", block.get("cache_level")),
        _number("priority", block.get("priority")),
    )


def _token(token: dict[str, Any]) -> tuple[int, int]:
    return _number("token_id", token.get("token_id")), _number("token_extra_id", token.get("token_extra_id", 0))


def _removed(data: dict[str, Any]) -> Removed:
    names = tuple(_name("block_hashes", name) for name in _list("block_hashes", data.get("block_hashes")))
    _once(names)
    return Removed(names)


def _updated(data: dict[str, Any]) -> Updated:
    name = _name("block_hash", data.get("block_hash"))
    return Updated(name, _diff("cache_level", data.get("cache_level")), _diff("priority", data.get("priority")))


def _diff(name: str, value: Any) -> Diff | None:
    if value is None:
        return None
    fields = _dict(name, value)
    return Diff(_number(name, fields.get("new_value")), _number(name, fields.get("old_value")))


_KINDS = {"created": _created, "stored": _stored, "removed": _removed, "updated": _updated}


def _dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: got {value!r:.80}, wanted an object")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: got {value!r:.80}, wanted an array")
    return value


def _number(name: str, value: Any, most: int = 1 << 64) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < most:
        raise ValueError(f"{name}: got {value!r:.80}, wanted an int of at least 0 and below {most}")
    return value


def _name(name: str, value: Any) -> Name:
    if isinstance(value, str) and len(value) <= _LONGEST_NAME:
        return value
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{name}: got {value!r:.80}, wanted an int of 64 bits or a short text")
    return value


def _text(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > _LONGEST_NAME):
        raise ValueError(f"{name}: got {value!r:.80}, wanted a short text")
    return value


def _once(names: Iterable[Name]) -> None:
    names = list(names)
    if len(set(names)) < len(names):
        raise ValueError("block_hash: got one twice, wanted each once")
