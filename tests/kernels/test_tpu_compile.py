# SPDX-License-Identifier: Apache-2.0
"""Programs compiled for real TPUs without one: pools stay in place, and chips exchange nothing but projections.

`make tpu-check` runs these tests in an environment with libtpu.
"""

import functools
import importlib.util
import json
import os
import pathlib
import re
import sys

import pytest

from tests.drive import output_of
from tests.kernels import tpu_compile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no compiler for TPUs (make tpu-check)"),
]
# Programs with a model take a minute each. The others share a process.
QUICK = tuple(case for case in tpu_compile.CASES if not case.startswith(tpu_compile.SEPARATE))
PROGRAMS = [(target, case) for target in tpu_compile.TARGETS for case in tpu_compile.cases_of(target)]


@functools.cache
def compiled(target, *cases):
    """Results by case: of `make tpu-check` if it has compiled them, or of a new process."""
    folder = os.environ.get("KVJAX_TPU_RESULTS")
    command = sys.executable, "-m", "tests.kernels.tpu_compile", "one", target, *cases
    printed = pathlib.Path(folder, f"{target}.json").read_text() if folder else output_of(*command)
    return {result["case"]: result for result in map(json.loads, printed.splitlines())}


def result_of(target, case):
    quick = [case for case in tpu_compile.cases_of(target) if case in QUICK]
    return compiled(target, *(quick if case in quick else (case,)))[case]


@pytest.mark.parametrize(("target", "case"), PROGRAMS)
def test_pools_stay_in_place(target, case):
    result = result_of(target, case)
    assert result["temporaries"] < tpu_compile.LIMITS.get(case, tpu_compile.LIMIT) * result["pool"]
    if not (case.endswith("mesh") and case.startswith(tpu_compile.WITH_MODEL)):
        assert not result["collectives"]
    else:  # the model adds up its projections, and looks up and chooses tokens in a divided vocabulary
        in_layers = [place for place in result["collectives"] if "/layer" in place]
        assert len(in_layers) == 2 * tpu_compile.LAYERS
        of_pools = re.compile("/(write|rope_write|attend|copy_blocks|extend|commit|trim)/")
        assert not any(of_pools.search(place) for place in result["collectives"])


def test_temporaries_are_those_that_the_compiler_asks_memory_for():
    """The temporaries of this program take 4 MiB, and `temp_size_in_bytes` would be 8."""
    command = sys.executable, "-m", "tests.kernels.tpu_compile", "limit", "v4", "step_tokens"
    asked = json.loads(output_of(*command).splitlines()[-1])
    assert asked["refusal"] - 0.1 < asked["analysis"] < asked["refusal"] + 1
