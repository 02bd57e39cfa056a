# SPDX-License-Identifier: Apache-2.0
"""A GPU's first minutes: which kernels are wrong, which are slow, and which tile sizes to change.

    first ten minutes   python -m benchmarks.gpu_first --out benchmarks/results
    go on               the same command: it measures the missing sections, and the sections of --again NAME

It needs jax, numpy and, for whole models, flax. The sections with the most telling results come first. They run one
after the other in a process, which is killed if a section takes too long, and started anew after a failure. So a kernel
which hangs or breaks the device only costs its section. A kernel which is wrong, raises or hangs is switched off for
the next sections, by the variable KVJAX_KERNELS (`pallas_kernels.tuning.switched`). You can switch it off in the same
way. The result is a file which is complete at any time. Without a GPU only `--quick` runs: it checks the sections with
tiny shapes and interpreted kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pallas_kernels.tuning import SWITCHES

FILE, BEGIN, END = "gpu_first.json", "== begin ", "== end "
START = 60.0  # seconds that a process gets to start jax
MINUTES, RESULTS = 9.0, pathlib.Path("benchmarks/results")
# Sections by how they begin, the most telling first; what is not among them comes last.
ORDER = (
    "device", "check", "loop, ", "ceilings", "decode_32x4096_b16", "decode_32x4096_int8", "decode_32x4096_fp8",
    "decode_ragged", "decode_skewed", "step_8b_b32", "tuning", "decode_one_layer", "prefill", "moves", "decode_",
    "append", "step_1b_b32", "loop_", "host", "",
)  # fmt: skip
SECONDS = {"device": 60, "check": 90, "tuning": 180, "": 120}  # that a section may take, by how it begins


check_name = "check {} {}".format  # of a function, by an implementation


def sections(quick: bool) -> dict[str, Callable[[Any], None]]:
    """All sections in their order: functions of a `benchmarks.gpu.Record`."""
    from benchmarks import kernels
    from tests.kernels import on_gpu

    def checked(function: str, who: str) -> Callable[[Any], None]:
        def run(record: Any) -> None:
            on_gpu.check(function, who)
            record.add(who, f"{function}_is_right", 1.0)

        return run

    measured = {"device": describe, **{check_name(*check): checked(*check) for check in on_gpu.CHECKS}}
    measured |= kernels.sections(kernels.QUICK if quick else kernels.FULL)
    return {name: measured[name] for name in sorted(measured, key=lambda name: ORDER.index(_begins(name, ORDER)))}


def _begins(name: str, starts: Iterable[str]) -> str:
    return next(start for start in starts if name.startswith(start))


def switches(failed: Collection[str]) -> dict[str, str]:
    """A replacement for each kernel with a failed check: Triton's kernel, unless its check failed too, else XLA."""
    from tests.kernels.on_gpu import CHECKS

    replacements = {}
    for function, who in CHECKS:
        if who != "xla" and check_name(function, who) in failed:
            triton = check_name(function, "triton")
            replacements[function] = "triton" if who == "mosaic" and triton not in failed else "xla"
    return replacements


def describe(record: Any) -> None:
    """Records whether a product on the device is right. `work` records the device and the versions."""
    import jax.numpy as jnp

    x = jnp.ones((256, 256), jnp.bfloat16)
    record.add("device", "computes", float((x @ x)[0, 0] == 256))


def work(names: Sequence[str], quick: bool, ceilings: dict[str, float]) -> None:
    """Runs sections. Prints a line when a section begins, and a line of JSON when it ends. Stops after a failure.

    `ceilings` has the ceilings of the device, if they are measured.
    """
    import jax

    from benchmarks import common, gpu

    chosen = sections(quick)
    about = {"device": jax.devices()[0].device_kind, "driver": gpu.driver(), **common.where()}
    for name in names:
        print(f"{BEGIN}{name}", flush=True)
        began = time.monotonic()
        record = gpu.Record(ceilings)
        with record.guard(name):
            chosen[name](record)
        if name == "ceilings":
            ceilings = record.metrics["device"]
        else:  # the ceilings are those of that section
            for metric in ceilings:
                record.metrics["device"].pop(metric, None)
        record.metrics = {who: metrics for who, metrics in record.metrics.items() if metrics}
        result = {key: value for key, value in vars(record).items() if value}
        result |= {"seconds": common.rounded(time.monotonic() - began), "about": about}
        print(f"{END}{json.dumps(result)}", flush=True)
        if record.errors:
            raise SystemExit(1)  # a broken device would fail all that follows


class Watch:
    """Runs sections in processes with these options, until a time of the monotonic clock, and updates a file."""

    def __init__(self, file: pathlib.Path, options: Sequence[str], end: float):
        self.file = file
        self.options = options
        self.end = end
        self.result: dict[str, Any] = {"benchmark": "gpu_first", "about": {}, "sections": {}}
        with contextlib.suppress(FileNotFoundError):
            self.result = json.loads(file.read_text())

    def run(self, chosen: Collection[str], scale: float) -> None:
        """Runs the missing sections. `scale` multiplies the time limits of sections."""
        while remaining := [name for name in chosen if name not in self.result["sections"]]:
            if time.monotonic() >= self.end or not self._some(remaining, scale):
                return

    def _some(self, names: Sequence[str], scale: float) -> bool:
        """Runs sections in a process until a section fails. Returns False when the time is over."""
        ceilings = json.dumps(self.result["sections"].get("ceilings", {}).get("metrics", {}).get("device", {}))
        command = [sys.executable, "-m", "benchmarks.gpu_first", *self.options, "--ceilings", ceilings]
        process = subprocess.Popen(
            [*command, "--work", *names], stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, SWITCHES: self.switches()},
        )  # fmt: skip
        lines = _lines_of(process)
        name = names[0]
        began = time.monotonic()
        deadline = time.monotonic() + START
        try:
            while (line := lines.get(timeout=max(min(deadline, self.end) - time.monotonic(), 0.01))) is not None:
                if line.startswith(BEGIN):
                    name = line.removeprefix(BEGIN)
                    began = time.monotonic()
                    deadline = began + SECONDS[_begins(name, SECONDS)] * scale
                    print(name, flush=True)
                elif line.startswith(END):
                    self._note(name, json.loads(line.removeprefix(END)))
                    deadline = time.monotonic() + START
                else:
                    print(line, flush=True)
        except queue.Empty:
            if time.monotonic() >= self.end:
                return False
            seconds = time.monotonic() - began
            self._note(name, {"errors": {name: f"hangs: killed after {seconds:.0f} s"}, "seconds": seconds})
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if name not in self.result["sections"]:  # it ended without a word, as after a crash
            self._note(name, {"errors": {name: f"ended with {process.returncode}"}, "seconds": 0.0})
        return True

    def _note(self, name: str, result: dict[str, Any]) -> None:
        """Stores the result of a section."""
        self.result["about"] |= result.pop("about", {})
        self.result["sections"][name] = result
        self.write()

    def switches(self) -> str:
        """The value of the variable KVJAX_KERNELS, which switches failed kernels off."""
        failed = [name for name, section in self.result["sections"].items() if section.get("errors")]
        return ",".join(f"{function}={replacement}" for function, replacement in switches(failed).items())

    def write(self) -> None:
        """Replaces the file."""
        from benchmarks.common import write

        write(self.result, self.file)

    def summary(self, chosen: Collection[str]) -> list[str]:
        """At most forty lines: failures, times compared with a copy, faster choices, and missing sections."""
        done = self.result["sections"]
        errors = [item for section in done.values() for item in section.get("errors", {}).items()]
        wrong = [f"FAILED {name}: {error}" for name, error in errors]
        off = [f"switched off: {SWITCHES}={value}"] if (value := self.switches()) else []
        shares = {
            f"{metric.removesuffix(end)} {who}": (1 / value, end[4:])
            for section in done.values()
            for who, metrics in section.get("metrics", {}).items()
            for metric, value in metrics.items()
            for end in ("_of_copy", "_of_product")
            if metric.endswith(end) and who != "device" and value > 0
        }
        slow = sorted(shares.items(), key=lambda item: -item[1][0])
        times = [f"{ratio:6.2f}x the time of a {what}: {name}" for name, (ratio, what) in slow]
        faster = [line for section in done.values() for line in section.get("faster", [])]
        remaining = [name for name in chosen if name not in done]
        rest = f"left for the next call: {len(remaining)} sections, from {remaining[0]!r} on" if remaining else ""
        head = [f"{self.result['about'].get('device')}, jax {self.result['about'].get('versions', {}).get('jax')}"]
        begin = [*head, *wrong[:12], *off]
        end = [*faster[:6], rest or "all is done"]
        return [*begin, *times[: 40 - len(begin) - len(end)], *end]


def _lines_of(process: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """A queue of the lines which a process prints, and of None at the end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the file (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which it ends (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny: whether it runs, on any machine")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time that sections may take")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="sections that begin like this")
    parser.add_argument("--again", nargs="+", default=(), metavar="NAME", help="sections to measure once more")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.quick, args.ceilings)
        return
    end = time.monotonic() + 60 * args.minutes
    chosen = [name for name in sections(args.quick) if name.startswith(tuple(args.only))]
    watch = Watch(args.out / FILE, ["--quick"] * args.quick, end)
    for name in [name for name in watch.result["sections"] if name.startswith(tuple(args.again))]:
        del watch.result["sections"][name]
    watch.write()
    watch.run(chosen, args.scale)
    lines = watch.summary(chosen)
    print("\n".join(lines))
    if any(line.startswith("FAILED") for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
