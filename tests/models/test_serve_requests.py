# SPDX-License-Identifier: Apache-2.0
"""Parts of the server: text of tokens and stop strings, requests as they are read, and options of the command line."""

import asyncio
import errno
import functools
import json
import re
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

import kvjax
from kvjax.serving import Output
from models import openai_api, openai_fields, openai_responses, serve, stores
from models.answers import Answer, Detokenizer, Piece, pieces
from models.openai_api import ApiError, Limits, read_json, read_params, read_prompts
from models.openai_messages import read_messages
from models.openai_replies import ResponseFormat, Usage
from models.recall import CHECKPOINT
from models.serve_app import Api
from models.serve_job import Served
from models.tenants import Keys, keys_of, salt_of
from tests.drive import PLAIN, ROOT, Driver

BIASES = "wanted an object of at most 300 token ids, each with a number from -100 to 100"
ANSWERS = {False: openai_fields.COMPLETIONS, True: openai_fields.CHATS}
ENDPOINTS = (
    openai_fields.COMPLETIONS,
    openai_fields.CHATS,
    openai_fields.RESPONSES,
    openai_fields.TOKENIZE,
    openai_fields.DETOKENIZE,
)
LISTS = {
    endpoint: openai_responses.FIELDS if endpoint == openai_fields.RESPONSES else openai_fields.fields_of(endpoint)
    for endpoint in ENDPOINTS
}
KINDS = "served", "ignored", "refused"  # of fields, as `fields_of` returns them
LIMITS = Limits(max_length=100, samples=4, top_logprobs=5)


def decode(tokens):
    """The text of tokens that are bytes."""
    return bytes(tokens).decode(errors="replace")


# Text of tokens.


@given(st.text(max_size=12), st.text(max_size=12), st.lists(st.integers(1, 9)))
def test_text_grows_by_whole_characters(prompt, text, sizes):
    """Token by token, and by several tokens that come together."""
    words, grown = Detokenizer(decode, list(prompt.encode())), ""
    for token in text.encode():
        grown += words.add(token)
        assert text.startswith(grown)
    assert grown + words.end() == text
    tokens, answer, shown = list(text.encode()), Answer(decode, [], has_starts=False), ""
    for size in sizes:
        shown += answer.add(tokens[:size])
        tokens = tokens[size:]
        assert text.startswith(shown)
    assert shown + answer.add(tokens, done=True) == text == answer.text
    assert answer.num_tokens == len(answer.starts) == len(text.encode())


def test_an_unfinished_character_comes_at_the_end():
    answer = Answer(decode, [])
    assert answer.add(list("é€".encode()[:4])) == "é"
    assert answer.add([], done=True) == "\N{REPLACEMENT CHARACTER}"
    assert answer.starts == [0, 0, 1, 1]


def test_a_prompt_may_end_within_a_character():
    first, last = "é".encode()
    assert Answer(decode, [97, first]).add([last, 98], done=True) == "éb"


class Counted:
    """A decoder of bytes that counts the tokens that it reads; the byte 0 is a special token, which has no text."""

    def __init__(self):
        self.tokens = 0

    def __call__(self, tokens):
        self.tokens += len(tokens)
        return decode(token for token in tokens if token)


@pytest.mark.parametrize("waiting", [b"\x80", "\N{GRINNING FACE}".encode()[:2], b"\xf0", b"\0"])
def test_tokens_that_finish_no_character_cost_linear_time_and_are_shown(waiting):
    cost = dict[int, int]()
    for number in (500, 2000):
        counted = Counted()
        words = Detokenizer(counted, list(b"hi"))
        tokens = list(waiting) * (number // len(waiting))
        lengths = [len(words.add(token)) for token in tokens]
        cost[number] = counted.tokens
        text = decode(token for token in tokens if token)
        assert len(text) - 16 <= sum(lengths) <= len(text) and sum(lengths) + len(words.end()) == len(text)
    assert cost[2000] < 5 * cost[500] < 5 * 500 * 100


@given(
    st.lists(
        st.one_of(st.sampled_from([b"\x80" * 13, b"\xf0\x9f" * 9, b"\0" * 20]), st.text(max_size=3).map(str.encode))
    )
)
def test_what_follows_such_tokens_is_whole(parts):
    data = list(b"".join(parts))
    words = Detokenizer(Counted(), [])
    assert "".join([words.add(token) for token in data]) + words.end() == decode(token for token in data if token)


LETTERS = st.text("ab", max_size=12)


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.just(0) | st.integers(0, 8), st.data())
def test_nothing_of_a_stop_string_is_shown(text, stop, min_tokens, data):
    """The stop string that is complete first ends the answer, however its tokens come.

    As in vLLM one counts if it is complete with a token after the first `min_tokens`; it may begin before.
    """
    ends = [(at + len(one), at) for one in stop for at in range(len(text)) if text.startswith(one, at)]
    end = min([(until, at) for until, at in ends if until > min_tokens], default=None)
    wanted = text if end is None else text[: min(at for until, at in ends if until == end[0])]
    answer, shown, left = Answer(decode, [], stop, min_tokens=min_tokens), "", list(text.encode())
    while left and not answer.stopped:
        size = data.draw(st.integers(1, len(left)))
        shown += answer.add(left[:size])
        left = left[size:]
        assert wanted.startswith(shown) and answer.num_shown == len(shown)
        so_far = text[: len(text) - len(left)]
        longest = max((n for one in stop for n in range(1, len(one) + 1) if so_far.endswith(one[:n])), default=0)
        assert answer.stopped or len(shown) >= len(so_far) - longest
    assert shown + ("" if answer.stopped else answer.add([], done=True)) == wanted == answer.text
    assert answer.stopped == (end is not None)
    assert len(answer.starts) == len(wanted) and answer.num_tokens == (len(text) if end is None else end[0])


class Grown:
    """A handle of an answer that is there already, as it grows by a few tokens at a time."""

    def __init__(self, tokens, tops, sizes):
        self.tokens, self.tops, self.sizes, self.done = tokens, tops, sizes, False

    async def changes(self, **_):
        output, end = Output(1, finish="length"), 0
        while end < len(self.tokens) and not self.done:
            end += next(self.sizes)
            self.done = end >= len(self.tokens)
            output.tokens, output.top_logprobs = self.tokens[:end], self.tops[:end]
            output.logprobs = [-0.5] * len(output.tokens)
            yield output

    def cancel(self):
        self.done = True


@functools.cache
def tokenizers_of_bytes_and_words():
    """One whose tokens are bytes and pairs of them, as GPT-2's, and one of words with their spaces, as Llama's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate([*alphabet, "Ġa", "ab"])}
    of_bytes = Tokenizer(BPE(vocabulary, [("Ġ", "a"), ("a", "b")]))
    of_bytes.pre_tokenizer, of_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)}
    of_words = Tokenizer(BPE({**fallback, "▁": 256, "a": 257, "▁a": 258}, [("▁", "a")], byte_fallback=True))
    of_words.pre_tokenizer = pre_tokenizers.Metaspace()
    of_words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return of_bytes, of_words


def test_impossible_tokens_have_a_number_in_json():
    params: Any = types.SimpleNamespace(logprobs=2, includes_usage=False)
    impossible = float("-inf")
    piece = Piece("ab", [1, 2], [], ["a", "b"], [0, 1], [-0.5, impossible], [{1: -0.5}, {2: impossible}], "length", 2)
    for is_chat in (False, True):
        whole = ResponseFormat("model", params, lambda ids: "ab"[ids[-1] - 1], is_chat=is_chat).whole(
            [[piece]], Usage()
        )
        assert "-9999.0" in json.dumps(whole, allow_nan=False)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("kind", [0, 1], ids=["bytes", "words"])
@settings(max_examples=60, deadline=None)
@given(
    text=st.text("ab é€😀", min_size=1, max_size=12),
    stop=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
    data=st.data(),
)
def test_the_tokens_of_log_probabilities_join_to_the_text(kind, is_chat, text, stop, data):
    """Whole and in a stream. A character of several tokens is the last one's."""
    tokenizer = tokenizers_of_bytes_and_words()[kind]
    prompt, tokens = (tokenizer.encode(words).ids for words in ("a b", text))
    words = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    tops = [{token: -0.5, 0: -1.0} for token in tokens]
    sizes = iter(data.draw(st.lists(st.integers(1, 3), min_size=len(tokens), max_size=len(tokens))))
    params: Any = types.SimpleNamespace(logprobs=2, includes_usage=False)
    form = ResponseFormat("model", params, words, is_chat=is_chat)

    async def read():
        of_answer = pieces(Grown(tokens, tops, sizes), Answer(words, prompt, stop), (), is_streaming=True, has_top=True)
        return [piece async for piece in of_answer]

    found = asyncio.run(read())
    (choice,) = form.whole([found], Usage())["choices"]
    chunks = [event["choices"][0] for piece in found for event in form.chunks(0, piece)]
    shown = choice["message"]["content"] if is_chat else choice["text"]
    assert found and shown == "".join(piece.text for piece in found)
    for choices in ([choice], chunks):
        if is_chat:
            entries = [entry for one in choices for entry in one["logprobs"]["content"]]
            assert "".join(entry["token"] for entry in entries) == shown
            assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)
            if "\N{REPLACEMENT CHARACTER}" not in shown:
                assert bytes(byte for entry in entries for byte in entry["bytes"]) == shown.encode()
        else:
            assert "".join(token for one in choices for token in one["logprobs"]["tokens"]) == shown


# Requests.


def params_of(is_chat=False, **fields):
    return read_params(read_json(json.dumps(fields).encode()), LIMITS, is_chat=is_chat)


def test_fields_that_are_absent_or_null_have_the_apis_defaults():
    for fields in ({}, {"temperature": None, "n": None, "stop": None, "seed": None, "unheard_of": 1}):
        one, chat = params_of(**fields), params_of(is_chat=True, **fields)
        assert (one.max_tokens, chat.max_tokens, one.n, one.stop, one.logprobs, one.salt) == (
            16,
            None,
            1,
            [],
            None,
            None,
        )
        assert one.sampling == kvjax.Sampling(1.0) and not one.is_streaming
    assert params_of().seed != params_of().seed


def test_fields_become_arguments_of_the_engine():
    one = params_of(
        is_chat=True, max_completion_tokens=7, max_tokens=9, temperature=0.5, top_p=0.9, top_k=-1, seed=-1, stop="x",
        logprobs=True, top_logprobs=3, priority=2, cache_salt="a", stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    assert (one.max_tokens, one.seed, one.stop, one.logprobs, one.priority) == (7, 2**32 - 1, ["x"], 3, -2)
    assert (
        one.sampling == kvjax.Sampling(0.5, None, 0.9) and one.salt == "a" and one.is_streaming and one.includes_usage
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": float("nan")}, "temperature: got NaN, wanted a number from 0 to 100"),
        ({"temperature": "1"}, 'temperature: got "1", wanted a number from 0 to 100'),
        ({"top_p": 0}, "top_p: got 0.0, wanted a number above 0"),
        ({"top_p": 1e-46}, "top_p: got 1e-46, wanted a number above 0"),
        ({"n": 5}, "n: got 5, wanted an integer from 1 to 4"),
        ({"n": True}, "n: got true, wanted an integer from 1 to 4"),
        ({"max_tokens": 0}, "max_tokens: got 0, wanted an integer from 1 to 1073741824"),
        ({"stop": ""}, 'stop: got "", wanted at most 4 strings of 1 to 1024 characters'),
        ({"stop": [1]}, "stop: got [1], wanted at most 4 strings of 1 to 1024 characters"),
        ({"logprobs": 6}, "logprobs: got 6, wanted an integer from 0 to 5"),
        ({"stream": 1}, "stream: got 1, wanted true or false"),
        ({"cache_salt": ["a", "b"]}, 'cache_salt: got ["a", "b"], wanted at most 1 strings of 1 to 256 characters'),
        ({"cache_salt": "\ud800"}, "cache_salt: got text that is not Unicode"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: got [-1], wanted a list of token ids"),
        ({"frequency_penalty": 2.1}, "frequency_penalty: got 2.1, wanted a number from -2 to 2"),
        ({"presence_penalty": "0"}, 'presence_penalty: got "0", wanted a number from -2 to 2'),
        ({"logit_bias": {"1": 101}}, 'logit_bias: got {"1": 101}, ' + BIASES),
        ({"logit_bias": {"a": 1}}, 'logit_bias: got {"a": 1}, ' + BIASES),
        ({"logit_bias": [3]}, "logit_bias: got [3], " + BIASES),
        ({"cache_salt": "kvjax-a"}, "cache_salt: got \"kvjax-a\", wanted a salt that does not begin with 'kvjax-'"),
        ({"echo": 0}, "echo: got 0, wanted true or false"),
        ({"prompt_logprobs": 6}, "prompt_logprobs: got 6, wanted an integer from 0 to 5"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs: got 0, wanted none with stream"),
        ({"min_p": False}, "min_p: got false, wanted a number from 0 to 1"),
        ({"min_p": 1.01}, "min_p: got 1.01, wanted a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0, wanted a number from 0.01 to 100"),
        ({"repetition_penalty": "1"}, 'repetition_penalty: got "1", wanted a number from 0.01 to 100'),
        ({"use_beam_search": 0}, "use_beam_search: got 0, wanted none or false: nothing else is served"),
        ({"web_search_options": {}}, "web_search_options: got {}, wanted none: nothing else is served"),
        ({"best_of": 2}, "best_of: got 2, wanted as many as n"),
        ({"best_of": True}, "best_of: got true, wanted an integer from -1073741824 to 1073741824"),
        ({"stream_options": {}}, "stream_options: got {}, wanted an object, and only with stream"),
        ({"stream_options": 1, "stream": True}, "stream_options: got 1, wanted an object, and only with stream"),
        (
            {"stream_options": {"include_usage": 1}, "stream": True},
            'stream_options: got {"include_usage": 1}, wanted true or false for include_usage, include_obfuscation, '
            "continuous_usage_stats",
        ),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(ApiError) as caught:
        params_of(**fields)
    error = caught.value.body["error"]
    assert (caught.value.status, error["message"], error["param"]) == (400, message, next(iter(fields)))
    assert (error["type"], error["code"]) == ("invalid_request_error", None)


# A value of each field that would change an answer.
CHANGES = {
    "allowed_token_ids": [3], "audio": {"voice": "alloy"}, "bad_words": ["bob"], "chat_template": "{{ messages }}",
    "documents": [{"text": "a"}], "early_stopping": True,
    "function_call": {"name": "f"}, "functions": [{"name": "f"}], "guided_decoding_backend": "outlines",
    "guided_grammar": "root ::=", "guided_whitespace_pattern": " *", "include_reasoning": False,
    "include_stop_str_in_output": True, "kv_transfer_params": {"do_remote_decode": True}, "length_penalty": 2,
    "logits_processors": ["f"], "logprob_token_ids": [1], "modalities": ["text", "audio"],
    "prompt_embeds": "x", "reasoning_effort": "high", "repetition_detection": {},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True, "skip_special_tokens": False, "structural_tag": "x",
    "suffix": "x", "thinking_token_budget": 9,
    "truncate_prompt_tokens": 3, "use_beam_search": True, "verbosity": "low", "vllm_xargs": {"a": 1},
    "web_search_options": {},
}  # fmt: skip
# Such values of fields that the other endpoint serves.
OF_THE_OTHER = {
    False: {
        "add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": True, "tool_choice": "required", "tools": [{}],
    },
    True: {"echo": True},
}  # fmt: skip


@pytest.mark.parametrize("is_chat", [False, True])
def test_fields_that_would_change_an_answer_are_refused_by_name(is_chat):
    changes = CHANGES | OF_THE_OTHER[is_chat]
    assert changes.keys() == openai_fields.fields_of(ANSWERS[is_chat])[2].keys()
    for name, value in changes.items():
        with pytest.raises(ApiError, match=f"^{name}: got .*, wanted none.*: nothing else is served") as caught:
            params_of(is_chat=is_chat, **{name: value})
        assert caught.value.status == 400 and caught.value.body["error"]["param"] == name


@pytest.mark.parametrize("is_chat", [False, True])
def test_values_that_change_nothing_are_taken(is_chat):
    plain = params_of(is_chat=is_chat, seed=1)
    _, ignored, refused = openai_fields.fields_of(ANSWERS[is_chat])
    values = [(name, value) for name, allowed in refused.items() for value in (None, *allowed)]
    values += [(name, value) for name in ignored for value in (None, "a", 1, {}, [True])]
    values += [("min_p", 0.0), ("repetition_penalty", 1.0), ("best_of", 1), ("logit_bias", {})]
    for name, value in values:
        assert params_of(is_chat=is_chat, seed=1, **{name: value}) == plain
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": None, "other": 1}
    assert params_of(is_chat=is_chat, stream=True, stream_options=options).includes_usage


class Watched(openai_api.Fields):
    """Fields that note their names when they are read."""

    def __init__(self, fields):
        super().__init__(fields)
        self.read = set()

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


def fields_read(endpoint):
    """The names of the fields that an endpoint reads, of a request that has none but its prompt or messages."""
    found = {"model"}  # which decides whether the others are read
    bodies = {
        openai_fields.COMPLETIONS: [{"prompt": "a"}],
        openai_fields.CHATS: [{"messages": [{"role": "user", "content": "a"}]}],
        openai_fields.DETOKENIZE: [{"tokens": [1]}],
        openai_fields.RESPONSES: [{"input": "a"}],
    }  # fmt: skip
    bodies[openai_fields.TOKENIZE] = [*bodies[openai_fields.COMPLETIONS], *bodies[openai_fields.CHATS]]
    template = types.SimpleNamespace(render=lambda messages, tools, **_: "a")
    tokenizer = types.SimpleNamespace(
        encode_batch_fast=lambda texts, **_: [types.SimpleNamespace(ids=[1])], decode=lambda *_, **__: "a"
    )
    served: Any = Served("m", tokenizer, 9, template, [], LIMITS, {}, Keys(), 1, 1, 1, 1, shows_cached=True,
                         before_end=None)  # fmt: skip
    api = Api(types.SimpleNamespace(vocabulary=9), served, None)
    reads = {
        endpoint: functools.partial(api._read, endpoint=endpoint)
        for endpoint in (openai_fields.COMPLETIONS, openai_fields.CHATS, openai_fields.RESPONSES)
    }
    reads |= {openai_fields.TOKENIZE: api._tokenized, openai_fields.DETOKENIZE: api._detokenized}
    for body in bodies[endpoint]:
        watched = Watched(body)
        api._fields = lambda _, fields=watched: fields
        reads[endpoint](b"")
        found |= watched.read
    return found


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_field_is_in_one_list_and_read_if_it_is_served_or_refused(endpoint):
    served, harmless, refused = LISTS[endpoint]
    assert len(served) + len(harmless) + len(refused) == len({*served, *harmless, *refused})
    assert fields_read(endpoint) == served | refused.keys()


def table_of_fields():
    """The table of all fields in Markdown, by the lists of the code."""
    values = {name: allowed for *_, refused in LISTS.values() for name, allowed in refused.items()}
    names = {name for groups in LISTS.values() for group in groups for name in group}
    lines = ["| field | " + " | ".join(f"`{endpoint}`" for endpoint in ENDPOINTS) + " | harmless values |"]
    lines.append("|---" * (len(ENDPOINTS) + 2) + "|")
    for name in sorted(names):
        kinds = [
            next((kind for kind, group in zip(KINDS, groups, strict=True) if name in group), "")
            for groups in LISTS.values()
        ]
        harmless = " ".join(f"`{json.dumps(value)}`" for value in values.get(name, ()))
        lines.append(f"| {' | '.join([f'`{name}`', *kinds, harmless])} |")
    return "\n".join(lines)


def test_the_page_has_the_table_of_fields():
    page, table = (ROOT / "docs/howto/serving.md").read_text(), table_of_fields()
    assert table in page, f"the table is to be:\n{table}"
    own = page.split("The fields of `/v1/completions`")[1].split("| harmless values |")[0]
    first_cells = [line.split("|")[1] for line in own.split("\n") if line.startswith("| `")]
    named = {name.split(".")[0] for cell in first_cells for name in re.findall(r"`([\w.]+)`", cell)}
    assert named - {"usage"} == openai_fields.SERVED


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_bodies_that_are_no_json_objects_are_refused(body):
    with pytest.raises(ApiError, match=r"the body is not (valid JSON|a JSON object)"):
        read_json(body)


def test_prompts_are_texts_or_token_ids():
    def prompts(prompt, encode=lambda text: list(text.encode())):
        return read_prompts(openai_api.Fields({"prompt": prompt}), encode, LIMITS)

    assert prompts("ab") == prompts([97, 98]) == prompts(["ab"]) == [[97, 98]]
    assert prompts(["a", [1]]) == [[97], [1]]
    for wrong in (None, {}, [[True]], [1, "a"], [["a"]], ["a"] * 65, "\udfff"):
        with pytest.raises(ApiError, match="prompt: got"):
            prompts(wrong)
    with pytest.raises(ApiError, match="the model has no tokenizer"):
        prompts("ab", None)


def test_messages_have_a_role_and_text():
    def messages(*found):
        return read_messages(openai_api.Fields({"messages": list(found)}))

    part = {"type": "text", "text": "a"}
    assert messages({"role": "user", "content": [part, part]}) == [{"role": "user", "content": "aa"}]
    for wrong in ((), ("a",), ({"role": "user"},), ({"role": "user", "content": [{"type": "image_url"}]},)):
        with pytest.raises(ApiError, match="messages: got"):
            messages(*wrong)


# Keys.

TEXT = st.text(max_size=9).filter(lambda text: text.isprintable())


@given(TEXT, TEXT, st.none() | TEXT, st.none() | TEXT)
def test_a_salt_is_that_of_one_key_and_one_cache_salt(key, other_key, cache_salt, other):
    assert (salt_of(key, cache_salt) == salt_of(other_key, other)) == ((key, cache_salt) == (other_key, other))
    assert salt_of(key, cache_salt).startswith(openai_api.OWN_SALTS) and "a secret" not in salt_of("a secret")
    assert salt_of(key, cache_salt).startswith(salt_of(other_key)) == (key == other_key)


def test_keys_are_taken_from_options_a_file_or_the_environment(tmp_path, monkeypatch):
    file, parser = tmp_path / "keys", serve.make_parser()
    file.write_text("# of the team\n  first \n\nthe second\n")

    def keys(*options):
        return keys_of(parser, parser.parse_args(["--checkpoint", "x", *options]))

    monkeypatch.delenv("KVJAX_API_KEY", raising=False)
    assert not keys() and keys().salt("any", None) is None and keys().salt("any", "a") == "a"
    found = keys("--api-key", "third", "--api-keys", str(file), "--api-key", "fourth")
    taken = [found.accepts(key) for key in ("first", "the second", "third", "fourth", "", "first ", "# of the team")]
    assert found and taken == [True] * 4 + [False] * 3
    assert found.salt("first", "a") == salt_of("first", "a") != salt_of("third", "a") == found.salt("third", "a")
    assert keys("--api-key", "first", "--share-prefixes").salt("first", "a") == "a"
    monkeypatch.setenv("KVJAX_API_KEY", "of the environment")
    assert keys().accepts("of the environment") and not keys("--api-key", "a").accepts("of the environment")
    assert not Keys([]).accepts("")


def test_an_engine_takes_all_stop_tokens_of_its_model(monkeypatch):
    """generation_config.json may have many; the template may add those that end a turn and a call."""
    monkeypatch.setattr(serve, "_note", lambda _: None)
    monkeypatch.setattr(serve, "Engine", lambda *_, **options: options["num_stop_tokens"])
    parser = serve.make_parser()
    args = parser.parse_args(["--checkpoint", str(CHECKPOINT), "--max-length", "64", "--chunk", "64"])
    for number, wanted in ((0, 8), (6, 8), (7, 9), (20, 22)):
        model = types.SimpleNamespace(config=types.SimpleNamespace(eos_token_ids=tuple(range(number))))
        assert serve._engine(parser, args, model, None, None, kvjax.Namespaces(), None, "none") == wanted


# A save at the end.


@pytest.mark.long
def test_a_save_is_tried_at_the_start_and_says_what_it_finds_and_saves(tmp_path, capsys):
    folder, notes, parser = tmp_path / "saved", list[str](), serve.make_parser()
    args = parser.parse_args(["--checkpoint", str(CHECKPOINT), "--save", str(folder)])

    def run(tokens):
        """A server that computes some tokens: what it says, and how many blocks it has loaded."""
        notes.clear()
        with stores.saved(parser, args, kvjax.Cache.create(PLAIN), kvjax.Namespaces(), notes.append) as found:
            driver = Driver(found.cache, verified=False)
            loaded = len(driver.mirror.index)
            driver.start(0, tokens)
            driver.do("release", 0)
            found.cache = driver.cache
        return notes[:], loaded

    none = f"--save: {folder}: the folder has no save yet, and the cache begins empty"
    assert run(range(8)) == ([none, "2 blocks are saved"], 0)
    (folder / f"{'0' * 16}.values").write_bytes(b"half")
    interrupted = f"--save: {folder}: 1 files of an interrupted save are deleted"
    assert run(range(20, 28)) == ([interrupted, "2 blocks are loaded", "4 blocks are saved"], 2)
    args.save = str(folder / "manifest.json" / "folder")
    with pytest.raises(SystemExit):
        run(range(4))
    assert capsys.readouterr().err.count("\n") == 1


def test_a_save_that_fails_at_the_end_is_an_error_of_one_line(tmp_path, capsys, monkeypatch):
    parser, folder = serve.make_parser(), str(tmp_path / "saved")
    args = parser.parse_args(["--checkpoint", str(CHECKPOINT), "--save", folder])

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache, names = kvjax.Cache.create(PLAIN), kvjax.Namespaces()
    with pytest.raises(SystemExit) as ended, stores.saved(parser, args, cache, names, print):
        monkeypatch.setattr(stores, "save", full)
    assert ended.value.code == 2
    line = f"--save: {folder}: no space left on device; the cache is not saved\n"
    assert capsys.readouterr().err.endswith(line)
