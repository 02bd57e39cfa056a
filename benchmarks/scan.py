# SPDX-License-Identifier: Apache-2.0
"""Compile time saved by scanning the layers of a decoder, and its cost at run time.

A decode step (`extend` by a token, the model, `commit`) is compiled for models of 4 and of 32 equal layers, unrolled
and scanned. The figures are seconds of tracing, lowering and compiling, without any cache of programs. The scanned step
may not copy a pool, and its temporaries may exceed the unrolled step's by the weights of a layer, since XLA copies each
layer's weights out of the stack. Then both steps of 32 layers run in turns over the same K/V, 16 rows of 256 tokens.
Their logits have to agree. A missed bar ends the benchmark.
"""

import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from benchmarks import caches, common
from benchmarks.common import Bar, Size, benchmark
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder, scanned

BARS = {
    "scanned_compile_32_s": Bar("to compile a step of 32 layers, scanned", "s"),
    "unrolled_compile_32_s": Bar("to compile a step of 32 layers, unrolled", "s"),
    "scanned_compile_ratio": Bar("to compile 32 layers, to 4 layers, scanned", at_most=1.5),
    "unrolled_compile_ratio": Bar("to compile 32 layers, to 4 layers, unrolled"),
    "scanned_temporaries_mb": Bar("temporaries of a step, scanned", "MB"),
    "unrolled_temporaries_mb": Bar("temporaries of a step, unrolled", "MB"),
    "more_temporaries_of_a_layer": Bar("more temporaries when scanned, to the weights of a layer", at_most=1),
    "scanned_step_ms": Bar("a step of 32 layers, scanned", "ms"),
    "unrolled_step_ms": Bar("a step of 32 layers, unrolled", "ms"),
}
NOTES = """
Times of the steps have no bar: they varied from run to run by more than they differ. A wide model runs slower when it
is scanned, as one of 109M parameters did (`--hidden 512`).
"""
TOLERANCE = 1e-3


def config_of(num_layers: int, size: Size) -> ModelConfig:
    """A model with 8 query heads and 4 K/V heads."""
    return ModelConfig("llama", 8192, size.hidden, 3 * size.hidden, 8, (LayerConfig(4, size.hidden // 8),) * num_layers)


def spec_of(model: Decoder, size: Size) -> kvjax.CacheSpec:
    return caches.spec_of(model, size.rows, size.context + size.rounds + 2)


def step(model: Decoder, cache: kvjax.Cache, tokens: jax.Array):
    """Computes a token i32[S, 1] of every row. Returns logits f32[S, V], and whether the cache did all of it."""
    cache, extended = cache.extend(jnp.ones(tokens.shape[:1], jnp.bool_))
    cache, logits, committed = kvjax.step(model, cache, tokens, jnp.ones(tokens.shape[:1], jnp.int32))
    return cache, logits, extended.ok & committed.ok


def compile_steps(scan: bool, size: Size) -> tuple[dict[int, float], Any]:
    """Minimum seconds to compile a step by number of layers, in turns, and the larger model's program."""
    least = {}
    compiled = None
    for layers in (size.few, size.many) * size.compiles:
        config = config_of(layers, size)
        model = nnx.eval_shape(lambda config=config: Decoder(config, scan=scan, rngs=nnx.Rngs(0)))
        cache = jax.eval_shape(functools.partial(kvjax.Cache.create, spec_of(model, size)))
        tokens = jax.ShapeDtypeStruct((size.rows, 1), jnp.int32)
        jax.clear_caches()  # else what was traced for one model would be there for the next
        began = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=1).lower(model, cache, tokens).compile()
        least[layers] = min(least.get(layers, float("inf")), time.perf_counter() - began)
    return least, compiled


def compare_programs(unrolled: Any, scan: Any, size: Size) -> dict[str, float]:
    """The temporaries of both steps. Ends the benchmark if the scanned step copies a pool."""
    model = nnx.eval_shape(lambda: Decoder(config_of(size.many, size), rngs=nnx.Rngs(0)))
    pools = jax.eval_shape(lambda: kvjax.init_pools(spec_of(model, size)))
    shape = ",".join(map(str, pools.arrays[0][0].shape))
    copies = len(re.findall(rf"\w+\[{shape}\]\S* copy(?:-start)?\(", scan.as_text()))
    common.require(copies == 0, f"the scanned step copies a pool {copies} times")
    before, after = (program.memory_analysis().temp_size_in_bytes for program in (unrolled, scan))
    layer = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model.layers[0]))
    return {
        "unrolled_temporaries_mb": before / 1e6,
        "scanned_temporaries_mb": after / 1e6,
        "more_temporaries_of_a_layer": (after - before) / layer,
    }


def make_cache(model: Decoder, size: Size) -> kvjax.Cache:
    """Rows of random K/V."""
    spec = spec_of(model, size)
    tokens = caches.random_prompts(8192, (size.rows, size.context))
    state, ok = caches.hold(kvjax.init(spec), jnp.asarray(tokens), jnp.full((size.rows,), size.context, jnp.int32))
    common.require(bool(ok), "the rows could not be admitted")
    pools = kvjax.init_pools(spec)
    (pool,) = jax.tree.leaves(pools)
    return kvjax.Cache(state, pools.with_pool(0, 0, jax.random.normal(jax.random.key(1), pool.shape, pool.dtype)))


def time_steps(programs: dict[str, Any], size: Size) -> dict[str, float]:
    """Minimum seconds of a step of each program, in turns. Ends the benchmark if their logits differ."""
    model = Decoder(config_of(size.many, size), rngs=nnx.Rngs(0))
    models = {"unrolled": model, "scanned": scanned(model)}
    held = {name: make_cache(model, size) for name in programs}
    tokens = jnp.zeros((size.rows, 1), jnp.int32)

    def run(name: str) -> jax.Array:
        held[name], logits, ok = programs[name](models[name], held[name], tokens)
        common.require(bool(ok), "the cache refused a step")
        return logits

    close = functools.partial(jnp.allclose, rtol=TOLERANCE, atol=TOLERANCE)
    took, _ = common.in_turns({name: functools.partial(run, name) for name in programs}, size.rounds, close)
    return {name: timing.least for name, timing in took.items()}


SIZES = {
    "few": (4, 2), "many": (32, 4), "hidden": (256, 32), "rows": (16, 2), "context": (256, 16), "compiles": (2, 1),
}  # fmt: skip


@benchmark(BARS, SIZES, rounds=(20, 1), strict=True)
def measure(size):
    jax.config.update("jax_enable_compilation_cache", False)
    programs = {}
    for name, scan in (("scanned", True), ("unrolled", False)):
        seconds, programs[name] = compile_steps(scan, size)
        yield {f"{name}_compile_{layers}_s": seconds[layers] for layers in seconds}
        yield {f"{name}_compile_ratio": seconds[size.many] / seconds[size.few]}
    yield compare_programs(programs["unrolled"], programs["scanned"], size)
    least = time_steps(programs, size)
    yield {f"{name}_step_ms": 1e3 * seconds for name, seconds in least.items()}
    yield {"step_ratio": least["scanned"] / least["unrolled"]}
