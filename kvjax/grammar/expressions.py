# SPDX-License-Identifier: Apache-2.0
"""Regular expressions over bytes as values: sets of bytes, sequences, alternatives, repetitions, intersections.

    word = repeat(byte_set(b"abc"), 1, None)
    listed = seq(literal("["), repeat(word, 0, None, separator=literal(",")), literal("]"))

The functions simplify as they build: an alternative without a text disappears, and so does a sequence with such a part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

MAX_CODE = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
Ranges = tuple[tuple[int, int], ...]


class GrammarError(ValueError):
    """A schema, a pattern or choices cannot become a table. The message names the part and the limit."""


class Automaton(NamedTuple):
    """A deterministic automaton over bytes. State 0 is the start.

    Attributes:
      next_state: i32[S, K]; the state after a byte of each class, or -1 if no text continues like this.
      byte_class: i32[256]; each byte's class.
      final: bool[S]; whether a text may end in the state.
    """

    next_state: np.ndarray
    byte_class: np.ndarray
    final: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """A set of byte strings. `size` counts the automaton's states before any are merged."""

    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class ByteSet(Expression):
    """A byte whose bit is set in `mask`."""

    mask: int


@dataclasses.dataclass(frozen=True, eq=False)
class Seq(Expression):
    """The parts in order."""

    parts: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Alt(Expression):
    """Any of the parts."""

    parts: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(Expression):
    """At least `minimum` and at most `maximum` items (None: any number), with a separator between two of them."""

    item: Expression
    minimum: int
    maximum: int | None
    separator: Expression


@dataclasses.dataclass(frozen=True, eq=False)
class Joined(Expression):
    """The parts in their order, each with whether it may be absent, and a separator between present parts."""

    parts: tuple[tuple[Expression, bool], ...]
    separator: Expression


@dataclasses.dataclass(frozen=True, eq=False)
class Minimal(Expression):
    """An item whose automaton is minimized before it becomes part of a larger automaton."""

    item: Expression


@dataclasses.dataclass(frozen=True, eq=False)
class Given(Expression):
    """The strings that an automaton accepts."""

    automaton: Automaton


@dataclasses.dataclass(frozen=True, eq=False)
class Both(Expression):
    """The strings of both sides."""

    first_operand: Expression
    second_operand: Expression


@dataclasses.dataclass(frozen=True, eq=False)
class Minus(Expression):
    """The strings of the left side without the strings of the right side."""

    first_operand: Expression
    second_operand: Expression


EMPTY = Seq(1, ())
NOTHING = Alt(1, ())


def byte_set(values: Iterable[int]) -> Expression:
    """Matches a byte of `values`."""
    mask = 0
    for value in values:
        mask |= 1 << value
    return ByteSet(1, mask) if mask else NOTHING


@functools.cache
def _byte_range(first: int, last: int) -> Expression:
    return byte_set(range(first, last + 1))


def literal(text: str | bytes) -> Expression:
    """Matches a text, in UTF-8, or bytes."""
    try:
        data = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError:
        raise GrammarError(f"got {text!r}, which has half of a surrogate pair") from None
    return seq(*(_byte_range(value, value) for value in data))


def seq(*parts: Expression) -> Expression:
    """Matches the parts in order."""
    flat: list[Expression] = []
    for part in parts:
        flat += part.parts if isinstance(part, Seq) else [part]
    if NOTHING in flat:
        return NOTHING
    if not flat:
        return EMPTY
    return flat[0] if len(flat) == 1 else Seq(1 + sum(part.size for part in flat), tuple(flat))


def alt(*parts: Expression) -> Expression:
    """Matches any of the parts. Single bytes become a set."""
    items: dict[Expression, None] = {}
    mask = 0
    for part in parts:
        for item in part.parts if isinstance(part, Alt) else [part]:
            if isinstance(item, ByteSet):
                mask |= item.mask
            else:
                items[item] = None
    flat = [*items, ByteSet(1, mask)] if mask else [*items]
    if not flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Alt(2 + sum(part.size + 1 for part in flat), tuple(flat))


def optional(part: Expression) -> Expression:
    """Matches the part or nothing."""
    return alt(part, EMPTY)


def repeat(item: Expression, minimum: int = 0, maximum: int | None = None, separator: Expression = EMPTY) -> Expression:
    """Matches at least `minimum` and at most `maximum` items (None: any number), with a separator between them."""
    if maximum is not None and maximum < minimum:
        return NOTHING
    if maximum == 0 or item is EMPTY:
        return EMPTY
    if item is NOTHING:
        return NOTHING if minimum else EMPTY
    if (minimum, maximum) == (1, 1):
        return item
    copies = max(minimum, 1) if maximum is None else maximum
    return Repeat(2 + copies * (item.size + separator.size + 2), item, minimum, maximum, separator)


def joined(parts: Sequence[tuple[Expression, bool]], separator: Expression) -> Expression:
    """Matches parts in their order, each with whether it may be absent, with a separator between present parts."""
    if any(part is NOTHING and not may_miss for part, may_miss in parts):
        return NOTHING
    remaining = tuple(pair for pair in parts if pair[0] is not NOTHING)
    if not remaining:
        return EMPTY
    return Joined(2 + sum(part.size + separator.size + 3 for part, _ in remaining), remaining, separator)


def minimal(item: Expression) -> Expression:
    """Matches the item, whose automaton is minimized first, once for all its uses."""
    return (
        item
        if isinstance(item, ByteSet | Minimal | Given | Both | Minus) or item.size < 4
        else Minimal(item.size, item)
    )


def given(automaton: Automaton) -> Expression:
    """Matches the texts of an automaton."""
    return Given(len(automaton.final) + 1, automaton)


def both(*parts: Expression) -> Expression:
    """Matches the texts of all parts."""
    result = parts[0]
    for part in parts[1:]:
        if result is NOTHING or part is NOTHING:
            return NOTHING
        result = Both(result.size + part.size, result, part)
    return result


def minus(first_operand: Expression, second_operand: Expression) -> Expression:
    """Matches the texts of the left side, without the texts of the right side."""
    return (
        first_operand
        if NOTHING in (first_operand, second_operand)
        else Minus(first_operand.size + second_operand.size, first_operand, second_operand)
    )


def normal_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorts ranges of code points and joins adjacent ranges."""
    result: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(last, result[-1][1])
        else:
            result.append((first, last))
    return tuple(result)


def complement(ranges: Ranges) -> Ranges:
    """Returns the ranges of all other code points."""
    result = []
    begin = 0
    for first, last in normal_ranges(ranges):
        result.append((begin, first - 1))
        begin = last + 1
    result.append((begin, MAX_CODE))
    return tuple((first, last) for first, last in result if first <= last)


@functools.lru_cache(1024)
def utf8(ranges: Ranges) -> Expression:
    """Matches a character whose code point is in `ranges`, in UTF-8. Surrogates are not characters."""
    outside = complement((_SURROGATES,))
    pairs = [
        (max(first, low), min(last, high))
        for first, last in normal_ranges(ranges)
        for low, high in outside
        if max(first, low) <= min(last, high)
    ]
    return minimal(alt(*(expression for first, last in pairs for expression in _encoded(first, last))))


def _encoded(first: int, last: int) -> Iterable[Expression]:
    """Divides a range of code points until the bytes of each part are independent of each other."""
    for end in (0x7F, 0x7FF, 0xFFFF):
        if first <= end < last:
            yield from _encoded(first, end)
            yield from _encoded(end + 1, last)
            return
    for bits in (6, 12, 18):
        tail = (1 << bits) - 1
        if last > 0x7F and first & ~tail != last & ~tail:
            if first & tail:
                yield from _encoded(first, first | tail)
                yield from _encoded((first | tail) + 1, last)
                return
            if last & tail != tail:
                yield from _encoded(first, (last & ~tail) - 1)
                yield from _encoded(last & ~tail, last)
                return
    begin = chr(first).encode()
    end = chr(last).encode()
    yield seq(*(_byte_range(low, high) for low, high in zip(begin, end, strict=True)))
