# SPDX-License-Identifier: Apache-2.0
"""The server's command with replicas on Ray: what clients see, also when replicas end (`make test-cluster`)."""

import asyncio
import collections
import os
import signal
import statistics
import time
import warnings

import httpx
import openai
import pytest

from models import recall
from tests.models.cluster_kit import (
    KEY,
    ON,
    PATIENCE,
    Running,
    hit_rate,
    processes,
    questions,
    wait_for,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("ray", reason="needs ray: make test-cluster")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SHORT = "bob is in oslo . where is bob ?"
DOCUMENT = recall.make_document(recall.np.random.default_rng(3), 30)
PEOPLE = list(DOCUMENT.facts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def running(saved):
    """Two replicas with three documents each."""
    with Running("--max-open", "16", "--max-waiting", "64", "--grace", "5", "--save", str(saved)) as found:
        yield found


def about(person):
    return f"{DOCUMENT.text} {recall.question(person)}"


async def chat(client, person, **fields):
    """The answer to a question about the document, and the cached tokens of its prompt."""
    response = await client.completions.create(
        model="recall", prompt=about(person), max_tokens=2, temperature=0, extra_body=fields
    )
    return response.choices[0].text.split()[0], response.usage.prompt_tokens_details.cached_tokens


def test_answers_streams_salts_and_refusals_are_those_of_a_server(running):
    async def main():
        async with running.client() as client:
            assert (await chat(client, PEOPLE[0]))[0] == DOCUMENT.facts[PEOPLE[0]]
            assert (await chat(client, PEOPLE[1]))[1] >= 140  # found where the first one was
            assert (await chat(client, PEOPLE[1], cache_salt="a tenant"))[1] == 0  # and by nobody else
            assert (await chat(client, PEOPLE[2], cache_salt="a tenant"))[1] >= 140
            fields = {"model": "recall", "prompt": SHORT, "max_tokens": 60, "temperature": 0, "extra_body": ON}
            chunks = [chunk async for chunk in await client.completions.create(stream=True, **fields)]
            whole = await client.completions.create(**fields)
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
            assert len(chunks) > 3 and chunks[-1].choices[0].finish_reason == "length"
            refusals = {404: {"model": "no"}, 400: {"max_tokens": 10**6}}
            for status, wrong in refusals.items():
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.completions.create(**{**fields, **wrong})
                assert caught.value.status_code == status

    asyncio.run(main())
    body = {"model": "recall", "prompt": "a"}
    assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 401
    long = httpx.post(
        f"{running.url}/v1/completions", json={"prompt": "a" * (5 << 20)}, headers={"authorization": f"Bearer {KEY}"}
    )
    assert long.status_code == 413


def test_each_document_stays_in_a_cache(running):
    """Served in turn, these questions find 0.38 of their tokens."""

    async def main():
        async with running.client() as client:
            rates = {}
            for seed, at_once in ((7, 1), (8, 6)):
                rates[at_once], num_right = await hit_rate(client, questions(6, 6, seed), at_once)
                assert num_right >= 35
            return rates

    rates = asyncio.run(main())
    print("cached share of the tokens, by questions at once:", rates)
    assert min(rates.values()) >= 0.80, rates


def test_clients_that_leave_cancel_their_answers(running):
    """The blocks that an engine stores tell what it has computed, also for nobody. Each answer is another text."""
    fields = {"model": "recall", "prompt": SHORT, "temperature": 1, "extra_body": ON}

    async def stream(*, leaves):
        async with running.client(timeout=120) as client:
            chunks = await client.completions.create(stream=True, max_tokens=280, n=3, seed=5 + leaves, **fields)
            async for _ in chunks:
                if leaves:
                    break
            await chunks.close()

    async def leave_answers():
        async with running.client(timeout=0.3) as client:
            asked = [client.completions.create(max_tokens=280, seed=9 + number, **fields) for number in range(24)]
            await asyncio.gather(*asked, return_exceptions=True)

    def num_computed(asked):
        before = running.metric("kvjax_stored_blocks_total")
        asyncio.run(asked)
        wait_for(lambda: sum(running.metric("kvjax_num_requests_running").values()) == 0)
        time.sleep(0.5)  # a row is released a turn after its request has ended
        return 8 * (sum(running.metric("kvjax_stored_blocks_total").values()) - sum(before.values()))

    whole = num_computed(stream(leaves=False))
    left = num_computed(stream(leaves=True))
    many = num_computed(leave_answers())
    print(f"tokens computed: {whole:.0f} of a stream, {left:.0f} of one whose client leaves, {many:.0f} of 24 answers")
    assert whole >= 800 and left < 3 * 280 / 4 and many < 24 * 280 / 2


def test_thirty_at_once_and_the_pages_of_all_replicas(running):
    async def main():
        async with running.client() as client:
            start = time.monotonic()
            answers = await asyncio.gather(*[chat(client, person) for person in PEOPLE[:30]])
            print(f"30 at once: {time.monotonic() - start:.2f} s")
            return [answer for answer, _ in answers]

    assert asyncio.run(main()) == [DOCUMENT.facts[person] for person in PEOPLE[:30]]
    assert len(running.replicas) == 2
    cache = running.pages("/cache")
    assert all(f"<h1>{name}</h1>" in cache for name in running.replicas)
    assert httpx.get(f"{running.url}/health").status_code == 200
    notes = [line for line in running.lines if "blocks are loaded" in line or "the cache begins empty" in line]
    assert len(notes) == 2 and all(any(name in note for note in notes) for name in running.replicas)


def test_the_front_costs_little(running):
    """Beside a server without replicas. The two answer in turn, so that both meet the same machine."""
    fields = {"model": "recall", "prompt": SHORT, "max_tokens": 280, "temperature": 0, "extra_body": ON}
    texts = set[str]()

    async def stream(client):
        chunks = [chunk async for chunk in await client.completions.create(stream=True, **fields)]
        assert chunks[-1].choices[0].finish_reason == "length"
        texts.add("".join(chunk.choices[0].text for chunk in chunks))

    async def listing(client):
        (model,) = (await client.models.list()).data
        assert model.id == "recall"

    async def main(alone):
        async with alone.client(timeout=120) as direct, running.client(timeout=120) as by_front:
            for client in (direct, by_front, direct, by_front):  # warms both up
                await stream(client)
            streams = [(await seconds_of(stream, direct), await seconds_of(stream, by_front)) for _ in range(12)]
            lists = [(await seconds_of(listing, direct), await seconds_of(listing, by_front)) for _ in range(60)]
            return [[statistics.median(column) for column in zip(*rows, strict=True)] for rows in (streams, lists)]

    with Running(replicas=None) as alone:
        streams, lists = asyncio.run(main(alone))
    print("median ms alone, and by the front:")
    for name, medians in (("a stream of 280 tokens", streams), ("GET /v1/models", lists)):
        print(name, ", ".join(f"{seconds * 1000:.1f}" for seconds in medians))
    assert len(texts) == 1
    assert streams[0] / streams[1] >= 0.8 and lists[1] - lists[0] < 0.015


async def seconds_of(ask, client):
    start = time.monotonic()
    await ask(client)
    return time.monotonic() - start


def test_more_than_may_wait_gets_429(running):
    async def ask(client, number):
        prompt = f"{recall.PEOPLE[number % 100]} is in paris . where is bob ?"
        try:
            await client.completions.create(model="recall", prompt=prompt, max_tokens=280, extra_body=ON)
            return 200, None
        except openai.APIStatusError as error:
            return error.status_code, error.response.headers.get("retry-after")

    async def main():
        async with running.client(timeout=120) as client:
            return collections.Counter(await asyncio.gather(*[ask(client, number) for number in range(200)]))

    counts = asyncio.run(main())
    print("200 at once, 2 x 16 open, 64 wait:", counts)
    assert set(counts) == {(200, None), (429, "1")} and counts[200, None] >= 2 * 16


def test_a_killed_replica_costs_no_new_request_and_every_stream_has_an_end(running):
    before = running.replicas

    async def stream(client, number):
        prompt = f"{recall.PEOPLE[number]} is in paris . where is {recall.PEOPLE[number]} ?"
        fields = {"model": "recall", "prompt": prompt, "max_tokens": 280, "temperature": 0, "extra_body": ON}
        try:
            chunks = [chunk async for chunk in await client.completions.create(stream=True, **fields)]
            return chunks[-1].choices[0].finish_reason
        except openai.APIError as error:
            return str(error)

    async def main():
        async with running.client(timeout=120) as client:
            tasks = [asyncio.create_task(stream(client, number)) for number in range(10)]
            await asyncio.sleep(0.5)
            os.kill(processes()[0], signal.SIGKILL)
            start = time.monotonic()
            num_answered = 0
            while True:
                answer, _ = await chat(client, PEOPLE[num_answered % 30])
                assert answer == DOCUMENT.facts[PEOPLE[num_answered % 30]]
                num_answered += 1
                names = await asyncio.to_thread(lambda: running.replicas)
                if len(names) == 2 and names != before:
                    break
                assert time.monotonic() - start < 60
                await asyncio.sleep(0.05)
            print(f"a new replica after {time.monotonic() - start:.1f} s, with {num_answered} new requests meanwhile")
            return collections.Counter(await asyncio.gather(*tasks))

    ends = asyncio.run(main())
    print("streams:", ends)
    assert set(ends) <= {"length", "the replica has ended"} and sum(ends.values()) == 10


def test_an_end_saves_the_caches_and_leaves_time_for_open_answers(running, saved):
    """The last test of this server."""

    async def main():
        async with running.client(timeout=120) as client:
            fields = {"model": "recall", "prompt": SHORT, "max_tokens": 100, "extra_body": ON}
            stream = await client.completions.create(stream=True, **fields)
            chunks = [await anext(stream)]
            running.process.send_signal(signal.SIGTERM)
            return [*chunks, *[chunk async for chunk in stream]]

    assert asyncio.run(main())[-1].choices[0].finish_reason == "length"
    assert running.process.wait(120) == 0
    assert sorted(path.name for path in saved.iterdir()) == ["0", "1"]
    assert all((saved / rank / "manifest.json").exists() for rank in "01"), list(saved.rglob("*"))


def test_a_replica_that_cannot_start_ends_the_command_with_a_line():
    failed = Running("--max-length", "99999")
    assert failed.process.wait(PATIENCE) == 2
    failed.__exit__()
    lines = [line for line in failed.lines if "99999" in line and not line.startswith("\x1b")]
    assert [line.startswith("python -m models.serve: --max-length: got 99999, wanted at most ") for line in lines] == [
        True
    ]


def test_a_mesh_inside_a_replica():
    """Each of two devices has a K/V head, and so half of the 904 KiB of K/V."""

    async def main(running):
        async with running.client() as client:
            return [await chat(client, person) for person in PEOPLE[:4]]

    with Running("--mesh", "2", replicas=1, devices=2) as running:
        answers = asyncio.run(main(running))
        assert any("452.0 KiB of K/V" in line for line in running.lines), "\n".join(running.lines)
    assert [answer for answer, _ in answers] == [DOCUMENT.facts[person] for person in PEOPLE[:4]]
    assert min(num_cached for _, num_cached in answers[1:]) >= 140
