# SPDX-License-Identifier: Apache-2.0
"""The server, with the bundled model: OpenAI's own client against all of it."""

import re
import time

import httpx
import openai
import pytest

from models import recall
from models.recall import CHECKPOINT
from tests import drive
from tests.models.serve_kit import DOCUMENT, GREEDY, KEY, ON, PEOPLE, Running, answer_about, prompt_of


@pytest.mark.long
def test_a_completion_is_the_models_answer(client):
    found = client.completions.create(prompt=prompt_of(PEOPLE[0]), max_tokens=8, **GREEDY)
    (choice,), usage = found.choices, found.usage
    assert (choice.text, choice.finish_reason) == (f" {DOCUMENT.facts[PEOPLE[0]]}", "stop")
    prompt_tokens = len(recall.encode(prompt_of(PEOPLE[0])))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt_tokens, 2, prompt_tokens + 2)
    cut = client.completions.create(prompt=recall.encode(prompt_of(PEOPLE[0])), max_tokens=4, extra_body=ON, **GREEDY)
    assert cut.choices[0].finish_reason == "length" and answer_about(PEOPLE[0]).text.startswith(cut.choices[0].text)
    several = client.completions.create(prompt=[prompt_of(person) for person in PEOPLE[:3]], max_tokens=8, **GREEDY)
    assert [one.text for one in several.choices] == [f" {DOCUMENT.facts[person]}" for person in PEOPLE[:3]]
    assert [one.index for one in several.choices] == [0, 1, 2]


@pytest.mark.long
def test_a_chat_has_the_checkpoints_template_and_finds_its_turns_in_the_cache(client):
    messages = [{"role": "user", "content": prompt_of(PEOPLE[1])}]
    first = client.chat.completions.create(messages=messages, **GREEDY, extra_body={"cache_salt": "chat"})
    answer = first.choices[0].message
    assert (answer.role, answer.content) == ("assistant", f" {DOCUMENT.facts[PEOPLE[1]]}")
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    messages += [answer.model_dump(include={"role", "content"})]
    messages += [{"role": "user", "content": f". {recall.question(PEOPLE[2])}"}]
    second = client.chat.completions.create(messages=messages, **GREEDY, extra_body={"cache_salt": "chat"})
    assert second.choices[0].message.content == f" {DOCUMENT.facts[PEOPLE[2]]}"
    cached = first.usage.total_tokens - 1  # the last token was chosen and never computed
    assert second.usage.prompt_tokens_details.cached_tokens == cached
    parts = [{"role": "user", "content": [{"type": "text", "text": messages[0]["content"]}]}]
    chunks = [*client.chat.completions.create(messages=parts, stream=True, **GREEDY)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == answer.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@pytest.mark.long
def test_samples_differ_and_seeds_repeat_them(client):
    options = {"prompt": "alice is in", "max_tokens": 6, "temperature": 1.5, "model": "recall", "extra_body": ON}
    texts = [
        [choice.text for choice in client.completions.create(n=4, seed=seed, **options).choices] for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) > 1
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(n=4, seed=1, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert [*streamed.values()] == texts[0]
    cold = client.completions.create(**options | {"temperature": 5, "extra_body": {**ON, "top_k": 1}})
    assert cold.choices[0].text == client.completions.create(**options | {"temperature": 0}).choices[0].text


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_an_answer_and_frees_its_row(server, client, streams):
    whole = answer_about(PEOPLE[0]).text
    words = whole.split(" ")
    stop = f"{words[5][-2:]} {words[6]}"  # across two tokens
    wanted = whole[: whole.index(stop)]
    found = client.completions.create(
        prompt=prompt_of(PEOPLE[0]), max_tokens=800, stop=[stop, "never"], stream=streams, logprobs=0, extra_body=ON,
        **GREEDY,
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in (found if streams else [found])]
    assert "".join(choice.text for choice in choices) == wanted and choices[-1].finish_reason == "stop"
    assert "".join(token for choice in choices if choice.logprobs for token in choice.logprobs.tokens) == wanted
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert len(offsets) == len(wanted.split()) and offsets[-1] < len(wanted)
    if not streams:
        assert found.usage.completion_tokens == len(wanted.split()) + 1
        after = client.completions.create(
            prompt=prompt_of(PEOPLE[0]), max_tokens=9, stop=stop, extra_body={**ON, "min_tokens": 9}, **GREEDY
        )
        assert after.choices[0].text.startswith(wanted + stop) and after.choices[0].finish_reason == "length"
    server.wait_for(lambda: server.rows == 0)


@pytest.mark.long
def test_logprobs_are_those_of_the_chosen_tokens(client):
    options = {"prompt": prompt_of(PEOPLE[0]), "max_tokens": 5, "extra_body": ON, **GREEDY}
    choice = client.completions.create(logprobs=2, **options).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text == answer_about(PEOPLE[0]).text[: len(choice.text)]
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert choice.text[offset:].startswith(token)
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(top.values()) == top[token] == pytest.approx(logprob) and len(top) == 2
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(logprobs=2, stream=True, **options)]
    assert [token for one in streamed for token in one.tokens] == logprobs.tokens
    messages = [{"role": "user", "content": prompt_of(PEOPLE[0])}]
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=5, max_tokens=1, **GREEDY)
    (one,) = chat.choices[0].logprobs.content
    assert one.token == chat.choices[0].message.content == one.top_logprobs[0].token
    assert (one.token, bytes(one.bytes).decode()) == (logprobs.tokens[0],) * 2 and len(one.top_logprobs) == 5
    assert one.logprob == pytest.approx(logprobs.token_logprobs[0], abs=1e-4)


@pytest.mark.long
def test_biases_and_penalties_change_the_tokens_of_those_who_ask(client):
    options = {"prompt": prompt_of(PEOPLE[0]), "max_tokens": 6, "extra_body": ON, **GREEDY}
    (token,) = recall.encode("paris")

    def words(**fields):
        return client.completions.create(**options, **fields).choices[0].text.split()

    assert words(logit_bias={token: 100}) == ["paris"] * 6
    penalized = words(logit_bias={token: 12}, frequency_penalty=2, presence_penalty=2)
    assert 1 <= penalized.count("paris") < 6
    assert words() == answer_about(PEOPLE[0]).words[:6]


def refusal(client, **fields):
    """The status, the field, the code and the message of a completion's error, which has the API's form."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{"prompt": "alice", **GREEDY, **fields})
    error = caught.value
    assert error.response.json()["error"].keys() == {"message", "type", "param", "code"}
    return error.status_code, error.param, error.code, error.response.json()["error"]["message"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"n": 9}, (400, "n", None)),
        ({"frequency_penalty": 3}, (400, "frequency_penalty", None)),
        ({"logit_bias": {"100000": 1}}, (400, "logit_bias", None)),
        ({"prompt": [249]}, (400, "prompt", None)),
        ({"prompt": [10**30]}, (400, "prompt", None)),
        ({"prompt": ""}, (400, "prompt", None)),
        ({"prompt": "a " * 1024}, (400, "prompt", "context_length_exceeded")),
        ({"prompt": "a" * 100_001}, (413, None, "body_too_large")),
        ({"max_tokens": 1024}, (400, "prompt", "context_length_exceeded")),
        ({"extra_body": {"min_p": 1.5}}, (400, "min_p", None)),
        ({"extra_body": {"stop_token_ids": [*range(9)]}}, (400, "stop_token_ids", None)),
        ({"extra_body": {"cache_salt": "kvjax-weights:1"}}, (400, "cache_salt", None)),
        ({"model": "other"}, (404, "model", "model_not_found")),
        ({"prompt": ["alice"] * 16, "n": 4}, (400, "n", None)),  # more than can ever be open
        ({"prompt": ["alice"] * 61}, (400, "prompt", None)),
        # 8 of 1,024 tokens are more than 512 blocks of 16.
        ({"n": 8, "max_tokens": 1022, "extra_body": ON}, (400, None, "context_length_exceeded")),
    ],
)
def test_bad_requests_are_errors_of_the_api(server, client, fields, wanted):
    *found, message = refusal(client, **fields)
    assert tuple(found) == wanted
    assert ("wanted at most 60 of a request" in message) == (fields.get("prompt", [])[:1] == ["alice"])
    server.wait_for(lambda: server.engine.running == 0 == server.rows)


@pytest.mark.long
def test_the_template_refuses_chats_with_its_own_words(client):
    with pytest.raises(openai.BadRequestError, match="no tools"):
        client.chat.completions.create(messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}], **GREEDY)


@pytest.mark.long
def test_a_server_that_is_full_says_when_to_come_again(server, client, monkeypatch):
    options = {"max_tokens": 500, "stream": True, "extra_body": ON, **GREEDY}
    with client.completions.create(prompt=["alice"] * 14, n=4, **options) as open_answers:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(prompt=["alice"] * 3, n=4, **GREEDY)
        next(open_answers)
    assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "rate_limit_exceeded"
    server.wait_for(lambda: server.engine.running == 0)
    monkeypatch.setattr(server.engine, "_max_waiting", 2)
    with pytest.raises(openai.RateLimitError, match="wait already"):  # the scheduler has 32 requests at most
        client.completions.create(prompt=["alice"] * 20, n=2, max_tokens=500, extra_body=ON, **GREEDY)
    assert refusal(client, n=3)[3] == "n: got 3, wanted at most 2"
    monkeypatch.undo()
    assert client.completions.create(prompt="alice", **GREEDY).choices


@pytest.mark.long
def test_a_key_is_wanted_for_prompts_and_answers(server, client):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError) as caught:
            other.models.list()
        assert caught.value.code == "invalid_api_key"
    assert [model.id for model in client.models.list()] == ["recall"] == [client.models.retrieve("recall").id]
    assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/metrics").status_code == 200
    denied = httpx.get(f"{server.url}/cache")
    assert denied.status_code == 401 and denied.headers["www-authenticate"].startswith("Basic")
    assert httpx.get(f"{server.url}/cache", auth=("", KEY)).status_code == 200


@pytest.mark.long
def test_pages_show_the_cache_and_the_requests(server, client):
    client.completions.create(prompt="<pad> where is bob ?", max_tokens=3, extra_body=ON, **GREEDY)
    time.sleep(1.1)  # a page is made anew
    page = httpx.get(f"{server.url}/cache", auth=("", KEY)).text
    assert 'src="data:image/png;base64,' in page and 'http-equiv="refresh"' in page
    assert "where is bob ?" in page and "<pad>" not in page
    text = httpx.get(f"{server.url}/metrics").text
    numbers = dict(re.findall(r"^(kvjax_\w+)(?:{[^}]*})? ([\d.e+-]+)$", text, re.MULTILINE))
    assert float(numbers["kvjax_generation_tokens_total"]) >= 3 and numbers["kvjax_num_requests_running"] == "0.0"
    counts = [float(numbers[f"kvjax_{name}_seconds_count"]) for name in ("time_to_first_token", "e2e_request_latency")]
    assert counts[0] >= counts[1] > 0
    assert float(numbers["kvjax_queried_tokens_total"]) > 0 and "kvjax_num_requests_waiting" in numbers


@pytest.mark.slow
def test_samples_come_in_several_calls_and_what_a_store_is_read_for_is_dropped_with_its_prompts(tmp_path):
    """Some are cancelled before they are admitted."""
    prompt, wanted = recall.encode(prompt_of(PEOPLE[0])), answer_about(PEOPLE[0]).words
    running = Running(CHECKPOINT, "--store", str(tmp_path / "store"))
    try:
        with running.engine._inbox.wake:  # the engine's thread sees all of it at once; it has slots for 32 requests
            groups = [drive.ask(running.engine, prompt, max_new_tokens=16, samples=7).samples for _ in range(5)]
            for handle in [groups[1][0], *groups[4][2:]]:
                handle.cancel()
        outputs = [handle.result(60) for handles in groups for handle in handles]
        finishes = [output.finish for output in outputs]
        assert finishes == ["length"] * 7 + ["cancelled"] + ["length"] * 22 + ["cancelled"] * 5
        assert all(recall.decode(output.tokens).split() == wanted for output in outputs if output.tokens)
        running.wait_for(lambda: not running.engine._thread.driver.stored.prefixes)
    finally:
        running.close()


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_that_fails_is_an_error_of_the_api_and_goes_on(server, client, monkeypatch, streams):
    def fails(*_, **__):
        monkeypatch.undo()
        raise RuntimeError("broken")

    server.engine.drain(20)
    monkeypatch.setattr("kvjax.serving.driver.turn", fails)
    with pytest.raises(openai.APIError, match="the engine failed: RuntimeError: broken") as caught:
        list(client.completions.create(prompt="alice", stream=streams, **GREEDY))
    assert streams or caught.value.status_code == 503
    found = client.completions.create(prompt=prompt_of(PEOPLE[0]), max_tokens=8, **GREEDY)
    assert found.choices[0].text == f" {DOCUMENT.facts[PEOPLE[0]]}"
    assert found.usage.prompt_tokens_details.cached_tokens == 0
