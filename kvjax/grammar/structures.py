# SPDX-License-Identifier: Apache-2.0
"""Turns a structure, such as the text around the JSON of a tool call, into an expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvjax.grammar.automaton import Builder
from kvjax.grammar.expressions import Expression, GrammarError, alt, literal, minimal, minus, repeat, seq, utf8
from kvjax.grammar.json_schema import schema_expression
from kvjax.grammar.patterns import EVERYTHING, pattern_expression

_MAX_LEVELS = 16
_TEXT = repeat(utf8(EVERYTHING))
_TYPES = ("const_string", "json_schema", "regex", "any_text", "sequence", "or", "plus")


def structure_expression(structure: Any, builder: Builder, place: str = "structure", level: int = 0) -> Expression:
    """Reads a structure. `kvjax.grammar.compile_structure` lists its types.

    Args:
      structure: an object with a type.
      builder: builds intermediate automata.
      place: name of the object's place, for errors.
      level: the objects around it.

    Raises:
      GrammarError: naming the place.
    """
    if not isinstance(structure, dict) or structure.get("type") not in _TYPES:
        raise GrammarError(f"{place}: got {structure!r:.80}, wanted an object of a type of {', '.join(_TYPES)}")
    if level > _MAX_LEVELS:
        raise GrammarError(f"{place}: got over {_MAX_LEVELS} levels of structures")

    def inner(name: str, child: Any) -> Expression:
        return structure_expression(child, builder, f"{place}.{name}", level + 1)

    def without(read: Callable[[], Expression], name: str = "") -> Expression:
        """Reads a part, without the texts of an excluded part."""
        schema_part = _named(structure.get("name", f"{place}.json_schema" if name else place), name, read)
        excluded = structure.get("excludes", [])
        if not isinstance(excluded, list):
            raise GrammarError(f"{place}.excludes: got {excluded!r:.80}, wanted a list")
        parts = [
            literal(part) if isinstance(part, str) and part else inner(f"excludes[{index}]", part)
            for index, part in enumerate(excluded)
        ]
        return minus(schema_part, seq(_TEXT, alt(*parts), _TEXT)) if parts else schema_part

    match structure:
        case {"type": "const_string", "value": str(text)}:
            return _named(place, "", lambda: literal(text))
        case {"type": "json_schema", "json_schema": schema}:
            return without(lambda: minimal(schema_expression(schema, builder)), "schema")
        case {"type": "regex", "pattern": str(pattern)}:
            return without(lambda: pattern_expression(pattern))
        case {"type": "any_text"}:
            return without(lambda: _TEXT)
        case {"type": "sequence" | "or" as kind, "elements": [*elements]} if elements:
            join = seq if kind == "sequence" else alt
            return join(*(inner(f"elements[{index}]", child) for index, child in enumerate(elements)))
        case {"type": "plus", "content": content} if isinstance(separator := structure.get("separator", ""), str):
            return repeat(inner("content", content), 1, separator=_named(place, "", lambda: literal(separator)))
    raise GrammarError(f"{place}: got {structure!r:.80}, wanted the fields of a {structure['type']}")


def _named(place: str, name: str, read: Callable[[], Expression]) -> Expression:
    """Reads a part. Its error begins with the place of the part instead of the reader's name."""
    try:
        return read()
    except GrammarError as error:
        message = str(error)
        is_path = name != "" and message.startswith((f"{name}.", f"{name}:", f"{name}["))
        raise GrammarError(f"{place}{message.removeprefix(name)}" if is_path else f"{place}: {message}") from None
