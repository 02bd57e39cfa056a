# SPDX-License-Identifier: Apache-2.0
"""One command each, `python -m benchmarks.NAME [--json FILE]`; each checks its answers as it measures."""
