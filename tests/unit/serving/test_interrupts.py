# SPDX-License-Identifier: Apache-2.0
"""A generation that ends early never loses the cache: errors, Ctrl-C and abandoned streams.

Prompts have 13 tokens and run one at a time, while another row is in use, so that all tests of a spec share the same
few programs.
"""

import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.pools import host as host_pool
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
    collect_in_a_trace,
    ctrl_c_acts,
    fail,
    make_spec,
    press,
    prompts_of,
    spread,
    start,
    state_of,
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
            causes = []
            for n in calls.each(**how):
                run += 1
                prompts = prompts_of(run)
                try:
                    outputs, cache, decoded = (together, spread)[n % 2](cache, prompts)
                    assert [output.finish for output in outputs] == ["length"] * 2
                except kvjax.serving.GenerationInterrupted as error:
                    causes.append(type(error.__cause__))
                    outputs, cache, decoded = error.outputs, error.cache, error.events
                events += decoded
                # Blocks that a chunk pushes out of a window do not go to the host.
                lossy = kind == "windows" and host
                assert_whole(cache, events, () if lossy else prompts, () if lossy else outputs)
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert causes == [cause] * (n - 1)
            assert n > 5


def test_the_last_call_is_followed_by_ctrl_c_too(monkeypatch):
    cache, events = start(), []
    calls = Calls(monkeypatch)
    _, cache, decoded = together(cache, prompts_of(0))
    calls.at, calls.count, calls.after = calls.count, 0, press
    with pytest.raises(kvjax.serving.GenerationInterrupted) as caught:
        together(cache, prompts_of(9))
    assert [output.finish for output in caught.value.outputs] == ["length"] * 2
    assert_whole(caught.value.cache, events + decoded + caught.value.events, prompts_of(9), caught.value.outputs)


def test_a_second_ctrl_c_acts_at_once_and_may_cost_the_cache(monkeypatch):
    calls = Calls(monkeypatch)
    calls.at, calls.after = 3, lambda: (press(), press())
    with pytest.raises(
        kvjax.serving.GenerationInterrupted, match=r"interrupted by KeyboardInterrupt; .* no cache"
    ) as caught:
        together(start(), prompts_of(0))
    assert caught.value.cache is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_call_that_dies_on_the_device_leaves_no_cache(monkeypatch):
    calls = Calls(monkeypatch)
    calls.at, calls.after = 3, fail
    cache = start()
    with pytest.raises(
        kvjax.serving.GenerationInterrupted, match=r"interrupted by MemoryError: no memory; .* no cache"
    ) as caught:
        together(cache, prompts_of(0))
    assert caught.value.cache is None
    assert isinstance(caught.value.__cause__, MemoryError)
    for use in (
        together,
        spread,
        lambda cache, _: kvjax.step(MODEL, cache, np.zeros((3, 1), np.int32), np.zeros(3, np.int32)),
    ):
        with pytest.raises(ValueError, match=r"^cache: was donated to an earlier call: go on with what that call ret"):
            use(cache, prompts_of(0))


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


def test_a_stream_may_be_collected_while_something_is_traced():
    cache, events = start(), []
    streams = [drive.stream(MODEL, cache, prompts_of(0), **OPTIONS)]
    progress = next(streams[0])
    collect_in_a_trace(streams)
    assert_whole(progress.cache, events + progress.events + progress.closing, prompts_of(0), progress.outputs)


@pytest.mark.slow
def test_a_prompt_finds_blocks_for_its_next_chunk_where_what_is_cached_has_children_on_the_host():
    cache = start("windows", host=HOST)
    for number in range(4):
        outputs, cache, _ = together(cache, prompts_of(number))
        assert [output.finish for output in outputs] == ["length"] * 2


def successor(tokens, pools, view, *, last):
    """A model that always predicts the next number, and stores nothing."""
    del view
    chosen = tokens if last is None else tokens[jnp.arange(tokens.shape[0]), last]
    return jax.nn.one_hot((chosen + 1) % 30, 30), pools


def test_a_cache_with_a_host_tier_steps():
    cache, tokens = start(host=HOST), np.arange(21, dtype=np.int32).reshape(3, 7)
    model = jax.tree_util.Partial(successor)
    after, logits, events = cache.step(model, tokens, np.asarray([0, 3, 0], np.int32))
    assert logits.shape == (3, 30) and int(jnp.argmax(logits[1])) == 10
    assert bool(events.ok) and after.cache.state.seqs.committed.tolist() == [0, 3, 0]
    after, logits, _ = kvjax.step(model, after, tokens, np.asarray([0, 4, 0], np.int32), logits="all")
    assert logits.shape == (3, 7, 30)
    kvjax.check(state_of(after))
    with pytest.raises(ValueError, match=r"^cache: was donated"):
        cache.step(model, tokens, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"^cache: was donated"):
        cache.watermark(1, most=1)
    with pytest.raises(ValueError, match=r"^model: got successor"):
        after.step(successor, tokens, np.zeros(3, np.int32))


@pytest.mark.slow
def test_a_failed_move_is_tried_again_and_then_done_without(monkeypatch):
    cache, copy, failed = start(host=HOST), host_pool._copy, []
    outputs, cache, events = together(cache, prompts_of(0) + prompts_of(1))  # some are on the host now

    def copy_or_fail(targets, sources, rows):
        if targets[0][0].sharding.memory_kind != "pinned_host":  # onboarding
            failed.append(rows)
            raise MemoryError("no memory")
        return copy(targets, sources, rows)

    monkeypatch.setattr(host_pool, "_copy", copy_or_fail)
    for prompt in prompts_of(0):
        before = len(failed)
        with pytest.warns(RuntimeWarning, match=r"computed again: group 0: .*: no memory"):
            outputs, cache, decoded = together(cache, [prompt])
        assert len(failed) == before + 1
        events += decoded
        assert outputs[0].finish == "length"
        assert_whole(cache, events, [prompt], outputs)


def test_every_prompt_has_an_output_and_every_stream_a_last_progress():
    cache = start()
    inadmissible = {(): "bad_request", (-1,): "bad_request", (2, VOCAB): "bad_request", (1,) * 40: "row_full"}
    outputs, cache, events = together(cache, list(inadmissible))
    assert ([output.finish for output in outputs], events) == (list(inadmissible.values()), [])
    assert len(list(drive.stream(MODEL, cache, [[]]))) == 1
    assert together(cache, []) == ([], cache, [])
