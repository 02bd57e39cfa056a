# SPDX-License-Identifier: Apache-2.0
"""JSON schemas keyword by keyword: texts that a table accepts, and texts that it refuses."""

import datetime
import enum
import json
import uuid
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest

from kvjax.grammar import GrammarError, Vocabulary, compile_schema
from tests.grammar_kit import BYTES, VOCABULARY, accepts, walk

BY_BYTES = Vocabulary(BYTES)


def obj(properties, required=(), **keywords):
    return {"type": "object", "properties": properties, "required": [*required], **keywords}


INTEGER, STRING, ANY_KEY = {"type": "integer"}, {"type": "string"}, {"type": "object", "additionalProperties": True}
# name: (schema, texts that are accepted, texts that are refused)
CASES = {
    "type": (INTEGER, ["0", "-12"], ["1.0", "01", "-0", "+1", "", " 1", '"1"']),
    "types": ({"type": ["string", "null"]}, ['"a"', "null"], ["1", "nul", '"']),
    "number": (
        {"type": "number"},
        ["0", "-0", "1.50", "-2e10", "3E-07", "0.1e+5"],
        ["1.", ".5", "1e", "1e100", "00", "NaN", "Infinity", "1e400"],
    ),
    "boolean": ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    "null": ({"type": "null"}, ["null"], ["none"]),
    "string": (
        STRING,
        ['""', '"é日😀"', r'"\"\\\/\b\f\n\r\t"', r'"\u00e9\uD83D\ude00\u0000"', '"\x7f"'],
        ["'a'", '"\n"', '"\x1f"', r'"\ud83d"', r'"\ude00"', r'"\ud83da"', r'"\a"', r'"\u12g4"', '"a" ', '"a'],
    ),
    "any": ({}, ["1", '{"a": [{}]}', "[[[1]]]", "true"], ["[[[[1]]]]", "[1,]", "{,}", "{1:2}"]),
    "true": (True, ["[]", "null"], ["[", "nul"]),
    "minLength": ({**STRING, "minLength": 2}, ['"ab"', '"é日"', r'"\n\\"'], ['"a"', '""', r'"\u00e9a"']),
    "maxLength": ({**STRING, "maxLength": 2}, ['""', '"é😀"'], ['"abc"', '"ééé"']),
    "pattern": ({**STRING, "pattern": "b+$"}, ['"b"', '"aabb"', r'"\"b"'], ['"ba"', '""']),
    "pattern of the whole": (
        {**STRING, "pattern": r'^["\n]é.$'}, [r'"\"éx"', r'"\né\\"'], ['"éx"', r'"\néx "', r'"\né\n"'],
    ),
    "pattern and length": ({**STRING, "pattern": "a", "maxLength": 2}, ['"a"', '"ba"'], ['"bba"', '"b"']),
    "date": (
        {**STRING, "format": "date"},
        ['"2024-02-29"', '"1900-12-31"'],
        ['"2023-02-29"', '"1900-02-29"', '"2024-13-01"', '"0000-01-01"'],
    ),
    "date-time": (
        {**STRING, "format": "date-time"},
        ['"2024-01-01T23:59:59Z"', '"2024-01-01T00:00:00.25+05:30"'],
        ['"2024-01-01"', '"2024-01-01T24:00:00Z"', '"2024-01-01T00:00:00"'],
    ),
    "email": ({**STRING, "format": "email"}, ['"a.b+c@x-y.org"'], ['"a@b"', '"@b.c"', '".a@b.c"']),
    "ipv4": ({**STRING, "format": "ipv4"}, ['"255.0.10.1"'], ['"256.0.0.1"', '"1.2.3"', '"01.2.3.4"']),
    "uri": ({**STRING, "format": "uri"}, ['"https://a.org:80/b?c=%20#d"'], ['"a.org"', '"http://a b"']),
    "duration": ({**STRING, "format": "duration"}, ['"P1DT2H"', '"P3W"', '"PT5M6S"'], ['"P"', '"PT"', '"P1Y1W"']),
    "format without a constraint": ({**STRING, "format": "password"}, ['"a"'], ["a"]),
    "minimum": ({**INTEGER, "minimum": -5}, ["-5", "0", "123"], ["-6", "-10"]),
    "maximum": ({**INTEGER, "maximum": 120}, ["120", "99", "-1000"], ["121", "1000", "130"]),
    "exclusive": ({**INTEGER, "exclusiveMinimum": 0, "exclusiveMaximum": 10}, ["1", "9"], ["0", "10", "-1"]),
    "fractional bounds of integers": ({**INTEGER, "minimum": 0.5, "maximum": 2.5}, ["1", "2"], ["0", "3"]),
    "bounds of numbers": (
        {"type": "number", "minimum": -1.25, "exclusiveMaximum": 2},
        ["-1.25", "-1.249", "1.99", "0", "-0.0", "1.250"],
        ["-1.26", "-1.2501", "2", "2.0", "1e0", "10"],
    ),
    "a strict bound, near which floats are equal": (
        {"type": "number", "exclusiveMinimum": 0.1}, ["0.11", "0.10000001"], ["0.1", "0.10", "0.1000000000000000001"],
    ),
    "multipleOf": ({**INTEGER, "multipleOf": 7}, ["0", "-14", "7007"], ["1", "-15"]),
    "multipleOf a fraction": (
        {"type": "number", "multipleOf": 0.25, "minimum": 0}, ["0.25", "1.5", "2", "2.50"], ["0.3", "0.251", "-0.25"],
    ),
    "enum": (
        {"enum": ["a", 1, None, 2.0, [1], {"b": "é"}]},
        ['"a"', "1", "null", "2", "[1]", '{"b":"é"}'],
        ["3", '"b"', "true"],
    ),
    "enum and type": ({"enum": ["a", 1, True], **INTEGER}, ["1"], ['"a"', "true"]),
    "enum and constraints": (
        {"enum": ["a", "abc", 5], "minLength": 2, "type": ["string", "integer"]}, ['"abc"', "5"], ['"a"'],
    ),
    "const": ({"const": 'quo"te\n'}, [r'"quo\"te\n"'], ['"quote"']),
    "const null": ({"const": None}, ["null"], ["false"]),
    "properties": (
        obj({"a": INTEGER, "b c": STRING}, ["a"]),
        ['{"a":1}', '{"a": 1, "b c": "x"}', '{"a": 1,"b c":"x"}'],
        [
            '{"b c":"x"}', '{"b c":"x","a":1}', '{"a":1,"z":2}', '{"a":1,}', '{ "a":1}', '{"a":  1}', '{"a" :1}',
            '{"a":1,"a":1}',
        ],
    ),
    "optional properties": (
        obj({"a": INTEGER, "b": INTEGER, "c": INTEGER}),
        ["{}", '{"c":1}', '{"a":1,"c":1}', '{"b": 2}'],
        ['{"c":1,"a":1}', '{"a":1 "b":1}', "{,}"],
    ),
    "required without a schema": (
        {"type": "object", "required": ["a"]}, ['{"a":[1]}', '{"a":1,"b":2}'], ["{}", '{"b":2}'],
    ),
    "additionalProperties": (
        obj({"a": STRING}, additionalProperties=INTEGER),
        ['{"a":"x","b":1,"ab":2}', '{"": 1}', r'{"\"":1}'],
        ['{"a":1}', '{"b":"x"}', r'{"\u0061":1}', '{"b":1,"a":"x"}'],
    ),
    "additionalProperties: false": ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": STRING},
        ['{"x1":1,"y":"a"}', "{}"],
        ['{"x1":"a"}', '{"y":1}'],
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"b":1,"a":2}'], ['{"c":1}']),
    "minProperties": ({**ANY_KEY, "minProperties": 1}, ['{"a":1}'], ["{}"]),
    "minProperties of optional ones": (obj({"a": INTEGER, "b": INTEGER}, minProperties=1), ['{"b":1}'], ["{}"]),
    "maxProperties": ({**ANY_KEY, "maxProperties": 2}, ["{}", '{"a":1,"b":1}'], ['{"a":1,"b":1,"c":1}']),
    "items": ({"type": "array", "items": INTEGER}, ["[]", "[1]", "[1, 2,3]"], ["[1,]", '["a"]', "[ 1]", "[1 ]"]),
    "minItems, maxItems": (
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3}, ["[1]", "[1,2,3]"], ["[]", "[1,2,3,4]"],
    ),
    "maxItems 0": ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    "items of any kind": ({"type": "array", "minItems": 1}, ["[1]", '[{"a":1}, "b"]'], ["[]"]),
    "prefixItems": (
        {"type": "array", "prefixItems": [INTEGER, STRING]}, ["[]", "[1]", '[1,"a"]'], ['["a"]', '[1,"a",2]'],
    ),
    "prefixItems and items": (
        {"type": "array", "prefixItems": [INTEGER], "items": STRING, "minItems": 1},
        ["[1]", '[1,"a","b"]'],
        ["[]", "[1,2]", '["a"]'],
    ),
    "items of an older draft": (
        {"type": "array", "items": [INTEGER], "additionalItems": STRING}, ['[1,"a"]'], ["[1,2]"],
    ),
    "no items": ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    "uniqueItems of one item": ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,1]"]),
    "anyOf": ({"anyOf": [INTEGER, {**STRING, "maxLength": 1}]}, ["1", '"a"'], ['"ab"', "null"]),
    "anyOf next to keywords": (
        {**obj({"a": INTEGER, "b": INTEGER}), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
        ["{}"],
    ),
    "oneOf by type": ({"oneOf": [INTEGER, STRING]}, ["1", '"a"'], ["null"]),
    "oneOf by a property": (
        {"oneOf": [obj({"k": {"const": "a"}, "x": INTEGER}, ["k"]), obj({"k": {"enum": ["b", "c"]}}, ["k"])]},
        ['{"k":"a","x":1}', '{"k":"c"}'],
        ['{"k":"b","x":1}', '{"k":"d"}'],
    ),
    "oneOf by ranges": ({"oneOf": [{**INTEGER, "maximum": 3}, {**INTEGER, "minimum": 4}]}, ["3", "4"], ["3.5"]),
    "allOf": ({"allOf": [{**INTEGER, "minimum": 2}, {"maximum": 4}, {"multipleOf": 2}]}, ["2", "4"], ["3", "6"]),
    "allOf of objects": (
        {"allOf": [obj({"a": INTEGER}, ["a"]), obj({"b": STRING, "a": {"minimum": 5}})]},
        ['{"a":5,"b":"x"}', '{"a":7}'],
        ['{"a":1}', '{"b":"x"}'],
    ),
    "allOf, closed": (
        {"allOf": [obj({"a": INTEGER}, additionalProperties=False), obj({"b": INTEGER})]},
        ["{}", '{"a":1}'],
        ['{"b":1}'],
    ),
    "$ref": (
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER}}, ["1"], ['"1"'],
    ),
    "$ref next to keywords": ({"$ref": "#/$defs/n", "maximum": 3, "$defs": {"n": INTEGER}}, ["3"], ["4"]),
    "$ref to itself": (
        obj({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, ["next"]),
        ['{"next":null}', '{"next":{"next":{"next":null}}}'],
        ["null", "{}", '{"next":' * 9 + "null" + "}" * 9],
    ),
    "annotations": (
        {**INTEGER, "title": "T", "description": "D", "default": "x", "examples": [1], "x-order": 3}, ["1"], ['"x"'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_keyword(name):
    schema, accepted, refused = CASES[name]
    table = compile_schema(schema, VOCABULARY)
    assert {text: accepts(table, text) for text in accepted} == dict.fromkeys(accepted, True)
    assert {text: accepts(table, text) for text in refused} == dict.fromkeys(refused, False)
    is_old = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    validator = (jsonschema.Draft7Validator if is_old else jsonschema.Draft202012Validator)(schema)
    for text in [*accepted, *(walk(table, VOCABULARY, seed).decode() for seed in range(10))]:
        validator.validate(json.loads(text))


def test_a_text_of_a_schema_and_any_object():
    table = compile_schema('{"type": "object"}', VOCABULARY)
    assert accepts(table, '{"a": {"b": {"c": {"d": {"e": 1}}}}}')
    assert accepts(table, '{"a": [[[[1, 2]]], {}], "b": "c"}')
    assert not accepts(table, '{"a": {"b": {"c": {"d": {"e": {}}}}}}')
    assert not accepts(table, "[]")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (obj({"age": {**INTEGER, "minimum": "x"}}), r"schema\.properties\.age\.minimum: got 'x', wanted a number"),
        (obj({"a": {"not": INTEGER}}), r"schema\.properties\.a\.not: this keyword is not supported"),
        ({"if": {}}, r"schema\.if: this keyword is not supported"),
        ({"type": "array", "contains": {}}, r"schema\.contains: this keyword is not supported"),
        ({"type": "array", "items": {"nullable": True}}, r"schema\.items\.nullable: this keyword"),
        ({"type": "array", "uniqueItems": True}, r"schema\.uniqueItems: got True, wanted false"),
        ({"type": "text"}, r"schema\.type: got 'text', wanted one or several of object"),
        ({**STRING, "pattern": "a(?=b)"}, r"schema\.pattern: got a lookahead at position 1"),
        ({**STRING, "pattern": "a{,2}"}, r"schema\.pattern: got \{,2\}, which Python and ECMAScript read differently"),
        ({**STRING, "format": "color"}, r"schema\.format: got 'color', wanted one of binary, date"),
        ({**STRING, "minLength": -1}, r"schema\.minLength: got -1, wanted an integer of at least 0"),
        ({**INTEGER, "multipleOf": 0}, r"schema\.multipleOf: got 0, wanted a number above 0"),
        ({**INTEGER, "multipleOf": 12345}, r"schema\.multipleOf: got 12345, wanted"),
        ({**INTEGER, "maximum": 1e300}, r"schema\.maximum: got a number of over 25 digits"),
        ({"$ref": "#/$defs/a"}, r"schema\.\$ref: got '#/\$defs/a', wanted a schema that exists"),
        ({"$ref": "other.json"}, r"schema\.\$ref: got 'other.json', wanted a pointer into the same schema"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, r"schema\.\$defs\.a\.\$ref: .* between a"),
        ({"anyOf": []}, r"schema\.anyOf: got \[\], wanted a list of schemas"),
        ({"anyOf": [3]}, r"schema\.anyOf\[0\]: got 3, wanted a schema"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, r"schema\.oneOf: a value could belong to 0 and 1 at once"),
        ({"oneOf": [obj({"a": INTEGER}), obj({"b": INTEGER})]}, r"schema\.oneOf: a value could belong to 0 and 1"),
        (obj({}, required=[1]), r"schema\.required: got \[1\], wanted a list of names"),
        ({"properties": [1]}, r"schema\.properties: got \[1\], wanted schemas by name"),
        ({"enum": "ab"}, r"schema\.enum: got 'ab', wanted a list of values"),
        ({"enum": [[1], [2]], "minItems": 1}, r"schema\.enum: an array among the values, with other keywords"),
        ({**ANY_KEY, "minProperties": 3}, r"schema\.minProperties: got 3, wanted at most 1"),
        (obj({"a": {}, "b": {}}, maxProperties=1), r"schema\.maxProperties: got 1, wanted none next to optional"),
        (False, "schema: no text matches"),
        ({**INTEGER, "minimum": 3, "maximum": 2}, "schema: no text matches"),
        (obj({"a": {"$ref": "#"}}, ["a"]), "schema: no text matches"),
        ("{", "schema: got a text that is no JSON"),
        (5, "schema: got 5, wanted a schema"),
        ({"items": {**STRING, "maxLength": 999}}, r"schema\.items: got .* states, wanted at most max_states=4096"),
        ({"type": "array", "items": {"enum": [*range(5000)]}, "maxItems": 900}, "schema: got .* wanted at most"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_its_path(schema, message):
    with pytest.raises(GrammarError, match=f"^{message}"):
        compile_schema(schema, VOCABULARY)


def nested(levels, around=lambda schema: {"type": "array", "items": schema}):
    schema = INTEGER
    for _ in range(levels):
        schema = around(schema)
    return schema


# Each entry refers to the next one twice: 2 ** 40 values.
LAUGHS = {f"a{n}": obj({"x": {"$ref": f"#/$defs/a{n + 1}"}, "y": {"$ref": f"#/$defs/a{n + 1}"}}) for n in range(25)}
MUTUAL = {f"n{i}": obj({f"n{j}": {"$ref": f"#/$defs/n{j}"} for j in range(7)}) for i in range(7)}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#/$defs/a0", "$defs": {**LAUGHS, "a25": INTEGER}}, "wanted at most"),
        ({"$ref": "#/$defs/n0", "$defs": MUTUAL}, "got"),
        (nested(40), "got over 32 levels of objects and arrays"),
        (nested(5000), "got"),
        (nested(5000, lambda schema: {"anyOf": [schema]}), "too many levels"),
        ({"const": nested(5000)}, "too many levels"),
        ({"allOf": [{"anyOf": [INTEGER] * 20}] * 20}, ": got 400 alternatives, wanted at most 256"),
        ({"anyOf": [{"anyOf": [{"const": i * 100 + j} for j in range(99)]} for i in range(99)]}, "got"),
        (obj({f"p{i}": {} for i in range(40)}), "got"),
        (obj({str(i) * 40: {**STRING, "pattern": "^(a|b)*a(a|b){9}$"} for i in range(9)}), "got"),
        ({**INTEGER, "allOf": [{"multipleOf": n} for n in (997, 991, 983)]}, "got"),
    ],
)  # fmt: skip
def test_a_schema_that_is_too_large_is_refused_in_seconds(schema, message):
    with pytest.raises(GrammarError, match=f"^schema.*{message}"):
        compile_schema(schema, BY_BYTES)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(pydantic.BaseModel):
    street: str
    city: str = pydantic.Field(min_length=1)
    zip_code: str = pydantic.Field(pattern=r"^\d{5}$")


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Person(pydantic.BaseModel):
    """A model with one field of each kind."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)
    score: float = pydantic.Field(gt=0, lt=1)
    color: Color
    address: Address
    tags: list[str] = []
    other: Address | None = None
    born: datetime.date
    updated: datetime.datetime
    number: uuid.UUID
    pets: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]]
    counts: dict[str, int] = {}
    pair: tuple[int, str]
    extra: dict | None = None


class Tree(pydantic.BaseModel):
    value: int
    children: list["Tree"] = []


@pytest.mark.parametrize("model", [Address, Person, Tree])
def test_models_of_pydantic(model):
    table = compile_schema(model.model_json_schema(), VOCABULARY)
    for seed in range(20):
        text = walk(table, VOCABULARY, seed)
        model.model_validate_json(text)
        jsonschema.validate(json.loads(text), model.model_json_schema())


def test_a_strict_schema_of_openai():
    step = obj({"explanation": STRING, "output": STRING}, ["explanation", "output"], additionalProperties=False)
    schema = {
        **obj(
            {"steps": {"type": "array", "items": {"$ref": "#/$defs/step"}}, "answer": {"type": ["string", "null"]}},
            ["steps", "answer"],
            additionalProperties=False,
        ),
        "$defs": {"step": step},
    }
    table = compile_schema(schema, VOCABULARY)
    assert accepts(table, '{"steps": [{"explanation": "a", "output": "b"}], "answer": null}')
    assert not accepts(table, '{"steps": []}')
