# SPDX-License-Identifier: Apache-2.0
"""Lines of a file as records with checked fields. Every error message has the file and the line."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvjax._files import open_regular

_LARGEST = 2**31 - 1
_REQUEST_BLOCKS = 1 << 20


def lines(path: str | pathlib.Path) -> Iterator[tuple[str, str]]:
    """(file:line, the line) of every line that is not blank.

    Raises:
      ValueError: for a file that is not text, and for a pipe or a device.
    """
    line_number = 0
    with open_regular(path, "rb") as file:  # a text file reads ahead, so its errors could not name the line
        for line in itertools.chain.from_iterable(part.rstrip(b"\r\n").split(b"\r") for part in file):
            line_number += 1
            try:
                text = line.decode("utf-8-sig" if line_number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{line_number}: got bytes that are not UTF-8, wanted text") from error
            if text:
                yield f"{path}:{line_number}", text


def parse_json(where: str, line: str) -> Any:
    """The value of a line of JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: got {line:.60}, wanted JSON: {error}") from error


def objects(path: str | pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, the object) of every line that is not blank."""
    for where, line in lines(path):
        record = parse_batch(where, line)
        if not isinstance(record, dict):
            raise ValueError(f"{where}: got {line:.60}, wanted a JSON object")
        yield where, record


def parse_batch(where: str, line: str) -> Any:
    """The value of a line of JSON. An array of records is an error."""
    if line.startswith("[") and line[1:].lstrip()[:1] in ("", "{"):
        raise ValueError(f"{where}: got a JSON array of objects, wanted JSON lines: an object a line, without brackets")
    return parse_json(where, line)


def check_blocks(requests: Iterable[tuple[str, int]], max_blocks: int) -> None:
    """Refuses requests with too many blocks before their ids are made, since a short line could ask for gigabytes.

    Args:
      requests: the file and line of each request, and its number of blocks.
      max_blocks: the maximum number of blocks of all requests.

    Raises:
      ValueError: for the first request with too many blocks, or beyond `max_blocks`.
    """
    total = 0
    for where, num_blocks in requests:
        total += num_blocks
        if num_blocks > _REQUEST_BLOCKS:
            raise ValueError(f"{where}: got a prompt of {num_blocks} blocks, wanted at most {_REQUEST_BLOCKS}")
        if total > max_blocks:
            raise ValueError(f"{where}: got {total} blocks up to this request, wanted at most {max_blocks}")


def field(where: str, record: Mapping[str, Any], name: str) -> Any:
    """A required field."""
    if name not in record:
        raise ValueError(f"{where}: {name}: got no such field, wanted a value")
    return record[name]


def integer(where: str, record: Mapping[str, Any], name: str) -> int:
    """An integer of any sign and size."""
    value = field(where, record, name)
    if type(value) is not int:
        raise ValueError(f"{where}: {name}: got {value!r:.40}, wanted an integer")
    return value


def count(where: str, record: Mapping[str, Any], name: str) -> int:
    """A number of tokens: an integer of 32 bits, or its decimal digits."""
    value = field(where, record, name)
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 100:  # int() accepts at most 4300 digits
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{where}: {name}: got {value!r:.40}, wanted an integer from 0 to {_LARGEST}")
    return value


def timestamp(where: str, record: Mapping[str, Any], name: str) -> float:
    """A finite number, or its text. Seconds must be finite as milliseconds too."""
    value = field(where, record, name)
    try:
        time = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        time = math.nan
    if not math.isfinite(1000 * time):
        raise ValueError(f"{where}: {name}: got {value!r:.40}, wanted a finite number")
    return time


def integers(where: str, record: Mapping[str, Any], name: str) -> list[int]:
    """A list of integers, such as the hashes of a prompt's blocks."""
    value = field(where, record, name)
    if not isinstance(value, list) or any(type(element) is not int for element in value):
        raise ValueError(f"{where}: {name}: got {value!r:.40}, wanted a list of integers")
    return value
