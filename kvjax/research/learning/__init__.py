# SPDX-License-Identifier: Apache-2.0
"""A policy learned from a trace, and its comparison with other policies on later requests."""
