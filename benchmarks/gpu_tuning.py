# SPDX-License-Identifier: Apache-2.0
"""Other tile sizes than those of `pallas_kernels.tuning`, for `benchmarks.gpu_first`: is one of them faster?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import gpu, gpu_attention
from benchmarks.gpu import Record
from benchmarks.gpu_attention import Shape
from benchmarks.kernels import TINY
from pallas_kernels import tuning
from pallas_kernels.tuning import Programs, Tiles

GAIN = 1.03  # less than this is noise


class Choice(NamedTuple):
    """A function of `tuning`, what it could return, and the attention that tells which is best.

    Attributes:
      function: its name.
      candidates: results in place of its own.
      who: the implementation.
      kind: "decode" or "prefill".
      shape: of the batch.
    """

    function: str
    candidates: Sequence[Any]
    who: str
    kind: str
    shape: Shape


DECODE, PREFILL = Shape(32, 4096), Shape(1, 12_288, layers=4, chunk=4096)
STAGES = [Programs(64, 16, 4, 3, 3), Programs(64, 16, 4, 2, 3)]
CHOICES = [
    Choice("triton_decode", [*STAGES, Programs(32, 16, 4, 5, 3), Programs(64, 16, 8, 3, 2), Programs(64, 16, 4, 5, 2)],
           "triton", "decode", DECODE),
    Choice("triton_decode", [*STAGES, Programs(64, 16, 4, 5, 4), Programs(128, 16, 8, 3, 2)],
           "triton", "decode", Shape(32, 4096, dtype="int8")),
    Choice("mosaic_prefill", [Tiles(64, 4, 2), Tiles(64, 2, 2), Tiles(128, 2, 1)], "mosaic", "prefill", PREFILL),
    Choice("triton_prefill", [Programs(64, 64, 4), Programs(64, 64, 8), Programs(32, 128, 8)],
           "triton", "prefill", PREFILL),
]  # fmt: skip
QUICK = [Choice("triton_decode", [Programs(32, 16, 4)], "xla", "decode", Shape(2, 64, **TINY))]


@contextlib.contextmanager
def returning(function: str, value: Any) -> Iterator[None]:
    """Lets a function of `tuning` return something else; None: its own."""
    own = getattr(tuning, function)
    if value is not None:
        setattr(tuning, function, lambda *_: value)
    try:
        yield
    finally:
        setattr(tuning, function, own)


def measure(record: Record, choices: Sequence[Choice], effort: gpu.Effort) -> None:
    """Microseconds by each candidate, and in `faster` those that win, with the line that they would change."""
    for function, candidates, who, kind, shape in choices:
        case, times = gpu_attention.make_case(shape), {}
        args = (case.pool, case.scales, case.tables, case.lengths)
        for candidate in (None, *candidates):
            name = f"{function} {shape.dtype} {'own' if candidate is None else candidate}"
            with record.guard(name, ours=candidate is None), returning(function, candidate):
                calls = min(shape.layers, 8) if who != "xla" else 1
                program = gpu_attention.chain(gpu_attention.caller(who, shape), calls)
                times[candidate] = 1e6 * gpu.time_s(program, case.q, args, effort)[0] / calls
                record.add("tuning", name, times[candidate])
        best = min(times, key=lambda one: times[one], default=None)
        if best is not None and None in times and times[best] * GAIN < times[None]:
            gain = f"{times[None] / times[best]:.2f}x, {times[best]:.0f} us for {times[None]:.0f}"
            found = f"pallas_kernels/tuning.py, {function}: {best} for {shape.dtype} {kind} is {gain}"
            record.result.setdefault("faster", []).append(found)
