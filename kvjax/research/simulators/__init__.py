# SPDX-License-Identifier: Apache-2.0
"""Hits of a trace in caches of many sizes: for LRU, for any policy, and the maximum over all policies."""
