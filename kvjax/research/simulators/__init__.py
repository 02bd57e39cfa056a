# SPDX-License-Identifier: Apache-2.0
"""Hits of a trace in caches of many sizes: by LRU, by any policy, and the maximum for all policies."""
