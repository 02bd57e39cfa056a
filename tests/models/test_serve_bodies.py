# SPDX-License-Identifier: Apache-2.0
"""Malformed and hostile requests: each gets an answer or an error of the API, and leaves the engine as it was."""

import contextlib
import gzip
import json
import re
import socket

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

from models import openai_fields
from tests.models.serve_kit import JSON, KEY, ON, PEOPLE, prompt_of, request_of


@pytest.fixture(scope="module")
def client(server):
    """A client that sends whatever it is told to."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=20) as one:
        yield one


def assert_error(response):
    """Requires an error in the API's form, by the client's fault, without a traceback."""
    assert 400 <= response.status_code < 500, (response.status_code, response.text)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and isinstance(error["message"], str)
    assert isinstance(error["type"], str) and "Traceback" not in error["message"] and 'File "' not in error["message"]
    assert len(error["message"]) < 1000


def assert_answer(response):
    """Requires an answer in the API's form, whole or by events."""
    if response.headers["content-type"].startswith("text/event-stream"):
        *lines, last = [line for line in response.text.split("\n") if line]
        assert last == "data: [DONE]" and all(line.startswith("data: {") for line in lines)
        found = [json.loads(line.removeprefix("data: ")) for line in lines]
    else:
        found = [response.json()]
    finishes = {}
    for body in found:
        assert body.keys() >= {"id", "object", "created", "model", "choices"} and body["model"] == "recall"
        for choice in body["choices"]:
            assert choice.keys() >= {"index", "logprobs", "finish_reason"}
            finishes[choice["index"]] = choice["finish_reason"]
    assert [*range(len(finishes))] == sorted(finishes) and set(finishes.values()) <= {"stop", "length", "tool_calls"}


def assert_sound(response):
    if response.status_code == 200:
        assert_answer(response)
    else:
        assert_error(response)


def assert_idle(server, client):
    """Requires that nothing runs any more, and that the server is well."""
    server.wait_for(lambda: server.engine.running == server.engine.waiting == 0)
    assert client.get("/health").status_code == 200


# Bodies by the API's fields: the text of JSON, so that there can be what `json.dumps` does not write.

ODD = (
    "NaN", "Infinity", "-Infinity", "1e999", "-0", "-0.0", "1e-320", "9" * 400, "9" * 5000, '"\\ud800"', '"\\u0000"',
    *("[" * depth + "]" * depth for depth in (400, 5000)), '{"a": ' * 400 + "1" + "}" * 400, '{"a": 1, "a": [2]}',
    "tru", "'a'", '""', "null", "true", "[null]", "[[]]", "[{}]", "{}", '{"type": "text"}', '"' + "a " * 2000 + '"',
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
WRONG = st.sampled_from(ODD) | VALUES.map(json.dumps)
TOKENS = st.lists(st.integers(0, 248) | st.integers(-2, 2**70), max_size=5)
TEXT = st.sampled_from(["alice is in", "where is bob ?", "a", "", "\U0001f600 é"])
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": TEXT})
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "\ud800"])
FUNCTION = st.fixed_dictionaries(
    {"name": TEXT | st.just("f")}, optional={"arguments": TEXT | st.just("{}"), "parameters": VALUES, "strict": VALUES}
)
TOOL = st.fixed_dictionaries({"type": st.sampled_from(["function", "custom"]), "function": FUNCTION}) | VALUES
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE, "content": TEXT | st.none() | st.lists(PART, max_size=2)},
    optional={"tool_calls": st.lists(TOOL, max_size=2), "tool_call_id": TEXT, "reasoning_content": TEXT},
)
SMALL, BIG = st.integers(1, 8), st.integers(-(2**70), 2**70)
FIELDS = {
    "model": st.sampled_from(["recall", "other", "\ud800"]),
    "prompt": TEXT | TOKENS | st.lists(TEXT | TOKENS, max_size=3),
    "messages": st.lists(MESSAGE, max_size=3),
    "max_tokens": st.integers(0, 8) | BIG,
    "max_completion_tokens": SMALL | BIG,
    "temperature": st.floats(0, 3) | st.floats(),
    "top_p": st.floats(0, 1) | st.floats(),
    "top_k": st.integers(-1, 9) | BIG,
    "min_tokens": st.integers(0, 9) | BIG,
    "seed": BIG,
    "n": st.integers(0, 10) | BIG,
    "best_of": st.integers(0, 3),
    "stop": TEXT | st.lists(TEXT, max_size=6),
    "stop_token_ids": TOKENS | st.just([*range(20)]),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 9) | st.booleans(),
    "echo": st.booleans(),
    "prompt_logprobs": st.integers(0, 9),
    "top_logprobs": st.integers(0, 9),
    "priority": st.integers(-3, 3) | BIG,
    "cache_salt": TEXT | st.sampled_from(["kvjax-weights:1", "\ud800", "s" * 300]),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {"include_usage": st.booleans() | st.integers()}, optional={"continuous_usage_stats": st.booleans()}
    ),
    "frequency_penalty": st.sampled_from([0, 0.5, 3]),
    "presence_penalty": st.sampled_from([0, -0.5, 3]),
    "logit_bias": st.dictionaries(st.integers(0, 9).map(str), st.integers(-200, 200), max_size=2),
    "tools": st.lists(TOOL, max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required"]) | TOOL,
    "parallel_tool_calls": st.booleans(),
    "user": TEXT,
    # Of the fields that are not served a value that is taken, and others that are not; see `openai_fields.REFUSED`.
    **{name: st.sampled_from([None, *allowed, "x", 3, {"a": 1}]) for name, allowed in openai_fields.REFUSED.items()},
    **dict.fromkeys(openai_fields.HARMLESS, VALUES),
    "add_special_tokens": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "tools", "role"]), VALUES, max_size=2),
    "min_p": st.sampled_from([0, 0.1, 1, 1.5]),
    "repetition_penalty": st.sampled_from([1, 0.01, 1.3, 0, 1e-9]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | VALUES,
    "structured_outputs": st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar"]), VALUES, max_size=2),
    "guided_json": VALUES,
    "guided_json_object": st.booleans(),
    "guided_regex": TEXT,
    "guided_choice": st.lists(TEXT, max_size=3),
}
LENGTHS = {"max_tokens", "max_completion_tokens"}  # without one of them an answer to a chat is long


@st.composite
def bodies(draw):
    """A path, and a body: of fields that are right, of which some are wrong, absent, null or given twice."""
    is_chat = draw(st.booleans())
    pairs = [("max_tokens", "4"), ("temperature", "0")]
    pairs += [("messages", '[{"role": "user", "content": "bob"}]')] if is_chat else [("prompt", '"alice is in"')]
    for name in draw(st.lists(st.sampled_from([*FIELDS]), max_size=6)):
        value = draw(
            st.one_of(FIELDS[name].map(json.dumps), WRONG)
            if draw(st.integers(0, 3)) == 0
            else FIELDS[name].map(json.dumps)
        )
        if name in LENGTHS and value == "null":
            continue
        pairs.append((name, value))
    absent = draw(st.sampled_from([None, None, None, "prompt", "messages"]))
    text = ", ".join(f"{json.dumps(name)}: {value}" for name, value in pairs if name != absent)
    return f"/v1/{'chat/' if is_chat else ''}completions", f"{{{text}}}".encode()


@pytest.mark.long
@hypothesis.given(st.lists(bodies(), min_size=5, max_size=5))
def test_every_body_gets_an_answer_or_an_error_of_the_api(server, client, requests):
    for path, body in requests:
        assert_sound(client.post(path, content=body))
    assert_idle(server, client)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_field_with_each_odd_value_gets_an_answer_or_an_error(server, client, path):
    base = {"max_tokens": "4", "temperature": "0", "prompt": '"alice is in"'}
    base |= {"messages": '[{"role": "user", "content": "bob"}]'}
    for name in FIELDS:
        for value in ODD:
            if name in LENGTHS and value == "null":
                continue
            text = ", ".join(f"{json.dumps(key)}: {one}" for key, one in {**base, name: value}.items())
            assert_sound(client.post(path, content=f"{{{text}}}".encode()))
    assert_idle(server, client)


@pytest.mark.long
@pytest.mark.parametrize("value", [1e-30, 1e-38, 1e-40, 1e-45, 1e-320])
def test_tiny_temperatures_and_shares_take_the_likeliest_token(client, value):
    def text(**fields):
        body = {"prompt": prompt_of(PEOPLE[0]), "max_tokens": 8, "seed": 3, "temperature": 1, **ON, **fields}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    assert text(temperature=value) == text(temperature=0)
    if value >= 1e-45:
        assert text(top_p=value) == text(temperature=0)


# Requests that are no bodies of JSON, or that go elsewhere.

WHOLE = json.dumps({"prompt": "alice is in", "max_tokens": 4, "temperature": 0}).encode()


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (WHOLE, {"content-type": "Application/JSON; charset=utf-8"}, 200),
        (WHOLE, {"content-type": "text/plain"}, 415),  # as pages of other sites can have browsers send it
        (WHOLE, {"content-type": "multipart/form-data; boundary=x"}, 415),
        (WHOLE, {"content-type": "application/x-www-form-urlencoded"}, 415),
        (WHOLE, {"content-type": "text/plain; application/json"}, 415),
        (WHOLE, {"content-type": ""}, 415),
        (WHOLE, {"accept": "text/html"}, 200),
        ([WHOLE[:9], WHOLE[9:]], {}, 200),
        ([b"a"] * 2000, {}, 400),
        ([b"a" * 1000] * 101, {}, 413),
        (b"a" * 100_001, {}, 413),
        (WHOLE.decode().encode("utf-16"), {}, 200),  # as `json.loads` detects it
        ("é".encode("latin-1"), {}, 400),
        (b"\xff\xfe\xff", {}, 400),
        (b"\x00", {}, 400),
        (gzip.compress(WHOLE, mtime=0), {"content-encoding": "gzip"}, 400),
        (b"", {}, 400),
        (b"null", {}, 400),
        (b"[" * 99_999, {}, 400),
        (b'{"a": ' * 16_000, {}, 400),
        (b"{}", {}, 400),
        (b'"' + WHOLE + b'"', {}, 400),
        (WHOLE + WHOLE, {}, 400),
        (b"\xef\xbb\xbf" + WHOLE, {}, 200),
        (WHOLE, {"authorization": "Bearer"}, 401),
        (WHOLE, {"authorization": "Basic !"}, 401),
        (WHOLE, {"authorization": "Basic //79"}, 401),
        (WHOLE, {"authorization": b"Bearer \xff\xfe"}, 401),
        (WHOLE, {"authorization": ""}, 401),
    ],
)
def test_bodies_and_headers_that_are_odd(server, client, content, headers, status):
    response = client.post("/v1/completions", content=content, headers=headers)
    assert_sound(response)
    assert response.status_code == status
    assert_idle(server, client)


PATHS = (
    "/", "/v1", "/v1/", "/v1/models/", "/v1/models/other", "/v1/models/../completions",
    "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%2e%2e/%2e%2e/etc/passwd", "/v1/models/%ff", "/v1/models/%00",
    "/v1/models/recall%00", "/v1/models/" + "a" * 5000, "//v1/models", "/v1/models//recall", "/etc/passwd",
    "/v1/embeddings", "/%", "/cache/..", "/v1/models/%F0%9F%98%80", "/v1/models/{name}",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"])
def test_other_paths_and_methods_are_errors(server, client, method):
    paths = [*PATHS, *(["/v1/completions"] if method != "POST" else []), *(["/health"] if method[-1] in "TE" else [])]
    for path in paths:
        if method == "GET" and path == "/health":
            continue
        response = client.request(method, path)
        assert 400 <= response.status_code < 500, (path, response.status_code)
        if method not in ("HEAD", "BREW"):  # uvicorn itself may refuse one that is no method
            assert_error(response)
    assert_idle(server, client)


@pytest.mark.long
def test_a_slash_behind_a_path_leads_to_the_one_without(client):
    response = client.post("/v1/completions/", content=WHOLE)
    assert (response.status_code, response.headers["location"]) == (307, str(client.base_url.join("/v1/completions")))
    assert_answer(client.post("/v1/completions/", content=WHOLE, follow_redirects=True))


# What no HTTP client sends.

BODY = {"prompt": "alice is in", "max_tokens": 4, "temperature": 0}
PATH = "/v1/completions"


def answer_to(server, data, *, ends=False):
    """All bytes that the server sends on a connection that begins with some, until it or the client ends it."""
    found = b""
    with server.connect() as connection:
        connection.sendall(data)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        connection.settimeout(3)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while new := connection.recv(1 << 16):
                found += new
                if found.endswith(b"}"):
                    break
    return found


def chunks(*parts):
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


CHUNKED = "transfer-encoding: chunked"


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request_of(PATH, BODY), 200),
        (request_of(PATH, chunks(WHOLE[:5], WHOLE[5:], b""), CHUNKED), 200),
        (request_of(PATH, chunks(WHOLE[:5], b""), CHUNKED), 400),
        (request_of(PATH, b"x\r\n" + WHOLE, CHUNKED), 400),
        (request_of(PATH, WHOLE, "content-length: 10"), 400),
        (request_of(PATH, WHOLE, "content-length: -1"), 400),
        (request_of(PATH, WHOLE, "content-length: x"), 400),
        (request_of(PATH, WHOLE, "content-length: \N{ARABIC-INDIC DIGIT FIVE}"), 400),
        (request_of(PATH, WHOLE, "content-length: 99999999999999999999"), 4),
        (request_of(PATH, WHOLE, "content-length: 100001"), 413),
        (request_of(PATH, WHOLE, "content-length: 5", "content-length: 6"), 400),
        (request_of(PATH, b"", "content-length: 0"), 400),
        (f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n{JSON}\r\n\r\n".encode(), 400),
        (f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n\r\n".encode(), 415),
        (f"POST {PATH} HTTP/1.1\r\n\r\n".encode(), 4),
        (f"POST {PATH} HTTP/9.9\r\nhost: localhost\r\n\r\n".encode(), 4),
        (b"POST /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", 4),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 4),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"hello\r\n\r\n", 400),
    ],
)
def test_bytes_that_no_client_sends(server, client, data, status):
    """The status begins with these digits: the two parsers that uvicorn may have differ in some of them."""
    found = answer_to(server, data)
    assert found.startswith(f"HTTP/1.1 {status}".encode()) and b"Traceback" not in found
    assert_idle(server, client)


@pytest.mark.long
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        request_of(PATH, WHOLE)[:50],
        request_of(PATH, WHOLE, "content-length: 5000"),
        request_of(PATH, chunks(WHOLE), CHUNKED),
        request_of(PATH, b"ffffffffffffffffffff\r\n" + WHOLE, CHUNKED),
    ],
)
def test_a_request_without_its_end_is_no_request(server, client, data):
    assert not answer_to(server, data, ends=True).startswith(b"HTTP/1.1 2")
    assert_idle(server, client)


@pytest.mark.long
def test_requests_one_behind_the_other_are_all_answered(server, client):
    data = request_of(PATH, BODY) + request_of(PATH, b"{") + request_of(PATH, BODY, "connection: close")
    with server.connect() as connection:
        connection.sendall(data)
        found = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"400", b"200"]
    assert_idle(server, client)
