# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for real GPUs without one: what ptxas says of it, held against tests/data/gpu_budgets.json.

Of registers a budget is the most, of everything else the least. No kernel may spill or use local memory, and no
program may copy a pool.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import gpu_compile

ROOT = pathlib.Path(__file__).parents[1]
TOOLCHAIN = ROOT / ".gpu-toolchain"
BUDGETS = json.loads((ROOT / "tests" / "data" / "gpu_budgets.json").read_text())
# The step holds all kernels of decoding; what else there is takes minutes.
USUAL = {"h200": ["prefill_16", "gather", "scatter", "step"], "a100": ["decode_16", "prefill_16"]}
SLOW = {
    "h200": [case for case in gpu_compile.CASES if case not in USUAL["h200"]],
    "a100": ["append", "copy", "gather", "scatter"],
}
ALL = [(target, case) for target, cases in USUAL.items() for case in cases]
ALL += [pytest.param(target, case, marks=pytest.mark.slow) for target, cases in SLOW.items() for case in cases]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (TOOLCHAIN / ".installed").exists(), reason="no CUDA compiler (scripts/gpu_toolchain.sh)"),
]


@functools.cache
def compiled(target, usual):
    """Results by case, from a process of its own: one target to a process, and bad parameters can abort it."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{TOOLCHAIN}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.gpu_compile", target, *(USUAL if usual else SLOW)[target]]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return {result["case"]: result for result in map(json.loads, done.stdout.splitlines())}


def result_of(target, case):
    return compiled(target, case in USUAL[target])[case]


@pytest.mark.parametrize(("target", "case"), ALL)
def test_kernels_stay_within_their_budgets(target, case):
    result = result_of(target, case)
    assert result["kernels"], "no kernel of this library was emitted"
    for name, found in result["kernels"].items():
        assert (found["spills"], found["stack"]) == (0, 0), f"{name}: {found}"
        for what, bound in BUDGETS[name].items():
            assert found[what] <= bound if what == "registers" else found[what] >= bound, f"{name}: {found}"


@pytest.mark.parametrize("case", ["scatter", "step"])
def test_pools_are_updated_in_place(case):
    result = result_of("h200", case)
    assert result["pool_copies"] == 0
    assert result["aliased"] >= result["pool"]
    assert result["temporaries"] < 0.05 * result["pool"]


def test_the_whole_step_is_made_of_the_kernels():
    """What `implementation=None` chooses when a program is lowered for a GPU."""
    assert set(result_of("h200", "step")["kernels"]) == {
        "decode_attention", "merge_attention", "append_kv", "copy_blocks",
    }  # fmt: skip
