# SPDX-License-Identifier: Apache-2.0
"""A server under load: many streams, clients that go away at any stage, tenants, a subscriber, and sudden ends."""

import asyncio
import collections
import contextlib
import functools
import random
import threading
import time

import numpy as np
import pytest

import kvjax
from kvjax.serving import engine_thread
from models import recall, serve
from models.demo import CHECKPOINT
from tests import wire_kit
from tests.models.serve_kit import (
    DOCUMENT,
    GREEDY,
    KEY,
    ON,
    PATIENCE,
    PEOPLE,
    Running,
    batch,
    expected,
    prompt_of,
    request_of,
    with_template,
)
from tests.unit.interop.forest import named, projected

FACTS = list(DOCUMENT.facts.items())
LONG = " ".join(prompt_of(person) for person in PEOPLE)  # a prompt of several chunks


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Running(with_template(tmp_path_factory.mktemp("served") / "recall"), "--max-waiting", "256")
    yield running
    running.close()


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


def idle(server):
    """Requires that nothing runs any more, and that all blocks are free or can be evicted."""
    server.wait_for(lambda: server.engine.running == server.engine.waiting == server.rows == 0)
    state = server.engine.state
    kvjax.check(state, rows=())
    assert all(not np.asarray(group.blocks.refcount).any() for group in state.groups)
    assert kvjax.debug.stats(state).active_blocks == 0


async def stream_of(client, number):
    """Streams one of many requests, all of which differ; returns whether its answer is the one of a batch."""
    person, n = PEOPLE[number % len(PEOPLE)], 2 if number % 5 == 0 else 1
    answer = batch()[person]
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
    assert len(texts) == n and all(answer.agrees(text) for text in texts)
    is_same = texts == [wanted] * n
    if is_same:
        assert finishes == ["stop" if stop else "length"] * n
        assert usage.completion_tokens == n * num_tokens
    return is_same


@pytest.mark.long
def test_64_streams_at_a_time_say_what_a_batch_does(server):
    """Chats and completions, some with two samples or stop strings. Hardly one differs, and only at a tie."""
    import openai

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


@functools.cache
def table():
    """The answers of `run_batch` by prompt and seed, None for the greedy one."""
    keys = [(prompt, None) for prompt in PROMPTS]
    keys += [(prompt, seed) for prompt in PROMPTS[:SAMPLED] for seed in (SEED, SEED + 1)]
    sampling = [kvjax.Sampling(temperature=float(seed is not None)) for _, seed in keys]
    answers = expected(
        [recall.encode(prompt) for prompt, _ in keys], WORDS, sampling=sampling, seeds=[seed or 0 for _, seed in keys]
    )
    return dict(zip(keys, answers, strict=True))


async def request(client, rng):
    """A random request; returns what became of it: "same", "tie" or "cancelled"."""
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
    wanted = [table()[prompt, SEED + sample if is_sampled else None] for sample in range(n)]
    if texts == [answer.text for answer in wanted]:
        return "same"
    assert not is_sampled and all(answer.agrees(text) for text, answer in zip(texts, wanted, strict=True))
    return "tie"


@pytest.mark.long
def test_a_thousand_requests_get_what_a_batch_does_and_leave_nothing_in_use(server):
    import openai

    table()
    rng = random.Random(5)
    waiting = iter([random.Random(rng.random()) for _ in range(1000)])

    async def work(client):
        return [await request(client, one) for one in waiting]

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
    import openai

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
    import openai

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


@pytest.mark.long
def test_mirrors_of_what_is_published_under_load_are_the_engines_state(monkeypatch):
    """One subscriber is there from the beginning, and one comes amid requests, which evict. There are many tenants."""
    import openai

    from kvjax.interop.vllm import Subscriber

    def subscriber():
        return stack.enter_context(Subscriber(*endpoints))

    async def work(client, numbers, subs):
        for number in numbers:
            salt = {"cache_salt": str(number % 41)} if number % 41 else {}
            person = PEOPLE[number % len(PEOPLE)]
            found = await ask(client, prompt_of(person), max_tokens=16, n=1 + number % 2, extra_body=salt)
            assert all(batch()[person].agrees(choice.text) for choice in found.choices)
            if number == 100:
                subs.append(subscriber())

    async def run():
        subs, numbers = [subscriber()], iter(range(240))
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            await asyncio.gather(*(work(client, numbers, subs) for _ in range(24)))
        return subs

    with contextlib.ExitStack() as stack:
        options = ("--publish", wire_kit.ANY, "--replay", wire_kit.ANY, "--agent", "0")
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
        assert kvjax.debug.stats(state).cached_blocks > 500 and len({one[0] for one in mirror.nodes.values()}) > 10
        assert mirror.index == kvjax.events.index_of(state)
        wanted = projected(mirror, state.spec, names)
        assert len(subs) == 2 and all(wire_kit.agrees(sub, wanted) for sub in subs)
        assert reader.agrees(named(mirror, state.spec, names, model="recall"))


# Clients that go away.

N, NEW = 4, 40


class Watch:
    """The requests of an engine, what is cancelled, and the rows in use after each turn; a turn can be held.

    Attributes:
      handles: of all samples that were submitted.
      cancels: the number of turns that had begun at each cancel.
      rows: in use, after each turn.
    """

    def __init__(self, engine, monkeypatch):
        self.handles, self.cancels, self.rows = [], [], []
        self._stage, self._held, self._go = None, threading.Event(), threading.Event()
        submit, cancel, turn = engine.submit, engine._cancel, engine_thread.turn

        def submitting(*args, **options):
            handle = submit(*args, **options)
            self.handles += handle.samples
            return handle

        def cancelling(handle):
            self.cancels.append(len(self.rows))
            cancel(handle)

        def turning(*args, **options):
            if self._stage is not None and self._stage():
                self._stage = None
                self._held.set()
                assert self._go.wait(PATIENCE)
            found = turn(*args, **options)
            self.rows.append(int(np.sum(np.asarray(found[0].cache.state.seqs.length) > 0)))
            return found

        monkeypatch.setattr(engine, "submit", submitting)
        monkeypatch.setattr(engine, "_cancel", cancelling)
        monkeypatch.setattr(engine_thread, "turn", turning)

    def hold(self, stage):
        """Holds the first turn before which something is true."""
        self._held.clear()
        self._go.clear()
        self._stage = stage

    def wait(self):
        """Waits until a turn is held."""
        assert self._held.wait(PATIENCE)

    def go(self):
        """Lets it begin."""
        self._go.set()

    @property
    def lengths(self):
        """The number of tokens of each answer so far."""
        return [len(handle.output.tokens) for handle in self.handles]


@pytest.fixture
def watch(server, monkeypatch):
    server.wait_for(lambda: server.engine.drain(0))
    found = Watch(server.engine, monkeypatch)
    yield found
    found.go()
    server.wait_for(lambda: server.engine.drain(0))


def body_of(prompt="alice is in", *, streams=False, **fields):
    return {"prompt": prompt, "n": N, "max_tokens": NEW, "stream": streams, **ON, **GREEDY, **fields}


STAGES = {
    "prefill": lambda watch: watch.handles and watch.handles[0].times.admitted and not any(watch.lengths),
    "the first token": lambda watch: max(watch.lengths, default=0) >= 1,
    "the middle": lambda watch: max(watch.lengths, default=0) >= NEW // 2,
    "the last tokens": lambda watch: max(watch.lengths, default=0) >= NEW - 2,
}
each_way = pytest.mark.parametrize("streams", [False, True])


@pytest.mark.long
@each_way
@pytest.mark.parametrize("stage", STAGES)
def test_two_turns_after_a_client_has_gone_its_rows_are_free(server, watch, stage, streams):
    watch.hold(lambda: STAGES[stage](watch))
    prompt = LONG if stage == "prefill" else "alice is in"
    with server.connect() as connection:
        connection.sendall(request_of("/v1/completions", body_of(prompt, streams=streams)))
        watch.wait()
        assert server.engine.running == N
    server.wait_for(lambda: len(watch.cancels) == N)
    assert {*watch.cancels} == {len(watch.rows)} and watch.rows[-1] > 0
    watch.go()
    idle(server)
    assert watch.rows[watch.cancels[0] + 1] == 0
    if stage != "the last tokens":
        assert {handle.output.finish for handle in watch.handles} == {"cancelled"}
    assert len(watch.cancels) == N


@pytest.mark.long
@each_way
@pytest.mark.parametrize("has_slot", [False, True])
def test_a_client_that_goes_away_while_it_waits_gets_no_row(server, watch, has_slot, streams):
    """It waits for the scheduler, or has a slot of it already and waits for one of the rows, which others have."""
    others = [server.engine.submit([5], max_new_tokens=1000) for _ in range(8)]
    server.wait_for(lambda: all(handle.output.tokens for handle in others))
    watch.handles.clear()

    def holds():
        return not has_slot or (len(watch.handles) == N and server.engine.running == len(others) + N)

    watch.hold(holds)
    if not has_slot:
        watch.wait()
    with server.connect() as connection:
        connection.sendall(request_of("/v1/completions", body_of(streams=streams)))
        if has_slot:
            watch.wait()
        server.wait_for(lambda: len(watch.handles) == N)
        assert server.engine.waiting == (0 if has_slot else N)
    server.wait_for(lambda: len(watch.cancels) == N)
    watch.go()
    for handle in watch.handles:
        output = handle.result(PATIENCE)
        assert (output.finish, output.tokens, handle.times.admitted) == ("cancelled", [], None)
    assert not any(handle.done for handle in others)
    for handle in others:
        handle.cancel()
    idle(server)


@pytest.mark.long
def test_a_client_that_goes_away_amid_its_request_has_submitted_nothing(server, watch):
    import httpx

    data = request_of("/v1/completions", body_of())
    for size in (10, data.index(b"\r\n\r\n") + 4, len(data) - 1):
        with server.connect() as connection:
            connection.sendall(data[:size])
        assert httpx.get(f"{server.url}/health").status_code == 200
    idle(server)
    assert watch.handles == watch.rows == []


@pytest.mark.long
@each_way
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_goes_away_after_the_end_cancels_nothing(server, watch, reads, streams):
    with server.connect() as connection:
        connection.sendall(request_of("/v1/completions", body_of(streams=streams)))
        if reads:
            found = b""
            while not found.rstrip().endswith(b"\r\n0" if streams else b"}"):
                found += connection.recv(1 << 16)
            assert found.count(b'"length"') == N and (b"[DONE]" in found) == streams
        server.wait_for(lambda: len(watch.handles) == N and all(handle.done for handle in watch.handles))
    idle(server)
    assert not watch.cancels
    assert {handle.output.finish for handle in watch.handles} == {"length"}
