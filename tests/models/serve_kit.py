# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of the server: in a thread or in a process of its own, and the answers that `run_batch` gives."""

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

import numpy as np

import kvjax
from kvjax.serving import driver
from models import load, recall, serve, tenants
from models.recall import CHECKPOINT
from models.serve_http import Clients
from tests import drive
from tests.drive import ROOT, TIMEOUT

TEMPLATE = """{%- for message in messages %}
    {%- if message.role == "tool" %}{{ raise_exception("no tools") }}{% endif %}
    {{- message.content | trim }}{{ " " }}
{%- endfor %}"""
KEY, ROWS, PATIENCE = "a secret", 8, 60
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
        args = parser.parse_args(["--checkpoint", str(folder), "--rows", str(ROWS), "--api-key", KEY, *options])
        found = self._stack.enter_context(serve.served(parser, args))
        self.engine = found.engine
        self._stack.enter_context(contextlib.closing(listening := socket.socket()))
        listening.bind(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        is_open = threading.Event()
        self._server = serve.http_server(args, found, is_open.set)
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

    @property
    def connections(self):
        """Connections that are open, and requests that are being answered."""
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
    """Requires that nothing runs any more, and that all blocks are free or can be evicted."""
    server.wait_for(lambda: server.connections[1] == 0)
    assert server.engine.drain(PATIENCE) and server.engine.running == server.engine.waiting == 0
    state = server.engine.state
    kvjax.check(state, rows=())
    assert all(not np.asarray(group.blocks.refcount).any() for group in state.groups)
    assert kvjax.debug.stats(state).active_blocks == 0


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
            found = turn(*args, **options)
            self.rows.append(int(np.sum(np.asarray(found[0].cache.state.seqs.length) > 0)))
            return found

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
    """A `Watch` of a server that is idle before and after."""
    assert server.engine.drain(PATIENCE)
    found = Watch(server.engine, monkeypatch)
    yield found
    found.go()
    assert server.engine.drain(PATIENCE)


MARGIN = 1e-3  # between two logits, of which sums in another order may exchange the order


class Expected:
    """An answer of `run_batch`: a word for each token, and by how much each one is likelier than the next."""

    def __init__(self, output):
        self.words = recall.decode(output.tokens).split(" ")
        self._margins = [first - second for first, second in (top.values() for top in output.top_logprobs)]

    @property
    def text(self):
        """The text, as it follows a prompt."""
        return f" {' '.join(self.words)}"

    def agrees(self, text):
        """Whether a text is the answer's beginning, up to a token that hardly was the likeliest one."""
        found = text.split()
        same = [one == other for one, other in zip(found, self.words, strict=False)]
        end = same.index(False) if False in same else len(same)
        return len(found) <= len(self.words) and (end == len(found) or self._margins[end] <= MARGIN)


def expected(prompts, new, **options):
    """The answers of `run_batch` to prompts of token ids, which nothing ends before."""
    model = load(CHECKPOINT)[0]
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=512, max_seqs=ROWS, max_length=1024, block_size=16, dtype="float32"
    )
    outputs, *_ = drive.run_batch(
        model, kvjax.Cache.create(spec), prompts, max_new_tokens=new, top_logprobs=2, log_events=False, **options
    )
    return [Expected(output) for output in outputs]


@functools.cache
def batch():
    """Answers of 16 tokens to the questions about each of the people."""
    found = expected([recall.encode(prompt_of(person)) for person in PEOPLE], 16)
    return dict(zip(PEOPLE, found, strict=True))


def request_of(path, body, *headers):
    """The bytes of a POST request with a body, bytes or what becomes JSON."""
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
def started(folder, *options, code=0):
    """A server in a process of its own, which is to be ended by a signal: the process, and its address."""
    command = [sys.executable, "-m", "models.serve", "--checkpoint", str(folder), "--port", "0", *options]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", tenants.KEY: KEY}
    with subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(TIMEOUT, process.kill)
        timer.start()
        try:
            lines = iter(process.stderr.readline, "")
            address = next((line.split(" at ")[1].strip() for line in lines if line.startswith("serving at")), "")
            assert address, "it has ended"
            yield process, address
            rest = process.stderr.read()
        finally:
            timer.cancel()
            if sys.exc_info()[0] is not None:
                process.kill()
    assert (process.returncode, rest) == (code, "")
