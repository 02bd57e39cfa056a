# SPDX-License-Identifier: Apache-2.0
"""Models and caches of all kinds, random prompts with shared prefixes, and the bits of their outputs."""

import functools

import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.serving import Sampling, Scheduler
from models import Decoder, LayerConfig, ModelConfig, load
from tests import drive
from tests.serving_kit import empty

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
    "kind",
    [kind if kind == "wide" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)


@functools.cache
def model_of(kind):
    if kind == "wide":
        return Decoder(WIDE, rngs=nnx.Rngs(0))
    return load(f"tests/data/goldens/{KINDS[kind][0]}")[0]


def make_cache(kind):
    """An empty cache, full of NaN, with a few blocks less than all the tests' prompts need."""
    options = {"num_blocks": BLOCKS, "max_seqs": ROWS, "max_length": LENGTH, "block_size": SIZE, "dtype": "float32"}
    spec = kvjax.make_spec(model_of(kind).layer_specs(), **options | KINDS[kind][1])
    return empty(spec)


def run(kind, cache, prompts, seeds, **options):
    """The bits of each output, the number of cached prompt tokens of each, and the cache."""
    options = {"scheduler": Scheduler(chunk=CHUNK), "canonical": True, **options}
    outputs, cache, _ = drive.run_batch(
        model_of(kind), cache, prompts, max_new_tokens=NEW, sampling=Sampling(temperature=1.0), seed=seeds,
        top_logprobs=model_of(kind).config.vocab_size, log_events=False, **options,
    )  # fmt: skip
    assert not any(output.preemptions for output in outputs)
    bits = [(tuple(o.tokens), np.asarray(o.logprobs, np.float32).tobytes(), str(o.top_logprobs)) for o in outputs]
    return bits, [output.cached_tokens for output in outputs], cache


def make_prompts(kind, rng):
    """Prompts with shared prefixes of all lengths, and the output of a prompt followed by something else."""
    base = rng.integers(0, 40, LENGTH)
    prompts = []
    for _ in range(8):
        length, shared = rng.integers(1, LENGTH - NEW), rng.integers(0, LENGTH)
        prompts.append([*base[:shared], *rng.integers(0, 40, LENGTH)][:length])
    prompts = [[int(token) for token in prompt] for prompt in prompts]
    first = base[:50].tolist()
    (tokens, *_), *_ = run(kind, make_cache(kind), [first], [0])[0]
    return [first, [*first, *tokens, *prompts[0][:30]], *prompts]
