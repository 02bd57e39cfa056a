# SPDX-License-Identifier: Apache-2.0
"""Random JSON schemas and regular expressions: every answer that ends matches, whatever happens to its request."""

import itertools
import json
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import kvjax
from kvjax import Sampling
from kvjax.grammar import GrammarError
from kvjax.serving import Constraints, Finish, Request, RunOptions, Scheduler, constrain
from tests import drive
from tests.grammar_kit import VOCABULARY, patterns, schemas

pytestmark = pytest.mark.long
SIZE, STOP, LENGTH, MOST, EACH = len(VOCABULARY), len(VOCABULARY) - 1, 80, 48, 8
SPEC = kvjax.make_spec(
    [kvjax.LayerSpec(1, 2)], num_blocks=48, max_seqs=4, max_length=LENGTH, block_size=8, dtype="float32"
)
SCHEDULER = Scheduler(chunk=16, reserve="num_tokens")
REFUSALS = "no text matches|with other keywords about|max_|could belong|states"
# A text comes to an end sooner: what closes something is likelier, and what begins an escape is not.
LIKELY = {STOP: 2.0} | {
    number: -9.0 if token.startswith(b"\\") else 1.5 if token.strip() in (b'"', b"}", b"]", b'"}', b"]}") else 0.0
    for number, token in enumerate(VOCABULARY.tokens)
    if token
}
BIAS = np.array([LIKELY.get(number, 0.0) for number in range(SIZE)], np.float32)


@jax.tree_util.Partial
def noise(tokens, pools, view, *, last):
    """A model whose logits are noise of the last token and its position; it stores nothing."""
    rows = np.arange(tokens.shape[0])
    position = view.positions[rows, last] if view.starts is None else view.positions[0, last]
    token = tokens[rows, last] if view.starts is None else tokens[0, last]
    number = token[:, None] * 7_919 + position[:, None] * 26_861 + np.arange(SIZE, dtype=np.int32)[None] * 10_007
    return ((number * 65_537) % 65_521 % 997).astype(jnp.float32) / 250 + BIAS[None], pools


def assert_right(source, text):
    """Asserts that a text is one of a schema, or of a pattern."""
    if isinstance(source, str):
        assert re.fullmatch(source, text, re.ASCII), (source, text)
    else:
        value = json.loads(text)
        jsonschema.Draft202012Validator(source).validate(value)
        json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair


def text_of(tokens):
    return b"".join(VOCABULARY.tokens[token] for token in tokens).decode()


def assert_answer(source, tokens, finish):
    """Asserts that an answer that has ended is a text of its grammar; returns whether it has ended."""
    assert finish in ("stop", "length") and tokens.count(STOP) == (finish == "stop")
    if finish == "stop":
        assert tokens[-1] == STOP
        assert_right(source, text_of(tokens[:-1]))
    return finish == "stop"


def constraint_of(source):
    """The constraint of a schema or a pattern; an example without one is left out."""
    try:
        named = {"regex": source} if isinstance(source, str) else {"schema": source}
        return constrain(**named, tokenizer=VOCABULARY, stop_tokens=[STOP])
    except GrammarError as error:
        if not re.search(REFUSALS, str(error)):
            raise
        return None


@pytest.fixture(scope="module")
def engine():
    """An engine for all examples: only the first compiles."""
    options = {"scheduler": SCHEDULER, "logits_fn": Constraints.create(EACH, SIZE)}
    with drive.engine(noise, cache_of(18), **options) as engine:
        yield engine


def cache_of(num_blocks):
    cache = kvjax.Cache.create(SPEC, num_blocks=np.int32(num_blocks))
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), cache)


@jax.jit
def rollout(cache, constraint, prompts, lengths, seed):
    found, cache, _ = kvjax.rollout(
        noise, cache, prompts, lengths, samples=2, max_new_tokens=MOST, seed=seed, stop_tokens=[STOP],
        logits_fn=constraint, scheduler=SCHEDULER,
    )  # fmt: skip
    return found, cache.state.seqs.length


ENDED = {"engine": 0, "run_batch": 0, "rollout": 0, "cut": 0, "preempted": 0, "cached": 0}


def check(engine, sources, seed):
    """Answers of all grammars, by an engine, a batch and rollouts, on few blocks."""
    rng = np.random.default_rng(seed)
    bound = [(source, found) for source in sources if (found := constraint_of(source)) is not None][:EACH]
    constraints = Constraints.create(EACH, SIZE)
    for number, (_, constraint) in enumerate(bound):
        constraints = constraints.put(number, constraint)
    shared = rng.integers(0, SIZE, 24).tolist()
    requests = [
        Request(
            [*shared[:cut], *rng.integers(0, SIZE, 25 - cut).tolist()], max_new_tokens=MOST, stop_tokens=[STOP],
            samples=int(rng.integers(1, 3)), logits_state=constraints.state(number), seed=seed,
            sampling=Sampling(float(rng.choice([0.0, 0.7, 1.0]))),
        )
        for number, cut in enumerate(rng.integers(25, size=len(bound)).tolist())
    ]  # fmt: skip
    engine.replace_logits_fn(constraints)
    handles = [handle for request in requests for handle in engine.submit(request).samples]
    by_engine = [handle.result(120) for handle in handles]
    options = RunOptions(scheduler=SCHEDULER, logits_fn=constraints, steps=64)
    by_batch, cache, _ = kvjax.run_batch(noise, cache_of(18), requests, options)
    kvjax.check(cache.state)
    assert [output.tokens for output in by_engine] == [output.tokens for output in by_batch]
    own = [source for (source, _), request in zip(bound, requests, strict=True) for _ in range(request.samples)]
    for way, outputs in (("engine", by_engine), ("run_batch", by_batch)):
        for source, output in zip(own, outputs, strict=True):
            has_ended = assert_answer(source, output.tokens, output.finish)
            ENDED[way if has_ended else "cut"] += 1
            ENDED["preempted"] += output.preemptions
            ENDED["cached"] += output.cached_tokens > 0
    for source, constraint in itertools.islice(bound, 2):
        prompts, lengths = np.array([shared] * 3, np.int32), np.array([24, 9, 17], np.int32)
        found, in_use = rollout(cache_of(48), constraint, prompts, lengths, np.int32(seed))
        assert not np.any(in_use)
        for row, (length, finish) in enumerate(zip(np.ravel(found.lengths), np.ravel(found.finish), strict=True)):
            tokens = np.reshape(found.tokens, (6, MOST))[row, :length].tolist()
            ENDED["rollout" if assert_answer(source, tokens, Finish(finish).name.lower()) else "cut"] += 1


HEALTH = [
    hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large, hypothesis.HealthCheck.large_base_example
]  # fmt: skip


def run(engine, of_one, examples):
    """Checks so many lists of grammars."""

    @hypothesis.settings(max_examples=examples, deadline=None, suppress_health_check=HEALTH)
    @hypothesis.given(st.lists(of_one, min_size=EACH, max_size=EACH), st.integers(0, 2**31 - 1))
    def draw(sources, seed):
        check(engine, sources, seed)

    draw()


def assert_happened():
    assert all(ENDED.values()), ENDED
    assert ENDED["cut"] < ENDED["engine"] + ENDED["run_batch"], ENDED


def test_every_answer_under_a_schema_or_a_pattern_is_right(engine):
    run(engine, schemas(), 3)
    run(engine, patterns(), 2)
    assert_happened()


@pytest.mark.slow
def test_every_answer_under_500_schemas_and_200_patterns_is_right(engine):
    run(engine, schemas(), 63)
    run(engine, patterns(), 25)
    assert_happened()
