# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, a command each: `python -m benchmarks.NAME [--json FILE]`. Each checks its answers as it measures."""
