# SPDX-License-Identifier: Apache-2.0
"""Prints a dashboard for Grafana.

python -m kvjax.interop.metrics --dashboard > kvjax.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from kvjax.interop.metrics.dashboard import dashboard


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.interop.metrics", description=__doc__)
    parser.add_argument("--dashboard", action="store_true", required=True, help="print the JSON that Grafana imports")
    parser.parse_args(arguments)
    print(json.dumps(dashboard(), indent=1))


if __name__ == "__main__":
    main()
