# SPDX-License-Identifier: Apache-2.0
"""Tools of the GPU benchmarks: records of figures and failures, device time, and the machine's ceilings.

A program is a chain of calls, where each call needs the result of the call before. It is queued many times without
waiting, which hides launches if the device takes longer than the host. Its time is the host's time divided by the
number of calls, as the median of several rounds. If the device is faster than the host, `profiled` asks the profiler.
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
    """The approximate seconds of a round, and the number of rounds."""

    seconds: float = 0.05
    rounds: int = 7


class Record:
    """Figures {implementation: {metric: value}} of a section, printed as they come, together with failures.

    You may pass the device's ceilings if they are known. A record also has the profiler's times of kernels, and lines
    about faster choices.
    """

    def __init__(self, ceilings: Mapping[str, float] | None = None):
        self.metrics: dict[str, dict[str, float]] = collections.defaultdict(dict, device=dict(ceilings or {}))
        self.not_measured = dict[str, str]()
        self.errors = dict[str, str]()
        self.kernels_us = dict[str, dict[str, float]]()
        self.faster = list[str]()

    def add(self, who: str, metric: str, value: float) -> None:
        """Adds a figure, unless it is NaN."""
        if value == value:
            self.metrics[who][metric] = common.rounded(value)
            print(f"  {who:8} {metric:44} {value:>12,.6g}", flush=True)

    def rate(self, who: str, metric: str, value: float, ceiling: str) -> None:
        """Adds a rate per second, and its share of a ceiling of the device."""
        kind, unit = ceiling.split("_", 1)
        self.add(who, f"{metric}_{unit}", value / 1e12)
        self.add(who, f"{metric}_of_{kind}", value / 1e12 / self.metrics["device"].get(ceiling, float("nan")))

    def skip(self, what: str, why: object) -> None:
        """Notes something which could not be measured. This is no error."""
        self.not_measured[what] = str(why)[:500]
        print(f"  {what}: not measured: {str(why)[:500]}", flush=True)

    @contextlib.contextmanager
    def guard(self, what: str, ours: bool = True):
        """Records a failure inside, and goes on. It is an error if the code is ours."""
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
    """The implementations of a function on this machine, unless `tuning.switched` has switched them off."""
    platforms = ("cuda", None) if has_gpu() else (None,)
    usable = [who for who in pallas_kernels.IMPLEMENTATIONS if pallas_kernels.PLATFORMS.get(who) in platforms]
    return [who for who in usable if who in ("xla", tuning.SWITCHED.get(function, who))]


def key(seed: int) -> jax.Array:
    """A key with fast random numbers."""
    return jax.random.key(seed, impl="unsafe_rbg")


def time_s(
    program: Callable[..., Any], state: Any, args: tuple, effort: Effort, max_runs: int = 1000
) -> tuple[float, Any]:
    """Median seconds of a program (state, *args) -> state, which may donate its state. Also returns the last state.

    At most `max_runs` runs are queued, since each run may hold a result in memory unless it donates.
    """
    state = jax.block_until_ready(program(state, *args))  # compiles
    began = time.perf_counter()
    state = jax.block_until_ready(program(state, *args))
    runs = max(1, min(round(effort.seconds / (time.perf_counter() - began)), max_runs))
    times = []
    for _ in range(effort.rounds):
        began = time.perf_counter()
        for _ in range(runs):
            state = program(state, *args)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - began) / runs)
    return statistics.median(times), state


def profiled(record: Record, who: str, name: str, program, state, args, calls: int, runs: int = 5) -> None:
    """Adds the profiler's device time for a call of a compiled program and for each kernel, in microseconds."""
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
    """Microseconds of a trace in which any stream of a GPU is busy, and the sum for each kernel."""
    events = list(events)
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"].startswith("Stream")
    }
    work = [event for event in events if event.get("ph") == "X" and (event["pid"], event.get("tid")) in streams]
    if not work:
        raise NotImplementedError("the profiler's trace has no events on a GPU's streams")
    kernels = collections.Counter()
    busy = 0.0
    end = float("-inf")
    for event in sorted(work, key=lambda event: event["ts"]):
        kernels[event["name"]] += event["dur"]
        busy += max(event["ts"] + event["dur"] - max(event["ts"], end), 0.0)
        end = max(end, event["ts"] + event["dur"])
    return busy, dict(kernels.most_common())


def random_pool(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Random blocks and a last block of NaN, if the dtype has NaN. They are made block by block to save memory."""
    last = 0 if jnp.dtype(dtype).itemsize == 1 else jnp.nan

    def fill(i, pool):
        block = jax.random.normal(jax.random.fold_in(key(0), i), shape[1:], jnp.float32)
        block = (block * 32 if dtype == "int8" else block).astype(dtype)
        return lax.dynamic_update_index_in_dim(pool, block, i, 0, allow_negative_indices=False)

    return jax.jit(lambda: lax.fori_loop(0, shape[0] - 1, fill, jnp.full(shape, last, dtype)))()


def ceilings(record: Record, copied_bytes: int, side: int, effort: Effort) -> None:
    """Measures the machine's ceilings: bytes/s, read and written, of a copy on the device, and FLOP/s of a product."""
    x = jax.jit(lambda: jax.random.normal(key(0), (copied_bytes // 2,), jnp.bfloat16))()
    seconds, _ = time_s(jax.jit(jnp.copy), x, (), effort, max_runs=8)
    record.add("device", "copy_tb_s", 2 * x.nbytes / seconds / 1e12)

    def products(x, y):
        for _ in range(4):
            x = x @ y
        return x

    x = jax.random.normal(key(0), (side, side), jnp.bfloat16)
    seconds, _ = time_s(jax.jit(products), x, (x * side**-0.5,), effort)
    record.add("device", "product_tflop_s", 4 * 2 * side**3 / seconds / 1e12)


def differs(got: Any, wanted: Any) -> float:
    """The largest relative error of a vector along the last axis. NaN and infinities count as errors."""
    got, wanted = (jnp.asarray(x, jnp.float32) for x in (got, wanted))
    error = jnp.linalg.norm(got - wanted, axis=-1) / jnp.maximum(jnp.linalg.norm(wanted, axis=-1), 1e-6)
    return float(jnp.max(error))
