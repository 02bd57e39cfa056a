# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompts: under eviction, part by part, beside requests that run, and where they cannot be had.

All ways of serving are in `test_contract.py`, a recurrent layer in `test_kinds.py`, and engines whose calls fail in the
machine of `tests/oracle/engines.py`.
"""

import random

import jax
import numpy as np
import pytest

import kvjax
from kvjax.serving import Engine, Request, RunOptions, Scheduler, prompt_scores, turns
from kvjax.serving.engine_thread import EngineThread
from tests.serving_kit import (
    BASE,
    BLOCKS,
    HOST,
    LENGTH,
    MODEL,
    ROWS,
    SCHEDULER,
    VOCAB,
    answer,
    ask,
    assert_scored,
    make_cache,
    successor,
)

PROMPT = np.random.default_rng(4).integers(0, VOCAB, 29).tolist()


def requests_of(seed):
    """Requests whose prompts share beginnings; most are to be scored from some token on."""
    rng, found = random.Random(seed), []
    for _ in range(12):
        prompt = [*PROMPT[: rng.randint(0, 26)], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 4)))]
        first = rng.choice([None, 0, rng.randint(0, len(prompt))])
        new = rng.randint(first is None, 3)
        found.append(ask(prompt, prompt_logprobs_from=first, max_new_tokens=new, namespace=rng.randrange(2)))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "host", "num_blocks"), [("plain", 0, 9), ("windows", 0, 10), ("plain", HOST, 9), ("plain", 0, BLOCKS)]
)
def test_parts_of_prompts_are_right_among_others_and_under_eviction(kind, host, num_blocks, monkeypatch):
    monkeypatch.setattr(prompt_scores, "CHUNKS", 1)  # a call for each chunk
    options = RunOptions(**BASE)
    with Engine(MODEL, make_cache(num_blocks, host, kind), options, num_ranges=1) as engine:
        for seed in range(3):
            requests = requests_of(seed)
            handles = [engine.submit(request) for request in requests]
            for request, handle in zip(requests, handles, strict=True):
                output = handle.result(60)
                assert (
                    output.finish == "length"
                    and output.tokens
                    == answer(request.prompt, request.max_new_tokens or 1, kind).tokens[: request.max_new_tokens]
                )
                assert_scored(request, output, kind)
        kvjax.check(engine.state, rows=())


@pytest.mark.long
def test_a_prompt_waits_for_a_row_and_then_those_behind_it_go_on():
    """While all rows run, nothing is chosen after it; a cancel, a time limit and the end of the engine end it."""
    with Engine(MODEL, make_cache(), RunOptions(**BASE), num_ranges=1) as engine:
        running = [engine.submit(ask([n, 1, 2], max_new_tokens=20)) for n in range(ROWS)]
        scored = engine.submit(ask(PROMPT[:9], max_new_tokens=0, prompt_logprobs_from=0))
        cancelled = engine.submit(ask(PROMPT[:9], prompt_logprobs_from=0, samples=2))
        late = engine.submit(ask(PROMPT[:9], prompt_logprobs_from=0), timeout=0.0)
        after = engine.submit(ask([9]))
        for handle in cancelled.samples:
            handle.cancel()
        assert [handle.result(60).finish for handle in cancelled.samples] == ["cancelled"] * 2
        assert late.result(60).finish == "cancelled" and not late.output.prompt_logprobs
        assert_scored(scored.job.request, scored.result(60))
        assert after.result(60).tokens == answer([9]).tokens
        assert [len(handle.result(60).tokens) for handle in running] == [20] * ROWS
        assert engine.drain(60) and engine.waiting == 0


@pytest.mark.long
def test_a_prompt_that_the_cache_cannot_hold_ends_without_blocks():
    few, fits = make_cache(5), ask(PROMPT[:18], max_new_tokens=0, prompt_logprobs_from=0)
    requests = [ask(PROMPT[:24], max_new_tokens=new, prompt_logprobs_from=0) for new in (0, 3)]
    outputs, few, _ = kvjax.run_batch(MODEL, few, [*requests, fits], RunOptions(**BASE))
    assert [(output.finish, output.prompt_logprobs) for output in outputs[:2]] == [("no_blocks", [])] * 2
    assert_scored(fits, outputs[2])
    tokens = np.arange(12, dtype=np.int32)
    busy, events = make_cache(8).admit(1, tokens, 12)  # rows of others keep blocks
    assert bool(events.ok)
    (output,), busy, _ = kvjax.run_batch(MODEL, busy, [ask(PROMPT, prompt_logprobs_from=0)], RunOptions(**BASE))
    assert output.finish == "no_blocks" and len(output.prompt_logprobs) < len(PROMPT)
    assert busy.state.seqs.length.tolist() == [0, 12, 0]
    kvjax.check(busy.state)


@pytest.mark.long
def test_a_step_ends_a_request_that_waits_only_if_nothing_runs(monkeypatch):
    monkeypatch.setattr(EngineThread, "start", lambda thread: None)
    engine = Engine(MODEL, make_cache(), RunOptions(**BASE), num_ranges=1)
    thread = engine._thread
    running = [engine.submit(ask([n, 1, 2], max_new_tokens=20)) for n in range(ROWS)]
    thread._step()
    scored = engine.submit(ask(PROMPT[:9], prompt_logprobs_from=0))
    thread._step()
    after = engine.submit(ask([9]))
    for _ in range(3):
        thread._step()
        assert engine.waiting == 2 and not scored.done and scored.output.prompt_logprobs == [None]
    while not after.done:
        thread._step()
    assert_scored(scored.job.request, scored.output)
    assert all(handle.done for handle in running) and after.output.tokens == answer([9]).tokens
    thread._end()


@pytest.mark.long
def test_programs_of_other_requests_stay_as_they_are():
    requests, scored = [ask(PROMPT[:9])], ask(PROMPT[:9], prompt_logprobs_from=0)
    before = prompt_scores._score_prompt._jitted._cache_size()
    _, cache, _ = kvjax.run_batch(MODEL, make_cache(), requests, RunOptions(**BASE))
    _, cache, _ = kvjax.run_batch(MODEL, cache, requests, RunOptions(**BASE))
    assert prompt_scores._score_prompt._jitted._cache_size() == before
    loops = turns.turn._jitted._cache_size()
    _, cache, _ = kvjax.run_batch(MODEL, cache, [*requests, scored], RunOptions(**BASE))
    kvjax.run_batch(MODEL, cache, requests, RunOptions(**BASE))
    assert turns.turn._jitted._cache_size() == loops


@pytest.mark.long
def test_what_cannot_be_is_named():
    canonical = RunOptions(scheduler=Scheduler(chunk=8, canonical=True))
    with pytest.raises(ValueError, match="prompt_logprobs_from: got 0 with canonical=True, wanted None"):
        kvjax.run_batch(MODEL, make_cache(), [Request([1], prompt_logprobs_from=0)], canonical)
    last_only, spec = jax.tree_util.Partial(successor), kvjax.make_spec(num_blocks=9, max_seqs=2, max_length=LENGTH)
    scored, cache = Request([1, 2], prompt_logprobs_from=0), kvjax.Cache.create(spec)
    with pytest.raises(ValueError, match="for last=None, wanted a pair of logits"):
        kvjax.run_batch(last_only, cache, [scored])
    with Engine(last_only, cache, RunOptions(scheduler=SCHEDULER, log_events=False)) as engine:
        for _ in range(2):
            with pytest.raises(ValueError, match="for last=None, wanted a pair of logits"):
                engine.submit(scored)
        assert engine.submit(Request([1, 2])).result(60).tokens[:2] == [3, 4]
