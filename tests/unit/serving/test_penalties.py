# SPDX-License-Identifier: Apache-2.0
"""Penalties and biases: against plain arithmetic, alone and in an engine with requests that have none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.serving import Penalties, Scheduler, penalize
from models import load
from tests import drive

VOCABULARY, MOST = 7, 5


def stacked(*each):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


def test_logits_are_those_of_plain_arithmetic():
    rng = np.random.default_rng(0)
    wanted = [(0.5, 0.25, {1: 3.0, 6: -100.0}), (0.0, 0.0, {}), (-1.5, 0.0, {}), (0.0, 1.0, {0: 2.0})]
    state = stacked(*(Penalties.of(MOST, *one, most=2) for one in wanted))
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
        ({"bias": {1: 0, 2: 0, 3: 0}, "most": 2}, "bias: got 3 tokens, wanted at most 2"),
    ],
)
def test_wrong_penalties_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Penalties.of(**{"max_tokens": 3, **options})


def test_a_batch_whose_requests_have_different_states_is_refused():
    spec = kvjax.make_spec(num_blocks=4, max_seqs=2, max_length=8, block_size=4)
    model = jax.tree_util.Partial(lambda tokens, pools, view, *, last: (jnp.zeros((*last.shape, VOCABULARY)), pools))
    cache, one = kvjax.Cache.create(spec), Penalties.of(MOST)
    for states, logits_fn, message in (
        ([one, None], penalize, "prompt 1: logits_state: got None, wanted arrays like those of the first prompt"),
        ([one, Penalties.of(MOST + 1)], penalize, "prompt 1: logits_state: got .*, wanted arrays like those of the"),
        ([one, one], None, "prompt 0: logits_state: got one, wanted None without a logits_fn"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            drive.run_batch(model, cache, [[1], [2]], logits_fn=logits_fn, logits_state=states)
    kvjax.check(cache.state)


@pytest.mark.slow
def test_an_engine_penalizes_those_who_ask_and_nobody_else():
    model = load("tests/data/goldens/llama")[0]
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=40, max_seqs=3, max_length=64, block_size=16, dtype="float32"
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, length).tolist() for length in (5, 20, 33, 9)]
    wanted = [
        {},
        {"frequency": 5.0, "presence": 2.0, "bias": {3: 30.0}},
        {"bias": {3: 40.0, 5: -100.0}},
        {"presence": -5.0},
    ]
    new, options = 12, {"logits_fn": penalize, "logits_state": Penalties.of(64)}

    @jax.jit
    def logits_of(line, length):
        cache, _ = kvjax.Cache.create(spec).admit(np.zeros(1, np.int32), line[None], length[None])
        return kvjax.step(model, cache, line[None], length[None], np.zeros(1, np.int32))[1][0]

    def chosen(prompt, frequency=0.0, presence=0.0, bias=None):
        """Tokens one after the other, by whole prompts and plain arithmetic."""
        tokens, bias = [], bias or {}
        for _ in range(new):
            line, text = np.zeros((64,), np.int32), prompt + tokens
            line[: len(text)] = text
            logits = np.array(logits_of(line, np.int32(len(text))))
            counts = np.bincount(tokens, minlength=len(logits))
            logits -= frequency * counts + presence * (counts > 0)
            logits[[*bias]] += [*bias.values()]
            tokens.append(int(np.argmax(logits)))
        return tokens

    with drive.engine(model, kvjax.Cache.create(spec), scheduler=Scheduler(reserve="num_tokens"), **options) as engine:
        asks = list(zip(prompts * 2, wanted * 2, strict=True))
        handles = [
            drive.ask(engine, prompt, max_new_tokens=new, logits_state=Penalties.of(64, **one) if one else None)
            for prompt, one in asks
        ]
        found = [handle.result(60).tokens for handle in handles]
        with pytest.raises(ValueError, match=r"logits_state: got .*, wanted arrays like those of the engine"):
            drive.ask(engine, [1], logits_state=Penalties.of(65))
    assert found == [chosen(prompt, **one) for prompt, one in asks[:4]] * 2
    states = [Penalties.of(64, **one) for one in wanted]
    outputs, *_ = drive.run_batch(
        model, kvjax.Cache.create(spec), prompts, max_new_tokens=new, logits_fn=penalize, logits_state=states
    )
    assert [output.tokens for output in outputs] == found[:4]
    assert found[2] == [3] * new and 1 < found[1].count(3) < new
    with pytest.raises(ValueError, match="logits_state: got one, wanted None without a logits_fn"):
        drive.engine(model, kvjax.Cache.create(spec), logits_state=Penalties.of(64))
