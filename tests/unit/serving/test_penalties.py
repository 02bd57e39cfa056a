# SPDX-License-Identifier: Apache-2.0
"""Penalties and biases: against plain arithmetic, alone and in an engine with requests that have none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.serving import Penalties, RunOptions, Sampling, Scheduler, penalize
from kvjax.serving.sampling import sample
from tests import drive
from tests.serving_kit import LENGTH, MODEL, VOCAB, ask, batched, make_cache

VOCABULARY, MOST, NEW = 7, 5, 12


def stacked(*each):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


def test_logits_are_those_of_plain_arithmetic():
    rng = np.random.default_rng(0)
    wanted = [(0.5, 0.25, {1: 3.0, 6: -100.0}), (0.0, 0.0, {}), (-1.5, 0.0, {}), (0.0, 1.0, {0: 2.0})]
    state = stacked(*(Penalties.of(MOST, *one, max_biases=2) for one in wanted))
    prompt, chosen = rng.integers(0, VOCABULARY, 4), rng.integers(0, VOCABULARY, (4, MOST))
    for step in range(MOST):
        logits = rng.normal(size=(4, VOCABULARY)).astype(np.float32)
        last = prompt if step == 0 else chosen[:, step - 1]
        found, state = jax.jit(penalize)(logits, last.astype(np.int32), np.zeros(4, np.int32), state)
        for row, (frequency, presence, bias) in enumerate(wanted):
            counts = np.bincount(chosen[row, :step], minlength=VOCABULARY)
            expected = logits[row] - frequency * counts - presence * (counts > 0)
            for token, value in bias.items():
                expected[token] += value
            np.testing.assert_allclose(found[row], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found[1], logits[1])  # bit for bit


def repeated(logits, text, factor):
    """Transformers' repetition penalty on the logits f32[V] after a text, in numpy."""
    found = logits.copy()
    for token in set(text):
        found[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
    return found


def test_the_repetition_penalty_is_that_of_transformers():
    """It counts the prompt too, is after the biases, and before the penalties of what was generated alone."""
    rng, length = np.random.default_rng(1), 3
    wanted = [(0.0, 0.0, None, 1.3), (0.5, 0.25, {1: 3.0}, 1.8), (0.5, 0.0, {2: -1.0}, 1.0), (0.0, 0.0, {}, 0.7)]
    prompts, chosen = rng.integers(0, VOCABULARY, (4, length)), rng.integers(0, VOCABULARY, (4, MOST))
    state = stacked(*(
        Penalties.of(length + MOST, *one[:3], repetition=one[3], prompt=prompt, max_biases=2)
        for one, prompt in zip(wanted, prompts, strict=True)
    ))  # fmt: skip
    for step in range(MOST):
        logits = rng.normal(size=(4, VOCABULARY)).astype(np.float32)
        last = prompts[:, -1] if step == 0 else chosen[:, step - 1]
        found, state = jax.jit(penalize)(logits, last.astype(np.int32), np.zeros(4, np.int32), state)
        for row, (frequency, presence, bias, factor) in enumerate(wanted):
            expected = logits[row].copy()
            for token, value in (bias or {}).items():
                expected[token] += value
            expected = repeated(expected, [*prompts[row], *chosen[row, :step]], factor)
            counts = np.bincount(chosen[row, :step], minlength=VOCABULARY)
            expected -= frequency * counts + presence * (counts > 0)
            np.testing.assert_allclose(found[row], expected, rtol=1e-6, atol=1e-6)


def test_states_without_a_repetition_have_no_array_for_it():
    plain, one = Penalties.of(MOST), Penalties.of(MOST, repetition=1)
    assert len(jax.tree.leaves(one)) == len(jax.tree.leaves(plain)) + 2
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, VOCABULARY)), jnp.float32)
    found, _ = jax.jit(penalize)(logits, *[np.zeros(2, np.int32)] * 2, stacked(one, one))
    np.testing.assert_array_equal(found, logits)


def test_rows_without_any_make_no_array_of_the_logits_size():
    state = stacked(*(Penalties.of(MOST) for _ in range(2)))
    text = jax.jit(penalize).lower(jnp.zeros((2, VOCABULARY)), *[np.zeros(2, np.int32)] * 2, state).as_text()
    assert text.count("stablehlo.case") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"frequency": np.nan}, "frequency: got .nan., wanted finite numbers"),
        ({"bias": {1: np.inf}}, "bias: got .*inf.*, wanted finite numbers"),
        ({"bias": {1: 0, 2: 0, 3: 0}, "max_biases": 2}, "bias: got 3 tokens, wanted at most 2"),
        ({"repetition": 0}, "repetition: got 0, wanted a number from 0.01 to 100"),
        ({"repetition": -1.5}, "repetition: got -1.5, wanted a number from 0.01 to 100"),
        ({"repetition": np.inf}, "repetition: got inf, wanted a number from 0.01 to 100"),
        ({"repetition": np.nan}, "repetition: got nan, wanted a number from 0.01 to 100"),
        ({"repetition": 2, "prompt": "text"}, "prompt: got 'text', wanted a list of token ids"),
        ({"repetition": 2, "prompt": [2**70]}, "prompt: got "),
        ({"repetition": 2, "prompt": [1, 2, 3, 4]}, "prompt: got 4 tokens, wanted at most max_tokens, 3"),
    ],
)
def test_wrong_penalties_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Penalties.of(**{"max_tokens": 3, **options})


def test_a_batch_whose_requests_have_different_states_is_refused():
    cache, one = make_cache(), Penalties.of(MOST)
    for states, logits_fn, message in (
        ([one, None], penalize, "prompt 1: logits_state: got None, wanted arrays like those of the first prompt"),
        ([one, Penalties.of(MOST + 1)], penalize, "prompt 1: logits_state: got .*, wanted arrays like those of the"),
        ([one, one], None, "prompt 0: logits_state: got one, wanted None without a logits_fn"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            batched(cache, [[1], [2]], logits_fn=logits_fn, logits_state=states)
    kvjax.check(cache.state)


def chosen(prompt, frequency=0.0, presence=0.0, bias=None, repetition=1.0, sampling=None, seed=0):
    """Tokens one after the other, by whole prompts and plain arithmetic."""
    tokens, bias, dense = [], bias or {}, jax.jit(MODEL.dense)
    for _ in range(NEW):
        text = [*prompt, *tokens]
        logits = np.array(dense(np.resize(np.array(text, np.int32), LENGTH))[len(text) - 1])
        counts = np.bincount(tokens, minlength=len(logits))
        logits[[*bias]] += [*bias.values()]
        logits = repeated(logits, text, repetition)
        logits -= frequency * counts + presence * (counts > 0)
        of_row = np.array([seed], np.uint32), np.array([len(text)], np.int32)
        tokens.append(int(sample(jnp.asarray(logits)[None], sampling, *of_row).tokens[0]))
    return tokens


@pytest.mark.slow
def test_an_engine_and_a_batch_penalize_those_who_ask_and_nobody_else():
    rng, most = np.random.default_rng(0), LENGTH
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (5, 14, 20, 9)]
    wanted = [
        {},
        {"frequency": 5.0, "presence": 2.0, "bias": {3: 30.0}},
        {"bias": {3: 100.0, 5: -100.0}},
        {"presence": -5.0},
    ]
    options = {"logits_fn": penalize, "scheduler": Scheduler(reserve="num_tokens")}
    asks = [
        ask(prompt, logits_state=Penalties.of(most, **one) if one else None, retention=None, max_new_tokens=NEW)
        for prompt, one in zip(prompts, wanted, strict=True)
    ]
    with drive.engine(MODEL, make_cache(), logits_state=Penalties.of(most), **options) as engine:
        handles = [engine.submit(one) for one in asks * 2]
        found = [handle.result(60).tokens for handle in handles]
        with pytest.raises(ValueError, match=r"logits_state: got .*, wanted arrays like the engine's"):
            engine.submit(ask([1], logits_state=Penalties.of(most + 1), retention=None))
    assert found == [chosen(prompt, **one) for prompt, one in zip(prompts, wanted, strict=True)] * 2
    states = [Penalties.of(most, **one) for one in wanted]
    outputs, *_ = drive.run_batch(
        MODEL, make_cache(), prompts, max_new_tokens=NEW, logits_fn=penalize, logits_state=states
    )
    assert [output.tokens for output in outputs] == found[:4]
    assert found[2] == [3] * NEW and 1 < found[1].count(3) < NEW
    with pytest.raises(ValueError, match="logits_state: got one, wanted None without a logits_fn"):
        drive.engine(MODEL, make_cache(), logits_state=Penalties.of(most))


@pytest.mark.slow
def test_repetition_and_min_p_are_the_same_through_preemption_samples_and_reuse():
    rng, seed, samples = np.random.default_rng(5), 40, (1, 2, 1, 2)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (5, 9, 13, 6)]
    wanted = [{"repetition": 1.5}, {"repetition": 3.0, "presence": 1.0, "bias": {3: 5.0}}, {}, {"repetition": 0.6}]
    samplings = [Sampling(1.2, min_p=0.1), None, Sampling(2.0, min_p=0.05), Sampling(1.0, top_k=9)]
    states = [
        Penalties.of(LENGTH, **{"repetition": 1.0} | one, prompt=prompt)
        for one, prompt in zip(wanted, prompts, strict=True)
    ]
    asks = [
        ask(prompt, logits_state=state, sampling=sampling, seed=seed, samples=number, max_new_tokens=NEW)
        for prompt, state, sampling, number in zip(prompts, states, samplings, samples, strict=True)
    ]
    answers = [
        chosen(prompt, **one, sampling=sampling, seed=seed + sample)
        for prompt, one, sampling, number in zip(prompts, wanted, samplings, samples, strict=True)
        for sample in range(number)
    ]
    options = {"logits_fn": penalize, "scheduler": Scheduler(chunk=8, reserve="num_tokens"), "steps": 4}
    cache = make_cache(11)
    for turn in range(2):
        outputs, cache, _ = kvjax.run_batch(MODEL, cache, asks, RunOptions(**options))
        assert [output.tokens for output in outputs] == answers
        assert any(output.preemptions for output in outputs)
        assert not turn or any(output.cached_tokens for output in outputs)
    default = Penalties.of(LENGTH, repetition=1.0)
    with drive.engine(MODEL, cache, logits_state=default, min_p=True, num_ranges=1, **options) as engine:
        handles = [one for request in asks for one in engine.submit(request).samples]
        assert [handle.result(60).tokens for handle in handles] == answers
    assert answers[0] != chosen(prompts[0], sampling=Sampling(1.2), seed=seed)
