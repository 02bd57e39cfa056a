# SPDX-License-Identifier: Apache-2.0
"""The scheduler's guarantees, in small stories. `tests/oracle/test_machine_serving.py` compares random ones.

All run the program of its first options: chunks of 6 tokens for 2 rows, in blocks of 4 tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Status
from kvjax.events.log import init_log
from kvjax.serving import Scheduler, cancel, drain, init_serving, results, serve, serve_step, worst_step
from kvjax.serving.requests import Stage
from tests.oracle.bytes_machine import SIZE, VOCAB
from tests.oracle.serving import LOG, MODEL, ROWS, SLOTS, program
from tests.unit.serving.stories import CAPACITY, OVERCOMMITS, Story

pytestmark = pytest.mark.long


def test_a_request_waits_while_its_prefix_is_computed():
    story, prompt = Story(), [1, 2, 0, 1] * 4 + [2]
    story.submit(prompt, prompt, prompt)
    served = story.step()
    assert served.admitted.slots.tolist() == [0, -1, -1, -1]  # rows and blocks suffice for all
    found = story.until_done()
    assert [output.cached_tokens for output in found.values()] == [0, 16, 16]
    assert len({tuple(output.tokens) for output in found.values()}) == 1


def test_nobody_is_passed_over_more_often_than_patience_allows():
    """Short urgent requests come at every step, and the long one needs most of the blocks."""
    story = Story(num_blocks=6)
    story.submit([1] * 5, [2] * 5, [0] * 5)
    story.step()
    _, (slot, *_), _ = story.submit([1, 2] * 8)
    for number in range(60):
        story.submit([number % VOCAB, 1], [2, number % VOCAB], priority=5, new=2)
        story.step()
        story.serving = drain(story.serving)
        requests = story.serving.requests
        assert int(requests.passed[slot]) <= OVERCOMMITS.patience
        if int(requests.admitted[slot]) >= 0:
            break
    else:
        raise AssertionError("it starves")
    assert int(requests.passed[slot]) == OVERCOMMITS.patience


def test_a_late_cancel_hits_nobody_and_a_cancelled_row_is_free_after_the_next_step():
    story = Story()
    _, (first, *_), (generation, *_) = story.submit([1, 2, 0] * 4, new=8)
    story.step(3)
    assert int(jnp.sum(story.serving.row >= 0)) == 1
    named = np.array([first], np.int32), np.array([generation], np.int32)
    story.serving, status = cancel(story.serving, *named)
    assert status.tolist() == [Status.OK]
    assert cancel(story.serving, *named)[1].tolist() == [Status.BAD_REQUEST]
    story.step()
    assert not np.asarray(story.serving.cache.state.seqs.length).any()
    assert results(story.serving)[first, generation].finish == "cancelled"
    story.serving = drain(story.serving)
    _, (second, *_), (later, *_) = story.submit([2, 2])
    assert (second, later) == (first, generation + 1)
    assert cancel(story.serving, *named)[1].tolist() == [Status.BAD_REQUEST]
    assert story.serving.requests.stage[second] == Stage.WAITING


@pytest.mark.slow
def test_what_can_never_fit_is_refused_when_it_is_submitted():
    story = Story(num_blocks=6, pins=2)
    status, slots, _ = story.submit([1] * 10, [1] * 10, [1] * 3, new=7)
    assert [Status(s).name for s in status] == ["OK", "OK", "OK"]  # 16 tokens written, 4 blocks
    assert slots == [0, 1, 2]
    assert {output.finish for output in story.until_done().values()} == {"length"}
    status, slots, _ = story.submit([1] * 3, [1] * 20, [1] * 2, new=17)
    assert [Status(s).name for s in status] == ["NO_BLOCKS", "ROW_FULL", "NO_BLOCKS"]  # 5 blocks
    assert slots == [-1, -1, -1]


@pytest.mark.slow
def test_pinned_blocks_do_not_stand_in_the_way_of_those_whose_prefix_they_are():
    """Four of six blocks are pinned. Both prompts need five, and only one finds the pinned ones."""
    story = Story(num_blocks=6, pins=4)
    status, _, _ = story.submit(range(16), [1] * 16, new=3)
    assert [Status(s).name for s in status] == ["OK", "OK", "BAD_REQUEST"]
    shares, other = story.until_done().values()
    assert (shares.finish, shares.cached_tokens, len(shares.tokens)) == ("length", 15, 3)
    assert (other.finish, other.tokens) == ("no_blocks", [])


def test_requests_that_hold_no_prompt_or_too_much_are_refused():
    story = Story()
    status, _, _ = story.submit([], [1, -2], [1])
    assert [Status(s).name for s in status] == ["BAD_REQUEST", "BAD_REQUEST", "OK"]
    for _ in range(3):
        status, slots, _ = story.submit([1], [2], [0])
    assert [Status(s).name for s in status] == ["HELD", "HELD", "HELD"]
    assert slots == [-1, -1, -1]


def shortest_first(requests, state):
    return requests.prompt


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_policy_of_ones_own_decides_who_is_first(jitted):
    """It decides the order of admissions and of prompts."""
    scheduler = dataclasses.replace(OVERCOMMITS, order=shortest_first)
    step = program(scheduler) if jitted else functools.partial(serve_step, scheduler=scheduler)
    story, model = Story(), jax.tree.map(jnp.asarray, MODEL)
    story.submit([1, 2] * 5, [2, 0, 1], [0] * 8)
    _, _, served = step(model, story.serving, init_log(LOG, SIZE))
    assert served.admitted.slots.tolist() == [1, 2, 0, -1]
    assert (served.chunks.rows.tolist(), served.chunks.count.tolist()) == ([0, 1], [3, 3])
    served = story.step()
    assert served.admitted.slots.tolist() == [0, 1, 2, -1]
    assert (served.chunks.rows.tolist(), served.chunks.count.tolist()) == ([0, 1], [6, 0])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"reserve": "all"}, r"reserve: got 'all', wanted one of \('max_tokens', 'num_tokens', 'batch'\)"),
        ({"chunks": "lifo"}, r"chunks: got 'lifo', wanted one of \('fcfs', 'equal'\)"),
        ({"chunk": 0}, "chunk: got 0, wanted an int of at least 1"),
        ({"watermark": -1}, "watermark: got -1, wanted an int of at least 0"),
        ({"k": 5}, "k: got 5, wanted at most the block size, 4"),
        ({"budget": 4}, "budget: got 4, wanted more than the 4 rows"),
    ],
)
def test_options_that_do_not_fit_are_named(options, wanted):
    with pytest.raises(ValueError, match=wanted):
        program(Scheduler(**options))(MODEL, Story().serving, init_log(LOG, SIZE))


def test_a_loop_ends_where_no_row_is_left_for_those_who_wait():
    """All rows are in use without requests, and the loop cannot change that."""
    story = Story()
    state = story.serving.cache.state
    for row in range(ROWS):
        state, events = kvjax.admit(state, row, np.arange(SIZE, dtype=np.int32), SIZE)
        assert bool(events.ok)
    story.serving = story.serving.replace(cache=story.serving.cache.replace(state=state))
    story.submit([1, 2, 0])
    assert not bool(story.serving.busy)
    story.serving = story.serving.replace(cache=story.serving.cache.replace(state=kvjax.release(state, 0)[0]))
    assert bool(story.serving.busy)


@pytest.mark.slow
def test_the_likeliest_tokens_are_noted_with_each_one_chosen():
    """All log-probabilities of a model that depends only on the last token, in mixed steps and in blocks of steps."""
    table = np.random.default_rng(5).normal(size=(7, 7)).astype(np.float32)

    def pairs(table, tokens, pools, view, *, last):
        del view
        return table[tokens[jnp.arange(tokens.shape[0]), last]], pools

    story = Story()
    serving = init_serving(story.serving.cache, [CAPACITY + 1] * SLOTS, top_logprobs=3)
    story.serving = serving
    story.submit([1, 2, 3], [4] * 9, new=6)
    run = jax.jit(functools.partial(serve, scheduler=OVERCOMMITS, steps=100))
    log = init_log(2 * LOG + 2 * worst_step(serving.cache.state.spec, OVERCOMMITS), SIZE)
    serving, _ = run(jax.tree_util.Partial(pairs, jnp.asarray(table)), story.serving, log)
    scores = np.asarray(jax.nn.log_softmax(table, axis=-1))
    for prompt, output in zip([[1, 2, 3], [4] * 9], results(serving).values(), strict=True):
        assert len(output.tokens) == len(output.top_logprobs) == 6
        before = [prompt[-1], *output.tokens]
        for last, token, logprob, top in zip(before, output.tokens, output.logprobs, output.top_logprobs, strict=False):
            assert list(top) == np.argsort(-scores[last])[:3].tolist()
            np.testing.assert_allclose(list(top.values()), np.sort(scores[last])[::-1][:3], rtol=1e-5)
            assert next(iter(top)) == token and top[token] == logprob
