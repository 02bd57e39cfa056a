# SPDX-License-Identifier: Apache-2.0
"""Files of JSON and their fields, checked one by one: a ValueError names the field, its value and what was wanted.

`of` is the field that holds these fields; empty at the top.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Names of fields, each with the attribute of a config that it becomes and the function that reads it.
type Table = Mapping[str, tuple[str, Callable[[Mapping[str, Any], str], Any]]]
_MOST = 2**31 - 1
_LEAST_FLOAT, _MOST_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def check_file(path: pathlib.Path) -> None:
    """Refuses a path that has no bytes, as a folder, or would wait for somebody who writes, as a pipe."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: got a folder, a pipe or a device, wanted a file")


@contextlib.contextmanager
def errors_in(path: pathlib.Path, wanted: str = "", kinds: Any = (ValueError, RecursionError)) -> Iterator[None]:
    """Makes a ValueError of an error of these kinds, with the name of a file, and perhaps what it was wanted to be."""
    try:
        yield
    except OSError:
        raise
    except kinds as error:
        raise ValueError(f"{path}: not {wanted} ({error})" if wanted else f"{path}: {error}") from error


def read_text(path: pathlib.Path) -> str:
    """The text of a file, without the byte order mark that it may begin with."""
    check_file(path)
    with errors_in(path, "UTF-8"):
        return path.read_text(encoding="utf-8-sig")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The fields of a file of JSON; a ValueError names the file."""
    check_file(path)
    with errors_in(path, "valid JSON"):
        value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path}: got a JSON {type(value).__name__}, wanted an object")
    return value


def either(wanted: Iterable[Any]) -> str:
    """The values in words, as in 'a' or 'b'."""
    return " or ".join(repr(value) for value in wanted)


def shortened(names: Sequence[str], most: int = 8) -> str:
    """The first names of a list, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def only(hf: Mapping[str, Any], name: str, *wanted, absent=None, of: str = "") -> Any:
    """The field's value, which must be one of `wanted`."""
    value = hf.get(name)
    value = absent if value is None else value
    if value not in wanted:
        raise ValueError(f"{of}{'.' * bool(of)}{name}: got {value!r:.80}, wanted {either(wanted)}")
    return value


def count(hf: Mapping[str, Any], name: str, absent: int | None = None, least: int = 1, of: str = "") -> int:
    """The field's value, a whole number of 32 bits."""
    value = hf.get(name)
    value = absent if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError(
            f"{of}{'.' * bool(of)}{name}: got {value!r:.80}, wanted an int of at least {least} and below 2**31"
        )
    return value


def number(hf: Mapping[str, Any], name: str, absent: float | None = None, of: str = "") -> float:
    """The field's value, a positive number that float32 has."""
    value = hf.get(name, absent)
    if not isinstance(value, int | float) or isinstance(value, bool) or not _LEAST_FLOAT <= value <= _MOST_FLOAT:
        raise ValueError(f"{of}{'.' * bool(of)}{name}: got {value!r:.80}, wanted a positive number that float32 has")
    return float(value)


def flag(hf: Mapping[str, Any], name: str) -> bool:
    """The field's value, false where the config is silent."""
    value = hf.get(name) or False
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r:.80}, wanted true or false")
    return value


def listed(hf: Mapping[str, Any], name: str) -> list[Any] | None:
    """The field's value, a list; None where the config is silent."""
    value = hf.get(name)
    if value is not None and not isinstance(value, list | tuple):
        raise ValueError(f"{name}: got {value!r:.80}, wanted a list")
    return None if value is None else list(value)


def layer_types(
    types: list[Any], wanted: Iterable[Any], num_layers: int, field: str = "layer_types"
) -> tuple[str, ...]:
    """The type of each layer, which must be one of `wanted`."""
    if len(types) != num_layers:
        raise ValueError(f"{field}: got {len(types)} entries, wanted num_hidden_layers={num_layers}")
    for index, name in enumerate(types):
        if name not in wanted:
            raise ValueError(f"{field}[{index}]: got {name!r:.80}, wanted {either(wanted)}")
    return tuple(types)


def ids(hf: Mapping[str, Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of the vocabulary, given as null, one number or a list."""
    value = hf.get(name)
    found = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in found):
        raise ValueError(f"{name}: got {value!r:.80}, wanted token ids below vocab_size={vocab_size}")
    return found


def token(hf: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    """One token id of the vocabulary; None where the config is silent."""
    found = ids(hf, name, vocab_size)
    if len(found) > 1:
        raise ValueError(f"{name}: got {hf[name]!r:.80}, wanted one token id")
    return found[0] if found else None


def read_table(hf: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """The attributes of a table's fields."""
    return {attribute: read(hf, name) for name, (attribute, read) in table.items()}


def write_table(config: Any, table: Table) -> dict[str, Any]:
    """The fields that `read_table` turns into a config's attributes."""
    return {name: getattr(config, attribute) for name, (attribute, _) in table.items()}
