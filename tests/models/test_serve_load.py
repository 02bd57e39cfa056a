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
    MAX_OPEN,
    NEW,
    ON,
    PEOPLE,
    Running,
    answer_about,
    answer_to,
    idle,
    prompt_of,
)
from tests.unit.interop.forest import named, projected

FACTS = list(DOCUMENT.facts.items())


def ask(client, prompt, *, is_chat=False, **fields):
    """A coroutine of OpenAI's client: a greedy completion, or the chat of which the template makes the same prompt."""
    fields = {**GREEDY, **fields, "extra_body": {**ON, **fields.get("extra_body", {})}}
    if is_chat:
        return client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **fields)
    return client.completions.create(prompt=prompt, **fields)


async def answers_of(found, *, streams):
    """The texts of the choices, their reasons to end, and the usage."""
    texts, finishes, usage = {}, {}, None
    if not streams:
        choices = [getattr(choice, "message", choice) for choice in found.choices]
        texts = [choice.content if hasattr(choice, "content") else choice.text for choice in choices]
        return texts, [choice.finish_reason for choice in found.choices], found.usage
    async for chunk in found:
        usage = chunk.usage
        for choice in chunk.choices:
            new = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (new or "")
            finishes[choice.index] = choice.finish_reason
    return [texts[n] for n in sorted(texts)], [finishes[n] for n in sorted(finishes)], usage


# Requests of all kinds.

SAMPLED, SEED, SALTS = 8, 7, ("a", "b")  # prompts of which there are samples too
PROMPTS = [*map(prompt_of, PEOPLE), *(f"{who} is in {where} . {recall.question(who)}" for who, where in FACTS)]


async def request(client, rng, samples):
    """A random request; returns what became of it: "same", "tie" or "cancelled". A seed's first samples are right."""
    is_sampled, n, streams = rng.random() < 0.1, rng.choice((1, 1, 1, 2)), rng.random() < 0.5
    prompt = PROMPTS[rng.randrange(SAMPLED if is_sampled else len(PROMPTS))]
    answer, stop, num_tokens = answer_to(prompt), None, NEW
    wanted = answer.text
    if rng.random() < 0.3 and not is_sampled:
        stop = [f" {answer.words[rng.randrange(6, NEW - 2)]}", "never"]
        wanted = answer.text[: answer.text.index(stop[0])]
        num_tokens = len(answer.text[: len(wanted) + len(stop[0])].split())
    sent = ask(
        client, prompt, is_chat=rng.random() < 0.5, max_tokens=NEW, n=n, stop=stop, stream=streams,
        extra_body={"cache_salt": rng.choice(SALTS)}, **({"temperature": 1, "seed": SEED} if is_sampled else {}),
        **({"stream_options": {"include_usage": True}} if streams else {}),
    )  # fmt: skip
    try:
        async with asyncio.timeout(rng.uniform(0, 0.1) if rng.random() < 0.05 else None):
            texts, finishes, usage = await answers_of(await sent, streams=streams)
    except TimeoutError:
        return "cancelled"
    assert usage.prompt_tokens == len(recall.encode(prompt)) and len(texts) == n
    if is_sampled:
        assert texts == [samples.setdefault((prompt, sample), text) for sample, text in enumerate(texts)]
    elif texts != [wanted] * n:
        assert all(answer.begins(text) for text in texts)
        return "tie"
    assert finishes == ["stop" if stop else "length"] * n and usage.completion_tokens == n * num_tokens
    return "same"


@pytest.mark.parametrize(
    "number", [pytest.param(100, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_requests_of_all_kinds_get_the_models_answers_and_leave_nothing_in_use(server, number):
    """Chats and completions, streams, samples, stop strings, tenants, and clients that go away."""
    rng, samples = random.Random(5), {}
    waiting = iter([random.Random(rng.random()) for _ in range(number)])

    async def work(client):
        return [await request(client, one, samples) for one in waiting]

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            async with asyncio.timeout(180):
                return await asyncio.gather(*(work(client) for _ in range(MAX_OPEN // 2)))

    found = collections.Counter(outcome for outcomes in asyncio.run(run()) for outcome in outcomes)
    print(found)
    assert found.total() == number and found["same"] >= 0.9 * number and found["tie"] <= 0.02 * number
    assert found["cancelled"] > 0
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
