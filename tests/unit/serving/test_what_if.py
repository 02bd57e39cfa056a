# SPDX-License-Identifier: Apache-2.0
"""`what_if` predicts the future, at any moment of random histories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Cache
from kvjax.events import init_log
from kvjax.serving import Scheduler, cancel, init_serving, serve, submit, what_if
from kvjax.serving.requests import Stage
from kvjax.tiered import TieredCache
from tests import drive
from tests.oracle.bytes_machine import SIZE
from tests.oracle.serving import AT_ONCE, COLUMNS, COUNTS, LINE, LOG, OPTIONS, SLOTS, config

FIELDS = (
    "stage", "finish", "num_tokens", "admitted", "cached", "first_token", "ended", "preemptions", "passed", "arrival",
)  # fmt: skip
QUICK = {"xla_backend_optimization_level": 0}
NUMBER = 4 * SLOTS  # of slots, so that `what_if` needs more events than its log holds at once
_submit, _cancel = jax.jit(submit, static_argnames="scheduler"), jax.jit(cancel)


def successor(tokens, pools, view, *, last):
    """A model whose choices occur in no prompt, and that stores nothing."""
    del view
    chosen = tokens[jnp.arange(tokens.shape[0]), last]
    return jax.nn.one_hot(chosen % 400 + 500, 1000), pools


def submitted(serving, rng, documents, scheduler):
    """Submits more requests. They often begin alike, and have tokens that neither model chooses."""
    lengths = rng.integers(1, COLUMNS * SIZE - 2, AT_ONCE).astype(np.int32)
    prompts = [[*documents[rng.integers(2)][: rng.integers(n)], *rng.integers(1, 100, n)][:n] for n in lengths]
    lead = np.array([-1, -1, rng.integers(-1, 2)], np.int32)
    if lead[-1] >= 0:
        prompts[-1], lengths[-1] = prompts[lead[-1]], lengths[lead[-1]]
    flat = drive.padded(np.concatenate(prompts), LINE)
    new, priority = (rng.integers(least, most, AT_ONCE).astype(np.int32) for least, most in ((1, 12), (0, 3)))
    return _submit(serving, flat, lengths, new, scheduler=scheduler, priority=priority, sample_of=lead)[0]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param("num_tokens", "full", marks=pytest.mark.long),
        pytest.param("max_tokens", "full", marks=pytest.mark.slow),
        pytest.param("num_tokens", "windows", marks=pytest.mark.slow),
        pytest.param("batch", "full", marks=pytest.mark.slow),
        pytest.param("tight", "full", marks=pytest.mark.slow),
    ],
)
def test_what_if_is_what_then_happens(name, layers):
    scheduler, spec = OPTIONS[name], config(layers).spec()
    predict = jax.jit(functools.partial(what_if, scheduler=scheduler, steps=400), compiler_options=QUICK)
    model = jax.tree_util.Partial(successor)
    run = jax.jit(functools.partial(serve, model, scheduler=scheduler), compiler_options=QUICK)
    waited = found = preempted = 0
    for seed in range(24):
        rng = np.random.default_rng(seed)
        documents = rng.integers(1, 100, (2, COLUMNS * SIZE)).tolist()
        cache = Cache.create(spec, num_blocks=np.int32(COUNTS[seed % len(COUNTS)]))
        serving = jax.device_put(init_serving(cache, [COLUMNS * SIZE + 1] * NUMBER), jax.devices()[0])
        for _ in range(3):
            for _ in range(rng.integers(1, 4)):
                serving = submitted(serving, rng, documents, scheduler)
            serving, _ = run(serving, init_log(LOG, SIZE), steps=np.int32(rng.integers(6)))
            slots = rng.integers(NUMBER, size=1).astype(np.int32)
            if rng.random() < 0.3:
                serving, _ = _cancel(serving, slots, np.asarray(serving.requests.generation)[slots])
        predicted, begin = predict(serving), int(serving.steps)
        while bool(serving.busy):
            serving, _ = run(serving, init_log(LOG, SIZE), steps=np.int32(400))
        for field in FIELDS:
            np.testing.assert_array_equal(
                getattr(predicted, field), getattr(serving.requests, field), f"{field}, seed {seed}"
            )
        later = np.asarray(predicted.admitted) > begin
        waited += int(later.sum())
        found += int(np.asarray(predicted.cached)[later].sum())
        preempted += int(np.asarray(predicted.preemptions).sum())
        assert not np.isin(np.asarray(predicted.stage), (Stage.WAITING, Stage.RUNNING)).any()
    assert waited > 20
    assert found > 20
    assert bool(preempted) == (scheduler.reserve == "num_tokens")
    assert predict._cache_size() == run._cache_size() == 1


@pytest.mark.slow
def test_what_if_finds_nothing_on_the_host():
    """It is like a loop that onboards nothing. A prompt on the device is found."""
    layers = [kvjax.LayerSpec(1, 2)]
    spec = kvjax.make_spec(
        layers, num_blocks=12, num_host_blocks=8, max_seqs=3, max_length=32, block_size=SIZE, dtype="float32"
    )
    tiered, model = TieredCache.create(spec), jax.tree_util.Partial(successor)
    prompts, scheduler = [list(range(21)), list(range(30, 51))], Scheduler(chunk=8)
    _, tiered, _ = kvjax.generate(model, tiered, prompts, max_new_tokens=1)
    tiered, events = tiered.offload(np.arange(6, dtype=np.int32))  # all blocks of the first prompt
    assert bool(events.ok)
    assert int(kvjax.lookup(tiered.state, np.array(prompts[0]), 21).host_tokens) == 20

    serving = init_serving(tiered.cache, [32] * 2, greedy=True)
    flat, lengths = np.concatenate(prompts).astype(np.int32), np.full(2, 21, np.int32)
    serving, status, *_ = _submit(serving, flat, lengths, np.full(2, 3, np.int32), scheduler=scheduler)
    assert not np.any(status)
    predicted = jax.jit(functools.partial(what_if, scheduler=scheduler, steps=50))(serving)
    run = jax.jit(functools.partial(serve, model, scheduler=scheduler, steps=50))
    asks, _ = run(serving, init_log(LOG, SIZE))
    assert (int(asks.onboard_slot), int(asks.steps)) == (0, 0)  # the loop ends for the first one
    alone = serving.requests.replace(onboard=jnp.zeros_like(serving.requests.onboard))
    done, _ = run(serving.replace(requests=alone), init_log(LOG, SIZE))
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(predicted, field), getattr(done.requests, field), field)
    assert np.asarray(predicted.cached).tolist() == [0, 20]


def test_requests_may_want_the_likeliest_tokens():
    """`what_if` has a model with a vocabulary of one token."""
    serving = init_serving(Cache.create(config("full").spec()), [8, 8], top_logprobs=2)
    predict = functools.partial(what_if, scheduler=OPTIONS["num_tokens"], steps=8)
    shapes = jax.eval_shape(predict, serving)
    assert jax.tree.map(jnp.shape, shapes.top) == jax.tree.map(jnp.shape, serving.requests.top)
