# SPDX-License-Identifier: Apache-2.0
"""A whole decode step on a GPU, for `benchmarks.kernels`: models of random weights in the engine's jitted loop.

The rows begin in the middle of their texts in a full pool, so each new block evicts another. A step is compared with a
copy on the device of the bytes it has to read: all weights once, and the K/V of all rows. Bookkeeping is the same loop
with a model which only reads the view.

The loop is also timed in single steps and in blocks of steps, with command buffers, where the device decides how it
goes on, and without. Each program runs several times from the same state, and has to choose the same tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from benchmarks import caches, common, gpu
from benchmarks.gpu import Record
from kvjax import serving
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder

CONFIGS = {
    "1b": ModelConfig("llama", 128_256, 2048, 8192, 32, (LayerConfig(8, 64),) * 16, tie_word_embeddings=True),
    "8b": ModelConfig("llama", 128_256, 4096, 14_336, 32, (LayerConfig(8, 128),) * 32),
    "tiny": ModelConfig("llama", 128, 32, 64, 4, (LayerConfig(2, 16),) * 2),
}
TOLERANCE = 0.05  # relative error of logits, bf16


class Size(NamedTuple):
    """Steps around a context of `context` tokens, and rounds."""

    context: int = 2048
    steps: int = 32
    rounds: int = 5


QUICK = Size(48, 8, 1)


def measure(record: Record, name: str, rows: int, quick: bool) -> None:
    """Measures a model with `rows` rows."""
    config = CONFIGS[name]
    size = QUICK if quick else Size()
    metric = f"step_{name}_b{rows}"
    error = compare_with_dense(dataclasses.replace(config, layers=config.layers[:2]))
    common.require(error <= TOLERANCE, f"the paged model's logits differ from the dense one's by {error}")
    model, state, pools = begin(config, rows, size)
    seconds, pools, _ = time_loop(model, state, pools, size)
    bookkeeping, *_ = time_loop(caches.reads_the_view, state, pools, size)

    record.add("kvjax", f"{metric}_us", 1e6 * seconds)
    record.add("kvjax", f"{metric}_tokens_s", rows / seconds)
    record.rate("kvjax", metric, (weight_bytes(model) + kv_bytes(config, rows, size)) / seconds, "copy_tb_s")
    record.add("kvjax", f"{metric}_bookkeeping_us", 1e6 * bookkeeping)
    record.add("kvjax", f"{metric}_bookkeeping_share", bookkeeping / seconds)


def weight_bytes(model: Decoder) -> int:
    """Bytes of weights read in a step: all but the embedding, unless it is the output matrix too."""

    def size(weights):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))

    return size(model) - (0 if model.config.tie_word_embeddings else size(model.embed_tokens))


def kv_bytes(config: ModelConfig, rows: int, size: Size) -> int:
    """Bytes of bfloat16 K/V read in a step."""
    return rows * size.context * sum(2 * 2 * layer.kv_heads * layer.head_dim for layer in config.layers)


def measure_loops(record: Record, name: str, rows: int, quick: bool) -> None:
    """Measures a model's loop by the number of steps in a block, and with and without command buffers."""
    size = QUICK if quick else Size()
    model, state, pools = begin(CONFIGS[name], rows, size)
    for k in (1, state.spec.block_size):
        tokens = {}
        for who, options in gpu.DECIDES.items():
            for kind, called in (("", model), ("_bookkeeping", caches.reads_the_view)):
                metric = f"loop_{name}_b{rows}_k{k}_{who}{kind}"
                seconds, pools, runs = time_loop(called, state, pools, size, k, options)
                common.require(bool(jnp.all(runs == runs[:1])), f"{metric}: two runs chose different tokens")
                record.add("kvjax", f"{metric}_us", 1e6 * seconds)
                tokens.setdefault(kind, []).append(runs[0])
        # Another compilation may have chosen other kernels for the products: that is no error.
        record.add("kvjax", f"loop_{name}_b{rows}_k{k}_same_tokens", float(jnp.mean(jnp.equal(*tokens[""]))))


def begin(config: ModelConfig, rows: int, size: Size) -> tuple[Decoder, kvjax.CacheState, kvjax.pools.Pools]:
    """A model of random weights, and `rows` rows in the middle of their texts."""
    model = random_model(config)
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=rows * -(-(size.context + size.steps) // 16), max_seqs=rows,
        max_length=size.context + size.steps,
    )  # fmt: skip
    state = rows_in_the_middle(spec, config.vocab_size, size.context - size.steps // 2)
    (group,) = spec.groups
    (pool,) = group.pools
    shape = group.num_blocks + 1, len(pool.layers), 2, pool.kv_heads, spec.block_size, pool.head_dim
    return model, state, kvjax.pools.Pools(((gpu.random_pool(shape, pool.dtype),),), spec)


def random_model(config: ModelConfig) -> Decoder:
    """A model with random weights. A program for each shape makes them on the device."""

    @functools.partial(jax.jit, static_argnums=1)
    def make(leaf_index, shape):
        return jax.random.normal(jax.random.fold_in(gpu.key(0), leaf_index), shape, jnp.bfloat16) * jnp.bfloat16(0.02)

    shapes = jax.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(shapes)
    arrays = [make(i, x.shape) if len(x.shape) > 1 else jnp.ones(x.shape, x.dtype) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, arrays)


def compare_with_dense(config: ModelConfig) -> float:
    """Relative error of logits after a prompt in a chunk and a decoded token, against a model without a cache."""
    model = random_model(config)
    length = 40
    tokens = jax.random.randint(gpu.key(1), (1, length + 1), 0, config.vocab_size, jnp.int32)
    pools = kvjax.init_pools(kvjax.make_spec(model.layer_specs(), num_blocks=3, max_seqs=1, max_length=48))
    paged = jax.jit(Decoder.__call__)
    logits = []
    for begin, end in ((0, length), (length, length + 1)):
        positions = jnp.arange(begin, end, dtype=jnp.int32)[None]
        count = jnp.full((1,), end - begin, jnp.int32)
        view = kvjax.pools.View((jnp.arange(3, dtype=jnp.int32)[None],), positions, count + begin, (positions,), count)
        new, pools = paged(model, tokens[:, begin:end], pools, view, last=count - 1)
        logits.append(new)
    wanted = jax.jit(Decoder.dense)(model, tokens, jnp.arange(length - 1, length + 1))
    return gpu.differs(jnp.stack(logits, axis=1), wanted)


def rows_in_the_middle(spec: kvjax.CacheSpec, vocabulary: int, length: int) -> kvjax.CacheState:
    """The state of a cache without empty blocks, in which each row holds `length` tokens."""
    rows = jnp.arange(spec.max_seqs, dtype=jnp.int32)
    old, new = jax.random.randint(gpu.key(2), (2, spec.max_seqs, spec.max_length), 0, vocabulary, jnp.int32)
    state, filled = caches.hold(kvjax.init(spec), old, jnp.full(rows.shape, spec.max_length))
    state, _ = jax.jit(kvjax.release, donate_argnums=0)(state, rows)
    common.require(bool(filled) and int(state.groups[0].num_empty) == 0, "the cache could not be filled")
    state, held = caches.hold(state, new, jnp.full(rows.shape, length))
    common.require(bool(held), "the rows could not be admitted")
    return state


def time_loop(
    model: Any, state: kvjax.CacheState, pools: kvjax.pools.Pools, size: Size, k: int | None = None,
    options: dict[str, str] | None = None,
) -> tuple[float, kvjax.pools.Pools, jax.Array]:  # fmt: skip
    """Times the decode loop from a state, in blocks of k steps, compiled with these options of XLA.

    Returns:
      Median seconds of a step, the donated pools, and the tokens of each run, i32[runs, S, steps].
    """
    spec = state.spec
    single = jnp.ones((spec.max_seqs,), jnp.int32)
    rows = serving.Rows(single, single > 0, single * (size.steps + 1), single.astype(jnp.uint32))
    loop = functools.partial(serving.decode, steps=size.steps, sampling=None, k=k)
    loop = jax.jit(loop, donate_argnames=("cache", "log"), compiler_options=options)
    times = []
    tokens = []
    for _ in range(size.rounds + 1):
        cache = kvjax.Cache(jax.tree.map(jnp.copy, state), pools)
        log = serving.decode_log(spec, size.steps)
        jax.block_until_ready((cache, log))
        began = time.perf_counter()
        cache, _, _, decoded = jax.block_until_ready(loop(model, cache, rows, log, stop=-single[:1]))
        times.append(time.perf_counter() - began)
        common.require(bool(jnp.all(decoded.tokens >= 0)), "the loop ended early")
        pools = cache.pools
        tokens.append(decoded.tokens)
    return statistics.median(times[1:]) / size.steps, pools, jnp.stack(tokens)
