# SPDX-License-Identifier: Apache-2.0
"""Decoders of bonsai's form over the pools: equal logits, weights that change, and what is refused.

Those of Tunix are in `test_tunix.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from models.paged_decoders import paged
from tests.models import bonsai

LENGTH, CHUNK = 11, 4
TOKENS = np.random.default_rng(0).integers(0, bonsai.VOCAB, (2, LENGTH)).astype(np.int32)
step, admit = jax.jit(kvjax.step, static_argnames="logits"), jax.jit(kvjax.Cache.admit)


@pytest.fixture(autouse=True)
def as_flax_promotes():
    """Flax and bonsai rely on promotion of ranks and types."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def make(seed):
    """A decoder with random weights; in a program, since one operation after the other compiles long."""
    graph, _ = nnx.split(nnx.eval_shape(bonsai.Decoder))
    return nnx.merge(graph, jax.jit(lambda: nnx.state(bonsai.Decoder(seed)))())


@nnx.jit
def dense(module, tokens):
    """The logits f32[B, T, V] of the module itself."""
    return module(tokens, cache=bonsai.make_cache(*tokens.shape), segment_ids=jnp.ones_like(tokens))


def by_chunks(model):
    """The same of both rows in chunks, and those of the last tokens alone."""
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=8, max_seqs=2, max_length=16, block_size=4, dtype=model.dtype
    )  # fmt: skip
    cache, _ = admit(kvjax.Cache.create(spec), np.arange(2, dtype=np.int32), TOKENS, np.full(2, LENGTH, np.int32))
    found, last = [], None
    for begin in range(0, LENGTH, CHUNK):
        chunk = TOKENS[:, begin : begin + CHUNK]
        count = np.full(2, chunk.shape[1], np.int32)
        chunk = np.pad(chunk, ((0, 0), (0, CHUNK - chunk.shape[1])))
        _, last, _ = step(model, cache, chunk, count)
        cache, logits, _ = step(model, cache, chunk, count, logits="all")
        found.append(np.asarray(logits)[:, : count[0]])
    return np.concatenate(found, axis=1), last


@pytest.mark.long
def test_logits_are_the_modules_own_and_new_weights_compile_nothing():
    module, other = make(0), make(1)
    model = paged(module)
    assert model.layer_specs() == [kvjax.LayerSpec(bonsai.KV_HEADS, bonsai.WIDTH)] * bonsai.LAYERS
    assert model.dtype == jnp.float32
    programs = []
    for weights in (module, other):
        found, last = by_chunks(model.with_weights(weights))
        np.testing.assert_allclose(found, dense(weights, TOKENS), atol=1e-4)
        np.testing.assert_allclose(last, found[:, -1], atol=1e-5)
        programs.append(step._cache_size())
    assert programs[0] == programs[1]
    assert all(type(layer.attn) is bonsai.Attention for layer in module.layers)
    assert type(module.final_norm) is nnx.RMSNorm


@pytest.mark.long
def test_a_flat_batch():
    """A ragged view of both rows, with the logits of two positions."""
    module = make(0)
    model = paged(module)
    spec = kvjax.make_spec(model.layer_specs(), num_blocks=8, max_seqs=2, max_length=16, block_size=4, dtype="float32")
    lengths = np.array([LENGTH, 5], np.int32)
    cache, _ = admit(kvjax.Cache.create(spec), np.arange(2, dtype=np.int32), TOKENS, lengths)
    flat = np.concatenate([TOKENS[0], TOKENS[1, :5], [0, 0]]).astype(np.int32)[None]
    last = np.array([LENGTH - 1, LENGTH + 4], np.int32)

    @jax.jit
    def flat_step(model, cache):
        return model(flat, cache.pools, cache.ragged(lengths, flat.shape[1]), last=last)[0]

    logits = flat_step(model, cache)
    wanted = dense(module, TOKENS)[np.arange(2), lengths - 1]
    np.testing.assert_allclose(logits, wanted, atol=1e-4)


def changed(**parts):
    """A decoder whose first attention, or which itself, lacks a part (None), or has another."""
    module = bonsai.Decoder()
    for name, part in parts.items():
        owner = module if hasattr(module, name) else module.layers[0].attn
        if part is None:
            delattr(owner, name)
        else:
            setattr(owner, name, part)
    return module


class Bare(bonsai.Decoder):
    def __call__(self, tokens):
        return tokens


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "module: got a Linear, wanted a decoder with `layers`"),
        (lambda: changed(final_norm=None), "module: got a Decoder, wanted a decoder with `layers` and `final_norm`"),
        (Bare, r"module: got a Bare that is called with \['tokens'\], wanted"),
        (
            lambda: changed(q_proj=None),
            r"module.layers\[0\].attn: got a Attention with \['k_norm', .*, wanted \['k_proj'",
        ),
        (
            lambda: changed(q_bias=nnx.Param(jnp.zeros(3)), soft_cap=5.0),
            r"module.layers\[0\].attn: got a Attention with \['q_bias', 'soft_cap'\], wanted one without them",
        ),
        (lambda: changed(layers=nnx.List([nnx.List([])])), r"module.layers\[0\]: got a List, wanted one with `attn`"),
    ],
)
def test_refused_modules(make, message):
    with pytest.raises(ValueError, match=message):
        paged(make())


def test_weights_of_another_structure():
    with pytest.raises(ValueError, match="module: got a Decoder of another structure"):
        paged(bonsai.Decoder()).with_weights(changed(q_bias=nnx.Param(jnp.zeros(3))))
