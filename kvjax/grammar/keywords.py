# SPDX-License-Identifier: Apache-2.0
"""The supported keywords of a JSON schema, and the constraints of a tuple of schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.grammar.expressions import GrammarError
from kvjax.grammar.numerals import Bound, exact

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
KEYWORDS = {
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
KEYWORDS["integer"] = KEYWORDS["number"]
TYPED = {keyword for keywords in KEYWORDS.values() for keyword in keywords}
_ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
    "$defs",
    "definitions",
    "discriminator",
    "contentMediaType",
    "contentEncoding",
}
COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
SUPPORTED = {*TYPED, *_ANNOTATIONS, *COMBINING, "type", "enum", "const"}


class Part(NamedTuple):
    """A schema within the root schema.

    Attributes:
      schema: the schema.
      path: keywords that lead to it, for errors.
      refs: the references that lead to it, sorted.
      level: the number of objects and arrays around it.
    """

    schema: Any
    path: str
    refs: tuple[str, ...]
    level: int

    def under(self, schema: Any, keyword: str) -> Part:
        """The part for a keyword's schema, which describes the same value."""
        return Part(schema, f"{self.path}.{keyword}", self.refs, self.level)

    def within(self, schema: Any, keyword: str) -> Part:
        """The part for a keyword's schema, which describes a member of the value."""
        return Part(schema, f"{self.path}.{keyword}", self.refs, self.level + 1)

    def error(self, keyword: str, wanted: str) -> GrammarError:
        """Makes an error about a keyword's value."""
        return GrammarError(f"{self.path}.{keyword}: got {self.schema[keyword]!r:.80}, wanted {wanted}")


Parts = tuple[Part, ...]  # schemas that all hold


def read[T](part: Part, keyword: str, reader: Callable[[Any], T]) -> T:
    """Reads the value of a keyword. A GrammarError names the keyword's place."""
    try:
        return reader(part.schema[keyword])
    except GrammarError as error:
        raise GrammarError(f"{part.path}.{keyword}: {error}") from None


def check_keywords(part: Part) -> None:
    """Raises a GrammarError for a value other than a schema, or an unsupported keyword."""
    if not isinstance(part.schema, dict):
        raise GrammarError(f"{part.path}: got {part.schema!r:.80}, wanted a schema: a dict or a bool")
    for keyword in part.schema:
        if keyword not in SUPPORTED and not str(keyword).startswith("x-"):
            raise GrammarError(f"{part.path}.{keyword}: this keyword is not supported")


def is_plain(part: Part) -> bool:
    """Whether a schema has constraints of its own, apart from combined schemas."""
    return any(keyword in part.schema for keyword in (*TYPED, "type", "enum", "const"))


def schemas(part: Part, keyword: str) -> Sequence[Any]:
    """The schemas in a list."""
    value = part.schema.get(keyword, ())
    if keyword in part.schema and not (isinstance(value, list | tuple) and value):
        raise part.error(keyword, "a list of schemas")
    return value


def schema_map(part: Part, keyword: str) -> Mapping[str, Any]:
    """The schemas by name, or by pattern."""
    value = part.schema.get(keyword, {})
    if not isinstance(value, dict) or not all(map(_is_text, value)):
        raise part.error(keyword, "schemas by name")
    return value


def required_names(parts: Parts) -> list[str]:
    """The names of an object's required properties, in order."""
    names: dict[str, None] = {}
    for part in parts:
        value = part.schema.get("required", [])
        if not isinstance(value, list | tuple) or not all(map(_is_text, value)):
            raise part.error("required", "a list of names")
        names |= dict.fromkeys(value)
    return list(names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def limits(parts: Parts, low: str, high: str) -> tuple[int, int | None]:
    """The largest lower limit of a count, and the smallest upper limit, or None."""
    counts: dict[str, list[int]] = {low: [0], high: []}
    for part in parts:
        for keyword in (low, high):
            value = part.schema.get(keyword, 0)
            if isinstance(value, bool) or type_of(value) != "integer" or value < 0:
                raise part.error(keyword, "an integer of at least 0")
            if keyword in part.schema:
                counts[keyword].append(int(value))
    return max(counts[low]), min(counts[high], default=None)


def bounds(parts: Parts) -> tuple[Bound | None, Bound | None]:
    """The largest lower bound of a number, and the smallest upper bound."""
    lower = [*_bounds(parts, "minimum", False), *_bounds(parts, "exclusiveMinimum", True)]
    upper = [*_bounds(parts, "maximum", False), *_bounds(parts, "exclusiveMaximum", True)]
    largest = max(lower, key=lambda bound: (bound.value, bound.strict), default=None)
    return largest, min(upper, key=lambda bound: (bound.value, not bound.strict), default=None)


def _bounds(parts: Parts, keyword: str, strict: bool) -> Iterator[Bound]:
    for part in parts:
        if keyword in part.schema:
            check_number(part, keyword)
            yield Bound(read(part, keyword, exact), strict)


def check_number(part: Part, keyword: str) -> None:
    """Raises a GrammarError unless a keyword has a number."""
    if isinstance(part.schema[keyword], bool) or not isinstance(part.schema[keyword], int | float):
        raise part.error(keyword, "a number")


def types(parts: Parts) -> set[str]:
    """The types of a value, where a number may be an integer.

    Schemas without `type` have the types of their keywords, or all types.
    """
    explicit = [_explicit_types(part) for part in parts if "type" in part.schema]
    if explicit:
        return set.intersection(*explicit)
    concerned = {
        name for name, keywords in KEYWORDS.items() if any(set(keywords) & part.schema.keys() for part in parts)
    }
    return concerned or set(TYPES)


def _explicit_types(part: Part) -> set[str]:
    value = part.schema["type"]
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(name in TYPES for name in names):
        raise part.error("type", f"one or several of {', '.join(TYPES)}")
    return {*names, "integer"} if "number" in names else set(names)


def type_of(value: Any) -> str:
    """The type of a value, `integer` for a float without a fraction."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
    return "object" if isinstance(value, dict) else "array"


def enumerated(parts: Parts) -> dict[str, Any] | None:
    """The values of `enum` and `const`, by a key that equal values share, or None without these keywords."""
    result: dict[str, Any] | None = None
    for part in parts:
        values = part.schema.get("enum", [])
        if not isinstance(values, list | tuple):
            raise part.error("enum", "a list of values")
        lists = [("enum", values)] if "enum" in part.schema else []
        if "const" in part.schema:
            lists.append(("const", [part.schema["const"]]))
        for keyword, allowed in lists:
            try:
                keyed = {json.dumps(_normal(value), sort_keys=True): value for value in allowed}
            except (TypeError, ValueError):
                raise part.error(keyword, "values of JSON") from None
            result = keyed if result is None else {key: result[key] for key in result if key in keyed}
    return result


def _normal(value: Any) -> Any:
    """A value in which a float without a fraction is an integer."""
    match value:
        case dict():
            return {name: _normal(member) for name, member in value.items()}
        case list() | tuple():
            return [_normal(member) for member in value]
        case float():
            return int(value) if value.is_integer() else value
    return value


def first_with(parts: Parts, keyword: str) -> Part:
    """The first part with a keyword."""
    return next(part for part in parts if keyword in part.schema)
