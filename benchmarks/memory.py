# SPDX-License-Identifier: Apache-2.0
"""K/V memory which is allocated and unused, and temporaries of a decode step, which updates the pools in place.

Unused: 502 requests with lengths of a production trace live through a cache, 64 at a time: chunked prefill, decoding,
release. A slot counts as unused if a row holds its block and the slot has no token. It is measured after each chunk of
prefill, after each 32 tokens of decoding, and before each release. "In flight" is measured before the model would
write, so it includes the slots reserved for the tokens of the present step. `kvjax.debug.stats` counts the same slots
in another way.

In place: the engine's decode loop is compiled for a decoder of 10 million parameters. Its pools have to be donated and
not copied. A missed bar ends the benchmark.
"""

import csv
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from benchmarks import caches, common
from benchmarks.common import Bar, benchmark
from kvjax import serving
from kvjax._arrays import Pytree
from models.decoder import Decoder

ROWS, CHUNK, STEPS, NUM_BLOCKS, BLOCK_SIZE = 64, 512, 32, 131_072, 16
BARS = {
    "unused_percent": Bar("K/V bytes allocated and unused", "%", at_most=4),
    "unused_in_flight_percent": Bar("K/V bytes unused, blocks reserved for prompts in flight included", "%", at_most=4),
    "unused_prefill_percent": Bar("K/V bytes unused of rows after a chunk of prefill", "%", at_most=4),
    "unused_decode_percent": Bar("K/V bytes unused of rows after 32 tokens of decoding", "%", at_most=4),
    "unused_end_percent": Bar("K/V bytes unused of rows before their release", "%", at_most=4),
    "unused_worst_moment_percent": Bar("K/V bytes unused after the worst step", "%", at_most=4),
    "unused_if_contiguous_percent": Bar("K/V bytes unused with one contiguous stretch per row", "%"),
    "step_temporaries_percent_of_pool": Bar("temporaries of the compiled decode step, to the pools", "%", at_most=5),
    "donated_percent_of_pool": Bar("bytes of the pools that are donated", "%", at_least=100),
}
LENGTHS = pathlib.Path(__file__).parent / "data" / "mooncake_lengths.csv"


def read_lengths() -> np.ndarray:
    """i64[requests, 2]; prompt and answer lengths."""
    with LENGTHS.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return np.array([(int(row["input_length"]), int(row["output_length"])) for row in rows])


class Work(Pytree):
    """The work of each row, i32[S]: a request, the tokens of its prompt, and all its tokens. Idle rows have 0, 0, 0."""

    request: jax.Array
    prompt: jax.Array
    total: jax.Array


def tokens_at(work: Work, start: jax.Array, count: int) -> jax.Array:
    """i32[S, count]; tokens which no other request has at any position."""
    return work.request[:, None] * NUM_BLOCKS + start[:, None] + jnp.arange(count, dtype=jnp.int32)


def usage(state: kvjax.CacheState, rows: jax.Array) -> jax.Array:
    """i32[2]; slots held by the rows bool[S], and tokens written there. Rows share nothing here, so they add up."""
    held = jnp.sum(state.groups[0].table >= 0, axis=1, dtype=jnp.int32) * BLOCK_SIZE
    return jnp.stack([jnp.sum(jnp.where(rows, x, 0), dtype=jnp.int32) for x in (held, state.seqs.committed)])


@functools.partial(jax.jit, donate_argnums=0)
def advance(state: kvjax.CacheState, work: Work):
    """Computes a chunk of every unfinished prompt, then 32 steps of the other rows.

    Returns:
      The state, whether the cache did all of it, finished rows bool[S], and the use of each phase.
    """
    busy = work.total > 0
    committed = state.seqs.committed
    done_for = lambda events, rows: jnp.all(~rows | (events.status == kvjax.Status.OK))  # noqa: E731
    need = jnp.clip(work.prompt - committed, 0, CHUNK)
    grow = jnp.maximum(committed + need - state.seqs.length, 0)
    state, extended = kvjax.extend(state, grow > 0, grow, max_tokens=CHUNK)
    in_flight = usage(state, busy)
    state, written = kvjax.commit(state, tokens_at(work, committed, CHUNK), need)
    prefilling = busy & (state.seqs.committed < work.prompt)
    during_prefill = usage(state, prefilling)
    ok = extended.ok & done_for(written, busy)

    def step(carry, _):
        state, ok = carry
        active = busy & ~prefilling & (state.seqs.committed < work.total)
        position = state.seqs.committed
        state, extended = kvjax.extend(state, active)
        state, written = kvjax.commit(state, tokens_at(work, position, 1), active.astype(jnp.int32))
        return (state, ok & extended.ok & done_for(written, active)), None

    (state, ok), _ = jax.lax.scan(step, (state, ok), length=STEPS)
    done = busy & (state.seqs.committed >= work.total)
    decoding = busy & ~prefilling & ~done
    phases = {name: usage(state, rows) for name, rows in (("decode", decoding), ("end", done), ("all", busy))}
    return state, ok, done, {"in_flight": in_flight, "prefill": during_prefill, **phases}


def live_through(lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Runs all requests. Returns {phase: i64[moments, 2]}, slots held and written."""
    longest = int(lengths.sum(axis=1).max())
    spec = kvjax.make_spec(num_blocks=NUM_BLOCKS, max_seqs=ROWS, max_length=longest, block_size=BLOCK_SIZE)
    state = kvjax.init(spec)
    admit = jax.jit(functools.partial(kvjax.admit, reserve_tokens=CHUNK), donate_argnums=0)
    release = jax.jit(kvjax.release, donate_argnums=0)
    prompt_slots = -(-int(lengths[:, 0].max()) // BLOCK_SIZE) * BLOCK_SIZE
    work = Work(*(np.zeros(ROWS, np.int32) for _ in range(3)))
    waiting = list(range(len(lengths)))[::-1]
    moments = []
    finished = 0
    while finished < len(lengths):
        for seq in np.flatnonzero(work.total == 0)[: len(waiting)].tolist():
            request = waiting.pop()
            work.request[seq] = request
            work.prompt[seq] = lengths[request, 0]
            work.total[seq] = lengths[request].sum()
            prompt = tokens_at(work, jnp.zeros(ROWS, jnp.int32), prompt_slots)[seq]
            state, events = admit(state, seq, prompt, int(lengths[request, 0]))
            common.require(bool(events.ok), f"request {request} was not admitted: {events.status}")
        state, ok, done, phases = advance(state, work)
        common.require(bool(ok), "the cache refused a step")
        moments.append(jax.device_get(phases))
        if len(moments) % 50 == 1:
            seen = kvjax.debug.stats(state)
            counted = tuple(moments[-1]["all"].tolist())
            same = (seen.active_blocks * BLOCK_SIZE, seen.written_slots) == counted
            common.require(same, f"kvjax.debug.stats counts {seen}, the benchmark {counted}")
        for seq in np.flatnonzero(done).tolist():
            state, _ = release(state, seq)
            work.request[seq] = work.prompt[seq] = work.total[seq] = 0
            finished += 1
    return {phase: np.array([m[phase] for m in moments], np.int64) for phase in moments[0]}


def unused(lengths: np.ndarray) -> dict[str, float]:
    """Percent of the held slots without a token, over all moments of a phase, and in the worst moment."""
    phases = live_through(lengths)
    metrics = {}
    for phase, use in phases.items():
        held, written = use.sum(axis=0)
        metrics["unused_percent" if phase == "all" else f"unused_{phase}_percent"] = 100 * (1 - written / held)
    held, written = phases["all"].T
    metrics["unused_worst_moment_percent"] = float(100 * np.max(1 - written / held))
    longest = lengths.sum(axis=1).max()
    contiguous = float(100 * (1 - lengths.sum(axis=1).mean() / longest))  # if every row had room for the longest
    return metrics | {"unused_if_contiguous_percent": contiguous}


def in_place() -> dict[str, float]:
    """Compiles the decode loop without running it. Returns temporaries and donated bytes in percent of the pools."""
    model = nnx.eval_shape(lambda: Decoder(caches.LLAMA, rngs=nnx.Rngs(0)))
    spec = kvjax.make_spec(model.layer_specs(), num_blocks=1024, max_seqs=16, max_length=1024, dtype="float32")
    cache = jax.eval_shape(lambda: kvjax.Cache.create(spec))
    log = jax.eval_shape(lambda: serving.decode_log(spec, STEPS))
    per_row = jax.ShapeDtypeStruct((16,), jnp.int32)
    active = jax.ShapeDtypeStruct((16,), jnp.bool_)
    rows = serving.Rows(per_row, active, per_row, jax.ShapeDtypeStruct((16,), jnp.uint32))
    decode = jax.jit(functools.partial(serving.decode, steps=STEPS, sampling=None), donate_argnames=("cache", "log"))
    compiled = decode.lower(model, cache, rows, log, stop=jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
    pools = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(cache.pools))
    shapes = {",".join(map(str, array.shape)) for array in jax.tree.leaves(cache.pools)}
    copies = [line for line in compiled.as_text().splitlines() if re.search(r"\bcopy(-start)?\(", line)]
    copied = sum(any(f"[{shape}]" in line for shape in shapes) for line in copies)
    memory = compiled.memory_analysis()
    common.require(copied == 0, f"the compiled loop copies a pool {copied} times")
    return {
        "pool_mb": pools / 1e6,
        "step_temporaries_mb": memory.temp_size_in_bytes / 1e6,
        "step_temporaries_percent_of_pool": 100 * memory.temp_size_in_bytes / pools,
        "donated_percent_of_pool": 100 * memory.alias_size_in_bytes / pools,
    }


@benchmark(BARS, {"requests": (502, 3)}, strict=True)
def measure(size):
    yield unused(read_lengths()[: size.requests])
    yield in_place()
