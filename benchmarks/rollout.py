# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a training step, to a sampler that keeps dense K/V for each sample, as training loops have them.

The dense sampler has buffers `[B * G, K, P + T, D]` and computes each prompt once for every sample of its group. Where
google-tunix is installed, the baseline of the first two figures is its own `vanilla` engine, with a Qwen3 of Tunix in
both; else it is the dense sampler. The model has 4 layers of width 256. All are greedy and must choose the same tokens.
They take turns; ratios are of CPU time, the median of several rounds. A training step is a rollout, `score` and an
update.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import kvjax
from benchmarks import common, tunix_engines
from benchmarks.common import Bar
from benchmarks.contiguous import contiguous_step
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
several runs, and the second 1.2x to 1.5x. Without it the first was 3.1x to 3.4x, which misses the bar: most of the
group's rollout is decode steps, which the dense sampler has too. A prompt's share of the time is all that can be saved.
"""


class Size(NamedTuple):
    """G samples of prompts of up to so many tokens, `new` tokens each."""

    samples: int = 8
    prompt: int = 512
    new: int = 64
    block_size: int = 16
    prompts: int = 1

    @property
    def slots(self) -> int:
        """Token slots of the dense buffers."""
        return self.samples * (self.prompt + self.new)


class Case(NamedTuple):
    group: Size = Size()
    decode: Size = Size(prompt=64, new=192)
    score: Size = Size(prompt=1024)
    short: Size = Size(1, 64, prompts=16)
    config: ModelConfig = ModelConfig("llama", 2048, 256, 768, 8, (LayerConfig(4, 32),) * 4)
    rounds: int = 10


QUICK = Case(
    Size(2, 16, 4, 4), Size(2, 4, 8, 4), Size(2, 16, 4, 4), Size(1, 8, 4, 4, prompts=3),
    ModelConfig("llama", 64, 16, 32, 2, (LayerConfig(1, 8),) * 2), rounds=1,
)  # fmt: skip


def make_model(case: Case) -> Decoder:
    return Decoder(case.config, rngs=nnx.Rngs(0))


def make_prompt(case: Case, size: Size) -> np.ndarray:
    """i32[1, P]."""
    return np.random.default_rng(size.prompt).integers(0, case.config.vocab_size, (1, size.prompt)).astype(np.int32)


def make_cache(model: Decoder, size: Size) -> kvjax.Cache:
    """A cache with a row for each sample, 8 at most, and blocks for all."""
    blocks, completions = -(-(size.prompt + size.new) // size.block_size), size.samples * size.prompts
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=(completions + 1) * blocks, max_seqs=min(completions, 8),
        max_length=size.prompt + size.new, block_size=size.block_size, dtype="float32",
    )  # fmt: skip
    return kvjax.Cache.create(spec)


def dense_sampler(size: Size):
    """A jitted greedy sampler, (model, prompt i32[1, P]) -> i32[G, T], that knows no sharing."""

    @jax.jit
    def sample(model: Decoder, prompt: jax.Array) -> jax.Array:
        tokens = jnp.broadcast_to(prompt, (size.samples, size.prompt))
        positions = jnp.broadcast_to(jnp.arange(size.prompt)[None], tokens.shape)

        def prefill(number, _, layers, q, kv, angles):
            k, v = (jnp.moveaxis(x, 1, 2) for x in (rotate(kv[0], angles), kv[1]))  # [R, K, P, D]
            padded = [jnp.pad(x, ((0, 0), (0, 0), (0, size.new), (0, 0))) for x in (k, v)]
            return _causal(rotate(q, angles), k, v), (*layers, tuple(padded))

        x, layers = model._stream(tokens, positions, prefill, ())
        first = jnp.argmax(model._logits(x[:, -1]), axis=-1).astype(jnp.int32)

        def step(carry, number):
            token, layers = carry
            logits, layers = contiguous_step(model, layers, token, jnp.full_like(token, size.prompt) + number)
            new = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return (new, layers), token

        _, chosen = lax.scan(step, (first, layers), jnp.arange(size.new, dtype=jnp.int32))
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


def paged_sampler(size: Size):
    """The same by `rollout`, (model, cache, prompt) -> (tokens i32[G, T], cache)."""
    scheduler = Scheduler(chunk=min(size.prompt, 512))

    def sample(model: Decoder, cache: kvjax.Cache, prompt: jax.Array) -> tuple[jax.Array, kvjax.Cache]:
        found, cache, _ = kvjax.rollout(
            model, cache, prompt, np.array([size.prompt], np.int32), samples=size.samples, max_new_tokens=size.new,
            sampling=kvjax.Sampling(), scheduler=scheduler,
        )  # fmt: skip
        return found.tokens[0], cache

    return jax.jit(sample, donate_argnums=1)


def compare_samplers(case: Case, size: Size) -> tuple[float, dict[str, float]]:
    """How many times longer the dense sampler takes; and seconds."""
    model, prompt = make_model(case), make_prompt(case, size)
    dense, paged = dense_sampler(size), paged_sampler(size)
    programs: Any = {
        "dense": (lambda: None, lambda _: dense(model, prompt)),
        "paged": (lambda: make_cache(model, size), lambda cache: paged(model, cache, prompt)),
    }
    took, results = common.in_turns(programs, case.rounds)
    common.require(np.array_equal(results["paged"][0], results["dense"]), "the samplers chose other tokens")
    seconds = {f"{name}_{size.prompt}_s": one.cpu for name, one in took.items()}
    return took["dense"].cpu / took["paged"].cpu, seconds


def compare_engines(case: Case, size: Size) -> tuple[float, dict[str, float]]:
    """How many times longer Tunix' vanilla engine takes than `KvjaxRollout`, all that they do included; and seconds."""
    prompt = make_prompt(case, size)[0]
    programs = tunix_engines.engines(case.config, prompt, size.samples, size.new, size.block_size)
    took, results = common.in_turns(programs, case.rounds)
    common.require(np.array_equal(*results.values()), "the engines chose other tokens")
    return took["vanilla"].cpu / took["engine"].cpu, {f"{name}_{size.prompt}_s": one.cpu for name, one in took.items()}


def compare_slots(case: Case, size: Size) -> float:
    """Slots that samples at temperature 1 fill, which differ, in terms of the dense buffers' slots."""
    model = make_model(case)
    _, cache, _ = kvjax.rollout(
        model, make_cache(model, size), make_prompt(case, size), np.array([size.prompt], np.int32),
        samples=size.samples, max_new_tokens=size.new,
    )  # fmt: skip
    return int(jnp.sum(cache.state.groups[0].blocks.fill)) / size.slots


def compare_scores(case: Case) -> tuple[float, dict[str, float]]:
    """How many times longer a dense pass over whole rows takes than `score`; and seconds."""
    size, model = case.score, make_model(case)
    prompt = make_prompt(case, size)
    completions = np.random.default_rng(1).integers(0, case.config.vocab_size, (1, size.samples, size.new))
    completions = completions.astype(np.int32)
    rows = np.concatenate([np.repeat(prompt, size.samples, axis=0), completions[0]], axis=1)

    @jax.jit
    def dense(model: Decoder, rows: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(model.dense(rows, np.arange(size.prompt - 1, rows.shape[1] - 1)), axis=-1)
        return jnp.take_along_axis(scores, rows[:, size.prompt :, None], axis=-1)[:, :, 0]

    paged = jax.jit(functools.partial(kvjax.score, chunk=min(size.prompt, 512)), donate_argnums=1)
    lengths = np.array([size.prompt], np.int32)
    programs: Any = {
        "dense_score": (lambda: None, lambda _: dense(model, rows)),
        "score": (lambda: make_cache(model, size), lambda cache: paged(model, cache, prompt, completions, lengths)),
    }
    took, results = common.in_turns(programs, case.rounds)
    same = np.allclose(results["score"][0][0], results["dense_score"], atol=1e-4)
    common.require(same, "the log-probabilities differ")
    return took["dense_score"].cpu / took["score"].cpu, {f"{name}_s": one.cpu for name, one in took.items()}


def compare_canonical(case: Case, size: Size) -> float:
    """How many times longer rollouts take with `canonical=True`."""
    model, rng = make_model(case), np.random.default_rng(size.prompts)
    prompts = rng.integers(0, case.config.vocab_size, (size.prompts, size.prompt)).astype(np.int32)
    shortest = size.prompt if size.prompts == 1 else -(-size.prompt // 4)
    lengths = rng.integers(shortest, size.prompt + 1, size.prompts).astype(np.int32)

    def program(canonical: bool):
        def sample(model: Decoder, cache: kvjax.Cache) -> jax.Array:
            found, _, _ = kvjax.rollout(
                model, cache, prompts, lengths, samples=size.samples, max_new_tokens=size.new,
                sampling=kvjax.Sampling(), scheduler=Scheduler(chunk=min(size.prompt, 128)), canonical=canonical,
            )  # fmt: skip
            return found.tokens

        jitted = jax.jit(sample)
        return lambda: make_cache(model, size), lambda cache: jitted(model, cache)

    took, results = common.in_turns({"plain": program(False), "canonical": program(True)}, case.rounds)
    common.require(np.array_equal(*results.values()), "canonical=True chose other tokens")
    return took["canonical"].cpu / took["plain"].cpu


def count_recompiles(case: Case) -> int:
    """Programs that are compiled by training steps after the first one: each has new weights, seeds and prompts."""
    size, model = case.decode, make_model(case)
    graph, weights = nnx.split(model)
    cache, lengths = make_cache(model, size), np.array([size.prompt], np.int32)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(weights: Any, cache: kvjax.Cache, prompt: jax.Array, version: jax.Array):
        options: Any = {"namespace": version}
        found, cache, _ = kvjax.rollout(
            nnx.merge(graph, weights), cache, prompt, lengths, samples=size.samples, max_new_tokens=size.new,
            seed=version, **options,
        )  # fmt: skip
        _, cache, _ = kvjax.score(nnx.merge(graph, weights), cache, prompt, found.tokens, lengths, **options)
        rows = jnp.concatenate([jnp.broadcast_to(prompt, (size.samples, size.prompt)), found.tokens[0]], axis=1)

        def loss(weights: Any) -> jax.Array:
            return -jnp.mean(jax.nn.log_softmax(nnx.merge(graph, weights).dense(rows))[..., 0])

        new = jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, jax.grad(loss)(weights))
        return new, cache

    for number in range(3):
        weights, cache = step(weights, cache, make_prompt(case, size) + number % 2, np.int32(number))
    return step._cache_size() - 1


def main() -> None:
    def add(parser):
        parser.add_argument("--rounds", type=int, default=Case().rounds, help="how often each program runs")
        parser.add_argument("--quick", action="store_true", help="tiny shapes: that it runs, not how fast")

    args = common.parse("rollout", __doc__, add)
    case = QUICK if args.quick else Case()._replace(rounds=args.rounds)
    group_x, details = compare_samplers(case, case.group)
    decode_x, more = compare_samplers(case, case.decode)
    score_x, of_scores = compare_scores(case)
    details |= {"group_dense_x": group_x, "decode_dense_x": decode_x} | more | of_scores
    version, baseline = tunix_engines.version(), "the dense sampler of this benchmark"
    if version is not None:
        baseline = f"the vanilla engine of google-tunix {version}"
        group_x, seconds = compare_engines(case, case.group)
        decode_x, more = compare_engines(case, case.decode)
        details |= seconds | more
    print(f"  group_x and decode_x are to {baseline}")
    metrics = {
        "group_x": group_x, "decode_x": decode_x, "score_x": score_x,
        "canonical_x": compare_canonical(case, case.group), "canonical_short_x": compare_canonical(case, case.short),
        "slots_of_dense": compare_slots(case, case.group), "recompiles": count_recompiles(case),
    }  # fmt: skip
    common.report("rollout", metrics, args.json, details, {"baseline": baseline}, BARS)


if __name__ == "__main__":
    main()
