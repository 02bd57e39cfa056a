# SPDX-License-Identifier: Apache-2.0
"""Lines of a file with their numbers, and what has to be in them. Every refusal names the file and the line."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

_LARGEST = 2**31 - 1


def lines(path: str | pathlib.Path) -> Iterator[tuple[str, str]]:
    """(file:line, the line) of every line that is not blank.

    Raises:
      ValueError: for a file that is no text.
    """
    number = 0
    try:
        with pathlib.Path(path).open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line.strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got bytes that are no UTF-8 after line {number}, wanted text") from error


def entry(where: str, line: str) -> Any:
    """An entry of a line of JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: got {line:.60}, wanted JSON: {error}") from error


def entries(path: str | pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, the object) of every line that is not blank."""
    for where, line in lines(path):
        found = entry(where, line)
        if not isinstance(found, dict):
            raise ValueError(f"{where}: got {line:.60}, wanted a JSON object")
        yield where, found


def field(where: str, found: Mapping[str, Any], name: str) -> Any:
    """A field that has to be there."""
    if name not in found:
        raise ValueError(f"{where}: {name}: got no such field, wanted one")
    return found[name]


def count(where: str, found: Mapping[str, Any], name: str) -> int:
    """A number of tokens: an integer that fits 32 bits, or its decimal digits."""
    value = field(where, found, name)
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 100:  # int takes no more than 4300 digits
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{where}: {name}: got {value!r:.40}, wanted an integer from 0 to {_LARGEST}")
    return value


def moment(where: str, found: Mapping[str, Any], name: str) -> float:
    """A finite number, or the text of one; seconds are finite as milliseconds too."""
    value = field(where, found, name)
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(1000 * number):
        raise ValueError(f"{where}: {name}: got {value!r:.40}, wanted a finite number")
    return number


def hashes(where: str, found: Mapping[str, Any]) -> list[int]:
    """The `hash_ids` of a prompt."""
    value = field(where, found, "hash_ids")
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise ValueError(f"{where}: hash_ids: got {value!r:.40}, wanted a list of integers")
    return value
