# SPDX-License-Identifier: Apache-2.0
"""With `canonical=True` a prompt's log-probabilities are the same bits, whatever is cached and whoever runs beside it.

The log-probabilities of the whole vocabulary are compared at each step, so a bit of a logit that differs is seen.
"""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.serving import Scheduler
from tests.drafters import RIGHT, WRONG, Guesses
from tests.serving_kit import state_of
from tests.unit.serving.canonical_kit import CHUNK, KINDS, NEW, each_kind, make_cache, make_prompts, model_of, run


def check(kind, seed):
    """Runs random prompts alone and cold, then in random batches over one cache."""
    rng, found = np.random.default_rng(seed), 0
    prompts = make_prompts(kind, rng)
    cold = [run(kind, make_cache(kind), [prompt], [number])[0][0] for number, prompt in enumerate(prompts)]
    cache = make_cache(kind)
    for turn in range(5):
        chosen = rng.permutation(len(prompts))[: rng.integers(1, len(prompts) + 1)].tolist() if turn else [0]
        bits, cached, cache = run(kind, cache, [prompts[n] for n in chosen], chosen)
        assert bits == [cold[n] for n in chosen]
        found += sum(cached)
        assert all(tokens % CHUNK == 0 for tokens in cached)
    assert found > 0
    kvjax.check(state_of(cache), rows=())


@pytest.mark.long
@each_kind
def test_cold_warm_and_among_others_a_prompt_gives_the_same_bits(kind):
    check(kind, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_so_do_many_random_prompts(kind):
    for seed in range(2, 22):
        check(kind, seed)


@pytest.mark.long
def test_with_a_drafter_the_bits_depend_on_no_draft_and_no_other_prompt():
    """Each pass of a block is wide, whatever the drafts are."""
    prompts = make_prompts("wide", np.random.default_rng(1))[:5]
    model = model_of("wide")
    right, wrong = (Guesses.of(model, model.config.vocab_size, mode) for mode in (RIGHT, WRONG))
    cold = [run("wide", make_cache("wide"), [prompt], [n], drafter=right)[0][0] for n, prompt in enumerate(prompts)]
    bits, _, cache = run("wide", make_cache("wide"), prompts, range(5), drafter=wrong)
    assert bits == cold
    assert run("wide", cache, prompts[::-1], range(5)[::-1], drafter=right)[0] == cold[::-1]


@pytest.mark.slow
def test_a_rollout_is_the_same_bits_warm_and_cold_and_in_other_rows():
    model, rng = model_of("wide"), np.random.default_rng(2)
    prompts, lengths = rng.integers(0, 40, (3, 150)).astype(np.int32), np.array([150, 70, 131], np.int32)
    prompts[1, :100] = prompts[0, :100]

    @jax.jit
    def sample(cache, prompts, lengths, seeds):
        found, cache, _ = kvjax.rollout(
            model, cache, prompts, lengths, samples=2, max_new_tokens=NEW, seeds=seeds,
            scheduler=Scheduler(chunk=CHUNK, canonical=True),
        )  # fmt: skip
        return found, cache

    seeds, order = np.arange(6, dtype=np.uint32).reshape(3, 2), np.array([2, 0, 1])
    cold, cache = sample(make_cache("wide"), prompts, lengths, seeds)
    cache, _ = cache.admit(np.int32(0), np.zeros(4, np.int32), np.int32(4))  # somebody else has the first row
    warm, cache = sample(cache, prompts[order], lengths[order], seeds[order])
    assert warm.cached.sum() > cold.cached.sum()
    for name in ("tokens", "logprobs", "finish"):
        np.testing.assert_array_equal(getattr(warm, name), getattr(cold, name)[order])
