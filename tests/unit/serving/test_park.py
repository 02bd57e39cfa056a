# SPDX-License-Identifier: Apache-2.0
"""Requests are parked and go on with the same tokens; engines sleep, wake, and get new weights.

`tests/oracle/engines.py` does all this at random turns, and compares every byte.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Sampling
from kvjax.ledger import pool_bytes
from kvjax.serving import EngineError, QueueFull
from kvjax.serving.requests import Stage
from kvjax.stores import DiskStore
from tests import drive
from tests.compiles import no_compiles
from tests.serving_kit import (
    BASE,
    BLOCKS,
    HOST,
    LENGTH,
    MODEL,
    NEW,
    ROWS,
    SCHEDULER,
    VOCAB,
    answer,
    ask,
    make_cache,
    make_spec,
)
from tests.unit.serving.turned import Turned as Engines

pytestmark = pytest.mark.long
OTHER = MODEL.replace(head=MODEL.head * -1.3, project=MODEL.project * 1.1)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, VOCAB, length).tolist() for length in (3, 9, 14, 5, 7, 9)]
STEP = jax.jit(kvjax.serving.serve_step, static_argnames="scheduler")
PARK = jax.jit(kvjax.serving.park, static_argnames=("scheduler", "keep"))
SUBMIT = jax.jit(kvjax.serving.submit, static_argnames="scheduler")


# Pure functions.


def submitted(scheduler=SCHEDULER, kind="plain", cache=None, **options):
    """Requests of which two are samples of a prompt."""
    cache = make_cache(kind=kind) if cache is None else cache
    serving = kvjax.serving.init_serving(cache, [LENGTH] * 7, num_stop_tokens=1, **options)
    prompts = [PROMPTS[0], *PROMPTS]
    lengths = [len(prompt) for prompt in prompts]
    return SUBMIT(
        serving, np.concatenate(prompts).astype(np.int32), np.array(lengths, np.int32), np.full(7, NEW, np.int32),
        scheduler=scheduler, sample_of=np.array([-1, 0, -1, -1, -1, -1, -1], np.int32),
        sampling=Sampling(temperature=np.array([1, 1, 0, 1, 0, 1, 0], np.float32)),
        seed=np.arange(7, dtype=np.uint32), logits_state=options.get("logits_state"),
    )[0]  # fmt: skip


def finished(serving, scheduler=SCHEDULER, parks=()):
    """The outputs at the end, if the requests are parked before some steps."""
    step = 0
    while bool(serving.busy):
        if step in parks:
            parked, events = PARK(serving, scheduler=scheduler)
            assert bool(events.ok)
            kvjax.check(parked.serving.cache.state)
            assert not kvjax.events.index_of(parked.serving.cache.state)
            serving = kvjax.serving.unpark(parked, kvjax.pools.init_pools(serving.cache.state.spec))
        serving, _, _ = STEP(MODEL, serving, None, scheduler=scheduler)
        step += 1
    return kvjax.serving.results(serving), step


@functools.cache
def undisturbed(kind, canonical=False):
    scheduler = dataclasses.replace(SCHEDULER, canonical=canonical)
    return finished(submitted(scheduler, kind), scheduler)


@pytest.mark.parametrize("kind", ["plain", "windows"])
@pytest.mark.parametrize("canonical", [False, True])
def test_parked_requests_go_on_with_the_same_tokens(kind, canonical):
    scheduler = dataclasses.replace(SCHEDULER, canonical=canonical)
    expected, num_steps = undisturbed(kind, canonical)
    random = np.random.default_rng(1)
    for _ in range(4):
        parks = set(random.integers(0, num_steps + 2, 2).tolist())
        outputs, _ = finished(submitted(scheduler, kind), scheduler, parks)
        assert outputs.keys() == expected.keys()
        for key, output in outputs.items():
            assert output.tokens == expected[key].tokens and output.finish == expected[key].finish
            if canonical:
                assert output.logprobs == expected[key].logprobs  # bit for bit
            else:
                np.testing.assert_allclose(output.logprobs, expected[key].logprobs, atol=1e-5)


def test_a_state_of_logits_fn_goes_back_with_a_canonical_request():
    scheduler = dataclasses.replace(SCHEDULER, canonical=True)
    first = np.zeros(7, np.int32)
    serving = submitted(scheduler, logits_state=jnp.asarray(first))

    def shift(logits, tokens, positions, state):
        """Forbids a token that depends on the number of earlier choices."""
        del tokens, positions
        return jnp.where(jnp.arange(VOCAB)[None] == state[:, None] % VOCAB, -jnp.inf, logits), state + 1

    step = jax.jit(functools.partial(kvjax.serving.serve_step, logits_fn=shift), static_argnames="scheduler")
    outputs = []
    for parked_at in (None, 6):
        current, at = serving, 0
        while bool(current.busy):
            if at == parked_at:
                parked, _ = PARK(current, scheduler=scheduler, logits_state=first)
                current = kvjax.serving.unpark(parked, kvjax.pools.init_pools(current.cache.state.spec))
            current, _, _ = step(MODEL, current, None, scheduler=scheduler)
            at += 1
        outputs.append({key: one.tokens for key, one in kvjax.serving.results(current).items()})
    assert outputs[0] == outputs[1]
    with pytest.raises(ValueError, match=r"^logits_state: got None, wanted the requests' first states"):
        kvjax.serving.park(serving, scheduler=scheduler)


def test_parking_is_refused_as_a_whole_if_others_hold_blocks():
    serving = submitted()
    for _ in range(3):
        serving, _, _ = STEP(MODEL, serving, None, scheduler=SCHEDULER)
    fill = np.asarray(serving.cache.state.groups[0].blocks.fill)
    cache, pinned = serving.cache.pin(np.flatnonzero(fill > 0)[:1].astype(np.int32))
    assert bool(pinned.ok)
    serving = serving.replace(cache=cache)
    parked, events = PARK(serving, scheduler=SCHEDULER)
    assert not bool(events.ok) and not kvjax.to_list(events)
    same = kvjax.serving.unpark(parked, serving.cache.pools)
    jax.tree.map(np.testing.assert_array_equal, same, serving)
    with pytest.raises(ValueError, match=r"^pools: got pools of CacheSpec"):
        kvjax.serving.unpark(parked, kvjax.pools.init_pools(make_spec("windows")))


def test_blocks_parked_on_the_host_are_found_again():
    """Any block that came back with wrong bytes would give other tokens."""
    expected, num_steps = undisturbed("windows")
    spec = dataclasses.replace(make_spec("windows", host=HOST), backups=True)
    for park_at in (0, num_steps // 2, num_steps + 1):
        serving = submitted(kind="windows", cache=kvjax.tiers.TieredCache.create(spec))
        log = kvjax.events.init_log(2048, 4)
        for _ in range(park_at):
            serving, log, _ = STEP(MODEL, serving, log, scheduler=SCHEDULER)
        parked, events = PARK(serving, scheduler=SCHEDULER, keep="host")
        state = parked.serving.cache.state
        assert bool(events.ok)
        kvjax.check(state)
        mirror = kvjax.fold(kvjax.to_list(events), kvjax.fold(kvjax.to_list(log), kvjax.events.Mirror()))
        assert mirror.index == kvjax.events.index_of(state) and bool(mirror.index) == (park_at > 0)
        assert all(int(group.num_empty) == BLOCKS for group in state.groups)
        serving = kvjax.serving.unpark(parked, kvjax.pools.init_pools(spec))
        while bool(serving.busy):
            serving, log, _ = STEP(MODEL, serving, log, scheduler=SCHEDULER)
        outputs = kvjax.serving.results(serving)
        assert {key: output.tokens for key, output in outputs.items()} == {
            key: output.tokens for key, output in expected.items()
        }
    pinned, _ = serving.cache.pin([int(np.argmax(np.asarray(serving.cache.state.groups[0].blocks.fill) > 0))])
    held, events = PARK(serving.replace(cache=pinned), scheduler=SCHEDULER, keep="host")
    assert events.status.tolist() == [int(kvjax.Status.HELD)] * ROWS
    assert kvjax.events.index_of(held.serving.cache.state) == kvjax.events.index_of(pinned.state)
    jax.tree.map(np.testing.assert_array_equal, held.serving.host_pools, serving.host_pools)
    with pytest.raises(ValueError, match=r"^keep: got 'host', but the requests have no host pools"):
        kvjax.serving.park(submitted(), scheduler=SCHEDULER, keep="host")
    with pytest.raises(ValueError, match=r"^keep: got 'disk', wanted 'none' or 'host'"):
        kvjax.serving.park(serving, scheduler=SCHEDULER, keep="disk")


def test_the_events_of_parking_give_the_index_and_what_is_parked_can_be_saved(tmp_path):
    serving = submitted()
    mirror = kvjax.events.Mirror()
    log = kvjax.events.init_log(2048, 4)
    for _ in range(6):
        serving, log, _ = STEP(MODEL, serving, log, scheduler=SCHEDULER)
    mirror = kvjax.fold(kvjax.to_list(log), mirror)
    assert mirror.index == kvjax.events.index_of(serving.cache.state)
    parked, events = PARK(serving, scheduler=SCHEDULER)
    mirror = kvjax.fold(kvjax.to_list(events), mirror)
    assert mirror.index == kvjax.events.index_of(parked.serving.cache.state) == {}
    leaves, structure = jax.tree.flatten(parked)
    np.savez(tmp_path / "parked.npz", *leaves)
    with np.load(tmp_path / "parked.npz") as saved:
        again = jax.tree.unflatten(structure, [jax.device_put(saved[name]) for name in saved])
    outputs = []
    for each in (parked, again):
        serving = kvjax.serving.unpark(each, kvjax.pools.init_pools(serving.cache.state.spec))
        outputs.append({key: output.tokens for key, output in finished(serving)[0].items()})
    assert outputs[0] == outputs[1] and len(outputs[0]) == 7


# Engines, whose thread is turned by hand.


class Turned(Engines):
    """An engine of `MODEL`."""

    def __init__(self, monkeypatch, model=MODEL, host=0, **options):
        options = {"num_ranges": 1, "listener": lambda events: None, **BASE, "steps": 2, **options}
        super().__init__(monkeypatch, model, make_cache(host=host), **options)

    def begun(self, prompts=PROMPTS, turns=4, **fields):
        handles = [self.engine.submit(ask(prompt, max_new_tokens=12, **fields)) for prompt in prompts]
        self.turn(turns)
        assert any(handle.output.tokens and not handle.done for handle in handles)
        return handles


def with_weights(model, prompt, number):
    """The greedy tokens and their log-probabilities, by the whole text for each token."""
    tokens, logprobs = list(prompt), []
    dense = jax.jit(lambda text, at: jax.nn.log_softmax(model.dense(text)[at - 1]))
    for _ in range(number):
        scores = np.asarray(dense(np.resize(np.array(tokens, np.int32), LENGTH), np.int32(len(tokens))))
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return tokens[len(prompt) :], logprobs


def assert_chosen_by(models, prompt, output):
    """Asserts each token to be the choice of the model of its version, after the text before it."""
    path = list(prompt)
    for token, logprob, version in zip(output.tokens, output.logprobs, output.versions, strict=True):
        (chosen,), (score,) = with_weights(models[version], path, 1)
        assert token == chosen
        np.testing.assert_allclose(logprob, score, atol=1e-4)
        path.append(token)


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind != "pinned_host")


def test_a_sleeping_engine_frees_its_pools_and_goes_on_with_the_same_tokens(monkeypatch):
    turned = Turned(monkeypatch)
    handles = turned.begun()
    turned.thread.read_all()
    before, num_tokens = live_bytes(), [len(handle.output.tokens) for handle in handles]
    pools = pool_bytes(turned.engine.spec)[0]
    turned.change("sleep").result(0)
    assert turned.engine.is_asleep and before - live_bytes() >= 0.99 * pools
    late = turned.engine.submit(ask(PROMPTS[1]))
    cancelled = next(handle for handle in handles if handle.output.tokens)
    cancelled.cancel()
    timed_out = turned.engine.submit(ask(PROMPTS[2]), timeout=0.0)
    turned.turn(3)
    assert cancelled.done and cancelled.output.finish == timed_out.output.finish == "cancelled"
    assert [len(handle.output.tokens) for handle in handles] == num_tokens and not late.done
    kvjax.check(turned.thread.driver.state.cache.state, rows=())
    turned.change("wake").result(0)
    outputs = turned.finish([*handles, late])
    assert any(output.preemptions for output in outputs)
    for prompt, output in zip([*PROMPTS, PROMPTS[1]], outputs, strict=True):
        assert output.tokens == answer(prompt, 12).tokens[: len(output.tokens)]
        assert output.finish == ("cancelled" if output is cancelled.output else "length")
    turned.turn(2)  # a row is released a turn after its request has ended
    assert not turned.thread.driver.active and turned.thread.driver.num_free_slots == 12


def test_sleep_and_wake_again_compile_nothing(monkeypatch):
    turned = Turned(monkeypatch)
    handles = turned.begun()
    turned.change("sleep").result(0)
    turned.change("wake").result(0)
    turned.turn(4)
    with no_compiles():
        turned.change("sleep").result(0)
        turned.change("wake").result(0)
        turned.finish(handles)


def test_blocks_go_to_the_host_for_a_sleep_and_come_back(monkeypatch):
    turned = Turned(monkeypatch, host=HOST)
    handles = turned.begun(PROMPTS[:3])
    turned.change("sleep", keep="host").result(0)
    state = turned.thread.driver.state.cache.state
    assert kvjax.events.index_of(state) and all(level for level, _ in kvjax.events.index_of(state).values())
    turned.change("wake").result(0)
    for prompt, output in zip(PROMPTS, turned.finish(handles), strict=False):
        assert output.tokens == answer(prompt, 12).tokens
    again = turned.engine.submit(ask(PROMPTS[2]))
    assert turned.finish([again])[0].cached_tokens > 0


def test_a_move_that_fails_leaves_the_engine_serving(monkeypatch):
    from kvjax.pools import host as host_pool

    turned = Turned(monkeypatch, host=HOST)
    handles = turned.begun(PROMPTS[:3])
    copy = host_pool._copy

    def fail(*args):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(host_pool, "_copy", functools.update_wrapper(fail, copy))
    with pytest.warns(RuntimeWarning, match="lost K/V are computed again"):
        turned.change("sleep", keep="host").result(0)
    monkeypatch.setattr(host_pool, "_copy", copy)
    turned.change("wake").result(0)
    for prompt, output in zip(PROMPTS, turned.finish(handles), strict=False):
        assert output.tokens == answer(prompt, 12).tokens


def test_an_engine_closed_asleep_returns_a_cache(monkeypatch):
    turned = Turned(monkeypatch)
    handles = turned.begun()
    turned.change("sleep").result(0)
    turned.thread._end()
    cache = turned.thread.last
    kvjax.check(cache.state, rows=())
    assert cache.pools.arrays[0][0].shape == make_cache().pools.arrays[0][0].shape
    with pytest.raises(EngineError):
        handles[0].result(0)


@pytest.mark.parametrize("asleep", [False, True])
def test_recompute_keeps_tokens_and_goes_on_with_the_new_weights(monkeypatch, asleep):
    turned = Turned(monkeypatch)
    handles = turned.begun()
    if asleep:
        turned.change("sleep").result(0)
    turned.thread.read_all()
    counts = [len(handle.output.tokens) for handle in handles]
    assert turned.update(OTHER, "recompute", forget=False).result(0) == 1
    if asleep:
        turned.change("wake").result(0)
    outputs = turned.finish(handles)
    for prompt, count, output in zip(PROMPTS, counts, outputs, strict=True):
        assert output.versions == [0] * count + [1] * (12 - count) and not output.mixed
        assert_chosen_by({0: MODEL, 1: OTHER}, prompt, output)


def test_finish_ends_requests_with_the_old_weights_and_others_wait(monkeypatch):
    turned = Turned(monkeypatch)
    handles = turned.begun()
    turned.thread.read_all()
    begun = [bool(handle.output.tokens) or handle.job.stage == Stage.RUNNING for handle in handles]
    assert not all(begun)
    done = turned.update(OTHER, "finish")
    assert not done.done()
    late = turned.engine.submit(ask(PROMPTS[1], max_new_tokens=12))
    outputs = turned.finish([*handles, late])
    assert done.result(0) == 1
    for prompt, has_begun, output in zip([*PROMPTS, PROMPTS[1]], [*begun, False], outputs, strict=True):
        assert output.versions == [0 if has_begun else 1] * 12
        assert_chosen_by({0: MODEL, 1: OTHER}, prompt, output)


def test_continue_marks_rows_and_nobody_finds_their_blocks(monkeypatch):
    turned = Turned(monkeypatch)
    prompts = PROMPTS[1:3]
    handles = turned.begun(prompts, turns=8)
    assert turned.update(OTHER, "continue").result(0) == 1
    outputs = turned.finish(handles)
    for output in outputs:
        assert output.mixed and set(output.versions) == {0, 1}
    assert not kvjax.events.index_of(turned.thread.driver.state.cache.state)
    again = turned.finish([turned.engine.submit(ask([*prompts[0], *outputs[0].tokens])) for _ in range(2)])
    assert again[0].cached_tokens == 0 and not again[0].mixed
    assert_chosen_by({1: OTHER}, [*prompts[0], *outputs[0].tokens], again[0])


def test_old_blocks_are_forgotten_at_once_or_lazily_and_never_found(monkeypatch):
    turned = Turned(monkeypatch)
    for forget in (True, False):
        turned.finish([turned.engine.submit(ask(PROMPTS[2]))])
        turned.update(OTHER, "recompute", forget=forget, weights=f"forget {forget}").result(0)
        assert bool(kvjax.events.index_of(turned.thread.driver.state.cache.state)) != forget
        (output,) = turned.finish([turned.engine.submit(ask(PROMPTS[2]))])
        assert output.cached_tokens == 0
        (output,) = turned.finish([turned.engine.submit(ask(PROMPTS[2]))])
        assert output.cached_tokens > 0


def test_an_update_again_compiles_nothing(monkeypatch):
    turned = Turned(monkeypatch)
    models = [OTHER, MODEL, OTHER, MODEL, OTHER, MODEL]
    for number, mode in enumerate(["recompute", "finish", "continue"]):
        handles = turned.begun()
        turned.update(models[number], mode, weights=number)
        turned.finish(handles)
    with no_compiles():
        for number, mode in enumerate(["recompute", "finish", "continue"], 3):
            handles = turned.begun()
            turned.update(models[number], mode, weights=number)
            turned.finish(handles)


def test_weights_have_names_in_salts_and_in_a_store(monkeypatch, tmp_path):
    names = kvjax.Namespaces()
    tenant = names(salt="tenant")
    spec = make_spec()
    with DiskStore(tmp_path, spec, model="m", names=names, max_bytes=1 << 20) as store:
        turned = Turned(monkeypatch, names=names, store=store)
        prompt = PROMPTS[2]
        for model, weights in ((OTHER, "b"), (MODEL, "c"), (OTHER, "b")):
            turned.update(model, "recompute", weights=weights).result(0)
            handles = [turned.engine.submit(ask(prompt, namespace=tenant)), turned.engine.submit(ask(prompt), salt="x")]
            while not all(handle.done for handle in handles):
                turned.turn()
            for handle in handles:
                salt = "tenant" if handle is handles[0] else "x"
                assert names.describe(handle.job.namespace)[0] == kvjax.Namespaces.salted(salt, weights)
                version = turned.engine.version
                assert_chosen_by({version: model}, prompt, handle.output)
            store.flush()
        assert handles[0].output.cached_tokens > 0  # what the first update stored, or its namespace still has
        turned.thread._end()


def test_a_model_that_does_not_fit_leaves_the_old_weights(monkeypatch):
    engine = drive.engine(MODEL, make_cache(), **{"num_ranges": 1, **BASE})
    with engine:
        for model, got in (
            (MODEL.replace(head=jnp.zeros((8, VOCAB + 1))), "other arrays than the engine's"),
            (MODEL.replace(head=MODEL.head.astype(jnp.bfloat16)), "other arrays than the engine's"),
            ({"w": 1}, "other arrays than the engine's"),
        ):
            with pytest.raises(ValueError, match=f"^model: got {got}"):
                engine.update(model)
        with pytest.raises(ValueError, match=r"^in_flight: got 'now', wanted one of"):
            engine.update(OTHER, in_flight="now")
        with pytest.raises(ValueError, match=r"^keep: got 'host', wanted 'none'"):
            engine.sleep(keep="host")
        assert engine.submit(ask(PROMPTS[0])).result(60).tokens == answer(PROMPTS[0]).tokens
        assert engine.update(OTHER, weights="b") == 1
        engine.submit(ask(PROMPTS[0])).result(60)
        assert engine.update(MODEL, weights="c") == 2
        handle = engine.submit(ask(PROMPTS[1], max_new_tokens=20))
        with pytest.raises(ValueError, match=r"^weights: got the name 'b' of other arrays"):
            engine.update(MODEL.replace(head=MODEL.head * 2), weights="b")
        assert handle.result(60).versions == [2] * 20
        assert engine.version == 2 and not engine.is_asleep


def test_threads_that_ask_for_changes(monkeypatch):
    with drive.engine(MODEL, make_cache(), **{"num_ranges": 1, **BASE}, max_waiting=6) as engine:
        handles = [engine.submit(ask(prompt, max_new_tokens=12)) for prompt in PROMPTS[:3]]
        engine.sleep()
        waiting = [engine.submit(ask(PROMPTS[3])) for _ in range(6)]
        with pytest.raises(QueueFull):
            engine.submit(ask(PROMPTS[3]))
        assert not engine.drain(0.2)
        engine.wake()
        engine.wake()
        for prompt, handle in zip(PROMPTS, handles, strict=False):
            assert handle.result(60).tokens == answer(prompt, 12).tokens
        assert [handle.result(60).tokens for handle in waiting] == [answer(PROMPTS[3]).tokens] * len(waiting)
        assert engine.drain(60)
    for change in (engine.sleep, engine.wake, functools.partial(engine.update, OTHER)):
        with pytest.raises(EngineError):
            change()
