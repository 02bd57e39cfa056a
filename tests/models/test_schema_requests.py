# SPDX-License-Identifier: Apache-2.0
"""The forms that requests want, as data: how they are read, and the grammars of answers that may call tools."""

import contextlib
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvjax.grammar import compile_structure
from models.openai_api import ApiError, Fields, Grammar, Tools
from models.openai_schemas import FIELDS, MAX_CHARACTERS, read_format, read_grammar
from models.tool_calls import FORMATS
from models.tool_grammars import answer_grammar
from tests.grammar_kit import VOCABULARY, accepts

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {}}}
TEXT = '{"type": "object", "properties": {"b": {"type": "null"}, "a": {}}}'
ANY = '{"type": "object"}'


def grammar(**fields):
    return read_grammar(Fields(fields))


def json_schema(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def test_each_way_to_ask_for_a_form():
    place = "response_format.json_schema.schema"
    assert grammar(response_format=json_schema(SCHEMA, strict=True)) == ("schema", TEXT, place)
    assert grammar(response_format={"type": "json_object"}) == ("schema", ANY, "response_format")
    assert grammar(guided_json=SCHEMA) == grammar(guided_json=json.dumps(SCHEMA)) == ("schema", TEXT, "guided_json")
    assert grammar(guided_json_object=True) == ("schema", ANY, "guided_json_object")
    assert grammar(guided_regex="a") == ("regex", '"a"', "guided_regex")
    assert grammar(guided_choice=["é"]) == ("choices", '["é"]', "guided_choice")
    of_vllm = {"json": SCHEMA, "regex": "a", "choice": ["é"], "json_object": True}
    wanted = [("schema", TEXT), ("regex", '"a"'), ("choices", '["é"]'), ("schema", ANY)]
    for (name, value), (kind, text) in zip(of_vllm.items(), wanted, strict=True):
        others = {**dict.fromkeys(of_vllm), "json_object": False, "disable_fallback": True, "whitespace_pattern": None}
        found = grammar(structured_outputs={**others, name: value})
        assert found == (kind, text, f"structured_outputs.{name}") and found.field == "structured_outputs"
    flat = {"type": "json_schema", "name": "x", "schema": SCHEMA}  # as in the Responses API
    found = read_format("text.format", flat)
    assert found == ("schema", TEXT, "text.format.schema") and found.field == "text.format"


@pytest.mark.parametrize(
    "fields", [{}, dict.fromkeys(FIELDS), {"response_format": {"type": "text"}, "guided_json_object": False}]
)
def test_a_request_without_a_form(fields):
    assert grammar(**fields) is None


WRONG = [
    ({"response_format": "json"}, 'got "json", wanted the type "text", "json_object" or "json_schema"'),
    ({"response_format": {"type": "structural_tag"}}, 'got {"type": "structural_tag"}, wanted the type'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: got null, wanted an object"),
    ({"response_format": json_schema([])}, "response_format.json_schema: got"),
    ({"response_format": json_schema(SCHEMA, strict="yes")}, "response_format.json_schema: got"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema: got"),
    ({"guided_json": "{"}, 'guided_json: got "{", wanted a JSON schema, or its text'),
    ({"guided_json": 3}, "guided_json: got 3, wanted a JSON schema"),
    ({"guided_json_object": 1}, "guided_json_object: got 1, wanted true or false"),
    ({"guided_regex": ["a"]}, 'guided_regex: got ["a"], wanted a text'),
    ({"guided_regex": "a" * MAX_CHARACTERS}, f"guided_regex: got {MAX_CHARACTERS + 2:,} characters, wanted at most"),
    ({"guided_regex": "\ud800"}, "guided_regex: got text that is not Unicode"),
    ({"guided_choice": []}, "guided_choice: got [], wanted a list of texts"),
    ({"guided_choice": "ab"}, 'guided_choice: got "ab", wanted a list of texts'),
    ({"structured_outputs": []}, "structured_outputs: got [], wanted an object"),
    ({"structured_outputs": {}}, "structured_outputs: got {}, wanted one of json, regex, choice, json_object"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "wanted one of json, regex, choice, json_object"),
    ({"structured_outputs": {"json": {}, "other": 1}}, "wanted one of json, regex, choice, json_object"),
    ({"structured_outputs": {"grammar": "a"}}, 'structured_outputs.grammar: got "a", wanted none: nothing else'),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "disable_any_whitespace: got true"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice: got [1], wanted a list of texts"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "wanted none with response_format"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_forms_are_named(fields, message):
    with pytest.raises(ApiError) as caught:
        grammar(**fields)
    error = caught.value.body["error"]
    assert caught.value.status == 400 and message in error["message"] and error["param"] in fields


def test_a_schema_of_many_levels_is_refused_or_read():
    for depth in (100, 900, 5000, 100_000):
        deep = {}
        for _ in range(depth):
            deep = {"items": deep}
        with contextlib.suppress(ApiError):
            assert grammar(guided_json=deep).text.count("items") == depth


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "json_schema", "schema", "name", "json", "regex", "choice", "strict"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2))
def test_any_value_is_read_or_refused(fields):
    with contextlib.suppress(ApiError):
        found = grammar(**fields)
        assert found is None or json.loads(found.text) is not None


def tools_of(choice="auto", strict=(), named=None, is_parallel=True):
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    functions = [{"name": "weather", "parameters": city}, {"name": "now"}, {"name": "any", "parameters": {}}]
    definitions = [{"type": "function", "function": function} for function in functions]
    return Tools(definitions, choice, is_parallel, named, frozenset(strict))


def call_in(name, tool, arguments):
    """A call as the templates of a format write it."""
    return {
        "hermes": f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>',
        "llama3": f'{{"name": "{tool}", "parameters": {arguments}}}',
        "harmony": f" to=functions.{tool}<|channel|>commentary json<|message|>{arguments}",
    }[name]


def final_in(name, text):
    return f"<|channel|>final<|message|>{text}" if name == "harmony" else text


WEATHER, OTHER = ("weather", '{"city": "Oslo"}'), ("weather", '{"city": "Rome"}')
YES = Grammar("choices", '["yes"]', "guided_choice")


def table_of(name, wanted, tools):
    found = answer_grammar(wanted, tools, FORMATS[name])
    assert found.kind == "structure"
    return compile_structure(json.loads(found.text), VOCABULARY)


def parsed(name, text, tools):
    """The names and arguments of the calls that the format's parser finds in an answer, and its text."""
    parser = FORMATS[name](tools.names)
    parts = [*parser.add(text), *parser.end()]
    calls = [part.text for part in parts if part.kind in ("name", "arguments")]
    return calls, "".join(part.text for part in parts if part.kind == "content")


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_those_that_the_parser_reads(name):
    required = tools_of("required")
    table = table_of(name, YES, required)
    for tool, arguments in (WEATHER, ("now", "{}"), ("any", '{"a": [1]}')):
        text = call_in(name, tool, arguments)
        assert accepts(table, text) and parsed(name, text, required) == ([tool, arguments], "")
    for text in (call_in(name, *OTHER), call_in(name, "now", '{"a": 1}'), call_in(name, "other", "{}"), "yes", ""):
        assert not accepts(table, text)
    named = table_of(name, None, tools_of("named", named="now", is_parallel=False))
    assert accepts(named, call_in(name, "now", "{}")) and not accepts(named, call_in(name, *WEATHER))


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_tools_calls_and_other_text(name):
    tools = tools_of(strict=["weather"])
    table = table_of(name, None, tools)
    for tool, arguments in (WEATHER, ("now", '{"free": {}}')):
        assert accepts(table, call_in(name, tool, arguments))
    assert not accepts(table, call_in(name, *OTHER))
    for text in ("", "It is 5 < 6, {really} <b>\n", '{"city": "Rome"}'):
        text = final_in(name, text)
        assert accepts(table, text) and not parsed(name, text, tools)[0]
    for text in (call_in(name, *OTHER), "Wait.\n" + call_in(name, *OTHER)):
        assert not accepts(table, final_in(name, text))
    free = final_in(name, '{ "name":"weather", "parameters": {}}')
    assert accepts(table, free) == (parsed(name, free, tools)[0] == []) == (name != "llama3")


def test_text_before_calls_and_several_calls_of_hermes():
    calls = f"{call_in('hermes', *WEATHER)}\n{call_in('hermes', 'now', '{}')}"
    for tools, several in ((tools_of(strict=["weather"]), True), (tools_of(strict=["now"], is_parallel=False), False)):
        table = table_of("hermes", None, tools)
        assert accepts(table, f"I look.\n{calls}") == several
        assert accepts(table, f"I look.\n{call_in('hermes', *WEATHER)}")
    assert accepts(table_of("hermes", None, tools_of("required")), calls)
    assert not accepts(table_of("hermes", None, tools_of("required", is_parallel=False)), calls)


def test_a_model_of_harmony_thinks_before_an_answer_of_a_form_and_before_a_call():
    thought = "<|channel|>analysis<|message|>Hm < |.<|end|><|start|>assistant"
    for tools in (Tools([], "auto", is_parallel=True), tools_of(), tools_of("none")):
        table = table_of("harmony", YES, tools)
        for before in ("", thought, thought * 2):
            assert accepts(table, f"{before}<|channel|>final<|message|>yes")
        assert not accepts(table, "yes") and not accepts(table, f"{thought}<|channel|>final<|message|>no")
    assert accepts(table_of("harmony", None, tools_of("required")), thought + call_in("harmony", *WEATHER))


@pytest.mark.parametrize("name", FORMATS)
def test_with_tools_an_answer_has_the_form_or_is_a_call(name):
    schema = Grammar("schema", '{"type": "string"}', "guided_json")
    pattern = Grammar("regex", '"<[a-z]+>"', "guided_regex")
    for wanted, right, wrong in ((YES, "yes", "no"), (schema, '"a<b"', "a"), (pattern, "<abc>", "<>")):
        table = table_of(name, wanted, tools_of())
        assert accepts(table, final_in(name, right)) and not accepts(table, final_in(name, wrong))
        assert accepts(table, call_in(name, "weather", '{"free": 1}'))
    marks = {"hermes": '"<tool_call>"', "harmony": '"<|end|>"', "llama3": '"'}
    assert not accepts(table_of(name, schema, tools_of()), final_in(name, marks[name]))


def test_without_calls_a_form_stays_as_it_is():
    for name in ("hermes", "llama3"):
        for tools in (Tools([], "auto", is_parallel=True), tools_of("none", strict=["weather"])):
            assert answer_grammar(YES, tools, FORMATS[name]) is YES
            assert answer_grammar(None, tools, FORMATS[name]) is None
    assert answer_grammar(None, tools_of(), FORMATS["harmony"]) is None
    assert answer_grammar(YES, Tools([], "auto", is_parallel=True), None) is YES


def test_parameters_that_are_no_object_are_refused():
    tools = Tools([{"function": {"name": "f", "parameters": {"type": "array"}}}], "required", is_parallel=True)
    with pytest.raises(ApiError, match=r'^tools\[0\]\.function\.parameters\.type: got "array", wanted "object"'):
        answer_grammar(None, tools, FORMATS["hermes"])
