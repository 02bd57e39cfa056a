# SPDX-License-Identifier: Apache-2.0
"""The first minutes on a GPU, rehearsed without one: sections that fail, hang or are killed cost themselves alone."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from benchmarks import gpu_first
from pallas_kernels.tuning import switched
from tests.drive import ROOT, TIMEOUT

# Imported by Python itself when it starts: what a machine with a GPU may lack, and no network.
BARE = """
    import socket, sys

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("pytest", "hypothesis", "msgspec", "zmq", "chex"):
                raise ImportError(f"{name} is not there")

    def refuse(*args):
        raise OSError("no network")

    sys.meta_path.insert(0, Missing())
    socket.socket.connect = refuse
"""


# What makes one of Triton's kernels wrong, raise or hang, in each process.
PLANTED = """
    import importlib.abc, importlib.util, sys, time

    class Plant(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "pallas_kernels.triton":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            def planted(module):
                run(module)
                own = module.decode_attention
                def bad(*args, **options):
                    if {kind!r} == "raising":
                        raise RuntimeError("planted")
                    if {kind!r} == "hanging":
                        time.sleep(3600)
                    out = own(*args, **options)
                    return (out[0] + 1, *out[1:]) if isinstance(out, tuple) else out + 1
                module.decode_attention = bad
            spec.loader.exec_module = planted
            return spec

    sys.meta_path.insert(0, Plant())
"""


def command(folder, *options):
    return [sys.executable, "-m", "benchmarks.gpu_first", "--quick", "--out", str(folder), *options]


def start(folder, *options, **environment):
    return subprocess.Popen(
        command(folder, *options), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | environment, start_new_session=True,
    )  # fmt: skip


def run(folder, *options, **environment):
    """The exit status, what was printed, and the file."""
    process = start(folder, *options, **environment)
    out, _ = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, json.loads((folder / gpu_first.FILE).read_text())


@pytest.mark.slow
def test_all_of_it_runs_where_only_jax_numpy_and_flax_are(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(BARE))
    status, out, result = run(tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert status == 0, out
    assert set(result["sections"]) == set(gpu_first.sections(quick=True)) and result["about"]["versions"]["jax"]
    missing = {name for one in result["sections"].values() for name in one.get("not_measured", {})}
    assert {"check decode_attention mosaic", "check prefill_attention mosaic"} <= missing
    assert result["sections"]["check transitions fused"]["metrics"] == {"fused": {"transitions_is_right": 1.0}}
    lines = out.splitlines()
    summary = lines[next(n for n, line in enumerate(lines) if line.startswith("cpu, jax ")) :]
    assert len(summary) <= 40 and summary[-1] == "all is done"
    assert any(re.fullmatch(r" *[\d.]+x the time of a copy: decode_2x64_b16 xla", line) for line in summary)


SOME = ("device", "check decode_attention triton", "check append_kv triton", "decode_2x64_b16", "ceilings")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["wrong", pytest.param("raising", marks=pytest.mark.slow), pytest.param("hanging", marks=pytest.mark.slow)]
)
def test_a_planted_kernel_is_named_and_switched_off(kind, tmp_path):
    scale = "0.25" if kind == "hanging" else "1"
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(PLANTED).format(kind=kind))
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    status, out, result = run(tmp_path, "--only", *SOME, "--scale", scale, PYTHONPATH=path)
    assert status == 1
    (error,) = result["sections"]["check decode_attention triton"]["errors"].values()
    assert {"wrong": "AssertionError", "raising": "RuntimeError: planted", "hanging": "hangs: killed"}[kind] in error
    assert f"FAILED check decode_attention triton: {error}"[:60] in out
    assert "switched off: KVJAX_KERNELS=decode_attention=xla" in out
    others = [name for name in result["sections"] if name != "check decode_attention triton"]
    assert len(others) >= 4 and not any(result["sections"][name].get("errors") for name in others)


@pytest.mark.slow
def test_killed_at_any_time_it_goes_on(tmp_path):
    file, seen = tmp_path / gpu_first.FILE, 0
    for seconds in (0.5, 6, 10, 14):
        process = start(tmp_path, "--only", *SOME)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        done = json.loads(file.read_text())["sections"] if file.exists() else {}
        assert len(done) >= seen
        seen = len(done)
    before = json.loads(file.read_text())["sections"]
    status, _, result = run(tmp_path, "--only", *SOME)
    assert status == 0 and before.items() <= result["sections"].items()


@pytest.mark.long
def test_when_the_time_is_over_the_rest_is_left(tmp_path):
    status, out, result = run(tmp_path, "--only", *SOME, "--minutes", "0")
    assert status == 0 and not result["sections"]
    assert out.splitlines()[-1] == f"left for the next call: {len(SOME)} sections, from 'device' on"


def test_what_failed_is_served_by_others():
    failed = {f"check {name}" for name in ("decode_attention mosaic", "append_kv triton", "transitions xla")}
    wanted = {"decode_attention": "triton", "append_kv": "xla"}
    assert gpu_first.switches(failed) == wanted
    failed |= {"check decode_attention triton", "check prefill_attention triton"}
    assert gpu_first.switches(failed) == wanted | {"decode_attention": "xla", "prefill_attention": "xla"}


def test_a_switch_that_names_nothing_is_refused():
    assert switched("") == {} and switched("copy_blocks=mosaic,append_kv=triton") == {
        "copy_blocks": "mosaic", "append_kv": "triton",
    }  # fmt: skip
    for text in ("decode=xla", "append_kv=tpu", "append_kv"):
        with pytest.raises(
            ValueError, match=rf"^KVJAX_KERNELS: got '{text}', wanted some of decode_attention=triton\|mo"
        ):
            switched(text)
