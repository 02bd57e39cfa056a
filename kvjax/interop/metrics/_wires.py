# SPDX-License-Identifier: Apache-2.0
"""The package of the extra `metrics`."""

try:
    import prometheus_client
    from prometheus_client import core
except ImportError as error:
    raise ImportError('kvjax.interop.metrics: needs prometheus-client (pip install "kvjax[metrics]")') from error

__all__ = ["core", "prometheus_client"]
