# SPDX-License-Identifier: Apache-2.0
"""The Responses API, with OpenAI's own client, and a scripted model for each family of templates."""

import asyncio
import json
import re
import types
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvjax.serving import EngineError
from models.answers import Failed, Piece
from models.openai_api import ApiError, Fields, Limits, read_params
from models.openai_replies import Usage
from models.openai_response_form import ResponsesFormat
from models.openai_responses import FIELDS, own_names, read_request
from models.serve_job import events
from models.tool_calls import HarmonyParser, HermesParser
from tests.models.scripted_kit import (
    ARGUMENTS,
    CALLS,
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

TOOLS = [
    {"type": "function", "name": "get_weather", "description": "Weather now", "parameters": CITY, "strict": False},
    {"type": "function", "name": "get_time", "parameters": None, "strict": None},
]
TEXT_EVENTS = ["output_item.added", "content_part.added", "delta", "done", "content_part.done", "output_item.done"]
CALL_EVENTS = ["output_item.added", "delta", "done", "output_item.done"]
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def response_of(server, *, streams, **fields):
    """A whole response, or the one that a stream's events make, and end with."""
    fields = {"model": "scripted", "temperature": 0, **fields}
    if not streams:
        return server.client.responses.create(**fields)
    return of_stream(server.client.responses.create(stream=True, **fields))


def of_stream(stream):
    """The response of a stream, whose events are in order and make the items that it ends with."""
    found = list(stream)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0].response.status == "in_progress" and found[0].response.output == []
    last = found[-1].response
    assert found[-1].type == f"response.{last.status}" and last.id == found[0].response.id
    by_item = dict[int, list]()
    for event in found[2:-1]:
        assert event.output_index in (len(by_item) - 1, len(by_item))  # one item after the other
        by_item.setdefault(event.output_index, []).append(event)
    for index, item in enumerate(last.output):
        of_item = by_item[index]
        assert of_item[-1].item == item and of_item[0].item.status == "in_progress"
        deltas = "".join(event.delta for event in of_item if event.type.endswith(".delta"))
        is_call = item.type == "function_call"
        done = of_item[-2] if is_call else of_item[-3]
        assert deltas == (item.arguments if is_call else item.content[0].text)
        assert deltas == (done.arguments if is_call else done.text)
        names = [event.type.removeprefix("response.") for event in of_item]
        steps = [name.rpartition(".")[2] if name.count("_") != 1 or "text" in name else name for name in names]
        once = [name for i, name in enumerate(steps) if name != "delta" or steps[i - 1] != "delta"]
        wanted = CALL_EVENTS if is_call else TEXT_EVENTS
        assert once == [name for name in wanted if deltas or name != "delta"]
        if not is_call:
            assert of_item[1].part.text == "" and of_item[-2].part.model_dump() == item.content[0].model_dump()
    assert len(by_item) == len(last.output)
    return last


def calls_of(response):
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_an_agents_loop_finds_its_history_in_the_cache(servers, family, streams):
    """Two tools and four turns, with the prompts of the same chat."""
    server = servers(family)
    options = {"instructions": "Be brief.", "tools": TOOLS, "store": False}

    def ask(items):
        salt = {"cache_salt": f"loop {streams}"}
        response = response_of(server, streams=streams, input=items, **options, extra_body=salt)
        assert response.status == "completed" and response.incomplete_details is None
        usage = response.usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        calls = [item for item in response.output if item.type == "function_call"]
        assert all(call.status == "completed" for call in calls)
        return AgentTurn(
            [item.model_dump(exclude_none=True) for item in response.output],
            response.output_text,
            [(call.call_id, call.name, call.arguments) for call in calls],
            usage.input_tokens_details.cached_tokens,
            usage.input_tokens,
            usage.output_tokens,
        )

    def make_result(call_id, text):
        return {"type": "function_call_output", "call_id": call_id, "output": text}

    question = {"role": "user", "content": QUESTION}
    thanks = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Thanks."}]}
    items, texts = run_agent(server, family, question, ask, make_result, thanks)
    assert texts == ["", "", "Cold, at noon.", "You are welcome."]
    thought = {"thinking": "Weather first.", "reasoning_content": "Weather first."}
    thinking = thought if family == "harmony" else {}
    arguments = json.loads(ARGUMENTS)
    ids = [item["call_id"] for item in items if item.get("type") == "function_call"]
    assert server.prompts[-1] == server.prompt_of(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "", **thinking, "tool_calls": [_call(ids[0], "get_weather", arguments)]},
            {"role": "tool", "content": "cold in Åre for [1, 2]", "tool_call_id": ids[0], "name": "get_weather"},
            {"role": "assistant", "content": "", "tool_calls": [_call(ids[1], "get_time", {})]},
            {"role": "tool", "content": "12:00", "tool_call_id": ids[1], "name": "get_time"},
            {"role": "assistant", "content": "Cold, at noon."},
            {"role": "user", "content": "Thanks."},
        ],
        CHAT_TOOLS,
    )


def _call(call_id, name, arguments):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("family", "text", "kinds", "content", "calls"),
    [
        (
            "hermes",
            f"I look.\n{call_in('hermes', *CALLS[0])}\n{call_in('hermes', *CALLS[1])}",
            ["message", "function_call", "function_call"],
            "I look.",
            CALLS,
        ),
        ("hermes", "No <tool_call> here", ["message"], "No <tool_call> here", []),
        ("hermes", "", ["message"], "", []),
        (
            "llama3",
            "; ".join(call_in("llama3", *call) for call in CALLS),
            ["function_call", "function_call"],
            "",
            CALLS,
        ),
        (
            "harmony",
            PREAMBLE + THOUGHT + call_in("harmony", *CALLS[0]),
            ["message", "reasoning", "function_call"],
            "I look.",
            CALLS[:1],
        ),
        ("harmony", THOUGHT + text_in("harmony", "Cold."), ["reasoning", "message"], "Cold.", []),
        ("harmony", THOUGHT.partition("<|end|>")[0], ["reasoning", "message"], "", []),
    ],
)
def test_an_answer_is_a_list_of_items(servers, family, text, kinds, content, calls, streams):
    server = servers(family)
    server.says(text)
    response = response_of(server, streams=streams, input=QUESTION, tools=TOOLS)
    assert [item.type for item in response.output] == kinds and {item.status for item in response.output} == {
        "completed"
    }
    assert (response.output_text, calls_of(response), response.status) == (content, calls, "completed")
    ids = [item.id for item in response.output]
    call_ids = [item.call_id for item in response.output if item.type == "function_call"]
    assert len({*ids, *call_ids}) == len(ids) + len(call_ids)
    for item in response.output:
        if item.type == "reasoning":
            assert [part.text for part in item.content] == ["Weather first."] and item.summary == []
    shown = [{**tool, "strict": False} for tool in TOOLS]
    assert [tool.model_dump(exclude_unset=True) for tool in response.tools] == shown


@pytest.mark.long
def test_the_clients_own_stream_gathers_a_response(servers, family):
    server = servers(family)
    server.says(call_in(family, "get_weather", ARGUMENTS))
    with server.client.responses.stream(model="scripted", input=QUESTION, tools=TOOLS, temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert snapshots[-1] == call.arguments == ARGUMENTS
    server.says(text_in(family, "Cold."))
    with server.client.responses.stream(model="scripted", input=QUESTION, temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert snapshots[-1] == stream.get_final_response().output_text == "Cold."


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_a_cut_answer_is_incomplete(servers, family, streams):
    server, text = servers(family), call_in(family, "get_weather", ARGUMENTS)
    beginning = '{"city": "Åre"'  # of the arguments
    size = len(server.tokenizer.encode(text[: text.index(ARGUMENTS)] + beginning).ids)
    server.says(text)
    response = response_of(server, streams=streams, input=QUESTION, tools=TOOLS, max_output_tokens=size)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.max_output_tokens == response.usage.output_tokens == size
    (item,) = response.output
    assert item.status == "incomplete"
    if streams:  # the beginning of a call is not taken back
        assert (item.type, item.arguments) == ("function_call", beginning)
    else:
        assert item.type == "message" and response.output_text.endswith(beginning)


@pytest.mark.long
def test_a_response_has_the_fields_of_its_request_and_nothing_is_stored(servers):
    server = servers("hermes")
    for store in (None, True, False):
        server.says("Noon.")
        response = response_of(
            server,
            streams=False,
            input=QUESTION,
            instructions="Be brief.",
            metadata={"a": "b"},
            store=store,
            top_p=0.5,
            tools=TOOLS,
            tool_choice="none",
            parallel_tool_calls=False,
            text={"format": {"type": "text"}},
            user="u",
            reasoning={"summary": "auto", "effort": None},
            truncation="disabled",
            max_output_tokens=20,
            include=["reasoning.encrypted_content"],
            service_tier="auto",
        )
        assert Response.model_validate(response.model_dump(exclude={"usage"})) and response.object == "response"
        assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
        assert (response.model, response.temperature, response.top_p) == ("scripted", 0, 0.5)
        assert (response.tool_choice, response.parallel_tool_calls) == ("none", False)
        assert (response.text.format.type, response.truncation, response.max_output_tokens) == ("text", "disabled", 20)
        assert response.model_extra["store"] is False and response.previous_response_id is None
        assert response.error is None and response.output_text == "Noon."
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(response.id)


@pytest.mark.long
def test_events_have_their_types_as_server_sent_events_do(servers):
    server = servers("hermes")
    server.says("Noon.")
    found = server.running.post({"input": QUESTION, "stream": True, "temperature": 0}, "/v1/responses")
    assert found.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in found.text.removesuffix("\n\n").split("\n\n")]
    for first, second in blocks:
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        if "response" not in event:
            EVENT.validate_python(event, strict=True)  # all fields of the event are there
    assert blocks[-1][0] == "event: response.completed" and "[DONE]" not in found.text


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_of_a_text(client, streams):
    """As those of the same chat, by the bundled model."""
    question = "where is alice ?"
    include = ["message.output_text.logprobs"]
    fields = {"input": question, "max_output_tokens": 3, "include": include, "top_logprobs": 2, **GREEDY}
    fields["extra_body"] = {"ignore_eos": True}
    create = client.responses.create
    response = of_stream(create(stream=True, **fields)) if streams else create(**fields)
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": question}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
        **GREEDY,
        extra_body={"ignore_eos": True},
    ).choices[0]
    (item,) = response.output
    found = [entry.model_dump() for entry in item.content[0].logprobs]
    wanted = [entry.model_dump() for entry in chat.logprobs.content]
    assert len(found) == 3 and response.output_text == chat.message.content and response.status == "incomplete"
    for entry, other in zip(found, wanted, strict=True):
        assert entry["token"] == other["token"] and entry["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert [top["token"] for top in entry["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]


def chat_of(**fields):
    return read_request(Fields({"input": "a", **fields}))[0]


def messages_of(*items, **fields):
    return chat_of(input=list(items), **fields).get("messages")


def output(kind, text):
    return {"type": "message", "role": "assistant", "content": [{"type": kind, "text": text, "annotations": []}]}


THOUGHTS = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"}
OTHER = {**CALL, "call_id": "2"}
RESULT = {"type": "function_call_output", "call_id": "1"}


def test_the_items_of_a_turn_are_one_message():
    calls = [_call("1", "f", "{}"), _call("2", "f", "{}")]
    text, part = output("output_text", "b"), {"type": "input_text", "text": "c"}
    assert chat_of(instructions="s").get("messages") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
    ]
    assert messages_of(THOUGHTS, text, CALL, OTHER, {**RESULT, "output": [part, part]}, text, text) == [
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "cc"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "b"},
    ]
    assert messages_of(CALL, THOUGHTS, OTHER) == [
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls[1:]},
    ]
    empty = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert messages_of(empty, {"role": "developer", "content": "a"}) == [{"role": "system", "content": "a"}]


@pytest.mark.parametrize(
    ("fields", "param", "wanted"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "nothing is stored"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "nothing is stored"),
        ({"input": None}, "input", "a text or a list of items"),
        ({"input": []}, "input", "a text or a list of items"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input", 'the role "user"'),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text, or parts of it"),
        ({"input": [{"role": "user"}]}, "input", "text, or parts of it"),
        ({"input": [{"type": "web_search_call"}]}, "input", "an item of the type"),
        ({"input": [{**CALL, "arguments": {}}]}, "input", "arguments of text"),
        ({"input": [{**RESULT, "call_id": None, "output": "a"}]}, "input", "call_id and output"),
        ({"input": [{**RESULT, "output": None}]}, "input", "text, or parts of it"),
        ({"instructions": ["a"]}, "instructions", "a text"),
        ({"metadata": "a"}, "metadata", "an object"),
        ({"max_output_tokens": 0}, "max_output_tokens", "an integer from 1"),
        ({"tools": [{"type": "web_search"}]}, "tools", 'the type "function"'),
        ({"tools": CHAT_TOOLS}, "tools", 'the type "function", with a name'),
        ({"tools": [{**TOOLS[0], "strict": 1}]}, "tools", 'the type "function"'),
        ({"reasoning": {"effort": "high"}}, "reasoning", "no effort"),
        ({"reasoning": "high"}, "reasoning", "an object"),
        ({"include": ["all"]}, "include", "a list of some of"),
        ({"top_logprobs": 2}, "top_logprobs", "none without message.output_text.logprobs in include"),
        ({"text": "plain"}, "text", "an object with a format"),
        ({"truncation": "auto"}, "truncation", '"disabled"'),
        ({"background": True}, "background", "false"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options", "without prewarm"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "nothing else is served"),
        ({"n": 2}, "n", "nothing else is served"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, param, wanted):
    with pytest.raises(ApiError, match=f"^{param}: got .*{re.escape(wanted)}") as caught:
        chat_of(**fields)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)


def test_values_that_change_nothing_are_taken():
    plain = chat_of()
    for name, allowed in FIELDS[2].items():
        for value in (None, *allowed):
            assert chat_of(**{name: value}).get("messages") == plain.get("messages")


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "a " * 9000}, "input"),
        ({"max_output_tokens": 5000}, "input"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "get_date"}}, "tool_choice"),
        ({"tools": [{**TOOLS[0], "name": "two words"}]}, "tools"),
        ({"tools": TOOLS, "include": ["message.output_text.logprobs"]}, "include"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_errors_name_the_fields_of_this_api(servers, fields, param):
    body = {"model": "scripted", "input": "a", **fields}
    found = servers("hermes").running.post(body, "/v1/responses")
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: got ")


def test_an_error_of_the_template_is_one_of_the_input(client):
    fields = {"input": [CALL, {**RESULT, "output": "a"}], "tools": TOOLS, "tool_choice": "none", **GREEDY}
    with pytest.raises(openai.BadRequestError, match="no tools") as caught:
        client.responses.create(**fields)
    assert caught.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="a", model="other")
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    found = httpx.post(f"{client.base_url}responses", content=b'{"input": "\\udfff"}', headers=headers)
    assert found.json()["error"]["message"] == "input: got text that is not Unicode"
    with pytest.raises(ApiError, match="no name") as caught, own_names():
        raise ApiError(400, "no name", "temperature")
    assert caught.value.body["error"]["param"] == "temperature"


LIMITS = Limits(max_length=100, samples=4, top_logprobs=5)


def form_of(make_parser=None, **options):
    chat, repeated = read_request(Fields({"input": "a"}))
    params = read_params(chat, LIMITS, is_chat=True)
    params.response_fields = repeated
    return ResponsesFormat("m", params, str, make_parser=make_parser, **options)


def piece_of(text, finish=None):
    return Piece(text, [], [], [], [], [], [], finish, 1)


def test_an_item_ends_before_the_next_one_begins_and_a_whole_call_at_once():
    form = form_of(lambda is_early: HermesParser({"f", "g"}, is_early=is_early))

    def kinds(*piece):
        found = form.chunks(0, piece_of(*piece))
        return [(event["type"].removeprefix("response."), event["output_index"]) for event in found]

    form.first(1)
    assert kinds("Hi ") == [("output_item.added", 0), ("content_part.added", 0), ("output_text.delta", 0)]
    head, rest = '<tool_call>{"name": "f", "arguments": {"a"', ': "{é}"}'
    ended = [("output_text.done", 0), ("content_part.done", 0), ("output_item.done", 0)]
    assert kinds(head) == [*ended, ("output_item.added", 1), ("function_call_arguments.delta", 1)]
    call_ended = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(rest) == [(name, 1) for name in call_ended]
    assert kinds("}</tool_call>") == []
    broken = kinds('<tool_call>{"name": "g", "arguments": {1}}</tool_call>', "stop")
    assert broken[-1] == ("output_item.done", 2)
    (last,) = form.last(Usage(prompt=1, completion=2))
    shown = [(item["type"], item["status"]) for item in last["response"]["output"]]
    assert shown == [("message", "completed"), ("function_call", "completed"), ("function_call", "incomplete")]
    assert last["response"]["output"][1]["arguments"] == '{"a": "{é}"}'


@pytest.mark.parametrize(
    ("error", "code"), [(EngineError("a step has failed"), "server_error"), (Failed("row_full"), "invalid_prompt")]
)
def test_a_failure_in_a_stream_is_a_failed_response(error, code):
    async def pieces():
        yield 0, piece_of("Hi")
        raise error

    async def run():
        job: Any = types.SimpleNamespace(size=1, pieces=pieces)
        return [event async for event in events(job, form_of(), "req_1")]

    found = asyncio.run(run())
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    last = found[-1]
    assert (last["type"], last["request_id"], last["response"]["status"]) == ("response.failed", "req_1", "failed")
    assert last["response"]["error"]["code"] == code and last["response"]["error"]["message"]
    assert EVENT.validate_python(last)


def test_usage_has_only_what_is_counted_and_shown():
    usage = Usage(prompt=5, completion=2, cached=4)
    counts = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    none, cached = {"output_tokens_details": {"reasoning_tokens": 0}}, {"input_tokens_details": {"cached_tokens": 4}}
    pieces = [[piece_of("Hi", "stop")]]
    assert form_of().whole(pieces, usage)["usage"] == {**counts, **cached, **none}
    assert form_of(shows_cached=False).whole(pieces, usage)["usage"] == {**counts, **none}
    harmony = form_of(lambda is_early: HarmonyParser(None, is_early=is_early))
    thought = [[piece_of("<|channel|>analysis<|message|>Hm", "stop")]]
    assert harmony.whole(thought, usage)["usage"] == {**counts, **cached}


@pytest.mark.long
def test_the_loop_of_the_page(servers):
    assert run_page(servers("hermes"), "responses") == ["It is cold in Oslo."]
