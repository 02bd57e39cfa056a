# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: read from files, drawn at random, written for other tools."""
