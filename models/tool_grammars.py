# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers with calls of tools: calls in the model's own form, whose arguments satisfy schemas.

So the server reads a call as usual, and the next turn of a conversation finds it in the cache.
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
_ANY_OBJECT = {
    "type": "object",
    "additionalProperties": True,
}  # of four levels, where the one of json_object has five: two of them fit


def answer_grammar(wanted: Grammar | None, tools: Tools, tool_format: type[Parser] | None) -> Grammar | None:
    """The grammar of an answer to a chat; None: any text.

    Args:
      wanted: of the answer's text; None: any.
      tools: of the chat. The arguments of forced and of strict tools satisfy their schemas.
      tool_format: in which calls are written.

    Raises:
      ApiError: for parameters that are no object.
    """
    has_calls = tools.names is not None and (tools.is_forced or tools.strict or wanted is not None)
    if tool_format is None or not (has_calls or (wanted is not None and tool_format.is_for_all)):
        return wanted
    form = _FORMS[tool_format](tools, has_form=wanted is not None)
    parts = [] if tools.is_forced else [form.text(wanted)]
    parts += [form.calls()] if has_calls else []
    param = "tools" if wanted is None or tools.is_forced else wanted.param
    return Grammar("structure", json.dumps(_either(parts), ensure_ascii=False), param)


class _Form:
    """The form of answers of one format.

    Attributes:
      text_excludes: marks of its parser, which text has not.
      argument_excludes: the same of arguments.
    """

    text_excludes: tuple[str, ...] = ()
    argument_excludes: tuple[str, ...] = ()

    def __init__(self, tools: Tools, *, has_form: bool):
        """`has_form` says that text has a form: then none of it comes before a call."""
        self._tools, self._has_form = tools, has_form

    def text(self, wanted: Grammar | None) -> Structure:
        """Text, as a whole answer or before calls."""
        if wanted is None:
            return {"type": "any_text", "excludes": [*self.text_excludes]}
        value, name = json.loads(wanted.text), {"name": wanted.param, "excludes": [*self.text_excludes]}
        match wanted.kind:
            case "schema":
                schema = _ANY_OBJECT if value == {"type": "object"} else value
                return {"type": "json_schema", "json_schema": schema, **name}
            case "regex":
                return {"type": "regex", "pattern": value, **name}
        return _either([_const(choice) for choice in value])

    def calls(self) -> Structure:
        """The calls of an answer."""
        return self._call()

    def _call(self) -> Structure:
        raise NotImplementedError

    def _arguments(self) -> list[tuple[list[str], Structure]]:
        """The schemas of arguments, each with the names of its tools."""
        within = {"excludes": [*self.argument_excludes]}
        schemas, free = list[tuple[list[str], Structure]](), list[str]()
        for number, tool in enumerate(self._tools.definitions):
            name, place = tool["function"]["name"], f"tools[{number}].function.parameters"
            if name not in (self._tools.names or ()):
                continue
            if self._tools.is_forced or name in self._tools.strict:
                schema = _arguments_schema(tool["function"].get("parameters"), place)
                part = {"type": "json_schema", "json_schema": schema, "name": place, **within}
                schemas.append(([name], part))
            else:
                free.append(name)
        any_arguments = {"type": "json_schema", "json_schema": _ANY_OBJECT, **within}
        return [*schemas, *([(free, any_arguments)] if free else [])]


class _HermesForm(_Form):
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


class _Llama3Form(_Form):
    def text(self, wanted: Grammar | None) -> Structure:
        if wanted is not None:
            return super().text(wanted)
        # An object that begins so may be a call: no mark tells it from text.
        call = {"type": "regex", "pattern": rf'\{{\s*"({"|".join(CALL_KEYS)})"'}
        return {"type": "any_text", "excludes": [call]}

    def _call(self) -> Structure:
        return _either(
            _sequence([_const('{"name": "'), _names(names), _const('", "parameters": '), arguments, _const("}")])
            for names, arguments in self._arguments()
        )


class _HarmonyForm(_Form):
    text_excludes = argument_excludes = HarmonyParser.marks

    def text(self, wanted: Grammar | None) -> Structure:
        final = _const("<|channel|>final<|message|>")
        return _sequence([self._before(), final, super().text(wanted)])

    def calls(self) -> Structure:
        return _sequence([self._before(), self._call()])

    def _before(self) -> Structure:
        """Messages before the last one: reasoning, and text for the user before a call."""
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


_FORMS: dict[type[Parser], type[_Form]] = {
    HermesParser: _HermesForm,
    Llama3Parser: _Llama3Form,
    HarmonyParser: _HarmonyForm,
}


def _arguments_schema(parameters: dict[str, Any] | None, place: str) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
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
