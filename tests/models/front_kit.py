# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of a front whose replicas are servers in this process, without Ray."""

import asyncio
import contextlib

import httpx
import numpy as np
import pytest
import zmq

from kvjax.interop.vllm import Curve
from models import cluster_asgi, cluster_front, recall, serve, wires
from models.cluster_asgi import call_app
from models.cluster_front import Page, Prompt
from models.openai_fields import COMPLETIONS
from models.prefix_router import Router
from models.serve_http import with_request_ids
from models.tenants import salt_of
from tests.models.serve_kit import KEY
from tests.wire_kit import ANY, eventually

OPTIONS = ("--rows", "4", "--max-length", "320", "--blocks", "112", "--block-size", "8", "--name", "recall")


class Local(cluster_front.Replicas):
    """Servers in this process by name, chosen by a `Router`."""

    def __init__(self, servers, router):
        self.servers, self.router, self.prompts, self.num_calls = servers, router, list[Prompt](), 0
        self._apps = {name: with_request_ids(server.app) for name, server in servers.items()}

    async def call(self, scope, body, prompt):
        self.num_calls += 1
        number = self.num_calls
        place = self.router.rank(prompt.tokens, prompt.salt)[0]
        self.router.begin(number, place, prompt.tokens, prompt.salt, num_new=prompt.num_new)
        self.prompts.append(prompt)
        try:
            async with contextlib.aclosing(call_app(self._apps[place.name], scope, body)) as lists:
                async for messages in lists:
                    yield messages
        finally:
            self.router.end(number)

    async def fetch_all(self, path, headers):
        fetched = [(name, *await cluster_asgi.fetch(app, path, headers)) for name, app in self._apps.items()]
        return [Page(name, status, body) for name, status, _, body in fetched]


@contextlib.contextmanager
def fronted(folder):
    """(a front's application, its replicas): two servers that hold three documents each, with encrypted events."""
    public, secret = zmq.curve_keypair()
    parser = serve.make_parser()
    options = ("--checkpoint", str(folder), *OPTIONS, "--api-key", KEY, "--api-key", "another")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(wires.CURVE_KEY, secret.decode())
        patch.setattr(serve, "_note", lambda text: None)
        args = parser.parse_args([*options, "--publish", ANY, "--replay", ANY, "--curve"])
        router, servers = Router(), {}
        stack.callback(router.close)
        for name in ("one", "two"):
            server = servers[name] = stack.enter_context(serve.served(parser, args))
            feed = server.feeds["publish"]
            router.add(name, feed.endpoint, feed.replay_endpoint, Curve(*zmq.curve_keypair(), public))
        replicas = Local(servers, router)
        yield cluster_front.make_app(parser, parser.parse_args(options), replicas), replicas


def asked(app, *requests, key=KEY):
    """The responses to requests (method, path, body), one after the other."""

    async def main():
        headers = {"authorization": f"Bearer {key}", "host": "localhost", "content-type": "application/json"}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(main())


def post(path=COMPLETIONS, **fields):
    return "POST", path, {"model": "recall", "temperature": 0, "max_tokens": 1, **fields}


def documents_of(seed):
    rng = np.random.default_rng(seed)
    return [recall.make_document(rng, 24) for _ in range(4)]


def hit_rate(app, replicas, documents, salt):
    """The cached share of the tokens of six questions about each document, one after the other."""
    texts = [[f"{one.text} {recall.question(person)}" for person in list(one.facts)[:6]] for one in documents]
    num_cached, num_tokens = 0, 0
    for text in (text for of_person in zip(*texts, strict=True) for text in of_person):
        (response,) = asked(app, post(prompt=text, cache_salt=salt))
        usage = response.json()["usage"]
        num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        num_tokens += usage["prompt_tokens"]
        wait_for_mirrors(replicas, text, salt)
    return num_cached / num_tokens


def wait_for_mirrors(replicas, text, salt):
    num_tokens = len(recall.encode(text))
    eventually(lambda: num_found(replicas, text, salt) >= num_tokens // 8 * 8 - 8)


def num_found(replicas, text, salt):
    """The tokens of a text that the best mirror has."""
    return replicas.router.rank(recall.encode(text), salt_of(KEY, salt))[0].cached
