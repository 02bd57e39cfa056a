# SPDX-License-Identifier: Apache-2.0
"""The compilers for GPUs that scripts/gpu_toolchain.sh has installed for this jaxlib, and processes that use them."""

import json
import os
import sys
from typing import Any

import pytest

from tests.drive import ROOT, output_of
from tests.kernels.gpu_compile import TOOLCHAIN

needs_toolchain = pytest.mark.skipif(
    not (TOOLCHAIN / ".installed").exists(), reason="no CUDA compiler for this jaxlib (scripts/gpu_toolchain.sh)"
)


def results_of(module: str, *args: str, first: str = "", **environment: str) -> list[Any]:
    """The lines of JSON that a module prints, run as a process that finds the compilers.

    The folder `first` stands before all others that Python imports from.
    """
    path = os.pathsep.join(filter(None, (first, str(TOOLCHAIN), str(ROOT))))
    printed = output_of(sys.executable, "-m", module, *args, PYTHONPATH=path, **environment)
    return [json.loads(line) for line in printed.splitlines()]
