# SPDX-License-Identifier: Apache-2.0
"""A decode loop over the paged cache against the same loop over contiguous K/V.

Both generate greedily with a Llama-shaped model of 10 million parameters, 16 rows up to a context of 1,024 tokens, in a
jitted loop which donates the K/V. The paged loop is the whole `kvjax.serving.decode`, in a full pool with scattered
blocks, so each new block evicts another. The contiguous loop has K/V arrays of exactly the right length and a length
for each row, but no blocks, no events and no stop tokens. It multiplies K by each query of a group separately, which
was the fastest of several forms on a CPU. Both loops have to return the same first logits, and choose the same tokens.

Programs take turns, a few steps at a time, so a noisy machine is noisy for all of them. Each call of a few steps counts
with its minimum time of all rounds.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import kvjax
from benchmarks import caches, common
from benchmarks.common import Bar, Program, Size, benchmark
from kvjax import serving
from kvjax.serving.sampling import sample
from models.decoder import Decoder
from pallas_kernels.rotary import rotate

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
same = functools.partial(np.allclose, rtol=TOLERANCE, atol=TOLERANCE)


def contiguous_kv(cache: kvjax.Cache) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Contiguous K/V of the rows, with zeros after their written tokens."""
    kv = cache.pools.arrays[0][0][cache.view(1).tables[0]]  # [S, M, L, 2, K, P, D]
    rows, _, layers, _, heads, _, width = kv.shape
    kv = kv.transpose(2, 3, 0, 4, 1, 5, 6).reshape(layers, 2, rows, heads, -1, width)
    written = jnp.arange(kv.shape[4])[None] < cache.state.seqs.committed[:, None]
    kv = jnp.where(written[None, None, :, None, :, None], kv, 0)
    return tuple((k, v) for k, v in kv)


def attend_contiguous(q, layer, lengths, plain: bool):
    """Attention of q [S, Q, D] to the first `lengths` i32[S] tokens of a layer. Returns the shape of q."""
    (keys, values) = layer
    (rows, heads, width) = q.shape
    kv_heads, capacity = keys.shape[1:3]
    q = (q * width**-0.5).reshape(rows, kv_heads, heads // kv_heads, width)
    if plain:
        score = jnp.einsum("skgd,sktd->skgt", q, keys)
    else:
        score = jnp.stack([jnp.einsum("skd,sktd->skt", query, keys) for query in jnp.unstack(q, axis=2)], axis=2)
    seen = jnp.arange(capacity)[None] < lengths[:, None]
    weight = jax.nn.softmax(jnp.where(seen[:, None, None], score, -jnp.inf), axis=-1)
    return jnp.einsum("skgt,sktd->skgd", weight, values).reshape(rows, heads, width)


class Contiguous(NamedTuple):
    """Mixing of a layer over contiguous K/V, in place of `models.attention.Paged`. The cache has K and V of each layer.

    Attributes:
      layer_index: the layer.
      position: i32[S]; the position of each row's token.
      plain: see `attend_contiguous`.
    """

    layer_index: int
    position: jax.Array
    plain: bool

    def attend(self, cache, q, kv, angles, **_: Any):
        """Writes k and v, and attends to the row's tokens. Returns the values and the cache."""
        row = jnp.arange(self.position.size)
        index = row, slice(None), self.position
        k, v = cache[self.layer_index]
        k = k.at[index].set(rotate(kv[0], angles)[:, 0], unique_indices=True, mode="promise_in_bounds")
        v = v.at[index].set(kv[1][:, 0], unique_indices=True, mode="promise_in_bounds")
        y = attend_contiguous(rotate(q, angles)[:, 0], (k, v), self.position + 1, self.plain)
        return y[:, None], (*cache[: self.layer_index], (k, v), *cache[self.layer_index + 1 :])


def contiguous_step(model: Decoder, layers, token, position, plain: bool = True):
    """Logits f32[S, V] after the next token of each row, and K/V with this token."""
    capacity = layers[0][0].shape[2]

    def mixing(layer_index, _):
        return Contiguous(layer_index, position, plain)

    x, layers = model._stream(token[:, None], position[:, None], mixing, layers, capacity)
    return model._logits(x[:, 0]), layers


class Start(NamedTuple):
    """The start of both loops: a cache, rows with their next tokens, K and V [S, K, T, D] of each layer, lengths."""

    cache: kvjax.Cache
    rows: serving.Rows
    layers: tuple[tuple[jax.Array, jax.Array], ...]
    lengths: jax.Array


def full_cache(model: Decoder, size: Size) -> kvjax.Cache:
    """A cache with free rows and no empty block. Block ids are in random order."""
    spec = caches.spec_of(model, size.rows, size.context, block_size=size.block_size)
    rng = np.random.default_rng(0)
    state = kvjax.init(spec)
    shuffled = jnp.asarray(rng.permutation(spec.groups[0].num_blocks), jnp.int32)
    state = state.replace(groups=(state.groups[0].replace(empty=shuffled),))
    tokens = jnp.asarray(rng.integers(0, size.config.vocab_size, (size.rows, size.context)), jnp.int32)
    state, ok = caches.hold(state, tokens, jnp.full((size.rows,), size.context))
    state, released = jax.jit(kvjax.release, donate_argnums=0)(state, jnp.arange(size.rows, dtype=jnp.int32))
    full = bool(ok & released.ok) and int(state.groups[0].num_empty) == 0
    common.require(full, "the cache could not be filled")
    return kvjax.Cache(state, kvjax.init_pools(spec))


def make_start(model: Decoder, size: Size) -> Start:
    """Computes random prompts through the paged cache, and copies their K/V to contiguous arrays."""
    length = size.context - size.steps
    all_rows = jnp.arange(size.rows, dtype=jnp.int32)
    prompts = caches.random_prompts(size.config.vocab_size, (size.rows, length), 1)
    admit = jax.jit(kvjax.Cache.admit, donate_argnums=0)
    step = jax.jit(kvjax.step, donate_argnums=1)
    cache, admitted = admit(full_cache(model, size), all_rows, prompts, jnp.full((size.rows,), length))
    common.require(bool(admitted.ok), "the prompts were not admitted")
    token = jnp.zeros_like(all_rows)
    while np.any(remaining := length - np.asarray(cache.state.seqs.committed)):
        chunk = np.minimum(length - remaining[:, None] + np.arange(CHUNK), length - 1)
        cache, logits, _ = step(model, cache, np.take_along_axis(prompts, chunk, axis=1), np.minimum(remaining, CHUNK))
        token = jnp.where((remaining > 0) & (remaining <= CHUNK), jnp.argmax(logits, axis=1).astype(jnp.int32), token)
    seeds = all_rows.astype(jnp.uint32)
    rows = serving.Rows(token, jnp.ones((size.rows,), jnp.bool_), jnp.full((size.rows,), size.steps), seeds)
    return Start(cache, rows, jax.jit(contiguous_kv)(cache), cache.state.seqs.committed)


def take_turns(programs: dict[str, Any], rounds: int, calls: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Runs programs in turns. Returns the sum of minimum seconds of each program's calls, and {name: (state, results)}.

    A program is (begin, run): `begin` returns a state, and `run` donates the state and returns (state, result).
    """
    least = {name: np.full(calls, np.inf) for name in programs}
    ends = {}
    for round_index in range(rounds + 1):
        ends.clear()  # before new ones take as much memory
        ends = {name: (jax.block_until_ready(begin()), []) for name, (begin, _) in programs.items()}
        for call in range(calls):
            for name, (_, run) in programs.items():
                state, results = ends[name]
                began = time.perf_counter()
                state, result = jax.block_until_ready(run(state))
                took = time.perf_counter() - began
                ends[name] = state, [*results, result]
                if round_index:  # the first round compiles
                    least[name][call] = min(least[name][call], took)
    return {name: float(np.sum(seconds)) for name, seconds in least.items()}, ends


def paged_loop(model, start: Start, size: Size, steps: int = CALL_STEPS):
    """The paged loop: (begin, run). A call makes `steps` steps of the engine's loop."""
    begin = start.cache, start.rows, serving.decode_log(start.cache.state.spec, size.steps)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(model, state):
        *state, decoded = serving.decode(model, *state, steps=steps, sampling=None, stop=jnp.asarray([-1]))
        return tuple(state), (decoded.tokens, decoded.logprobs)

    return caches.copy_of(begin), functools.partial(run, model)


def contiguous_loop(model, start: Start):
    """The contiguous loop: (begin, run). A call makes CALL_STEPS steps of a state: K/V, tokens, positions."""
    begin = start.layers, start.rows.token, start.lengths

    def step(model, state):
        layers, token, position = state
        logits, layers = contiguous_step(model, layers, token, position, plain=False)
        chosen = sample(logits, None, start.rows.seed, position + 1)
        return (layers, chosen.tokens, position + 1), (chosen.tokens, chosen.logprobs)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(model, state):
        state, chosen = lax.scan(lambda state, _: step(model, state), state, length=CALL_STEPS)
        return state, jax.tree.map(jnp.transpose, chosen)

    return caches.copy_of(begin), functools.partial(run, model)


def attentions(cache: kvjax.Cache, layers, size: Size) -> dict[str, Program]:
    """Attention of all layers without the rest of the model, half-way through the steps. Each layer feeds the next."""
    lengths = cache.state.seqs.committed - size.steps // 2
    view = cache.view(1).replace(lengths=lengths)
    q = jax.random.normal(jax.random.key(0), (size.rows, size.config.num_heads, size.config.layers[0].head_dim))

    @jax.jit
    def paged(q, pools, view):
        for layer in range(len(layers)):
            q = q + kvjax.attend(q[:, None], pools, layer, view)[:, 0]
        return q

    @jax.jit
    def contiguous(q, layers, lengths):
        for layer in layers:
            q = q + attend_contiguous(q, layer, lengths, plain=False)
        return q

    return {
        "paged": lambda: paged(q, cache.pools, view),
        "contiguous": lambda: contiguous(q, layers, lengths),
    }


def compare_logits(model: Decoder, start: Start) -> float:
    """The largest difference between the paged and the contiguous logits for the first token."""

    @jax.jit
    def of_pages(model, cache, token):
        cache, _ = cache.extend(jnp.ones(token.shape, jnp.bool_))
        return model(token[:, None], cache.pools, cache.view(1), last=jnp.zeros_like(token))[0]

    paged = of_pages(model, start.cache, start.rows.token)
    contiguous, _ = jax.jit(contiguous_step)(model, start.layers, start.rows.token, start.lengths)
    np.testing.assert_allclose(paged, contiguous, rtol=TOLERANCE, atol=TOLERANCE)
    return float(jnp.max(jnp.abs(paged - contiguous)))


def check_loops(ends: dict[str, Any], size: Size) -> None:
    """Requires the same tokens and log-probabilities of both loops, and evictions of the paged loop."""
    (cache, _, log), calls = ends["paged"]
    tokens, logprobs = map(np.concatenate, zip(*calls, strict=True))
    wanted, wanted_logprobs = map(np.concatenate, zip(*ends["contiguous"][1], strict=True))
    common.require(np.array_equal(tokens, wanted), "the two loops chose different tokens")
    np.testing.assert_allclose(logprobs, wanted_logprobs, rtol=TOLERANCE, atol=TOLERANCE)
    evicted = int(kvjax.events.counts(log)["removed"])
    first, last = (-(-tokens // size.block_size) for tokens in (size.context - size.steps, size.context))
    common.require(evicted == size.rows * (last - first) > 0, f"{evicted} blocks were evicted")
    kvjax.check(cache.state)


# S rows of a model go from context - steps to context tokens.
SIZES = {"config": caches.CONFIGS, "rows": (16, 2), "context": (1024, 48), "steps": (64, 16), "block_size": 16}


@benchmark(BARS, SIZES, rounds=(10, 1))
def measure(size):
    model = Decoder(size.config, rngs=nnx.Rngs(0))
    start = make_start(model, size)
    yield {"logits_differ": compare_logits(model, start)}
    programs = {"paged": paged_loop(model, start, size), "contiguous": contiguous_loop(model, start)}
    step_s, ends = take_turns(programs, size.rounds, size.steps // CALL_STEPS)
    check_loops(ends, size)
    attention = attentions(ends["paged"][0][0], ends["contiguous"][0][0], size)
    del ends
    took, _ = common.in_turns(attention, 40 * size.rounds, same)
    attention_s = {name: timing.least for name, timing in took.items()}
    took, _ = common.in_turns({"books": paged_loop(caches.reads_the_view, start, size, size.steps)}, size.rounds)
    books_s = took["books"].least
    for part, seconds, calls in (("step", step_s, size.steps), ("attention", attention_s, 1)):
        yield {f"{name}_{part}_us": 1e6 * total / calls for name, total in seconds.items()}
        yield {f"{part}_ratio": seconds["paged"] / seconds["contiguous"]}
    yield {
        "bookkeeping_us": 1e6 * books_s / size.steps,
        "bookkeeping_percent_of_step": 100 * books_s / step_s["paged"],
        "parameters_m": sum(x.size for x in jax.tree.leaves(model)) / 1e6,
    }
