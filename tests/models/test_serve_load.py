# SPDX-License-Identifier: Apache-2.0
"""A server under load: many streams, a thousand requests, tenants, and subscribers."""

import asyncio
import collections
import contextlib
import random
import time

import numpy as np
import openai
import pytest

import kvjax
from kvjax.interop.vllm import Subscriber
from models import recall, serve
from models.recall import CHECKPOINT
from tests import wire_kit
from tests.models.serve_kit import (
    DOCUMENT,
    GREEDY,
    KEY,
    LONG,
    ON,
    PEOPLE,
    Running,
    answer_about,
    answer_to,
    idle,
    prompt_of,
    watched,
)
from tests.unit.interop.forest import named, projected

FACTS = list(DOCUMENT.facts.items())


@pytest.fixture
def watch(server, monkeypatch):
    with watched(server, monkeypatch) as found:
        yield found


def ask(client, prompt, *, is_chat=False, **fields):
    """A coroutine of OpenAI's client: a greedy completion, or the chat of which the template makes the same prompt."""
    fields = {**GREEDY, **fields, "extra_body": {**ON, **fields.get("extra_body", {})}}
    if is_chat:
        return client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **fields)
    return client.completions.create(prompt=prompt, **fields)


async def texts_of(stream):
    """The texts of a stream's choices, their reasons to end, and its usage."""
    texts, finishes, usage = {}, {}, None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            new = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (new or "")
            finishes[choice.index] = choice.finish_reason
    return [texts[n] for n in sorted(texts)], [finishes[n] for n in sorted(finishes)], usage


def text_of(choice):
    return choice.message.content if hasattr(choice, "message") else choice.text


async def stream_of(client, number):
    """Streams one of many requests, all of which differ; returns whether its answer is the model's."""
    person, n = PEOPLE[number % len(PEOPLE)], 2 if number % 5 == 0 else 1
    answer = answer_about(person)
    stop, wanted, num_tokens = None, answer.text, 16
    if number % 3 == 0:
        stop = [f" {answer.words[6 + number % 8]}", "never"]
        wanted = answer.text[: answer.text.index(stop[0])]
        num_tokens = len(answer.text[: len(wanted) + len(stop[0])].split())
    stream = await ask(
        client, prompt_of(person), is_chat=number % 2 == 1, max_tokens=16, n=n, stop=stop, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, finishes, usage = await texts_of(stream)
    assert usage.prompt_tokens == len(recall.encode(prompt_of(person)))
    assert len(texts) == n and all(answer.begins(text) for text in texts)
    is_same = texts == [wanted] * n
    if is_same:
        assert finishes == ["stop" if stop else "length"] * n
        assert usage.completion_tokens == n * num_tokens
    return is_same


@pytest.mark.long
def test_64_streams_at_a_time_say_what_the_model_does(server):
    """Chats and completions, some with two samples or stop strings. Hardly one differs, and only at a tie."""

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(stream_of(client, number) for number in range(64)))

    assert sum(asyncio.run(run())) >= 60
    idle(server)


# A thousand requests.

WORDS = 8  # of an answer
SAMPLED = 8  # prompts of which there are samples too
SEED, SALTS = 7, ("a", "b")
PROMPTS = [*map(prompt_of, PEOPLE), *(f"{who} is in {where} . {recall.question(who)}" for who, where in FACTS)]


async def request(client, rng, samples):
    """A random request; returns what became of it: "same", "tie" or "cancelled". A seed's first samples are right."""
    is_sampled, n, streams = rng.random() < 0.1, rng.choice((1, 1, 1, 2)), rng.random() < 0.5
    prompt = PROMPTS[rng.randrange(SAMPLED if is_sampled else len(PROMPTS))]
    options = {"temperature": 1, "seed": SEED} if is_sampled else {}
    sent = ask(
        client, prompt, is_chat=rng.random() < 0.5, max_tokens=WORDS, n=n, stream=streams,
        extra_body={"cache_salt": rng.choice(SALTS)}, **options,
    )  # fmt: skip
    try:
        async with asyncio.timeout(rng.uniform(0, 0.1) if rng.random() < 0.05 else None):
            found = await sent
            texts = (await texts_of(found))[0] if streams else [text_of(choice) for choice in found.choices]
    except TimeoutError:
        return "cancelled"
    if is_sampled:
        assert texts == [samples.setdefault((prompt, sample), text) for sample, text in enumerate(texts)]
        return "same"
    answer = answer_to(prompt)
    assert all(answer.begins(text) for text in texts)
    return "same" if texts == [f" {' '.join(answer.words[:WORDS])}"] * n else "tie"


@pytest.mark.slow
def test_a_thousand_requests_get_the_models_answers_and_leave_nothing_in_use(server):
    rng, samples = random.Random(5), {}
    waiting = iter([random.Random(rng.random()) for _ in range(1000)])

    async def work(client):
        return [await request(client, one, samples) for one in waiting]

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            async with asyncio.timeout(180):
                return await asyncio.gather(*(work(client) for _ in range(32)))

    found = collections.Counter(outcome for outcomes in asyncio.run(run()) for outcome in outcomes)
    print(found)
    assert found.total() == 1000 and found["same"] >= 900 and found["tie"] <= 10 and found["cancelled"] >= 5
    idle(server)


# Tenants.


@pytest.mark.long
def test_a_prompt_of_another_tenant_takes_as_many_turns_as_one_that_is_new(server, watch):
    """So no clock tells a tenant of another one's prompts."""

    def ask_for(salt):
        before = len(watch.rows)
        found = client.completions.create(
            prompt=LONG, max_tokens=1, extra_body={"cache_salt": f"turns {salt}"}, **GREEDY
        )
        idle(server)
        return found.usage.prompt_tokens_details.cached_tokens, len(watch.rows) - before

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        cold, other, *again = [ask_for(salt) for salt in "abab"]
    cached = len(recall.encode(LONG)) - 1
    assert cold == other and cold[0] == 0 and again[0] == again[1]
    assert again[0][0] == cached and again[0][1] + 5 <= cold[1]


@pytest.mark.long
def test_a_prompt_of_another_tenant_takes_as_long_as_one_that_is_new(server):
    def seconds(prompt, salt):
        begin = time.perf_counter()
        client.completions.create(prompt=prompt, max_tokens=1, extra_body={"cache_salt": f"time {salt}"}, **GREEDY)
        return time.perf_counter() - begin

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        times = [[seconds(f"{person} {LONG}", salt) for salt in "aba"] for person in PEOPLE[:9]]
    cold, other, warm = np.median(times, axis=0)
    print(f"{cold:.4f} s cold, {other:.4f} s of another tenant, {warm:.4f} s warm")
    assert other > 1.5 * warm and cold / 2 < other < 2 * cold


# Subscribers.


PLAIN = pytest.param((), marks=pytest.mark.long)
TIERS = pytest.param(("--blocks", "96", "--host-blocks", "200"), marks=pytest.mark.slow)


@pytest.mark.parametrize("more", [PLAIN, TIERS])
def test_mirrors_of_what_is_published_under_load_are_the_engines_state(more, monkeypatch):
    """One subscriber is there from the beginning, and one comes amid requests, which evict. There are many tenants."""

    def subscriber():
        return stack.enter_context(Subscriber(*endpoints))

    async def work(client, numbers, subs):
        for number in numbers:
            salt = {"cache_salt": str(number % 41)} if number % 41 else {}
            person = PEOPLE[number % len(PEOPLE)]
            found = await ask(client, prompt_of(person), max_tokens=16, n=1 + number % 2, extra_body=salt)
            assert all(answer_about(person).begins(choice.text) for choice in found.choices)
            if number == 100:
                subs.append(subscriber())

    async def run():
        subs, numbers = [subscriber()], iter(range(240))
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            await asyncio.gather(*(work(client, numbers, subs) for _ in range(24)))
        return subs

    with contextlib.ExitStack() as stack:
        options = ("--publish", wire_kit.ANY, "--replay", wire_kit.ANY, "--agent", "0", *more)
        notes = list[str]()
        monkeypatch.setattr(serve, "_note", notes.append)
        server = Running(CHECKPOINT, *options)
        stack.callback(server.close)
        endpoints = notes[0].removeprefix("publishing at ").split(" and ")
        reader = stack.enter_context(wire_kit.Reader(notes[1].removeprefix("an agent listens at ")))
        subs = asyncio.run(run())
        idle(server)
        state, names = server.engine.state, server.engine.names
        mirror = kvjax.fold(kvjax.events.snapshot(state))
        stats = kvjax.debug.stats(state)
        assert stats.empty_blocks < stats.num_blocks / 4 and len({one[0] for one in mirror.nodes.values()}) > 10
        assert mirror.index == kvjax.events.index_of(state)
        wanted = projected(mirror, state.spec, names)
        assert len(subs) == 2 and all(wire_kit.agrees(sub, wanted) for sub in subs)
        assert reader.agrees(named(mirror, state.spec, names, model="recall"))
