# SPDX-License-Identifier: Apache-2.0
"""A scheduler whose caller thins a row. If the row is preempted, it is computed again, and is whole."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.events.log import init_log
from kvjax.serving import Scheduler, init_serving, serve, submit
from tests import drive
from tests.serving_kit import DIM, MODEL

SIZE, NEW = 4, 14
PROMPTS = [list(range(1, 13)), list(range(13, 25))]
SCHEDULER = Scheduler(chunk=8, k=2, reserve="num_tokens")


@pytest.mark.long
def test_a_preempted_row_forgets_its_holes():
    sizes = {"max_seqs": 2, "max_length": 32, "block_size": SIZE, "dtype": "float32"}
    spec = kvjax.make_spec([kvjax.LayerSpec(1, DIM)], num_blocks=10, thinning=True, **sizes)
    serving = init_serving(kvjax.Cache.create(spec), [spec.max_length] * 2)
    flat = drive.padded([token for prompt in PROMPTS for token in prompt], 2 * spec.max_length)
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    serving, status, *_ = submit(serving, flat, lengths, np.full(2, NEW, np.int32), scheduler=SCHEDULER)
    assert status.tolist() == [0, 0]
    run = jax.jit(functools.partial(serve, MODEL, scheduler=SCHEDULER, steps=np.int32(2)))
    step = lambda serving: run(serving, init_log(256, SIZE))[0]  # noqa: E731

    while not np.all(np.asarray(serving.cache.state.seqs.committed) >= lengths):
        serving = step(serving)
    victim = int(np.asarray(serving.row).tolist().index(1))  # the later request
    cache, events = serving.cache.thin(np.int32(victim), np.arange(8) == 1)
    assert events.ok
    serving = serving.replace(cache=cache)
    whole_from = None
    while bool(serving.busy):
        before = int(serving.requests.num_tokens[1])
        serving = step(serving)
        kvjax.check(serving.cache.state)
        if whole_from is None and int(serving.requests.preemptions[1]):
            whole_from = before
    assert whole_from is not None
    text = np.asarray(serving.requests.tokens(np.array([1]), np.array([0]), len(PROMPTS[1]) + NEW))[0]
    logits = np.asarray(MODEL.dense(text, (None,)))
    after = np.arange(whole_from + SCHEDULER.k, len(text))
    assert len(after) >= 4
    np.testing.assert_array_equal(logits[after - 1].argmax(axis=1), text[after])
    assert not np.any(serving.cache.state.seqs.holes)
