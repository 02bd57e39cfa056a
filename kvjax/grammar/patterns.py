# SPDX-License-Identifier: Apache-2.0
r"""Turns a regular expression of Python or ECMAScript into an expression over bytes.

It supports the syntax that means the same in both languages. It refuses syntax that differs between them or is not
regular, and the error names it: lookaround, backreferences, word boundaries, inline flags, atomic groups and possessive
quantifiers. `\d`, `\w` and `\s` match only ASCII. A lazy quantifier means the same as a greedy quantifier.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvjax.grammar.expressions import (
    EMPTY,
    MAX_CODE,
    Expression,
    GrammarError,
    Ranges,
    alt,
    complement,
    normal_ranges,
    repeat,
    seq,
    utf8,
)

EVERYTHING: Ranges = ((0, MAX_CODE),)
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACES}
_CLASSES |= {name.upper(): complement(ranges) for name, ranges in _CLASSES.items()}
_CONTROLS = {"n": 0x0A, "t": 0x09, "r": 0x0D, "f": 0x0C, "v": 0x0B, "0": 0x00}
_QUANTIFIER = re.compile(r"\{(\d*)(,?)(\d*)\}")
_CODES = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}|U([0-9A-Fa-f]{8})")
_MAX_COUNT = 100_000
_MAX_DEPTH = 50  # groups within groups
_REFUSED = (
    ("(?=", "a lookahead"),
    ("(?!", "a lookahead"),
    ("(?<=", "a lookbehind"),
    ("(?<!", "a lookbehind"),
    ("(?>", "an atomic group"),
    ("(?P=", "a backreference"),
    ("(?(", "a conditional group"),
    ("(?#", "a comment"),
)


class Flavor(NamedTuple):
    """A language of patterns.

    Attributes:
      character: makes the expression of a character in some ranges of code points.
      newlines: the characters excluded by `.`.
      searches: whether a match may begin and end anywhere in the text, unless `^` and `$` say otherwise.
    """

    character: Callable[[Ranges], Expression]
    newlines: Ranges
    searches: bool


PYTHON = Flavor(utf8, ((0x0A, 0x0A),), False)


@dataclasses.dataclass(frozen=True)
class _Branch:
    """A part of a pattern, and whether it matches only at the beginning of a text, or only at its end."""

    begins: bool
    expression: Expression
    ends: bool


def pattern_expression(pattern: str, flavor: Flavor = PYTHON) -> Expression:
    """Reads a pattern.

    Raises:
      GrammarError: naming the refused construct, and its position.
    """
    reader = _Reader(pattern, flavor)
    branches = reader.alternatives(0)
    if reader.position < len(pattern):
        raise reader.error("got an unbalanced )")
    around = repeat(flavor.character(EVERYTHING)) if flavor.searches else EMPTY
    return alt(
        *(
            seq(EMPTY if branch.begins else around, branch.expression, EMPTY if branch.ends else around)
            for branch in branches
        )
    )


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, flavor: Flavor):
        self.pattern = pattern
        self.flavor = flavor
        self.position = 0

    def error(self, message: str, position: int | None = None) -> GrammarError:
        return GrammarError(f"{message} at position {self.position if position is None else position}")

    def take(self, text: str) -> bool:
        """Whether `text` comes next. If so, moves past it."""
        is_next = self.pattern.startswith(text, self.position)
        self.position += len(text) if is_next else 0
        return is_next

    def next(self) -> str:
        """The next character, "" at the end of the pattern."""
        return self.pattern[self.position : self.position + 1]

    def alternatives(self, depth: int) -> list[_Branch]:
        """Reads up to the end of a group: at most four branches, for the pairs of edges."""
        if depth > _MAX_DEPTH:
            raise self.error(f"got over {_MAX_DEPTH} groups within groups")
        branches = self._sequence(depth)
        while self.take("|"):
            branches += self._sequence(depth)
        return _grouped(branches)

    def _sequence(self, depth: int) -> list[_Branch]:
        branches = [_Branch(False, EMPTY, False)]
        parts: list[Expression] = []  # parts without edges, so a long sequence is made only once
        while self.next() and self.next() not in "|)":
            position = self.position
            item = self._quantified(depth)
            if len(item) == 1 and not item[0].begins and not item[0].ends:
                parts.append(item[0].expression)
                continue
            branches = self._joined(self._joined(branches, seq(*parts), position), item, position)
            parts = []
        return self._joined(branches, seq(*parts), self.position)

    def _joined(
        self, first_operand: list[_Branch], second_operand: list[_Branch] | Expression, position: int
    ) -> list[_Branch]:
        """The branches of two parts in sequence. An edge of the text has to be at an edge of the sequence."""
        following = (
            [_Branch(False, second_operand, False)] if isinstance(second_operand, Expression) else second_operand
        )
        result = []
        for before in first_operand:
            for after in following:
                if (after.begins and before.expression is not EMPTY) or (before.ends and after.expression is not EMPTY):
                    raise self.error("got ^ or $ inside of a pattern", position)
                both = seq(before.expression, after.expression)
                result.append(_Branch(before.begins or after.begins, both, before.ends or after.ends))
        return _grouped(result)

    def _quantified(self, depth: int) -> list[_Branch]:
        position = self.position
        item = self._atom(depth)
        counts = self._counts()
        if counts is None:
            return item
        if any(branch.begins or branch.ends for branch in item):
            raise self.error("got a repeated ^ or $", position)
        self.take("?")  # lazy
        if self.take("+"):
            raise self.error("got a possessive quantifier")
        if self._counts() is not None:
            raise self.error("got a quantifier after a quantifier")
        return [_Branch(False, repeat(item[0].expression, *counts), False)]

    def _counts(self) -> tuple[int, int | None] | None:
        """Reads a quantifier, if it comes next: the minimum and the maximum."""
        for text, counts in ("*", (0, None)), ("+", (1, None)), ("?", (0, 1)):
            if self.take(text):
                return counts
        match = _QUANTIFIER.match(self.pattern, self.position)
        if match is None or not (match[1] or match[3]):
            return None  # `{` means itself
        if not match[1] and self.flavor.searches:
            raise self.error(f"got {match[0]}, which Python and ECMAScript read differently")
        self.position = match.end()
        if max(len(match[1]), len(match[3])) > 7:
            raise self.error(f"got a count of {match[0]}, wanted at most {_MAX_COUNT:,}")
        minimum = int(match[1] or 0)
        maximum = int(match[3]) if match[3] else None if match[2] else minimum
        if max(minimum, maximum or 0) > _MAX_COUNT:
            raise self.error(f"got a count of {match[0]}, wanted at most {_MAX_COUNT:,}")
        if maximum is not None and maximum < minimum:
            raise self.error(f"got {match[0]}, whose counts are in the wrong order")
        return minimum, maximum

    def _atom(self, depth: int) -> list[_Branch]:
        position = self.position
        if self.next() == "(":
            return self._group(depth)
        if self.take("^"):
            return [_Branch(True, EMPTY, False)]
        if self.take("$"):
            return [_Branch(False, EMPTY, True)]
        if self.take("."):
            return self._one(complement(self.flavor.newlines))
        if self.take("["):
            return self._one(self._class(position))
        if self.take("\\"):
            if self.next() in ("A", "Z", "z") and not self.flavor.searches:
                begins = self.take("A")
                self.position += 0 if begins else 1
                return [_Branch(begins, EMPTY, not begins)]
            return self._one(self._escape(position))
        if self.next() in "*+?":
            raise self.error("got nothing to repeat")
        self.position += 1
        code = ord(self.pattern[position])
        return self._one(((code, code),))

    def _one(self, ranges: Ranges) -> list[_Branch]:
        return [_Branch(False, self.flavor.character(normal_ranges(ranges)), False)]

    def _group(self, depth: int) -> list[_Branch]:
        position = self.position
        for text, name in _REFUSED:
            if self.pattern.startswith(text, position):
                raise self.error(f"got {name}")
        self.position += 1
        if self.take("?") and not self.take(":"):
            name = re.compile(r"P?<[^\W\d]\w*>").match(self.pattern, self.position)
            if name is None:
                raise self.error("got inline flags", position)
            self.position = name.end()
        branches = self.alternatives(depth + 1)
        if not self.take(")"):
            raise self.error("got a group without its )", position)
        return branches

    def _class(self, position: int) -> Ranges:
        """Reads a class of characters after its `[`."""
        negated = self.take("^")
        if self.next() == "]":
            raise self.error("got a class that begins with ], which Python and ECMAScript read differently: write \\]")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            if not self.next():
                raise self.error("got a class without its ]", position)
            first = self._member()
            if self.next() != "-" or self.pattern[self.position + 1 : self.position + 2] in ("]", ""):
                ranges += first
                continue
            self.position += 1
            last = self._member()
            ends = [*first, *last]
            if len(ends) > 2 or any(begin != end for begin, end in ends):
                raise self.error("got a range between classes")
            if ends[1] < ends[0]:
                raise self.error("got a range in the wrong order")
            ranges.append((ends[0][0], ends[1][0]))
        return complement(tuple(ranges)) if negated else normal_ranges(ranges)

    def _member(self) -> Ranges:
        position = self.position
        self.position += 1
        if self.pattern[position] == "\\":
            return ((0x08, 0x08),) if self.take("b") else self._escape(position)
        code = ord(self.pattern[position])
        return ((code, code),)

    def _escape(self, position: int) -> Ranges:
        """Reads an escape after its backslash."""
        letter = self.next()
        if match := _CODES.match(self.pattern, self.position):
            self.position = match.end()
            code = int(next(group for group in match.groups() if group), 16)
            if code > MAX_CODE or 0xD800 <= code <= 0xDFFF:
                raise self.error(f"got \\{match[0]}, wanted a character", position)
            return ((code, code),)
        self.position += 1
        following = self.next()
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter in _CONTROLS and not (letter == "0" and following.isdigit()):
            return ((_CONTROLS[letter], _CONTROLS[letter]),)
        if letter and not letter.isalnum():
            return ((ord(letter), ord(letter)),)
        names = {"b": "a word boundary", "B": "a word boundary", "p": "a Unicode property", "P": "a Unicode property"}
        name = "a backreference" if letter.isdigit() or letter == "k" else names.get(letter, "an unknown escape")
        raise self.error(f"got {name}, \\{letter},", position)


def _grouped(branches: Iterable[_Branch]) -> list[_Branch]:
    """Joins the branches with the same edges."""
    groups: dict[tuple[bool, bool], list[Expression]] = {}
    for branch in branches:
        groups.setdefault((branch.begins, branch.ends), []).append(branch.expression)
    return [_Branch(begins, alt(*expressions), ends) for (begins, ends), expressions in groups.items()]
