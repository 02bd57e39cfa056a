# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a training step, against a sampler with dense K/V for each sample, as training loops have them.

The dense sampler has buffers `[B * G, K, P + T, D]` and computes each prompt once for every sample of its group. If
google-tunix is installed, the baseline of the first two figures is its `vanilla` engine, with a Qwen3 of Tunix on both
sides, else it is the dense sampler. The model has 4 layers of width 256. All are greedy and have to choose the same
tokens. They take turns, and ratios are of CPU time, the median of several rounds. A training step is a rollout, `score`
and an update.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import kvjax
from benchmarks import common
from benchmarks.caches import random_prompts, spec_of
from benchmarks.common import Bar, Program, benchmark
from benchmarks.decode_loop import contiguous_step
from kvjax.serving import Scheduler
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder
from pallas_kernels.rotary import rotate

BARS = {
    "group_x": Bar("speed of 8 samples, prompt of 512 tokens, 64 new ones, to the baseline", at_least=3.5),
    "decode_x": Bar("speed of 8 samples, prompt of 64 tokens, 192 new ones, to the baseline", at_least=1),
    "group_dense_x": Bar("speed of 8 samples, prompt of 512 tokens, 64 new ones, to the dense sampler"),
    "decode_dense_x": Bar("speed of 8 samples, prompt of 64 tokens, 192 new ones, to the dense sampler"),
    "score_x": Bar("speed of `score`, 8 completions of 64 tokens after 1,024, to a dense pass", at_least=4),
    "canonical_x": Bar("time of 8 samples, prompt of 512 tokens, `canonical=True`, to without", at_most=1.25),
    "canonical_short_x": Bar("time of 16 prompts of up to 64 tokens, `canonical=True`, to without", at_most=1.25),
    "slots_of_dense": Bar("K/V slots that are filled, to those of the dense buffers", at_most=0.25),
    "recompiles": Bar("programs that are compiled after the first training step", "", at_most=0),
}
NOTES = """
With Tunix 0.1.7 installed (`PYTHON=.venv-tunix/bin/python make bench-rollout`) the first figure was 4.3x to 4.7x in
several runs, and the second 1.2x to 1.5x. Without it the first was 3.1x to 3.4x, and missed its bar. Most of the
group's rollout is decode steps, which the dense sampler has too. Only a prompt's share of the time can be saved.
"""


class Shape(NamedTuple):
    """`samples` samples of each prompt of up to `prompt` tokens, with `new` tokens each."""

    samples: int = 8
    prompt: int = 512
    new: int = 64
    block_size: int = 16
    prompts: int = 1


def make_model(config: ModelConfig, shape: Shape) -> tuple[Decoder, np.ndarray, np.ndarray]:
    """Returns a model, and a prompt i32[1, P] with its length i32[1]."""
    prompt = random_prompts(config.vocab_size, (1, shape.prompt), shape.prompt)
    return Decoder(config, rngs=nnx.Rngs(0)), prompt, np.array([shape.prompt], np.int32)


def make_cache(model: Decoder, shape: Shape) -> kvjax.Cache:
    """A cache with blocks for all samples, and a row for each, but at most 8 rows."""
    blocks = -(-(shape.prompt + shape.new) // shape.block_size)
    completions = shape.samples * shape.prompts
    length = shape.prompt + shape.new
    num_blocks = (completions + 1) * blocks
    return kvjax.Cache.create(spec_of(model, min(completions, 8), length, num_blocks, shape.block_size))


def roll_out(model: Decoder, cache: kvjax.Cache, prompts: Any, lengths: Any, shape: Shape, **options: Any) -> Any:
    """`rollout` of all samples."""
    return kvjax.rollout(model, cache, prompts, lengths, samples=shape.samples, max_new_tokens=shape.new, **options)


class Prefill(NamedTuple):
    """Mixing of a layer of a whole prompt, in place of `models.attention.Dense`. It keeps K and V, with free space.

    Attributes:
      num_new: the number of tokens to reserve.
    """

    num_new: int

    def attend(self, cache, q, kv, angles, **_: Any):
        """Attends to the prompt. Returns the values, and the cache with K and V of this layer."""
        k = jnp.moveaxis(rotate(kv[0], angles), 1, 2)  # [R, K, P, D]
        v = jnp.moveaxis(kv[1], 1, 2)
        padded = [jnp.pad(x, ((0, 0), (0, 0), (0, self.num_new), (0, 0))) for x in (k, v)]
        return _causal(rotate(q, angles), k, v), (*cache, tuple(padded))


def dense_sampler(shape: Shape):
    """A jitted greedy sampler, (model, prompt i32[1, P]) -> i32[G, T], which shares nothing."""

    @jax.jit
    def sample(model: Decoder, prompt: jax.Array) -> jax.Array:
        tokens = jnp.broadcast_to(prompt, (shape.samples, shape.prompt))
        positions = jnp.broadcast_to(jnp.arange(shape.prompt)[None], tokens.shape)

        x, layers = model._stream(tokens, positions, lambda *_: Prefill(shape.new), (), shape.prompt + shape.new)
        first = jnp.argmax(model._logits(x[:, -1]), axis=-1).astype(jnp.int32)

        def step(carry, step_index):
            token, layers = carry
            logits, layers = contiguous_step(model, layers, token, jnp.full_like(token, shape.prompt) + step_index)
            new = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return (new, layers), token

        _, chosen = lax.scan(step, (first, layers), jnp.arange(shape.new, dtype=jnp.int32))
        return chosen.T

    return sample


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of q [R, P, Q, D] over k and v [R, K, P, D] of the same tokens."""
    rows, length, heads, width = q.shape
    q = (q * width**-0.5).reshape(rows, length, k.shape[1], -1, width)
    score = jnp.einsum("rtkgd,rksd->rkgts", q, k)
    seen = np.tri(length, dtype=bool)
    weight = jax.nn.softmax(jnp.where(seen[None, None, None], score, -jnp.inf), axis=-1)
    return jnp.einsum("rkgts,rksd->rtkgd", weight, v).reshape(rows, length, heads, width)


def compare_samplers(config: ModelConfig, shape: Shape, rounds: int) -> tuple[float, dict[str, float]]:
    """The dense sampler's time divided by ours, and seconds."""
    (model, prompt, lengths) = make_model(config, shape)
    dense = dense_sampler(shape)

    @functools.partial(jax.jit, donate_argnums=1)
    def paged(model: Decoder, cache: kvjax.Cache, prompt: jax.Array) -> jax.Array:
        rolled, cache, _ = roll_out(
            model, cache, prompt, lengths, shape, sampling=kvjax.Sampling(),
            scheduler=Scheduler(chunk=min(shape.prompt, 512)),
        )  # fmt: skip
        return rolled.tokens[0], cache

    programs: dict[str, Program] = {
        "dense": lambda: (dense(model, prompt), None),
        "paged": (lambda: make_cache(model, shape), lambda cache: paged(model, cache, prompt)),
    }
    took, _ = common.in_turns(programs, rounds, lambda result, expected: np.array_equal(result[0], expected[0]))
    return took["dense"].cpu / took["paged"].cpu, common.times(took, f"{shape.prompt}_s", "cpu")


def tunix_version() -> str | None:
    """The version of google-tunix, or None if it is not installed."""
    try:
        return metadata.version("google-tunix")
    except metadata.PackageNotFoundError:
        return None


# A tokenizer of texts that are numbers. Padding and ends are no tokens of the model.
NUMBERS = types.SimpleNamespace(
    encode=lambda text: [int(word) for word in text.split()],
    decode=lambda ids: " ".join(map(str, ids)),
    bos_id=lambda: 0, eos_id=lambda: -2, pad_id=lambda: -1,
)  # fmt: skip


def tunix_engines(config: ModelConfig, prompt: np.ndarray, samples: int, new: int, block_size: int) -> dict[str, Any]:
    """Programs of both engines: `samples` greedy completions i32[G, T] of a prompt i32[P].

    Each call of kvjax's engine is the first with its version of the weights, so it finds nothing and empties old
    blocks.
    """
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from models.tunix import KvjaxRollout

    layer = config.layers[0]
    length = prompt.size + new
    sizes = qwen3.ModelConfig(
        num_layers=len(config.layers), vocab_size=config.vocab_size, embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size, num_heads=config.num_heads, head_dim=layer.head_dim,
        num_kv_heads=layer.kv_heads, rope_theta=1_000_000, norm_eps=1e-6,
    )  # fmt: skip
    model = qwen3.Qwen3(sizes, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(nnx.state(model))
    leaves = [leaf + 0.02 * rng.normal(size=leaf.shape).astype(leaf.dtype) for leaf in leaves]
    nnx.update(model, jax.tree.unflatten(tree, leaves))
    rollout_config = RolloutConfig(new, top_p=None, max_prompt_length=prompt.size, kv_cache_size=length)
    cache_config = CacheConfig(length, len(config.layers), layer.kv_heads, layer.head_dim)
    vanilla = VanillaRollout(model, NUMBERS, cache_config)
    paged = KvjaxRollout(model, NUMBERS, rollout_config=rollout_config, block_size=block_size)
    texts = [" ".join(map(str, prompt.tolist()))] * samples

    def run(engine: Any) -> Callable[[Any], np.ndarray]:
        return lambda _: np.stack(engine.generate(texts, rollout_config).tokens)

    run(paged)(None)  # the program that empties old blocks is compiled by the second call
    return {"vanilla": (lambda: None, run(vanilla)), "engine": (paged.sampler.renew, run(paged))}


def compare_engines(config: ModelConfig, shape: Shape, rounds: int) -> tuple[float, dict[str, float]]:
    """The time of Tunix's vanilla engine divided by `KvjaxRollout`'s, each as a whole, and seconds."""
    prompt = make_model(config, shape)[1][0]
    programs = tunix_engines(config, prompt, shape.samples, shape.new, shape.block_size)
    took, _ = common.in_turns(programs, rounds, np.array_equal)
    return took["vanilla"].cpu / took["engine"].cpu, common.times(took, f"{shape.prompt}_s", "cpu")


def compare_slots(config: ModelConfig, shape: Shape) -> float:
    """Slots filled by samples at temperature 1, which differ, divided by the dense buffers' slots."""
    model, prompt, lengths = make_model(config, shape)
    _, cache, _ = roll_out(model, make_cache(model, shape), prompt, lengths, shape)
    return int(jnp.sum(cache.state.groups[0].blocks.fill)) / (shape.samples * (shape.prompt + shape.new))


def compare_scores(config: ModelConfig, shape: Shape, rounds: int) -> dict[str, float]:
    """Measures `score_x`: the time of a dense pass over whole rows divided by `score`'s."""
    model, prompt, lengths = make_model(config, shape)
    completions = random_prompts(config.vocab_size, (1, shape.samples, shape.new), 1)
    rows = np.concatenate([np.repeat(prompt, shape.samples, axis=0), completions[0]], axis=1)

    @jax.jit
    def dense(model: Decoder, rows: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(model.dense(rows, np.arange(shape.prompt - 1, rows.shape[1] - 1)), axis=-1)
        return jnp.take_along_axis(scores, rows[:, shape.prompt :, None], axis=-1)[:, :, 0]

    paged = jax.jit(functools.partial(kvjax.score, chunk=min(shape.prompt, 512)), donate_argnums=1)
    programs: dict[str, Program] = {
        "dense_score": lambda: [[dense(model, rows)]],
        "score": (lambda: make_cache(model, shape), lambda cache: paged(model, cache, prompt, completions, lengths)),
    }
    took, _ = common.in_turns(programs, rounds, lambda x, expected: np.allclose(x[0][0], expected[0][0], atol=1e-4))
    return {"score_x": took["dense_score"].cpu / took["score"].cpu, **common.times(took, "s", "cpu")}


def compare_canonical(config: ModelConfig, shape: Shape, rounds: int) -> float:
    """The time of rollouts with `canonical=True`, divided by the time without."""
    (model, *_) = make_model(config, shape)
    rng = np.random.default_rng(shape.prompts)
    prompts = rng.integers(0, config.vocab_size, (shape.prompts, shape.prompt)).astype(np.int32)
    shortest = shape.prompt if shape.prompts == 1 else -(-shape.prompt // 4)
    lengths = rng.integers(shortest, shape.prompt + 1, shape.prompts).astype(np.int32)

    def program(canonical: bool) -> Program:
        @jax.jit
        def sample(model: Decoder, cache: kvjax.Cache) -> jax.Array:
            rolled, _, _ = roll_out(
                model, cache, prompts, lengths, shape, sampling=kvjax.Sampling(),
                scheduler=Scheduler(chunk=min(shape.prompt, 128), canonical=canonical),
            )  # fmt: skip
            return rolled.tokens

        return lambda: make_cache(model, shape), lambda cache: sample(model, cache)

    took, _ = common.in_turns({"plain": program(False), "canonical": program(True)}, rounds, np.array_equal)
    return took["canonical"].cpu / took["plain"].cpu


def count_recompiles(config: ModelConfig, shape: Shape) -> int:
    """Programs compiled by training steps after the first. Each step has new weights, seeds and prompts."""
    model, prompts, lengths = make_model(config, shape)
    (graph, weights) = nnx.split(model)
    cache = make_cache(model, shape)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(weights: Any, cache: kvjax.Cache, prompt: jax.Array, version: jax.Array):
        options: Any = {"namespace": version}
        rolled, cache, _ = roll_out(nnx.merge(graph, weights), cache, prompt, lengths, shape, seed=version, **options)
        _, cache, _ = kvjax.score(nnx.merge(graph, weights), cache, prompt, rolled.tokens, lengths, **options)
        rows = jnp.concatenate([jnp.broadcast_to(prompt, (shape.samples, shape.prompt)), rolled.tokens[0]], axis=1)

        def loss(weights: Any) -> jax.Array:
            return -jnp.mean(jax.nn.log_softmax(nnx.merge(graph, weights).dense(rows))[..., 0])

        new = jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, jax.grad(loss)(weights))
        return new, cache

    for step_index in range(3):
        weights, cache = step(weights, cache, prompts + step_index % 2, np.int32(step_index))
    return step._cache_size() - 1


LARGE = ModelConfig("llama", 2048, 256, 768, 8, (LayerConfig(4, 32),) * 4)
SMALL = ModelConfig("llama", 64, 16, 32, 2, (LayerConfig(1, 8),) * 2)
SIZES = {
    "config": (LARGE, SMALL),
    "group": (Shape(), Shape(2, 16, 4, 4)),
    "decode": (Shape(prompt=64, new=192), Shape(2, 4, 8, 4)),
    "score": (Shape(prompt=1024), Shape(2, 16, 4, 4)),
    "short": (Shape(1, 64, prompts=16), Shape(1, 8, 4, 4, prompts=3)),
}


@benchmark(BARS, SIZES, rounds=(10, 1))
def measure(size):
    config = size.config
    rounds = size.rounds
    version = tunix_version()
    for name in ("group", "decode"):
        shape = getattr(size, name)
        ratio, seconds = compare_samplers(config, shape, rounds)
        yield {f"{name}_x": ratio, f"{name}_dense_x": ratio, **seconds}
        if version is not None:
            ratio, seconds = compare_engines(config, shape, rounds)
            yield {f"{name}_x": ratio, **seconds}
    dense_name = "the dense sampler of this benchmark"
    yield {"baseline": dense_name if version is None else f"the vanilla engine of google-tunix {version}"}
    yield compare_scores(config, size.score, rounds)
    yield {
        "canonical_x": compare_canonical(config, size.group, rounds),
        "canonical_short_x": compare_canonical(config, size.short, rounds),
        "slots_of_dense": compare_slots(config, size.group),
        "recompiles": count_recompiles(config, size.decode),
    }
