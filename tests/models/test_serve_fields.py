# SPDX-License-Identifier: Apache-2.0
"""Sampling, template arguments, defaults of a checkpoint, tokens, origins and ids, with OpenAI's client."""

import asyncio
import functools
import json
import logging
import types

import httpx
import jax.numpy as jnp
import numpy as np
import openai
import pytest

import kvjax
from kvjax import Sampling
from kvjax.serving import EngineError
from kvjax.serving.sampling import sample
from models import load, recall, serve
from models.chat import Template
from models.recall import CHECKPOINT
from models.serve_app import respond
from tests.models.serve_kit import (
    KEY,
    ON,
    PEOPLE,
    WIDTH,
    Running,
    dense,
    idle,
    prompt_of,
    request_of,
    with_template,
)

PROMPT, NEW, ORIGIN = prompt_of(PEOPLE[0]), 8, "https://chat.example"
DEFAULTS = {"temperature": 0.0, "repetition_penalty": 5.0, "max_new_tokens": NEW, "min_p": None, "do_sample": False}
TEMPLATE = """{%- for message in messages %}
    {{- message.role[0] + " " + message.content | trim + " . " }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "where is bob ? " }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ "frank is in paris . " }}{% endif %}
{%- endif %}"""


@functools.cache
def answer(prompt, repetition=1.0, temperature=0.0, min_p=0.0, seed=0):
    """The words of an answer of NEW tokens, by whole sequences and arithmetic in numpy."""
    sampling = Sampling(temperature, min_p=min_p)
    model, tokens = load(CHECKPOINT)[0], recall.encode(prompt)
    length = len(tokens)
    for at in range(length, length + NEW):
        line = np.zeros((1, WIDTH), np.int32)
        line[0, :at] = tokens
        logits = np.array(dense(model, line)[0, at - 1])
        for token in set(tokens):
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        of_row = np.array([seed], np.uint32), np.array([at], np.int32)
        tokens.append(int(sample(jnp.asarray(logits)[None], sampling, *of_row).tokens[0]))
    return recall.decode(tokens[length:]).split()


def words_of(found, *, streams):
    """The words of an answer of OpenAI's client, to a completion or a chat."""
    choices = [choice for chunk in found for choice in chunk.choices] if streams else found.choices
    if hasattr(choices[0], "text"):
        return "".join(choice.text for choice in choices).split()
    parts = [choice.delta if streams else choice.message for choice in choices]
    return "".join(part.content or "" for part in parts).split()


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_min_p_and_repetition_penalty_are_those_of_the_formulas(server, client, streams):
    options = {"model": "recall", "prompt": PROMPT, "max_tokens": NEW, "stream": streams}
    cases = [
        ({"repetition_penalty": 1.4}, {"temperature": 0}, (1.4,)),
        ({"repetition_penalty": 0.5, "min_p": 0.0}, {"temperature": 0}, (0.5,)),
        ({"min_p": 0.02}, {"temperature": 5, "seed": 3}, (1.0, 5.0, 0.02, 3)),
        ({"min_p": 0.3, "repetition_penalty": 2.0}, {"temperature": 3, "seed": 4}, (2.0, 3.0, 0.3, 4)),
        ({"min_p": 1}, {"temperature": 9, "seed": 5}, ()),
    ]
    found = [
        words_of(client.completions.create(**options, **fields, extra_body={**ON, **extra}), streams=streams)
        for extra, fields, _ in cases
    ]
    assert found == [answer(PROMPT, *wanted) for *_, wanted in cases]
    assert len({tuple(words) for words in found}) > 3
    idle(server)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A server with defaults of its checkpoint, a template with arguments, and pages of one origin."""
    folder = with_template(tmp_path_factory.mktemp("served") / "recall")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    running = Running(folder, "--allowed-origins", ORIGIN)
    yield running
    running.close()


@pytest.fixture(scope="module")
def of_other(other):
    with openai.OpenAI(base_url=f"{other.url}/v1", api_key=KEY, max_retries=0) as one:
        yield one


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_requests_have_the_checkpoints_defaults(of_other, streams):
    def words(**fields):
        options = {"model": "recall", "prompt": PROMPT, "stream": streams}
        return words_of(of_other.completions.create(**options | fields), streams=streams)

    assert words(extra_body=ON) == answer(PROMPT, 5.0)
    assert words(extra_body={**ON, "repetition_penalty": 1}, max_tokens=3) == answer(PROMPT)[:3]
    whole = [3] * 1020
    assert of_other.completions.create(model="recall", prompt=whole, extra_body=ON).usage.completion_tokens == 4


CHAT = [{"role": "user", "content": "alice is in rome"}, {"role": "assistant", "content": " bob is in "}]
RENDERED = "u alice is in rome . a bob is in"
FORMS = [
    ({}, f"{RENDERED} . where is bob ? "),
    ({"add_generation_prompt": False}, f"{RENDERED} . "),
    ({"continue_final_message": True}, RENDERED),
    ({"continue_final_message": True, "add_generation_prompt": False}, RENDERED),
    ({"chat_template_kwargs": {"enable_thinking": False}}, f"{RENDERED} . where is bob ? frank is in paris . "),
    ({"chat_template_kwargs": {"enable_thinking": True}}, f"{RENDERED} . where is bob ? "),
    ({"add_special_tokens": True}, f"{RENDERED} . where is bob ? "),  # of which this tokenizer has none
]


@pytest.mark.long
@pytest.mark.parametrize(("fields", "prompt"), FORMS)
def test_a_chats_fields_make_its_prompt(other, of_other, fields, prompt):
    tokens = recall.encode(prompt)
    tokenized = other.post({"messages": CHAT, **fields}, "/tokenize").json()
    assert tokenized == {"count": len(tokens), "max_model_len": 1024, "tokens": tokens, "token_strs": None}
    for streams in (False, True):
        found = of_other.chat.completions.create(
            model="recall", messages=CHAT, stream=streams, extra_body={**ON, **fields}
        )
        assert words_of(found, streams=streams) == answer(prompt, 5.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message: got true, wanted none or false with add_generation_prompt",
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: got [1], wanted an object without add_generation_"),
        ({"chat_template_kwargs": {"messages": []}}, 'chat_template_kwargs: got {"messages": []}, wanted an object'),
        ({"add_special_tokens": 1}, "add_special_tokens: got 1, wanted true or false"),
        ({"tools": [{"type": "function"}], "chat_template": "a"}, "chat_template: got"),
        ({"prompt": "a"}, 'prompt: got "a", wanted none with messages'),
    ],
)
def test_what_no_prompt_can_be_made_of_is_refused(other, fields, message):
    found = other.post({"messages": CHAT, **fields}, "/tokenize")
    assert found.status_code == 400 and found.json()["error"]["message"].startswith(message)


def test_a_continued_message_ends_the_text_as_in_transformers():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "  yes, "}]
    for template, wanted in [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<hi><  yes, "),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<hi><yes,"),
    ]:
        assert Template(template, {}).render(messages, continue_final_message=True) == wanted
    assert messages[1]["content"] == "  yes, "
    with pytest.raises(ValueError, match="drops the last message"):
        Template("{{ messages[0].content }}", {}).render(messages, continue_final_message=True)
    with pytest.raises(ValueError, match="has no text"):
        Template("a", {}).render([{"role": "assistant"}], continue_final_message=True)
    named = Template("{{ bos_token }} {{ enable_thinking }} {{ messages | length }}", {"bos_token": "<s>"})
    values = {"enable_thinking": False, "messages": [1]}
    assert named.render(messages, values=values) == "<s> False 2"


# Tokens.


@pytest.mark.long
def test_texts_become_tokens_and_tokens_texts(server):
    tokens = recall.encode("alice is in rome .")
    found = server.post({"prompt": "alice is in rome .", "return_token_strs": True, "model": "recall"}, "/tokenize")
    pieces = ["alice", "is", "in", "rome", "."]
    assert found.json() == {"count": 5, "max_model_len": 1024, "tokens": tokens, "token_strs": pieces}
    assert server.post({"tokens": tokens}, "/detokenize").json() == {"prompt": "alice is in rome ."}
    assert server.post({"prompt": ""}, "/tokenize").json()["count"] == 0
    for path, body, status, param in [
        ("/tokenize", {"prompt": [1]}, 400, "prompt"), ("/tokenize", {"prompt": "a", "model": "b"}, 404, "model"),
        ("/tokenize", {}, 400, "prompt"), ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"), ("/detokenize", {}, 400, "tokens"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"), ("/tokenize", {"messages": []}, 400, "messages"),
    ]:  # fmt: skip
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        found = httpx.post(f"{server.url}{path}", content=json.dumps(body), headers=headers)
        assert (found.status_code, found.json()["error"]["param"]) == (status, param)
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": "alice"}).status_code == 401
    assert httpx.get(f"{server.url}/version").json() == {"version": kvjax.__version__}


# Ids of requests.


@pytest.mark.long
@pytest.mark.parametrize("own", ["abc-1.2_3:4/5+6=@", "x" * 128])
def test_a_request_keeps_its_id(client, own):
    options = {"model": "recall", "prompt": "alice", "max_tokens": 1, "extra_headers": {"X-Request-Id": own}}
    assert client.completions.create(**options)._request_id == own
    with client.completions.with_streaming_response.create(**options, stream=True) as response:
        assert response.headers["x-request-id"] == own
        response.read()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**options, temperature=-1)
    assert caught.value.request_id == own == caught.value.response.json()["request_id"]


@pytest.mark.long
@pytest.mark.parametrize("hostile", [None, "", "a b", 'a"b', "x" * 129, "x" * 10_240, "a\tb", "\xe9", "a;b"])
def test_a_missing_or_hostile_id_is_replaced(server, hostile):
    given = {} if hostile is None else {"x-request-id": hostile.encode("latin-1")}
    ids = {
        httpx.request(method, f"{server.url}{path}", headers=given).headers["x-request-id"]
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("GET", "/nothing"), ("POST", "/health"))
    }
    assert len(ids) == 4 and all(len(one) == 32 and one.isalnum() for one in ids)


@pytest.mark.long
def test_an_id_with_a_line_break_or_two_ids_reach_no_log(server):
    for headers in (["x-request-id: a\nb: c"], ["x-request-id: a", "x-request-id: b"]):
        with server.connect() as connection:
            connection.sendall(request_of("/v1/completions", {"prompt": "alice", "max_tokens": 1}, *headers))
            head = connection.recv(1 << 16).partition(b"\r\n\r\n")[0].lower()
        (line,) = [line for line in head.split(b"\r\n") if line.startswith(b"x-request-id: ")] or [b""]
        assert line not in (b"x-request-id: a", b"x-request-id: b") or headers == ["x-request-id: a\nb: c"]


def test_a_failure_of_the_server_is_logged_with_its_id(caplog):
    request = types.SimpleNamespace(state=types.SimpleNamespace(request_id="abc"))
    with caplog.at_level(logging.ERROR):
        response = asyncio.run(respond(request, EngineError("broken")))
    assert json.loads(response.body)["request_id"] == "abc" and response.status_code == 503
    assert [record.getMessage() for record in caplog.records] == ["request abc: EngineError: broken"]


# Pages of other origins.


@pytest.mark.long
def test_pages_of_an_allowed_origin_get_answers_errors_and_preflights(other, server):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    found = httpx.options(f"{other.url}/v1/chat/completions", headers={"origin": ORIGIN, **ask})
    assert found.status_code == 200 and found.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in found.headers["access-control-allow-methods"]
    assert found.headers["access-control-allow-headers"] == "authorization,content-type"
    bodies = [({"prompt": "alice", "max_tokens": 1}, 200), ({"prompt": 1}, 400), ({"model": "b"}, 404)]
    for body, status in [*bodies, ({"prompt": "alice", "max_tokens": 1, "stream": True}, 200)]:
        found = other.post(body, origin=ORIGIN)
        assert (found.status_code, found.headers.get("access-control-allow-origin")) == (status, ORIGIN)
        assert found.headers["access-control-expose-headers"] == "x-request-id"
        assert "access-control-allow-origin" not in other.post(body, origin="https://evil.example").headers
        assert "access-control-allow-origin" not in server.post(body, origin=ORIGIN).headers
    found = httpx.get(f"{other.url}/v1/models", headers={"origin": ORIGIN})
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (401, ORIGIN)
    found = httpx.options(f"{other.url}/v1/completions", headers={"origin": "https://evil.example", **ask})
    assert found.status_code == 400 and "access-control-allow-origin" not in found.headers
    assert (
        "access-control-allow-origin" not in httpx.options(f"{server.url}/health", headers={"origin": ORIGIN}).headers
    )
    refused = httpx.get(f"{other.url}/health", headers={"origin": ORIGIN, "host": "evil.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (403, ORIGIN)


# The options.


def defaults_of(folder, *options):
    parser = serve.make_parser()
    return serve._defaults(parser, parser.parse_args(["--checkpoint", str(folder), *options]))


def test_the_server_says_which_defaults_requests_have(tmp_path, capsys):
    config = {
        "eos_token_id": [1, 2],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_length": 9,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert defaults_of(tmp_path) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    line = "defaults of requests: temperature 0.6, top_p 0.95, top_k 20 (generation_config.json)\n"
    assert capsys.readouterr().err == line
    for folder, options in ((tmp_path, ["--generation-config", "none"]), (CHECKPOINT, [])):
        assert defaults_of(folder, *options) == {}
        assert capsys.readouterr().err == "defaults of requests: the API's\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature: got -1, wanted a number from 0 to 100"),
        ({"top_p": 0}, "top_p: got 0.0, wanted a number above 0"),
        ({"repetition_penalty": True}, "repetition_penalty: got true, wanted a number from 0.01 to 100"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, wanted an integer from 1 to 1073741824"),
    ],
)
def test_defaults_that_no_request_could_have_are_named(tmp_path, capsys, fields, message):
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    with pytest.raises(SystemExit):
        defaults_of(tmp_path)
    assert f"--generation-config: {tmp_path}/generation_config.json: {message}" in capsys.readouterr().err
    assert defaults_of(tmp_path, "--generation-config", "none") == {}


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://a b", ""])
def test_what_is_no_origin_is_refused(origin, capsys):
    with pytest.raises(SystemExit):
        serve.make_parser().parse_args(["--checkpoint", "a", "--allowed-origins", origin])
    assert "--allowed-origins: got" in capsys.readouterr().err
