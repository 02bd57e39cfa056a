# SPDX-License-Identifier: Apache-2.0
"""Random patterns and schemas: each walk through a table ends in a text that matches, and matching texts are accepted."""

import datetime
import ipaddress
import json
import re
import uuid

import hypothesis
import hypothesis.strategies as st
import jsonschema
import pytest

from kvjax.grammar import GrammarError, compile_regex, compile_schema
from tests.grammar_kit import VOCABULARY, accepts, canonical, patterns, schemas, vocabularies, walk

CHECKER = jsonschema.FormatChecker(())
CHECKER.checks("date", ValueError)(lambda text: bool(datetime.date.fromisoformat(text)))
CHECKER.checks("time", ValueError)(lambda text: datetime.time.fromisoformat(text).tzinfo is not None)
CHECKER.checks("date-time", ValueError)(lambda text: datetime.datetime.fromisoformat(text).tzinfo is not None)
CHECKER.checks("uuid", ValueError)(lambda text: str(uuid.UUID(text)) == text)
CHECKER.checks("ipv4", ValueError)(lambda text: bool(ipaddress.IPv4Address(text)))
CHECKER.checks("email")(lambda text: re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", text))
SEEDS = st.integers(0, 2**32)
AT_LENGTH = hypothesis.settings(max_examples=500, derandomize=False)


def check_pattern(pattern, vocabulary, seed, texts):
    try:
        table = compile_regex(pattern, vocabulary, max_states=2000)
    except GrammarError as error:
        hypothesis.assume("states" not in str(error))
        assert "no sequence" in str(error)  # such as [^\s\S]
        return
    for number in range(5):
        text = walk(table, vocabulary, seed + number).decode()
        assert re.fullmatch(pattern, text, re.ASCII), text
        texts.append(text)
    bytewise = compile_regex(pattern, VOCABULARY, max_states=2000)
    for text in texts:
        for changed in {text, text[1:], text[:-1], text + "a", "b" + text, text[::-1]}:
            assert accepts(bytewise, changed) == bool(re.fullmatch(pattern, changed, re.ASCII)), changed


def validator(schema):
    return jsonschema.Draft202012Validator(schema, format_checker=CHECKER)


def check_schema(schema, vocabulary, seed):
    try:
        table = compile_schema(schema, vocabulary)
    except GrammarError as error:
        assert re.search("no text satisfies|no sequence of|with other keywords about|max_|could belong", str(error)), error
        hypothesis.reject()
    check, bytewise = validator(schema), compile_schema(schema, VOCABULARY)
    for number in range(5):
        text = walk(table, vocabulary, seed + number).decode()
        value = json.loads(text)
        check.validate(value)
        json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
        assert accepts(bytewise, text)


@hypothesis.given(patterns(), vocabularies(), SEEDS, st.lists(st.text("abé日😀.\n0_ ", max_size=5), max_size=5))
def test_patterns_are_those_of_python(pattern, vocabulary, seed, texts):
    check_pattern(pattern, vocabulary, seed, texts)


@hypothesis.given(schemas(), vocabularies(), SEEDS)
def test_each_walk_through_a_schemas_table_is_valid(schema, vocabulary, seed):
    check_schema(schema, vocabulary, seed)


@pytest.mark.slow
@hypothesis.settings(AT_LENGTH, max_examples=200)
@hypothesis.given(patterns(), vocabularies(), SEEDS, st.lists(st.text("abé日😀.\n0_ ", max_size=5), max_size=5))
def test_many_patterns_are_those_of_python(pattern, vocabulary, seed, texts):
    check_pattern(pattern, vocabulary, seed, texts)


@pytest.mark.slow
@hypothesis.settings(AT_LENGTH)
@hypothesis.given(schemas(), vocabularies(), SEEDS)
def test_each_walk_through_many_schemas_tables_is_valid(schema, vocabulary, seed):
    check_schema(schema, vocabulary, seed)
