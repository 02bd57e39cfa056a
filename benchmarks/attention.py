# SPDX-License-Identifier: Apache-2.0
"""Decode attention over the paged cache on a CPU, against the bytes it reads and against contiguous K/V.

Three programs take turns for each shape, so a noisy machine is noisy for all of them. Paged attention runs through
`kvjax.attend`, with each row's blocks scattered over the pool. The second program is attention over contiguous K/V
`[R, K, T, D]`, and the third a plain sum over the same bytes. All layers run in a single program, each on the output of
the layer before, as in a model. The answers are compared before anything is timed. Times are the minimum of all rounds,
per layer.

The mixed batch has decode rows and chunks of prompts. Attention of a layer over the flat batch is compared with two
calls, for decode rows and for chunks. The ragged form of the batch treats a decode row as a chunk of length 1.

The last two batches compare rows of different lengths, where a row is 32 times as long as the others, and rows of equal
lengths. Each is compared with a loop over the length of the longest row, which `View.fixed_split` selects. These times
are medians.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import common
from benchmarks.common import Bar, Program, Size, benchmark


class Shape(NamedTuple):
    rows: int
    length: int
    heads: int
    kv_heads: int
    width: int
    layers: int
    dtype: str = "float32"
    block_size: int = 16


SHAPES = {
    "large_2k": Shape(16, 2048, 32, 8, 128, 1),
    "large_1k": Shape(16, 1024, 32, 8, 128, 1),
    "small_1k": Shape(16, 1024, 8, 4, 64, 6),
    "small_1k_bf16": Shape(16, 1024, 8, 4, 64, 6, "bfloat16"),
    "one_row_4k": Shape(1, 4096, 8, 4, 64, 6),
}
SKEWED = Shape(32, 4096, 8, 4, 64, 1)  # of the longest row
LARGE_2K = "decode attention, 16 rows of 2,048 tokens, 32 / 8 heads of 128"
SMALL_1K = "decode attention, 16 rows of 1,024 tokens, 8 / 4 heads of 64"
BARS = {
    "large_2k_over_sum": Bar(f"{LARGE_2K}, to a plain sum", at_most=4),
    "large_2k_over_contiguous": Bar(f"{LARGE_2K}, to contiguous K/V"),
    "small_1k_over_sum": Bar(f"{SMALL_1K}, to a plain sum", at_most=4),
    "small_1k_over_contiguous": Bar(f"{SMALL_1K}, to contiguous K/V"),
    "small_1k_bf16_over_sum": Bar(f"{SMALL_1K}, bfloat16, to a plain sum", at_most=4),
    "small_1k_bf16_over_contiguous": Bar(f"{SMALL_1K}, bfloat16, to contiguous K/V"),
    "mixed_over_apart": Bar("32 decode rows and 4 chunks of 64 in one flat batch, to two calls", at_most=1.15),
    "mixed_as_ragged_over_apart": Bar("such a batch in ragged form, a decode row as a chunk, to two calls"),
    "skewed_over_loop": Bar("a row of 4,096 tokens and 31 of 128, to a loop over the longest row", at_most=0.25),
    "equal_over_loop": Bar("32 rows of 1,024 tokens, to a loop over the longest row", at_most=1.03),
}
NOTES = """
Heads are given as query heads / kv heads. The time over contiguous K/V is lost in reading. XLA gathers scattered 2 KB
tiles at about half the speed of a stream, and writes them to memory before it multiplies. The gathers take three
quarters of attention's time (`jax.profiler`). Copying the same tiles in C on the same machine takes twice as long as
copying a stream. Longer runs, larger tiles, a shared softmax for several tiles and other gather orders were slower.

The flat batch's ratio was 1.02x to 1.14x on a busy machine, and 6x to 8x in ragged form. A row of 4,096 tokens among
short rows is cut into parts. Rows of equal lengths are not.
"""


def make_case(shape: Shape):
    """Returns queries, pools whose rows have scattered blocks, a decode view, and each layer's contiguous K/V."""
    rows, length, heads, kv_heads, width, layers, dtype, size = shape
    rng = np.random.default_rng(0)
    blocks = rows * length // size
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(kv_heads, width)] * layers,
        num_blocks=blocks, max_seqs=rows, max_length=length, block_size=size, dtype=dtype,
    )  # fmt: skip
    array = rng.standard_normal((blocks + 1, layers, 2, kv_heads, size, width), np.float32)
    array[-1] = np.nan
    array = jnp.asarray(array, dtype)
    tables = jnp.asarray(rng.permutation(blocks).reshape(rows, -1), jnp.int32)
    lengths = jnp.full(rows, length, jnp.int32)
    ones = jnp.ones(rows, jnp.int32)
    view = kvjax.pools.View((tables,), lengths[:, None] - 1, lengths, (tables[:, -1:] * size + size - 1,), ones)

    @jax.jit
    def unpage(array):  # [L, 2, R, K, T, D]
        kv = array[tables].transpose(2, 3, 0, 4, 1, 5, 6).reshape(layers, 2, rows, kv_heads, length, width)
        return [(kv[i, 0], kv[i, 1]) for i in range(layers)]

    q = jnp.asarray(rng.standard_normal((rows, 1, heads, width)), dtype)
    return q, kvjax.pools.Pools(((array,),), spec), view, unpage(array)


def paged(q, pools, view):
    for layer in range(len(pools.spec.groups[0].pools[0].layers)):
        q = q + kvjax.attend(q, pools, layer, view)
    return q


def contiguous(q, layers, lengths, first):
    """Attention over contiguous K/V. `first` names the first factor of K's products, which matters to the compiler."""
    for k, v in layers:
        q = q + attend_contiguous(q, k, v, lengths, first)
    return q


def attend_contiguous(q, k, v, lengths, first):
    """Attention [R, 1, Q, W] of q [R, 1, Q, D] over K [R, K, T, D] and V [R, K, T, W]."""
    rows, _, heads, width = q.shape
    kv_heads, length = k.shape[1:3]
    query = (q.astype(jnp.float32) * width**-0.5).astype(k.dtype).reshape(rows, kv_heads, -1, width)
    if first == "q":
        score = jnp.einsum("rkgd,rktd->rkgt", query, k, preferred_element_type=jnp.float32)
    else:
        score = jnp.einsum("rktd,rkgd->rktg", k, query, preferred_element_type=jnp.float32)
        score = jax.lax.optimization_barrier(score).swapaxes(2, 3)
    seen = jnp.arange(length)[None] < lengths[:, None]
    weight = jax.nn.softmax(jnp.where(seen[:, None, None], score, -jnp.inf), axis=-1)
    mixed = jnp.einsum("rkgt,rktd->rkgd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return mixed.reshape(rows, 1, heads, -1).astype(q.dtype)


def measure_shape(name: str, shape: Shape, rounds: int) -> dict[str, float]:
    q, pools, view, layers = make_case(shape)
    programs: dict[str, Program] = {"paged": functools.partial(jax.jit(paged), q, pools, view)}
    for first in ("q", "k"):
        run = jax.jit(functools.partial(contiguous, first=first))
        programs[f"contiguous_{first}"] = functools.partial(run, q, layers, view.lengths)
    total = jax.jit(lambda layers: [jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(layers)])
    programs["sum"] = functools.partial(total, layers)
    took, answers = common.in_turns(programs, rounds)
    del answers["sum"]
    common.require_same(answers, functools.partial(close, tolerance=1e-4 if shape.dtype == "float32" else 5e-2))
    least = {program: timing.least for program, timing in took.items()}
    least["contiguous"] = min(least.pop("contiguous_q"), least.pop("contiguous_k"))
    return {
        **{f"{name}_{program}_ms": 1e3 * s / shape.layers for program, s in least.items()},
        **{f"{name}_over_{base}": least["paged"] / least[base] for base in ("contiguous", "sum")},
    }


def close(answer: Any, expected: Any, tolerance: float = 1e-4) -> bool:
    """Whether two answers agree within a tolerance."""
    return np.allclose(np.asarray(answer, np.float32), np.asarray(expected, np.float32), tolerance, tolerance)


def make_line(line: Size):
    """Returns queries [1, T, Q, D], pools, and the state of a cache whose rows still lack a token or a chunk."""
    rng = np.random.default_rng(0)
    rows = line.rows + line.chunks
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(line.kv_heads, line.width)], num_blocks=rows * -(-line.length // line.block_size),
        max_seqs=rows, max_length=line.length, block_size=line.block_size, dtype="float32",
    )  # fmt: skip
    pools = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)), kvjax.init_pools(spec))
    state = kvjax.init(spec)
    (group,) = state.groups
    table = jnp.asarray(rng.permutation(group.table.size).reshape(group.table.shape), jnp.int32)
    lacks = np.repeat(np.array([1, line.chunk], np.int32), (line.rows, line.chunks))
    seqs = state.seqs.replace(length=jnp.full((rows,), line.length), committed=jnp.asarray(line.length - lacks))
    q = rng.standard_normal((1, rows + line.chunks * line.chunk, line.heads, line.width), np.float32)
    return jnp.asarray(q), pools, state.replace(groups=(group.replace(table=table),), seqs=seqs)


def measure_mixed(line: Size) -> dict[str, float]:
    """Times a mixed batch, and compares it with two calls."""
    q, pools, state = make_line(line)
    rows = state.spec.max_seqs
    size = line.chunks * line.chunk
    decode = np.arange(rows) < line.rows
    chunks = np.arange(line.rows, rows, dtype=np.int32)
    counts = np.full(line.chunks, line.chunk, np.int32)
    view = kvjax.pools.mixed(state, decode, chunks, counts, size)
    attend = jax.jit(lambda q, pools, view: kvjax.attend(q, pools, 0, view))
    programs: dict[str, Program] = {
        "mixed": functools.partial(attend, q, pools, view),
        "mixed_as_ragged": functools.partial(attend, q, pools, view.replace(decodes=0)),
        "decode": functools.partial(
            attend, q[0, :rows, None], pools, kvjax.view(state, jnp.asarray(decode, jnp.int32), 1)
        ),
        "chunks": functools.partial(attend, q[:, rows:], pools, kvjax.ragged(state, counts, size, chunks)),
    }
    took, results = common.in_turns(programs, line.rounds)
    answers = {name: np.asarray(result).reshape(-1, *q.shape[2:]) for name, result in results.items()}
    answers["apart"] = np.concatenate([answers.pop("decode"), answers.pop("chunks")])
    common.require_same(answers, close)
    least = {name: timing.least for name, timing in took.items()}
    least["apart"] = least.pop("decode") + least.pop("chunks")
    return {
        **{f"{name}_ms": 1e3 * s for name, s in least.items()},
        **{f"{name}_over_apart": least[name] / least["apart"] for name in ("mixed", "mixed_as_ragged")},
    }


def measure_lengths(shape: Shape, rounds: int) -> dict[str, float]:
    """Times rows of different and of equal lengths, and compares them with the loop over the longest row."""
    q, pools, view, layers = make_case(shape)
    short = shape.length // 32
    equal = shape.length // 4
    attend = jax.jit(paged)
    dense = jax.jit(functools.partial(contiguous, first="q"))
    figures = {}
    for name, lengths in {"skewed": [shape.length, *[short] * (shape.rows - 1)], "equal": [equal] * shape.rows}.items():
        lengths = jnp.asarray(lengths, jnp.int32)
        (table,) = view.tables
        used = jnp.arange(table.shape[1])[None] * shape.block_size < lengths[:, None]
        table = jnp.where(used, table, pools.arrays[0][0].shape[0] - 1)  # the scratch row behind them, as in a cache
        rows = view.replace(tables=(table,), lengths=lengths, positions=lengths[:, None] - 1)
        wanted = np.asarray(dense(q, layers, rows.lengths))
        # The two by themselves, so that each of them finds in the caches what the other one has left there.
        views = {name: rows, f"{name}_loop": rows.replace(fixed_split=True)}
        programs: dict[str, Program] = {key: functools.partial(attend, q, pools, view) for key, view in views.items()}
        took, answers = common.in_turns(programs, rounds)
        common.require_same({f"{name}_contiguous": wanted, **answers}, close)
        figures |= common.times(took, "ms")
        figures[f"{name}_over_loop"] = took[name].wall / took[f"{name}_loop"].wall
    return figures


TINY = Shape(2, 64, 4, 2, 8, 2)
SIZES = {
    "shapes": (SHAPES, {name: TINY._replace(dtype=shape.dtype) for name, shape in SHAPES.items()}),
    # Of a mixed line, rows that decode and rows with a chunk, all of `length` tokens; of one layer.
    "rows": (32, 2), "chunks": (4, 2), "chunk": (64, 8), "length": (512, 64), "heads": (8, 4), "kv_heads": (4, 2),
    "width": (64, 8), "block_size": 16, "skewed": (SKEWED, Shape(8, 2048, 2, 1, 8, 1)),
}  # fmt: skip


@benchmark(BARS, SIZES, rounds=(30, 1))
def measure(size):
    for name, shape in size.shapes.items():
        yield measure_shape(name, shape, size.rounds)
    yield measure_mixed(size)
    yield measure_lengths(size.skewed, 5 * size.rounds)  # its bar is close
