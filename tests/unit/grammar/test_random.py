# SPDX-License-Identifier: Apache-2.0
"""Random patterns and schemas: each walk through a table matches, and texts that match are accepted."""

import contextlib
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
from kvjax.grammar.keywords import SUPPORTED, TYPES
from tests.grammar_kit import VOCABULARY, accepts, canonical, instance, patterns, schemas, vocabularies, walk

CHECKER = jsonschema.FormatChecker(())
CHECKS = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: datetime.time.fromisoformat(text).tzinfo is not None,
    "date-time": lambda text: datetime.datetime.fromisoformat(text).tzinfo is not None,
    "uuid": lambda text: str(uuid.UUID(text)) == text,
    "ipv4": ipaddress.IPv4Address,
    "email": lambda text: re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", text),
}
for name, check in CHECKS.items():
    CHECKER.checks(name, ValueError)(lambda text, check=check: not isinstance(text, str) or check(text))
SEEDS = st.integers(0, 2**32)
AT_LENGTH = hypothesis.settings(max_examples=500, derandomize=False)


def compiled(make, source, vocabulary, refusals, **limits):
    """The table; an example without one is left out, if the error is one of some."""
    try:
        return make(source, vocabulary, **limits)
    except GrammarError as error:
        if not re.search(refusals, str(error)):
            raise
        hypothesis.reject()


def check_pattern(pattern, vocabulary, seed, texts):
    table = compiled(compile_regex, pattern, vocabulary, "states|no text matches", max_states=2000)
    for number in range(5):
        text = walk(table, vocabulary, seed + number, max_tokens=10).decode()
        assert re.fullmatch(pattern, text, re.ASCII), text
        texts.append(text)
    bytewise = compile_regex(pattern, VOCABULARY, max_states=2000)
    for text in texts:
        for changed in {text, text[1:], text[:-1], text + "a", "b" + text, text[::-1]}:
            assert accepts(bytewise, changed) == bool(re.fullmatch(pattern, changed, re.ASCII)), changed


def validator(schema):
    return jsonschema.Draft202012Validator(schema, format_checker=CHECKER)


def check_schema(schema, vocabulary, seed):
    table = compiled(compile_schema, schema, vocabulary, "no text matches|with other keywords about|max_|could belong")
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


def check_instance(schema, data):
    value = instance(data.draw, schema, schema)
    hypothesis.assume(validator(schema).is_valid(value))
    table = compiled(compile_schema, schema, VOCABULARY, "max_|could belong")
    for spaces in (False, True):
        assert accepts(table, canonical(value, spaces)), value


@hypothesis.given(schemas(), st.data())
def test_a_value_that_is_valid_is_accepted_in_its_canonical_form(schema, data):
    check_instance(schema, data)


NAMES = st.sampled_from([*sorted(SUPPORTED), "unknown"])
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([*TYPES, "#", "date", "(", "a*", "\ud800"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(NAMES, children, max_size=4),
)


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.dictionaries(NAMES, JUNK, max_size=5))
def test_whatever_is_no_schema_is_refused_by_a_grammar_error(junk):
    with contextlib.suppress(GrammarError):
        table = compile_schema(junk, VOCABULARY)
        json.loads(walk(table, VOCABULARY, 0))


@pytest.mark.slow
@hypothesis.settings(AT_LENGTH)
@hypothesis.given(schemas(), st.data())
def test_many_values_that_are_valid_are_accepted_in_their_canonical_form(schema, data):
    check_instance(schema, data)


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
