# SPDX-License-Identifier: Apache-2.0
"""Replicas without Ray: the rule for a prompt, a front and its replicas in this process, metrics of all, options."""

import asyncio
import contextlib
import importlib
import json
import sys
import time
import types

import httpx
import numpy as np
import pytest
import zmq

import kvjax
import kvjax.stores
from kvjax.interop.vllm import Curve, Publisher
from models import cluster_asgi, cluster_options, prefix_router, recall, serve, stores
from models.cluster_asgi import Busy, Forwarded, NoReplica, ReplicaEnded, call_app
from models.cluster_front import merge_metrics, merge_pages
from models.openai_fields import CHATS, RESPONSES
from models.prefix_router import Place, Router
from models.recall import CHECKPOINT
from models.tenants import salt_of
from tests.models.cluster_kit import questions
from tests.models.front_kit import asked, documents_of, fronted, hit_rate, post
from tests.models.serve_kit import DOCUMENT, KEY, PEOPLE, prompt_of, with_template
from tests.wire_kit import ANY, eventually

LONG = list(range(40))


class FakeMirror:
    """A mirror with prompts, which may be silent."""

    def __init__(self, *prompts, salt=None):
        self.prompts, self.salt, self.is_silent, self.is_closed = list(prompts), salt, False, False

    def lookup(self, prompt, salt=None, lora=None):
        counts = [cluster_tokens(prompt, one) for one in self.prompts if salt == self.salt]
        return types.SimpleNamespace(tokens=max(counts, default=0))

    def close(self):
        self.is_closed = True


def cluster_tokens(one, other):
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def router_of(**mirrors):
    router = Router()
    router.mirrors = mirrors
    router._dealt = dict.fromkeys(mirrors, 0.0)
    return router


def names_of(places):
    return [place.name for place in places]


def test_the_replica_with_most_of_a_prompt_is_best_and_the_others_follow_by_their_load():
    router = router_of(a=FakeMirror(), b=FakeMirror(LONG), c=FakeMirror(LONG[:16]))
    assert router.rank(LONG)[0] == Place("b", 40)
    router.begin("one", Place("a", 0), LONG[::-1])
    assert names_of(router.rank(LONG)) == ["b", "c", "a"]
    assert names_of(router.rank(LONG, names=["a", "c"])) == ["c", "a"]
    assert router.rank(LONG, "a salt")[0].cached == 0
    router.mirrors["b"].is_silent = True
    assert names_of(router.rank(LONG)) == ["c", "a", "b"]


def test_prompts_that_no_replica_knows_are_dealt_out():
    router = router_of(a=FakeMirror(), b=FakeMirror(), c=FakeMirror())
    chosen = [router.route([n] * 20) for n in range(9)]
    assert sorted(chosen) == [*"aaabbbccc"] and chosen[:3] == [*"abc"]
    router.mirrors["a"].prompts.append(LONG[:16])  # a beginning of many prompts does not send all of them there
    chosen = [router.route([*LONG[:16], *([100 + n] * 500)]) for n in range(400)]
    assert min(map(chosen.count, "abc")) > 100, chosen
    assert sum(router._dealt.values()) <= prefix_router.MAX_DEALT


def test_prompts_follow_an_open_request_with_the_same_beginning_and_salt_until_its_replica_is_overloaded():
    router = router_of(a=FakeMirror(), b=FakeMirror())
    router.begin("one", Place("b", 0), LONG, "a salt")
    assert router.rank([*LONG, 7], "a salt")[0] == Place("b", 40)
    assert router.rank([*LONG, 7])[0] == Place("a", 0)
    assert router.rank([*LONG[:15], 99], "a salt")[0] == Place("a", 0)  # hardly a block
    for number in range(20):
        place = router.rank([*LONG, number], "a salt")[0]
        router.begin(number, place, [*LONG, number], "a salt", num_new=20)
        if place.name == "a":
            break
    assert place.name == "a" and number > 0
    for request in ("one", *range(20)):
        router.end(request)
    assert not router._open and router._dealt["b"] >= 40 + 21


def test_a_request_counts_where_it_is():
    router = router_of(a=FakeMirror(), b=FakeMirror())
    router.begin("one", Place("a", 0), LONG)
    assert router.place_of("one") == "a"
    router.begin("one", Place("b", 8), LONG, num_new=5)  # the first one was full
    assert router.place_of("one") == "b" and router._load("a") == 0 and router._load("b") == 37
    router.drop("one")
    assert router.place_of("one") is None and router._load("b") == 0
    router.end("one")
    assert router._dealt == {"a": 0.0, "b": 0.0}
    mirror = router.mirrors["a"]
    router.begin("two", Place("a", 0), LONG)
    router.remove("a")
    router.end("two")
    assert mirror.is_closed and router._dealt == {"b": 0.0} and router.rank(LONG) == [Place("b", 0)]


SPEC = kvjax.make_spec([kvjax.LayerSpec(1, 4)], num_blocks=8, max_seqs=1, max_length=32, block_size=8, dtype="float32")


def test_events_are_read_only_with_the_public_key_of_their_replica():
    public, secret = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    state, _ = kvjax.admit(kvjax.init(SPEC), 0, np.arange(16), 16)
    state, events = kvjax.commit(state, np.arange(16)[None], [16], seqs=[0])
    with Publisher(SPEC, bind=ANY, replay=ANY, curve=Curve(public, secret), heartbeat=0.05) as publisher:
        router = Router()
        router.add("one", publisher.endpoint, publisher.replay_endpoint, Curve(*zmq.curve_keypair(), public))
        router.add("two", publisher.endpoint, publisher.replay_endpoint, Curve(*zmq.curve_keypair(), other))
        router.add("three", publisher.endpoint, publisher.replay_endpoint)
        publisher.publish(events)
        with contextlib.closing(router):
            eventually(lambda: router.rank(range(17))[0] == Place("one", 16))
            assert [router.mirrors[name].counts["messages"] for name in ("two", "three")] == [0, 0]


# Calls of applications.

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
JSON = {**START, "headers": [(b"content-type", b"application/json")]}


def event(data, more=True):
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more}


def forwarded(*calls, leaves_after=None, timeout=5.0, has_types=False):
    """The messages of a response whose calls send some messages each, or raise. A client may leave after some."""
    remaining, closed, sent = list(calls), list[int](), list[dict]()

    async def main():
        gone = asyncio.Event()

        async def call():
            steps = remaining.pop(0)
            try:
                for step in steps:
                    if isinstance(step, Exception):
                        raise step
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    else:
                        yield [step]
            finally:
                closed.append(len(calls) - len(remaining))

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) == leaves_after:
                gone.set()
                await asyncio.sleep(0.05)

        response = Forwarded(call, timeout=timeout, request_id="an id", has_types=has_types)
        await response({"type": "http"}, receive, send)

    asyncio.run(main())
    return sent, closed


def test_a_request_of_which_nothing_was_sent_goes_to_another_replica():
    ended = ReplicaEnded("the replica has ended")
    sent, closed = forwarded([ended], [0.01, ended], [START, event(b"1", more=False)])
    assert sent == [START, event(b"1", more=False)] and closed == [1, 2, 3]
    sent, closed = forwarded([ended], [], [ended], [START])
    assert sent[0]["status"] == 503 and closed == [1, 2, 3]
    error = json.loads(sent[1]["body"])
    assert error["error"]["message"] == "the replica has ended" and error["request_id"] == "an id"
    assert (b"retry-after", b"5") in sent[0]["headers"]


@pytest.mark.parametrize(
    ("error", "status", "header"),
    [
        (Busy("full"), 429, (b"retry-after", b"1")),
        (NoReplica("no replica runs"), 503, (b"retry-after", b"5")),
        (0.5, 504, (b"x-should-retry", b"false")),
    ],
)
def test_a_request_that_no_replica_takes_is_refused_at_once(error, status, header):
    sent, closed = forwarded([error, START], [START], timeout=0.1)
    assert sent[0]["status"] == status and header in sent[0]["headers"] and closed == [1]
    assert set(json.loads(sent[1]["body"])) == {"error", "request_id"}


def test_a_stream_whose_replica_ends_has_an_error_and_an_end():
    sent, closed = forwarded([START, event(b"1"), ReplicaEnded("the replica has ended")], [START])
    assert sent[:2] == [START, event(b"1")] and closed == [1]
    error = json.loads(sent[2]["body"].decode().removeprefix("data: "))
    assert error["error"] == {
        "message": "the replica has ended",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert sent[2]["more_body"] is False and sent[2]["body"].endswith(b"\n\n")
    sent, _ = forwarded([START, event(b"1")])  # the replica sends no end
    assert b"only a part" in sent[2]["body"]


def test_a_stream_of_responses_ends_with_a_failed_response():
    first = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}, "sequence_number": 0}
    two = {**event(b""), "body": event(json.dumps(first).encode())["body"] + event(b"{}")["body"]}
    sent, _ = forwarded([START, two, ReplicaEnded("it has ended")], has_types=True)
    kind, data = sent[2]["body"].decode().strip().split("\n")
    assert kind == "event: response.failed"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "response.failed",
        "response": {"id": "resp_1", "status": "failed", "error": {"code": "server_error", "message": "it has ended"}},
        "request_id": "an id",
        "sequence_number": 2,
    }


def test_half_a_response_that_is_no_stream_ends_its_connection():
    with pytest.raises(Exception, match="it has ended"):
        forwarded([JSON, {"type": "http.response.body", "body": b"{", "more_body": True}, ReplicaEnded("it has ended")])


def test_a_client_that_leaves_ends_the_call():
    sent, closed = forwarded([START, event(b"1"), 60.0, event(b"2")], leaves_after=2)
    assert sent == [START, event(b"1")] and closed == [1]


def test_a_closed_call_cancels_the_task_of_its_application():
    ended = list[str]()

    async def app(scope, receive, send):
        assert await receive() == {"type": "http.request", "body": b"a body", "more_body": False}
        await send(START)
        await send(event(b"1"))
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(scope["path"])

    async def main():
        async with contextlib.aclosing(call_app(app, {"path": "/a"}, b"a body")) as lists:
            assert await anext(lists) == [START, event(b"1")]
            assert not ended
        assert ended == ["/a"]

    asyncio.run(main())


def lists_of(app):
    """(the lists of messages of an application, the seconds until each of them)"""

    async def main():
        start = time.monotonic()
        return [(messages, time.monotonic() - start) async for messages in call_app(app, {}, b"")]

    found = asyncio.run(main())
    return [messages for messages, _ in found], [seconds for _, seconds in found]


def test_messages_that_wait_are_one_list_and_a_failing_application_ends_them():
    async def app(scope, receive, send):
        await send(START)
        await send(event(b"1"))
        await send(event(b"2"))
        raise ValueError("broken")

    async def silent(scope, receive, send):
        raise ValueError("broken")

    async def head(scope, receive, send):
        await send(START)

    both = {**event(b"2"), "body": event(b"1")["body"] + event(b"2")["body"]}
    assert lists_of(app)[0] == [[START, both]]
    assert lists_of(silent)[0] == [] and lists_of(head)[0] == [[START]]


def test_lists_of_messages_follow_at_a_pace_and_neither_the_first_nor_the_last_one_waits(monkeypatch):
    monkeypatch.setattr(cluster_asgi, "PACE", 0.5)

    async def app(scope, receive, send):
        await send(START)
        await asyncio.sleep(0.05)
        for number in range(8):
            await send(event(str(number).encode(), more=number < 7))
            await asyncio.sleep(0.1 if number < 7 else 0)

    lists, seconds = lists_of(app)
    assert len(lists) == 3 and lists[0] == [START, event(b"0")]
    assert 0.5 < seconds[1] - seconds[0] < 0.65  # as the pace
    assert seconds[2] - seconds[1] < 0.4  # the end, whose list has no pause
    assert b"".join(part["body"] for part in [lists[0][1], *lists[1], *lists[2]]).count(b"data: ") == 8


# A front with two servers in this process.


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    """(a front's application, its replicas)"""
    with fronted(with_template(tmp_path_factory.mktemp("front") / "recall")) as made:
        yield made


def test_a_front_reads_the_tokens_and_the_salt_that_a_replica_caches(front):
    app, replicas = front
    text = prompt_of(PEOPLE[0])
    message = [{"role": "user", "content": text}]
    replicas.prompts.clear()
    responses = asked(
        app,
        post(prompt=text),
        post(CHATS, messages=message, cache_salt="a"),
        ("POST", RESPONSES, {"model": "recall", "input": text, "max_output_tokens": 1}),
        post(prompt=[[3, 4], [5]], n=2, max_tokens=7),
        post("/tokenize", prompt=text),
    )
    assert [response.status_code for response in responses] == [200] * 5
    tokens = recall.encode(text)
    first, chat, response, several, none = replicas.prompts
    assert first == (tokens, salt_of(KEY), 1)
    assert (chat.tokens, chat.salt) == (tokens, salt_of(KEY, "a")) and response.tokens == tokens
    assert several == ([3, 4], salt_of(KEY), 7 * 2 * 2 + 1) and none == ([], None, 0)


def test_a_front_answers_as_a_server_does(front):
    app, _ = front
    wrong = [
        post(prompt="a", model="no"),
        post(prompt="a", max_tokens=10**6),
        post(prompt="a " * 400),
        post(prompt=7),
        ("GET", "/v1/models/no", None),
        ("GET", "/nowhere", None),
        ("POST", "/tokenize", {"prompt": 1}),
    ]
    responses = asked(app, *wrong)
    assert [response.status_code for response in responses] == [404, 400, 400, 400, 404, 404, 400]
    for response in responses:
        assert response.json()["request_id"] == response.headers["x-request-id"], response.text
    models, health, version = asked(
        app, ("GET", "/v1/models", None), ("GET", "/health", None), ("GET", "/version", None)
    )
    assert models.json()["data"][0]["id"] == "recall" and models.json()["data"][0]["max_model_len"] == 320
    assert health.status_code == 200 and version.json() == {"version": kvjax.__version__}
    denied = asked(app, ("GET", "/v1/models", None), ("GET", "/cache", None), post(prompt="a"), key="wrong")
    assert [response.status_code for response in denied] == [401] * 3
    (long,) = asked(app, post(prompt="a" * (5 << 20)))
    assert long.status_code == 413
    (elsewhere,) = asyncio.run(_from_host(app, "evil.example"))
    assert elsewhere.status_code == 403


async def _from_host(app, host):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
        return [await client.get("/v1/models")]


def test_each_document_stays_in_a_cache(front):
    """Each cache holds three of four documents. Served in turn, they would find less than half of the tokens."""
    app, replicas = front
    documents = documents_of(seed=7)
    assert hit_rate(app, replicas, documents, "documents") > 0.75
    places = {replicas.router.rank(recall.encode(one.text), salt_of(KEY, "documents"))[0].name for one in documents}
    assert places == {"one", "two"}


def test_metrics_and_caches_of_all_replicas(front):
    app, _ = front
    metrics, cache, other = (
        *asked(app, ("GET", "/metrics", None), ("GET", "/cache", None)),
        *asked(app, ("GET", "/cache", None), key="another"),
    )
    lines = metrics.text.splitlines()
    assert sum(line.startswith('kvjax_queried_tokens_total{replica="') for line in lines) == 2
    assert len([line for line in lines if line.startswith("# TYPE kvjax_queried_tokens_total ")]) == 1
    assert cache.text.count("<h1>one</h1>") == cache.text.count("<h1>two</h1>") == 1
    assert cache.text.count("<head>") == cache.text.count("</html>") == 1
    word = DOCUMENT.text.split()[0]
    assert word in cache.text and word not in other.text  # each key sees its own prompts


def test_the_metrics_of_replicas_are_valid_as_one_text():
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, parser

    texts = []
    for number, name in enumerate("ab"):
        registry = CollectorRegistry()
        Counter("kvjax_tokens", "Tokens.", registry=registry).inc(number + 1)
        Counter("kvjax_ends", 'Ends, of "kinds"\nof lines.', ["kind"], registry=registry).labels('a "{b} c\\').inc()
        Histogram("kvjax_seconds", "Seconds.", registry=registry, buckets=(1, 2)).observe(number)
        texts.append((name, generate_latest(registry)))
    found = {family.name: family for family in parser.text_string_to_metric_families(merge_metrics(texts).decode())}
    assert {sample.labels["replica"]: sample.value for sample in found["kvjax_tokens"].samples} == {"a": 1.0, "b": 2.0}
    assert {
        tuple(sample.labels.items()) for sample in found["kvjax_ends"].samples if sample.name.endswith("total")
    } == {(("replica", name), ("kind", 'a "{b} c\\')) for name in "ab"}
    assert found["kvjax_seconds"].type == "histogram"
    assert len([one for one in found["kvjax_seconds"].samples if one.labels.get("le") == "+Inf"]) == 2
    assert merge_metrics([]) == b"" and "<body></body>" in merge_pages([])


REFUSED = {
    "--gpus 1": "--gpus: got one without --replicas",
    "--max-replicas 2": "--max-replicas: got one without --replicas",
    "--replicas 2 --max-replicas 1": "--max-replicas: got 1, wanted at least the 2 of --replicas",
    "--replicas 2 --publish tcp://*:5557": (
        "--publish: got one with --replicas, but each replica publishes to the front, encrypted"
    ),
    "--replicas 2 --max-connections 5": (
        "--max-connections: got one with --replicas, but clients connect to Ray's proxies"
    ),
    "--replicas 2 --agent 50051": ("--agent: got port 50051 with --replicas, wanted 0, a free port for each replica"),
    "--replicas 2 --operator-key a": (
        "--operator-key: got one with --replicas, but no path of the front changes a single engine"
    ),
    "--replicas 2 --store s3://a/b": (
        "--store: got s3://a/b with --replicas, wanted a folder, in which each replica has its own"
    ),
    "--replicas 2 --port 0": "--port: got 0 with --replicas, wanted the port of each machine's proxy",
    "--replicas 0": "--replicas: got '0', wanted an int of at least 1 and at most 1024",
}


@pytest.mark.parametrize(("options", "message"), REFUSED.items())
def test_options_that_replicas_cannot_have_are_refused(options, message, capsys, monkeypatch):
    monkeypatch.setattr(cluster_options.commands, "check_extra", lambda *_: None)
    with pytest.raises(SystemExit):
        serve.main(["--checkpoint", str(CHECKPOINT), *options.split()])
    assert capsys.readouterr().err == f"python -m models.serve: {message}\n"


def test_a_save_of_other_weights_does_not_stop_a_replica(tmp_path, capsys):
    folder = str(tmp_path / "save")
    kvjax.stores.save(kvjax.Cache.create(SPEC), folder, model="other weights", names=kvjax.Namespaces())
    parser = serve.make_parser()
    for options in ([], ["--replicas", "2"]):
        args = parser.parse_args(["--checkpoint", str(CHECKPOINT), "--save", folder, *options])
        notes = []
        with contextlib.suppress(SystemExit):
            cache, names = kvjax.Cache.create(SPEC), kvjax.Namespaces()
            with stores.saved(parser, args, cache, names, notes.append) as saved:
                assert saved.cache is cache and not saved.loaded
    refused = capsys.readouterr().err
    assert refused.startswith("python -m models.serve: --save: model: got 'checkpoint ")
    assert notes[0].startswith(f"--save: {folder} is not loaded: model: got 'checkpoint ")
    assert notes[1].endswith("blocks are saved")


@pytest.mark.long
def test_batches_are_sorted_and_their_answers_are_not(monkeypatch):
    """Ray Data is replaced by a loop over the batches, from the last one to the first one."""

    class Dataset:
        def __init__(self, rows, override_num_blocks):
            self.rows, self.num_blocks = rows, override_num_blocks

        def map_batches(self, made, *, fn_constructor_args, batch_size, compute):
            assert compute == 2 and self.num_blocks == -(-len(self.rows) // batch_size)
            call = made(*fn_constructor_args)
            blocks = [self.rows[start : start + batch_size] for start in range(0, len(self.rows), batch_size)]
            for block in reversed(blocks):
                answered = call({name: [row[name] for row in block] for name in block[0]})
                for position, row in enumerate(block):
                    row.update({name: values[position] for name, values in answered.items()})
            self.rows = [row for block in reversed(blocks) for row in block]
            return self

        def take_all(self):
            return self.rows

    data = types.ModuleType("ray.data")
    data.from_items = Dataset
    data.ActorPoolStrategy = lambda size: size
    package = types.ModuleType("ray")
    package.data = data
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.setitem(sys.modules, "ray.data", data)
    monkeypatch.setattr(kvjax, "enable_compilation_cache", lambda: None)
    monkeypatch.delitem(sys.modules, "models.ray_batches", raising=False)
    ray_batches = importlib.import_module("models.ray_batches")
    pairs = questions(4, 6)
    texts = [text for text, _ in pairs]
    sizes = {"num_blocks": 112, "max_seqs": 4, "max_length": 320, "block_size": 8}
    rows = ray_batches.map_prompts(str(CHECKPOINT), texts, max_new_tokens=2, actors=2, batch_size=6, **sizes)
    assert [row["prompt"] for row in rows] == texts
    num_right = sum(row["answer"].split()[0] == place for row, (_, place) in zip(rows, pairs, strict=True))
    assert num_right >= 23
    assert sum(row["cached_tokens"] for row in rows) / sum(len(recall.encode(text)) for text in texts) > 0.75
    del sys.modules["models.ray_batches"]  # it has the loop
