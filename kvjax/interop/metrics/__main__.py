# SPDX-License-Identifier: Apache-2.0
"""Prints a dashboard for Grafana.

python -m kvjax.interop.metrics --dashboard > kvjax.json
"""

import argparse
import json

from kvjax.interop.metrics import dashboard

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m kvjax.interop.metrics", description=__doc__)
    parser.add_argument("--dashboard", action="store_true", required=True, help="print the JSON that Grafana imports")
    parser.parse_args()
    print(json.dumps(dashboard(), indent=1))
