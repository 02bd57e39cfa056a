# SPDX-License-Identifier: Apache-2.0
"""With `canonical=True` a prompt's log-probabilities are the same bits, whatever is cached and whoever runs beside it.

The log-probabilities of the whole vocabulary are compared at each step, so a bit of a logit that differs is seen.
"""

import functools

import numpy as np
import pytest

import kvjax
from kvjax.serving import Sampling, Scheduler
from models import load
from tests.serving_kit import state_of

CHUNK, SIZE, ROWS, LENGTH, BLOCKS, NEW = 16, 8, 5, 96, 60, 6
# The golden model, and options of the cache.
KINDS = {
    "plain": ("qwen3", {}),
    "int8": ("llama", {"dtype": "int8"}),
    "windows": ("gemma3", {}),
    "sinks, experts": ("gpt_oss", {}),
    "recurrent": ("qwen3_next", {}),
    "latents": ("deepseek_v3", {}),
    "host": ("qwen3", {"num_host_blocks": 30}),
}
each_kind = pytest.mark.parametrize(
    "kind", ["plain", *[pytest.param(k, marks=pytest.mark.long) for k in list(KINDS)[1:]]]
)


@functools.cache
def model_of(kind):
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
        top_logprobs=8, log_events=False, **options,
    )  # fmt: skip
    assert not any(output.preemptions for output in outputs)
    bits = [(tuple(o.tokens), np.asarray(o.logprobs, np.float32).tobytes(), str(o.top_logprobs)) for o in outputs]
    return bits, [output.cached_tokens for output in outputs], cache


def texts(rng):
    """Prompts that share prefixes of all lengths."""
    base = rng.integers(0, 40, LENGTH)
    prompts = []
    for _ in range(8):
        length, shared = rng.integers(1, LENGTH - NEW), rng.integers(0, LENGTH)
        prompts.append([*base[:shared], *rng.integers(0, 40, LENGTH)][:length])
    return [[int(token) for token in prompt] for prompt in prompts]


@each_kind
def test_cold_warm_and_among_others_a_prompt_gives_the_same_bits(kind):
    rng, found = np.random.default_rng(1), 0
    prompts = texts(rng)
    cold = [run(kind, make_cache(kind), [prompt], [number])[0][0] for number, prompt in enumerate(prompts)]
    cache = make_cache(kind)
    for _ in range(4):
        chosen = rng.permutation(len(prompts))[: rng.integers(1, len(prompts) + 1)].tolist()
        bits, cached, cache = run(kind, cache, [prompts[n] for n in chosen], chosen)
        assert bits == [cold[n] for n in chosen]
        found += sum(cached)
        assert all(tokens % CHUNK == 0 for tokens in cached)
    assert found > 0
    kvjax.check(state_of(cache), rows=())
