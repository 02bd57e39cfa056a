# SPDX-License-Identifier: Apache-2.0
"""Readers of other engines' events. `kvjax.interop.vllm` and `kvjax.interop.trtllm` export them.

vllm.py, trtllm.py   a format: decodes its events, with limits on everything, and mirrors the cache
tree.py              the cached blocks of a mirror
subscriber.py        follows a stream of vLLM's over ZMQ: gaps, restarts and replays
"""
