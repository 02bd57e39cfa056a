# SPDX-License-Identifier: Apache-2.0
"""Tools and messages of requests as they are read."""

import contextlib
import json
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.chat import Template
from models.openai_api import ApiError, Fields, Limits
from models.openai_fields import CHATS
from models.openai_messages import read_messages, read_rendering, read_tools
from models.serve_app import Api
from models.serve_job import Served
from models.tenants import Keys
from models.tool_calls import FORMATS

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tools_of(**fields):
    return read_tools(Fields(fields))


def test_tools_are_read_without_what_says_nothing_to_a_model():
    for fields in ({}, {"tools": []}, {"tools": None, "tool_choice": None}, {"tools": [], "tool_choice": "none"}):
        found = tools_of(**fields)
        assert (found.definitions, found.names, found.is_parallel) == ([], None, True)
    odd = {"function": {"name": "f", "strict": False, "description": None, "returns": {"type": "string"}}, "extra": 1}
    found = tools_of(tools=[odd, TOOL], parallel_tool_calls=False)
    plain = {"type": "function", "function": {"name": "f", "returns": {"type": "string"}}}
    assert found.definitions == [plain, TOOL] and found.names == {"f"} and not found.is_parallel
    none = tools_of(tools=[TOOL], tool_choice="none")
    assert none.definitions == [TOOL] and none.names is None


def test_calls_may_be_forced_and_strict():
    strict = {"function": {"name": "g", "strict": True}}
    required = tools_of(tools=[TOOL, strict], tool_choice="required")
    assert required.is_forced and required.is_parallel and required.names == {TOOL["function"]["name"], "g"}
    assert required.strict == {"g"} and "strict" not in required.definitions[1]["function"]
    named = tools_of(tools=[TOOL, strict], tool_choice={"type": "function", "function": {"name": "g"}})
    assert named.is_forced and not named.is_parallel and named.names == {"g"} and len(named.definitions) == 2
    assert not tools_of(tools=[strict]).is_forced


CHOICE = 'wanted none, "none", "auto", "required" or a function with its name'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": {}}, "tools: got {}, wanted a list of tools"),
        ({"tools": ["f"]}, 'tools: got ["f"], wanted a list of tools'),
        ({"tools": [{}]}, 'tools: got {}, wanted the type "function", and a function'),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 'wanted the type "function", and a function'),
        ({"tools": [{"function": {}}]}, "tools: got {}, wanted a name of letters, digits and the signs"),
        ({"tools": [{"function": {"name": "a b"}}]}, "wanted a name of letters, digits and the signs"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "an object of parameters"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "the name of one of the tools",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, CHOICE),
        ({"tools": [TOOL], "tool_choice": "any"}, f'tool_choice: got "any", {CHOICE}'),
        ({"tool_choice": "required"}, 'tool_choice: got "required", wanted none without tools'),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls: got 1, wanted true or false"),
    ],
)
def test_wrong_tools_are_named(fields, message):
    with pytest.raises(ApiError) as caught:
        tools_of(**fields)
    error = caught.value.body["error"]
    assert (
        caught.value.status == 400 and message in error["message"] and error["param"] == error["message"].split(":")[0]
    )


def test_values_of_a_request_do_not_take_the_place_of_its_tools():
    template, of_tools = "plain {{ tools }}", "{{ tools[0].function.name }} {{ mode }} {{ add_generation_prompt }}"
    for one in (Template(of_tools, {}), Template(template, {}, for_tools=Template(of_tools, {}))):
        values = {"mode": "short", "tools": [{"function": {"name": "g"}}], "add_generation_prompt": True}
        assert one.render([], [TOOL], add_generation_prompt=False, values=values) == "f short False"
    assert Template(template, {}).render([], values={"tools": [TOOL]}) == "plain None"
    with pytest.raises(ApiError, match=r"^chat_template_kwargs: got .*, wanted an object without .*, tools$"):
        read_rendering(Fields({"chat_template_kwargs": {"tools": [TOOL]}}))


def test_a_chat_with_tools_has_the_defaults_of_its_checkpoint():
    template = Template("{{ tools[0].function.name }} {{ messages[0].content }}", {})
    tokenizer = types.SimpleNamespace(encode_batch_fast=lambda texts, **_: [types.SimpleNamespace(ids=texts)])
    defaults = {"temperature": 0.25, "min_p": 0.5, "repetition_penalty": 2.0, "max_new_tokens": 7}
    served: Any = Served("m", tokenizer, 9, template, [], Limits(100, 1, 0), defaults, Keys(), 999, 999, 1, 1,
                         shows_cached=True, before_end=None, tool_format=FORMATS["hermes"])  # fmt: skip
    api: Any = Api(types.SimpleNamespace(), served, None)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "temperature": 0.75}
    params, prompts = api._read(json.dumps(body).encode(), endpoint=CHATS)
    assert prompts == [["f hi"]] and params.tools.names == {"f"}
    assert (params.sampling.temperature, params.sampling.min_p, params.default_max_tokens) == (0.75, 0.5, 7)
    assert params.penalties["repetition"] == 2.0


def messages_of(*messages):
    return read_messages(Fields({"messages": list(messages)}))


def call(arguments='{"a": 1}', **fields):
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


def test_the_history_has_calls_with_their_arguments_and_the_names_of_tools():
    dumped = {"role": "assistant", "content": None, "refusal": None, "function_call": None, "audio": None}
    part = {"type": "text", "text": "a"}
    found = messages_of(
        {**dumped, "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "call_1", "content": [part, part]},
        {**dumped, "tool_calls": []},
        {"role": "tool", "content": "b", "name": "g", "tool_call_id": "call_2"},
        {**dumped, "tool_calls": None, "reasoning_content": "Hm."},
        {"role": "tool", "content": "c"},
    )
    assert found == [
        {"role": "assistant", "content": "", "tool_calls": [call({"a": 1})]},
        {"role": "tool", "content": "aa", "tool_call_id": "call_1", "name": "f"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "b", "tool_call_id": "call_2", "name": "g"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "thinking": "Hm."},
        {"role": "tool", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("", {}),
        (" ", {}),
        (None, {}),
        ("{}", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": tru}', '{"a": tru}'),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_arguments_that_are_no_object_stay_text(arguments, wanted):
    (found,) = messages_of({"role": "assistant", "tool_calls": [call(arguments)]})
    assert found["tool_calls"][0]["function"]["arguments"] == wanted


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "tool", "tool_call_id": "call_1"},
        {"role": "tool", "content": "a", "tool_call_id": 1},
        {"role": "assistant", "tool_calls": {}},
        {"role": "assistant", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": [{"id": "call_1"}]},
        {"role": "assistant", "tool_calls": [call(type="custom")]},
        {"role": "assistant", "tool_calls": [call(arguments=[1])]},
        {"role": "assistant", "tool_calls": [call(id=1)]},
        {"role": "assistant", "tool_calls": [call(function={"name": "", "arguments": "{}"})]},
        {"role": "assistant", "tool_calls": [call(arguments='"\ud800"')]},
        {"role": "assistant", "content": "a", "reasoning_content": 1},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    ],
)
def test_wrong_messages_are_refused(message):
    with pytest.raises(ApiError, match=r"^messages: got ") as caught:
        messages_of(message)
    assert caught.value.body["error"]["param"] == "messages"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=3)
    | st.sampled_from(["function", "f", "{}", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "arguments", "parameters", "id"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["assistant", "tool", "user"]) | VALUES, "content": VALUES},
    optional=dict.fromkeys(["tool_calls", "tool_call_id", "name", "reasoning_content"], VALUES | st.lists(VALUES)),
)


@given(tools=VALUES | st.lists(VALUES), choice=VALUES, messages=st.lists(MESSAGE, max_size=3))
def test_any_value_is_read_or_refused(tools, choice, messages):
    with contextlib.suppress(ApiError):
        found = tools_of(tools=tools, tool_choice=choice)
        assert found.choice in ("auto", "none", "required", "named") and all(
            tool["function"]["name"] for tool in found.definitions
        )
    with contextlib.suppress(ApiError):
        found = messages_of(*messages)
        assert all(isinstance(one["content"], str) for one in found) and json.dumps(found, ensure_ascii=False).encode()
