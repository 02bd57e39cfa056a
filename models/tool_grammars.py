# SPDX-License-Identifier: Apache-2.0
"""Grammars for answers with calls of tools, in the model's own format and with arguments which satisfy schemas.

The server reads such a call as usual, and the next turn of the conversation finds it in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from .openai_api import Grammar, Tools, refuse
from .tool_calls import HarmonyParser, HermesParser, Llama3Parser, Parser
from .tool_json import CALL_KEYS

type Structure = dict[str, Any]  # see `kvjax.grammar.compile_structure`
_NO_ARGUMENTS = {"type": "object", "properties": {}}
# Any object of four levels. The object of json_object has five levels, and two such objects exceed the limit of states.
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def answer_grammar(wanted: Grammar | None, tools: Tools, tool_format: type[Parser] | None) -> Grammar | None:
    """The grammar of an answer to a chat, or None for any text.

    Args:
      wanted: The grammar for the text of the answer. None means any text.
      tools: The tools of the chat. The arguments of forced and of strict tools satisfy their schemas.
      tool_format: The parser of the model's calls. None means the model has no format for calls.

    Raises:
      ApiError: if the parameters of a tool are no object.
    """
    has_calls = tools.names is not None and (tools.is_forced or tools.strict or wanted is not None)
    if tool_format is None or not (has_calls or (wanted is not None and tool_format.is_for_all)):
        return wanted
    answer_format = _FORMATS[tool_format](tools, has_form=wanted is not None)
    parts = [] if tools.is_forced else [answer_format.text(wanted)]
    parts += [answer_format.calls()] if has_calls else []
    param = "tools" if wanted is None or tools.is_forced else wanted.param
    return Grammar("structure", json.dumps(_either(parts), ensure_ascii=False), param)


class _AnswerFormat:
    """Makes the grammar of answers in the format of a parser.

    Attributes:
      text_excludes: Marks of the parser which no text may have.
      argument_excludes: Marks of the parser which no arguments may have.
    """

    text_excludes: tuple[str, ...] = ()
    argument_excludes: tuple[str, ...] = ()

    def __init__(self, tools: Tools, *, has_form: bool):
        """`has_form` says that text has a form of its own, so that no text comes before a call."""
        self._tools = tools
        self._has_form = has_form

    def text(self, wanted: Grammar | None) -> Structure:
        """The grammar of text, which is a whole answer or comes before calls."""
        if wanted is None:
            return {"type": "any_text", "excludes": [*self.text_excludes]}
        value = json.loads(wanted.text)
        options = {"name": wanted.param, "excludes": [*self.text_excludes]}
        match wanted.kind:
            case "schema":
                schema = _ANY_OBJECT if value == {"type": "object"} else value
                return {"type": "json_schema", "json_schema": schema, **options}
            case "regex":
                return {"type": "regex", "pattern": value, **options}
        return _either([_const(choice) for choice in value])

    def calls(self) -> Structure:
        """The grammar of the calls in an answer."""
        return self._call()

    def _call(self) -> Structure:
        raise NotImplementedError

    def _arguments(self) -> list[tuple[list[str], Structure]]:
        """The grammars of arguments, each with the names of its tools."""
        within = {"excludes": [*self.argument_excludes]}
        schemas = list[tuple[list[str], Structure]]()
        free_names = list[str]()  # tools with any arguments
        for tool_index, tool in enumerate(self._tools.definitions):
            name = tool["function"]["name"]
            place = f"tools[{tool_index}].function.parameters"
            if name not in (self._tools.names or ()):
                continue
            if self._tools.is_forced or name in self._tools.strict:
                schema = _arguments_schema(tool["function"].get("parameters"), place)
                part = {"type": "json_schema", "json_schema": schema, "name": place, **within}
                schemas.append(([name], part))
            else:
                free_names.append(name)
        any_arguments = {"type": "json_schema", "json_schema": _ANY_OBJECT, **within}
        return [*schemas, *([(free_names, any_arguments)] if free_names else [])]


class _HermesFormat(_AnswerFormat):
    text_excludes = (HermesParser.opening,)

    def calls(self) -> Structure:
        call = self._call()
        calls = {"type": "plus", "content": call, "separator": "\n"} if self._tools.is_parallel else call
        if self._tools.is_forced or self._has_form:
            return calls
        return _sequence([{"type": "any_text", "excludes": [*self.text_excludes]}, calls])

    def _call(self) -> Structure:
        return _either(
            _sequence(
                [
                    _const(f'{HermesParser.opening}\n{{"name": "'),
                    _names(names),
                    _const('", "arguments": '),
                    arguments,
                    _const(f"}}\n{HermesParser.closing}"),
                ]
            )
            for names, arguments in self._arguments()
        )


class _Llama3Format(_AnswerFormat):
    def text(self, wanted: Grammar | None) -> Structure:
        if wanted is not None:
            return super().text(wanted)
        # An object with such a beginning may be a call, because no mark distinguishes it from text.
        call = {"type": "regex", "pattern": rf'\{{\s*"({"|".join(CALL_KEYS)})"'}
        return {"type": "any_text", "excludes": [call]}

    def _call(self) -> Structure:
        return _either(
            _sequence([_const('{"name": "'), _names(names), _const('", "parameters": '), arguments, _const("}")])
            for names, arguments in self._arguments()
        )


class _HarmonyFormat(_AnswerFormat):
    text_excludes = argument_excludes = HarmonyParser.marks

    def text(self, wanted: Grammar | None) -> Structure:
        final = _const("<|channel|>final<|message|>")
        return _sequence([self._before(), final, super().text(wanted)])

    def calls(self) -> Structure:
        return _sequence([self._before(), self._call()])

    def _before(self) -> Structure:
        """The grammar of messages before the last message: reasoning, and text for the user before a call."""
        header = [_const("<|channel|>"), _names(["analysis", "commentary"]), _const("<|message|>")]
        any_text = {"type": "any_text", "excludes": [*self.text_excludes]}
        message = _sequence([*header, any_text, _const("<|end|><|start|>assistant")])
        return _either([_const(""), {"type": "plus", "content": message}])

    def _call(self) -> Structure:
        kind = _names([" json", " <|constrain|>json"])
        return _either(
            _sequence(
                [
                    _const(" to=functions."),
                    _names(names),
                    _const("<|channel|>commentary"),
                    kind,
                    _const("<|message|>"),
                    arguments,
                ]
            )
            for names, arguments in self._arguments()
        )


_FORMATS: dict[type[Parser], type[_AnswerFormat]] = {
    HermesParser: _HermesFormat,
    Llama3Parser: _Llama3Format,
    HarmonyParser: _HarmonyFormat,
}


def _arguments_schema(parameters: dict[str, Any] | None, place: str) -> dict[str, Any]:
    """The schema of a tool's arguments. Refuses a schema of another type than object."""
    if parameters is None:
        return _NO_ARGUMENTS
    if parameters.get("type", "object") != "object":
        raise refuse(f"{place}.type", parameters["type"], '"object"', "tools")
    return {**parameters, "type": "object"}


def _const(text: str) -> Structure:
    return {"type": "const_string", "value": text}


def _names(names: Sequence[str]) -> Structure:
    return _either([_const(name) for name in names])


def _sequence(parts: list[Structure]) -> Structure:
    return {"type": "sequence", "elements": parts}


def _either(parts: Iterable[Structure]) -> Structure:
    first, *others = parts
    return {"type": "or", "elements": [first, *others]} if others else first
