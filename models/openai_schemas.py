# SPDX-License-Identifier: Apache-2.0
"""Reads the formats for answers in OpenAI's HTTP API and in vLLM's: schemas, patterns and choices."""

from __future__ import annotations

import json
from typing import Any

from .openai_api import ApiError, Fields, GenerationParams, Grammar, check_text, is_list, refuse

MAX_CHARACTERS = 1 << 17  # of a grammar, as JSON
FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_json_object", "guided_regex", "guided_choice")
# Fields of `structured_outputs`: the grammars, and the other fields with their harmless values.
_KINDS = ("json", "regex", "choice", "json_object")
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "backend": ("auto",),
    "backend_was_auto": (True, False),
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (True, False),
    "grammar": (),
    "structural_tag": (),
    "whitespace_pattern": (),
}
_ANY_OBJECT = {"type": "object"}


def read_grammar(fields: Fields, format_name: str = FIELDS[0]) -> Grammar | None:
    """Reads the grammar for the answers to a request. Returns None for any text.

    `format_name` is the place of `response_format` in the client's request.
    """
    given = {name: fields.get(name) for name in FIELDS}
    given[format_name] = given.pop(FIELDS[0])
    grammars = {name: grammar for name, value in given.items() if (grammar := _read(name, value)) is not None}
    if len(grammars) > 1:
        name, *others = grammars
        raise refuse(name, given[name], f"none with {' and '.join(others)}: an answer has one form")
    return next(iter(grammars.values()), None)


def check_params(params: GenerationParams) -> None:
    """Refuses a grammar together with fields about the end of an answer, because the grammar decides where it ends."""
    if params.grammar is not None and params.ignores_eos:
        raise refuse("ignore_eos", True, f"false with {params.grammar.field}")
    if params.grammar is not None and params.sampling.min_tokens > 0:
        raise refuse("min_tokens", int(params.sampling.min_tokens), f"0 with {params.grammar.field}")


def _read(name: str, value: Any) -> Grammar | None:
    if value is None:
        return None
    match name:
        case "structured_outputs":
            return _structured(name, value)
        case "guided_json":
            return _of_schema(name, value)
        case "guided_json_object":
            return _object(name, value)
        case "guided_regex":
            return _of_regex(name, value)
        case "guided_choice":
            return _of_choices(name, value)
    return read_format(name, value)


def read_format(param: str, value: Any) -> Grammar | None:
    """Reads an object with a type: text, json_object, or json_schema with a schema.

    In chats, the name and the schema are in its field `json_schema`. In the Responses API, the object itself has them.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _grammar("schema", _ANY_OBJECT, param)
    if kind != "json_schema":
        raise refuse(param, value, 'the type "text", "json_object" or "json_schema"')
    is_flat = param != FIELDS[0]
    inner, place = (value, param) if is_flat else (value.get("json_schema"), f"{param}.json_schema")
    wanted = "an object with a name of text, and a schema"
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise refuse(place, inner, wanted, param)
    types = {"description": str, "strict": bool}
    wrong = [name for name, kind in types.items() if not isinstance(inner.get(name), kind | None)]
    if wrong or not isinstance(inner.get("schema"), dict | bool):
        raise refuse(place, inner, wanted, param)
    return _grammar("schema", inner["schema"], param, f"{place}.schema")


def _structured(name: str, value: Any) -> Grammar | None:
    """Reads vLLM's object."""
    if not isinstance(value, dict):
        raise refuse(name, value, "an object")
    for field, harmless in _HARMLESS.items():
        if value.get(field) is not None and value[field] not in harmless:
            wanted = " or ".join(["none", *map(json.dumps, harmless)])
            raise refuse(f"{name}.{field}", value[field], f"{wanted}: nothing else is served", name)
    unknown = sorted(value.keys() - {*_KINDS, *_HARMLESS})
    given = [field for field in _KINDS if value.get(field) not in (None, False)]
    if unknown or len(given) != 1:
        raise refuse(name, value, f"one of {', '.join(_KINDS)}")
    read = {"json": _of_schema, "regex": _of_regex, "choice": _of_choices, "json_object": _object}[given[0]]
    return read(f"{name}.{given[0]}", value[given[0]])


def _object(name: str, value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false", _field(name))
    return _grammar("schema", _ANY_OBJECT, name) if value else None


def _of_schema(name: str, value: Any) -> Grammar:
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            schema = None
    if not isinstance(schema, dict | bool):
        raise refuse(name, value, "a JSON schema, or its text", _field(name))
    return _grammar("schema", schema, name)


def _of_regex(name: str, value: Any) -> Grammar:
    if not isinstance(value, str):
        raise refuse(name, value, "a text", _field(name))
    return _grammar("regex", value, name)


def _of_choices(name: str, value: Any) -> Grammar:
    if not is_list(value, str) or not value:
        raise refuse(name, value, "a list of texts", _field(name))
    return _grammar("choices", value, name)


def _grammar(kind: Any, value: Any, name: str, place: str | None = None) -> Grammar:
    place = name if place is None else place
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ApiError(400, f"{place}: has too many levels within each other", _field(name)) from None
    if len(text) > MAX_CHARACTERS:
        message = f"{place}: got {len(text):,} characters, wanted at most {MAX_CHARACTERS:,}"
        raise ApiError(400, message, _field(name))
    check_text(_field(name), text)
    return Grammar(kind, text, place)


def _field(name: str) -> str:
    """The field of the request which contains a place."""
    return Grammar("schema", "", name).field
