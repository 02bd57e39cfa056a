# SPDX-License-Identifier: Apache-2.0
"""Numbers about a cache for Prometheus, and a dashboard for Grafana.

`python -m kvjax.interop.metrics --dashboard` prints the dashboard.
"""

import importlib.resources
import json
from typing import Any

from kvjax.interop.metrics.collector import Metrics

__all__ = ["Metrics", "dashboard"]


def dashboard() -> dict[str, Any]:
    """The dashboard as the JSON that Grafana imports; it asks for the data source."""
    return json.loads(importlib.resources.files(__name__).joinpath("dashboard.json").read_text(encoding="utf-8"))
