# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: read from files, generated at random, or written for other tools."""
