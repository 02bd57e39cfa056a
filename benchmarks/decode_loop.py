# SPDX-License-Identifier: Apache-2.0
"""A decode loop over the paged cache against the same loop over contiguous K/V.

Both generate greedily with one Llama-shaped model of 10 million parameters, 16 rows up to a context of 1,024 tokens,
in one jitted loop with the K/V donated. The paged loop is `kvjax.serving.decode` with all that it does, in a pool
whose blocks are scattered and full, so that every new block is an evicted one. The contiguous loop has K/V arrays of
just the right length, a length for each row, and nothing else: no blocks, no events, no stop tokens. It has two
versions: "contiguous" multiplies the queries of a group by K one by one, which is the fastest of the ways on a CPU that
were tried, and "plain" all at once. All must have the same first logits, and choose the same tokens.

Programs take turns, a few steps at a time, so that a noisy machine is noisy for all of them; each call of a few steps
counts with its least time of all rounds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import kvjax
from benchmarks import common
from benchmarks.common import Bar
from benchmarks.contiguous import attend_contiguous, contiguous_kv, contiguous_step
from kvjax import serving
from kvjax.serving.sampling import sample
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder

BARS = {
    "step_ratio": Bar("a step of the whole loop, to contiguous K/V", at_most=1.15),
    "paged_step_us": Bar("a step of the paged loop", "µs"),
    "contiguous_step_us": Bar("a step of the contiguous loop", "µs"),
    "attention_ratio": Bar("attention alone, all layers, to contiguous K/V", at_most=1.3),
    "paged_attention_us": Bar("attention of a step, all layers, paged", "µs"),
    "contiguous_attention_us": Bar("attention of a step, all layers, contiguous", "µs"),
    "bookkeeping_us": Bar("bookkeeping of a step", "µs"),
}
NOTES = """
The missed bars are lost in reading: see [attention](#attention). Blocks of 64 (`--block-size 64`) gave 1.32x for the
step and 1.36x for attention.
"""
TOLERANCE = 1e-3

CALL_STEPS = 8  # steps of one call of the loops that are compared
CHUNK = 64  # tokens of a prompt that are computed at once
# Per name how to begin, () -> state, and what to time, state -> (state, result); the state is donated.
Programs = dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Any, Any]]]]


class Size(NamedTuple):
    """What to run: S rows of a model go from context - steps to context tokens; everything is timed `rounds` times."""

    config: ModelConfig = ModelConfig("llama", 8192, 256, 768, 8, (LayerConfig(4, 32),) * 8)
    rows: int = 16
    context: int = 1024
    steps: int = 64
    block_size: int = 16
    rounds: int = 10
    clock: Callable[[], float] = time.perf_counter

    @property
    def new_blocks(self) -> int:
        """Blocks that each row takes on the way."""
        return -(-self.context // self.block_size) - -(-(self.context - self.steps) // self.block_size)


QUICK = Size(ModelConfig("llama", 128, 32, 64, 4, (LayerConfig(2, 8),) * 2), rows=2, context=48, steps=16, rounds=1)


class Start(NamedTuple):
    """Where both loops begin: the prompts are computed, and the next token of each row is chosen.

    Attributes:
      cache: the paged cache.
      rows: of the paged loop.
      layers: the same K/V for the contiguous loop, per layer K and V [S, K, T, D].
    """

    cache: kvjax.Cache
    rows: serving.Rows
    layers: tuple[tuple[jax.Array, jax.Array], ...]

    @property
    def lengths(self) -> jax.Array:
        """i32[S]; tokens of each row whose K/V are there."""
        return self.cache.state.seqs.committed


def full_cache(model: Decoder, size: Size) -> kvjax.Cache:
    """A cache with all rows free and no block empty; block ids are in random order."""
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=size.rows * -(-size.context // size.block_size), max_seqs=size.rows,
        max_length=size.context, block_size=size.block_size, dtype="float32",
    )  # fmt: skip
    rng, state = np.random.default_rng(0), kvjax.init(spec)
    shuffled = jnp.asarray(rng.permutation(spec.groups[0].num_blocks), jnp.int32)
    state = state.replace(groups=(state.groups[0].replace(empty=shuffled),))
    tokens = jnp.asarray(rng.integers(0, size.config.vocab_size, (size.rows, size.context)), jnp.int32)
    rows, lengths = jnp.arange(size.rows), jnp.full((size.rows,), size.context)

    def fill(state):
        state, admitted = kvjax.admit(state, rows, tokens, lengths)
        state, _ = kvjax.commit(state, tokens, lengths)
        state, released = kvjax.release(state, rows)
        return state, admitted.ok & released.ok

    state, ok = jax.jit(fill, donate_argnums=0)(state)
    common.require(bool(ok) and int(state.groups[0].num_empty) == 0, "the cache could not be filled")
    return kvjax.Cache(state, kvjax.init_pools(spec))


def make_start(model: Decoder, size: Size) -> Start:
    """Random prompts, computed through the paged cache and copied from there to the contiguous one."""
    length, each = size.context - size.steps, jnp.arange(size.rows, dtype=jnp.int32)
    prompts = np.random.default_rng(1).integers(0, size.config.vocab_size, (size.rows, length), dtype=np.int32)
    admit, step = (jax.jit(method, donate_argnums=at) for method, at in ((kvjax.Cache.admit, 0), (kvjax.step, 1)))
    cache, admitted = admit(full_cache(model, size), each, prompts, jnp.full((size.rows,), length))
    common.require(bool(admitted.ok), "the prompts were not admitted")
    token = jnp.zeros_like(each)
    while np.any(left := length - np.asarray(cache.state.seqs.committed)):
        chunk = np.minimum(length - left[:, None] + np.arange(CHUNK), length - 1)
        cache, logits, _ = step(model, cache, np.take_along_axis(prompts, chunk, axis=1), np.minimum(left, CHUNK))
        token = jnp.where((left > 0) & (left <= CHUNK), jnp.argmax(logits, axis=1).astype(jnp.int32), token)
    seeds = each.astype(jnp.uint32)
    rows = serving.Rows(token, jnp.ones((size.rows,), jnp.bool_), jnp.full((size.rows,), size.steps), seeds)
    return Start(cache, rows, jax.jit(contiguous_kv)(cache))


def paged_logits(model: Decoder, cache: kvjax.Cache, token):
    """Logits f32[S, V] after one more token of each row."""
    cache, _ = cache.extend(jnp.ones(token.shape, jnp.bool_))
    return model(token[:, None], cache.pools, cache.view(1), last=jnp.zeros_like(token))[0]


def no_model(tokens, pools, view, *, last):
    """Logits of a model that only reads the view, so that the loop has to compute it."""
    seen = sum(jnp.sum(x, dtype=jnp.int32) for x in jax.tree.leaves(view))
    return jnp.stack([tokens[:, 0] + seen, last], axis=1).astype(jnp.float32), pools


def take_turns(programs: Programs, clock, rounds: int, calls: int = 1) -> tuple[dict[str, float], dict[str, Any]]:
    """Least seconds of each program, summed over its calls; what it ended with, and every call's result."""
    least, ends = {name: np.full(calls, np.inf) for name in programs}, {}
    for number in range(rounds + 1):
        ends.clear()  # before new ones take as much memory
        ends = {name: (jax.block_until_ready(begin()), []) for name, (begin, _) in programs.items()}
        for call in range(calls):
            for name, (_, run) in programs.items():
                state, results = ends[name]
                began = clock()
                state, result = jax.block_until_ready(run(state))
                took = clock() - began
                ends[name] = state, [*results, result]
                if number:  # the first round compiles
                    least[name][call] = min(least[name][call], took)
    return {name: float(np.sum(seconds)) for name, seconds in least.items()}, ends


def paged_loop(model, start: Start, size: Size, steps: int = CALL_STEPS):
    """Begins with `start`; a call is `steps` steps of the engine's loop."""
    begin = start.cache, start.rows, serving.decode_log(start.cache.state.spec, size.steps)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(model, state):
        *state, decoded = serving.decode(model, *state, steps=steps, sampling=None, stop=jnp.asarray([-1]))
        return tuple(state), (decoded.tokens, decoded.logprobs)

    return lambda: jax.tree.map(jnp.copy, begin), functools.partial(run, model)


def contiguous_loop(model, start: Start, plain: bool):
    """Begins with `start`; a call is CALL_STEPS steps of state: K/V, tokens, positions."""
    begin = start.layers, start.rows.token, start.lengths

    def step(model, state):
        layers, token, position = state
        logits, layers = contiguous_step(model, layers, token, position, plain)
        chosen = sample(logits, None, start.rows.seed, position + 1)
        return (layers, chosen.tokens, position + 1), (chosen.tokens, chosen.logprobs)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(model, state):
        state, chosen = lax.scan(lambda state, _: step(model, state), state, length=CALL_STEPS)
        return state, jax.tree.map(jnp.transpose, chosen)

    return lambda: jax.tree.map(jnp.copy, begin), functools.partial(run, model)


def attentions(cache: kvjax.Cache, layers, size: Size) -> Programs:
    """Attention alone, half-way through the loop's steps: all layers, each on the output of the one before."""
    lengths = cache.state.seqs.committed - size.steps // 2
    view = cache.view(1).replace(lengths=lengths)
    q = jax.random.normal(jax.random.key(0), (size.rows, size.config.num_heads, size.config.layers[0].head_dim))

    @jax.jit
    def paged(q, pools, view):
        for layer in range(len(layers)):
            q = q + kvjax.attend(q[:, None], pools, layer, view)[:, 0]
        return q

    @functools.partial(jax.jit, static_argnames="plain")
    def contiguous(q, layers, lengths, plain):
        for layer in layers:
            q = q + attend_contiguous(q, layer, lengths, plain)
        return q

    return {
        "paged": (lambda: q, lambda q: (q, paged(q, cache.pools, view))),
        "contiguous": (lambda: q, lambda q: (q, contiguous(q, layers, lengths, plain=False))),
        "plain": (lambda: q, lambda q: (q, contiguous(q, layers, lengths, plain=True))),
    }


def compare_logits(model: Decoder, start: Start) -> float:
    """The largest difference between both ways' logits for the first token."""
    paged = jax.jit(paged_logits)(model, start.cache, start.rows.token)
    contiguous, _ = jax.jit(contiguous_step)(model, start.layers, start.rows.token, start.lengths)
    np.testing.assert_allclose(paged, contiguous, rtol=TOLERANCE, atol=TOLERANCE)
    return float(jnp.max(jnp.abs(paged - contiguous)))


def check_loops(ends: dict[str, Any], size: Size) -> None:
    """Requires of all loops the same tokens and log-probabilities, and of the paged one that it evicted blocks."""
    (cache, _, log), calls = ends["paged"]
    tokens, logprobs = map(np.concatenate, zip(*calls, strict=True))
    for name in ("contiguous", "plain"):
        wanted, wanted_logprobs = map(np.concatenate, zip(*ends[name][1], strict=True))
        common.require(np.array_equal(tokens, wanted), f"the paged and the {name} loop chose different tokens")
        np.testing.assert_allclose(logprobs, wanted_logprobs, rtol=TOLERANCE, atol=TOLERANCE)
    evicted = int(kvjax.events.counts(log)["removed"])
    common.require(evicted == size.rows * size.new_blocks > 0, f"{evicted} blocks were evicted")
    kvjax.check(cache.state)
    print(f"  {tokens.size:,} tokens, the same in all loops; {evicted} blocks evicted")


def measure(size: Size) -> dict[str, float]:
    model = Decoder(size.config, rngs=nnx.Rngs(0))
    start = make_start(model, size)
    print(f"  logits differ by {compare_logits(model, start):.1e} at most")
    programs = {
        "paged": paged_loop(model, start, size),
        "contiguous": contiguous_loop(model, start, plain=False),
        "plain": contiguous_loop(model, start, plain=True),
    }
    step_s, ends = take_turns(programs, size.clock, size.rounds, size.steps // CALL_STEPS)
    check_loops(ends, size)

    attention = attentions(ends["paged"][0][0], ends["contiguous"][0][0], size)
    attention_s, ends = take_turns(attention, size.clock, 40 * size.rounds)
    for name in ("contiguous", "plain"):
        np.testing.assert_allclose(ends["paged"][1], ends[name][1], rtol=TOLERANCE, atol=TOLERANCE)
    programs = {"bookkeeping": paged_loop(jax.tree_util.Partial(no_model), start, size, size.steps)}
    bookkeeping_s, _ = take_turns(programs, size.clock, size.rounds)

    metrics = {f"{name}_step_us": 1e6 * s / size.steps for name, s in step_s.items()}
    metrics |= {f"{name}_attention_us": 1e6 * s for name, s in attention_s.items()}
    for part, seconds in (("step", step_s), ("attention", attention_s)):
        metrics[f"{part}_ratio"] = seconds["paged"] / seconds["contiguous"]
        metrics[f"{part}_ratio_to_plain"] = seconds["paged"] / seconds["plain"]
    metrics["bookkeeping_us"] = 1e6 * bookkeeping_s["bookkeeping"] / size.steps
    metrics["bookkeeping_percent_of_step"] = 100 * bookkeeping_s["bookkeeping"] / step_s["paged"]
    metrics["parameters_m"] = sum(x.size for x in jax.tree.leaves(model)) / 1e6
    return metrics


def main() -> None:
    def options(parser):
        parser.add_argument("--rounds", type=int, help="how often everything is timed")
        parser.add_argument("--block-size", type=int, default=16, help="tokens to a block")
        parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs, not how fast")
        parser.add_argument("--cpu-time", action="store_true", help="of all cores together; for a busy machine")

    args = common.parse("decode_loop", __doc__, options)
    size = (QUICK if args.quick else Size())._replace(block_size=args.block_size)
    size = size if args.rounds is None else size._replace(rounds=args.rounds)
    size = size._replace(clock=time.process_time) if args.cpu_time else size
    print(f"decode_loop: {size.rows} rows, {size.context - size.steps:,} to {size.context:,} tokens each")
    common.report("decode_loop", measure(size), args.json, bars=BARS)


if __name__ == "__main__":
    main()
