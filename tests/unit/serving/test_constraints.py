# SPDX-License-Identifier: Apache-2.0
"""Constraints: their masks against plain Python, and every answer under a grammar, by each way to serve."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Sampling
from kvjax.grammar import TokenTable
from kvjax.serving import Constraints, Finish, GenerationInterrupted, Penalties, chain, constrain, driver, penalize
from tests import drive
from tests.constraint_kit import LIMITS, Grammar
from tests.serving_kit import (
    BASE,
    MODEL,
    SCHEDULER,
    VOCAB,
    WAYS,
    ask,
    assert_scored,
    batched,
    make_cache,
    prompts_of,
    together,
    wanted,
)

STOP, LONG = (0, 5), 12
SHORT = dataclasses.replace(SCHEDULER, reserve="num_tokens")
ANSWER = {"max_new_tokens": LONG, "stop_tokens": STOP}


def grammar_of(seed):
    return Grammar.random(seed, VOCAB, STOP)


def stacked(*grammars):
    """One `logits_fn` of several grammars, with space for another."""
    found = Constraints.create(len(grammars) + 1, VOCAB, **LIMITS)
    for number, grammar in enumerate(grammars):
        found = found.put(number, grammar.constraint)
    return found


def texts_of(outputs):
    return [(output.tokens, output.finish) for output in outputs]


def assert_same(outputs, expected):
    assert texts_of(outputs) == texts_of(expected)
    for output, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.logprobs, other.logprobs, atol=1e-4)


# The function alone.


@pytest.mark.parametrize("seed", range(20))
def test_logits_are_masked_as_by_plain_python(seed):
    rng, vocabulary = np.random.default_rng(seed), VOCAB + 3
    grammars = [Grammar.random((seed, number), size, (0, 5)) for number, size in enumerate((VOCAB, VOCAB - 2, 11))]
    function = stacked(*grammars)
    of_row = [None, 0, 1, 2, 1]
    state = np.array([-1 if number is None else function.state(number) for number in of_row], np.int32)
    last, texts = rng.integers(0, VOCAB, 5).astype(np.int32), [[] for _ in of_row]
    call = jax.jit(lambda function, *args: function(*args))
    for _ in range(8):
        logits = rng.standard_normal((5, vocabulary)).astype(np.float32)
        masked, state = call(function, logits, last, np.zeros(5, np.int32), state)
        for row, (number, text) in enumerate(zip(of_row, texts, strict=True)):
            allowed = np.ones(vocabulary, bool) if number is None else grammars[number].allowed(text, vocabulary)
            np.testing.assert_array_equal(masked[row], np.where(allowed, logits[row], -np.inf))
            # In row 4 also tokens that the grammar forbids: then only a stop token may come.
            free = np.arange(11) if row == 4 else np.flatnonzero(allowed)
            last[row] = rng.choice(free)
            text.append(int(last[row]))


def test_a_state_after_tokens_is_the_one_that_the_loop_has_then():
    grammar, last = grammar_of(3), np.zeros(1, np.int32)
    function, logits = stacked(grammar_of(1), grammar), np.zeros((1, VOCAB), np.float32)
    state, text = np.array([function.state(1)]), []
    for _ in range(6):
        masked, state = function(logits, last, last, state)
        again, _ = function(logits, last, last, np.array([function.state(1, text)]))
        np.testing.assert_array_equal(masked, again)
        text.append(int(np.flatnonzero(masked[0] == 0)[-1]))
        last = np.array(text[-1:], np.int32)
    forbidden = int(np.flatnonzero(~grammar.allowed((), VOCAB))[0])
    with pytest.raises(ValueError, match=f"^tokens: got {forbidden} at 0, wanted a token that the grammar allows"):
        function.state(1, [forbidden])


def test_no_array_of_all_states_and_tokens_and_no_copy_of_the_tables():
    function = Constraints.create(3, 1000, max_states=50, max_classes=40)
    rows = [np.zeros((4, 1000), np.float32), *[np.zeros(4, np.int32)] * 3]
    compiled = jax.jit(lambda function, *args: function(*args)).lower(function, *rows).compile()
    tables = [f"[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(function)]
    made = [
        line
        for line in compiled.as_text().splitlines()
        if " = " in line and not re.search(r"parameter\(|get-tuple-element\(", line)
    ]
    assert not [line for line in made if any(shape in line.split(" = ")[1].split("{")[0] for shape in tables[:2])]
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * 1000 * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Constraints.of(grammar_of(0).table, ()),
            "stop_tokens: got none, wanted the tokens that end an answer",
        ),
        (lambda: Constraints.of(grammar_of(0).table, [-1]), r"stop_tokens: got \[-1\], wanted at most 16 ids"),
        (lambda: Constraints.of(grammar_of(3).table, [0], max_states=1), "max_states: got 1, wanted at least the"),
        (lambda: Constraints.create(0, 9), "grammars: got 0"),
        (lambda: Constraints.create(1, 9, max_states=2**15), "max_states: got 32768, wanted at most 32765"),
        (lambda: stacked().put(1, grammar_of(0).constraint), r"grammar: got 1, wanted a number of 0\.\.0"),
        (lambda: stacked().put(0, stacked(grammar_of(0))), "other: got .*, wanted one grammar with max_states=9"),
        (lambda: Constraints.create(1, 9, **LIMITS).put(0, grammar_of(0).constraint), "other: got .* at most 9 tokens"),
        (lambda: stacked().state(-1), "grammar: got -1"),
        (lambda: constrain(tokenizer=None, stop_tokens=[0]), "schema: got none, wanted one of schema, regex and"),
        (lambda: constrain({}, regex="a", tokenizer=None, stop_tokens=[0]), "schema: got schema and regex, wanted one"),
        (lambda: chain(penalize, 3), r"functions\[1\]: got 3, wanted a function or None"),
        (
            lambda: stacked()(jnp.zeros((1, 9)), *[np.zeros(1, np.int32)] * 3),
            f"logits: got 9 tokens, wanted at least the {VOCAB} of the grammars",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_requests_that_would_not_end_with_their_grammar_are_refused():
    cache, constraint = make_cache(), grammar_of(0).constraint
    for options, message in (
        ({}, r"prompt 0: stop_tokens: got \[\], wanted some of the grammar's, \[0, 5\]"),
        ({"stop_tokens": [7]}, r"prompt 0: stop_tokens: got \[7\], wanted some of the grammar's, \[0, 5\]"),
        ({"stop_tokens": STOP, "sampling": Sampling(min_tokens=2)}, "prompt 0: min_tokens: got 2, wanted 0 under a"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            together(cache, [[1]], logits_fn=constraint, **options)
    with pytest.raises(ValueError, match=r"^prompt 0: logits_state: got .*, wanted what `state` returns"):
        batched(cache, [[1]], logits_fn=constraint, logits_state=[np.zeros(2, np.int32)], stop_tokens=STOP)
    kvjax.check(cache.state)


# In a generation.


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_answer_is_a_text_of_the_grammar(way):
    """Also through reuse of prefixes, which have nothing of a constraint. A new grammar compiles nothing."""
    cache, prompts = make_cache(), [*prompts_of(0), *prompts_of(1), prompts_of(0)[0]]
    sampling = [None, Sampling(1.0), None, Sampling(0.7), Sampling(2.0)]
    turns, finishes = None, set()
    for seed in range(6):
        grammar = grammar_of(seed)
        outputs, cache, _ = way(cache, prompts, logits_fn=grammar.constraint, sampling=sampling, **ANSWER)
        requests = [ask(one, sampling=own, **ANSWER) for one, own in zip(prompts, sampling, strict=True)]
        assert_same(outputs, wanted(requests, grammars=[grammar] * 5))
        assert all(map(grammar.accepts, outputs))
        finishes |= {output.finish for output in outputs}
        assert turns in (None, driver.turn._jitted._cache_size())
        turns = driver.turn._jitted._cache_size()
    assert finishes == {"stop", "length"} and outputs[0].cached_tokens == 12
    kvjax.check(cache.state)


def random_requests(rng, grammars, function, number, longest=13, least=1):
    """Requests of which some have a grammar, some samples, some scores; and the grammar of each."""
    requests, own = [], []
    for _ in range(number):
        at = int(rng.integers(-1, len(grammars)))
        prompt = rng.integers(0, 3, rng.integers(1, longest + 1)).tolist()
        sampling = Sampling(float(rng.choice([0.5, 1.0, 3.0]))) if rng.random() < 0.5 else None
        requests.append(
            ask(
                prompt, logits_state=None if at < 0 else function.state(at), stop_tokens=STOP,
                sampling=sampling, seed=int(rng.integers(9)), samples=int(rng.integers(1, 3)),
                max_new_tokens=int(rng.integers(least, LONG + 1)),
                prompt_logprobs_from=int(rng.integers(len(prompt) + 1)) if rng.random() < 0.2 else None,
            )
        )  # fmt: skip
        own.append(None if at < 0 else grammars[at])
    return requests, own


def assert_all(requests, own, outputs):
    """Asserts that outputs, a sample after the other, are the model's under the grammars."""
    assert_same(outputs, wanted(requests, grammars=own))
    numbers = iter(outputs)
    for request, grammar in zip(requests, own, strict=True):
        for output in (next(numbers) for _ in range(request.samples)):
            assert grammar is None or grammar.accepts(output)
            assert_scored(request, output)


@pytest.mark.long
@pytest.mark.parametrize("host", [0, pytest.param(20, marks=pytest.mark.slow)])
def test_grammars_of_each_request_through_preemption_and_samples(host):
    """Few blocks, so that requests are preempted; with a host tier their blocks wait there."""
    rng, preemptions = np.random.default_rng(0), 0
    scheduler = dataclasses.replace(SHORT, preempt="swap") if host else SHORT
    for round in range(4):
        grammars = [grammar_of((round, number)) for number in range(3)]
        function = stacked(*grammars)
        requests, own = random_requests(rng, grammars, function, 6, longest=8, least=LONG)
        options = kvjax.serving.RunOptions(**BASE | {"scheduler": scheduler}, logits_fn=function)
        outputs, cache, _ = kvjax.run_batch(MODEL, make_cache(10, host), requests, options)
        assert_all(requests, own, outputs)
        preemptions += sum(output.preemptions for output in outputs)
        kvjax.check(cache.state)
    assert preemptions


@pytest.mark.long
def test_an_interrupted_generation_goes_on_from_the_state_after_its_tokens():
    grammar = grammar_of(11)
    function, prompt = grammar.constraint, prompts_of(2)[0]
    (whole,) = wanted([ask(prompt, **ANSWER)], grammars=[grammar])
    assert len(whole.tokens) > 4

    def interrupt(outputs):
        if len(outputs[0].tokens) >= 4:
            raise KeyboardInterrupt

    with pytest.raises(GenerationInterrupted) as caught:
        batched(make_cache(), [prompt], logits_fn=function, progress=interrupt, **ANSWER)
    (first,) = caught.value.outputs
    done = first.tokens
    assert first.finish is None and 0 < len(done) < len(whole.tokens)
    outputs, _, _ = batched(
        caught.value.cache, [[*prompt, *done]], logits_fn=function, logits_state=[function.state(tokens=done)],
        **ANSWER | {"max_new_tokens": LONG - len(done)},
    )  # fmt: skip
    assert [*done, *outputs[0].tokens] == whole.tokens and outputs[0].finish == whole.finish


@pytest.mark.long
def test_an_engine_has_grammars_of_each_request_and_takes_new_ones_while_it_runs():
    rng, grammars = np.random.default_rng(1), [grammar_of((7, number)) for number in range(3)]
    function = stacked(*grammars)
    with drive.engine(MODEL, make_cache(), logits_fn=function, **BASE | {"scheduler": SHORT}, num_ranges=1) as engine:
        counted = []
        for round in range(4):
            requests, own = random_requests(rng, grammars, function, 8)
            handles = [engine.submit(one) for one in requests]
            grammars = [*grammars[1:], grammar_of((8, round))]
            assert engine.drain(60)
            assert_all(requests, own, [one.result(60) for handle in handles for one in handle.samples])
            function = stacked(*grammars)
            engine.replace_logits_fn(function)
            counted.append(driver.turn._jitted._cache_size())
        assert len(set(counted)) == 1, "a grammar has compiled a program"
        for other in (stacked(*grammars[:2]), penalize, grammars[0].constraint, None):
            with pytest.raises(ValueError, match=r"^logits_fn: got .*, wanted arrays like the engine's"):
                engine.replace_logits_fn(other)
        with pytest.raises(ValueError, match=r"^stop_tokens: got .*, wanted some of the grammar's"):
            engine.submit(ask([1], logits_state=function.state(1), stop_tokens=[7]))
        (request,), (output,) = [ask([1, 2])], [engine.submit(ask([1, 2])).result(60)]
        assert_same([output], wanted([request]))  # without a state it has no constraint


@pytest.mark.long
def test_new_grammars_come_while_requests_run_under_old_ones():
    """Requests go on under their own, in whose place nothing is put."""
    grammars = {number: grammar_of((9, number)) for number in range(2)}
    function, most = stacked(*grammars.values()), 18
    rng, submitted = np.random.default_rng(2), []
    with drive.engine(MODEL, make_cache(), logits_fn=function, **BASE, num_ranges=1, max_waiting=64) as engine:
        for seed in range(12):
            at = seed % 3
            for _, _, handle in (one for one in submitted if one[0] == at):
                handle.result(60)
            grammars[at] = grammar_of((10, seed))
            function = function.put(at, grammars[at].constraint)
            engine.replace_logits_fn(function)
            request = ask(
                rng.integers(0, 3, 6).tolist(), logits_state=function.state(at), stop_tokens=STOP, seed=seed,
                sampling=Sampling(1.0), max_new_tokens=most,
            )  # fmt: skip
            submitted.append((at, (request, grammars[at]), engine.submit(request)))
        for _, (request, grammar), handle in submitted:
            assert_all([request], [grammar], [handle.result(60)])


@pytest.mark.long
def test_a_chain_has_a_state_of_each_function():
    def likes_7(logits, last, positions):
        del last, positions
        return jnp.where(jnp.arange(logits.shape[1])[None] == 7, 50.0, logits)

    def no_7(logits, last, positions):
        del last, positions
        return jnp.where(jnp.arange(logits.shape[1])[None] == 7, -jnp.inf, logits)

    token_class = (np.arange(VOCAB) == 7).astype(np.int32)
    grammar = Grammar(TokenTable(np.array([[0, -1]], np.int32), token_class, np.zeros(1, bool)), STOP)
    constraint, (prompt, *_) = grammar.constraint, prompts_of(0)
    penalties = Penalties.of(LONG, frequency=2.0, bias={3: 40.0, 4: 39.0})
    found = []
    for function, states in (
        (chain(likes_7, penalize), (None, penalties)),
        (chain(likes_7, penalize, no_7), (None, penalties, None)),
        (chain(likes_7, penalize, constraint), (None, penalties, constraint.state())),
    ):
        outputs, _, _ = batched(make_cache(), [prompt], logits_fn=function, logits_state=[states], **ANSWER)
        found.append(outputs[0].tokens)
    assert 7 in found[0] and {*found[1]} == {3, 4} and found[1] == found[2]
    assert chain(likes_7, constraint).initial_state == (None, constraint.initial_state)
    assert chain(likes_7, penalize).initial_state is None
    with pytest.raises(ValueError, match=r"^prompt 0: stop_tokens: got \[\], wanted some of the grammar's"):
        batched(make_cache(), [prompt], logits_fn=function, logits_state=[states])


# In a rollout.


@pytest.mark.long
@pytest.mark.parametrize(("samples", "num_blocks"), [(1, 8), pytest.param(3, 24, marks=pytest.mark.slow)])
def test_a_rollout_takes_a_constraint_as_an_argument(samples, num_blocks):
    """Through preemption; another grammar compiles nothing."""
    prompts, number = np.array([*prompts_of(0), *prompts_of(1)], np.int32), 13
    sample = functools.partial(
        kvjax.rollout, max_new_tokens=LONG, samples=samples, scheduler=dataclasses.replace(SHORT, k=4), logprobs="raw"
    )
    program = jax.jit(
        lambda cache, constraint, seed: sample(
            MODEL, cache, prompts, np.full(4, number, np.int32), logits_fn=constraint, stop_tokens=STOP, seed=seed
        )
    )
    preemptions = 0
    for seed in range(4):
        grammar = grammar_of((12, seed))
        found, cache, _ = program(make_cache(num_blocks), grammar.constraint, np.int32(seed))
        seeds = jax.device_get(kvjax.serving.sampling.output_seeds(seed, 4 * samples)).reshape(4, samples)
        for prompt, own, tokens, lengths, finish in zip(
            prompts, seeds, np.asarray(found.tokens), np.asarray(found.lengths), np.asarray(found.finish), strict=True
        ):
            requests = [ask(prompt, sampling=Sampling(1.0), seed=int(one), **ANSWER) for one in own]
            expected = wanted(requests, grammars=[grammar] * samples)
            assert [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)] == [
                output.tokens for output in expected
            ]
            assert [Finish(one).name.lower() for one in finish] == [output.finish for output in expected]
            assert all(map(grammar.accepts, expected))
        preemptions += int(np.sum(found.preemptions))
        kvjax.check(cache.state)
    assert bool(preemptions) == (samples == 1) and program._cache_size() == 1
