# SPDX-License-Identifier: Apache-2.0
"""Readers of other engines' events. `kvjax.interop.vllm` and `kvjax.interop.trtllm` export them.

vllm.py, trtllm.py   a format: its events, decoded with limits on everything, and a mirror to follow them
tree.py              the cached blocks of a mirror
subscriber.py        follows a stream of vLLM's over ZMQ: gaps, restarts and replays
"""
