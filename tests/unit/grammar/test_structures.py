# SPDX-License-Identifier: Apache-2.0
"""Structures: texts with schemas within them, and the texts that they leave out."""

import json
import re

import pytest

from kvjax.grammar import GrammarError, compile_structure
from tests.grammar_kit import VOCABULARY, accepts, walk

AGE = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"]}


def const(text):
    return {"type": "const_string", "value": text}


def schema(value, **fields):
    return {"type": "json_schema", "json_schema": value, **fields}


def sequence(*parts):
    return {"type": "sequence", "elements": list(parts)}


def either(*parts):
    return {"type": "or", "elements": list(parts)}


CALL = sequence(const('<call>{"name": "f", "arguments": '), schema(AGE), const("}</call>"))
FREE = {"type": "any_text", "excludes": ["<call>"]}
CASES = {
    "a constant": (const("aé"), ["aé"], ["", "a", "aéa"]),
    "a schema": (schema(AGE), ['{"age": 5}', '{"age":12}'], ["{}", '{"age": 100}', '{"age": 5} ']),
    "a pattern": ({"type": "regex", "pattern": "a+b?"}, ["a", "aab"], ["", "b", "abb"]),
    "any text": ({"type": "any_text"}, ["", "x\n<call>", "日😀"], [b"\xff", b"\xed\xa0\x80"]),
    "text without": (FREE, ["", "<cal", "<<call", "<cal<call", "a > b"], ["<call>", "a<call>b", "<<call>"]),
    "a pattern without": (
        {"type": "regex", "pattern": "[a-z]*", "excludes": ["bad", {"type": "regex", "pattern": "x+y"}]},
        ["", "ba", "xxx"],
        ["bad", "abadc", "zxxyz"],
    ),
    "a schema without": (schema({"type": "string"}, excludes=["<end>"]), ['"<end"', '"a"'], ['"<end>"', '"a<end>b"']),
    "a sequence": (CALL, ['<call>{"name": "f", "arguments": {"age": 1}}</call>'], ["<call>", '{"age": 1}']),
    "one of two": (either(const("a"), const("b")), ["a", "b"], ["", "ab"]),
    "several": ({"type": "plus", "content": const("ab"), "separator": "; "}, ["ab", "ab; ab"], ["", "abab", "ab; "]),
    "without a separator": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], [""]),
    "perhaps nothing": (sequence(const("a"), either(const(""), const("b"))), ["a", "ab"], ["", "b"]),
}


@pytest.mark.parametrize("case", CASES)
def test_texts_of_a_structure(case):
    structure, accepted, refused = CASES[case]
    table = compile_structure(structure, VOCABULARY)
    for text in accepted:
        assert accepts(table, text), text
    for text in refused:
        assert not accepts(table, text), text


def test_walks_through_text_and_calls_have_whole_calls_alone():
    calls = {"type": "plus", "content": CALL, "separator": "\n"}
    table = compile_structure(sequence(FREE, calls), VOCABULARY)
    num_calls = 0
    for seed in range(60):
        _, *rest = re.split("<call>|</call>", walk(table, VOCABULARY, seed).decode())
        assert len(rest) % 2 == 0 and rest
        for number, part in enumerate(rest):
            if number % 2:
                assert part == ("" if number == len(rest) - 1 else "\n")
            else:
                assert 0 <= json.loads(part)["arguments"]["age"] <= 99
                num_calls += 1
    assert num_calls >= 60


WRONG = {
    "structure: got 3, wanted an object of a type of const_string, json_schema": 3,
    "structure: got {'type': 'tag'}, wanted an object of a type": {"type": "tag"},
    "structure: got {'type': 'const_string', 'value': 3}, wanted the fields of a const_string": const(3),
    "structure: got {'type': 'or', 'elements': []}, wanted the fields of a or": either(),
    "structure.elements[1]: got None, wanted an object": either(const("a"), None),
    "structure.elements[0].content: got {}": sequence({"type": "plus", "content": {}}),
    "structure: got {'type': 'plus', 'content': {}, 'separator': 1}": {"type": "plus", "content": {}, "separator": 1},
    "structure.json_schema.not: this keyword": schema({"not": {}}),
    "structure: tools[0].parameters.properties.a.minimum: got 'x', wanted a number": schema(
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": "x"}}}, name="tools[0].parameters"
    ),
    "structure: got a lookahead": {"type": "regex", "pattern": "(?=a)"},
    "structure.excludes: got 'a', wanted a list": {"type": "any_text", "excludes": "a"},
    "structure.excludes[0]: got '', wanted an object": {"type": "any_text", "excludes": [""]},
    "structure: no text matches": {"type": "regex", "pattern": "ab", "excludes": ["b"]},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_structures_are_named(message):
    with pytest.raises(GrammarError) as caught:
        compile_structure(WRONG[message], VOCABULARY)
    assert str(caught.value).startswith(message), caught.value


def test_other_errors_have_the_structures_name():
    deep = const("a")
    for _ in range(100):
        deep = either(deep, const("b"))
    for wrong, message in ((deep, "levels of structures"), (const("\ud800"), "half of a surrogate pair")):
        with pytest.raises(GrammarError, match=rf"^structure.*{message}"):
            compile_structure(wrong, VOCABULARY)
