# SPDX-License-Identifier: Apache-2.0
"""The half of `benchmarks.kinds` about recurrent layers: the cost of `recur`, and the snapshots that stay."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import attention, common
from benchmarks.trace import TRACE, read_trace
from models.recurrence import DeltaCell, DeltaConfig, DeltaInputs


class Line(NamedTuple):
    """Rows that decode, chunks beside them and their tokens; tokens of every row before; P; heads of a layer."""

    rows: int = 16
    chunks: int = 2
    chunk: int = 64
    before: int = 100
    block_size: int = 64
    heads: int = 8
    width: int = 64


def measure_recur(line: Line, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Of decode rows alone and with chunks, to the same cell on states of its own; and times in milliseconds.

    The chunks begin inside a block and at the beginning of one.
    """
    rng, total = np.random.default_rng(0), line.rows + line.chunks
    config = DeltaConfig(line.heads, line.heads, line.width, line.width, 4)
    cell = DeltaCell(config, jnp.asarray(rng.standard_normal((4, sum(config.parts))), jnp.float32))
    size, starts = line.block_size, np.full(total, line.before, np.int32)
    starts[-1] = -(-line.before // size) * size
    most = int(starts.max()) + line.chunk
    spec = kvjax.make_spec(
        [config.spec()], num_blocks=total * -(-most // size), max_seqs=total, max_length=most, block_size=size
    )
    cache, tokens = kvjax.Cache.create(spec), rng.integers(0, 1000, (total, most)).astype(np.int32)
    decodes = np.arange(total) < line.rows
    cache, events = cache.admit(np.arange(total), tokens, starts + np.where(decodes, 1, line.chunk).astype(np.int32))
    common.require(bool(events.ok), f"admission: {events}")

    def inputs(rows: int, length: int) -> DeltaInputs:
        qkv, decay, beta = (
            rng.standard_normal((rows, length, sum(config.parts))),
            *rng.random((2, rows, length, line.heads)),
        )
        return DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in (qkv, -decay[..., None], beta)))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pools, view, inputs):
        return kvjax.recur(cell, pools, 0, view, inputs)

    early = inputs(total, most)
    _, pools = run(cache.pools, cache.view(starts, most), early)
    cache, events = cache.replace(pools=pools).commit(tokens, starts)
    alone = kvjax.view(cache.state, 1, seqs=np.arange(line.rows))
    mixed = cache.mixed(decodes, np.flatnonzero(~decodes), np.full(line.chunks, line.chunk), line.chunks * line.chunk)
    one, many = inputs(line.rows, 1), inputs(line.chunks, line.chunk)
    _, states = jax.jit(cell)(cell.zeros(total), early, starts)
    own = [jax.tree.map(lambda x, rows=rows: x[rows], states) for rows in (decodes, ~decodes)]

    @functools.partial(jax.jit, donate_argnums=0)
    def direct(states, *inputs):
        found = [cell(of, x, jnp.full(x.beta.shape[0], x.beta.shape[1])) for of, x in zip(states, inputs, strict=True)]
        return [outputs for outputs, _ in found], [new for _, new in found]

    line_of = jax.tree.map(
        lambda x, y: jnp.concatenate([x[:, 0], jnp.zeros((line.chunks, *x.shape[2:])), y.reshape(-1, *y.shape[2:])])[None],
        one, many,
    )  # fmt: skip
    held: dict[str, Any] = {"pools": cache.pools, "decode": own[:1], "mixed": own}

    def paged(view, inputs):
        outputs, held["pools"] = run(held["pools"], view, inputs)
        return outputs, held["pools"]

    def contiguous(name, *inputs):
        outputs, held[name] = direct(held[name], *inputs)
        return outputs, held[name]

    programs = {
        "recur_decode": lambda: paged(alone, one),
        "recur_mixed": lambda: paged(mixed, line_of),
        "cell_decode": lambda: contiguous("decode", one),
        "cell_mixed": lambda: contiguous("mixed", one, many),
    }
    answers = {
        name: np.asarray(program()[0][0] if name.startswith("cell") else program()[0])
        for name, program in programs.items()
    }
    wanted, got = answers["cell_decode"], answers["recur_decode"]
    common.require(np.allclose(got, wanted, 1e-3, 1e-3), "recur: other outputs than the cell's")
    least = attention.least_s(programs, rounds)
    metrics = {f"recur_{name}": least[f"recur_{name}"] / least[f"cell_{name}"] for name in ("decode", "mixed")}
    return metrics, {f"{name}_ms": 1e3 * seconds for name, seconds in least.items()}


CHUNK, SIZE = 512, 16


def spec_of(prompts: Sequence[np.ndarray], num_snapshots: int, window: bool = False) -> kvjax.CacheSpec:
    """A cache with blocks for all prompts, and so many snapshots; with `window` these leave by age alone."""
    layer = kvjax.LayerSpec(1, 1, window=2) if window else kvjax.LayerSpec.recurrent({"state": (1,)})
    longest = -(-max(map(len, prompts)) // SIZE) * SIZE
    total = len(np.unique(np.concatenate([prompt // 32 for prompt in prompts]))) * 2 + len(prompts) + longest // SIZE
    numbers = {None: total, 2 if window else "recurrent": num_snapshots}
    return kvjax.make_spec(
        [kvjax.LayerSpec(1, 1), layer], num_blocks=numbers, max_seqs=1, max_length=longest, block_size=SIZE,
        partial_reuse=False,
    )  # fmt: skip


def snapshots_found(prompts: Sequence[np.ndarray], spec: kvjax.CacheSpec) -> list[int]:
    """The tokens found of each prompt, one after the other, computed in chunks."""

    @functools.partial(jax.jit, donate_argnums=0)
    def serve(state, tokens, length):
        state, admitted = kvjax.admit(state, 0, tokens, length, reserve_tokens=CHUNK)

        def more(carry):
            state, _ = carry
            return state.seqs.committed[0] < length

        def chunk(carry):
            state, ok = carry
            done = state.seqs.committed[0]
            count = jnp.minimum(length - done, CHUNK)
            state, grown = kvjax.extend(
                state, jnp.ones((1,), bool), (done + count - state.seqs.length)[:1], max_tokens=CHUNK
            )
            new = jax.lax.dynamic_slice(tokens, (done,), (CHUNK,))[None]
            state, committed = kvjax.commit(state, new, count[None])
            return state, ok & grown.ok & committed.ok

        state, ok = jax.lax.while_loop(more, chunk, (state, admitted.ok))
        state, released = kvjax.release(state, 0)
        return state, jnp.sum(admitted.cached), ok & released.ok

    state, found = kvjax.init(spec), []
    for prompt in prompts:
        padded = np.zeros(spec.max_length + CHUNK, np.int32)
        padded[: len(prompt)] = prompt
        state, cached, ok = serve(state, padded, np.int32(len(prompt)))
        common.require(bool(ok), f"request {len(found)}: refused")
        found.append(int(cached))
    return found


def trace_prompts(number: int) -> list[np.ndarray]:
    """The prompts of a trace: their whole blocks, and a token of their own."""
    found = []
    for own, request in enumerate(read_trace(TRACE, number)):
        whole = request.prompt[: len(request.prompt) // 32 * 32]
        found.append(np.append(whole, np.int32(2**30 + own)))
    return found


def measure_found(number: int, num_snapshots: int) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens of a trace that are found with so many snapshots, to those found where they leave by age alone."""
    prompts = trace_prompts(number)
    found = {
        name: sum(snapshots_found(prompts, spec_of(prompts, blocks, window)))
        for name, blocks, window in (
            ("found", num_snapshots, False), ("found_by_age", num_snapshots, True), ("findable", 100_000, False)
        )
    }  # fmt: skip
    return {"snapshots_found": found["found"] / max(found["found_by_age"], 1)}, found
