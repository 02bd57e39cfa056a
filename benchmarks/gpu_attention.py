# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU, for `benchmarks.kernels`: decode and prefill by all implementations, and by jax's kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import common, gpu
from benchmarks.gpu import Effort, Record

TOLERANCE = 0.03  # relative error of a head's result, bf16


class Shape(NamedTuple):
    """A batch of `rows` of `length` tokens over a pool of `layers` layers. In prefill the last `chunk` are queries.

    A ragged batch has lengths from 1 to `length`. In a skewed batch all rows except the first have a 32nd of `length`.
    """

    rows: int
    length: int
    block: int = 16
    layers: int = 32
    dtype: str = "bfloat16"
    ragged: bool = False
    skewed: bool = False
    chunk: int = 0
    heads: tuple[int, int, int] = (32, 8, 128)  # Q, K, D


class Case(NamedTuple):
    """The arguments of attention except the layer. `scales` is None unless the pool is quantized."""

    q: jax.Array
    pool: jax.Array
    scales: jax.Array | None
    tables: jax.Array
    lengths: jax.Array
    read_bytes: float  # of K/V and scales, one layer


def make_case(shape: Shape) -> Case:
    """Random inputs. The blocks of all rows are scattered over the pool."""
    rng = np.random.default_rng(0)
    (heads, kv_heads, width) = shape.heads
    lengths = np.full(shape.rows, shape.length)
    if shape.ragged:
        lengths = np.r_[1, rng.integers(1, shape.length, shape.rows - 2), shape.length]
    if shape.skewed:
        lengths[1:] = max(shape.length // 32, 1)
    blocks = -(-lengths // shape.block)
    tables = np.full((shape.rows, blocks.max()), blocks.sum())  # scratch
    tables[np.arange(blocks.max()) < blocks[:, None]] = rng.permutation(blocks.sum())
    pool = gpu.random_pool((int(blocks.sum()) + 1, shape.layers, 2, kv_heads, shape.block, width), shape.dtype)
    scales = None
    if pool.dtype.itemsize == 1:
        scales = jax.random.uniform(gpu.key(1), pool.shape[:5], minval=0.5, maxval=1.5)
        scales = scales / 32 if pool.dtype == jnp.int8 else scales
    token_bytes = 2 * kv_heads * (width * pool.dtype.itemsize + (4 if scales is not None else 0))
    q = jax.random.normal(gpu.key(2), (shape.chunk or shape.rows, heads, width), jnp.bfloat16)
    tables = jnp.asarray(tables, jnp.int32)
    lengths = jnp.asarray(lengths, jnp.int32)
    return Case(q, pool, scales, tables, lengths, float(jnp.sum(lengths)) * token_bytes)


def caller(who: str, shape: Shape) -> Callable[..., Any]:
    """A layer's attention by an implementation, for `chain`: decode if the shape's chunk is 0, else prefill."""

    def attend(q, layer, pool, scales, tables, lengths):
        name = "decode_attention"
        prefill_args = ()
        options = {"scale": shape.heads[2] ** -0.5, "scales": scales}
        if shape.chunk:
            name = "prefill_attention"
            options["max_count"] = shape.chunk
            prefill_args = jnp.zeros((1,), jnp.int32), jnp.full((1,), shape.chunk, jnp.int32)
        return pallas_kernels.call(name, q, pool, layer, tables, lengths, *prefill_args, implementation=who, **options)

    return attend


def chain(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """A program of `calls` calls, (q, *args) -> q. The function also takes the index of the call."""

    def run(q, *args):
        for call_index in range(calls):
            q = function(q, call_index, *args)
        return q

    return jax.jit(run)


def measure(record: Record, kind: str, name: str, shape: Shape, effort: Effort) -> None:
    """Measures a shape of decode or prefill, by all implementations and by jax's kernels."""
    case = make_case(shape)
    args = (case.pool, case.scales, case.tables, case.lengths)
    pairs = shape.chunk * (shape.length - shape.chunk) + shape.chunk * (shape.chunk + 1) // 2
    flops = 4.0 * shape.heads[0] * shape.heads[2] * pairs

    def rates(who: str, seconds: float, flops: float = flops) -> None:
        record.add(who, f"{kind}_{name}_us", 1e6 * seconds)
        done, ceiling = (flops, "product_tflop_s") if shape.chunk else (case.read_bytes, "copy_tb_s")
        record.rate(who, f"{kind}_{name}", done / seconds, ceiling)

    # The K/V of so many layers do not fit in a cache.
    copies = max(2, int(2**27 / case.read_bytes))
    most_calls = min(shape.layers, max(8, copies))
    # Large queries make a few keys count, so that one wrong block shows.
    twin = chain(caller("xla", shape), 1)
    wanted = twin(4 * case.q, *args)
    for who in gpu.served(f"{kind}_attention"):
        with record.guard(f"{kind}_{name} {who}"):
            calls = 1
            program = twin  # more of the twin would take long to compile
            if who != "xla":
                calls = most_calls
                function = caller(who, shape)
                error = gpu.differs(chain(function, 1)(4 * case.q, *args), wanted)
                common.require(error <= TOLERANCE, f"{who} differs from its twin by {error}")
                program = chain(function, calls)
            seconds, _ = gpu.time_s(program, case.q, args, effort)
            rates(who, seconds / calls)
            if not shape.chunk and case.read_bytes < 2**26 and gpu.has_gpu():
                gpu.profiled(record, who, f"{kind}_{name}", program, case.q, args, calls)
    if shape.ragged or shape.skewed or case.scales is not None:
        return
    for who, (prepare, call) in jax_own(shape).items():
        with record.guard(f"{kind}_{name} {who}", ours=False):
            kv = [prepare(*args, layer) for layer in np.arange(min(copies, shape.layers))]
            calls = max(len(kv), 4)
            on_layer = functools.partial(lambda call, q, call_index, kv: call(q, *kv[call_index % len(kv)]), call)
            program = chain(on_layer, calls)
            if not shape.chunk:
                error = gpu.differs(chain(on_layer, 1)(4 * case.q, kv), wanted)
                common.require(error <= TOLERANCE, f"{who} differs from xla by {error}")
            seconds, _ = gpu.time_s(program, case.q, (kv,), effort)
            all_pairs = 4.0 * shape.heads[0] * shape.heads[2] * shape.chunk * shape.length
            rates(who, seconds / calls, all_pairs)


def jax_own(shape: Shape) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Attention of jax over contiguous K/V, and jax's paged kernel for decode. It attends a chunk without a mask.

    Returns:
      By name: (*args, layer) -> kv, which lays out a layer's K/V, and (q, *kv) -> attention like q.
    """
    kv_heads, width = shape.heads[1:]

    @jax.jit
    def contiguous(pool, scales, tables, lengths, layer):
        kv = pool[tables, layer]  # [R, M, 2, K, P, D]
        return tuple(kv[:, :, i].swapaxes(2, 3).reshape(shape.rows, -1, kv_heads, width) for i in range(2))

    def dense(q, k, v, implementation):
        query = q.reshape(shape.rows, -1, *q.shape[1:])
        return jax.nn.dot_product_attention(query, k, v, implementation=implementation).reshape(q.shape)

    @jax.jit
    def pages(pool, scales, tables, lengths, layer):
        return *(pool[:-1, layer, i].swapaxes(0, 1) for i in range(2)), tables, lengths

    def paged(q, k, v, tables, lengths):
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        return paged_attention((q * width**-0.5).astype(q.dtype), k, v, tables, lengths)

    kinds = {f"jax_{name}": (contiguous, functools.partial(dense, implementation=name)) for name in ("xla", "cudnn")}
    if not gpu.has_gpu():
        del kinds["jax_cudnn"]
    elif not shape.chunk:
        kinds["jax_paged"] = pages, paged
    return kinds
