# SPDX-License-Identifier: Apache-2.0
"""A policy learned from a trace, and its comparison with others on requests that it has not seen."""
