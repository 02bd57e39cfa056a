# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of a GPU share: records of failures too, device time, and the ceilings of the machine.

A program is a chain of calls of which each needs the result of the one before. It is queued many times without
waiting, so that launching is hidden wherever the device takes longer than the host; time is the host's clock over the
number of calls, the median of several rounds. Where the device is faster than the host, `profiled` asks the profiler.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import pathlib
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import kvjax
import pallas_kernels
from benchmarks import common
from pallas_kernels import tuning

# Options of XLA, by who decides how a loop goes on: the device (command buffers), or the host, for which it stops.
DECIDES = {
    "device": kvjax.serving.compiler_options("cuda"),
    "host": {"xla_gpu_enable_command_buffer": ""},
}


class Effort(NamedTuple):
    """How long to measure: each round about so many seconds, so many rounds."""

    seconds: float = 0.05
    rounds: int = 7


class Record:
    """Figures {implementation: {metric: value}} of a section, printed as they come, and what went wrong.

    The device's ceilings may be known before. It also has the profiler's times of kernels, and lines about choices that
    were faster.
    """

    def __init__(self, ceilings: Mapping[str, float] | None = None):
        self.metrics: dict[str, dict[str, float]] = collections.defaultdict(dict, device=dict(ceilings or {}))
        self.not_measured, self.errors = dict[str, str](), dict[str, str]()
        self.kernels_us, self.faster = dict[str, dict[str, float]](), list[str]()

    def add(self, who: str, metric: str, value: float) -> None:
        """Adds a figure, unless it is NaN."""
        if value == value:
            self.metrics[who][metric] = common.rounded(value)
            print(f"  {who:8} {metric:44} {value:>12,.6g}", flush=True)

    def rate(self, who: str, metric: str, value: float, ceiling: str) -> None:
        """Adds a rate per second, and its share of a ceiling, which is one of the device's figures."""
        kind, unit = ceiling.split("_", 1)
        self.add(who, f"{metric}_{unit}", value / 1e12)
        self.add(who, f"{metric}_of_{kind}", value / 1e12 / self.metrics["device"].get(ceiling, float("nan")))

    def skip(self, what: str, why: object) -> None:
        """Notes what could not be measured, which is no error."""
        self.not_measured[what] = str(why)[:500]
        print(f"  {what}: not measured: {str(why)[:500]}", flush=True)

    @contextlib.contextmanager
    def guard(self, what: str, ours: bool = True):
        """Records a failure inside, as an error if the code is ours, and goes on."""
        try:
            yield
        except (NotImplementedError, ModuleNotFoundError) as refusal:
            self.skip(what, refusal)
        except (Exception, SystemExit) as error:
            if not ours:
                self.skip(what, f"{type(error).__name__}: {error}")
                return
            traceback.print_exc()
            self.errors[what] = f"{type(error).__name__}: {error}"[:500]


def driver() -> str | None:
    """The version of the driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    return None


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def served(function: str) -> list[str]:
    """The implementations of a function that this machine can run, less those that `tuning.switched` has off."""
    platforms = ("cuda", None) if has_gpu() else (None,)
    usable = [who for who in pallas_kernels.IMPLEMENTATIONS if pallas_kernels.PLATFORMS.get(who) in platforms]
    return [who for who in usable if who in ("xla", tuning.SWITCHED.get(function, who))]


def key(seed: int) -> jax.Array:
    """A key whose random numbers compile fast."""
    return jax.random.key(seed, impl="unsafe_rbg")


def time_s(program: Callable[..., Any], state: Any, args: tuple, effort: Effort, most: int = 1000) -> tuple[float, Any]:
    """Median seconds of a program, (state, *args) -> state, which may donate its state; and the last state.

    At most `most` runs are queued at once: without donation each may hold a result of its own.
    """
    state = jax.block_until_ready(program(state, *args))  # compiles
    began = time.perf_counter()
    state = jax.block_until_ready(program(state, *args))
    runs = max(1, min(round(effort.seconds / (time.perf_counter() - began)), most))
    times = []
    for _ in range(effort.rounds):
        began = time.perf_counter()
        for _ in range(runs):
            state = program(state, *args)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - began) / runs)
    return statistics.median(times), state


def profiled(record: Record, who: str, name: str, program, state, args, calls: int, runs: int = 5) -> None:
    """Adds the profiler's device time for one call of a compiled program, and that of each kernel, in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                state = program(state, *args)
            jax.block_until_ready(state)
        files = list(pathlib.Path(folder).rglob("*.trace.json.gz"))
        events = [event for file in files for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    with record.guard(f"{name}_device_us {who}"):
        busy, kernels = busy_us(events)
        record.add(who, f"{name}_device_us", busy / runs / calls)
        record.kernels_us[f"{name} {who}"] = {
            kernel: common.rounded(us / runs / calls) for kernel, us in kernels.items()
        }


def busy_us(events: Iterable[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
    """Microseconds of a trace in which any stream of a GPU was at work, and the sum for each kernel."""
    events = list(events)
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"].startswith("Stream")
    }
    work = [event for event in events if event.get("ph") == "X" and (event["pid"], event.get("tid")) in streams]
    if not work:
        raise NotImplementedError("the profiler's trace has no events on a GPU's streams")
    kernels, busy, end = collections.Counter(), 0.0, float("-inf")
    for event in sorted(work, key=lambda event: event["ts"]):
        kernels[event["name"]] += event["dur"]
        busy += max(event["ts"] + event["dur"] - max(event["ts"], end), 0.0)
        end = max(end, event["ts"] + event["dur"])
    return busy, dict(kernels.most_common())


def random_pool(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Blocks of random numbers and a last one of NaN, if the dtype has it; block by block, so without temporaries."""
    last = 0 if jnp.dtype(dtype).itemsize == 1 else jnp.nan

    def fill(i, pool):
        block = jax.random.normal(jax.random.fold_in(key(0), i), shape[1:], jnp.float32)
        block = (block * 32 if dtype == "int8" else block).astype(dtype)
        return lax.dynamic_update_index_in_dim(pool, block, i, 0, allow_negative_indices=False)

    return jax.jit(lambda: lax.fori_loop(0, shape[0] - 1, fill, jnp.full(shape, last, dtype)))()


def ceilings(record: Record, copied_bytes: int, side: int, effort: Effort) -> None:
    """The machine's ceilings: bytes/s of a copy on the device, read and written, and FLOP/s of a matrix product."""
    x = jax.jit(lambda: jax.random.normal(key(0), (copied_bytes // 2,), jnp.bfloat16))()
    seconds, _ = time_s(jax.jit(jnp.copy), x, (), effort, most=8)
    record.add("device", "copy_tb_s", 2 * x.nbytes / seconds / 1e12)

    def products(x, y):
        for _ in range(4):
            x = x @ y
        return x

    x = jax.random.normal(key(0), (side, side), jnp.bfloat16)
    seconds, _ = time_s(jax.jit(products), x, (x * side**-0.5,), effort)
    record.add("device", "product_tflop_s", 4 * 2 * side**3 / seconds / 1e12)


def differs(got: Any, wanted: Any) -> float:
    """The largest relative error of a vector along the last axis; NaN and infinities count as such."""
    got, wanted = (jnp.asarray(x, jnp.float32) for x in (got, wanted))
    error = jnp.linalg.norm(got - wanted, axis=-1) / jnp.maximum(jnp.linalg.norm(wanted, axis=-1), 1e-6)
    return float(jnp.max(error))
