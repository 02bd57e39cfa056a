# SPDX-License-Identifier: Apache-2.0
"""One test of each way to generate, in one program. `test_interrupts.py`, `test_listener.py` and others have more."""

import jax
import pytest

import kvjax
from kvjax.events import Listeners
from kvjax.serving import GenerationInterrupted
from tests import drive
from tests.serving_kit import (
    MODEL,
    OPTIONS,
    WAYS,
    Calls,
    Listener,
    assert_whole,
    ctrl_c_acts,
    fail,
    press,
    prompts_of,
    start,
    together,
)

__all__ = ["ctrl_c_acts"]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_generates_and_its_listener_gets_every_event(way):
    cache, published = start(), []
    for cached in (0, 12):  # the last token's logits are wanted
        listener = Listener()
        outputs, cache, events = way(cache, prompts_of(0), listener=listener)
        assert [(output.finish, len(output.tokens)) for output in outputs] == [("length", 6)] * 2
        assert [output.cached_tokens for output in outputs] == [cached] * 2
        assert events == listener.events and listener.totals.reused_tokens == 2 * cached
        published += events
        assert_whole(cache, published, prompts_of(0), outputs)


@pytest.mark.parametrize("way", WAYS)
def test_generation_runs_where_implicit_transfers_are_forbidden(way):
    cache = start()
    with jax.transfer_guard("disallow"):
        outputs, cache, events = way(cache, prompts_of(1), seed=3)
    assert_whole(cache, events, prompts_of(1), outputs)


def test_a_stream_hands_out_tokens_as_they_come():
    seen = [[], []]
    for progress in drive.stream(MODEL, start(), prompts_of(0), **OPTIONS):
        for number, tokens in progress.new.items():
            assert len(tokens) <= OPTIONS["steps"]
            seen[number] += tokens
        kvjax.check(progress.state)
    assert seen == [output.tokens for output in progress.outputs]
    assert [len(tokens) for tokens in seen] == [6, 6]


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_leaves_a_cache_that_goes_on(way, monkeypatch):
    calls, cache = Calls(monkeypatch), start()
    calls.at, calls.after = 3, press
    with pytest.raises(GenerationInterrupted, match="interrupted by KeyboardInterrupt; go on with") as caught:
        way(cache, prompts_of(0))
    error = caught.value
    assert_whole(error.cache, error.events, prompts_of(0), error.outputs)
    outputs, cache, events = way(error.cache, prompts_of(1))
    assert_whole(cache, error.events + events, prompts_of(1), outputs)


def test_what_a_listener_raises_costs_nothing_and_it_gets_a_snapshot():
    listener = Listener(fail, [1])
    outputs, cache, events = together(start(), prompts_of(0), listener=listener)
    for published in (events, listener.events):
        assert_whole(cache, published, prompts_of(0), outputs)
    assert [output.tokens for output in outputs] == [output.tokens for output in together(start(), prompts_of(0))[0]]
    counts = Listeners(listener).counts
    assert counts["failures"] == counts["snapshots"] == 1 and counts["missed"]
