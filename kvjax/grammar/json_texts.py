# SPDX-License-Identifier: Apache-2.0
"""JSON values as texts: strings, literals, and any value up to a depth.

`kvjax.grammar.compile_schema` describes the spelling of a text.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from kvjax.grammar.expressions import (
    Expression,
    GrammarError,
    Ranges,
    alt,
    byte_set,
    complement,
    literal,
    minimal,
    optional,
    repeat,
    seq,
    utf8,
)
from kvjax.grammar.numerals import NUMBER, numeral
from kvjax.grammar.patterns import EVERYTHING, Flavor, pattern_expression

_QUOTE = literal('"')
_SPACE = optional(literal(" "))
COMMA = seq(literal(","), _SPACE)
COLON = seq(literal(":"), _SPACE)
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_HEX = byte_set(b"0123456789abcdefABCDEF")


@functools.lru_cache(1024)
def character(ranges: Ranges) -> Expression:
    """Matches a character of these ranges in a string, in its single spelling."""
    outside = complement(_ESCAPED)
    plain = tuple(
        (max(first, low), min(last, high))
        for first, last in ranges
        for low, high in outside
        if max(first, low) <= min(last, high)
    )
    escapes = [
        literal("\\" + letter)
        for code, letter in _SHORT.items()
        if any(first <= code <= last for first, last in ranges)
    ]
    return minimal(alt(utf8(plain), *escapes))


def _free_character() -> Expression:
    lone = alt(seq(byte_set(b"0123456789abcefABCEF"), _HEX), seq(byte_set(b"dD"), byte_set(b"01234567")))
    high = seq(byte_set(b"dD"), byte_set(b"89abAB"))
    low = seq(byte_set(b"dD"), byte_set(b"cdefCDEF"))
    unit = seq(_HEX, _HEX)
    pair = seq(high, unit, literal("\\u"), low, unit)
    code = seq(literal("u"), alt(seq(lone, unit), pair))
    return minimal(alt(utf8(complement(_ESCAPED)), seq(literal("\\"), alt(byte_set(b'"\\/bfnrt'), code))))


def quoted(content: Expression) -> Expression:
    """Matches a string with a content."""
    return seq(_QUOTE, content, _QUOTE)


CHARACTER = character(EVERYTHING)
STRING = minimal(quoted(repeat(_free_character())))
NAME = minimal(quoted(repeat(CHARACTER)))
# ECMAScript's `.` excludes four characters, and Python's `.` only the first of them.
PATTERN = Flavor(character, ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)), True)
SCALARS = {
    "string": STRING,
    "number": NUMBER,
    "boolean": alt(literal("true"), literal("false")),
    "null": literal("null"),
}


@functools.cache
def any_value(depth: int) -> Expression:
    """Matches any value with at most `depth` levels of objects and arrays."""
    containers = [any_object(depth), any_array(depth)] if depth else []
    return alt(*SCALARS.values(), *containers)


@functools.cache
def any_object(depth: int) -> Expression:
    """Matches any object with 1 to `depth` levels."""
    member = seq(STRING, COLON, any_value(depth - 1))
    return seq(literal("{"), repeat(member, separator=COMMA), literal("}"))


@functools.cache
def any_array(depth: int) -> Expression:
    """Matches any array with 1 to `depth` levels."""
    return seq(literal("["), repeat(any_value(depth - 1), separator=COMMA), literal("]"))


def text_literal(text: str) -> Expression:
    """Matches a string as `json.dumps` writes it with `ensure_ascii=False`."""
    if not isinstance(text, str):
        raise GrammarError(f"got {text!r:.80}, wanted a text")
    return literal(json.dumps(text, ensure_ascii=False))


def value_literal(value: Any) -> Expression:
    """Matches a value, with its members in order."""
    match value:
        case str():
            return text_literal(value)
        case bool() | None:
            return literal(json.dumps(value))
        case int() | float():
            return literal(numeral(value))
        case dict():
            members = [seq(text_literal(name), COLON, value_literal(member)) for name, member in value.items()]
            return seq(literal("{"), _listed(members), literal("}"))
        case list() | tuple():
            return seq(literal("["), _listed([value_literal(member) for member in value]), literal("]"))
    raise GrammarError(f"got {value!r:.80}, wanted a value of JSON")


def _listed(members: list[Expression]) -> Expression:
    parts: list[Expression] = []
    for member in members:
        parts += [COMMA, member] if parts else [member]
    return seq(*parts)


_MONTHS = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
_YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_DATE = rf"(?:{_YEAR}-{_MONTHS}|{_LEAP})"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2}"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(?:\d+W|(?:\d+Y)?(?:\d+M)?\d+D|(?:\d+Y)?\d+M|\d+Y|(?:(?:\d+Y)?(?:\d+M)?(?:\d+D)?T"
    r"(?:(?:\d+H)?(?:\d+M)?\d+S|(?:\d+H)?\d+M|\d+H)))",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": r"(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*://{_HOST}(?::\d{{1,4}})?(?:/(?:{_PATH})*)?"
    rf"(?:\?(?:{_PATH}|[?])*)?(?:#(?:{_PATH}|[?])*)?",
}
# Formats that describe the use of a string, and do not constrain its text.
_UNCONSTRAINED = {"password", "binary", "path", "file-path", "directory-path"}


@functools.cache
def format_content(name: str) -> Expression | None:
    """The content of strings of a format, or None without a constraint. Raises a GrammarError for others."""
    if name in _UNCONSTRAINED:
        return None
    if name not in _FORMATS:
        raise GrammarError(f"got {name!r}, wanted one of {', '.join(sorted({*_FORMATS, *_UNCONSTRAINED}))}")
    return minimal(pattern_expression(f"^(?:{_FORMATS[name]})$", PATTERN))
