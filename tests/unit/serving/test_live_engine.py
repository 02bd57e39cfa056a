# SPDX-License-Identifier: Apache-2.0
"""`Engine`: requests that come from threads and from asyncio while others run get what `run_batch` gives them."""

import asyncio
import contextlib
import random
import threading
import time
import warnings

import jax
import numpy as np
import pytest

import kvjax
from kvjax import Sampling
from kvjax.events import Listeners, Mirror, fold, index_of, listeners
from kvjax.pools import host as host_pool
from kvjax.serving import EngineError, QueueFull, Scheduler, driver, engine_thread
from kvjax.stores import DiskStore
from models import load
from tests import drive
from tests.compiles import COMPILED
from tests.poison import poisoned
from tests.serving_kit import state_of

pytestmark = pytest.mark.long  # by default the tests of servers run an engine
ROWS, LENGTH, SIZE, NEW = 4, 96, 16, 10
MODEL = load("tests/data/goldens/llama")[0]
OPTIONS = {"max_seqs": ROWS, "max_length": LENGTH, "block_size": SIZE, "dtype": "float32"}
SPEC = kvjax.make_spec(MODEL.layer_specs(), num_blocks=40, **OPTIONS)
RNG = np.random.default_rng(0)
BASE = RNG.integers(0, 40, LENGTH).tolist()
PROMPTS = [[*BASE[: RNG.integers(0, 60)], *RNG.integers(0, 40, RNG.integers(1, 24)).tolist()] for _ in range(24)]


# Engines with events share a program.
SHARED = {"listener": lambda events: None}


def empty(spec=SPEC, model=MODEL):
    if spec.has_host:
        tiered = kvjax.tiers.TieredCache.create(spec)
        return tiered.replace(tiered.cache.replace(pools=poisoned(tiered.pools)))
    cache = kvjax.Cache.create(spec)
    return cache.replace(pools=poisoned(cache.pools))


def wanted(prompts=PROMPTS, new=NEW, **options):
    outputs, _, _ = drive.run_batch(MODEL, empty(), prompts, max_new_tokens=new, **options)
    return [output.tokens for output in outputs]


@pytest.fixture(scope="module")
def tokens():
    return wanted()


@pytest.fixture(scope="module")
def engine():
    with drive.engine(MODEL, empty(), **SHARED) as engine:
        yield engine


def idle(engine):
    """Requires that nothing runs any more, and that the state is sound."""
    assert engine.drain(60) and engine.running == engine.waiting == 0
    kvjax.check(engine.state, rows=())


def test_requests_get_what_run_batch_gives(engine, tokens):
    handles = [drive.ask(engine, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    assert [handle.result(60).tokens for handle in handles] == tokens
    for handle, prompt in zip(handles, PROMPTS, strict=True):
        assert handle.output.finish == "length" and handle.output.prompt_tokens == len(prompt)
        assert len(handle.output.logprobs) == NEW and handle.done
        times = handle.times
        assert times.queued <= times.admitted <= times.first_token <= times.ended
    again = drive.ask(engine, PROMPTS[0], max_new_tokens=NEW)
    assert list(again) == tokens[0] and again.output.cached_tokens > 0
    idle(engine)


def test_threads_and_tasks_that_come_and_go_at_random(engine, tokens):
    """Some read as tokens come, some wait for the end, some give up at any stage."""
    failures, rng = [], random.Random(3)

    def use(number, way, delay):
        try:
            time.sleep(delay)
            handle = drive.ask(engine, PROMPTS[number], max_new_tokens=NEW, priority=number % 3)
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


@contextlib.contextmanager
def no_compiles():
    """Requires that nothing is compiled."""
    compiled = []

    def note(event, *_, **__):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert COMPILED not in compiled


def test_nothing_is_compiled_after_the_start(engine):
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9)
    with no_compiles():
        handles = [drive.ask(engine, BASE[:length], max_new_tokens=3) for length in (1, 17, 90)]
        handles += [
            drive.ask(engine, BASE, max_new_tokens=40),
            drive.ask(engine, [3], sampling=sampling, stop_tokens=[1, 2]),
        ]
        handles += [
            drive.ask(engine, PROMPTS[1], samples=3, seed=5, sampling=sampling),
            drive.ask(engine, [1], namespace=7),
        ]
        assert len(list(drive.ask(engine, [5, 6], max_new_tokens=30))) == 30
        handles[-1].cancel()
        for handle in handles:
            handle.result(60)
    idle(engine)


def shared_tokens(one, other):
    """The number of tokens with which both begin."""
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


@pytest.mark.parametrize("host", [0, pytest.param(30, marks=pytest.mark.slow)])
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

    spec, rng = kvjax.make_spec(MODEL.layer_specs(), num_blocks=40, num_host_blocks=host, **OPTIONS), random.Random(5)
    with drive.engine(MODEL, empty(spec), names=names, listener=listen) as engine:
        most_live = 0
        for wave in range(40):
            salts = [f"salt {rng.choice((wave * 6 + n, rng.randrange(8)))}" for n in range(6)]
            chosen = [rng.randrange(len(PROMPTS)) for _ in salts]
            handles = [
                drive.ask(engine, PROMPTS[number], max_new_tokens=NEW, salt=salt)
                for number, salt in zip(chosen, salts, strict=True)
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
    with pytest.raises(ValueError, match=r"^salt: got one of an engine without names, wanted None"):
        drive.ask(engine, [1], salt="a")
    names = kvjax.Namespaces()
    with drive.engine(MODEL, empty(), names=names, max_waiting=3, **SHARED) as engine:
        own = names("own")
        for options, message in (
            ({"prompt": []}, "prompt: got"),
            ({"samples": 4}, "samples: got 4, wanted at most 3"),
            ({"sampling": 3}, "sampling: got 3"),
            ({"namespace": own}, "salt: got one beside namespace 1, wanted None"),
            ({"salt": "kvjax-weights:1:1"}, "salt: got 'kvjax-weights:1:1', wanted one that does not begin"),
            ({"salt": 3}, "salt: got 3, wanted a str or None"),
        ):
            with pytest.raises(ValueError, match=message):
                drive.ask(engine, **{"prompt": [1, 2], "salt": "new", **options})
        with engine._inbox.wake:  # nothing leaves the queue
            for number in range(3):
                drive.ask(engine, [number], namespace=own)
            with pytest.raises(QueueFull):
                drive.ask(engine, [4], salt="new")
        idle(engine)
        assert len(names) == 2
        assert drive.ask(engine, [4], salt="own").result(60).finish == "length" and len(names) == 2


def test_a_request_that_is_late_is_cancelled(engine):
    late, early = drive.ask(engine, [1, 2, 3], max_new_tokens=90, timeout=0.0), drive.ask(engine, [1, 2], timeout=60)
    assert late.result(60).finish == "cancelled" and early.result(60).finish == "length"
    with pytest.raises(TimeoutError):
        drive.ask(engine, [4], max_new_tokens=90).result(0)
    idle(engine)


def test_an_idle_engine_sleeps(engine):
    idle(engine)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_rows_are_free_two_turns_after_a_cancel(engine):
    handles = [drive.ask(engine, [n], max_new_tokens=90) for n in range(ROWS)]
    for handle in handles:
        next(iter(handle))
        handle.cancel()
    last = drive.ask(engine, [9], max_new_tokens=1)
    assert last.result(60).finish == "length"
    assert all(len(handle.result(60).tokens) < 90 for handle in handles)
    idle(engine)


# Engines of their own.


def test_a_full_queue_refuses_and_a_closed_engine_does_too(monkeypatch):
    with drive.engine(MODEL, empty(), max_waiting=3, **SHARED) as engine:
        gate, whole = threading.Event(), driver.apply
        monkeypatch.setattr(driver, "apply", lambda *args, **options: (gate.wait(), whole(*args, **options))[1])
        handles = [drive.ask(engine, [1])]
        while engine._inbox.queue:
            time.sleep(0.001)
        handles += [drive.ask(engine, [n]) for n in range(3)]
        with pytest.raises(QueueFull, match="3 requests wait already") as refused:
            drive.ask(engine, [4])
        assert refused.value.waiting == 3
        gate.set()
        assert all(handle.result(60).finish == "length" for handle in handles)
        running = drive.ask(engine, [5], max_new_tokens=90)
    with pytest.raises(EngineError, match="closed"):
        running.result(60)
    for use in (lambda: drive.ask(engine, [1]), lambda: engine.state):
        with pytest.raises(EngineError, match="closed"):
            use()
    kvjax.check(engine.close().state, rows=())


class Away:
    """A listener that is away at some calls, or for ever."""

    def __init__(self, fails):
        self.fails, self.mirror, self.calls = fails, Mirror(), 0

    def listen(self, events):
        self.calls += 1
        if self.fails():
            raise ConnectionError("away")
        self.mirror = fold(kvjax.to_list(events), self.mirror)


@pytest.mark.parametrize("host", [0, pytest.param(30, marks=pytest.mark.slow)])
def test_a_listener_that_fails_at_random_costs_no_request_and_has_the_index_in_the_end(host, monkeypatch, tokens):
    monkeypatch.setattr(listeners, "_FIRST_WAIT", 0.01)
    spec, rng = kvjax.make_spec(MODEL.layer_specs(), num_blocks=40, num_host_blocks=host, **OPTIONS), random.Random(3)
    away = Away(lambda: rng.random() < 0.4)
    with drive.engine(MODEL, empty(spec), listener=away.listen) as engine:
        for _ in range(4):
            handles = [drive.ask(engine, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
            assert [handle.result(60).tokens for handle in handles] == tokens
        away.fails = lambda: False
        idle(engine)
        until = time.monotonic() + 20
        while Listeners(away.listen).is_behind and time.monotonic() < until:
            time.sleep(0.01)  # the engine tries again with nothing else to do
        assert away.mirror.index == index_of(engine.state)
        counts = Listeners(away.listen).counts
        assert counts["failures"] > 2 and counts["missed"] and counts["snapshots"] > 1
        away.fails = lambda: rng.random() < 0.4
        for prompt in PROMPTS[:6]:
            drive.ask(engine, prompt, max_new_tokens=90 - len(prompt))
        time.sleep(0.3)
        away.fails = lambda: False
    assert away.mirror.index == index_of(state_of(engine.close()))  # closed in the middle


def test_an_engine_that_cannot_go_on_ends_all_requests(monkeypatch):
    def failing(*args, **options):
        raise RuntimeError("no device")

    engine = drive.engine(MODEL, empty(), **SHARED)
    monkeypatch.setattr(driver, "turn", failing)
    monkeypatch.setattr(threading, "excepthook", lambda error: None)  # pytest's own would report the thread's end
    handles = [drive.ask(engine, [n], max_new_tokens=90) for n in range(3)]
    for handle in handles:
        with pytest.raises(EngineError):
            handle.result(60)
    assert engine.drain(10)
    with pytest.raises(EngineError, match="closed"):
        drive.ask(engine, [1])
    kvjax.check(engine.close().state, rows=())


@pytest.mark.parametrize("host", [0, pytest.param(30, marks=pytest.mark.slow)])
def test_a_store_serves_an_engine_after_a_restart(host, tmp_path, tokens):
    spec = kvjax.make_spec(MODEL.layer_specs(), num_blocks=40, num_host_blocks=host, **OPTIONS)

    def opened():
        return DiskStore(tmp_path, spec, model="m", names=kvjax.Namespaces(), max_bytes=1 << 30, patience_ms=60_000)

    for turn in range(2):
        with opened() as store, drive.engine(MODEL, empty(spec), store=store) as engine:
            with no_compiles():
                handles = [drive.ask(engine, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
                assert [handle.result(60).tokens for handle in handles] == tokens
            if turn:
                for handle, prompt in zip(handles, PROMPTS, strict=True):
                    output = handle.output
                    assert output.cached_tokens >= min(len(prompt) // SIZE * SIZE, len(prompt) - 1)
                assert sum(handle.output.stored_tokens for handle in handles) > 200
            idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("swap", [False, True])
def test_an_engine_with_two_tiers(swap, tokens):
    spec = kvjax.make_spec(MODEL.layer_specs(), num_blocks=14, num_host_blocks=30, **OPTIONS)
    scheduler = Scheduler(reserve="num_tokens", preempt="swap") if swap else Scheduler()
    found = []
    with drive.engine(MODEL, empty(spec), scheduler=scheduler, listener=found.append) as engine:
        with no_compiles():
            for _ in range(2):
                handles = [drive.ask(engine, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
                assert [handle.result(60).tokens for handle in handles] == tokens
        idle(engine)
    cache = engine.close()
    kvjax.check(state_of(cache), rows=())
    events = [event for one in found for event in kvjax.to_list(one)]
    assert any(event.get("level") == 1 for event in events)
    assert fold(events).index == index_of(state_of(cache))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_moves_that_fail_and_cancels_change_nobodys_tokens(seed, monkeypatch, tokens):
    """Unused slots of the pools are NaN: what a failed move has lost is computed again, and never read."""
    copy, rng, failed = host_pool._copy, random.Random(seed), []

    def copy_or_fail(*args):
        if rng.random() < 0.2:
            failed.append(len(args))
            raise RuntimeError("a move")
        return copy(*args)

    spec = kvjax.make_spec(MODEL.layer_specs(), num_blocks=14, num_host_blocks=30, **OPTIONS)
    scheduler = Scheduler(reserve="num_tokens", preempt="swap" if seed % 2 == 0 else "recompute")
    with warnings.catch_warnings(), drive.engine(MODEL, empty(spec), scheduler=scheduler, **SHARED) as engine:
        warnings.simplefilter("ignore", RuntimeWarning)
        monkeypatch.setattr(host_pool, "_copy", copy_or_fail)
        for _ in range(4):
            handles = [drive.ask(engine, prompt, max_new_tokens=NEW, priority=rng.randrange(3)) for prompt in PROMPTS]
            for handle in rng.sample(handles, 4):
                handle.cancel()
            for handle, wanted in zip(handles, tokens, strict=True):
                output = handle.result(60)
                assert output.tokens == (wanted if output.finish == "length" else wanted[: len(output.tokens)])
        idle(engine)
    assert failed


@pytest.mark.slow
def test_rows_that_cannot_be_swapped_out_go_on_in_an_engine(monkeypatch):
    """All moves to the host fail: no row is lost, and nobody's tokens change."""
    copy, rows = host_pool._copy, []

    def copy_or_fail(targets, sources, index):
        if targets[0][0].sharding.memory_kind == "pinned_host":
            raise RuntimeError("a move")
        return copy(targets, sources, index)

    def swap_out(cache, row, **options):
        with pytest.raises(kvjax.tiers.FailedTransfer) as caught:
            swapped_out(cache, row, **options)
        rows.append((int(row), caught.value.lost))
        raise caught.value

    spec = kvjax.make_spec(MODEL.layer_specs(), num_blocks=14, num_host_blocks=30, **OPTIONS)
    scheduler, swapped_out = Scheduler(reserve="num_tokens", preempt="swap"), kvjax.tiers.TieredCache.swap_out
    prompts, new = [[number, *BASE[:19]] for number in range(8)], 60  # 5 blocks at their end, and none of them equal
    tokens = wanted(prompts, new)
    with warnings.catch_warnings(), drive.engine(MODEL, empty(spec), scheduler=scheduler, **SHARED) as engine:
        warnings.simplefilter("ignore", RuntimeWarning)
        monkeypatch.setattr(host_pool, "_copy", copy_or_fail)
        monkeypatch.setattr(kvjax.tiers.TieredCache, "swap_out", swap_out)
        handles = [drive.ask(engine, prompt, max_new_tokens=new) for prompt in prompts]
        assert [handle.result(60).tokens for handle in handles] == tokens
        idle(engine)
    assert rows and all(not lost for _, lost in rows)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_engines_of_other_kinds(family):
    model = load(f"tests/data/goldens/{family}")[0]
    spec = kvjax.make_spec(model.layer_specs(), num_blocks=40, **OPTIONS)
    outputs, _, _ = drive.run_batch(model, empty(spec), PROMPTS, max_new_tokens=NEW)
    with drive.engine(model, empty(spec)) as engine:
        handles = [drive.ask(engine, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        assert [handle.result(60).tokens for handle in handles] == [output.tokens for output in outputs]
        idle(engine)
