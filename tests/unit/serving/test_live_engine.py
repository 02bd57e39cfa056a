# SPDX-License-Identifier: Apache-2.0
"""`Engine` with its thread: requests come from threads and from asyncio, some late, and some give up.

`test_contract.py` has what an engine shares with the other ways of serving. `tests/oracle/test_engines.py` turns
engines by hand: moves and listeners fail, requests are cancelled, and every byte is compared.
"""

import asyncio
import random
import threading
import time

import numpy as np
import pytest

import kvjax
from kvjax import Sampling
from kvjax.events import Listeners, Mirror, fold, index_of, listeners
from kvjax.serving import EngineError, QueueFull, driver, engine_thread
from kvjax.stores import DiskStore
from tests import drive
from tests.compiles import no_compiles
from tests.serving_kit import (
    BASE,
    HOST,
    LENGTH,
    MODEL,
    VOCAB,
    answer,
    ask,
    make_cache,
    make_spec,
    state_of,
)

pytestmark = pytest.mark.long  # by default `test_contract.py` runs an engine
RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, VOCAB, LENGTH).tolist()
PROMPTS = [
    [*TEXT[: RNG.integers(0, 17)], *RNG.integers(0, VOCAB, RNG.integers(1, 10)).tolist()] for _ in range(24)
]  # fmt: skip
MOST = LENGTH + 1  # tokens that no request gets


def opened(host=0, **options):
    options = {"num_ranges": 1, "listener": lambda events: None, **BASE, **options}
    return drive.engine(MODEL, make_cache(host=host), **options)


@pytest.fixture(scope="module")
def tokens():
    return [answer(prompt).tokens for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine():
    with opened() as engine:
        yield engine


def idle(engine):
    """Requires that nothing runs any more, and that the state is sound."""
    assert engine.drain(60) and engine.running == engine.waiting == 0
    kvjax.check(engine.state, rows=())


def test_a_handle_has_the_output_its_times_and_the_tokens_as_they_come(engine, tokens):
    handles = [engine.submit(ask(prompt)) for prompt in PROMPTS]
    assert [handle.result(60).tokens for handle in handles] == tokens
    for handle in handles:
        times = handle.times
        assert handle.done and times.queued <= times.admitted <= times.first_token <= times.ended
    assert list(engine.submit(ask(PROMPTS[0]))) == tokens[0]
    idle(engine)


def test_threads_and_tasks_that_come_and_go_at_random(engine, tokens):
    """Some read as tokens come, some wait for the end, some give up at any stage."""
    failures, rng = [], random.Random(3)

    def use(number, way, delay):
        try:
            time.sleep(delay)
            handle = engine.submit(ask(PROMPTS[number], priority=number % 3))
            if way == "read":
                assert list(handle) == tokens[number]
            elif way == "wait":
                assert handle.result(60).tokens == tokens[number]
            elif way == "task":
                assert asyncio.run(read(handle)) == tokens[number]
            else:
                time.sleep(delay / 4)
                handle.cancel()
                output = handle.result(60)
                assert output.finish in ("cancelled", "length")
                assert output.tokens == tokens[number][: len(output.tokens)]
        except BaseException as error:
            failures.append(error)

    async def read(handle):
        return [token async for token in handle]

    ways = [(n % len(PROMPTS), rng.choice(["read", "wait", "task", "leave"]), rng.uniform(0, 0.3)) for n in range(60)]
    threads = [threading.Thread(target=use, args=way) for way in ways]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        kvjax.check(engine.state)
    assert not failures
    idle(engine)


def test_nothing_is_compiled_after_the_start(engine):
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9)
    with no_compiles():
        handles = [engine.submit(ask(TEXT[:length])) for length in (1, 17, 30)]
        handles += [engine.submit(ask(TEXT)), engine.submit(ask([3], sampling=sampling, stop_tokens=[1, 2]))]
        handles += [engine.submit(ask(PROMPTS[1], samples=3, seed=5, sampling=sampling))]
        handles += [engine.submit(ask([1], namespace=7, retention=None))]
        assert len(list(engine.submit(ask([5, 6], max_new_tokens=30)))) == 30
        handles[-1].cancel()
        for handle in handles:
            handle.result(60)
    idle(engine)


def shared_tokens(one, other):
    """The number of tokens with which both begin."""
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


@pytest.mark.parametrize("host", [0, pytest.param(HOST, marks=pytest.mark.slow)])
def test_salts_come_and_go_and_nobody_finds_the_tokens_of_another(host, monkeypatch, tokens):
    """A number is its salt's for ever, and is given back when no block and no request has it."""
    monkeypatch.setattr(engine_thread, "_FEW_SALTS", 4)
    names, events, salt_of_number, texts = kvjax.Namespaces(), [], {}, {}

    def listen(log):
        for event in kvjax.to_list(log):
            events.append(event)
            if event["kind"] == "stored" and event["parent"] is None:
                salt, _ = names.describe(event["namespace"])
                assert salt_of_number.setdefault(event["namespace"], salt) == salt

    rng = random.Random(5)
    with opened(host, names=names, listener=listen) as engine:
        most_live = 0
        for wave in range(40):
            salts = [f"salt {rng.choice((wave * 6 + n, rng.randrange(8)))}" for n in range(6)]
            chosen = [rng.randrange(len(PROMPTS)) for _ in salts]
            handles = [
                engine.submit(ask(PROMPTS[number]), salt=salt) for number, salt in zip(chosen, salts, strict=True)
            ]
            handles[rng.randrange(6)].cancel()
            for number, salt, handle in zip(chosen, salts, handles, strict=True):
                texts.setdefault(salt, {})[handle] = [*PROMPTS[number], *tokens[number]]
            for number, salt, handle in zip(chosen, salts, handles, strict=True):
                output = handle.result(60)
                assert output.tokens == tokens[number][: len(output.tokens)]
                others = [text for other, text in texts[salt].items() if other is not handle]
                most = max([shared_tokens(PROMPTS[number], text) for text in others], default=0)
                assert output.cached_tokens <= most
            idle(engine)
            live = {namespace for _, namespace, _ in index_of(engine.state)}
            assert {number: names.describe(number)[0] for number in live} == {n: salt_of_number[n] for n in live}
            most_live = max(most_live, len(live))
            assert len(names) <= 2 * most_live + 4 + 2 * len(salts)
        assert len(salt_of_number) > len(names)
        assert fold(events).index == index_of(engine.state)


def test_a_request_that_is_refused_makes_no_namespace(engine):
    with pytest.raises(ValueError, match=r"^salt: got a salt without names, wanted None"):
        engine.submit(ask([1]), salt="a")
    names = kvjax.Namespaces()
    with opened(names=names, max_waiting=3) as engine:
        own = names("own")
        for fields, salt, message in (
            ({"prompt": []}, "new", "prompt: got"),
            ({"samples": 4}, "new", "samples: got 4, wanted at most 3"),
            ({"namespace": own}, "new", "salt: got a salt together with namespace 1, wanted None"),
            ({}, "kvjax-weights:1:1", "salt: got 'kvjax-weights:1:1', wanted a salt that does not begin"),
            ({}, 3, "salt: got 3, wanted a str or None"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit(ask(**{"prompt": [1, 2], **fields}), salt=salt)
        with engine._inbox.wake:  # nothing leaves the queue
            for number in range(3):
                engine.submit(ask([number], namespace=own))
            with pytest.raises(QueueFull):
                engine.submit(ask([4]), salt="new")
        idle(engine)
        assert len(names) == 2
        assert engine.submit(ask([4]), salt="own").result(60).finish == "length" and len(names) == 2


def test_a_request_that_is_late_is_cancelled(engine):
    late = engine.submit(ask([1, 2, 3], max_new_tokens=MOST), timeout=0.0)
    early = engine.submit(ask([1, 2]), timeout=60)
    assert late.result(60).finish == "cancelled" and early.result(60).finish == "length"
    with pytest.raises(TimeoutError):
        engine.submit(ask([4], max_new_tokens=MOST)).result(0)
    idle(engine)


def test_an_idle_engine_sleeps(engine):
    idle(engine)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


# Engines of their own.


def test_a_full_queue_refuses_and_a_closed_engine_does_too(monkeypatch):
    with opened(max_waiting=3) as engine:
        gate, whole = threading.Event(), driver.apply
        monkeypatch.setattr(driver, "apply", lambda *args, **options: (gate.wait(), whole(*args, **options))[1])
        handles = [engine.submit(ask([1]))]
        while engine._inbox.queue:
            time.sleep(0.001)
        handles += [engine.submit(ask([n])) for n in range(3)]
        with pytest.raises(QueueFull, match="3 requests wait already") as refused:
            engine.submit(ask([4]))
        assert refused.value.waiting == 3
        gate.set()
        assert all(handle.result(60).finish == "length" for handle in handles)
        running = engine.submit(ask([5], max_new_tokens=MOST))
    with pytest.raises(EngineError, match="closed"):
        running.result(60)
    for use in (lambda: engine.submit(ask([1])), lambda: engine.state):
        with pytest.raises(EngineError, match="closed"):
            use()
    kvjax.check(engine.close().state, rows=())


@pytest.mark.parametrize("host", [0, pytest.param(HOST, marks=pytest.mark.slow)])
def test_an_idle_engine_tries_a_listener_again_that_has_failed(host, monkeypatch):
    monkeypatch.setattr(listeners, "_FIRST_WAIT", 0.01)
    mirror, num_refusals = Mirror(), 0

    def listen(events):
        nonlocal mirror, num_refusals
        if num_refusals:
            num_refusals -= 1
            raise ConnectionError("away")
        mirror = fold(kvjax.to_list(events), mirror)

    with opened(host, listener=listen) as engine:
        for turn in (1, 2, 3):
            num_refusals = turn
            for handle in [engine.submit(ask([turn, *prompt])) for prompt in PROMPTS[:8]]:
                assert handle.result(60).finish == "length"
            idle(engine)
            until = time.monotonic() + 20
            while Listeners(listen).is_behind and time.monotonic() < until:
                time.sleep(0.01)
            assert mirror.index == index_of(engine.state)
        counts = Listeners(listen).counts
        assert (counts["failures"], counts["snapshots"]) == (6, 3)
        num_refusals = 3
        for prompt in PROMPTS:
            engine.submit(ask(prompt, max_new_tokens=MOST))
        time.sleep(0.1)
        num_refusals = 0
    assert mirror.index == index_of(state_of(engine.close()))  # closed in the middle


def test_a_running_request_is_cancelled_where_it_is_and_so_is_a_later_one_in_its_slot():
    running = []

    def listen(events):
        for handle in running:
            handle.cancel()

    with opened(listener=listen) as engine:
        for _ in range(3):  # all slots are used again
            for handle in [engine.submit(ask(prompt)) for prompt in PROMPTS]:
                assert handle.result(60).finish == "length"
            running[:] = [engine.submit(ask([1, 2, 3], max_new_tokens=LENGTH - 3))]
            output = running[0].result(60)
            running.clear()
            assert output.finish == "cancelled" and len(output.tokens) < LENGTH - 3
        idle(engine)


def test_an_engine_that_cannot_go_on_ends_all_requests(monkeypatch):
    def failing(*args, **options):
        raise RuntimeError("no device")

    engine = opened()
    monkeypatch.setattr(driver, "turn", failing)
    monkeypatch.setattr(threading, "excepthook", lambda error: None)  # pytest's own would report the thread's end
    handles = [engine.submit(ask([n])) for n in range(3)]
    for handle in handles:
        with pytest.raises(EngineError):
            handle.result(60)
    assert engine.drain(10)
    with pytest.raises(EngineError, match="closed"):
        engine.submit(ask([1]))
    kvjax.check(engine.close().state, rows=())


def test_what_was_pinned_is_not_found_behind_a_step_that_failed(monkeypatch, tokens):
    """Its K/V are lost with the cache, as all others are."""
    (_, cache, events), turn = drive.run_batch(MODEL, make_cache(), [PROMPTS[0]], max_new_tokens=8), driver.turn
    blocks = np.flatnonzero(np.asarray(cache.state.groups[0].blocks.fill)).astype(np.int32)
    state, pinned = kvjax.pin(cache.state, blocks)
    assert len(blocks) and pinned.ok
    mirror, failures = fold(events), ["a step"]

    def turn_or_fail(*args, **options):
        if failures:
            raise RuntimeError(failures.pop())
        return turn(*args, **options)

    def listener(events):
        nonlocal mirror
        mirror = fold(kvjax.to_list(events), mirror)

    options = {"num_ranges": 1, **BASE, "listener": listener}
    with drive.engine(MODEL, cache.replace(state=state), **options) as engine:
        monkeypatch.setattr(driver, "turn", turn_or_fail)
        with pytest.raises(EngineError, match="a step"):
            engine.submit(ask(PROMPTS[1])).result(60)
        output = engine.submit(ask(PROMPTS[0])).result(60)
        assert (output.cached_tokens, output.tokens) == (0, tokens[0])
        idle(engine)
        assert mirror.index == index_of(engine.state)


@pytest.mark.parametrize("host", [0, pytest.param(HOST, marks=pytest.mark.slow)])
def test_with_a_store_and_two_tiers_nothing_is_compiled_after_the_start(host, tmp_path, tokens):
    options = {"model": "m", "names": kvjax.Namespaces(), "max_bytes": 1 << 30, "read_timeout_ms": 60_000}
    for turn in range(2):
        with DiskStore(tmp_path, make_spec(host=host), **options) as store, opened(host, store=store) as engine:
            with no_compiles():
                handles = [engine.submit(ask(prompt)) for prompt in PROMPTS]
                assert [handle.result(60).tokens for handle in handles] == tokens
            assert (sum(handle.output.stored_tokens for handle in handles) > 100) == bool(turn)
            idle(engine)
