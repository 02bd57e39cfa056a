# SPDX-License-Identifier: Apache-2.0
"""The kernels' sections of `benchmarks.gpu_first`, with rows and bars, against the machine's ceilings.

A kernel's answers are first compared with its XLA twin's. It is then timed as a model calls it: a call for each layer
of a pool, so no call finds its bytes in a cache, each with the output of the call before. As in a model, a program
computes once the values which the calls of a step share, such as the schedule of the rows. Bytes are the K/V read, or
the blocks read and written. FLOPs count the visible pairs of query and key. Rates are compared with a copy on the
device, read and written, and with a product of two bf16 matrices. Both are measured in the same run.

The kernels are also compared with `jax.nn.dot_product_attention` over contiguous K/V, and with jax's own paged kernel.
A whole decode step is in `benchmarks.gpu_step`. Everything except attention is a row of a table: moves and appends of
K/V, ways to update an array of several gigabytes in pinned host memory, and other tile sizes than
`pallas_kernels.tuning` has.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import SingleDeviceSharding

import pallas_kernels
from benchmarks import common, gpu, gpu_attention
from benchmarks.common import Bar, Size
from benchmarks.gpu import Effort, Record
from benchmarks.gpu_attention import Shape
from pallas_kernels import tuning
from pallas_kernels.tuning import Programs, Tiles

KERNELS, MOVES, CHUNK = ("triton", "mosaic"), ("copy", "gather", "scatter"), 4096
DECODE, PREFILL = Shape(32, 4096), Shape(1, 3 * CHUNK, layers=4, chunk=CHUNK)
STAGES = [Programs(64, 16, 4, 3, 3), Programs(64, 16, 4, 2, 3)]
FULL = Size(
    decode={
        "32x4096_b16": DECODE,
        "32x4096_b64": Shape(32, 4096, 64),
        "1x1024_b16": Shape(1, 1024),
        "64x8192_b16": Shape(64, 8192, layers=8),
        "ragged_b16": Shape(32, 16_384, layers=8, ragged=True),
        "32x4096_int8": Shape(32, 4096, dtype="int8"),
        "32x4096_fp8": Shape(32, 4096, dtype="float8_e4m3fn"),
        "skewed_b16": Shape(128, 32_768, layers=4, skewed=True),
        "one_layer_b16": Shape(32, 4096, layers=1),
    },
    prefill={f"{n // 1024}k": Shape(1, n + CHUNK, layers=4, chunk=CHUNK) for n in (4096, 8192, 16_384, 32_768)},
    # Blocks to move at once, of the 16 tokens and all layers of a pool [N + 1, L, 2, K, 16, D]; tokens to append.
    counts={"64mb": 32, "256mb": 128, "1gb": 512}, layers=32, heads=(8, 128), tokens=256, calls=4,
    # Blocks of a host array, numbers in each, how many blocks are written at once; bytes to transfer.
    host_blocks=2048, host_block=2**20, host_moved=32, sent_bytes=2**28,
    # A function of `tuning`, results in place of its own, and the attention that tells which is best.
    choices=[
        ("triton_decode", "triton", DECODE,
         [*STAGES, Programs(32, 16, 4, 5, 3), Programs(64, 16, 8, 3, 2), Programs(64, 16, 4, 5, 2)]),
        ("triton_decode", "triton", Shape(32, 4096, dtype="int8"),
         [*STAGES, Programs(64, 16, 4, 5, 4), Programs(128, 16, 8, 3, 2)]),
        ("mosaic_prefill", "mosaic", PREFILL, [Tiles(64, 4, 2), Tiles(64, 2, 2), Tiles(128, 2, 1)]),
        ("triton_prefill", "triton", PREFILL, [Programs(64, 64, 4), Programs(64, 64, 8), Programs(32, 128, 8)]),
    ],
    models=[("8b", 32), ("1b", 32), ("8b", 1), ("8b", 128), ("1b", 1), ("1b", 128)], looped=("1b", 32),
    copied_bytes=2**31, side=8192, effort=Effort(), quick=False,
)  # fmt: skip
TINY = {"heads": (4, 2, 16), "layers": 2}
QUICK = Size(
    decode={
        "2x64_b16": Shape(2, 64, **TINY),
        "ragged_b16": Shape(3, 80, ragged=True, **TINY),
        "skewed_b16": Shape(3, 80, skewed=True, **TINY),
        "2x64_int8": Shape(2, 64, dtype="int8", **TINY),
    },
    prefill={"tiny": Shape(1, 64, chunk=32, **TINY)},
    counts={"tiny": 2}, layers=2, heads=(2, 16), tokens=4, calls=2,
    host_blocks=32, host_block=128, host_moved=4, sent_bytes=2**12,
    choices=[("triton_decode", "xla", Shape(2, 64, **TINY), [Programs(32, 16, 4)])],
    models=[("tiny", 2)], looped=("tiny", 2),
    copied_bytes=2**16, side=64, effort=Effort(1e-4, 2), quick=True,
)  # fmt: skip
# {(implementation, metric): its bar}
BARS = {
    **{(who, f"decode_32x4096_{block}_us"): Bar("", "", at_most=139) for block in ("b16", "b64") for who in KERNELS},
    **{(who, "decode_64x8192_b16_of_copy"): Bar("", "", at_least=0.92) for who in KERNELS},
    **{(who, "decode_1x1024_b16_device_us"): Bar("", "", at_most=8) for who in KERNELS},
    **{(who, "decode_ragged_b16_of_copy"): Bar("", "", at_least=0.85) for who in KERNELS},
    **{(who, f"prefill_{name}_tflop_s"): Bar("", "", at_least=bound) for name in FULL.prefill
       for who, bound in (("mosaic", 500), ("triton", 350))},
    **{("triton", f"{move}_{name}_of_copy"): Bar("", "", at_least=0.85) for move in MOVES for name in FULL.counts},
    ("triton", "append_device_us"): Bar("", "", at_most=10),
    **{("kvjax", f"step_{model}_b32_of_copy"): Bar("", "", at_least=0.7) for model in ("1b", "8b")},
}  # fmt: skip
GAIN = 1.03  # of another choice; less than this is noise
HOST = jax.memory.Space.Host


class Row(NamedTuple):
    """A program to time. `start` checks its answer and returns (program, state, args) for `gpu.time_s`.

    Attributes:
      figures: units, with the calls or bytes of a run. NAME_us and NAME_ms are times of a call, NAME_gb_s is a rate,
        and "copy" is a rate and its share of a copy's rate.
      after: takes the record and the last state.
      most: maximum runs in the queue.
    """

    who: str
    name: str
    start: Callable[[], tuple[Callable[..., Any], Any, tuple[Any, ...]]]
    figures: dict[str, int]
    after: Callable[[Record, Any], object] = lambda *_: None
    ours: bool = True
    most: int = 1000


def measure_rows(record: Record, rows: Iterable[Row], effort: Effort) -> dict[str, float]:
    """Times each row, even if others have failed. Returns seconds by name."""
    took = {}
    for row in rows:
        with record.guard(f"{row.name} {row.who}", row.ours):
            program, state, args = row.start()
            seconds, last = gpu.time_s(program, state, args, effort, row.most)
            row.after(record, last)
            for unit, amount in row.figures.items():
                values = {"us": 1e6 * seconds / amount, "ms": 1e3 * seconds / amount, "gb_s": amount / seconds / 1e9}
                if unit == "copy":
                    record.rate(row.who, row.name, amount / seconds, "copy_tb_s")
                else:
                    record.add(row.who, f"{row.name}_{unit}", values[unit])
            took[row.name] = seconds
    return took


def require_same(got: Any, wanted: Any, who: str) -> None:
    """Requires equal bits, except for the bits of NaN."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    common.require(all(bool(jnp.array_equal(*pair, equal_nan=True)) for pair in pairs), f"{who} differs from its twin")


def moves(size: Size) -> Iterator[Row]:
    """Whole blocks copied in a pool, gathered from it and put back. Bytes are read and written."""
    block = (size.layers, 2, size.heads[0], 16, size.heads[1])
    half = max(size.counts.values()) * size.calls  # sources, then as many targets
    order = jax.random.permutation(gpu.key(0), 2 * half).astype(jnp.int32)
    offsets = jnp.arange(size.calls, dtype=jnp.int32)
    small = gpu.random_pool((2 * size.calls + 1, *block), "bfloat16")
    pools = list[jax.Array]()

    @functools.cache
    def program(move: str, who: str, count: int) -> Callable[..., Any]:
        call = functools.partial(pallas_kernels.call, f"{move}_blocks", implementation=who)

        def run(pool, staged, sources, targets):
            gathered = []
            for i in range(size.calls):
                source, target = (x[i * count : (i + 1) * count] for x in (sources, targets))
                if move == "gather":
                    gathered.append(call(pool, source))
                else:
                    args = (source, target) if move == "copy" else (staged, target)
                    pool = call(pool, *args, jnp.int32(count))
            return gathered or pool

        return jax.jit(run, donate_argnums=() if move == "gather" else 0)

    def row(move: str, who: str, name: str, count: int) -> Row:
        staged = jnp.ones((count, *block), jnp.bfloat16)
        moved = size.calls * staged.nbytes
        gathers = move == "gather"

        def start() -> Any:
            check = jnp.ones((1, *block), jnp.bfloat16), offsets, offsets + size.calls
            wanted = program(move, "xla", 1)(jnp.copy(small), *check)
            require_same(program(move, who, 1)(jnp.copy(small), *check), wanted, who)
            pool = pools.pop() if pools else gpu.random_pool((2 * half + 1, *block), "bfloat16")
            run = program(move, who, count)
            args = (staged, order[:half], order[half:])
            if not gathers:
                return run, pool, args
            pools.append(pool)
            return lambda _, *args: run(*args), None, (pool, *args)

        keep = (lambda *_: None) if gathers else (lambda _, last: pools.append(last))
        max_runs = max(2**34 // moved, 1) if gathers else 1000
        return Row(who, f"{move}_{name}", start, {"copy": 2 * moved}, keep, most=max_runs)

    for move in MOVES:
        for who, (name, count) in itertools.product(gpu.served(f"{move}_blocks"), size.counts.items()):
            yield row(move, who, name, count)


def appends(size: Size) -> Iterator[Row]:
    """K/V of a step's tokens, written into a pool layer by layer."""
    kv_heads, width = size.heads
    pool = gpu.random_pool((size.tokens + 1, size.layers, 2, kv_heads, 16, width), "bfloat16")
    slots = jnp.asarray(np.random.default_rng(0).permutation(size.tokens * 16)[: size.tokens], jnp.int32)
    args = (*jax.random.normal(gpu.key(0), (2, size.tokens, kv_heads, width), jnp.bfloat16), slots)

    def run(who, pool, k, v, slots):
        for layer in range(size.layers):
            pool = pallas_kernels.call("append_kv", pool, layer, k, v, slots, implementation=who)
        return pool

    def row(who: str) -> Row:
        program = jax.jit(functools.partial(run, who), donate_argnums=0)

        def start() -> Any:
            require_same(program(jnp.copy(pool), *args), jax.jit(functools.partial(run, "xla"))(pool, *args), who)
            return program, jnp.copy(pool), args

        def after(record: Record, last: Any) -> None:
            if gpu.has_gpu():
                gpu.profiled(record, who, "append", program, last, args, size.layers)

        return Row(who, "append", start, {"us": size.layers}, after)

    yield from map(row, gpu.served("append_kv"))


def scatter(pool, staged, ids):
    return pool.at[ids].set(staged, unique_indices=True, mode="promise_in_bounds", wrap_negative_indices=False)


def slices(pool, staged, ids):
    for i in range(ids.size):
        pool = lax.dynamic_update_slice_in_dim(pool, staged[i : i + 1], ids[i], 0, allow_negative_indices=False)
    return pool


def host_code(pool, staged, ids):
    """By the host's processor."""
    run: Any = compute_on(scatter, compute_type="device_host", out_memory_spaces=HOST)
    return run(pool, staged, ids)


def host(size: Size) -> Iterator[Row]:
    """GB/s in both directions, milliseconds to write blocks into a large host array, and whether it kept its memory."""
    pinned, device = (SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in ("pinned_host", "device"))
    x = jnp.ones((size.sent_bytes // 2,), jnp.bfloat16)
    staged = jnp.ones((size.host_moved, size.host_block), jnp.bfloat16)
    ids = 7 * jnp.arange(size.host_moved, dtype=jnp.int32) + 3

    def write(copy: Callable[..., Any]) -> Row:
        name = f"host_{copy.__name__}"
        before = list[int]()

        def put(pool, staged, ids):
            return copy(pool, *jax.device_put((staged, ids), HOST))

        def start() -> Any:
            pool = jax.device_put(jnp.zeros((size.host_blocks, size.host_block), jnp.bfloat16), pinned)
            before.append(pool.unsafe_buffer_pointer())
            return jax.jit(put, donate_argnums=0, out_shardings=pinned), pool, (staged, ids)

        def after(record: Record, pool: Any) -> None:
            total = float(jnp.sum(jax.device_put(pool, device), dtype=jnp.float32))
            common.require(total == staged.size, f"{total} ones were written, wanted {staged.size}")
            record.add("device", f"{name}_same_memory", float(pool.unsafe_buffer_pointer() == before[0]))

        return Row("device", name, start, {"ms": 1, "gb_s": staged.nbytes}, after, ours=False)

    for name, array, to in (("to_host", x, pinned), ("to_device", jax.device_put(x, pinned), device)):
        put = functools.partial(lambda to, _, array: jax.device_put(array, to), to)
        start = functools.partial(lambda *start: start, put, None, (array,))
        yield Row("device", f"device_put_{name}", start, {"gb_s": array.nbytes})
    yield from map(write, (scatter, slices, host_code))


def tune(record: Record, size: Size) -> None:
    """Microseconds with each candidate of tile sizes. `faster` gets the winners, with the line to change."""
    for function, who, shape, candidates in size.choices:
        case = gpu_attention.make_case(shape)
        calls = min(shape.layers, 8) if who != "xla" else 1
        took = {}
        for candidate in (None, *candidates):
            program = gpu_attention.chain(gpu_attention.caller(who, shape), calls)
            start = functools.partial(
                lambda *start: start, program, case.q, (case.pool, case.scales, case.tables, case.lengths)
            )
            name = f"{function} {shape.dtype} {candidate or 'own'}"
            is_default = candidate is None
            patch = mock.patch.object(tuning, function, lambda *_, tiles=candidate: tiles)
            with contextlib.nullcontext() if is_default else patch:
                row = Row("tuning", name, start, {"us": calls}, ours=is_default)
                for seconds in measure_rows(record, [row], size.effort).values():
                    took[candidate] = 1e6 * seconds / calls
        best = min(took, key=lambda candidate: took[candidate], default=None)
        if best is not None and None in took and took[best] * GAIN < took[None]:
            kind = "prefill" if shape.chunk else "decode"
            gain = f"{took[None] / took[best]:.2f}x"
            gain += f", {took[best]:.0f} us for {took[None]:.0f}"
            record.faster.append(f"pallas_kernels/tuning.py, {function}: {best} for {shape.dtype} {kind} is {gain}")


def sections(size: Size) -> dict[str, Callable[[Record], None]]:
    """The sections to measure. `gpu_first` has their order."""

    def steps(model: str, rows: int, measure: str = "measure", quick: bool = size.quick) -> Callable[[Record], None]:
        def run(record: Record) -> None:
            from benchmarks import gpu_step  # late: it needs flax

            getattr(gpu_step, measure)(record, model, rows, quick)

        return run

    def attention(kind: str, name: str, shape: Shape) -> Callable[[Record], None]:
        return lambda record: gpu_attention.measure(record, kind, name, shape, size.effort)

    def table(rows: Callable[[Size], Iterator[Row]]) -> Callable[[Record], None]:
        return lambda record: measure_rows(record, rows(size), size.effort)

    looped, rows = size.looped
    return {
        "ceilings": lambda record: gpu.ceilings(record, size.copied_bytes, size.side, size.effort),
        "loop, twice, with command buffers and without": steps("tiny", 2, "measure_loops", quick=True),
        **{f"decode_{name}": attention("decode", name, shape) for name, shape in size.decode.items()},
        **{f"prefill_{name}": attention("prefill", name, shape) for name, shape in size.prefill.items()},
        "tuning": lambda record: tune(record, size),
        **{f"step_{model}_b{rows}": steps(model, rows) for model, rows in size.models},
        "append": table(appends),
        "moves": table(moves),
        f"loop_{looped}_b{rows}": steps(looped, rows, "measure_loops"),
        "host": table(host),
    }
