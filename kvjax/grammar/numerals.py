# SPDX-License-Identifier: Apache-2.0
"""Matches JSON numbers between bounds, and multiples of a number.

A number without bounds may have an exponent of two digits. Bounds and multiples apply to plain decimals, `-12.50`.
"""

from __future__ import annotations

import decimal
import math
from typing import NamedTuple

import numpy as np

from kvjax.grammar.expressions import (
    EMPTY,
    NOTHING,
    Automaton,
    Expression,
    GrammarError,
    alt,
    both,
    byte_set,
    given,
    literal,
    minimal,
    optional,
    repeat,
    seq,
)

_MAX_DIVISOR = 1000
_EXACT_DIGITS = 15  # different decimals of this many digits are different floats
_LONGEST_BOUND = 25  # digits


def _between(first: int, last: int) -> Expression:
    return byte_set(range(48 + first, 49 + last))


_DIGIT = _between(0, 9)
_NONZERO = _between(1, 9)
_DIGITS = repeat(_DIGIT)
_MINUS = literal("-")
_POINT = literal(".")
_POSITIVE = seq(_NONZERO, _DIGITS)
_WHOLE = alt(literal("0"), _POSITIVE)
_FRACTION = seq(_POINT, repeat(_DIGIT, 1))
_EXPONENT = seq(byte_set(b"eE"), optional(byte_set(b"+-")), repeat(_DIGIT, 1, 2))
INTEGER = minimal(alt(literal("0"), seq(optional(_MINUS), _POSITIVE)))
NUMBER = minimal(seq(optional(_MINUS), _WHOLE, optional(_FRACTION), optional(_EXPONENT)))


class Bound(NamedTuple):
    """A bound of a number. `strict` excludes the bound."""

    value: decimal.Decimal
    strict: bool


def numeral(value: float) -> str:
    """The plain decimal of a finite number."""
    return format(exact(value), "f") if isinstance(value, float) else str(value)


def exact(value: float) -> decimal.Decimal:
    """The decimal Python writes for a number. Raises a GrammarError for too many digits, or an infinite number."""
    if isinstance(value, float) and not math.isfinite(value):
        raise GrammarError(f"got {value}, wanted a finite number")
    if abs(value) >= 10**_LONGEST_BOUND:
        raise GrammarError(f"got a number of over {_LONGEST_BOUND} digits")
    exact_value = decimal.Decimal(repr(value))
    if exact_value.adjusted() < -_LONGEST_BOUND:
        raise GrammarError(f"got {value!r}, which has over {_LONGEST_BOUND} digits after the point")
    return decimal.Decimal(int(exact_value)) if exact_value == exact_value.to_integral_value() else exact_value


def integers(lower: Bound | None, upper: Bound | None) -> Expression:
    """Matches the integers between two bounds."""
    lowest = None if lower is None else math.floor(lower.value) + 1 if lower.strict else math.ceil(lower.value)
    highest = None if upper is None else math.ceil(upper.value) - 1 if upper.strict else math.floor(upper.value)
    sides = [INTEGER]
    if lowest is not None:
        negative = seq(_MINUS, both(_POSITIVE, _whole_at_most(-lowest))) if lowest < 0 else NOTHING
        sides.append(alt(negative, _whole_at_least(max(lowest, 0))))
    if highest is not None:
        negative = seq(_MINUS, both(_POSITIVE, _whole_at_least(max(-highest, 0))))
        sides.append(alt(negative, _whole_at_most(highest)))
    return both(*sides) if len(sides) > 1 else INTEGER


def numbers(lower: Bound | None, upper: Bound | None) -> Expression:
    """Matches the decimals between two bounds.

    Near a strict bound a decimal has at most 15 digits: with more, a float could be equal to the bound.
    """
    sides = []
    if lower is not None:
        if lower.value >= 0:
            sides.append(_at_least(lower))
        else:
            negative = seq(_MINUS, _at_most(lower._replace(value=-lower.value)))
            sides.append(alt(seq(_WHOLE, optional(_FRACTION)), negative))
    if upper is not None:
        if upper.value < 0 or (upper.value == 0 and upper.strict):
            sides.append(seq(_MINUS, _at_least(upper._replace(value=-upper.value))))
        else:
            sides.append(alt(seq(_MINUS, _WHOLE, optional(_FRACTION)), _at_most(upper)))
    for bound in (lower, upper):
        if bound is not None and bound.strict:
            decimals = max(_EXACT_DIGITS - len(_parts(bound.value)[0]), 0)
            fraction = optional(seq(_POINT, repeat(_DIGIT, 1, decimals))) if decimals else EMPTY
            sides.append(seq(optional(_MINUS), _WHOLE, fraction))
    return both(*sides) if sides else NUMBER


def multiples(divisor: float) -> Expression:
    """Matches multiples of a number as decimals, by an automaton of remainders.

    Raises:
      GrammarError: if the divisor is not positive, or has more than three digits.
    """
    value = exact(divisor)
    decimals = max(-int(value.normalize().as_tuple().exponent), 0)
    step = int(value.scaleb(decimals))
    if step <= 0 or step > _MAX_DIVISOR or decimals > 6:
        raise GrammarError(f"got {divisor}, wanted a number above 0 with at most three digits, or {_MAX_DIVISOR}")
    # A state is a remainder and the number of digits after the point, then -1 before it. 0 comes before any digit.
    states = [(0, -2)] + [(remainder, digits) for digits in range(-1, decimals + 1) for remainder in range(step)]
    number_of = {state: state_index for state_index, state in enumerate(states)}
    next_state = np.full((len(states), 13), -1, np.int32)
    final = np.zeros(len(states), bool)
    for state_index, (remainder, digits) in enumerate(states):
        missing = decimals - max(digits, 0)
        final[state_index] = digits not in (-2, 0) and remainder * 10**missing % step == 0
        if digits < decimals:
            for digit in range(10):
                after = max(digits, -1) if digits < 0 else digits + 1
                next_state[state_index, digit] = number_of[(remainder * 10 + digit) % step, after]
        if digits == -1 and decimals:
            next_state[state_index, 10] = number_of[remainder, 0]
    next_state[0, 11] = 0  # a sign; NUMBER says where it may be
    byte_class = np.full(256, 12, np.int32)
    byte_class[48:58] = range(10)
    byte_class[ord(".")] = 10
    byte_class[ord("-")] = 11
    return both(NUMBER, given(Automaton(next_state, byte_class, final)))


def _parts(value: decimal.Decimal) -> tuple[str, str]:
    """The digits of a nonnegative number, before and after the point, without zeros at the end."""
    integer_part, _, fraction = format(value, "f").partition(".")
    return integer_part, fraction.rstrip("0")


def _whole_at_least(value: int) -> Expression:
    digits = str(value)
    longer = seq(_NONZERO, repeat(_DIGIT, len(digits)))
    equal_or_larger = [literal(digits)]
    for index, digit in enumerate(digits):
        larger = _between(int(digit) + 1, 9)
        equal_or_larger.append(seq(literal(digits[:index]), larger, *[_DIGIT] * (len(digits) - index - 1)))
    return alt(longer, *equal_or_larger)


def _whole_at_most(value: int) -> Expression:
    if value < 0:
        return NOTHING
    digits = str(value)
    shorter = alt(literal("0"), seq(_NONZERO, repeat(_DIGIT, 0, len(digits) - 2))) if len(digits) > 1 else NOTHING
    equal_or_smaller = [literal(digits)]
    for index, digit in enumerate(digits):
        smaller = _between(1 if index == 0 and len(digits) > 1 else 0, int(digit) - 1)
        equal_or_smaller.append(seq(literal(digits[:index]), smaller, *[_DIGIT] * (len(digits) - index - 1)))
    return alt(shorter, *equal_or_smaller)


def _at_least(bound: Bound) -> Expression:
    """Matches decimals without a sign from a bound on."""
    integer_part, fraction = _parts(bound.value)
    larger = seq(_whole_at_least(int(integer_part) + 1), optional(_FRACTION))
    not_zero = seq(_DIGITS, _NONZERO, _DIGITS)
    if not fraction:
        after = seq(_POINT, not_zero) if bound.strict else optional(_FRACTION)
    else:
        digits = [
            seq(literal(fraction[:index]), _between(int(digit) + 1, 9), _DIGITS) for index, digit in enumerate(fraction)
        ]
        equal = seq(literal(fraction), not_zero if bound.strict else _DIGITS)
        after = seq(_POINT, alt(equal, *digits))
    return alt(larger, seq(literal(integer_part), after))


def _at_most(bound: Bound) -> Expression:
    """Matches decimals without a sign up to a bound."""
    integer_part, fraction = _parts(bound.value)
    smaller = seq(_whole_at_most(int(integer_part) - 1), optional(_FRACTION))
    zeros = repeat(literal("0"))
    if not fraction:
        after = NOTHING if bound.strict else optional(seq(_POINT, literal("0"), zeros))
    else:
        digits = [
            seq(literal(fraction[:index]), _between(0, int(digit) - 1), _DIGITS) for index, digit in enumerate(fraction)
        ]
        prefixes = [literal(fraction[:length]) for length in range(1, len(fraction))]
        equal = NOTHING if bound.strict else seq(literal(fraction), zeros)
        after = optional(seq(_POINT, alt(equal, *digits, *prefixes)))
    return alt(smaller, seq(literal(integer_part), after))
