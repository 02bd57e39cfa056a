# SPDX-License-Identifier: Apache-2.0
"""A server for all files which need no options of their own, and OpenAI's client.

Other tests of models run without the packages imported here.
"""

import contextlib

import pytest


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server with a template of chats, of whose answers none is open at the end."""
    from tests.models.serve_kit import GREEDY, MAX_BODY, MAX_OPEN, Running, with_template

    limits = ("--max-open", str(MAX_OPEN), "--max-waiting", "256", "--max-body", str(MAX_BODY))
    running = Running(with_template(tmp_path_factory.mktemp("served") / "recall"), *limits)
    yield running
    status = running.post({"prompt": ["alice"] * (MAX_OPEN // 4), "n": 4, "max_tokens": 1, **GREEDY}).status_code
    running.close()
    assert status == 200


@pytest.fixture(scope="session")
def client(server):
    import openai

    from tests.models.serve_kit import KEY

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture
def watch(server, monkeypatch):
    """The requests of the server's engine, and its turns."""
    from tests.models.serve_kit import watched

    with watched(server, monkeypatch) as watch:
        yield watch


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Starts a scripted server of a family, or returns the running server."""
    from tests.models.scripted_kit import ScriptedServer
    from tests.models.serve_kit import idle

    with contextlib.ExitStack() as stack:
        running = dict[str, ScriptedServer]()

        def start(family):
            if family not in running:
                running[family] = ScriptedServer(tmp_path_factory.mktemp(family), family)
                stack.callback(running[family].close)
            return running[family]

        yield start
        for server in running.values():
            idle(server.running)
