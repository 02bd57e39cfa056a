# SPDX-License-Identifier: Apache-2.0
"""Servers in processes of their own, which end with the process that has started them."""

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from models import recall, server_process
from models.server_process import ServerEnded, ServerProcess
from tests.drive import ROOT, TIMEOUT
from tests.wire_kit import ANY

OPTIONS = ["--checkpoint", str(recall.CHECKPOINT), "--rows", "1", "--blocks", "112", "--block-size", "8"]
OPTIONS += ["--max-length", "320", "--publish", ANY, "--replay", ANY]


def status_of(url):
    """The status by which a server answers somebody without its key; None: nobody answers."""
    try:
        return httpx.get(f"{url}/models").status_code
    except httpx.TransportError:
        return None


@pytest.mark.long
def test_a_server_answers_its_starter_alone_and_is_started_again_after_its_end():
    server = ServerProcess(*OPTIONS)
    with pytest.raises(ServerEnded, match=r"^the server does not run$"):
        server.complete([1], 1)
    try:
        first, prompt = server.ready(), recall.encode("alice is in paris . bob is in oslo . where is bob ?")
        assert server.ready() == first and len(first) == 2
        assert [server.complete(prompt, 1, salt) for salt in ("a", "a", "b")] == [
            (" oslo", num_cached) for num_cached in (0, len(prompt) - 1, 0)
        ]
        with pytest.raises(ValueError, match="max_tokens: got 0, wanted an integer from 1"):
            server.complete(prompt, 0)
        assert status_of(server._noted("serving at ")) == 401
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait(TIMEOUT)
        with pytest.raises(ServerEnded, match=r"^the server does not answer: "):
            server.complete(prompt, 1)
        assert server.ready() != first and server.complete(prompt, 1) == (" oslo", 0)
    finally:
        server.close()
    assert server._process.returncode == 0


@pytest.mark.long
def test_a_server_that_cannot_start_says_why(monkeypatch):
    server = ServerProcess("--checkpoint", "none")
    with pytest.raises(ServerEnded, match=r"^--checkpoint: none: no such folder$"):
        server.ready()
    server.close()
    monkeypatch.setattr(server_process, "SECONDS", 0.1)
    silent = ServerProcess("--checkpoint", str(recall.CHECKPOINT))
    with pytest.raises(ServerEnded, match=r"^the server has not started within 0 s$"):
        silent.ready()
    silent.close()
    assert silent._process.returncode is not None


@pytest.mark.long
def test_a_server_ends_with_the_process_that_has_started_it():
    code = (
        "import time; from models.server_process import ServerProcess; "
        f"server = ServerProcess(*{OPTIONS}); server.ready(); print(server._noted('serving at '), flush=True); "
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        url = starter.stdout.readline().strip()
        assert status_of(url) == 401
        starter.kill()
    deadline = time.monotonic() + 60
    while status_of(url) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
