# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompts from the server: `echo`, `prompt_logprobs` and `max_tokens: 0`, with OpenAI's client."""

import itertools

import jax
import numpy as np
import openai
import pytest

from models import load, recall
from models.recall import CHECKPOINT
from tests.models.serve_kit import GREEDY, ON, PEOPLE, WIDTH, answer_to, dense, idle, prompt_of

PROMPTS = [prompt_of(PEOPLE[0]), "where is bob ?", "alice"]


def scores_of(tokens):
    """The log-probabilities f32[n, V] after each of these tokens, by the whole sequence without a cache."""
    line = np.zeros((1, WIDTH), np.int32)
    line[0, : len(tokens)] = tokens
    return np.asarray(jax.nn.log_softmax(dense(load(CHECKPOINT)[0], line)[0, : len(tokens)], axis=-1))


def assert_columns(columns, text, tokens, most):
    """Requires the entries of all tokens, the model's log-probabilities, and offsets into the text."""
    words, scores = columns["tokens"], scores_of(tokens)
    assert "".join(words) == text and len(words) == len(tokens)
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    wanted = [float(scores[at, token]) for at, token in enumerate(tokens[1:])]
    np.testing.assert_allclose(columns["token_logprobs"][1:], wanted, atol=1e-3)
    for word, logprob, top, before in zip(
        words[1:], columns["token_logprobs"][1:], columns["top_logprobs"][1:], scores, strict=False
    ):
        assert top[word] == logprob and most <= len(top) <= most + 1
        np.testing.assert_allclose(max(top.values()), before.max(), atol=1e-3)
    for word, start in zip(words, columns["text_offset"], strict=True):
        assert text[start : start + len(word)] == word


@pytest.mark.long
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("streams", [False, True])
def test_a_prompt_comes_before_its_answer_with_its_log_probabilities(server, client, max_tokens, streams):
    fields = {"max_tokens": max_tokens, "echo": True, "logprobs": 2, "n": 2, "extra_body": ON, **GREEDY}
    for prompts in (PROMPTS, [recall.encode(prompt) for prompt in PROMPTS]):  # the second time all are cached
        found = client.completions.create(prompt=prompts, stream=streams, **fields)
        size = 2 * len(PROMPTS)
        texts, finishes, columns = [""] * size, [None] * size, [{} for _ in range(size)]
        for choice in itertools.chain.from_iterable(one.choices for one in found) if streams else found.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                for name, column in choice.logprobs.model_dump().items():
                    columns[choice.index].setdefault(name, []).extend(column or [])
        if not streams:
            lengths = [len(recall.encode(prompt)) for prompt in PROMPTS]
            assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (sum(lengths), size * max_tokens)
        assert finishes == ["length"] * size
        for at, prompt in enumerate(np.repeat(PROMPTS, 2).tolist()):
            answer = answer_to(prompt)
            assert texts[at].startswith(prompt) and answer.begins(texts[at][len(prompt) :])
            tokens = recall.encode(texts[at])
            assert len(tokens) == len(recall.encode(prompt)) + max_tokens
            assert_columns(columns[at], texts[at], tokens, 2)
    idle(server)


@pytest.mark.long
def test_a_prompt_alone_and_a_stop_token_have_their_entries(client):
    prompt = PROMPTS[0]
    tokens = recall.encode(prompt)
    for max_tokens in (0, 2):
        (choice,) = client.completions.create(prompt=prompt, max_tokens=max_tokens, echo=True, **GREEDY).choices
        assert choice.text.startswith(prompt) and choice.logprobs is None
    answer = client.completions.create(prompt=prompt, max_tokens=9, **GREEDY).choices[0]
    assert answer.finish_reason == "stop"  # after a word the model ends
    (choice,) = client.completions.create(prompt=prompt, max_tokens=9, echo=True, logprobs=0, **GREEDY).choices
    columns = choice.logprobs
    assert choice.text == prompt + answer.text and columns.top_logprobs is None
    assert len(columns.token_logprobs) == len(tokens) + len(recall.encode(answer.text)) + 1  # with the stop token
    assert (columns.tokens[-1], columns.text_offset[-1]) == ("", len(choice.text))
    assert "".join(columns.tokens) == choice.text and columns.token_logprobs[-1] > -1


@pytest.mark.long
def test_prompt_logprobs_have_the_form_of_vllm(server, client):
    prompt = PROMPTS[0]
    completion = client.completions.create(
        prompt=[prompt, "alice"], max_tokens=1, n=2, extra_body={"prompt_logprobs": 2}, **GREEDY
    )
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": prompt}], max_tokens=0, extra_body={"prompt_logprobs": 0}, **GREEDY
    )
    of_prompts = [choice.prompt_logprobs for choice in completion.choices]
    assert of_prompts[0] == of_prompts[1] and of_prompts[2:] == [[None]] * 2
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("", "length")
    for entries, most in ((of_prompts[0], 2), (chat.prompt_logprobs, 0)):
        tokens, scores = recall.encode(prompt), scores_of(recall.encode(prompt))
        assert entries[0] is None and len(entries) == chat.usage.prompt_tokens == len(tokens)
        for at, entry in enumerate(entries[1:], 1):
            found = {int(token): one for token, one in entry.items()}
            assert next(iter(found)) == tokens[at] and max(1, most) <= len(found) <= most + 1
            for token, one in found.items():
                assert one.keys() == {"logprob", "rank", "decoded_token"}
                np.testing.assert_allclose(one["logprob"], scores[at - 1, token], atol=1e-3)
                assert one["rank"] == 1 + np.sum(scores[at - 1] > scores[at - 1, token])
                assert one["decoded_token"].strip() == recall.decode([token])
    idle(server)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: got 0, wanted an integer from 1 to"),
        ({"messages": [{"role": "user", "content": "alice"}], "echo": True}, "echo: got true, wanted none or false:"),
        ({"prompt": [3] * 1024, "max_tokens": 1, "echo": True}, "prompt: got 1024 tokens and 1 of its answer"),
        ({"prompt": [3] * 1025, "max_tokens": 0, "echo": True}, "prompt: got 1025 tokens, wanted at most 1024"),
    ],
)
def test_what_is_refused(server, fields, message):
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    found = server.post({"prompt": "alice", **fields}, path)
    assert found.status_code == 400 and found.json()["error"]["message"].startswith(message)


@pytest.mark.long
def test_a_failure_of_the_program_ends_the_request_alone(server, client, monkeypatch):
    def fails(*_, **__):
        monkeypatch.undo()
        raise RuntimeError("broken")

    server.engine.drain(20)
    monkeypatch.setattr("kvjax.serving.prompt_scores._score_prompt", fails)
    fields = {"max_tokens": 0, "echo": True, "logprobs": 1, **GREEDY}
    with pytest.raises(openai.InternalServerError, match="the engine failed: RuntimeError: broken"):
        client.completions.create(prompt=PROMPTS[0], **fields)
    assert client.completions.create(prompt=PROMPTS[0], **fields).choices[0].logprobs
    idle(server)
