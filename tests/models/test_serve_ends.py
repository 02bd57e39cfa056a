# SPDX-License-Identifier: Apache-2.0
"""A server that is ended under load, by SIGTERM or by `kill -9`: the next one finds all that was in its store."""

import concurrent.futures
import contextlib
import itertools
import signal
import threading

import numpy as np
import openai
import pytest

import kvjax
from kvjax.stores import DiskStore
from models import load, recall, stores
from models.recall import CHECKPOINT
from tests.models.serve_kit import GREEDY, KEY, ON, PATIENCE, started

SIZE, CLIENTS, ANSWERS, NEW = 16, 8, 24, 20


def client_of(address):
    return openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)


def prompt_of(number):
    """A prompt that shares nothing with those of other numbers."""
    rng = np.random.default_rng(number)
    return rng.integers(5, len(recall.VOCABULARY), rng.integers(20, 200)).tolist()


def answered(process, address, numbers, end):
    """Texts, with their answers, that clients had got before a signal ended the server, while it served others."""
    texts, lock, are_enough = [], threading.Lock(), threading.Event()

    def work(client, streams):
        with contextlib.suppress(openai.APIError):
            while True:
                with lock:
                    prompt = prompt_of(next(numbers))
                options = {"prompt": prompt, "max_tokens": NEW, "stream": streams, "extra_body": ON, **GREEDY}
                found = client.completions.create(**options)
                answer = recall.encode("".join(chunk.choices[0].text for chunk in (found if streams else [found])))
                if len(answer) < NEW:
                    continue  # one of its tokens is special, and has no text
                with lock:
                    texts.append([*prompt, *answer])
                    if len(texts) >= ANSWERS:
                        are_enough.set()

    with client_of(address) as client, concurrent.futures.ThreadPoolExecutor(CLIENTS) as threads:
        stream = client.completions.create(prompt=[5], max_tokens=1000, stream=True, extra_body=ON, **GREEDY)
        next(stream)
        working = [threads.submit(work, client, number % 2 == 0) for number in range(CLIENTS)]
        assert are_enough.wait(PATIENCE)
        with lock:
            process.send_signal(end)
            found = texts[:]
        if end == signal.SIGTERM:
            with pytest.raises(openai.APIError, match="the engine was closed"):
                list(stream)
        for one in working:
            one.result(PATIENCE)
    return found


def stored_blocks(folder, texts):
    """The number of whole blocks of each text that a store has, up to the first one that it lacks."""
    spec = kvjax.make_spec(
        load(CHECKPOINT)[0].layer_specs(), num_blocks=1, max_seqs=1, max_length=SIZE, block_size=SIZE, dtype="float32"
    )
    model = stores.checkpoint_name(CHECKPOINT)
    with DiskStore(folder, spec, model=model, names=kvjax.Namespaces(), readonly=True) as store:
        has = [[*(store.has(block, 0) for block in store.blocks(text)), False] for text in texts]
    return [one.index(False) for one in has]


def cached_blocks(address, texts):
    """The number of whole blocks of each text that a server finds for a prompt that goes on behind it."""
    with client_of(address) as client:
        found = [client.completions.create(prompt=[*text, 5], max_tokens=1, **GREEDY) for text in texts]
    return [one.usage.prompt_tokens_details.cached_tokens // SIZE for one in found]


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "more"), [(1, ["--host-blocks", "64"]), (8, [])])
def test_what_a_store_has_is_found_again_when_a_server_is_ended_under_load(kills, more, tmp_path):
    """`kill -9` may lose blocks that were not written yet, and SIGTERM none of any text whose answer was there."""
    folder, numbers = tmp_path / "store", itertools.count()
    options = ["--store", str(folder), "--grace", "0", "--rows", "8", *more]
    first, blocks = list[list[int]](), list[int]()
    for _ in range(kills):
        with started(CHECKPOINT, *options, code=-signal.SIGKILL) as (process, address):
            assert cached_blocks(address, first) == blocks
            first = answered(process, address, numbers, signal.SIGKILL)
        blocks = stored_blocks(folder, first)
        assert sum(blocks) >= ANSWERS  # the store writes behind the answers
    with started(CHECKPOINT, *options) as (process, address):
        assert cached_blocks(address, first) == blocks
        second = answered(process, address, numbers, signal.SIGTERM)
    whole = [(len(text) - 1) // SIZE for text in second]  # the last token was chosen and never computed
    assert stored_blocks(folder, second) == whole
    with started(CHECKPOINT, *options, "--grace", "60") as (process, address), client_of(address) as client:
        assert cached_blocks(address, second) == whole
        assert cached_blocks(address, first) == [len(text) // SIZE for text in first]  # computed with what follows
        stream = client.completions.create(prompt=[5], max_tokens=300, stream=True, extra_body=ON, **GREEDY)
        next(stream)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"  # it has time to end
