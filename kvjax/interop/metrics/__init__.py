# SPDX-License-Identifier: Apache-2.0
"""Numbers about a cache for Prometheus, and a dashboard for Grafana.

`python -m kvjax.interop.metrics --dashboard` prints the dashboard.
"""

from kvjax.interop.metrics.collector import Metrics
from kvjax.interop.metrics.dashboard import dashboard

__all__ = ["Metrics", "dashboard"]
