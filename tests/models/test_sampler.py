# SPDX-License-Identifier: Apache-2.0
"""A sampler for training loops on the host: groups of equal prompts, versions of weights, and what is refused.

Its model's tokens tell the bytes that it read.
"""

import jax
import numpy as np
import pytest

import kvjax
from models.paged_decoders import paged
from models.sampler import Options, Sampler, group_size
from tests.models import bonsai
from tests.oracle.bytes_machine import SIZE, TWO, VOCAB, Chain, name_of
from tests.serving_kit import prompts_of

MODEL = Chain(np.full(VOCAB, name_of(0, ()), np.int32), TWO)
A, B = (np.array(prompt, np.int32) for prompt in prompts_of(0))
MOST, WIDTH = 4, 13


def chosen(prompt):
    """The tokens that the model chooses after a prompt."""
    path = tuple(prompt.tolist())
    for _ in range(MOST):
        path += (name_of(0, path) % VOCAB,)
    return list(path[-MOST:])


def make_sampler(**options):
    layers = [kvjax.LayerSpec(1, 2)] * 2
    return Sampler(layers, **{"max_length": 32, "block_size": SIZE, "dtype": "float32", **options})


@pytest.mark.parametrize(
    ("batch", "most", "usual", "size"),
    [
        ([A, A, B, B], 4, None, 2),
        ([A, A, A, A], 4, None, 4),
        ([A, A, A, A], 3, None, 2),  # of the divisors the largest that there are rows for
        ([A, A, A, A], 4, 2, 2),  # a prompt that came twice: the program for groups of two serves
        ([A, A, A, B], 4, None, 1),
        ([A, A, B, B, B, B], 4, None, 2),
        ([A, B, A, B], 4, 2, 1),
        ([A, A[:5], A, A], 4, None, 1),
        ([A], 4, 8, 1),
    ],
)
def test_the_size_of_groups(batch, most, usual, size):
    assert group_size(batch, most, usual) == size


@pytest.mark.slow
def test_samples_of_groups_and_of_new_weights():
    """One program; no version finds what another has computed; old blocks are gone, and so are the weights' names."""
    sampler, greedy = make_sampler(), Options(MOST, temperature=0)
    batch = [A, A, B[:9], B[:9]]
    for version in range(3):
        for again in (False, True):
            found = sampler.sample(MODEL, batch, WIDTH, greedy)
            assert [one.tolist() for one in found.tokens] == [chosen(prompt) for prompt in batch]
            assert found.cached.shape == (2,) and bool(found.cached[0]) is again
            assert sampler.version == version
        sampler.renew()
    sampler.sample(MODEL, [B, B, A, A], WIDTH, greedy)
    assert sampler.programs.sample._cache_size() == 1
    spec, state = sampler.cache.state.spec, sampler.cache.state
    assert spec.max_seqs == 4 and spec.groups[0].num_blocks == 4 * -(-32 // SIZE)
    namespaces = {event["namespace"] for event in kvjax.events.snapshot(state) if event.get("namespace") is not None}
    assert namespaces == {sampler.namespace}
    kvjax.check(state)


@pytest.mark.slow
def test_a_larger_batch_gets_rows_unless_their_number_is_fixed():
    greedy = Options(MOST, temperature=0)
    for most, rows in ((None, [1, 2, 2]), (1, [1, 1, 1])):
        sampler, found = make_sampler(max_seqs=most), []
        for batch in ([A], [B, B], [A]):
            tokens = sampler.sample(MODEL, batch, WIDTH, greedy).tokens
            assert [one.tolist() for one in tokens] == [chosen(prompt) for prompt in batch]
            found.append(sampler.cache.state.spec.max_seqs)
        assert found == rows


@pytest.mark.slow
def test_log_probabilities_are_of_the_whole_distribution():
    """Whatever top-k and top-p leave of it; scores are those of the temperature 1."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        module = bonsai.Decoder()
        model = paged(module)
        sampler = Sampler(model.layer_specs(), 32, block_size=4, max_seqs=2, dtype=model.dtype)
        batch = [A, A, B[:9], B[:9]]
        found = sampler.sample(model, batch, WIDTH, Options(MOST, 0.7, 3, 0.9, jax.random.key(3), [0]))
        scores = sampler.score(model, batch, found.tokens, WIDTH, MOST)
        for prompt, tokens, logprobs, score in zip(batch, found.tokens, found.logprobs, scores, strict=True):
            row = np.concatenate([prompt, tokens])[None]
            logits = module(row, cache=bonsai.make_cache(*row.shape), segment_ids=np.ones_like(row))[0]
            at = np.arange(prompt.size - 1, row.size - 1), tokens
            np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits / 0.7)[at], atol=1e-4)
            np.testing.assert_allclose(score[: tokens.size], jax.nn.log_softmax(logits)[at], atol=1e-4)
            assert not score[tokens.size :].any() and 0 not in tokens[:-1]


@pytest.mark.parametrize(
    ("batch", "width", "message"),
    [
        ([], WIDTH, r"prompts: got lengths \[\], wanted some, of 1 to 13 tokens each"),
        ([A[:0]], WIDTH, r"prompts: got lengths \[0\]"),
        ([A], 12, r"prompts: got lengths \[13\], wanted some, of 1 to 12"),
        ([np.resize(A, 30)], 30, r"prompts: got one of 30 tokens for 4 new ones, wanted at most 32 together"),
    ],
)
def test_bad_prompts(batch, width, message):
    with pytest.raises(ValueError, match=message):
        make_sampler().sample(MODEL, batch, width, Options(MOST))


@pytest.mark.parametrize("name", ["max_length", "block_size", "num_blocks", "max_seqs"])
def test_bad_sizes(name):
    with pytest.raises(ValueError, match=f"{name}: got 0"):
        make_sampler(**{name: 0})


@pytest.mark.long
def test_too_few_blocks():
    with pytest.raises(RuntimeError, match="num_blocks: got 1, wanted more: 1 of 1 completions ended with NO_BLOCKS"):
        make_sampler(num_blocks=1).sample(MODEL, [A], WIDTH, Options(MOST, temperature=0))


@pytest.mark.slow
def test_a_sampler_that_sleeps_frees_its_memory_and_compiles_nothing():
    sampler, greedy = make_sampler(), Options(MOST, temperature=0)
    for _ in range(2):
        found = sampler.sample(MODEL, [A, A, B, B], WIDTH, greedy)
        assert [one.tolist() for one in found.tokens] == [chosen(prompt) for prompt in (A, A, B, B)]
        assert found.cached[0] == 0
        pools = jax.tree.leaves(sampler.cache.pools)
        sampler.sleep()
        assert sampler.cache is None and all(array.is_deleted() for array in pools)
    assert sampler.programs.sample._cache_size() == 1
