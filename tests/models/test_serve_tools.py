# SPDX-License-Identifier: Apache-2.0
"""Calls of tools through the server, with OpenAI's own client, and a scripted model for each family of templates."""

import json

import httpx
import openai
import pytest

from models import serve
from models.recall import CHECKPOINT
from tests.models.scripted_kit import (
    ARGUMENTS,
    CHAT_TOOLS,
    CITY,
    FAMILIES,
    QUESTION,
    THOUGHT,
    AgentTurn,
    call_in,
    run_agent,
    run_page,
    text_in,
)
from tests.models.serve_kit import GREEDY, KEY

pytestmark = pytest.mark.long

USER = {"role": "user", "content": QUESTION}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def gathered(chunks):
    """The messages, the finish reasons and the usage of a stream, put together as the API says."""
    messages, finishes, usage = {}, {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message = messages.setdefault(choice.index, {"content": None})
            assert choice.index not in finishes  # nothing comes after the finish
            delta = choice.delta.model_dump(exclude_none=True)
            message["role"] = delta.get("role", message.get("role"))
            for name in {"content", "reasoning_content"} & delta.keys():
                message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):  # a new call: its id, its type and its name come first
                    assert part["id"].startswith("call_") and part["function"]["arguments"] == ""
                    calls.append({key: part[key] for key in ("id", "type", "function")})
                else:
                    assert part.keys() == {"index", "function"} and part["index"] == len(calls) - 1
                    assert part["function"].keys() == {"arguments"}
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            if choice.finish_reason is not None:
                finishes[choice.index] = choice.finish_reason
    for message in messages.values():
        message["content"] = message["content"] or (None if "tool_calls" in message else "")
    return [messages[i] for i in range(len(messages))], [finishes[i] for i in range(len(messages))], usage


def answers_of(server, messages, tools, *, streams, **fields):
    """The messages, finish reasons and usage of the answers."""
    if streams:
        options = {"stream_options": {"include_usage": True}}
        return gathered(server.ask(messages, tools, stream=True, **options, **fields))
    found = server.ask(messages, tools, **fields)
    dumped = [choice.message.model_dump(exclude_none=True) for choice in found.choices]
    shown = [{"content": None, **message} for message in dumped]
    return shown, [choice.finish_reason for choice in found.choices], found.usage


@pytest.mark.parametrize("streams", [False, True])
def test_an_agents_loop_finds_its_history_in_the_cache(servers, family, streams):
    """Two tools and four turns; the last turn comes after a new question."""
    server = servers(family)
    salt = {"cache_salt": f"loop {streams}"}

    def ask(messages):
        (message,), (finish,), usage = answers_of(
            server, messages, CHAT_TOOLS, streams=streams, temperature=0, extra_body=salt
        )
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        assert finish == ("tool_calls" if calls else "stop") and (message["content"] is None) == bool(calls)
        num_cached = usage.prompt_tokens_details.cached_tokens
        return AgentTurn([message], message["content"], calls, num_cached, usage.prompt_tokens, usage.completion_tokens)

    def make_result(call_id, text):
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    first = len(server.prompts)
    thanks = {"role": "user", "content": "Thanks."}
    messages, texts = run_agent(server, family, USER, ask, make_result, thanks)
    assert texts == [None, None, "Cold, at noon.", "You are welcome."]
    expected = server.prompt_of([_as_template(message) for message in messages[:5]], CHAT_TOOLS)
    assert server.prompts[first + 2] == expected


def _as_template(message):
    """A message as templates want it: arguments are objects, content is text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    thinking = {"thinking": message["reasoning_content"]} if "reasoning_content" in message else {}
    shown = {**message, **thinking, "content": message["content"] or ""}
    return shown | ({"tool_calls": calls} if calls else {})


def calls_of(message):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


HARMONY_PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
ANSWERS = {
    "hermes": [
        (
            "I look.\n" + call_in("hermes", "get_weather", ARGUMENTS) + "\n" + call_in("hermes", "get_time", "{}"),
            "I look.",
            [("get_weather", ARGUMENTS), ("get_time", "{}")],
        ),
        ("No <tool_call> here", "No <tool_call> here", []),
        ("", "", []),
    ],
    "llama3": [
        (
            call_in("llama3", "get_weather", ARGUMENTS) + "; " + call_in("llama3", "get_time", "{}"),
            None,
            [("get_weather", ARGUMENTS), ("get_time", "{}")],
        ),
        (
            "<|python_tag|>" + call_in("llama3", "get_weather", ARGUMENTS) + "<|eom_id|>",
            None,
            [("get_weather", ARGUMENTS)],
        ),
        ('{"city": "Oslo"}', '{"city": "Oslo"}', []),
    ],
    "harmony": [
        (HARMONY_PREAMBLE + call_in("harmony", "get_weather", ARGUMENTS), "I look.", [("get_weather", ARGUMENTS)]),
        (THOUGHT + text_in("harmony", "It is cold."), "It is cold.", []),
        ("It is cold.", "It is cold.", []),
    ],
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_answers_have_content_and_calls(servers, family, number, streams):
    text, content, calls = ANSWERS[family][number]
    server = servers(family)
    server.says(text)
    (message,), (finish,), usage = answers_of(server, [USER], CHAT_TOOLS, streams=streams, temperature=0)
    assert (message["content"], calls_of(message), message["role"]) == (content, calls, "assistant")
    assert finish == ("tool_calls" if calls else "stop")
    assert usage.completion_tokens == len(server.tokenizer.encode(text).ids) + (
        not text.endswith(("<|call|>", "<|eom_id|>"))
    )
    if text.startswith(THOUGHT):
        assert message["reasoning_content"] == "Weather first."
    ids = [call["id"] for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)


def test_the_clients_own_stream_gathers_a_call(servers, family):
    server = servers(family)
    server.says(call_in(family, "get_weather", ARGUMENTS))
    with server.client.chat.completions.stream(
        model="scripted", messages=[USER], tools=CHAT_TOOLS, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        (choice,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, choice.finish_reason) == (
        "get_weather",
        ARGUMENTS,
        "tool_calls",
    )


@pytest.mark.parametrize("streams", [False, True])
def test_samples_limits_stop_strings_and_log_probabilities_go_with_calls(servers, family, streams):
    server, text = servers(family), call_in(family, "get_weather", ARGUMENTS)
    ask = {"streams": streams, "temperature": 0}
    server.says(text)
    messages, finishes, usage = answers_of(server, [USER], CHAT_TOOLS, n=3, **ask)
    assert [calls_of(message) for message in messages] == [[("get_weather", ARGUMENTS)]] * 3
    assert finishes == ["tool_calls"] * 3 and usage.completion_tokens == 3 * (len(server.answers[-1]) + 1)
    assert len({message["tool_calls"][0]["id"] for message in messages}) == 3

    beginning = '{"city": "Åre"'  # of the arguments
    size = len(server.tokenizer.encode(text[: text.index(ARGUMENTS)] + beginning).ids)
    for cut, finish in (({"max_tokens": size}, "length"), ({"stop": ', "days"'}, "stop")):
        server.says(text)
        (message,), finishes, _ = answers_of(server, [USER], CHAT_TOOLS, **cut, **ask)
        assert finishes == [finish]
        if streams:  # the beginning of a call is not taken back
            assert calls_of(message) == [("get_weather", beginning)]
        else:
            assert not calls_of(message) and message["content"].endswith(beginning)

    server.says(text)
    found = server.ask([USER], CHAT_TOOLS, logprobs=True, stream=streams, temperature=0)
    choices = [chunk.choices[0] for chunk in found] if streams else found.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    shown = "".join(entry.token for entry in entries)
    assert shown == text.removesuffix("<|call|>") and all(entry.logprob > -1e-3 for entry in entries)


@pytest.mark.parametrize("streams", [False, True])
def test_one_call_is_all_where_no_parallel_ones_are_wanted(servers, streams):
    server = servers("hermes")
    server.says(ANSWERS["hermes"][0][0])
    (message,), finishes, _ = answers_of(
        server, [USER], CHAT_TOOLS, streams=streams, temperature=0, parallel_tool_calls=False
    )
    assert (calls_of(message), finishes) == ([("get_weather", ARGUMENTS)], ["tool_calls"])


@pytest.mark.parametrize("streams", [False, True])
def test_without_tools_or_with_the_choice_none_a_call_is_text(servers, family, streams):
    server = servers(family)
    text = call_in(family, "get_time", "{}")
    wanted = "{}" if family == "harmony" else text
    for tools, fields in ((CHAT_TOOLS, {"tool_choice": "none"}), (None, {}), ([], {"tool_choice": "auto"})):
        server.says(text)
        (message,), finishes, _ = answers_of(server, [USER], tools, streams=streams, temperature=0, **fields)
        assert (message["content"], finishes) == (wanted, ["stop"]) and not calls_of(message)
        assert server.prompts[-1] == server.prompt_of(
            [USER], tools
        )  # with the tools, so that the cache has its beginning


def test_tokens_of_a_chat_are_counted_with_its_tools(servers, family):
    server = servers(family)
    for tools in (None, [], CHAT_TOOLS):
        found = server.running.post({"messages": [USER], "tools": tools}, "/tokenize").json()
        assert found["tokens"] == server.prompt_of([USER], tools)
    wrong = server.running.post({"messages": [USER], "tools": [{"function": {}}]}, "/tokenize")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("streams", [False, True])
def test_a_message_is_continued_in_a_chat_with_tools(servers, family, streams):
    server = servers(family)
    messages = [USER, {"role": "assistant", "content": "It is"}]
    server.says(" cold.")
    (message,), finishes, _ = answers_of(
        server, messages, CHAT_TOOLS, streams=streams, temperature=0, extra_body={"continue_final_message": True}
    )
    assert (message["content"], finishes) == (" cold.", ["stop"])
    text = server.template.render(messages, CHAT_TOOLS, continue_final_message=True)
    assert server.prompts[-1] == server.tokenizer.encode(text, add_special_tokens=False).ids and text.endswith("It is")


def test_a_mistake_of_the_model_does_not_end_a_conversation(servers, family):
    """Arguments that are no JSON go back to the model as they are."""
    server = servers(family)
    calls = [{"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{'a': 1}"}}]
    server.says(text_in(family, "Sorry."))
    history = [{"role": "assistant", "content": None, "tool_calls": calls, "function_call": None, "index": 0}]
    found = server.ask(
        [USER, *history, {"role": "tool", "content": [], "tool_call_id": "call_1"}], CHAT_TOOLS, temperature=0
    )
    assert found.choices[0].message.content == "Sorry."


AGENTS = [
    {"type": "function", "function": {"name": "get_time", "parameters": None, "description": None, "strict": False}},
    {"type": "function", "function": {"name": "f", "parameters": {}}, "cache_control": {"type": "ephemeral"}},
    {"type": "function", "function": {"name": "mcp.server/search:v1", "parameters": {**CITY, "$schema": "x"}}},
]


def test_requests_as_agents_kits_send_them(servers, family):
    server = servers(family)
    fields = {"tool_choice": None, "parallel_tool_calls": None, "store": None, "metadata": {}, "temperature": 0}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Time?"}]}]
    body = {"model": "scripted", "messages": parts, "tools": AGENTS, **fields, "response_format": None, "functions": []}
    server.says(call_in(family, "get_time", "{}"))
    headers = {"authorization": f"Bearer {KEY}"}
    found = httpx.post(f"{server.running.url}/v1/chat/completions", json=body, headers=headers, timeout=20).json()
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls" and calls_of(choice["message"]) == [("get_time", "{}")]
    plain = [
        {"type": "function", "function": {"name": "get_time"}},
        {"type": "function", "function": {"name": "f", "parameters": {}}},
    ]
    assert server.prompts[-1] == server.prompt_of([{"role": "user", "content": "Time?"}], [*plain, AGENTS[2]])
    text = text_in(family, "Noon.")
    server.says(text)
    found = httpx.post(
        f"{server.running.url}/v1/chat/completions", json={**body, "tools": []}, headers=headers, timeout=20
    )
    message = found.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Noon.", "refusal": None}  # clients send it back: no empty list


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]}, "messages"),
    ],
)
def test_the_old_fields_are_refused_by_name(servers, fields, param):
    server = servers("hermes")
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(
            **{"model": "scripted", "messages": [USER], "tools": CHAT_TOOLS, **fields}
        )
    assert caught.value.param == param


def test_a_template_without_a_format_refuses_tools_and_names_the_formats(client):
    with pytest.raises(openai.BadRequestError, match="--tool-format: hermes, llama3, harmony") as caught:
        client.chat.completions.create(messages=[USER], tools=CHAT_TOOLS, **GREEDY)
    assert caught.value.param == "tools"
    message = {"role": "user", "content": "where is alice ?"}
    assert client.chat.completions.create(
        messages=[message], tools=CHAT_TOOLS, tool_choice="none", max_tokens=1, **GREEDY
    )
    with pytest.raises(openai.BadRequestError, match=r"tools: got .*, wanted none or \[\]: nothing else is served"):
        client.completions.create(prompt="alice", extra_body={"tools": CHAT_TOOLS}, **GREEDY)


def test_an_option_names_the_format(capsys, tmp_path):
    parser = serve.make_parser()
    args = parser.parse_args(["--checkpoint", str(CHECKPOINT), "--tool-format", "llama3"])
    assert serve.tool_format_of(args, None).call_end == "<|eom_id|>"
    with pytest.raises(SystemExit):
        parser.parse_args(["--checkpoint", str(CHECKPOINT), "--tool-format", "xml"])
    line = capsys.readouterr().err
    assert "--tool-format: invalid choice: 'xml'" in line and all(name in line for name in FAMILIES)


def test_the_tools_of_the_page_are_called(servers):
    assert run_page(servers("hermes"), "tool_calls") == ["It is cold in Oslo."]
