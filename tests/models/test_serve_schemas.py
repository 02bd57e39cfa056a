# SPDX-License-Identifier: Apache-2.0
"""Answers under schemas, patterns and choices, with OpenAI's client and a model that writes at random."""

import concurrent.futures
import contextlib
import json
import math
import re
import time
from typing import Literal

import hypothesis
import hypothesis.strategies as st
import jsonschema
import openai
import pydantic
import pytest

from tests.compiles import no_compiles
from tests.drive import ROOT
from tests.grammar_kit import patterns, schemas
from tests.models.schema_kit import RandomServer
from tests.models.scripted_kit import FAMILIES
from tests.models.serve_kit import KEY, idle, request_of

pytestmark = pytest.mark.long

SLOTS = 4
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DATE, COLORS = r"\d{4}-\d\d?", ["red", "green", "grey"]


def format_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def is_valid(schema, text):
    jsonschema.validate(json.loads(text), schema)
    return True


# The fields of each way to ask for a form, and whether a text has it.
FORMS = {
    "json_schema": ({"response_format": format_of(PERSON)}, lambda text: is_valid(PERSON, text)),
    "json_object": ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    "guided_json": ({"extra_body": {"guided_json": PERSON}}, lambda text: is_valid(PERSON, text)),
    "guided_json's text": ({"extra_body": {"guided_json": json.dumps(PERSON)}}, lambda text: is_valid(PERSON, text)),
    "guided_regex": ({"extra_body": {"guided_regex": DATE}}, lambda text: re.fullmatch(DATE, text)),
    "guided_choice": ({"extra_body": {"guided_choice": COLORS}}, COLORS.__contains__),
    "json": ({"extra_body": {"structured_outputs": {"json": PERSON}}}, lambda text: is_valid(PERSON, text)),
    "regex": ({"extra_body": {"structured_outputs": {"regex": DATE}}}, lambda text: re.fullmatch(DATE, text)),
    "choice": ({"extra_body": {"structured_outputs": {"choice": COLORS}}}, COLORS.__contains__),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Starts a server of a family, or returns the one that runs."""
    with contextlib.ExitStack() as stack:
        running = dict[str, RandomServer]()

        def start(family):
            if family not in running:
                options = ("--schemas", str(SLOTS), "--top-logprobs", "5")
                running[family] = RandomServer(tmp_path_factory.mktemp(family), family, *options)
                stack.callback(running[family].close)
            return running[family]

        yield start
        for server in running.values():
            idle(server.running)
            assert_free(server)


@pytest.fixture
def writer(servers):
    return servers("hermes")


def assert_free(server):
    server.running.wait_for(lambda: not any(slot.users for slot in server.schemas._slots))


def joined(chunks):
    """The text of a stream, and how it has ended."""
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_stops_has_the_form(writer, form, streams):
    fields, has_form = FORMS[form]
    texts = []
    for seed in range(3):
        found = writer.ask(max_tokens=300, seed=seed, stream=streams, **fields)
        text, finish = joined(found) if streams else (found.choices[0].message.content, found.choices[0].finish_reason)
        assert finish in ("stop", "length")
        texts += [text] * (finish == "stop")
        assert finish != "stop" or has_form(text), text
    assert texts


@pytest.mark.parametrize("form", ["json", "regex", "choice"])
def test_completions_have_the_form_in_each_sample_of_each_prompt(writer, form):
    fields, has_form = FORMS[form]
    found = writer.complete(["hi", "there"], n=4, seed=3, **fields)
    assert len(found.choices) == 8
    texts = [choice.text for choice in found.choices if choice.finish_reason == "stop"]
    assert texts and all(map(has_form, texts)) and len({*texts}) > 1


class Reply(pydantic.BaseModel):
    """A model of pydantic's, as users have it."""

    mood: Literal["good", "bad"]
    count: int = pydantic.Field(ge=-3, le=3)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=3)
    inner: "Reply | None" = None


class Flat(pydantic.BaseModel):
    """One whose answers are short."""

    mood: Literal["good", "bad"]
    count: int = pydantic.Field(ge=-3, le=3)
    is_new: bool | None


def test_the_client_parses_models_of_pydantic(writer):
    messages = [{"role": "user", "content": "hi"}]
    for model in (Flat, Reply):
        found = writer.client.chat.completions.parse(
            model="random", messages=messages, response_format=model, max_tokens=1000, seed=5
        )
        parsed = found.choices[0].message.parsed
        assert isinstance(parsed, model) and parsed.mood in ("good", "bad") and -3 <= parsed.count <= 3
    with writer.client.chat.completions.stream(
        model="random", messages=messages, response_format=Flat, max_tokens=500, seed=6
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Flat)


def test_the_code_of_the_page_runs(writer):
    page = (ROOT / "docs/howto/serving.md").read_text()
    code = next(block for block in re.findall(r"^```python3\n(.*?)^```$", page, re.M | re.S) if "pydantic" in block)
    code = code.replace("http://127.0.0.1:8000", writer.running.url).replace('"none"', f'"{KEY}"')
    printed = []
    names = {"print": printed.append, "__name__": "page"}
    exec(code.replace("qwen3", "random"), names)
    names["client"].close()
    place, choice = printed
    assert 1 <= place.stars <= 5 and isinstance(place.city, str) and choice in ("yes", "no")


def test_responses_have_the_form_and_their_client_parses_it(writer):
    found = writer.client.responses.parse(model="random", input="hi", text_format=Flat, max_output_tokens=500)
    assert isinstance(found.output_parsed, Flat) and found.text.format.type == "json_schema"
    with writer.client.responses.stream(model="random", input="hi", text_format=Flat, max_output_tokens=500) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Flat)
    wrong = {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {"a": {"not": {}}}}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema\.properties\.a\.not: ") as caught:
        writer.client.responses.create(model="random", input="hi", text={"format": wrong})
    assert caught.value.param == "text.format"


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_of_responses_have_the_tools_arguments(servers, family):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    named = {"type": "function", "name": "save"}
    for choice in ("required", named):
        found = servers(family).client.responses.create(
            model="random", input="hi", tools=tools, tool_choice=choice, max_output_tokens=400
        )
        calls = [item for item in found.output if item.type == "function_call" and item.status == "completed"]
        assert found.status == "incomplete" or calls
        assert [tool.strict for tool in found.tools] == [True, False]
        for call in calls:
            arguments = json.loads(call.arguments)
            assert call.name != "save" or jsonschema.Draft202012Validator(PERSON).is_valid(arguments)


def test_twenty_schemas_at_once_share_the_places(writer):
    def ask(number):
        schema = {"type": "object", "properties": {f"k{number}": {"const": number}}, "required": [f"k{number}"]}
        schema["additionalProperties"] = False
        found = writer.ask(response_format=format_of(schema), max_tokens=60, n=2, seed=number)
        return [json.loads(choice.message.content) for choice in found.choices]

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, [*range(20), *range(20)]))
    assert answers == [[{f"k{number % 20}": number % 20}] * 2 for number in range(40)]


def test_a_new_schema_compiles_nothing(writer):
    writer.complete(extra_body={"guided_regex": "first"})
    with no_compiles():
        for number in range(2 * SLOTS):
            assert writer.complete(extra_body={"guided_regex": f"new{number}"}).choices[0].text == f"new{number}"


def test_a_request_without_a_form_has_the_same_tokens_as_alone(writer):
    def plain(seed):
        found = writer.ask("plain", max_tokens=60, seed=seed, logprobs=True, extra_body={"cache_salt": f"s{seed}"})
        return [(entry.token, entry.logprob) for entry in found.choices[0].logprobs.content]

    alone = [plain(seed) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        fields = FORMS["json_schema"][0]
        others = [pool.submit(writer.ask, max_tokens=200, seed=seed, n=2, **fields) for seed in range(4)]
        beside = list(pool.map(plain, range(4)))
        for other in others:
            other.result()
    assert [[token for token, _ in tokens] for tokens in beside] == [[token for token, _ in tokens] for tokens in alone]
    for one, other in zip(beside, alone, strict=True):
        assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=1e-4)


def test_log_probabilities_are_of_the_tokens_that_the_form_allows(writer):
    found = writer.ask(
        extra_body={"guided_choice": ["ac", "bd"]}, logprobs=True, top_logprobs=5, seed=1, max_tokens=9
    ).choices[0]
    first, second = found.logprobs.content
    assert found.message.content == first.token + second.token
    likely = {entry.token: entry.logprob for entry in first.top_logprobs if entry.logprob > -1000}
    assert likely.keys() == {"a", "b"} and sum(map(math.exp, likely.values())) == pytest.approx(1, 1e-3)
    assert second.logprob == pytest.approx(0, abs=1e-5)


def test_stop_strings_and_stop_token_ids_end_an_answer_before_its_form(writer):
    found = writer.ask(extra_body={"guided_regex": "(ab)+c{9}"}, stop=["cc"], seed=2, max_tokens=500).choices[0]
    assert found.finish_reason == "stop" and re.fullmatch("(ab)+", found.message.content)
    body = {"guided_regex": "(ab)+c{9}", "stop_token_ids": [writer.token("c")]}
    found = writer.ask(extra_body=body, seed=2, max_tokens=500).choices[0]
    assert found.finish_reason == "stop" and re.fullmatch("(ab)+", found.message.content)


def test_penalties_and_biases_are_served_with_a_form(writer):
    body = {"guided_choice": ["a", "b", "c"], "repetition_penalty": 1.5}
    token = str(writer.token("b"))
    for _ in range(3):
        found = writer.ask(extra_body=body, logit_bias={token: 100}, frequency_penalty=1, max_tokens=5)
        assert found.choices[0].message.content == "b"


WRONG = {
    "a place in a schema": (
        {"response_format": format_of({"type": "object", "properties": {"a": {"not": {}}}})},
        "response_format",
        "response_format.json_schema.schema.properties.a.not: ",
    ),
    "a pattern": ({"guided_regex": "(?=a)b"}, "guided_regex", "guided_regex: got a lookahead"),
    "no text": ({"guided_regex": r"[^\x00-\U0010ffff]"}, "guided_regex", "guided_regex: "),
    "two forms": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "none with guided_choice"),
    "too many states": ({"guided_json": {"type": "string", "maxLength": 100_000}}, "guided_json", "states"),
    "ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "false with guided_regex"),
    "min_tokens": ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "0 with guided_regex"),
    "another field": ({"structured_outputs": {"grammar": "root"}}, "structured_outputs", "structured_outputs.grammar"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_forms_that_are_not_served_are_refused_by_name(writer, wrong):
    body, param, message = WRONG[wrong]
    with pytest.raises(openai.BadRequestError) as caught:
        writer.ask(extra_body=body, max_tokens=5)
    assert caught.value.param == param and message in caught.value.message, caught.value.message


HOSTILE = {
    "counts": {"guided_regex": "(a|b)*a(a|b){20}"},
    "nested counts": {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    "long": {"guided_regex": "a" * 200_000},
    "alternatives": {"guided_json": {"allOf": [{"anyOf": [{"minLength": i} for i in range(20)]} for _ in range(20)]}},
    "depth": {"guided_json": json.loads('{"properties":{"a":' * 60 + "{}" + "}}" * 60)},
    "itself": {"guided_json": {"$ref": "#"}},
    "wide": {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
    "choices": {"guided_choice": [f"{i:x}" * 40 for i in range(2000)]},
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_form_ends_in_time_and_others_are_served_meanwhile(writer, hostile):
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(writer.ask, extra_body=HOSTILE[hostile], max_tokens=5)
        slowest = 0.0
        while not asked.done():
            before = time.monotonic()
            assert writer.complete(max_tokens=2).choices[0].finish_reason in ("stop", "length")
            slowest = max(slowest, time.monotonic() - before)
        with contextlib.suppress(openai.BadRequestError):
            asked.result()
    assert time.monotonic() - began < 30 and slowest < 5


def test_a_client_that_goes_away_gives_its_place_back(writer):
    body = {
        "model": "random",
        "prompt": "x",
        "max_tokens": 1500,
        "guided_regex": "a*b",
        "logit_bias": {str(writer.token("b")): -100},
    }
    for streams in (False, True):
        with writer.running.connect() as connection:
            connection.sendall(request_of("/v1/completions", {**body, "stream": streams}))
            writer.running.wait_for(lambda: any(slot.users for slot in writer.schemas._slots))
        assert_free(writer)
    idle(writer.running)


def test_a_request_waits_for_a_place_and_leaves_the_queue_with_its_client(writer):
    found = writer.schemas
    with contextlib.ExitStack() as stack:
        held = [found._slots[number] for number in range(SLOTS)]
        for slot in held:  # as requests would
            slot.users += 1
        keys = [slot.key for slot in held]
        with writer.running.connect() as connection:
            body = {"model": "random", "prompt": "x", "guided_regex": "waits"}
            connection.sendall(request_of("/v1/completions", body))
            writer.running.wait_for(lambda: found._num_waiting == 1)
        writer.running.wait_for(lambda: found._num_waiting == 0)
        assert [slot.key for slot in held] == keys
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        waits = pool.submit(writer.complete, extra_body={"guided_regex": "waits"})
        writer.running.wait_for(lambda: found._num_waiting == 1)
        writer.release(held[2])
        assert waits.result().choices[0].text == "waits" and held[2].key == ("regex", '"waits"')
        for slot in held[:2] + held[3:]:
            writer.release(slot)


def test_a_server_without_schemas_refuses_them_with_the_reason(client):
    with pytest.raises(openai.BadRequestError, match="guided_regex: no schemas are served: tokenizer: ") as caught:
        client.completions.create(model="recall", prompt="alice", extra_body={"guided_regex": "a"})
    assert caught.value.param == "guided_regex"


TOOLS = [
    {"type": "function", "function": {"name": "save", "strict": True, "parameters": PERSON}},
    {"type": "function", "function": {"name": "now"}},
]


def checked_calls(message):
    for call in message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        if call.function.name == "save":
            jsonschema.validate(arguments, PERSON)
        else:
            assert call.function.name == "now" and isinstance(arguments, dict)
        yield call.function.name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", ["required", "save", "now"])
def test_a_forced_call_has_the_tools_arguments(servers, family, choice):
    server, names = servers(family), []
    named = {"type": "function", "function": {"name": choice}}
    for seed in range(4):
        found = server.ask(
            tools=TOOLS, tool_choice=choice if choice == "required" else named, max_tokens=400, seed=seed
        ).choices[0]
        calls = list(checked_calls(found.message))
        if found.finish_reason == "tool_calls":
            assert calls and (choice == "required" or calls == [choice]) and not found.message.content
            names += calls
        else:
            assert found.finish_reason == "length"
    assert names


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_are_streamed(servers, family):
    server = servers(family)
    chunks = list(server.ask(tools=TOOLS, tool_choice="required", max_tokens=400, seed=1, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    whole = server.ask(tools=TOOLS, tool_choice="required", max_tokens=400, seed=1).choices[0]
    texts = {}
    for delta in deltas:
        texts[delta.index] = texts.get(delta.index, "") + (delta.function.arguments or "")
    assert [*texts.values()] == [call.function.arguments for call in whole.message.tool_calls or ()]
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


@pytest.mark.parametrize("family", FAMILIES)
def test_a_strict_tool_that_the_model_may_call_gets_arguments_of_its_schema(servers, family):
    server = servers(family)
    for seed in range(6):
        found = server.ask(tools=TOOLS, max_tokens=150, seed=seed).choices[0]
        list(checked_calls(found.message))


@pytest.mark.parametrize("family", FAMILIES)
def test_with_tools_an_answer_has_the_form_or_is_a_call(servers, family):
    server, kinds = servers(family), set()
    for seed in range(8):
        found = server.ask(tools=TOOLS, response_format=format_of(PERSON), max_tokens=400, seed=seed).choices[0]
        calls = list(checked_calls(found.message))
        kinds.add(found.finish_reason)
        if found.finish_reason == "stop":
            assert not calls and is_valid(PERSON, found.message.content)
    assert kinds & {"stop", "tool_calls"}


REFUSALS = "no text matches|with other keywords about|states|classes|could belong|entries"


def answered(server, body, seed):
    """The texts of the answers that have ended by themselves; a form that is too large is left out."""
    try:
        found = server.complete(n=2, seed=seed, max_tokens=100, extra_body=body)
    except openai.BadRequestError as error:
        if not re.search(REFUSALS, error.message):
            raise
        hypothesis.reject()
    return [choice.text for choice in found.choices if choice.finish_reason == "stop"]


SEEDS = st.integers(0, 2**31)
CHECKS = [hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow]
BY_DAY = hypothesis.settings(max_examples=20, deadline=None, suppress_health_check=CHECKS)
BY_NIGHT = hypothesis.settings(BY_DAY, max_examples=500, derandomize=False)


def check_schema(server, schema, seed):
    for text in answered(server, {"guided_json": schema}, seed):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def check_pattern(server, pattern, seed):
    for text in answered(server, {"guided_regex": pattern}, seed):
        assert re.fullmatch(pattern, text, re.ASCII), text


@hypothesis.settings(BY_DAY)
@hypothesis.given(schema=schemas(), seed=SEEDS)
def test_each_answer_under_a_drawn_schema_is_valid(writer, schema, seed):
    check_schema(writer, schema, seed)


@hypothesis.settings(BY_DAY)
@hypothesis.given(pattern=patterns(), seed=SEEDS)
def test_each_answer_under_a_drawn_pattern_matches(writer, pattern, seed):
    check_pattern(writer, pattern, seed)


@pytest.mark.slow
@hypothesis.settings(BY_NIGHT)
@hypothesis.given(schema=schemas(), seed=SEEDS)
def test_each_answer_under_a_drawn_schema_is_valid_at_length(writer, schema, seed):
    check_schema(writer, schema, seed)


@pytest.mark.slow
@hypothesis.settings(BY_NIGHT, max_examples=200)
@hypothesis.given(pattern=patterns(), seed=SEEDS)
def test_each_answer_under_a_drawn_pattern_matches_at_length(writer, pattern, seed):
    check_pattern(writer, pattern, seed)
