# SPDX-License-Identifier: Apache-2.0
"""The kernels on a GPU, against the machine's ceilings and against jax's own: one command, minutes on an H200.

Each kernel first gives the answers of its XLA twin, then it is timed as a model calls it: one call for each layer of
a pool, so that no call finds its bytes in a cache, each on the output of the one before. A program makes once what
the calls of a step share, such as the schedule of the rows, as a model does. Bytes are those of the K/V that are read,
or of blocks read and written; FLOPs are those of the visible pairs of query and key. Rates are held against a copy on
the device, read and written, and a product of two bf16 matrices, both measured in the same run.

Beside them: `jax.nn.dot_product_attention` over contiguous K/V, and jax's own paged kernel. A whole decode step is in
`benchmarks.gpu_step`. Without a GPU only `--quick` measures: tiny shapes, to see that all runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import common, gpu, gpu_attention, gpu_host, gpu_moves
from benchmarks.gpu import Bar, Effort, Record
from benchmarks.gpu_attention import Shape

KERNELS = ("triton", "mosaic")


class Size(NamedTuple):
    """Everything that is measured."""

    decode: dict[str, Shape]
    prefill: dict[str, Shape]
    moves: gpu_moves.Size
    host: gpu_host.Size
    copied_bytes: int
    side: int  # of the matrix product
    effort: Effort


CHUNK = 4096
FULL = Size(
    decode={
        "32x4096_b16": Shape(32, 4096),
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
    moves=gpu_moves.Size({"64mb": 32, "256mb": 128, "1gb": 512}),
    host=gpu_host.Size(),
    copied_bytes=2**31, side=8192, effort=Effort(),
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
    moves=gpu_moves.Size({"tiny": 2}, layers=2, heads=(2, 16), tokens=4, calls=2),
    host=gpu_host.QUICK,
    copied_bytes=2**16, side=64, effort=Effort(1e-4, 2),
)  # fmt: skip
BARS = [
    *(Bar(f"decode_32x4096_{block}_us", 139, KERNELS, at_most=True) for block in ("b16", "b64")),
    Bar("decode_64x8192_b16_of_copy", 0.92, KERNELS),
    Bar("decode_1x1024_b16_device_us", 8, KERNELS, at_most=True),
    Bar("decode_ragged_b16_of_copy", 0.85, KERNELS),
    *(Bar(f"prefill_{name}_tflop_s", bound, (who,)) for name in FULL.prefill
      for who, bound in (("mosaic", 500), ("triton", 350))),
    *(Bar(f"{move}_{name}_of_copy", 0.85, ("triton",)) for move in ("copy", "gather", "scatter")
      for name in FULL.moves.counts),
    Bar("append_device_us", 10, ("triton",), at_most=True),
    *(Bar(f"step_{model}_b32_of_copy", 0.7, ("kvjax",)) for model in ("1b", "8b")),
]  # fmt: skip


def sections(size: Size, quick: bool) -> dict[str, Callable[[Record], None]]:
    """The sections to measure, the most important first."""

    def steps(model, rows, measure="measure"):
        def run(record):
            from benchmarks import gpu_step

            getattr(gpu_step, measure)(record, model, rows, quick)

        return run

    def attention(kind, name, shape):
        return lambda record: gpu_attention.measure(record, kind, name, shape, size.effort)

    order = [("tiny", 2)] if quick else [("8b", 32), ("1b", 32), ("8b", 1), ("8b", 128), ("1b", 1), ("1b", 128)]
    models = {f"step_{model}_b{rows}": steps(model, rows) for model, rows in order}
    model, rows = order[0] if quick else ("1b", 32)
    return {
        "ceilings": lambda record: gpu.ceilings(record, size.copied_bytes, size.side, size.effort),
        **{f"decode_{name}": attention("decode", name, shape) for name, shape in size.decode.items()},
        **{f"prefill_{name}": attention("prefill", name, shape) for name, shape in size.prefill.items()},
        "append": lambda record: gpu_moves.append(record, size.moves, size.effort),
        "moves": lambda record: gpu_moves.moves(record, size.moves, size.effort),
        **dict(list(models.items())[:2]),
        f"loop_{model}_b{rows}": steps(model, rows, "measure_loops"),
        "host": lambda record: gpu_host.measure(record, size.host, size.effort),
        **dict(list(models.items())[2:]),
    }


def main() -> None:
    def options(parser):
        parser.add_argument("--quick", action="store_true", help="tiny shapes: whether all runs, on any machine")
        parser.add_argument("--only", nargs="+", metavar="SECTION", default=[""], help="those that begin like this")
        parser.add_argument("--limit", type=float, default=420, help="seconds after which no new section begins")

    args = common.parse("kernels", __doc__, options)
    began, record = time.monotonic(), Record("kernels", [] if args.quick else BARS, args.json, quick=args.quick)
    if not (args.quick or gpu.has_gpu()):
        record.skip("everything", "no GPU")
        record.write()
        return
    for name, run in sections(QUICK if args.quick else FULL, args.quick).items():
        if name != "ceilings" and not name.startswith(tuple(args.only)):
            record.skip(name, "not asked for")
        elif time.monotonic() - began > args.limit:
            record.skip(name, f"the time was over ({args.limit:g} s)")
        else:
            print(f"{name} ({time.monotonic() - began:.0f} s)", flush=True)
            with record.guard(name):
                run(record)
    record.end()


if __name__ == "__main__":
    main()
