# SPDX-License-Identifier: Apache-2.0
"""A listener gets every event of a generation once and in order, however it ends. An error of its costs nothing.

The prompts and the programs are those of `serving_kit.py`.
"""

import functools
import itertools
import warnings

import numpy as np
import pytest

import kvjax
from kvjax.events import Listeners
from kvjax.pools import host as host_pool
from kvjax.serving import GenerationInterrupted, driver
from tests import drive
from tests.serving_kit import (
    HOST,
    MODEL,
    OPTIONS,
    RELEASE,
    WAYS,
    Listener,
    assert_whole,
    collect_in_a_trace,
    ctrl_c_acts,
    fail,
    press,
    prompts_of,
    spread,
    start,
    together,
)

__all__ = ["ctrl_c_acts"]
pytestmark = pytest.mark.long


def moves_fail(monkeypatch, to="device"):
    """Makes all moves to one tier fail."""
    copy = host_pool._copy

    def copy_or_fail(targets, sources, rows):
        on_host = targets[0][0].sharding.memory_kind == "pinned_host"
        return fail() if on_host == (to == "host") else copy(targets, sources, rows)

    monkeypatch.setattr(host_pool, "_copy", copy_or_fail)


@pytest.mark.slow
@pytest.mark.parametrize("moves", ["move", "fail"])
def test_what_it_raises_costs_nothing_wherever_it_is_raised(moves, monkeypatch):
    """It raises at each of its calls in turn, and at some that follow, also for both halves of a failed move."""
    cache = start(host=HOST)
    _, cache, published = together(cache, prompts_of(0) + prompts_of(1))
    if moves == "fail":
        moves_fail(monkeypatch)
    for at in itertools.count(1):
        listener, prompts = Listener(fail, [at, at + 2, at + 3]), prompts_of(at % 2)
        with warnings.catch_warnings(category=RuntimeWarning, action="ignore"):
            outputs, cache, decoded = WAYS[at % 3](cache, prompts, listener=listener)
        wanted, published = kvjax.fold(published + decoded).index, published + listener.events
        assert kvjax.fold(published).index == wanted
        lossy = moves == "fail"  # a failed move loses the blocks that it was to bring back
        assert_whole(cache, published, () if lossy else prompts, () if lossy else outputs)
        counts = Listeners(listener).counts
        assert counts["failures"] == sum(listener.calls >= one for one in listener.at)
        if listener.calls < at:
            break
        assert counts["snapshots"] or listener.calls == at
    assert at > 4


def test_both_halves_of_a_failed_move_are_published(monkeypatch):
    _, cache, published = together(start(host=HOST), prompts_of(0) + prompts_of(1))
    moves_fail(monkeypatch)
    failures, init, listener = [], kvjax.tiered.FailedTransfer.__init__, Listener()

    def noted(self, *args):
        init(self, *args)
        failures.append((kvjax.to_list(self.events), kvjax.to_list(self.removed)))

    monkeypatch.setattr(kvjax.tiered.FailedTransfer, "__init__", noted)
    with pytest.warns(RuntimeWarning, match="computed again"):
        _, cache, _ = together(cache, prompts_of(0)[:1], listener=listener, log_events=False)
    ((ordered, removed),) = failures
    assert {event["kind"] for event in removed} == {"removed"} and ordered
    at = listener.events.index(ordered[0])
    assert listener.events[at : at + len(ordered) + len(removed)] == ordered + removed
    assert_whole(cache, published + listener.events)


def test_a_warning_that_is_an_error_costs_neither_the_cache_nor_events(monkeypatch):
    _, cache, published = together(start(host=HOST), prompts_of(0) + prompts_of(1))
    moves_fail(monkeypatch)
    listener = Listener()
    with (
        warnings.catch_warnings(category=RuntimeWarning, action="error"),
        pytest.raises(GenerationInterrupted, match="by RuntimeWarning: lost") as caught,
    ):
        together(cache, prompts_of(0), listener=listener)
    assert caught.value.events == listener.events
    assert_whole(caught.value.cache, published + listener.events)


@pytest.mark.parametrize("way", WAYS)
def test_the_events_of_a_loop_are_published_while_the_next_one_runs(way, monkeypatch):
    """A `Progress`, however, comes when all events before it are published."""
    order, turn = [], driver.turn

    def noted(*args, **options):
        order.append("loop")
        return turn(*args, **options)

    monkeypatch.setattr(driver, "turn", functools.update_wrapper(noted, turn))
    way(start(), prompts_of(0), listener=lambda _: order.append("events"))
    loops = order.count("loop")
    wanted = ["loop", "events"] * loops if way is spread else ["loop", *["loop", "events"] * (loops - 1), "events"]
    assert order == wanted and loops > 1


def test_an_interrupt_that_it_raises_comes_with_its_failure_at_the_last_events():
    def leave():
        raise SystemExit("enough")

    listener = Listener(leave, range(1, 1000))
    with pytest.raises(GenerationInterrupted) as caught:
        together(start(), prompts_of(0), listener=listener)
    at_last = "; at its last events the listener raised SystemExit: enough"
    assert str(caught.value) == f"interrupted by SystemExit: enough; go on with this error's `cache`{at_last}"
    assert listener.calls == 2  # the events of a loop, and a snapshot
    assert caught.value.outputs[0].tokens  # that of the loop whose events it got
    for events in (caught.value.events, listener.events):
        assert_whole(caught.value.cache, events, prompts_of(0), caught.value.outputs)


@pytest.mark.parametrize("raises", [False, True])
def test_a_stream_that_is_closed_tells_of_its_releases(raises):
    listener = Listener(fail, [2] if raises else ())
    stream = drive.stream(MODEL, start(), prompts_of(0), **OPTIONS, listener=listener)
    progress = next(stream)
    assert listener.events == progress.events
    stream.close()
    published = progress.events + progress.closing
    assert progress.closing and listener.events[: len(published)] == published
    assert (len(listener.events) > len(published)) == raises  # by a snapshot
    assert_whole(progress.cache, listener.events, prompts_of(0), progress.outputs)


def test_a_stream_whose_cache_has_gone_elsewhere_tells_nothing_more():
    listener = Listener()
    stream = drive.stream(MODEL, start(), prompts_of(0), **OPTIONS, listener=listener)
    RELEASE(next(stream).cache, np.asarray([0], np.int32), now=np.int32(0))
    stream.close()
    assert listener.calls == 1


def test_a_listener_may_compute_while_its_stream_is_collected_in_a_trace():
    found = []

    def listen(events):
        found.append(int(kvjax.events.counts(events)["stored"]))

    streams = [drive.stream(MODEL, start(), prompts_of(0), **OPTIONS, listener=listen)]
    progress = next(streams[0])
    collect_in_a_trace(streams)
    stored = sum(event["kind"] == "stored" for event in progress.events + progress.closing)
    assert sum(found) == stored and len(found) == 2 and progress.closing
    assert_whole(progress.cache, progress.events + progress.closing, prompts_of(0), progress.outputs)


@pytest.mark.parametrize("at", [2, 3])
def test_a_second_ctrl_c_while_a_loop_runs_loses_no_events_of_a_cache_that_it_leaves(at, monkeypatch):
    """It comes during the wait for the loop."""
    read, count = driver.Driver.read, itertools.count(1)

    def interrupted(self):
        if next(count) == at:
            press()
            press()
        return read(self)

    monkeypatch.setattr(driver.Driver, "read", interrupted)
    listener = Listener()
    with pytest.raises(GenerationInterrupted) as caught:
        together(start(), prompts_of(0), listener=listener)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert caught.value.events == listener.events
    assert_whole(caught.value.cache, listener.events)
