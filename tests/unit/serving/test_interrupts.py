# SPDX-License-Identifier: Apache-2.0
"""A generation that ends early never loses the cache: errors, Ctrl-C and abandoned streams, wherever they come.

`test_contract.py` has an error, Ctrl-C and a lost cache in each way of serving. Prompts have 13 tokens and run one at a
time, while another row is in use.
"""

import signal
import threading

import jax
import numpy as np
import pytest

import kvjax
from tests import drive
from tests.serving_kit import (
    BEFORE,
    HOST,
    MODEL,
    OPTIONS,
    RELEASE,
    VOCAB,
    Calls,
    assert_whole,
    batched,
    ctrl_c_acts,
    fail,
    make_spec,
    press,
    prompts_of,
    spread,
    start,
    state_of,
    successor,
    together,
)

__all__ = ["ctrl_c_acts"]
pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        ("plain", 0),
        pytest.param("plain", HOST, marks=pytest.mark.slow),
        pytest.param("windows", 0, marks=pytest.mark.slow),
        pytest.param("windows", HOST, marks=pytest.mark.slow),
    ],
)
def test_ended_at_any_jitted_call_the_cache_is_whole(kind, host, monkeypatch):
    """Ctrl-C comes before the call or as it returns, or an error is raised. Each time the same cache is used again."""
    cache, events = start(kind, host), []
    outputs, cache, decoded = together(cache, prompts_of(0))
    events += decoded
    run = 0
    for how, cause in (
        ({"before": press}, KeyboardInterrupt),
        ({"after": press}, KeyboardInterrupt),
        ({"before": fail}, MemoryError),
    ):
        with monkeypatch.context() as patch:
            calls = Calls(patch, inner=cause is KeyboardInterrupt)
            causes, finishes = [], []
            for n in calls.each(**how):
                run += 1
                prompts = prompts_of(run)
                try:
                    outputs, cache, decoded = (together, spread)[n % 2](cache, prompts)
                    assert [output.finish for output in outputs] == ["length"] * 2
                except kvjax.serving.GenerationInterrupted as error:
                    causes.append(type(error.__cause__))
                    finishes.append([output.finish for output in error.outputs])
                    outputs, cache, decoded = error.outputs, error.cache, error.events
                events += decoded
                # Blocks that a chunk pushes out of a window do not go to the host.
                lossy = kind == "windows" and host
                assert_whole(cache, events, () if lossy else prompts, () if lossy else outputs)
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert causes == [cause] * (n - 1)
            assert n > 5 and (host or "after" not in how or finishes[-1] == ["length"] * 2)


def test_a_second_ctrl_c_acts_at_once_and_may_cost_the_cache(monkeypatch):
    calls = Calls(monkeypatch)
    calls.at, calls.after = 3, lambda: (press(), press())
    with pytest.raises(
        kvjax.serving.GenerationInterrupted, match=r"interrupted by KeyboardInterrupt; .* no cache"
    ) as caught:
        together(start(), prompts_of(0))
    assert caught.value.cache is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_while_compiling_what_follows_a_verb_loses_nothing(monkeypatch):
    cache = kvjax.tiers.TieredCache.create(make_spec(host=HOST))
    monkeypatch.setattr(kvjax.tiered, "_finish", jax.jit(lambda *_: fail(), donate_argnums=0))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            cache.admit(0, np.zeros(4, np.int32), 3)
        kvjax.check(cache.state)


def test_functions_of_the_caller_that_fail_lose_nothing():
    cache, events = start(), []
    for number in range(1, 20):  # the first reading only checks that the clock gives ints
        readings = iter(range(number))
        try:
            together(cache, prompts_of(number), clock=readings.__next__)
            break
        except kvjax.serving.GenerationInterrupted as error:
            cache, events = error.cache, events + error.events
            assert_whole(cache, events, prompts_of(number), error.outputs)
    assert number == 5
    cache, events = start(), []
    for use in (together, spread):
        with pytest.raises(kvjax.serving.GenerationInterrupted) as caught:
            use(cache, prompts_of(0), logits_fn=lambda logits, tokens, positions: fail())
        cache, events = caught.value.cache, events + caught.value.events
        assert_whole(cache, events)


def test_a_handler_of_the_caller_is_called_between_calls_and_is_in_force_between_loops(monkeypatch):
    pressed = []
    handler = lambda *_: pressed.append(calls.count)  # noqa: E731
    before = signal.signal(signal.SIGINT, handler)
    try:
        calls = Calls(monkeypatch)
        calls.at, calls.before = 2, press
        outputs = []
        for progress in drive.stream(MODEL, start(), prompts_of(0), **OPTIONS):
            outputs = progress.outputs
            assert signal.getsignal(signal.SIGINT) is handler
        assert pressed == [2]  # once, after the call
        assert [output.finish for output in outputs] == ["length"] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_signals_alone():
    results, cache = [], start()
    thread = threading.Thread(target=lambda: results.append(together(cache, prompts_of(0))))
    thread.start()
    thread.join()
    assert [output.finish for output in results[0][0]] == ["length"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, HOST])
def test_a_stream_that_nobody_reads_on_releases_its_rows(host):
    cache, events = start(host=host), []
    for progress in drive.stream(MODEL, cache, prompts_of(0), **OPTIONS):
        events += progress.events
        break
    assert progress.closing
    assert_whole(progress.cache, events + progress.closing, prompts_of(0), progress.outputs)
    events += progress.closing

    stream = drive.stream(MODEL, progress.cache, prompts_of(1), **OPTIONS)
    progress = next(stream)
    in_between = progress.cache
    stream.close()
    events += progress.events + progress.closing
    assert_whole(progress.cache, events, prompts_of(1), progress.outputs)
    assert state_of(in_between).seqs.length.tolist() != [0, BEFORE, BEFORE]  # the caller's arrays are never donated


def test_a_stream_leaves_a_cache_alone_that_the_caller_has_gone_on_with():
    stream = drive.stream(MODEL, start(), prompts_of(0), **OPTIONS)
    progress = next(stream)
    assert progress.cache.state.seqs.length[0] > 0
    cache, _ = RELEASE(progress.cache, np.asarray([0], np.int32), now=np.int32(0))
    stream.close()
    assert not progress.closing
    outputs, cache, _ = together(cache, prompts_of(1))
    assert [output.finish for output in outputs] == ["length"] * 2
    kvjax.check(cache.state)


@pytest.mark.slow
def test_a_prompt_finds_blocks_for_its_next_chunk_where_what_is_cached_has_children_on_the_host():
    cache = start("windows", host=HOST)
    for number in range(4):
        outputs, cache, _ = together(cache, prompts_of(number))
        assert [output.finish for output in outputs] == ["length"] * 2


@pytest.mark.slow
def test_a_cache_with_a_host_tier_steps():
    cache, tokens = start(host=HOST), np.arange(21, dtype=np.int32).reshape(3, 7)
    after, logits, events = cache.step(MODEL, tokens, np.asarray([0, 3, 0], np.int32))
    np.testing.assert_allclose(logits[1], MODEL.dense(tokens[1, :3])[2], atol=1e-4)
    assert bool(events.ok) and after.cache.state.seqs.committed.tolist() == [0, 3, 0]
    after, logits, _ = kvjax.step(MODEL, after, tokens, np.asarray([0, 4, 0], np.int32), logits="all")
    text = np.concatenate([tokens[1, :3], tokens[1, :4]])
    assert logits.shape == (3, 7, VOCAB)
    np.testing.assert_allclose(logits[1, :4], MODEL.dense(text)[3:], atol=1e-4)
    kvjax.check(state_of(after))
    with pytest.raises(ValueError, match=r"^cache: was donated"):
        cache.step(MODEL, tokens, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"^cache: was donated"):
        cache.watermark(1, max_blocks=1)
    with pytest.raises(ValueError, match=r"^model: got successor"):
        after.step(successor, tokens, np.zeros(3, np.int32))


def test_a_run_without_requests_ends_at_once():
    cache = start()
    assert together(cache, []) == ([], cache, [])
    assert batched(cache, []) == ([], cache, [])
    (progress,) = drive.stream(MODEL, cache, [[]], **OPTIONS)
    assert [output.finish for output in progress.outputs] == ["bad_request"]
