# SPDX-License-Identifier: Apache-2.0
"""Turns a JSON schema into an expression.

First `anyOf`, `oneOf`, `allOf` and `$ref` divide a schema into alternatives. Each alternative is a tuple of plain
schemas which must all hold. For each type of an alternative, the keywords become an expression.
`kvjax.grammar.compile_schema` describes which valid texts match.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.grammar.automaton import Builder
from kvjax.grammar.expressions import (
    EMPTY,
    NOTHING,
    Expression,
    GrammarError,
    alt,
    both,
    joined,
    literal,
    minimal,
    minus,
    optional,
    repeat,
    seq,
)
from kvjax.grammar.json_texts import (
    CHARACTER,
    COLON,
    COMMA,
    NAME,
    PATTERN,
    SCALARS,
    STRING,
    any_array,
    any_object,
    format_content,
    quoted,
    text_literal,
    value_literal,
)
from kvjax.grammar.keywords import (
    KEYWORDS,
    TYPES,
    Part,
    Parts,
    bounds,
    check_keywords,
    check_number,
    enumerated,
    first_with,
    is_plain,
    limits,
    read,
    required_names,
    schema_map,
    schemas,
    type_of,
    types,
)
from kvjax.grammar.numerals import INTEGER, NUMBER, integers, multiples, numbers
from kvjax.grammar.patterns import pattern_expression

ANY_DEPTH = 3
ROOT_DEPTH = 5
RECURSION = 3
_TEXT = {"type": "string"}
_MAX_ALTERNATIVES = 256
_MAX_EXPRESSIONS = 5000
_MAX_LEVELS = 32


def schema_expression(schema: Any, builder: Builder) -> Expression:
    """Reads a schema.

    Args:
      schema: the schema, or its JSON.
      builder: builds intermediate automata.

    Raises:
      GrammarError: naming the place in the schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"schema: got a text that is no JSON ({error})") from None
    return _Reader(schema, builder).value((Part(schema, "schema", (), 0),))


class _Reader:
    """Reads the parts of a schema."""

    def __init__(self, root: Any, builder: Builder):
        self.root = root
        self.builder = builder
        # Keyed by the schemas and the references that led to them. The parts keep the schemas alive.
        self.values: dict[tuple[tuple[int, tuple[str, ...]], ...], tuple[Parts, Expression]] = {}

    def value(self, parts: Parts) -> Expression:
        """Matches the values for which all parts hold."""
        key = tuple((id(part.schema), part.refs) for part in parts)
        if key not in self.values:
            if len(self.values) >= _MAX_EXPRESSIONS:
                raise GrammarError(f"schema: got over {_MAX_EXPRESSIONS:,} values within it, with those of its $refs")
            if parts and parts[0].level > _MAX_LEVELS:
                raise GrammarError(f"{parts[0].path}: got over {_MAX_LEVELS} levels of objects and arrays")
            self.values[key] = parts, alt(*map(self._alternative, self.alternatives(parts)))
        return self.values[key][1]

    def alternatives(self, parts: Parts, pending: tuple[str, ...] = ()) -> list[Parts]:
        """The alternatives: tuples of plain schemas."""
        result: list[Parts] = [()]
        for part in parts:
            result = _product(result, self._of_part(part, pending), part)
        return result

    def _of_part(self, part: Part, pending: tuple[str, ...]) -> list[Parts]:
        schema = part.schema
        if isinstance(schema, bool):
            return [()] if schema else []
        check_keywords(part)
        result: list[Parts] = [(part,)] if is_plain(part) else [()]
        if "$ref" in schema:
            result = _product(result, self._referenced(part, pending), part)
        for index, child in enumerate(schemas(part, "allOf")):
            result = _product(result, self._of_part(part.under(child, f"allOf[{index}]"), pending), part)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                children = [part.under(child, f"{keyword}[{i}]") for i, child in enumerate(schemas(part, keyword))]
                extra = self._discriminator(part) if keyword == "oneOf" else ()
                branches = [self.alternatives((child, *extra), pending) for child in children]
                if keyword == "oneOf":
                    self._check_disjoint(part, branches)
                result = _product(result, list(itertools.chain(*branches)), part)
        return result

    def _referenced(self, part: Part, pending: tuple[str, ...]) -> list[Parts]:
        """The alternatives of the schema to which `$ref` points."""
        pointer = part.schema["$ref"]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise part.error("$ref", "a pointer into the same schema, such as '#/$defs/name'")
        if pointer in pending:
            raise part.error("$ref", "an object or an array between a schema and itself")
        target = self.root
        keys = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
        for key in keys:
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise part.error("$ref", "a schema that exists")
        refs = tuple(sorted((*part.refs, pointer)))
        if len(refs) - len(set(refs)) > RECURSION:
            return []
        path = ".".join(["schema", *keys])
        return self._of_part(Part(target, path, refs, part.level), (*pending, pointer))

    def _discriminator(self, part: Part) -> Parts:
        """A schema with the required property of OpenAPI's `discriminator`, which separates the branches of `oneOf`."""
        discriminator = part.schema.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        return (part.under({"type": "object", "required": [name]}, "discriminator"),) if isinstance(name, str) else ()

    def _check_disjoint(self, part: Part, branches: Sequence[Sequence[Parts]]) -> None:
        """Refuses `oneOf` unless no value belongs to two branches."""
        for (i, first_parts), (j, second_parts) in itertools.combinations(enumerate(branches), 2):
            if not self._are_disjoint(first_parts, second_parts):
                raise GrammarError(
                    f"{part.path}.oneOf: a value could belong to {i} and {j} at once; wanted branches that differ by"
                    " type, or by a required property with other values, or anyOf"
                )

    def _are_disjoint(self, first_parts: Iterable[Parts], second_parts: Iterable[Parts]) -> bool:
        return all(self._differ(first_part, second_part) for first_part in first_parts for second_part in second_parts)

    def _differ(self, first_part: Parts, second_part: Parts) -> bool:
        """Whether it is visible from the keywords that no value belongs to both alternatives."""
        values = [enumerated(parts) for parts in (first_part, second_part)]
        if values[0] is not None and values[1] is not None:
            return not values[0].keys() & values[1].keys()
        common = types(first_part) & types(second_part)
        if "array" in common:
            return False
        for name in common - {"object"}:
            sides = [self._typed(name, parts) for parts in (first_part, second_part)]
            if NOTHING not in sides and not self.builder.matches_nothing(both(*sides)):
                return False
        return "object" not in common or self._differ_by_property(first_part, second_part)

    def _differ_by_property(self, first_part: Parts, second_part: Parts) -> bool:
        required = [set(required_names(parts)) for parts in (first_part, second_part)]
        for name in sorted(required[0] & required[1]):
            sides = [self.alternatives(self._member(parts, name)) for parts in (first_part, second_part)]
            if self._are_disjoint(*sides):
                return True
        return False

    def _alternative(self, parts: Parts) -> Expression:
        """Matches the values for which all of these plain schemas hold."""
        values = enumerated(parts)
        if values is not None:
            return alt(*(self._constant(value, parts) for value in values.values()))
        names = types(parts) - ({"integer"} if "number" in types(parts) else set())
        return alt(*(self._typed(name, parts) for name in TYPES if name in names))

    def _constant(self, value: Any, parts: Parts) -> Expression:
        """Matches a value, if the other keywords allow it."""
        part = next(part for part in parts if {"enum", "const"} & part.schema.keys())
        keyword = "const" if "const" in part.schema else "enum"
        name = type_of(value)
        if name not in types(parts):
            return NOTHING
        try:
            expression = value_literal(value)
        except GrammarError as error:
            raise GrammarError(f"{part.path}.{keyword}: {error}") from None
        constraints = [item for item in parts if set(KEYWORDS.get(name, ())) & item.schema.keys()]
        if not constraints:
            return expression
        if name in ("object", "array"):
            raise GrammarError(f"{part.path}.{keyword}: an {name} among the values, with other keywords about {name}s")
        return both(expression, self._typed(name, parts))

    def _typed(self, name: str, parts: Parts) -> Expression:
        """Matches the values of a type for which all of these plain schemas hold."""
        match name:
            case "object":
                return self._object(parts)
            case "array":
                return self._array(parts)
            case "string":
                return self._string(parts)
            case "number" | "integer":
                return self._checked(_number(name, parts), parts) if parts else NUMBER
        return SCALARS[name]

    def _string(self, parts: Parts) -> Expression:
        contents = []
        minimum, maximum = limits(parts, "minLength", "maxLength")
        if (minimum, maximum) != (0, None):
            contents.append(repeat(CHARACTER, minimum, maximum))
        for part in parts:
            for keyword, reader in ("pattern", _pattern), ("format", format_content):
                if keyword in part.schema:
                    if not isinstance(part.schema[keyword], str):
                        raise part.error(keyword, "a text")
                    contents += [content for content in [read(part, keyword, reader)] if content is not None]
        return self._checked(minimal(quoted(both(*contents))), parts) if contents else STRING

    def _checked(self, expression: Expression, parts: Parts) -> Expression:
        """Builds the automaton of an expression now, so an error can name its place."""
        path = parts[0].path
        try:
            states = len(self.builder.build(expression).final)
        except GrammarError as error:
            raise GrammarError(f"{path}: {error}") from None
        if states > self.builder.max_states:
            raise GrammarError(f"{path}: got {states:,} states, wanted at most max_states={self.builder.max_states}")
        return expression

    def _array(self, parts: Parts) -> Expression:
        for part in parts:
            if part.schema.get("uniqueItems", False) not in (False,) and part.schema.get("maxItems", 2) not in (0, 1):
                raise part.error("uniqueItems", "false: unique items are not supported")
        minimum, maximum = limits(parts, "minItems", "maxItems")
        shapes = [_array_shape(part) for part in parts]
        count = max((len(prefix) for prefix, _ in shapes), default=0)
        members = [
            tuple(part for prefix, rest in shapes if (part := [*prefix, rest][min(index, len(prefix))]) is not None)
            for index in range(count + 1)
        ]
        if not members[-1] and not count:
            return self._any_array(parts, minimum, maximum)
        if count and all(rest is None for _, rest in shapes) and minimum <= count:
            maximum = count if maximum is None else min(maximum, count)
        positions = members[:-1] if maximum is None else members[: min(count, maximum)]
        items: list[Expression] = []
        for index, member in enumerate(positions):
            item = self.value(member)
            if item is NOTHING:
                if index < minimum:
                    return NOTHING
                maximum = index
                break
            items.append(item)
        rest_items = NOTHING if maximum is not None and maximum <= len(items) else minimal(self.value(members[-1]))
        return _sequence_of(items, rest_items, minimum, maximum)

    def _any_array(self, parts: Parts, minimum: int, maximum: int | None) -> Expression:
        if (minimum, maximum) == (0, None):
            return any_array(ANY_DEPTH)
        return _sequence_of([], minimal(self.value(())), minimum, maximum)

    def _member(self, parts: Parts, name: str) -> Parts:
        """The schemas of a property, or of an additional property with this name."""
        members_found = []
        for part in parts:
            properties = schema_map(part, "properties")
            if name in properties:
                members_found.append(part.within(properties[name], f"properties.{name}"))
            patterns = [
                part.within(schema, f"patternProperties.{pattern}")
                for pattern, schema in schema_map(part, "patternProperties").items()
                if self.builder.accepts(self._names(part, pattern), json.dumps(name, ensure_ascii=False).encode())
            ]
            members_found += patterns
            if name not in properties and not patterns and "additionalProperties" in part.schema:
                members_found.append(part.within(part.schema["additionalProperties"], "additionalProperties"))
        return tuple(members_found)

    def _object(self, parts: Parts) -> Expression:
        if not any(set(KEYWORDS["object"]) & part.schema.keys() for part in parts):
            return any_object(ROOT_DEPTH if parts and parts[0].level == 0 else ANY_DEPTH)
        required = required_names(parts)
        names = list(dict.fromkeys([*(name for part in parts for name in schema_map(part, "properties")), *required]))
        allowed = [
            minimal(self.value((part.within({"allOf": [part.schema["propertyNames"]], **_TEXT}, "propertyNames"),)))
            for part in parts
            if "propertyNames" in part.schema
        ]
        members: list[tuple[Expression, bool]] = []
        for name in names:
            key = text_literal(name)
            fits = all(
                self.builder.accepts(names_allowed, json.dumps(name, ensure_ascii=False).encode())
                for names_allowed in allowed
            )
            value = self.value(self._member(parts, name)) if fits else NOTHING
            members.append((seq(key, COLON, value), name not in required))
        declared = [member for member in members if member[0] is not NOTHING]
        additional = self._additional(parts, alt(*(text_literal(name) for name in names)), allowed)
        minimum, maximum = limits(parts, "minProperties", "maxProperties")
        fixed = len(required)
        has_optional = len(declared) > len(required)
        if maximum is not None and maximum < fixed:
            return NOTHING
        if maximum is not None and has_optional and (maximum < len(declared) or additional is not NOTHING):
            raise first_with(parts, "maxProperties").error("maxProperties", "none next to optional properties")
        can_count = 1 if fixed == 0 or not has_optional else 0
        if minimum > fixed + can_count:
            raise first_with(parts, "minProperties").error("minProperties", f"at most {fixed + can_count} here")
        rest_items = repeat(additional, 1, None if maximum is None else maximum - len(declared), COMMA)
        needs_more = minimum > fixed and not has_optional
        content = joined([*members, (rest_items, not needs_more)], COMMA)
        if minimum > fixed and has_optional:
            content = minus(content, EMPTY)
        return seq(literal("{"), content, literal("}"))

    def _names(self, part: Part, pattern: str) -> Expression:
        """Matches names by a pattern."""
        try:
            return _quoted_pattern(pattern)
        except GrammarError as error:
            raise GrammarError(f"{part.path}.patternProperties: {error}") from None

    def _additional(self, parts: Parts, declared: Expression, allowed: list[Expression]) -> Expression:
        """Matches a property without a name in the schema."""
        patterns = [(part, pattern) for part in parts for pattern in schema_map(part, "patternProperties")]
        if len(patterns) > 1:
            raise patterns[0][0].error("patternProperties", "one pattern")
        name = minus(both(NAME, *allowed), declared)
        general = tuple(
            part.within(part.schema["additionalProperties"], "additionalProperties")
            for part in parts
            if "additionalProperties" in part.schema
        )
        is_open = bool(general) or not (patterns or any("properties" in part.schema for part in parts))
        if not patterns:
            value = self.value(general) if is_open else NOTHING
            return seq(minimal(name), COLON, value) if value is not NOTHING else NOTHING
        part, pattern = patterns[0]
        matching = self._names(part, pattern)
        others = tuple(schema for schema in general if not schema.path.startswith(f"{part.path}.additional"))
        schema = part.within(part.schema["patternProperties"][pattern], f"patternProperties.{pattern}")
        values = [(both(name, matching), self.value((schema, *others)))]
        if is_open:
            values.append((minus(name, matching), self.value(general)))
        return alt(*(seq(minimal(key), COLON, value) for key, value in values))


@functools.lru_cache(256)
def _pattern(pattern: str) -> Expression:
    return minimal(pattern_expression(pattern, PATTERN))


@functools.lru_cache(256)
def _quoted_pattern(pattern: str) -> Expression:
    return minimal(quoted(_pattern(pattern)))


def _number(name: str, parts: Parts) -> Expression:
    """Matches the numbers, or the integers, for which all of these plain schemas hold."""
    lower, upper = bounds(parts)
    sides: list[Expression] = []
    if lower is not None or upper is not None:
        sides.append(integers(lower, upper) if name == "integer" else numbers(lower, upper))
    for part in parts:
        if "multipleOf" in part.schema:
            check_number(part, "multipleOf")
            sides.append(read(part, "multipleOf", multiples))
    if name == "integer" and (lower, upper) == (None, None):
        sides.append(INTEGER)
    return minimal(both(*sides)) if sides else NUMBER


def _array_shape(part: Part) -> tuple[list[Part], Part | None]:
    """The schemas of the first items, and the schema of later items or None. Older drafts have two `items`."""
    schema = part.schema
    keyword, rest = ("items", "additionalItems") if isinstance(schema.get("items"), list) else ("prefixItems", "items")
    first = [part.within(item, f"{keyword}[{index}]") for index, item in enumerate(schemas(part, keyword))]
    return first, part.within(schema[rest], rest) if rest in schema else None


def _sequence_of(items: list[Expression], rest_items: Expression, minimum: int, maximum: int | None) -> Expression:
    """Matches an array of the items and any number of others, at least `minimum` and at most `maximum` in all."""
    count = len(items)
    min_rest = max(minimum - count, 0)
    max_rest = None if maximum is None else max(maximum - count, 0)
    if not count:
        return seq(literal("["), repeat(rest_items, min_rest, max_rest, COMMA), literal("]"))
    tail = repeat(seq(COMMA, rest_items), min_rest, max_rest)
    for index in reversed(range(count)):
        tail = seq(*([COMMA] if index else []), items[index], tail)
        tail = tail if index < minimum else optional(tail)
    return seq(literal("["), tail, literal("]"))


def _product(first_part: list[Parts], second_part: list[Parts], part: Part) -> list[Parts]:
    if len(first_part) * len(second_part) > _MAX_ALTERNATIVES:
        raise GrammarError(
            f"{part.path}: got {len(first_part) * len(second_part):,} alternatives, wanted at most {_MAX_ALTERNATIVES}"
        )
    return [(*first_parts, *second_parts) for first_parts in first_part for second_parts in second_part]
