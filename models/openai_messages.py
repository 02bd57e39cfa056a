# SPDX-License-Identifier: Apache-2.0
"""The messages and the tools of a chat in OpenAI's HTTP API, read for a chat template."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from .openai_api import Fields, Tools, check_text, is_list, refuse

# Values of a template which `chat_template_kwargs` may not set.
RESERVED_VALUES = ("add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tools")
_NAME = re.compile(r"[\w.:/-]{1,256}")
_CALL = "tool_calls of objects with id, and function with name and arguments"


class Rendering(NamedTuple):
    """The arguments of `chat.Template.render`, except the messages and the tools."""

    add_generation_prompt: bool
    continue_final_message: bool
    values: dict[str, Any]


def read_rendering(fields: Fields) -> Rendering:
    """Reads the fields about the rendering of a chat as a prompt."""
    name = "continue_final_message"
    continues_message = fields.flag(name)
    adds_prompt = fields.flag("add_generation_prompt", not continues_message)
    if continues_message and adds_prompt:
        raise refuse(name, continues_message, "none or false with add_generation_prompt")
    wanted = f"an object without {', '.join(RESERVED_VALUES)}"
    values = fields.checked("chat_template_kwargs", {}, wanted, _are_template_values)
    return Rendering(adds_prompt, continues_message, values)


def _are_template_values(values: Any) -> bool:
    return isinstance(values, dict) and values.keys().isdisjoint(RESERVED_VALUES)


def read_tools(fields: Fields) -> Tools:
    """Reads the tools of a chat and the choice among them."""
    definitions = read_definitions(fields)
    is_parallel = fields.flag("parallel_tool_calls", True)
    choice = fields.get("tool_choice", "auto")
    named = None
    if choice not in ("auto", "none"):
        named = _check_choice(choice, [definition["function"]["name"] for definition in definitions])
        choice = "required" if named is None else "named"
    functions = [tool["function"] for tool in fields.get("tools", [])]
    strict = frozenset(function["name"] for function in functions if function.get("strict"))
    return Tools(definitions, choice, is_parallel and named is None, named, strict)


def read_definitions(fields: Fields) -> list[dict[str, Any]]:
    """Reads the tools for a chat template, without the fields that are useless to a model."""
    tools = fields.checked("tools", [], "a list of tools", lambda value: is_list(value, dict))
    return [_definition(tool) for tool in tools]


def _definition(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise refuse("tools", tool, 'the type "function", and a function')
    types = {"description": str, "parameters": dict, "strict": bool}
    wrong = [name for name, kind in types.items() if not isinstance(function.get(name), kind | None)]
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or wrong:
        wanted = "a name of letters, digits and the signs _.:/-, a description of text, an object of parameters"
        raise refuse("tools", function, wanted)
    shown_function = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return {"type": "function", "function": shown_function}


def _check_choice(choice: Any, names: list[str]) -> str | None:
    """Refuses a wrong choice. Returns the name of the tool to call, or None if any tool may be called."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise refuse("tool_choice", choice, 'none, "none", "auto", "required" or a function with its name')
    if not names:
        raise refuse("tool_choice", choice, "none without tools")
    if name is not None and name not in names:
        raise refuse("tool_choice", choice, "the name of one of the tools")
    return name


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Reads the messages of a chat. Joins the text of their parts, and turns the arguments of calls into objects.

    A tool's message gets the name of the tool whose call it answers. If a model has made a mistake and arguments are
    not an object, they stay text, and the conversation continues.
    """
    messages = fields.get("messages")
    if not is_list(messages, dict) or not messages:
        raise refuse("messages", messages, "a list of messages")
    read: list[dict[str, Any]] = []
    tool_names = dict[str, str]()  # by the id of the call
    for message in messages:
        read.append(_message(message, tool_names))
        calls = read[-1].get("tool_calls", ())
        tool_names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    return read


def _message(message: dict[str, Any], tool_names: dict[str, str]) -> dict[str, Any]:
    role = message.get("role")
    content = message.get("content")
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if content is None and role == "assistant":
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise refuse("messages", message, "a role and a content of text")
    if message.get("function_call") is not None:
        raise refuse("messages", message, "tool_calls in place of function_call")
    read: dict[str, Any] = {"role": check_text("messages", role), "content": check_text("messages", content)}
    if role == "assistant":
        reasoning = _optional_text(message, "reasoning_content") or _optional_text(message, "reasoning")
        calls = message.get("tool_calls")
        if calls is not None and not is_list(calls, dict):
            raise refuse("messages", message, _CALL)
        read |= {"tool_calls": [_call(call) for call in calls]} if calls else {}
        read |= {"reasoning_content": reasoning} if reasoning else {}
        # The template of gpt-oss reads `thinking`, and refuses it with a call and content.
        read |= {"thinking": reasoning} if reasoning and not (calls and content) else {}
    if role == "tool":
        call_id = _optional_text(message, "tool_call_id")
        name = _optional_text(message, "name") or tool_names.get(call_id or "")
        read |= {"tool_call_id": call_id} if call_id else {}
        read |= {"name": name} if name else {}
    return read


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise refuse("messages", call, _CALL)
    name = function.get("name")
    arguments = function.get("arguments")
    if not isinstance(name, str) or not name or not isinstance(arguments, str | dict | None):
        raise refuse("messages", call, _CALL)
    call_id = _optional_text(call, "id")
    shown = {"name": check_text("messages", name), "arguments": _arguments(arguments)}
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": shown}


def _arguments(arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else check_text("messages", arguments)


def _optional_text(message: dict[str, Any], name: str) -> str | None:
    value = message.get(name)
    if not isinstance(value, str | None):
        raise refuse("messages", message, f"{name} of text")
    return None if value is None else check_text("messages", value)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
