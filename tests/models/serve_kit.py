# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of the server: in a thread or in a process of its own, and the answers of the model alone."""

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import httpx
import jax
import numpy as np

import kvjax
from kvjax.serving import driver
from models import Decoder, load, recall, serve, tenants
from models.recall import CHECKPOINT
from models.serve_http import Clients
from tests.drive import ROOT, TIMEOUT

TEMPLATE = """{%- for message in messages %}
    {%- if message.role == "tool" %}{{ raise_exception("no tools") }}{% endif %}
    {{- message.content | trim }}{{ " " }}
{%- endfor %}"""
KEY, ROWS, CHUNK, PATIENCE = "a secret", 8, 128, 60
MAX_OPEN, MAX_BODY = 60, 100_000
JSON = "content-type: application/json"
DOCUMENT = recall.make_document(np.random.default_rng(3), 12)
PEOPLE = list(DOCUMENT.facts)
GREEDY = {"model": "recall", "temperature": 0}
ON = {"ignore_eos": True}  # goes on after the model's stop token


def prompt_of(person):
    return f"{DOCUMENT.text} {recall.question(person)}"


LONG = " ".join(prompt_of(person) for person in PEOPLE)  # a prompt of several chunks


class Running:
    """A server in a thread."""

    def __init__(self, folder, *options, patience=None):
        parser, self._stack = serve.make_parser(), contextlib.ExitStack()
        sizes = ("--rows", str(ROWS), "--chunk", str(CHUNK))
        args = parser.parse_args(["--checkpoint", str(folder), *sizes, "--api-key", KEY, *options])
        served = self._stack.enter_context(serve.served(parser, args))
        self.engine = served.engine
        self._stack.enter_context(contextlib.closing(listening := socket.socket()))
        listening.bind(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        is_open = threading.Event()
        self._server = serve.http_server(args, served, is_open.set)
        if patience is not None:
            self._server.server_state = Clients(patience)
        self._thread = threading.Thread(target=self._server.run, args=([listening],))
        self._thread.start()
        assert is_open.wait(PATIENCE)

    def connect(self):
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def close(self):
        self._server.should_exit = True
        self._thread.join()
        self._stack.close()

    def post(self, body, path="/v1/completions", **headers):
        """The answer to a request from a plain client."""
        headers = {"authorization": f"Bearer {KEY}", **headers}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=PATIENCE)

    @property
    def connections(self):
        """Open connections, and requests in progress."""
        return len(self._server.server_state.connections), len(self._server.server_state.tasks)

    @property
    def rows(self):
        """Rows in use."""
        return int(np.sum(np.asarray(self.engine.state.seqs.length) > 0))

    def wait_for(self, holds):
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.002)


def idle(server):
    """Requires an idle server whose blocks are all free or evictable."""
    server.wait_for(lambda: server.connections[1] == 0)
    assert server.engine.drain(PATIENCE) and server.engine.running == server.engine.waiting == 0
    state = server.engine.state
    kvjax.check(state, rows=())
    assert all(not np.asarray(group.blocks.refcount).any() for group in state.groups)
    assert kvjax.debug.stats(state).active_blocks == 0


class Watch:
    """The requests of an engine, its cancels, and the rows in use after each turn. A test can hold a turn.

    Attributes:
      handles: handles of all submitted samples.
      cancels: the number of turns begun before each cancel.
      rows: rows in use after each turn.
    """

    def __init__(self, engine, monkeypatch):
        self.handles, self.cancels, self.rows = [], [], []
        self._stage, self._held, self._go = None, threading.Event(), threading.Event()
        submit, cancel, turn = engine.submit, engine._cancel, driver.turn

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
            turn_result = turn(*args, **options)
            self.rows.append(int(np.sum(np.asarray(turn_result[0].cache.state.seqs.length) > 0)))
            return turn_result

        monkeypatch.setattr(engine, "submit", submitting)
        monkeypatch.setattr(engine, "_cancel", cancelling)
        monkeypatch.setattr(driver, "turn", turning)

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


@contextlib.contextmanager
def watched(server, monkeypatch):
    """A `Watch` of a server which is idle before and after."""
    assert server.engine.drain(PATIENCE)
    watch = Watch(server.engine, monkeypatch)
    yield watch
    watch.go()
    assert server.engine.drain(PATIENCE)


MARGIN = 1e-3  # between two logits, of which sums in another order may exchange the order


class Expected:
    """A greedy answer: a word for each token, and its lead over the second likeliest token."""

    def __init__(self, tokens, margins):
        self.words, self._margins = recall.decode(tokens).split(" "), margins

    @property
    def text(self):
        """The text, as it follows a prompt."""
        return f" {' '.join(self.words)}"

    def begins(self, text):
        """Whether a text is the answer's beginning, up to a token with hardly any lead."""
        words = text.split()
        same = [one == other for one, other in zip(words, self.words, strict=False)]
        end = same.index(False) if False in same else len(same)
        return len(words) <= len(self.words) and (end == len(words) or self._margins[end] <= MARGIN)


NEW, WIDTH = 16, 96  # tokens of an answer, and the most of a prompt with its answer
dense = jax.jit(Decoder.dense)


@functools.cache
def answer_to(prompt):
    """The model's answer to a text, which nothing ends before: by whole sequences, without a cache."""
    model, tokens = load(CHECKPOINT)[0], recall.encode(prompt)
    line, margins, length = np.zeros((1, WIDTH), np.int32), [], len(tokens)
    line[0, :length] = tokens
    for position in range(length, length + NEW):
        logits = np.asarray(dense(model, line))[0, position - 1]
        second, first = np.sort(logits)[-2:]
        line[0, position] = np.argmax(logits)
        margins.append(first - second)
    return Expected(line[0, length : length + NEW], margins)


def answer_about(person):
    return answer_to(prompt_of(person))


def request_of(path, body, *headers):
    """The bytes of a POST request. The body is bytes or becomes JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {KEY}", JSON, *headers]
    if not any(header.startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"content-length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode() + data


def with_template(folder):
    """A copy of the bundled checkpoint in a folder, with a template of chats."""
    shutil.copytree(CHECKPOINT, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@contextlib.contextmanager
def started(folder, *options, line="serving at", code=0, says=""):
    """A server in a separate process: the process once it has printed a line, and the address in this line.

    A signal has to end it with an exit status. It has to print nothing more but the text `says`.
    """
    command = [sys.executable, "-m", "models.serve", "--checkpoint", str(folder), "--port", "0", *options]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", tenants.KEY: KEY}
    with subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(TIMEOUT, process.kill)
        timer.start()
        try:
            found = next((one for one in iter(process.stderr.readline, "") if one.startswith(line)), None)
            assert found is not None, "it has ended"
            yield process, found.split(" at ")[-1].strip()
            rest = process.stderr.read()
        finally:
            timer.cancel()
            if sys.exc_info()[0] is not None:
                process.kill()
    assert (process.returncode, rest) == (code, says)
