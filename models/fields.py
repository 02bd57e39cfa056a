# SPDX-License-Identifier: Apache-2.0
"""Reads JSON files, and checks their fields. A ValueError names the field, its value and the wanted value.

`section` is the name of the field with the fields to check. It is empty at the top of the file.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Names of fields, each with its attribute in a config and the function to read it.
type Table = Mapping[str, tuple[str, Callable[[Mapping[str, Any], str], Any]]]
_MAX_INT = 2**31 - 1
_MIN_FLOAT = float(np.finfo(np.float32).tiny)
_MAX_FLOAT = float(np.finfo(np.float32).max)


def _full_name(section: str, name: str) -> str:
    """A field's name after its section's, as in rope_parameters.factor. At the top of a file it is only the name."""
    return f"{section}.{name}" if section else name


def check_file(path: pathlib.Path) -> None:
    """Refuses a path that has no bytes, such as a folder, or could block, such as a pipe."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: got a folder, a pipe or a device, wanted a file")


@contextlib.contextmanager
def errors_in(path: pathlib.Path, wanted: str = "", kinds: Any = (ValueError, RecursionError)) -> Iterator[None]:
    """Turns an error of these kinds into a ValueError with the file's name and, if given, the wanted format."""
    try:
        yield
    except OSError:
        raise
    except kinds as error:
        raise ValueError(f"{path}: not {wanted} ({error})" if wanted else f"{path}: {error}") from error


def read_text(path: pathlib.Path) -> str:
    """Reads the text of a file, without a byte order mark at its beginning."""
    check_file(path)
    with errors_in(path, "UTF-8"):
        return path.read_text(encoding="utf-8-sig")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads the fields of a file of JSON. A ValueError has the file's name."""
    check_file(path)
    with errors_in(path, "valid JSON"):
        value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path}: got a JSON {type(value).__name__}, wanted an object")
    return value


def either(wanted: Iterable[Any]) -> str:
    """Joins values with "or": 'a' or 'b'."""
    return " or ".join(repr(value) for value in wanted)


def shortened(names: Sequence[str], max_names: int = 8) -> str:
    """Joins the first names of a list, and adds the number of further names."""
    rest = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + rest


def only(hf: Mapping[str, Any], name: str, *wanted, absent=None, section: str = "") -> Any:
    """The field's value, which must be among `wanted`."""
    value = hf.get(name)
    value = absent if value is None else value
    if value not in wanted:
        raise ValueError(f"{_full_name(section, name)}: got {value!r:.80}, wanted {either(wanted)}")
    return value


def count(hf: Mapping[str, Any], name: str, absent: int | None = None, minimum: int = 1, section: str = "") -> int:
    """The field's value, an integer that fits into 32 bits."""
    value = hf.get(name)
    value = absent if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= _MAX_INT:
        wanted = f"an int of at least {minimum} and below 2**31"
        raise ValueError(f"{_full_name(section, name)}: got {value!r:.80}, wanted {wanted}")
    return value


def number(hf: Mapping[str, Any], name: str, absent: float | None = None, section: str = "") -> float:
    """The field's value, a positive number in the range of float32."""
    value = hf.get(name, absent)
    if not isinstance(value, int | float) or isinstance(value, bool) or not _MIN_FLOAT <= value <= _MAX_FLOAT:
        wanted = "a positive number that float32 has"
        raise ValueError(f"{_full_name(section, name)}: got {value!r:.80}, wanted {wanted}")
    return float(value)


def flag(hf: Mapping[str, Any], name: str) -> bool:
    """The field's value, or false if it is absent."""
    value = hf.get(name) or False
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r:.80}, wanted true or false")
    return value


def listed(hf: Mapping[str, Any], name: str) -> list[Any] | None:
    """The field's value, a list, or None if it is absent."""
    value = hf.get(name)
    if value is not None and not isinstance(value, list | tuple):
        raise ValueError(f"{name}: got {value!r:.80}, wanted a list")
    return None if value is None else list(value)


def layer_types(
    types: list[Any], wanted: Iterable[Any], num_layers: int, field: str = "layer_types"
) -> tuple[str, ...]:
    """The type of each layer, which must be among `wanted`."""
    if len(types) != num_layers:
        raise ValueError(f"{field}: got {len(types)} entries, wanted num_hidden_layers={num_layers}")
    for index, name in enumerate(types):
        if name not in wanted:
            raise ValueError(f"{field}[{index}]: got {name!r:.80}, wanted {either(wanted)}")
    return tuple(types)


def ids(hf: Mapping[str, Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of the vocabulary, given as null, a number or a list."""
    value = hf.get(name)
    tokens = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in tokens):
        raise ValueError(f"{name}: got {value!r:.80}, wanted token ids below vocab_size={vocab_size}")
    return tokens


def token(hf: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    """A token id of the vocabulary, or None if it is absent."""
    tokens = ids(hf, name, vocab_size)
    if len(tokens) > 1:
        raise ValueError(f"{name}: got {hf[name]!r:.80}, wanted one token id")
    return tokens[0] if tokens else None


def read_table(hf: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """Reads the fields of a table, and returns their values by attribute."""
    return {attribute: read(hf, name) for name, (attribute, read) in table.items()}


def write_table(config: Any, table: Table) -> dict[str, Any]:
    """Writes a config's attributes as the fields of a table."""
    return {name: getattr(config, attribute) for name, (attribute, _) in table.items()}
