# SPDX-License-Identifier: Apache-2.0
"""The compilers for GPUs which scripts/gpu_toolchain.sh has installed for this jaxlib, and processes to use them."""

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
    """The lines of JSON printed by a module, run as a process which finds the compilers.

    The folder `first` comes before all others from which Python imports.
    """
    path = os.pathsep.join(filter(None, (first, str(TOOLCHAIN), str(ROOT))))
    printed = output_of(sys.executable, "-m", module, *args, PYTHONPATH=path, **environment)
    return [json.loads(line) for line in printed.splitlines()]
