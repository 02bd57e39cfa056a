# SPDX-License-Identifier: Apache-2.0
"""With a drafter, each request has the answer that it has without one, whatever the drafts are.

The contract's way "drafts" runs all its cases with random drafts, and `oracle/engines.py` compares all bytes.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.serving import (
    Constraints,
    Drafting,
    Penalties,
    Request,
    RunOptions,
    Sampling,
    chain,
    draft_model,
    early_exit,
    measured_pass_cost,
    ngram,
    penalize,
)
from kvjax.serving.speculation_cost import estimated_pass_cost
from kvjax.serving.speculation_stats import best_drafts
from models import first_layers, load
from tests.constraint_kit import LIMITS, Grammar
from tests.drafters import RANDOM, RIGHT, WRONG, Guesses
from tests.serving_kit import BASE, MODEL, NEW, VOCAB, ask, assert_alike, empty, make_cache, prompts_of, wanted

PROMPTS = [*prompts_of(1), [1, 2, 3], [4] * 9, prompts_of(1)[0]]
SAMPLINGS = [None, Sampling(1.0), Sampling(0.7, top_k=4), Sampling(1.3, top_p=0.8), Sampling(1.0, min_tokens=7)]
REQUESTS = [
    ask(prompt, max_new_tokens=2 * NEW, sampling=sampling, stop_tokens=[11])
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
]


def run(drafter, kind="plain", requests=REQUESTS, num_blocks=16, **options):
    """The outputs, and the cache after it was checked."""
    options = RunOptions(**BASE | {"drafter": drafter} | options)
    outputs, cache, events = kvjax.run_batch(MODEL, make_cache(num_blocks, kind=kind), requests, options)
    kvjax.check(cache.state, rows=())
    assert kvjax.fold(events).index == kvjax.events.index_of(cache.state)
    return outputs, cache


@pytest.mark.long
@pytest.mark.parametrize(("mode", "accepted"), [(RIGHT, 1.0), (WRONG, 0.0), (RANDOM, None)])
def test_answers_are_those_without_drafts(mode, accepted):
    outputs, _ = run(Guesses.of(MODEL, VOCAB, mode))
    assert_alike(outputs, wanted(REQUESTS))
    drafted, right = (sum(getattr(o, name) for o in outputs) for name in ("drafted_tokens", "accepted_tokens"))
    assert drafted > 0
    if accepted is None:
        assert 0 < right < drafted
    elif accepted == 0:
        assert right == 0
    else:  # a draft after a stop token is not accepted
        assert right >= 0.9 * drafted


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "windows"])
def test_grammars_and_penalties_hold_with_drafts(kind):
    """States of `logits_fn` go on from the last accepted token."""
    grammars = [Grammar.random(number, VOCAB, (11,)) for number in range(2)]
    constraints = Constraints.create(2, VOCAB, **LIMITS)
    for number, grammar in enumerate(grammars):
        constraints = constraints.put(number, grammar.constraint)
    penalties = Penalties.of(3 * NEW, frequency=0.5, presence=0.25)
    requests = [
        dataclasses.replace(request, logits_state=(penalties, constraints.state(number % 2)))
        for number, request in enumerate(REQUESTS[:4])  # not the one with min_tokens, which a grammar excludes
    ]
    options = {"kind": kind, "requests": requests, "logits_fn": chain(penalize, constraints)}
    plain, _ = run(None, **options)
    outputs, _ = run(Guesses.of(MODEL, VOCAB), **options)
    assert_alike(outputs, plain)
    assert sum(output.accepted_tokens for output in outputs) > 0


@pytest.mark.long
def test_blocks_of_a_fixed_number_of_passes_have_the_same_answers():
    outputs, _ = run(Guesses.of(MODEL, VOCAB), fixed_steps=True)
    assert_alike(outputs, wanted(REQUESTS))
    assert sum(output.accepted_tokens for output in outputs) > 0


@pytest.mark.long
def test_a_pass_is_narrow_while_its_drafts_are_wrong():
    """A drafter is tried without a cost, and verified once it is right."""
    outputs, _ = run(Guesses.of(MODEL, VOCAB, WRONG, pass_cost=0.5))
    assert_alike(outputs, wanted(REQUESTS))
    assert all(output.drafted_tokens == 0 for output in outputs)
    outputs, _ = run(Guesses.of(MODEL, VOCAB, RIGHT, pass_cost=0.5))
    assert_alike(outputs, wanted(REQUESTS))
    assert sum(output.accepted_tokens for output in outputs) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "deepseek_v3", "gemma3"])
@pytest.mark.parametrize("drafter", ["first layers", "draft model"])
def test_models_of_all_kinds_answer_as_they_do_without_a_draft_model(name, drafter):
    model = load(f"tests/data/goldens/{name}")[0]
    small = first_layers(model, 1)
    specs = model.layer_specs()
    drafts: Any = early_exit(small, num_tokens=3, pass_cost=0)
    drafted_model: Any = model
    if drafter == "draft model":
        drafted_model, drafts = draft_model(model, small, first_layer=len(specs), num_tokens=3, pass_cost=0)
        specs = [*specs, *small.layer_specs()]
    options = {"num_blocks": 40, "max_seqs": 2, "max_length": 64, "block_size": 8, "dtype": "float32"}
    prompts = [[5, 3, 7, 1, 2, 9, 4, 11, 8], [2, 4, 6], [5, 3, 7, 1, 2, 9, 4, 11, 8, 1, 1]]
    requests = [Request(prompt, max_new_tokens=12, seed=3) for prompt in prompts]
    plain = kvjax.run_batch(model, empty(kvjax.make_spec(model.layer_specs(), **options)), requests)[0]
    outputs = kvjax.run_batch(
        drafted_model, empty(kvjax.make_spec(specs, **options)), requests, RunOptions(drafter=drafts)
    )[0]
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    for output, other in zip(outputs, plain, strict=True):
        np.testing.assert_allclose(output.logprobs, other.logprobs, atol=1e-5)
    assert sum(output.drafted_tokens for output in outputs) > 0


@pytest.mark.long
def test_the_log_probabilities_of_a_rollout_with_drafts_are_those_of_score():
    prompts = np.array([[5, 3, 7, 1], [2, 4, 6, 8]], np.int32)
    lengths = np.array([4, 3], np.int32)

    @jax.jit
    def sample(cache, drafter):
        options = {"max_new_tokens": NEW, "samples": 2, "logprobs": "raw", "scheduler": BASE["scheduler"]}
        return kvjax.rollout(MODEL, cache, prompts, lengths, drafter=drafter, seed=3, **options)

    drafted, *_ = sample(make_cache(), Guesses.of(MODEL, VOCAB))
    plain, *_ = jax.jit(
        lambda cache: kvjax.rollout(
            MODEL, cache, prompts, lengths, max_new_tokens=NEW, samples=2, logprobs="raw",
            scheduler=BASE["scheduler"], seed=3,
        )
    )(make_cache())  # fmt: skip
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    score = jax.jit(functools.partial(kvjax.score, chunk=BASE["scheduler"].chunk))
    confirmed, *_ = score(MODEL, make_cache(), prompts, drafted.tokens, lengths)
    np.testing.assert_allclose(drafted.logprobs, confirmed, atol=1e-5)
    np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=1e-5)
    assert np.all(drafted.logprobs < 0)


# Parts.


def likeliest_of_all(chances, counts, max_total):
    """The number of chosen drafts of each row, in plain Python."""
    expected = [(chance**depth, -row) for row, chance in enumerate(chances) for depth in range(1, counts[row] + 1)]
    best = sorted(expected, reverse=True)[:max_total]
    return [sum(-row == number for _, row in best) for number in range(len(chances))], sum(p for p, _ in best)


@pytest.mark.parametrize("max_total", [1, 4, 9, 12])
def test_the_likeliest_drafts_of_all_rows_are_verified(max_total):
    rng = np.random.default_rng(max_total)
    for _ in range(20):
        chances = rng.uniform(0.05, 0.95, 4).astype(np.float32)
        counts = rng.integers(0, 4, 4).astype(np.int32)
        chosen, expected = best_drafts(jnp.asarray(chances), jnp.asarray(counts), 3, max_total)
        numbers, total = likeliest_of_all(chances.tolist(), counts.tolist(), max_total)
        assert chosen.tolist() == numbers
        np.testing.assert_allclose(expected, total, rtol=1e-5)


def guesses_by_hand(text, num_tokens, max_ngram, min_ngram):
    """Drafts by prompt lookup in plain Python, or None."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(text) - 2, size - 2, -1):
            if text[end - size + 1 : end + 1] == text[-size:] and size <= len(text):
                period = len(text) - 1 - end
                return [text[end + 1 + number % period] for number in range(num_tokens)]
    return None


def test_ngrams_are_looked_up_as_by_hand():
    rng = np.random.default_rng(0)
    drafter = ngram(5, max_ngram=3, min_ngram=2, window=24)
    cache = make_cache()
    found = 0
    for _ in range(40):
        texts = [rng.integers(0, 3, rng.integers(1, 20)).tolist() for _ in range(3)]
        padded = np.stack([np.pad(text, (0, 30 - len(text)), constant_values=1) for text in texts]).astype(np.int32)
        length = jnp.array([len(text) for text in texts], jnp.int32)
        rows: Any = None
        drafting = Drafting(cache, rows, jnp.ones(3, bool), jnp.zeros(3), jnp.asarray(padded), length, rows)
        drafts = drafter.propose(drafting)
        for text, tokens, count in zip(texts, drafts.tokens.tolist(), drafts.count.tolist(), strict=True):
            by_hand = guesses_by_hand(text, 5, 3, 2)
            assert (tokens if count else None) == by_hand, text
            found += by_hand is not None
    assert found > 20


def test_the_cost_of_a_pass_is_estimated_or_measured():
    """A pass with more positions costs more, and its share falls with the rows of a plain step."""
    few, many, of_rows = estimated_pass_cost(1, 8), estimated_pass_cost(1, 16), estimated_pass_cost(32, 16)
    assert 0 < few < many and of_rows < many
    assert ngram(8).cost(1, 8) == few
    assert ngram(8, pass_cost=0.25).cost(1, 8) == 0.25

    def slow_pass(tokens, pools, view, *, last):
        """A model whose time grows with its positions."""
        x = jnp.ones((tokens.size, 256), jnp.float32)
        x = jax.lax.fori_loop(0, 8, lambda _, x: jnp.tanh(x @ jnp.full((256, 256), 0.01)), x)
        return jnp.zeros((last.shape[0], VOCAB)) + jnp.sum(x), pools

    spec = kvjax.make_spec(num_blocks=8, max_seqs=1, max_length=32, block_size=8)
    assert measured_pass_cost(jax.tree_util.Partial(slow_pass), spec, 2_000, rounds=3) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ngram(0), "num_tokens: got 0"),
        (lambda: ngram(4, max_ngram=1), "max_ngram: got 1"),
        (lambda: ngram(4, window=3), "window: got 3"),
        (lambda: ngram(4, max_drafts=0), "max_drafts: got 0"),
        (lambda: ngram(4, pass_cost=-1), "pass_cost: got -1, wanted a number of at least 0 or None"),
        (lambda: RunOptions(drafter=cast(Any, 4)), "drafter: got 4, wanted a kvjax.serving.Drafter or None"),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()
