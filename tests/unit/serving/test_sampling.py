# SPDX-License-Identifier: Apache-2.0
"""A batch in which each row has its own sampling, equal in every bit to a program for that sampling alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax import Sampling
from kvjax.serving import Request
from kvjax.serving.sampling import output_seeds, restrict, sample
from tests.oracle import static_sampling
from tests.oracle.static_sampling import Static

R, V = 8, 37
STATICS = (
    Static(), Static(0.7), Static(1.3, 5), Static(1.0, V), Static(0.9, V + 4), Static(2.0, None, 0.9),
    Static(0.8, 12, 0.7), Static(1.1, 1), Static(1.0, None, 1e-6), Static(3.0, 3, 1.0), Static(1.5, None, 0.5),
)  # fmt: skip
SEEDS, POSITIONS = jnp.arange(R, dtype=jnp.uint32) * 5, jnp.arange(R, dtype=jnp.int32) * 11
NONE = jnp.full((3,), -1, jnp.int32)  # stop tokens: three of padding
NEW = jnp.zeros((R,), jnp.int32)
by_row, limited = jax.jit(sample, static_argnames="top_logprobs"), jax.jit(restrict)


def test_a_seed_is_an_integer_a_key_or_the_words_of_one():
    streams = [output_seeds(seed, 2).tolist() for seed in (
        3, np.int64(3), 3 + 2**32, jax.random.key(3), jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))
    )]  # fmt: skip
    wanted = [jax.random.bits(jax.random.fold_in(jax.random.key(3), output)).item() for output in range(2)]
    assert streams == [wanted] * 6
    assert output_seeds(-1, 1).tolist() == output_seeds(2**32 - 1, 1).tolist() != [wanted[0]]
    traced = jax.jit(output_seeds, static_argnums=1)
    assert traced(jax.random.PRNGKey(3), 2).tolist() == traced(jnp.int32(3), 2).tolist() == wanted


@pytest.mark.parametrize("seed", [0.5, True, "3", [0, 3], np.zeros(3, np.uint32), jax.random.split(jax.random.key(1))])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(ValueError, match=r"^seed: got (.|\n)*"):
        output_seeds(seed, 2)


@functools.cache
def make_logits(seed=0):
    """Random logits with many ties, among the likeliest too."""
    return jnp.asarray(np.round(np.random.default_rng(seed).normal(size=(R, V)) * 4) / 2, jnp.float32)


@jax.jit
def alone(logits, seeds, positions):
    """The choices of each static program for all rows, and the tokens that its top-k and top-p leave."""
    chosen = [static_sampling.sample(logits, static, seeds, positions) for static in STATICS]
    return chosen, [static_sampling.restrict(logits, static) > -jnp.inf for static in STATICS]


def in_rows(statics):
    """A sampling of arrays, from one static sampling for each row."""
    fields = zip(*statics, strict=True)
    return Sampling(*([off if x is None else x for x in field] for off, field in zip((0, 0, 1), fields, strict=True)))


@pytest.mark.parametrize("shift", range(len(STATICS)))
def test_each_row_chooses_what_a_program_of_its_own_chooses(shift):
    numbers = (np.arange(R) * 3 + shift) % len(STATICS)
    chosen, restricted = alone(make_logits(), SEEDS, POSITIONS)
    wanted = [[np.asarray(of)[number][row] for row, number in enumerate(numbers)] for of in zip(*chosen, strict=True)]
    sampling = in_rows([STATICS[number] for number in numbers])
    found = by_row(make_logits(), sampling, SEEDS, POSITIONS, stop=NONE, generated=NEW)
    assert [found.tokens.tolist(), found.logprobs.tolist()] == wanted
    left = np.asarray(limited(make_logits(), sampling) > -jnp.inf)
    assert np.array_equal(left, [np.asarray(restricted)[number][row] for row, number in enumerate(numbers)])


@pytest.mark.parametrize("number", range(len(STATICS)))
def test_one_sampling_for_all_rows(number):
    (tokens, logprobs), static = alone(make_logits(), SEEDS, POSITIONS)[0][number], STATICS[number]
    one = by_row(make_logits(), Sampling(*static), SEEDS, POSITIONS, stop=NONE, generated=NEW)
    assert one.tokens.tolist() == tokens.tolist() and one.logprobs.tolist() == logprobs.tolist()
    if static == Static():
        greedy = by_row(make_logits(), None, SEEDS, POSITIONS)
        assert greedy.tokens.tolist() == tokens.tolist() and greedy.logprobs.tolist() == logprobs.tolist()


def test_tokens_as_likely_as_the_last_one_that_stays_stay_too():
    logits = jnp.log(jnp.array([[0.3, 0.2, 0.2, 0.2, 0.1]] * 6, jnp.float32))
    sampling = Sampling(1.0, top_k=[2, 4, 5, 0, 0, 2], top_p=[1, 1, 1, 0.4, 1e-9, 0.2])
    counts = np.isfinite(limited(logits, sampling)).sum(axis=1)
    assert counts.tolist() == [4, 4, 5, 4, 1, 1]


def test_a_row_depends_on_its_own_logits_sampling_seed_and_position_alone():
    sampling = in_rows([STATICS[number] for number in (1, 2, 5, 0, 6, 1, 2, 9)]).each_row(R)
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    args = (make_logits(), sampling, SEEDS, POSITIONS)
    found = by_row(*args, stop=NONE, generated=NEW)
    other = by_row(*jax.tree.map(lambda x: x[order], args), stop=NONE, generated=NEW)
    assert other.tokens.tolist() == found.tokens[order].tolist()
    assert other.logprobs.tolist() == found.logprobs[order].tolist()
    later = by_row(make_logits(), sampling, SEEDS, POSITIONS + 1, stop=NONE, generated=NEW)
    assert later.tokens.tolist() != found.tokens.tolist()


# The operations.

TAKES = [
    ("greedy throughout", Sampling(), 0),
    ("greedy rows do not use their top-k and top-p", Sampling(0.0, 3, 0.5), 0),
    ("enough was generated", Sampling(min_tokens=[4, 2, 0] + [0] * 5), 0),
    ("too early to stop", Sampling(min_tokens=[4, 3, 0] + [0] * 5), 1),
    ("one row draws", Sampling([0] * 7 + [0.5], top_k=[3] * 7 + [0]), 2),
    ("a top-k of all tokens", Sampling(0.5, V), 2),
    ("a row that draws has a top-k", Sampling([0, 0.5] * 4, [0, 3] + [0] * 6), 3),
    ("a row that draws has a top-p", Sampling([0, 0.5] * 4, top_p=[1] * 7 + [0.9], min_tokens=9), 3),
]


@pytest.mark.parametrize(("sampling", "number"), [pytest.param(*case, id=name) for name, *case in TAKES])
def test_only_what_some_row_needs_runs(sampling, number, monkeypatch):
    taken, switch = [], lax.switch
    monkeypatch.setattr(lax, "switch", lambda index, programs: taken.append(int(index)) or switch(index, programs))
    generated = jnp.array([4, 2, 0, 0, 0, 0, 0, 0], jnp.int32)
    sample(make_logits(), sampling, SEEDS, POSITIONS, stop=jnp.array([1, 2, -1], jnp.int32), generated=generated)
    assert taken == [number]


def primitives(jaxpr, into_branches=True):
    """The names of all primitives in a jaxpr, in those inside it too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name == "cond" and not into_branches:
            continue
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from primitives(inner, into_branches)


COSTLY = {"sort", "top_k", "cumsum", "random_bits", "random_gumbel", "threefry2x32", "scatter"}


@pytest.mark.parametrize("caches", [False, True], ids=["alone", "under vmap"])
def test_what_draws_and_sorts_is_in_branches_that_a_greedy_batch_does_not_take(caches):
    def run(logits, sampling, generated):
        return sample(logits, sampling, SEEDS, POSITIONS, stop=jnp.array([1, 2], jnp.int32), generated=generated)

    args = (make_logits(), Sampling().each_row(R), NEW)
    if caches:
        run, args = jax.vmap(run), jax.tree.map(lambda x: jnp.stack([x, x]), args)
    jaxpr = jax.make_jaxpr(run)(*args).jaxpr
    assert {"sort", "cumsum", "scatter"} <= set(primitives(jaxpr))
    assert not COSTLY & set(primitives(jaxpr, into_branches=False))
    (cond,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "cond"]
    assert not COSTLY & set(primitives(cond.params["branches"][0].jaxpr))


def test_without_a_sampling_nothing_but_the_greedy_choice_is_traced():
    jaxpr = jax.make_jaxpr(lambda logits: sample(logits, None, SEEDS, POSITIONS))(make_logits()).jaxpr
    assert not {"cond", *COSTLY} & set(primitives(jaxpr))


# Min-p.


def warped(logits, temperature, top_k, top_p, min_p):
    """The logits f32[V] that transformers' warpers leave of one row, in their order, in numpy; the others are -inf."""
    scores = logits.astype(np.float64) / temperature
    if 0 < top_k < V:
        scores = np.where(scores < np.sort(scores)[-top_k], -np.inf, scores)
    if top_p < 1:
        order = np.argsort(scores, kind="stable")
        weights = np.exp(scores[order] - scores.max())
        is_dropped = np.cumsum(weights / weights.sum()) <= 1 - top_p
        is_dropped[-1:] = False
        scores[order[is_dropped]] = -np.inf
    probs = np.exp(scores - scores.max())
    return np.where(probs / probs.sum() < min_p * (probs / probs.sum()).max(), -np.inf, scores)


MIN_P = [0.0, 0.05, 0.3, 0.9, 1.0, 0.011, 0.6, 0.07]


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": [0, 5, 9, 0, 3, 20, 0, 7]}, {"top_p": 0.9}, {"top_k": 12, "top_p": [0.7, 0.95] * 4}]
)
def test_min_p_leaves_the_tokens_that_transformers_leaves(limits):
    logits = np.random.default_rng(4).normal(size=(R, V)).astype(np.float32) * 3  # without ties
    sampling = Sampling([0.5, 1.0, 1.5, 2.0] * 2, min_p=MIN_P, **limits)
    each = sampling.each_row(R)
    of_rows = zip(logits, each.temperature, each.top_k, each.top_p, each.min_p, strict=True)
    wanted = np.stack([warped(row, *(number.item() for number in numbers)) for row, *numbers in of_rows])
    found = by_row(jnp.asarray(logits), sampling, SEEDS, POSITIONS)
    scaled = jnp.asarray(logits) / each.temperature[:, None]
    np.testing.assert_array_equal(np.isfinite(limited(scaled, sampling)), np.isfinite(wanted))
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(SEEDS, POSITIONS)
    tokens = jax.vmap(jax.random.categorical)(keys, jnp.asarray(wanted, jnp.float32))
    assert found.tokens.tolist() == tokens.tolist()
    assert found.tokens[4] == np.argmax(logits[4])  # by a min-p of 1
    log_probs = np.asarray(sample(jnp.asarray(logits), sampling, SEEDS, POSITIONS, logprobs="sampling").logprobs)
    left = wanted - np.log(np.exp(wanted - wanted.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(log_probs, (left - wanted.max(axis=1, keepdims=True))[np.arange(R), tokens], atol=1e-4)


def test_a_min_p_of_nothing_changes_no_token_and_greedy_rows_have_none():
    sampling = in_rows([STATICS[number] for number in (1, 2, 5, 0, 6, 1, 2, 9)])
    args = make_logits(), SEEDS, POSITIONS
    found, plain = (by_row(args[0], one, *args[1:]) for one in (sampling.with_min_p(), sampling))
    assert found.tokens.tolist() == plain.tokens.tolist()
    greedy = by_row(args[0], Sampling(0.0, min_p=0.7), *args[1:])
    assert greedy.tokens.tolist() == jnp.argmax(args[0], axis=-1).tolist()


def test_without_a_min_p_no_leaf_exists_and_alone_it_sorts_nothing():
    one = Sampling(0.7, min_p=0.25)
    assert len(jax.tree.leaves(one)) == len(jax.tree.leaves(Sampling(0.7))) + 1
    assert one.with_min_p() is one and Sampling(min_p=None).min_p is None
    assert float(Sampling(0.7).with_min_p().min_p) == 0 and jax.tree.map(lambda leaf: leaf, one).min_p == one.min_p
    jaxpr = jax.make_jaxpr(lambda logits: sample(logits, one, SEEDS, POSITIONS))(make_logits()).jaxpr
    (cond,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "cond"]
    drawing, sorting = (set(primitives(branch.jaxpr)) for branch in cond.params["branches"][2:])
    assert "sort" in sorting and not {"sort", "cumsum", "top_k"} & drawing


# Stop tokens, and the likeliest tokens.


@pytest.mark.parametrize("each", [False, True], ids=["one list", "a list for each row"])
def test_no_stop_token_is_chosen_before_min_tokens(each):
    greedy, order = jnp.argmax(make_logits(), axis=-1), jnp.argsort(-make_logits(), axis=-1, stable=True)
    own = jnp.concatenate([order[:, :2], jnp.array([[-1, V, 2**31 - 1]] * R)], axis=1).astype(jnp.int32)
    stop = own if each else own[0]
    temperature, min_tokens = np.array([0, 0.9] * 4), np.array([0, 0, 3, 3, 4, 4, 9, 9])
    generated = jnp.full((R,), 3, jnp.int32)
    sampling = Sampling(temperature, [0, 3] * 4, min_tokens=min_tokens)
    found = by_row(make_logits(), sampling, SEEDS, POSITIONS, stop=stop, generated=generated)
    early = min_tokens > 3
    barred = np.zeros((R, V), bool)
    for row in np.flatnonzero(early):
        barred[row, np.asarray(own[row if each else 0, :2])] = True
    wanted = by_row(jnp.where(barred, -jnp.inf, make_logits()), sampling, SEEDS, POSITIONS, stop=NONE, generated=NEW)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert not np.any(np.take_along_axis(barred, np.asarray(found.tokens)[:, None], axis=1))
    assert found.tokens[:3:2].tolist() == greedy[:3:2].tolist()
    if each:
        assert found.tokens[4::2].tolist() == order[4::2, 2].tolist()  # the third likeliest
    scores = np.asarray(jax.nn.log_softmax(make_logits()))
    np.testing.assert_allclose(found.logprobs, scores[np.arange(R), found.tokens], rtol=1e-6)


def test_the_likeliest_tokens_are_those_of_the_logits_as_they_came():
    sampling = Sampling([0, 0.9] * 4, [0, 2] * 4, min_tokens=1)
    stop = jnp.argmax(make_logits(), axis=-1).astype(jnp.int32)[:, None]
    found = by_row(make_logits(), sampling, SEEDS, POSITIONS, stop=stop, generated=NEW, top_logprobs=4)
    scores = np.asarray(jax.nn.log_softmax(make_logits()))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :4]
    assert found.top_tokens.dtype == jnp.int32 and found.top_tokens.tolist() == order.tolist()
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(scores, order, axis=1), rtol=1e-6)
    without = by_row(make_logits(), sampling, SEEDS, POSITIONS, stop=stop, generated=NEW)
    assert without.top_tokens is without.top_logprobs is None
    assert without.tokens.tolist() == found.tokens.tolist()
    with pytest.raises(ValueError, match=r"^top_logprobs: got -1, wanted an int of at least 0"):
        sample(make_logits(), None, SEEDS, POSITIONS, top_logprobs=-1)
    most = make_logits().shape[1]
    with pytest.raises(ValueError, match=rf"^top_logprobs: got {most + 1}, wanted at most the vocabulary, {most}"):
        sample(make_logits(), None, SEEDS, POSITIONS, top_logprobs=most + 1)


# The pytree, and its arguments.


def test_log_probabilities_of_the_distribution_that_was_sampled_from():
    """In numpy, by temperature, then the tokens that stay; a greedy row has chosen with certainty."""
    logits, sampling = make_logits(), Sampling(np.tile([0.0, 0.5, 2.0, 1.0], R // 4), [0, 3, 0, 5] * (R // 4), 0.8)
    found = sample(logits, sampling, SEEDS, POSITIONS, logprobs="sampling")
    greedy = np.asarray(sampling.temperature) == 0
    scaled = np.asarray(logits) / np.where(greedy, 1, sampling.temperature)[:, None]
    left = np.asarray(limited(jnp.asarray(scaled, jnp.float32), sampling) > -jnp.inf)
    weights = np.where(left, np.exp(scaled - scaled.max(axis=1, keepdims=True)), 0)
    wanted = np.log(np.maximum(weights / weights.sum(axis=1, keepdims=True), 1e-30))[np.arange(R), found.tokens]
    np.testing.assert_allclose(found.logprobs, np.where(greedy, 0, wanted), atol=1e-5)
    raw = sample(logits, sampling, SEEDS, POSITIONS)
    np.testing.assert_array_equal(found.tokens, raw.tokens)
    assert not np.allclose(found.logprobs, raw.logprobs)
    assert not np.any(sample(logits, None, SEEDS, POSITIONS, logprobs="sampling").logprobs)


def test_a_sampling_is_a_pytree_of_numbers_of_one_type():
    one, many = Sampling(0.7, 40, 0.9, 3), Sampling([0.7, 0.0], [40, 0], [0.9, 1.0], [3, 0])
    for sampling, shape in ((Sampling(), ()), (one, ()), (many, (2,)), (Sampling(1, top_p=1), ())):
        assert [(type(x), x.dtype.name, x.shape) for x in jax.tree.leaves(sampling)] == [
            (np.ndarray, name, shape) for name in ("float32", "int32", "float32", "int32")
        ]
    assert [float(x) for x in jax.tree.leaves(Sampling())] == [0, 0, 1, 0]
    assert int(Sampling(top_k=2**40).top_k) == 2**31 - 1
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(one)]
    assert names == [".temperature", ".top_k", ".top_p", ".min_tokens"]
    assert one.replace(top_k=None).top_k == 0 and one.replace(top_k=None).top_p == one.top_p
    assert jax.tree.map(lambda _: "anything", one).top_p == "anything"  # not checked, as in jax
    assert jax.jit(lambda x: x)(many).temperature.tolist() == many.temperature.tolist()


def test_a_sampling_is_never_static():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Sampling())


def test_traced_numbers_are_not_checked():
    made = jax.jit(lambda x: Sampling(x, top_p=x).replace(top_k=1))(jnp.float32(-1))
    assert [float(x) for x in jax.tree.leaves(made)] == [-1, 1, -1, 0]


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": (-1.0, float("nan"), "hot", [0.5, -0.5], True, None, [[1], [1, 2]]),
        "top_k": (-1, 2.0, [1, -2], "all", [1, None]),
        "top_p": (0.0, 1.5, float("nan"), np.array([0.5, 0.0])),
        "min_tokens": (-1, 0.5, np.array([1, -1])),
        "min_p": (-0.1, 1.1, float("nan"), "a", [0.5, None]),
    }.items(),
)
def test_numbers_out_of_range_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name}: got .*, wanted "):
            Sampling(**{name: value})


def test_shapes_are_named():
    stop = jnp.zeros((2,), jnp.int32)
    for message, sampling, options in (
        (r"sampling\.top_k: got shape \[3\], wanted \[\] or \[8\]", Sampling(top_k=[1, 2, 3]), {}),
        (r"sampling\.temperature: got shape \[1, 8\], wanted", Sampling([[1.0] * R]), {}),
        (r"generated: got None, wanted integers", Sampling(), {"stop": stop}),
        (r"generated: got shape \[3\], wanted \[8\]", Sampling(), {"stop": stop, "generated": NEW[:3]}),
        (r"stop: got shape \[3, 2\], wanted \[8, K\]", Sampling(), {"stop": jnp.zeros((3, 2), jnp.int32)}),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            sample(make_logits(), sampling, SEEDS, POSITIONS, **options)


@pytest.mark.parametrize(
    ("sampling", "is_greedy"),
    [
        (None, True),
        (Sampling(), True),
        (Sampling(top_k=3), True),
        (Sampling(0.5), False),
        (Sampling(min_tokens=2), False),
    ],
)
def test_a_request_is_greedy_if_the_likeliest_tokens_are_its_answer(sampling, is_greedy):
    assert Request([1], sampling=sampling).is_greedy == is_greedy


@pytest.mark.parametrize("sampling", [0.5, Sampling([0.5, 1.0]), [Sampling()]])
def test_the_sampling_of_a_request_is_one_of_numbers(sampling):
    with pytest.raises(ValueError, match=r"^sampling: got .*, wanted a kvjax\.Sampling of numbers or None"):
        Request([1], sampling=sampling)
