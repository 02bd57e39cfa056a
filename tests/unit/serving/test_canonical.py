# SPDX-License-Identifier: Apache-2.0
"""With `canonical=True` a prompt's log-probabilities are the same bits, whatever is cached and whoever runs beside it.

The log-probabilities of the whole vocabulary are compared at each step, so a bit of a logit that differs is seen.
"""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.serving import Sampling, Scheduler
from models import Decoder, LayerConfig, ModelConfig, load
from tests.serving_kit import state_of

CHUNK, SIZE, ROWS, LENGTH, BLOCKS, NEW = 64, 16, 5, 192, 60, 20
# The golden model, and options of the cache. A wide model's matrix products differ by their number of rows.
WIDE = ModelConfig("llama", 64, 256, 512, 4, (LayerConfig(2, 64),) * 2)
KINDS = {
    "wide": ("", {}),
    "int8": ("llama", {"dtype": "int8"}),
    "windows": ("gemma3", {}),
    "sinks, experts": ("gpt_oss", {}),
    "recurrent": ("qwen3_next", {}),
    "latents": ("deepseek_v3", {}),
    "host": ("qwen3", {"num_blocks": 40, "num_host_blocks": 30}),
}
each_kind = pytest.mark.parametrize(
    "kind", ["wide", *[pytest.param(k, marks=pytest.mark.long) for k in list(KINDS)[1:]]]
)


@functools.cache
def model_of(kind):
    if kind == "wide":
        return Decoder(WIDE, rngs=nnx.Rngs(0))
    return load(f"tests/data/goldens/{KINDS[kind][0]}")[0]


def make_cache(kind):
    """An empty cache with a few blocks less than all the tests' prompts need."""
    options = {"num_blocks": BLOCKS, "max_seqs": ROWS, "max_length": LENGTH, "block_size": SIZE, "dtype": "float32"}
    spec = kvjax.make_spec(model_of(kind).layer_specs(), **options | KINDS[kind][1])
    return (kvjax.tiers.TieredCache if spec.has_host else kvjax.Cache).create(spec)


def run(kind, cache, prompts, seeds, **options):
    """The bits of each output, and how many prompt tokens were found for each; also the cache."""
    options = {"scheduler": Scheduler(chunk=CHUNK), "canonical": True, **options}
    outputs, cache, _ = kvjax.run_batch(
        model_of(kind), cache, prompts, max_new_tokens=NEW, sampling=Sampling(temperature=1.0), seeds=seeds,
        top_logprobs=model_of(kind).config.vocab_size, log_events=False, **options,
    )  # fmt: skip
    assert not any(output.preemptions for output in outputs)
    bits = [(tuple(o.tokens), np.asarray(o.logprobs, np.float32).tobytes(), str(o.top_logprobs)) for o in outputs]
    return bits, [output.cached_tokens for output in outputs], cache


def make_prompts(kind, rng):
    """Prompts that share prefixes of all lengths, and the output of one of them followed by something else."""
    base = rng.integers(0, 40, LENGTH)
    prompts = []
    for _ in range(8):
        length, shared = rng.integers(1, LENGTH - NEW), rng.integers(0, LENGTH)
        prompts.append([*base[:shared], *rng.integers(0, 40, LENGTH)][:length])
    prompts = [[int(token) for token in prompt] for prompt in prompts]
    first = base[:50].tolist()
    (tokens, *_), *_ = run(kind, make_cache(kind), [first], [0])[0]
    return [first, [*first, *tokens, *prompts[0][:30]], *prompts]


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


@each_kind
def test_cold_warm_and_among_others_a_prompt_gives_the_same_bits(kind):
    check(kind, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_so_do_many_random_prompts(kind):
    for seed in range(2, 22):
        check(kind, seed)


@pytest.mark.long
def test_a_rollout_is_the_same_bits_warm_and_cold_and_in_other_rows():
    model, rng = model_of("wide"), np.random.default_rng(2)
    prompts, lengths = rng.integers(0, 40, (3, 150)).astype(np.int32), np.array([150, 70, 131], np.int32)
    prompts[1, :100] = prompts[0, :100]

    @jax.jit
    def sample(cache, prompts, lengths, seeds):
        found, cache, _ = kvjax.rollout(
            model, cache, prompts, lengths, samples=2, max_new_tokens=NEW, seeds=seeds, canonical=True,
            scheduler=Scheduler(chunk=CHUNK),
        )  # fmt: skip
        return found, cache

    seeds, order = np.arange(6, dtype=np.uint32).reshape(3, 2), np.array([2, 0, 1])
    cold, cache = sample(make_cache("wide"), prompts, lengths, seeds)
    cache, _ = cache.admit(np.int32(0), np.zeros(4, np.int32), np.int32(4))  # somebody else has the first row
    warm, cache = sample(cache, prompts[order], lengths[order], seeds[order])
    assert warm.cached.sum() > cold.cached.sum()
    for name in ("tokens", "logprobs", "finish"):
        np.testing.assert_array_equal(getattr(warm, name), getattr(cold, name)[order])
