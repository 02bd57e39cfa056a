# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given completions against those of whole sequences without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.serving import rollout_log
from tests.serving_kit import MODEL, ROWS, VOCAB, WINDOWS, make_cache, make_spec

B, G, P, T = 3, 2, 21, 5
LENGTHS, ENDS = np.array([21, 1, 9], np.int32), np.array([[5, 3], [1, 5], [0, 2]], np.int32)
IS_PROMPT = np.arange(P)[None] < LENGTHS[:, None]
PROMPTS = np.where(IS_PROMPT, np.random.default_rng(0).integers(0, VOCAB, (B, P)), 0).astype(np.int32)
COMPLETIONS = np.random.default_rng(1).integers(0, VOCAB, (B, G, T)).astype(np.int32)
score = jax.jit(functools.partial(kvjax.score, chunk=8))
dense = jax.jit(MODEL.dense, static_argnums=1)


def reference(temperature=1.0, kind="plain"):
    """The same from whole sequences, [B, G, T]."""
    found = np.zeros((B, G, T), np.float32)
    for number, sample in np.ndindex(B, G):
        text = np.array([*PROMPTS[number, : LENGTHS[number]], *COMPLETIONS[number, sample]], np.int32)
        scores = jax.nn.log_softmax(dense(np.resize(text, P + T), WINDOWS[kind]) / temperature, axis=-1)
        chosen = scores[LENGTHS[number] - 1 + np.arange(T), COMPLETIONS[number, sample]]
        found[number, sample] = np.where(np.arange(T) < ENDS[number, sample], chosen, 0)
    return found


@pytest.mark.long
def test_scores_are_those_of_whole_sequences_whatever_is_cached():
    log = jax.device_put(rollout_log(make_spec(), (B, P), T, G), jax.devices()[0])  # like that which a call returns
    cache, before = make_cache(), score._cache_size()
    for _ in range(2):  # the second time all prompts are found
        found, cache, log = score(
            MODEL, cache, PROMPTS, COMPLETIONS, LENGTHS, completion_lengths=ENDS, temperature=np.float32(0.7), log=log
        )
        np.testing.assert_allclose(found, reference(0.7), atol=1e-4)
        assert np.all(np.asarray(cache.state.seqs.length) == 0)
        kvjax.check(cache.state)
    assert int(log.queried) == 2 * LENGTHS.sum() and int(log.cached) >= (LENGTHS - 1).sum()
    assert kvjax.fold(kvjax.to_list(log)) == kvjax.fold(kvjax.events.snapshot(cache.state))
    assert score._cache_size() == before + 1


@pytest.mark.slow
def test_windows_padding_on_the_left_and_other_rows():
    cache, events = make_cache(kind="windows").admit(2, np.full(P, 7, np.int32), 8)
    assert bool(events.ok)
    left = np.stack([np.roll(prompt, P - length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)])
    found, after, _ = score(MODEL, cache, left, COMPLETIONS, mask=IS_PROMPT[:, ::-1], completion_lengths=ENDS)
    np.testing.assert_allclose(found, reference(kind="windows"), atol=1e-4)
    np.testing.assert_array_equal(after.state.groups[0].table, cache.state.groups[0].table)


@pytest.mark.slow
def test_what_cannot_be_scored_is_nan_and_gives_all_back():
    cache = make_cache(7)  # enough for the prompt, not for two completions of 5 tokens
    ends = np.full((B, G), T, np.int32)
    long = np.array([21, 22, 9], np.int32)  # more tokens than there are
    found, cache, _ = score(MODEL, cache, PROMPTS, COMPLETIONS, long, completion_lengths=ends)
    assert np.isnan(found).all(axis=(1, 2)).tolist() == [True, True, False]
    assert np.all(np.asarray(cache.state.seqs.length) == 0)
    kvjax.check(cache.state)
    busy = make_cache()
    for row in range(ROWS - 1):
        busy, _ = busy.admit(row, PROMPTS[0], 4)
    found, _, _ = score(MODEL, busy, PROMPTS, COMPLETIONS, LENGTHS, completion_lengths=ends)
    assert np.isnan(found).all()


def last_only(tokens, pools, view, /, *, last):
    return jnp.zeros((*last.shape, 3)), pools


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"completions": COMPLETIONS[:2]}, r"completions: got shape \[2, 2, 5\], wanted \[3, G, T\]"),
        ({"completions": np.zeros((B, 5, T), np.int32)}, "completions: got 5 for a prompt, wanted at most the 3 rows"),
        ({"completion_lengths": ENDS[:2]}, "completion_lengths: got"),
        ({"temperature": np.ones(2)}, r"temperature: got shape \[2\]"),
        ({"lengths": None}, "lengths: got None without a mask, wanted lengths or a mask"),
        ({"chunk": 0}, "chunk: got 0"),
        ({"model": jax.tree_util.Partial(last_only)}, "model: got .* for last=None, wanted all logits"),
    ],
)
def test_bad_arguments(options, message):
    arguments = {"model": MODEL, "prompts": PROMPTS, "completions": COMPLETIONS, "lengths": LENGTHS, **options}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda cache: kvjax.score(cache=cache, **arguments), make_cache())
