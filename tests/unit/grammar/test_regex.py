# SPDX-License-Identifier: Apache-2.0
"""Regular expressions and choices: what they accept, and what is refused by name."""

import re

import pytest

from kvjax.grammar import GrammarError, Vocabulary, compile_choices, compile_regex
from tests.grammar_kit import BYTES, VOCABULARY, accepts, next_state

# Each pattern with texts, of which some match by `re.fullmatch` with ASCII's classes, and some do not.
TEXTS = {
    "(ab)+": ["ab", "abab", "a", "", "aba"],
    "a|b*c?": ["a", "bbc", "bb", "", "ac"],
    "((a*)*|b){2}": ["", "aab", "bb", "bbb"],
    "a{2}b{1,2}c{,2}d{2,}": ["aabdd", "aabbccddd", "abdd", "aabd"],
    "a{x}b{": ["a{x}b{", "ab"],
    "[^a-z]{1,2}": ["é", "日😀", "aé", "", "\n"],
    "[é-日]": ["é", "日", "e", "本", "\u0800", "\ud7ff"],
    "[\\]\\-a-c-]+": ["]-abc", "d"],
    "a.c": ["abc", "aéc", "a😀c", "a\nc", "a\rc", "ac"],
    r"^\d{2,4}-\w+\s?\S$": ["12-ab", "12-a b", "1-ab", "12-é"],
    r"\x41\u00e9\t\.\/": ["Aé\t./", "Aé\t.."],
    "^(?:x|(?P<name>y))|z$": ["x", "y", "z", "xz"],
    "(^a$|^b)(?:)": ["a", "b", "ab"],
    "a*?b+?c??": ["b", "aabbc", "a"],
    "": ["", "a"],
    r"[\s\S]": ["\n", "é", "\x00", "", "ab"],
    r"\A[\b]b\Z": ["\bb", "b"],
}


@pytest.mark.parametrize("pattern", TEXTS)
def test_a_pattern_matches_the_texts_that_re_matches(pattern):
    table = compile_regex(pattern, VOCABULARY)
    matches = {text: accepts(table, text) for text in TEXTS[pattern]}
    assert matches == {text: bool(re.fullmatch(pattern, text, re.ASCII)) for text in TEXTS[pattern]}
    assert any(matches.values()) and not all(matches.values())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?=b)", "a lookahead at position 1"),
        ("(?<!a)b", "a lookbehind at position 0"),
        (r"(a)\1", r"a backreference, \\1, at position 3"),
        (r"(?P<x>a)(?P=x)", "a backreference at position 8"),
        (r"a\b", "a word boundary"),
        (r"\p{L}", "a Unicode property"),
        (r"\q", "an unknown escape"),
        ("(?i)a", "inline flags at position 0"),
        ("(?>a)", "an atomic group"),
        ("a++", "a possessive quantifier"),
        ("a**", "a quantifier after a quantifier"),
        ("^*a", r"a repeated \^ or \$"),
        ("a^b", r"\^ or \$ inside of a pattern at position 1"),
        ("*a", "nothing to repeat at position 0"),
        ("[]a]", "Python and ECMAScript read differently"),
        ("[b-a]", "a range in the wrong order"),
        (r"[\d-z]", "a range between classes"),
        ("[a", r"a class without its \]"),
        ("(a", r"a group without its \)"),
        ("a)", r"an unbalanced \)"),
        ("a{3,2}", "counts are in the wrong order"),
        ("a{1000000}", "at most 100,000"),
        (r"\ud800", "wanted a character"),
        ("\\", "an unknown escape"),
        ("(" * 60 + ")" * 60, "over 50 groups"),
    ],
)
def test_what_is_not_served_is_refused_by_name(pattern, message):
    with pytest.raises(GrammarError, match=f"^regex: got .*{message}"):
        compile_regex(pattern, VOCABULARY)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a|b)*a(a|b){20}", "wanted at most 8 times max_states=4096"),
        (".*a.{200}", "wanted at most 8 times max_states=4096"),
        ("((a{1,100}){1,100}){1,100}", "wanted at most 200,000"),
        ("(a?){3000}", "over 4,000,000 moves"),
        ("(((((a*)*b)*c)*){1,90}){1,90}", "wanted at most 200,000"),
        ("a{5000}", "got over 4,096 states, wanted at most max_states=4096"),
    ],
)
def test_a_pattern_that_is_too_large_is_refused_in_seconds(pattern, message):
    with pytest.raises(GrammarError, match=message):
        compile_regex(pattern, VOCABULARY)


def test_limits_of_the_table_are_named():
    with pytest.raises(GrammarError, match=r"^regex: got over 4 states, wanted at most max_states=4$"):
        compile_regex("abcd", VOCABULARY, max_states=4)
    with pytest.raises(GrammarError, match=r"^choices: got 4 classes of tokens, wanted at most max_classes=3$"):
        compile_choices(["a", "b", "cd"], Vocabulary([*BYTES]), max_classes=3)
    assert compile_regex("abcd", VOCABULARY, max_states=5).may_end.tolist() == [False, False, False, False, True]


def test_a_token_of_several_bytes_goes_where_its_bytes_go():
    tokens = Vocabulary([b"a", b"b", b"ab", b"aba", b"ba", b"", None, b"c"])
    table = compile_regex("(ab)+", tokens)
    state = next_state(table, 0, 3)  # aba
    assert [next_state(table, 0, token) >= 0 for token in range(8)] == [1, 0, 1, 1, 0, 0, 0, 0]
    assert not table.may_end[state] and next_state(table, state, 1) == next_state(table, 0, 2)
    assert table.may_end[next_state(table, 0, 2)] and not table.may_end[0]
    assert table.next_state.dtype == table.token_class.dtype == "int32" and table.may_end.dtype == bool
    assert table.next_state.shape == (3, 5) and table.token_class.shape == (8,)


def test_ways_that_the_tokens_cannot_complete_are_forbidden():
    """`b` is not in the vocabulary, so that `a` would be a dead end; `ac` goes on."""
    table = compile_regex("ab|acd?|c", Vocabulary([b"a", b"ac", b"c", b"d"]))
    assert [next_state(table, 0, token) >= 0 for token in range(4)] == [True, True, True, False]
    assert table.may_end[next_state(table, 0, 1)]
    table = compile_regex("abx|ac", Vocabulary([b"a", b"b", b"c", b"ab"]))
    assert [next_state(table, 0, token) >= 0 for token in range(4)] == [True, False, False, False]
    assert next_state(table, next_state(table, 0, 0), 1) < 0
    with pytest.raises(
        GrammarError, match=r"^regex: no sequence of the vocabulary's tokens spells a text that matches"
    ):
        compile_regex("ab", Vocabulary([b"a", b"c"]))
    with pytest.raises(GrammarError, match=r"^regex: no text matches$"):
        compile_regex(r"[^\s\S]", VOCABULARY)


def test_tokens_that_cut_characters_are_joined_to_whole_ones():
    tokens = Vocabulary([b"\xc3", b"\xa9", b"\xa9x", b"\xf0\x9f", b"\x98\x80", b"\xed\xa0\x80", b"\xff"])
    table = compile_regex(".x?", tokens)
    assert [next_state(table, 0, token) >= 0 for token in range(7)] == [True, False, False, True, False, False, False]
    after = next_state(table, 0, 0)
    assert [next_state(table, after, token) >= 0 for token in range(7)] == [
        False,
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_choices():
    table = compile_choices(["yes", "no", "maybé", "yes!"], VOCABULARY)
    assert all(accepts(table, text) for text in ("yes", "no", "maybé", "yes!"))
    assert not any(accepts(table, text) for text in ("", "ye", "yes!!", "maybe", "yesno"))
    assert table.may_end.sum() == 2  # after `yes`, and where nothing follows


@pytest.mark.parametrize("choices", ["yes", [], [1], [b"a"]])
def test_choices_are_a_list_of_texts(choices):
    with pytest.raises(GrammarError, match=r"^choices: got .*, wanted a list of texts"):
        compile_choices(choices, VOCABULARY)


def test_choices_with_half_of_a_character():
    with pytest.raises(GrammarError, match=r"^choices: got .*surrogate"):
        compile_choices(["a", "\ud800"], VOCABULARY)
