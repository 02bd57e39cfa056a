# SPDX-License-Identifier: Apache-2.0
"""Decode that reads a quarter of the cache through `select_blocks`, against decode that reads all of it.

Each layer chooses other blocks of each row, at random: 64 of 256. First attention alone, with the choice of blocks.
Then a whole decode step of a model: `extend`, the model in a context of `sparse_attention`, `commit`. Attention over
the chosen blocks is compared with a masked softmax over contiguous K/V before anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from benchmarks import caches, common
from benchmarks.attention import Shape, attend_contiguous, close, make_case
from benchmarks.common import Bar, benchmark
from kvjax.pools import select_blocks, sparse_attention
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder

SHAPE = Shape(8, 4096, 8, 4, 64, 4)
BARS = {
    "attention_quarter_over_full": Bar("attention over a quarter of 4,096 tokens, to all of them", at_most=0.35),
    "step_quarter_over_full": Bar("a decode step that reads a quarter of 4,096 tokens, to all of them", at_most=0.5),
    "step_full_ms": Bar("a decode step of 8 rows of 4,096 tokens, 4 layers", "ms"),
}
NOTES = """
The model of the step has 8 rows and 8 / 4 heads of 64 in 4 layers, and its weights are read once for all rows: K/V are
most of the bytes of a step. A single row with a large model gains less.
"""


def attention(q, pools, view, columns=None):
    """All layers, each on the output of the one before, over the blocks columns bool[L, R, M]."""
    for layer in range(len(pools.spec.groups[0].pools[0].layers)):
        seen = view if columns is None else select_blocks(view, columns[layer])
        q = q + kvjax.attend(q, pools, layer, seen)
    return q


def masked(q, layers, columns, block_size):
    """The same over contiguous K/V, where the tokens of other blocks have no weight."""
    for (k, v), chosen in zip(layers, columns, strict=True):
        chosen = chosen.at[:, -1].set(True)  # the token's own block
        order = jnp.argsort(jnp.repeat(~chosen, block_size, axis=1), axis=1, stable=True)[:, None, :, None]
        k, v = (jnp.take_along_axis(x, order, axis=2) for x in (k, v))
        q = q + attend_contiguous(q, k, v, jnp.sum(chosen, axis=1) * block_size, "q")
    return q


def choose(shape: Shape, share: float = 0.25) -> jax.Array:
    """Columns bool[L, R, M], a share of each row's."""
    num_columns = shape.length // shape.block_size
    noise = np.random.default_rng(1).random((shape.layers, shape.rows, num_columns))
    return jnp.asarray(np.argsort(np.argsort(noise, axis=-1), axis=-1) < share * num_columns)


def measure_attention(shape: Shape, rounds: int) -> dict[str, float]:
    q, pools, view, layers = make_case(shape)
    pools = pools.replace(spec=dataclasses.replace(pools.spec, sparse=True))
    view = view.replace(spec=pools.spec)
    columns = choose(shape)
    run = jax.jit(attention)
    wanted = jax.jit(functools.partial(masked, block_size=shape.block_size))(q, layers, columns)
    common.require(close(run(q, pools, view, columns), wanted), "attention over chosen blocks differs from a mask")
    programs = {
        "full": functools.partial(run, q, pools, view),
        "quarter": functools.partial(run, q, pools, view, columns),
    }
    took, _ = common.in_turns(programs, rounds)
    return {
        **{f"attention_{name}_ms": 1e3 * each.least for name, each in took.items()},
        "attention_quarter_over_full": took["quarter"].least / took["full"].least,
    }


def step(model: Decoder, cache: kvjax.Cache, tokens: jax.Array, columns: jax.Array | None):
    """One token i32[S, 1] of every row: logits f32[S, V]."""

    def chosen(q, pools, layer, view, **options):
        return view if columns is None else select_blocks(view, columns[layer])

    ones = jnp.ones(tokens.shape[:1], jnp.int32)
    cache, _ = cache.extend(ones > 0)
    with sparse_attention(chosen):
        cache, logits, _ = kvjax.step(model, cache, tokens, ones)
    return cache, logits


def measure_step(shape: Shape, rounds: int) -> dict[str, float]:
    hidden = shape.heads * shape.width
    layers = (LayerConfig(shape.kv_heads, shape.width),) * shape.layers
    model = Decoder(ModelConfig("llama", 1024, hidden, 2 * hidden, shape.heads, layers), rngs=nnx.Rngs(0))
    spec = caches.spec_of(model, shape.rows, shape.length + rounds + 2)
    cache = kvjax.Cache.create(dataclasses.replace(spec, sparse=True))
    admit = jax.jit(kvjax.Cache.admit, donate_argnums=0, static_argnames="length")
    for row in range(shape.rows):
        prompt = np.arange(shape.length, dtype=np.int32) + row
        cache, _ = admit(cache, row, prompt, length=shape.length)
    texts = np.arange(shape.length, dtype=np.int32)[None] + np.arange(shape.rows, dtype=np.int32)[:, None]
    cache, _ = jax.jit(kvjax.Cache.commit, donate_argnums=0)(cache, texts, np.full(shape.rows, shape.length))
    num_columns = cache.state.spec.max_blocks_per_seq
    columns = jnp.pad(choose(shape), [(0, 0), (0, 0), (0, num_columns - shape.length // shape.block_size)])
    tokens = jnp.zeros((shape.rows, 1), jnp.int32)
    run = jax.jit(step, donate_argnums=1)
    caches_of: dict[str, Any] = {"full": cache, "quarter": jax.tree.map(jnp.copy, cache)}

    def advance(name: str, columns: Any):
        caches_of[name], logits = run(model, caches_of[name], tokens, columns)
        return logits

    programs = {
        "full": functools.partial(advance, "full", None),
        "quarter": functools.partial(advance, "quarter", columns),
    }
    took, logits = common.in_turns(programs, rounds)
    common.require(bool(np.isfinite(logits["quarter"]).all()), "a step over chosen blocks is not finite")
    return {
        **{f"step_{name}_ms": 1e3 * each.least for name, each in took.items()},
        "step_quarter_over_full": took["quarter"].least / took["full"].least,
    }


@benchmark(BARS, {"shape": (SHAPE, Shape(2, 64, 4, 2, 16, 2))}, rounds=(20, 1))
def measure(size):
    yield measure_attention(size.shape, size.rounds)
    yield measure_step(size.shape, size.rounds)
