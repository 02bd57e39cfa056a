# SPDX-License-Identifier: Apache-2.0
"""Requests to the bundled model, with blocks for all rows or for one only: the same tokens, one program."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import Cache, Status
from kvjax.events import init_log
from kvjax.serving import Sampling, Scheduler, init_serving, results, serve, submit
from models import load, recall
from models.recall import CHECKPOINT
from tests import drive

pytestmark = pytest.mark.long
SIZE, ROWS, FACTS, NEW, NUMBER = 8, 8, 6, 14, 64
LENGTH = FACTS * recall.FACT_TOKENS + recall.QUESTION_TOKENS
FEWEST = -(-(LENGTH + NEW - 1) // SIZE)  # blocks: just enough for one row
PLENTY = NUMBER * FEWEST
MARGIN = 2e-3  # of the two likeliest tokens; another order of the sums may change them by less
SCHEDULER = Scheduler(reserve="num_tokens", chunk=16, chunk_rows=4, max_skips=8)
LOG = 8_000


WAYS = {
    "greedy": Sampling(np.zeros(NUMBER), np.zeros(NUMBER, int), np.ones(NUMBER)),
    "sampled": Sampling(
        temperature=np.resize([0.7, 1.0, 1.5, 0.0], NUMBER),
        top_k=np.resize([0, 5, 40], NUMBER),
        top_p=np.resize([1.0, 1.0, 0.9, 0.95, 0.5], NUMBER),
    ),
}


@functools.cache
def prompts():
    """Prompts, each with the first facts of one of four documents and a question about a person in them."""
    rng = np.random.default_rng(7)
    documents, found = [recall.make_document(rng, FACTS) for _ in range(4)], []
    for number in range(NUMBER):
        document, facts = documents[number % 4], int(rng.integers(2, FACTS + 1))
        question = recall.encode(recall.question(list(document.facts)[rng.integers(facts)]))
        found.append(document.ids[: facts * recall.FACT_TOKENS] + question)
    return found


@functools.cache
def programs():
    """`submit` and the whole loop; the number of blocks in use is an argument of both."""
    loop = functools.partial(serve, scheduler=SCHEDULER, steps=10_000)
    return jax.jit(functools.partial(submit, scheduler=SCHEDULER)), jax.jit(loop)


@functools.cache
def bundled():
    model, _ = load(CHECKPOINT)
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=PLENTY, max_seqs=ROWS, max_length=FEWEST * SIZE, block_size=SIZE,
        dtype="float32",
    )  # fmt: skip
    return model, spec


@functools.cache
def served(num_blocks, way):
    """The outputs of all prompts, submitted at once, with so many blocks."""
    model, spec = bundled()
    submits, run = programs()
    serving = init_serving(Cache.create(spec, num_blocks=np.int32(num_blocks)), [LENGTH + NEW] * NUMBER, top_logprobs=2)
    serving = jax.device_put(serving, jax.devices()[0])
    line = drive.padded(np.concatenate(prompts()), NUMBER * LENGTH)
    lengths, seeds = np.array(list(map(len, prompts())), np.int32), np.arange(NUMBER, dtype=np.uint32)
    serving, status, _, _ = submits(
        serving, line, lengths, np.full(NUMBER, NEW, np.int32), seed=seeds, sampling=WAYS[way]
    )
    assert (np.asarray(status) == Status.OK).all()
    events = []
    while bool(serving.busy):
        serving, log = run(model, serving, init_log(LOG, SIZE))
        events += kvjax.to_list(log)
    kvjax.check(serving.cache.state)
    assert kvjax.fold(events).index == kvjax.events.index_of(serving.cache.state)
    outputs = [*results(serving).values()]
    assert [(output.finish, len(output.tokens)) for output in outputs] == [("length", NEW)] * NUMBER
    assert run._cache_size() == submits._cache_size() == 1
    return outputs


def margin(top):
    """The difference between the logits of the likeliest token and the next."""
    first, second = top.values()
    return first - second


@pytest.mark.parametrize("way", WAYS)
def test_tokens_under_pressure_are_those_without(way):
    wanted, compared, preempted, greedy = served(PLENTY, way), 0, 0, way == "greedy"
    assert not any(output.preemptions for output in wanted)
    for num_blocks in (5 * FEWEST, 3 * FEWEST, 2 * FEWEST - 1, FEWEST):
        outputs = served(num_blocks, way)
        preempted += sum(output.preemptions for output in outputs)
        for number, (output, free) in enumerate(zip(outputs, wanted, strict=True)):
            same = [one == other for one, other in zip(output.tokens, free.tokens, strict=True)]
            end = same.index(False) if False in same else NEW
            assert end == NEW or (greedy and margin(free.top_logprobs[end]) <= MARGIN), (num_blocks, number, end)
            np.testing.assert_allclose(output.logprobs[:end], free.logprobs[:end], atol=1e-4)
            compared += end
    assert preempted > 20
    assert compared > 0.95 * 4 * NUMBER * NEW
    if not greedy:
        likeliest = [[next(iter(top)) for top in output.top_logprobs] for output in wanted]
        chosen = [output.tokens == tokens for output, tokens in zip(wanted, likeliest, strict=True)]
        assert all(chosen[3::4]) and sum(chosen) < NUMBER / 2  # greedy ones, and the others


def test_answers_are_right_under_pressure():
    """The answer is a person's last fact, whether it was found in the cache or computed again."""
    outputs, right = served(FEWEST, "greedy"), 0
    for prompt, output in zip(prompts(), outputs, strict=True):
        words = recall.decode(prompt).split()
        place = words[words.index(words[-2]) + 3]  # PERSON is in PLACE
        right += recall.VOCABULARY[output.tokens[0]] == place
    assert right > 0.9 * NUMBER
