# SPDX-License-Identifier: Apache-2.0
"""Runs scenario files: `python -m tests.scenarios [--oracle] PATH [PATH ...]` (tests/oracle/scenarios.py)."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # metadata alone; read when jax is imported
    from tests.oracle.scenarios import main

    sys.exit(main())
