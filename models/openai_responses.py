# SPDX-License-Identifier: Apache-2.0
"""Requests of OpenAI's Responses API, read as chats, so a conversation has the same cached blocks in both APIs.

The server stores no response, so the items of a request are the whole conversation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from .openai_api import ApiError, Fields, check_refused, is_list, refuse
from .openai_fields import CHATS, COMPLETIONS, HARMLESS, fields_of

# Fields with the same meaning in chats.
_CHAT_FIELDS = frozenset(
    {
        "add_special_tokens",
        "cache_salt",
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "min_tokens",
        "model",
        "parallel_tool_calls",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_p",
    }
)
SERVED = _CHAT_FIELDS | {
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "metadata",
    "prompt_cache_options",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
}
IGNORED = (HARMLESS - SERVED) | {
    "access_programs",
    "background_options",
    "image",
    "max_tool_calls",
}
# Fields about a conversation in the memory of a server.
_STORED = ("conversation", "previous_response_id", "prompt")
REFUSED: dict[str, tuple[Any, ...]] = {
    name: harmless_values
    for name, harmless_values in {
        **dict.fromkeys(fields_of(CHATS)[0], ()),
        **fields_of(COMPLETIONS)[2],
        **fields_of(CHATS)[2],
        **dict.fromkeys(_STORED, ()),
        "background": (False,),
        "context_management": ([],),
        "enable_response_messages": (False,),
        "logprobs": (False,),
        "moderation": (),
        "n": (1,),
        "previous_input_messages": ([],),
        "truncation": ("disabled",),
    }.items()
    if name not in SERVED
}
FIELDS = SERVED, IGNORED, REFUSED  # `openai_fields.fields_of` returns the same for other endpoints

_LOGPROBS = "message.output_text.logprobs"
# Values of `include`. Except for the log-probabilities they have no effect, because no answer has such items.
_INCLUDED = frozenset(
    {
        _LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
# Fields of `reasoning`, with their harmless values. The server makes no summaries.
_REASONING: dict[str, tuple[Any, ...]] = {"effort": (), "mode": ("standard",), "context": ("auto",)}
# Names of a chat's fields, and the names of this API.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "verbosity": "text.verbosity",
}
_PARTS = {"input_text", "output_text"}
_CALL = "a function_call with call_id, name and arguments of text"


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Puts the names of this API into errors about the fields of a chat."""
    try:
        yield
    except ApiError as error:
        shown = error.body["error"]
        name = _NAMES.get(shown["param"])
        if name is None:
            raise
        message = shown["message"]
        if message.startswith((f"{shown['param']}:", f"{shown['param']}.")):
            message = name + message.removeprefix(shown["param"])
        raise ApiError(error.status, message, name, shown["code"], kind=shown["type"], headers=error.headers) from None


def read_request(fields: Fields, *, has_schemas: bool = True) -> tuple[Fields, dict[str, Any]]:
    """Reads a request. Returns its fields as a chat, and the fields to repeat in the response.

    Clients of this API make tools strict by default. A server without schemas ignores this.
    """
    for name in _STORED:
        if fields.get(name) is not None:
            raise refuse(name, fields.get(name), "none: nothing is stored, and input is the whole conversation")
    check_refused(fields, REFUSED)
    _check_reasoning(fields)
    fields.checked("prompt_cache_options", {}, "an object without prewarm", _is_harmless_to_cache)
    tools = fields.checked("tools", [], "a list of tools", lambda value: is_list(value, dict))
    functions = [_read_tool(tool) for tool in tools]
    if not has_schemas:
        tools = [{**tool, "strict": False} for tool in tools]
        functions = [{**tool, "function": {**tool["function"], "strict": False}} for tool in functions]
    text = fields.checked("text", {}, "an object with a format", lambda value: isinstance(value, dict))
    instructions = fields.checked("instructions", None, "a text", lambda value: isinstance(value, str))
    chat = {name: fields.get(name) for name in _CHAT_FIELDS} | {
        "messages": _read_messages(fields, instructions),
        "tools": functions,
        "tool_choice": _read_choice(fields.get("tool_choice")),
        "max_completion_tokens": fields.integer("max_output_tokens", None, 1),
        "response_format": text.get("format"),
        "verbosity": text.get("verbosity"),
        **_read_logprobs(fields),
    }
    response_fields = {
        "instructions": instructions,
        "metadata": fields.checked("metadata", {}, "an object", lambda value: isinstance(value, dict)),
        "tools": [{**tool, "strict": bool(tool.get("strict"))} for tool in tools],
        "tool_choice": fields.get("tool_choice", "auto"),
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "text": {"format": {"type": "text"}} | {name: value for name, value in text.items() if value is not None},
        "top_logprobs": fields.get("top_logprobs", 0),
    }
    return Fields(chat), response_fields


def _is_harmless_to_cache(options: Any) -> bool:
    return isinstance(options, dict) and not options.get("prewarm")


def _check_reasoning(fields: Fields) -> None:
    """Refuses values that would affect answers. Clients set an effort for the template in `chat_template_kwargs`."""
    reasoning = fields.checked("reasoning", {}, "an object", lambda value: isinstance(value, dict))
    for name, harmless_values in _REASONING.items():
        if reasoning.get(name) is not None and reasoning[name] not in harmless_values:
            wanted = f"no {name}: chat_template_kwargs has the values of the chat template"
            raise refuse("reasoning", reasoning, wanted)


def _read_logprobs(fields: Fields) -> dict[str, Any]:
    """The fields of a chat which ask for the log-probabilities of the answer."""
    wanted = f"a list of some of {', '.join(sorted(_INCLUDED))}"
    included = fields.checked("include", [], wanted, lambda value: is_list(value, str) and _INCLUDED.issuperset(value))
    num_top = fields.integer("top_logprobs", 0, 0)
    if num_top and _LOGPROBS not in included:
        raise refuse("top_logprobs", num_top, f"none without {_LOGPROBS} in include")
    return {"logprobs": _LOGPROBS in included, "top_logprobs": num_top}


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool in the format of chats."""
    is_function = tool.get("type") == "function" and isinstance(tool.get("name"), str)
    if not is_function or not isinstance(tool.get("strict"), bool | None):
        raise refuse("tools", tool, 'the type "function", with a name, a description and parameters')
    function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": function}


def _read_choice(choice: Any) -> Any:
    """The choice of a tool in the format of chats."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _read_messages(fields: Fields, instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat with the same conversation. The instructions are its system message.

    The items of a turn become a single message, which has reasoning, text and calls in this order, if any.
    """
    value = fields.get("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not is_list(items, dict) or not items:
        raise refuse("input", value, "a text or a list of items")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        message = _read_item(item)
        if message is not None:
            last = messages[-1] if messages else {}
            if last.get("role") == message["role"] == "assistant" and _goes_on(last, message):
                calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
                message = {**last, **message, "content": last["content"] or message["content"]}
                message |= {"tool_calls": calls} if calls else {}
                messages.pop()
            messages.append(message)
    return messages


def _goes_on(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether the message of an item is a part of the turn of the last message."""
    return "tool_calls" in message or _stage(last) < _stage(message)


def _stage(message: Mapping[str, Any]) -> int:
    """The place in a turn of a message's last part: reasoning, text or calls."""
    if "tool_calls" in message:
        return 2
    return 0 if "reasoning_content" in message and not message["content"] else 1


def _read_item(item: dict[str, Any]) -> dict[str, Any] | None:
    """The message of an item, or None if it tells a model nothing."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise refuse("input", item, 'the role "user", "assistant", "system" or "developer"')
            # Many templates ignore the role of a developer.
            role = "system" if role == "developer" else role
            return {"role": role, "content": _read_text(item, item.get("content"), _PARTS)}
        case "reasoning":
            content = item.get("content")
            text = "" if content is None else _read_text(item, content, {"reasoning_text"})
            return {"role": "assistant", "content": "", "reasoning_content": text} if text else None
        case "function_call":
            if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
                raise refuse("input", item, _CALL)
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise refuse("input", item, "a function_call_output with call_id and output")
            content = _read_text(item, item.get("output"), _PARTS)
            return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
        case "item_reference":
            raise refuse("input", item, "the item itself: nothing is stored")
    kinds = "message, function_call, function_call_output or reasoning"
    raise refuse("input", item, f"an item of the type {kinds}")


def _read_text(item: dict[str, Any], content: Any, kinds: set[str]) -> str:
    """The text of an item's parts, joined."""
    if isinstance(content, str):
        return content
    if not is_list(content, dict) or not all(
        part.get("type") in kinds and isinstance(part.get("text"), str) for part in content
    ):
        raise refuse("input", item, f"text, or parts of it ({', '.join(sorted(kinds))})")
    return "".join(part["text"] for part in content)
