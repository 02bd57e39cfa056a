# SPDX-License-Identifier: Apache-2.0
"""The server against clients that would stop it: other clients get their answers, and nothing is left."""

import asyncio
import concurrent.futures
import contextlib
import json
import pathlib
import random
import signal
import socket
import threading
import time

import httpx
import pytest

from models.recall import CHECKPOINT
from models.serve_http import Patience
from models.serve_pages import Pages
from tests.models.serve_kit import (
    GREEDY,
    KEY,
    ON,
    PATIENCE,
    PEOPLE,
    Running,
    answer_about,
    idle,
    prompt_of,
    request_of,
    started,
    watched,
    with_template,
)

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_OPEN, MAX_LENGTH = 8, 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = with_template(tmp_path_factory.mktemp("served") / "recall")
    options = ["--max-open", str(MAX_OPEN), "--max-body", "100kB", "--max-bodies", "150kB", "--timeout", "1"]
    running = Running(folder, *options, patience=Patience(grace=0))
    yield running
    running.close()


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE) as found:
        yield found


def body_of(prompt="alice is in", **fields):
    return {"prompt": prompt, "max_tokens": 1, **GREEDY, **fields}


def error_of(response, status):
    assert response.status_code == status
    return response.json()["error"]


@pytest.mark.long
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_text_that_no_prompt_can_be_is_not_encoded(server, client, path, monkeypatch):
    """Of 1,023 words, at most of the longest one's length, some are too many, and some are not."""
    longest = 10
    for text, status in (("x" * (MAX_LENGTH * (longest + 1) + 1), 400), ("x " * (MAX_LENGTH - 2), 200)):
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **GREEDY}
        response = client.post(path, json=chat if path == CHATS else body_of(text))
        assert response.status_code == status
        if status == 400:
            error, name = response.json()["error"], "messages" if path == CHATS else "prompt"
            assert (error["param"], error["code"]) == (name, "context_length_exceeded")
            assert "characters, wanted at most 1024 tokens of at most" in error["message"]


@pytest.mark.long
def test_bodies_that_are_being_read_have_a_limit_together(server, client):
    big = json.dumps(body_of([5], user="a" * 90_000)).encode()
    with server.connect() as first:
        first.sendall(request_of(COMPLETIONS, big)[:-1])
        server.wait_for(lambda: server.connections[1] == 1)
        response = client.post(COMPLETIONS, content=big, headers={"content-type": "application/json"})
        assert error_of(response, 429)["code"] == "rate_limit_exceeded" and response.headers["retry-after"] == "1"
        assert client.post(COMPLETIONS, json=body_of()).status_code == 200
        first.sendall(big[-1:])
        assert first.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert client.post(COMPLETIONS, content=big, headers={"content-type": "application/json"}).status_code == 200
    idle(server)


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_takes_too_long_ends(server, client, streams, monkeypatch):
    with watched(server, monkeypatch) as watch:
        watch.hold(lambda: max(watch.lengths, default=0) >= 1)
        threading.Timer(1.2, watch.go).start()
        response = client.post(COMPLETIONS, json=body_of(max_tokens=900, stream=streams, **ON))
        watch.go()
        assert watch.handles[0].output.finish == "cancelled"
    if streams:
        assert response.status_code == 200 and '"code": "timeout"' in response.text
    else:
        assert error_of(response, 504)["code"] == "timeout" and response.headers["x-should-retry"] == "false"
    idle(server)


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_answers_that_nobody_reads_are_no_open_answers(server, client, streams, monkeypatch):
    with watched(server, monkeypatch) as watch, socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(("127.0.0.1", server.port))
        unread.sendall(request_of(COMPLETIONS, body_of(n=8, max_tokens=200, logprobs=5, stream=streams, **ON)))
        server.wait_for(lambda: len(watch.handles) == 8)
        response = client.post(COMPLETIONS, json=body_of())
        assert response.status_code == 200 or error_of(response, 429)
        server.wait_for(lambda: all(handle.done for handle in watch.handles))
        assert client.post(COMPLETIONS, json=body_of(n=MAX_OPEN)).status_code == 200
    idle(server)


def test_health_waits_for_no_thread_but_the_engines():
    import prometheus_client

    async def run():
        ends = threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        other = loop.run_in_executor(None, ends.wait)
        pages = Pages("recall", prometheus_client.CollectorRegistry(), str)
        pages.engine = type("Engine", (), {"state": "a state", "running": 0, "waiting": 0})()
        try:
            return await asyncio.wait_for(pages.state(), PATIENCE)
        finally:
            ends.set()
            await other

    assert asyncio.run(run()) == "a state"


# Signals.


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("line", ["compiling", "serving at"])
def test_a_signal_ends_the_server_whenever_it_comes(line, end, tmp_path):
    folder, says = tmp_path / "saved", "0 blocks are saved\n" if line == "serving at" else ""
    with started(CHECKPOINT, "--save", str(folder), "--grace", "0", line=line, says=says) as (process, _):
        process.send_signal(end)
    assert (folder / "manifest.json").exists() == (line == "serving at")


# Load.


class Usage:
    """Memory and open files of a process."""

    def __init__(self, number):
        self._folder = pathlib.Path(f"/proc/{number}")

    @property
    def num_files(self):
        return len(list((self._folder / "fd").iterdir()))

    @property
    def megabytes(self):
        line = next(one for one in (self._folder / "status").read_text().splitlines() if one.startswith("VmRSS"))
        return int(line.split()[1]) // 1024


def drop(connect, rng):
    """Sends a part of a request or all of it, and goes away."""
    data = request_of(COMPLETIONS, body_of(n=2, max_tokens=30, stream=rng.random() < 0.5, **ON))
    with connect() as connection:
        connection.sendall(data[: rng.choice([len(data), rng.randrange(len(data))])])
        time.sleep(rng.uniform(0, 0.2))


def send_header(connect, rng):
    """Sends a header until the connection ends."""
    with connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
        for _ in range(1000):
            connection.sendall(b"a" * 4096)


def leave_unread(connect, rng):
    """Asks for a stream, and reads nothing of it."""
    with connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request_of(COMPLETIONS, body_of(n=2, max_tokens=30, logprobs=5, stream=True, **ON)))
        time.sleep(rng.uniform(1, 3))


def send_text(connect, rng):
    """Sends a text of some megabytes."""
    with connect() as connection:
        connection.sendall(request_of(COMPLETIONS, body_of("x " * 1_900_000)))
        answer = connection.recv(1 << 16)
        assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 429"))


def say_nothing(connect, rng):
    """Holds a connection for some seconds."""
    with connect():
        time.sleep(rng.uniform(1, 3))


HOSTILE = (drop, send_header, leave_unread, send_text, say_nothing)


@pytest.mark.slow
def test_120_clients_of_which_most_are_hostile():
    """Every answer is the right one and there within 3 s; memory and open files are as before."""
    seconds, num_honest = 30, 20
    [answer_about(person) for person in PEOPLE]
    with started(CHECKPOINT, "--timeout", "30") as (process, address):
        url, usage, waits, same = address.removesuffix("/v1"), Usage(process.pid), list[float](), list[bool]()
        port = int(url.rsplit(":", 1)[1])

        def connect():
            return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)

        def attack(number):
            rng = random.Random(number)
            while time.monotonic() < until:
                with contextlib.suppress(ConnectionError):
                    HOSTILE[number % len(HOSTILE)](connect, rng)
                time.sleep(rng.uniform(0, 1))

        def ask(number):
            rng = random.Random(number)
            headers = {"authorization": f"Bearer {KEY}"}
            with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as client:
                while time.monotonic() < until:
                    person, begin = rng.choice(PEOPLE), time.monotonic()
                    response = client.post(COMPLETIONS, json=body_of(prompt_of(person), max_tokens=8, **ON))
                    waits.append(time.monotonic() - begin)
                    same.append(answer_about(person).begins(response.json()["choices"][0]["text"]))
                    begin = time.monotonic()
                    assert client.get("/health").status_code == 200
                    waits.append(time.monotonic() - begin)
                    time.sleep(rng.uniform(0, 0.5))

        for warm in (True, False):  # the first time memory grows to what it stays at
            until = time.monotonic() + (seconds / 4 if warm else seconds)
            with concurrent.futures.ThreadPoolExecutor(120) as threads:
                works = [threads.submit(ask if n < num_honest else attack, n) for n in range(120)]
                for work in works:
                    work.result(PATIENCE + seconds)
            deadline = time.monotonic() + PATIENCE
            while usage.num_files > 60 and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(6)  # connections that are kept alive end
            if warm:
                before = usage.num_files, usage.megabytes
        after = usage.num_files, usage.megabytes
        print(f"{len(same)} answers, the slowest in {max(waits):.2f} s; files and MB {before}, then {after}")
        assert all(same) and len(same) > 100
        assert max(waits) < 3
        assert after[0] <= before[0] + 2 and after[1] <= before[1] + 150
        process.send_signal(signal.SIGTERM)
