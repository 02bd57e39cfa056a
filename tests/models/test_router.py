# SPDX-License-Identifier: Apache-2.0
"""Servers in processes of their own, and a fleet of them of which some end."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

import kvjax
from kvjax.interop.vllm import Publisher
from models import recall, router, server_process
from models.server_process import Answer, ServerEnded, ServerProcess
from tests.drive import ROOT, TIMEOUT, output_of
from tests.wire_kit import ANY

PROMPTS = [[number] for number in range(6)]  # shorter than a block: no mirror has them
SPEC = kvjax.make_spec(
    [kvjax.LayerSpec(1, 4)], num_blocks=4, max_seqs=1, max_length=32, block_size=router.BLOCK, dtype="float32"
)


class Fake:
    """A server that publishes an empty cache, and ends at some of its prompts."""

    def __init__(self, *ends_at, starts=True):
        self._ends_at, self._starts, self._source = ends_at, starts, None
        self.prompts, self.num_starts = [], 0

    def ready(self):
        self.num_starts += 1
        if self.num_starts > 1 and not self._starts:
            raise ServerEnded("it does not start again")
        self._source = Publisher(SPEC, bind=ANY, replay=ANY, heartbeat=0.1)
        return [self._source.endpoint, self._source.replay_endpoint]

    def complete(self, prompt, max_tokens, salt=None):
        self.prompts.append(prompt)
        if prompt[0] in self._ends_at and self.prompts.count(prompt) == 1:
            self._source.close()
            raise ServerEnded("it has ended")
        return Answer(f"{prompt[0]} {max_tokens} {salt}", 0)

    def close(self):
        if self._source is not None:
            self._source.close()


def answered(servers, choose):
    """The answers of fake servers to all prompts, in a salt."""
    with router.Fleet(servers) as fleet:
        replies = fleet.answer(PROMPTS, choose, "a salt", at_once=1)
        concurrent.futures.wait(fleet._starts.values())
        assert [reply.answer.text for reply in replies] == [f"{n} {router.NEW} a salt" for (n,) in PROMPTS]
        assert all(reply.is_mirrored for reply in replies)
        return [reply.server for reply in replies], fleet.down


def status_of(url):
    """The status by which a server answers somebody without its key; None: nobody answers."""
    try:
        return httpx.get(f"{url}/models").status_code
    except httpx.TransportError:
        return None


def first_up(names):
    """A rule that sends each prompt to the first server that is up."""
    return lambda _, down: next(name for name in names if name not in down)


def test_a_server_that_ends_leaves_its_prompt_to_others_and_is_started_again():
    servers = {"one": Fake(2), "two": Fake()}
    chosen, down = answered(servers, first_up(servers))
    assert chosen[:3] == ["one", "one", "two"] and not down
    assert (servers["one"].num_starts, servers["two"].num_starts) == (2, 1)
    assert [prompt for prompt in PROMPTS if prompt in servers["two"].prompts] == servers["two"].prompts


def test_a_server_that_does_not_start_again_stays_down():
    servers = {"one": Fake(0, starts=False), "two": Fake()}
    chosen, down = answered(servers, first_up(servers))
    assert chosen == ["two"] * len(PROMPTS) and down == {"one"}


def test_a_prompt_over_which_servers_end_ends_the_run(monkeypatch):
    monkeypatch.setattr(router, "LOSSES", 2)
    servers = {"one": Fake(0), "two": Fake(0)}
    with router.Fleet(servers) as fleet, pytest.raises(ServerEnded, match=r"^2 servers ended over the same prompt$"):
        fleet.answer(PROMPTS, first_up(servers))


def test_servers_that_cannot_be_had_end_the_run(monkeypatch):
    servers = {"one": Fake(0, starts=False)}
    with router.Fleet(servers) as fleet, pytest.raises(ServerEnded, match=r"^no server has started again$"):
        fleet.answer(PROMPTS, first_up(servers))
    monkeypatch.setattr(router, "LAG", 0.0)
    with pytest.raises(ServerEnded, match=r"^nothing comes from tcp://127.0.0.1:\d+, where server one publishes$"):
        router.Fleet({"one": Fake()}).__enter__()


@pytest.mark.long
def test_a_server_answers_its_starter_alone_and_is_started_again_after_its_end():
    server = ServerProcess(*router.options())
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
        "import time; from models import router; from models.server_process import ServerProcess; "
        "server = ServerProcess(*router.options()); server.ready(); print(server._noted('serving at '), flush=True); "
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


@pytest.mark.slow
def test_a_router_finds_what_is_cached():
    """The command fails by itself if a mirror differs, or if round-robin finds as much."""
    out = output_of(sys.executable, "-m", "models.router", "--quick")
    assert "router's mirror of it said: True" in out and "round robin" in out
