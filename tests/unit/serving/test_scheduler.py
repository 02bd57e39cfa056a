# SPDX-License-Identifier: Apache-2.0
"""The scheduler's guarantees that `tests/oracle/` does not compare: pins, an order of one's own, nothing compiled anew.

There both schedulers get the same requests and cancels, and do the same in every step.
"""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.events.log import init_log
from kvjax.serving import cancel, drain, results, serve_step
from kvjax.serving.requests import Stage
from tests.oracle.bytes_machine import SIZE, VOCAB
from tests.oracle.serving import COLUMNS, LOG, MODEL, ROWS, SLOTS, program
from tests.unit.serving.stories import OVERCOMMITS, Desk

pytestmark = pytest.mark.long
_cancel, _drain = jax.jit(cancel), jax.jit(drain)


@pytest.mark.slow
def test_pinned_blocks_do_not_stand_in_the_way_of_those_whose_prefix_they_are():
    """Four of six blocks are pinned. Both prompts need five, and only one finds the pinned ones."""
    desk = Desk(num_blocks=6, pins=4)
    status, _, _ = desk.submit(range(16), [1] * 16, new=3)
    assert status == ["OK", "OK"]
    list(desk.steps())
    shares, other = results(desk.serving).values()
    assert (shares.finish, shares.cached_tokens, len(shares.tokens)) == ("length", 15, 3)
    assert (other.finish, other.tokens) == ("no_blocks", [])


def shortest_first(requests, state):
    return requests.prompt


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [True, False])
def test_a_policy_of_ones_own_decides_who_is_first(jitted):
    """It decides the order of admissions and of prompts."""
    scheduler = dataclasses.replace(OVERCOMMITS, order=shortest_first)
    step = program(scheduler) if jitted else functools.partial(serve_step, scheduler=scheduler)
    desk, model = Desk(), jax.tree.map(jnp.asarray, MODEL)
    desk.submit([1, 2] * 5, [2, 0, 1], [0] * 8)
    _, _, served = step(model, desk.serving, init_log(LOG, SIZE))
    assert served.admitted.slots.tolist() == [1, 2, 0, -1]
    assert (served.chunks.rows.tolist(), served.chunks.count.tolist()) == ([0, 1], [3, 3])
    served = desk.step()
    assert served.admitted.slots.tolist() == [0, 1, 2, -1]
    assert (served.chunks.rows.tolist(), served.chunks.count.tolist()) == ([0, 1], [6, 0])


def test_a_loop_ends_where_no_row_is_left_for_those_who_wait():
    """All rows are in use without requests, and the loop cannot change that."""
    desk = Desk()
    state = desk.serving.cache.state
    for row in range(ROWS):
        state, events = kvjax.admit(state, row, np.arange(SIZE, dtype=np.int32), SIZE)
        assert bool(events.ok)
    desk.serving = desk.serving.replace(cache=desk.serving.cache.replace(state=state))
    desk.submit([1, 2, 0])
    assert not bool(desk.serving.busy)
    desk.serving = desk.serving.replace(cache=desk.serving.cache.replace(state=kvjax.release(state, 0)[0]))
    assert bool(desk.serving.busy)


@pytest.mark.slow
def test_nothing_is_compiled_after_the_first_round_of_2000_requests(caplog):
    """Requests of all kinds come, some are cancelled, and all are drained. Nothing is held in the end."""
    desk, rng, ends = Desk(), np.random.default_rng(0), []

    def round_of_all(cancels):
        prompts = [rng.integers(0, VOCAB, rng.integers(1, COLUMNS * SIZE - 3)).tolist() for _ in range(3)]
        lead = [-1, *rng.integers(-1, 1, 2)]
        prompts = [prompt if of < 0 else prompts[0] for prompt, of in zip(prompts, lead, strict=True)]
        desk.submit(*prompts, new=rng.integers(1, 4, 3), priority=rng.integers(3, size=3), sample_of=lead)
        desk.step(int(rng.integers(1, 7)))
        slot = rng.integers(SLOTS, size=1).astype(np.int32)
        if cancels:
            desk.serving, _ = _cancel(desk.serving, slot, np.asarray(desk.serving.requests.generation)[slot])
        ends.extend(output.finish for output in results(desk.serving).values() if output.finish)
        desk.serving = _drain(desk.serving)

    def something_new(x):
        return x + 1

    round_of_all(True)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        while int(desk.serving.arrivals) < 2000:
            round_of_all(rng.random() < 0.2)
        jax.jit(something_new)(np.int32(1))
    messages = (record.getMessage() for record in caplog.records)
    names = [name for message in messages for name in re.findall(r"^Compiling jit\((\w+)\)", message)]
    assert names == ["something_new"]
    assert {"length", "cancelled"} <= set(ends)
    assert program(OVERCOMMITS)._cache_size() == 1
    list(desk.steps())
    desk.step()
    desk.serving = _drain(desk.serving)
    assert desk.rows == [-1] * ROWS and desk.held == 0 and results(desk.serving) == {}
    assert (np.asarray(desk.serving.requests.stage) == Stage.EMPTY).all()
    for name in ("leads", "out_of_blocks", "skipped_steps", "refused", "chunks_deferred"):
        assert not np.asarray(getattr(desk.serving, name)).any(), name
