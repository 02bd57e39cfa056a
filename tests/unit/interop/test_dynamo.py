# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo's indexer, which decodes the wire by itself, gives the same answers as `Subscriber.lookup`.

The test is skipped if `ai-dynamo-runtime` is not installed. KVJAX_DYNAMO_PYTHON names a Python that has it.
"""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.unit.interop.forest import Forest, arrays_of, namespaces, projected, spec_of
from tests.wire_kit import LONG, agrees, publisher, subscriber, whole

INSTALLED = importlib.util.find_spec("dynamo") is not None and importlib.util.find_spec("dynamo.indexer") is not None
PYTHON = os.environ.get("KVJAX_DYNAMO_PYTHON", sys.executable if INSTALLED else "")
pytestmark = [pytest.mark.long, pytest.mark.skipif(not PYTHON, reason="ai-dynamo-runtime is not installed")]
SIZE, ADAPTERS = 4, {3: "sql"}


class Indexer:
    """The indexer service, whose contents end with its process."""

    def __init__(self, port):
        self.port = port

    def ask(self, path, **body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode() if body else None,
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            return answer.read()

    def register(self, source):
        self.ask("/register", instance_id=1, endpoint=source.endpoint, model_name="m", block_size=SIZE,
                 replay_endpoint=source.replay_endpoint)  # fmt: skip

    def found(self, tokens, salt, lora):
        """The numbers of tokens found in all, and on the device."""
        tenant = ({"cache_salt": salt} if salt else {}) | ({"lora_name": lora} if lora else {})
        answer = json.loads(self.ask("/query", model_name="m", token_ids=tokens, **tenant))
        found = answer["instances"].get("1", {"longest_matched": 0, "gpu": 0})
        return found["longest_matched"], found["gpu"]


@contextlib.contextmanager
def indexer():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [PYTHON, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until, one = time.monotonic() + LONG, Indexer(port)
        while True:
            try:
                one.ask("/health")
                break
            except OSError:
                assert time.monotonic() < until and process.poll() is None, "the service does not come up"
                time.sleep(0.1)
        yield one
    finally:
        process.kill()
        process.wait()


def questions(forest, names):
    """Prompts with salt and adapter, and some that are not cached.

    Their blocks are first on the device and then on the host, because the service counts one tier after the other.
    """
    for (group, namespace, path), _ in forest.mirror.index.items():
        levels = [
            forest.mirror.index.get((0, namespace, path[:end]), (2,))[0] for end in range(SIZE, len(path) + 1, SIZE)
        ]
        if group == 0 and levels == sorted(levels) and 2 not in levels:
            salt, lora = names.describe(namespace)
            yield [*path, 3, 3, 3, 3], salt, ADAPTERS.get(lora)
            yield [*path], None, None
            yield [5, *path], salt, ADAPTERS.get(lora)


def assert_same(one, sub, forest, names):
    """Asserts that every question comes to have the same answer from both."""
    queries, until = list(questions(forest, names)), time.monotonic() + LONG
    wanted = [sub.lookup(*question) for question in queries]
    wanted = [(found.tokens, found.media.get("GPU", 0)) for found in wanted]
    while (got := [one.found(*question) for question in queries]) != wanted:
        different = [item for item in zip(queries, got, wanted, strict=True) if item[1] != item[2]]
        assert time.monotonic() < until, different
        time.sleep(0.1)
    assert any(total > device for total, device in wanted) and any(total == device > 0 for total, device in wanted)


@pytest.mark.parametrize("form", ["map", "array"])
def test_the_indexer_answers_as_lookup_does(form):
    """One indexer is early; one joins late, misses messages that a small history dropped, and sees a restart."""
    spec, names, forest = spec_of("windows", 30), namespaces(), Forest(spec_of("windows", 30), 3)
    options = {"names": names, "lora_names": ADAPTERS, "salts": "plain", "form": form, "buffer_batches": 2}
    with indexer() as early, indexer() as late:
        with publisher(spec, **options) as source, subscriber(source, salts="plain", replay_timeout=1.0) as sub:
            early.register(source)
            for number in range(12):
                source.publish(arrays_of(forest.draw(12), spec))
                if number % 4 == 3:
                    assert agrees(sub, projected(forest.mirror, spec, names, salts="plain", loras=ADAPTERS))
                    assert_same(early, sub, forest, names)
            late.register(source)
            assert_same(late, sub, forest, names)
            again = {"bind": source.endpoint, "replay": source.replay_endpoint}
        forest.draw(20)
        with publisher(spec, **options, **again) as source, subscriber(source, salts="plain") as sub:
            source.publish(whole(forest))
            assert agrees(sub, projected(forest.mirror, spec, names, salts="plain", loras=ADAPTERS))
            assert_same(early, sub, forest, names)
            assert_same(late, sub, forest, names)
